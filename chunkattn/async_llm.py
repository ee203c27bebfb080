"""`AsyncLLM`: the asyncio API, with the engine in a separate process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from os import PathLike
from secrets import token_hex
from types import TracebackType
from typing import Any, TypeVar, Unpack, overload

from chunkattn.adapter_salt import LoRARequest, salt_for
from chunkattn.calls.decide import DecideOptions, decide_call, method_job
from chunkattn.calls.frontend import Frontend
from chunkattn.calls.generate import GenerateJob, OutputBuilder, generate_job, with_adapters
from chunkattn.calls.job import Ask, Flow, Job, LookUp, Returned, advance
from chunkattn.calls.precompute import LookupOptions, PrecomputeOptions, precompute_job
from chunkattn.calls.rerank import RerankOptions, rerank_call
from chunkattn.calls.score_inputs import Items, ListedItems, ListedQueries, Query, ScoreOptions, score_call
from chunkattn.config import SamplingParams, make_config
from chunkattn.decisions import DecisionOutput, Question
from chunkattn.engine.limits import EngineLimits
from chunkattn.errors import ConfigError, EngineDeadError, RequestError
from chunkattn.fair_threads import FairThreads
from chunkattn.focus import FocusLike
from chunkattn.models.loader import open_files
from chunkattn.options import list_options
from chunkattn.outputs import CacheReport, RequestOutput, RerankOutput, ScoreOutput, ScoreUsage
from chunkattn.parsers import ParsedPrompt
from chunkattn.parsers.arguments import as_list, chat_options
from chunkattn.parsers.prompt import Documents, Prefix, Prompt
from chunkattn.parsers.states import State, States
from chunkattn.remote.client import EngineClient
from chunkattn.remote.inflight import InflightRequests
from chunkattn.remote.messages import Checkpoint
from chunkattn.request_record import RECORD

T = TypeVar("T")
J = TypeVar("J", bound=Job[Any])


class AsyncLLM:
    """Model with an engine in a separate process, which is restarted when it dies or hangs.

    The instance belongs to the event loop it is started in. The engine is ready once the first programs are compiled. It
    compiles the others beside requests, the likeliest first, unless `warmup=False`.

    The engine's process inherits the environment variables of this process, but not its Python objects. Register your own
    attention backend through the entry-point group `chunkattn.backends`, since the engine cannot see a backend registered
    by the decorator. Set JAX options by variables instead of `jax.config`. This process itself uses no accelerator.

    Example:
        >>> async with AsyncLLM(enable_chunk_aware=True) as llm:  # doctest: +SKIP
        ...     async for output in llm.generate("Read. # # A document. # # Another. # # A question?"):
        ...         print(output.outputs[0].text)

    Args:
        model: local Hugging Face folder, GGUF file or hub id; None for the bundled demo model.
        **options: other fields of `chunkattn.config.EngineConfig`, by name.

    Attributes:
        client: client of the engine's process.
        config: options of the engine.

    Raises:
        ConfigError: an option is unknown or invalid.
    """

    def __init__(self, model: str | PathLike[str] | None = None, **options: Any) -> None:
        self.config = make_config(model, options)
        if self.config.host_index:
            raise ConfigError(f"host {self.config.host_index} of several takes no requests; run `chunkattn serve` on it")
        self.client = EngineClient(self.config, self._connect)
        self._frontend: Frontend | None = None
        self._generations: dict[str, tuple[InflightRequests, OutputBuilder | None]] = {}

    # Start and stop

    @classmethod
    async def start(cls, model: str | PathLike[str] | None = None, **options: Any) -> AsyncLLM:
        """Start an engine. The caller closes it with `close`.

        Args:
            model: see `AsyncLLM`.
            **options: see `AsyncLLM`.

        Raises:
            ConfigError, ModelError, BackendError: the engine cannot be built.
            EngineDeadError: the engine's process died three times.
        """
        llm = cls(model, **options)
        await llm.open()
        return llm

    async def open(self) -> None:
        """Start the engine and wait until it is ready, as `start` and `async with` do.

        Raises:
            ChunkAttnError: as `start`; the engine is then closed.
        """
        try:
            self.client.launch()
            files = await asyncio.to_thread(open_files, self.config)
            self._frontend = await asyncio.to_thread(Frontend, self.config, files)
            await self.client.start(Checkpoint.of(files))
        except BaseException:
            await self.close()
            raise

    async def __aenter__(self) -> AsyncLLM:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace_s: float | None = None) -> None:
        """Stop the engine. All waiting callers get `EngineDeadError`. A second call does nothing.

        Args:
            grace_s: seconds for the engine to finish its step and to write to its KV store; None is 60 with a store, else 10.
        """
        await self.client.close((60.0 if self.config.kv_store else 10.0) if grace_s is None else grace_s)

    @property
    def frontend(self) -> Frontend:
        """Return the frontend, which parses prompts.

        Raises:
            EngineDeadError: the engine has not been started.
        """
        if self._frontend is None:
            raise EngineDeadError("the engine has not been started")
        return self._frontend

    def _connect(self, limits: EngineLimits) -> None:
        self.frontend.connect(limits)

    @property
    def state(self) -> str:
        """Return `"starting"`, `"ready"`, `"restarting"`, `"failed"` or `"closed"`; see `EngineClient`."""
        return self.client.state

    @property
    def is_ready(self) -> bool:
        """Return whether the engine accepts requests."""
        return self.client.is_ready

    @property
    def is_warm(self) -> bool:
        """Return whether every program has been compiled ahead, so that no request waits for a compilation."""
        return self.client.is_warm

    @property
    def limits(self) -> EngineLimits:
        """Return the sizes and limits of the engine.

        Raises:
            EngineDeadError: the engine has never been ready.
        """
        if self.client.limits is None:
            raise EngineDeadError("the engine has not been started")
        return self.client.limits

    @property
    def decide_method(self) -> str | None:
        """Return the method of decisions by default; None before the model has been asked (see `find_decide_method`)."""
        return None if self._frontend is None else self._frontend.decide_method

    async def find_decide_method(self) -> str:
        """Return the method of decisions by default, and ask the model if no earlier start has.

        Raises:
            ChunkAttnError: as `run`.
        """
        return await self.run(partial(method_job, self.frontend))

    @property
    def threads(self) -> FairThreads:
        """Return the threads for the CPU work of calls. The work of each `chunkattn.fair_threads.OWNER` forms one queue."""
        return self.client.threads

    async def metrics(self) -> str:
        """Return the engine's metrics in Prometheus' text format.

        Raises:
            EngineDeadError: the engine is not ready, or dies.
        """
        return await self.client.metrics()

    # Generation

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of calls that give none; see `LLM.get_default_sampling_params`."""
        return self.frontend.default_sampling

    def generate(
        self,
        prompt: Prompt | ParsedPrompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        chunk_aware: bool | None = None,
        focus: FocusLike | None = None,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        timeout: float | None = None,
        final_only: bool = False,
        snapshots: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt, and yield the output so far whenever it grows.

        Closing the iterator or cancelling its task aborts the request. A slow caller misses intermediate outputs but always
        gets the last output.

        Args:
            prompt: text, `{"prompt": ...}`, `{"prompt_token_ids": ...}`, `ChunkedPrompt`, `DocumentPrompt` or `ParsedPrompt`.
            sampling_params: parameters of the text; None uses `get_default_sampling_params`.
            request_id: id for `abort`; None makes one up.
            chunk_aware: split text and token ids at the separator; None takes the engine's `enable_chunk_aware`.
            focus: see `LLM.generate`; a `ParsedPrompt` has its own instead.
            cache_salt: salt of the cache; only requests of equal salt share cached blocks.
            lora_request: adapter of the request; see `LLM.generate`.
            priority: rank in the queue; lower goes first.
            timeout: seconds after which the request is aborted.
            final_only: yield only the last output. After `abort`, this output may lack tokens.
            snapshots: whether to yield copies. If False, every iteration yields the same object, updated in place; read it
                before the next iteration. Copying takes time that grows with the square of the number of tokens.

        Raises:
            RequestError: the prompt or a parameter is invalid, or the checkpoint is a sequence classifier. The error comes
                before the request is sent.
            QueueFullError: `max_queued_requests` calls are under way already.
            EngineError: a step failed.
            EngineDeadError: the engine is not ready, or dies.
            DeadlineExceededError: `timeout` has passed.
        """

        def make() -> GenerateJob:
            if isinstance(prompt, ParsedPrompt) and focus is not None:
                raise RequestError("a ParsedPrompt has a focus of its own; leave focus out", param="focus")
            parsed = [prompt] if isinstance(prompt, ParsedPrompt) else self.frontend.parse([prompt], chunk_aware, focus)
            return self._job(parsed, sampling_params, priority, cache_salt, lora_request, final_only=final_only)

        return self._generate(make, request_id, timeout, snapshots, lora_request)

    def _job(
        self,
        parsed: list[ParsedPrompt],
        params: SamplingParams | None,
        priority: int,
        cache_salt: str | None,
        lora_request: LoRARequest | None,
        *,
        final_only: bool,
    ) -> GenerateJob:
        adapted = with_adapters(parsed, lora_request, cache_salt)
        return generate_job(self.frontend, adapted, params, priority, final_only=final_only)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        documents: Sequence[str | Sequence[int]] | None = None,
        focus: FocusLike | None = None,
        request_id: str | None = None,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        timeout: float | None = None,
        final_only: bool = False,
        snapshots: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation, and yield outputs as `generate` does.

        Args:
            messages: messages of the conversation.
            sampling_params: see `generate`.
            documents: texts or token ids that become chunks; see `LLM.chat`.
            focus: see `LLM.generate`; needs documents.
            request_id: see `generate`.
            cache_salt: see `generate`.
            lora_request: see `generate`.
            priority: see `generate`.
            timeout: see `generate`.
            final_only: see `generate`.
            snapshots: see `generate`.
            chat_template: see `LLM.chat`.
            add_generation_prompt: see `LLM.chat`.
            continue_final_message: see `LLM.chat`.
            chat_template_kwargs: variables of the chat template.

        Raises:
            RequestError: the chat template is missing or unusable, documents have no user message to stand before, or as
                `generate`.
            NotRenderedError: the chat template leaves out a message or a part of it.
            ChunkAttnError: as `generate`.
        """

        def make() -> GenerateJob:
            options = chat_options(chat_template_kwargs, chat_template, add_generation_prompt, continue_final_message)
            parsed = self.frontend.parse_chat([as_list(messages, "messages")], documents, options, focus)
            return self._job(parsed, sampling_params, priority, cache_salt, lora_request, final_only=final_only)

        return self._generate(make, request_id, timeout, snapshots, lora_request)

    def stream(
        self, job: GenerateJob | Callable[[], GenerateJob], *, timeout: float | None = None, snapshots: bool = True
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a job of one prompt made by `generate_job`, and yield outputs as `generate` does.

        Args:
            job: job made with this engine's `frontend`, or a function that makes the job off the event loop.
            timeout: see `generate`.
            snapshots: see `generate`.

        Raises:
            ChunkAttnError: as `generate`.
        """
        return self._generate(job, None, timeout, snapshots)

    async def _generate(
        self,
        made: GenerateJob | Callable[[], GenerateJob],
        request_id: str | None,
        timeout: float | None,
        snapshots: bool,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        name = token_hex(16) if request_id is None else request_id
        if not isinstance(name, str) or name in self._generations:
            raise RequestError(f"request_id must be a text no other running request has, got {name!r}", param="request_id")
        await self._load(lora_request)
        with self.client.call(_check_timeout(timeout)) as call:
            self._generations[name] = call, None
            try:
                job, flow, step = await call.prepare(_begin, (lambda: made) if isinstance(made, GenerateJob) else made)
                while not job.builders and not call.aborted and not isinstance(step, Returned):
                    answer = await self._answer(call, step)
                    if not call.aborted:  # else scores are missing
                        step = await call.prepare(advance, flow, answer)
                if call.aborted:  # before its start
                    return
                assert isinstance(step, Ask)
                (builder,) = job.builders
                builder.output.request_id = name
                self._generations[name] = call, builder
                call.send(step.requests, partial(step.take, stop=self.client.stop), quiet=job.final_only)
                ended = False
                while not ended:
                    await call.wait()
                    ended = builder.finished  # read before the yield, during which more outputs may arrive
                    if ended or not job.final_only:
                        output = builder.read()
                        yield snapshot(output) if snapshots and not ended else output
            finally:
                del self._generations[name]

    async def abort(self, request_id: str) -> None:
        """End a generation. Its last output has `finish_reason="abort"`.

        A generation that has not begun ends without an output. Ids that are not running are ignored, since the generation
        may just have finished.

        Args:
            request_id: id that was given to `generate` or `chat`.
        """
        call, builder = self._generations.get(request_id, (None, None))
        for completion in builder.read().outputs if builder else []:
            completion.finish_reason = completion.finish_reason or "abort"
        if call is not None:
            call.abort()

    # Scoring

    @overload
    async def score(  # type: ignore[overload-overlap]  # a str is also a Sequence[str]
        self,
        query: Query | None = None,
        items: Items | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> ScoreOutput: ...

    @overload
    async def score(
        self,
        query: ListedQueries,
        items: Items | ListedItems,
        *,
        timeout: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> list[ScoreOutput]: ...

    @list_options(ScoreOptions, score_call)
    async def score(
        self,
        query: Query | ListedQueries | None = None,
        items: Items | ListedItems | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> ScoreOutput | list[ScoreOutput]:
        """Return P(label | query + item) for every item; see `LLM.score`.

        Args:
            query: see `LLM.score`.
            items: see `LLM.score`.
            timeout: see `generate`.
            **options: labels and how to score, see `chunkattn.calls.score_inputs.ScoreOptions`.

        Raises:
            RequestError: the query, items or labels are malformed. The error comes before any request is sent.
            ChunkAttnError: as `generate`.
        """
        await self._load(options.get("lora_request"))
        return await self.run(partial(score_call, self.frontend, query, items, **options), timeout)

    @list_options(RerankOptions, rerank_call)
    async def rerank(
        self,
        query: str,
        documents: Sequence[str | Sequence[int]],
        top_n: int | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[RerankOptions],
    ) -> RerankOutput:
        """Rank documents by their relevance to a query; see `LLM.rerank`.

        Args:
            query: see `LLM.rerank`.
            documents: see `LLM.rerank`.
            top_n: see `LLM.rerank`.
            timeout: see `generate`.
            **options: template, cuts and how to score, see `chunkattn.calls.rerank.RerankOptions`.

        Raises:
            RequestError: an argument is invalid, or a document is too long and not cut. The error comes before any request is
                sent.
            ChunkAttnError: as `generate`.
        """
        await self._load(options.get("lora_request"))
        return await self.run(partial(rerank_call, self.frontend, query, documents, top_n, **options), timeout)

    @overload
    async def decide(  # type: ignore[overload-overlap]  # a str is also a Sequence[str]
        self,
        state: str | Mapping[str, Any],
        questions: Sequence[Question],
        *,
        timeout: float | None = None,
        **options: Unpack[DecideOptions],
    ) -> DecisionOutput: ...

    @overload
    async def decide(
        self,
        state: Sequence[str],
        questions: Sequence[Question],
        *,
        timeout: float | None = None,
        **options: Unpack[DecideOptions],
    ) -> list[DecisionOutput]: ...

    @overload
    async def decide(
        self,
        state: State | States,
        questions: Sequence[Question],
        *,
        timeout: float | None = None,
        **options: Unpack[DecideOptions],
    ) -> Any: ...

    @list_options(DecideOptions, decide_call)
    async def decide(
        self,
        state: State | States,
        questions: Sequence[Question],
        *,
        timeout: float | None = None,
        **options: Unpack[DecideOptions],
    ) -> DecisionOutput | list[DecisionOutput]:
        """Answer typed questions about one state or many, each exactly as if it were asked alone; see `LLM.decide`.

        Args:
            state: see `LLM.decide`.
            questions: see `LLM.decide`.
            timeout: see `generate`.
            **options: method and rendering, see `chunkattn.calls.decide.DecideOptions`.

        Raises:
            RequestError: as `LLM.decide`. The error comes before any request is sent.
            ChunkAttnError: as `generate`.
        """
        await self._load(options.get("lora_request"))
        return await self.run(partial(decide_call, self.frontend, state, questions, **options), timeout)

    # The cache

    @list_options(PrecomputeOptions, precompute_job)
    async def precompute(
        self, prefix: Prefix, documents: Documents, *, timeout: float | None = None, **options: Unpack[PrecomputeOptions]
    ) -> CacheReport:
        """Compute the K/V of a prefix and documents ahead of use. Cached and pinned blocks are lost when the engine dies.

        Args:
            prefix: text or token ids exactly as in the later prompts, or the messages before the first user message; an empty
                list before texts for chats without any.
            documents: texts or token ids, of the same kind as the prefix. Texts get the engine's `document_template`, as in
                `chat` and `DocumentPrompt`.
            timeout: see `generate`.
            **options: see `chunkattn.calls.precompute.PrecomputeOptions`.

        Returns:
            Tokens and bytes of every document, and the number of documents that fit the pool together.

        Raises:
            RequestError: a part is malformed or too long. The error comes before any request is sent.
            CapacityError: `pin` is set and the documents do not all fit. No block of the call stays pinned.
            ChunkAttnError: as `generate`.
        """
        await self._load(options.get("lora_request"))
        return await self.run(partial(precompute_job, self.frontend, prefix, documents, **options), timeout)

    @list_options(LookupOptions, precompute_job)
    async def lookup(self, prefix: Prefix, documents: Documents, **options: Unpack[LookupOptions]) -> CacheReport:
        """Return which documents are in memory, as `done` and `was_cached`, without computing anything.

        Args:
            prefix: see `precompute`.
            documents: see `precompute`.
            **options: see `chunkattn.calls.precompute.LookupOptions`.

        Raises:
            RequestError: as `precompute`.
            QueueFullError: `max_queued_requests` calls are under way already.
            EngineDeadError: the engine is not ready, or dies.
        """
        await self._load(options.get("lora_request"))
        return await self.run(partial(precompute_job, self.frontend, prefix, documents, forget=False, **options))

    @list_options(LookupOptions, precompute_job)
    async def forget(self, prefix: Prefix, documents: Documents, **options: Unpack[LookupOptions]) -> CacheReport:
        """Forget documents in memory and on disk. A block in memory is freed when the last pin or request releases it.

        Args:
            prefix: see `precompute`.
            documents: see `precompute`.
            **options: see `chunkattn.calls.precompute.LookupOptions`.

        Returns:
            Report of the documents that were in memory, as from `lookup`.

        Raises:
            RequestError: as `precompute`.
            QueueFullError: `max_queued_requests` calls are under way already.
            EngineDeadError: the engine is not ready, or dies.
        """
        await self._load(options.get("lora_request"))
        return await self.run(partial(precompute_job, self.frontend, prefix, documents, forget=True, **options))

    async def unpin(self, report: CacheReport) -> None:
        """Let the cache evict the blocks that `precompute(pin=True)` pinned.

        Args:
            report: return value of that call.
        """
        self.client.unpin(report.pin_ids)

    async def reset_prefix_cache(self) -> bool:
        """Forget every cached block in memory, including pinned blocks; the KV store keeps its parts.

        Returns:
            Whether every page is free: False while requests run.

        Raises:
            EngineDeadError: the engine is not ready, or dies.
        """
        self.frontend.scores.forget_cached()
        return await self.client.reset_cache()

    # The engine's loop

    async def run(self, make: Callable[[], Job[T]], timeout: float | None = None) -> T:
        """Make a job, run it and return its result. Slow CPU work runs in a thread.

        Args:
            make: makes a job with this engine's `frontend`.
            timeout: see `generate`.

        Raises:
            ChunkAttnError: the job or a request cannot be made, or as `InflightRequests.finish`.
        """
        pins: list[str] = []
        with self.client.call(_check_timeout(timeout)) as call:
            try:
                _, flow, step = await call.prepare(_begin, make)
                while not isinstance(step, Returned):
                    pins += step.pins
                    step = await call.prepare(advance, flow, await self._answer(call, step))
            except BaseException:
                call.abort()  # before `unpin`, so that the engine pins nothing afterwards
                self.client.unpin(pins)
                raise
        result: T = step.value
        _count_usage(result)
        return result

    async def _load(self, request: Any) -> None:
        """Load the adapter of a call, if the call brings one."""
        salt_for(request, None)
        if request is not None and request.lora_path:
            await self.client.load_adapter(request.lora_name, request.lora_path)

    async def _answer(self, call: InflightRequests, question: Ask | LookUp) -> Sequence[Any]:
        """Return the engine's answer to a question; nothing if the call is aborted."""
        if isinstance(question, LookUp):
            return await call.ask(self.client.look_up(question.requests, forget=question.forget))
        await call.finish(question.requests, partial(question.take, stop=self.client.stop))
        return [] if call.aborted else question.answer


def _begin(make: Callable[[], J]) -> tuple[J, Flow[Any], Ask | LookUp | Returned[Any]]:
    """Make a job and run its flow up to the first question or its end, in a thread: both may take long."""
    job = make()
    flow = job.flow()
    return job, flow, advance(flow)


def snapshot(output: RequestOutput) -> RequestOutput:
    """Return a copy that a caller may keep while the original grows."""
    copies = [
        replace(o, token_ids=list(o.token_ids), logprobs=None if o.logprobs is None else list(o.logprobs))
        for o in output.outputs
    ]
    return replace(output, outputs=copies)


def _count_usage(result: Any) -> None:
    """Add the usage of scores, a ranking or decisions to the record of the request that asked for them."""
    if (record := RECORD.get()) is not None:
        for output in result if isinstance(result, list) else [result]:
            if isinstance(usage := getattr(output, "usage", None), ScoreUsage):
                record.count(usage.prompt_tokens, usage.cached_tokens, usage.computed_tokens)


def _check_timeout(timeout: float | None) -> float | None:
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, Real) or not timeout > 0):
        raise RequestError(f"timeout must be a number of seconds above 0, got {timeout!r}", param="timeout")
    return timeout
