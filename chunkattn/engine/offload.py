"""Between the pool and the store on disk: parts are fetched when a request is placed, and written behind the steps."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from chunkattn.cache.store import KVStore, StoreWriter, entry_key
from chunkattn.engine.request import Part, Request
from chunkattn.engine.runner import Runner
from chunkattn.engine.scheduler import Span
from chunkattn.layout import PREFIX_ID, QUESTION_ID

logger = logging.getLogger(__name__)


class DiskTier:
    """Keeps prefixes and chunks of requests that share the cache.

    Attributes:
        counts: parts hit, missed, written, and refused because the writer was behind.
    """

    def __init__(self, store: KVStore, runner: Runner) -> None:
        self.store, self.runner = store, runner
        self.writer = StoreWriter(store, max_pending=16)
        self.fingerprint = runner.fingerprint()
        self.counts: Counter[str] = Counter({"hit": 0, "miss": 0, "submitted": 0, "refused": 0})

    def load(self, request: Request) -> None:
        """Fill a placed request's missing parts from the store, each below a complete prefix only."""
        for part, kind, start, end in self._parts(request):
            if part.complete or any(b.filled for b in part.blocks[part.cursor :]):
                continue  # there, or being computed by another request
            if not all(p is None or p.page < 0 or p.complete for p in part.parents):
                return
            key = self._key(request, kind, start, end)
            like = [((len(part.blocks), *shape), dtype) for shape, dtype in self.runner.page_shapes]
            arrays = self.store.get(key, like)
            self.counts["miss" if arrays is None else "hit"] += 1
            if arrays is None:
                continue
            missing = part.blocks[part.cursor :]
            self.runner.write_pages([b.page for b in missing], [a[part.cursor :] for a in arrays])
            for block in missing:
                block.filled = block.planned = block.size
            self.writer.touch(key)

    def save(self, spans: Iterable[Span]) -> None:
        """Hand parts that a step has completed to the writer."""
        for sequence in dict.fromkeys(s.sequence for s in spans):
            request = sequence.request
            touched = [s for s in spans if s.sequence is sequence]
            for part, kind, start, end in self._parts(request):
                if not part.complete or not any(s.start < end and s.end > start for s in touched):
                    continue
                key = self._key(request, kind, start, end)
                fetch = self.runner.read_pages([b.page for b in part.blocks])
                if self.writer.submit(key, fetch, tokens=end - start, kind="prefix" if kind == PREFIX_ID else "chunk"):
                    self.counts["submitted"] += 1
                else:
                    self.counts["refused"] += 1

    def _parts(self, request: Request) -> list[tuple[Part, int, int, int]]:
        """Parts the store keeps, with chunk id and token range; none of a request that does not share or has ended."""
        if not request.shares or not request.sequences or not request.sequences[0].parts:
            return []
        parts = zip(request.sequences[0].parts, request.parts, strict=True)
        return [(part, kind, start, end) for part, (kind, start, end) in parts if kind != QUESTION_ID]

    def _key(self, request: Request, kind: int, start: int, end: int) -> bytes:
        ids = request.layout.token_ids
        prefix = ids[: request.layout.prefix_len]
        chunk = None if kind == PREFIX_ID else ids[start:end]
        return entry_key(self.fingerprint, request.cache_salt, prefix, chunk, int(request.layout.positions[start]))

    def catch_up(self) -> None:
        """Wait until the writer has caught up, when much is to be written and nobody waits for a token."""
        self.writer.flush(timeout=600)

    def close(self) -> None:
        """Write what is pending and close the store."""
        self.writer.close(timeout=60)
        self.store.close()
