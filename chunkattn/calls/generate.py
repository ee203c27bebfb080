"""`GenerateJob`: turns prompts into requests, and tokens into `RequestOutput`s; `LikelihoodJob`: reads given answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from chunkattn.calls.detokenizer import Detokenizer
from chunkattn.calls.frontend import Frontend, check_priorities
from chunkattn.calls.job import StopSample
from chunkattn.config import SamplingParams
from chunkattn.engine.messages import EngineOutput, GenerateRequest, PromptLogprobsOutput, TokenLogprobs, TokenOutput
from chunkattn.errors import RequestError
from chunkattn.layout import ChunkLayout
from chunkattn.outputs import CompletionOutput, Logprob, RequestOutput
from chunkattn.parsers import ParsedPrompt
from chunkattn.parsers.arguments import check_ids, check_salt, one_each, salt_key

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COST = "prompts and max_tokens of all samples"
"""Name in errors of the tokens that `max_tokens_per_call` bounds."""


class OutputBuilder:
    """Builder of one request's `RequestOutput` from the engine's outputs."""

    def __init__(
        self,
        request: GenerateRequest,
        prompt: str | None,
        tokenizer: PreTrainedTokenizerBase | None,
        decode: Callable[[int], str | None],
    ) -> None:
        layout, params = request.layout, request.sampling
        self._ids, self._decode, self._params = layout.token_ids.tolist(), decode, params
        question = self._ids[layout.question_start :]
        self.output = RequestOutput(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=self._ids,
            outputs=[CompletionOutput(i) for i in range(params.n)],
            prompt_logprobs=None if params.prompt_logprobs is None else [None] * len(layout),
            chunk_lens=layout.chunk_lens,
            prefix_len=layout.prefix_len if layout.chunk_lens else 0,
        )
        self._text = [
            None
            if tokenizer is None
            else Detokenizer(
                tokenizer,
                question,
                stop=tuple(params.stop),
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
                skip_special_tokens=params.skip_special_tokens,
            )
            for _ in range(params.n)
        ]
        if params.logprobs is not None:
            for completion in self.output.outputs:
                completion.logprobs, completion.cumulative_logprob = [], 0.0

    @property
    def finished(self) -> bool:
        """Return whether every sample has ended."""
        return all(o.finish_reason for o in self.output.outputs)

    def add_tokens(self, event: TokenOutput) -> bool:
        """Add tokens. Return True if a stop string ended their sample, which the engine then must end, too.

        Args:
            event: new tokens of a sample; one at a time if there are stop strings.
        """
        completion, detokenizer = self.output.outputs[event.sample], self._text[event.sample]
        completion.token_ids += event.token_ids
        if event.cached is not None:
            self.output.num_cached_tokens = event.cached.total
            self.output.num_cached_chunk_tokens = event.cached.chunks
        if event.logprobs is not None and completion.logprobs is not None:
            for row, token in enumerate(event.token_ids):
                completion.logprobs.append(self._entry(event.logprobs, row, token))
                completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + float(event.logprobs.target[row])
        completion.finish_reason, completion.stop_reason = event.finish_reason, event.stop_reason
        if detokenizer is None:
            return False
        if event.finish_reason == "stop":  # the text excludes the token that ends it
            stopped = detokenizer.add(event.token_ids[:-1]) or detokenizer.flush()
        else:
            stopped = detokenizer.add(event.token_ids, last=event.finish_reason is not None)
        if stopped:
            completion.finish_reason, completion.stop_reason = "stop", detokenizer.stopped_by
        if completion.finish_reason:  # a reader of the growing output may read the text now
            completion.text = detokenizer.text
        return stopped and event.finish_reason is None

    def read(self) -> RequestOutput:
        """Return `output` with the texts so far."""
        for completion, detokenizer in zip(self.output.outputs, self._text, strict=True):
            if detokenizer is not None:
                completion.text = detokenizer.text
        return self.output

    def add_prompt_logprobs(self, event: PromptLogprobsOutput) -> None:
        """Add the prompt's log-probabilities."""
        self.output.prompt_logprobs = [
            self._entry(event.logprobs, i, token) if known else None
            for i, (token, known) in enumerate(zip(self._ids, event.known.tolist(), strict=True))
        ]

    def _entry(self, values: TokenLogprobs, row: int, token_id: int) -> dict[int, Logprob]:
        entry = {token_id: Logprob(float(values.target[row]), int(values.rank[row]), self._decode(token_id))}
        for rank, (top_id, logprob) in enumerate(zip(values.top_ids[row].tolist(), values.top[row].tolist(), strict=True), 1):
            entry.setdefault(top_id, Logprob(logprob, rank, self._decode(top_id)))
        return entry


class GenerateJob:
    """Job of a `generate` or `chat` call; see `chunkattn.calls.job.Job`.

    Args:
        requests: one request for each prompt.
        builders: one builder for each prompt, in the same order.
        tokens: number of tokens that the call may make the engine compute.
        final_only: whether the caller reads only the last output of each prompt.

    Attributes:
        builders: one builder for each prompt, in order.
        tokens: number of tokens that the call may make the engine compute.
        final_only: whether the caller reads only the last output of each prompt.
    """

    unit = "prompts"

    def __init__(
        self,
        requests: Sequence[GenerateRequest],
        builders: Sequence[OutputBuilder],
        tokens: int,
        *,
        final_only: bool = False,
    ) -> None:
        self._requests, self.builders, self.tokens, self.final_only = requests, builders, tokens, final_only
        self._by_id = {request.request_id: builder for request, builder in zip(requests, builders, strict=True)}
        self.total, self.done = len(requests), 0
        self.pins: Sequence[str] = ()

    def stages(self) -> Iterator[Sequence[GenerateRequest]]:
        """Yield all requests as one stage."""
        yield self._requests

    def take(self, output: EngineOutput, stop: StopSample) -> bool:
        """Add new tokens, or the log-probabilities of a prompt, to the output."""
        builder = self._by_id[output.request_id]
        if isinstance(output, PromptLogprobsOutput):
            builder.add_prompt_logprobs(output)
        # The engine may compute a few more tokens of a sample before it learns of the stop string.
        elif isinstance(output, TokenOutput) and builder.output.outputs[output.sample].finish_reason is None:
            if builder.add_tokens(output):
                stop(output.request_id, output.sample)
            self.done += builder.finished
        return builder.finished

    def result(self) -> list[RequestOutput]:
        """Return one output for each prompt, in order."""
        return [builder.read() for builder in self.builders]


def generate_job(
    frontend: Frontend,
    prompts: Sequence[ParsedPrompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    priority: int | Sequence[int] = 0,
    *,
    cache_salt: str | None = None,
    final_only: bool = False,
    weighing: tuple[float, float] | None = None,
    prompt_only: bool = False,
) -> GenerateJob:
    """Check the arguments of `generate`, and return the job with its requests.

    Args:
        frontend: frontend of the engine.
        prompts: parsed prompts.
        params: one set of parameters for all prompts, or one each; None uses the defaults.
        priority: one priority for all prompts, or one each.
        cache_salt: salt of the prompts that have none of their own.
        final_only: see `AsyncLLM.generate`.
        weighing: chunk temperature and scale instead of the engine's; only for an engine built with other values than 1.
        prompt_only: whether the caller reads the prompt's log-probabilities alone and discards the generated token.

    Raises:
        RequestError: an argument is invalid, or the lists differ in length.
        CapacityError: a prompt cannot fit, or the prompts together exceed `max_tokens_per_call`.
    """
    salt = check_salt(cache_salt)
    listed = one_each(SamplingParams() if params is None else params, SamplingParams, len(prompts), "sampling_params")
    requests = []
    for prompt, param, rank in zip(prompts, listed, check_priorities(priority, len(prompts)), strict=True):
        if param.stop and frontend.tokenizer is None:
            raise RequestError("stop strings need a tokenizer and this engine has none; use stop_token_ids", param="stop")
        request = GenerateRequest(
            frontend.new_id(),
            prompt.layout,
            param,
            frontend.eos_token_ids,
            salt_key(prompt.cache_salt or salt),
            rank,
            weighing,
            prompt_only=prompt_only,
        )
        frontend.limits.check(request, prompt.names)
        requests.append(request)
    # Without max_tokens, count one token per sample.
    tokens = sum(len(r.layout) + r.sampling.n * (r.sampling.max_tokens or 1) for r in requests)
    frontend.limits.check_tokens(tokens, COST, prompts[0].names.whole(prompts[0].layout) if prompts else "prompt")
    texts = [prompt.text for prompt in prompts]
    builders = [OutputBuilder(r, text, frontend.tokenizer, frontend.decode) for r, text in zip(requests, texts, strict=True)]
    return GenerateJob(requests, builders, tokens, final_only=final_only)


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

    def take(self, output: EngineOutput, stop: StopSample) -> bool:
        """Keep the log-probabilities of an answer."""
        if isinstance(output, PromptLogprobsOutput):
            self._found[output.request_id] = output.logprobs.target[self._starts[output.request_id] :]
        ended = isinstance(output, TokenOutput)
        self.done += ended
        return ended

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
        if not len(ids := check_ids(answer, f"answer {number}", "answers")):
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
        frontend.limits.check(request, prompt.names._replace(question="answers"))
        requests.append(request)
        starts.append(start)
    frontend.limits.check_tokens(sum(len(r.layout) + 1 for r in requests), "prompts and answers", "prompt")
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
