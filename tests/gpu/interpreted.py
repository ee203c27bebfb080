"""The GPU backend in Pallas' GPU interpreter with race detection, beside the reference, over one step at a time."""

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.jaxpr_interpret import JaxprInterpreter, resolve_ref
from jax._src.state import types as state_types
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from chunkattn.backends.base import AttentionBatch, AttentionSpec
from chunkattn.backends.default_cache import storage_dtype
from chunkattn.backends.pallas_gpu import kernel, plan, products, shape, splits
from chunkattn.backends.pallas_gpu.backend import PallasGpuBackend
from chunkattn.backends.reference import ReferenceBackend
from chunkattn.testing import random_steps


class Interpreted(PallasGpuBackend):
    """The backend with race detection. Few blocks of threads share the decodes, so each takes several."""

    name = "pallas_gpu"
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    multiprocessors = 3


class Whole(Interpreted):
    """The backend as in steps of many rows: it splits no blocks."""

    def block_splits(self, batch: AttentionBatch) -> int:
        return 1


class Splitting(Interpreted):
    """The backend as in steps of few rows: it splits all blocks."""

    def block_splits(self, batch: AttentionBatch) -> int:
        return plan.MOST_SPLITS


@dataclass(frozen=True)
class Setting:
    """Settings of a random step: heads, cache, window, weighing, and whether blocks of rows are split."""

    head_dim: int = 64
    groups: int = 2
    kv_heads: int = 1
    dtype: str = "bfloat16"
    block_size: int = 16
    window: int | None = None
    weighs: bool = False
    splits: bool = False
    kv_dtype: str | None = None
    scale: float | None = None

    @property
    def spec(self) -> AttentionSpec:
        heads, kept = self.groups * self.kv_heads, None if self.kv_dtype is None else jnp.dtype(self.kv_dtype)
        sizes = heads, self.kv_heads, self.head_dim, jnp.dtype(self.dtype), self.block_size
        return AttentionSpec(*sizes, (self.window,), kept)

    @property
    def backend(self) -> type[Interpreted]:
        return Splitting if self.splits else Whole


def use_small_tiles(monkeypatch):
    """Let sequences of a few hundred slots have several KV tiles, turns of the ring and splits."""
    small = {64: (64, 2), 128: (64, 2), 256: (64, 2)}
    monkeypatch.setattr(shape, "_TILES", small)
    monkeypatch.setattr(shape, "_STATE_TILES", small)
    fp8 = {64: (64, 2, 3), 128: (64, 2, 2), 256: (64, 2, 1)}
    monkeypatch.setattr(shape, "_FP8_TILES", fp8)
    monkeypatch.setattr(shape, "_FP8_STATE_TILES", fp8)
    monkeypatch.setattr(splits, "SPLIT_SLOTS", 64)
    monkeypatch.setattr(plan, "MOST_SPLITS", 3)


def use_tensor_cores(monkeypatch):
    """Run `wgmma` itself in place of the twins of the products.

    The interpreter gets operands in registers. It has no `run_state`, so sums start at zero and are added afterwards.
    """
    scores, interpret = products.scores, JaxprInterpreter._interpret_wgmma_ref_p

    def add_values(accumulated, weights, values, then, *, twin):
        def multiply(accumulator):
            plgpu.wgmma(accumulator, weights, values)
            then()
            return accumulator[...]

        return accumulated + pl.run_scoped(multiply, plgpu.ACC(accumulated.shape, jnp.float32))

    def interpret_wgmma(self, eqn, token, get_invals):
        accumulator, a, b, *leaves = get_invals()
        if isinstance(eqn.invars[1].aval, state_types.AbstractRef):
            return interpret(self, eqn, token, get_invals)
        transforms = jax.tree.unflatten(eqn.params["b_transforms_tree"], leaves)
        b, transforms = resolve_ref(eqn.invars[2].aval, b, transforms)
        where = {"mesh_location": self.mesh_location, "thread": self.thread, "source_info": eqn.source_info}
        shape = jax.ShapeDtypeStruct((a.shape[1], eqn.invars[0].aval.shape[1]), a.dtype)
        token, b = gpu_callbacks.call_get(
            token=token, result_shape_and_dtype=shape, allocation_key_as_array=b, transforms=transforms, **where
        )
        product = jnp.dot(a, b, preferred_element_type=jnp.float32)
        token, _ = gpu_callbacks.call_swap(
            token=token,
            result_shape_and_dtype=product,
            allocation_key_as_array=accumulator,
            transforms=(),
            val=product,
            mask=None,
            **where,
        )
        return token, []

    monkeypatch.setattr(products, "scores", lambda *args, twin: scores(*args, twin=False))
    monkeypatch.setattr(products, "add_values", add_values)
    monkeypatch.setattr(JaxprInterpreter, "_interpret_wgmma_ref_p", interpret_wgmma)


class Races(list):
    """The race records of all kernel calls. The interpreter itself keeps only the last call's record."""

    @property
    def found(self) -> bool:
        assert self, "no kernel was called"
        return any(record.races_found for record in self)


@contextmanager
def recorded_races():
    """Yield the race records of the kernel calls within."""
    records, make = Races(), gpu_callbacks.GPURaceDetectionState

    def recording(*args, **options):
        records.append(make(*args, **options))
        return records[-1]

    gpu_callbacks.GPURaceDetectionState = recording
    gpu_callbacks.reset_gpu_interpret_mode_state()
    try:
        yield records
    finally:
        gpu_callbacks.GPURaceDetectionState = make
        gpu_callbacks.reset_gpu_interpret_mode_state()


def draw_step(rng: np.random.Generator, setting: Setting) -> AttentionBatch:
    """Return one step of random sequences of up to 1,024 slots: one with decodes beside prefills, or one of many rows.

    Some pages are listed twice, as those of a repeated chunk.
    """
    options = {"weighs": setting.weighs, "windowed": setting.window is not None}
    steps = random_steps(rng, block_size=setting.block_size, scale=64 // setting.block_size or 1, **options)
    mixed = [step for step in steps if _has_decode(step) and step.num_rows > 16]
    return _share_pages(rng, mixed[int(rng.integers(len(mixed)))] if mixed else max(steps, key=lambda step: step.num_rows))


def _has_decode(batch: AttentionBatch) -> bool:
    single = np.bincount(batch.row_seq[: batch.num_rows]) == 1
    return bool((single[batch.row_seq[: batch.num_rows]] & (batch.row_start[: batch.num_rows] == 0)).any())


def _share_pages(rng: np.random.Generator, batch: AttentionBatch) -> AttentionBatch:
    """Let some entries of the page tables name pages of equal length that others name, too: chunks listed twice."""
    table = batch.block_tables.copy()
    rows = slice(0, batch.num_rows)
    written = set(batch.block_tables[batch.row_seq[rows], batch.row_slot[rows] // batch.block_size].tolist())
    flat, lengths = table.ravel(), batch.page_len.ravel()
    for index in rng.permutation(len(flat))[: len(flat) // 4]:
        other = int(rng.choice(np.flatnonzero(lengths == lengths[index])))
        if flat[index] not in written and flat[other] not in written:
            flat[index] = flat[other]
    return replace(batch, block_tables=table)


def seen_slots(batch: AttentionBatch, window: int | None) -> np.ndarray:
    """Return which slots of the pool, by page, some row of the step sees."""
    seen = np.zeros((batch.block_tables.max() + 1, batch.block_size), bool)
    slots = np.arange(batch.block_tables.shape[1] * batch.block_size)
    page, within = slots // batch.block_size, slots % batch.block_size
    for row in range(batch.num_rows):
        seq, slot = batch.row_seq[row], batch.row_slot[row]
        mask = (slots <= slot) & ((slots < batch.prefix_end[seq]) | (slots >= batch.row_start[row]))
        mask &= within < batch.page_len[seq][page]
        if window is not None:
            positions = batch.page_position[seq][page] + within
            mask &= positions > positions[slot] - window
        seen[batch.block_tables[seq][page[mask]], within[mask]] = True
    return seen


@cache
def _forward(cls: type, spec: AttentionSpec):
    backend = cls(spec)
    return backend, jax.jit(backend.forward, static_argnames=("scale", "window"))


def draw_arrays(rng: np.random.Generator, batch: AttentionBatch, setting: Setting):
    """Return q, k and v of a step, and pools `[2, pages, slots, heads, head_dim]` with NaN in all slots that no row sees."""
    spec, rows = setting.spec, len(batch.row_seq)
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    arrays = [jnp.asarray(rng.standard_normal((rows, h, spec.head_dim)), spec.dtype) for h in heads]
    seen = seen_slots(batch, setting.window)
    pools = rng.standard_normal((2, *seen.shape, spec.num_kv_heads, spec.head_dim))
    kept = jnp.asarray(np.where(seen[..., None, None], pools, np.nan), spec.cache_dtype)
    return arrays, kept.view(storage_dtype(spec.cache_dtype))


def run_step(cls: type, arrays, pools, batch: AttentionBatch, setting: Setting, *, fresh: bool = False):
    """Return the outputs of a step's rows and the written pools.

    Args:
        cls: `Setting.backend` or `ReferenceBackend`.
        arrays: q, k and v.
        pools: see `draw_arrays`.
        batch: the step.
        setting: sizes.
        fresh: compile anew, for a backend with a planted fault.
    """
    backend, forward = _forward.__wrapped__(cls, setting.spec) if fresh else _forward(cls, setting.spec)
    swap = (lambda x: x.swapaxes(1, 2)) if issubclass(cls, PallasGpuBackend) else (lambda x: x)
    scale = setting.head_dim**-0.5 if setting.scale is None else setting.scale
    metadata = jax.tree.map(jnp.asarray, backend.build_metadata(batch))
    out, cache = forward(*arrays, tuple(swap(pool) for pool in pools), metadata, scale=scale, window=setting.window)
    out = np.asarray(out, np.float32)
    assert np.isfinite(out).all(), "NaN or infinity came out"
    return out[: batch.num_rows], np.stack([swap(np.asarray(pool)) for pool in cache])


def check_step(seed: int, setting: Setting, *, fresh: bool = False) -> None:
    """Assert that a random step equals the reference within the dtype's rounding. The pools are equal bit by bit."""
    rng = np.random.default_rng(seed)
    batch = draw_step(rng, setting)
    given = (*draw_arrays(rng, batch, setting), batch, setting)
    if fresh:
        kernel.attend.clear_cache()
    try:
        ours, pool = run_step(setting.backend, *given, fresh=fresh)
    finally:
        if fresh:
            kernel.attend.clear_cache()
    theirs, expected = run_step(ReferenceBackend, *given)
    tolerance = {"bfloat16": 2e-2, "float16": 2.5e-3}[setting.dtype]
    np.testing.assert_allclose(ours, theirs, atol=tolerance, rtol=tolerance)
    np.testing.assert_array_equal(pool, expected)
