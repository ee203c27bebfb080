"""Answers of servers, read while they arrive: token times of streams, and counts of scores."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from chunkattn.tools.load.client import LONGEST_MESSAGE, Client
from chunkattn.tools.load.open_loop import OK, Record


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    def has_text(self) -> bool:
        delta = self.delta or _Delta()
        return bool(self.text or delta.content or delta.reasoning or delta.reasoning_content)


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Scores(msgspec.Struct):
    scores: list[Any] | None = None
    data: list[Any] | None = None
    results: list[Any] | None = None
    usage: _Usage | None = None


class Stream:
    """Server-sent events of a generation, `/v1/completions` or `/v1/chat/completions`.

    Args:
        record: record to write to.
        clock: current time in seconds.
    """

    def __init__(self, record: Record, clock: Callable[[], float]) -> None:
        self._record, self._clock = record, clock
        self._rest, self._other = b"", b""
        self._is_done = False
        self._fault: str | None = None
        self._decoder = msgspec.json.Decoder(_Event)

    def hear(self, piece: bytes) -> None:
        """Take a piece of the stream. All events of one piece have the same time."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())
            elif not line.startswith((b":", b"event:", b"id:", b"retry:")):
                self._other += line

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            event = self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            self._fault = self._fault or f"an event of the stream cannot be read: {error}"
            return
        if event.error is not None:
            self._fault = self._fault or f"in the stream: {event.error}"
        if any(choice.has_text() for choice in event.choices):
            self._record.tokens.append(self._clock())
        if event.usage is not None:
            self._record.prompt_tokens = event.usage.prompt_tokens
            self._record.completion_tokens = event.usage.completion_tokens

    def text(self) -> str:
        """Return the lines that are no events."""
        return (self._other + self._rest).decode(errors="replace")

    def fault(self) -> str | None:
        """Return the first fault of the stream; a stream without its end is one."""
        return self._fault or (None if self._is_done else "the stream ended without [DONE]")


class Scores:
    """Answer of a scoring route.

    Args:
        record: record to write to.
        items: number of scores asked for.
    """

    def __init__(self, record: Record, items: int) -> None:
        self._record, self._items = record, items
        self._body = bytearray()

    def hear(self, piece: bytes) -> None:
        """Take a piece of the body."""
        self._body += piece

    def text(self) -> str:
        """Return the body."""
        return self._body.decode(errors="replace")

    def fault(self) -> str | None:
        """Return a fault if the number of scores differs from the number of items."""
        try:
            answer = msgspec.json.decode(self._body, type=_Scores)
        except msgspec.MsgspecError as error:
            return f"the answer cannot be read: {error}"
        scores = answer.scores or answer.data or answer.results or []
        if answer.usage is not None:
            self._record.prompt_tokens = answer.usage.prompt_tokens
        return None if len(scores) == self._items else f"{len(scores)} scores for {self._items} items"


class Sender:
    """Sends the requests of one workload to a server.

    Args:
        client: client of the server.
        path: route.
        items: number of scores in an answer; None for streams.
        clock: current time in seconds.
    """

    def __init__(self, client: Client, path: str, items: int | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._client, self._path, self._items, self._clock = client, path, items, clock

    async def __call__(self, body: bytes, record: Record) -> None:
        """Send a request, and write status, token times and counts of the answer into the record."""
        answer = Stream(record, self._clock) if self._items is None else Scores(record, self._items)
        try:
            status = await self._client.send(self._path, body, answer.hear)
        except OSError as error:
            record.status, record.message = "connection", str(error) or type(error).__name__
            return
        if status != 200:
            record.status, record.message = str(status), answer.text()[:LONGEST_MESSAGE]
        elif fault := answer.fault():
            record.status, record.message = "wrong answer", fault[:LONGEST_MESSAGE]
        else:
            record.status = OK
