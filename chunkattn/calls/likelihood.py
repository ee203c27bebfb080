"""`LikelihoodJob`: the log-probabilities of given answers, with prefix and chunks read from the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from chunkattn.accounting import generation_tokens
from chunkattn.calls.frontend import Frontend
from chunkattn.calls.job import Taken
from chunkattn.config import SamplingParams
from chunkattn.engine.messages import EngineOutput, GenerateRequest, PromptLogprobsOutput, TokenOutput
from chunkattn.errors import RequestError
from chunkattn.layout import ChunkLayout
from chunkattn.parsers import ParsedPrompt
from chunkattn.parsers.arguments import check_ids


class LikelihoodJob:
    """Job that reads the log-probabilities of answers; see `chunkattn.calls.job.Job`.

    Args:
        requests: one request for each answer, whose layout ends with the answer.
        starts: token index of each answer's first token.
    """

    unit = "answers"

    def __init__(self, requests: Sequence[GenerateRequest], starts: Sequence[int]) -> None:
        self._requests, self._starts = requests, dict(zip((r.request_id for r in requests), starts, strict=True))
        self._found: dict[str, np.ndarray] = {}
        self.total, self.done = len(requests), 0
        self.pins: Sequence[str] = ()

    def stages(self) -> Iterator[Sequence[GenerateRequest]]:
        """Yield all requests as one stage."""
        yield self._requests

    def take(self, output: EngineOutput) -> Taken:
        """Keep the log-probabilities of an answer."""
        if isinstance(output, PromptLogprobsOutput):
            self._found[output.request_id] = output.logprobs.target[self._starts[output.request_id] :]
        ended = isinstance(output, TokenOutput)
        self.done += ended
        return Taken(ended)

    def result(self) -> list[np.ndarray]:
        """Return the log-probabilities of each answer's tokens, float32 `[tokens]`, in order."""
        return [self._found[request.request_id] for request in self._requests]


def likelihood_job(
    frontend: Frontend,
    prompts: Sequence[ParsedPrompt],
    answers: Sequence[Sequence[int]],
    weighing: tuple[float, float] | None = None,
) -> LikelihoodJob:
    """Check the arguments, and return the job with its requests.

    Args:
        frontend: frontend of the engine.
        prompts: parsed prompts.
        answers: token ids of each prompt's answer, which follow its question.
        weighing: chunk temperature and scale instead of the engine's; only for an engine built with other values than 1.

    Raises:
        RequestError: an answer is empty or malformed, or the lists differ in length.
        CapacityError: a prompt with its answer cannot fit, or all exceed `max_tokens_per_call`.
    """
    if len(prompts) != len(answers):
        raise RequestError(f"{len(prompts)} prompts and {len(answers)} answers must be of one length", param="answers")
    params, requests, starts = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), [], []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if not len(ids := check_ids(answer, f"answer {number}")):
            raise RequestError(f"answer {number} is empty", param="answers")
        start = len(prompt.layout)
        request = GenerateRequest(
            frontend.new_id(),
            _extended(prompt.layout, ids),
            params,
            weighing=weighing,
            logprobs_from=start,
            prompt_only=True,
        )
        frontend.intake.check(request)
        requests.append(request)
        starts.append(start)
    frontend.check_tokens(sum(generation_tokens(len(r.layout), 1, 1) for r in requests), "prompts and answers", "prompt")
    return LikelihoodJob(requests, starts)


def _extended(layout: ChunkLayout, answer: Sequence[int]) -> ChunkLayout:
    """Return the layout with an answer at the end of its question."""
    positions = np.arange(layout.next_position, layout.next_position + len(answer), dtype=np.int32)
    return replace(
        layout,
        token_ids=np.concatenate([layout.token_ids, np.asarray(answer, np.int32)]),
        positions=np.concatenate([layout.positions, positions]),
        question_len=layout.question_len + len(answer),
    )
