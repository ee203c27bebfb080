"""Policies: their records against a naive model, their rules in small cases, and their bounds at 1,024 replicas."""

import random
from collections import Counter

import pytest

from benchmarks.routing_policies import POLICIES, PowerOfTwoPolicy, PrefixPolicy, RoundRobinPolicy
from chunkattn.gateway import policy as policies
from chunkattn.gateway.policy import Policy, Work
from chunkattn.schema.piece_keys import Keys

NAMES = ["a", "b", "c"]


def keys(*numbers, size=100, rest=10):
    return Keys(tuple((number, size) for number in numbers), rest)


def made(kind=Policy, names=NAMES, capacity=None):
    policy = kind()
    policy.set_replicas(names)
    for name in names if capacity else ():
        policy.set_capacity(name, capacity)
    return policy


def held(policy, name, numbers):
    return {number for number in numbers if not policy.missing(name, keys(number))}


class Naive:
    """The record of one replica as a list, oldest first: (key, size, time)."""

    def __init__(self, capacity):
        self.capacity, self.pieces, self.queue = capacity, [], {}

    def drop(self, key):
        self.pieces = [piece for piece in self.pieces if piece[0] != key]

    def has(self, key):
        return key in [piece[0] for piece in self.pieces]

    def shrink(self):
        while sum(size for _, size, _ in self.pieces) > self.capacity:
            self.pieces.pop(0)

    def sent(self, request, now):
        missing = sum(size for key, size in request.pieces if not self.has(key))
        for key, size in request.pieces[::-1]:
            self.drop(key)
            self.pieces.append((key, size, now))
        self.shrink()
        return missing


@pytest.mark.parametrize("seed", range(6))
def test_the_record_against_a_naive_model(seed):
    rng = random.Random(seed)
    policy, naive, queue = Policy(), {}, {}
    sizes = [rng.randrange(1, 60) for _ in range(30)]
    for now in range(300):
        action, name = rng.randrange(10), rng.choice(NAMES)
        numbers = rng.sample(range(30), rng.randrange(1, 6))
        request = Keys(tuple((number, sizes[number]) for number in numbers), rng.randrange(50))
        if action == 0 and rng.random() < 0.3:
            present = rng.sample(NAMES, rng.randrange(4))
            policy.set_replicas(present)
            naive = {n: naive.get(n, Naive(float("inf"))) for n in present}
        elif action == 1 and name in naive:
            capacity = rng.randrange(50, 400)
            policy.set_capacity(name, capacity)
            naive[name].capacity = capacity
            naive[name].shrink()
        elif action == 2:
            policy.note(name, request.pieces[::-1], now)  # sent by another gateway
            if name in naive:
                naive[name].sent(request, now)
        elif action == 3 and rng.random() < 0.3:
            policy.clear(name)
            if name in naive:
                naive[name].pieces = []
        elif action == 4:
            policy.forget(numbers[:1])
            for one in naive.values():
                one.drop(numbers[0])
        elif action < 8:
            work = policy.sent(name, request, now)
            if name in naive:
                assert work.size - request.rest - naive[name].sent(request, now) == policies._REQUEST
                naive[name].queue[now] = work.size
            queue[now] = name, work
        elif queue:
            number = rng.choice(list(queue))
            owner, work = queue.pop(number)
            policy.done(owner, work)
            if owner in naive:
                naive[owner].queue.pop(number, None)
        for one in NAMES:
            own = naive.get(one, Naive(0))
            assert held(policy, one, range(30)) == {key for key, _, _ in own.pieces}
            assert policy.queued(one) == sum(own.queue.values())
            assert policy.num_pieces(one) == len(own.pieces)
    assert set(policy._where) == {key for own in naive.values() for key, _, _ in own.pieces}


def test_a_request_goes_where_least_is_to_do():
    policy = made()
    policy.sent("b", keys(1, 2), 0)
    done = policy.sent("c", keys(1), 0)
    policy.done("c", done)
    # b: 0 missing, a quarter of 256 + 10 + 200 queued; c: 100 missing; a: 200 missing.
    assert policy.rank(keys(1, 2), NAMES) == ["c", "b", "a"]
    assert policy.rank(keys(1, 2, size=200), NAMES)[0] == "b"
    assert policy.rank(keys(1, 2, size=200), ["a", "c"]) == ["c", "a"]
    assert policy.rank(keys(1, 2), ["unknown", "b"]) == ["b", "unknown"]


def test_new_documents_go_to_the_owner_of_most_bytes():
    names = [f"replica {n}" for n in range(40)]
    one, other = made(names=names), made(names=names[::-1])
    owned = Counter()
    for key in range(1000, 1200):
        assert one.owner(key) == other.owner(key) == one.rank(keys(key), names)[0]
        owned[one.owner(key)] += 1
    assert max(owned.values()) < 20
    assert len(owned) > 30
    mixed = Keys(((1000, 10), (1001, 30)))
    assert other.rank(mixed, names)[0] == one.owner(1001)
    # A replica that leaves takes over no key of another one.
    one.set_replicas(names[1:])
    assert all(one.owner(k) == other.owner(k) for k in range(1000, 1200) if other.owner(k) != names[0])
    with pytest.raises(LookupError, match="no replica"):
        Policy().owner(1)


def test_a_request_that_was_not_taken_leaves_nothing():
    policy = made()
    policy.done("a", policy.sent("a", keys(1), 0))
    refused = policy.sent("a", keys(1, 2, 3), 1)
    later = policy.sent("a", keys(3), 2)
    policy.done("a", refused, computed=False)
    assert held(policy, "a", range(4)) == {1, 3}
    policy.done("a", later)
    assert policy.queued("a") == 0


def test_work_of_an_earlier_life_is_not_taken_off():
    policy = made()
    before = policy.sent("a", keys(1), 0)
    policy.set_replicas(["b"])
    assert policy.sent("a", keys(1), 0) == Work()
    policy.set_replicas(NAMES)
    assert held(policy, "a", [1]) == set()
    now = policy.sent("a", keys(1), 1)
    policy.done("a", before)
    assert policy.queued("a") == now.size
    policy.clear("a")  # the engine has restarted; its requests end with errors
    assert policy.queued("a") == now.size
    policy.done("a", now)
    assert policy.queued("a") == 0


def test_prefix_goes_to_the_longest_beginning():
    policy = made(PrefixPolicy)
    for name, numbers in (("a", (1, 2, 3)), ("b", (1, 2)), ("c", (2, 1, 3, 4))):
        policy.done(name, policy.sent(name, keys(*numbers), 0))
    assert policy.rank(keys(1, 2, 3, 4), NAMES) == ["a", "b", "c"]
    assert policy.rank(keys(2, 1), NAMES)[0] == "c"
    policy.sent("a", keys(), 0)
    assert policy.rank(keys(1), NAMES)[0] == "b"
    names = [f"replica {n}" for n in range(200)]
    many = made(PrefixPolicy, names)
    many.sent(names[77], keys(5, 6), 0)
    assert many.rank(keys(5, 6), names)[0] == names[77]


def test_policies_without_a_record_spread_requests():
    policy = made(RoundRobinPolicy)
    assert [policy.rank(keys(1), NAMES)[0] for _ in range(6)] == NAMES * 2
    policy = made(PowerOfTwoPolicy)
    policy.sent("a", keys(1), 0)
    firsts = Counter(policy.rank(keys(1), NAMES)[0] for _ in range(200))
    assert firsts["a"] == 0
    assert min(firsts["b"], firsts["c"]) > 50


@pytest.mark.parametrize("kind", POLICIES.values())
@pytest.mark.parametrize("count", [0, 1, 2, 16, 17, 100])
def test_rankings_hold_distinct_present_names_and_enough_of_them(kind, count):
    names = [f"replica {n}" for n in range(count)]
    policy = made(kind, names)
    for n in range(count):
        policy.sent(names[n], keys(n % 3, 7), n)
    allowed = names[: count - 3] if count > 16 else names
    for request in (keys(), keys(0, 7), keys(50)):
        ranked = policy.rank(request, allowed)
        assert len(ranked) == len(set(ranked)) >= min(3, len(allowed))
        assert set(ranked) <= set(allowed)
    assert kind().rank(keys(1), ["a", "b"])


def test_idle_replicas_share_requests_without_pieces():
    policy = made()
    assert len({policy.rank(Keys(), NAMES)[0] for _ in range(50)}) == 3


def test_decisions_and_memory_are_bounded_at_1024_replicas(monkeypatch):
    names = [f"replica {n}" for n in range(1024)]
    policy = Policy(most_pieces=8192)
    policy.set_replicas(names)
    for n, name in enumerate(names):
        policy.sent(name, keys(1, 2, *range(10 * n + 10, 10 * n + 20)), n)
    assert {policy.num_pieces(name) for name in names} == {8}
    assert len(policy._where) <= 8192
    compared = Counter()
    missing = policies.Holdings.missing

    def counted(self, pieces):
        pieces = list(pieces)
        compared.update(replicas=1, pieces=len(pieces))
        return missing(self, pieces)

    monkeypatch.setattr(policies.Holdings, "missing", counted)
    policy.rank(keys(*range(5000)), names)
    assert compared["replicas"] <= 64
    assert compared["pieces"] <= 64 * 256
    compared.clear()
    assert policy.rank(keys(1, 2, *range(5010, 5014)), names)[0] == names[500]
    assert compared["replicas"] <= 64
    monkeypatch.setattr(policies, "_MOST_OWNERS", 10)
    for key in range(10_000, 10_100):
        policy.owner(key)
    assert len(policy._owners) <= 10
    # Holders are compared in the order in which the piece was last sent to them, so all of them take turns.
    taken = set()
    for now in range(200):
        best = policy.rank(keys(1), names)[0]
        policy.sent(best, keys(1), 2000 + now)
        taken.add(best)
    assert len(taken) > 100
