"""Load a real server with clients of every kind, abandon a third of their requests, and check answers and leftovers.

    python -m benchmarks.serve_load [--seconds 600] [--clients 32] [--json FILE|-]

`chunkattn serve` runs the demo model (float32) with a KV pool so small that requests wait for pages. Clients of httpx and
of `openai` send one request at a time. Every second request has a salt of its own and therefore nothing cached. Streams
are abandoned after a few events, other requests after a moment. All answers are compared with `LLM`'s in this process:
texts must be equal, scores within 1e-5. Clients wait after a 429 and retry.

The command fails on any other error, any wrong answer, an error in the server's log, pages or requests still held a minute
after the last answer, more memory of server and engine at the end than in the middle (in runs of two minutes and more),
and an exit code other than 0.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jax
from openai import AsyncOpenAI

from benchmarks.score_load import GROWTH, SETTLED, mib, percentile
from benchmarks.serving import Server
from chunkattn import LLM, ChunkedPrompt, RequestOutput, SamplingParams
from chunkattn.server.state import DEMO_NAME
from chunkattn.terminal.progress import say, timed
from chunkattn.tools.bench.measure import resident_bytes
from training.world import PREFIX, World

SIZES = {"score 3": 3, "score 30": 30, "score 100": 100}
"""Number of items by kind of request."""
KINDS = ("completion", "chunked", "chat", "prompts", *SIZES, "rerank", "tokenize")
STREAMED, BY_OPENAI = ("chunked", "chat"), ("completion", "chat")
ENDS = ("finished", "disconnected", "refused")
VARIANTS = 3
"""Different requests of every kind."""
LENGTHS = (8, 16, 24)
"""Numbers of tokens to generate."""
LEAVING = 1 / 3
LIMITS = httpx.Limits()
"""No limit on connections."""
TOLERANCE = 1e-5
MARGIN = 1e-3
"""Minimum lead of the likeliest token's log-probability; rounding could reverse a smaller lead."""
BUDGET = 512
POOL_BYTES = 4 << 20
"""102 pages of the demo model; a request over four documents takes about a dozen."""
ANSWER_S, IDLE_S, SAMPLE_S = 120, 60, 5
HELD = ('chunkattn_pages{state="used"}', *(f'chunkattn_requests_now{{state="{s}"}}' for s in ("waiting", "running")))


@dataclass
class Job:
    """A request with its right answer: texts, scores or token ids."""

    kind: str
    path: str
    body: dict[str, Any]
    expected: list[Any]
    margin: float = math.inf

    def is_right(self, found: list[Any]) -> bool:
        """Return whether an answer matches the right answer."""
        pairs = zip(found, self.expected, strict=False)
        return len(found) == len(self.expected) and all(
            abs(a - b) <= TOLERANCE if isinstance(b, float) else a == b for a, b in pairs
        )


@dataclass
class Load:
    """Observations of one run.

    Attributes:
        counts: number of requests by kind and outcome, of `ENDS` or "count" for all.
        latencies: seconds of each finished request, by kind.
        errors: counts by message.
        wrong: wrong answers.
        memory: bytes of server and engine, sampled.
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    latencies: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    def typical(self, kind: str) -> float:
        """Return the median of recent latencies in seconds, or 0.1 before the first answer."""
        return statistics.median(self.latencies[kind][-50:]) if self.latencies[kind] else 0.1


# The catalogue


def draw(kind: str, llm: LLM, world: World) -> Job:
    """Make a random request and answer it offline."""
    if kind == "tokenize":
        text = " ".join(world.reading(8).documents)
        return Job(kind, "/tokenize", {"prompt": text}, list(llm.tokenizer(text).input_ids))
    if kind == "rerank" or kind in SIZES:
        judging = world.judging(SIZES.get(kind, 20))
        query, items = judging.query, list(judging.items)
        if kind == "rerank":
            ranked = {r.index: r.relevance_score for r in llm.rerank(query, items, use_tqdm=False).results}
            return Job(kind, "/v1/rerank", {"query": query, "documents": items}, [ranked[i] for i in range(len(items))])
        asked = {"query": query, "items": items, "labels": ["yes", "no"], "apply_softmax": True}
        return Job(kind, "/v1/score", asked, [v for row in llm.score(**asked, use_tqdm=False).scores for v in row])
    greedy = {"temperature": 0, "max_tokens": world.rng.choice(LENGTHS), "ignore_eos": True}
    params, path = SamplingParams(**greedy, logprobs=2), "/v1/completions"
    readings = [world.reading(4) for _ in range(3 if kind == "prompts" else 1)]
    documents, question = list(readings[0].documents), readings[0].questions[0].text
    if kind == "chunked":
        body: dict[str, Any] = {"chunks": {"prefix": PREFIX, "documents": documents, "question": question}}
        outputs = llm.generate(ChunkedPrompt(PREFIX, documents, question), params)
    elif kind == "chat":
        path, messages = "/v1/chat/completions", [{"role": "user", "content": question.removesuffix(" Answer:")}]
        body = {"messages": messages, "documents": documents}
        outputs = llm.chat(messages, params, documents=documents)
    else:
        joint = " " if kind == "completion" else llm.config.chunk_separator
        prompts = [joint.join((PREFIX, *r.documents, r.questions[0].text)) for r in readings]
        body = {"prompt": prompts if kind == "prompts" else prompts[0]}
        outputs = llm.generate(prompts, params)
    return Job(kind, path, body | greedy, [o.outputs[0].text for o in outputs], closest(outputs))


def closest(outputs: list[RequestOutput]) -> float:
    """Return the smallest lead of the likeliest token's log-probability over the second's."""
    steps = (sorted(p.logprob for p in step.values()) for o in outputs for step in o.outputs[0].logprobs or ())
    return min(values[-1] - values[-2] for values in steps)


def make_catalogue() -> dict[str, list[Job]]:
    """Return requests by kind, the same in every run. The engine that answers them is freed."""
    llm = LLM(enable_chunk_aware=True, max_num_batched_tokens=BUDGET, kv_cache_memory_bytes=32 << 20)
    catalogue: dict[str, list[Job]] = {kind: [] for kind in KINDS}
    world = World(0, held_out=True)
    for kind, jobs in catalogue.items():
        while len(jobs) < VARIANTS:
            if (job := draw(kind, llm, world)).margin > MARGIN:
                jobs.append(job)
    llm.close()
    del llm
    gc.collect()
    jax.clear_caches()
    return catalogue


# The clients


class Client:
    """A client with httpx and `openai` over one pool of connections."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self.http = http
        self.openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=ANSWER_S, http_client=http)

    async def ask(self, job: Job, body: dict[str, Any], most: int | None) -> list[Any] | None:
        """Send a request and return its answer; None if its stream is abandoned after `most` events."""
        if job.kind in STREAMED:
            parts: list[str] = []
            async with aclosing(self._chat(body) if job.kind in BY_OPENAI else self._stream(job.path, body)) as texts:
                async for text in texts:
                    parts.append(text)
                    if len(parts) == most:
                        return None
            return ["".join(parts)]
        if job.kind in BY_OPENAI:
            done = await self.openai.completions.create(model=DEMO_NAME, prompt=body["prompt"], extra_body=body)
            return [choice.text for choice in done.choices]
        response = await self.http.post(job.path, json=body)
        response.raise_for_status()
        answer = response.json()
        if job.kind == "prompts":
            return [choice["text"] for choice in answer["choices"]]
        if job.kind == "rerank":
            return [r["relevance_score"] for r in sorted(answer["results"], key=lambda r: r["index"])]
        return answer["tokens"] if job.kind == "tokenize" else [v for row in answer["scores"] for v in row]

    async def _chat(self, body: dict[str, Any]) -> AsyncGenerator[str, None]:
        asked = {"model": DEMO_NAME, "messages": body["messages"], "stream": True}
        async with await self.openai.chat.completions.create(**asked, extra_body=body) as events:
            async for event in events:
                yield event.choices[0].delta.content or ""

    async def _stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[str, None]:
        async with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            if response.is_error:
                await response.aread()  # for the error message
            response.raise_for_status()
            async with aclosing(response.aiter_lines()) as lines:
                async for line in lines:
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            raise RuntimeError(f"in a stream: {event['error']}")
                        yield event["choices"][0]["text"]


async def attempt(client: Client, job: Job, load: Load, rng: random.Random) -> float | None:
    """Send one request. Return the seconds to wait before another attempt if the request is refused."""
    kind, leaves, streamed = job.kind, rng.random() < LEAVING, job.kind in STREAMED
    most = rng.randint(1, 6) if leaves and streamed else None
    patience = rng.uniform(1e-3, load.typical(kind)) if leaves and not streamed else None
    salted = rng.random() < 0.5 and kind != "tokenize"
    body, began = job.body | ({"cache_salt": str(rng.random())} if salted else {}), time.perf_counter()
    try:
        async with asyncio.timeout(patience) as limit:
            found = await client.ask(job, body, most)
    except Exception as error:  # every error is counted
        response = getattr(error, "response", None)
        if isinstance(error, TimeoutError) and limit.expired():
            load.counts[kind, "disconnected"] += 1
        elif response is not None and response.status_code == 429 and "retry-after" in response.headers:
            load.counts[kind, "refused"] += 1
            return float(response.headers["retry-after"])
        else:
            said = error if response is None else f"{response.status_code} {response.text}"
            load.errors[f"{kind}: {type(error).__name__}: {said}"[:300]] += 1
            await asyncio.sleep(0.1)  # give a dead server time to restart
        return None
    load.counts[kind, "disconnected" if found is None else "finished"] += 1
    if found is not None:
        load.latencies[kind].append(time.perf_counter() - began)
        if not job.is_right(found):
            load.errors[f"{kind}: a wrong answer"] += 1
            load.wrong.append({"kind": kind, "body": body, "margin": job.margin, "expected": job.expected, "found": found})
    return None


async def call(client: Client, catalogue: dict[str, list[Job]], load: Load, until: float, rng: random.Random) -> None:
    """Send request after request, as one caller."""
    while time.perf_counter() < until:
        job = rng.choice(catalogue[rng.choice(KINDS)])
        load.counts[job.kind, "count"] += 1
        while (pause := await attempt(client, job, load, rng)) is not None and time.perf_counter() < until:
            await asyncio.sleep(pause)


# Leftovers


async def watch(pid: int, load: Load, seconds: float, until: float) -> None:
    """Sample the memory of a process and its children (Linux reports it), and print what has ended ten times."""
    tenths = 0
    while (left := until - time.perf_counter()) > 0:
        if (now := int(10 * (seconds - left) / seconds)) > tenths:
            tenths = now
            ended = ", ".join(f"{sum(load.counts[kind, end] for kind in KINDS)} {end}" for end in ENDS)
            say(f"{seconds - left:.0f} of {seconds:.0f} s: {ended}; {sum(load.errors.values())} errors")
        with suppress(OSError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            load.memory.append(sum(resident_bytes(process) or 0 for process in (pid, *map(int, children))))
        await asyncio.sleep(max(min(SAMPLE_S, until - time.perf_counter()), 0))


def grown(memory: list[int]) -> float | None:
    """Return the median of the last fifth over the median of the middle fifth, or None with too few samples."""
    fifth = len(memory) // 5
    return statistics.median(memory[-fifth:]) / statistics.median(memory[2 * fifth : -2 * fifth]) if fifth else None


async def read_metrics(http: httpx.AsyncClient) -> dict[str, float]:
    """Return the metrics by name and labels; empty if the server does not answer."""
    with suppress(httpx.HTTPError):
        lines = (await http.get("/metrics")).text.splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] not in ("", "#"))}
    return {}


async def settle(http: httpx.AsyncClient) -> dict[str, float]:
    """Return the metrics once no page or request is held, or after a time limit."""
    until, found = time.perf_counter() + IDLE_S, await read_metrics(http)
    while any(found.get(name) != 0 for name in HELD) and time.perf_counter() < until:
        await asyncio.sleep(0.1)
        found = await read_metrics(http)
    return found


async def run(server: Server, catalogue: dict[str, list[Job]], clients: int, seconds: float) -> dict[str, Any]:
    """Run `clients` clients for `seconds` seconds and return the results."""
    load, began = Load(), time.perf_counter()
    async with httpx.AsyncClient(base_url=server.url, timeout=ANSWER_S, limits=LIMITS) as http:
        client, until = Client(http, server.url), began + seconds
        callers = (call(client, catalogue, load, until, random.Random(number)) for number in range(clients))
        await asyncio.gather(watch(server.process.pid, load, seconds, until), *callers)
        taken, metrics = time.perf_counter() - began, await settle(http)
    load.errors.update(f"{name} is {metrics.get(name)} in the end" for name in HELD if metrics.get(name) != 0)
    growth = grown(load.memory)
    if seconds >= SETTLED and growth is not None and growth > GROWTH:
        load.errors["memory of server and engine has grown"] += 1
    requests = {
        kind: {name: load.counts[kind, name] for name in ("count", *ENDS)}
        | {f"p{p}_ms": percentile(latencies, p) for p in (50, 99)}
        for kind, latencies in load.latencies.items()
    }
    return {
        "clients": clients,
        "seconds": taken,
        "requests": requests,
        "memory_mib": [mib(held) for held in load.memory],
        "memory_growth": growth,
        **{name: metrics.get(f"chunkattn_{name}_total") for name in ("evictions", "preemptions")},
        "errors": dict(load.errors),
        "wrong": load.wrong[:20],
    }


def show(result: dict[str, Any]) -> None:
    print(f"{result['clients']} clients, {result['seconds']:.0f} s; refused are answers of 429\n")
    print("kind           count  finished  disconnected  refused    p50 ms    p99 ms")
    for kind, found in result["requests"].items():
        counts = f"{found['count']:7} {found['finished']:9} {found['disconnected']:13} {found['refused']:8}"
        times = "".join(f"{'-':>10}" if found[p] is None else f"{found[p]:10.0f}" for p in ("p50_ms", "p99_ms"))
        print(f"{kind:12} {counts}{times}")
    print(f"\ncached blocks evicted: {result['evictions']}, requests preempted: {result['preemptions']}")
    if memory := result["memory_mib"]:
        growth = "" if result["memory_growth"] is None else f"; last fifth over middle fifth {result['memory_growth']:.3f}"
        print(f"memory of server and engine: first {memory[0]}, last {memory[-1]}, maximum {max(memory)} MiB{growth}")
    for wrong in result["wrong"]:
        print(f"wrong: {json.dumps(wrong, ensure_ascii=False)}")
    for error, count in Counter(result["errors"]).most_common(20):
        print(f"{count:6} x {error}")
    print(f"FAILED: {sum(result['errors'].values())} errors" if result["errors"] else "no errors, no wrong answers")


def main(args: argparse.Namespace) -> int:
    with timed("expected answers"):
        catalogue = make_catalogue()
    options = {
        "max-num-batched-tokens": BUDGET,
        "kv-cache-memory-bytes": POOL_BYTES,
        "max-queued-requests": max(4, 3 * args.clients // 2),  # several lists of prompts reach it together
    }
    server = Server("--enable-chunk-aware", *(f"--{name}={value}" for name, value in options.items()))
    try:
        result = asyncio.run(run(server, catalogue, args.clients, args.seconds))
    finally:
        code = server.end()
    result["exit_code"] = code
    if code != 0:
        result["errors"]["the server had to be killed" if code is None else f"the server's exit code is {code}"] = 1
    result["errors"] |= Counter(f"in the server's log: {line}"[:300] for line in server.faults())
    if args.json != "-":
        show(result)
    text = json.dumps(result, indent=2)
    if args.json == "-":
        print(text)
    elif args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    return int(bool(result["errors"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE; - prints it instead of the text")
    sys.exit(main(parser.parse_args()))
