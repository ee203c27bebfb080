"""Arrays that JAX takes over, and those that it must not keep."""

import jax
import ml_dtypes
import numpy as np
import pytest

from chunkattn.models.aligned import aligned, aligned_zeros
from chunkattn.models.shards import ONE_DEVICE


def of_file(path):
    np.arange(4096, dtype=np.float32).tofile(path)
    return np.memmap(path, np.float32, "r")


def test_a_cpu_takes_over_aligned_memory():
    values = aligned_zeros((3, 5), np.dtype(ml_dtypes.bfloat16))
    values[1, 2] = 7
    assert aligned(values) is values
    kept = ONE_DEVICE.load("model.norm.weight", (3, 5), lambda index: values)
    np.testing.assert_array_equal(kept, values)
    if jax.default_backend() == "cpu":
        assert kept.unsafe_buffer_pointer() == values.ctypes.data


@pytest.mark.parametrize("start", [0, 1])
def test_nothing_is_kept_of_a_file(start, tmp_path):
    mapped = of_file(tmp_path / "file")[start:]
    kept = ONE_DEVICE.load("model.norm.weight", mapped.shape, lambda index: mapped)
    (tmp_path / "file").write_bytes(bytes(4 * 4096))  # in place: a view of the file would show it
    np.testing.assert_array_equal(kept, np.arange(start, 4096, dtype=np.float32))
