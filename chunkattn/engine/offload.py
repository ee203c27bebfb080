"""Between the pool and the store on disk: parts are fetched when a request is placed, and written behind the steps."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable

from chunkattn.cache.store import KVStore, StoreWriter, entry_key
from chunkattn.engine.request import Part, Request
from chunkattn.engine.runner import Runner
from chunkattn.engine.scheduler import Span
from chunkattn.layout import PREFIX_ID, QUESTION_ID

logger = logging.getLogger(__name__)

PENDING_BYTES = 1 << 30
"""K/V copied out of the pool and not yet written; beyond it parts are refused until they are used again."""
_REMEMBERED = 1 << 17


class DiskTier:
    """Keeps prefixes and chunks of requests that share the cache."""

    def __init__(self, store: KVStore, runner: Runner) -> None:
        self.store, self.runner = store, runner
        self.writer = StoreWriter(store, max_pending=1 << 14, max_pending_bytes=PENDING_BYTES)
        self.fingerprint = runner.fingerprint()
        self._counts = Counter({"hit": 0, "miss": 0})
        self._stored: OrderedDict[bytes, None] = OrderedDict()  # keys believed on disk, the latest last

    @property
    def counts(self) -> dict[str, int]:
        """Parts found, not found, written, refused because the writer was behind, not writable, and damaged."""
        writer = self.writer
        written = {"written": writer.written, "refused": writer.dropped, "failed": writer.failed}
        return {**self._counts, **written, "damaged": self.store.damaged}

    def load(self, request: Request) -> None:
        """Fill a placed request's missing parts from the store, each below a complete prefix only.

        Parts found in memory count as used on disk too, and are written if they are not there: their blocks may have
        come from a plain prompt, or the writer may have been behind.
        """
        for part, kind, start, end in self._parts(request):
            if not all(p is None or p.page < 0 or p.complete for p in part.parents):
                return
            key = self._key(request, kind, start, end)
            if part.complete:
                self._keep(key, part, kind, end - start)
            elif not any(b.filled for b in part.blocks[part.cursor :]):  # else another request is computing it
                self._fetch(key, part)

    def forget(self, request: Request) -> None:
        """Delete the chunks of a prompt, or the prefix if there is no chunk."""
        for kind, start, end in request.parts:
            if kind >= 0 or not request.layout.num_chunks:
                key = self._key(request, kind, start, end)
                self._stored.pop(key, None)
                self.writer.delete(key)

    def _fetch(self, key: bytes, part: Part) -> None:
        like = [((len(part.blocks), *shape), dtype) for shape, dtype in self.runner.page_shapes]
        arrays = None if self.writer.deletes(key) else self.store.get(key, like)
        self._counts["miss" if arrays is None else "hit"] += 1
        if arrays is None:
            self._stored.pop(key, None)
            return
        missing = part.blocks[part.cursor :]
        self.runner.write_pages([b.page for b in missing], [a[part.cursor :] for a in arrays])
        for block in missing:
            block.filled = block.planned = block.size
        self._remember(key)
        self.writer.touch(key)

    def save(self, spans: Iterable[Span]) -> None:
        """Hand parts that a step has completed to the writer."""
        for sequence, start, end in spans:
            if start >= sequence.request.layout.question_start:
                continue
            for part, kind, first, last in self._parts(sequence.request):
                wanted = first < end and start < last and part.complete
                if wanted and all(block.keep for block in part.blocks):  # nobody has it forgotten meanwhile
                    self._keep(self._key(sequence.request, kind, first, last), part, kind, last - first)

    def _keep(self, key: bytes, part: Part, kind: int, tokens: int) -> None:
        """See that a complete part is on disk, and count it as used."""
        for lost in self.writer.take_lost():
            self._stored.pop(lost, None)
        if key in self._stored:
            self.writer.touch(key)
            return
        size = len(part.blocks) * self.runner.page_bytes
        fetch, name = self.runner.read_pages([b.page for b in part.blocks]), "prefix" if kind == PREFIX_ID else "chunk"
        if self.writer.submit(key, fetch, tokens=tokens, kind=name, num_bytes=size):
            self._remember(key)

    def _remember(self, key: bytes) -> None:
        self._stored[key] = None
        self._stored.move_to_end(key)
        if len(self._stored) > _REMEMBERED:
            self._stored.popitem(last=False)

    def _parts(self, request: Request) -> list[tuple[Part, int, int, int]]:
        """Parts the store keeps, with chunk id and token range; none of a request that does not share or has ended."""
        passing = request.score or (request.precompute and not request.precompute.persist)
        if passing or not request.shares or not request.sequences or not request.sequences[0].parts:
            return []
        parts = zip(request.sequences[0].parts, request.parts, strict=True)
        return [(part, kind, start, end) for part, (kind, start, end) in parts if kind != QUESTION_ID]

    def _key(self, request: Request, kind: int, start: int, end: int) -> bytes:
        ids = request.layout.token_ids
        prefix = ids[: request.layout.prefix_len]
        chunk = None if kind == PREFIX_ID else ids[start:end]
        return entry_key(self.fingerprint, request.cache_salt, prefix, chunk, int(request.layout.positions[start]))

    def catch_up(self, timeout: float = 600.0) -> bool:
        """Wait for the writer when it is far behind, as precomputing makes it. Returns whether it no longer is."""
        return self.writer.pending_bytes < PENDING_BYTES // 2 or self.writer.flush(timeout)

    def close(self) -> None:
        """Write what is pending and close the store."""
        self.writer.close(timeout=60)
        self.store.close()
