"""Packed weights: packing, products and gathered rows against the gguf package and double precision, and their bits."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

from chunkattn.backends.cpu import build, library, packed
from chunkattn.errors import ModelError
from tests.cpu_kernels import use
from tests.gguf_files import HALVES, random_blocks

pytestmark = pytest.mark.skipif(library.refusal() is not None, reason="no native library")
FORMATS = list(packed.FORMATS)


def rows_of(name, outputs, depth, seed=0):
    """Random rows of a GGUF tensor, uint8 `[outputs, bytes]`, with every code and factor."""
    rng = np.random.default_rng(seed)
    if Kind[name] in HALVES:
        return random_blocks(rng, (outputs, depth), Kind[name])
    rows = quantize(rng.standard_normal((outputs, depth)).astype(np.float32), Kind[name])
    blocks = rows.reshape(-1, packed.FORMATS[name].source_bytes)
    scales = 4 if name.endswith("_1") else 2
    blocks[:, scales:] = rng.integers(0, 256, blocks[:, scales:].shape, np.uint8)
    return rows


def pack(name, rows):
    form = packed.FORMATS[name]
    depth = rows.shape[1] // form.source_bytes * form.block
    out = np.zeros(form.packed_bytes(len(rows), depth), np.uint8)
    packed.pack(name, rows, out)
    return out


def multiply(x, data, name, outputs, digits):
    """The product outside of a program: each call takes the kernel of the moment."""
    return np.asarray(packed.multiply(x, data, format=name, outputs=outputs, digits=digits))


def rounded(x, digits):
    """Values that the digits of rows stand for, float64: each block of 32 has its largest magnitude at 127 or 127 * 128."""
    blocks = x.reshape(len(x), -1, 32).astype(np.float64)
    most = 127 if digits == 1 else 127 * 128
    unit = np.abs(blocks).max(-1, keepdims=True) / most
    return (np.rint(np.divide(blocks, unit, out=np.zeros_like(blocks), where=unit > 0)) * unit).reshape(x.shape)


def inputs(rows, depth, seed=1):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, depth)) * np.exp(2 * rng.standard_normal((rows, 1)))
    x[0, :64] = 0
    return x.astype(np.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_gathered_rows_have_the_bits_of_the_gguf_package(name):
    rows = rows_of(name, 48, 768)
    ids = jnp.asarray([47, 0, 5, 16, 15, 5, -1, 48])
    found = np.asarray(packed.gather(pack(name, rows), ids, format=name, outputs=48, depth=768))
    np.testing.assert_array_equal(found[:6], dequantize(rows, Kind[name])[ids[:6]])
    assert np.isnan(found[6:]).all()


@pytest.mark.parametrize("digits", packed.DIGITS)
@pytest.mark.parametrize("name", FORMATS)
def test_products_equal_double_precision(kernel, name, digits):
    for outputs, depth, count in ((16, 256, 1), (48, 1280, 7), (80, 2304, 37)):
        rows = rows_of(name, outputs, depth)
        x = inputs(count, depth)
        weight = dequantize(rows, Kind[name]).astype(np.float64)
        found = multiply(x, pack(name, rows), name, outputs, digits)
        taken = rounded(x, digits)
        size = np.abs(taken) @ np.abs(weight).T
        assert (np.abs(found - taken @ weight.T) / size).max() < 2e-6
        assert (np.abs(found - x @ weight.T) / size).max() < (1e-2 if digits == 1 else 1e-4)


@pytest.mark.parametrize("digits", packed.DIGITS)
@pytest.mark.parametrize("name", FORMATS)
def test_rows_kernels_and_places_change_no_bit(name, digits):
    outputs, depth, count = 80, 2304, 65
    x, data = inputs(count, depth), pack(name, rows_of(name, outputs, depth))
    whole = multiply(x, data, name, outputs, digits)
    assert whole.std() > 0
    seen = []
    for kernel in build.kernels():
        if use(kernel):
            continue
        seen.append(library.packed_kernel_name())
        np.testing.assert_array_equal(multiply(x, data, name, outputs, digits), whole)
        for rows in (*range(1, 18), 64):
            first = count - rows if rows % 2 else 0
            np.testing.assert_array_equal(
                multiply(x[first : first + rows], data, name, outputs, digits), whole[first : first + rows]
            )
    use("")
    assert "portable" in seen


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q6_K"])
def test_products_in_one_call_have_the_bits_of_single_ones(kernel, name):
    """The others have minima, a table, and two scales of a block, so they need other integers of the rows."""
    names, outputs = (name, "Q4_K", "IQ4_NL", "Q6_K", name), (48, 16, 112, 32, 16)
    data = [pack(one, rows_of(one, n, 1280, seed)) for seed, (one, n) in enumerate(zip(names, outputs, strict=True))]
    for rows in (1, 3, 40):
        x = inputs(rows, 1280)
        found = packed.multiply_several(x, data, formats=names, outputs=outputs, digits=2)
        for product, one, n, codes in zip(found, names, outputs, data, strict=True):
            np.testing.assert_array_equal(product, multiply(x, codes, one, n, 2))


@pytest.mark.parametrize("name", ["Q8_0", "Q5_1", "Q6_K"])
@pytest.mark.parametrize("rows", [3, 40])
def test_bad_values_stay_in_their_row(kernel, name, rows):
    x, data = inputs(rows, 512), pack(name, rows_of(name, 32, 512))
    for digits in packed.DIGITS:
        whole = multiply(x, data, name, 32, digits)
        for value in (np.nan, np.inf, -np.inf):
            bad = x.copy()
            bad[1, 300] = value
            found = multiply(bad, data, name, 32, digits)
            assert np.isnan(found[1]).all()
            np.testing.assert_array_equal(np.delete(found, 1, 0), np.delete(whole, 1, 0))


def test_extreme_rows(kernel):
    """The largest and smallest blocks of float32: a block below 2^-60 counts as zero, and products near the limit are right."""
    rows = rows_of("Q8_0", 16, 96)
    weight = dequantize(rows, Kind.Q8_0).astype(np.float64)
    x = np.zeros((4, 96), np.float32)
    x[0, :32], x[1, 32:64], x[2, 64:], x[3, 0] = 2.0**-61, 2.0**-59, 1e36, np.finfo(np.float32).tiny / 4
    found = multiply(x, pack("Q8_0", rows), "Q8_0", 16, 2)
    assert not found[0].any()
    assert not found[3].any()
    np.testing.assert_allclose(found[1:3], x[1:3].astype(np.float64) @ weight.T, rtol=1e-4)


def test_slices_of_panels_are_packed_weights():
    rows = rows_of("Q5_K", 96, 512)
    whole = pack("Q5_K", rows)
    size = packed.FORMATS["Q5_K"].packed_bytes(16, 512)
    pieces = np.zeros_like(whole)
    for first, last in ((0, 32), (32, 48), (48, 96)):
        packed.pack("Q5_K", rows[first:last], pieces[first // 16 * size : last // 16 * size])
    np.testing.assert_array_equal(pieces, whole)
    x = inputs(5, 512)
    np.testing.assert_array_equal(
        multiply(x, whole[size : 3 * size], "Q5_K", 32, 2), multiply(x, whole, "Q5_K", 96, 2)[:, 16:48]
    )


@pytest.mark.parametrize("name", FORMATS)
def test_columns_are_packed_without_a_copy(name):
    form = packed.FORMATS[name]
    rows = rows_of(name, 32, 5 * form.block)
    part = rows[:, form.source_bytes : 4 * form.source_bytes]
    assert not part.flags.c_contiguous
    np.testing.assert_array_equal(pack(name, part), pack(name, np.ascontiguousarray(part)))


@pytest.mark.parametrize("name", FORMATS)
def test_bad_scales_are_refused(name):
    at = {"Q6_K": [208]}.get(name, [0, 2] if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else [0])
    form = packed.FORMATS[name]
    for offset in at:
        for value in (np.nan, np.inf, -np.inf):
            rows = rows_of(name, 48, 3 * form.block)
            rows[37, 2 * form.source_bytes + offset :][:2] = np.array([value], np.float16).view(np.uint8)
            with pytest.raises(ModelError, match=f"^a scale of {name} is NaN or infinite$"):
                pack(name, rows)


@pytest.mark.parametrize(
    ("name", "outputs", "depth", "reason"),
    [
        ("Q8_0", 16, 32, None),
        ("Q4_K", 16, 256, None),
        ("Q4_K", 16, 288, "the depth must be a multiple of 256 in Q4_K, got 288"),
        ("Q8_0", 40, 64, "the outputs must be a multiple of 16, got 40"),
        ("Q2_K", 16, 256, "Q2_K cannot be packed; the formats are Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL, Q4_K, Q5_K, Q6_K"),
    ],
)
def test_what_cannot_be_packed_is_refused(name, outputs, depth, reason):
    assert packed.refusal(name, outputs, depth) == reason


def test_nothing_is_packed_without_the_library(monkeypatch):
    monkeypatch.setattr(library, "_loaded", lambda: "no library")
    assert packed.refusal("Q8_0", 16, 32) == "no library"
    with pytest.raises(ModelError, match="no library"):
        packed.pack("Q8_0", np.zeros((16, 34), np.uint8), np.zeros(544, np.uint8))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_rounding_to_q8_0_has_the_bytes_of_the_gguf_package(dtype):
    rng = np.random.default_rng(0)
    weights = (0.02 * rng.standard_normal((4099, 64)) * np.exp(3 * rng.standard_normal((4099, 1)))).astype(dtype)
    weights[0], weights[1, :32], weights[2] = 0, np.arange(-16, 16) * 1e-7, 1e-30
    with np.errstate(over="ignore", invalid="ignore"):
        expected = quantize(weights.astype(np.float32), Kind.Q8_0)
    np.testing.assert_array_equal(packed.quantize_q8_0(weights), expected)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e9])
def test_rounding_marks_values_that_have_no_scale(value):
    weights = np.ones((16, 64), np.float32)
    weights[3, 40] = value
    with pytest.raises(ModelError, match="a scale of Q8_0 is NaN or infinite"):
        pack("Q8_0", packed.quantize_q8_0(weights))


def test_operators_run_in_programs():
    """Within a program, beside other operations, and with weights of other bytes than the shape takes."""
    data = jnp.asarray(pack("Q4_0", rows_of("Q4_0", 32, 64)))
    x = jnp.asarray(inputs(3, 64))

    @jax.jit
    def program(x, data):
        return packed.multiply(2 * x, data, format="Q4_0", outputs=32, digits=2) + 1

    np.testing.assert_array_equal(program(x, data), multiply(2 * x, data, "Q4_0", 32, 2) + 1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="another number of bytes than its shape takes"):
        multiply(x, data, "Q4_0", 16, 2)
    with pytest.raises(jax.errors.JaxRuntimeError, match="another number of bytes than its shape takes"):
        np.asarray(packed.gather(data, jnp.asarray([0]), format="Q4_0", outputs=32, depth=96))
