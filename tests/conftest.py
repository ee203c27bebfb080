import logging
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# PyTorch's matrices are tiny here, and its idle threads spin on the cores of the other worker.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Variables reach the engines and servers that tests start, too. JAX would keep no program that compiles within a second.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")

import numpy as np
import pytest
from hypothesis import settings
from transformers import Qwen3Config

from chunkattn import LLM
from tests.chat_templates import CHATML
from tests.checkpoints import CHECKPOINTS, Oracle, make_checkpoint
from tests.costs import Costs
from tests.memory_maps import release_programs
from tests.reranker_files import CHAT_OPTIONS, SHAPE, add_tokenizer
from tests.server_helpers import SMALL, ServerProcess, is_idle, wait_until

collect_ignore = ["gpu", "vllm", "clients"]  # need environments with a newer JAX, with vLLM, and with many clients
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    collect_ignore.append("parallel")  # needs eight devices; run by tests/engine/test_tensor_parallel.py


# Fixed seeds, and no time limit for an example.
settings.register_profile("chunkattn", derandomize=True, deadline=None)
settings.load_profile("chunkattn")


def pytest_configure(config):
    if os.environ.get("TEST_COSTS"):
        config.pluginmanager.register(Costs())


@pytest.fixture(scope="module", autouse=True)
def few_maps():
    """Between two files."""
    yield
    release_programs()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Folder of a named tiny random checkpoint, made once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make_checkpoint(CHECKPOINTS[name], tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory):
    """A tiny random model with a tokenizer of Qwen's kind and a chat template, of 2,048 positions."""
    made = tmp_path_factory.mktemp("chat")
    make_checkpoint(Qwen3Config(**{**SHAPE, "max_position_embeddings": 2048}), made)
    add_tokenizer(made, chat_template=CHATML)
    return made


@pytest.fixture(scope="session")
def chat_llm(chat_folder):
    """An engine of `chat_folder`, which must have no leaked page at the end."""
    made = LLM(str(chat_folder), **CHAT_OPTIONS)
    yield made
    made.core.scheduler.check()
    assert made.reset_prefix_cache(), "pages leaked"


@pytest.fixture(scope="session")
def oracle(checkpoint):
    """transformers on a named checkpoint: float32, eager, custom masks."""
    made: dict[str, Oracle] = {}

    def get(name: str) -> Oracle:
        if name not in made:
            made[name] = Oracle(checkpoint(name))
        return made[name]

    return get


@pytest.fixture(scope="session")
def engine(checkpoint):
    """An engine on a named checkpoint; equal options share one, so its programs compile once."""
    made: dict[tuple, LLM] = {}

    def get(name: str, **options) -> LLM:
        defaults = {"skip_tokenizer_init": True, "max_num_batched_tokens": 256, "max_num_seqs": 16, "max_logprobs": 128}
        options = {**defaults, "kv_cache_memory_bytes": 8 << 20, **options}
        key = (name, *sorted(options.items()))
        if key not in made:
            made[key] = LLM(str(checkpoint(name)), **options)
        return made[key]

    yield get
    for llm in made.values():
        llm.core.scheduler.check()
        assert llm.reset_prefix_cache(), "pages leaked"


@pytest.fixture(scope="session")
def demo() -> LLM:
    """The bundled demo model."""
    return LLM(enable_chunk_aware=True, kv_cache_memory_bytes=32 << 20, max_num_batched_tokens=512, decide_method="letters")


@pytest.fixture(scope="session")
def demo_server():
    """Server of the bundled demo model in a process of its own."""
    made = ServerProcess(*SMALL)
    yield made
    assert made.process.poll() is None, "the server has ended:\n" + "".join(made.log[-40:])
    with made.client() as http:
        wait_until(lambda: is_idle(http))
    assert made.close() == 0


@pytest.fixture(autouse=True)
def log_level():
    """The level of the package's log lines, which commands and servers set, is the same for every test."""
    logger = logging.getLogger("chunkattn")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers, the same in every run."""
    return np.random.default_rng(0)
