"""The cache fuzzer of `tests.fuzz`: in short, at length, and on planted defects."""

import logging
import time

import pytest

from tests.fuzz.alone import Alone
from tests.fuzz.fuzzer import EPISODE, Fuzzer
from tests.fuzz.oracle import Transformers
from tests.fuzz.plants import OF_STATES, PLANTS, planted
from tests.fuzz.rig import SUBJECTS, Rig, make_model
from tests.fuzz.witness import ColdEngine, Difference

SUBJECT = SUBJECTS["auto"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("fuzz"), SUBJECT)


@pytest.fixture(scope="module")
def rig(model):
    return Rig(model, SUBJECT)


@pytest.fixture(scope="module")
def cold(model):
    return ColdEngine(model, SUBJECT)


@pytest.fixture(scope="module")
def alone(model):
    return Alone(model, SUBJECT)


@pytest.fixture(scope="module")
def oracle(model):
    return Transformers(model, SUBJECT)


@pytest.fixture(autouse=True)
def quiet():
    """Without the engine's log of the injected failures."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.ci
def test_no_difference(rig, cold, oracle, alone):
    fuzzer = Fuzzer(rig, cold, oracle, 3, alone)
    fuzzer.run(1000)
    happened = (
        "answers",
        "cached tokens",
        "preemptions",
        "evictions",
        "restored parts",
        "interrupted",
        "damaged",
        "items first",
        "second opinions",
        "decisions",
        "choices",
        "runs of 16 decodes",
        "runs of several rows",
        "shapes",
    )
    assert all(fuzzer.counts[name] for name in happened), fuzzer.counts
    assert fuzzer.counts["decodes in runs"] > fuzzer.counts["steps"] / 4, fuzzer.counts
    assert fuzzer.counts["second opinions after scoring"]
    assert fuzzer.counts["second opinions after a restart"]
    assert fuzzer.counts["second opinions after cached documents"]
    assert fuzzer.counts["refused"] < fuzzer.counts["call"] / 10


@pytest.mark.slow
def test_no_difference_in_two_minutes(rig, cold, oracle, alone):
    end, seed = time.monotonic() + 120, 1
    while time.monotonic() < end:
        Fuzzer(rig, cold, oracle, seed, alone).run(EPISODE, lambda: time.monotonic() > end)
        seed += 1


@pytest.mark.slow
@pytest.mark.parametrize("plant", [plant for plant in PLANTS if plant not in OF_STATES])
def test_planted_defect_is_found(model, cold, alone, plant):
    rig = Rig(model, SUBJECT)  # some defects are traced
    bits = alone if plant == "order" else None  # the other plants change more than bits

    def fuzz():
        for seed in range(10):
            Fuzzer(rig, cold, None, seed, bits).run(EPISODE)

    with planted(plant), pytest.raises(Difference):
        fuzz()
