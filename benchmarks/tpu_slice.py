"""Compile decoder steps for slices of TPUs that are absent: one program over all chips, with the real kernel inside.

    make .cache/libtpu/.installed    # the libtpu of the installed JAX
    PYTHONPATH=.cache/libtpu python -m benchmarks.tpu_slice [--topology v5e:2x4] [--model llama-3-70b] [--layers 2] [--rows 64]

The command prints what each chip holds, beside what `chunkattn plan` says of the whole model, and counts the collectives.
"""

from __future__ import annotations

import argparse
import json

from jax.experimental import topologies

import benchmarks.tpu  # noqa: F401  sets libtpu's environment
from benchmarks.aot import MODELS, Step, collectives, compile_call, lower_step
from benchmarks.tpu.attention import compiled_backend
from benchmarks.tpu.chips import CHIPS
from chunkattn.backends.pallas_tpu.backend import PallasTpuBackend
from chunkattn.terminal.progress import timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v6e:2x2", help="chip and shape of the slice")
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b")
    parser.add_argument("--layers", type=int, default=2, help="layers to compile; the pool keeps the pages of the whole model")
    parser.add_argument("--rows", type=int, default=64, help="rows of the step")
    args = parser.parse_args()
    chip = args.topology.partition(":")[0]
    devices = topologies.get_topology_desc(platform="tpu", topology_name=args.topology).devices
    step = Step(chip, args.model, args.rows, width=PallasTpuBackend.narrowest_table, layers=args.layers)
    with timed(f"{args.model}, {args.layers} layers on {args.topology}"):
        sizes, lower = lower_step(step, compiled_backend(chip), CHIPS[chip].hbm_bytes, devices)
        result = {"chips": len(devices), **sizes, **compile_call(lower, collectives)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
