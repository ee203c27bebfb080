"""The hosts of one model: how their engines find each other, and the connections that carry calls and tell who is gone.

Every other host says `Hello` to the first one, at the address that the option `coordinator` gives, and names a port for calls.
Once all are there, the first host connects to these ports and answers `Join` with the port of JAX's coordinator. These ports
are new in every start, so that no process of an earlier start can take part. ZeroMQ's heartbeats close the connection of a
host that stands still, and a port for calls takes no second connection.

These ports take no credentials, as JAX's own do not. They belong on a private network.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from ipaddress import ip_address
from typing import Any

import jax
import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from chunkattn.config import EngineConfig, split_address
from chunkattn.engine.host_calls import HostCall
from chunkattn.errors import ConfigError
from chunkattn.remote.group_messages import FRAMES, Busy, End, Hello, Join, Refused, difference, traits_of
from chunkattn.remote.messages import Checkpoint, Failed

logger = logging.getLogger(__name__)

_HELLO_S = 1.0
"""Seconds between two times that a host says `Hello`."""
_FRESH_S = 3.0
"""Seconds after which a host that said `Hello` counts as gone."""
_CONNECT_S = 10.0
"""Seconds within which the connections to all hosts must stand."""
_WORDS_S = 0.1
"""Seconds that the last words of a host take to arrive."""
_REPORT_S = 10.0
"""Seconds between two log lines about hosts that are missing."""
_HEARTBEATS = 6
"""Heartbeats within the time after which a host counts as gone."""
_SHARE = 0.6
"""Part of `engine_hang_timeout_s` after which a silent host counts as gone, so that callers hear of it within the limit."""
_LONGEST_TTL_MS = 6_553_500
"""Longest time that a heartbeat of ZeroMQ's protocol can announce."""
_START_TIMEOUT_S = 300
_LAST_WORDS_MS = 2000
Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


class FirstHost:
    """The connections of the host that schedules. It tells every call to the other hosts.

    Attributes:
        failure: last words of another host, if its engine has failed.

    Args:
        context: ZeroMQ context.
        config: options of the engine.
        checkpoint: the checkpoint to load.

    Raises:
        ConfigError: `coordinator` is no address of this machine, or is in use.
    """

    def __init__(self, context: Context, config: EngineConfig, checkpoint: Checkpoint) -> None:
        self._context, self._config, self._traits = context, config, traits_of(config, checkpoint)
        self._ip, port = _own_address(config)
        self._hellos = context.socket(zmq.ROUTER)
        self._hellos.ipv6 = True
        self._senders: dict[int, bytes] = {}
        self._calls: dict[int, Socket] = {}
        self._monitors: dict[int, Socket] = {}
        self._warned: set[str] = set()
        self._joined = False
        self.failure: Failed | None = None
        try:
            self._hellos.bind(_url(self._ip, port))
        except zmq.ZMQError as error:
            self._hellos.close()
            raise ConfigError(f"coordinator {config.coordinator!r}: {error}; use another port, or end what uses it") from None

    def gather(self) -> None:
        """Wait until every host is there and connected, then start JAX on all of them."""
        while not self._connect(self._wait()):
            self._close_calls()
        self._joined = True
        initialize(self._config, f"{_bracketed(self._ip.replace('*', '127.0.0.1'))}:{self._port}")

    def tell(self, call: HostCall) -> None:
        """Send a call to every other host; see `chunkattn.engine.host_calls.Hosts`."""
        self._send(FRAMES.encode([call]))

    def _send(self, frame: bytes) -> None:
        for calls in self._calls.values():
            with suppress(zmq.Again):  # that host is gone, as `lost` tells
                calls.send(frame, zmq.NOBLOCK)

    def lost(self) -> str | None:
        """Return why a host that has joined is gone, or None. One thread alone may call this and `hear`."""
        for index, monitor in self._monitors.items() if self._joined else ():
            if _has_gone(monitor):
                time.sleep(_WORDS_S)  # the host's last words come over another connection
                self.hear(busy=False)
                said = f": {self.failure.error_type}: {self.failure.text}" if self.failure else ""
                return f"host {index} of {self._config.num_hosts} is gone{said}"
        return f"the engine of another host failed: {self.failure.text}" if self.failure else None

    def hear(self, *, busy: bool) -> bool:
        """Exchange with the others who is busy. Return whether another host loads or compiles.

        Args:
            busy: whether this host does.
        """
        if not self._joined:
            return False
        others, known = set[bytes](), set(self._senders.values())
        for sender, message in self._received(0):
            if sender in known and isinstance(message, Failed):
                self.failure = message
            elif sender in known and isinstance(message, Busy):
                others.add(sender)
            elif isinstance(message, Hello) and sender not in known:
                self._warn(f"another process says that it is host {message.host_index}; it waits for the next start")
        for sender in known:
            if busy or others - {sender}:
                self._hellos.send_multipart([sender, FRAMES.encode([Busy()])])
        return bool(others)

    def end(self) -> None:
        """Tell the other hosts that this one ends in order, and close the connections."""
        self._send(FRAMES.encode([End()]))
        self._close_calls(_LAST_WORDS_MS)
        self._hellos.close(linger=0)

    def _wait(self) -> dict[int, tuple[bytes, str]]:
        """Wait until all other hosts say `Hello`. Return the identity of each one's connection, and where it takes calls."""
        found: dict[int, tuple[bytes, str, float]] = {}
        reported = 0.0
        while True:
            for sender, message in self._received(1000):
                address = self._address
                if not isinstance(message, Hello):
                    continue
                fault = difference(self._traits, message.traits)
                if not fault and not 0 < message.host_index < self._config.num_hosts:
                    fault = f"host_index must be 1 to {self._config.num_hosts - 1}, got {message.host_index}"
                if fault:
                    self._warn(f"host {message.host_index} is refused: {fault}")
                    self._hellos.send_multipart([sender, FRAMES.encode([Refused(fault)])])
                else:
                    found[message.host_index] = sender, _url(address, message.port), time.monotonic()
            now = time.monotonic()
            missing = [
                index for index in range(1, self._config.num_hosts) if index not in found or now - found[index][2] > _FRESH_S
            ]
            if not missing:
                return {index: (sender, calls) for index, (sender, calls, _) in found.items()}
            if now - reported > _REPORT_S:
                names = ", ".join(map(str, missing))
                logger.info("waiting for host %s of %d at %s", names, self._config.num_hosts, self._config.coordinator)
                reported = now

    def _connect(self, hosts: dict[int, tuple[bytes, str]]) -> bool:
        """Connect to the hosts and let them join. Return whether all connections stand in time."""
        for index, (_, address) in hosts.items():
            calls = self._calls[index] = _beating(self._context, zmq.PUSH, self._config)
            calls.sndhwm = 0  # the first host waits for results, which bounds the calls in flight
            calls.reconnect_ivl = -1  # calls that were lost would leave the hosts apart
            self._monitors[index] = calls.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            calls.connect(address)
        until = time.monotonic() + _CONNECT_S
        for index, monitor in self._monitors.items():
            in_time = monitor.poll(max(0, int(1000 * (until - time.monotonic()))))
            if not in_time or parse_monitor_message(monitor.recv_multipart())["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                logger.warning("host %d cannot be reached at %s", index, hosts[index][1])
                return False
        self._port = _free_port(self._ip)
        self._senders = {index: sender for index, (sender, _) in hosts.items()}
        for sender in self._senders.values():
            self._hellos.send_multipart([sender, FRAMES.encode([Join(self._port)])])
        return True

    def _received(self, timeout_ms: int) -> Iterator[tuple[bytes, Any]]:
        """Yield the messages of other hosts that are there, each with the identity of its connection."""
        while self._hellos.poll(timeout_ms):
            timeout_ms = 0
            sender, *frames = self._hellos.recv_multipart(copy=False)
            try:
                for frame in frames:
                    self._address = str(frame.get("Peer-Address"))
                    for message in FRAMES.decode(frame.bytes):
                        yield sender.bytes, message
            except (msgspec.DecodeError, TypeError, ValueError) as error:
                self._warn(f"{self._config.coordinator} got a message that cannot be understood: {error}")

    def _warn(self, text: str) -> None:
        """Log a warning once."""
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)

    def _close_calls(self, linger_ms: int = 0) -> None:
        for calls, monitor in zip(self._calls.values(), self._monitors.values(), strict=True):
            calls.disable_monitor()
            calls.close(linger=linger_ms)
            monitor.close(linger=0)
        self._calls.clear()
        self._monitors.clear()


class OtherHost:
    """The connections of a host that follows.

    Args:
        context: ZeroMQ context.
        config: options of the engine.
        checkpoint: the checkpoint to load.
    """

    def __init__(self, context: Context, config: EngineConfig, checkpoint: Checkpoint) -> None:
        self._config, self._traits = config, traits_of(config, checkpoint)
        self._hellos = _beating(context, zmq.DEALER, config)
        self._hellos.immediate = True  # no `Hello` waits for a later start of the first host
        self._host, self._first_port = split_address(config.coordinator or "")
        self._monitor = self._hellos.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.failure: Failed | None = None
        self.calls = _beating(context, zmq.PULL, config)
        self.calls.rcvhwm = 0
        self._port = self.calls.bind_to_random_port("tcp://*")
        self._joined = False

    def join(self) -> None:
        """Wait until the first host lets this one join, then start JAX.

        Raises:
            ConfigError: the first host refuses this one.
        """
        config, reported, address = self._config, 0.0, None
        hello = FRAMES.encode([Hello(config.host_index, self._port, self._traits)])
        while True:
            while _has_gone(self._monitor):  # connections to earlier starts
                pass
            try:
                self._hellos.send(hello, zmq.NOBLOCK)
            except zmq.Again:  # no connection
                address = self._connect(address)
            if self._hellos.poll(int(1000 * _HELLO_S)):
                (answer,) = FRAMES.decode(self._hellos.recv())
                if isinstance(answer, Refused):
                    raise ConfigError(f"host {config.host_index} is refused by host 0: {answer.reason}")
                if isinstance(answer, Join):
                    break
            if time.monotonic() - reported > _REPORT_S:
                logger.info("host %d waits for host 0 at %s", config.host_index, config.coordinator)
                reported = time.monotonic()
        self._joined = True
        initialize(config, f"{_bracketed(address or self._host)}:{answer.port}")

    def _connect(self, former: str | None) -> str | None:
        """Connect to the IP address at which host 0 can be reached now. Return it, or `former` if there is none.

        ZeroMQ would try one of the addresses of a name, whether it can be reached or not.
        """
        try:
            with socket.create_connection((self._host, self._first_port), timeout=_HELLO_S) as found:
                address = str(found.getpeername()[0])
        except OSError:
            return former
        if address != former:
            if former is not None:
                self._hellos.disconnect(_url(former, self._first_port))
            self._hellos.connect(_url(address, self._first_port))
        return address

    def receive(self) -> Sequence[HostCall | End]:
        """Return the calls that have arrived, without waiting."""
        try:
            return FRAMES.decode(self.calls.recv(zmq.NOBLOCK))
        except zmq.Again:
            return []

    def lost(self) -> str | None:
        """Return why the first host is gone after this one has joined, or None. One thread alone may call this and `hear`."""
        return "host 0 is gone" if self._joined and _has_gone(self._monitor) else None

    def hear(self, *, busy: bool) -> bool:
        """Exchange with the first host who is busy. Return whether it loads or compiles, or another host does.

        Args:
            busy: whether this host does.
        """
        others = False
        if self._joined:
            while self._hellos.poll(0):
                others |= any(isinstance(message, Busy) for message in FRAMES.decode(self._hellos.recv()))
            if busy:
                with suppress(zmq.Again):  # host 0 is gone, as `lost` tells
                    self._hellos.send(FRAMES.encode([Busy()]), zmq.NOBLOCK)
        return others

    def fail(self, failure: Failed) -> None:
        """Tell the first host why this one ends."""
        with suppress(zmq.Again):
            self._hellos.send(FRAMES.encode([failure]), zmq.NOBLOCK)

    def end(self) -> None:
        """Close the connections."""
        self._hellos.disable_monitor()
        self._monitor.close(linger=0)
        self.calls.close(linger=0)
        self._hellos.close(linger=_LAST_WORDS_MS)


def initialize(config: EngineConfig, coordinator: str) -> None:
    """Start JAX on the devices of all hosts.

    Args:
        config: options of the engine.
        coordinator: address of JAX's coordinator, on the first host.
    """
    jax.distributed.initialize(coordinator, config.num_hosts, config.host_index, initialization_timeout=_START_TIMEOUT_S)


def _beating(context: Context, kind: int, config: EngineConfig) -> Socket:
    """Return a socket whose connections end when the other side stands still."""
    made = context.socket(kind)
    limit_ms = min(int(1000 * _SHARE * config.engine_hang_timeout_s), 2**31 - 1)
    made.heartbeat_timeout = limit_ms
    made.heartbeat_ttl = min(limit_ms, _LONGEST_TTL_MS)
    made.heartbeat_ivl = limit_ms // _HEARTBEATS
    made.ipv6 = True
    return made


def _has_gone(monitor: Socket) -> bool:
    """Return whether a connection has ended since the last call."""
    while monitor.poll(0):
        if parse_monitor_message(monitor.recv_multipart())["event"] == zmq.EVENT_DISCONNECTED:
            return True
    return False


def _own_address(config: EngineConfig) -> tuple[str, int]:
    """Return IP address and port to listen on for `coordinator`, which must be this host's.

    For a name, all interfaces are listened on: hosts may resolve it differently, and Debian's `/etc/hosts` has the loopback
    address for this host's own name.

    Raises:
        ConfigError: the name is unknown.
    """
    host, port = split_address(config.coordinator or "")
    try:
        found = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
        with suppress(ValueError):
            return str(ip_address(host)), port
        return (found if host == "localhost" else "*"), port
    except OSError as error:
        raise ConfigError(f"coordinator {config.coordinator!r}: {error}; name an address of host 0") from None


def _free_port(ip: str) -> int:
    """Return a port of an IP address that nobody uses."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with closing(socket.socket(family)) as free:
        free.bind(("" if ip == "*" else ip, 0))
        return int(free.getsockname()[1])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _url(host: str, port: int | None = None) -> str:
    return f"tcp://{_bracketed(host)}" + ("" if port is None else f":{port}")
