"""`LLM`: the Python API, one engine in this process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Unpack, overload

from tqdm import tqdm

from chunkattn.calls.frontend import Frontend
from chunkattn.calls.generate import generate_job
from chunkattn.calls.job import Job
from chunkattn.calls.precompute import precompute_job
from chunkattn.calls.score import Items, ListedItems, ListedQueries, Query, ScoreOptions, rerank_job, score_job
from chunkattn.config import SamplingParams, make_config
from chunkattn.engine.build import build_core, open_files
from chunkattn.engine.messages import EngineOutput, Message, RequestFailed
from chunkattn.errors import CapacityError, EngineError
from chunkattn.outputs import CacheReport, RequestOutput, RerankOutput, ScoreOutput
from chunkattn.parsers.prompt import Prompt
from chunkattn.scoring.rerank import RerankTemplate

T = TypeVar("T")

logger = logging.getLogger(__name__)


class LLM:
    """A model with its engine.

    Threads may share one: their calls run one after the other. `AsyncLLM` runs many at once.

    Example:
        >>> llm = LLM(enable_chunk_aware=True)  # doctest: +SKIP
        >>> llm.generate("Read. # # A document. # # Another. # # A question?")  # doctest: +SKIP

    Args:
        model: a local Hugging Face folder, a hub id, or None for the bundled demo model.
        **options: see `chunkattn.config.EngineConfig`.

    Raises:
        ConfigError: an option is unknown or invalid.
        ModelError: the checkpoint cannot be loaded.
        BackendError: the attention backend is unknown or does not support the model.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.config = make_config(model, options)
        files = open_files(self.config)
        self.frontend = Frontend(self.config, files)  # checks the options that need no weights
        self.tokenizer, self.parser = self.frontend.tokenizer, self.frontend.parser
        self.core = build_core(self.config, files)
        self._lock = threading.RLock()  # the core is for one thread at a time
        self.limits = self.core.limits
        self.frontend.connect(self.limits)
        if self.config.warmup:
            self.warm_up()

    def warm_up(self, *, use_tqdm: bool = True) -> float:
        """Compile every step variant now instead of when a request first needs it. Returns seconds."""
        with self._lock, tqdm(unit="program", desc="warm-up", disable=None if use_tqdm else True, dynamic_ncols=True) as bar:

            def progress(done: int, total: int) -> None:
                bar.total, bar.n = total, done
                bar.refresh()

            return self.core.warm_up(progress)

    # Generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chunk_aware: bool | None = None,
        cache_salt: str | None = None,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue one prompt or many, chunk-aware and plain ones mixed as you like.

        Args:
            prompts: text, `{"prompt": ...}`, `{"prompt_token_ids": ...}` or `ChunkedPrompt`, one or a list.
            sampling_params: for all prompts, or one each; defaults when None.
            chunk_aware: split text and ids at the separator; None is the engine's `enable_chunk_aware`.
            cache_salt: share the cache with requests of the same salt alone.
            priority: for all prompts, or one each; the lower goes first.
            use_tqdm: show a progress bar on long batches, when stderr is a terminal.

        Returns:
            One output a prompt, in order.

        Raises:
            RequestError: a prompt or parameter is invalid, or the checkpoint is a sequence classifier; nothing of the
                batch has run then.
            EngineError: a step failed.
        """
        parsed = self.frontend.parse(prompts, chunk_aware)
        return self._run(generate_job(self.frontend, parsed, sampling_params, priority, cache_salt=cache_salt), use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        documents: Sequence[str] | None = None,
        cache_salt: str | None = None,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many.

        Args:
            messages: a conversation, or a list of them.
            sampling_params: see `generate`.
            documents: become the chunks of every conversation; what comes before the first user
                message's content is the prefix, the rest the question.
            cache_salt: see `generate`.
            priority: see `generate`.
            use_tqdm: see `generate`.
            chat_template_kwargs: passed to the chat template, e.g. `{"enable_thinking": False}`.

        Raises:
            RequestError: no user message, no usable chat template, or as `generate`.
            EngineError: a step failed.
        """
        parsed = self.frontend.parse_chat(messages, documents, chat_template_kwargs)
        return self._run(generate_job(self.frontend, parsed, sampling_params, priority, cache_salt=cache_salt), use_tqdm)

    # The cache

    def precompute(
        self,
        prefix: str | Sequence[int] | Sequence[Mapping[str, Any]],
        documents: Sequence[str] | Sequence[Sequence[int]],
        *,
        pin: bool = False,
        cache_salt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> CacheReport:
        """Compute the K/V of a prefix and documents ahead of use.

        Args:
            prefix: as it will stand in the prompts, text or token ids; for `chat`, the messages before the
                first of the user's, such as the system message.
            documents: all text, or all token ids, as the prefix is.
            pin: keep them until `unpin`, whatever else needs pages.
            cache_salt: see `generate`.
            chat_template_kwargs: as they will be given to `chat`.
            use_tqdm: see `generate`.

        Returns:
            Tokens and bytes of every document, and how many fit the pool together.

        Raises:
            RequestError: malformed or too long; nothing has run then.
            CapacityError: `pin` and not all of them fit beside what is pinned already; nothing stays pinned then.
            EngineError: a step failed.
        """
        job = precompute_job(
            self.frontend, prefix, documents, cache_salt=cache_salt, pin=pin, template_options=chat_template_kwargs
        )
        return self._run(job, use_tqdm)

    def lookup(
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
        """
        return self._look_up(prefix, documents, cache_salt, chat_template_kwargs, forget=False)

    def forget(
        self,
        prefix: str | Sequence[int] | Sequence[Mapping[str, Any]],
        documents: Sequence[str] | Sequence[Sequence[int]],
        *,
        cache_salt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> CacheReport:
        """Forget documents, in memory as soon as no pin holds them, and on disk; see `precompute`.

        Without documents the prefix is meant, which stays as long as something stands behind it.

        Returns:
            What was in memory, as `lookup`.

        Raises:
            RequestError: as `precompute`.
        """
        return self._look_up(prefix, documents, cache_salt, chat_template_kwargs, forget=True)

    def _look_up(
        self,
        prefix: str | Sequence[int] | Sequence[Mapping[str, Any]],
        documents: Sequence[str] | Sequence[Sequence[int]],
        cache_salt: str | None,
        template_options: Mapping[str, Any] | None,
        *,
        forget: bool,
    ) -> CacheReport:
        job = precompute_job(self.frontend, prefix, documents, cache_salt=cache_salt, template_options=template_options)
        for stage in job.stages():
            with self._lock:
                job.note(stage, [self.core.look_up(request, forget=forget, checked=True) for request in stage])
        return job.found()

    def unpin(self, report: CacheReport) -> None:
        """Let what a `precompute(pin=True)` pinned be evicted again."""
        with self._lock:
            self.core.unpin(report.pin_ids)

    def metrics(self) -> str:
        """The engine's metrics in Prometheus' text format."""
        with self._lock:
            return self.core.metrics_text()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block, pinned ones too, not what is on disk. Returns whether every page is free."""
        self.frontend.scores.forget_cached()
        with self._lock:
            return self.core.reset_prefix_cache()

    def close(self) -> None:
        """Write what is left to the KV store and close it; the engine goes on without."""
        with self._lock:
            self.core.close_disk()

    # Scoring

    @overload
    def score(  # type: ignore[overload-overlap]  # a str is a Sequence[str], too
        self, query: Query | None = None, items: Items | None = None, *, use_tqdm: bool = True, **options: Unpack[ScoreOptions]
    ) -> ScoreOutput: ...

    @overload
    def score(
        self, query: ListedQueries, items: Items | ListedItems, *, use_tqdm: bool = True, **options: Unpack[ScoreOptions]
    ) -> list[ScoreOutput]: ...

    def score(
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
        use_tqdm: bool = True,
    ) -> ScoreOutput | list[ScoreOutput]:
        """P(label | query + item) for every item, exactly as if each item were sent alone.

        Args:
            query: text or token ids, or a list of either.
            items: all text, or all token ids, as the query is; for a list of queries, a list of items each, or one list of
                items for all of them. Text is tokenized without special tokens.
            labels: texts of one token each, whose probability after the item is the score; or
            label_token_ids: the tokens themselves. A sequence classifier takes neither: its scores are the softmax over its
                classes, or the sigmoid of its only one.
            apply_softmax: normalise over the labels instead of the whole vocabulary; nothing to a classifier.
            item_first: score item + query instead; nothing is shared then.
            algorithm: `"auto"`, `"serial"`, `"packed_segment"`, `"prefill_extend"` or `"packed_dense"`; they agree. None is
                the engine's `score_algorithm`.
            packed_ids: instead of query and items, `query<d>item<d>...item<d>` with the engine's
                `multi_item_scoring_delimiter`.
            cache_salt: see `generate`.
            priority: see `generate`.
            use_tqdm: see `generate`.

        Returns:
            One row of scores an item, one column a label or class; for a list of queries, a list of such.

        Raises:
            RequestError: malformed query, items or labels; nothing has run then.
            EngineError: a step failed.
        """
        job = score_job(
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
        )
        return self._run(job, use_tqdm)

    def rerank(
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
        use_tqdm: bool = True,
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
            use_tqdm: see `generate`.

        Returns:
            The best first, equal ones as they came.

        Raises:
            RequestError: an argument is invalid, or a document too long and not cut; nothing has run then.
            EngineError: a step failed.
        """
        job = rerank_job(
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
        )
        return self._run(job, use_tqdm)

    # The engine's loop

    def _run(self, job: Job[T], use_tqdm: bool) -> T:
        """Run a job's stages one after the other. Nothing of a job that fails stays behind."""
        try:
            with _progress(job.total, use_tqdm, job.unit) as bar:
                for stage in job.stages():
                    self._run_stage(stage, job, bar)
        except BaseException:
            with self._lock:
                self.core.unpin(job.pins)
            raise
        return job.result()

    def _run_stage(self, requests: Sequence[Message], job: Job[T], bar: tqdm) -> None:
        wanted = {request.request_id for request in requests}
        with self._lock:
            try:
                for request in requests:
                    self.core.add(request, checked=True)
                while self.core.has_work:
                    outputs = self.core.step()
                    for output in outputs:
                        if output.request_id in wanted:
                            self._take(output, job)
                            bar.update(job.done - bar.n)
                    if self.core.disk is not None and self.core.has_precomputed(outputs):
                        self.core.disk.catch_up()
            finally:
                for request in requests:
                    self.core.abort(request.request_id)

    def _take(self, output: EngineOutput, job: Job[T]) -> None:
        if isinstance(output, RequestFailed):
            if output.param:
                raise CapacityError(output.reason, param=output.param)
            raise EngineError(f"request {output.request_id} failed in a step: {output.reason}")
        if (stop := job.take(output).stop) is not None:
            self.core.stop(output.request_id, stop)


def _progress(total: int, wanted: bool, unit: str) -> tqdm:
    """A bar for long batches; silent where stderr is no terminal."""
    return tqdm(total=total, unit=unit, disable=None if wanted and total > 8 else True, dynamic_ncols=True)
