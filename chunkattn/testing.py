"""Comparison of an attention backend with the reference on random ragged batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chunkattn.backends.base import AttentionBackend, AttentionBatch, AttentionSpec, HeadInputs
from chunkattn.backends.default_cache import FP8
from chunkattn.backends.registry import get_backend, refusal
from chunkattn.cache.slots import plan_slots
from chunkattn.errors import BackendError
from chunkattn.layout import ChunkLayout
from chunkattn.rope.positions import make_layout
from chunkattn.rope.rotary import apply_rotary
from chunkattn.same_bits import Prompt, Row, SameBits, batch_of

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}
"""Largest absolute difference from the reference, by dtype."""

_ROWS, _SEQS, _WIDTH = 96, 6, 16
_DECODES, _RUN = 3, 24
_STRETCH = 1024
_EPSILON = 1e-6
_MAX_VALUE = 3**0.5
"""Bound of random values, and so of outputs: variance 1, and two bfloat16 roundings stay within the tolerance."""


@dataclass
class PlannedPrompt(Prompt):
    """Prompt with the slots and row starts of its generated tokens, too, its pages, and the rows computed so far."""

    prompt_len: int = 0
    pages: list[int] = field(default_factory=list)
    done: int = 0

    @classmethod
    def of(cls, layout: ChunkLayout, block_size: int, *, aligned: bool, decodes: int) -> PlannedPrompt:
        """Lay out a prompt in slots, and some generated tokens after it.

        Args:
            layout: the prompt.
            block_size: slots per page.
            aligned: whether every part begins on a page.
            decodes: number of generated tokens.
        """
        plan = plan_slots(layout, block_size, aligned=aligned)
        first = np.searchsorted(plan.slots, np.arange(len(plan.page_len)) * block_size)
        slots = [*plan.slots.tolist(), *range(plan.end, plan.end + decodes)]
        row_start = plan.row_start.tolist() + [0] * decodes
        shift = layout.next_position - plan.end
        positions, page_len = layout.positions[first].tolist() if aligned else [], list(plan.page_len)
        return cls([], slots, row_start, plan.prefix_end, page_len, positions, shift, prompt_len=len(plan.slots))

    def take(self, count: int, number: int) -> list[Row]:
        """Return the next `count` rows, of the prompt `number` of a step."""
        picked = slice(self.done, self.done + count)
        self.done += count
        return [(number, slot, start) for slot, start in zip(self.slots[picked], self.row_start[picked], strict=True)]


def random_layout(rng: np.random.Generator, *, most_chunks: int = 6, longest: int = 20, scoring: bool = False) -> ChunkLayout:
    """Return a layout with empty, one-token and unequal parts.

    Args:
        rng: source of random numbers.
        most_chunks: maximum number of chunks.
        longest: maximum number of tokens of a chunk; prefix and question are shorter.
        scoring: whether to leave the question out.
    """
    lens = [int(rng.integers(0, rng.choice([1, 2, longest + 1]))) for _ in range(rng.integers(0, most_chunks + 1))]
    prefix, question = int(rng.integers(0, longest)), 0 if scoring else int(rng.integers(1, longest))
    if not prefix + sum(lens) + question:
        prefix = 1
    ids = rng.integers(0, 1000, prefix + sum(lens) + question)
    parts = np.split(ids, np.cumsum([prefix, *lens]))
    return make_layout(parts[0], parts[1:-1], parts[-1])


def random_steps(
    rng: np.random.Generator,
    *,
    block_size: int = 8,
    scale: int = 1,
    weighs: bool = False,
    windowed: bool = False,
) -> list[AttentionBatch]:
    """Return consecutive steps over the same sequences: mixed spans, a few decode rows each, padding and unused slots.

    Args:
        rng: source of random numbers.
        block_size: slots per page.
        scale: factor of the lengths of sequences and steps.
        weighs: whether batches weigh chunks anew in some of the questions.
        windowed: whether batches have the positions of pages. All parts begin on pages then, and some prompts have one part.
    """
    sequences, tables = _random_sequences(rng, block_size, scale, weighs, windowed, _DECODES)
    most_rows, steps = scale * _ROWS, list[AttentionBatch]()
    while any(s.done < len(s.slots) for s in sequences) or not steps:
        rows: list[Row] = []
        for index, seq in enumerate(sequences):
            prompt = seq.prompt_len - seq.done
            most = min(prompt if prompt > 0 else min(1, len(seq.slots) - seq.done), most_rows - len(rows))
            span = int(rng.integers(0, most + 1))
            rows += seq.take(span, index)
        steps.append(batch_of(sequences, tables, rows, most_rows, block_size, weighs=weighs, windowed=windowed))
    return steps


def random_run(
    rng: np.random.Generator, *, block_size: int = 8, scale: int = 1, weighs: bool = False, windowed: bool = False
) -> tuple[list[AttentionBatch], list[AttentionBatch]]:
    """Return the steps of some prompts, and the steps of a run of decodes of them all. Rows end at different steps.

    Args:
        rng: source of random numbers.
        block_size: see `random_steps`.
        scale: see `random_steps`.
        weighs: see `random_steps`.
        windowed: see `random_steps`.
    """
    sequences, tables, options = list[PlannedPrompt](), np.zeros((0, 0), np.int32), {"weighs": weighs, "windowed": windowed}
    while not sequences:
        sequences, tables = _random_sequences(rng, block_size, scale, weighs, windowed, _RUN)
        sequences, tables = _those_that_decode(sequences, tables)
    size = scale * _ROWS
    rows = [row for number, s in enumerate(sequences) for row in s.take(s.prompt_len, number)]
    parts = [rows[first : first + size] for first in range(0, len(rows), size)]
    prompts = [batch_of(sequences, tables, part, size, block_size, **options) for part in parts]
    lengths = rng.integers(1, _RUN + 1, len(sequences))
    run = []
    for step in range(lengths.max()):
        last = [(n, s.slots[s.prompt_len + min(step, lengths[n] - 1)], 0) for n, s in enumerate(sequences)]
        run.append(batch_of(sequences, tables, last, _SEQS + 2, block_size, **options))
    return prompts, run


def _those_that_decode(sequences: list[PlannedPrompt], tables: np.ndarray) -> tuple[list[PlannedPrompt], np.ndarray]:
    """Return the sequences with generated tokens and their tables, followed by unused tables."""
    kept = [number for number, sequence in enumerate(sequences) if len(sequence.slots) > sequence.prompt_len]
    chosen = np.zeros_like(tables)
    chosen[: len(kept)] = tables[kept]
    return [sequences[number] for number in kept], chosen


def _random_sequences(
    rng: np.random.Generator, block_size: int, scale: int, weighs: bool, windowed: bool, most_decodes: int
) -> tuple[list[PlannedPrompt], np.ndarray]:
    """Return random sequences, and the page tables `[sequences, width]` of as many as there may be."""
    sequences: list[PlannedPrompt] = []
    width = scale * _WIDTH
    pool = rng.permutation(_SEQS * width).tolist()
    for _ in range(rng.integers(1, _SEQS + 1)):
        if windowed and rng.random() < 0.3:
            layout = make_layout([], [], rng.integers(0, 1000, rng.integers(1, width * block_size // 2)))
        else:
            layout = random_layout(rng, longest=5 * scale * block_size // 2, scoring=bool(rng.integers(2)))
        decodes = most_decodes if layout.question_len else 0
        aligned = bool(rng.integers(2)) or (windowed and not layout.is_plain)
        sequence = PlannedPrompt.of(layout, block_size, aligned=aligned, decodes=decodes)
        if sequence.slots[-1] < width * block_size:
            sequence.pages = [pool.pop() for _ in range(width)]
            if weighs and layout.question_len and any(layout.chunk_lens) and rng.random() < 0.8:
                sequence.question = sequence.slots[layout.question_start]
                sequence.weighing = (float(rng.uniform(0.3, 2)), float(rng.uniform(0.3, 2)))
            sequences.append(sequence)
    tables = np.zeros((_SEQS, width), np.int32)
    tables[: len(sequences)] = np.reshape([sequence.pages for sequence in sequences], (-1, width))
    return sequences, tables


def _full_of_nan(pool: jax.Array) -> jax.Array:
    """Return an array of NaN like `pool`. All bits set is NaN in every float format that is stored as integers."""
    is_float = jnp.issubdtype(pool.dtype, jnp.floating)
    return jnp.full_like(pool, jnp.nan if is_float else np.iinfo(pool.dtype).max)


def _heads(q: jax.Array, k: jax.Array, v: jax.Array) -> HeadInputs:
    """Return heads with factors and angles that differ by lane and row."""
    rows, _, size = q.shape
    angles = np.outer(np.arange(rows), 1 / (1 + np.arange(size // 2)))[:, None].astype(np.float32)
    factors = jnp.linspace(0.5, 1.5, size, dtype=jnp.float32)
    q32, k32, v32 = (x.astype(jnp.float32) for x in (q, k, v))
    return HeadInputs(q32, k32, v32, factors, factors, jnp.cos(angles), jnp.sin(angles), _EPSILON, q.dtype, is_rounded=True)


def _forward_inputs(backend: AttentionBackend, *arrays: Any, scale: float, window: int | None) -> Any:
    """Call `forward_inputs` in place of `forward`."""
    assert window is None
    *heads, cache, metadata = arrays
    return backend.forward_inputs(_heads(*heads), cache, metadata, scale=scale)


def _forward_prepared(backend: AttentionBackend, *arrays: Any, scale: float, window: int | None) -> Any:
    """Call `forward` with heads that are normalised and rotated."""
    *given, cache, metadata = arrays
    heads = _heads(*given)

    def prepared(x: jax.Array, factors: jax.Array | None) -> jax.Array:
        assert factors is not None
        normed = x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + _EPSILON) * factors
        return apply_rotary(normed, heads.cos, heads.sin).astype(heads.dtype)

    q, k = prepared(heads.q, heads.q_scale), prepared(heads.k, heads.k_scale)
    return backend.forward(q, k, given[2], cache, metadata, scale=scale, window=window)


class Comparison:
    """Two backends that compute the same steps.

    Args:
        judged: backend to judge.
        oracle: backend of the same spec whose results are right.
        rng: source of the random queries, keys and values.
        window: sliding window in positions; None for full attention.
        inputs: whether `judged` normalises and rotates the heads itself, by `forward_inputs`.

    Attributes:
        stretch: float `[head_dim]` factors of keys and values. In FP8 one lane is far beyond the format's range; the inverse
            factors keep its weight in scores and differences at 1.
    """

    def __init__(
        self,
        judged: AttentionBackend,
        oracle: AttentionBackend,
        rng: np.random.Generator,
        window: int | None,
        *,
        inputs: bool = False,
    ) -> None:
        self._spec, self._rng, self._window = judged.spec, rng, window
        one, other = partial(_forward_inputs, judged), partial(_forward_prepared, oracle)
        forwards = ((judged, one), (oracle, other)) if inputs else ((judged, judged.forward), (oracle, oracle.forward))
        self._pair = [(b, jax.jit(forward, static_argnames=("scale", "window"))) for b, forward in forwards]
        self._advance = jax.jit(judged.advance)
        self.stretch = np.ones(judged.spec.head_dim)
        self.stretch[0] = _STRETCH if judged.spec.cache_dtype == FP8 else 1

    def differences(self, steps: Sequence[AttentionBatch]) -> Iterator[float]:
        """Compute consecutive steps over a pool that starts full of NaN.

        Args:
            steps: the steps, whose page tables have one size and hold pages below that size.

        Yields:
            The largest absolute difference of each step; NaN if a value of the judged backend is not finite.
        """
        options = {"scale": self._spec.head_dim**-0.5, "window": self._window}
        caches = [jax.tree.map(_full_of_nan, b.allocate(steps[0].block_tables.size)) for b, _ in self._pair]
        for batch in steps:
            drawn, results = self._draw(len(batch.row_seq)), []
            for i, (backend, forward) in enumerate(self._pair):
                out, caches[i] = forward(*drawn, caches[i], backend.build_metadata(batch), **options)
                results.append(np.asarray(out, np.float32) / self.stretch)
            if np.isfinite(results[0]).all():
                yield float(np.abs(np.subtract(*results)[: batch.num_rows]).max(initial=0.0))
            else:
                yield float("nan")

    def run_differences(self, prompts: Sequence[AttentionBatch], run: Sequence[AttentionBatch]) -> Iterator[float]:
        """Compute a run of decodes with the judged backend, with its metadata advanced and with that of every step.

        Args:
            prompts: steps that fill a pool, which starts full of NaN, with the prompts.
            run: steps of the run.

        Yields:
            The largest absolute difference of each step's results and of the pools after it; NaN if a result or a value of the
            pool differs in being finite.
        """
        options = {"scale": self._spec.head_dim**-0.5, "window": self._window}
        backend, forward = self._pair[0]
        cache = jax.tree.map(_full_of_nan, backend.allocate(run[0].block_tables.size))
        for batch in prompts:
            _, cache = forward(*self._draw(len(batch.row_seq)), cache, backend.build_metadata(batch), **options)
        decodes, used, caches = backend.build_decodes(run[0]), np.arange(len(run[0].row_seq)) < run[0].num_rows, [cache, cache]
        for batch in run:
            drawn, results = self._draw(len(batch.row_seq)), []
            steps = np.where(used, batch.row_slot - run[0].row_slot, 0).astype(np.int32)
            for i, metadata in enumerate((self._advance(decodes, steps, used), backend.build_metadata(batch))):
                out, caches[i] = forward(*drawn, caches[i], metadata, **options)
                pools = (x.astype(jnp.float32) for x in jax.tree.leaves(caches[i]))
                results.append([np.asarray(out, np.float32)[: batch.num_rows] / self.stretch, *map(np.asarray, pools)])
            apart = [
                np.abs(np.subtract(*pair))[~(np.isnan(pair[0]) & np.isnan(pair[1]))] for pair in zip(*results, strict=True)
            ]
            yield float(np.max([pair.max(initial=0.0) for pair in apart]))

    def _draw(self, rows: int) -> list[jax.Array]:
        """Return random queries, keys and values."""
        spec = self._spec
        shapes = ((rows, spec.num_heads, spec.head_dim), *2 * [(rows, spec.num_kv_heads, spec.head_dim)])
        drawn = (*map(self._rng.standard_normal, shapes[:2]), self._rng.uniform(-_MAX_VALUE, _MAX_VALUE, shapes[2]))
        factors = (1 / self.stretch, self.stretch, self.stretch)
        return [jnp.asarray(x * by, spec.dtype) for x, by in zip(drawn, factors, strict=True)]


def check_backend(
    backend: str | type[AttentionBackend],
    *,
    cases: int = 20,
    seed: int = 0,
    head_dim: int = 16,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    dtype: str = "float32",
    block_size: int = 8,
    window: int | None = None,
    kv_dtype: str | None = None,
    scale: int = 1,
    weighs: bool = False,
    bits: bool = False,
) -> float:
    """Compare a backend with `reference` over random ragged batches.

    The pool starts full of NaN, so a read of an invalid slot shows in the output. If the backend `advances`, random runs of
    decodes are computed with its `advance` and with its `build_metadata`, and compared. With `bits`, the rows of random prompts
    are also computed alone and in companies: with other prompts added, other parts of the prompt added, lengthened, removed and
    moved, pages moved, spans cut elsewhere, and in steps and page tables of other sizes.

    Args:
        backend: backend class, or a registered name.
        cases: number of random sets of sequences, each computed in several steps.
        seed: seed of the random numbers.
        head_dim: size of a head.
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads.
        dtype: dtype of queries, keys and values.
        block_size: slots per page.
        window: sliding window in positions; None for full attention.
        kv_dtype: dtype of the cache; None for `dtype`. With `float8_e4m3fn`, some keys and values exceed its range.
        scale: factor of the lengths of sequences and steps, for backends with large tiles.
        weighs: whether batches weigh chunks anew, with a temperature and a scale for each sequence.
        bits: whether rows must have the same bits in any company.

    Returns:
        The largest absolute difference.

    Raises:
        BackendError: the backend is unknown, `supports` refuses the spec, the spec is invalid, or the backend does not weigh
            chunks anew.
        AssertionError: a difference exceeds `TOLERANCE[dtype]`, or is NaN, or a bit depends on the company; the message names
            the case.
    """
    cls = get_backend(backend) if isinstance(backend, str) else backend
    kept = None if kv_dtype is None else jnp.dtype(kv_dtype)
    spec = AttentionSpec(num_heads, num_kv_heads, head_dim, jnp.dtype(dtype), block_size, (window,), kept)
    if reason := refusal(cls, spec, weighs):
        raise BackendError(f"backend {cls.name!r} refuses {spec}: {reason}")
    judged_backend = cls(spec)
    judged_backend.batch_invariant = bits
    rng, worst = np.random.default_rng(seed), 0.0
    comparison = Comparison(judged_backend, get_backend("reference")(spec), rng.spawn(1)[0], window)
    of_runs = rng.spawn(1)[0]
    for case in range(cases):
        windowed = window is not None
        steps = random_steps(rng, block_size=block_size, scale=scale, weighs=weighs, windowed=windowed)
        for number, difference in enumerate(comparison.differences(steps)):
            where = f"backend {cls.name!r}, seed {seed}, case {case}, step {number}"
            if not np.isfinite(difference):
                raise AssertionError(f"{where}: NaN or infinity came out")
            if difference > TOLERANCE[dtype]:
                raise AssertionError(f"{where}: differs from reference by {difference:.3g}, allowed {TOLERANCE[dtype]:.0e}")
            worst = max(worst, difference)
        if judged_backend.advances and not bits:
            run = random_run(of_runs, block_size=block_size, scale=scale, weighs=weighs, windowed=windowed)
            for number, difference in enumerate(comparison.run_differences(*run)):
                if not difference <= TOLERANCE[dtype]:
                    where = f"backend {cls.name!r}, seed {seed}, case {case}, step {number} of a run of decodes"
                    raise AssertionError(f"{where}: `advance` differs from `build_metadata` by {difference:.3g}")
                worst = max(worst, difference)
    if bits:
        _check_bits(judged_backend, cases, seed, scale, comparison.stretch, weighs, window)
    return worst


def _check_bits(
    backend: AttentionBackend, cases: int, seed: int, scale: int, stretch: np.ndarray, weighs: bool, window: int | None
) -> None:
    spec, rng = backend.spec, np.random.default_rng(seed)

    def draw(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        q, k, v = (rng.standard_normal((rows, n, spec.head_dim)) for n in heads)
        return q / stretch, k * stretch, v * stretch

    options = {"scale": spec.head_dim**-0.5, "window": window}
    judge = SameBits(backend, rng, draw, scale=scale, weighs=weighs, options=options)
    for case in range(cases):
        try:
            judge.check()
        except AssertionError as error:
            raise AssertionError(f"backend {backend.name!r}, seed {seed}, bits of case {case}: {error}") from None
