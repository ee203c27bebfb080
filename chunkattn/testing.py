"""Judging a backend against the reference on random ragged batches."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from chunkattn.backends.base import AttentionBackend, AttentionBatch, AttentionSpec
from chunkattn.backends.registry import get_backend
from chunkattn.cache.slots import SlotPlan, plan_slots
from chunkattn.layout import ChunkLayout
from chunkattn.rope.positions import make_layout

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}
"""Largest absolute difference from the reference, by dtype."""

_ROWS, _SEQS, _WIDTH, _BLOCK_SIZE = 96, 6, 16, 8


@dataclass
class _Sequence:
    plan: SlotPlan
    pages: list[int]
    done: int = 0
    plain: bool = False


def random_layout(rng: np.random.Generator, *, most_chunks: int = 6, longest: int = 20, scoring: bool = False) -> ChunkLayout:
    """A layout with empty, one-token and unequal parts; without a question when `scoring`."""
    lens = [int(rng.integers(0, rng.choice([1, 2, longest + 1]))) for _ in range(rng.integers(0, most_chunks + 1))]
    prefix, question = int(rng.integers(0, longest)), 0 if scoring else int(rng.integers(1, longest))
    if not prefix + sum(lens) + question:
        prefix = 1
    ids = rng.integers(0, 1000, prefix + sum(lens) + question)
    parts = np.split(ids, np.cumsum([prefix, *lens]))
    return make_layout(parts[0], parts[1:-1], parts[-1])


def random_steps(rng: np.random.Generator, *, plain: bool = False) -> list[AttentionBatch]:
    """A few consecutive steps over the same sequences: mixed spans, decodes, padding, holes."""
    sequences, pool = [], rng.permutation(_SEQS * _WIDTH).tolist()
    for _ in range(rng.integers(1, _SEQS + 1)):
        if plain:
            layout = make_layout([], [], rng.integers(0, 1000, rng.integers(1, _WIDTH * _BLOCK_SIZE // 2)))
        else:
            layout = random_layout(rng, scoring=bool(rng.integers(2)))
        plan = plan_slots(layout, _BLOCK_SIZE, aligned=bool(rng.integers(2)))
        if plan.end <= _WIDTH * _BLOCK_SIZE - 4:
            sequences.append(_Sequence(plan, [pool.pop() for _ in range(_WIDTH)], plain=layout.is_plain))
    steps: list[AttentionBatch] = []
    while any(s.done < len(s.plan.slots) for s in sequences) or not steps:
        rows: list[tuple[int, int, int]] = []  # sequence, slot, row_start
        for index, seq in enumerate(sequences):
            left, room = len(seq.plan.slots) - seq.done, _ROWS - len(rows)
            if left:
                span = min(int(rng.integers(0, left + 1)), room)
                picked = slice(seq.done, seq.done + span)
                rows += [
                    (index, int(a), int(b)) for a, b in zip(seq.plan.slots[picked], seq.plan.row_start[picked], strict=True)
                ]
                seq.done += span
            elif seq.done - len(seq.plan.slots) == 0 and room:  # one decode
                rows.append((index, seq.plan.end, 0))
        steps.append(_batch(sequences, rows))
        if len(steps) > 50:
            raise RuntimeError("random_steps made no progress")
    return steps


def _batch(sequences: list[_Sequence], rows: list[tuple[int, int, int]]) -> AttentionBatch:
    table = np.zeros((_SEQS, _WIDTH), np.int32)
    page_len = np.full((_SEQS, _WIDTH), _BLOCK_SIZE, np.int32)
    prefix_end = np.zeros(_SEQS, np.int32)
    for index, seq in enumerate(sequences):
        table[index] = seq.pages
        page_len[index, : len(seq.plan.page_len)] = seq.plan.page_len
        prefix_end[index] = seq.plan.prefix_end
    columns = np.zeros((3, _ROWS), np.int32)
    columns[:, : len(rows)] = np.asarray(rows, np.int32).reshape(-1, 3).T
    row_seq, row_slot, row_start = columns
    return AttentionBatch(len(rows), row_seq, row_slot, row_start, prefix_end, table, page_len, _BLOCK_SIZE)


def _full_of_nan(pool: jax.Array) -> jax.Array:
    """NaN in every slot; all bits set is NaN in every float format kept as integers."""
    is_float = jnp.issubdtype(pool.dtype, jnp.floating)
    return jnp.full_like(pool, jnp.nan if is_float else np.iinfo(pool.dtype).max)


def check_backend(
    backend: str | type[AttentionBackend],
    *,
    cases: int = 20,
    seed: int = 0,
    head_dim: int = 16,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    dtype: str = "float32",
    window: int | None = None,
) -> float:
    """Run a backend beside `reference` over random ragged batches.

    The pool starts full of NaN, so whatever a backend reads but must not use shows.

    Args:
        backend: a class, or a registered name.
        cases: random sets of sequences, each computed in several steps.
        seed: of the generator.
        head_dim: size of a head.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        dtype: of queries, keys and values.
        window: a sliding window, over plain prompts.

    Returns:
        The largest absolute difference seen.

    Raises:
        BackendError: the backend is unknown.
        NotImplementedError: the backend's `supports` refuses these sizes.
        AssertionError: a difference beyond `TOLERANCE[dtype]`, or a NaN; the message names the case.
    """
    cls = get_backend(backend) if isinstance(backend, str) else backend
    spec = AttentionSpec(num_heads, num_kv_heads, head_dim, jnp.dtype(dtype), _BLOCK_SIZE, (window,))
    if reason := cls.supports(spec):
        raise NotImplementedError(f"backend {cls.name!r} refuses {spec}: {reason}")
    rng, worst = np.random.default_rng(seed), 0.0
    judged, oracle = (
        (b, jax.jit(b.forward, static_argnames=("scale", "window"))) for b in (cls(spec), get_backend("reference")(spec))
    )
    for case in range(cases):
        caches = [jax.tree.map(_full_of_nan, b.allocate(_SEQS * _WIDTH)) for b, _ in (judged, oracle)]
        for number, batch in enumerate(random_steps(rng, plain=window is not None)):
            shapes = ((_ROWS, num_heads, head_dim), *2 * [(_ROWS, num_kv_heads, head_dim)])
            q, k, v = (jnp.asarray(rng.standard_normal(s), dtype) for s in shapes)
            results = []
            for i, (instance, forward) in enumerate((judged, oracle)):
                metadata = instance.build_metadata(batch)
                out, caches[i] = forward(q, k, v, caches[i], metadata, scale=head_dim**-0.5, window=window)
                results.append(np.asarray(out[: batch.num_rows], np.float32))
            difference = float(np.abs(results[0] - results[1]).max(initial=0.0))
            if not difference <= TOLERANCE[dtype]:
                raise AssertionError(
                    f"backend {cls.name!r}, seed {seed}, case {case}, step {number}: differs from reference by "
                    f"{difference:.3g}, allowed {TOLERANCE[dtype]:.0e}"
                )
            worst = max(worst, difference)
    return worst
