"""`LLM`: the Python API, with the engine in this process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, TypeVar, Unpack, overload

from tqdm import tqdm

from chunkattn.adapter_salt import LoRARequest, salt_for
from chunkattn.calls.decide import DecideOptions, decide_call
from chunkattn.calls.frontend import Frontend
from chunkattn.calls.generate import generate_batch, with_adapters
from chunkattn.calls.job import Job, answer, drive
from chunkattn.calls.job import Question as EngineQuestion
from chunkattn.calls.precompute import LookupOptions, PrecomputeOptions, precompute_job
from chunkattn.calls.rerank import RerankOptions, rerank_call
from chunkattn.calls.score_inputs import Items, ListedItems, ListedQueries, Query, ScoreOptions, score_call
from chunkattn.citations import CitationsLike
from chunkattn.config import make_config
from chunkattn.decisions import DecisionOutput, Question
from chunkattn.engine.build import build_core
from chunkattn.errors import ConfigError
from chunkattn.focus import FocusLike
from chunkattn.models.loader import open_files
from chunkattn.options import list_options
from chunkattn.outputs import CacheReport, RequestOutput, RerankOutput, ScoreOutput
from chunkattn.parsers import ParsedPrompt
from chunkattn.parsers.arguments import chat_options
from chunkattn.parsers.joined import ISOLATED
from chunkattn.parsers.prompt import DocumentLike, Documents, Prefix, Prompt
from chunkattn.parsers.states import State, States
from chunkattn.sampling_params import SamplingParams

T = TypeVar("T")

logger = logging.getLogger(__name__)


class LLM:
    """Model with its engine in this process.

    Threads may share one instance; their calls run one at a time. `AsyncLLM` runs many calls at once.

    Example:
        >>> llm = LLM(enable_chunk_aware=True)  # doctest: +SKIP
        >>> llm.generate("Read. # # A document. # # Another. # # A question?")  # doctest: +SKIP

    Args:
        model: local Hugging Face folder, GGUF file, hub id or `MODEL:QUANT`; None for the bundled demo model.
        **options: other fields of `chunkattn.config.EngineConfig`, by name.

    Raises:
        ConfigError: an option is unknown or invalid.
        ModelError: the checkpoint cannot be loaded.
        BackendError: the attention backend is unknown or does not support the model.
    """

    def __init__(self, model: str | PathLike[str] | None = None, **options: Any) -> None:
        self.config = make_config(model, options)
        if self.config.num_hosts > 1:
            raise ConfigError(f"num_hosts={self.config.num_hosts} needs `AsyncLLM` or `chunkattn serve`, not `LLM`")
        files = open_files(self.config)
        self.frontend = Frontend(self.config, files)  # checks options before the weights are loaded
        self.tokenizer, self.parser = self.frontend.tokenizer, self.frontend.parser
        self.core = build_core(self.config, files)
        self._lock = threading.RLock()  # one thread at a time may use the core
        self.limits = self.core.limits
        self.frontend.connect(self.limits)
        if self.config.warmup:
            self.warm_up()

    def warm_up(self, *, use_tqdm: bool = True) -> float:
        """Compile every program, except those of backends that a request names, before the first request needs it.

        Args:
            use_tqdm: show a progress bar when stderr is a terminal.

        Returns:
            Duration in seconds.
        """
        with self._lock, tqdm(unit="program", desc="warm-up", disable=None if use_tqdm else True, dynamic_ncols=True) as bar:

            def progress(done: int, total: int) -> None:
                bar.total, bar.n = total, done
                bar.refresh()

            return self.core.warm_up(progress)

    # Generation

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of calls that give none: the model's defaults, as `generation_config` says."""
        return self.frontend.default_sampling

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chunk_aware: bool | None = None,
        focus: FocusLike | None = None,
        chunk_mode: str = ISOLATED,
        citations: CitationsLike | None = None,
        cache_salt: str | None = None,
        lora_request: LoRARequest | list[LoRARequest | None] | None = None,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue one prompt or many. Chunk-aware and plain prompts may be mixed.

        Args:
            prompts: text, `{"prompt": ...}`, `{"prompt_token_ids": ...}`, `ChunkedPrompt` or `DocumentPrompt`, one or a list.
            sampling_params: one set of parameters for all prompts, or one each; None uses `get_default_sampling_params`.
            chunk_aware: split text and token ids at the separator; None takes the engine's `enable_chunk_aware`.
            focus: number of documents that each prompt chooses by its question, or a `chunkattn.focus.Focus`; for prompts that
                have none of their own. None shows all documents alike.
            chunk_mode: `"isolated"` makes every document a chunk. `"joined"` makes one chunk of all documents of a prompt, or
                of those that a focus chooses, in an order that ignores yours. Each then sees the documents before it.
            citations: whether the answers cite the documents of every `DocumentPrompt`: True, False, `"required"` or a
                `chunkattn.Citations`. Each document then begins with a marker, and an answer holds markers of its documents
                alone; `CompletionOutput.citations` lists them.
            cache_salt: salt of the cache; only requests of equal salt share cached blocks.
            lora_request: adapter of all prompts, or a list with one or None each. An adapter that `lora_modules` does not name
                is loaded first, which needs `enable_lora`; more than `max_loras` take turns. Adapters share no cached blocks.
            priority: one priority for all prompts, or one each; lower goes first.
            use_tqdm: show a progress bar on calls of more than 8 prompts when stderr is a terminal.

        Returns:
            One output per prompt, in order.

        Raises:
            RequestError: a prompt or parameter is invalid, or the checkpoint is a sequence classifier. The error comes before
                any prompt runs.
            EngineError: a step failed.
        """
        listed = self.frontend.parse(prompts, chunk_aware, focus, chunk_mode=chunk_mode, citations=citations)
        parsed = self._adapted(listed, lora_request, cache_salt)
        return self.run(generate_batch(self.frontend, parsed, sampling_params, priority), use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        documents: Sequence[DocumentLike] | None = None,
        focus: FocusLike | None = None,
        chunk_mode: str = ISOLATED,
        citations: CitationsLike | None = None,
        cache_salt: str | None = None,
        lora_request: LoRARequest | list[LoRARequest | None] | None = None,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many.

        Args:
            messages: one conversation, or a list of conversations.
            sampling_params: see `generate`; one set of parameters for all conversations, or one each.
            documents: texts or token ids, or `Document`s, that become the chunks of every conversation, texts in the engine's
                `document_template`. The text before the content of the first user message is the prefix, and the rest is the
                question.
            focus: see `generate`; needs documents.
            chunk_mode: see `generate`.
            citations: see `generate`.
            cache_salt: see `generate`.
            lora_request: see `generate`.
            priority: see `generate`.
            use_tqdm: see `generate`.
            chat_template: chat template in place of the tokenizer's own: a file, or the template itself.
            add_generation_prompt: whether the prompt ends with the beginning of an answer; None says so unless the last message
                is continued.
            continue_final_message: whether the prompt ends with the content of the last message, which the model continues.
            tools: functions that the chat template shows to the model, each `{"type": "function", "function": {"name", ...}}`.
            chat_template_kwargs: passed to the chat template, e.g. `{"enable_thinking": False}`.

        Raises:
            RequestError: the chat template is missing or unusable, documents have no user message to stand before, or as
                `generate`.
            NotRenderedError: the chat template leaves out a message or a part of it.
            EngineError: a step failed.
        """
        options = chat_options(chat_template_kwargs, chat_template, add_generation_prompt, continue_final_message, tools=tools)
        chats = self.frontend.parse_chat(messages, documents, options, focus, chunk_mode=chunk_mode, citations=citations)
        parsed = self._adapted(chats, lora_request, cache_salt)
        return self.run(generate_batch(self.frontend, parsed, sampling_params, priority), use_tqdm)

    def _adapted(self, prompts: list[ParsedPrompt], requests: Any, cache_salt: str | None) -> list[ParsedPrompt]:
        """Return prompts whose salts name their adapters, which are loaded."""
        adapted = with_adapters(prompts, requests, cache_salt)
        for request in requests if isinstance(requests, list) else [requests]:
            self._load(request)
        return adapted

    def _load(self, request: Any) -> None:
        """Load the adapter of a call, if the call brings one."""
        salt_for(request, None)
        if request is not None and (place := self.frontend.find_adapter(request)):
            with self._lock:
                self.core.load_adapter(request.lora_name, place[1])
            self.frontend.adapters[request.lora_name] = place

    # The cache

    @list_options(PrecomputeOptions, precompute_job)
    def precompute(
        self, prefix: Prefix, documents: Documents, *, use_tqdm: bool = True, **options: Unpack[PrecomputeOptions]
    ) -> CacheReport:
        """Compute the K/V of a prefix and documents ahead of use.

        Args:
            prefix: text or token ids exactly as in the later prompts; for `chat`, the messages before the first user message,
                such as the system message; an empty list before texts for chats without any.
            documents: texts or token ids, of the same kind as the prefix. Texts get the engine's `document_template`, as in
                `chat` and `DocumentPrompt`.
            use_tqdm: see `generate`.
            **options: see `chunkattn.calls.precompute.PrecomputeOptions`.

        Returns:
            Tokens and bytes of every document, and the number of documents that fit the pool together.

        Raises:
            RequestError: a part is malformed or too long. The error comes before anything is computed.
            CapacityError: `pin` is set and the documents do not all fit beside the blocks pinned already. No block of the call
                stays pinned.
            EngineError: a step failed.
        """
        self._load(options.get("lora_request"))
        return self.run(precompute_job(self.frontend, prefix, documents, **options), use_tqdm)

    @list_options(LookupOptions, precompute_job)
    def lookup(self, prefix: Prefix, documents: Documents, **options: Unpack[LookupOptions]) -> CacheReport:
        """Return which documents are in memory, as `done` and `was_cached`, without computing anything.

        Args:
            prefix: see `precompute`.
            documents: see `precompute`.
            **options: see `chunkattn.calls.precompute.LookupOptions`.

        Raises:
            RequestError: as `precompute`.
        """
        self._load(options.get("lora_request"))
        return self.run(precompute_job(self.frontend, prefix, documents, forget=False, **options), False)

    @list_options(LookupOptions, precompute_job)
    def forget(self, prefix: Prefix, documents: Documents, **options: Unpack[LookupOptions]) -> CacheReport:
        """Forget documents in memory and on disk. A block in memory is freed when the last pin or request releases it.

        Without documents, forget the prefix, which stays while the cache holds blocks below it.

        Args:
            prefix: see `precompute`.
            documents: see `precompute`.
            **options: see `chunkattn.calls.precompute.LookupOptions`.

        Returns:
            Report of the documents that were in memory, as from `lookup`.

        Raises:
            RequestError: as `precompute`.
        """
        self._load(options.get("lora_request"))
        return self.run(precompute_job(self.frontend, prefix, documents, forget=True, **options), False)

    def unpin(self, report: CacheReport) -> None:
        """Let the cache evict the blocks that `precompute(pin=True)` pinned.

        Args:
            report: return value of that call.
        """
        with self._lock:
            self.core.unpin(report.pin_ids)

    def metrics(self) -> str:
        """Return the engine's metrics in Prometheus' text format."""
        with self._lock:
            return self.core.metrics_text()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block in memory, including pinned blocks; the KV store keeps its parts.

        Returns:
            Whether every page is free: False while requests run.
        """
        self.frontend.scores.forget_cached()
        with self._lock:
            return self.core.reset_prefix_cache()

    def close(self) -> None:
        """Write pending parts to the KV store and close it. The engine continues without a store."""
        with self._lock:
            self.core.close_disk()

    # Scoring

    @overload
    def score(  # type: ignore[overload-overlap]  # a str is also a Sequence[str]
        self, query: Query | None = None, items: Items | None = None, *, use_tqdm: bool = True, **options: Unpack[ScoreOptions]
    ) -> ScoreOutput: ...

    @overload
    def score(
        self, query: ListedQueries, items: Items | ListedItems, *, use_tqdm: bool = True, **options: Unpack[ScoreOptions]
    ) -> list[ScoreOutput]: ...

    @list_options(ScoreOptions, score_call)
    def score(
        self,
        query: Query | ListedQueries | None = None,
        items: Items | ListedItems | None = None,
        *,
        use_tqdm: bool = True,
        **options: Unpack[ScoreOptions],
    ) -> ScoreOutput | list[ScoreOutput]:
        """Return P(label | query + item) for every item, exactly as if each item were sent alone.

        Args:
            query: text or token ids, or a list of either.
            items: texts or token ids, of the same kind as the query. For a list of queries, one list of items per query, or one
                list of items for all queries. Text is tokenized without special tokens.
            use_tqdm: see `generate`.
            **options: labels and how to score, see `chunkattn.calls.score_inputs.ScoreOptions`.

        Returns:
            One row of scores per item, one column per label or class; for a list of queries, one such output per query.

        Raises:
            RequestError: the query, items or labels are malformed. The error comes before any item is scored.
            EngineError: a step failed.
        """
        self._load(options.get("lora_request"))
        return self.run(score_call(self.frontend, query, items, **options), use_tqdm)

    @list_options(RerankOptions, rerank_call)
    def rerank(
        self,
        query: str,
        documents: Sequence[str | Sequence[int]],
        top_n: int | None = None,
        *,
        use_tqdm: bool = True,
        **options: Unpack[RerankOptions],
    ) -> RerankOutput:
        """Rank documents by their relevance to a query: the probability of "yes" against "no" as the model's answer.

        Instruction and query come first in the prompt, so that all documents share them; with `order="document_first"` each
        document comes first and stays in the cache. The text of special tokens in instruction, query or documents is tokenized
        as plain text.

        Args:
            query: text that documents are judged by.
            documents: texts, which get the rerank template alone, or token ids; an empty list gives no results.
            top_n: number of best documents to return; None returns all.
            use_tqdm: see `generate`.
            **options: template, cuts and how to score, see `chunkattn.calls.rerank.RerankOptions`.

        Returns:
            The best document first; documents of equal score keep their order.

        Raises:
            RequestError: an argument is invalid, or a document is too long and not cut. The error comes before any document is
                scored.
            EngineError: a step failed.
        """
        self._load(options.get("lora_request"))
        return self.run(rerank_call(self.frontend, query, documents, top_n, **options), use_tqdm)

    @overload
    def decide(  # type: ignore[overload-overlap]  # a str is also a Sequence[str]
        self,
        state: str | Mapping[str, Any],
        questions: Sequence[Question],
        *,
        use_tqdm: bool = True,
        **options: Unpack[DecideOptions],
    ) -> DecisionOutput: ...

    @overload
    def decide(
        self,
        state: Sequence[str],
        questions: Sequence[Question],
        *,
        use_tqdm: bool = True,
        **options: Unpack[DecideOptions],
    ) -> list[DecisionOutput]: ...

    @overload
    def decide(
        self,
        state: State | States,
        questions: Sequence[Question],
        *,
        use_tqdm: bool = True,
        **options: Unpack[DecideOptions],
    ) -> Any: ...

    @list_options(DecideOptions, decide_call)
    def decide(
        self,
        state: State | States,
        questions: Sequence[Question],
        *,
        use_tqdm: bool = True,
        **options: Unpack[DecideOptions],
    ) -> DecisionOutput | list[DecisionOutput]:
        """Answer typed questions about one state or about many, each exactly as if it were asked alone.

        A state is computed once and stays cached. The text of special tokens in state, questions and options is tokenized as
        plain text. Of a list of states, those in the cache run first.

        Args:
            state: text; JSON object, which becomes compact JSON; or messages, a list of objects that all have `role` and
                `content`, which become one line of compact JSON each. Any other list is a list of states, in which a state may
                also be a JSON array.
            questions: `Predicate`, `Choice` and `Rating`, at least one.
            use_tqdm: see `generate`.
            **options: documents, method and rendering, see `chunkattn.calls.decide.DecideOptions`.

        Returns:
            One answer per question, in order; for a list of states, a list with one such output per state, in order. The tokens
            of the calibration count as computed for the first state alone.

        Raises:
            RequestError: an argument is malformed, the chat template is missing, leaves reasoning open or changes the content,
                a label is not one token, or the checkpoint is a sequence classifier. The error comes before anything runs. For
                a list of states it names the state.
            NotRenderedError: the chat template leaves out the system message.
            CapacityError: a state or a question is too long, or the states exceed `max_tokens_per_call`.
            EngineError: a step failed.
        """
        self._load(options.get("lora_request"))
        return self.run(decide_call(self.frontend, state, questions, **options), use_tqdm)

    # The engine's loop

    def run(self, job: Job[T], use_tqdm: bool = True) -> T:
        """Run a job and return its result. A failed job releases its requests and pins.

        Args:
            job: job made with this engine's `frontend`.
            use_tqdm: see `generate`.

        Raises:
            CapacityError: the job does not fit beside pinned documents.
            EngineError: a step failed.
        """
        pins: list[str] = []
        try:
            with _progress(job.total, use_tqdm, job.unit) as bar:

                def advance() -> None:
                    bar.update(job.done - bar.n)

                def ask(question: EngineQuestion) -> list[Any]:
                    advance()
                    pins.extend(question.pins)
                    with self._lock:
                        return answer(self.core, question, advance)

                result = drive(job.flow(), ask)
                advance()
                return result
        except BaseException:
            if pins:  # a job without pins has no reason to wait for another thread's call
                with self._lock:
                    self.core.unpin(pins)
            raise


def _progress(total: int, shown: bool, unit: str) -> tqdm:
    """Return a progress bar, shown for more than 8 units when stderr is a terminal."""
    return tqdm(total=total, unit=unit, disable=None if shown and total > 8 else True, dynamic_ncols=True)
