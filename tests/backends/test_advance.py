"""Runs of decodes: metadata that is advanced on the device computes what metadata of the host does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkattn.backends import AttentionSpec, get_backend
from chunkattn.backends.pallas_tpu import backend as pallas_tpu
from chunkattn.backends.pallas_tpu import decodes, kernel
from chunkattn.backends.pallas_tpu.blocks import TABLE, Blocks
from chunkattn.testing import Comparison, check_backend, random_run

TPU = {"head_dim": 128, "block_size": 16}
OPTIONS = [{}, {"window": 7}, {"weighs": True}, {"kv_dtype": "float8_e4m3fn"}, {"dtype": "bfloat16", "block_size": 16}]


@pytest.fixture
def small_tiles(monkeypatch):
    """Several KV tiles even for sequences of a few hundred slots."""
    small = Blocks(512, 128, 2)
    monkeypatch.setattr(pallas_tpu.PallasTpuBackend, "table", dict.fromkeys(TABLE, (small, small)))


def differences(
    backend,
    cases,
    *,
    head_dim=16,
    dtype="float32",
    block_size=8,
    window=None,
    kv_dtype=None,
    weighs=False,
    scale=1,
    heads=(4, 2),
):
    """Yield the differences of random runs of decodes."""
    kept = None if kv_dtype is None else jnp.dtype(kv_dtype)
    made = backend(AttentionSpec(*heads, head_dim, jnp.dtype(dtype), block_size, (window,), kept))
    rng = np.random.default_rng(0)
    comparison = Comparison(made, made, rng.spawn(1)[0], window)
    for _ in range(cases):
        run = random_run(rng, block_size=block_size, scale=scale, weighs=weighs, windowed=window is not None)
        yield from comparison.run_differences(*run)


@pytest.mark.parametrize("backend", ["cpu", "xla"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_bits_are_equal(backend, options):
    found = list(differences(get_backend(backend), 3, **options))
    assert len(found) > 20
    assert not any(found)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"head_dim": 64, "dtype": "bfloat16", "heads": (3, 1)}, marks=pytest.mark.ci),
        pytest.param({"kv_dtype": "float8_e4m3fn", "dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param({"scale": 4}, marks=pytest.mark.slow),
        pytest.param({"weighs": True, "scale": 4}, marks=pytest.mark.slow),
        pytest.param({"window": 150, "scale": 4}, marks=pytest.mark.ci),
        pytest.param({"window": 19, "block_size": 32}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_tpu_kernel_computes_the_same_bits(options, small_tiles):
    found = list(differences(get_backend("pallas_tpu"), 1, **{**TPU, **options}))
    assert len(found) > 8
    assert not any(found)


@pytest.mark.parametrize("options", [{}, {"weighs": True}, {"window": 150}], ids=str)
def test_scalars_of_the_tpu_kernel_are_those_of_the_host(options, small_tiles):
    """Over many random runs, without computing them."""
    options = {"window": None, "weighs": False, **options}
    backend = get_backend("pallas_tpu")(AttentionSpec(4, 2, 128, jnp.dtype("float32"), 16, (options["window"],)))
    rng, crossed, advanced = np.random.default_rng(1), 0, jax.jit(backend.advance)
    for _ in range(20):
        windowed = options["window"] is not None
        _, run = random_run(rng, block_size=16, scale=8, weighs=options["weighs"], windowed=windowed)
        first, used = backend.build_decodes(run[0]), np.arange(len(run[0].row_seq)) < run[0].num_rows
        for batch in (run[0], run[-1]):
            steps = np.where(used, batch.row_slot - run[0].row_slot, 0)
            moved, planned = advanced(first, steps, used), backend.build_metadata(batch)
            rows = slice(batch.num_rows)
            pairs = [(moved.decodes[4:, rows], planned.decodes[4:, rows])]  # further rows than those of blocks
            for ours, theirs in zip(moved.windows, planned.windows, strict=True):
                pairs += [(ours.scalars[4:, rows], theirs.decodes[4:, rows])]
                pairs += [(ours.visits[rows] >> 1, theirs.decode_visits[rows] >> 1)]
                # A tile without a mask has no token before the window.
                assert not (np.asarray(ours.visits[rows]) & 1 < theirs.decode_visits[rows] & 1).any()
            for got, wanted in pairs:
                np.testing.assert_array_equal(got, wanted)
        tiles = np.asarray(moved.decodes)[kernel.SECOND_END] - first.scalars[kernel.SECOND_END]
        crossed += (tiles[: run[0].num_rows] > 0).sum()
    assert crossed > 2


def unmoved(advance, self, first, steps, used):
    return advance(self, first, steps * 0, used)


def late(advance, self, first, steps, used):
    return advance(self, first, jnp.maximum(steps, 1), used)


def without_pages(advance, self, first, steps, used):
    moved = advance(self, first, steps, used)
    return moved._replace(flat_slots=jnp.where(used, moved.flat_slots // 8 * 8, -1))


@pytest.mark.parametrize("fault", [unmoved, late, without_pages], ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(fault, monkeypatch):
    xla = get_backend("xla")
    advance = xla.advance
    check_backend("xla", cases=2)
    monkeypatch.setattr(xla, "advance", lambda *args: fault(advance, *args))
    with pytest.raises(AssertionError, match="of a run of decodes: `advance` differs"):
        check_backend("xla", cases=2)


def test_a_backend_without_it_runs_single_steps():
    reference = get_backend("reference")(AttentionSpec(4, 2, 16, jnp.dtype("float32"), 8))
    assert not reference.advances
    _, run = random_run(np.random.default_rng(0))
    with pytest.raises(NotImplementedError):
        reference.advance(reference.build_decodes(run[0]), run[0].row_slot * 0, run[0].row_slot >= 0)
    check_backend("reference", cases=1)


def test_decodes_of_a_tpu_take_few_arrays():
    """Query tiles and writes are made on the chip."""
    backend = get_backend("pallas_tpu")(AttentionSpec(4, 2, 128, jnp.dtype("float32"), 16))
    _, run = random_run(np.random.default_rng(0), block_size=16)
    made = backend.build_decodes(run[0])
    assert isinstance(made, decodes.Decodes)
    assert [name for name, value in made._asdict().items() if value is not None] == ["scalars", "count", "table"]
