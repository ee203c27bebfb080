"""Generation: turns prompts into requests, and tokens into `RequestOutput`s."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from chunkattn.adapter_salt import salt_for, salted, split
from chunkattn.calls.cited_text import CitedText
from chunkattn.calls.detokenizer import Detokenizer
from chunkattn.calls.focus_scores import check_longest, choose_documents
from chunkattn.calls.frontend import Frontend, check_priorities
from chunkattn.calls.job import Ask, CheckShape, Flow, Job, JobsInTurn, StopSample
from chunkattn.engine.limits import EngineLimits
from chunkattn.engine.messages import EngineOutput, GenerateRequest, PromptLogprobsOutput, TokenLogprobs, TokenOutput
from chunkattn.errors import RequestError
from chunkattn.outputs import CompletionOutput, Logprob, RequestOutput
from chunkattn.parsers import ParsedPrompt
from chunkattn.parsers.arguments import check_salt, salt_key
from chunkattn.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COST = "prompts and max_tokens of all samples"
"""Name in errors of the tokens that `max_tokens_per_call` bounds."""
_WITH_FOCUS = f"{COST}, with all that focus scores,"
_POOL_SHARE = 0.75
"""Share of the KV pool that the prompts of one group may take; the rest is for the reads of their questions."""


class OutputBuilder:
    """Builder of one request's `RequestOutput` from the engine's outputs.

    Args:
        request: the request.
        prompt: the parsed prompt.
        tokenizer: tokenizer, or None for an engine without one.
        decode: function that returns the text of a token id.
    """

    def __init__(
        self,
        request: GenerateRequest,
        prompt: ParsedPrompt,
        tokenizer: PreTrainedTokenizerBase | None,
        decode: Callable[[int], str | None],
    ) -> None:
        layout, params = request.layout, request.sampling
        self._ids, self._decode, self._params = layout.token_ids.tolist(), decode, params
        question = self._ids[layout.question_start :]
        self.output = RequestOutput(
            request_id=request.request_id,
            prompt=prompt.text,
            prompt_token_ids=self._ids,
            outputs=[CompletionOutput(i) for i in range(params.n)],
            prompt_logprobs=None if params.prompt_logprobs is None else [None] * len(layout),
            chunk_lens=layout.chunk_lens,
            prefix_len=layout.prefix_len if layout.chunk_lens else 0,
            focus=prompt.chosen,
            joined=prompt.joined,
        )
        cited = prompt.cited
        self._cited = None if cited is None else [CitedText(cited, prompt.shown) for _ in range(params.n)]
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
        if event.finish_reason == "stop" and not event.is_complete:  # the text excludes the token that ends it
            stopped = detokenizer.add(event.token_ids[:-1]) or detokenizer.flush()
        else:
            stopped = detokenizer.add(event.token_ids, last=event.finish_reason is not None)
        if stopped:
            completion.finish_reason, completion.stop_reason = "stop", detokenizer.stopped_by
        if completion.finish_reason:  # a reader of the growing output may read the text now
            self._read(event.sample, detokenizer)
        return stopped and event.finish_reason is None

    def read(self) -> RequestOutput:
        """Return `output` with the texts so far."""
        for sample, detokenizer in enumerate(self._text):
            if detokenizer is not None:
                self._read(sample, detokenizer)
        return self.output

    def _read(self, sample: int, detokenizer: Detokenizer) -> None:
        completion = self.output.outputs[sample]
        completion.text = detokenizer.text
        if self._cited is not None:
            cited = self._cited[sample]
            cited.read(completion.text, ended=completion.finish_reason is not None)
            completion.text, completion.citations = cited.text, cited.citations

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
        frontend: frontend of the engine.
        prompts: parsed prompts.
        requests: one request for each prompt; of a prompt with `focus`, its layout is replaced when the choice is made.
        tokens: number of tokens that the call may make the engine compute.
        focus: flow that chooses documents and returns the prompts to answer; None if no prompt has a focus.
        final_only: whether the caller reads only the last output of each prompt.

    Attributes:
        requests: one request for each prompt, in order.
        builders: one builder for each prompt, in order; empty until `focus` has ended. The next question of the flow then
            generates the answers.
        tokens: number of tokens that the call may make the engine compute.
        final_only: whether the caller reads only the last output of each prompt.
    """

    unit = "prompts"

    def __init__(
        self,
        frontend: Frontend,
        prompts: Sequence[ParsedPrompt],
        requests: Sequence[GenerateRequest],
        tokens: int,
        focus: Flow[list[ParsedPrompt]] | None = None,
        *,
        final_only: bool = False,
    ) -> None:
        self._frontend, self._prompts, self._focus, self.requests = frontend, prompts, focus, requests
        self.tokens, self.final_only = tokens, final_only
        self.builders: list[OutputBuilder] = []
        self._by_id: dict[str, OutputBuilder] = {}
        self.total, self.done = len(requests), 0

    def flow(self) -> Flow[list[RequestOutput]]:
        """Choose documents where a prompt has a focus, generate, and return one output for each prompt, in order.

        The shapes of the texts are compiled first.
        """
        prompts = self._prompts
        shapes = dict.fromkeys(request.sampling.structured_outputs for request in self.requests)
        for shape in filter(None, shapes):
            yield CheckShape(shape, self._frontend.vocabulary)
        if self._focus is not None:
            prompts = yield from self._focus
            self.requests = [
                replace(r, layout=prompt.layout, sampling=_citing(r.sampling, prompt))
                for r, prompt in zip(self.requests, prompts, strict=True)
            ]
        for request, prompt in zip(self.requests, prompts, strict=True):
            builder = OutputBuilder(request, prompt, self._frontend.tokenizer, self._frontend.decode)
            self._by_id[request.request_id] = builder
        self.builders = list(self._by_id.values())
        yield Ask(self.requests, self._take)
        return [builder.read() for builder in self.builders]

    def _take(self, output: EngineOutput, stop: StopSample) -> bool:
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
    most_tokens: int | None = None,
) -> GenerateJob:
    """Check the arguments of `generate`, and return the job with its requests.

    Args:
        frontend: frontend of the engine.
        prompts: parsed prompts.
        params: one set of parameters for all prompts, or one each; None uses the model's defaults.
        priority: one priority for all prompts, or one each.
        cache_salt: salt of the prompts that have none of their own.
        final_only: see `AsyncLLM.generate`.
        weighing: chunk temperature and scale instead of the engine's; only for an engine built with other values than 1.
        prompt_only: whether the prompt is only read, for its log-probabilities; no token is generated.
        most_tokens: limit on the tokens of parameters without `max_tokens`; without `params`, the model's own.

    Raises:
        RequestError: an argument is invalid, the lists differ in length, or citations meet structured outputs.
        CapacityError: a prompt cannot fit, or the prompts together exceed `max_tokens_per_call`. A prompt with `focus` must fit
            with its longest documents.
    """
    salt = check_salt(cache_salt)
    listed = frontend.sampling(params, len(prompts))
    most_tokens = frontend.sampling_defaults.get("max_tokens") if params is None else most_tokens
    ranks, requests = check_priorities(priority, len(prompts)), []
    for prompt, param, rank in zip(prompts, listed, ranks, strict=True):
        if param.stop and frontend.tokenizer is None:
            raise RequestError("stop strings need a tokenizer and this engine has none; use stop_token_ids", param="stop")
        request = GenerateRequest(
            frontend.new_id(),
            prompt.layout,
            _checked_citing(param, prompt),
            frontend.eos_token_ids,
            salt_key(_salt(prompt, salt)),
            rank,
            weighing,
            prompt_only=prompt_only,
            most_tokens=most_tokens,
        )
        if prompt.focus is None:
            frontend.limits.check(request, prompt.names)
        requests.append(request if prompt.focus is None else check_longest(frontend.limits, request, prompt, frontend.gap))
    # Without max_tokens, count one token per sample.
    tokens = sum(len(r.layout) + (0 if prompt_only else r.sampling.n * (r.sampling.max_tokens or 1)) for r in requests)
    focus, what = None, COST
    if any(prompt.focus is not None for prompt in prompts):
        salts, private = [_salt(prompt, salt) for prompt in prompts], [p.skip_reading_prefix_cache for p in listed]
        scored, focus = choose_documents(frontend, prompts, salts, ranks, weighing, private)
        tokens, what = tokens + scored, _WITH_FOCUS
    frontend.limits.check_tokens(tokens, what, prompts[0].names.whole(prompts[0].layout) if prompts else "prompt")
    return GenerateJob(frontend, prompts, requests, tokens, focus, final_only=final_only)


def _checked_citing(params: SamplingParams, prompt: ParsedPrompt) -> SamplingParams:
    """Return parameters whose answers cite documents of the prompt alone; without citations, the parameters.

    Raises:
        RequestError: the parameters have a shape of their own, or as `Cited.pattern`.
    """
    if prompt.cited is not None and params.structured_outputs is not None:
        text = (
            "citations and structured outputs exclude each other: the pattern of citations is a shape of the whole answer; "
            "leave one out, or list the ids of the documents as an enum in your schema"
        )
        raise RequestError(text, param="citations")
    return _citing(params, prompt)


def _citing(params: SamplingParams, prompt: ParsedPrompt) -> SamplingParams:
    """Return parameters with the shape of answers that cite the documents which the prompt shows."""
    return params if prompt.cited is None else replace(params, structured_outputs=prompt.cited.shape(prompt.shown))


def with_adapters(prompts: Sequence[ParsedPrompt], requests: Any, cache_salt: str | None) -> list[ParsedPrompt]:
    """Return prompts whose salts name their adapters.

    Args:
        prompts: parsed prompts.
        requests: one `LoRARequest` or None for all prompts, or a list with one each.
        cache_salt: salt of the prompts that have none of their own.

    Raises:
        RequestError: the list has another length, or as `salt_for`.
    """
    listed = requests if isinstance(requests, list) else [requests] * len(prompts)
    if len(listed) != len(prompts):
        raise RequestError(f"{len(listed)} lora_request for {len(prompts)} prompts", param="lora_request")
    return [
        replace(prompt, cache_salt=salt_for(request, prompt.cache_salt or check_salt(cache_salt)))
        for prompt, request in zip(prompts, listed, strict=True)
    ]


def _salt(prompt: ParsedPrompt, salt: str | None) -> str | None:
    """Return the salt of a prompt: its own, or that of the call; with the call's adapter, unless it names one."""
    own = prompt.cache_salt
    return salt if own is None else own if split(own)[0] else salted(split(salt)[0], own)


def generate_batch(
    frontend: Frontend,
    prompts: Sequence[ParsedPrompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    priority: int | Sequence[int] = 0,
    *,
    cache_salt: str | None = None,
) -> Job[list[RequestOutput]]:
    """Check the arguments of `generate`, and return the job of all prompts.

    A focus scores all documents of a prompt before it answers. If the documents of all prompts exceed the KV pool, prompts run
    in groups that fit, so that an answer finds its documents in the cache.

    Args:
        frontend: frontend of the engine.
        prompts: parsed prompts.
        params: see `generate_job`.
        priority: see `generate_job`.
        cache_salt: see `generate_job`.

    Raises:
        RequestError: as `generate_job`.
        CapacityError: as `generate_job`.
    """
    if all(prompt.focus is None for prompt in prompts):
        return generate_job(frontend, prompts, params, priority, cache_salt=cache_salt)
    listed = frontend.sampling(params, len(prompts))
    ranks = check_priorities(priority, len(prompts))
    order = sorted(range(len(prompts)), key=ranks.__getitem__)
    groups = list(_groups(prompts, order, frontend.limits))
    jobs = [
        generate_job(
            frontend,
            [prompts[n] for n in group],
            None if params is None else [listed[n] for n in group],
            [ranks[n] for n in group],
            cache_salt=cache_salt,
        )
        for group in groups
    ]
    tokens, whole = sum(job.tokens for job in jobs), prompts[0].names.whole(prompts[0].layout)
    frontend.limits.check_tokens(tokens, _WITH_FOCUS, whole)
    places = [place for group in groups for place in group]

    def in_order(outputs: list[list[RequestOutput]]) -> list[RequestOutput]:
        by_place = dict(zip(places, chain.from_iterable(outputs), strict=True))
        return [by_place[place] for place in range(len(places))]

    return JobsInTurn(jobs, in_order)


def _groups(prompts: Sequence[ParsedPrompt], order: Iterable[int], limits: EngineLimits) -> Iterator[list[int]]:
    """Yield groups of prompts whose parts fit `_POOL_SHARE` of the pool together; a longer prompt is a group of its own."""
    room = _POOL_SHARE * limits.num_pages
    group: list[int] = []
    held: set[Hashable] = set()
    used = 0
    for place in order:
        parts = _parts(prompts[place], place)
        new = sum(-(-parts[part] // limits.block_size) for part in parts.keys() - held)
        if group and used + new > room:
            yield group
            group, held = [], set()
            used, new = 0, sum(-(-length // limits.block_size) for length in parts.values())
        group.append(place)
        held |= parts.keys()
        used += new
    yield group


def _parts(prompt: ParsedPrompt, place: int) -> dict[Hashable, int]:
    """Return the tokens of each part that the scores of a prompt leave in the cache for its answer, by what shares them."""
    if prompt.focus is None:
        return {}
    layout = prompt.layout
    prefix = (prompt.cache_salt, layout.part(layout.segments[0]).tobytes())
    parts: dict[Hashable, int] = {prefix: layout.prefix_len, place: layout.question_len}
    parts.update(((prefix, digest), length) for digest, length in zip(layout.chunk_digests, layout.chunk_lens, strict=True))
    return parts
