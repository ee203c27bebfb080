"""The cache fuzzer of `tests.fuzz` over models with recurrent layers: in short, at length, and on planted defects."""

import logging
import time
from functools import cache
from typing import NamedTuple

import pytest

from tests.fuzz.alone import Alone
from tests.fuzz.fuzzer import EPISODE, Fuzzer
from tests.fuzz.oracle import Transformers
from tests.fuzz.plants import OF_STATES, planted
from tests.fuzz.rig import SUBJECTS, Rig, make_model
from tests.fuzz.witness import ColdEngine, Difference

KINDS = [name for name, subject in SUBJECTS.items() if subject.recurrence is not None]


class Judges(NamedTuple):
    rig: Rig
    cold: ColdEngine
    oracle: Transformers | None
    alone: Alone


@pytest.fixture(scope="module")
def judges(tmp_path_factory):
    """The engine and the judges of a kind."""

    @cache
    def get(kind):
        subject = SUBJECTS[kind]
        model = make_model(tmp_path_factory.mktemp("fuzz"), subject)
        oracle = Transformers(model, subject) if kind == "recurrent" else None
        return Judges(Rig(model, subject), ColdEngine(model, subject), oracle, Alone(model, subject))

    return get


@pytest.fixture(autouse=True)
def quiet():
    """Without the engine's log of the injected failures."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def fuzz(judges, seed, operations, expired=lambda: False):
    fuzzer = Fuzzer(judges.rig, judges.cold, judges.oracle, seed, judges.alone)
    fuzzer.run(operations, expired)
    return fuzzer.counts


@pytest.mark.ci
def test_no_difference(judges):
    counts = fuzz(judges("recurrent"), 0, 800)
    happened = (
        "answers",
        "cached tokens",
        "preemptions",
        "evictions",
        "evicted states",
        "refused by name",
        "damaged",
        "decisions",
        "choices",
        "second opinions",
        "stop",
        "shapes",
    )
    assert all(counts[name] for name in happened), counts
    assert counts["refused"] < counts["call"] / 2  # an engine of few slots refuses what pins leave no room for


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_difference_at_length(judges, kind):
    end, seed = time.monotonic() + 60, 1
    while time.monotonic() < end:
        fuzz(judges(kind), seed, EPISODE, lambda: time.monotonic() > end)
        seed += 1


@pytest.mark.slow
@pytest.mark.parametrize("plant", OF_STATES)
def test_planted_defect_is_found(judges, plant):
    def run():
        for seed in range(10):
            fuzz(judges("recurrent")._replace(oracle=None), seed, EPISODE)

    with planted(plant), pytest.raises(Difference):
        run()
