"""Arrays on their way to another host, without the padding at the ends of their axes."""

import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from chunkattn.engine.host_calls import Forward
from chunkattn.remote.frames import from_plain, to_plain
from chunkattn.remote.hosts.group_messages import CALLS

KINDS = st.sampled_from(["bool", "int32", "uint32", "int64", "float32", "float64", "uint8", "float16"])


def returned(array):
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(to_plain(array)))
    return from_plain(np.ndarray, plain)


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
    _, shape, _, used, data = to_plain(table)
    assert (shape, used, len(data)) == ((96, 1024), (3, 40), 3 * 40 * 4)


@pytest.mark.parametrize(
    "plain",
    [
        ("<f4", (1 << 28,), bytes(4), (0,), b""),
        ("<f4", (1 << 40, 1 << 40), bytes(4), (0, 0), b""),
        ("<f4", (1 << 20, 0, 1 << 62), b"", (0, 0, 0), b""),
        ("<f4", (-1,), bytes(4), (0,), b""),
        ("<f4", (-(1 << 40), -1), bytes(4), (0, 0), b""),
        ("<f4", (2.0,), bytes(4), (0,), b""),
        ("<f4", (2,), b"", (0,), b""),
        ("<f4", (2,), bytes(3), (0,), b""),
        ("<f4", (2,), bytes(4), (3,), bytes(12)),
        ("<f4", (2,), bytes(4), (2,), bytes(4)),
        ("<f4", (2,), bytes(4), (-1,), bytes(4)),
        ("O", (2,), bytes(8), (0,), b""),
        ("V4", (2,), bytes(4), (0,), b""),
        ("<f4,<f4", (2,), bytes(8), (0,), b""),
        ("S1000000000000", (1,), b"", (0,), b""),
        ("no such type", (2,), bytes(4), (0,), b""),
        ("<f4", None, bytes(4), (0,), b""),
        ("<f4", (2,), bytes(4)),
        (),
        None,
        7,
        "<f4",
        {"a": 1},
    ],
)
def test_wrong_arrays_are_refused_before_they_are_made(plain):
    frame = msgspec.msgpack.encode([("Forward", {"leaves": [plain], "backend": None})])
    tracemalloc.start()
    try:
        with pytest.raises(msgspec.DecodeError):
            CALLS.decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_all_arrays_of_a_frame_share_its_room():
    array = ("<i4", (1 << 25,), bytes(4), (0,), b"")  # 128 MiB, and the room is 512 MiB
    frames = CALLS
    with pytest.raises(msgspec.DecodeError, match="at most 536870912 bytes"):
        frames.decode(msgspec.msgpack.encode([("Forward", {"leaves": [array] * 5, "backend": None})]))
    assert frames.decode(frames.encode([Forward((np.arange(5),), None)]))[0].leaves[0].tolist() == [0, 1, 2, 3, 4]


def test_objects_are_refused():
    with pytest.raises(TypeError, match="no wire form"):
        to_plain(np.array([object()]))
    with pytest.raises(ValueError, match="no wire form"):
        from_plain(np.ndarray, ("O", (1,), b"", (1,), b"12345678"))
