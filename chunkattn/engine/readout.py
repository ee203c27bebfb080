"""Readouts of a request: its sampled tokens, the rows that steps read for it, and its cached prompt tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from chunkattn.engine.batch import StepPlan
from chunkattn.engine.messages import (
    CachedTokens,
    EngineOutput,
    PromptLogprobsOutput,
    ScoreResult,
    StepRates,
    TokenLogprobs,
    TokenOutput,
)
from chunkattn.engine.metrics import EngineMetrics
from chunkattn.engine.rates import RateMeter
from chunkattn.engine.request import Request, Sequence
from chunkattn.engine.runner import StepResult
from chunkattn.engine.sampling_plan import SampleRow


class Readouts:
    """Collectors of the requests that want scores or prompt log-probabilities, until each has all of its rows."""

    def __init__(self) -> None:
        self._open: dict[str, RowCollector] = {}

    def expect(self, request: Request) -> None:
        """Open a collector for a new request, if it wants scores or prompt log-probabilities."""
        if request.score is not None:
            self._open[request.request_id] = RowCollector(len(request.score.rows))
        elif wanted := len(request.logprob_rows):
            self._open[request.request_id] = RowCollector(wanted)

    def forget(self, request_id: str) -> None:
        """Drop the rows read for a request."""
        self._open.pop(request_id, None)

    def take(self, plan: StepPlan, result: StepResult, taken: np.ndarray, meter: RateMeter) -> Iterator[EngineOutput]:
        """Collect the rows of one step. Yield the outputs of the requests whose last row is among them.

        Args:
            plan: plan of the step.
            result: values read from the step.
            taken: bool `[T]`, whether the values of a row count.
            meter: meter whose rates score results carry.
        """
        for (row, request, place), values in zip(plan.scores, result.scores, strict=True):
            if taken[row] and (collector := self._collect(request, place, values)):
                yield collector.score_result(request, meter.rates)
                self.forget(request.request_id)
        if (read := result.prompt_logprobs) is not None:
            for i, (row, request, place) in enumerate(plan.prompt_logprobs):
                found = (read.target[i], read.rank[i], read.top_ids[i], read.top[i])
                if taken[row] and (collector := self._collect(request, int(request.user_index[place]), found)):
                    yield collector.prompt_output(request)
                    self.forget(request.request_id)

    def _collect(self, request: Request, index: int, values: object) -> RowCollector | None:
        """Collect a row. Return the request's collector if the row was the last."""
        collector = self._open.get(request.request_id)
        if collector is None:  # the request was answered before its sequence restarted
            return None
        collector.rows[index] = values
        return collector if len(collector.rows) == collector.wanted else None


class RowCollector:
    """Collector of the rows of one request's readout."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.rows: dict[int, Any] = {}

    def score_result(self, request: Request, rates: StepRates) -> ScoreResult:
        """Return label log-probabilities, or a classifier's logits, in the order of the request's rows."""
        return ScoreResult(request.request_id, np.stack([self.rows[i] for i in range(self.wanted)]), rates)

    def prompt_output(self, request: Request) -> PromptLogprobsOutput:
        """Return the prompt log-probabilities collected, by token index in the user's order."""
        assert request.sampling is not None
        tokens, num_top = len(request.layout), request.sampling.prompt_logprobs or 0
        target, rank, known = np.zeros(tokens, np.float32), np.zeros(tokens, np.int32), np.zeros(tokens, bool)
        top_ids, top = np.zeros((tokens, num_top), np.int32), np.zeros((tokens, num_top), np.float32)
        for index, row in self.rows.items():
            target[index], rank[index], known[index] = row[0], row[1], True
            top_ids[index], top[index] = row[2][:num_top], row[3][:num_top]
        return PromptLogprobsOutput(request.request_id, TokenLogprobs(target, rank, top_ids, top), known)


def accept_token(
    row: SampleRow, token: int, logprobs: TokenLogprobs | None, outputs: list[EngineOutput], metrics: EngineMetrics
) -> Sequence | None:
    """Append a sampled token to its sequence and to the outputs. Return the sequence if the token is its last.

    Args:
        row: row that the token is sampled from.
        token: the token.
        logprobs: log-probabilities of the token, if requested.
        outputs: outputs of the step.
        metrics: metrics of the engine.
    """
    request, sample, params, now = row.sequence.request, row.sample, row.params, time.perf_counter()
    sequence = next(s for s in request.sequences if s.sample == sample)
    number, cached = len(sequence.output_ids) + 1, None
    if number == 1:
        cached = cached_tokens(request)
        if sample == 0:
            metrics.first_token.observe(now - request.added_at)
            metrics.count_cached(cached, prompt_tokens(request))
    else:
        metrics.inter_token.observe(now - sequence.last_token_at)
    sequence.last_token_at = now
    finish_reason, stop_reason = None, None
    if number > params.min_tokens:
        if token in params.stop_token_ids:
            finish_reason, stop_reason = "stop", token
        elif token in request.eos_token_ids and not params.ignore_eos:
            finish_reason = "stop"
    if finish_reason is None and number >= request.max_tokens:
        finish_reason = "length"
    # Adjacent statements leave an interrupt little time between them.
    sequence.output_ids.append(token)
    outputs.append(TokenOutput(request.request_id, sample, (token,), logprobs, finish_reason, stop_reason, cached))
    return sequence if finish_reason else None


def _by_part(request: Request, tokens: np.ndarray) -> CachedTokens:
    """Count the True values of a bool `[T]` by part, chunks in the user's order."""
    layout = request.layout
    counts = [int(tokens[s.start : s.end].sum()) for s in layout.segments]
    chunks = [0] * layout.num_chunks
    for place, number in enumerate(request.chunk_order):
        chunks[number] = counts[1 + place]
    return CachedTokens(counts[0], tuple(chunks), counts[-1])


def cached_tokens(request: Request) -> CachedTokens:
    """Return the number of prompt tokens that the request did not compute, by part."""
    return _by_part(request, ~request.computed)


def prompt_tokens(request: Request) -> CachedTokens:
    """Return the number of prompt tokens, by part."""
    return _by_part(request, np.ones(len(request.layout), bool))
