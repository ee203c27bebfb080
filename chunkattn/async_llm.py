"""`AsyncLLM`: the asyncio API, with the engine in a separate process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any, Unpack, overload

from chunkattn.adapter_salt import LoRARequest
from chunkattn.calls.decide import DecideOptions, decide_call, method_job
from chunkattn.calls.generate import GenerateJob, generate_job, with_adapters
from chunkattn.calls.precompute import LookupOptions, PrecomputeOptions, precompute_job
from chunkattn.calls.rerank import RerankOptions, rerank_call
from chunkattn.calls.score_inputs import Items, ListedItems, ListedQueries, Query, ScoreOptions, score_call
from chunkattn.citations import CitationsLike
from chunkattn.decisions import DecisionOutput, Question
from chunkattn.errors import RequestError
from chunkattn.focus import FocusLike
from chunkattn.options import list_options
from chunkattn.outputs import CacheReport, RequestOutput, RerankOutput, ScoreOutput
from chunkattn.parsers import ParsedPrompt
from chunkattn.parsers.arguments import as_list, chat_options
from chunkattn.parsers.joined import ISOLATED
from chunkattn.parsers.prompt import DocumentLike, Documents, Prefix, Prompt
from chunkattn.parsers.states import State, States
from chunkattn.remote.async_runner import AsyncRunner
from chunkattn.sampling_params import SamplingParams


class AsyncLLM(AsyncRunner):
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
        chunk_mode: str = ISOLATED,
        citations: CitationsLike | None = None,
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
            chunk_mode: see `LLM.generate`; a `ParsedPrompt` has its own instead.
            citations: see `LLM.generate`; a `ParsedPrompt` has its own instead.
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
            if isinstance(prompt, ParsedPrompt):
                own = {"focus": focus is not None, "citations": citations is not None, "chunk_mode": chunk_mode != ISOLATED}
                if name := next((name for name, is_given in own.items() if is_given), None):
                    raise RequestError(f"a ParsedPrompt has a {name} of its own; leave {name} out", param=name)
                parsed = [prompt]
            else:
                parsed = self.frontend.parse([prompt], chunk_aware, focus, chunk_mode=chunk_mode, citations=citations)
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
        documents: Sequence[DocumentLike] | None = None,
        focus: FocusLike | None = None,
        chunk_mode: str = ISOLATED,
        citations: CitationsLike | None = None,
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
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation, and yield outputs as `generate` does.

        Args:
            messages: messages of the conversation.
            sampling_params: see `generate`.
            documents: texts or token ids that become chunks; see `LLM.chat`.
            focus: see `LLM.generate`; needs documents.
            chunk_mode: see `LLM.generate`.
            citations: see `LLM.generate`.
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
            tools: see `LLM.chat`.
            chat_template_kwargs: variables of the chat template.

        Raises:
            RequestError: the chat template is missing or unusable, documents have no user message to stand before, or as
                `generate`.
            NotRenderedError: the chat template leaves out a message or a part of it.
            ChunkAttnError: as `generate`.
        """

        def make() -> GenerateJob:
            options = chat_options(
                chat_template_kwargs, chat_template, add_generation_prompt, continue_final_message, tools=tools
            )
            chats = [as_list(messages, "messages")]
            parsed = self.frontend.parse_chat(chats, documents, options, focus, chunk_mode=chunk_mode, citations=citations)
            return self._job(parsed, sampling_params, priority, cache_salt, lora_request, final_only=final_only)

        return self._generate(make, request_id, timeout, snapshots, lora_request)

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
