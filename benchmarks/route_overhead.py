"""Measure the CPU time of `chunkattn route` per request, in front of a backend that answers at once.

    python -m benchmarks.route_overhead [--clients 64] [--asked 3000] [--events 32] [--profile FILE]

Client, gateway and backend are processes of their own. Half of the measurement asks for answers of one token, the other half
streams as many events. `--profile` runs the gateway under cProfile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import uvicorn

from benchmarks.serving import PATH
from chunkattn.terminal.progress import timed

_ANSWER = json.dumps({"choices": [{"text": "one"}], "usage": {"completion_tokens": 1}}).encode()
_EVENT = b'data: {"choices": [{"index": 0, "text": "one"}]}\n\n'
_REPORT = b'{"generation": "1", "ready": true, "capacity": 100000}'
_TICKS = os.sysconf("SC_CLK_TCK")


def _backend(port: int, events: int) -> None:
    """Serve the backend until the process ends."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        streams = b'"stream": true' in body
        answer = _ANSWER if scope["path"] == PATH else _REPORT
        headers = [(b"content-type", b"text/event-stream" if streams else b"application/json")]
        if not streams:
            headers.append((b"content-length", b"%d" % len(answer)))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(events if streams else 0):
            await send({"type": "http.response.body", "body": _EVENT, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"" if streams else answer})

    uvicorn.run(app, port=port, log_level="error", access_log=False)


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


async def _ask(port: int, clients: int, asked: int, *, stream: bool) -> None:
    """Send requests over one connection for each client."""
    left = iter(range(asked))

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in left:
            documents = [f"document {(number + n) % 50} " * 40 for n in range(4)]
            chunks = {"prefix": "Read.", "documents": documents, "question": f"What is {number}?"}
            body = json.dumps({"chunks": chunks, "max_tokens": 1, "stream": stream}).encode()
            head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            if not answer.startswith(b"HTTP/1.1 200 "):
                raise RuntimeError(answer.decode())
            if stream:
                await reader.readuntil(b"0\r\n\r\n")
            else:
                await reader.readexactly(len(_ANSWER))
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))


async def _connect(port: int) -> None:
    """Wait until an address answers requests with 200."""
    while True:
        try:
            await _ask(port, 1, 1, stream=False)
            return
        except (OSError, RuntimeError, asyncio.IncompleteReadError):
            await asyncio.sleep(0.1)


def main() -> None:
    """Print the CPU time per request."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--asked", type=int, default=3000)
    parser.add_argument("--events", type=int, default=32)
    parser.add_argument("--port", type=int, default=18790)
    parser.add_argument("--profile", help="file of the gateway's profile")
    parser.add_argument("--backend", action="store_true", help="be the backend")
    args = parser.parse_args()
    if args.backend:
        _backend(args.port, args.events)
        return
    own = [sys.executable, "-m", "benchmarks.route_overhead", "--backend", f"--events={args.events}"]
    profiled = ["-m", "cProfile", "-o", args.profile] if args.profile else []
    route = ["-m", "chunkattn", "route", f"http://127.0.0.1:{args.port}", f"--port={args.port + 1}"]
    backend = subprocess.Popen([*own, f"--port={args.port}"])
    gateway = subprocess.Popen([sys.executable, *profiled, *route], stderr=subprocess.DEVNULL)
    try:
        asyncio.run(_connect(args.port + 1))
        for name, stream in (("one token", False), (f"{args.events} events", True)):
            asked = args.asked // (4 if stream else 1)
            before, began = cpu_s(gateway.pid), time.perf_counter()
            with timed(name):
                asyncio.run(_ask(args.port + 1, args.clients, asked, stream=stream))
            spent, took = cpu_s(gateway.pid) - before, time.perf_counter() - began
            print(f"{name}: {1000 * spent / asked:.2f} CPU-ms per request, {asked / took:.0f} requests/s", flush=True)
    finally:
        gateway.send_signal(signal.SIGINT)
        gateway.wait(60)
        backend.kill()
        backend.wait()


if __name__ == "__main__":
    main()
