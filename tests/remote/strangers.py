"""Strangers at the ports of a group of hosts: what they send, and how."""

import random
import socket
import time
from contextlib import suppress

import msgspec
import numpy as np
import zmq
from zmq.utils import z85

from chunkattn.engine.host_calls import CopyPages, Forward, ReadTokens, ResetPool
from chunkattn.remote.hosts.group_messages import CALLS, TO_FIRST, TO_OTHER, Busy, End, Failed, Hello, Join, Refused

GREETING = b"\xff" + bytes(8) + b"\x7f"
"""First bytes that a ZeroMQ port sends and expects."""
SMALL_BUT_HUGE = msgspec.msgpack.encode([("Forward", {"leaves": [("<f4", (1 << 28,), bytes(4), (0,), b"")], "backend": None})])
"""A frame of few bytes whose array takes 1 GiB."""


def zmtp(version, mechanism, *commands):
    """Return the bytes of a ZeroMQ client of a version: greeting, then commands with a length of one byte."""
    head = GREETING + bytes([version, 0]) + mechanism.ljust(20, b"\0") + b"\0" + bytes(31)
    return head + b"".join(b"\x04" + bytes([len(command)]) + command for command in commands)


FRAMES = (
    CALLS.encode([ResetPool()]),
    CALLS.encode([CopyPages(((0, 1), (1, 0)))]),
    CALLS.encode([Forward((), None)]),
    CALLS.encode([Forward((np.arange(8, dtype=np.int32), np.zeros((4, 4), np.int32)), None)]),
    CALLS.encode([ReadTokens((0,), (1,))]),
    CALLS.encode([End()]),
    TO_FIRST.encode([Hello(1, 9, b"k" * 40, {})]),
    TO_FIRST.encode([Hello(99, 70_000, b"", {"chunkattn": "0"})]),
    TO_FIRST.encode([Failed("ValueError", "made up"), Busy()]),
    TO_OTHER.encode([Join(1), Refused("made up")]),
    SMALL_BUT_HUGE,
    b"",
    b"\xc1",
    b"\xdd\xff\xff\xff\xff",
    b"\x91" * 100_000,
)
"""Frames that do harm to a host that believes them, or that no decoder may trip over."""
STREAMS = (
    zmtp(3, b"NULL", b"\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH"),
    zmtp(3, b"PLAIN", b"\x05HELLO\x04user\x04pass"),
    zmtp(3, b"CURVE", b"\x05HELLO\x01\x00" + bytes(72) + bytes(120)),
    zmtp(3, b"CURVE", b"\x08INITIATE" + bytes(200)),
    zmtp(3, b"CURVE") + b"\x06\x7f\xff\xff\xff\xff\xff\xff\xff" + b"x" * 500,
    zmtp(2, b"")[:12] + b"\x05\x00\x00",
    zmtp(1, b"")[:12] + b"\x00\x00",
    b"\x01\x00" + bytes([len(FRAMES[0]) + 1]) + b"\x00" + FRAMES[0],
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
)
"""Beginnings of connections in ZeroMQ's protocol of every version and mechanism, and in others."""


def mutated(data, rng):
    """Return bytes with a few random changes."""
    changed = bytearray(data)
    for _ in range(rng.randint(0, 4)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0 if at < len(changed):
                changed[at] = rng.randrange(256)
            case 1:
                del changed[at : at + rng.randint(1, 8)]
            case 2:
                changed[at:at] = rng.randbytes(rng.randint(1, 8))
            case 3:
                del changed[at:]
    return bytes(changed)


def knock(port, data, *, linger_s=0.0):
    """Send bytes to a port over a connection of their own."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
        connection.sendall(data)
        if linger_s:
            connection.settimeout(linger_s)
            connection.recv(64)


def send_as(port, frames, server_key=None, *, kinds=(zmq.PUSH, zmq.DEALER), wait_s=0.2):
    """Send frames as a ZeroMQ client, without a secret or with the key of one."""
    context = zmq.Context()
    for kind in kinds:
        made = context.socket(kind)
        made.linger = 0
        if server_key is not None:
            made.curve_serverkey = server_key
            made.curve_publickey, made.curve_secretkey = zmq.curve_keypair()
        made.connect(f"tcp://127.0.0.1:{port}")
        for frame in frames:
            with suppress(zmq.Again):  # the port has refused the connection
                made.send(frame, zmq.NOBLOCK)
    time.sleep(wait_s)
    context.destroy(linger=0)


def attack(port, *, count, seed):
    """Send `count` random and mutated frames and streams to a port."""
    rng = random.Random(seed)
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]  # they say nothing
    whole = [*STREAMS, *(STREAMS[0] + b"\x00" + bytes([len(frame)]) + frame for frame in FRAMES if len(frame) < 256)]
    for number in range(count // 2):
        data = rng.randbytes(rng.randint(1, 300)) if number % 4 == 0 else mutated(rng.choice(whole), rng)
        knock(port, data, linger_s=0.05 if number % 50 == 0 else 0.0)
    own = z85.encode(rng.randbytes(32))
    for key in (None, own):
        frames = [mutated(rng.choice(FRAMES), rng) for _ in range(count // 4 - len(FRAMES))]
        send_as(port, [*FRAMES, *frames], key, kinds=(zmq.PUSH,))
        send_as(port, FRAMES, key, kinds=(zmq.DEALER,))
    for connection in idle:
        connection.close()
