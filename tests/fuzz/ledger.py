"""An upper bound on what the cache may hold: whose K/V has been asked for, by salt and content.

The K/V of a token depends on the tokens and positions before it, as docs/concepts/semantics.md has it. The ledger states that
dependence without blocks, pages or keys: a token is a *path*, its context and every token from the context's start to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from chunkattn.engine.messages import CachedTokens
from chunkattn.layout import ChunkLayout, Segment

Path = tuple[object, bytes]


class Owner(NamedTuple):
    """One part of one request."""

    request_id: str
    part: int


def part_paths(layout: ChunkLayout) -> Iterator[tuple[Segment, list[Path]]]:
    """Yield every part with one path a token.

    Prefix tokens, and tokens that go on from the prefix as if the prompt were plain, have the context None: every chunk at
    the position behind the prefix, and the question when all chunks are empty. Another chunk's context is the prefix and
    its position; a question's context is the prefix and the set of chunks with their positions.
    """
    prefix = layout.token_ids[: layout.prefix_len].tobytes()
    chunks = []
    for number, segment in enumerate(layout.segments):
        if segment.start == segment.end:
            yield segment, []
            continue
        ids, position = layout.part(segment), int(layout.positions[segment.start])
        if 0 < number <= layout.num_chunks:
            chunks.append((position, ids.tobytes()))
        question = segment.chunk_id < -1 and bool(chunks)
        context: object = (prefix, tuple(sorted(chunks))) if question else (prefix, position)
        before = b""
        if not question and position == layout.prefix_len * (number > 0):
            context, before = None, prefix if number else b""
        yield segment, [(context, before + ids[:end].tobytes()) for end in range(1, len(ids) + 1)]


class Ledger:
    """Paths with the requests that had them computed, two owners a path at most: enough to find one that is another."""

    def __init__(self) -> None:
        self._owners: dict[tuple[str | None, Path], set[Owner]] = defaultdict(set)

    def note(self, request_id: str, salt: str | None, layout: ChunkLayout) -> None:
        """Note that a request has every token of a layout computed and left in the cache under a salt."""
        for number, (_, paths) in enumerate(part_paths(layout)):
            for path in paths:
                owners = self._owners[salt, path]
                if len(owners) < 2:
                    owners.add(Owner(request_id, number))

    def bound(self, request_id: str, salt: str | None, layout: ChunkLayout) -> CachedTokens:
        """Return how many tokens of every part others, or other parts of the same request, can have left."""
        counts = []
        for number, (_, paths) in enumerate(part_paths(layout)):
            me, known = Owner(request_id, number), 0
            while known < len(paths) and self._owners.get((salt, paths[known]), set()) - {me}:
                known += 1
            counts.append(known)
        return CachedTokens(counts[0], tuple(counts[1:-1]), counts[-1])


def exceeds(found: CachedTokens, most: CachedTokens) -> bool:
    """Return whether any part has more tokens than it may."""
    parts = [np.array([c.prefix, *c.chunks, c.question]) for c in (found, most)]
    return bool((parts[0] > parts[1]).any() or (parts[0] < 0).any())
