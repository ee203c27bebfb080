"""`DiskTier`: reads parts from the KV store before a request is placed, and writes computed parts in the background."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import cast

import numpy as np

from chunkattn.cache.disk.reader import Entries, Lookup, StoreReader
from chunkattn.cache.disk.store import KVStore, entry_key, state_key
from chunkattn.cache.disk.writer import StoreWriter
from chunkattn.engine.request import Part, Request
from chunkattn.engine.runner import Runner
from chunkattn.engine.states import States
from chunkattn.engine.step import Span
from chunkattn.layout import PREFIX_ID, QUESTION_ID

logger = logging.getLogger(__name__)

PENDING_BYTES = 1 << 30
"""Limit in bytes on K/V copied out of the pool and not yet written. Beyond it, parts are refused until their next use."""
READ_BYTES = 1 << 30
"""Limit in bytes on K/V read from disk for requests that are not placed yet. Beyond it, reading pauses."""
_REMEMBERED = 1 << 17


class DiskTier:
    """Tier of the cache on disk: keeps prefixes and chunks of requests that share the cache.

    Args:
        store: the store.
        runner: runner whose pools hold K/V and states.
    """

    def __init__(self, store: KVStore, runner: Runner) -> None:
        self.store, self.pool, self.state_pool = store, runner.pool, runner.states
        self.states: States | None = None  # of the scheduler, which the engine makes later
        self.writer = StoreWriter(store, max_pending=1 << 14, max_pending_bytes=PENDING_BYTES)
        self.reader = StoreReader(store, max_bytes=READ_BYTES)
        self.fingerprint = runner.fingerprint()
        self._entries: dict[Request, Entries] = {}  # parts read for requests that are not placed yet
        self._forgotten: dict[Request, set[bytes]] = {}  # parts forgotten while a request that reads them is not placed yet
        self._counts = Counter({"hit": 0, "miss": 0})
        self._stored: OrderedDict[bytes, None] = OrderedDict()  # keys assumed to be on disk, the most recent last

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of parts by event.

        Events: `hit` and `miss` on reading, `written`, `refused` because the writer was late, `failed` to be written, and
        `damaged` on disk.
        """
        writer = self.writer
        written = {"written": writer.written, "refused": writer.dropped, "failed": writer.failed}
        return {**self._counts, **written, "damaged": self.store.damaged}

    def read_ahead(self, request: Request, look_up: Callable[[Request], list[Part]]) -> bool:
        """Start reading the parts of a request that memory lacks.

        Args:
            request: request that is not placed yet.
            look_up: returns the request's parts with the blocks that are in memory.

        Returns:
            Whether anything is read. If so, `take_read` returns the request when its parts are there.
        """
        if not any(self._keeps(request, kind) for kind, _, _ in request.segments):
            return False
        lookups = []
        for part, (kind, start, end) in zip(look_up(request), request.segments, strict=True):
            pages = -(-(end - start) // request.plan.block_size)
            key = self._key(request, kind, start, end) if self._keeps(request, kind) else None
            # An entry whose deletion is pending may still be there.
            if key is None or self.writer.deletes(key):
                continue
            in_memory = len(part.blocks) == pages and part.complete
            if not in_memory:
                lookups.append(Lookup(key, self._like(pages), kind == PREFIX_ID))
            if self.state_pool is not None and self._wants_state(request, kind):
                kept = States.find(part.blocks[-1]) if in_memory else None
                if kept is None or not kept.ready:
                    lookups.append(Lookup(state_key(key), self.state_pool.slot_shapes, False))
        lookups = [*{w.key: w for w in lookups}.values()]
        if lookups:
            self._forgotten[request] = set()
            self.reader.submit(request, lookups)
        return bool(lookups)

    @property
    def reading(self) -> frozenset[Request]:
        """Return the requests that wait for their parts."""
        return cast("frozenset[Request]", self.reader.owners)

    def take_read(self, timeout: float = 0.0) -> list[Request]:
        """Return the requests whose parts have been read since the last call.

        Args:
            timeout: seconds to wait at most for the first request.
        """
        arrived = cast("list[tuple[Request, Entries]]", self.reader.take(timeout) if self.reading else [])
        self._entries |= arrived
        return [request for request, _ in arrived]

    def drop(self, request: Request) -> None:
        """Cancel reading for a request, and free the parts read for it."""
        self.reader.cancel(request)
        self._forgotten.pop(request, None)
        if (entries := self._entries.pop(request, None)) is not None:
            self.reader.release(entries)

    def load(self, request: Request) -> None:
        """Fill the missing parts of a placed request with the parts read from disk. A part needs a complete prefix above it.

        A part found in memory counts as used on disk as well, and is written if the disk lacks it: a plain prompt may have
        computed its blocks, or the writer may have been late.
        """
        entries, forgotten = self._entries.get(request, {}), self._forgotten.get(request, ())
        for part, kind, start, end in self._parts(request):
            if not all(p is None or p.page < 0 or p.complete for p in part.parents):
                break
            key = self._key(request, kind, start, end)
            if part.complete:
                self._keep(key, part, kind, end - start)
            elif key in entries and not any(b.planned for b in part.blocks[part.cursor :]):  # another request computes it
                self._fill(key, part, None if key in forgotten else entries[key])
            if (state := state_key(key)) in entries and key not in forgotten:
                self._take_state(state, part, entries[state])
        self.drop(request)

    def _take_state(self, key: bytes, part: Part, arrays: list[np.ndarray] | None) -> None:
        """Keep a state from disk at the end of a complete part, if there is room and no sample computes the state."""
        if arrays is None:
            self._stored.pop(key, None)
            return
        block = part.blocks[-1]
        if not part.complete or block.walker is not None:
            return
        assert self.states is not None
        assert self.state_pool is not None
        kept = self.states.find(block)
        if kept is not None and kept.ready:
            return
        kept = kept or self.states.keep(block, block.size, ready=True)
        if kept is not None:
            self.state_pool.write(kept.slot, arrays)
            kept.ready = True
            self._remember(key)
            self.writer.touch(key)

    def forget(self, request: Request) -> None:
        """Delete the chunks of a prompt from the store, or the prefix if there is no chunk."""
        for kind, start, end in request.segments:
            if kind >= 0 or not request.layout.num_chunks:
                self._delete(self._key(request, kind, start, end))

    def discard(self, request: Request) -> None:
        """Delete the parts that a request computed, even in part, from the store."""
        for kind, start, end in request.segments:
            if self._keeps(request, kind) and request.computed[start:end].any():
                self._delete(self._key(request, kind, start, end))

    def _delete(self, part: bytes) -> None:
        for key in (part,) if self.state_pool is None else (part, state_key(part)):
            self._stored.pop(key, None)
            self.writer.delete(key)
            for keys in self._forgotten.values():
                keys.add(key)

    def _like(self, pages: int) -> list[tuple[tuple[int, ...], np.dtype]]:
        return [((pages, *shape), dtype) for shape, dtype in self.pool.page_shapes]

    def _fill(self, key: bytes, part: Part, arrays: list[np.ndarray] | None) -> None:
        self._counts["miss" if arrays is None else "hit"] += 1
        if arrays is None:
            self._stored.pop(key, None)
            return
        missing = part.blocks[part.cursor :]
        self.pool.write_pages([b.page for b in missing], [a[part.cursor :] for a in arrays])
        for block in missing:
            block.filled = block.planned = block.size
        self._remember(key)
        self.writer.touch(key)

    def save(self, spans: Iterable[Span]) -> None:
        """Hand the parts that a step completed to the writer."""
        for sample, start, end, _ in spans:
            if start >= sample.request.layout.question_start:
                continue
            for part, kind, first, last in self._parts(sample.request):
                is_completed = first < end and start < last and part.complete
                if is_completed and all(block.keep for block in part.blocks):  # no caller has forgotten the part meanwhile
                    self._keep(self._key(sample.request, kind, first, last), part, kind, last - first)

    def _keep(self, key: bytes, part: Part, kind: int, tokens: int) -> None:
        """Write a complete part, and the state at its end, unless they are on disk, and count them as used."""
        for lost in self.writer.take_lost():
            self._stored.pop(lost, None)
        pages, name = [b.page for b in part.blocks], "prefix" if kind == PREFIX_ID else "chunk"
        self._write(key, lambda: self.pool.read_pages(pages), tokens, name, len(pages) * self.pool.page_bytes)
        kept = States.find(part.blocks[-1])
        if (pool := self.state_pool) is not None and kept is not None and kept.ready:
            self._write(state_key(key), lambda: pool.read(kept.slot), tokens, "state", pool.slot_bytes)

    def _write(
        self, key: bytes, copy: Callable[[], Callable[[], list[np.ndarray]]], tokens: int, kind: str, num_bytes: int
    ) -> None:
        """Write what `copy` takes out of a pool unless it is on disk, and count it as used."""
        if key in self._stored:
            self.writer.touch(key)
        elif self.writer.submit(key, copy(), tokens=tokens, kind=kind, num_bytes=num_bytes):
            self._remember(key)

    def _remember(self, key: bytes) -> None:
        self._stored[key] = None
        self._stored.move_to_end(key)
        if len(self._stored) > _REMEMBERED:
            self._stored.popitem(last=False)

    def _parts(self, request: Request) -> list[tuple[Part, int, int, int]]:
        """Return the parts that the store keeps, each with chunk id and token range.

        The list is empty for a request that does not share the cache or has ended.
        """
        if not request.samples or not request.samples[0].parts:
            return []
        parts = zip(request.samples[0].parts, request.segments, strict=True)
        return [(part, kind, start, end) for part, (kind, start, end) in parts if self._keeps(request, kind)]

    def _keeps(self, request: Request, kind: int) -> bool:
        """Return whether the store keeps parts of this kind for a request."""
        passing = (request.score and request.score.is_pack) or (request.precompute and not request.precompute.persist)
        return request.shares and not passing and kind != QUESTION_ID

    def _wants_state(self, request: Request, kind: int) -> bool:
        """Return whether something may go on from the state at the end of a part."""
        keeps_states = request.precompute is not None and request.precompute.keep_states
        return kind == PREFIX_ID or keeps_states or request.layout.question_len > 0

    def _key(self, request: Request, kind: int, start: int, end: int) -> bytes:
        ids = request.layout.token_ids
        prefix = ids[: request.layout.prefix_len]
        chunk = None if kind == PREFIX_ID else ids[start:end]
        return entry_key(self.fingerprint, request.salt_key, prefix, chunk, int(request.layout.positions[start]))

    def catch_up(self, timeout: float = 600.0) -> bool:
        """Wait up to `timeout` seconds for the writer if it is late. Return whether it has caught up.

        Args:
            timeout: limit on the wait in seconds.
        """
        return self.writer.pending_bytes < PENDING_BYTES // 2 or self.writer.flush(timeout)

    def close(self) -> list[Request]:
        """Write pending parts and close the store. Return the requests that still wait for their parts."""
        left = cast("list[Request]", self.reader.close())
        self.writer.close(timeout=60)
        self.store.close()
        return left
