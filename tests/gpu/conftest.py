"""Tests of the GPU kernel in Pallas' GPU interpreter: `pytest --confcutdir=tests/gpu tests/gpu`, with JAX 0.11 or newer."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Warpgroups and the step itself each hold a thread of XLA's pool, which otherwise has one a core.
os.environ["NPROC"] = "16"

import jax
import pytest

from chunkattn.backends.pallas_gpu.backend import INTERPRETER_SINCE


def pytest_configure(config):
    if jax.__version_info__ < INTERPRETER_SINCE:
        needed = ".".join(map(str, INTERPRETER_SINCE))
        raise pytest.UsageError(f"tests/gpu needs the GPU interpreter of JAX {needed} or newer, found JAX {jax.__version__}")
