"""`FirstHost`: the connections of the host that schedules; see `chunkattn.remote.hosts.group`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from chunkattn.config import EngineConfig
from chunkattn.engine.host_calls import HostCall
from chunkattn.errors import ConfigError
from chunkattn.remote.hosts import group
from chunkattn.remote.hosts.gate import Gate
from chunkattn.remote.hosts.group import CONNECT_S, KEY_BYTES, REPORT_S
from chunkattn.remote.hosts.group_messages import (
    CALLS,
    TO_FIRST,
    TO_OTHER,
    Busy,
    End,
    Hello,
    Join,
    Opened,
    Refused,
    difference,
    traits_of,
)
from chunkattn.remote.hosts.group_secret import curve_key
from chunkattn.remote.hosts.group_sockets import (
    Context,
    Socket,
    address_of,
    beating,
    bracketed,
    connect_with,
    free_port,
    has_gone,
    listen_with,
    own_address,
    parts_of,
    url,
)
from chunkattn.remote.messages import Checkpoint, Failed

logger = logging.getLogger(__name__)

_FRESH_S = 3.0
"""Seconds after which a host that said `Hello` counts as gone."""
_WORDS_S = 0.1
"""Seconds that the last words of a host take to arrive."""
_LATE_PLACES = 16
"""Connections that may be open without being a member's, once all hosts are there."""
_WARNINGS = 100
"""Different warnings about messages that are logged."""
_LEAVE_S = 2.0
"""Seconds that the other hosts have to end in order before JAX's coordinator does, which would end them by an error."""


class _Candidate(NamedTuple):
    """Host that wants to take part.

    Attributes:
        sender: identity of its connection.
        address: address where it takes calls.
        key: public key of that port.
        heard_at: time of its last `Hello` on the monotonic clock.
    """

    sender: bytes
    address: str
    key: bytes
    heard_at: float


class FirstHost:
    """The connections of the host that schedules. It tells every call to the other hosts.

    Attributes:
        failure: last words of another host, if its engine has failed.

    Args:
        context: ZeroMQ context.
        config: options of the engine.
        checkpoint: the checkpoint to load.

    Raises:
        ConfigError: `coordinator` is no address of this machine or is in use, or the group's secret is missing.
    """

    def __init__(self, context: Context, config: EngineConfig, checkpoint: Checkpoint) -> None:
        self._context, self._config, self._traits = context, config, traits_of(config, checkpoint)
        self._frames = CALLS
        self._ip, port = own_address(config)
        key = curve_key(config)
        self._hellos = beating(context, zmq.ROUTER, config)
        listen_with(self._hellos, key)
        self._gate = Gate(self._hellos, f"coordinator {config.coordinator}")
        self._senders: dict[int, bytes] = {}
        self._calls: dict[int, Socket] = {}
        self._monitors: dict[int, Socket] = {}
        self._warned: set[str] = set()
        self._joined = False
        self.failure: Failed | None = None
        try:
            self._hellos.bind(url(self._ip, port))
        except zmq.ZMQError as error:
            self._gate.close()
            self._hellos.close()
            raise ConfigError(f"coordinator {config.coordinator!r}: {error}; use another port, or end what uses it") from None

    def gather(self) -> None:
        """Wait until every host is there and connected, then start JAX on all of them."""
        while not self._connect(self._wait()):
            self._close_calls()
        self._joined, self._gate.places = True, _LATE_PLACES
        address = f"{bracketed(self._ip)}:{self._port}"
        if self._ip == "*":
            group.initialize(self._config, f"127.0.0.1:{self._port}")
        else:
            group.initialize(self._config, address, bind=address)

    def tell(self, call: HostCall) -> None:
        """Send a call to every other host; see `chunkattn.engine.host_calls.Tell`."""
        self._send(self._frames.encode([call]))

    def _send(self, frame: bytes) -> None:
        for calls in self._calls.values():
            with suppress(zmq.Again):  # that host is gone, as `lost` tells
                calls.send_multipart(parts_of(frame), zmq.NOBLOCK)

    def lost(self) -> str | None:
        """Return why a host that has joined is gone, or None. One thread alone may call this and `hear`."""
        for index, monitor in self._monitors.items() if self._joined else ():
            if has_gone(monitor):
                time.sleep(_WORDS_S)  # the host's last words come over another connection
                self.hear(busy=False)
                return f"host {index} of {self._config.num_hosts} is gone{f': {self.failure}' if self.failure else ''}"
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
                self._answer(sender, Busy())
        return bool(others)

    def end(self) -> None:
        """Tell the other hosts that this one ends in order, wait until they have ended, and close the connections."""
        if self._joined:
            self._send(self._frames.encode([End()]))
            for sender in self._senders.values():  # a host that computes does not read its calls
                self._answer(sender, End())
            until, present = time.monotonic() + _LEAVE_S, dict(self._monitors)
            while present and time.monotonic() < until:
                present = {index: monitor for index, monitor in present.items() if not has_gone(monitor)}
                time.sleep(0.02)
        self._close_calls()
        self._gate.close()
        self._hellos.close(linger=0)

    def _answer(self, sender: bytes, message: Refused | Join | Busy | End) -> None:
        self._hellos.send_multipart([sender, TO_OTHER.encode([message])])

    def _wait(self) -> dict[int, _Candidate]:
        """Wait until all other hosts say `Hello`, and return them by number."""
        hosts: dict[int, _Candidate] = {}
        reported = 0.0
        while True:
            for sender, message in self._received(1000):
                if not isinstance(message, Hello):
                    continue
                if fault := self._fault(message):
                    self._warn(f"host {message.host_index} is refused: {fault}")
                    self._answer(sender, Refused(fault))
                else:
                    address = url(self._address, message.port)
                    hosts[message.host_index] = _Candidate(sender, address, message.key, time.monotonic())
            now = time.monotonic()
            fresh = {index for index, host in hosts.items() if now - host.heard_at <= _FRESH_S}
            if not (missing := [str(index) for index in range(1, self._config.num_hosts) if index not in fresh]):
                return hosts
            if now - reported > REPORT_S:
                names = ", ".join(missing)
                logger.info("waiting for host %s of %d at %s", names, self._config.num_hosts, self._config.coordinator)
                reported = now

    def _fault(self, hello: Hello) -> str | None:
        """Return why a host cannot take part, or None."""
        if fault := difference(self._traits, hello.traits):
            return fault
        if not 0 < hello.host_index < self._config.num_hosts:
            return f"host_index must be 1 to {self._config.num_hosts - 1}, got {hello.host_index}"
        if not 0 < hello.port < 2**16 or len(hello.key) != KEY_BYTES:
            return f"its port {hello.port} or the key of it is invalid"
        return None

    def _connect(self, hosts: dict[int, _Candidate]) -> bool:
        """Connect to the hosts and let them join. Return whether all connections stand in time."""
        for index, host in hosts.items():
            calls = self._calls[index] = beating(self._context, zmq.PUSH, self._config)
            calls.sndhwm = 0  # the first host waits for results, which bounds the calls in flight
            calls.reconnect_ivl = -1  # calls that were lost would leave the hosts apart
            connect_with(calls, host.key)
            self._monitors[index] = calls.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            calls.connect(host.address)
        until = time.monotonic() + CONNECT_S
        for index, monitor in self._monitors.items():
            in_time = monitor.poll(max(0, int(1000 * (until - time.monotonic()))))
            if not in_time or parse_monitor_message(monitor.recv_multipart())["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                logger.warning("host %d cannot be reached at %s", index, hosts[index].address)
                return False
        self._send(self._frames.encode([Opened()]))
        self._port = free_port(self._ip)
        self._senders = {index: host.sender for index, host in hosts.items()}
        for sender in self._senders.values():
            self._answer(sender, Join(self._port))
        return True

    def _received(self, timeout_ms: int) -> Iterator[tuple[bytes, Any]]:
        """Yield the messages of other hosts that are there, each with the identity of its connection."""
        while self._hellos.poll(timeout_ms):
            timeout_ms = 0
            sender, *frames = self._hellos.recv_multipart(copy=False)
            for frame in frames:
                self._address = address_of(frame)
                try:
                    messages = TO_FIRST.decode(frame.bytes)
                except msgspec.DecodeError as error:
                    self._warn(f"{self._address} sent a message that cannot be understood; its connection is closed: {error}")
                    self._gate.hang_up(frame)
                    break
                self._gate.admit(frame)
                for message in messages:
                    yield sender.bytes, message

    def _warn(self, text: str) -> None:
        """Log a warning once. Many different warnings are not logged, so that their record stays small."""
        if text not in self._warned and len(self._warned) < _WARNINGS:
            self._warned.add(text)
            logger.warning("%s", text)

    def _close_calls(self) -> None:
        for calls, monitor in zip(self._calls.values(), self._monitors.values(), strict=True):
            calls.disable_monitor()
            calls.close(linger=0)
            monitor.close(linger=0)
        self._calls.clear()
        self._monitors.clear()
