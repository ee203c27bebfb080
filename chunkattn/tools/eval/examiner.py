"""`Examiner`: the model's answers to questions under conditions, computed once and read from earlier results after that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from chunkattn.calls.generate import generate_job
from chunkattn.calls.likelihood import likelihood_job
from chunkattn.errors import EngineError, NonFiniteError, RequestError
from chunkattn.layout import ChunkLayout
from chunkattn.llm import LLM
from chunkattn.parsers import ParsedPrompt
from chunkattn.parsers.choice import longest
from chunkattn.sampling_params import SamplingParams
from chunkattn.tools.eval.choices import Choices
from chunkattn.tools.eval.conditions import GOLD, Condition, TokenizedQuestion
from chunkattn.tools.eval.data import Question, at_line
from chunkattn.tools.eval.report import LOGPROB, RECALL, Values, answer_measures
from chunkattn.tools.eval.results import Results, layout_digest, result_key

MOST_TOGETHER = 16
"""Number of questions per call at most. Results are kept after every call."""
_POOL_SHARE = 0.75
"""Share of the KV pool that the prompts of one call may fill, so that their documents stay cached for the next call."""


class Examiner:
    """Questions, an engine that answers them, and the results so far.

    A result's key is a digest of the model's weights, the prompt's tokens and positions, the weights of the documents and the
    answer, so a result is reused exactly where it would come out again.

    Args:
        llm: engine. Conditions with a temperature or scale need an engine that is built with one.
        questions: questions of the data.
        prompts: token ids of every question.
        results: earlier results; new results are added.
        max_tokens: number of tokens of a greedy answer at most.
        advance: called with the number of results after every call, new or not.
    """

    def __init__(
        self,
        llm: LLM,
        questions: Sequence[Question],
        prompts: Sequence[TokenizedQuestion],
        results: Results,
        *,
        max_tokens: int = 32,
        advance: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.llm, self.results, self.advance = llm, results, advance
        self.questions, self.prompts = questions, prompts
        # Models without a chat template continue with the next question instead of an end.
        stop = () if getattr(llm.tokenizer, "chat_template", None) else ("\n",)
        self._params = SamplingParams(temperature=0, max_tokens=max_tokens, stop=stop)
        self._model = llm.core.runner.fingerprint().hex()
        self._choices = Choices(llm, questions, prompts, results, self._model)

    def check(self, conditions: Sequence[Condition]) -> None:
        """Check that every question fits the engine under every condition.

        Args:
            conditions: conditions to come.

        Raises:
            RequestError: a question does not fit. The message names its line and the condition.
        """
        for condition in conditions:
            for number, question in enumerate(self.questions):
                prompt, answer = self._longest(condition, number), self.prompts[number].answer
                with at_line(question.line, condition.name):
                    likelihood_job(self.llm.frontend, [prompt], [answer], condition.weighing)
                    generate_job(self.llm.frontend, [prompt], self._params, weighing=condition.weighing)

    @property
    def max_gap(self) -> int:
        """Return the largest gap that the model's positions allow every question."""
        longest = 0
        for prompt in self.prompts:
            end = Condition("shared").layout(prompt).next_position
            longest = max(longest, end + max(len(prompt.answer) + 1, self._params.max_tokens or 0))
        return self.llm.limits.max_model_len - longest

    def batches(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Yield groups of questions whose prompts fit the KV pool together.

        Args:
            numbers: places of the questions.
        """
        size = self.llm.limits.block_size
        room = _POOL_SHARE * self.llm.limits.num_pages
        group: list[int] = []
        used = 0
        for number in numbers:
            prompt = self.prompts[number]
            parts = [*map(len, (prompt.prefix, *prompt.documents)), len(prompt.question) + len(prompt.answer)]
            pages = sum(-(-part // size) for part in [*parts, self._params.max_tokens or 0])
            if group and (used + pages > room or len(group) == MOST_TOGETHER):
                yield group
                group, used = [], 0
            group.append(number)
            used += pages
        if group:
            yield group

    def examine(self, conditions: Sequence[Condition], numbers: Sequence[int], *, texts: bool) -> dict[Condition, Values]:
        """Return the values of questions under every condition.

        Args:
            conditions: conditions in the order in which they run; neighbours share what they can of the cache.
            numbers: places of the questions.
            texts: whether to generate answers and measure them as well.

        Raises:
            RequestError: a question does not fit the engine. The message names its line, or the lines of its group, and the
                condition.
            EngineError: a step failed. The message names the same.
        """
        logprobs: dict[Condition, list[float]] = {condition: [] for condition in conditions}
        written: dict[Condition, list[str]] = {condition: [] for condition in conditions}
        for group in self.batches(numbers):
            for condition in conditions:
                with self._named(condition, group):
                    self._choices.choose(condition, group)
                logprobs[condition] += self.likelihoods(condition, group)
                if texts:
                    written[condition] += self.texts(condition, group)
        questions = [self.questions[number] for number in numbers]
        return {
            condition: {
                LOGPROB: np.asarray(values),
                **(answer_measures(written[condition], questions) if texts else {}),
                **self._recall(condition, numbers),
            }
            for condition, values in logprobs.items()
        }

    def _recall(self, condition: Condition, numbers: Sequence[int]) -> Values:
        """Return the recall of a focus if all questions name their gold documents; nothing for other conditions."""
        if condition.focus is None or not all(self.prompts[number].gold for number in numbers):
            return {}
        return {RECALL: np.asarray([self._choices.recall(condition, number) for number in numbers])}

    def likelihoods(self, condition: Condition, numbers: Sequence[int]) -> list[float]:
        """Return the mean log-probability of a token of the gold answer, for each question.

        Args:
            condition: condition of the prompts.
            numbers: places of the questions, which fit the KV pool together.

        Raises:
            RequestError: a question does not fit the engine. The message names its line, or the lines of its group, and the
                condition.
            EngineError: a step failed. The message names the same.
        """

        def compute(prompts: Sequence[ParsedPrompt], missing: Sequence[int]) -> list[dict[str, Any]]:
            answers = [self.prompts[number].answer for number in missing]
            outputs = self.llm.run(likelihood_job(self.llm.frontend, prompts, answers, condition.weighing), False)
            return [{"logprob": float(np.mean(logprobs, dtype=np.float64)), "tokens": len(logprobs)} for logprobs in outputs]

        return self._results("logprob", condition, numbers, compute)

    def texts(self, condition: Condition, numbers: Sequence[int]) -> list[str]:
        """Return the greedy answer to each question.

        Args:
            condition: condition of the prompts.
            numbers: places of the questions.

        Raises:
            RequestError: a question does not fit the engine. The message names its line, or the lines of its group, and the
                condition.
            EngineError: a step failed. The message names the same.
        """

        def compute(prompts: Sequence[ParsedPrompt], _: Sequence[int]) -> list[dict[str, Any]]:
            outputs = self.llm.run(generate_job(self.llm.frontend, prompts, self._params, weighing=condition.weighing), False)
            return [{"text": output.outputs[0].text.strip()} for output in outputs]

        return self._results("text", condition, numbers, compute)

    def _results(
        self,
        kind: str,
        condition: Condition,
        numbers: Sequence[int],
        compute: Callable[[Sequence[ParsedPrompt], Sequence[int]], list[dict[str, Any]]],
    ) -> list[Any]:
        """Return the values of a kind of results, after those that are missing are computed and kept.

        Args:
            kind: name of the value.
            condition: condition of the prompts.
            numbers: places of the questions.
            compute: returns the fields of the results of prompts and the places of their questions.
        """
        keys = {number: self._key(kind, condition, number) for number in numbers}
        if missing := [number for number in numbers if keys[number] not in self.results]:
            with self._named(condition, missing):
                computed = compute([self._prompt(condition, number) for number in missing], missing)
            self.results.add(
                {"key": keys[number], "line": self.questions[number].line, "condition": condition.name, **values}
                for number, values in zip(missing, computed, strict=True)
            )
        self.advance(len(numbers))
        return [self.results[keys[number]][kind] for number in numbers]

    @contextmanager
    def _named(self, condition: Condition, numbers: Sequence[int]) -> Iterator[None]:
        """Name lines and condition in errors."""
        try:
            yield
        except (RequestError, EngineError) as error:
            kinds = (RequestError, NonFiniteError, EngineError)
            raised: type[RequestError | EngineError] = next(kind for kind in kinds if isinstance(error, kind))
            lines = ", ".join(str(self.questions[number].line) for number in numbers)
            raise raised(f"line{'s' * (len(numbers) > 1)} {lines}, {condition.name}: {error}") from error

    def _prompt(self, condition: Condition, number: int) -> ParsedPrompt:
        return ParsedPrompt(self._layout(condition, number), None)

    def _longest(self, condition: Condition, number: int) -> ParsedPrompt:
        """Return the longest prompt that a question may have, whatever is chosen."""
        if condition.focus is None or condition.focus.score == GOLD:
            return ParsedPrompt(condition.layout(self.prompts[number], self.prompts[number].gold), None)
        prompt = replace(self._prompt(condition, number), focus=condition.focus)
        return replace(longest(prompt, condition.calibration.chunk_position_gap), focus=None)

    def _layout(self, condition: Condition, number: int) -> ChunkLayout:
        return condition.layout(self.prompts[number], self._choices.of(condition, number))

    def _key(self, kind: str, condition: Condition, number: int) -> str:
        layout = self._layout(condition, number)
        form = [layout.prefix_len, layout.chunk_lens, condition.weighing if any(layout.chunk_lens) else None]
        end = list(self.prompts[number].answer) if kind == "logprob" else [self._params.max_tokens, self._params.stop]
        return result_key(kind, self._model, layout_digest(layout), form, end)
