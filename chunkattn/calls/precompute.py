"""`PrecomputeJob`: turns documents into requests that fill the cache, and their results into a `CacheReport`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from chunkattn.adapter_salt import LoRARequest, salt_for
from chunkattn.calls.frontend import Frontend, check_priorities
from chunkattn.calls.job import STAGE_STEPS, Ask, Flow, LookUp, stages
from chunkattn.citations import CitationsLike
from chunkattn.engine.messages import CachedTokens, PrecomputeRequest
from chunkattn.errors import CapacityError, RequestError
from chunkattn.layout import Names
from chunkattn.outputs import CachedDocument, CacheReport
from chunkattn.parsers.arguments import salt_key
from chunkattn.parsers.joined import ISOLATED, is_joined, joined_ids, names_of_joined
from chunkattn.parsers.prompt import DOCUMENT_NAMES
from chunkattn.rope.positions import make_layout


class LookupOptions(TypedDict, total=False):
    """Options of `LLM.lookup` and `LLM.forget`, all by name.

    Attributes:
        cache_salt: see `LLM.generate`.
        lora_request: see `LLM.generate`; one adapter for the call.
        chat_template_kwargs: the same options as in the calls of `chat`.
        tools: the same tools as in the calls of `chat`.
        chunk_mode: see `LLM.generate`. `"joined"` takes all documents together, and reports them as one.
        keep_states: count a document as cached only with the state at its end; no effect without recurrent layers.
        citations: documents with the markers that answers cite them by; see `LLM.generate`.
    """

    cache_salt: str | None
    lora_request: LoRARequest | None
    chat_template_kwargs: Mapping[str, Any] | None
    tools: Sequence[Mapping[str, Any]] | None
    chunk_mode: str
    keep_states: bool
    citations: CitationsLike | None


class PrecomputeOptions(LookupOptions, total=False):
    """Options of `LLM.precompute`, all by name.

    Attributes:
        pin: keep the blocks until `unpin`, even when other requests need pages.
        priority: see `LLM.generate`; one value for the call.
        cache_salt: see `LLM.generate`.
        lora_request: see `LLM.generate`; one adapter for the call.
        chat_template_kwargs: the same options as in the later calls of `chat`.
        tools: the same tools as in the later calls of `chat`.
        chunk_mode: see `LLM.generate`. `"joined"` computes all documents together for later calls of that mode, and reports
            them as one.
        keep_states: keep the state at the end of every document as well, so that a question behind it does not compute the
            document again; no effect without recurrent layers. A state takes `CacheReport.state_bytes`.
        citations: compute the documents for later calls with `citations`, whose markers are in them.
    """

    pin: bool
    priority: int


class PrecomputeJob:
    """Job of a `precompute` call, or of a `lookup` or `forget` call that looks up what it would compute; see `Job`.

    Under `shared` positions every document is a request with the prefix; otherwise all documents form one request.

    Args:
        frontend: frontend of the engine.
        prefix: token ids of the prefix.
        documents: token ids of each document.
        cache_salt: see `LLM.generate`.
        pin: whether the requests pin their blocks.
        priority: rank in the queue; lower goes first.
        keep_states: see `PrecomputeOptions`.
        names: the caller's names of prefix and documents, for errors.
        forget: whether to look the documents up and forget them, or only look them up; None computes them.

    Raises:
        RequestError: an argument is malformed, a token id is outside the vocabulary, or there is nothing to compute.
        CapacityError: a part is too long, the call exceeds `max_tokens_per_call`, or `pin` is set and the pool, or with
            `keep_states` the number of states, is too small for all documents.
    """

    unit = "documents"

    def __init__(
        self,
        frontend: Frontend,
        prefix: list[int],
        documents: list[list[int]],
        *,
        cache_salt: str | None = None,
        pin: bool = False,
        priority: int = 0,
        keep_states: bool = False,
        names: Names = DOCUMENT_NAMES,
        forget: bool | None = None,
    ) -> None:
        self._frontend, self._prefix, self._documents, self._pin = frontend, prefix, documents, pin
        self._forget, self._keep_states = forget, keep_states
        config, self.limits = frontend.config, frontend.limits
        if not config.enable_prefix_caching:
            raise RequestError("this engine has no cache: enable_prefix_caching is False", param=names.chunks)
        for name, flag in (("pin", pin), ("keep_states", keep_states)):
            if not isinstance(flag, bool):
                raise RequestError(f"{name} must be True or False, got {flag!r}", param=name)
        (self._priority,), self._salt_key = check_priorities(priority, 1), salt_key(cache_salt)
        if not prefix and not documents:
            raise RequestError("there is neither a prefix nor a document", param=names.chunks)
        alone = config.position_strategy == "shared" and len(documents) > 0
        self._groups = [[number] for number in range(len(documents))] if alone else [list(range(len(documents)))]
        self.total, self.done = len(self._groups), 0
        self._places: dict[int, tuple[str, int]] = {}  # request of every document, and its chunk there
        self._cached: dict[str, CachedTokens] = {}
        if alone:
            self.limits.check_items(prefix, documents, names, gap=frontend.gap, chunks=True)
        elif request := self._request(self._groups[0]):
            self.limits.check(request, names)
        self.limits.check_tokens(len(prefix) + sum(map(len, documents)), "prefix and documents", names.chunks)
        if pin:
            self._check_room(names)

    def _request(self, group: Sequence[int]) -> PrecomputeRequest | None:
        """Return the request of some documents, by number; None for an empty document after an empty prefix."""
        parts, strategy = [self._documents[number] for number in group], self._frontend.config.position_strategy
        layout = make_layout(self._prefix, parts, [], strategy, self._frontend.gap)
        if not len(layout):
            return None
        return PrecomputeRequest(
            self._frontend.new_id(),
            layout,
            self._salt_key,
            self._pin,
            priority=self._priority,
            keep_states=self._keep_states,
        )

    def stages(self) -> Iterator[list[PrecomputeRequest]]:
        """Yield the requests in stages."""
        most = STAGE_STEPS * self._frontend.config.max_num_batched_tokens
        return stages(self._requests(), most, lambda request: sum(request.layout.chunk_lens))

    def _requests(self) -> Iterator[PrecomputeRequest]:
        for group in self._groups:
            if (request := self._request(group)) is not None:
                self._places |= {number: (request.request_id, place) for place, number in enumerate(group)}
                yield request

    def flow(self) -> Flow[CacheReport]:
        """Compute the documents, or look them up, and return the report."""
        for stage in self.stages():
            if self._forget is not None:
                answers = yield LookUp(stage, self._forget)
            else:
                answers = [result.cached for result in (yield Ask(stage))]
            self._cached |= {request.request_id: cached for request, cached in zip(stage, answers, strict=True)}
            self.done += len(stage)
        report = self.result()
        if self._forget is None:
            return report
        return replace(report, documents=[replace(d, done=d.was_cached) for d in report.documents])

    def _check_room(self, names: Names) -> None:
        """Check that the pool can hold all documents at once."""
        report = self.result()
        limits, states = self.limits, self._num_states
        if limits.recurrent and states >= limits.state_slots:
            raise CapacityError(
                f"the {states} states of prefix and documents cannot all be pinned: the engine holds {limits.state_slots} of "
                f"{limits.state_bytes} bytes, and one is of a running request; pin less, or raise state_cache_memory_bytes",
                param=names.chunks,
            )
        if report.fits < len(report.documents):
            raise CapacityError(
                f"{len(report.documents)} documents of {report.total_bytes} bytes cannot all be pinned: the pool of "
                f"{report.pool_bytes} bytes holds the first {report.fits}",
                param=names.chunks,
            )

    @property
    def _num_states(self) -> int:
        """Return the number of states that a pin of the documents holds: the prefix's and, with `keep_states`, theirs."""
        return bool(self._prefix) + (len({tuple(ids) for ids in self._documents if ids}) if self._keep_states else 0)

    def result(self) -> CacheReport:
        """Return the sizes of the parts, and the number of documents that fit the pool together."""
        limits, documents, fits = self.limits, [], 0
        page = -(-len(self._prefix) // limits.block_size)
        room, seen = limits.num_pages - page, set()
        states = limits.state_slots - 1 - bool(self._prefix) if limits.recurrent and self._keep_states else len(self._documents)
        for number, ids in enumerate(self._documents):
            pages = -(-len(ids) // limits.block_size)
            request_id, place = self._places.get(number, ("", 0))
            cached = self._cached.get(request_id)
            was_cached = not ids or (cached is not None and cached.chunks[place] == len(ids))
            state_kept = cached is not None and bool(cached.states) and cached.states[place]
            done = cached is not None or not ids
            documents.append(CachedDocument(len(ids), pages * limits.page_bytes, was_cached, done, state_kept))
            if ids and tuple(ids) not in seen:  # equal documents share pages and state
                room, states = room - pages, states - 1
            seen.add(tuple(ids))
            fits += min(room, states) >= 0
        return CacheReport(
            prefix_tokens=len(self._prefix),
            prefix_bytes=page * limits.page_bytes,
            documents=documents,
            pool_bytes=limits.num_pages * limits.page_bytes,
            fits=fits,
            pin_ids=tuple(self._cached) if self._pin else (),
            state_bytes=limits.state_bytes,
            state_slots=limits.state_slots,
        )


def precompute_job(
    frontend: Frontend,
    prefix: Any,
    documents: Any,
    *,
    pin: bool = False,
    priority: int = 0,
    cache_salt: str | None = None,
    lora_request: LoRARequest | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chunk_mode: str = ISOLATED,
    keep_states: bool = False,
    citations: CitationsLike | None = None,
    names: Names = DOCUMENT_NAMES,
    forget: bool | None = None,
) -> PrecomputeJob:
    """Return the job of the arguments of `precompute`, `lookup` or `forget`.

    See `LLM.precompute` and `PrecomputeOptions` for the arguments, and `PrecomputeJob` for `names` and `forget`.

    Raises:
        RequestError: as `PrecomputeJob`, a part cannot be tokenized, or there are more than `max_items_per_request` documents.
        CapacityError: as `PrecomputeJob`.
    """
    if isinstance(documents, Sequence) and not isinstance(documents, str):
        frontend.limits.check_count(len(documents), "documents", names.chunks)
    joins, variables = is_joined(chunk_mode), frontend.template_options(chat_template_kwargs, tools)
    prefix_ids, chunks = frontend.parser.parse_cache(prefix, documents, variables, names, citations)
    if joins:
        chunks, names = joined_ids(chunks), names_of_joined(names)
    options: dict[str, Any] = {"pin": pin, "priority": priority, "keep_states": keep_states, "names": names, "forget": forget}
    return PrecomputeJob(frontend, prefix_ids, chunks, cache_salt=salt_for(lora_request, cache_salt), **options)
