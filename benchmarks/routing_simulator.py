"""Simulate replicas behind a gateway, under each policy of `benchmarks.routing_policies`, and compare what they compute.

    python -m benchmarks.routing_simulator [--replicas 4 64 1024] [--gateways 8 --report 2] [--json]

Clients ask one request after the other. A request has 4 to 8 documents in shuffled order, drawn by Zipf's law: independently,
or all of one topic (`--topic-size`). A replica's cache is a least recently used list of pages, as the engine's is. The
policies are the objects of the gateway; only clock, clients and engines are simulated. All caches together hold all documents
once, or 4/3 times with up to 9 replicas.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from benchmarks.routing_policies import POLICIES
from chunkattn.gateway.policy import Policy
from chunkattn.gateway.watch import DOCUMENT_SHARE
from chunkattn.schema.piece_keys import Keys
from chunkattn.server.cache_report import CacheReports
from chunkattn.terminal.progress import timed

if TYPE_CHECKING:
    from chunkattn.async_llm import AsyncLLM


BYTES_PER_TOKEN = 4
_ENGINE = SimpleNamespace(
    client=SimpleNamespace(restarts=0, limits=None), config=SimpleNamespace(lora_names=()), decide_method=None
)
"""Engine of the replicas' logs."""


@dataclass(frozen=True)
class Outcome:
    """Result of a simulation.

    Attributes:
        computed: tokens of documents that the replicas computed.
        asked: tokens of documents that the requests held.
        hit_rate: share of the tokens asked that was cached.
        p50_s: median time to the first token.
        p99_s: 99th percentile of the time to the first token.
        mispredicted: error of the policy's predictions of missing bytes, as a share of the bytes asked.
        decision_s: mean CPU time of a decision, measured.
    """

    computed: int
    asked: int
    hit_rate: float
    p50_s: float
    p99_s: float
    mispredicted: float
    decision_s: float


def workload(
    rng: np.random.Generator,
    documents: int,
    requests: int,
    *,
    topic_size: int = 0,
    zipf: float = 1.0,
    low: int = 4,
    high: int = 8,
) -> list[list[int]]:
    """Return requests, each the numbers of its distinct documents in shuffled order.

    Args:
        rng: source of randomness.
        documents: number of documents.
        requests: number of requests.
        topic_size: documents of a topic, on average; all documents of a request are of one topic. 0 draws from all.
        zipf: exponent of Zipf's law, by which documents are drawn.
        low: number of documents of the smallest request.
        high: number of documents of the largest request.
    """
    weights = np.empty(documents)
    weights[rng.permutation(documents)] = 1 / np.arange(1, documents + 1) ** zipf
    everything = np.arange(documents)
    steps = np.cumsum(weights)
    topics = rng.integers(0, max(1, documents // topic_size), documents) if topic_size else np.zeros(documents, int)
    order = np.argsort(topics, kind="stable")
    starts = np.searchsorted(topics[order], np.arange(topics.max() + 2))
    made = []
    for _ in range(requests):
        members, own = everything, steps
        if topic_size:
            topic = topics[_draw(rng, steps, 1)[0]]
            members = order[starts[topic] : starts[topic + 1]]
            own = np.cumsum(weights[members])
        wanted, found = min(int(rng.integers(low, high + 1)), len(members)), dict[int, None]()
        while len(found) < wanted:
            found.update(dict.fromkeys(members[_draw(rng, own, 2 * high)].tolist()))
        made.append([int(number) for number in rng.permutation(list(found)[:wanted])])
    return made


def _draw(rng: np.random.Generator, steps: np.ndarray, size: int) -> np.ndarray:
    """Return places drawn by their weights, whose cumulative sums are `steps`."""
    return np.searchsorted(steps, rng.random(size) * steps[-1] * (1 - 1e-12), side="right")


class Cache:
    """Cache of one engine: the least recently used parts lose pages first, from their ends, unless requests use them.

    Args:
        pages: number of pages.
        block: tokens of a page.
    """

    def __init__(self, pages: int, block: int) -> None:
        self._room, self._block = pages, block
        self._pages: OrderedDict[int, int] = OrderedDict()  # pages present of each part
        self._users: dict[int, int] = {}

    def take(self, parts: Iterable[tuple[int, int]]) -> int:
        """Add the parts of a request that begins, and return the tokens to compute.

        Args:
            parts: key and tokens of each part.
        """
        computed = 0
        for key, tokens in parts:
            self._users[key] = self._users.get(key, 0) + 1
            present, pages = self._pages.pop(key, 0), -(-tokens // self._block)
            self._pages[key] = pages
            self._room -= pages - present
            computed += 0 if present == pages else tokens - present * self._block
        for key in list(self._pages) if self._room < 0 else ():
            if key in self._users:
                continue
            freed = min(self._pages[key], -self._room)
            self._room += freed
            self._pages[key] -= freed
            if not self._pages[key]:
                del self._pages[key]
            if self._room >= 0:
                break
        return computed

    def release(self, parts: Iterable[tuple[int, int]]) -> None:
        """Note that a request has ended.

        Args:
            parts: key and tokens of each part.
        """
        for key, _ in parts:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
            if key in self._pages:
                self._pages.move_to_end(key)


def simulate(
    jobs: Sequence[Sequence[int]],
    sizes: Sequence[int],
    *,
    policy: str,
    replicas: int,
    clients: int,
    pages: int,
    block: int = 16,
    text_sizes: Sequence[float] | None = None,
    question: int = 20,
    answer: int = 16,
    gateways: int = 1,
    report_s: float | None = None,
    assumed: float = DOCUMENT_SHARE,
    skip: int = 0,
    per_token_s: float = 0.4e-3,
    per_request_s: float = 0.05,
    noise: float = 0.0,
    seed: int = 0,
) -> Outcome:
    """Simulate a closed loop of clients over replicas. An engine prefills one request at a time and decodes in batches.

    Args:
        jobs: numbers of the documents of each request.
        sizes: tokens of each document.
        policy: name of a policy in `POLICIES`.
        replicas: number of replicas.
        clients: number of clients; each has one request at a time.
        pages: pages of each replica's cache.
        block: tokens of a page.
        text_sizes: bytes of each document, which the policy sees; None takes 4 for each token.
        question: tokens of a question.
        answer: tokens of an answer.
        gateways: number of gateways, which take turns; each has a policy of its own.
        report_s: seconds between two reports of a replica to all gateways; None for no reports.
        assumed: capacity that policies assume, as a share of the true capacity.
        skip: number of first requests that warm up and are not counted.
        per_token_s: seconds of prefill for each token.
        per_request_s: seconds of a request beside the prefill of documents.
        noise: sigma of the log-normal noise of all times.
        seed: seed of policies, names and noise.
    """
    rng, serial = random.Random(seed), count()
    text_sizes = [BYTES_PER_TOKEN * size for size in sizes] if text_sizes is None else text_sizes
    names = [f"replica {number} of {seed}" for number in range(replicas)]
    caches, free_at = {name: Cache(pages, block) for name in names}, dict.fromkeys(names, 0.0)
    logs = {name: CacheReports(cast("AsyncLLM", _ENGINE)) for name in names}
    policies = [_policy(policy, names, assumed * pages * block * BYTES_PER_TOKEN, seed + n) for n in range(gateways)]
    computed = asked = wrong = 0
    times, decisions, told = list[float](), list[float](), dict.fromkeys(names, 0)
    events: list[tuple[float, int, Any]] = [(0.0, next(serial), None) for _ in range(clients)]
    if report_s is not None:
        events += [(report_s * (n + 1) / replicas, next(serial), name) for n, name in enumerate(names)]
    heapq.heapify(events)
    left = iter(enumerate(jobs))
    running = 0
    while events:
        now, _, event = heapq.heappop(events)
        if isinstance(event, str):
            if running:
                report = logs[event].report(told[event])
                for one in policies:
                    one.note(event, report["held"], now)
                told[event] = report["version"]
                heapq.heappush(events, (now + (report_s or 0), next(serial), event))
            continue
        if event is not None:
            name, one, work, parts = event
            running -= 1
            caches[name].release(parts)
            one.done(name, work)
        number, documents = next(left, (-1, ()))
        if number < 0:
            continue
        one = policies[number % gateways]
        keys = Keys(tuple([(d + 1, int(text_sizes[d])) for d in documents]), BYTES_PER_TOKEN * question)
        began = time.thread_time()
        name = one.rank(keys, names)[0]
        decisions.append(time.thread_time() - began)
        missing = one.missing(name, keys)
        work = one.sent(name, keys, now)
        if report_s is not None:
            with logs[name].sent(keys):
                pass
        parts = [(d + 1, sizes[d]) for d in documents]
        new = caches[name].take(parts)
        # The cache keeps full pages alone of question and answer.
        parts.append((-1 - number, (question + answer) // block * block))
        caches[name].take(parts[-1:])
        begin = max(now, free_at[name])
        free_at[name] = begin + (new * per_token_s + per_request_s / 4) * rng.lognormvariate(0, noise)
        if number >= skip:
            computed, asked = computed + new, asked + sum(sizes[d] for d in documents)
            wrong += abs(BYTES_PER_TOKEN * new - missing)
            times.append(free_at[name] - now)
        running += 1
        end = free_at[name] + per_request_s * rng.lognormvariate(0, noise)
        heapq.heappush(events, (end, next(serial), (name, one, work, parts)))
    p50, p99 = np.quantile(times, [0.5, 0.99]).tolist()
    return Outcome(
        computed, asked, 1 - computed / asked, p50, p99, wrong / (BYTES_PER_TOKEN * asked), sum(decisions) / len(decisions)
    )


def _policy(name: str, names: Sequence[str], capacity: float, seed: int) -> Policy:
    policy = POLICIES[name](seed=seed)
    policy.set_replicas(names)
    for replica in names:
        policy.set_capacity(replica, capacity)
    return policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 64, 1024])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--topic-size", type=int, nargs="+", default=[20, 0], help="documents of a topic; 0: independent")
    parser.add_argument("--documents", type=int, default=100, help="documents per replica")
    parser.add_argument("--requests", type=int, default=200, help="requests per replica")
    parser.add_argument("--most-requests", type=int, default=60_000)
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--report", type=float, help="seconds between reports; by default there are none")
    parser.add_argument("--assumed", type=float, default=DOCUMENT_SHARE, help="share of the true capacity that is assumed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    if not args.json:
        print("replicas  documents    policy         hit rate    computed  p50 ms  p99 ms  mispredicted  ms/decision")
    for replicas in args.replicas:
        for topic_size in args.topic_size:
            rng = np.random.default_rng(args.seed)
            documents = args.documents * replicas
            sizes = [int(size) for size in rng.integers(120, 221, documents)]
            pages = sum(-(-size // 16) for size in sizes) // (3 if replicas < 10 else replicas)
            requests = min(args.requests * replicas, args.most_requests)
            jobs = workload(rng, documents, requests, topic_size=topic_size, zipf=args.zipf)
            kind = "topics" if topic_size else "independent"
            for policy in args.policies:
                with timed(f"{replicas} replicas, {kind}, {policy}"):
                    outcome = simulate(
                        jobs,
                        sizes,
                        policy=policy,
                        replicas=replicas,
                        clients=max(8, replicas * 8 // 3),
                        pages=pages,
                        gateways=args.gateways,
                        report_s=args.report,
                        assumed=args.assumed,
                    )
                rows.append({"replicas": replicas, "documents": kind, "policy": policy} | asdict(outcome))
                if not args.json:
                    print(
                        f"{replicas:8}  {kind:11}  {policy:12} {outcome.hit_rate:10.3f} {outcome.computed:11} "
                        f"{1000 * outcome.p50_s:7.0f} {1000 * outcome.p99_s:7.0f} {outcome.mispredicted:13.3f} "
                        f"{1000 * outcome.decision_s:12.3f}",
                        flush=True,
                    )
    if args.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
