"""Measure the cost of each route's worst requests to other clients: gaps between tokens of streams, and latency of `/health`.

    python -m benchmarks.serve_attacks [--streams 16] [--only NAME] [--json FILE|-] [-- OPTION...]
    python -m benchmarks.serve_attacks --clients 12 [--seconds 20] [--streams 2] ...
    python -m benchmarks.serve_attacks --gateway [--clients 12] ...

`chunkattn serve` runs the demo model with its default options, or with the options after `--`. While the streams run and
`/health` is requested every 100 ms without waiting for the last answer, each request is sent by itself and given 30
seconds. A gap is the time between two events of a stream. The target: no gap beyond `max_decode_gap_s` + 1 s, and `/health`
within 250 ms at the 99th percentile and 1.5 s at most.

With `--clients`, that many clients under one API key repeat a request for some seconds, in a process of their own. They
read every answer, or hang up as soon as they have sent the body. The streams and a bystander use another key. The bystander
asks again and again, on a new connection each time, for one token and then for a document that it has stored. The table has
its median and longest time for the token, its longest time for the document, and the growth of the server process in MiB and
its CPU seconds. The target: the bystander's longest times are at most three times their quiet medians plus 1 s, and the
process grows by at most 512 MiB. The command fails if a row misses a target.

With `--gateway`, all of them ask a gateway in front of the server; memory and CPU seconds are those of the gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import itertools
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.attack_bodies import IDLING, STORED, WORDS, attacks, floods
from benchmarks.attack_shapes import numbered
from benchmarks.serving import PATH, Server, greedy

ATTACK_S, HEALTH_S, CALM_S = 30.0, 0.1, 1.0
BYSTANDER_S, MEMORY_S = 0.3, 0.05
GAP_S, HEALTH_P99_S, MEMORY_MIB = 1.5, 0.25, 512.0
"""Targets of the attacks."""
ATTACKER, BYSTANDER = "attacker", "bystander"
"""API keys, which are also their names."""
DOCUMENTS = 100
"""Number of documents that the attacker has stored."""
IDLE = 2100
"""Idle connections, more than the server's default limit."""


class Watch:
    """Endless streams, polls of the server's health, and a bystander that asks for one token again and again.

    Attributes:
        gap: longest time in seconds between two events of a stream since `reset`.
        health: seconds of each answer of `/health` since `reset`.
        asked: seconds of each of the bystander's requests for a token since `reset`.
        fetched: seconds of each of its requests for a document since `reset`.
        memory: largest resident memory of the server process in MiB since `reset`.
    """

    def __init__(self, client: httpx.AsyncClient, streams: int, pid: int) -> None:
        self._client, self._pid = client, pid
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # a new connection for each request
        self._stranger = httpx.AsyncClient(
            base_url=client.base_url, timeout=client.timeout, limits=limits, headers=client.headers
        )
        self._tasks = [asyncio.create_task(self._stream(n)) for n in range(streams)]
        self._tasks += [asyncio.create_task(watch) for watch in (self._poll(), self._stand_by(), self._weigh())]
        self._asked: set[asyncio.Task[None]] = set()
        self._last: dict[int, float] = {}
        self.reset()

    def reset(self) -> None:
        """Forget the measurements so far."""
        self.gap, self.health, self.asked, self.fetched = 0.0, list[float](), list[float](), list[float]()
        self.memory = resident(self._pid)

    async def _stand_by(self) -> None:
        body = {"prompt": "Where does Zenuso live?", **greedy(1)}
        while True:
            self.asked.append(await self._timed("POST", PATH, json=body))
            self.fetched.append(await self._timed("GET", f"{STORED}/0"))
            await asyncio.sleep(BYSTANDER_S)

    async def _timed(self, method: str, path: str, **options: Any) -> float:
        """Return the seconds of a request; infinity for one that fails."""
        began = time.perf_counter()
        try:
            (await self._stranger.request(method, path, **options)).raise_for_status()
        except httpx.HTTPError:
            return float("inf")
        return time.perf_counter() - began

    async def _weigh(self) -> None:
        while True:
            self.memory = max(self.memory, resident(self._pid))
            await asyncio.sleep(MEMORY_S)

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
        await self._stranger.aclose()


def send(url: httpx.URL, path: str, body: bytes) -> str:
    """Send one request and discard its answer. Return the status, or the way the request ended."""
    connection = http.client.HTTPConnection(url.host, url.port or 80, timeout=ATTACK_S)
    try:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ATTACKER}", **coding_of(body)}
        connection.request("POST", path, body, headers)
        answer, until = connection.getresponse(), time.monotonic() + ATTACK_S
        while answer.read(1 << 20):
            if time.monotonic() > until:
                return f"{answer.status}, cut off"
        return str(answer.status)
    except OSError as error:
        return type(error).__name__
    finally:
        connection.close()


def coding_of(body: bytes) -> dict[str, str]:
    """Return the header of a compressed body; none for another."""
    coding = {b"\x1f\x8b": "gzip", b"\x28\xb5": "zstd"}.get(body[:2])
    return {} if coding is None else {"Content-Encoding": coding}


def idle(url: httpx.URL, seconds: float) -> str:
    """Open connections that send nothing for some seconds. Return how many there were."""
    with contextlib.ExitStack() as kept, contextlib.suppress(OSError):
        for _ in range(IDLE):
            kept.enter_context(socket.create_connection((url.host, url.port or 80), timeout=ATTACK_S))
        time.sleep(seconds)
    return f"{IDLE} idle"


def store(url: str, key: str, count: int) -> None:
    """Store documents 0, 1, ... under a key."""
    documents = [{"id": f"{n}", "text": f"{n} {WORDS * 10}"} for n in range(count)]
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(url + STORED, json={"documents": documents}, headers=headers, timeout=300)
    if answer.status_code != 200:
        raise RuntimeError(answer.text)


def wait_until_ready(url: str) -> None:
    """Wait for a gateway to find its replica ready."""
    until = time.monotonic() + ATTACK_S
    while httpx.get(f"{url}/health").status_code != 200:
        if time.monotonic() > until:
            raise TimeoutError(f"{url} is not ready")
        time.sleep(0.1)


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> float:
    """Return the resident memory of a process in MiB; NaN where `/proc` does not tell it."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return float("nan")
    return pages * 4096 / (1 << 20)


def flood(url: httpx.URL, path: str, body: bytes, clients: int, hangs_up: bool, seconds: float, counts: Any) -> None:
    """Repeat one request from many clients. Runs in a process of its own.

    Args:
        url: address of the server.
        path: route.
        body: body of every request, see `numbered`; an empty one is a GET.
        clients: number of clients.
        hangs_up: whether the clients close their connections as soon as they have sent the body.
        seconds: time in seconds after which no request begins.
        counts: counts the statuses of the answers, and "left" and "failed" requests.
    """
    coding = "".join(f"{name}: {value}\r\n" for name, value in coding_of(body).items())
    method = "POST" if body else "GET"
    head = f"{method} {path} HTTP/1.1\r\nHost: {url.host}\r\nAuthorization: Bearer {ATTACKER}\r\nConnection: close\r\n{coding}"
    request = f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    until, lock, numbers = time.monotonic() + seconds, threading.Lock(), itertools.count()

    def attack() -> None:
        while time.monotonic() < until:
            ended = "failed"
            with contextlib.suppress(OSError), socket.create_connection((url.host, url.port), timeout=ATTACK_S) as connection:
                connection.sendall(numbered(request, next(numbers)))
                ended = "left"
                if not hangs_up:
                    ended = connection.recv(1 << 16).split()[1].decode()
                    while connection.recv(1 << 20):
                        pass
            with lock:
                counts[ended] = counts.get(ended, 0) + 1
            time.sleep(0.01)

    threads = [threading.Thread(target=attack, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until + ATTACK_S - time.monotonic()))


def flooded(url: str, path: str, body: bytes, clients: int, hangs_up: bool, seconds: float) -> str:
    """Run `flood` in a process and return the counts of the ends of its requests."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        counts = manager.dict()
        attackers = context.Process(target=flood, args=(httpx.URL(url), path, body, clients, hangs_up, seconds, counts))
        attackers.start()
        attackers.join(seconds + 2 * ATTACK_S)
        attackers.kill()
        return " ".join(f"{count}x{end}" for end, count in sorted(counts.items()))


async def measure(url: str, pid: int, args: argparse.Namespace, show: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Run every attack and return their rows."""
    rows = []
    limits, headers = httpx.Limits(max_connections=None), {"Authorization": f"Bearer {BYSTANDER}"}
    chosen = floods() if args.clients else ((name, path, body, False) for name, path, body in attacks())
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, headers=headers) as client:
        watch = Watch(client, args.streams, pid)
        await asyncio.sleep(3 * CALM_S)
        for name, path, body, hangs_up in [("nothing", "", b"", False), *chosen]:
            if name != "nothing" and args.only and args.only not in name:
                continue
            data = body if isinstance(body, bytes) else await asyncio.to_thread(lambda b=body: json.dumps(b).encode())
            await asyncio.sleep(CALM_S)
            watch.reset()
            before, began, cpu, status = watch.memory, time.perf_counter(), cpu_s(pid), "-"
            if name == IDLING:
                status = await asyncio.to_thread(idle, httpx.URL(url), min(args.seconds, ATTACK_S))
            elif path and args.clients:
                status = await asyncio.to_thread(flooded, url, path, data, args.clients, hangs_up, args.seconds)
            elif path:
                status = await asyncio.to_thread(send, httpx.URL(url), path, data)
            seconds = time.perf_counter() - began
            await asyncio.sleep(10 * CALM_S if name == "nothing" else CALM_S)
            row = {
                "request": name,
                "route": path,
                "answer": status,
                "seconds": seconds,
                "gap": watch.gap,
                "health_p99": float(np.percentile(watch.health, 99)),
                "health_max": max(watch.health),
                "bystander_median": float(np.median(watch.asked or [float("nan")])),
                "bystander_max": max(watch.asked, default=float("nan")),
                "fetch_median": float(np.median(watch.fetched or [float("nan")])),
                "fetch_max": max(watch.fetched, default=float("nan")),
                "memory_mib": watch.memory - before,
                "cpu_s": cpu_s(pid) - cpu,
            }
            row["exceeded"] = exceeded(row, rows[0], bool(args.clients)) if rows else []
            show(row)
            rows.append(row)
        await watch.close()
    return rows


def exceeded(row: dict[str, Any], quiet: dict[str, Any], many: bool) -> list[str]:
    """Return the names of the targets that a row misses.

    Args:
        row: figures of an attack.
        quiet: figures without an attack.
        many: whether many clients attack. A single request may fill the engine's sequences, for which the bystander waits.
    """
    limits = {"gap": GAP_S, "health_p99": HEALTH_P99_S, "memory_mib": MEMORY_MIB}
    if many or row["request"] == IDLING:
        limits["bystander_max"] = 3 * quiet["bystander_median"] + 1
        limits["fetch_max"] = 3 * quiet["fetch_median"] + 1
    return [name for name, most in limits.items() if not row[name] <= most]


def show(row: dict[str, Any]) -> None:
    """Print a line of the table."""
    print(
        f"{row['request']:28} {row['seconds']:7.2f} {row['gap']:7.2f} "
        f"{1000 * row['health_p99']:8.0f} {1000 * row['health_max']:8.0f} {1000 * row['bystander_median']:8.0f} "
        f"{1000 * row['bystander_max']:8.0f} {1000 * row['fetch_max']:8.0f} {row['memory_mib']:6.0f} {row['cpu_s']:6.2f}  "
        f"{row['answer']}"
        f"{'  EXCEEDS ' if row['exceeded'] else ''}{', '.join(row['exceeded'])}",
        flush=True,
    )


def main() -> None:
    """Run, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--clients", type=int, default=0, help="clients under one key that repeat each request at once")
    parser.add_argument("--seconds", type=float, default=20.0, help="time of each attack of many clients")
    parser.add_argument("--gateway", action="store_true", help="attack a gateway in front of the server")
    parser.add_argument("--only", help="run only requests whose name contains this")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("options", nargs="*", help="options of the server, after --")
    args = parser.parse_args()
    with tempfile.NamedTemporaryFile("w", suffix=".keys", encoding="utf-8") as keys:
        keys.write(f"{ATTACKER}:{ATTACKER}\n{BYSTANDER}:{BYSTANDER}\n")
        keys.flush()
        servers = [Server("--api-key-file", keys.name, "--report-documents", *args.options)]
        try:
            if args.gateway:
                servers.append(Server(servers[0].url, "--api-key-file", keys.name, "--replica-key", ATTACKER, command="route"))
            front = servers[-1]
            wait_until_ready(front.url)
            store(front.url, ATTACKER, DOCUMENTS)
            store(front.url, BYSTANDER, 1)
            heads = f"{'s':>7} {'gap s':>7} {'p99 ms':>8} {'max ms':>8} {'other ms':>8} {'max ms':>8} {'GET ms':>8}"
            heads += f" {'MiB':>6} {'CPU s':>6}"
            with contextlib.redirect_stdout(sys.stderr) if args.json == "-" else contextlib.nullcontext():
                print(f"{'request':28} {heads}  answer", flush=True)
                rows = asyncio.run(measure(front.url, front.process.pid, args, show))
                for fault in [fault for server in servers for fault in server.faults()]:
                    print(fault)
        finally:
            for server in reversed(servers):
                server.end()
    if args.json:
        report = json.dumps(rows, indent=1)
        print(report) if args.json == "-" else Path(args.json).write_text(report, encoding="utf-8")
    if any(row["exceeded"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
