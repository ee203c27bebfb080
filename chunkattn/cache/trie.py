r"""The trie of computed K/V: prefix blocks, chunk blocks below prefix blocks, and question blocks below chunk blocks.

A block holds one page of tokens, taken from a pool. Its K/V depend on the blocks above it and on its own tokens and
positions, so every sequence with the same path can use it:

    root(salt) -> prefix blocks -> blocks of each chunk
                              \-> question blocks, below the prefix and the ordered chunks

Keys hold the tokens themselves instead of hashes, so a collision cannot mix two documents. The children of a full block
continue at the next position, so a plain prompt and a prefix, or two prefixes, share their blocks up to the first
difference.

A block enters the trie when a request needs it, before it is computed. The next request to run fills it, so requests
that need the same block compute it once, even if one of them is aborted. Reference counts pin blocks; among blocks
without references, the least recently used leaf is evicted first.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any

from chunkattn.errors import OutOfPagesError

Key = tuple[object, ...]


class Block:
    """One page of K/V and its place in the trie.

    Attributes:
        page: page number; -1 for a root.
        size: number of slots that hold a token once the block is complete.
        filled: number of tokens computed.
        planned: number of tokens computed once the step being built has run.
        refs: number of sequences and pins that hold the block.
        parents: blocks it depends on; the first parent lists it in `children`.
        later: blocks that have this block as a parent other than the first.
        key: key under the first parent, or the salt for a root; None while the block is private to one sequence.
        keep: whether the block stays cached when its last holder releases it.
        states: what the cache of states keeps of the block, by the number of its tokens; None for nothing.
        walker: who computes the part that ends in the block, in a model with recurrent layers; None for nobody.
    """

    __slots__ = (
        "children",
        "dependents",
        "filled",
        "keep",
        "key",
        "last_used",
        "later",
        "page",
        "parents",
        "planned",
        "refs",
        "serial",
        "size",
        "states",
        "walker",
    )

    def __init__(self, serial: int, page: int, size: int, keep: bool) -> None:
        self.serial, self.page, self.size, self.keep = serial, page, size, keep
        self.filled = self.planned = self.refs = self.dependents = self.last_used = 0
        self.parents: tuple[Block, ...] = ()
        self.key: Key | None = None
        self.children: dict[Key, Block] = {}
        self.later: set[Block] = set()
        self.states: dict[int, Any] | None = None
        self.walker: object = None

    @property
    def complete(self) -> bool:
        """Return whether all tokens of the block are computed."""
        return self.filled == self.size


class BlockTrie:
    """Blocks by content, over a pool of pages `0 ... num_pages - 1`, each free or held by one block.

    Attributes:
        num_pages: number of pages.
        evictions: number of blocks evicted so far.
        dropped: called with each block that has `states` when it leaves the pool.
    """

    def __init__(self, num_pages: int, dropped: Callable[[Block], None] | None = None) -> None:
        self.num_pages, self.dropped = num_pages, dropped
        self.evictions = 0
        self._serials, self._clock = count(), count()
        self.reset()

    def reset(self) -> None:
        """Forget every block and mark every page free, after the pool is lost. No block may be held."""
        self._free = deque(range(self.num_pages))
        self._roots: dict[str | None, Block] = {}
        self._unheld: set[Block] = set()
        self._leaves: list[tuple[int, int, Block]] = []  # eviction candidates; stale entries are skipped

    @property
    def num_free(self) -> int:
        """Return the number of free pages."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Return the number of pages that `new` can hand out: free pages and pages of unreferenced blocks."""
        return len(self._free) + len(self._unheld)

    @property
    def num_cached(self) -> int:
        """Return the number of blocks cached without references."""
        return len(self._unheld)

    def root(self, salt: str | None) -> Block:
        """Return the root of the paths under a salt. Different salts share no blocks."""
        if salt not in self._roots:
            self._roots[salt] = Block(next(self._serials), -1, 0, keep=True)
            self._roots[salt].key = (salt,)
        return self._roots[salt]

    def private_root(self) -> Block:
        """Return a root known only to the caller. Blocks below it are freed with their last holder."""
        return Block(next(self._serials), -1, 0, keep=False)

    def _forget(self, root: Block) -> None:
        """Remove the root of a salt if it has neither references nor blocks below it."""
        if root.key and not root.dependents and not root.refs:
            del self._roots[root.key[0]]  # type: ignore[arg-type]
            root.key = None

    # Holding

    def acquire(self, block: Block) -> Block:
        """Add a holder to a block and return the block. A holder must also hold the block's parents."""
        block.refs += 1
        self._unheld.discard(block)
        return block

    def release(self, blocks: Iterable[Block], *, used: bool = True) -> None:
        """Remove one holder from each block; pass children before their parents.

        A complete block of the trie stays cached until its page is needed, unless it is marked as forgotten. Every other block
        is freed with its last holder.

        Args:
            blocks: blocks to release, children first.
            used: whether the release counts as a use for the eviction order.
        """
        now = next(self._clock)
        for block in blocks:
            block.refs -= 1
            block.last_used = now if used else block.last_used
            if block.refs:
                continue
            if block.page < 0:
                self._forget(block)
            elif block.complete and block.key is not None and (block.keep or block.dependents):
                self._unheld.add(block)
                self._offer(block)
            else:
                self._drop(block)

    def forget(self, path: Sequence[Block]) -> None:
        """Forget the blocks of a path and the blocks computed with the whole path as context.

        A forgotten block that is held is freed when its last holder releases it. A block that another path continues from stays
        as long as that path does.

        Args:
            path: blocks from the first to the last, each the parent of the next.
        """
        doomed, below = [*path], [*path[-1].later]
        while below:
            doomed.append(block := below.pop())
            below += block.children.values()
        for block in reversed(doomed):
            block.keep = False
            if block in self._unheld and not block.dependents:
                self._unheld.discard(block)
                self._drop(block)

    # Blocks

    def new(self, size: int, *, keep: bool) -> Block:
        """Return a held, private block on a page of its own. Evict the least recently used leaf if no page is free.

        Args:
            size: slots that hold a token once the block is complete.
            keep: whether the block stays cached after its last holder releases it.

        Raises:
            OutOfPagesError: every page is held.
        """
        if not self._free:
            self._evict()
        if not self._free:
            raise OutOfPagesError(f"none of {self.num_pages} pages is free")
        block = Block(next(self._serials), self._free.popleft(), size, keep)
        block.refs = 1
        return block

    def link(self, block: Block, parents: tuple[Block, ...], key: Key) -> None:
        """Put a private block into the trie.

        Args:
            block: the private block.
            parents: blocks that its K/V depend on; all must be held and in the trie.
            key: key of the block under the first parent; it must be free.
        """
        block.parents, block.key = parents, key
        parents[0].children[key] = block
        for parent in parents:
            parent.dependents += 1
        for parent in parents[1:]:
            parent.later.add(block)

    def evict_all(self) -> None:
        """Evict every block without references."""
        while self._unheld:
            self._evict()

    def _offer(self, block: Block) -> None:
        """Make a block a candidate for eviction if it is an unreferenced leaf."""
        if block in self._unheld and not block.dependents:
            heapq.heappush(self._leaves, (block.last_used, block.serial, block))
            if len(self._leaves) > 2 * self.num_pages + 64:
                self._leaves = [entry for entry in dict.fromkeys(self._leaves) if self._valid(entry)]
                heapq.heapify(self._leaves)

    def _valid(self, entry: tuple[int, int, Block]) -> bool:
        last_used, _, block = entry
        # A block gains children only while held, and its release then updates `last_used`.
        return block in self._unheld and block.last_used == last_used

    def _evict(self) -> None:
        while self._leaves:
            entry = heapq.heappop(self._leaves)
            if self._valid(entry):
                self.evictions += 1
                self._unheld.discard(entry[2])
                self._drop(entry[2])
                return

    def _drop(self, block: Block) -> None:
        """Unlink a block without references or dependents and free its page."""
        assert not block.refs
        assert not block.dependents
        self._free.append(block.page)
        if block.states and self.dropped is not None:
            self.dropped(block)
        if block.key is not None:
            del block.parents[0].children[block.key]
            for parent in block.parents[1:]:
                parent.later.discard(block)
            for parent in block.parents:
                parent.dependents -= 1
                self._offer(parent)
                if parent.page < 0:
                    self._forget(parent)
            block.key = None

    # Inspection

    def blocks(self) -> Iterator[Block]:
        """Yield every block below the roots with a salt."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            block = stack.pop()
            yield block
            stack += block.children.values()

    def check(self, holders: Iterable[Iterable[Block]]) -> None:
        """Assert the invariants against the blocks that every sequence and pin holds.

        Args:
            holders: blocks of each sequence and pin.

        Raises:
            AssertionError: reference counts differ from the holders; a page is lost, both free and used, or used twice; or a
                block is held without its parents.
        """
        refs: dict[Block, int] = {}
        for held in holders:
            for block in held:
                refs[block] = refs.get(block, 0) + 1
        reachable = set(self.blocks())
        assert all(b.refs == refs.get(b, 0) for b in reachable | set(refs)), "reference counts do not match the holders"
        assert {b for b in reachable if not b.refs} == self._unheld, "unheld blocks are miscounted"
        assert all(b.complete for b in self._unheld), "an incomplete block is kept"
        for block in reachable:
            assert all(p.page < 0 or (p in reachable and p.refs >= bool(block.refs)) for p in block.parents), "parent lost"
            expected = sum(child.parents.count(block) for child in reachable)
            assert len(block.children) <= block.dependents == expected, "dependents are miscounted"
            assert block.later == {child for child in reachable if block in child.parents[1:]}, "later blocks are miscounted"
        used = [b.page for b in reachable | {b for b in refs if b.page >= 0}]
        assert sorted([*self._free, *used]) == list(range(self.num_pages)), "pages are lost, or both free and held"
