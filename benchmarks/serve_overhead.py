"""Measure the cost of the process boundary and of HTTP: throughput and time to first token of `LLM`, `AsyncLLM` and the server.

    python -m benchmarks.serve_overhead [--geometry qwen3-0.6b] [--clients 16] [--prompt-tokens 66] [--tokens 64]
                                        [--requests 192] [--repeats 24] [--launches 3] [--json FILE|-]

Throughput. Three engines with the same options live side by side on a CPU and take turns. `LLM`, in this process, gets all
requests at once. `AsyncLLM`, with its engine in a process of its own, and `chunkattn serve` have `--clients` callers, each
with one request at a time. All three run equally many sequences at once. Every turn has new prompts of about
`--prompt-tokens` tokens, so nothing is cached, and each request makes half to one and a half times `--tokens` tokens. The
cost of HTTP is mostly per request, so its share should be largest for short requests.

Time to first token. The same prompts go to the idle `AsyncLLM` and to the idle server, one by one in turn. The time is
split into the part that the engine itself counts (from a request's arrival in it to its first token) and the part beyond:
tokenization, the messages of both processes, HTTP and its client. The variation of the computation exceeds the second
part. The time of the HTTP client, in this process, counts as the server's; the client is minimal, because httpx takes more
of the machine than the server does. All run on uvloop.

A geometry is served with random weights and the demo model's tokenizer.

Many short turns give a smaller error than few long turns, because a shared machine changes its speed within seconds and
within minutes. The defaults suit the demo model, with turns of 6 seconds; Qwen3-0.6B's geometry takes half an hour with
`--requests 64 --repeats 3`. An engine's process may be some percent faster or slower than another of the same code for its
whole life, so turns of the same processes understate the error. `--launches` repeats the whole measurement with new
processes and reports the error between launches. With three launches that error is rough itself: one time in twenty the
mean is off by four times the error.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import httpx
import uvloop

from benchmarks.serving import Job, Server, connected, greedy
from chunkattn import LLM, AsyncLLM, SamplingParams
from chunkattn.engine.limits import EngineLimits
from chunkattn.terminal.progress import timed as told
from chunkattn.tools.bench.geometry import GEOMETRIES, save_model
from chunkattn.tools.bench.measure import round_name

NAMES = ("Nila", "Rumi", "Siku", "Zenuso", "Lezudo", "Tunise", "Kirora", "Pegelu")
WORDS = (*NAMES, "lives", "works", "likes", "was", "born", "in", "as", "a", "baker", "poet", "honey", "figs")
WORD_TOKENS, WORD_SPREAD = 1.65, 0.85
"""Mean and standard deviation of the tokens per word over `WORDS`, by the demo model's tokenizer."""
FIRST_TOKENS = 8
FIRSTS = 40
"""Single requests to each of `AsyncLLM` and the server."""
BATCHED_TOKENS = 512
"""Small, so that the warm-up compiles few programs."""


def lengths(tokens: int) -> range:
    """Return the range of tokens that a request may make, for `tokens` on average."""
    return range(max(tokens // 2, 1), tokens + tokens // 2 + 1)


def longest(args: argparse.Namespace) -> int:
    """Return a bound on a request's tokens, prompt included, that one in a hundred million requests exceeds."""
    words = args.prompt_tokens / WORD_TOKENS
    return math.ceil(args.prompt_tokens + 6 * WORD_SPREAD * math.sqrt(words)) + lengths(args.tokens)[-1]


def draw(rng: random.Random, count: int, prompt_tokens: int, tokens: int) -> list[Job]:
    """Make random requests with common beginnings shorter than a page."""
    words = round(prompt_tokens / WORD_TOKENS)
    return [Job(" ".join(rng.choices(WORDS, k=words)), rng.choice(lengths(tokens))) for _ in range(count)]


# Throughput: each way answers all requests and returns tokens per second


async def timed(jobs: list[Job], work: Awaitable[int]) -> float:
    """Return the tokens per second of `work`, which returns the number of tokens made.

    Raises:
        RuntimeError: the number of tokens differs from the requested number.
    """
    began = time.perf_counter()
    tokens = await work
    seconds = time.perf_counter() - began
    if tokens != (asked := sum(job.tokens for job in jobs)):
        raise RuntimeError(f"{tokens} tokens were made, {asked} were asked for")
    return tokens / seconds


def generate(llm: LLM, jobs: list[Job]) -> int:
    """Generate all requests at once and return the number of their tokens."""
    params = [SamplingParams(**greedy(job.tokens)) for job in jobs]
    outputs = llm.generate([job.prompt for job in jobs], params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


async def offline(llm: LLM, jobs: list[Job]) -> float:
    """Return the tokens per second of `LLM` with all requests at once."""
    return await timed(jobs, asyncio.to_thread(generate, llm, jobs))


async def by_coroutines(engine: AsyncLLM, callers: int, jobs: list[Job]) -> float:
    """Return the tokens per second of `AsyncLLM` with `callers` callers."""
    return await timed(jobs, by_callers([partial(by_engine, engine)] * callers, jobs))


async def by_engine(engine: AsyncLLM, job: Job) -> int:
    """Run one request with `AsyncLLM` and return its number of tokens."""
    params = SamplingParams(**greedy(job.tokens))
    outputs = [output async for output in engine.generate(job.prompt, params, final_only=True)]
    return len(outputs[-1].outputs[0].token_ids)


async def by_connections(url: httpx.URL, callers: int, jobs: list[Job]) -> float:
    """Return the tokens per second of the server with `callers` callers, each with a connection of its own."""
    async with connected(url, callers) as connections:
        return await timed(jobs, by_callers([connection.ask for connection in connections], jobs))


async def by_callers(asks: Sequence[Callable[[Job], Awaitable[int]]], jobs: list[Job]) -> int:
    """Run all requests, one at a time for each caller, and return the number of tokens."""
    waiting = iter(jobs)

    async def call(ask: Callable[[Job], Awaitable[int]]) -> int:
        return sum([await ask(job) for job in waiting])

    return sum(await asyncio.gather(*map(call, asks)))


async def throughput(
    ways: Mapping[str, Callable[[list[Job]], Awaitable[float]]], args: argparse.Namespace, rng: random.Random
) -> dict[str, list[float]]:
    """Return the tokens per second of every turn, by way."""
    speeds = {name: list[float]() for name in ways}
    for turn in range(args.repeats + 1):
        jobs = draw(rng, args.requests if turn else args.clients, args.prompt_tokens, args.tokens)
        for name in rng.sample(list(ways), len(ways)):
            with told(f"throughput of {name}, {round_name(turn, args.repeats)}"):
                speed = await ways[name](jobs)
            if turn:  # the first turn warms up
                speeds[name].append(speed)
    return speeds


# Time to first token, which may be a piece of a character. Each request runs to its end, so that the engine is idle again


async def first_by_engine(engine: AsyncLLM, job: Job) -> float:
    """Run one request with `AsyncLLM` and return the seconds until its first token."""
    began, first = time.perf_counter(), math.nan
    async for output in engine.generate(job.prompt, SamplingParams(**greedy(job.tokens))):
        if math.isnan(first) and output.outputs[0].token_ids:
            first = time.perf_counter() - began
    return first


def engine_first_tokens(metrics: str) -> float:
    """Return the seconds from arrival in the engine to the first token, summed over the engine's requests."""
    (found,) = re.findall(r"^chunkattn_time_to_first_token_seconds_sum (\S+)", metrics, re.MULTILINE)
    return float(found)


class First(NamedTuple):
    """Time to first token of one request.

    Attributes:
        ms: milliseconds until the first token.
        beyond_ms: milliseconds of these that the engine itself does not count.
    """

    ms: float
    beyond_ms: float


async def first_tokens(engine: AsyncLLM, url: httpx.URL, jobs: list[Job]) -> dict[str, list[First]]:
    """Return the times to first token of the same prompts, both ways in turn. Both engines must be idle."""
    found: dict[str, list[First]] = {"AsyncLLM": [], "HTTP": []}
    counted = dict.fromkeys(found, math.nan)
    async with connected(url, 1) as (connection,), httpx.AsyncClient(base_url=url, trust_env=False) as client:

        async def scraped() -> str:
            return (await client.get("/metrics")).text

        ways: list[tuple[str, Callable[[Job], Awaitable[float]], Callable[[], Awaitable[str]]]] = [
            ("AsyncLLM", partial(first_by_engine, engine), engine.metrics),
            ("HTTP", connection.first_token, scraped),
        ]
        for number, job in enumerate(jobs):
            for name, way, metrics in ways[:: 1 if number % 2 else -1]:
                with told(f"first token of {name}, {round_name(number, len(jobs) - 1)}"):
                    seconds, before = await way(job), counted[name]
                counted[name] = engine_first_tokens(await metrics())
                if number:  # the first request warms up
                    found[name].append(First(1000 * seconds, 1000 * (seconds - (counted[name] - before))))
    return found


def check_room(limits: EngineLimits, args: argparse.Namespace) -> None:
    """Check that all callers' requests fit the KV pool at once; otherwise fewer run at once, which hides the callers' cost.

    Raises:
        SystemExit: the model or the pool is too small.
    """
    most, pages = longest(args), -(-longest(args) // limits.block_size) + 1  # each keeps one page free to grow
    if most > limits.max_model_len:
        text = f"requests of up to {most} tokens exceed the model's {limits.max_model_len}"
        raise SystemExit(text + ": make --prompt-tokens or --tokens less")
    if args.clients * pages > limits.num_pages:
        text = f"{args.clients} requests of up to {pages} pages at once exceed the KV pool of {limits.num_pages} pages"
        raise SystemExit(text + ": make --clients, --prompt-tokens or --tokens less")


async def measure(model: str | None, args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything and return medians, mean shares with their standard errors, and all values."""
    options: dict[str, Any] = {"max_num_seqs": args.clients, "max_num_batched_tokens": BATCHED_TOKENS}
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    rng = random.Random(0)
    llm = await asyncio.to_thread(LLM, model, warmup=True, **options)
    check_room(llm.core.limits, args)
    async with AsyncLLM(model, **options) as engine:
        while not engine.is_warm:
            await asyncio.sleep(0.1)
        server = await asyncio.to_thread(Server, *([model] if model else []), *arguments)
        gc.collect()
        gc.freeze()  # the other two processes do the same
        try:
            url = httpx.URL(server.url)
            ways = {
                "LLM": partial(offline, llm),
                "AsyncLLM": partial(by_coroutines, engine, args.clients),
                "HTTP": partial(by_connections, url, args.clients),
            }
            speeds = await throughput(ways, args, rng)
            firsts = await first_tokens(engine, url, draw(rng, FIRSTS + 1, args.prompt_tokens, FIRST_TOKENS))
        finally:
            await asyncio.to_thread(server.end)
    speed = {name: statistics.median(values) for name, values in speeds.items()}
    beyond = {name: [first.beyond_ms for first in values] for name, values in firsts.items()}
    added = [b - a for a, b in zip(beyond["AsyncLLM"], beyond["HTTP"], strict=True)]
    return {
        "geometry": args.geometry,
        "clients": args.clients,
        "requests": args.requests,
        "prompt_tokens": args.prompt_tokens,
        "tokens": args.tokens,
        "turns": args.repeats,
        "tokens_per_s": speed,
        "share_of_llm": {name: share(values, speeds["LLM"])._asdict() for name, values in speeds.items()},
        "share_of_async": share(speeds["HTTP"], speeds["AsyncLLM"])._asdict(),
        "first_token_ms": {name: statistics.median(first.ms for first in values) for name, values in firsts.items()},
        "first_token_beyond_engine_ms": {name: median_and_error(values)._asdict() for name, values in beyond.items()},
        "first_token_http_adds_ms": median_and_error(added)._asdict(),
        "turns_tokens_per_s": speeds,
        "all_first_tokens_ms": {name: [first._asdict() for first in values] for name, values in firsts.items()},
    }


class Share(NamedTuple):
    """Mean of ratios.

    Attributes:
        mean: the mean.
        error: its standard error; None for a single ratio.
    """

    mean: float
    error: float | None

    def __str__(self) -> str:
        return f"{self.mean:.1%}" + (f" ± {100 * self.error:.1f}" if self.error is not None else "")


def share(values: list[float], others: list[float]) -> Share:
    """Return the geometric mean of the ratios within each turn, which favours neither way.

    Ratios are taken within a turn, because the machine itself changes between turns.
    """
    logs = [math.log(a / b) for a, b in zip(values, others, strict=True)]
    mean = math.exp(statistics.fmean(logs))
    return Share(mean, mean * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else None)


class Median(NamedTuple):
    """Median of values.

    Attributes:
        median: the median.
        error: its standard error.
    """

    median: float
    error: float

    def __str__(self) -> str:
        return f"{self.median:.1f} ± {self.error:.1f}"


def median_and_error(values: list[float]) -> Median:
    """Return the median, with the standard error of normal values with the same quartiles.

    A few stalls of the machine change neither.
    """
    low, median, high = statistics.quantiles(values, n=4)
    spread = (high - low) / (2 * statistics.NormalDist().inv_cdf(0.75))
    return Median(median, spread * math.sqrt(math.pi / 2 / len(values)))


def launched(args: argparse.Namespace) -> dict[str, Any]:
    """Run this command once in a process of its own and return its result."""
    options = {**vars(args), "launches": 1, "json": "-"}
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
    command = [sys.executable, "-m", "benchmarks.serve_overhead", *given]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)


def over_launches(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the means over several launches with their standard errors, and all results."""

    def of(shares: list[dict[str, float]]) -> dict[str, Any]:
        return share([s["mean"] for s in shares], [1.0] * len(shares))._asdict()

    beyond = {name: [r["first_token_beyond_engine_ms"][name]["median"] for r in results] for name in ("AsyncLLM", "HTTP")}
    return {
        "share_of_llm": {name: of([r["share_of_llm"][name] for r in results]) for name in results[0]["share_of_llm"]},
        "share_of_async": of([r["share_of_async"] for r in results]),
        "first_token_beyond_engine_ms": {
            name: {"mean": statistics.fmean(ms), "error": statistics.stdev(ms) / math.sqrt(len(ms))}
            for name, ms in beyond.items()
        },
        "launches": results,
    }


def show(result: dict[str, Any]) -> None:
    made = lengths(result["tokens"])
    print(f"{result['geometry'] or 'the demo model'}: {result['turns']} turns of {result['requests']} requests", end=", ")
    print(f"{made[0]} to {made[-1]} tokens after prompts of {result['prompt_tokens']}, {result['clients']} at once\n")
    print("medians:   tokens/s  of LLM (mean)  first token ms  beyond the engine's own ms")
    for name, speed in result["tokens_per_s"].items():
        line = f"{name:9} {speed:9.0f}  {Share(**result['share_of_llm'][name])!s:>13}"
        if name in result["first_token_ms"]:
            line += f"  {result['first_token_ms'][name]:14.1f}  {Median(**result['first_token_beyond_engine_ms'][name])!s:>26}"
        print(line)
    left, added = Share(**result["share_of_async"]), Median(**result["first_token_http_adds_ms"])
    print(f"\nof AsyncLLM's throughput HTTP leaves {left}; to the first token it adds {added} ms\n", flush=True)


def show_means(result: dict[str, Any]) -> None:
    of_llm = {name: Share(**found) for name, found in result["share_of_llm"].items()}
    beyond = result["first_token_beyond_engine_ms"]
    print(f"over {len(result['launches'])} launches: AsyncLLM has {of_llm['AsyncLLM']} of LLM's throughput, HTTP", end=" ")
    print(f"{of_llm['HTTP']}, and {Share(**result['share_of_async'])} of AsyncLLM's; the first token comes", end=" ")
    print(
        " and ".join(f"{found['mean']:.1f} ± {found['error']:.1f} ms" for found in beyond.values()), "beyond the engine's own"
    )


def measure_all(args: argparse.Namespace, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run the requested launches and return the result; `tell` is called with each launch's result."""
    if args.launches > 1:
        results = []
        for _ in range(args.launches):
            results.append(launched(args))
            tell(results[-1])
        return over_launches(results)
    with TemporaryDirectory() as folder:
        if args.geometry:
            save_model(args.geometry, Path(folder))
        result = uvloop.run(measure(folder if args.geometry else None, args))
    tell(result)
    return result


def main(args: argparse.Namespace) -> None:
    as_json = args.json == "-"
    result = measure_all(args, (lambda _: None) if as_json else show)
    text = json.dumps(result, indent=2)
    if as_json:
        print(text)
        return
    if args.launches > 1:
        show_means(result)
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=GEOMETRIES, help="geometry of the model; default: the bundled demo model")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=66, help="mean tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="mean tokens that a request makes")
    parser.add_argument(
        "--requests",
        type=int,
        default=192,
        help="requests of a turn; at its start, callers arrive one by one and `LLM` has all at once",
    )
    parser.add_argument("--repeats", type=int, default=24, help="turns of each way; they differ by some percent")
    parser.add_argument("--launches", type=int, default=1, help="launches of all processes; they differ, too")
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE; - prints it instead of the text")
    main(parser.parse_args())
