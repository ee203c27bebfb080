"""Compile the TPU kernels for real chips, with no TPU at hand.

    pip install libtpu==0.0.42.1
    python -m benchmarks.tpu_aot [--topology v6e] [--quick] [--json FILE|-]

libtpu compiles for a chip it is told of. Every case is one layer's call, writes included:
whether it compiled, else the first line of the error; vector memory of each kernel, and
what the call takes in HBM beside its arguments. `--quick` is the common case on v6e.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

for _name, _value in {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}.items():
    os.environ.setdefault(_name, _value)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402

from chunkattn.backends import AttentionBatch, AttentionSpec  # noqa: E402
from chunkattn.backends.pallas_tpu import PallasTpuBackend  # noqa: E402

TOPOLOGIES: dict[str, dict[str, Any]] = {
    "v5e": {"topology_name": "v5e:1x1", "chips_per_host_bounds": [1, 1, 1]},
    "v5p": {"topology_name": "v5p:2x2x1"},  # the smallest there is; one of its chips is compiled for
    "v6e": {"topology_name": "v6e:1x1", "chips_per_host_bounds": [1, 1, 1]},
}
_MIB = 2**20


@dataclass(frozen=True)
class Case:
    """One compilation: a chip, a model's heads, and the sizes of a step."""

    topology: str
    head_dim: int
    block_size: int
    dtype: str
    heads: int = 16
    kv_heads: int = 8
    rows: int = 2048
    sequences: int = 64
    width: int = 256
    pages: int = 4096
    window: int | None = None

    @property
    def pool_bytes(self) -> int:
        """Of one layer's K and V."""
        return 2 * self.pages * self.kv_heads * self.block_size * self.head_dim * jnp.dtype(self.dtype).itemsize


class Compiled(PallasTpuBackend):
    """The kernels themselves, not their interpreter."""

    interpret = False


def cases(topology: str) -> Iterator[Case]:
    """The settings compiled for a chip, the common one first."""
    yield Case(topology, 128, 16, "bfloat16")
    yield Case(topology, 64, 16, "bfloat16", heads=14, kv_heads=2)
    yield Case(topology, 256, 16, "bfloat16", heads=8, kv_heads=1)
    yield Case(topology, 128, 32, "bfloat16", heads=28, kv_heads=4, window=4096)
    yield Case(topology, 128, 128, "bfloat16", heads=32, pages=1024)
    yield Case(topology, 128, 256, "bfloat16", heads=40, kv_heads=40, pages=256)
    yield Case(topology, 64, 32, "float32", heads=9, kv_heads=3)
    yield Case(topology, 128, 16, "float32")
    yield Case(topology, 256, 128, "float32", heads=8, kv_heads=4, pages=512)
    yield Case(topology, 128, 16, "bfloat16", heads=32, rows=8192, sequences=256, width=16384, pages=16384)
    yield Case(topology, 128, 16, "bfloat16", rows=131072, sequences=1, width=8192, pages=8192)
    yield Case(topology, 128, 16, "bfloat16", rows=1, sequences=1, width=1)


def lower(case: Case) -> Any:
    """The call of one layer, lowered for the case's chip; the pool is donated."""
    chip = topologies.get_topology_desc(platform="tpu", **TOPOLOGIES[case.topology]).devices[0]
    dtype = jnp.dtype(case.dtype)
    backend = Compiled(AttentionSpec(case.heads, case.kv_heads, case.head_dim, dtype, case.block_size, (case.window,)))
    row, seq = np.zeros(case.rows, np.int32), np.zeros(case.sequences, np.int32)
    table = np.zeros((case.sequences, case.width), np.int32)
    metadata = backend.build_metadata(AttentionBatch(0, row, row, row, seq, table, table, case.block_size))
    metadata = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), metadata)
    q, k = (jax.ShapeDtypeStruct((case.rows, heads, case.head_dim), dtype) for heads in (case.heads, case.kv_heads))
    cache = jax.eval_shape(lambda: backend.allocate(case.pages))
    where = jax.sharding.SingleDeviceSharding(chip)

    def call(*arrays: Any) -> Any:
        return backend.forward(*arrays, scale=case.head_dim**-0.5, window=case.window)

    return jax.jit(call, in_shardings=where, out_shardings=where, donate_argnums=3).lower(q, k, k, cache, metadata)


def vector_memory(hlo: str) -> dict[str, float]:
    """MiB of vector memory each kernel uses, by name."""
    used = {}
    for line in hlo.splitlines():
        kernel = re.search(r"%(\w+?)[.\d]* = .*tpu_custom_call", line)
        size = re.search(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"', line)
        if kernel and size:
            used[kernel[1]] = round(int(size[1]) / _MIB, 2)
    return used


def compile_case(case: Case) -> dict[str, Any]:
    """What became of it, as JSON has it."""
    began = time.perf_counter()
    result: dict[str, Any] = {**asdict(case), "compiled": False}
    try:
        compiled = lower(case).compile()
    except Exception as error:  # whatever the compiler objects to is the answer
        return result | {"error": str(error).strip()}
    memory = compiled.memory_analysis()
    return result | {
        "compiled": True,
        "seconds": round(time.perf_counter() - began, 1),
        "vector_memory_mib": vector_memory(compiled.as_text()),
        "temporary_mib": round(memory.temp_size_in_bytes / _MIB, 1),
        "arguments_mib": round(memory.argument_size_in_bytes / _MIB, 1),
        "pool_mib": round(case.pool_bytes / _MIB, 1),
        "aliased_mib": round(memory.alias_size_in_bytes / _MIB, 1),
    }


def describe(case: dict[str, Any]) -> str:
    """One line of the table."""
    settings = (
        f"{case['topology']}  {case['head_dim']:3} {case['heads']:3}/{case['kv_heads']:<3} {case['dtype']:8} "
        f"{case['block_size']:4} {case['rows']:7} {case['sequences']:4} {case['width']:6}  "
    )
    if not case["compiled"]:
        return settings + "failed: " + case["error"].splitlines()[0]
    vector = ", ".join(f"{name} {size:g}" for name, size in case["vector_memory_mib"].items())
    return settings + f"compiled in {case['seconds']:4.1f} s  {case['temporary_mib']:7.1f} {case['pool_mib']:7.1f}  {vector}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", choices=TOPOLOGIES, action="append", help="a chip; may be repeated; default all")
    parser.add_argument("--quick", action="store_true", help="the common case, on v6e unless --topology says otherwise")
    parser.add_argument("--json", metavar="FILE", help="write the cases there as JSON; - is standard output, without the table")
    args = parser.parse_args()
    chips = args.topology or (["v6e"] if args.quick else list(TOPOLOGIES))
    picked = [case for chip in chips for case in itertools.islice(cases(chip), 1 if args.quick else None)]
    table = args.json != "-"
    if table:
        print(
            "chip  dim heads    dtype    page    rows seqs  width                     HBM MiB: temp, pool   VMEM MiB by kernel"
        )
    results = []
    for case in picked:
        results.append(compile_case(case))
        if table:
            print(describe(results[-1]), flush=True)
    if args.json:
        text = json.dumps(results, indent=2)
        if table:
            with open(args.json, "w", encoding="utf-8") as file:
                file.write(text + "\n")
        else:
            print(text)
    sys.exit(not all(case["compiled"] for case in results))


if __name__ == "__main__":
    main()
