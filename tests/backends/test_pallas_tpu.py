"""The TPU kernels in Pallas' TPU interpreter against the reference, and their host-side plans against NumPy."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental.pallas import tpu as pltpu

from chunkattn import ChunkedPrompt, SamplingParams
from chunkattn.backends import AttentionBatch, AttentionSpec, get_backend
from chunkattn.backends.pallas_tpu import backend as pallas_tpu
from chunkattn.backends.pallas_tpu import kernel
from chunkattn.backends.pallas_tpu.blocks import TABLE, Blocks
from chunkattn.backends.pallas_tpu.write import BUFFER, COUNT, DEPTH, DEST, GROUP, LAST, OFFSET, ROW, block_rows, plan_writes
from chunkattn.cache.slots import plan_slots
from chunkattn.rope.positions import make_layout
from chunkattn.testing import TOLERANCE, check_backend, random_steps
from tests.soak.tpu_interpret import Races

BLOCK = 16
SMALL = {"head_dim": 128, "block_size": BLOCK}


@pytest.fixture
def small_tiles(monkeypatch):
    """Several query and KV tiles even for sequences of a few hundred slots."""
    small = Blocks(512, 128, 2)
    monkeypatch.setattr(pallas_tpu.PallasTpuBackend, "most_rows", 32)
    monkeypatch.setattr(pallas_tpu.PallasTpuBackend, "table", dict.fromkeys(TABLE, (small, small)))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"cases": 2}, marks=pytest.mark.slow),
        pytest.param({"scale": 4}, marks=pytest.mark.slow),
        pytest.param({"head_dim": 64, "dtype": "bfloat16", "num_heads": 3, "num_kv_heads": 1}, marks=pytest.mark.ci),
        pytest.param({"window": 19}, marks=pytest.mark.slow),
        pytest.param({"kv_dtype": "float8_e4m3fn", "dtype": "bfloat16", "scale": 4}, marks=pytest.mark.slow),
        pytest.param({"weighs": True, "scale": 4}, marks=pytest.mark.slow),
        pytest.param({"bits": True}, marks=pytest.mark.slow),
        pytest.param({"bits": True, "weighs": True, "head_dim": 64, "dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param({"bits": True, "window": 50}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_equals_reference(options, small_tiles):
    check_backend("pallas_tpu", **{"cases": 1, **SMALL, **options})


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_equals_reference_over_hundreds_of_batches():
    command = [sys.executable, "-m", "tests.soak.tpu_interpret", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert sum(f["batches"] for f in found) >= 200
    assert sum(f["batches"] for f in found if f["races"] is not None) >= 20
    assert not any(f["races"] for f in found)
    assert all(f["difference"] <= TOLERANCE[f["dtype"]] for f in found)


def shared_pages(rng):
    """One request as three sequences of one page table in one step: the tail of a chunk, another chunk, the question."""
    parts = [rng.integers(0, 9, n) for n in (21, 30, 0, 1, 18)]
    layout = make_layout(parts[0], parts[1:-1], parts[-1])
    plan = plan_slots(layout, BLOCK, aligned=True)
    picked = [range(36, 51), range(51, 52), range(52, 70)]
    size, seqs, width = 48, 4, 8
    row_seq, row_slot, row_start = np.zeros((3, size), np.int32)
    rows = [i for span in picked for i in span]
    row_seq[: len(rows)] = np.repeat(np.arange(3), [len(span) for span in picked])
    row_slot[: len(rows)], row_start[: len(rows)] = plan.slots[rows], plan.row_start[rows]
    table = np.tile(rng.permutation(24)[:width].astype(np.int32), (seqs, 1))
    page_len = np.full((seqs, width), BLOCK, np.int32)
    page_len[:, : len(plan.page_len)] = plan.page_len
    prefix_end = np.full(seqs, plan.prefix_end, np.int32)
    return AttentionBatch(len(rows), row_seq, row_slot, row_start, prefix_end, table, page_len, BLOCK), table, plan


def attend_shared_pages(backends):
    """Outputs of the rows and caches of each backend class after that step, over what earlier steps computed."""
    rng = np.random.default_rng(0)
    batch, table, plan = shared_pages(rng)
    q, k, v = (jnp.asarray(rng.standard_normal((len(batch.row_seq), h, 128)), jnp.float32) for h in (4, 2, 2))
    old = rng.standard_normal((2, 2, 8 * BLOCK, 128)).astype(np.float32)
    slots = plan.slots[:36]  # computed in earlier steps
    pages, within = table[0, slots // BLOCK], slots % BLOCK
    for cls in backends:
        backend = cls(AttentionSpec(4, 2, 128, jnp.dtype("float32"), BLOCK))
        cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), backend.allocate(24))
        if isinstance(cache, tuple):
            cache = tuple(c.at[pages, within].set(x[:, slots].swapaxes(0, 1)) for c, x in zip(cache, old, strict=True))
        else:
            cache = cache.at[pages, :, within].set(np.concatenate(old, -1)[:, slots].swapaxes(0, 1))
        metadata = jax.tree.map(jnp.asarray, backend.build_metadata(batch))
        out, cache = backend.forward(q, k, v, cache, metadata, scale=0.1)
        yield np.asarray(out[: batch.num_rows]), cache


def test_sequences_of_one_step_see_each_others_rows(small_tiles):
    """The question reads K/V that other sequences write in the same step."""
    (out, cache), (wanted, (keys, values)) = attend_shared_pages(map(get_backend, ("pallas_tpu", "reference")))
    np.testing.assert_allclose(out, wanted, atol=TOLERANCE["float32"])
    # Nothing else in the pool was touched.
    np.testing.assert_array_equal(cache, np.concatenate([keys, values], -1).swapaxes(1, 2))


@pytest.mark.slow
def test_two_cores_take_half_of_the_heads_each(small_tiles):
    class Halves(get_backend("pallas_tpu")):
        interpret = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
        chip = "v5p"

    with Races() as races:
        (out, cache), (wanted, wanted_cache) = attend_shared_pages([Halves, get_backend("pallas_tpu")])
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(cache, wanted_cache)
    assert races.states
    assert not races.found


@pytest.mark.slow
def test_the_engine_answers_as_transformers_does(engine, oracle):
    """Chunks, their reuse in another order, decodes and scores, all over this kernel's own form of the pool."""
    options = {"attention_backend": "pallas_tpu", "max_num_batched_tokens": 64, "max_num_seqs": 4, "max_logprobs": 128}
    llm, rng = engine("qwen3-64", kv_cache_memory_bytes=1 << 20, **options), np.random.default_rng(3)
    prefix, one, two, question = (rng.integers(0, 128, n).tolist() for n in (5, 20, 3, 4))
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=128)
    outs = [llm.generate(ChunkedPrompt(prefix, chunks, question), params)[0] for chunks in ([one, two], [two, one])]
    assert outs[1].num_cached_tokens > 20
    for chunks, out in zip(([one, two], [two, one]), outs, strict=True):
        sample = out.outputs[0]
        logits = oracle("qwen3-64").chunked(make_layout(prefix, chunks, question), sample.token_ids)
        wanted = torch.log_softmax(torch.as_tensor(logits[-4:-1]), -1).numpy()
        got = [[step[token].logprob for token in range(128)] for step in sample.logprobs]
        np.testing.assert_allclose(got, wanted, atol=1e-4)
    scores = llm.score(prefix, [one, two], label_token_ids=[7]).scores
    for item, score in zip((one, two), scores, strict=True):
        alone = torch.softmax(torch.as_tensor(oracle("qwen3-64").logits(prefix + item)[-1]), -1)
        np.testing.assert_allclose(score, alone[7], rtol=1e-4)


def test_visited_tiles_are_those_with_a_visible_pair(small_tiles):
    """Every row is in one query tile or one decode, and their KV tiles hold something it sees, holes apart."""
    rng = np.random.default_rng(5)
    backend = get_backend("pallas_tpu")(AttentionSpec(4, 2, 128, jnp.dtype("float32"), BLOCK))
    visited = 0
    for _ in range(30):
        for batch in random_steps(rng, block_size=BLOCK):
            metadata = backend.build_metadata(batch)
            seen = np.zeros(len(batch.row_seq), int)
            blocks = set()
            for scalars, count in ((metadata.tiles, metadata.num_tiles), (metadata.decodes, metadata.num_decodes)):
                for tile in scalars[:, :count].T:
                    begin = tile[kernel.BLOCK] * 32
                    rows = np.arange(begin + tile[kernel.LOW], begin + tile[kernel.HIGH])
                    seen[rows] += 1
                    if scalars is metadata.tiles:
                        blocks.add(tile[kernel.BLOCK])
                    first = range(tile[kernel.FIRST_END])
                    second = range(tile[kernel.SECOND_START], tile[kernel.SECOND_END])
                    named = [*first, *second]
                    wanted = set()
                    for r in rows:
                        slot, seq = np.arange(batch.row_slot[r] + 1), batch.row_seq[r]
                        assert seq == tile[kernel.SEQ]
                        valid = slot % BLOCK < batch.page_len[seq, slot // BLOCK]
                        valid &= (slot < batch.prefix_end[seq]) | (slot >= batch.row_start[r])
                        wanted |= set((slot[valid] // 128).tolist())
                    assert len(named) == len(set(named))
                    assert wanted == set(named)
                    visited += len(named)
            assert (seen[: batch.num_rows] == 1).all()
            assert not seen[batch.num_rows :].any()
            assert blocks == set(range(len(batch.row_seq) // 32))
    assert visited > 100


@pytest.mark.parametrize("gaps", [False, True])
def test_planned_writes_are_a_scatter(gaps):
    """Also for rows with gaps anywhere, and for sequences that write different slots of the same group."""
    rng = np.random.default_rng(int(gaps))
    for _ in range(40):
        size, pages, width = int(rng.integers(1, 700)), 64, 64
        owner = rng.integers(0, 3, pages * BLOCK) if gaps else np.repeat(rng.integers(0, 3, pages), BLOCK)
        rows: list[tuple[int, int]] = []
        for seq in range(3):
            slots = np.flatnonzero(owner == seq)
            slots = slots[rng.random(len(slots)) < (0.7 if gaps else 1)][: rng.integers(0, 300)]
            rows += [(seq, slot) for slot in slots]
        rows = rows[:size]
        row_seq, row_slot = np.zeros((2, size), np.int32)
        row_seq[: len(rows)], row_slot[: len(rows)] = np.array(rows, np.int32).reshape(-1, 2).T
        table = np.tile(rng.permutation(pages).astype(np.int32), (3, 1))[:, :width]
        zero = np.zeros(3, np.int32)
        batch = AttentionBatch(len(rows), row_seq, row_slot, row_slot, zero, table, np.full_like(table, BLOCK), BLOCK)
        rows_of_block = block_rows(size, 4096)
        pieces, counts = plan_writes(batch, rows_of_block)
        pool = np.full(pages * BLOCK, -1)
        for block in range(len(pieces)):
            for begin in range(0, counts[block], DEPTH):
                buffers, taken = {}, set()
                for n in range(begin, min(begin + DEPTH, counts[block])):
                    piece = pieces[block, :, n]
                    dest, buffer = piece[DEST], piece[BUFFER]
                    if buffer == n % DEPTH:
                        assert dest not in taken  # one reader and one writer of a group at a time
                        taken.add(dest)
                        buffers[buffer] = pool[dest * GROUP : (dest + 1) * GROUP].copy()
                    assert piece[OFFSET] + piece[COUNT] <= GROUP
                    first = block * rows_of_block + piece[ROW]
                    buffers[buffer][piece[OFFSET] : piece[OFFSET] + piece[COUNT]] = np.arange(first, first + piece[COUNT])
                    if piece[LAST]:
                        pool[dest * GROUP : (dest + 1) * GROUP] = buffers.pop(buffer)
                assert not buffers
        flat = batch.flat_slots()[: len(rows)]
        expected = np.full_like(pool, -1)
        expected[flat] = np.arange(len(rows))
        np.testing.assert_array_equal(pool, expected)


def test_metadata_sizes_follow_from_the_batch_alone():
    rng = np.random.default_rng(0)
    backend = get_backend("pallas_tpu")(AttentionSpec(4, 2, 128, jnp.dtype("float32"), BLOCK))
    shapes = {
        tuple((np.shape(leaf), np.asarray(leaf).dtype) for leaf in backend.build_metadata(batch))
        for _ in range(10)
        for batch in random_steps(rng, block_size=BLOCK)
    }
    assert len(shapes) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 96}, "head_dim must be one of 64, 128, 256, got 96"),
        ({"block_size": 8}, "block_size must be one of 16, 32, 64, 128, 256, got 8"),
        ({"block_size": 48}, "got 48"),
        ({"dtype": jnp.dtype("float16")}, "dtype must be bfloat16 or float32, got float16"),
    ],
)
def test_refuses_with_a_reason(change, reason):
    spec = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "dtype": jnp.dtype("bfloat16"), "block_size": 16}
    supports = get_backend("pallas_tpu").supports
    assert supports(AttentionSpec(**spec)) is None
    assert reason in supports(AttentionSpec(**{**spec, **change}))
