"""The reference against NumPy, everything else against the reference, and the registry."""

import logging
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from ml_dtypes import bfloat16, float8_e4m3fn
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

import chunkattn.backends.reference as reference
import chunkattn.backends.xla as xla
from benchmarks.attention_memory import temporary_bytes
from chunkattn import AttentionBackend, chunk_attention, register_backend
from chunkattn.backends import AttentionBatch, AttentionSpec, available_backends, get_backend, make_backend, softmax
from chunkattn.backends.cpu import library
from chunkattn.backends.default_cache import FP8, to_cache
from chunkattn.backends.pallas_gpu import backend as gpu_backend
from chunkattn.backends.tiles import Tiles, cut, spans, tile_ranges
from chunkattn.errors import BackendError
from chunkattn.testing import check_backend, random_layout, random_steps


def dense_numpy(q, k, v, visible, scale):
    """Attention by its definition, in float64, one row and head at a time."""
    out = np.zeros(q.shape)
    groups = q.shape[1] // k.shape[1]
    for i in range(len(q)):
        seen = np.flatnonzero(visible[i])
        for h in range(q.shape[1]):
            scores = (k[seen, h // groups].astype(float) @ q[i, h].astype(float)) * scale
            weights = np.exp(scores - scores.max())
            out[i, h] = weights / weights.sum() @ v[seen, h // groups]
    return out


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.ci) for seed in (2, 3))])
def test_chunk_attention_is_the_definition(backend, seed):
    rng = np.random.default_rng(seed)
    layout = random_layout(rng, most_chunks=8, longest=30)
    part = [s.name for s in layout.segments for _ in range(s.start, s.end)]
    t = len(layout)
    visible = np.array(
        [[k <= i and (part[k] == "prefix" or part[k] == part[i] or part[i] == "question") for k in range(t)] for i in range(t)]
    )
    q, k, v = (rng.standard_normal((t, h, 8)).astype(np.float32) for h in (6, 2, 2))
    out = chunk_attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), layout, backend=backend)
    np.testing.assert_allclose(out, dense_numpy(q, k, v, visible, 8**-0.5), atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"cases": 40}, marks=pytest.mark.ci),
        pytest.param({"dtype": "bfloat16", "num_heads": 2, "num_kv_heads": 2}, marks=pytest.mark.ci),
        pytest.param({"window": 7}, marks=pytest.mark.ci),
        {"num_heads": 8, "num_kv_heads": 1, "head_dim": 64, "block_size": 16},
        {"dtype": "float16", "block_size": 4},
        pytest.param({"kv_dtype": "float8_e4m3fn"}, marks=pytest.mark.ci),
        pytest.param({"kv_dtype": "float8_e4m3fn", "dtype": "bfloat16"}, marks=pytest.mark.ci),
        {"kv_dtype": "float8_e4m3fn", "window": 7},
        {"weighs": True},
        {"dtype": "bfloat16"},
        pytest.param({"num_heads": 8, "num_kv_heads": 4, "head_dim": 128}, marks=pytest.mark.ci),
        pytest.param({"num_heads": 8, "num_kv_heads": 4, "head_dim": 128, "dtype": "bfloat16"}, marks=pytest.mark.ci),
    ],
    ids=str,
)
def test_xla_equals_reference(options):
    check_backend("xla", **{"cases": 10, **options})


def without_scale(weigh, scores, mask, slots, weighing):
    return weigh(scores, mask, slots, weighing._replace(scale=jnp.ones_like(weighing.scale)))


def with_temperature_on_the_question(weigh, scores, mask, slots, weighing):
    own = mask & (weighing.end > 0)[:, None] & (slots >= weighing.end[:, None])
    return jnp.where(own, scores / weighing.temperature[:, None], weigh(scores, mask, slots, weighing))


def with_the_prefix_as_a_chunk(weigh, scores, mask, slots, weighing):
    return weigh(scores, mask, slots, weighing._replace(begin=jnp.zeros_like(weighing.begin)))


@pytest.mark.parametrize(
    "mutant", [without_scale, with_temperature_on_the_question, with_the_prefix_as_a_chunk], ids=lambda mutant: mutant.__name__
)
def test_a_mutated_weighing_of_the_reference_is_noticed(mutant, monkeypatch):
    monkeypatch.setattr(reference, "_weigh", partial(mutant, reference._weigh))
    with pytest.raises(AssertionError, match="differs from reference"):
        check_backend("xla", cases=3, weighs=True)


@pytest.mark.ci
@pytest.mark.parametrize(
    "options", [{}, {"window": 9}, pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.ci), {"weighs": True}], ids=str
)
@pytest.mark.parametrize("runs", [1, pytest.param(3, marks=pytest.mark.ci)])
def test_xla_equals_reference_with_many_small_tiles(options, runs, monkeypatch):
    monkeypatch.setattr(xla, "portion", lambda: 16)
    monkeypatch.setattr(xla, "MANY_ROWS", 16)
    monkeypatch.setattr(xla, "MOST_FEW", 12)
    monkeypatch.setattr(xla, "few_runs", lambda: runs)
    check_backend("xla", cases=20, seed=1, **options)


def test_weights_are_rounded_to_the_nearest_bfloat16():
    weights = np.random.default_rng(0).random(100_000, np.float32)
    weights = np.concatenate([weights, weights * 1e-38, [0, 1, 2**-126, 2**-149, np.inf]]).astype(np.float32)
    weights = weights[weights.view(np.uint32) & 0xFFFF != 0x8000]  # halfway: up, where IEEE 754 has even
    rounded = jax.jit(softmax._rounded, static_argnums=1)(weights, jnp.dtype("bfloat16"))
    np.testing.assert_array_equal(np.asarray(rounded), weights.astype(jnp.bfloat16))


@pytest.mark.parametrize("tile", [8, 16, 32])
def test_visited_tiles_are_those_with_a_visible_pair(tile):
    """Tile ranges name exactly the KV tiles that hold a slot some row of the query tile sees."""
    rng = np.random.default_rng(tile)
    for _ in range(15):
        for batch in random_steps(rng):
            tiles = cut(spans(batch), 16)
            assert tiles.size.sum() == batch.num_rows
            ranges = tile_ranges(batch, tiles, tile)
            for q, (row, size) in enumerate(zip(*tiles, strict=True)):
                seq = batch.row_seq[row]
                assert (batch.row_seq[row : row + size] == seq).all()
                wanted = set()
                for r in range(row, row + size):
                    for slot in range(batch.row_slot[r] + 1):
                        valid = slot % batch.block_size < batch.page_len[seq, slot // batch.block_size]
                        if valid and (slot < batch.prefix_end[seq] or slot >= batch.row_start[r]):
                            wanted.add(slot // tile)
                named = [*range(ranges.first_end[q]), *range(ranges.second_start[q], ranges.second_end[q])]
                assert len(named) == len(set(named)) == ranges.counts[q]
                assert wanted <= set(named)
                if (batch.row_start[row : row + size] > 0).all():  # chunk rows alone: nothing to spare but holes
                    assert len(named) - len(wanted) <= 1


def test_cut_covers_rows_in_order():
    tiles = cut(Tiles(np.array([0, 5, 6]), np.array([5, 1, 33])), 16)
    assert tiles.row.tolist() == [0, 5, 6, 22, 38]
    assert tiles.size.tolist() == [5, 1, 16, 16, 1]


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["plain", "chunks"])
def test_memory_is_linear_in_the_prompt(kind):
    """XLA's own analysis of an 8,000-token call: far below a dense mask, and in proportion to the tokens."""
    small, large = (temporary_bytes("xla", tokens, kind) for tokens in (2048, 8192))
    assert large < 5 * small
    assert large < 8192**2 * 4  # one head's scores alone
    assert temporary_bytes("packed_dense", 8192, kind) > 8192**2 * 4  # the instrument can tell


class Broken(get_backend("xla")):  # type: ignore[misc]
    """Forgets the holes."""

    def build_metadata(self, batch):
        return super().build_metadata(batch)._replace(page_len=np.full_like(batch.page_len, batch.block_size))


class Leaky(get_backend("xla")):  # type: ignore[misc]
    """Right where it matters, NaN in padding rows."""

    def forward(self, q, k, v, cache, metadata, **options):
        out, cache = super().forward(q, k, v, cache, metadata, **options)
        return jnp.where((metadata.flat_slots < 0)[:, None, None], jnp.nan, out), cache


class Unquantized(get_backend("xla")):  # type: ignore[misc]
    """Keeps K/V in the model's dtype."""

    def __init__(self, spec):
        super().__init__(AttentionSpec(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.dtype, spec.block_size))


class Overflowing(get_backend("xla")):  # type: ignore[misc]
    """Casts to FP8 without a look at its range."""

    def forward(self, q, k, v, cache, metadata, **options):
        k, v = (x.astype(FP8).astype(x.dtype) for x in (k, v))
        return super().forward(q, k, v, cache, metadata, **options)


def test_check_backend_notices_a_broken_backend():
    with pytest.raises(AssertionError, match=r"differs from reference|NaN or infinity"):
        check_backend(Broken)
    with pytest.raises(AssertionError, match="NaN or infinity"):
        check_backend(Leaky)
    with pytest.raises(AssertionError, match="differs from reference"):
        check_backend(Unquantized, kv_dtype="float8_e4m3fn")
    with pytest.raises(AssertionError, match="NaN or infinity"):
        check_backend(Overflowing, kv_dtype="float8_e4m3fn")


@pytest.mark.parametrize("dtype", [np.float32, bfloat16, np.float16])
def test_to_cache_rounds_and_saturates(dtype):
    """Every 16-bit float, or many of 32 bits, against ml_dtypes' cast."""
    if dtype is np.float32:
        rng = np.random.default_rng(0)
        x = (rng.standard_normal(1 << 18) * np.exp2(rng.uniform(-14, 12, 1 << 18))).astype(dtype)
        x[:3] = np.inf, -np.inf, np.nan
    else:
        x = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    got = np.asarray(jax.jit(to_cache, static_argnums=1)(x, FP8)).astype(np.float32)
    x = x.astype(np.float32)
    assert np.isnan(got[np.isnan(x)]).all()
    x, got = x[~np.isnan(x)], got[~np.isnan(x)]
    np.testing.assert_array_equal(got, np.clip(x, -448, 448).astype(float8_e4m3fn).astype(np.float32))
    assert got.max() == -got.min() == 448


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_rows_of_a_step_are_attended_to_as_the_cache_keeps_them(backend, kv_dtype):
    """A prompt in one step or in three: the same bits, in the pool and in what comes out."""
    rng = np.random.default_rng(0)
    instance = make_backend(backend, AttentionSpec(4, 2, 16, jnp.dtype("float32"), 8, kv_dtype=kv_dtype))
    size, tokens = 32, 27
    q, k, v = (rng.standard_normal((size, h, 16)).astype(np.float32) for h in (4, 2, 2))
    results = []
    for steps in ([range(27)], [range(9), range(9, 20), range(20, 27)]):
        cache, out = instance.allocate(4), np.zeros((tokens, 4, 16), np.float32)
        assert {x.dtype for x in cache} == {jnp.dtype("float32" if kv_dtype is None else "uint8")}
        for rows in steps:
            slot = np.zeros(size, np.int32)
            slot[: len(rows)] = rows
            zeros, pages = np.zeros(size, np.int32), np.arange(4, dtype=np.int32)[None]
            full = np.full((1, 4), 8, np.int32)
            batch = AttentionBatch(len(rows), zeros, slot, zeros, np.zeros(1, np.int32), pages, full, 8)
            metadata = jax.tree.map(jnp.asarray, instance.build_metadata(batch))
            given = (jnp.asarray(x[slot]) for x in (q, k, v))
            got, cache = instance.forward(*given, cache, metadata, scale=0.25)
            out[rows] = got[: len(rows)]
        results.append((out, *map(np.asarray, cache)))
    for one, three in zip(*results, strict=True):
        np.testing.assert_array_equal(one, three)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_chunk_attention_is_that_of_transformers(backend):
    """Compared with transformers' eager attention under the layout's mask."""
    rng = np.random.default_rng(1)
    layout = random_layout(rng)
    q, k, v = (3 * rng.standard_normal((len(layout), h, 8)).astype(np.float32) for h in (4, 2, 2))
    module = SimpleNamespace(num_key_value_groups=2, training=False, head_dim=8)
    heads_first = (torch.as_tensor(x).transpose(0, 1)[None] for x in (q, k, v))
    mask = torch.where(torch.as_tensor(layout.visible()), 0.0, torch.finfo(torch.float32).min)[None, None]
    expected, _ = eager_attention_forward(module, *heads_first, mask, scaling=0.3)
    q, k, v = map(jnp.asarray, (q, k, v))
    out = chunk_attention(q, k, v, layout, backend=backend, scale=0.3)
    np.testing.assert_allclose(out, expected[0].numpy(), atol=1e-5)


def test_spec_refuses_what_is_no_setting():
    sizes = (4, 2, 16, jnp.dtype("bfloat16"), 16)
    for dtype in ("float32", "float64", "float8_e5m2", "int8"):
        with pytest.raises(BackendError, match=f"kv_dtype must be the model's bfloat16 or float8_e4m3fn, got {dtype}"):
            AttentionSpec(*sizes, kv_dtype=jnp.dtype(dtype))
    assert AttentionSpec(*sizes).cache_dtype == AttentionSpec(*sizes, kv_dtype=sizes[3]).cache_dtype == sizes[3]
    assert AttentionSpec(*sizes, kv_dtype=FP8).cache_dtype == FP8


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_auto_by_platform(platform, monkeypatch, caplog):
    """The platform's kernel, and `xla` with a warning where it cannot serve."""
    preferred = {"tpu": "pallas_tpu", "gpu": "pallas_gpu", "cpu": "cpu"}[platform]
    spec, kernel = (
        AttentionSpec(4, 2, 128, jnp.dtype("bfloat16"), 16),
        get_backend(preferred),
    )
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(library, "refusal", lambda: None)
    monkeypatch.setattr(gpu_backend, "device_refusal", lambda interpret: None)
    with caplog.at_level(logging.INFO, "chunkattn.backends.registry"):
        first = make_backend("auto", spec).name
        monkeypatch.setattr(kernel, "supports", lambda spec: "head_dim must be 7")
        assert make_backend("auto", spec).name == "xla"
        monkeypatch.setattr(get_backend("xla"), "supports", lambda spec: "no")
        with pytest.raises(BackendError, match=f"no attention backend on {platform}: .*xla cannot serve this model: no"):
            make_backend("auto", spec)
    records = [(r.levelname, r.getMessage()) for r in caplog.records]
    chosen = f"attention_backend auto: {first} on {platform}, the first choice there"
    assert first == preferred
    fallback = f"attention_backend auto: xla on {platform}, because {first} cannot serve this model: head_dim must be 7"
    assert records == [("INFO", chosen), ("WARNING", fallback)]


def test_kernels_are_imported_when_asked_for():
    code = "import sys, chunkattn.backends as b; b.available_backends(); print([m for m in sys.modules if 'backends.p' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_registry():
    spec = AttentionSpec(4, 2, 16, jnp.dtype("float32"), 16)
    assert {"cpu", "pallas_tpu", "reference", "xla"} <= set(available_backends())
    assert make_backend("auto", spec).name == ("xla" if library.refusal() else "cpu")
    with pytest.raises(BackendError, match=r"unknown attention_backend 'nope'.*reference"):
        make_backend("nope", spec)
    with pytest.raises(BackendError, match="already registered"):
        register_backend("xla")(Broken)
    with pytest.raises(BackendError, match="subclass"):
        register_backend("other")(object)

    @register_backend("picky")
    class Picky(Broken):
        @classmethod
        def supports(cls, spec):
            return "head_dim must be 7"

    with pytest.raises(BackendError, match="head_dim must be 7"):
        make_backend("picky", spec)
    with pytest.raises(BackendError, match="head_dim must be 7"):
        check_backend("picky")
    assert issubclass(Picky, AttentionBackend)


def test_entry_points(tmp_path, monkeypatch):
    """An installed package brings a backend without being imported first."""
    (tmp_path / "outside.py").write_text(
        "from chunkattn.backends.xla import XlaBackend\nclass Outside(XlaBackend):\n    pass\n", encoding="utf-8"
    )
    info = tmp_path / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[chunkattn.backends]\noutside = outside:Outside\ngone = outside:Gone\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert {"outside", "gone"} <= set(available_backends())
    assert get_backend("outside").name == "outside"
    check_backend("outside", cases=2)
    with pytest.raises(BackendError, match=r"'gone' \(outside:Gone\) cannot be loaded"):
        get_backend("gone")


@pytest.mark.ci
def test_gradients_under_reference():
    """d/dq, d/dk and d/dv are those of plain softmax attention under the mask."""
    rng = np.random.default_rng(3)
    layout = random_layout(rng)
    t = len(layout)
    q, k, v = (jnp.asarray(rng.standard_normal((t, h, 8)), jnp.float32) for h in (4, 2, 2))
    weight = jnp.asarray(rng.standard_normal(q.shape), jnp.float32)

    def plain(q, k, v):
        scores = jnp.einsum("qhd,khd->hqk", q, jnp.repeat(k, 2, 1)) * 8**-0.5
        attention = jax.nn.softmax(jnp.where(layout.visible(), scores, -1e30))
        return (weight * jnp.einsum("hqk,khd->qhd", attention, jnp.repeat(v, 2, 1))).sum()

    def ours(q, k, v):
        return (weight * chunk_attention(q, k, v, layout, backend="reference")).sum()

    for mine, theirs in zip(jax.grad(ours, (0, 1, 2))(q, k, v), jax.grad(plain, (0, 1, 2))(q, k, v), strict=True):
        assert np.abs(theirs).max() > 0.1
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_chunk_attention_refuses_shapes_that_do_not_match():
    layout = random_layout(np.random.default_rng(0))
    x = jnp.zeros((len(layout) + 1, 2, 8))
    with pytest.raises(ValueError, match="do not match"):
        chunk_attention(x, x, x, layout)
    for bad in (x[:0], x.astype(int), x[0]):
        with pytest.raises(ValueError, match="one float dtype and not empty"):
            chunk_attention(bad, bad, bad, layout)
    with pytest.raises(ValueError, match="scale must be 0 or more, got -1"):
        chunk_attention(x[1:], x[1:], x[1:], layout, scale=-1)
