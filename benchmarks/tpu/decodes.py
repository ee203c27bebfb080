"""Compile a run of decodes with every layer of a model for a TPU that may be absent, and print its memory as JSON.

    PYTHONPATH=.cache/libtpu:. python -m benchmarks.tpu.decodes [--chip v6e] [--rows 64] [--layers 4]

The sizes of the pool are those of the whole model. `copies` names the copies of arrays as large as a layer's pool or larger.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from typing import Any

import jax
import jax.numpy as jnp

import benchmarks.tpu  # noqa: F401  sets libtpu's environment
from benchmarks.aot import MIB, compile_call, decoder, planned
from benchmarks.tpu.attention import compiled_backend
from benchmarks.tpu.chips import CHIPS
from chunkattn.config import EngineConfig
from chunkattn.engine.build import attention_spec
from chunkattn.engine.core import EngineCore
from chunkattn.engine.runner import Runner

_COPY = re.compile(r"= (\w+)\[([\d,]*)\]\S* (?:copy|copy-start|transpose)\(")
MODEL = "qwen3-0.6b"


def copies(text: str, least: int) -> list[str]:
    """Return the arrays of at least `least` values that a program copies."""
    found = [(kind, [int(side) for side in sides.split(",") if side]) for kind, sides in _COPY.findall(text)]
    return [f"{kind}{shape}" for kind, shape in found if math.prod(shape) >= least]


def compile_run(chip: str, rows: int, layers: int | None) -> dict[str, Any]:
    """Compile the program of runs of `rows` rows with tables of the widest contexts, and return the result for JSON."""
    config = EngineConfig(max_num_seqs=64, max_num_batched_tokens=2048, block_size=16)
    model, pages = decoder(MODEL, layers), planned(MODEL, CHIPS[chip].hbm_bytes, config).num_pages
    backend = compiled_backend(chip)(attention_spec(config, model.spec, jnp.dtype("bfloat16")))
    runner = Runner(model, backend, 64, config.max_logprobs)
    core, layer = EngineCore(runner, config, 4096), jax.eval_shape(lambda: backend.allocate(pages))
    arrays = core.runs.empty(rows, core.builder.width_buckets[-1])
    result = compile_call(
        lambda: runner.lower(arrays, pages, CHIPS[chip].sharding()),
        lambda compiled: {"copies": copies(compiled.as_text() or "", layer.size)},
    )
    pool = model.spec.num_layers * layer.size * layer.dtype.itemsize
    return {"chip": chip, "rows": rows, "layers": model.spec.num_layers, "pool_mib": round(pool / MIB, 1), **result}


def main() -> None:
    """Compile the programs of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", nargs="+", default=["v6e"], choices=list(CHIPS))
    parser.add_argument("--rows", type=int, nargs="+", default=[64])
    parser.add_argument("--layers", type=int, help="number of layers; default: all")
    args = parser.parse_args()
    print(json.dumps([compile_run(chip, rows, args.layers) for chip in args.chip for rows in args.rows], indent=2))


if __name__ == "__main__":
    main()
