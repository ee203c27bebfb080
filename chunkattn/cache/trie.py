r"""The trie of computed K/V: prefix blocks, below them chunks, below those question paths.

A block is one page's worth of tokens. What its K/V is depends on the blocks above it
and its own tokens and positions, so it may be used wherever that path occurs again:

    root(salt) -> prefix blocks -> blocks of each chunk
                              \-> question blocks, below the prefix and the ordered chunks

Keys hold the tokens themselves, not hashes of them: no collision can mix two documents.
The children of a full block are whatever comes next at the next position, so a plain
prompt and a prefix, or two prefixes, share their blocks up to where they part.

Blocks enter the trie when a request needs them, before they are computed. Whoever runs
next fills them, so requests that need the same block compute it once whatever becomes of
either. References pin; of the blocks without, the least recently used leaf goes first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import count

from chunkattn.cache.pages import PagePool

Key = tuple[object, ...]


class Block:
    """One page of K/V and its place in the trie.

    Attributes:
        page: its page; -1 for a root.
        size: slots that hold a token once it is complete.
        filled: tokens computed.
        planned: tokens computed once the step being built has run.
        refs: sequences and pins that hold it.
        parents: the blocks it depends on; it is listed under the first.
        later: blocks it is a parent of, but not the first.
        key: under the first parent, of a root its salt; None while it is private to one sequence.
        keep: whether it stays when nobody holds it.
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
    )

    def __init__(self, serial: int, page: int, size: int, keep: bool) -> None:
        self.serial, self.page, self.size, self.keep = serial, page, size, keep
        self.filled = self.planned = self.refs = self.dependents = self.last_used = 0
        self.parents: tuple[Block, ...] = ()
        self.key: Key | None = None
        self.children: dict[Key, Block] = {}
        self.later: set[Block] = set()

    @property
    def complete(self) -> bool:
        """Whether all its tokens are computed."""
        return self.filled == self.size


class BlockTrie:
    """Blocks by content, over a pool of pages.

    Attributes:
        pool: the pages.
        evictions: blocks given up for their pages so far.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.evictions = 0
        self._serials, self._clock = count(), count()
        self._start()

    def _start(self) -> None:
        self.pool = PagePool(self.num_pages)
        self._roots: dict[str | None, Block] = {}
        self._unheld: set[Block] = set()
        self._leaves: list[tuple[int, int, Block]] = []  # candidates for eviction; some have found holders since

    @property
    def num_available(self) -> int:
        """Pages free or held by blocks nobody refers to: what `new` can still be given."""
        return self.pool.num_free + len(self._unheld)

    @property
    def num_cached(self) -> int:
        """Blocks kept though nobody refers to them."""
        return len(self._unheld)

    def root(self, salt: str | None) -> Block:
        """Where paths under a salt begin. Different salts share nothing."""
        if salt not in self._roots:
            self._roots[salt] = Block(next(self._serials), -1, 0, keep=True)
            self._roots[salt].key = (salt,)
        return self._roots[salt]

    def private_root(self) -> Block:
        """A root only its caller knows, below which nothing outlives its holders."""
        return Block(next(self._serials), -1, 0, keep=False)

    def _forget(self, root: Block) -> None:
        """Forget a salt that nobody uses and below which there is nothing."""
        if root.key and not root.dependents and not root.refs:
            del self._roots[root.key[0]]  # type: ignore[arg-type]
            root.key = None

    # Holding

    def acquire(self, block: Block) -> Block:
        """One more holder; whoever holds a block holds its parents too."""
        block.refs += 1
        self._unheld.discard(block)
        return block

    def release(self, blocks: Iterable[Block], *, used: bool = True) -> None:
        """One holder less, children before their parents.

        Args:
            blocks: held once more than they shall be.
            used: whether this counts as a use, before which others are evicted.

        A complete block of the trie stays until its page is wanted, unless it is to be forgotten; anything else is
        freed with its last holder.
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
        """Keep neither the blocks of a path nor what was computed with all of it; what somebody holds goes with its holder.

        Where another path goes on below one of the blocks, that one stays as long as the other path does.

        Args:
            path: blocks one below the other, from the first.
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
        """A held, private block on a page of its own, evicting the least recently used leaf when none is free.

        Raises:
            OutOfPagesError: every page is held.
        """
        if not self.pool.num_free:
            self._evict()
        block = Block(next(self._serials), self.pool.take(), size, keep)
        block.refs = 1
        return block

    def link(self, block: Block, parents: tuple[Block, ...], key: Key) -> None:
        """Put a private block into the trie; `parents` must be in it and held, `key` free under the first."""
        block.parents, block.key = parents, key
        parents[0].children[key] = block
        for parent in parents:
            parent.dependents += 1
        for parent in parents[1:]:
            parent.later.add(block)

    def reset(self) -> None:
        """Forget every block and hand out the pages anew: for a pool that was lost. Nobody may hold a block."""
        self._start()

    def evict_all(self) -> None:
        """Evict every block nobody holds."""
        while self._unheld:
            self._evict()

    def _offer(self, block: Block) -> None:
        """Make a block a candidate for eviction if it is an unheld leaf."""
        if block in self._unheld and not block.dependents:
            heapq.heappush(self._leaves, (block.last_used, block.serial, block))
            if len(self._leaves) > 2 * self.num_pages + 64:
                self._leaves = [entry for entry in dict.fromkeys(self._leaves) if self._valid(entry)]
                heapq.heapify(self._leaves)

    def _valid(self, entry: tuple[int, int, Block]) -> bool:
        last_used, _, block = entry
        # One that has got children since has had a holder, and with it another time of use.
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
        """Unlink a block nobody holds or depends on and free its page."""
        assert not block.refs
        assert not block.dependents
        self.pool.release(block.page)
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
        """Every block of the trie below the roots with a salt."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            block = stack.pop()
            yield block
            stack += block.children.values()

    def check(self, holders: Iterable[Iterable[Block]]) -> None:
        """Assert the invariants against what every sequence and pin holds.

        Raises:
            AssertionError: reference counts do not equal the holders, a page is lost, both free and
                used or used twice, or a block without its parents is held.
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
        self.pool.check(b.page for b in reachable | {b for b in refs if b.page >= 0})
