"""The dense baseline against reference, xla, the Pallas kernel and PyTorch; its limit and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from chunkattn import chunk_attention
from chunkattn.backends import AttentionBatch, AttentionSpec, available_backends, get_backend, make_backend
from chunkattn.backends.default_cache import FP8
from chunkattn.cache.slots import plan_slots
from chunkattn.errors import BackendError
from chunkattn.layout import PREFIX_ID, QUESTION_ID
from chunkattn.rope.positions import make_layout
from chunkattn.testing import random_layout

BLOCK = 16
SAME = 1e-6
PACKS = {
    "items": [(20, [5, 9, 3], 0)],
    "empty items": [(13, [0, 4, 0, 7, 0], 0)],
    "one-token items": [(7, [1, 1, 1, 1, 1, 1], 0)],
    "several packs": [(20, [5, 9, 3], 0), (1, [0, 1], 0), (33, [2] * 11, 0), (3, [20], 0)],
    "with questions": [(10, [6, 0, 21], 9), (0, [4, 4], 1), (0, [], 17)],
}


def spec_of(head_dim=64, **changes):
    return AttentionSpec(4, 2, head_dim, jnp.dtype("float32"), BLOCK, **changes)


def pack(lens, *, rows=128, aligned=False):
    """Whole prompts of `(prefix, chunks, question)` tokens in one step, the rest of its rows padding."""
    layouts = [make_layout(np.zeros(s), [np.zeros(c) for c in cs], np.zeros(q)) for s, cs, q in lens]
    plans = [plan_slots(layout, BLOCK, aligned=aligned) for layout in layouts]
    seqs, width, used = len(plans) + 1, 16, sum(map(len, layouts))
    row_seq, row_slot, row_start = np.zeros((3, rows), np.int32)
    row_seq[:used] = np.repeat(np.arange(len(plans)), [len(layout) for layout in layouts])
    row_slot[:used] = np.concatenate([plan.slots for plan in plans])
    row_start[:used] = np.concatenate([plan.row_start for plan in plans])
    page_len = np.full((seqs, width), BLOCK, np.int32)
    for index, plan in enumerate(plans):
        page_len[index, : len(plan.page_len)] = plan.page_len
    prefix_end = np.asarray([*(plan.prefix_end for plan in plans), 0], np.int32)
    table = np.random.default_rng(0).permutation(seqs * width).reshape(seqs, width).astype(np.int32)
    return AttentionBatch(used, row_seq, row_slot, row_start, prefix_end, table, page_len, BLOCK)


def take(batch, rows):
    """The same step with those of its rows only."""
    columns = (np.pad(x[rows], (0, len(x) - len(rows))) for x in (batch.row_seq, batch.row_slot, batch.row_start))
    return AttentionBatch(len(rows), *columns, batch.prefix_end, batch.block_tables, batch.page_len, BLOCK)


def attend(name, batch, head_dim=64):
    """Return a backend's output for a step of standard normal numbers."""
    rng, backend = np.random.default_rng(1), make_backend(name, spec_of(head_dim))
    q, k, v = (jnp.asarray(rng.standard_normal((len(batch.row_seq), h, head_dim)), jnp.float32) for h in (4, 2, 2))
    cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), backend.allocate(batch.block_tables.size))
    metadata = jax.tree.map(jnp.asarray, backend.build_metadata(batch))
    out, _ = jax.jit(backend.forward, static_argnames="scale")(q, k, v, cache, metadata, scale=head_dim**-0.5)
    return np.asarray(out)


def difference(name, batch, head_dim=64):
    dense = attend("packed_dense", batch, head_dim)
    assert np.isfinite(dense).all()  # padding rows too
    return np.abs(dense - attend(name, batch, head_dim))[: batch.num_rows].max()


@pytest.mark.parametrize("aligned", [False, True], ids=["packed", "aligned"])
@pytest.mark.parametrize("lens", PACKS.values(), ids=PACKS)
@pytest.mark.parametrize("name", [pytest.param("reference", marks=pytest.mark.ci), "xla"])
def test_equals_the_other_backends(name, lens, aligned):
    assert difference(name, pack(lens, aligned=aligned)) <= SAME


@pytest.mark.ci
@pytest.mark.parametrize("aligned", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["packed", "aligned"])
def test_pallas_kernel_equals_it(aligned):
    """Segments and dense masks are the same result, in Pallas' TPU interpreter."""
    pytest.importorskip("chunkattn.backends.pallas_tpu.backend")
    assert difference("pallas_tpu", pack(PACKS["several packs"], aligned=aligned), head_dim=128) <= SAME


@pytest.mark.parametrize("seed", range(3))
def test_equals_pytorch_under_a_mask_by_hand(seed):
    rng = np.random.default_rng(seed)
    layout = random_layout(rng, most_chunks=8, longest=30)
    part, tokens = layout.chunk_ids, range(len(layout))
    mask = [[k <= i and (part[k] in (PREFIX_ID, part[i]) or part[i] == QUESTION_ID) for k in tokens] for i in tokens]
    q, k, v = (rng.standard_normal((len(layout), h, 64)).astype(np.float32) for h in (4, 2, 2))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(torch.from_numpy(x).transpose(0, 1)[None] for x in (q, k, v)), attn_mask=torch.tensor(mask), enable_gqa=True
    )
    out = chunk_attention(*(jnp.asarray(x) for x in (q, k, v)), layout, backend="packed_dense")
    assert np.abs(np.asarray(out) - wanted[0].transpose(0, 1).numpy()).max() <= SAME


def test_the_cache_is_left_alone():
    batch, backend = pack(PACKS["items"]), make_backend("packed_dense", spec_of())
    q, k = (jnp.ones((len(batch.row_seq), h, 64)) for h in (4, 2))
    cache = backend.allocate(4)
    _, after = backend.forward(q, k, k, cache, backend.build_metadata(batch), scale=1.0)
    assert all(a is b for a, b in zip(after, cache, strict=True))


def test_more_rows_than_the_limit_are_refused():
    batch, backend = pack(PACKS["items"]), make_backend("packed_dense", spec_of())
    assert backend.max_rows == 8192
    backend.max_rows = 37  # as many as there are
    whole = backend.build_metadata(batch)
    assert whole.mask.shape == (37, 37)  # padding beyond the limit costs nothing
    q, k = (jnp.asarray(np.random.default_rng(0).standard_normal((128, h, 64)), jnp.float32) for h in (4, 2))
    out, _ = backend.forward(q, k, k, None, whole, scale=0.1)
    wanted, _ = backend.forward(q, k, k, None, make_backend("packed_dense", spec_of()).build_metadata(batch), scale=0.1)
    assert out.shape == q.shape
    np.testing.assert_allclose(out[:37], wanted[:37], atol=SAME)
    backend.max_rows = 36
    with pytest.raises(BackendError, match=r"37 rows .* exceed the limit of 36.*Score fewer items"):
        backend.build_metadata(batch)


@pytest.mark.parametrize(
    ("gone", "row"),
    [(slice(0, 20), 0), (slice(22, 23), 22), (slice(19, 20), 19)],
    ids=["the query", "an item's token", "the query's last token"],
)
def test_a_slot_of_another_step_is_an_error(gone, row):
    """Rows that see what is not among the step's rows; the first of them is named."""
    batch = pack(PACKS["items"])
    rest = take(batch, np.delete(np.arange(batch.num_rows), gone))
    with pytest.raises(BackendError, match=rf"packed_dense: row {row} \(sequence 0, slot \d+\) sees .*one step.*another"):
        make_backend("packed_dense", spec_of()).build_metadata(rest)


def test_items_that_nobody_sees_may_be_missing():
    """An item's rows see the query and themselves, so a step without another item is whole."""
    assert difference("reference", take(pack([(20, [5, 9, 3], 0)]), np.r_[0:20, 25:34])) <= SAME


def test_sizes_follow_from_the_rows_alone():
    backend = make_backend("packed_dense", spec_of())
    assert {backend.build_metadata(pack(lens)).mask.shape for lens in PACKS.values()} == {(128, 128)}
    assert backend.build_metadata(pack([(3, [2], 0)], rows=8)).mask.shape == (8, 8)


def test_refuses_with_a_reason():
    supports = get_backend("packed_dense").supports
    assert "packed_dense" in available_backends()
    assert supports(spec_of()) is supports(spec_of(kv_dtype=jnp.dtype("float32"))) is None
    assert "K/V must stay float32, got kv_dtype float8_e4m3fn" in supports(spec_of(kv_dtype=FP8))
    with pytest.raises(BackendError, match=r"'packed_dense' cannot serve this model: .* K/V must stay float32"):
        make_backend("packed_dense", spec_of(kv_dtype=FP8))
