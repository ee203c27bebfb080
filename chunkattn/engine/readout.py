"""What is read off a request: rows as steps compute them, and how much of its prompt was cached."""

from __future__ import annotations

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
)
from chunkattn.engine.rates import RateMeter
from chunkattn.engine.request import Request
from chunkattn.engine.runner import StepResult


class Readouts:
    """Rows read for the requests that have asked for scores or prompt log-probabilities, until each has all of its rows."""

    def __init__(self) -> None:
        self._open: dict[str, RowCollector] = {}

    def expect(self, request: Request) -> None:
        """Take note of a new request."""
        params = request.sampling
        if request.score is not None:
            self._open[request.request_id] = RowCollector(len(request.score.rows))
        elif params is not None and params.prompt_logprobs is not None and (wanted := len(request.layout.known_rows)):
            self._open[request.request_id] = RowCollector(wanted)

    def forget(self, request_id: str) -> None:
        """Drop what was read for a request, if anything."""
        self._open.pop(request_id, None)

    def take(self, plan: StepPlan, result: StepResult, meter: RateMeter) -> list[EngineOutput]:
        """Take the rows of one step. Returns the outputs of the requests whose last row is among them."""
        outputs: list[EngineOutput] = []
        for (_, request, place), values in zip(plan.scores, result.scores, strict=True):
            if collector := self._note(request, place, values):
                outputs.append(collector.score_result(request, meter.rates))
        if (read := result.prompt_logprobs) is not None:
            for i, (_, request, place) in enumerate(plan.prompt_logprobs):
                row = (read.target[i], read.rank[i], read.top_ids[i], read.top[i])
                if collector := self._note(request, int(request.user_index[place]), row):
                    outputs.append(collector.prompt_output(request))
        return outputs

    def _note(self, request: Request, index: int, row: object) -> RowCollector | None:
        """Note a row; returns the request's collector, no longer kept here, when this was its last."""
        collector = self._open.get(request.request_id)
        if collector is None:  # answered before its sequence had to start over
            return None
        collector.rows[index] = row
        return self._open.pop(request.request_id) if len(collector.rows) == collector.wanted else None


class RowCollector:
    """Rows of one request's readout as steps compute them."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.rows: dict[int, Any] = {}

    def score_result(self, request: Request, rates: StepRates) -> ScoreResult:
        """Label log-probabilities, or a classifier's logits, in the order of the request's rows."""
        return ScoreResult(request.request_id, np.stack([self.rows[i] for i in range(self.wanted)]), rates)

    def prompt_output(self, request: Request) -> PromptLogprobsOutput:
        """Everything collected, by token index in the user's order."""
        assert request.sampling is not None
        tokens, num_top = len(request.layout), request.sampling.prompt_logprobs or 0
        target, rank, known = np.zeros(tokens, np.float32), np.zeros(tokens, np.int32), np.zeros(tokens, bool)
        top_ids, top = np.zeros((tokens, num_top), np.int32), np.zeros((tokens, num_top), np.float32)
        for index, row in self.rows.items():
            target[index], rank[index], known[index] = row[0], row[1], True
            top_ids[index], top[index] = row[2][:num_top], row[3][:num_top]
        return PromptLogprobsOutput(request.request_id, TokenLogprobs(target, rank, top_ids, top), known)


def _by_part(request: Request, tokens: np.ndarray) -> CachedTokens:
    """Counts of a bool `[T]` over the parts, chunks in the user's order."""
    layout = request.layout
    counts = [int(tokens[s.start : s.end].sum()) for s in layout.segments]
    chunks = [0] * layout.num_chunks
    for place, number in enumerate(request.chunk_order):
        chunks[number] = counts[1 + place]
    return CachedTokens(counts[0], tuple(chunks), counts[-1])


def cached_tokens(request: Request) -> CachedTokens:
    """Prompt tokens the request did not have to compute."""
    return _by_part(request, ~request.computed)


def prompt_tokens(request: Request) -> CachedTokens:
    """All of them, by part."""
    return _by_part(request, np.ones(len(request.layout), bool))
