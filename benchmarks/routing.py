"""Compare the policies of the gateway on real replicas, beside the simulator on the same requests.

    python -m benchmarks.routing [--only policies overhead scaling] [--rounds 3] [--json FILE]

Several `chunkattn serve` of the demo model run behind `chunkattn route`. `policies`: 8 clients stream 600 requests of 4 to 8
documents in shuffled order; each cache holds a third of the 300 documents. The rounds of the policies take turns, and each
begins with other documents' text in the caches. Every answer is compared with that of one engine. `overhead`: 64 clients ask
for one token; the CPU time of the gateway's process for each request. `scaling`: one and three replicas whose engine sleeps
in every step, as if an accelerator worked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import numpy as np

from benchmarks.routing_policies import POLICIES
from benchmarks.routing_simulator import simulate, workload
from benchmarks.serving import PATH, Server, greedy
from chunkattn.terminal.progress import say, timed

WORDS = ("river", "poet", "lives", "in", "Tunise", "Rumi", "Nila", "city", "job", "is", "a", "painter", "who", "works", "near")
PREFIX, QUESTION = "Read the documents and answer the question. ", " What is the job of Rumi? Answer:"
TOPIC_SIZE, WARM, ANSWER = 20, 60, 8
SLOW_STEP_S, BLOCK = 0.1, 16


def texts(count: int, seed: int = 5) -> list[str]:
    """Return distinct documents of 60 to 110 words."""
    rng = random.Random(seed)
    return [f"{n} " + " ".join(rng.choice(WORDS) for _ in range(rng.randint(60, 110))) for n in range(count)]


def body(documents: list[str], numbers: list[int], salt: str, tokens: int = ANSWER) -> dict[str, Any]:
    """Return a completion over documents."""
    chunks = {"prefix": PREFIX, "documents": [documents[n] for n in numbers], "question": QUESTION}
    return {"chunks": chunks, **greedy(tokens), "return_chunk_usage": True, "cache_salt": salt}


async def ask_all(url: str, bodies: list[dict[str, Any]], clients: int) -> list[dict[str, Any]]:
    """Stream all requests in a closed loop of clients, and return a row for each, in order."""
    rows: list[dict[str, Any]] = [{} for _ in bodies]
    left = iter(range(len(bodies)))

    async def client(session: aiohttp.ClientSession) -> None:
        for number in left:
            began, row, text = time.perf_counter(), rows[number], []
            options = {"stream": True, "stream_options": {"include_usage": True}}
            try:
                async with session.post(url + PATH, json=bodies[number] | options) as answer:
                    row["status"] = answer.status
                    async for line in answer.content:
                        if not line.startswith(b"data: {"):
                            continue
                        event = json.loads(line[6:])
                        if event.get("choices"):
                            row.setdefault("first_s", time.perf_counter() - began)
                            text.append(event["choices"][0]["text"])
                        if bodies[number]["return_chunk_usage"] and event.get("usage"):
                            parts = event["usage"]["prompt_tokens_details"]["chunks"]
                            row["asked"] = sum(part["tokens"] for part in parts)
                            row["computed"] = row["asked"] - sum(part["cached_tokens"] for part in parts)
            except aiohttp.ClientError as error:
                row["error"] = repr(error)
            row["text"] = "".join(text)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(300)) as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
    return rows


async def wait_ready(url: str, replicas: int) -> None:
    """Wait until that many replicas of a gateway are ready."""
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/health") as answer:
                listed = (await answer.json()).get("replicas", {})
            if sum(state["ready"] for state in listed.values()) == replicas:
                return
            await asyncio.sleep(0.2)


def gateway(urls: list[str], policy: str) -> Server:
    """Return a running gateway whose replicas are all ready."""
    here = Path(__file__).parent
    env = {"PYTHONPATH": f"{here / 'other_policy'}{os.pathsep}{here.parent}", "ROUTING_POLICY": policy}
    made = Server(*urls, "--log-format=json", command="route", env=env)
    asyncio.run(wait_ready(made.url, len(urls)))
    return made


def cpu_s(server: Server) -> float:
    """Return the CPU seconds of a server's process so far."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def compare_policies(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each policy, kind of workload and round."""
    documents = texts(args.documents)
    rows = []
    with ExitStack() as stack:
        one = stack.enter_context(closing_server(Server("--no-warmup", f"--kv-cache-memory-bytes={256 << 20}")))
        sizes = asyncio.run(measure(one.url, documents))
        pages = sum(-(-size // BLOCK) for size in sizes) // 3
        memory = f"--kv-cache-memory-bytes={pages * asyncio.run(page_bytes(one.url, 256 << 20))}"
        servers = [stack.enter_context(closing_server(Server(memory, "--report-documents"))) for _ in range(args.replicas)]
        jobs = {
            kind: workload(np.random.default_rng(1), args.documents, args.requests, topic_size=size)
            for kind, size in (("topics", TOPIC_SIZE), ("independent", 0))
        }
        warm = workload(np.random.default_rng(9), args.documents, WARM)
        say(f"documents of {sum(sizes)} tokens, {pages} pages for each of {args.replicas} replicas")
        expected = {}
        for kind, listed in jobs.items():
            with timed(f"answers of one engine, {kind}"):
                bodies = [body(documents, numbers, "one") for numbers in listed]
                expected[kind] = [row["text"] for row in asyncio.run(ask_all(one.url, bodies, args.clients))]
        for number in range(args.rounds):
            for kind, listed in jobs.items():
                for policy in args.policies:
                    salt = f"{number} {kind} {policy}"
                    router = gateway([server.url for server in servers], policy)
                    with closing_server(router), timed(f"round {number}, {kind}, {policy}"):
                        asyncio.run(ask_all(router.url, [body(documents, n, f"warm {salt}") for n in warm], args.clients))
                        found = asyncio.run(ask_all(router.url, [body(documents, n, salt) for n in listed], args.clients))
                        faults = router.faults()
                    rows.append(summary(found, expected[kind]) | {"round": number, "kind": kind, "policy": policy})
                    outcome = simulate(
                        listed,
                        sizes,
                        policy=policy,
                        replicas=args.replicas,
                        clients=args.clients,
                        pages=pages,
                        text_sizes=[len(text) for text in documents],
                        answer=ANSWER,
                        seed=number,
                    )
                    rows[-1] |= {"simulated": outcome.computed, "simulated_hit": outcome.hit_rate, "faults": faults}
                    say(json.dumps(rows[-1]))
    return rows


async def measure(url: str, documents: list[str]) -> list[int]:
    """Return the tokens of each document as a chunk, and fill the cache of a server with them."""
    rows = await ask_all(url, [body(documents, [n], "one", 1) for n in range(len(documents))], 8)
    return [row["asked"] for row in rows]


async def page_bytes(url: str, memory: int) -> int:
    """Return the bytes of a page, from the pages that a server makes of its memory."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        text = await answer.text()
    pages = sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("chunkattn_pages{"))
    return memory // int(pages)


class closing_server(closing[Server]):
    """Context of a server that ends it."""

    def __exit__(self, *given: object) -> None:
        """End the server."""
        self.thing.end()


def summary(rows: list[dict[str, Any]], expected: list[str]) -> dict[str, Any]:
    """Return the totals of a run."""
    good = [row for row in rows if row.get("status") == 200 and "asked" in row]
    asked, computed = sum(row["asked"] for row in good), sum(row["computed"] for row in good)
    firsts = [1000 * row["first_s"] for row in good if "first_s" in row]
    return {
        "computed": computed,
        "asked": asked,
        "hit": round(1 - computed / asked, 4),
        "p50_ms": round(float(np.quantile(firsts, 0.5)), 1),
        "p99_ms": round(float(np.quantile(firsts, 0.99)), 1),
        "failed": len(rows) - len(good),
        "server_errors": sum(row.get("status", 0) >= 500 for row in rows),
        "wrong": sum(row.get("text") != text for row, text in zip(rows, expected, strict=True)),
    }


def compare_overhead(args: argparse.Namespace) -> dict[str, Any]:
    """Return the CPU time per request of a gateway, and the throughput beside the bare server's."""
    prompt = {"prompt": "Rumi is a poet. What is the job of Rumi? Answer:", **greedy(1)}
    rates: dict[str, list[float]] = {"bare": [], "gateway": []}
    with ExitStack() as stack:
        server = stack.enter_context(closing_server(Server()))
        router = stack.enter_context(closing_server(gateway([server.url], "document")))
        spent = []
        for number in range(args.rounds + 1):  # the first round warms up
            for name, url in (("bare", server.url), ("gateway", router.url)):
                before, began = cpu_s(router), time.perf_counter()
                asyncio.run(ask_plain(url, prompt, args.asked, 64))
                if number:
                    rates[name].append(args.asked / (time.perf_counter() - began))
                if number and name == "gateway":
                    spent.append(1000 * (cpu_s(router) - before) / args.asked)
    return {
        "cpu_ms": round(median(spent), 2),
        "cpu_ms_range": [round(min(spent), 2), round(max(spent), 2)],
        "requests_per_s": {name: round(median(found), 1) for name, found in rates.items()},
    }


async def ask_plain(url: str, given: dict[str, Any], count: int, clients: int) -> None:
    """Send one request again and again, without a stream."""
    left = iter(range(count))

    async def client(session: aiohttp.ClientSession) -> None:
        for _ in left:
            async with session.post(url + PATH, json=given) as answer:
                if answer.status != 200:
                    raise RuntimeError(await answer.text())
                await answer.read()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))


def compare_scaling(args: argparse.Namespace) -> dict[str, Any]:
    """Return the throughput of one and of several replicas whose steps sleep, and of as many whose steps do not."""
    folder = str(Path(__file__).parent / "slow_steps")
    found: dict[str, Any] = {}
    for name, env in (("sleeping", {"PYTHONPATH": folder, "SLOW_STEP_S": str(SLOW_STEP_S)}), ("real", {})):
        with ExitStack() as stack:
            servers = [stack.enter_context(closing_server(Server("--max-num-seqs=4", env=env))) for _ in range(args.replicas)]
            for count in (1, args.replicas):
                with closing_server(gateway([server.url for server in servers[:count]], "document")) as router:
                    listed = [{"prompt": f"{n} Who is Rumi?", **greedy(16)} for n in range(args.scaled)]
                    asyncio.run(ask_each(router.url, listed[:24]))
                    began = time.perf_counter()
                    asyncio.run(ask_each(router.url, listed))
                    found[f"{name} {count}"] = round(len(listed) / (time.perf_counter() - began), 2)
        found[f"{name} ratio"] = round(found[f"{name} {args.replicas}"] / found[f"{name} 1"], 2)
    return found


async def ask_each(url: str, bodies: list[dict[str, Any]]) -> None:
    """Send all requests from 24 clients."""
    await ask_all(url, [given | {"return_chunk_usage": False} for given in bodies], 24)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("policies", "overhead", "scaling"), default=[])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--documents", type=int, default=300)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--asked", type=int, default=2000, help="requests of a round of `overhead`")
    parser.add_argument("--scaled", type=int, default=240, help="requests of a run of `scaling`")
    parser.add_argument("--json", type=Path, help="file for all rows")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    if not args.only or "policies" in args.only:
        results["policies"] = rows = compare_policies(args)
        print("documents    policy         computed     hit  simulated     hit  p50 ms  p99 ms  wrong  failed")
        for kind in ("topics", "independent"):
            for policy in args.policies:
                own = [row for row in rows if (row["kind"], row["policy"]) == (kind, policy)]
                medians = {name: median(row[name] for row in own) for name in own[0] if isinstance(own[0][name], (int, float))}
                print(
                    f"{kind:11}  {policy:12} {medians['computed']:10.0f} {medians['hit']:7.3f} {medians['simulated']:10.0f} "
                    f"{medians['simulated_hit']:7.3f} {medians['p50_ms']:7.0f} {medians['p99_ms']:7.0f} "
                    f"{sum(row['wrong'] for row in own):6} {sum(row['failed'] for row in own):7}"
                )
    for name, measured in (("overhead", compare_overhead), ("scaling", compare_scaling)):
        if not args.only or name in args.only:
            results[name] = measured(args)
            print(name, json.dumps(results[name]))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
