"""Tests of the vLLM integration: `pytest --confcutdir=tests/vllm tests/vllm`, in an environment with vLLM."""

import os

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0-1")
os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # unless a test sets it: many tests look at the connector

import numpy as np
import pytest

from tests.checkpoints import make_checkpoint
from tests.vllm.engines import engine
from tests.vllm.models import CONFIGS
from tests.vllm.witness import Witness


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Folder of a named tiny random checkpoint, made once."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = make_checkpoint(CONFIGS[name], tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture(scope="session")
def witness(checkpoint):
    """transformers on a named checkpoint."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = Witness(checkpoint(name))
        return made[name]

    return get


@pytest.fixture(scope="module")
def shared_engine(request, checkpoint):
    """Engine of one test file, with the arguments that the file names in `ENGINE`."""
    with engine(checkpoint("llama"), **request.module.ENGINE) as made:
        yield made


@pytest.fixture
def llama(shared_engine):
    """Engine with empty caches. After the test, scheduler and worker agree and hold nothing of ended requests."""
    shared_engine.reset()
    yield shared_engine
    shared_engine.check_idle()


@pytest.fixture
def model(witness):
    """transformers on the checkpoint of `llama`."""
    return witness("llama")


@pytest.fixture
def rng(request):
    """Random numbers of a test's own."""
    return np.random.default_rng([ord(letter) for letter in request.node.name])
