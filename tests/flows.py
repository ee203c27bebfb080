"""Flows of calls without an engine."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from chunkattn.calls.job import Ask, Job, LookUp, Returned, advance
from chunkattn.engine.messages import CachedTokens, Message, PrecomputeResult, ScoreRequest, ScoreResult, StepRates

NOTHING = CachedTokens(0, (), 0)
"""Answer to a look-up that finds nothing."""


def questions_of(job: Job[Any]) -> Iterator[Ask | LookUp]:
    """Yield the questions of a job. Nothing is cached, and results are made up."""
    flow, answer = job.flow(), None
    while not isinstance(question := advance(flow, answer), Returned):
        yield question
        if isinstance(question, LookUp):
            answer = [NOTHING] * len(question.requests)
        else:
            answer = [] if question.on_output else [_result(request) for request in question.requests]


def stages_of(job: Job[Any]) -> Iterator[list[Message]]:
    """Yield the stages of a job, see `questions_of`."""
    for question in questions_of(job):
        if isinstance(question, Ask):
            yield list(question.requests)


def _result(request: Message) -> PrecomputeResult | ScoreResult:
    if isinstance(request, ScoreRequest):
        labels = max(map(len, request.label_token_ids), default=1)
        return ScoreResult(request.request_id, np.zeros((len(request.rows), labels), np.float32), StepRates(1, 1, 1), 0)
    return PrecomputeResult(request.request_id, CachedTokens(0, (0,) * request.layout.num_chunks, 0))
