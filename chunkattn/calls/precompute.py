"""`PrecomputeJob`: documents on their way into the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from chunkattn.engine.messages import CachedTokens, EngineLimits, PrecomputeRequest, PrecomputeResult
from chunkattn.errors import CapacityError
from chunkattn.outputs import CachedDocument, CacheReport

_MAX_STAGE_LAYOUT = 1 << 20
"""Tokens of the requests of one stage, the prefix in each: 8 bytes a token."""


class PrecomputeJob:
    """The requests that fill the cache, made stage by stage, and the report of what they did.

    Args:
        request: makes the request of a group of documents, given their numbers; None where it holds no token.
        groups: documents that share a request, by number.
        prefix: token ids.
        documents: token ids each.
        pin: whether the requests pin.
        max_stage_tokens: of the documents of one stage, where it has more than one request.
        limits: of the engine.

    Attributes:
        request_ids: of all requests made so far.
    """

    def __init__(
        self,
        request: Callable[[Sequence[int]], PrecomputeRequest | None],
        groups: list[list[int]],
        prefix: list[int],
        documents: list[list[int]],
        *,
        pin: bool,
        max_stage_tokens: int,
        limits: EngineLimits,
    ) -> None:
        self._request, self._groups, self._prefix, self._documents = request, groups, prefix, documents
        self._pin, self._max_stage_tokens, self.limits = pin, max_stage_tokens, limits
        self.request_ids: list[str] = []
        self._places: dict[int, tuple[str, int]] = {}  # of every document: its request, and its chunk there
        self._cached: dict[str, CachedTokens] = {}

    @property
    def num_requests(self) -> int:
        """Number of requests."""
        return len(self._groups)

    def stages(self) -> Iterator[list[PrecomputeRequest]]:
        """Make the requests of one stage after the other."""
        stage: list[PrecomputeRequest] = []
        tokens = laid_out = 0
        for group in self._groups:
            if (request := self._request(group)) is None:
                continue
            size = sum(request.layout.chunk_lens)
            full = tokens + size > self._max_stage_tokens or laid_out + len(request.layout) > _MAX_STAGE_LAYOUT
            if stage and full:
                yield stage
                stage, tokens, laid_out = [], 0, 0
            self._places |= {number: (request.request_id, place) for place, number in enumerate(group)}
            self.request_ids.append(request.request_id)
            stage.append(request)
            tokens, laid_out = tokens + size, laid_out + len(request.layout)
        if stage:
            yield stage

    def add(self, event: PrecomputeResult) -> None:
        """Take one request's result."""
        self._cached[event.request_id] = event.cached

    def found(self) -> CacheReport:
        """Return the report of a job whose requests were looked up, not computed; `note` has told what there is."""
        report = self.report()
        return replace(report, documents=[replace(d, done=d.was_cached) for d in report.documents])

    def note(self, stage: Sequence[PrecomputeRequest], cached: Sequence[CachedTokens]) -> None:
        """Take what is in memory of each request of a stage."""
        self._cached |= {request.request_id: found for request, found in zip(stage, cached, strict=True)}

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
            pin_ids=tuple(name for name in self.request_ids if self._pin and name in self._cached),
        )
