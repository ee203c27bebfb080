"""Products of rows with the factors of their adapters, against NumPy's in float64, in any company."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from chunkattn.models.adapter_slots import RowAdapters

SLOTS, INPUTS = 3, 64


@pytest.mark.parametrize(("rank", "depth", "outputs"), [(16, 16, 48), (5, 16, 6), (20, 32, 33), (40, 64, 16)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_factors_add_their_products(rank, depth, outputs, dtype, rng):
    def random(*shape):
        return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)

    slots = rng.integers(0, SLOTS + 1, 40).astype(np.int32)
    x, a, b = random(len(slots), INPUTS), random(SLOTS, rank, INPUTS), np.zeros((SLOTS, outputs, depth), ml_dtypes.bfloat16)
    b[..., :rank] = random(SLOTS, outputs, rank)
    y = rng.standard_normal((len(slots), outputs), np.float32)

    @jax.jit
    def add(x, y, slots):
        stacks = {"m": (jnp.asarray(a, dtype), jnp.asarray(b, dtype))}
        return RowAdapters.of(stacks, slots, SLOTS).add([y], x, ["m"])[0]

    found = np.asarray(add(x.astype(dtype), y, slots))
    for row, slot in enumerate(slots):
        if slot == SLOTS:
            np.testing.assert_array_equal(found[row], y[row])
            continue
        inner = x[row].astype(np.float64) @ a[slot].astype(np.float64).T
        inner = inner.astype(dtype).astype(np.float64)
        expected = y[row] + inner @ b[slot, :, :rank].astype(np.float64).T
        np.testing.assert_allclose(found[row], expected, rtol=0, atol=0.3 if dtype == "bfloat16" else 1e-3)
    order = rng.permutation(len(slots))
    np.testing.assert_array_equal(np.asarray(add(x[order].astype(dtype), y[order], slots[order])), found[order])
    for rows in (slice(0, 1), slice(3, 8)):
        np.testing.assert_array_equal(np.asarray(add(x[rows].astype(dtype), y[rows], slots[rows])), found[rows])
