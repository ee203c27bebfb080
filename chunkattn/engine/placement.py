"""`Placement`: finds the parts of a sample in the trie of blocks, or allocates blocks for them.

This module alone defines how a prompt becomes a path in the trie: the prefix, the chunks below the prefix, and the
question below the prefix and its chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from chunkattn.cache.trie import Block, BlockTrie, Key
from chunkattn.engine.request import Part, Request, Sample, held_by
from chunkattn.engine.walks import Walks
from chunkattn.layout import PREFIX_ID, QUESTION_ID


class Placement:
    """Allocator of blocks for samples.

    Args:
        trie: cache of blocks.
        block_size: tokens per page.
        walks: planner of recurrent layers, whose slots and seats a sample takes with its blocks; None for none.

    Attributes:
        lacks_states: whether the last request that was not placed had its pages, but not its slots and seats.
    """

    def __init__(self, trie: BlockTrie, block_size: int, walks: Walks | None = None) -> None:
        self.trie, self.block_size, self._walks = trie, block_size, walks
        self.lacks_states = False

    def place(self, request: Request, headroom: int) -> bool:
        """Hold every block of the tokens known so far, for all samples of a request, or hold none.

        Args:
            request: request that is not placed yet.
            headroom: pages to leave free for samples that are growing.

        Returns:
            Whether there was room.
        """
        for sample in request.samples:
            if not self._place(sample, headroom):
                self.release(request)
                return False
        if request.forks and request.plan.end % self.block_size:
            if self.trie.num_available < request.num_samples - 1 + headroom:
                self.release(request)
                return False
            request.spares = [self._new(request, self.block_size) for _ in range(request.num_samples - 1)]
        self.lacks_states = self._walks is not None and not self._walks.take(request)
        if self.lacks_states:
            self.release(request)
        return not self.lacks_states

    def missing(self, request: Request) -> int:
        """Return the number of pages that placing a request would take."""
        total = 0
        for sample in request.samples:
            cached, missing = self._find(sample)
            self._release_found(sample, cached)
            total += missing
        return total

    def mark_cached(self, request: Request, *, forget: bool) -> None:
        """Mark every prompt token as computed, except the cached tokens.

        With recurrent layers, a token whose K/V is cached is computed again if it lies before a state that is missing.

        Args:
            request: request that does not run.
            forget: whether to forget its cached chunks, or its prefix if it has no chunk.
        """
        request.computed[:] = True
        parts = self.look_up(request)
        self.note_states(request, parts)
        for number, (part, (kind, _, _)) in enumerate(zip(parts, request.segments, strict=True)):
            cached = sum(block.filled for block in part.blocks)
            if self._walks is not None:
                cached = self._walks.count_cached(request, number, part)
            request.computed[part.start : part.start + cached] = False
            if forget and part.blocks and (kind >= 0 or not request.layout.num_chunks):
                self.trie.forget(part.blocks)

    def note_states(self, request: Request, parts: list[Part]) -> None:
        """Note the chunks of a precompute request whose states the cache holds.

        Args:
            request: the request.
            parts: its parts, perhaps with some of their blocks alone.
        """
        if (walks := self._walks) is not None:
            pairs = zip(parts, request.segments, strict=True)
            request.kept_states = {kind for part, (kind, start, end) in pairs if walks.has_state(part, end - start)}

    def discard(self, request: Request, others: Iterable[Request]) -> None:
        """Forget the cached blocks that a request computed. The request holds no block.

        Blocks that others hold stay, and count as computed by them. Blocks that other cached blocks continue from stay as well.

        Args:
            request: request that has failed.
            others: requests that hold blocks.
        """
        held = set()
        for sample in request.samples if request.shares else ():
            cached, _ = self._find(sample)
            self._release_found(sample, cached, used=False)
            for start, block in reversed(self._blocks(cached)):
                end = start + block.size
                if end > len(request.layout) or request.computed[start:end].any():
                    if block.refs:
                        held.add(block)
                    else:
                        self.trie.forget([block])
        for other in others if held else ():
            for start, block in self._blocks(other.samples[0].parts):
                if block in held:
                    other.computed[start : start + block.size] = True

    def _blocks(self, parts: list[Part]) -> list[tuple[int, Block]]:
        """Return the blocks of parts, each with the token index of its first token."""
        return [(p.start + n * self.block_size, block) for p in parts for n, block in enumerate(p.blocks)]

    def look_up(self, request: Request) -> list[Part]:
        """Return the parts of a prompt with the blocks that are cached, without holding the blocks."""
        (sample,) = request.samples
        cached, _ = self._find(sample)
        self._release_found(sample, cached, used=False)
        return cached

    def _find(self, sample: Sample) -> tuple[list[Part], int]:
        """Hold the blocks of a sample that are in the trie. Return its parts and the number of missing blocks."""
        request = sample.request
        if request.shares:
            root = self.trie.root(request.salt_key)
        else:
            root = request.root = request.root or self.trie.private_root()
        sample.root = self.trie.acquire(root)
        return self._walk(sample)

    def _release_found(self, sample: Sample, cached: list[Part], *, used: bool = True) -> None:
        assert sample.root is not None
        self.trie.release([*held_by(cached), sample.root], used=used)
        sample.root = None

    def _place(self, sample: Sample, headroom: int) -> bool:
        request = sample.request
        cached, missing = self._find(sample)
        if missing + headroom > self.trie.num_available:
            self._release_found(sample, cached)
            return False
        sample.parts, _ = self._walk(sample, cached)
        pages = [block.page for part in sample.parts for block in part.blocks]
        sample.num_pages = len(pages)
        sample.pages = np.zeros(request.pages_per_sample, np.int32)
        sample.pages[: len(pages)] = pages
        return True

    def _walk(self, sample: Sample, cached: list[Part] | None = None) -> tuple[list[Part], int]:
        """Walk the parts of a sample through the trie. Return the parts and the number of missing blocks.

        Without `cached`, hold the blocks that are in the trie. With `cached`, the parts from such a walk, allocate the missing
        blocks. The found blocks stay held meanwhile, so that allocation evicts none of them.
        """
        request, parts, missing, first = sample.request, [], 0, 0
        prefix: Block | None = sample.root
        ends: list[Block | None] = []
        for number, (kind, start, end) in enumerate(request.segments):
            grows = number == len(request.segments) - 1 and request.sampling is not None
            size = (sample.num_tokens if grows else end) - start
            part = cached[number] if cached else Part(start, first, ())
            part.parents = (prefix, *ends) if kind == QUESTION_ID else (prefix,)
            last = self._follow(sample, part, number, size, grows, create=cached is not None)
            parts.append(part)
            first += -(-size // self.block_size)
            if number not in request.repeats:  # a repeated chunk reuses the blocks of its first occurrence
                missing += first - part.first - len(part.blocks)
            if kind == PREFIX_ID:
                prefix = last
            elif kind != QUESTION_ID:
                ends.append(last)
            elif request.is_state(number):  # the question continues after it
                prefix, ends = last, []
        return parts, missing

    def _follow(self, sample: Sample, part: Part, number: int, size: int, grows: bool, *, create: bool) -> Block | None:
        """Extend a part by its next blocks. Return the last block, or None if it is neither found nor allocated."""
        request, block = sample.request, part.blocks[-1] if part.blocks else None
        parents = part.parents if block is None else (block,)
        for kept in part.blocks if create else ():
            kept.keep |= request.shares  # a new user cancels a pending forget
        total = -(-size // self.block_size)
        # Every request computes its last prompt token itself: cached tokens have no logits.
        reads = request.score is not None or request.logprobs_from is not None
        private = reads and request.segments[number][0] == QUESTION_ID and not request.is_state(number)
        shared = 0 if private else (size - 1) // self.block_size if grows else total
        for index in range(len(part.blocks), total):
            start, block = index * self.block_size, None
            width = self.block_size if grows else min(size - start, self.block_size)
            known = [p for p in parents if p is not None]
            if index < shared and len(known) == len(parents):
                key = self._key(sample, number, part.start + start, width, known)
                block = known[0].children.get(key)
                if block is not None:
                    self.trie.acquire(block)
                    block.keep |= create and request.shares
                elif create:
                    block = self._new(request, width)
                    self.trie.link(block, tuple(known), key)
            elif create:
                block = self._new(request, width)
            if block is None:
                return None
            part.blocks.append(block)
            parents = (block,)
        return block

    def _key(self, sample: Sample, number: int, start: int, width: int, parents: Sequence[Block]) -> Key:
        """Return what a block's K/V depends on besides its first parent: position, tokens and the other parents."""
        request, kind = sample.request, sample.request.segments[number][0]
        private = number if request.distinct else -1
        weighing = request.weighing if kind == QUESTION_ID else None
        # A chunk alone has the K/V of a plain prompt, but for the bits: its attention to the prefix is summed apart.
        apart = kind != PREFIX_ID and request.plan.prefix_end > 0
        return request.key_of(sample, start, width), private, weighing, apart, *(p.serial for p in parents[1:])

    def _new(self, request: Request, size: int) -> Block:
        return self.trie.new(size, keep=request.shares)

    def lacks(self, sample: Sample, more: int = 0) -> int:
        """Return how many pages a sample lacks for its tokens and `more`."""
        part = sample.parts[-1]
        return max(-(-(sample.num_tokens + more - part.start) // self.block_size) - len(part.blocks), 0)

    def grow(self, sample: Sample, more: int = 0) -> bool:
        """Provide slots for a sample's tokens and `more`. Return whether there were pages; without, none is taken."""
        lacking = self.lacks(sample, more)
        if lacking > self.trie.num_available:
            return False
        for _ in range(lacking):
            block = self._new(sample.request, self.block_size)
            sample.parts[-1].blocks.append(block)
            sample.pages[sample.num_pages] = block.page
            sample.num_pages += 1
        return True

    def shrink(self, samples: Iterable[Sample]) -> None:
        """Take back the last page of samples that `grow` gave them and that nothing was written to."""
        for sample in samples:
            if sample.parts:  # otherwise the sample has ended and released its pages
                sample.num_pages -= 1
                self.trie.release([sample.parts[-1].blocks.pop()])

    def publish(self, sample: Sample, part: Part, index: int) -> None:
        """Add a full block of generated tokens to the trie, or switch to the block of equal content that is there.

        Blocks of scored items stay private. Items are isolated and their positions restart, so tokens and first position do
        not determine the K/V.

        Args:
            sample: sample that computed the block.
            part: last part of the sample.
            index: index of the block in the part.
        """
        request, block = sample.request, part.blocks[index]
        if request.sampling is None:
            return
        above = part.parents if index == 0 else (part.blocks[index - 1],)
        parents = tuple(p for p in above if p is not None and p.key is not None)
        if not request.shares or len(parents) < len(above):
            return
        key = self._key(sample, len(request.segments) - 1, part.start + index * self.block_size, block.size, parents)
        twin = parents[0].children.get(key)
        if twin is None:
            block.keep = all(parent.keep for parent in parents)  # a child of a block to be forgotten is forgotten, too
            self.trie.link(block, parents, key)
        elif twin.complete:
            part.blocks[index] = self.trie.acquire(twin)
            sample.pages[part.first + index] = twin.page
            self.trie.release([block])

    def fork(self, request: Request) -> list[tuple[int, int]]:
        """Create the other samples of a request with a computed prompt.

        Returns:
            Pages to copy, `(from, to)`. Each sample gets its own copy of the prompt's last, partial page.
        """
        first, copies = request.samples[0], []
        for number in range(1, request.num_samples):
            sample = Sample(request, number, root=first.root, current=first.current)
            sample.parts = [Part(p.start, p.first, p.parents, list(p.blocks), p.cursor) for p in first.parts]
            sample.pages, sample.num_pages = first.pages.copy(), first.num_pages
            for block in first.held:
                self.trie.acquire(block)
            if request.spares:
                tail, copy = sample.parts[-1].blocks[-1], request.spares.pop()
                copy.filled = copy.planned = tail.filled
                copies.append((tail.page, copy.page))
                self.trie.release([tail])
                sample.parts[-1].blocks[-1] = copy
                sample.pages[sample.num_pages - 1] = copy.page
            if self._walks is not None:
                self._walks.fork(first, sample, request.spare_tracks.pop())
            request.samples.append(sample)
        return copies

    def release(self, request: Request) -> None:
        """Release every block of a request. The request keeps its generated tokens."""
        for sample in request.samples:
            self.release_sample(sample)
        self.trie.release(request.spares)
        request.spares = []
        if self._walks is not None:
            self._walks.give_back(request)

    def forget(self, request: Request) -> None:
        """Clear the blocks of a request after the pool was reset, without releasing them."""
        for sample in request.samples:
            sample.parts, sample.root, sample.current, sample.num_pages = [], None, 0, 0
        request.spares, request.root = [], None
        if self._walks is not None:
            self._walks.forget(request)

    def release_sample(self, sample: Sample) -> None:
        """Release the blocks of one sample."""
        if self._walks is not None:
            self._walks.end(sample)
        self.trie.release(sample.held)
        sample.parts, sample.root, sample.current, sample.num_pages = [], None, 0, 0
