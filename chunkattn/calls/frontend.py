"""What stands between users and messages: parsing, checks by the names users know, and outputs.

`LLM` and `AsyncLLM` differ in how they move messages; this they share.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import count
from numbers import Integral
from typing import Any

import numpy as np

from chunkattn.accounting import generation_tokens, precompute_tokens
from chunkattn.calls.output import OutputBuilder, token_decoder
from chunkattn.calls.precompute import PrecomputeJob
from chunkattn.config import EngineConfig, SamplingParams
from chunkattn.engine.intake import Intake
from chunkattn.engine.messages import EngineLimits, GenerateRequest, PrecomputeRequest
from chunkattn.errors import CapacityError, ConfigError, RequestError
from chunkattn.models.loader import ModelFiles
from chunkattn.parsers import ChunkedPrompt, ParsedPrompt, PromptParser
from chunkattn.parsers.delimited import check_delimiter, check_no_delimiter, parse_delimited
from chunkattn.parsers.prompt import Prompt, check_ids, check_salt, salt_key
from chunkattn.rope.positions import make_layout
from chunkattn.scoring import ScoreJob, ScorePlanner, ScoringJob
from chunkattn.scoring.labels import resolve_labels
from chunkattn.scoring.planner import STAGE_STEPS, max_request_tokens
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
            max_chunks=config.max_chunks_per_prompt,
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
            CapacityError: one cannot fit, or together they exceed `max_tokens_per_call`.
        """
        listed = _one_each(SamplingParams() if params is None else params, SamplingParams, prompts, "sampling_params")
        # Where max_tokens is None, one token a sample is certain.
        costs = (generation_tokens(len(q.layout), p.n, p.max_tokens or 1) for q, p in zip(prompts, listed, strict=True))
        self._check_tokens(sum(costs), "prompts and max_tokens of all samples", "prompt")
        jobs = []
        for prompt, param, rank in zip(prompts, listed, _priorities(priority, prompts), strict=True):
            if param.stop and self.tokenizer is None:
                raise RequestError("stop strings need a tokenizer and this engine has none; use stop_token_ids", param="stop")
            salt = salt_key(prompt.cache_salt)
            request = GenerateRequest(self._new_id(), prompt.layout, param, self._eos_token_ids, salt, rank)
            self.intake.check(request)
            jobs.append((request, OutputBuilder(request, prompt.text, self.tokenizer, self._decode)))
        return jobs

    def _check_tokens(self, tokens: int, what: str, param: str) -> None:
        """Check what a call costs.

        Raises:
            CapacityError: more than `max_tokens_per_call`.
        """
        if tokens > (most := self.config.max_tokens_per_call):
            text = f"{what} are {tokens} tokens, max_tokens_per_call is {most}; split the call"
            raise CapacityError(text, param=param)

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
        """A checked job that fills the cache.

        Raises:
            RequestError: a part is malformed or too long, or there are more than `max_items_per_request` documents.
            CapacityError: more than `max_tokens_per_call`, or `pin` and the pool is too small for all of them.
        """
        if not self.config.enable_prefix_caching:
            raise RequestError("this engine keeps nothing: enable_prefix_caching is False", param="documents")
        if not isinstance(pin, bool):
            raise RequestError(f"pin must be True or False, got {pin!r}", param="pin")
        (rank,), salt = _priorities(priority, [None]), salt_key(cache_salt)
        if isinstance(documents, Sequence) and not isinstance(documents, str):
            self._check_count(len(documents), "documents")
        prefix_ids, chunks = self.parser.parse_cache(prefix, documents, options)
        if not prefix_ids and not chunks:
            raise RequestError("there is neither a prefix nor a document", param="documents")
        shared, strategy = self.config.position_strategy == "shared", self.config.position_strategy
        # Under shared positions every document stands alone; else all of them are one sequence.
        groups = [[number] for number in range(len(chunks))] if shared and chunks else [list(range(len(chunks)))]
        self._check_tokens(precompute_tokens(len(prefix_ids), [*map(len, chunks)]), "prefix and documents", "documents")

        def request(group: Sequence[int]) -> PrecomputeRequest | None:
            layout = make_layout(prefix_ids, [chunks[number] for number in group], [], strategy)
            if not len(layout):
                return None  # an empty document behind an empty prefix
            return PrecomputeRequest(self._new_id(), layout, salt, pin, priority=rank)

        for group in groups:  # one at a time: nothing has been sent when one is refused
            self._check_documents(request(group), group)
        job = PrecomputeJob(
            request,
            groups,
            prefix_ids,
            chunks,
            pin=pin,
            max_stage_tokens=STAGE_STEPS * self.config.max_num_batched_tokens,
            limits=self.limits,
        )
        if pin:
            job.check_room()
        return job

    def _check_documents(self, request: PrecomputeRequest | None, group: Sequence[int]) -> None:
        """Check a request by the names of the documents that are its chunks."""
        if request is None:
            return
        try:
            self.intake.check(request)
        except RequestError as error:
            part = error.part
            if part and part.startswith("chunk "):
                part = f"document {group[int(part.removeprefix('chunk '))]}"
            raise error.renamed(part, "documents") from None

    # Scoring

    def score_call(
        self, query: Any, items: Any, labels: Sequence[str] | None, label_token_ids: Sequence[int] | None, **options: Any
    ) -> ScoringJob | ScoringJobs:
        """What a call of `LLM.score` has to run: one query, or a list of them. Options are those of `scoring`.

        Raises:
            RequestError: malformed queries, items or labels; of a list, the query is named.
        """
        ids, given = self._labels(labels, label_token_ids), options.pop("packed_ids")
        pairs = None if given is not None else pair_queries(query, items)
        if pairs is None:
            job = self.score_job(query, items, given, item_first=options.pop("item_first"), labels=ids)
            return self.scoring([job], ids, **options)[0]
        self._check_count(max(sum(len(own) for _, own in pairs), len(pairs)), "items of all queries")
        item_first, jobs, known = options.pop("item_first"), [], dict[int, list[list[int]]]()
        for number, (one, its_items) in enumerate(pairs):
            try:
                jobs.append(self.score_job(one, its_items, None, item_first=item_first, labels=ids, known=known))
            except RequestError as error:
                raise type(error)(f"query {number}: {error}", param=error.param) from None
        return ScoringJobs(self.scoring(jobs, ids, **options), self.config.max_num_batched_tokens)

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
            self._check_count(len(documents), "documents")
        encode = self.parser.encode
        picked, special = pick_template(template, self.config.model, encode), self.config.special_tokens_in_documents
        plan = plan_rerank(encode, picked, query, documents, special_tokens=special, **options)
        plan.check_room(self.limits, self.config.max_chunk_len)
        labels = plan.labels if classes is None else ()
        try:
            scored = self.score_job(plan.prefix, plan.items, None, labels=labels, delimited=False)
            (job,) = self.scoring(
                [scored], labels, apply_softmax=True, algorithm=algorithm, cache_salt=cache_salt, priority=priority
            )
        except RequestError as error:  # by the names of this call
            names = {"items": "documents", "label_token_ids": "template"}
            raise error.renamed(error.part, names.get(error.param or "", error.param)) from None
        return RerankJob(plan, job)

    def score_job(
        self,
        query: Any,
        items: Any,
        packed_ids: Sequence[int] | None,
        *,
        labels: tuple[int, ...],
        item_first: bool = False,
        delimited: bool = True,
        known: dict[int, list[list[int]]] | None = None,
    ) -> ScoreJob:
        """One query and its items, tokenized and checked.

        Args:
            query: text or token ids.
            items: texts or token ids, as the query is.
            packed_ids: instead of both.
            labels: token ids.
            item_first: see `LLM.score`.
            delimited: no part may hold the engine's delimiter, if it has one.
            known: token ids of the lists of items of this call, by the list's identity; new ones are added.

        Raises:
            RequestError: malformed query, items or labels.
        """
        query_ids, item_ids, leading = self._score_ids(query, items, packed_ids, {} if known is None else known)
        if delimited and packed_ids is None and (delimiter := self.config.multi_item_scoring_delimiter) is not None:
            check_no_delimiter(query_ids, item_ids, delimiter)
        self._check_score(query_ids, item_ids, leading, labels)
        return self.scores.job(query_ids, item_ids, leading, item_first and not self._delimited())

    def scoring(
        self,
        jobs: Sequence[ScoreJob],
        labels: tuple[int, ...],
        *,
        apply_softmax: bool,
        algorithm: str | None,
        cache_salt: str | None,
        priority: int,
    ) -> list[ScoringJob]:
        """Plan the jobs of one call; no request is made before a stage is asked for.

        Raises:
            RequestError: an argument is malformed, or the algorithm cannot serve a job.
            CapacityError: the call would compute more than `max_tokens_per_call`.
        """
        (rank,) = _priorities(priority, [None])
        plan = partial(
            self.scores.plan,
            algorithm=algorithm,
            labels=labels,
            apply_softmax=apply_softmax,
            cache_salt=salt_key(cache_salt),
            priority=rank,
            new_id=self._new_id,
            too_costly=self.scores.too_costly(jobs),
            check=self.intake.check,
        )
        return [plan(job) for job in jobs]

    def _delimited(self) -> bool:
        """Whether sequences are laid out as delimiters have it, the query first; warns, for another order was asked for."""
        delimited = self.config.multi_item_scoring_delimiter is not None
        if delimited:
            warnings.warn("item_first is ignored: this engine has a multi_item_scoring_delimiter", stacklevel=4)
        return delimited

    def _score_ids(
        self, query: Any, items: Any, packed_ids: Sequence[int] | None, known: dict[int, list[list[int]]]
    ) -> tuple[list[int], list[list[int]], list[int]]:
        """Token ids of query and items from whichever form they came in, and of text the leading special tokens."""
        delimiter = self.config.multi_item_scoring_delimiter
        if packed_ids is not None:
            if delimiter is None:
                raise RequestError("packed_ids need the engine option multi_item_scoring_delimiter", param="packed_ids")
            if query is not None or items is not None:
                raise RequestError("packed_ids come instead of query and items", param="packed_ids")
            if isinstance(packed_ids, (Sequence, np.ndarray)):
                self._check_count(list(packed_ids).count(delimiter) - 1, "items")
            return *parse_delimited(check_ids(packed_ids, "packed_ids", "packed_ids"), delimiter), []
        if query is None or items is None:
            raise RequestError("score needs a query and items", param="query" if query is None else "items")
        given, items = id(items), as_list(items, "items")
        self._check_count(len(items), "items")
        kinds = {isinstance(part, str) for part in (query, *items)}
        if len(kinds) > 1:
            raise RequestError("query and items must be all text or all token ids", param="items")
        encode = self.parser.encode
        if kinds == {False}:
            query_ids = check_ids(query, "query", "query")
            if given not in known:
                known[given] = [check_ids(item, f"items[{i}]", "items") for i, item in enumerate(items)]
        else:
            read = self.parser.prompts
            query_ids = read(query, "query", "query")
            if given not in known:
                known[given] = [read(item, f"item {i}", "items") for i, item in enumerate(items)]
        item_ids = known[given]
        if not query_ids:
            raise RequestError("the query is empty", param="query")
        return query_ids, item_ids, encode.leading_ids if kinds == {True} else []

    def _check_count(self, count: int, name: str) -> None:
        """Before anything is tokenized."""
        if count > (most := self.config.max_items_per_request):
            raise RequestError(f"{count} {name} exceed max_items_per_request {most}", param=name.split()[0])

    def _check_score(self, query: list[int], items: list[list[int]], leading: list[int], labels: tuple[int, ...]) -> None:
        """Every limit that does not depend on the algorithm, by the names the caller knows."""
        limits, longest, slots = self.limits, self.config.max_chunk_len, max_request_tokens(self.limits)
        named = [("query", query, "query"), *((f"item {i}", item, "items") for i, item in enumerate(items))]
        for name, ids, param in [*named, ("label_token_ids", labels, "label_token_ids")]:
            if ids and max(ids) >= limits.vocab_size:
                text = f": token id {max(ids)} is outside the vocabulary of {limits.vocab_size}"
                raise RequestError(text, param=param, part=name)
        for name, ids, param in named:
            total = len(leading) + len(query) + (len(ids) if name != "query" else 0)
            if name != "query" and len(ids) > longest:
                raise RequestError(f" has {len(ids)} tokens, max_chunk_len is {longest}", param=param, part=name)
            if total > limits.max_model_len:
                raise CapacityError(
                    f" of {len(ids)} tokens needs {total} positions with the query, max_model_len is {limits.max_model_len}",
                    param=param,
                    part=name,
                )
            if total > slots:
                raise CapacityError(
                    f" of {len(ids)} tokens needs {total} KV slots with the query, the pool has {slots}; "
                    "raise kv_cache_memory_bytes",
                    param=param,
                    part=name,
                )


def as_list(values: Any, name: str) -> list[Any]:
    """Any iterable but text as a list.

    Raises:
        RequestError: not iterable, or one text or mapping where several values are expected.
    """
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise RequestError(f"{name} must be a list, got {type(values).__name__}", param=name)
    return list(values)


def _priorities(value: Any, prompts: Sequence[Any]) -> list[int]:
    """One priority for each prompt.

    Raises:
        RequestError: as `_one_each`, or beyond 64 bits.
    """
    listed = [int(rank) for rank in _one_each(value, Integral, prompts, "priority")]
    for rank in listed:
        if not -(2**63) <= rank < 2**63:
            raise RequestError(f"priority must fit 64 bits, got {rank}", param="priority")
    return listed


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
