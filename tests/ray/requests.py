"""Requests to a service, and what becomes of many of them while a process dies."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.ray.cluster import Processes

KEY = "anna-secret-key-of-32-characters"
LONGEST_S = 90
PAUSE_S = 0.2
"""Seconds between an answer and a client's next question, in which what starts again gets its share of two processors."""


@dataclass
class Answer:
    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Return the data of the events of a stream; `[DONE]` as it is."""
        data = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [d if d == "[DONE]" else json.loads(d) for d in data]

    @property
    def text(self) -> str:
        """Return the text of a completion, streamed or not."""
        parts = [self.json] if self.headers["Content-Type"].startswith("application/json") else self.events[:-1]
        return "".join(c["text"] for p in parts for c in p["choices"])


@dataclass
class Service:
    url: str
    processes: Processes
    key: str | None = KEY

    def run(self, work: Callable[[aiohttp.ClientSession], Awaitable[Any]]) -> Any:
        """Run a coroutine with a session."""

        async def main() -> Any:
            headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
            connector = aiohttp.TCPConnector(limit=0)
            limits = {"max_line_size": 1 << 17, "max_field_size": 1 << 17}
            timeout = aiohttp.ClientTimeout(total=LONGEST_S)
            async with aiohttp.ClientSession(
                self.url, headers=headers, connector=connector, timeout=timeout, **limits
            ) as session:
                return await work(session)

        return asyncio.run(main())

    def ask(self, path: str, body: Any = None, method: str | None = None, **options: Any) -> Answer:
        """Send one request. `body` is JSON, or bytes as they are."""

        async def one(session: aiohttp.ClientSession) -> Answer:
            return await ask(session, path, body, method, **options)

        return self.run(one)


async def ask(session: aiohttp.ClientSession, path: str, body: Any = None, method: str | None = None, **options: Any) -> Answer:
    given = {"json": body} if not isinstance(body, bytes) else {"data": body}
    headers = {"Content-Type": "application/json"} if isinstance(body, bytes) else {}
    headers |= options.pop("headers", {})
    method = method or ("GET" if body is None else "POST")
    async with session.request(method, path, headers=headers, **(given if body is not None else {}), **options) as answer:
        return Answer(answer.status, answer.headers, await answer.read())


@dataclass
class Load:
    """Clients that ask one question after the other until they are told to stop.

    Attributes:
        outcomes: number of requests by outcome: `complete`, `error event`, `503` and other statuses, `closed`, and
            `500 of HAProxy`.
        chunks: chunks of some of the requests, whose answers are not compared; they name stored documents.
        refused: ends of the answers that are errors.
        wrong: answers that differ from the expected ones, and streams that ended without a sign.
    """

    expected: dict[str, str]
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    refused: list[bytes] = field(default_factory=list)
    stopped: bool = False
    chunks: dict[str, Any] | None = None

    async def client(self, session: aiohttp.ClientSession, seed: int) -> None:
        choices = random.Random(seed)
        while not self.stopped:
            prompt = choices.choice(list(self.expected))
            stream = choices.random() < 0.7
            asked: dict[str, Any] = {"prompt": prompt}
            if by_id := self.chunks is not None and choices.random() < 0.1:
                asked, stream = {"chunks": self.chunks}, False
            body = asked | {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": stream}
            try:
                answer = await ask(session, "/v1/completions", body)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, aiohttp.ClientOSError):
                self.outcomes["closed"] += 1
                await asyncio.sleep(0.1)
                continue
            self.note(None if by_id else prompt, stream, answer)
            await asyncio.sleep(PAUSE_S)

    def note(self, prompt: str | None, stream: bool, answer: Answer) -> None:
        if answer.status != 200 or b'"error"' in answer.body:
            self.refused.append(answer.body[-300:])
        if answer.status == 500 and answer.headers["Content-Type"] == "text/plain":
            self.outcomes["500 of HAProxy"] += 1
        elif answer.status != 200:
            assert answer.json["error"]["message"], answer
            self.outcomes[str(answer.status)] += 1
        elif not stream:
            self.outcomes["complete"] += 1
            if prompt is not None and answer.text != self.expected[prompt]:
                self.wrong.append(answer.text)
        elif not answer.events or answer.events[-1] != "[DONE]":
            self.wrong.append(f"a stream ended without a sign: {answer.body[-200:]!r}")
        elif any("error" in e for e in answer.events[:-1]):
            self.outcomes["error event"] += 1
        else:
            self.outcomes["complete"] += 1
            if answer.text != self.expected[prompt or ""]:
                self.wrong.append(answer.text)
