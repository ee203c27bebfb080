"""A whole decoder step with every layer of a real geometry, compiled for a chip and compared with its memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from benchmarks.aot import MIB, MODELS, Step, compile_call, lower_step, planned
from benchmarks.tpu.attention import compiled_backend
from benchmarks.tpu.chips import CHIPS

WIDEST = 1 << 15
"""Pages of the longest page table, which fills a pool of the chip's memory or reaches the kernel's limit."""


def steps(chip: str, layers: int | None = None) -> Iterator[Step]:
    """Yield prefill and decode steps of the models with weights small enough to leave room for pages."""
    for model in MODELS:
        if planned(model, CHIPS[chip].hbm_bytes).free_bytes > 1 << 30:
            yield Step(chip, model, 2048, layers=layers)
            yield Step(chip, model, 64, layers=layers)
            if model == "qwen3-0.6b":
                yield Step(chip, model, 2048, width=WIDEST, layers=layers)
                yield Step(chip, model, 2048, kv_cache_dtype="fp8", layers=layers)


def compile_step(step: Step) -> dict[str, Any]:
    """Compile a step with the pool that the engine would allocate beside the weights, and return the result for JSON."""
    chip = CHIPS[step.chip]
    sizes, lower = lower_step(step, compiled_backend(step.chip), chip.hbm_bytes, chip.sharding())
    result = {"kind": "step", **asdict(step), **sizes} | compile_call(lower)
    if result["compiled"]:
        result["hbm_limit_mib"] = chip.hbm_bytes // MIB
        result["fits"] = result["hbm_mib"] <= result["hbm_limit_mib"]
    return result
