"""The reference against NumPy, everything else against the reference, and the registry."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chunkattn.backends.xla as xla
from benchmarks.attention_memory import temporary_bytes
from chunkattn import AttentionBackend, chunk_attention, register_backend
from chunkattn.backends import AttentionSpec, available_backends, get_backend, make_backend
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
@pytest.mark.parametrize("seed", range(4))
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
        {"cases": 40},
        {"dtype": "bfloat16", "num_heads": 2, "num_kv_heads": 2},
        {"window": 7},
        {"num_heads": 8, "num_kv_heads": 1, "head_dim": 64, "block_size": 16},
        {"dtype": "float16", "block_size": 4},
    ],
    ids=str,
)
def test_xla_equals_reference(options):
    check_backend("xla", **{"cases": 10, **options})


@pytest.mark.parametrize("window", [None, 9])
def test_xla_equals_reference_with_many_small_tiles(window, monkeypatch):
    monkeypatch.setattr(xla, "TILE_ROWS", 16)
    monkeypatch.setattr(xla, "TILE_SLOTS", 16)
    monkeypatch.setattr(xla, "DECODE_ROWS", 2)
    check_backend("xla", cases=40, seed=1, window=window)


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


@pytest.mark.parametrize("kind", ["plain", "chunks"])
def test_memory_is_linear_in_the_prompt(kind):
    """XLA's own analysis of an 8,000-token call: far below a dense mask, and in proportion to the tokens."""
    small, large = (temporary_bytes("xla", tokens, kind) for tokens in (2048, 8192))
    assert large < 5 * small
    assert large < 8192**2 * 4  # one head's scores alone
    assert temporary_bytes("reference", 8192, kind) > 10 * large  # the instrument can tell


class Broken(get_backend("xla")):  # type: ignore[misc]
    """Forgets the holes."""

    def build_metadata(self, batch):
        return super().build_metadata(batch)._replace(page_len=np.full_like(batch.page_len, batch.block_size))


class Leaky(get_backend("xla")):  # type: ignore[misc]
    """Right where it matters, NaN in padding rows."""

    def forward(self, q, k, v, cache, metadata, **options):
        out, cache = super().forward(q, k, v, cache, metadata, **options)
        return jnp.where((metadata.flat_slots < 0)[:, None, None], jnp.nan, out), cache


def test_check_backend_notices_a_broken_backend():
    with pytest.raises(AssertionError, match=r"differs from reference|NaN or infinity"):
        check_backend(Broken)
    with pytest.raises(AssertionError, match="NaN or infinity"):
        check_backend(Leaky)


def test_registry():
    spec = AttentionSpec(4, 2, 16, jnp.dtype("float32"), 16)
    assert {"reference", "xla"} <= set(available_backends())
    assert make_backend("auto", spec).name == "xla"
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
    with pytest.raises(ValueError, match="do not go together"):
        chunk_attention(x, x, x, layout)
    for bad in (x[:0], x.astype(int), x[0]):
        with pytest.raises(ValueError, match="one float dtype and not empty"):
            chunk_attention(bad, bad, bad, layout)
