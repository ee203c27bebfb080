"""`PrecomputeJob`: turns documents into requests that fill the cache, and their results into a `CacheReport`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from chunkattn.adapter_salt import LoRARequest, salt_for
from chunkattn.calls.frontend import Frontend, check_priorities
from chunkattn.calls.job import STAGE_STEPS, Ask, Flow, LookUp, stages
from chunkattn.engine.messages import CachedTokens, PrecomputeRequest
from chunkattn.errors import CapacityError, RequestError
from chunkattn.layout import Names
from chunkattn.outputs import CachedDocument, CacheReport
from chunkattn.parsers.arguments import salt_key
from chunkattn.parsers.prompt import DOCUMENT_NAMES
from chunkattn.rope.positions import make_layout


class LookupOptions(TypedDict, total=False):
    """Options of `LLM.lookup` and `LLM.forget`, all by name.

    Attributes:
        cache_salt: see `LLM.generate`.
        lora_request: see `LLM.generate`; one adapter for the call.
        chat_template_kwargs: the same options as in the calls of `chat`.
    """

    cache_salt: str | None
    lora_request: LoRARequest | None
    chat_template_kwargs: Mapping[str, Any] | None


class PrecomputeOptions(LookupOptions, total=False):
    """Options of `LLM.precompute`, all by name.

    Attributes:
        pin: keep the blocks until `unpin`, even when other requests need pages.
        priority: see `LLM.generate`; one value for the call.
        cache_salt: see `LLM.generate`.
        lora_request: see `LLM.generate`; one adapter for the call.
        chat_template_kwargs: the same options as in the later calls of `chat`.
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
        names: the caller's names of prefix and documents, for errors.
        forget: whether to look the documents up and forget them, or only look them up; None computes them.

    Raises:
        RequestError: an argument is malformed, a token id is outside the vocabulary, or there is nothing to compute.
        CapacityError: a part is too long, the call exceeds `max_tokens_per_call`, or `pin` is set and the pool is too small
            for all documents.
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
        names: Names = DOCUMENT_NAMES,
        forget: bool | None = None,
    ) -> None:
        self._frontend, self._prefix, self._documents, self._pin = frontend, prefix, documents, pin
        self._forget = forget
        config, self.limits = frontend.config, frontend.limits
        if not config.enable_prefix_caching:
            raise RequestError("this engine has no cache: enable_prefix_caching is False", param=names.chunks)
        if not isinstance(pin, bool):
            raise RequestError(f"pin must be True or False, got {pin!r}", param="pin")
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
        return PrecomputeRequest(self._frontend.new_id(), layout, self._salt_key, self._pin, priority=self._priority)

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
        if report.fits < len(report.documents):
            raise CapacityError(
                f"{len(report.documents)} documents of {report.total_bytes} bytes cannot all be pinned: the pool of "
                f"{report.pool_bytes} bytes holds the first {report.fits}",
                param=names.chunks,
            )

    def result(self) -> CacheReport:
        """Return the sizes of the parts, and the number of documents that fit the pool together."""
        limits, documents, fits = self.limits, [], 0
        page = -(-len(self._prefix) // limits.block_size)
        room, seen = limits.num_pages - page, set()
        for number, ids in enumerate(self._documents):
            pages = -(-len(ids) // limits.block_size)
            request_id, place = self._places.get(number, ("", 0))
            cached = self._cached.get(request_id)
            was_cached = not ids or (cached is not None and cached.chunks[place] == len(ids))
            documents.append(CachedDocument(len(ids), pages * limits.page_bytes, was_cached, cached is not None or not ids))
            room -= 0 if tuple(ids) in seen else pages  # equal documents share pages
            seen.add(tuple(ids))
            fits += room >= 0
        return CacheReport(
            prefix_tokens=len(self._prefix),
            prefix_bytes=page * limits.page_bytes,
            documents=documents,
            pool_bytes=limits.num_pages * limits.page_bytes,
            fits=fits,
            pin_ids=tuple(self._cached) if self._pin else (),
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
    prefix_ids, chunks = frontend.parser.parse_cache(prefix, documents, frontend.template_options(chat_template_kwargs), names)
    options: dict[str, Any] = {"pin": pin, "priority": priority, "names": names, "forget": forget}
    return PrecomputeJob(frontend, prefix_ids, chunks, cache_salt=salt_for(lora_request, cache_salt), **options)
