"""`OtherHost`: the connections of a host that follows; see `chunkattn.remote.hosts.group`."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

import zmq
from zmq.utils.monitor import parse_monitor_message

from chunkattn.config import EngineConfig, split_address
from chunkattn.engine.host_calls import HostCall
from chunkattn.errors import ConfigError
from chunkattn.remote.hosts import group
from chunkattn.remote.hosts.gate import Gate
from chunkattn.remote.hosts.group import CONNECT_S, REPORT_S
from chunkattn.remote.hosts.group_messages import CALLS, TO_FIRST, TO_OTHER, Busy, End, Hello, Join, Refused, traits_of
from chunkattn.remote.hosts.group_secret import curve_key
from chunkattn.remote.hosts.group_sockets import Context, Socket, beating, bracketed, connect_with, has_gone, listen_with, url
from chunkattn.remote.messages import Checkpoint, Failed

logger = logging.getLogger(__name__)

_HELLO_S = 1.0
"""Seconds between two times that a host says `Hello`."""
_RECONNECT_MS = 500
_REFUSALS = 3
"""Failed handshakes between two log lines that make a wrong secret likely. One may be the end of a process."""
_LAST_WORDS_MS = 2000


class OtherHost:
    """The connections of a host that follows.

    Attributes:
        calls: socket of the calls of the first host; none before `join`.
        failure: None; see `FirstHost`.
        has_ended: whether the first host has ended in order. Call `hear` to know.

    Args:
        context: ZeroMQ context.
        config: options of the engine.
        checkpoint: the checkpoint to load.

    Raises:
        ConfigError: the group's secret is missing.
    """

    def __init__(self, context: Context, config: EngineConfig, checkpoint: Checkpoint) -> None:
        self._context, self._config, self._traits = context, config, traits_of(config, checkpoint)
        self._frames, first_key = CALLS, zmq.curve_public(curve_key(config))
        self._hellos = beating(context, zmq.DEALER, config)
        self._hellos.immediate = True  # no `Hello` waits for a later start of the first host
        self._hellos.reconnect_ivl = _RECONNECT_MS
        connect_with(self._hellos, first_key)
        self._host, self._first_port = split_address(config.coordinator or "")
        self._address: str | None = None
        self._local: str | None = None
        failed = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        self._monitor = self._hellos.get_monitor_socket(zmq.EVENT_DISCONNECTED | failed)
        self._gate: Gate | None = None
        self.calls: Socket
        self.failure: Failed | None = None
        self._joined = self.has_ended = False

    def join(self) -> None:
        """Wait until the first host lets this one join, then start JAX.

        Raises:
            ConfigError: the first host refuses this one.
            msgspec.DecodeError: the first host sends what cannot be understood.
        """
        config, reported, refusals = self._config, 0.0, 0
        while True:
            refusals += self._refusals()
            try:
                if self._gate is None:
                    raise zmq.Again
                hello = Hello(config.host_index, self._port, self._key, self._traits)
                self._hellos.send(TO_FIRST.encode([hello]), zmq.NOBLOCK)
            except zmq.Again:  # no connection
                self._connect()
            if self._hellos.poll(int(1000 * _HELLO_S)):
                answers = TO_OTHER.decode(self._hellos.recv())
                if refused := next((answer for answer in answers if isinstance(answer, Refused)), None):
                    raise ConfigError(f"host {config.host_index} is refused by host 0: {refused.reason}")
                if joined := next((answer for answer in answers if isinstance(answer, Join)), None):
                    break
            if time.monotonic() - reported > REPORT_S:
                if refusals >= _REFUSALS:
                    text = "host %d fails the handshake with %s: give host 0 and this host the same group_secret_file"
                    logger.warning(text, config.host_index, config.coordinator)
                else:
                    logger.info("host %d waits for host 0 at %s", config.host_index, config.coordinator)
                reported, refusals = time.monotonic(), 0
        self._admit_first()
        self._joined = True
        group.initialize(config, f"{bracketed(self._address or self._host)}:{joined.port}")

    def _refusals(self) -> int:
        """Return the number of handshakes with the first host that have failed since the last call."""
        failed = 0
        while self._monitor.poll(0):
            failed += parse_monitor_message(self._monitor.recv_multipart())["event"] != zmq.EVENT_DISCONNECTED
        return failed

    def _connect(self) -> None:
        """Connect to the IP address at which host 0 can be reached now, and take calls at the address that reaches it.

        ZeroMQ would try one of the addresses of a name, whether it can be reached or not.
        """
        try:
            with socket.create_connection((self._host, self._first_port), timeout=_HELLO_S) as connection:
                address, local = str(connection.getpeername()[0]), str(connection.getsockname()[0])
        except OSError:
            return
        if local != self._local or self._gate is None:
            self._listen(local)
        if address != self._address:
            if self._address is not None:
                self._hellos.disconnect(url(self._address, self._first_port))
            self._hellos.connect(url(address, self._first_port))
            self._address = address

    def _listen(self, local: str) -> None:
        """Open the port for calls at an address of this host."""
        self._close_calls()
        self._key, secret_key = zmq.curve_keypair()
        self.calls = beating(self._context, zmq.PULL, self._config)
        self.calls.rcvhwm = 0
        listen_with(self.calls, secret_key)
        self._gate = Gate(self.calls, f"the port for calls at {local}")
        self._port, self._local = self.calls.bind_to_random_port(f"tcp://{bracketed(local)}"), local

    def _admit_first(self) -> None:
        """Wait for the connection of the first host to the port for calls. Others are closed from now on."""
        assert self._gate is not None
        if not self.calls.poll(int(1000 * CONNECT_S)):
            raise ConnectionError(f"host 0 let host {self._config.host_index} join but sends no calls")
        frame = self.calls.recv(copy=False)
        self._frames.decode(frame.bytes)
        self._gate.admit(frame)
        self._gate.places = 0

    def receive(self) -> Sequence[HostCall | End]:
        """Return the calls that have arrived, without waiting.

        Raises:
            msgspec.DecodeError: the first host sends what cannot be understood.
        """
        try:
            return self._frames.decode(b"".join(self.calls.recv_multipart(zmq.NOBLOCK)))
        except zmq.Again:
            return []

    def lost(self) -> str | None:
        """Return why the first host is gone after this one has joined, or None. One thread alone may call this and `hear`."""
        return "host 0 is gone" if self._joined and has_gone(self._monitor) else None

    def hear(self, *, busy: bool) -> bool:
        """Exchange with the first host who is busy. Return whether it loads or compiles, or another host does.

        Args:
            busy: whether this host does.

        Raises:
            msgspec.DecodeError: the first host sends what cannot be understood.
        """
        others = False
        if self._joined:
            while self._hellos.poll(0):
                messages = TO_OTHER.decode(self._hellos.recv())
                others |= any(isinstance(message, Busy) for message in messages)
                self.has_ended |= any(isinstance(message, End) for message in messages)
            if busy:
                with suppress(zmq.Again):  # host 0 is gone, as `lost` tells
                    self._hellos.send(TO_FIRST.encode([Busy()]), zmq.NOBLOCK)
        return others

    def fail(self, failure: Failed) -> None:
        """Tell the first host why this one ends."""
        with suppress(zmq.Again):
            self._hellos.send(TO_FIRST.encode([failure]), zmq.NOBLOCK)

    def end(self) -> None:
        """Close the connections."""
        self._hellos.disable_monitor()
        self._monitor.close(linger=0)
        self._close_calls()
        self._hellos.close(linger=_LAST_WORDS_MS)

    def _close_calls(self) -> None:
        if self._gate is not None:
            self._gate.close()
            self.calls.close(linger=0)
            self._gate = None
