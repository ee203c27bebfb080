"""`PrecomputeJob`: turns documents into requests that fill the cache, and their results into a `CacheReport`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from chunkattn.calls.frontend import Frontend, check_priorities
from chunkattn.calls.job import STAGE_STEPS, StopSample
from chunkattn.engine.messages import CachedTokens, EngineLimits, EngineOutput, PrecomputeRequest, PrecomputeResult
from chunkattn.errors import CapacityError, RequestError
from chunkattn.outputs import CachedDocument, CacheReport
from chunkattn.parsers.arguments import salt_key
from chunkattn.rope.positions import make_layout

_MAX_STAGE_LAYOUT = 1 << 20
"""Limit on the tokens of one stage, counting the prefix in every request: a layout takes 8 bytes per token."""


class PrecomputeJob:
    """Job of a `precompute`, `lookup` or `forget` call; see `chunkattn.calls.job.Job`.

    Args:
        request: returns the request of a group of documents, given their numbers; None if it has no token.
        groups: groups of document numbers; each group is one request.
        prefix: token ids of the prefix.
        documents: token ids of each document.
        pin: whether the requests pin their blocks.
        max_stage_tokens: token limit of the documents in one stage; a single request may exceed it.
        limits: limits of the engine.

    Attributes:
        pins: ids of the requests made so far, if `pin` is set.
    """

    unit = "documents"

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
        self.pins: list[str] = []
        self.total, self.done = len(groups), 0
        self._places: dict[int, tuple[str, int]] = {}  # request of every document, and its chunk there
        self._cached: dict[str, CachedTokens] = {}

    def stages(self) -> Iterator[list[PrecomputeRequest]]:
        """Yield the stages in order, each a list of requests."""
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
            if self._pin:
                self.pins.append(request.request_id)
            stage.append(request)
            tokens, laid_out = tokens + size, laid_out + len(request.layout)
        if stage:
            yield stage

    def take(self, output: EngineOutput, stop: StopSample) -> bool:
        """Process the result of one request."""
        if isinstance(output, PrecomputeResult):
            self._cached[output.request_id] = output.cached
            self.done += 1
        return True

    def found(self) -> CacheReport:
        """Return the report of a job whose requests were looked up with `note`, and not computed."""
        report = self.result()
        return replace(report, documents=[replace(d, done=d.was_cached) for d in report.documents])

    def note(self, stage: Sequence[PrecomputeRequest], cached: Sequence[CachedTokens]) -> None:
        """Record the tokens in memory for each request of a stage.

        Args:
            stage: requests of the stage.
            cached: tokens in memory, one entry for each request.
        """
        self._cached |= {request.request_id: found for request, found in zip(stage, cached, strict=True)}

    def check_room(self) -> None:
        """Check that the pool can hold all documents at once.

        Raises:
            CapacityError: the pool is too small.
        """
        report = self.result()
        if report.fits < len(report.documents):
            raise CapacityError(
                f"{len(report.documents)} documents of {report.total_bytes} bytes cannot all be pinned: the pool of "
                f"{report.pool_bytes} bytes holds the first {report.fits}",
                param="documents",
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
            pin_ids=tuple(name for name in self.pins if name in self._cached),
        )


def precompute_job(
    frontend: Frontend,
    prefix: Any,
    documents: Any,
    *,
    cache_salt: str | None = None,
    pin: bool = False,
    template_options: Mapping[str, Any] | None = None,
    priority: int = 0,
) -> PrecomputeJob:
    """Check the arguments of `precompute`, `lookup` or `forget`, and return the job.

    Args:
        frontend: frontend of the engine.
        prefix: see `LLM.precompute`.
        documents: see `LLM.precompute`.
        cache_salt: see `LLM.generate`.
        pin: see `LLM.precompute`.
        template_options: options of the chat template.
        priority: rank in the queue; lower goes first.

    Raises:
        RequestError: a part is malformed or too long, or there are more than `max_items_per_request` documents.
        CapacityError: the call exceeds `max_tokens_per_call`, or `pin` is set and the pool is too small for all documents.
    """
    config = frontend.config
    if not config.enable_prefix_caching:
        raise RequestError("this engine has no cache: enable_prefix_caching is False", param="documents")
    if not isinstance(pin, bool):
        raise RequestError(f"pin must be True or False, got {pin!r}", param="pin")
    (rank,), salt = check_priorities(priority, 1), salt_key(cache_salt)
    if isinstance(documents, Sequence) and not isinstance(documents, str):
        frontend.check_count(len(documents), "documents")
    prefix_ids, chunks = frontend.parser.parse_cache(prefix, documents, template_options)
    if not prefix_ids and not chunks:
        raise RequestError("there is neither a prefix nor a document", param="documents")
    # Under shared positions every document is independent; otherwise all documents form one sequence.
    alone = config.position_strategy == "shared" and chunks
    groups = [[number] for number in range(len(chunks))] if alone else [list(range(len(chunks)))]
    frontend.check_tokens(len(prefix_ids) + sum(map(len, chunks)), "prefix and documents", "documents")

    def request(group: Sequence[int]) -> PrecomputeRequest | None:
        parts = [chunks[number] for number in group]
        layout = make_layout(prefix_ids, parts, [], config.position_strategy, config.calibration.chunk_position_gap)
        if not len(layout):
            return None  # an empty document after an empty prefix
        return PrecomputeRequest(frontend.new_id(), layout, salt, pin, priority=rank)

    for group in groups:  # discards each request, as the layouts of many documents need much memory
        _check(frontend, request(group), group)
    job = PrecomputeJob(
        request,
        groups,
        prefix_ids,
        chunks,
        pin=pin,
        max_stage_tokens=STAGE_STEPS * config.max_num_batched_tokens,
        limits=frontend.limits,
    )
    if pin:
        job.check_room()
    return job


def _check(frontend: Frontend, request: PrecomputeRequest | None, group: Sequence[int]) -> None:
    """Check a request; errors name the documents instead of the chunks."""
    if request is None:
        return
    try:
        frontend.intake.check(request)
    except RequestError as error:
        part = error.part
        if part and part.startswith("chunk "):
            part = f"document {group[int(part.removeprefix('chunk '))]}"
        raise error.renamed(part, "documents") from None
