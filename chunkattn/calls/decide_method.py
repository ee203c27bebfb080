"""`MethodJob`: asks a model the built-in questions once, to choose the method of its decisions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np
import xxhash

from chunkattn.calls.decide_probes import PROBES, Probe
from chunkattn.calls.decide_questions import ask
from chunkattn.calls.decide_verdict import MethodVerdict, read_verdict, write_verdict
from chunkattn.calls.frontend import Frontend
from chunkattn.calls.job import Flow, Job
from chunkattn.decisions import ChoiceAnswer, DecisionOutput
from chunkattn.errors import RequestError

T = TypeVar("T")

logger = logging.getLogger(__name__)

_ASKED = "letters", "likelihood"
_OPTIONS = "dtype", "weights", "activations", "quantization", "kv_cache_dtype"
"""Options of the engine that change its numbers."""


class MethodJob:
    """Job that returns the method of decisions by default, and keeps it in `Frontend.decide_method`.

    The verdict of an earlier start is read from its file. A model that cannot be asked, for example for want of a chat
    template, gets `letters`: its decisions fail with the reason.

    Args:
        frontend: frontend of the engine.
        decide: makes the job that asks the questions of a probe by a method.
    """

    unit = "methods"
    total = len(_ASKED)

    def __init__(self, frontend: Frontend, decide: Callable[[Probe, str], Job[Any]]) -> None:
        self._frontend, self._decide, self.done = frontend, decide, 0

    def flow(self) -> Flow[str]:
        """Read the verdict, or ask the questions."""
        frontend = self._frontend
        if frontend.decide_method is not None:
            return frontend.decide_method
        try:
            key = self._key()
            verdict = read_verdict(key)
            if verdict is None:
                began = time.perf_counter()
                verdict = yield from self._ask()
                write_verdict(key, verdict)
                logger.info("decide_method auto: the model was asked in %.1f s", time.perf_counter() - began)
        except RequestError as error:
            logger.info("decide_method auto: letters, because the model cannot be asked: %s", error)
            frontend.decide_method = "letters"
            return "letters"
        logger.info("decide_method auto: %s; %s", verdict.method, verdict)
        frontend.decide_method = verdict.method
        return verdict.method

    def _ask(self) -> Flow[MethodVerdict]:
        right, masses = yield from self._answers("letters")
        verdict = MethodVerdict(right, None, float(np.mean(masses)), len(masses))
        if not verdict.is_settled:
            verdict = replace(verdict, likelihood=(yield from self._answers("likelihood"))[0])
        return verdict

    def _answers(self, method: str) -> Flow[tuple[int, list[float]]]:
        """Ask by a method. Return how many answers are right, and the label mass of each."""
        right, masses = 0, list[float]()
        for probe in PROBES:
            output: DecisionOutput = yield from self._decide(probe, method).flow()
            for answer, expected in zip(output.answers, probe.answers, strict=True):
                assert isinstance(answer, ChoiceAnswer)
                # Without four letters in the vocabulary, options under letters are asked by likelihood.
                is_asked = answer.method == method
                right += is_asked and answer.choice == expected
                masses.append(answer.label_mass if is_asked else 0.0)
        self.done += 1
        return right, masses

    def _key(self) -> dict[str, Any]:
        """Return all that the verdict depends on: weights, options, and the tokens of all prompts.

        Raises:
            RequestError: the questions cannot be tokenized.
        """
        frontend, digest = self._frontend, xxhash.xxh3_128()
        labels = frontend.answer_labels(None, None)
        for probe in PROBES:
            digest.update(np.asarray(labels.template.prefix(probe.state), np.int32).tobytes())
            for method in _ASKED:
                for question in probe.questions:
                    asked = ask(question, method, labels, "question")
                    ids = [labels.template.item(pieces, "question") for pieces in asked.items]
                    ids += [list(asked.label_ids), *(labels.template.answer(text, "question") for text in asked.texts)]
                    for part in ids:
                        digest.update(np.asarray([len(part), *part], np.int32).tobytes())
        options = {name: getattr(frontend.config, name) for name in _OPTIONS}
        return {"weights": frontend.sample().hex(), "prompts": digest.hexdigest(), "options": options}


class MethodFirst(Generic[T]):
    """Job of a call by the default method, which is not known yet; see `chunkattn.calls.job.Job`.

    Args:
        first: job that finds the method.
        make: makes the job of the call by a method, and checks its arguments.
    """

    def __init__(self, first: MethodJob, make: Callable[[str], Job[T]]) -> None:
        self._first, self._make = first, make
        self._job = make("letters")  # checks the arguments before anything is asked
        self.unit, self.total = self._job.unit, self._job.total

    @property
    def done(self) -> int:
        """Return the number of things that have ended."""
        return min(self._job.done, self.total)

    def flow(self) -> Flow[T]:
        """Find the method, and run the call."""
        if (method := (yield from self._first.flow())) != "letters":
            self._job = self._make(method)
        return (yield from self._job.flow())
