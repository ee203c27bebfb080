"""`StreamTail`: the end of a stream of events on its way to a client."""

from __future__ import annotations

import re

from chunkattn.web.error_events import DONE, error_events
from chunkattn.web.errors import ApiError

_KEPT = 256
"""Bytes that hold the head of any event: its name, its type and its number."""
_HEAD = re.compile(rb'(?:\A|\n)event: (\S+)\ndata: \{"type": "[^"]+"(?:, "sequence_number": (\d+))?[,}]')
_LAST = frozenset((b"message_stop", b"response.completed", b"response.incomplete", b"response.failed", b"error"))
"""Names of the events that end a stream of named events."""
_DONE = DONE.encode()


class StreamTail:
    """End of a stream so far.

    Attributes:
        is_whole: whether the last event of the stream was sent.
        next_number: number of the event that would come next, in a stream of `/v1/responses`.
    """

    def __init__(self) -> None:
        self.is_whole, self.next_number = False, 0
        self._end, self._name = b"", b""

    def add(self, body: bytes) -> None:
        """Note more of the stream."""
        text = self._end + body
        for head in _HEAD.finditer(text):
            self._name = head[1]
            if head[2] is not None:
                self.next_number = int(head[2]) + 1
        self._end = text[-_KEPT:]
        self.is_whole = text.endswith(_DONE) or (self._name in _LAST and text.endswith(b"\n\n"))

    def ending(self, error: ApiError, path: str, request_id: str) -> bytes:
        """Return what ends the stream with an error: nothing behind its last event.

        Args:
            error: the error.
            path: path of the request.
            request_id: id of the request.
        """
        if self.is_whole:
            return b""
        is_open = bool(self._end) and not self._end.endswith(b"\n\n")
        return b"\n\n" * is_open + error_events(error, path, request_id, self.next_number).encode()
