"""Metadata of runs of decodes, computed on the device, beside the host's plan of a step at the later slots."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkattn.backends.base import NO_QUESTION, AttentionBatch, AttentionSpec, Weighing
from chunkattn.backends.pallas_gpu import plan, run
from chunkattn.backends.pallas_gpu.backend import PallasGpuBackend
from chunkattn.backends.pallas_gpu.splits import split_items
from chunkattn.backends.reference import ReferenceBackend
from chunkattn.backends.tiles import spans
from chunkattn.backends.windows import sees_parts
from tests.gpu.interpreted import Interpreted, Setting, draw_arrays, recorded_races, use_small_tiles

pytestmark = pytest.mark.timeout(600)
STEPS = 33
SETTINGS = {
    "plain": Setting(),
    "weighed": Setting(weighs=True, groups=4),
    "window": Setting(window=20, groups=3, head_dim=128, block_size=32),
    "weighed window": Setting(window=200, weighs=True, groups=3, block_size=128),
    "whole window": Setting(window=4000, block_size=64),
}


def draw_decodes(rng: np.random.Generator, setting: Setting, rows: int, width: int, longest: int) -> AttentionBatch:
    """Return a step of decodes of up to `longest` slots behind prefixes, parts with holes, and questions.

    The page tables have the pages of `STEPS` further steps, and `width` entries.
    """
    size, used = setting.block_size, int(rng.integers(1, rows + 1))
    tables = rng.permutation(rows * width).reshape(rows, width).astype(np.int32)
    lengths, positions = np.full((rows, width), size, np.int32), np.tile(np.arange(width, dtype=np.int32) * size, (rows, 1))
    slots, prefix_end, question = np.zeros((3, rows), np.int32)
    longest = min(longest, width * size - STEPS - 1)
    for row in range(used):
        slots[row] = rng.integers(0, longest)
        pages = slots[row] // size
        first, own = sorted(rng.integers(0, pages + 1, 2))  # pages of the prefix, then of the chunks, then of the question
        prefix_end[row] = first * size if rng.random() < 0.7 else min(slots[row], first * size + rng.integers(0, size))
        question[row] = max(own * size, prefix_end[row]) if rng.random() < 0.8 else NO_QUESTION
        if rng.random() < 0.3:
            question[row] = slots[row] + rng.integers(1, STEPS)
        if rng.random() < 0.3 or prefix_end[row] % size:
            continue
        page, start = first, int(prefix_end[row])
        while page < own:
            count = int(rng.integers(1, own - page + 1))
            positions[row, page : page + count] = start + np.arange(count) * size
            page += count
            lengths[row, page - 1] = rng.integers(1, size + 1)
        positions[row, own:] = int(rng.integers(0, 300)) + start + np.arange(width - own) * size
    seq = np.where(np.arange(rows) < used, np.arange(rows), 0).astype(np.int32)
    weighing = None
    if setting.weighs:
        weighing = Weighing(question, *rng.uniform(0.5, 1.5, (2, rows)).astype(np.float32))
    page_position = positions if setting.window is not None else None
    start = np.zeros(rows, np.int32)
    return AttentionBatch(used, seq, slots, start, prefix_end, tables, lengths, size, weighing, page_position)


def later(batch: AttentionBatch, steps: np.ndarray) -> AttentionBatch:
    return replace(batch, row_slot=batch.row_slot + steps)


def planned(backend: PallasGpuBackend, batch: AttentionBatch, window: int | None) -> plan.Work:
    """Return the host's work items of decodes."""
    shape, weighing = backend.decode_shape, batch.row_weighing() if window is None else None
    near = None if window is None else plan.Near(window, sees_parts(batch))
    runs, most = spans(batch), plan.decode_states(weighing is not None, windowed=window is not None)
    assert len(runs.row) == batch.num_rows
    start = np.arange(len(runs.row), dtype=np.int32) * 8
    base, found = plan._near(plan._items(batch, runs, shape, start), batch, runs, shape, near)
    items, splits = split_items(base, batch, weighing, runs, shape, plan.MOST_SPLITS, most, len(batch.row_seq))
    items, listed = plan._visit(items, found, len(batch.row_seq))
    return plan.Work(items, None, None, None, None, splits, listed)


def assert_same(ours: plan.Work, theirs: plan.Work) -> None:
    for name in ("num_items", "kinds", "factors", "scale"):
        pair = getattr(ours.splits, name), getattr(theirs.splits, name)
        assert (pair[0] is None) == (pair[1] is None), name
        if pair[0] is not None:
            np.testing.assert_allclose(*pair, rtol=1e-6, err_msg=name)
    np.testing.assert_array_equal(ours.items, theirs.items)
    if theirs.visits is not None:
        np.testing.assert_array_equal(ours.visits, theirs.visits)


@pytest.mark.parametrize("small", [False, True], ids=["real tiles", "small tiles"])
@pytest.mark.parametrize("name", SETTINGS)
def test_items_equal_those_planned_at_later_slots(name, small, monkeypatch):
    if small:
        use_small_tiles(monkeypatch)
    setting, rng = SETTINGS[name], np.random.default_rng(3)
    spec = AttentionSpec(setting.groups, 1, setting.head_dim, jnp.dtype("bfloat16"), setting.block_size, (None, setting.window))
    backend = PallasGpuBackend(spec)
    advance = jax.jit(backend.advance)
    for case in range(12):
        longest = int(rng.choice([40, 700, 9000]))
        batch = draw_decodes(rng, setting, 8, 40 if case % 2 else 10000 // setting.block_size, longest)
        used = np.arange(8) < batch.num_rows
        for most in (1, 2, STEPS):  # rows that have ended stand still
            steps = np.where(used, rng.integers(0, most, 8), 0).astype(np.int32)
            then = later(batch, steps)
            found, host = advance(backend.build_decodes(batch), steps, used), backend.build_metadata(then)
            assert_same(found.decodes, planned(backend, then, None))
            np.testing.assert_array_equal(found.flat_slots, host.flat_slots)
            np.testing.assert_array_equal(found.table, host.table)
            np.testing.assert_array_equal(found.state_holes, host.state_holes)
            if setting.window is not None:
                assert_same(found.windows[0].decodes, planned(backend, then, setting.window))
                np.testing.assert_array_equal(found.shifts, host.shifts)


@pytest.mark.parametrize("name", ["plain", *(pytest.param(name, marks=pytest.mark.slow) for name in list(SETTINGS)[1:])])
def test_outputs_equal_the_reference_at_later_slots(name, monkeypatch):
    use_small_tiles(monkeypatch)
    setting, rng = SETTINGS[name], np.random.default_rng(5)
    backend, reference = Interpreted(setting.spec), ReferenceBackend(setting.spec)
    batch = draw_decodes(rng, setting, 8, 1024 // setting.block_size, 600)
    used = np.arange(8) < batch.num_rows

    @jax.jit
    def one(decodes, steps, arrays, pools):
        return backend.forward(*arrays, pools, backend.advance(decodes, steps, used), scale=0.125, window=setting.window)

    for most in (0, 9):
        steps = np.where(used, most - np.arange(8) % 2 * (most > 0), 0).astype(np.int32)
        then = later(batch, steps)
        arrays, pools = draw_arrays(rng, then, setting)
        with recorded_races() as races:
            given = backend.build_decodes(batch), steps, arrays, tuple(pool.swapaxes(1, 2) for pool in pools)
            out, cache = jax.block_until_ready(one(*given))
        assert not races.found
        given = jax.tree.map(jnp.asarray, reference.build_metadata(then))
        expected, kept = reference.forward(*arrays, tuple(pools), given, scale=0.125, window=setting.window)
        out, expected = (np.asarray(x, np.float32)[: batch.num_rows] for x in (out, expected))
        np.testing.assert_allclose(out, expected, atol=2e-2, rtol=2e-2)
        for ours, theirs in zip(cache, kept, strict=True):
            np.testing.assert_array_equal(ours.swapaxes(1, 2), theirs)


def test_a_decode_behind_a_cut_split_has_room_for_its_states():
    """The prefix ends in the split in which the window begins: one split more than those of the whole sequence."""
    batch = draw_decodes(np.random.default_rng(0), Setting(window=4000), 8, 600, 10)
    slots = np.where(np.arange(8) < batch.num_rows, 8191, 0).astype(np.int32)
    lengths = np.full_like(batch.page_len, 16)
    batch = replace(batch, row_slot=slots, prefix_end=np.full(8, 300, np.int32), page_len=lengths, page_position=None)
    spec = AttentionSpec(2, 1, 64, jnp.dtype("bfloat16"), 16, (7792,))
    work = planned(PallasGpuBackend(spec), replace(batch, page_position=batch.page_positions()), 7792)
    assert (work.splits.kinds[: batch.num_rows] != 0).sum(axis=1).tolist() == [plan.MOST_SPLITS + 1] * batch.num_rows


def test_a_fault_of_the_device_is_noticed(monkeypatch):
    monkeypatch.setattr(run.splits, "SPLIT_SLOTS", 512)
    ranges = run._ranges
    monkeypatch.setattr(run, "_ranges", lambda last, *of: ranges(last - 1, *of))
    with pytest.raises(AssertionError):
        test_items_equal_those_planned_at_later_slots("plain", False, monkeypatch)


def test_rows_that_must_keep_bits_do_not_run():
    backend = PallasGpuBackend(Setting().spec)
    assert backend.advances
    backend.batch_invariant = True
    assert not backend.advances
