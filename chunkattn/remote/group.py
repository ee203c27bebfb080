"""The hosts of one model: how their engines find each other, and the connections that carry calls and tell who is gone.

Every other host says `Hello` to the first one, at the address that the option `coordinator` gives. Once all are there, the
first host answers `Join` with two more addresses: that of JAX's coordinator, and one where it pushes its calls. Both are new
in every start, so that no process of an earlier start can take part. ZeroMQ's heartbeats close the connection of a host that
stands still.

These addresses take no credentials, as JAX's own do not. They belong on a private network.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from typing import Any, get_args

import jax
import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

import chunkattn
from chunkattn.config import EngineConfig, split_address
from chunkattn.engine.host_calls import HostCall
from chunkattn.errors import ConfigError
from chunkattn.remote.frames import Frames, from_used, to_used
from chunkattn.remote.messages import Checkpoint, Failed

logger = logging.getLogger(__name__)

_HELLO_S = 1.0
"""Seconds between two times that a host says `Hello`."""
_FRESH_S = 3.0
"""Seconds after which a host that said `Hello` counts as gone."""
_CONNECT_S = 10.0
"""Seconds that a host has to connect after `Join`."""
_REPORT_S = 10.0
"""Seconds between two log lines about hosts that are missing."""
_HEARTBEATS = 6
"""Heartbeats within the time after which a host counts as gone."""
_SHARE = 0.75
"""Part of `engine_hang_timeout_s` after which a silent host counts as gone, so that callers hear of it within the limit."""
_START_TIMEOUT_S = 300
_LAST_WORDS_MS = 2000
_OWN_OPTIONS = ("model", "tokenizer", "revision", "chunk_calibration", "host_index")
"""Options that may differ between hosts."""

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


@dataclass(frozen=True)
class Hello:
    """A host that wants to take part.

    Attributes:
        host_index: the host's number.
        traits: what must be equal on all hosts, by name.
    """

    host_index: int
    traits: dict[str, Any]


@dataclass(frozen=True)
class Refused:
    """Answer to a host that cannot take part."""

    reason: str


@dataclass(frozen=True)
class Join:
    """Answer to a host once all hosts are there.

    Attributes:
        coordinator: address of JAX's coordinator.
        calls: address where the host takes its calls.
    """

    coordinator: str
    calls: str


@dataclass(frozen=True)
class End:
    """Notice that the first host ends in order."""


_FRAMES = Frames([Hello, Refused, Join, Failed, End, *get_args(HostCall)], to_used, from_used)


def traits_of(config: EngineConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what must be equal on all hosts of a model, by name.

    Args:
        config: options of the engine.
        checkpoint: the checkpoint to load.
    """
    options = {name: value for name, value in asdict(config).items() if name not in _OWN_OPTIONS}
    model = msgspec.to_builtins(checkpoint.spec, enc_hook=to_used)
    return {
        "chunkattn": chunkattn.__version__,
        "jax": jax.__version__,
        **options,
        "shape of the model": msgspec.json.encode(model).decode(),
        "dtype of the model": checkpoint.dtype,
        "weights of the model": checkpoint.files().sample().hex(),
    }


def difference(own: dict[str, Any], other: dict[str, Any]) -> str | None:
    """Return the first trait that differs between two hosts, in words, or None."""
    for name in own:
        if (there := other.get(name)) != (here := own[name]):
            values = f": {there!r} there, {here!r} on host 0" if len(repr((there, here))) < 120 else ""
            return f"{name} differs{values}; start every host with the same version, options and checkpoint"
    return None


class FirstHost:
    """The connections of the host that schedules. It tells every call to the other hosts.

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
        self._calls: dict[int, Socket] = {}
        self._monitors: dict[int, Socket] = {}
        self._warned: set[str] = set()
        self._joined = False
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
        initialize(self._config, self._coordinator)

    def tell(self, call: HostCall) -> None:
        """Send a call to every other host; see `chunkattn.engine.host_calls.Hosts`."""
        self._send(_FRAMES.encode([call]))

    def _send(self, frame: bytes) -> None:
        for calls in self._calls.values():
            with suppress(zmq.Again):  # that host is gone, as `lost` tells
                calls.send(frame, zmq.NOBLOCK)

    def lost(self) -> str | None:
        """Return why a host that has joined is gone, or None. One thread at a time may ask."""
        if not self._joined:
            return None
        for sender, message in self._received(0):
            if isinstance(message, Failed):
                return f"an engine on another host failed: {message.error_type}: {message.text}"
            if isinstance(message, Hello) and sender:  # a host that waits for the next start, or a wrong `host_index`
                self._warn(f"host {message.host_index} is there already; another process with that host_index waits")
        for index, monitor in self._monitors.items():
            if _has_gone(monitor):
                time.sleep(0.1)  # the host's last words come over another connection
                words = [m for _, m in self._received(0) if isinstance(m, Failed)]
                said = f": {words[0].error_type}: {words[0].text}" if words else ""
                return f"host {index} of {self._config.num_hosts} is gone{said}"
        return None

    def end(self) -> None:
        """Tell the other hosts that this one ends in order, and close the connections."""
        self._send(_FRAMES.encode([End()]))
        self._close_calls(_LAST_WORDS_MS)
        self._hellos.close(linger=0)

    def _wait(self) -> dict[int, bytes]:
        """Wait until all other hosts say `Hello`. Return the identity of each one's connection."""
        found: dict[int, tuple[bytes, float]] = {}
        reported = 0.0
        while True:
            for sender, message in self._received(1000):
                if not isinstance(message, Hello):
                    continue
                fault = difference(self._traits, message.traits)
                if not fault and not 0 < message.host_index < self._config.num_hosts:
                    fault = f"host_index must be 1 to {self._config.num_hosts - 1}, got {message.host_index}"
                if fault:
                    self._warn(f"host {message.host_index} is refused: {fault}")
                    self._hellos.send_multipart([sender, _FRAMES.encode([Refused(fault)])])
                else:
                    found[message.host_index] = sender, time.monotonic()
            now = time.monotonic()
            missing = [
                index for index in range(1, self._config.num_hosts) if index not in found or now - found[index][1] > _FRESH_S
            ]
            if not missing:
                return {index: sender for index, (sender, _) in found.items()}
            if now - reported > _REPORT_S:
                names = ", ".join(map(str, missing))
                logger.info("waiting for host %s of %d at %s", names, self._config.num_hosts, self._config.coordinator)
                reported = now

    def _connect(self, senders: dict[int, bytes]) -> bool:
        """Let the hosts join. Return whether all have connected in time."""
        self._coordinator = f"{_bracketed(self._ip)}:{_free_port(self._ip)}"
        for index, sender in senders.items():
            calls = self._calls[index] = _made(self._context, zmq.PUSH, self._config)
            calls.sndhwm = 0  # the first host waits for results, which bounds the calls in flight
            self._monitors[index] = calls.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            port = calls.bind_to_random_port(_url(self._ip))
            self._hellos.send_multipart([sender, _FRAMES.encode([Join(self._coordinator, _url(self._ip, port))])])
        until = time.monotonic() + _CONNECT_S
        for index, monitor in self._monitors.items():
            if not monitor.poll(max(0, 1000 * (until - time.monotonic()))):
                logger.warning("host %d has not connected within %g s", index, _CONNECT_S)
                return False
            monitor.recv_multipart()
        return True

    def _received(self, timeout_ms: int) -> Iterator[tuple[bytes, Any]]:
        """Yield the messages of other hosts that are there, each with the identity of its connection."""
        while self._hellos.poll(timeout_ms):
            timeout_ms = 0
            sender, *frames = self._hellos.recv_multipart()
            try:
                for frame in frames:
                    for message in _FRAMES.decode(frame):
                        yield sender, message
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
        self._context, self._config, self._traits = context, config, traits_of(config, checkpoint)
        self._hellos = _made(context, zmq.DEALER, config)
        self._hellos.ipv6 = True
        self._hellos.immediate = True  # a `Hello` that waited would come from the past
        host, port = split_address(config.coordinator or "")
        self._hellos.connect(_url(host, port))
        self.calls = _made(context, zmq.PULL, config)
        self.calls.rcvhwm = 0
        self._monitor = self.calls.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._joined = False

    def join(self) -> None:
        """Wait until the first host lets this one join, then start JAX.

        Raises:
            ConfigError: the first host refuses this one.
        """
        config, reported = self._config, 0.0
        hello = _FRAMES.encode([Hello(config.host_index, self._traits)])
        while True:
            with suppress(zmq.Again):  # nobody is there
                self._hellos.send(hello, zmq.NOBLOCK)
            if self._hellos.poll(int(1000 * _HELLO_S)):
                (answer,) = _FRAMES.decode(self._hellos.recv())
                if isinstance(answer, Refused):
                    raise ConfigError(f"host {config.host_index} is refused by host 0: {answer.reason}")
                break
            if time.monotonic() - reported > _REPORT_S:
                logger.info("host %d waits for host 0 at %s", config.host_index, config.coordinator)
                reported = time.monotonic()
        self.calls.connect(answer.calls)
        self._joined = True
        initialize(config, answer.coordinator)

    def receive(self) -> Sequence[HostCall | End]:
        """Return the calls that have arrived, without waiting."""
        try:
            return _FRAMES.decode(self.calls.recv(zmq.NOBLOCK))
        except zmq.Again:
            return []

    def lost(self) -> str | None:
        """Return why the first host is gone after this one has joined, or None. One thread at a time may ask."""
        return "host 0 is gone" if self._joined and _has_gone(self._monitor) else None

    def fail(self, failure: Failed) -> None:
        """Tell the first host why this one ends."""
        with suppress(zmq.Again):
            self._hellos.send(_FRAMES.encode([failure]), zmq.NOBLOCK)

    def end(self) -> None:
        """Close the connections."""
        self.calls.disable_monitor()
        self.calls.close(linger=0)
        self._monitor.close(linger=0)
        self._hellos.close(linger=_LAST_WORDS_MS)


def initialize(config: EngineConfig, coordinator: str) -> None:
    """Start JAX on the devices of all hosts.

    Args:
        config: options of the engine.
        coordinator: address of JAX's coordinator, on the first host.
    """
    jax.distributed.initialize(coordinator, config.num_hosts, config.host_index, initialization_timeout=_START_TIMEOUT_S)


def _made(context: Context, kind: int, config: EngineConfig) -> Socket:
    """Return a socket whose connections end when the other side stands still."""
    made = context.socket(kind)
    limit_ms = int(1000 * _SHARE * config.engine_hang_timeout_s)
    made.heartbeat_timeout = made.heartbeat_ttl = limit_ms
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
    """Return IP address and port of `coordinator`, which must be this host's.

    Raises:
        ConfigError: the name is unknown.
    """
    host, port = split_address(config.coordinator or "")
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]), port
    except OSError as error:
        raise ConfigError(f"coordinator {config.coordinator!r}: {error}; name an address of host 0") from None


def _free_port(ip: str) -> int:
    """Return a port of an IP address that nobody uses."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with closing(socket.socket(family)) as free:
        free.bind((ip, 0))
        return int(free.getsockname()[1])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _url(host: str, port: int | None = None) -> str:
    return f"tcp://{_bracketed(host)}" + ("" if port is None else f":{port}")
