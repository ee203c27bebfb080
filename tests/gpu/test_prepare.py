"""The kernel that prepares heads in Pallas' GPU interpreter, beside NumPy in float64, and whole steps beside the reference."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkattn.backends.base import HeadInputs
from chunkattn.backends.default_cache import storage_dtype
from chunkattn.backends.pallas_gpu import prepare
from chunkattn.backends.pallas_gpu.backend import PallasGpuBackend
from chunkattn.backends.pallas_gpu.prepare import Places, prepare_inputs
from chunkattn.backends.reference import ReferenceBackend
from tests.gpu.interpreted import Interpreted, Setting, draw_arrays, draw_step, recorded_races, run_step, use_small_tiles
from tests.gpu.test_runs import draw_decodes

pytestmark = pytest.mark.timeout(600)
PAGES, UNUSED, EPSILON = 5, 3, 1e-3
"""Pages of a pool, rows of padding at the end of a step, and what is added to the mean squares."""


@dataclass(frozen=True)
class Case:
    """Sizes of a call, whether heads are normalised, and whether products are rounded."""

    groups: int = 2
    head_dim: int = 64
    rows: int = 24
    dtype: str = "bfloat16"
    norms: bool = True
    is_rounded: bool = True
    kv_heads: int = 2
    arrays: int = 1
    """Arrays of folded queries."""


CASES = {
    "rounded": Case(),
    "wide heads": Case(head_dim=128, groups=4, rows=72),
    "float32 products": Case(is_rounded=False, rows=19, arrays=2),
    "float16": Case(dtype="float16", is_rounded=False, norms=False, groups=1),
    "widest heads": Case(head_dim=256, groups=8, kv_heads=1, rows=16),
}


def turned(x, scale, cos, sin):
    """Return heads in float64, normalised if there is a scale, and rotated."""
    if scale is not None:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * np.float64(scale)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def expected_of(heads: HeadInputs) -> list[np.ndarray]:
    """Return queries, keys and values in float64."""
    q, k, v = (np.float64(x) for x in heads[:3])
    return [turned(q, heads.q_scale, heads.cos, heads.sin), turned(k, heads.k_scale, heads.cos, heads.sin), v]


def draw_heads(rng: np.random.Generator, rows: int, heads: int, case: Case) -> HeadInputs:
    dtype, kv, size = jnp.dtype(case.dtype), case.kv_heads, case.head_dim
    x = rng.standard_normal((rows, heads + 2 * kv, size)).astype(np.float32)
    x = np.float32(jnp.asarray(x, dtype)) if case.is_rounded else x
    angles = rng.uniform(0, 6, (rows, 1, size // 2)).astype(np.float32)
    scales = [jnp.asarray(rng.uniform(0.5, 2, size), dtype) if case.norms else None for _ in "qk"]
    parts = (x[:, :heads], x[:, heads : heads + kv], x[:, heads + kv :])
    return HeadInputs(*parts, *scales, np.cos(angles), np.sin(angles), EPSILON, dtype, case.is_rounded)


def assert_close(ours, theirs) -> None:
    """Assert that values are those of float64 rounded to their dtype, and by at most one place."""
    np.testing.assert_allclose(np.float64(ours), theirs, rtol=2**-7 if ours.dtype == jnp.bfloat16 else 2**-10, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_heads_are_normalised_rotated_stored_and_folded(name):
    """Rows go to drawn places; rows of padding leave the pool as it is."""
    check_call(CASES[name])


def check_call(case: Case) -> None:
    rng = np.random.default_rng(3)
    rows, used = case.rows, case.rows - UNUSED
    heads = draw_heads(rng, rows, case.groups * case.kv_heads, case)
    slots = np.append(rng.permutation(PAGES * 16)[:used], [-1] * UNUSED).astype(np.int32)
    folded = np.full((case.arrays, rows), -1, np.int32)
    folded[np.arange(used) % case.arrays, np.arange(used)] = case.groups * rng.permutation(used)
    pools = [jnp.asarray(rng.standard_normal((PAGES, case.kv_heads, 16, case.head_dim)), heads.dtype) for _ in "kv"]

    @jax.jit
    def call(arrays, places, cache):
        sizes = (case.groups * rows,) * case.arrays
        return prepare_inputs(HeadInputs(*arrays, *heads[7:]), places, cache, sizes, interpret=Interpreted.interpret)

    prepare.prepare.clear_cache()
    try:
        with recorded_races() as races:
            cache = tuple(pool.view(storage_dtype(heads.dtype)) for pool in pools)
            q, written = jax.block_until_ready(call(heads[:7], Places(slots, tuple(folded)), cache))
    finally:
        prepare.prepare.clear_cache()
    assert not races.found, "races"
    queries, *expected = expected_of(heads)
    for row in range(used):
        of_row = queries[row].reshape(case.kv_heads, case.groups, -1)
        place = folded[row % case.arrays, row]
        assert_close(q[row % case.arrays][:, place : place + case.groups], of_row)
    others = np.setdiff1d(np.arange(PAGES * 16), slots)
    for pool, kept, values in zip(pools, written, expected, strict=True):
        by_slot, before = (np.asarray(x.view(heads.dtype)).swapaxes(1, 2).reshape(-1, *values.shape[1:]) for x in (kept, pool))
        assert_close(by_slot[slots[:used]], values[:used])
        np.testing.assert_array_equal(by_slot[others], before[others])


def overwriting_rows_that_are_copied(monkeypatch):
    monkeypatch.setattr(prepare, "wait_for_room", lambda: None)


def without_commit(monkeypatch):
    monkeypatch.setattr(prepare, "commit", lambda: None)


def rotating_the_other_way(monkeypatch):
    of = prepare._Angles.of
    monkeypatch.setattr(prepare._Angles, "of", lambda *args: (of(*args)[0], -of(*args)[1]))


def leaving_out_the_mean(monkeypatch):
    monkeypatch.setattr(prepare, "_normalised", lambda parts, scale, sizes: parts)


@pytest.mark.parametrize(
    "fault", [overwriting_rows_that_are_copied, without_commit, rotating_the_other_way, leaving_out_the_mean]
)
def test_planted_faults_are_noticed(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
        check_call(CASES["rounded"])


def attend(backend: PallasGpuBackend, heads: HeadInputs, pools, metadata) -> tuple[np.ndarray, np.ndarray]:
    """Return the outputs of a step and its pools, `[2, pages, slots, heads, head_dim]`."""

    @jax.jit
    def call(arrays, cache, metadata):
        return backend.forward_inputs(HeadInputs(*arrays, *heads[7:]), cache, metadata, scale=0.125)

    with recorded_races() as races:
        out, cache = jax.block_until_ready(call(heads[:7], tuple(pool.swapaxes(1, 2) for pool in pools), metadata))
    assert not races.found
    return np.float32(out), np.stack([np.asarray(pool).swapaxes(1, 2) for pool in cache])


def assert_as_reference(heads, setting, batch, pools, found) -> None:
    """Assert that a step equals the reference over heads of float64. Values of the pool differ in ties alone."""
    arrays = [jnp.asarray(np.float32(x), heads.dtype) for x in expected_of(heads)]
    theirs, expected = run_step(ReferenceBackend, arrays, pools, batch, replace(setting, scale=0.125))
    ours, written = found
    np.testing.assert_allclose(ours[: batch.num_rows], theirs, atol=3e-2, rtol=3e-2)
    apart = np.abs(np.int32(written) - np.int32(expected))
    assert apart.max() <= 1
    assert apart.mean() < 1e-2


SETTINGS = {
    "tiles": Setting(kv_heads=2),
    "blocks": Setting(splits=True, groups=3),
    "tiles and blocks": Setting(weighs=True, groups=4),
}


@pytest.mark.parametrize("name", ["tiles", pytest.param("blocks", marks=pytest.mark.slow), "tiles and blocks"])
def test_steps_equal_the_reference(name, monkeypatch):
    use_small_tiles(monkeypatch)
    setting, rng = SETTINGS[name], np.random.default_rng(11)
    batch = draw_step(rng, setting)
    _, pools = draw_arrays(rng, batch, setting)
    backend = setting.backend(setting.spec)
    heads = draw_heads(rng, len(batch.row_seq), setting.spec.num_heads, Case(kv_heads=setting.kv_heads))
    found = attend(backend, heads, pools, backend.build_metadata(batch))
    assert_as_reference(heads, setting, batch, pools, found)


def test_runs_of_decodes_equal_the_reference(monkeypatch):
    use_small_tiles(monkeypatch)
    setting, rng = Setting(kv_heads=2, groups=3), np.random.default_rng(5)
    batch = draw_decodes(rng, setting, 8, 64, 600)
    used = np.arange(8) < batch.num_rows
    _, pools = draw_arrays(rng, batch, setting)
    backend, heads = Interpreted(setting.spec), draw_heads(rng, 8, 6, Case())
    metadata = backend.advance(backend.build_decodes(batch), np.zeros(8, np.int32), used)
    found = attend(backend, heads, pools, metadata)
    assert_as_reference(heads, setting, batch, pools, found)


def test_keys_and_values_that_are_not_finite_stay_in_their_row():
    """Every head of the row that reads them becomes NaN."""
    setting, rng = Setting(kv_heads=2), np.random.default_rng(5)
    batch = draw_decodes(rng, setting, 8, 8, 60)
    assert batch.num_rows > 2
    backend, heads = Interpreted(setting.spec), draw_heads(rng, 8, 4, Case())
    k, v = heads.k.copy(), heads.v.copy()
    k[0, 1, 7], v[1, 0, 0] = np.inf, np.nan
    metadata = backend.advance(backend.build_decodes(batch), np.zeros(8, np.int32), np.arange(8) < batch.num_rows)
    pools = np.zeros((2, 64, 16, 2, 64), np.uint16)
    good, _ = attend(backend, heads, pools, metadata)
    found, written = attend(backend, heads._replace(k=k, v=v), pools, metadata)
    assert np.isnan(found[0, 2:]).all()
    assert np.isnan(found[1, :2]).all()
    for kept in (np.s_[0, :2], np.s_[1, 2:], np.s_[2:]):
        np.testing.assert_array_equal(found[kept], good[kept])
    assert np.isfinite(np.float32(written.view(jnp.bfloat16))).all()
