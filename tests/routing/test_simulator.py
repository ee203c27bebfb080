"""The simulator: its counts in cases small enough for a pencil, and the order of the policies where topics cluster."""

import numpy as np
import pytest

from benchmarks.routing_simulator import simulate, workload

ONE = {"replicas": 1, "clients": 1, "block": 10, "question": 0, "answer": 0}


def test_tokens_by_hand():
    sizes = [40, 20, 30]
    # Room for 7 pages: 0 and 1 are computed and kept; 2 takes a page and then two of 0, from its end.
    jobs = [[0, 1], [1, 0], [2], [1], [0]]
    outcome = simulate(jobs, sizes, policy="document", pages=7, **ONE)
    assert (outcome.computed, outcome.asked) == (40 + 20 + 0 + 30 + 20 + 20, 60 + 60 + 30 + 20 + 40)


def test_two_replicas_by_hand():
    sizes, jobs = [40, 40], [[0], [1], [0], [1], [0], [1]]
    options = {"replicas": 2, "clients": 1, "pages": 4, "block": 10, "question": 0, "answer": 0, "assumed": 1.0}
    # In turns, each replica always gets the same document, and then 0, 1, 0 and 0, 0, 1.
    assert simulate(jobs, sizes, policy="round_robin", **options).computed == 80
    assert simulate([[0], [0], [1]] * 2, sizes, policy="round_robin", **options).computed == 40 * (3 + 2)
    # By documents, both stay at their owners, which are two replicas or one that holds one document at a time.
    outcomes = [simulate(jobs, sizes, policy="document", seed=seed, **options) for seed in range(8)]
    assert {outcome.computed for outcome in outcomes} == {80, 240}
    assert {outcome.mispredicted for outcome in outcomes} == {0}


def test_documents_are_distinct_and_of_one_topic():
    jobs = workload(np.random.default_rng(0), 200, 500, topic_size=20)
    assert all(len(set(job)) == len(job) <= 8 for job in jobs)
    groups = [{n} for n in range(200)]
    for job in jobs:
        joined = set().union(*(groups[n] for n in job))
        for n in joined:
            groups[n] = joined
    assert max(map(len, groups)) < 45
    free = workload(np.random.default_rng(0), 200, 500)
    assert len(set().union(*map(set, free))) > 150


@pytest.mark.ci
def test_documents_cluster_better_than_prefixes_and_those_better_than_chance():
    rng = np.random.default_rng(3)
    sizes = [int(size) for size in rng.integers(120, 221, 400)]
    pages = sum(-(-size // 16) for size in sizes) // 3
    jobs = workload(rng, 400, 800, topic_size=20)
    options = {"replicas": 4, "clients": 10, "pages": pages}
    computed = {name: simulate(jobs, sizes, policy=name, **options).computed for name in ("document", "prefix", "power_of_two")}
    assert computed["document"] < 0.4 * computed["prefix"]
    assert computed["prefix"] < computed["power_of_two"]
    apart = simulate(jobs, sizes, policy="document", gateways=4, **options).computed
    told = simulate(jobs, sizes, policy="document", gateways=4, report_s=2.0, **options).computed
    assert computed["document"] <= told < 0.7 * apart
