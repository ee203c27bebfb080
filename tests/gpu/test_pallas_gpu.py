"""The GPU kernel in Pallas' GPU interpreter, against the reference."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from chunkattn.backends.base import AttentionBatch
from chunkattn.backends.default_cache import FP8
from chunkattn.backends.pallas_gpu import kernel, plan, producer, walk
from chunkattn.cache.slots import plan_slots
from chunkattn.rope.positions import make_layout
from chunkattn.testing import check_backend
from tests.gpu.interpreted import (
    Interpreted,
    Setting,
    Whole,
    check_step,
    draw_arrays,
    draw_step,
    recorded_races,
    run_step,
    use_small_tiles,
    use_tensor_cores,
)

# A deadlock of the kernel hangs the interpreter.
pytestmark = pytest.mark.timeout(600)

SETTINGS = [
    Setting(),
    Setting(weighs=True, groups=4),
    Setting(window=20, groups=3),
    Setting(dtype="float16", groups=1, block_size=32),
    Setting(kv_heads=2, groups=7),
    Setting(head_dim=128, groups=8, block_size=64),
    Setting(head_dim=256, block_size=128, groups=4),
    Setting(head_dim=128, weighs=True, kv_heads=2, dtype="float16"),
    Setting(window=40, block_size=32, groups=5, head_dim=128),
    Setting(groups=6, scale=0.0),
    Setting(splits=True),
    Setting(splits=True, weighs=True, groups=3, kv_heads=2, dtype="float16"),
    Setting(splits=True, window=30, groups=5, block_size=32),
    Setting(splits=True, head_dim=128, groups=8, block_size=64),
    Setting(splits=True, head_dim=256, weighs=True, block_size=128),
    Setting(kv_dtype=FP8.name),
    Setting(kv_dtype=FP8.name, weighs=True, head_dim=128, block_size=64, dtype="float16"),
    Setting(kv_dtype=FP8.name, splits=True, head_dim=256, block_size=32, groups=4),
    Setting(kv_dtype=FP8.name, splits=True, window=30, kv_heads=2, groups=7),
]
SEEDS = 4
QUICK = [(0, 1), (1, 3), (2, 2), (11, 0), (15, 1)]
FAULT_SEED = 7
"""A step with a prefix of several tiles, holes, and more tiles than the ring has places."""


@pytest.fixture
def small_tiles(monkeypatch):
    use_small_tiles(monkeypatch)


@pytest.mark.parametrize(
    ("number", "seed"),
    [
        pytest.param(number, seed, marks=[] if (number, seed) in QUICK else pytest.mark.slow)
        for number in range(len(SETTINGS))
        for seed in range(SEEDS)
    ],
)
def test_equals_reference_without_races(number, seed, small_tiles):
    with recorded_races() as races:
        check_step(seed + 100 * number, SETTINGS[number])
    assert not races.found


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(11, marks=pytest.mark.slow)])
def test_neighbours_change_no_bit_of_a_sequence(number, small_tiles):
    setting, rng = SETTINGS[number], np.random.default_rng(FAULT_SEED)
    batch = draw_step(rng, setting)
    arrays, pools = draw_arrays(rng, batch, setting)
    together, _ = run_step(setting.backend, arrays, pools, batch, setting)
    sequences = np.unique(batch.row_seq[: batch.num_rows])
    assert len(sequences) > 2
    for sequence in sequences:
        rows = np.flatnonzero(batch.row_seq[: batch.num_rows] == sequence)
        order = np.concatenate([rows, np.setdiff1d(np.arange(len(batch.row_seq)), rows)])
        columns = {name: getattr(batch, name)[order] for name in ("row_seq", "row_slot", "row_start")}
        alone = replace(batch, num_rows=len(rows), **columns)
        out, _ = run_step(setting.backend, [x[order] for x in arrays], pools, alone, setting)
        np.testing.assert_array_equal(out, together[rows])


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 5, 15])
def test_wgmma_itself_equals_reference(number, small_tiles, monkeypatch):
    """Races are not looked for: the interpreter does not track what `wgmma` reads."""
    use_tensor_cores(monkeypatch)
    check_step(FAULT_SEED, SETTINGS[number], fresh=True)


# Planted faults: each replaces one small function of the kernel.


def without_waiting_for_values(monkeypatch):
    monkeypatch.setattr(kernel, "wait_for_values", lambda here: None)


def freeing_keys_before_they_are_read(monkeypatch):
    def multiply(q, keys, free, then, *, twin):
        plgpu.barrier_arrive(free)
        return kernel.products.scores(q, keys, then, twin=twin)

    monkeypatch.setattr(kernel, "multiply_keys", multiply)


def overwriting_places_in_use(monkeypatch):
    monkeypatch.setattr(producer, "wait_until_free", lambda free, turn, shape: None)


def without_commit(monkeypatch):
    monkeypatch.setattr(kernel, "commit", lambda: None)


def overwriting_results_that_are_copied(monkeypatch):
    monkeypatch.setattr(kernel, "wait_for_copies", lambda: None)


def without_commit_of_converted_tiles(monkeypatch):
    monkeypatch.setattr(producer, "commit", lambda: None)


def seeing_one_slot_less(monkeypatch):
    monkeypatch.setattr(kernel, "visible", lambda slot, last, start, end: (slot < last) & ((slot < end) | (slot >= start)))


def ignoring_page_lengths(monkeypatch):
    monkeypatch.setattr(walk, "page_len", lambda entry: jnp.int32(1 << 10) + (entry & 0))


def cutting_the_prefix(monkeypatch):
    ranges = plan.tile_ranges

    def cut(batch, tiles, slots):
        found = ranges(batch, tiles, slots)
        return found._replace(first_end=np.maximum(found.first_end - 1, 0), second_start=found.second_start)

    monkeypatch.setattr(plan, "tile_ranges", cut)


def converting_without_clearing(monkeypatch):
    monkeypatch.setattr(producer, "_zero_unless", lambda seen, values: values)


def leaving_nan_in_values(monkeypatch):
    def pass_on(gmem, smem, shape, walk, item, tile, place):
        plgpu.barrier_wait(smem.values_raw.at[place])
        for _ in range(shape.boxes):
            plgpu.barrier_arrive(smem.values_here.at[place])

    monkeypatch.setattr(producer, "_clean", pass_on)


RACES = [without_waiting_for_values, freeing_keys_before_they_are_read, overwriting_places_in_use, without_commit]
DIFFERENCES = [seeing_one_slot_less, ignoring_page_lengths, cutting_the_prefix, leaving_nan_in_values]
MORE_RACES = [overwriting_results_that_are_copied, without_commit_of_converted_tiles]
KERNELS = {"tiles": Setting(), "splits": Setting(splits=True), "fp8": Setting(kv_dtype=FP8.name)}
FAULTS = {
    "tiles": [None, *RACES, *DIFFERENCES],
    "splits": [None, *RACES, *DIFFERENCES[:2], DIFFERENCES[3], MORE_RACES[0]],
    "fp8": [None, overwriting_places_in_use, MORE_RACES[1], converting_without_clearing],
}


@pytest.mark.parametrize(
    ("kernel_name", "fault"),
    [
        pytest.param(name, fault, marks=[] if name == "tiles" else pytest.mark.slow)
        for name, faults in FAULTS.items()
        for fault in faults
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_planted_faults_are_noticed(kernel_name, fault, small_tiles, monkeypatch):
    if fault is not None:
        fault(monkeypatch)
    difference = None
    with recorded_races() as races:
        try:
            check_step(FAULT_SEED, KERNELS[kernel_name], fresh=True)
        except (AssertionError, jax.errors.JaxRuntimeError) as error:
            difference = error
    if fault in RACES + MORE_RACES:
        assert races.found or isinstance(difference, jax.errors.JaxRuntimeError)  # the interpreter stops at some races
        return
    assert not races.found
    differs = fault in [*DIFFERENCES, converting_without_clearing]
    assert isinstance(difference, AssertionError) if differs else fault or not difference


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 1},
        pytest.param({"weighs": True, "num_kv_heads": 2, "num_heads": 4, "seed": 2}, marks=pytest.mark.slow),
        pytest.param({"window": 20, "dtype": "float16"}, marks=pytest.mark.slow),
        pytest.param({"head_dim": 128, "block_size": 64, "num_heads": 8}, marks=pytest.mark.slow),
        pytest.param({"kv_dtype": FP8.name, "seed": 3}, marks=pytest.mark.slow),
        pytest.param({"kv_dtype": FP8.name, "head_dim": 256, "weighs": True, "block_size": 32}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_check_backend_passes(options):
    """Tiles and splits have their real sizes."""
    given = {"head_dim": 64, "num_heads": 2, "num_kv_heads": 1, "dtype": "bfloat16", "block_size": 16, **options}
    with recorded_races() as races:
        check_backend(Interpreted, cases=1, **given)
    assert not races.found


@pytest.mark.parametrize("invariant", [True, False])
def test_bits_of_an_item_in_company(invariant, small_tiles):
    """An item alone as a question, alone in a pack, and between others, in steps of one size: one step each."""
    backend, rng = Whole(Setting().spec), np.random.default_rng(4)
    backend.batch_invariant = invariant
    forward = jax.jit(backend.forward, static_argnames="scale")
    prefix, item, *others = (rng.standard_normal((n, 4, 64)) for n in (20, 22, 14, 5))
    found = []
    for items in ([item], [item], [others[0], item, others[1]]):
        chunks, question = ([], items[0]) if not found else (items, [])
        layout = make_layout(np.zeros(20), [np.zeros(len(x)) for x in chunks], np.zeros(len(question)))
        slots = plan_slots(layout, 16, aligned=True, apart=True)
        rows, pages = len(layout), len(slots.page_len)
        columns, tables = np.zeros((3, 64), np.int32), np.zeros((2, 1, 16), np.int32)
        columns[1, :rows], columns[2, :rows] = slots.slots, slots.row_start
        tables[0, 0], tables[1, 0] = rng.permutation(16), np.pad(slots.page_len, (0, 16 - pages), constant_values=16)
        batch = AttentionBatch(rows, *columns, np.asarray([20], np.int32), *tables, 16)
        given = np.concatenate([prefix, *items, np.zeros((64 - rows, 4, 64))])
        q, k, v = (jnp.asarray(given[:, heads], jnp.bfloat16) for heads in (slice(2), slice(2, 3), slice(3, 4)))
        out, _ = forward(q, k, v, backend.allocate(16), backend.build_metadata(batch), scale=0.125)
        first = 20 + (14 if len(items) > 1 else 0)
        found.append(np.asarray(out, np.float32)[first : first + 22])
    np.testing.assert_allclose(found[2], found[0], atol=0.02)
    np.testing.assert_array_equal(found[1], found[0])
    assert np.array_equal(found[2], found[0]) == invariant
