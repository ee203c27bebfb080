"""The bits of an answer: the same call again, alone, on an engine without a cache and with larger steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.calls import Call, Generate, Precompute, Score, describe
from tests.fuzz.decisions import Decide, numbers_of, rows_of
from tests.fuzz.focus import Choose
from tests.fuzz.rig import Rig, Subject
from tests.fuzz.witness import Difference

_STEPS = 32
"""Tokens of a step, in pages: most calls take one step."""
_PAGES = 400


class Alone:
    """Engines that answer one call each, with nothing cached and nothing beside it.

    Scores are computed item by item, whatever algorithm the call names, decisions question by question, and choices with the
    documents in another order.

    Args:
        model: folder of `rig.make_model`.
        subject: backend and sizes.
        changes: other options of the engines.
    """

    def __init__(self, model: Path, subject: Subject, **changes: Any) -> None:
        sizes = {"pages": _PAGES, "max_num_batched_tokens": _STEPS * subject.block}
        self._rig = Rig(model, subject, enable_prefix_caching=False, **sizes, **changes)
        self._caching = self._rig.caching()  # decisions keep documents in the cache

    def check(self, call: Call) -> None:
        """Compare an answer with the answer of the call alone.

        Raises:
            Difference: a bit differs.
        """
        ask = call.ask
        if isinstance(ask, Decide):
            self._check_decision(call, ask)
            return
        if isinstance(ask, Precompute) or (isinstance(ask, Score) and ask.algorithm == "packed_dense"):
            return
        if isinstance(ask, Choose):
            other: Generate | Score = ask.turned()
        else:
            other = replace(ask, algorithm="serial") if isinstance(ask, Score) else ask
        again = self._answer(other, call.positions)
        for name, value in _values(call).items():
            if not np.array_equal(value, _values(again)[name]):
                error = np.abs(np.asarray(value, np.float64) - np.asarray(_values(again)[name], np.float64)).max()
                raise Difference(f"alone, {describe(ask)} has other bits: {name} differ by {error:.3g}", ask)

    def _check_decision(self, call: Call, ask: Decide) -> None:
        """Compare every question with the question alone, options and documents in another order."""
        rows, answers = rows_of(call.job), call.result.answers
        rig, first = self._caching if ask.documents else self._rig, 0
        for number, apart in enumerate(ask.apart(call.positions)):
            again = self._answer(apart, call.positions, rig)
            found = rows_of(again.job)
            end = first + len(found[0])
            for own, alone in zip(rows, found, strict=True):
                for row, other in zip(own[first:end], alone, strict=True):
                    if not np.array_equal(row, other):
                        error = np.abs(row - other).max()
                        raise Difference(f"alone, {describe(apart)} has other bits: rows differ by {error:.3g}", ask)
            one = numbers_of(ask.questions[number], answers[number])
            other = numbers_of(apart.questions[0], again.result.answers[0])
            if not np.array_equal(one, other):
                raise Difference(f"alone, {describe(apart)} has another answer: {other}, not {one}", ask)
            first = end

    def _answer(self, ask: Generate | Score | Decide, positions: str, rig: Rig | None = None) -> Call:
        rig = rig or self._rig
        core, call = rig.start(positions, None), Call(ask, rig.frontends[positions])
        while stage := call.next_stage():
            for request in stage:
                core.add(request)
                while core.has_work:
                    for event in core.step():
                        call.take(event)
        return call


def _values(call: Call) -> dict[str, object]:
    """Return every value of an answer, by name."""
    if isinstance(call.ask, Score):
        output = call.result
        if call.ask.rerank:
            return {"relevance": [r.relevance_score for r in sorted(output.results, key=lambda r: r.index)]}
        return {f"label log-probabilities of item {number}": row for number, row in enumerate(output.logprobs)}
    values: dict[str, object] = {}
    if isinstance(call.ask, Choose):
        found, documents = call.result[0].focus, call.ask.prompt.chunks
        scores = dict(zip(documents, found.scores, strict=True))
        values["scores"] = [scores[document] for document in call.ask.candidates]
        values["choice"] = [call.ask.candidates.index(documents[number]) for number in found.documents]
    for number, sample in enumerate(call.samples):
        values[f"tokens of sample {number}"] = sample.tokens
        values[f"log-probabilities of sample {number}"] = sample.logprobs
        values[f"likeliest log-probabilities of sample {number}"] = sample.top
    if call.prompt_logprobs is not None:
        found = call.prompt_logprobs
        values["prompt log-probabilities"] = np.where(found.known, found.logprobs.target, 0)
    return values
