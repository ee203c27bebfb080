"""Native operators on single rows: their values against float64, and the same bits beside any number of rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkattn.backends import AttentionSpec, get_backend
from chunkattn.backends.base import AttentionBatch, HeadInputs
from chunkattn.backends.cpu import library, linear, rows
from chunkattn.backends.default_cache import FP8
from chunkattn.models.linear import add_rms_norm, gated, multiply_several, rms_norm
from chunkattn.testing import random_steps

pytestmark = pytest.mark.skipif(library.refusal() is not None, reason="no native library")

DTYPES = {"float32": 2e-6, "bfloat16": 4e-3, "float16": 5e-4}
"""Relative errors: half the distance of two neighbours."""


def check(compute, arrays, expected, dtype):
    """The values are `expected` up to the rounding to `dtype`, and few rows have the bits of all."""
    whole = jax.jit(compute)(*arrays)
    assert whole.dtype == dtype
    error = DTYPES[dtype]
    np.testing.assert_allclose(np.float64(whole), expected, rtol=1.01 * error, atol=error * 1e-3)
    for first, last in ((0, 1), (3, 5), (2, 19)):
        part = jax.jit(compute)(*(x[first:last] for x in arrays))
        np.testing.assert_array_equal(part, whole[first:last])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [37, 64, 1000])
def test_norms(kernel, dtype, features):
    rng = np.random.default_rng(features)
    x, delta = rng.standard_normal((2, 40, features)).astype(np.float32)
    scale, total = jnp.asarray(rng.standard_normal(features), dtype), x + delta

    def norm(x):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-3) * np.float64(scale)

    check(lambda x: rms_norm(x, scale, 1e-3, jnp.dtype(dtype)), [x], norm(np.float64(x)), dtype)
    check(lambda *x: add_rms_norm(*x, scale, 1e-3, jnp.dtype(dtype))[1], [x, delta], norm(np.float64(total)), dtype)
    added, _ = jax.jit(lambda *x: add_rms_norm(*x, scale, 1e-3, jnp.dtype(dtype)))(x, delta)
    np.testing.assert_array_equal(added, total)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(kernel, dtype):
    gate, up = np.random.default_rng(0).standard_normal((2, 40, 37)).astype(np.float32) * [[[9]], [[1]]]
    gate, up = np.float32(gate), np.float32(up)
    check(partial(gated, dtype=jnp.dtype(dtype)), [gate, up], gate / (1 + np.exp(-np.float64(gate))) * up, dtype)


def test_gates_of_extreme_values(kernel):
    gate = jnp.asarray([[0.0, 1e30, -1e38, -200.0, np.inf, np.nan, -np.inf]])
    of = np.asarray(gated(gate, jnp.ones_like(gate), jnp.dtype("float32")))[0]
    np.testing.assert_allclose(of[:5], [0, 1e30, 0, 0, np.inf], atol=1e-30)
    assert np.isnan(of[5:]).all()


def test_the_first_of_the_largest_logits(kernel):
    logits = np.random.default_rng(0).standard_normal((6, 9001)).astype(np.float32)
    logits[1, [77, 8000]] = logits[2, [4095, 4096]] = logits[3, 9000] = 9
    logits[4, 5], logits[5, 3] = -np.inf, np.nan
    index, finite = rows.largest(jnp.asarray(logits))
    np.testing.assert_array_equal(index[:5], logits[:5].argmax(-1))
    np.testing.assert_array_equal(finite, [True, True, True, True, False, False])


def test_products_of_several_weights_are_those_of_each(kernel):
    rng = np.random.default_rng(0)
    x, *weights = (jnp.asarray(rng.standard_normal((n, 96)), jnp.bfloat16) for n in (16, 43, 300, 32))
    if not all(linear.serves(x, weight) for weight in weights):
        pytest.skip("XLA has another order of additions here")
    for count in (1, 5, 16):
        for product, weight in zip(jax.jit(multiply_several)(x[:count], weights), weights, strict=True):
            np.testing.assert_array_equal(product, jax.jit(linear.multiply)(x[:count], weight))
            np.testing.assert_allclose(product, np.float64(x[:count]) @ np.float64(weight).T, atol=1e-4)


def test_derivatives_are_those_of_plain_operations():
    def loss(x, scale):
        added, normed = add_rms_norm(x, 2 * x, scale, 1e-6, jnp.dtype("float32"))
        return (gated(normed, added, jnp.dtype("float32")) * rms_norm(x, scale, 1e-6)).sum()

    x, scale = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32), np.arange(1, 9, dtype=np.float32)
    by_x, by_scale = jax.grad(loss, (0, 1))(x, scale)
    for at in ((0, 0), (2, 5)):
        step = np.zeros_like(x)
        step[at] = 1e-2
        np.testing.assert_allclose(by_x[at], (loss(x + step, scale) - loss(x - step, scale)) / 2e-2, rtol=2e-2)
    step = np.eye(8, dtype=np.float32)[3] * 1e-2
    np.testing.assert_allclose(by_scale[3], (loss(x, scale + step) - loss(x, scale - step)) / 2e-2, rtol=2e-2)


def turned(x, scale, cos, sin):
    """Heads in float64, normalised if there is a scale, and rotated."""
    if scale is not None:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-3) * np.float64(scale)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@pytest.mark.parametrize(("dtype", "stored", "dim"), [("float32", None, 48), ("bfloat16", None, 128), ("float16", FP8, 16)])
@pytest.mark.parametrize("norms", [False, True])
def test_heads_are_normalised_rotated_and_stored(kernel, dtype, stored, dim, norms):
    rng = np.random.default_rng(dim)
    spec = AttentionSpec(4, 2, dim, jnp.dtype(dtype), 16, kv_dtype=stored)
    backend, batch = get_backend("cpu")(spec), next(iter(random_steps(rng, block_size=16)))
    count, used = len(batch.row_seq), slice(batch.num_rows)
    q, k, v = (np.float32(5 * rng.standard_normal((count, heads, dim))) for heads in (4, 2, 2))
    k[0, 0, :3], v[0, 1, :3] = 700, 3e-4  # beyond FP8, and among its subnormal numbers
    angles = rng.uniform(0, 6, (count, 1, dim // 2)).astype(np.float32)
    scales = [jnp.asarray(rng.uniform(0.5, 2, dim), dtype) if norms else None for _ in "qk"]
    pool, metadata = backend.allocate(int(batch.block_tables.max()) + 1), backend.build_metadata(batch)

    def compute(*arrays):
        heads = HeadInputs(*arrays[:3], *scales, *arrays[3:], 1e-3, jnp.dtype(dtype))
        return backend.forward_inputs(heads, pool, metadata, scale=0.02)

    out, written = jax.jit(compute)(q, k, v, np.cos(angles), np.sin(angles))
    prepared = [turned(np.float64(x), scale, np.cos(angles), np.sin(angles)) for x, scale in zip((q, k), scales, strict=True)]
    given = [jnp.asarray(np.float32(x), dtype) for x in (*prepared, v)]
    expected, stored_by_xla = jax.jit(partial(backend.forward, metadata=metadata, scale=0.02))(*given, pool)
    error = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.3}[dtype]
    np.testing.assert_allclose(np.float32(out)[used], np.float32(expected)[used], atol=error)
    for ours, others in zip(written, stored_by_xla, strict=True):
        if dtype == "float32":
            np.testing.assert_allclose(ours, others, atol=1e-4)
        else:  # neighbours in rare ties
            assert np.abs(np.int32(ours) - np.int32(others)).max() <= 1
            assert np.mean(np.asarray(ours) != np.asarray(others)) < 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_that_are_not_finite_stay_in_their_row(kernel, dtype):
    spec = AttentionSpec(4, 2, 32, jnp.dtype(dtype), 16)
    backend, rng = get_backend("cpu")(spec), np.random.default_rng(0)
    batch = AttentionBatch(
        5, *np.int32([[0] * 5, [*range(5)], [0] * 5]), np.zeros(1, np.int32), np.zeros((1, 1), np.int32), np.int32([[16]]), 16
    )
    q, k, v = (jnp.asarray(rng.standard_normal((5, heads, 32)), jnp.float32) for heads in (4, 2, 2))
    ones, zeros = np.ones((5, 1, 16), np.float32), np.zeros((5, 1, 16), np.float32)
    metadata = backend.build_metadata(batch)

    def run(k, v):
        heads = HeadInputs(q, k, v, None, None, ones, zeros, 0.0, jnp.dtype(dtype))
        out, pool = backend.forward_inputs(heads, backend.allocate(1), metadata, scale=0.2)
        return np.float32(out), pool

    good, _ = run(k, v)
    damaged, pool = run(k.at[3, 1, 7].set(np.inf), v.at[1, 0, 0].set(np.nan))
    assert np.isnan(damaged[3, 2:]).all()
    assert np.isnan(damaged[1, :2]).all()
    assert np.isfinite(damaged[[0, 2, 4]]).all()
    np.testing.assert_array_equal(damaged[0], good[0])
    np.testing.assert_array_equal(damaged[2, 2:], good[2, 2:])
    for kept in pool:
        values = np.asarray(kept) if dtype == "float32" else np.asarray(kept).view(jnp.dtype(dtype))
        assert np.isfinite(np.float32(values)).all()
