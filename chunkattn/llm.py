"""`LLM`: the Python API, one engine in this process."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from typing import Any

import jax
import numpy as np
from scipy.special import softmax
from tqdm import tqdm

from chunkattn.backends import AttentionBackend, AttentionSpec, make_backend
from chunkattn.config import EngineConfig, SamplingParams
from chunkattn.engine.collect import OutputBuilder, token_decoder
from chunkattn.engine.compile_cache import enable_compile_cache
from chunkattn.engine.core import EngineCore
from chunkattn.engine.messages import (
    EngineOutput,
    GenerateRequest,
    PromptLogprobsOutput,
    RequestFailed,
    ScoreRequest,
    ScoreResult,
    TokenOutput,
)
from chunkattn.engine.runner import Runner, page_bytes
from chunkattn.errors import CapacityError, ConfigError, EngineError, RequestError
from chunkattn.models.loader import ModelFiles, open_model
from chunkattn.models.spec import DecoderSpec
from chunkattn.outputs import RequestOutput, ScoreOutput, ScoreUsage
from chunkattn.parsers import ChunkedPrompt, ParsedPrompt, PromptParser
from chunkattn.parsers.delimited import check_delimiter, check_no_delimiter, parse_delimited
from chunkattn.parsers.prompt import Prompt, check_ids
from chunkattn.scoring import ALGORITHMS, ScoreJob, select_algorithm

logger = logging.getLogger(__name__)

_DEFAULT_KV_BYTES = 1 << 30
_DEFAULT_KV_TOKENS = 1 << 18
_ACCELERATOR_SHARE = 0.85


class LLM:
    """A model with its engine.

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
        known = {f.name for f in fields(EngineConfig)}
        if unknown := sorted(set(options) - known):
            raise ConfigError(f"unknown option {unknown[0]!r}; options are {', '.join(sorted(known))}")
        self.config = EngineConfig(model=model, **options)
        config = self.config
        enable_compile_cache()
        # Everything that can be wrong with the options is found before the weights are read.
        files = open_model(
            model,
            tokenizer=config.tokenizer,
            revision=config.revision,
            dtype=config.dtype,
            skip_tokenizer_init=config.skip_tokenizer_init,
        )
        self.tokenizer, self._eos_token_ids = files.tokenizer, files.eos_token_ids
        self.parser = PromptParser(
            self.tokenizer,
            separator=config.chunk_separator,
            strategy=config.position_strategy,
            chunk_aware=config.enable_chunk_aware,
        )
        if config.multi_item_scoring_delimiter is not None:
            check_delimiter(self.tokenizer, config.multi_item_scoring_delimiter, files.spec.vocab_size)
        self.max_model_len = _max_model_len(config, files.spec)
        backend = _make_backend(config, files)
        decoder = files.load()
        num_pages = _num_pages(config, page_bytes(backend, files.spec.num_layers))  # of the memory the weights leave
        self.core = EngineCore(Runner(decoder, backend, num_pages, config.max_logprobs), config, self.max_model_len)
        self.limits = self.core.limits
        self._decode = token_decoder(self.tokenizer)
        self._next_id = 0

    # Generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chunk_aware: bool | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue one prompt or many, chunk-aware and plain ones mixed as you like.

        Args:
            prompts: text, `{"prompt": ...}`, `{"prompt_token_ids": ...}` or `ChunkedPrompt`, one or a list.
            sampling_params: for all prompts, or one each; defaults when None.
            chunk_aware: split text and ids at the separator; None is the engine's `enable_chunk_aware`.
            use_tqdm: show a progress bar on long batches, when stderr is a terminal.

        Returns:
            One output a prompt, in order.

        Raises:
            RequestError: a prompt or parameter is invalid; nothing of the batch has run then.
            EngineError: a step failed.
        """
        listed = [prompts] if isinstance(prompts, (str, Mapping, ChunkedPrompt)) else _as_list(prompts, "prompts")
        return self._generate([self.parser.parse(p, chunk_aware) for p in listed], sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        documents: Sequence[str] | None = None,
        use_tqdm: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many.

        Args:
            messages: a conversation, or a list of them.
            sampling_params: see `generate`.
            documents: become the chunks of every conversation; what comes before the first user
                message's content is the prefix, the rest the question.
            use_tqdm: see `generate`.
            chat_template_kwargs: passed to the chat template, e.g. `{"enable_thinking": False}`.

        Raises:
            RequestError: no user message, no usable chat template, or as `generate`.
            EngineError: a step failed.
        """
        listed = _as_list(messages, "messages")
        conversations = listed if listed and isinstance(listed[0], (list, tuple)) else [listed]
        options = dict(chat_template_kwargs or {})
        parsed = [self.parser.parse_chat(m, documents, **options) for m in conversations]
        return self._generate(parsed, sampling_params, use_tqdm)

    def _generate(
        self, prompts: list[ParsedPrompt], params: SamplingParams | Sequence[SamplingParams] | None, use_tqdm: bool
    ) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            listed = [params or SamplingParams()] * len(prompts)
        else:
            listed = _as_list(params, "sampling_params")
        if len(listed) != len(prompts):
            raise RequestError(f"{len(listed)} sampling_params for {len(prompts)} prompts", param="sampling_params")
        builders: dict[str, OutputBuilder] = {}
        requests = []
        for prompt, param in zip(prompts, listed, strict=True):
            if not isinstance(param, SamplingParams):
                raise RequestError(
                    f"sampling_params must be SamplingParams, got {type(param).__name__}", param="sampling_params"
                )
            if param.stop and self.tokenizer is None:
                raise RequestError("stop strings need a tokenizer and this engine has none; use stop_token_ids", param="stop")
            request = GenerateRequest(self._new_id(), prompt.layout, param, self._eos_token_ids)
            self.core.check(request)
            requests.append(request)
            builders[request.request_id] = OutputBuilder(request, prompt.text, self.tokenizer, self._decode)
        with _progress(len(requests), use_tqdm, "prompts") as bar, closing(self._drive(requests)) as events:
            for event in events:
                builder = builders[event.request_id]
                if isinstance(event, PromptLogprobsOutput):
                    builder.add_prompt_logprobs(event)
                elif isinstance(event, TokenOutput):
                    if builder.add_token(event):
                        self.core.stop(event.request_id, event.sample)
                    bar.update(builder.finished)
        return [b.output for b in builders.values()]

    # Scoring

    def score(
        self,
        query: str | Sequence[int] | None = None,
        items: Sequence[str] | Sequence[Sequence[int]] | None = None,
        *,
        label_token_ids: Sequence[int],
        apply_softmax: bool = False,
        item_first: bool = False,
        algorithm: str = "auto",
        packed_ids: Sequence[int] | None = None,
        use_tqdm: bool = True,
    ) -> ScoreOutput:
        """P(label | query + item) for every item, exactly as if each item were sent alone.

        Args:
            query: text or token ids.
            items: all text, or all token ids, as the query is. Text is tokenized without special tokens.
            label_token_ids: tokens whose probability after the item is the score.
            apply_softmax: normalise over the labels instead of the whole vocabulary.
            item_first: score item + query instead; nothing is shared then.
            algorithm: `"auto"`, `"serial"` or `"packed_segment"`; they agree.
            packed_ids: instead of query and items, `query<d>item<d>...item<d>` with the engine's
                `multi_item_scoring_delimiter`.
            use_tqdm: see `generate`.

        Returns:
            One row of scores an item, one column a label.

        Raises:
            RequestError: malformed query, items or labels; nothing has run then.
            EngineError: a step failed.
        """
        labels = tuple(check_ids(label_token_ids, "label_token_ids", "label_token_ids"))
        if not labels:
            raise RequestError("label_token_ids must hold at least one token id", param="label_token_ids")
        query_ids, item_ids, leading = self._score_ids(query, items, packed_ids)
        self._check_score(query_ids, item_ids, leading, labels)
        job = ScoreJob(query_ids, item_ids, leading, item_first, self._max_pack_tokens(len(query_ids)))
        chosen = select_algorithm(algorithm, job, self.limits.sliding_window)
        parts = ALGORITHMS[chosen](job)
        requests = [ScoreRequest(self._new_id(), p.layout, p.rows, labels) for p in parts]
        for request in requests:
            self.core.check(request)
        place = {r.request_id: p.items for r, p in zip(requests, parts, strict=True)}
        logprobs = np.zeros((len(item_ids), len(labels)), np.float32)
        with _progress(len(item_ids), use_tqdm, "items") as bar, closing(self._drive(requests)) as events:
            for event in events:
                if isinstance(event, ScoreResult):
                    logprobs[place[event.request_id]] = event.logprobs
                    bar.update(len(event.logprobs))
        values = logprobs.astype(np.float64)
        return ScoreOutput(
            scores=(softmax(values, axis=1) if apply_softmax else np.exp(values)).tolist(),
            logprobs=values.tolist(),
            algorithm=chosen,
            usage=ScoreUsage(len(leading) + len(query_ids) + sum(map(len, item_ids)), sum(len(p.layout) for p in parts)),
        )

    def _score_ids(
        self, query: Any, items: Any, packed_ids: Sequence[int] | None
    ) -> tuple[list[int], list[list[int]], list[int]]:
        """Token ids of query and items from whichever form they came in, and of text the leading special tokens."""
        delimiter = self.config.multi_item_scoring_delimiter
        if packed_ids is not None:
            if delimiter is None:
                raise RequestError("packed_ids need the engine option multi_item_scoring_delimiter", param="packed_ids")
            if query is not None or items is not None:
                raise RequestError("packed_ids come instead of query and items", param="packed_ids")
            return *parse_delimited(check_ids(packed_ids, "packed_ids", "packed_ids"), delimiter), []
        if query is None or items is None:
            raise RequestError("score needs a query and items", param="query" if query is None else "items")
        items = _as_list(items, "items")
        kinds = {isinstance(part, str) for part in (query, *items)}
        if len(kinds) > 1:
            raise RequestError("query and items must be all text or all token ids", param="items")
        encode = self.parser.encode
        if kinds == {False}:
            query_ids = check_ids(query, "query", "query")
            item_ids = [check_ids(item, f"items[{i}]", "items") for i, item in enumerate(items)]
        else:
            query_ids, item_ids = encode(query), [encode(item) for item in items]
        if not query_ids:
            raise RequestError("the query is empty", param="query")
        if delimiter is not None:
            check_no_delimiter(query_ids, item_ids, delimiter)
        return query_ids, item_ids, encode.leading_ids if kinds == {True} else []

    def _check_score(self, query: list[int], items: list[list[int]], leading: list[int], labels: tuple[int, ...]) -> None:
        """Every limit that does not depend on the algorithm, by the names the caller knows."""
        if len(items) > self.config.max_items_per_request:
            raise RequestError(
                f"{len(items)} items exceed max_items_per_request {self.config.max_items_per_request}", param="items"
            )
        limits, longest = self.limits, self.config.max_chunk_len
        named = [("query", query, "query"), *((f"item {i}", item, "items") for i, item in enumerate(items))]
        for name, ids, param in [*named, ("label_token_ids", labels, "label_token_ids")]:
            if ids and max(ids) >= limits.vocab_size:
                raise RequestError(f"{name}: token id {max(ids)} is outside the vocabulary of {limits.vocab_size}", param=param)
        for name, ids, param in named:
            total = len(leading) + len(query) + (len(ids) if name != "query" else 0)
            if name != "query" and len(ids) > longest:
                raise RequestError(f"{name} has {len(ids)} tokens, max_chunk_len is {longest}", param=param)
            if total > limits.max_model_len:
                raise CapacityError(
                    f"{name} of {len(ids)} tokens needs {total} positions with the query, max_model_len is "
                    f"{limits.max_model_len}",
                    param=param,
                )
            if total > limits.kv_tokens:
                raise CapacityError(
                    f"{name} of {len(ids)} tokens needs {total} KV slots with the query, the pool has {limits.kv_tokens}; "
                    "raise kv_cache_memory_bytes",
                    param=param,
                )

    def _max_pack_tokens(self, query: int) -> int:
        """Large enough that the query's share of a pack is small, small enough that several fit the pool."""
        return min(max(8192, 4 * query, self.config.max_num_batched_tokens), max(self.limits.kv_tokens // 4, query))

    # The engine's loop

    def _drive(self, requests: Sequence[GenerateRequest | ScoreRequest]) -> Generator[EngineOutput, None, None]:
        """Run requests to their end, yielding what the engine produces. Whatever happens, none is left behind."""
        try:
            for request in requests:
                self.core.add(request)
            while self.core.has_work:
                for event in self.core.step():
                    if isinstance(event, RequestFailed):
                        raise EngineError(f"request {event.request_id} failed in a step: {event.reason}")
                    yield event
        finally:
            for request in requests:
                self.core.abort(request.request_id)

    def _new_id(self) -> str:
        self._next_id += 1
        return str(self._next_id - 1)


def _as_list(values: Any, name: str) -> list[Any]:
    """Any iterable but text as a list.

    Raises:
        RequestError: not iterable, or one text or mapping where several values are expected.
    """
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise RequestError(f"{name} must be a list, got {type(values).__name__}", param=name)
    return list(values)


def _progress(total: int, wanted: bool, unit: str) -> tqdm:
    """A bar for long batches; silent where stderr is no terminal."""
    return tqdm(total=total, unit=unit, disable=None if wanted and total > 8 else True, dynamic_ncols=True)


def _max_model_len(config: EngineConfig, spec: DecoderSpec) -> int:
    limit = spec.max_model_len if spec.rotary.max_positions is None else min(spec.max_model_len, spec.rotary.max_positions)
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(f"max_model_len {config.max_model_len} exceeds the {limit} positions the checkpoint is made for")
    return config.max_model_len or limit


def _make_backend(config: EngineConfig, files: ModelFiles) -> AttentionBackend:
    spec = files.spec
    windows = tuple(dict.fromkeys(spec.windows))
    return make_backend(
        config.attention_backend,
        AttentionSpec(spec.num_heads, spec.num_kv_heads, spec.head_dim, files.dtype, config.block_size, windows),
    )


def _num_pages(config: EngineConfig, per_page: int) -> int:
    """Pages of the KV pool: what fits the memory it may have."""
    memory = config.kv_cache_memory_bytes or _default_kv_bytes(per_page, config.block_size)
    if memory < per_page:
        raise ConfigError(f"kv_cache_memory_bytes {memory} is less than one page of {per_page} bytes")
    num_pages = memory // per_page
    logger.info("KV pool: %d pages of %d tokens, %.2f GiB", num_pages, config.block_size, num_pages * per_page / 2**30)
    return num_pages


def _default_kv_bytes(per_page: int, block_size: int) -> int:
    """85% of an accelerator's memory less what the weights take; on CPU 1 GiB, or less where that is beyond 256K tokens."""
    stats = jax.devices()[0].memory_stats() or {}
    if jax.default_backend() != "cpu" and "bytes_limit" in stats:
        return int(stats["bytes_limit"] * _ACCELERATOR_SHARE) - stats.get("bytes_in_use", 0)
    return max(min(_DEFAULT_KV_BYTES, _DEFAULT_KV_TOKENS // block_size * per_page), per_page)
