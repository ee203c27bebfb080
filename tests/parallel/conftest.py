"""Engines over several devices, for tests that run in a process of eight virtual devices: see `test_parallel.py`."""

import copy
import gc

import jax
import numpy as np
import pytest

from chunkattn import LLM
from tests.checkpoints import CHECKPOINTS, make_checkpoint
from tests.parallel.answers import OPTIONS

HEADS, HEAD_DIM = 8, 16


def pytest_collection_modifyitems(items):
    assert len(jax.devices()) == 8, "these tests need XLA_FLAGS=--xla_force_host_platform_device_count=8"


@pytest.fixture(scope="session")
def wide(tmp_path_factory):
    """Folder of a named checkpoint of eight heads, more than its two or four KV heads."""
    made = {}

    def get(name, **changes):
        key = (name, *changes.items())
        if key not in made:
            config = copy.deepcopy(CHECKPOINTS[name])
            config.num_attention_heads, config.head_dim = HEADS, HEAD_DIM
            for field, value in changes.items():
                setattr(config, field, value)
            made[key] = make_checkpoint(config, tmp_path_factory.mktemp(name))
        return made[key]

    return get


def _engines():
    """Yield a function that starts engines; then close them, with every page free."""
    made = []

    def get(folder, size=1, **options):
        made.append(LLM(str(folder), tensor_parallel_size=size, **OPTIONS | options))
        return made[-1]

    yield get
    for llm in made:
        llm.core.scheduler.check()
        assert llm.reset_prefix_cache(), "pages leaked"
        llm.close()
    made.clear()
    gc.collect()  # engines hold many programs, and a process can map only so many


@pytest.fixture
def start():
    """Starts engines that end with the test."""
    yield from _engines()


@pytest.fixture(scope="module")
def start_for_module():
    """Starts engines that end with the module."""
    yield from _engines()


@pytest.fixture
def rng():
    return np.random.default_rng(0)
