"""`AsyncLLM`: the asyncio API, the engine in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from secrets import token_hex
from types import TracebackType
from typing import Any, TypeVar, Unpack, overload

from tqdm import tqdm

from chunkattn.calls.frontend import Frontend
from chunkattn.calls.generate import GenerateJob, generate_job
from chunkattn.calls.job import Job
from chunkattn.calls.precompute import precompute_job
from chunkattn.calls.score import Items, ListedItems, ListedQueries, Query, ScoreOptions, rerank_job, score_job
from chunkattn.config import SamplingParams, make_config
from chunkattn.engine.build import open_files
from chunkattn.engine.messages import EngineLimits, EngineOutput, Message
from chunkattn.errors import EngineDeadError, RequestError
from chunkattn.outputs import CacheReport, RequestOutput, RerankOutput, ScoreOutput
from chunkattn.parsers import ParsedPrompt
from chunkattn.parsers.arguments import as_list
from chunkattn.parsers.prompt import Prompt
from chunkattn.remote.client import EngineClient
from chunkattn.remote.control_messages import Checkpoint
from chunkattn.remote.inflight import InflightRequests
from chunkattn.scoring.rerank import RerankTemplate

T = TypeVar("T")


class AsyncLLM:
    """A model whose engine runs in a process of its own, which is started again when it dies or hangs.

    Belongs to the event loop it is started in. Compiles every step variant at the start unless `warmup=False`; when the
    engine is started again, beside its first requests. The engine's process sees this one's environment variables but none of
    its Python objects: an attention backend of your own must come through the entry-point group `chunkattn.backends`, one
    registered by decorator alone is not found, and JAX options must be set by variables, not by `jax.config`. This process
    itself uses no accelerator.

    Example:
        >>> async with AsyncLLM(enable_chunk_aware=True) as llm:  # doctest: +SKIP
        ...     async for output in llm.generate("Read. # # A document. # # Another. # # A question?"):
        ...         print(output.outputs[0].text)

    Args:
        model: a local Hugging Face folder, a hub id, or None for the bundled demo model.
        **options: see `chunkattn.config.EngineConfig`.

    Attributes:
        client: of the engine's process.
        config: as given.

    Raises:
        ConfigError: an option is unknown or invalid.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.config = make_config(model, options)
        self.client = EngineClient(self.config, self._connect, self._warming)
        self._bar: tqdm | None = None
        self._frontend: Frontend | None = None
        self._generations: dict[str, tuple[InflightRequests, GenerateJob | None]] = {}

    # Life

    @classmethod
    async def start(cls, model: str | None = None, **options: Any) -> AsyncLLM:
        """A started engine, to be closed with `close`.

        Raises:
            ConfigError, ModelError, BackendError: it cannot be built.
            EngineDeadError: its process died three times.
        """
        llm = cls(model, **options)
        await llm.open()
        return llm

    async def open(self) -> None:
        """Start the engine and wait until it is ready; what `start` and `async with` do.

        Raises:
            ChunkAttnError: as `start`; the engine is closed then.
        """
        try:
            files = await asyncio.to_thread(open_files, self.config)
            self._frontend = await asyncio.to_thread(Frontend, self.config, files)
            await self.client.start(Checkpoint.of(files))
        except BaseException:
            await self.close()
            raise

    def _warming(self, done: int, total: int) -> None:
        """Show the progress of the warm-up, where stderr is a terminal."""
        if self._bar is None:
            self._bar = tqdm(total=total, unit="program", desc="warm-up", disable=None, dynamic_ncols=True)
        self._bar.update(done - self._bar.n)
        if done == total:
            self._bar.close()

    async def __aenter__(self) -> AsyncLLM:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace_s: float | None = None) -> None:
        """End the engine; all callers get `EngineDeadError`. Closing twice is fine.

        Args:
            grace_s: seconds it gets to finish its step and to write to its KV store; None is 60 with a store, else 10.
        """
        await self.client.close((60.0 if self.config.kv_store else 10.0) if grace_s is None else grace_s)

    @property
    def frontend(self) -> Frontend:
        """Parses what users send.

        Raises:
            EngineDeadError: not started.
        """
        if self._frontend is None:
            raise EngineDeadError("the engine has not been started")
        return self._frontend

    def _connect(self, limits: EngineLimits) -> None:
        self.frontend.connect(limits)

    @property
    def state(self) -> str:
        """`"starting"`, `"ready"`, `"restarting"`, `"failed"` or `"closed"`; see `EngineClient`."""
        return self.client.state

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self.client.is_ready

    @property
    def limits(self) -> EngineLimits:
        """What the engine can hold.

        Raises:
            EngineDeadError: it has never been ready.
        """
        if self.client.limits is None:
            raise EngineDeadError("the engine has not been started")
        return self.client.limits

    async def metrics(self) -> str:
        """The engine's metrics in Prometheus' text format.

        Raises:
            EngineDeadError: it is not ready, or dies.
        """
        return await self.client.metrics()

    # Generation

    def generate(
        self,
        prompt: Prompt | ParsedPrompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        chunk_aware: bool | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        final_only: bool = False,
        snapshots: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt, yielding all there is so far whenever there is more.

        Closing the iterator or cancelling its task aborts the request. A slow caller misses intermediate outputs, never
        the last one.

        Args:
            prompt: text, `{"prompt": ...}`, `{"prompt_token_ids": ...}`, `ChunkedPrompt`, or one parsed already.
            sampling_params: defaults when None.
            request_id: for `abort`; one is made up when None.
            chunk_aware: split text and ids at the separator; None is the engine's `enable_chunk_aware`.
            cache_salt: share the cache with requests of the same salt alone.
            priority: the lower goes first.
            timeout: seconds until it is aborted.
            final_only: yield the last output alone; of a request that `abort` has ended, it may lack tokens.
            snapshots: yield copies. False yields one output that grows, for callers who read it before they ask for the
                next: copying all tokens at every token takes time in the square of their number.

        Raises:
            RequestError: prompt or parameters are invalid, or the checkpoint is a sequence classifier; nothing has been
                sent then.
            QueueFullError: `max_queued_requests` are on their way already.
            EngineError: a step failed.
            EngineDeadError: the engine is not ready, or died.
            DeadlineExceededError: `timeout` has passed.
        """

        def make() -> GenerateJob:
            parsed = [prompt] if isinstance(prompt, ParsedPrompt) else self.frontend.parse([prompt], chunk_aware)
            return generate_job(self.frontend, parsed, sampling_params, priority, cache_salt=cache_salt, final_only=final_only)

        return self._generate(make, request_id, timeout, snapshots)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        documents: Sequence[str] | None = None,
        request_id: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        final_only: bool = False,
        snapshots: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation, yielding as `generate` does.

        Args:
            messages: the conversation.
            sampling_params: see `generate`.
            documents: become its chunks; see `LLM.chat`.
            request_id: see `generate`.
            cache_salt: see `generate`.
            priority: see `generate`.
            timeout: see `generate`.
            final_only: see `generate`.
            snapshots: see `generate`.
            chat_template_kwargs: passed to the chat template.

        Raises:
            RequestError: no user message, no usable chat template, or as `generate`.
            ChunkAttnError: as `generate`.
        """

        def make() -> GenerateJob:
            parsed = self.frontend.parse_chat([as_list(messages, "messages")], documents, chat_template_kwargs)
            return generate_job(self.frontend, parsed, sampling_params, priority, cache_salt=cache_salt, final_only=final_only)

        return self._generate(make, request_id, timeout, snapshots)

    def stream(
        self, job: GenerateJob, *, timeout: float | None = None, snapshots: bool = True
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a job of one prompt that `generate_job` has made, yielding as `generate` does.

        Args:
            job: of this engine's `frontend`.
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
    ) -> AsyncGenerator[RequestOutput, None]:
        name = token_hex(16) if request_id is None else request_id
        if not isinstance(name, str) or name in self._generations:
            raise RequestError(f"request_id must be a text no other running request has, got {name!r}", param="request_id")
        with self.client.call(_check_timeout(timeout)) as call:
            self._generations[name] = call, None
            try:
                job = made if isinstance(made, GenerateJob) else await call.prepare(made)
                if call.done:  # aborted before it began
                    return
                (builder,) = job.builders
                builder.output.request_id = name
                self._generations[name] = call, job
                (requests,) = job.stages()
                call.send(requests, partial(self._take, job), quiet=job.final_only)
                ended = False
                while not ended:
                    await call.wait()
                    ended = builder.finished  # before the caller gets its turn, in which more may come
                    if ended or not job.final_only:
                        output = builder.read()
                        yield snapshot(output) if snapshots and not ended else output
            finally:
                del self._generations[name]

    async def abort(self, request_id: str) -> None:
        """End a generation, wherever it is awaited; its last output says `finish_reason="abort"`.

        Ids not running are ignored, for it may just have finished. One that has not begun ends without any output.
        """
        call, job = self._generations.get(request_id, (None, None))
        for completion in job.result()[0].outputs if job else []:
            completion.finish_reason = completion.finish_reason or "abort"
        if call is not None:
            call.abort()

    # Scoring

    @overload
    async def score(  # type: ignore[overload-overlap]  # a str is a Sequence[str], too
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

    async def score(
        self,
        query: Query | ListedQueries | None = None,
        items: Items | ListedItems | None = None,
        *,
        labels: Sequence[str] | None = None,
        label_token_ids: Sequence[int] | None = None,
        apply_softmax: bool = False,
        item_first: bool = False,
        algorithm: str | None = None,
        packed_ids: Sequence[int] | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> ScoreOutput | list[ScoreOutput]:
        """P(label | query + item) for every item; arguments are those of `LLM.score`.

        Args:
            query: text or token ids, or a list of either.
            items: all text, or all token ids, as the query is; for a list of queries, a list of items each, or one list of
                items for all of them. Text is tokenized without special tokens.
            labels: texts of one token each, whose probability after the item is the score; or
            label_token_ids: the tokens themselves. A sequence classifier takes neither: its scores are the softmax over its
                classes, or the sigmoid of its only one.
            apply_softmax: normalise over the labels instead of the whole vocabulary; nothing to a classifier.
            item_first: score item + query instead.
            algorithm: see `LLM.score`.
            packed_ids: see `LLM.score`.
            cache_salt: see `generate`.
            priority: see `generate`.
            timeout: see `generate`.

        Raises:
            RequestError: malformed query, items or labels; nothing has been sent then.
            ChunkAttnError: as `generate`.
        """
        return await self._run(
            partial(
                score_job,
                self.frontend,
                query,
                items,
                labels=labels,
                label_token_ids=label_token_ids,
                apply_softmax=apply_softmax,
                item_first=item_first,
                algorithm=algorithm,
                packed_ids=packed_ids,
                cache_salt=cache_salt,
                priority=priority,
            ),
            timeout,
        )

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        *,
        instruction: str | None = None,
        template: RerankTemplate | str | None = None,
        max_tokens_per_doc: int | None = None,
        algorithm: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> RerankOutput:
        """Rank documents by their relevance to a query: the chance of "yes" against "no" as the model's answer.

        Instruction and query come first in the prompt, so all documents share them. Special tokens written in instruction,
        query or documents are tokenized as text.

        Args:
            query: what documents are judged by.
            documents: texts; `[]` gives no results.
            top_n: how many of the best to return; None is all.
            instruction: what the query wants, instead of the template's own.
            template: one's name (`chunkattn.scoring.rerank.TEMPLATES`) or your own; None picks by the model's name.
            max_tokens_per_doc: a document's tokens beyond these are cut; None cuts nothing.
            algorithm: see `score`.
            cache_salt: see `generate`.
            priority: see `generate`.
            timeout: see `generate`.

        Returns:
            The best first, equal ones as they came.

        Raises:
            RequestError: an argument is invalid, or a document too long and not cut; nothing has been sent then.
            ChunkAttnError: as `generate`.
        """
        return await self._run(
            partial(
                rerank_job,
                self.frontend,
                query,
                documents,
                top_n,
                instruction=instruction,
                template=template,
                max_tokens_per_doc=max_tokens_per_doc,
                algorithm=algorithm,
                cache_salt=cache_salt,
                priority=priority,
            ),
            timeout,
        )

    # The cache

    async def precompute(
        self,
        prefix: str | Sequence[int] | Sequence[Mapping[str, Any]],
        documents: Sequence[str] | Sequence[Sequence[int]],
        *,
        pin: bool = False,
        cache_salt: str | None = None,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> CacheReport:
        """Compute the K/V of a prefix and documents ahead of use. Nothing stays, pinned or not, when the engine dies.

        Args:
            prefix: as it will stand in the prompts, text or token ids, or the messages before the first of the user's.
            documents: all text, or all token ids, as the prefix is.
            pin: keep them until `unpin`, whatever else needs pages.
            cache_salt: see `generate`.
            priority: see `generate`.
            chat_template_kwargs: as they will be given to `chat`.
            timeout: see `generate`.

        Returns:
            Tokens and bytes of every document, and how many fit the pool together.

        Raises:
            RequestError: malformed or too long; nothing has been sent then.
            CapacityError: `pin` and not all of them fit; nothing stays pinned then.
            ChunkAttnError: as `generate`.
        """
        return await self._run(
            partial(
                precompute_job,
                self.frontend,
                prefix,
                documents,
                cache_salt=cache_salt,
                pin=pin,
                template_options=chat_template_kwargs,
                priority=priority,
            ),
            timeout,
        )

    async def lookup(
        self,
        prefix: str | Sequence[int] | Sequence[Mapping[str, Any]],
        documents: Sequence[str] | Sequence[Sequence[int]],
        *,
        cache_salt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> CacheReport:
        """As `precompute`, but nothing is computed: `done` and `was_cached` tell which documents are in memory now.

        Raises:
            RequestError: as `precompute`.
            QueueFullError: `max_queued_requests` are on their way already.
            EngineDeadError: the engine is not ready, or dies.
        """
        return await self._ask_cache(prefix, documents, cache_salt, chat_template_kwargs, forget=False)

    async def forget(
        self,
        prefix: str | Sequence[int] | Sequence[Mapping[str, Any]],
        documents: Sequence[str] | Sequence[Sequence[int]],
        *,
        cache_salt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> CacheReport:
        """Forget documents, in memory as soon as no request or pin holds them, and on disk; see `precompute`.

        Returns:
            What was in memory, as `lookup`.

        Raises:
            RequestError: as `precompute`.
            QueueFullError: `max_queued_requests` are on their way already.
            EngineDeadError: the engine is not ready, or dies.
        """
        return await self._ask_cache(prefix, documents, cache_salt, chat_template_kwargs, forget=True)

    async def _ask_cache(
        self,
        prefix: str | Sequence[int] | Sequence[Mapping[str, Any]],
        documents: Sequence[str] | Sequence[Sequence[int]],
        cache_salt: str | None,
        template_options: Mapping[str, Any] | None,
        *,
        forget: bool,
    ) -> CacheReport:
        make = partial(
            precompute_job, self.frontend, prefix, documents, cache_salt=cache_salt, template_options=template_options
        )
        with self.client.call() as call:
            job = await call.prepare(make)
            stages = job.stages()
            while (stage := await call.prepare(next, stages, None)) is not None:
                job.note(stage, await self.client.look_up(stage, forget=forget))
            return job.found()

    async def unpin(self, report: CacheReport) -> None:
        """Let what a `precompute(pin=True)` pinned be evicted again."""
        self.client.unpin(report.pin_ids)

    async def reset_prefix_cache(self) -> bool:
        """Forget every cached block, pinned ones too, not what is on disk.

        Returns:
            Whether every page is free: False while requests run.

        Raises:
            EngineDeadError: the engine is not ready, or dies.
        """
        self.frontend.scores.forget_cached()
        return await self.client.reset_cache()

    # The engine's loop

    async def _run(self, make: Callable[[], Job[T]], timeout: float | None) -> T:
        """Make a job and run its stages one after the other. Whatever takes long on the CPU runs in a thread.

        Raises:
            ChunkAttnError: the job or a stage cannot be made, or as `InflightRequests.finish`.
        """

        def begin() -> tuple[Job[T], Iterator[Sequence[Message]], Sequence[Message] | None]:
            job = make()
            stages = iter(job.stages())
            return job, stages, next(stages, None)

        with self.client.call(_check_timeout(timeout)) as call:
            job, stages, stage = await call.prepare(begin)
            try:
                while stage is not None:
                    await call.finish(stage, partial(self._take, job))
                    stage = await call.prepare(next, stages, None)
            except BaseException:
                call.abort()  # first, so that nothing gets pinned after the engine has heard of the unpinning
                self.client.unpin(job.pins)
                raise
            return await asyncio.to_thread(job.result)

    def _take(self, job: Job[T], output: EngineOutput) -> bool:
        taken = job.take(output)
        if taken.stop is not None:
            self.client.stop(output.request_id, taken.stop)
        return taken.ended


def snapshot(output: RequestOutput) -> RequestOutput:
    """Return a copy that a caller may keep while the original grows."""
    copies = [
        replace(o, token_ids=list(o.token_ids), logprobs=None if o.logprobs is None else list(o.logprobs))
        for o in output.outputs
    ]
    return replace(output, outputs=copies)


def _check_timeout(timeout: float | None) -> float | None:
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, Real) or not timeout > 0):
        raise RequestError(f"timeout must be a number of seconds above 0, got {timeout!r}", param="timeout")
    return timeout
