"""Native products of groups: their values against float64, and the same bits in any group."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from chunkattn.backends.cpu import groups, library, packed
from tests.backends.test_packed import inputs, multiply, pack, rounded, rows_of

pytestmark = pytest.mark.skipif(library.refusal() is not None, reason="no native library")

SIZES = [0, 1, 5, 0, 16, 17, 9, 200, 530, 1]
"""Groups with and without rows, of few rows and many, and of more rows than are computed at a time."""


def pairs(sizes, count, seed=0):
    """Row of each pair, which no group orders, and the group of each."""
    rows = np.random.default_rng(seed).integers(0, count, sum(sizes)).astype(np.int32)
    return rows, np.repeat(np.arange(len(sizes)), sizes)


def in_other_company(compute, rows, group, whole, count):
    """A pair has its bits alone, in small groups, and in a group of all."""
    rng = np.random.default_rng(1)
    for size in (1, 2, 9, 16, 17, 40, 200):
        some = np.sort(rng.choice(len(rows), size, replace=False))
        sizes = np.bincount(group[some], minlength=count).astype(np.int32)
        for product, expected in zip(compute(rows[some], sizes), whole, strict=True):
            np.testing.assert_array_equal(product, expected[some])


@pytest.mark.parametrize("depth", [64, 2080])
def test_bfloat16(kernel, depth):
    rng = np.random.default_rng(depth)
    rows, group = pairs(SIZES, 90)
    x = jnp.asarray(rng.standard_normal((90, depth)), jnp.bfloat16)
    weights = [jnp.asarray(rng.standard_normal((len(SIZES), n, depth)), jnp.bfloat16) for n in (48, 7, 130)]
    assert groups.serves(x, weights)

    def compute(rows, sizes):
        return [np.asarray(y) for y in groups.multiply(x, jnp.asarray(rows), jnp.asarray(sizes), *weights)]

    whole = compute(rows, np.asarray(SIZES, np.int32))
    for weight, product in zip(weights, whole, strict=True):
        given, by = np.float64(x)[rows], np.float64(weight)
        expected = np.concatenate([given[group == g] @ by[g].T for g in range(len(SIZES))])
        np.testing.assert_allclose(product, expected, atol=2e-6 * depth)
    in_other_company(compute, rows, group, whole, len(SIZES))


@pytest.mark.parametrize("digits", packed.DIGITS)
def test_packed(kernel, digits):
    """Formats of several kinds of integers, in one call; the bits are those of a product of one weight."""
    sizes, names, outputs, depth = SIZES[:8], ("Q4_K", "Q6_K", "Q8_0", "Q4_K"), (48, 16, 80, 32), 512
    x, (rows, group) = inputs(60, depth), pairs(sizes, 60)
    stored = [[rows_of(name, n, depth, seed) for seed in range(len(sizes))] for name, n in zip(names, outputs, strict=True)]
    data = [np.concatenate([pack(name, one) for one in some]) for name, some in zip(names, stored, strict=True)]

    def compute(rows, sizes):
        options = {"formats": names, "outputs": outputs, "digits": digits}
        found = groups.multiply_packed(x, jnp.asarray(rows), jnp.asarray(sizes), *data, **options)
        return [np.asarray(y) for y in found]

    whole = compute(rows, np.asarray(sizes, np.int32))
    for name, n, some, product in zip(names, outputs, stored, whole, strict=True):
        for g, one in enumerate(some):
            if not sizes[g]:
                continue
            given, weight = x[rows[group == g]], np.float64(dequantize(one, Kind[name]))
            taken = rounded(given, digits)
            size = np.abs(taken) @ np.abs(weight).T
            assert (np.abs(product[group == g] - taken @ weight.T) <= 2e-6 * size).all()
            np.testing.assert_array_equal(product[group == g], multiply(given, pack(name, one), name, n, digits))
    in_other_company(compute, rows, group, whole, len(sizes))


def test_a_row_that_is_not_finite_changes_no_other():
    (rows, _), rng = pairs(SIZES, 90), np.random.default_rng(0)
    x, weight = rng.standard_normal((90, 64)), jnp.asarray(rng.standard_normal((len(SIZES), 40, 64)), jnp.bfloat16)
    products = []
    for value in (x[4, 3], np.nan):
        x[4, 3] = value
        (product,) = groups.multiply(jnp.asarray(x, jnp.bfloat16), jnp.asarray(rows), jnp.asarray(SIZES, jnp.int32), weight)
        products.append(np.asarray(product))
    np.testing.assert_array_equal(products[0][rows != 4], products[1][rows != 4])
    assert np.isnan(products[1][rows == 4]).all()


def test_pairs_of_no_group_are_zero():
    x, weight, rows = jnp.ones((3, 32), jnp.bfloat16), jnp.ones((2, 8, 32), jnp.bfloat16), jnp.asarray([1, 0, 2, 2])
    (product,) = groups.multiply(x, rows.astype(jnp.int32), jnp.asarray([0, 1], jnp.int32), weight)
    np.testing.assert_array_equal(product, [[32] * 8, *[[0] * 8] * 3])


@pytest.mark.parametrize(
    ("rows", "sizes", "message"),
    [
        ([0, 1], [1, 2], "add up to more than the pairs"),
        ([0, 1], [3, -1], "a negative size"),
        ([0, 9], [1, 1], "a pair has no row"),
    ],
)
def test_wrong_pairs(rows, sizes, message):
    x, weight = jnp.ones((9, 32), jnp.bfloat16), jnp.ones((2, 8, 32), jnp.bfloat16)
    with pytest.raises(Exception, match=message):
        groups.multiply(x, jnp.asarray(rows, jnp.int32), jnp.asarray(sizes, jnp.int32), weight)[0].block_until_ready()


@pytest.mark.parametrize(
    ("weight", "out", "message"),
    [
        ((3, 8, 32), (2, 8), "a matrix for each group"),
        ((2, 8, 64), (2, 8), "the inputs of the rows"),
        ((8, 32), (2, 8), "a matrix for each group"),
        ((2, 8, 32), (1, 8), "a row for each row or pair"),
        ((2, 8, 32), (3, 8), "a row for each row or pair"),
        ((2, 8, 32), (2, 9), "the outputs of their weights"),
    ],
)
def test_wrong_shapes(weight, out, message):
    x, weight = jnp.ones((9, 32), jnp.bfloat16), jnp.ones(weight, jnp.bfloat16)
    pairs = jnp.asarray([0, 1], jnp.int32), jnp.asarray([1, 1], jnp.int32)
    call = jax.ffi.ffi_call(library.GROUPS, [jax.ShapeDtypeStruct(out, jnp.float32)])
    with pytest.raises(Exception, match=message):
        call(x, *pairs, weight)[0].block_until_ready()


@pytest.mark.parametrize("rows", [1, 3])
def test_wrong_shapes_of_packed_products(rows):
    data = np.concatenate([pack("Q8_0", rows_of("Q8_0", 16, 32, 0))] * 2)
    options = {"packings": np.array([packed.FORMATS["Q8_0"].number], np.int32), "digits": np.int32(2)}
    call = jax.ffi.ffi_call(library.PACKED_GROUPS, [jax.ShapeDtypeStruct((rows, 16), jnp.float32)])
    pairs = jnp.asarray([0, 1], jnp.int32), jnp.asarray([1, 1], jnp.int32)
    with pytest.raises(Exception, match="a row for each row or pair"):
        call(jnp.ones((9, 32)), *pairs, data, **options)[0].block_until_ready()


def test_inputs_that_a_kernel_does_not_take(kernel):
    x, weight, pairs = jnp.ones((9, 40), jnp.bfloat16), jnp.ones((2, 8, 40), jnp.bfloat16), jnp.asarray([1, 1], jnp.int32)
    if kernel == "amx":
        np.testing.assert_array_equal(groups.multiply(x, pairs, pairs, weight)[0], np.full((2, 8), 40))
    else:
        with pytest.raises(Exception, match="a multiple of 32 inputs"):
            groups.multiply(x, pairs, pairs, weight)[0].block_until_ready()
