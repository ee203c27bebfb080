"""The cache fuzzer over the GPU kernel in Pallas' GPU interpreter."""

import logging

import numpy as np
import pytest

from chunkattn.backends.pallas_gpu import backend
from chunkattn.backends.pallas_gpu.backend import PallasGpuBackend
from tests.fuzz import fuzzer
from tests.fuzz.plants import planted
from tests.fuzz.rig import SUBJECTS, Rig, make_model
from tests.fuzz.witness import ColdEngine, Difference

pytestmark = pytest.mark.timeout(900)
SUBJECT = SUBJECTS["pallas_gpu"]


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """A rig over the backend, and the witness. Few blocks of threads are fast to interpret, and enough to split all steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PallasGpuBackend, "multiprocessors", 8)
        patch.setattr(fuzzer, "smallest", lambda *given: None)
        logging.disable(logging.ERROR)  # hide the injected failures
        model = make_model(tmp_path_factory.mktemp("fuzz"), SUBJECT)
        yield Rig(model, SUBJECT), ColdEngine(model, SUBJECT)
        logging.disable(logging.NOTSET)


def fuzz(engines, seed, operations):
    episode = fuzzer.Fuzzer(*engines, None, seed)
    episode.run(operations)
    return episode.counts


@pytest.mark.slow
def test_no_difference(engines):
    counts, wanted = fuzzer.Counter(), ("answers", "cached tokens", "preempt", "decisions")
    for seed in range(104, 112):  # which operations a seed draws changes with every new kind of operation
        counts += fuzz(engines, seed, 15)
        if all(counts[name] for name in wanted):
            break
    assert all(counts[name] for name in wanted), counts


@pytest.mark.slow
def test_no_difference_at_length(engines):
    counts = sum((fuzz(engines, seed, 60) for seed in (2, 12)), start=fuzzer.Counter())
    happened = ("answers", "cached tokens", "preemptions", "evictions", "restored parts", "interrupted", "decisions")
    assert all(counts[name] for name in happened), counts


@pytest.mark.slow
def test_planted_defect_is_found(engines):
    with planted("position"), pytest.raises(Difference, match="come from the cache"):
        fuzz(engines, 5, 60)


@pytest.mark.slow
def test_wrong_page_lengths_are_found(engines, monkeypatch):
    pack = backend.pack_table
    monkeypatch.setattr(backend, "pack_table", lambda tables, page_len, *of: pack(tables, np.full_like(page_len, 16), *of))
    with pytest.raises(Difference, match="differ by"):
        fuzz(engines, 1, 60)
