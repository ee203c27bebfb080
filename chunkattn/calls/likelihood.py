"""`LikelihoodJob`: reads the log-probabilities of the last tokens of prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import numpy as np

from chunkattn.calls.frontend import Frontend
from chunkattn.calls.job import STAGE_STEPS, Ask, Flow, StopSample, stages
from chunkattn.engine.messages import EngineOutput, GenerateRequest, PromptLogprobsOutput, TokenOutput
from chunkattn.errors import RequestError
from chunkattn.layout import ChunkLayout
from chunkattn.parsers import ParsedPrompt
from chunkattn.parsers.arguments import check_ids
from chunkattn.sampling_params import SamplingParams

T = TypeVar("T")

_READ = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)


class LikelihoodJob(Generic[T]):
    """Job that reads the log-probabilities of the last tokens of prompts; see `chunkattn.calls.job.Job`.

    Args:
        requests: requests made by `likelihood_request`, in order. Each is made when its stage is asked for.
        count: number of requests.
        tokens: tokens of all requests.
        stage_tokens: number of tokens behind the prefixes in one stage; a single request may exceed it.
        finish: makes the result from the log-probabilities of each request's last tokens, float32 `[tokens]`, and the number of
            tokens that each request computed.

    Attributes:
        tokens: tokens of all requests.
    """

    unit = "answers"

    def __init__(
        self,
        requests: Iterable[GenerateRequest],
        count: int,
        tokens: int,
        stage_tokens: int,
        finish: Callable[[list[np.ndarray], list[int]], T],
    ) -> None:
        self._requests, self._stage_tokens, self._finish, self.tokens = requests, stage_tokens, finish, tokens
        self._sent: dict[str, GenerateRequest] = {}  # requests that have not ended
        self._logprobs: dict[str, np.ndarray] = {}
        self._computed: dict[str, int] = {}
        self.total, self.done = count, 0

    def flow(self) -> Flow[T]:
        """Send the requests in order, in stages of bounded size, since documents may be uncached."""
        names: list[str] = []
        for stage in stages(
            self._requests, self._stage_tokens, lambda request: len(request.layout) - request.layout.prefix_len
        ):
            self._sent |= {request.request_id: request for request in stage}
            names += [request.request_id for request in stage]
            yield Ask(stage, self._take)
        return self._finish([self._logprobs[name] for name in names], [self._computed.get(name, 0) for name in names])

    def _take(self, output: EngineOutput, stop: StopSample) -> bool:
        """Keep the log-probabilities of one request."""
        request = self._sent[output.request_id]
        if isinstance(output, PromptLogprobsOutput):
            self._logprobs[request.request_id] = output.logprobs.target[request.logprobs_from :].copy()
        if not isinstance(output, TokenOutput):
            return False
        if output.cached is not None:
            self._computed[request.request_id] = len(request.layout) - output.cached.total
        del self._sent[request.request_id]
        self.done += 1
        return True


def likelihood_request(
    frontend: Frontend,
    layout: ChunkLayout,
    start: int,
    *,
    salt_key: str | None = None,
    priority: int = 0,
    weighing: tuple[float, float] | None = None,
    private: bool = False,
) -> GenerateRequest:
    """Return the request of a prompt whose last tokens are read. The prompt's other tokens may come from the cache.

    Args:
        frontend: frontend of the engine.
        layout: layout of the prompt.
        start: token index of the first token that is read, behind the first token of the question.
        salt_key: see `GenerateRequest`.
        priority: rank in the queue; lower goes first.
        weighing: see `GenerateRequest`.
        private: whether the request reads nothing from the cache and leaves nothing in it.
    """
    return GenerateRequest(
        frontend.new_id(),
        layout,
        replace(_READ, skip_reading_prefix_cache=True) if private else _READ,
        salt_key=salt_key,
        priority=priority,
        weighing=weighing,
        logprobs_from=start,
        prompt_only=True,
    )


def stage_tokens(frontend: Frontend) -> int:
    """Return the number of tokens that one stage may have behind the prefixes."""
    return STAGE_STEPS * frontend.config.max_num_batched_tokens


def likelihood_job(
    frontend: Frontend,
    prompts: Sequence[ParsedPrompt],
    answers: Sequence[Sequence[int]],
    weighing: tuple[float, float] | None = None,
) -> LikelihoodJob[list[np.ndarray]]:
    """Check the arguments, and return the job that reads the log-probabilities of answers.

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
    requests = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if not len(ids := check_ids(answer, f"answer {number}", "answers")):
            raise RequestError(f"answer {number} is empty", param="answers")
        request = likelihood_request(frontend, _extended(prompt.layout, ids), len(prompt.layout), weighing=weighing)
        frontend.limits.check(request, prompt.names._replace(question="answers"))
        requests.append(request)
    tokens = sum(len(request.layout) + 1 for request in requests)
    frontend.limits.check_tokens(tokens, "prompts and answers", "prompt")
    return LikelihoodJob(requests, len(requests), tokens, stage_tokens(frontend), lambda logprobs, _: logprobs)


def _extended(layout: ChunkLayout, answer: Sequence[int]) -> ChunkLayout:
    """Return the layout with an answer at the end of its question."""
    positions = np.arange(layout.next_position, layout.next_position + len(answer), dtype=np.int32)
    return replace(
        layout,
        token_ids=np.concatenate([layout.token_ids, np.asarray(answer, np.int32)]),
        positions=np.concatenate([layout.positions, positions]),
        question_len=layout.question_len + len(answer),
    )
