"""Load the engine with many scoring callers and check errors, answers, memory and streams.

    python -m benchmarks.score_load [--callers 8 32] [--minutes 10] [--aborts] [--stream] [--json FILE|-]

Callers of one `AsyncLLM` on the demo model (float32) send requests of 3, 30 and 500 items, one at a time. Every other
request has a salt of its own and therefore no cached query. All answers are compared with `LLM`'s by `serial`. With
`--aborts`, a third of the requests is abandoned at a random moment, by cancelling the task or by the request's timeout.
With `--stream`, another caller generates text meanwhile. The command fails on any error, any wrong answer, any page still
held at the end, and more memory at the end than in the middle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from chunkattn import LLM, SamplingParams
from chunkattn.async_llm import AsyncLLM
from chunkattn.errors import DeadlineExceededError
from chunkattn.terminal.progress import say, timed
from chunkattn.tools.bench.measure import resident_bytes

SIZES = {3: 0.5, 30: 0.35, 500: 0.15}
"""Shares of the requests by number of items."""
TOLERANCE = 1e-5
"""Tolerance of scores, relative to a request's largest score."""
ABORTED = 1 / 3
GROWTH = 1.05
"""Largest ratio of memory at the end to memory in the middle that counts as noise."""
SETTLED = 120
"""Minimum seconds of a run with meaningful memory growth: caches still fill up in shorter runs."""
LABELS = [5, 6]


@dataclass
class Job:
    """A request with its right answer."""

    query: list[int]
    items: list[list[int]]
    scores: np.ndarray

    def is_right(self, scores: list[list[float]]) -> bool:
        """Return whether the scores match the right answer."""
        return bool(np.abs(np.asarray(scores) - self.scores).max() <= TOLERANCE * self.scores.max())


@dataclass
class Load:
    """Observations of one run.

    Attributes:
        latencies: seconds of each finished request, by number of items.
        gaps: seconds between outputs of the stream.
        errors: counts by message.
        memory: bytes of the engine's process and of this process, where known.
        aborted: number of abandoned requests.
    """

    latencies: dict[int, list[float]] = field(default_factory=lambda: {size: [] for size in SIZES})
    gaps: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[int | None, int | None]] = field(default_factory=list)
    aborted: int = 0

    def typical(self, size: int) -> float:
        """Return the median latency in seconds, or 0.1 before the first answer."""
        return float(np.median(self.latencies[size])) if self.latencies[size] else 0.1


def make_jobs(variants: int, options: dict[str, Any]) -> dict[int, list[Job]]:
    """Make requests of every size and answer them one item at a time."""
    rng, llm = np.random.default_rng(0), LLM(dtype="float32", **options)
    vocab = llm.limits.vocab_size
    jobs: dict[int, list[Job]] = {size: [] for size in SIZES}
    for size in [size for size in SIZES for _ in range(variants)]:
        query = rng.integers(0, vocab, rng.integers(10, 120)).tolist()
        items = [rng.integers(0, vocab, rng.integers(0, 21)).tolist() for _ in range(size)]
        answer = llm.score(query, items, label_token_ids=LABELS, algorithm="serial", use_tqdm=False)
        jobs[size].append(Job(query, items, np.asarray(answer.scores)))
    return jobs


async def ask(llm: AsyncLLM, job: Job, load: Load, salt: str | None, timeout: float | None = None) -> None:
    """Send one request, time it and check its answer."""
    llm.frontend.scores.results.clear()  # the same items again are work again
    began = time.perf_counter()
    output = await llm.score(job.query, job.items, label_token_ids=LABELS, cache_salt=salt, timeout=timeout)
    load.latencies[len(job.items)].append(time.perf_counter() - began)
    if not job.is_right(output.scores):
        load.errors[f"a wrong answer by {output.algorithm}"] += 1


async def call(llm: AsyncLLM, jobs: dict[int, list[Job]], load: Load, until: float, aborts: bool, rng: random.Random) -> None:
    """Send request after request, as one caller."""
    while time.perf_counter() < until:
        (size,) = rng.choices(list(SIZES), list(SIZES.values()))
        job, salt = rng.choice(jobs[size]), rng.choice([None, f"{rng.random()}"])
        patience = rng.uniform(1e-3, load.typical(size)) if aborts and rng.random() < ABORTED else None
        cancelled = patience is not None and rng.random() < 0.5
        try:
            async with asyncio.timeout(patience if cancelled else None):
                await ask(llm, job, load, salt, None if cancelled else patience)
        except (TimeoutError, DeadlineExceededError):
            load.aborted += 1
        except Exception as error:  # every error is counted
            load.errors[f"{type(error).__name__}: {error}"] += 1


async def stream(llm: AsyncLLM, load: Load, until: float) -> None:
    """Generate text and record the gaps between outputs."""
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    while time.perf_counter() < until:
        last = None
        async with aclosing(llm.generate("Read the documents and answer the question.", params)) as outputs:
            async for _ in outputs:
                now = time.perf_counter()
                if last is not None:
                    load.gaps.append(now - last)
                last = now


async def watch(llm: AsyncLLM, load: Load, seconds: float) -> None:
    """Record memory of the engine's process and of this process at the start, in the middle and at the end."""
    for pause in (0, seconds / 2, seconds / 2):
        await asyncio.sleep(pause)
        load.memory.append((resident_bytes(llm.client.pid), resident_bytes()))


async def progress(load: Load, seconds: float, callers: int) -> None:
    """Print the number of requests on stderr at every tenth of the time."""
    for tenth in range(1, 11):
        await asyncio.sleep(seconds / 10)
        asked = sum(map(len, load.latencies.values()))
        say(f"{callers} callers, {tenth * seconds / 10:.0f} of {seconds:.0f} s: {asked} requests, {load.aborted} aborted")


async def all_free(llm: AsyncLLM) -> bool:
    """Return whether no page is held, once the last abort has arrived."""
    for _ in range(100):
        if await llm.reset_prefix_cache():
            return True
        await asyncio.sleep(0.1)
    return False


async def run(llm: AsyncLLM, jobs: dict[int, list[Job]], callers: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run `callers` callers for the requested time and return the results."""
    with timed(f"{callers} callers, warm-up"):
        await asyncio.gather(*(ask(llm, job, Load(), None) for listed in jobs.values() for job in listed))
    load, seconds = Load(), args.seconds or 60 * args.minutes
    began, restarts = time.perf_counter(), llm.client.restarts
    until = began + seconds
    tasks = [call(llm, jobs, load, until, args.aborts, random.Random(number)) for number in range(callers)]
    if args.stream:
        tasks.append(stream(llm, load, until))
    await asyncio.gather(watch(llm, load, seconds), progress(load, seconds, callers), *tasks)
    taken = time.perf_counter() - began
    if llm.client.restarts > restarts:
        load.errors["the engine was started again"] += llm.client.restarts - restarts
    for who, held in zip(("engine", "callers"), zip(*load.memory, strict=True), strict=True):
        if seconds >= SETTLED and held[1] and held[2] and held[2] > GROWTH * held[1]:
            load.errors[f"memory of the {who} has grown"] += 1
    if not await all_free(llm):
        load.errors["pages are still held at the end"] += 1
    return {
        "callers": callers,
        "seconds": taken,
        "items_per_s": sum(size * len(latencies) for size, latencies in load.latencies.items()) / taken,
        "requests": {
            size: {"count": len(latencies), "p50_ms": percentile(latencies, 50), "p99_ms": percentile(latencies, 99)}
            for size, latencies in load.latencies.items()
        },
        "aborted": load.aborted,
        "errors": dict(load.errors),
        "engine_mib": [mib(engine) for engine, _ in load.memory],
        "callers_mib": [mib(size_bytes) for _, size_bytes in load.memory],
        "longest_gap_ms": 1000 * max(load.gaps) if load.gaps else None,
        "p99_gap_ms": percentile(load.gaps, 99),
    }


def mib(held: int | None) -> float | None:
    """Return bytes in MiB, or None if they are unknown."""
    return None if held is None else round(held / 2**20, 1)


def percentile(seconds: list[float], which: float) -> float | None:
    """Return a percentile in milliseconds, or None without values."""
    return 1000 * float(np.percentile(seconds, which)) if seconds else None


def show(result: dict[str, Any]) -> None:
    print(f"{result['callers']} callers, {result['seconds']:.0f} s: {result['items_per_s']:.0f} items/s")
    for size, figures in result["requests"].items():
        if figures["count"]:
            times = f"p50 {figures['p50_ms']:7.0f} ms, p99 {figures['p99_ms']:7.0f} ms"
            print(f"  {size:4} items: {figures['count']:6} requests, {times}")
    errors = result["errors"]
    print(f"  aborted: {result['aborted']}; errors and wrong answers: {sum(errors.values())} {errors or ''}")
    for who in ("engine", "callers"):
        print(f"  memory of the {who} process at start, middle, end: {', '.join(map(str, result[f'{who}_mib']))} MiB")
    if result["longest_gap_ms"] is not None:
        print(f"  between tokens of a stream: p99 {result['p99_gap_ms']:.0f} ms, longest {result['longest_gap_ms']:.0f} ms")


async def main(args: argparse.Namespace) -> int:
    options = {"max_num_batched_tokens": args.budget}
    with timed("expected scores"):
        jobs = await asyncio.to_thread(make_jobs, args.variants, options)
    results = []
    async with AsyncLLM(dtype="float32", **options) as llm:
        for callers in args.callers:
            results.append(await run(llm, jobs, callers, args))
            if args.json != "-":
                show(results[-1])
    text = json.dumps(results, indent=2)
    if args.json == "-":
        print(text)
    elif args.json:
        await asyncio.to_thread(Path(args.json).write_text, text + "\n", encoding="utf-8")
    return int(any(result["errors"] for result in results))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--callers", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes of each run")
    parser.add_argument("--seconds", type=float, help="seconds of each run, instead of --minutes")
    parser.add_argument("--aborts", action="store_true")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--variants", type=int, default=3, help="different requests of each size")
    parser.add_argument("--budget", type=int, default=2048, help="max_num_batched_tokens")
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE; - prints it instead of the text")
    sys.exit(asyncio.run(main(parser.parse_args())))
