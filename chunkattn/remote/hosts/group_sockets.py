"""The sockets of a group of hosts: their heartbeats, their encryption, and the addresses that they listen on."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import closing, suppress
from ipaddress import ip_address

import zmq
from zmq.utils.monitor import parse_monitor_message

from chunkattn.config import EngineConfig, split_address
from chunkattn.errors import ConfigError

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

_HEARTBEATS = 6
"""Heartbeats within the time after which a host counts as gone."""
_SHARE = 0.6
"""Part of `engine_hang_timeout_s` after which a silent host counts as gone, so that callers hear of it within the limit."""
_LONGEST_TTL_MS = 6_553_500
"""Longest time that a heartbeat of ZeroMQ's protocol can announce."""
_PART_BYTES = 1 << 20
"""Bytes of one part of a frame. A connection that announces more is closed before memory is allocated."""
_OVERHEAD_BYTES = 4096


def beating(context: Context, kind: int, config: EngineConfig) -> Socket:
    """Return a socket whose connections end when the other side stands still, or announces too long a message."""
    made = context.socket(kind)
    limit_ms = min(int(1000 * _SHARE * config.engine_hang_timeout_s), 2**31 - 1)
    made.heartbeat_timeout = limit_ms
    made.heartbeat_ttl = min(limit_ms, _LONGEST_TTL_MS)
    made.heartbeat_ivl = limit_ms // _HEARTBEATS
    made.maxmsgsize = _PART_BYTES + _OVERHEAD_BYTES
    made.ipv6 = True
    return made


def listen_with(listening: Socket, secret_key: bytes) -> None:
    """Let a socket accept only connections that know the public key of `secret_key`, and encrypt them."""
    listening.curve_server = True
    listening.curve_secretkey = secret_key


def connect_with(connecting: Socket, server_key: bytes) -> None:
    """Let a socket connect only to one that has the secret key of `server_key`, and encrypt the connection."""
    connecting.curve_serverkey = server_key
    connecting.curve_publickey, connecting.curve_secretkey = zmq.curve_keypair()


def parts_of(frame: bytes) -> Sequence[bytes | memoryview]:
    """Return a frame in parts that a socket of the group takes."""
    if len(frame) <= _PART_BYTES:
        return (frame,)
    whole = memoryview(frame)
    return [whole[start : start + _PART_BYTES] for start in range(0, len(frame), _PART_BYTES)]


def has_gone(monitor: Socket) -> bool:
    """Return whether a connection has ended since the last call."""
    while monitor.poll(0):
        if parse_monitor_message(monitor.recv_multipart())["event"] == zmq.EVENT_DISCONNECTED:
            return True
    return False


def own_address(config: EngineConfig) -> tuple[str, int]:
    """Return IP address and port to listen on for `coordinator`, which must be this host's.

    For a name, all interfaces are listened on: hosts may resolve it differently, and Debian's `/etc/hosts` has the loopback
    address for this host's own name.

    Raises:
        ConfigError: the name is unknown.
    """
    host, port = split_address(config.coordinator or "")
    try:
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
        with suppress(ValueError):
            return str(ip_address(host)), port
        return (address if host.lower() == "localhost" else "*"), port
    except OSError as error:
        raise ConfigError(f"coordinator {config.coordinator!r}: {error}; name an address of host 0") from None


def address_of(frame: zmq.Frame) -> str:
    """Return the IP address that a frame came from, or an empty text if it is unknown."""
    try:
        return str(frame.get("Peer-Address")).removeprefix("::ffff:")
    except zmq.ZMQError:
        return ""


def free_port(ip: str) -> int:
    """Return a port of an IP address that nobody uses."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with closing(socket.socket(family)) as free:
        free.bind(("" if ip == "*" else ip, 0))
        return int(free.getsockname()[1])


def bracketed(host: str) -> str:
    """Return a host as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def url(host: str, port: int | str) -> str:
    """Return ZeroMQ's address of a port."""
    return f"tcp://{bracketed(host)}:{port}"
