"""A pytest plugin: workers of `AsyncLLM` that fail, hang and die on request."""

import asyncio
import os

import jax
import pytest

# Put on the worker's path: the product has no hooks for tests. Each fault waits in a file.
FAULTS = """
import os, time
from pathlib import Path
file = Path(os.environ["FAULT_FILE"])
read = lambda: file.read_text() if file.exists() else ""
if read() == "exit":
    os._exit(3)
from chunkattn.engine.core import EngineCore
from chunkattn.engine.runner import Runner
metrics_text = EngineCore.metrics_text
def faulty_metrics(self):
    if read() == "error":
        raise ZeroDivisionError("outside a step")
    return metrics_text(self)
EngineCore.metrics_text = faulty_metrics
def faulty(original, steps, self, *arrays, **options):
    fault = read()
    if fault == "raise":
        file.unlink()
        raise ValueError("injected")
    if fault == "raise always":
        raise ValueError("injected")
    if fault == "hang":
        file.write_text("hanging")
        while True:
            time.sleep(1)
    if fault == "slow":
        time.sleep(0.05 * steps(arrays[0]))
    return original(self, *arrays, **options)
def faulty_call(name, steps):
    original = getattr(Runner, name)
    setattr(Runner, name, lambda self, *arrays, **options: faulty(original, steps, self, *arrays, **options))
faulty_call("forward", lambda arrays: 1)
faulty_call("decode", lambda arrays: int(arrays.limit))
from chunkattn.parsers.encode import PartEncoder
ids = PartEncoder._ids
def stuck(self, text):
    while "never ends" in text:
        time.sleep(1)
    return ids(self, text)
PartEncoder._ids = stuck
"""


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def fault_file(tmp_path_factory):
    """A file that workers look into before every step; removed, nothing is wrong with them."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "sitecustomize.py").write_text(FAULTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULT_FILE", str(folder / "fault"))
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        for name in ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"):
            patch.setenv(name.upper(), str(getattr(jax.config, name)))
        yield folder / "fault"


@pytest.fixture
def fault(fault_file):
    """The same file, gone when the test ends."""
    yield fault_file
    fault_file.unlink(missing_ok=True)
