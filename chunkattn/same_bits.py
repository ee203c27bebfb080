"""Judge that an attention backend gives a row the same bits in any company, for `chunkattn.testing.check_backend`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from chunkattn.backends.base import NO_QUESTION, AttentionBackend, AttentionBatch, Weighing

_SEQS = 8
_STEPS = (16, 96, 512)
"""Rows of a step, in turn."""
Row = tuple[int, int, int]
"""Number of the prompt, slot and row start of one row."""


class _Tokens(NamedTuple):
    """Consecutive tokens with their queries, keys and values. Tokens of one name see the same tokens in every prompt."""

    name: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


@dataclass
class Prompt:
    """A prompt laid out in slots.

    Attributes:
        tokens: the parts, of which every row is a row of the prompt.
        slots: slot of every row.
        row_start: row start of every row.
        prefix_end: see `AttentionBatch`.
        page_len: valid slots of the pages in use.
        page_position: position of the first slot of the pages in use, if parts at other positions begin on pages.
        shift: position minus slot of the last part and of what follows.
        question: first slot of the question whose chunks are weighed, or `NO_QUESTION`.
        weighing: temperature and scale.
    """

    tokens: list[_Tokens] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    row_start: list[int] = field(default_factory=list)
    prefix_end: int = 0
    page_len: list[int] = field(default_factory=list)
    page_position: list[int] = field(default_factory=list)
    shift: int = 0
    question: int = NO_QUESTION
    weighing: tuple[float, float] = (1.0, 1.0)

    def append(self, tokens: _Tokens, block_size: int, *, aligned: bool, isolated: bool, position: int | None = None) -> None:
        """Append a part.

        Args:
            tokens: the part.
            block_size: slots per page.
            aligned: whether it begins on a page of its own.
            isolated: whether its rows see themselves and the prefix alone.
            position: position of its first token; None for the next one.
        """
        start = self.slots[-1] + 1 if self.slots else 0
        if aligned and start % block_size:
            self.page_len[-1] = start % block_size
            start += -start % block_size
        end = start + len(tokens.q)
        self.page_len += [block_size] * (-(-end // block_size) - len(self.page_len))
        if position is not None:
            self.shift = position - start
        new = range(len(self.page_position), len(self.page_len))
        self.page_position += [page * block_size + self.shift for page in new]
        self.tokens.append(tokens)
        self.slots += range(start, end)
        self.row_start += [start if isolated else 0] * len(tokens.q)

    def rows(self) -> list[tuple[str, int]]:
        """Return the name and the number of every row."""
        return [(part.name, i) for part in self.tokens for i in range(len(part.q))]


@dataclass
class SameBits:
    """Random prompts that are computed alone and in companies.

    Attributes:
        backend: the backend to judge.
        rng: source of random numbers.
        draw: returns random queries, keys and values of a number of rows.
        scale: factor of the lengths.
        weighs: whether questions weigh chunks anew.
        options: arguments of `forward`.
    """

    backend: AttentionBackend
    rng: np.random.Generator
    draw: Callable[[int], tuple[np.ndarray, np.ndarray, np.ndarray]]
    scale: int
    weighs: bool
    options: dict[str, Any]

    def __post_init__(self) -> None:
        self._windowed = self.backend.spec.windowed
        self._pages = self._windowed or (not self.backend.keeps_bits and self.backend.can_keep_bits)
        self._block = self.backend.spec.block_size
        self._longest = 4 * self._block * self.scale
        self._width = 12 * self._longest // self._block
        self._forward = jax.jit(self.backend.forward, static_argnames=("scale", "window"))

    def check(self) -> None:
        """Compare the rows of some prompts alone with the same rows in companies.

        Each company is computed in steps of another size, with a page table of another width. It adds prompts, adds,
        lengthens, removes and moves the other parts of a prompt, moves pages, and cuts spans elsewhere. For a backend that only
        `can_keep_bits`, steps differ in the rows that they use, and items begin on pages.

        Raises:
            AssertionError: a bit differs; the message names the company, the part and the row.
        """
        prefix, items = self._tokens("prefix", 2), [self._tokens(f"item {i}", 1) for i in range(2)]
        whole = self._whole()
        alone: dict[tuple[str, int], np.ndarray] = {}
        for prompt in [whole, *(self._packed(prefix, [item]) for item in items)]:
            alone |= self._compute([prompt], _STEPS[-1], self._width, cut=False)
        for number, rows in enumerate(_STEPS):
            company = [self._whole(f"other {i}") for i in range(int(self.rng.integers(1, 4)))] + [whole]
            others = [self._tokens(f"other item {i}", 1) for i in range(int(self.rng.integers(1, 4)))]
            parts = [*items, *others]
            company.append(self._packed(prefix, [parts[i] for i in self.rng.permutation(len(parts))]))
            company = [company[i] for i in self.rng.permutation(len(company))]
            together = self._compute(company, rows, (1 + number) * self._width, cut=True)
            for (part, row), bits in alone.items():
                if not np.array_equal(together[part, row], bits):
                    by = np.abs(together[part, row].astype(np.float32) - bits.astype(np.float32)).max()
                    raise AssertionError(
                        f"company {number}, in steps of {rows} rows: row {row} of {part} differs by {by:.3g} from the row alone"
                    )

    def _tokens(self, name: str, longest: int) -> _Tokens:
        return _Tokens(name, *self.draw(int(self.rng.integers(1, longest * self._longest))))

    def _packed(self, prefix: _Tokens, items: list[_Tokens]) -> Prompt:
        """Return a prompt of items that see the prefix and themselves, some of them on a page of their own."""
        prompt = Prompt()
        prompt.append(prefix, self._block, aligned=False, isolated=False)
        prompt.prefix_end = len(prefix.q)
        for item in items:
            aligned = self._pages or bool(self.rng.integers(2))
            prompt.append(item, self._block, aligned=aligned, isolated=True, position=len(prefix.q))
        return prompt

    def _whole(self, name: str = "") -> Prompt:
        """Return a prompt with parts that a question and generated tokens see, or one without."""
        prompt = Prompt()
        if self._windowed and self.rng.integers(3) == 0:
            prompt.append(self._tokens(f"{name} plain", 4), self._block, aligned=False, isolated=False)
            return prompt
        aligned = self._windowed or bool(self.rng.integers(2))
        if self.rng.integers(4):
            prompt.append(self._tokens(f"{name} prefix", 1), self._block, aligned=False, isolated=False)
            prompt.prefix_end = len(prompt.slots)
        chunks = [self._tokens(f"{name} chunk {i}", 1) for i in range(int(self.rng.integers(1, 4)))]
        for chunk in chunks:
            prompt.append(chunk, self._block, aligned=aligned, isolated=True, position=prompt.prefix_end)
        after = prompt.prefix_end + max(len(chunk.q) for chunk in chunks)
        question = self._tokens(f"{name} question", 1)
        prompt.append(question, self._block, aligned=aligned, isolated=False, position=after)
        if self.weighs:
            prompt.question = prompt.slots[-len(prompt.tokens[-1].q)]
            prompt.weighing = (float(self.rng.uniform(0.3, 2)), float(self.rng.uniform(0.3, 2)))
        return prompt

    def _compute(self, prompts: list[Prompt], rows: int, width: int, *, cut: bool) -> dict[tuple[str, int], np.ndarray]:
        """Return the outputs of all rows, by the name and the number of the row.

        Args:
            prompts: the prompts.
            rows: rows that a step uses at most.
            width: width of the page tables.
            cut: whether to cut spans at random; else a step takes as many rows as it can.
        """
        backend, spec = self.backend, self.backend.spec
        outputs: dict[tuple[int, int], np.ndarray] = {}
        cache = backend.allocate(_SEQS * self._width)
        size = _STEPS[-1] if self._pages else rows
        shapes = [(size, heads, spec.head_dim) for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
        inputs = [[np.concatenate(x) for x in list(zip(*p.tokens, strict=True))[1:]] for p in prompts]
        for batch, taken in self._batches(prompts, size, rows, width, cut):
            step = [np.zeros(shape, np.float32) for shape in shapes]
            for at, (number, row) in enumerate(taken):
                for to, values in zip(step, inputs[number], strict=True):
                    to[at] = values[row]
            q, k, v = (jnp.asarray(x, spec.dtype) for x in step)
            out, cache = self._forward(q, k, v, cache, backend.build_metadata(batch), **self.options)
            outputs |= zip(taken, np.asarray(out))
        return {name: outputs[n, i] for n, prompt in enumerate(prompts) for i, name in enumerate(prompt.rows())}

    def _batches(
        self, prompts: list[Prompt], size: int, rows: int, width: int, cut: bool
    ) -> Iterator[tuple[AttentionBatch, list[tuple[int, int]]]]:
        """Yield the steps of `size` rows, each with the prompt and the row number of every row that it uses."""
        tables, pool = np.zeros((_SEQS, width), np.int32), self.rng.permutation(_SEQS * self._width)
        for number in range(len(prompts)):
            tables[number, : self._width] = pool[number * self._width :][: self._width]
        done = [0] * len(prompts)
        while any(n < len(p.slots) for n, p in zip(done, prompts, strict=True)):
            taken: list[tuple[int, int]] = []
            for number, prompt in enumerate(prompts):
                most = min(len(prompt.slots) - done[number], rows - len(taken))
                span = int(self.rng.integers(0, min(most, self.rng.choice([2, 40, rows])) + 1)) if cut else most
                taken += [(number, row) for row in range(done[number], done[number] + span)]
                done[number] += span
            picked = [(number, prompts[number].slots[row], prompts[number].row_start[row]) for number, row in taken]
            yield batch_of(prompts, tables, picked, size, self._block, weighs=self.weighs, windowed=self._windowed), taken


def batch_of(
    prompts: Sequence[Prompt],
    tables: np.ndarray,
    rows: Sequence[Row],
    size: int,
    block_size: int,
    *,
    weighs: bool,
    windowed: bool = False,
) -> AttentionBatch:
    """Return a step of some rows.

    Args:
        prompts: the prompts, at most as many as there are tables.
        tables: int32 `[sequences, width]` pages of every prompt.
        rows: every row in use.
        size: rows of the step, unused ones included.
        block_size: slots per page.
        weighs: whether the batch weighs chunks anew.
        windowed: whether the batch has the positions of pages.
    """
    page_len, prefix_end = np.full(tables.shape, block_size, np.int32), np.zeros(len(tables), np.int32)
    page_position = np.tile(np.arange(tables.shape[1], dtype=np.int32) * block_size, (len(tables), 1))
    weighing = Weighing(np.full(len(tables), NO_QUESTION, np.int32), *np.ones((2, len(tables)), np.float32))
    for number, prompt in enumerate(prompts):
        page_len[number, : len(prompt.page_len)] = prompt.page_len
        page_position[number] += prompt.shift
        page_position[number, : len(prompt.page_position)] = prompt.page_position
        prefix_end[number] = prompt.prefix_end
        weighing.question_start[number] = prompt.question
        weighing.temperature[number], weighing.scale[number] = prompt.weighing
    row_seq, row_slot, row_start = np.zeros((3, size), np.int32)
    row_seq[: len(rows)], row_slot[: len(rows)], row_start[: len(rows)] = np.asarray(rows, np.int32).reshape(-1, 3).T
    return AttentionBatch(
        num_rows=len(rows),
        row_seq=row_seq,
        row_slot=row_slot,
        row_start=row_start,
        prefix_end=prefix_end,
        block_tables=tables,
        page_len=page_len,
        block_size=block_size,
        weighing=weighing if weighs else None,
        page_position=page_position if windowed else None,
    )
