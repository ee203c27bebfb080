"""Time of the host in a step, by part: `Clock`, and an engine whose device computes nothing.

Scripts that measure the host import this module.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from transformers import Qwen3Config

from chunkattn.backends.pallas_gpu.backend import PallasGpuBackend
from chunkattn.config import EngineConfig
from chunkattn.engine.build import attention_spec
from chunkattn.engine.core import EngineCore
from chunkattn.engine.runner import Runner
from chunkattn.engine.upload import unpack
from chunkattn.models.decoder import Decoder, random_decoder
from chunkattn.models.families import spec_from_config
from chunkattn.models.loader import DEMO_FOLDER, open_files
from chunkattn.tools.bench.geometry import QWEN3, core_of, sizes

MOST_POSITIONS = 40960
_STUB = Qwen3Config(**sizes(1024, 64, 64, 28, 16, 8, 128, MOST_POSITIONS), **QWEN3)
"""As many arrays as Qwen3-0.6B has, and its heads; small matrices."""


class StubBackend(PallasGpuBackend):
    """The GPU backend's metadata, for a step that does not attend."""

    interpret = False

    def forward(self, q: Any, k: Any, v: Any, cache: Any, metadata: Any, **_: Any) -> Any:
        """Return the queries."""
        return q, cache


def stub_core(pages: int, **options: Any) -> EngineCore:
    """Return an engine whose step only touches its arguments, with the GPU backend's metadata.

    Args:
        pages: size of the KV pool in pages of 64 slots.
        **options: options of the engine.
    """
    config, spec, dtype = (
        EngineConfig(dtype="bfloat16", block_size=64, **options),
        spec_from_config(_STUB),
        jnp.dtype("bfloat16"),
    )
    runner = Runner(random_decoder(spec, dtype), StubBackend(attention_spec(config, spec, dtype)), pages, config.max_logprobs)

    def touch(params: Any, caches: Any, stacks: Any, given: Any, *, form: Any = None, backend: Any = None) -> Any:
        token_ids, *inputs = given if form is None else unpack(given, form)
        first = (jnp.ravel(x)[0].astype(jnp.float32) for x in jax.tree.leaves((params, stacks, token_ids, inputs)))
        hidden = jnp.zeros((len(token_ids), spec.hidden_size), jnp.float32) + sum(first, jnp.float32(0)) * 0
        return hidden, jnp.ones(len(token_ids), bool), caches

    runner._step = jax.jit(touch, donate_argnums=1, static_argnames=("form", "backend"))
    runner._packs = lambda where: True  # type: ignore[method-assign]  # as on a card
    return EngineCore(runner, config, spec.max_model_len)


def demo_core(pages: int, backend: str = "cpu", **options: Any) -> EngineCore:
    """Return an engine over the demo model, for more positions than it was trained on: its answers mean nothing.

    Args:
        pages: size of the KV pool in pages of 64 slots.
        backend: name of the attention backend.
        **options: options of the engine.
    """
    config = EngineConfig(dtype="bfloat16", block_size=64, **options)
    files = open_files(replace(config, model=str(DEMO_FOLDER), skip_tokenizer_init=True))
    model = files.load()
    model = Decoder(replace(model.spec, max_model_len=MOST_POSITIONS), model.weights, model.dtype)
    return core_of(model, config, pages, backend)


class Clock:
    """Sum of the time in some functions, less that of clocked functions inside them.

    Attributes:
        spent: seconds by label.
        calls: number of calls by label.
    """

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._inner = [0.0]

    def watch(self, owner: Any, name: str, label: str) -> None:
        """Clock a function.

        Args:
            owner: object or module that has the function.
            name: name of the function.
            label: label of its time.
        """
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            began = time.perf_counter()
            try:
                return original(*args, **options)
            finally:
                took = time.perf_counter() - began
                self.calls[label] += 1
                self.spent[label] += took - self._inner.pop()
                self._inner[-1] += took

        setattr(owner, name, timed)

    def reset(self) -> None:
        """Forget all times and calls."""
        self.spent.clear()
        self.calls.clear()
