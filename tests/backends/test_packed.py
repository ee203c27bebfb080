"""Packed weights: packing, products and gathered rows against the gguf package and double precision, and their bits."""

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

from chunkattn.backends.cpu import build, library, packed
from tests.cpu_kernels import use
from tests.gguf_files import HALVES, random_blocks

pytestmark = pytest.mark.skipif(library.refusal() is not None, reason="no native library")
FORMATS = list(packed.FORMATS)


@pytest.fixture(params=list(build.kernels()))
def kernel(request):
    """One kernel after the other, where this machine has its instructions."""
    if reason := use(request.param):
        pytest.skip(f"{request.param}: {reason}")
    yield request.param
    use("")


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
