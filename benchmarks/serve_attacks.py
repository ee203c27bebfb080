"""Measure the cost of each route's worst requests to other clients: gaps between tokens of streams, and latency of `/health`.

    python -m benchmarks.serve_attacks [--streams 16] [--only NAME] [--json FILE|-] [-- OPTION...]

`chunkattn serve` runs the demo model with its default options, or with the options after `--`. While 16 streams run and
`/health` is requested every 100 ms without waiting for the last answer, each request is sent by itself and given 30
seconds. A gap is the time between two events of a stream. The target: no gap beyond `max_decode_gap_s` + 1 s, and `/health`
within 250 ms at the 99th percentile and 1.5 s at most.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.serving import PATH, Server, greedy

ATTACK_S, HEALTH_S, CALM_S = 30.0, 0.1, 1.0
BODY = 7 << 20
"""Bytes of a large body; the server's default limit is 8 MiB."""
WORDS = "Zenuso lives in Kirora and works as a baker. "

Body = dict[str, Any] | bytes


def attacks() -> Iterator[tuple[str, str, Body]]:
    """Yield name, route and body of every attack."""
    text = WORDS * (BODY // len(WORDS))
    question = {"prefix": "Read.", "question": "Who?"}
    yield "empty documents", PATH, {"chunks": {**question, "documents": [""] * (BODY // 4)}, "max_tokens": 1}
    yield "separators", PATH, {"prompt": " # # " * (BODY // 5), "chunk_aware": True, "max_tokens": 1}
    yield "empty documents, inspected", "/inspect", {"chunks": {**question, "documents": [""] * (BODY // 4)}}
    yield "many documents", PATH, {"chunks": {**question, "documents": ["A b."] * 4000}, "max_tokens": 1}
    yield "a long prompt", PATH, {"prompt": text, "max_tokens": 1}
    yield "stop strings", PATH, {"prompt": "a", "stop": ["ab"] * (BODY // 6)}
    yield "stop tokens", PATH, {"prompt": "a", "stop_token_ids": [5] * (BODY // 3)}
    yield "a long salt", PATH, {"prompt": "a", "cache_salt": "s" * BODY}
    yield "biases", PATH, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(500_000)}}
    yield "all prompts admitted", PATH, {"prompt": ["Where does Zenuso live?"] * 128, "max_tokens": 200, "ignore_eos": True}
    yield "too many prompts", PATH, {"prompt": ["a"] * 100_000, "max_tokens": 1}
    yield "samples", PATH, {"prompt": "a", "n": 64, "max_tokens": 400, "ignore_eos": True, "seed": 1}
    yield "samples ahead of all", PATH, {"prompt": "a", "n": 64, "max_tokens": 400, "priority": -1}
    yield "streamed samples, logprobs", PATH, {"prompt": ["a"] * 8, "n": 8, "logprobs": 20, "stream": True, **greedy(300)}
    yield "prompt logprobs", PATH, {"prompt": WORDS * 30, "echo": True, "logprobs": 20, "max_tokens": 1}
    options = {"top_p": 0.9, "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "logit_bias": {"3": 1}, "logprobs": 5}
    yield "every sampler", PATH, {"prompt": WORDS * 20, "n": 4, "max_tokens": 50, **options}
    score = {"query": [5, 6], "items": [[7]] * 10_000, "label_token_ids": [3, 4]}
    yield "items", "/v1/score", score
    yield "items, longer", "/v1/score", {**score, "query": list(range(200)), "items": [list(range(100))] * 5_000}
    yield "items times queries", "/v1/score", {**score, "query": [[5]] * 1024}
    yield "items times labels", "/v1/score", {**score, "label_token_ids": list(range(700)), "return_logprobs": True}
    yield "items first", "/v1/score", {**score, "query": list(range(400)), "item_first": True}
    yield "a dense mask", "/v1/score", {**score, "items": [list(range(50))] * 160, "algorithm": "packed_dense"}
    yield "labels", "/v1/score", {**score, "items": [[7]], "label_token_ids": [3] * (BODY // 3)}
    yield "reranking", "/v1/rerank", {"query": "a baker", "documents": [WORDS * 3] * 10_000}
    yield "documents", "/v1/cache/documents", {"documents": [f"{n} {WORDS}" for n in range(5_000)], "pin": True}
    yield "tokenizing", "/tokenize", {"prompt": text, "return_token_strs": True}
    yield "detokenizing", "/detokenize", {"tokens": [100] * (BODY // 5)}
    yield "messages", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 150_000}
    yield "a broken body", PATH, b'{"prompt": "' + b"a" * BODY
    yield "a body of another shape", PATH, {"prompt": "a", "stop": [[]] * (BODY // 4)}


class Watch:
    """Endless streams, and polls of the server's health.

    Attributes:
        gap: longest time in seconds between two events of a stream since `reset`.
        health: seconds of each answer of `/health` since `reset`.
    """

    def __init__(self, client: httpx.AsyncClient, streams: int) -> None:
        self._client = client
        self._tasks = [asyncio.create_task(self._stream(n)) for n in range(streams)]
        self._tasks.append(asyncio.create_task(self._poll()))
        self._asked: set[asyncio.Task[None]] = set()
        self._last: dict[int, float] = {}
        self.reset()

    def reset(self) -> None:
        """Forget the measurements so far."""
        self.gap, self.health = 0.0, list[float]()

    async def _stream(self, number: int) -> None:
        body = {"prompt": f"Question {number}. {WORDS}", "stream": True, **greedy(400), "ignore_eos": True}
        while True:
            try:
                async with self._client.stream("POST", PATH, json=body) as answer:
                    last = None
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            now = time.perf_counter()
                            self.gap = max(self.gap, now - last) if last is not None else self.gap
                            last = now
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.05)

    async def _poll(self) -> None:
        while True:
            asked = asyncio.create_task(self._ask())
            self._asked.add(asked)
            asked.add_done_callback(self._asked.discard)
            await asyncio.sleep(HEALTH_S)

    async def _ask(self) -> None:
        began = time.perf_counter()
        with contextlib.suppress(httpx.HTTPError):
            await self._client.get("/health")
        self.health.append(time.perf_counter() - began)

    async def close(self) -> None:
        """End the streams."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._asked, return_exceptions=True)


def send(url: httpx.URL, path: str, body: bytes) -> str:
    """Send one request and discard its answer. Return the status, or the way the request ended."""
    connection = http.client.HTTPConnection(url.host, url.port or 80, timeout=ATTACK_S)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer, until = connection.getresponse(), time.monotonic() + ATTACK_S
        while answer.read(1 << 20):
            if time.monotonic() > until:
                return f"{answer.status}, cut off"
        return str(answer.status)
    except OSError as error:
        return type(error).__name__
    finally:
        connection.close()


async def measure(url: str, streams: int, only: str | None, show: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Run every attack and return their rows."""
    rows = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        watch = Watch(client, streams)
        await asyncio.sleep(3 * CALM_S)
        for name, path, body in [("nothing", "", b""), *attacks()]:
            if only and only not in name:
                continue
            data = body if isinstance(body, bytes) else await asyncio.to_thread(lambda b=body: json.dumps(b).encode())
            await asyncio.sleep(CALM_S)
            watch.reset()
            began = time.perf_counter()
            status = await asyncio.to_thread(send, httpx.URL(url), path, data) if path else "-"
            seconds = time.perf_counter() - began
            await asyncio.sleep(CALM_S if path else 5 * CALM_S)
            row = {
                "request": name,
                "route": path,
                "answer": status,
                "seconds": seconds,
                "gap": watch.gap,
                "health_p99": float(np.percentile(watch.health, 99)),
                "health_max": max(watch.health),
            }
            show(row)
            rows.append(row)
        await watch.close()
    return rows


def show(row: dict[str, Any]) -> None:
    """Print a line of the table."""
    print(
        f"{row['request']:28} {row['answer']:>14} {row['seconds']:7.2f} {row['gap']:7.2f} "
        f"{1000 * row['health_p99']:8.0f} {1000 * row['health_max']:8.0f}",
        flush=True,
    )


def main() -> None:
    """Run, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--only", help="run only requests whose name contains this")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("options", nargs="*", help="options of the server, after --")
    args = parser.parse_args()
    server = Server(*args.options)
    try:
        print(f"{'request':28} {'answer':>14} {'s':>7} {'gap s':>7} {'p99 ms':>8} {'max ms':>8}")
        rows = asyncio.run(measure(server.url, args.streams, args.only, show))
        for fault in server.faults():
            print(fault)
    finally:
        server.end()
    if args.json:
        report = json.dumps(rows, indent=1)
        print(report) if args.json == "-" else Path(args.json).write_text(report, encoding="utf-8")


if __name__ == "__main__":
    main()
