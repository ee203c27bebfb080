"""`Gate`: bounds the connections to a listening socket that have not proved to know the group's secret."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time

import zmq
from zmq.utils.monitor import parse_monitor_message

logger = logging.getLogger(__name__)

HANDSHAKE_MS = 5000
"""Milliseconds within which a connection must pass the handshake."""
PLACES = 64
"""Connections that may be in the handshake at once."""
_POLL_MS = 500
"""Milliseconds after which the thread notices that the context has been destroyed under it."""
_REPORT_S = 60.0
"""Seconds between two log lines about refused connections."""
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED | _REFUSED

Peer = tuple[str, int]
"""IP address and port of the other end of a connection."""


class Gate:
    """A thread that closes the oldest connection of strangers when there are too many, and logs who is refused.

    ZeroMQ bounds the time of a handshake but not the number of handshakes. A flood would take every file descriptor of the
    process. Create the gate before the socket is bound.

    Attributes:
        places: connections that may be open without being a member's.

    Args:
        listening: socket that will be bound.
        name: what the socket is, for log lines.
    """

    def __init__(self, listening: zmq.Socket[bytes], name: str) -> None:
        self.places = PLACES
        self._name = name
        self._listening = listening
        self._members: set[Peer] = set()
        self._open: dict[int, Peer | None] = {}
        self._refused, self._reported = 0, -_REPORT_S
        listening.handshake_ivl = HANDSHAKE_MS
        self._monitor = listening.get_monitor_socket(_EVENTS)
        self._thread = threading.Thread(target=self._watch, name="gate", daemon=True)
        self._thread.start()

    def admit(self, frame: zmq.Frame) -> None:
        """Count the connection of a frame, which has passed the handshake, as a member's."""
        if (peer := _peer(_descriptor(frame))) is not None:
            self._members.add(peer)

    def hang_up(self, frame: zmq.Frame) -> None:
        """Close the connection that a frame came over."""
        fd = _descriptor(frame)
        _hang_up(fd, _peer(fd))

    def close(self) -> None:
        """Stop watching. Call this before the socket is closed."""
        self._listening.disable_monitor()  # ends the thread with MONITOR_STOPPED
        self._thread.join()

    def _watch(self) -> None:
        """Follow the events of the socket until its monitor stops."""
        try:
            while True:
                if not self._monitor.poll(_POLL_MS):
                    continue
                event = parse_monitor_message(self._monitor.recv_multipart())
                kind, fd = event["event"], event["value"]
                if kind == zmq.EVENT_MONITOR_STOPPED:
                    return
                if kind == zmq.EVENT_ACCEPTED:
                    self._open.pop(fd, None)
                    self._open[fd] = _peer(fd)
                    self._bound()
                elif kind == zmq.EVENT_DISCONNECTED:
                    self._open.pop(fd, None)
                elif kind & _REFUSED:
                    self._report()
        except zmq.ZMQError:  # the context ends
            return
        finally:
            self._monitor.close(linger=0)

    def _bound(self) -> None:
        strangers = [fd for fd, peer in self._open.items() if peer not in self._members]
        for fd in strangers[: max(0, len(strangers) - self.places)]:
            _hang_up(fd, self._open.pop(fd))

    def _report(self) -> None:
        self._refused += 1
        if (now := time.monotonic()) - self._reported >= _REPORT_S:
            strangers = [peer for peer in self._open.values() if peer is not None and peer not in self._members]
            last = f", the last from {strangers[-1][0].removeprefix('::ffff:')}" if strangers else ""
            logger.warning("%s: connections refused without the group's secret: %d%s", self._name, self._refused, last)
            self._refused, self._reported = 0, now


def _descriptor(frame: zmq.Frame) -> int:
    """Return the file descriptor of a frame's connection, or -1 if it is unknown."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def _peer(fd: int) -> Peer | None:
    """Return the other end of the connection of a file descriptor, or None if it is closed."""
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            address = connection.getpeername()
            return str(address[0]), int(address[1])
    except (OSError, IndexError, TypeError):
        return None


def _hang_up(fd: int, peer: Peer | None) -> None:
    """Shut a connection down, unless its file descriptor has become another one's. ZeroMQ closes it then."""
    if peer is None:
        return
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            if connection.getpeername()[:2] == peer:
                connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
