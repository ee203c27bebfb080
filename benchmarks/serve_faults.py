"""Measure how long a server is unavailable when its engine dies or hangs under load, and the answers its clients get.

    python -m benchmarks.serve_faults [--clients 16] [--repeats 5] [--json FILE|-]

`chunkattn serve` runs the demo model with its default options, except that an engine counts as hung after two seconds.
Clients send one request at a time, half of them streams, and retry after an error. The engine's process
alternately gets SIGKILL, and SIGSTOP, after which it no longer answers. The command reports three times: from the signal
until `/health` reports the fault, from there until `/health` is well again and a first answer is right, and the longest
that any request took to get its answer or its error.

Answers must equal the answers from before the faults. The command fails on any error other than 503, and on a request without
answer or error for a minute. (`serve_load` checks that answers are right at all; the tests cover failing steps.)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from benchmarks.serving import PATH, Server, greedy
from chunkattn.terminal.progress import timed
from chunkattn.tools.bench.measure import round_name

WAYS = {"killed": signal.SIGKILL, "hung": signal.SIGSTOP}
HANG_S = 2
TOKENS, ANSWER_S, TICK_S, BETWEEN_S = 64, 60, 0.02, 3


class Load:
    """Clients of one server.

    Attributes:
        seen: number of requests by outcome: "right", "wrong", "503" or another status.
        longest: maximum seconds that a request took.
    """

    def __init__(self, http: httpx.AsyncClient, prompts: list[str]) -> None:
        self.http, self.prompts = http, prompts
        self.expected: dict[str, str] = {}
        self.seen: Counter[str] = Counter()
        self.longest = 0.0

    async def ask(self, prompt: str, *, stream: bool = False) -> str:
        """Send one request and return its outcome. A prompt's first answer is the reference for its later answers."""
        began = time.perf_counter()
        answer = await self.http.post(PATH, json={"prompt": prompt, **greedy(TOKENS), "stream": stream})
        self.longest = max(self.longest, time.perf_counter() - began)
        if answer.status_code != 200:
            return str(answer.status_code)
        if not stream:
            text = answer.json()["choices"][0]["text"]
        else:
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            if "error" in events[-1]:
                return "503" if events[-1]["error"]["code"] == "engine_not_ready" else events[-1]["error"]["message"]
            text = "".join(event["choices"][0]["text"] for event in events)
        return "right" if self.expected.setdefault(prompt, text) == text else "wrong"

    async def call(self, number: int) -> None:
        """Send requests forever."""
        while True:
            ended = await self.ask(self.prompts[number % len(self.prompts)], stream=number % 2 == 1)
            self.seen[ended] += 1
            if ended == "503":
                await asyncio.sleep(0.1)

    async def healthy(self) -> bool:
        """Return whether the server reports that it is healthy."""
        return (await self.http.get("/health")).status_code == 200

    async def until(self, healthy: bool) -> None:
        """Wait until the server's health is `healthy`."""
        while await self.healthy() != healthy:
            await asyncio.sleep(TICK_S)


def engine_pid(server: Server) -> int:
    """Return the process id of a server's engine."""
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return next(int(child) for child in children if b"chunkattn.remote.worker" in Path(f"/proc/{child}/cmdline").read_bytes())


async def fault(server: Server, load: Load, number: signal.Signals) -> dict[str, float]:
    """Send a signal to the busy engine. Return the seconds until the server notices, and from there until it serves again."""
    await asyncio.sleep(BETWEEN_S)
    os.kill(engine_pid(server), number)
    began = time.perf_counter()
    await load.until(healthy=False)
    noticed = time.perf_counter()
    await load.until(healthy=True)
    if (ended := await load.ask(load.prompts[0])) != "right":
        raise RuntimeError(f"the first answer of the new engine: {ended}")
    return {"noticed_s": noticed - began, "served_again_s": time.perf_counter() - noticed}


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    server = await asyncio.to_thread(Server, f"--engine-hang-timeout-s={HANG_S}")
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=ANSWER_S, limits=httpx.Limits()) as http:
            load = Load(http, [f"Where does number {n} live?" for n in range(args.clients)])
            for prompt in load.prompts:
                await load.ask(prompt)
            load.longest = 0.0
            clients = asyncio.gather(*(load.call(n) for n in range(args.clients)))
            faults: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for repeat in range(args.repeats):
                for way, number in WAYS.items():
                    hit = asyncio.create_task(fault(server, load, number))
                    with timed(f"engine {way}, {round_name(repeat + 1, args.repeats)}"):
                        await asyncio.wait({hit, clients}, return_when=asyncio.FIRST_COMPLETED)
                    if clients.done():
                        hit.cancel()
                        await clients  # raises the client's error
                    faults[way].append(await hit)
            clients.cancel()
            await asyncio.gather(clients, return_exceptions=True)
    finally:
        status = await asyncio.to_thread(server.end)
    if unexpected := set(load.seen) - {"right", "503"} or (status != 0 and {f"exit code {status}"}):
        raise RuntimeError(f"unexpected: {unexpected}")
    return {"clients": args.clients, "requests": dict(load.seen), "longest_s": load.longest, "faults": faults}


def show(result: dict[str, Any]) -> None:
    print(f"the demo model, {result['clients']} clients; median and maximum of {len(result['faults']['killed'])}, seconds\n")
    print("engine  noticed after  served again after that")
    for way, faults in result["faults"].items():
        columns = [[found[name] for found in faults] for name in ("noticed_s", "served_again_s")]
        noticed, served = (f"{statistics.median(column):.1f}, {max(column):.1f}" for column in columns)
        print(f"{way:6}  {noticed:>13}  {served:>23}")
    asked = result["requests"]
    print(f"\n{asked['right']} right answers, {asked.get('503', 0)} times 503, nothing else;", end=" ")
    print(f"no request took longer than {result['longest_s']:.1f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5, help="faults of each kind")
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE; - prints it instead of the text")
    args = parser.parse_args()
    result = asyncio.run(measure(args))
    if args.json != "-":
        show(result)
    if args.json:
        text = json.dumps(result, indent=2)
        print(text) if args.json == "-" else Path(args.json).write_text(text + "\n", encoding="utf-8")
