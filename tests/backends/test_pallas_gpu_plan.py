"""The GPU backend on the host: its refusals, its cards and its work items. `tests/gpu` runs the kernel."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkattn.backends import AttentionBatch, AttentionSpec, make_backend, registry
from chunkattn.backends.default_cache import FP8
from chunkattn.backends.pallas_gpu import plan, splits, walk
from chunkattn.backends.pallas_gpu.backend import PallasGpuBackend
from chunkattn.backends.pallas_gpu.combine import CHUNK, REST
from chunkattn.config import EngineConfig
from chunkattn.engine.build import attention_spec
from chunkattn.testing import random_steps

SPEC = AttentionSpec(4, 2, 128, jnp.dtype("bfloat16"), 64)
CARDS = {"NVIDIA A100-SXM4-80GB": "8.0", "NVIDIA H100 80GB HBM3": "9.0", "NVIDIA B200": "10.0"}


class Compiled(PallasGpuBackend):
    """The backend as it is on a GPU."""

    name = "pallas_gpu"
    interpret = False


def stub_platform(monkeypatch, card):
    """Let JAX see one card, or none."""
    devices = [SimpleNamespace(device_kind=card, compute_capability=CARDS[card])] if card else jax.devices("cpu")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu" if card else "cpu")
    monkeypatch.setattr(jax, "devices", lambda *platform: devices)


@pytest.mark.parametrize("card", CARDS)
def test_auto_takes_the_kernel_on_hopper_alone(card, monkeypatch, caplog):
    stub_platform(monkeypatch, card)
    with caplog.at_level(logging.INFO, "chunkattn.backends.registry"):
        chosen = make_backend("auto", SPEC).name
    (record,) = caplog.records
    if CARDS[card] == "9.0":
        assert chosen == "pallas_gpu"
        assert record.getMessage() == "attention_backend auto: pallas_gpu on gpu, the first choice there"
    else:
        assert chosen == "xla"
        reason = f"a {card} has compute capability {CARDS[card]}; the kernel needs 9.0 (Hopper)"
        assert record.getMessage().endswith(f"xla on gpu, because pallas_gpu cannot serve this model: {reason}")


def test_auto_says_why_a_card_is_not_used(monkeypatch, caplog, tmp_path):
    stub_platform(monkeypatch, None)
    monkeypatch.setattr(registry, "_NVIDIA", (tmp_path,))
    monkeypatch.delenv("JAX_PLATFORMS")
    with caplog.at_level(logging.INFO, "chunkattn.backends.registry"):
        chosen = make_backend("auto", SPEC).name
    (record,) = caplog.records
    assert chosen in ("cpu", "xla")
    assert f"{chosen} on cpu, because JAX sees no GPU: there is an NVIDIA driver" in record.getMessage()


def test_a_kernel_that_this_jax_cannot_load_leaves_the_portable_backend(monkeypatch, caplog):
    stub_platform(monkeypatch, "NVIDIA H100 80GB HBM3")
    monkeypatch.delitem(registry._REGISTERED, "pallas_gpu")
    monkeypatch.setitem(registry._BUILT_IN, "pallas_gpu", "chunkattn.backends.nowhere")
    with caplog.at_level(logging.INFO, "chunkattn.backends.registry"):
        assert make_backend("auto", SPEC).name == "xla"
    assert "backend 'pallas_gpu' cannot be loaded: ModuleNotFoundError" in caplog.records[0].getMessage()


def test_without_a_gpu_the_interpreter_must_be_good_enough(monkeypatch):
    stub_platform(monkeypatch, None)
    monkeypatch.setenv("NPROC", "16")
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert "the GPU interpreter of JAX" in PallasGpuBackend.supports(SPEC)
    assert make_backend("auto", SPEC).name != "pallas_gpu"
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    assert PallasGpuBackend.supports(SPEC) is None
    monkeypatch.setenv("NPROC", "2")
    assert "hangs on 2 threads" in PallasGpuBackend.supports(SPEC)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 96}, "head_dim must be one of 64, 128, 256, got 96"),
        ({"num_heads": 18}, "at most 8 query heads may share a KV head, got 9"),
        ({"block_size": 8}, "block_size must be one of 16, 32, 64, 128, got 8"),
        ({"dtype": jnp.dtype("float32")}, "dtype must be bfloat16 or float16, got float32"),
        ({"head_dim": 256, "block_size": 16, "dtype": jnp.dtype("float16"), "windows": (None, 512)}, None),
        ({"kv_dtype": FP8}, None),
    ],
)
def test_refuses_with_a_reason(change, reason):
    found = Compiled.supports(replace(SPEC, **change))
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("multiprocessors", [132, 1])
@pytest.mark.parametrize("weighs", [False, True])
def test_metadata_sizes_follow_from_the_batch_alone(weighs, multiprocessors, monkeypatch):
    monkeypatch.setattr(Compiled, "multiprocessors", multiprocessors)
    backend, rng = Compiled(replace(SPEC, block_size=16)), np.random.default_rng(0)
    steps = [step for _ in range(8) for step in random_steps(rng, block_size=16, weighs=weighs)]
    sizes = [jax.tree.map(np.shape, backend.build_metadata(step)) for step in steps]
    assert all(size == sizes[0] for size in sizes)


def seen_by(batch, work, window, shape, shifts):
    """Return the slots that each item's rows see by the kernel's rule, with the page lengths left out."""
    number = len(work.items) if work.splits is None else work.splits.num_items[0]
    items, rows = work.items[:number], work.rows
    slots = np.arange(batch.block_tables.shape[1] * batch.block_size)
    tile = slots // shape.slots
    for item in items:
        visited = (tile < item[walk.FIRST_END]) | ((tile >= item[walk.SECOND_START]) & (tile < item[walk.SECOND_END]))
        whole = (tile < item[walk.FULL_END]) | ((tile >= item[walk.FULL_START]) & (tile < item[walk.FULL_STOP]))
        if window is not None:
            listed = work.visits[item[walk.QUERY], item[walk.SECOND_START] : item[walk.SECOND_END]]
            visited = np.isin(tile, listed >> 1)
            whole &= ~np.isin(tile, listed[listed & 1 == 1] >> 1)
        high, low = np.repeat(item[[walk.HIGH, walk.LOW], None, None], shape.rows, axis=1)
        last, start = (high, low) if rows is None else rows[item[walk.QUERY]][:2].reshape(2, -1, 1)
        if shape.states:
            last, start = np.minimum(last, high), np.maximum(start, low)
        mask = (slots <= last) & ((slots < item[walk.PREFIX_END]) | (slots >= start))
        if window is not None:
            own = (
                np.repeat(item[walk.POSITION], shape.rows)[:, None]
                if rows is None
                else rows[item[walk.QUERY]][2].reshape(-1, 1)
            )
            mask &= slots + shifts[item[walk.SEQ], slots // batch.block_size] > own - window
        yield item, slots, visited, mask, whole


def rows_by_block(batch, work, shape):
    """Return the rows of each block of queries, from its items' first folded rows and sizes."""
    number = len(work.items) if work.splits is None else work.splits.num_items[0]
    found = {}
    for item in work.items[:number][work.items[:number, walk.SIZE] > 0]:
        tokens = np.arange(item[walk.SIZE])
        folded = item[walk.START] + tokens // shape.tokens * 64 + tokens % shape.tokens * shape.groups
        found[int(item[walk.QUERY])] = (work.source[folded] // shape.groups).tolist()
    return found


def expected(batch, row, window):
    """Return the slots that a row sees, with the page lengths left out."""
    slots, seq = np.arange(batch.block_tables.shape[1] * batch.block_size), batch.row_seq[row]
    slot, end = batch.row_slot[row], batch.prefix_end[seq]
    seen = (slots <= slot) & ((slots < end) | (slots >= batch.row_start[row]))
    if window is not None:
        positions = batch.page_position[seq, slots // 16] + slots % 16
        seen &= positions > positions[slot] - window
        # A KV tile may lie in a hole behind the last token in the window.
        seen &= slots % 16 < batch.page_len[seq, slots // 16]
    return set(slots[seen].tolist())


@pytest.mark.parametrize("head_dim", [pytest.param(64, marks=pytest.mark.slow), 128])
@pytest.mark.parametrize(
    ("window", "weighs"),
    [(None, False), pytest.param(50, False, marks=pytest.mark.ci), pytest.param(None, True, marks=pytest.mark.ci)],
)
@pytest.mark.parametrize("multiprocessors", [132, 1], ids=["split", "whole"])
def test_items_hold_every_visible_slot_of_every_row_once(head_dim, window, weighs, multiprocessors, monkeypatch):
    monkeypatch.setattr(splits, "SPLIT_SLOTS", 128)
    monkeypatch.setattr(plan, "MOST_SPLITS", 3)
    monkeypatch.setattr(Compiled, "multiprocessors", multiprocessors)
    backend, rng = Compiled(replace(SPEC, head_dim=head_dim, block_size=16, windows=(window,))), np.random.default_rng(1)
    shapes = {"tiles": backend.tile_shape, "blocks": backend.block_shape}
    most = 0
    for _ in range(12):
        for batch in random_steps(rng, block_size=16, scale=4, weighs=weighs, windowed=window is not None):
            metadata, found = backend.build_metadata(batch), [set() for _ in range(batch.num_rows)]
            works = metadata if window is None else metadata.windows[0]
            valid = np.arange(16) < batch.page_len[..., None]
            kinds, covered = [{} for _ in range(batch.num_rows)], {name: set() for name in shapes}
            for name, shape in shapes.items():
                work = getattr(works, name)
                if work is None:
                    continue
                rows_of = rows_by_block(batch, work, shape)
                for item, slots, visited, mask, whole in seen_by(batch, work, window, shape, metadata.shifts):
                    most = max(most, item[walk.OUT] % work.splits.kinds.shape[1] if name == "blocks" else 0)
                    for token in range(item[walk.SIZE]):
                        row = rows_of[int(item[walk.QUERY])][token]
                        covered[name].add(int(row))
                        warpgroup, place = divmod(token, shape.tokens)
                        folded = item[walk.START] + 64 * warpgroup + place * backend.groups
                        assert work.source[folded : folded + 2].tolist() == [2 * row, 2 * row + 1]
                        assert work.folded[row] == folded
                        seen = mask[warpgroup * 64 + place * backend.groups]
                        assert not (whole & visited & ~seen).any()
                        present = valid[batch.row_seq[row]].ravel() if window is not None else True
                        own = set(slots[visited & seen & present].tolist())
                        assert not own & found[row]
                        found[row] |= own
                        kind = REST if work.splits is None else int(work.splits.kinds.ravel()[item[walk.OUT]])
                        kinds[row].update(dict.fromkeys(own, kind))
            assert set.union(*covered.values()) == set(range(batch.num_rows))
            weighing = batch.row_weighing()
            for row in range(batch.num_rows):
                assert found[row] == expected(batch, row, window)
                if weighing is not None:
                    begin, end = weighing.begin[row], weighing.end[row]
                    assert all((kind == CHUNK) == (begin <= slot < end) for slot, kind in kinds[row].items())
    assert (most > 1) == (multiprocessors > 1 or weighs)


def test_the_splits_of_a_decode_depend_on_its_slot_alone():
    """A row's items are the same, whatever the other rows of the step and the width of the page table."""
    backend = Compiled(SPEC)

    def items_of(slots, width):
        rows = len(slots)
        batch = AttentionBatch(
            rows,
            np.arange(rows, dtype=np.int32),
            np.asarray(slots, np.int32),
            *np.zeros((2, rows), np.int32),
            np.zeros((rows, width), np.int32),
            np.full((rows, width), 64, np.int32),
            64,
        )
        work = jax.jit(backend.advance)(backend.build_decodes(batch), 0, np.ones(rows, bool)).decodes
        items = np.asarray(work.items[: work.splits.num_items[0]])
        ranges = items[:, [walk.SECOND_START, walk.SECOND_END, walk.LOW, walk.HIGH]]
        return [ranges[items[:, walk.QUERY] == row].tolist() for row in range(rows)]

    slots = [0, 511, 512, 5000, 8191, 8192, 20000, 31999]
    together = items_of(slots, 512)
    assert together == [items_of([slot], slot // 64 + 1)[0] for slot in slots]
    assert [len(items) for items in together] == [1, 1, 2, 10, 16, 9, 14, 16]


@pytest.mark.parametrize(
    ("rows", "sequences", "spec", "splits"),
    [
        (64, 8, AttentionSpec(16, 8, 128, jnp.dtype("bfloat16"), 64), 16),
        (64, 64, AttentionSpec(16, 8, 128, jnp.dtype("bfloat16"), 64), 6),
        (256, 64, AttentionSpec(32, 8, 128, jnp.dtype("bfloat16"), 64), 5),
        (256, 300, AttentionSpec(32, 8, 128, jnp.dtype("bfloat16"), 64), 1),
        (512, 64, AttentionSpec(32, 8, 128, jnp.dtype("bfloat16"), 64), 1),
        (64, 8, AttentionSpec(32, 32, 128, jnp.dtype("bfloat16"), 64), 5),
    ],
)
def test_blocks_are_split_in_steps_that_leave_multiprocessors_idle(rows, sequences, spec, splits):
    table = np.zeros((sequences, 1), np.int32)
    batch = AttentionBatch(0, *np.zeros((3, rows), np.int32), np.zeros(sequences, np.int32), table, table, 64)
    assert Compiled(spec).block_splits(batch) == splits
    metadata = Compiled(spec).build_metadata(batch)
    assert (metadata.tiles is None, metadata.blocks is None) == (splits > 1, splits == 1)


def test_a_question_alone_occupies_most_of_the_card():
    """50 tokens behind 12 documents of 500: 192 items for 132 multiprocessors, where whole tiles would be 8."""
    backend = Compiled(AttentionSpec(16, 8, 128, jnp.dtype("bfloat16"), 64))
    slots, rows, width = np.arange(6000, 6050, dtype=np.int32), 64, 96
    columns = np.zeros((3, rows), np.int32)
    columns[1, : len(slots)] = slots
    length = np.full((8, width), 64, np.int32)
    batch = AttentionBatch(len(slots), *columns, np.zeros(8, np.int32), np.zeros((8, width), np.int32), length, 64)
    work = backend.build_metadata(batch).blocks
    items = work.items[: work.splits.num_items[0]]
    assert len(items) * backend.spec.num_kv_heads == 2 * 12 * 8
    longest = (items[:, walk.SECOND_END] - items[:, walk.SECOND_START]).max() * backend.block_shape.slots
    assert longest == splits.SPLIT_SLOTS


def test_the_default_page_size_is_that_of_the_platform(monkeypatch):
    model = SimpleNamespace(heads=(4, 2, 64), windows=(None,))
    for platform, size in (("gpu", 64), ("cpu", 16), ("tpu", 16)):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        assert attention_spec(EngineConfig(), model, jnp.dtype("bfloat16")).block_size == size
        assert attention_spec(EngineConfig(block_size=32), model, jnp.dtype("bfloat16")).block_size == 32


@pytest.mark.parametrize(
    ("head_dim", "block_size", "window", "multiprocessors", "kv_dtype", "kernels"),
    [
        (64, 16, None, 132, None, 1),
        pytest.param(128, 64, 100, 1, None, 1, marks=pytest.mark.ci),
        pytest.param(256, 128, None, 1, None, 2, marks=pytest.mark.ci),
        pytest.param(128, 32, None, 1, FP8, 2, marks=pytest.mark.ci),
    ],
)
def test_steps_lower_for_cuda(head_dim, block_size, window, multiprocessors, kv_dtype, kernels, monkeypatch):
    """Mosaic GPU accepts every kernel of a step, in this JAX and without CUDA, and layers share the kernels.

    `benchmarks.gpu_aot` goes on to machine code.
    """
    monkeypatch.setattr(Compiled, "multiprocessors", multiprocessors)
    backend = Compiled(replace(SPEC, head_dim=head_dim, block_size=block_size, windows=(window,), kv_dtype=kv_dtype))
    (batch, *_) = random_steps(np.random.default_rng(0), block_size=block_size, weighs=window is None)
    arrays = [jnp.zeros((len(batch.row_seq), heads, head_dim), jnp.bfloat16) for heads in (4, 2, 2)]

    def two_layers(q, k, v, cache, metadata):
        q, cache = backend.forward(q, k, v, cache, metadata, scale=0.1, window=window)
        return backend.forward(q, k, v, cache, metadata, scale=0.1, window=window)

    step = jax.jit(two_layers).trace(*arrays, backend.allocate(8), backend.build_metadata(batch))
    lowered = step.lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @mosaic_gpu") == kernels
