"""A lightweight client and a server in a process of its own, shared by the server benchmarks."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx

from chunkattn.tools.load.server import Server as Server

PATH = "/v1/completions"


def greedy(tokens: int) -> dict[str, Any]:
    """Return the options for exactly `tokens` greedy tokens, valid in Python and HTTP."""
    return {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}


class Job(NamedTuple):
    """A request: text, and the number of tokens to make."""

    prompt: str
    tokens: int


class Connection:
    """One persistent HTTP/1.1 connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def _send(self, job: Job, **options: object) -> str:
        """Send a request and return the head of its answer, which must be a 200."""
        body = json.dumps({"prompt": job.prompt, **greedy(job.tokens), **options}).encode()
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.writer.write(head.encode() + body)
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        if not head.startswith("http/1.1 200 "):
            raise RuntimeError(f"the server answered {head.splitlines()[0]!r}")
        return head

    async def ask(self, job: Job) -> int:
        """Send one request and return its number of tokens."""
        head = await self._send(job)
        answer = json.loads(await self.reader.readexactly(int(re.findall(r"content-length: (\d+)", head)[0])))
        return answer["usage"]["completion_tokens"]

    async def first_token(self, job: Job) -> float:
        """Send one streamed request and return the seconds until the event of its first token."""
        began, first, line = time.perf_counter(), math.nan, b""
        await self._send(job, stream=True)
        while line != b"0\r\n":  # the end of a chunked body
            line = await self.reader.readline()
            if not line or line.startswith(b'data: {"error"'):
                raise RuntimeError(f"the stream broke off: {line.decode() or 'the connection was closed'}")
            if math.isnan(first) and line.startswith(b"data: {"):
                first = time.perf_counter() - began
        await self.reader.readline()
        return first


@asynccontextmanager
async def connected(url: httpx.URL, count: int) -> AsyncIterator[list[Connection]]:
    """Open `count` connections."""
    connections = [Connection(*await asyncio.open_connection(url.host, url.port)) for _ in range(count)]
    try:
        yield connections
    finally:
        for connection in connections:
            connection.writer.close()
