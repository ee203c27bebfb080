"""What stands between users and messages: parsing, checks by the names users know, and outputs.

`LLM` and `AsyncLLM` differ in how they move messages; this they share.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import count
from numbers import Integral
from typing import Any

from chunkattn.config import EngineConfig, SamplingParams
from chunkattn.engine.collect import OutputBuilder, token_decoder
from chunkattn.engine.intake import Intake
from chunkattn.engine.messages import (
    CachedTokens,
    EngineLimits,
    GenerateRequest,
    PrecomputeRequest,
    PrecomputeResult,
)
from chunkattn.errors import CapacityError, ConfigError, RequestError
from chunkattn.models.loader import ModelFiles
from chunkattn.outputs import CachedDocument, CacheReport
from chunkattn.parsers import ChunkedPrompt, ParsedPrompt, PromptParser
from chunkattn.parsers.delimited import check_delimiter, check_no_delimiter, parse_delimited
from chunkattn.parsers.prompt import Prompt, check_ids, check_salt
from chunkattn.rope.positions import make_layout
from chunkattn.scoring import ScorePlanner, ScoringJob
from chunkattn.scoring.labels import resolve_labels
from chunkattn.scoring.queries import ScoringJobs, pair_queries
from chunkattn.scoring.rerank import RerankJob, RerankTemplate, pick_template, plan_rerank


def make_config(model: str | None, options: Mapping[str, Any]) -> EngineConfig:
    """Engine options by name.

    Raises:
        ConfigError: an option is unknown or invalid.
    """
    known = {f.name for f in fields(EngineConfig)}
    if unknown := sorted(set(options) - known):
        raise ConfigError(f"unknown option {unknown[0]!r}; options are {', '.join(sorted(known))}")
    return EngineConfig(model=model, **options)


class Frontend:
    """Makes messages of what users send, and what users get of the outputs.

    Attributes:
        limits: of the engine; None until it is known.
    """

    def __init__(self, config: EngineConfig, files: ModelFiles) -> None:
        self.config = config
        self.tokenizer, self._eos_token_ids = files.tokenizer, files.eos_token_ids
        self.parser = PromptParser(
            self.tokenizer,
            separator=config.chunk_separator,
            strategy=config.position_strategy,
            chunk_aware=config.enable_chunk_aware,
            special_tokens_in_documents=config.special_tokens_in_documents,
            special_tokens_in_prompts=config.special_tokens_in_prompts,
        )
        if config.multi_item_scoring_delimiter is not None:
            check_delimiter(self.tokenizer, config.multi_item_scoring_delimiter, files.spec.vocab_size)
        self._decode = token_decoder(self.tokenizer)
        self._ids = count()
        self.scores = ScorePlanner(config)

    def connect(self, limits: EngineLimits) -> None:
        """Learn what the engine can hold; before that nothing can be checked."""
        self.limits = limits
        self.intake = Intake(self.config, limits)
        self.scores.connect(limits)

    def _new_id(self) -> str:
        return str(next(self._ids))

    # Generation

    def parse(self, prompts: Prompt | Sequence[Prompt], chunk_aware: bool | None, cache_salt: str | None) -> list[ParsedPrompt]:
        """One prompt or many.

        Raises:
            RequestError: one is malformed, or the checkpoint is no language model.
        """
        self.intake.check_generates()
        listed = [prompts] if isinstance(prompts, (str, ChunkedPrompt, Mapping)) else as_list(prompts, "prompts")
        return self.salted([self.parser.parse(p, chunk_aware) for p in listed], cache_salt)

    def parse_chat(
        self, messages: Any, documents: Sequence[str] | None, options: Mapping[str, Any] | None, cache_salt: str | None
    ) -> list[ParsedPrompt]:
        """One conversation or many.

        Raises:
            RequestError: as `parse`.
        """
        self.intake.check_generates()
        listed = as_list(messages, "messages")
        conversations = listed if listed and isinstance(listed[0], (list, tuple)) else [listed]
        return self.salted([self.parser.parse_chat(m, documents, **(options or {})) for m in conversations], cache_salt)

    def salted(self, prompts: list[ParsedPrompt], cache_salt: str | None) -> list[ParsedPrompt]:
        """Prompts under a salt, where they have none of their own.

        Raises:
            RequestError: it is no text.
        """
        if (salt := check_salt(cache_salt)) is None:
            return prompts
        return [replace(p, cache_salt=p.cache_salt or salt) for p in prompts]

    def generation(
        self,
        prompts: list[ParsedPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] = 0,
    ) -> list[tuple[GenerateRequest, OutputBuilder]]:
        """Checked requests and what builds their outputs.

        Raises:
            RequestError: one is invalid, or the lists differ in length.
        """
        listed = _one_each(SamplingParams() if params is None else params, SamplingParams, prompts, "sampling_params")
        jobs = []
        for prompt, param, rank in zip(prompts, listed, _one_each(priority, Integral, prompts, "priority"), strict=True):
            if param.stop and self.tokenizer is None:
                raise RequestError("stop strings need a tokenizer and this engine has none; use stop_token_ids", param="stop")
            request = GenerateRequest(self._new_id(), prompt.layout, param, self._eos_token_ids, prompt.cache_salt, int(rank))
            self.intake.check(request)
            jobs.append((request, OutputBuilder(request, prompt.text, self.tokenizer, self._decode)))
        return jobs

    # The cache

    def precompute(
        self,
        prefix: Any,
        documents: Any,
        cache_salt: str | None,
        pin: bool,
        options: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> PrecomputeJob:
        """Checked requests that fill the cache, and what tells about it.

        Raises:
            RequestError: a part is malformed or too long.
            CapacityError: `pin` and the pool is too small for all of them.
        """
        if not self.config.enable_prefix_caching:
            raise RequestError("this engine keeps nothing: enable_prefix_caching is False", param="documents")
        if not isinstance(pin, bool):
            raise RequestError(f"pin must be True or False, got {pin!r}", param="pin")
        (rank,) = _one_each(priority, Integral, [None], "priority")
        prefix_ids, chunks = self.parser.parse_cache(prefix, documents, options)
        if not prefix_ids and not chunks:
            raise RequestError("there is neither a prefix nor a document", param="documents")
        shared, strategy = self.config.position_strategy == "shared", self.config.position_strategy
        # Under shared positions every document stands alone; else all of them are one sequence.
        groups = [[number] for number in range(len(chunks))] if shared and chunks else [list(range(len(chunks)))]
        requests: list[PrecomputeRequest] = []
        places: dict[int, tuple[str, int]] = {}
        for group in groups:
            layout = make_layout(prefix_ids, [chunks[number] for number in group], [], strategy)
            if not len(layout):
                continue  # an empty document behind an empty prefix
            request = PrecomputeRequest(self._new_id(), layout, check_salt(cache_salt), pin, priority=int(rank))
            try:
                self.intake.check(request)
            except RequestError as error:
                name = f"document {group[0]}" if len(group) == 1 else "document"
                text = str(error).replace("chunk 0" if len(group) == 1 else "chunk", name)
                raise type(error)(text, param="documents") from None
            places |= {number: (request.request_id, place) for place, number in enumerate(group)}
            requests.append(request)
        job = PrecomputeJob(requests, places, prefix_ids, chunks, self.limits)
        if pin:
            job.check_room()
        return job

    # Scoring

    def score_call(
        self, query: Any, items: Any, labels: Sequence[str] | None, label_token_ids: Sequence[int] | None, **options: Any
    ) -> ScoringJob | ScoringJobs:
        """What a call of `LLM.score` has to run: one query, or a list of them. Options are those of `scoring`.

        Raises:
            RequestError: malformed queries, items or labels; of a list, the query is named.
        """
        ids = self._labels(labels, label_token_ids)
        pairs = None if options["packed_ids"] is not None else pair_queries(query, items)
        if pairs is None:
            return self.scoring(query, items, ids, **options)
        jobs = []
        for number, (one, its_items) in enumerate(pairs):
            try:
                jobs.append(self.scoring(one, its_items, ids, **options))
            except RequestError as error:
                raise type(error)(f"query {number}: {error}", param=error.param) from None
        return ScoringJobs(jobs, self.config.max_num_batched_tokens)

    def _labels(self, labels: Sequence[str] | None, label_token_ids: Sequence[int] | None) -> tuple[int, ...]:
        if (classes := self.limits.num_labels) is None:
            return resolve_labels(self.parser.encode, labels, label_token_ids)
        if labels is not None or label_token_ids is not None:
            given = "label_token_ids" if labels is None else "labels"
            reason = f"this checkpoint is a sequence classifier and scores its own {classes} classes; leave {given} out"
            raise RequestError(reason, param=given)
        return ()

    def rerank_call(
        self,
        query: str,
        documents: Sequence[str],
        template: RerankTemplate | str | None,
        *,
        algorithm: str | None,
        cache_salt: str | None,
        priority: int,
        **options: Any,
    ) -> RerankJob:
        """What a call of `LLM.rerank` has to run. Other options are those of `plan_rerank`.

        Raises:
            RequestError: an argument is malformed, a document too long, or the checkpoint a classifier of several classes.
        """
        if (classes := self.limits.num_labels) not in (None, 1):
            raise RequestError(f"only a classifier of one class can rerank, this has {classes}; score it", param="documents")
        if isinstance(documents, Sequence):
            self._check_count(documents, "documents")
        encode = self.parser.encode
        picked, special = pick_template(template, self.config.model, encode), self.config.special_tokens_in_documents
        plan = plan_rerank(encode, picked, query, documents, special_tokens=special, **options)
        plan.check_room(self.limits, self.config.max_chunk_len)
        try:
            job = self.scoring(
                plan.prefix,
                plan.items,
                plan.labels if classes is None else (),
                apply_softmax=True,
                item_first=False,
                algorithm=algorithm,
                packed_ids=None,
                cache_salt=cache_salt,
                priority=priority,
                delimited=False,
            )
        except RequestError as error:  # by the names of this call
            names = {"items": "documents", "label_token_ids": "template"}
            raise type(error)(str(error), param=names.get(error.param or "", error.param)) from None
        return RerankJob(plan, job)

    def scoring(
        self,
        query: Any,
        items: Any,
        labels: tuple[int, ...],
        *,
        apply_softmax: bool,
        item_first: bool,
        algorithm: str | None,
        packed_ids: Sequence[int] | None,
        cache_salt: str | None = None,
        priority: int = 0,
        delimited: bool = True,
    ) -> ScoringJob:
        """Checked requests of one query with its items, and what builds its output.

        With `delimited`, no part may hold the engine's delimiter, if it has one.

        Raises:
            RequestError: malformed query, items or labels.
        """
        (rank,) = _one_each(priority, Integral, [None], "priority")
        query_ids, item_ids, leading = self._score_ids(query, items, packed_ids)
        if delimited and packed_ids is None and (delimiter := self.config.multi_item_scoring_delimiter) is not None:
            check_no_delimiter(query_ids, item_ids, delimiter)
        self._check_score(query_ids, item_ids, leading, labels)
        job = self.scores.plan(
            self.scores.job(query_ids, item_ids, leading, item_first and not self._delimited()),
            algorithm,
            labels,
            apply_softmax=apply_softmax,
            cache_salt=check_salt(cache_salt),
            priority=int(rank),
            new_id=self._new_id,
        )
        for request in job.requests:
            self.intake.check(request)
        return job

    def _delimited(self) -> bool:
        """Whether sequences are laid out as delimiters have it, the query first; warns, for another order was asked for."""
        delimited = self.config.multi_item_scoring_delimiter is not None
        if delimited:
            warnings.warn("item_first is ignored: this engine has a multi_item_scoring_delimiter", stacklevel=4)
        return delimited

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
        items = as_list(items, "items")
        self._check_count(items, "items")
        kinds = {isinstance(part, str) for part in (query, *items)}
        if len(kinds) > 1:
            raise RequestError("query and items must be all text or all token ids", param="items")
        encode = self.parser.encode
        if kinds == {False}:
            query_ids = check_ids(query, "query", "query")
            item_ids = [check_ids(item, f"items[{i}]", "items") for i, item in enumerate(items)]
        else:
            read = self.parser.prompts
            query_ids = read(query, "query", "query")
            item_ids = [read(item, f"item {i}", "items") for i, item in enumerate(items)]
        if not query_ids:
            raise RequestError("the query is empty", param="query")
        return query_ids, item_ids, encode.leading_ids if kinds == {True} else []

    def _check_count(self, items: Sequence[Any], name: str) -> None:
        """Before anything is tokenized."""
        if len(items) > (most := self.config.max_items_per_request):
            raise RequestError(f"{len(items)} {name} exceed max_items_per_request {most}", param=name)

    def _check_score(self, query: list[int], items: list[list[int]], leading: list[int], labels: tuple[int, ...]) -> None:
        """Every limit that does not depend on the algorithm, by the names the caller knows."""
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


class PrecomputeJob:
    """Precompute requests, and the report of what they did.

    Args:
        requests: one a document, or one for all of them.
        places: of every document that is not empty, or whose prefix is not: its request, and its chunk there.
        prefix: token ids.
        documents: token ids each.
        limits: of the engine.
    """

    def __init__(
        self,
        requests: list[PrecomputeRequest],
        places: dict[int, tuple[str, int]],
        prefix: list[int],
        documents: list[list[int]],
        limits: EngineLimits,
    ) -> None:
        self.requests, self.limits = requests, limits
        self._places, self._prefix, self._documents = places, prefix, documents
        self._cached: dict[str, CachedTokens] = {}

    def add(self, event: PrecomputeResult) -> None:
        """Take one request's result."""
        self._cached[event.request_id] = event.cached

    def found(self, cached: Sequence[CachedTokens]) -> CacheReport:
        """The report when nothing was computed.

        Args:
            cached: what is in memory of each request.
        """
        pairs = zip(self.requests, cached, strict=True)
        self._cached = {r.request_id: c for r, c in pairs}
        report = self.report()
        return replace(report, documents=[replace(d, done=d.was_cached) for d in report.documents])

    def check_room(self) -> None:
        """Check that the pool holds all documents at once.

        Raises:
            CapacityError: it does not.
        """
        report = self.report()
        if report.fits < len(report.documents):
            raise CapacityError(
                f"{len(report.documents)} documents of {report.total_bytes} bytes cannot all be pinned: the pool of "
                f"{report.pool_bytes} bytes holds the first {report.fits}",
                param="documents",
            )

    def report(self) -> CacheReport:
        """Sizes of the parts, and how many of the documents the pool holds."""
        limits, documents, fits = self.limits, [], 0
        page = -(-len(self._prefix) // limits.block_size)
        room, seen = limits.num_pages - page, set()
        for number, ids in enumerate(self._documents):
            pages = -(-len(ids) // limits.block_size)
            request_id, place = self._places.get(number, ("", 0))
            cached = self._cached.get(request_id)
            was_cached = not ids or (cached is not None and cached.chunks[place] == len(ids))
            documents.append(CachedDocument(len(ids), pages * limits.page_bytes, was_cached, cached is not None or not ids))
            room -= 0 if tuple(ids) in seen else pages  # one that comes again shares its pages
            seen.add(tuple(ids))
            fits += room >= 0
        return CacheReport(
            prefix_tokens=len(self._prefix),
            prefix_bytes=page * limits.page_bytes,
            documents=documents,
            pool_bytes=limits.num_pages * limits.page_bytes,
            fits=fits,
            pin_ids=tuple(r.request_id for r in self.requests if r.pin and r.request_id in self._cached),
        )


def as_list(values: Any, name: str) -> list[Any]:
    """Any iterable but text as a list.

    Raises:
        RequestError: not iterable, or one text or mapping where several values are expected.
    """
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise RequestError(f"{name} must be a list, got {type(values).__name__}", param=name)
    return list(values)


def _one_each(value: Any, kind: type, prompts: Sequence[Any], name: str) -> list[Any]:
    """One value for all prompts, or a list with one for each.

    Raises:
        RequestError: of another type, or not as many as prompts.
    """
    what = "an integer" if kind is Integral else kind.__name__
    listed = value if isinstance(value, (list, tuple)) else [value] * len(prompts)
    for entry in listed:
        if not isinstance(entry, kind) or isinstance(entry, bool):
            raise RequestError(f"{name} must be {what}, or a list of such, got {type(entry).__name__}", param=name)
    if len(listed) != len(prompts):
        raise RequestError(f"{len(listed)} {name} for {len(prompts)} prompts", param=name)
    return list(listed)
