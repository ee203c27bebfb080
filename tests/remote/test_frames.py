"""Arrays on their way to another host, without the padding at the ends of their axes."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from chunkattn.remote.frames import from_used, to_used

KINDS = st.sampled_from(["bool", "int32", "uint32", "int64", "float32", "float64", "uint8", "float16"])


def returned(array):
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(to_used(array)))
    return from_used(np.ndarray, plain)


@given(st.data(), KINDS, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
def test_every_array_returns(data, dtype, shape):
    found = data.draw(arrays.arrays(dtype, shape, elements=None, fill=st.just(np.zeros((), dtype)[()])))
    made = returned(found)
    assert (made.dtype, made.shape, made.tobytes()) == (found.dtype, found.shape, found.tobytes())


@pytest.mark.parametrize(
    "array", [np.asfortranarray(np.arange(12.0).reshape(3, 4)), np.arange(12)[::3], np.array([0.0, -0.0, 0.0])]
)
def test_order_and_signs_of_zero_stay(array):
    assert returned(array).tobytes() == np.ascontiguousarray(array).tobytes()


def test_padding_takes_no_room():
    table = np.zeros((96, 1024), np.int32)
    table[:3, :40] = 7
    _, shape, _, used, data = to_used(table)
    assert (shape, used, len(data)) == ((96, 1024), (3, 40), 3 * 40 * 4)


def test_objects_are_refused():
    with pytest.raises(TypeError, match="no wire form"):
        to_used(np.array([object()]))
    with pytest.raises(ValueError, match="no wire form"):
        from_used(np.ndarray, ("O", (1,), b"", (1,), b"12345678"))
