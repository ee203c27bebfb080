"""`Placement`: finds the parts of a sequence in the trie of blocks, or allocates blocks for them.

This module alone defines how a prompt becomes a path in the trie: the prefix, the chunks below the prefix, and the
question below the prefix and its chunks.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from chunkattn.cache.trie import Block, BlockTrie, Key
from chunkattn.engine.request import Part, Request, Sequence, held_by
from chunkattn.layout import PREFIX_ID, QUESTION_ID


class Placement:
    """Allocator of blocks for sequences."""

    def __init__(self, trie: BlockTrie, block_size: int) -> None:
        self.trie, self.block_size = trie, block_size

    def place(self, request: Request, headroom: int) -> bool:
        """Hold every block of the tokens known so far, for all sequences of a request, or hold none.

        Args:
            request: request that is not placed yet.
            headroom: pages to leave free for sequences that are growing.

        Returns:
            Whether enough pages were available.
        """
        for sequence in request.sequences:
            if not self._place(sequence, headroom):
                self.release(request)
                return False
        if request.forks and request.plan.end % self.block_size:
            if self.trie.num_available < request.samples - 1 + headroom:
                self.release(request)
                return False
            request.spares = [self._new(request, self.block_size) for _ in range(request.samples - 1)]
        return True

    def missing(self, request: Request) -> int:
        """Return the number of pages that placing a request would take."""
        total = 0
        for sequence in request.sequences:
            found, missing = self._find(sequence)
            self._release_found(sequence, found)
            total += missing
        return total

    def mark_cached(self, request: Request, *, forget: bool) -> None:
        """Mark every prompt token as computed, except the cached tokens.

        Args:
            request: request that does not run.
            forget: whether to forget its cached chunks, or its prefix if it has no chunk.
        """
        request.computed[:] = True
        for part, (kind, _, _) in zip(self.look_up(request), request.parts, strict=True):
            request.computed[part.start : part.start + sum(b.filled for b in part.blocks)] = False
            if forget and part.blocks and (kind >= 0 or not request.layout.num_chunks):
                self.trie.forget(part.blocks)

    def discard(self, request: Request, others: Iterable[Request]) -> None:
        """Forget the cached blocks that a request computed. The request holds no block.

        Blocks that others hold stay, and count as computed by them. Blocks that other cached blocks continue from stay as well.

        Args:
            request: request that has failed.
            others: requests that hold blocks.
        """
        held = set()
        for sequence in request.sequences if request.shares else ():
            found, _ = self._find(sequence)
            self._release_found(sequence, found, used=False)
            for start, block in reversed(self._blocks(found)):
                end = start + block.size
                if end > len(request.layout) or request.computed[start:end].any():
                    if block.refs:
                        held.add(block)
                    else:
                        self.trie.forget([block])
        for other in others if held else ():
            for start, block in self._blocks(other.sequences[0].parts):
                if block in held:
                    other.computed[start : start + block.size] = True

    def _blocks(self, parts: list[Part]) -> list[tuple[int, Block]]:
        """Return the blocks of parts, each with the token index of its first token."""
        return [(p.start + n * self.block_size, block) for p in parts for n, block in enumerate(p.blocks)]

    def look_up(self, request: Request) -> list[Part]:
        """Return the parts of a prompt with the blocks that are cached, without holding the blocks."""
        (sequence,) = request.sequences
        found, _ = self._find(sequence)
        self._release_found(sequence, found, used=False)
        return found

    def _find(self, sequence: Sequence) -> tuple[list[Part], int]:
        """Hold the blocks of a sequence that are in the trie. Return its parts and the number of missing blocks."""
        request = sequence.request
        if request.shares:
            root = self.trie.root(request.salt_key)
        else:
            root = request.root = request.root or self.trie.private_root()
        sequence.root = self.trie.acquire(root)
        return self._walk(sequence)

    def _release_found(self, sequence: Sequence, found: list[Part], *, used: bool = True) -> None:
        assert sequence.root is not None
        self.trie.release([*held_by(found), sequence.root], used=used)
        sequence.root = None

    def _place(self, sequence: Sequence, headroom: int) -> bool:
        request = sequence.request
        found, missing = self._find(sequence)
        if missing + headroom > self.trie.num_available:
            self._release_found(sequence, found)
            return False
        sequence.parts, _ = self._walk(sequence, found)
        pages = [block.page for part in sequence.parts for block in part.blocks]
        sequence.num_pages = len(pages)
        sequence.pages = np.zeros(request.pages_per_sample, np.int32)
        sequence.pages[: len(pages)] = pages
        return True

    def _walk(self, sequence: Sequence, found: list[Part] | None = None) -> tuple[list[Part], int]:
        """Walk the parts of a sequence through the trie. Return the parts and the number of missing blocks.

        Without `found`, hold the blocks that are in the trie. With `found`, the parts from such a walk, allocate the missing
        blocks. The found blocks stay held meanwhile, so that allocation evicts none of them.
        """
        request, parts, missing, first = sequence.request, [], 0, 0
        prefix: Block | None = sequence.root
        ends: list[Block | None] = []
        for number, (kind, start, end) in enumerate(request.parts):
            grows = number == len(request.parts) - 1 and request.sampling is not None
            size = (sequence.num_tokens if grows else end) - start
            part = found[number] if found else Part(start, first, ())
            part.parents = (prefix, *ends) if kind == QUESTION_ID else (prefix,)
            last = self._follow(sequence, part, number, size, grows, create=found is not None)
            parts.append(part)
            first += -(-size // self.block_size)
            if number not in request.repeats:  # a repeated chunk reuses the blocks of its first occurrence
                missing += first - part.first - len(part.blocks)
            if kind == PREFIX_ID:
                prefix = last
            elif kind != QUESTION_ID:
                ends.append(last)
        return parts, missing

    def _follow(self, sequence: Sequence, part: Part, number: int, size: int, grows: bool, *, create: bool) -> Block | None:
        """Extend a part by its next blocks. Return the last block, or None if it is neither found nor allocated."""
        request, block = sequence.request, part.blocks[-1] if part.blocks else None
        parents = part.parents if block is None else (block,)
        for kept in part.blocks if create else ():
            kept.keep |= request.shares  # a new user cancels a pending forget
        total = -(-size // self.block_size)
        # Every request computes its last prompt token itself: cached tokens have no logits.
        reads = request.score is not None or request.logprobs_from is not None
        private = reads and request.parts[number][0] == QUESTION_ID
        shared = 0 if private else (size - 1) // self.block_size if grows else total
        for index in range(len(part.blocks), total):
            start, block = index * self.block_size, None
            width = self.block_size if grows else min(size - start, self.block_size)
            known = [p for p in parents if p is not None]
            if index < shared and len(known) == len(parents):
                key = self._key(sequence, number, part.start + start, width, known)
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

    def _key(self, sequence: Sequence, number: int, start: int, width: int, parents: Seq[Block]) -> Key:
        """Return what a block's K/V depends on besides its first parent: position, tokens and the other parents."""
        request, kind = sequence.request, sequence.request.parts[number][0]
        private = number if request.distinct else -1
        weighing = request.weighing if kind == QUESTION_ID else None
        # A chunk alone has the K/V of a plain prompt, but for the bits: its attention to the prefix is summed apart.
        apart = kind != PREFIX_ID and request.plan.prefix_end > 0
        return request.key_of(sequence, start, width), private, weighing, apart, *(p.serial for p in parents[1:])

    def _new(self, request: Request, size: int) -> Block:
        return self.trie.new(size, keep=request.shares)

    def grow(self, sequence: Sequence) -> bool:
        """Provide a slot for one more token. Return whether a page was available."""
        part = sequence.parts[-1]
        if sequence.num_tokens - part.start <= len(part.blocks) * self.block_size:
            return True
        if not self.trie.num_available:
            return False
        block = self._new(sequence.request, self.block_size)
        part.blocks.append(block)
        sequence.pages[sequence.num_pages] = block.page
        sequence.num_pages += 1
        return True

    def publish(self, sequence: Sequence, part: Part, index: int) -> None:
        """Add a full block of generated tokens to the trie, or switch to the block of equal content that is there.

        Blocks of scored items stay private. Items are isolated and their positions restart, so tokens and first position do
        not determine the K/V.

        Args:
            sequence: sequence that computed the block.
            part: last part of the sequence.
            index: index of the block in the part.
        """
        request, block = sequence.request, part.blocks[index]
        if request.sampling is None:
            return
        above = part.parents if index == 0 else (part.blocks[index - 1],)
        parents = tuple(p for p in above if p is not None and p.key is not None)
        if not request.shares or len(parents) < len(above):
            return
        key = self._key(sequence, len(request.parts) - 1, part.start + index * self.block_size, block.size, parents)
        twin = parents[0].children.get(key)
        if twin is None:
            block.keep = all(parent.keep for parent in parents)  # a child of a block to be forgotten is forgotten, too
            self.trie.link(block, parents, key)
        elif twin.complete:
            part.blocks[index] = self.trie.acquire(twin)
            sequence.pages[part.first + index] = twin.page
            self.trie.release([block])

    def fork(self, request: Request) -> list[tuple[int, int]]:
        """Create the other samples of a request with a computed prompt.

        Returns:
            Pages to copy, `(from, to)`. Each sample gets its own copy of the prompt's last, partial page.
        """
        first, copies = request.sequences[0], []
        for sample in range(1, request.samples):
            sequence = Sequence(request, sample, root=first.root, current=first.current)
            sequence.parts = [Part(p.start, p.first, p.parents, list(p.blocks), p.cursor) for p in first.parts]
            sequence.pages, sequence.num_pages = first.pages.copy(), first.num_pages
            for block in first.held:
                self.trie.acquire(block)
            if request.spares:
                tail, own = sequence.parts[-1].blocks[-1], request.spares.pop()
                own.filled = own.planned = tail.filled
                copies.append((tail.page, own.page))
                self.trie.release([tail])
                sequence.parts[-1].blocks[-1] = own
                sequence.pages[sequence.num_pages - 1] = own.page
            request.sequences.append(sequence)
        return copies

    def release(self, request: Request) -> None:
        """Release every block of a request. The request keeps its generated tokens."""
        for sequence in request.sequences:
            self.release_sequence(sequence)
        self.trie.release(request.spares)
        request.spares = []

    def forget(self, request: Request) -> None:
        """Clear the blocks of a request after the pool was reset, without releasing them."""
        for sequence in request.sequences:
            sequence.parts, sequence.root, sequence.current, sequence.num_pages = [], None, 0, 0
        request.spares, request.root = [], None

    def release_sequence(self, sequence: Sequence) -> None:
        """Release the blocks of one sequence."""
        self.trie.release(sequence.held)
        sequence.parts, sequence.root, sequence.current, sequence.num_pages = [], None, 0, 0
