"""Compile whole decoder steps and JAX's own attention kernel for an H100, on a machine without a GPU.

    make test-gpu    # installs JAX and the CUDA compilers into .cache/gpu-env
    .cache/gpu-env/bin/python -m benchmarks.gpu_aot [--quick] [--only peers] [--layers N] [--json FILE|-]

The command prints registers, spilled bytes, shared memory and tensor core products (HGMMA) of a kernel, and the instructions
that a warp issues in one turn of each loop, per tile of 64 rows and 128 slots. Whole steps of Qwen3-0.6B and Llama-3-8B are
compared with the memory that JAX takes of the card's 80 GB. `--quick` compiles steps of two layers. Counts are the
compiler's; nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.nvidia import hopper

PARTS = "peers", "steps"
HEAD_DIMS = 64, 128, 256
_DUMPS: Path | None = None


def _watch_kernels() -> None:
    """Set up the process that compiles kernels: it keeps what the compilers say about them."""
    global _DUMPS
    _DUMPS = Path(tempfile.mkdtemp(prefix="kernels-"))
    hopper.prepare(_DUMPS)


def _compile(case: Any) -> dict[str, Any]:
    from benchmarks.nvidia import peer, step

    if isinstance(case, step.GpuStep):
        return step.compile_step(case)
    assert _DUMPS is not None
    return peer.compile_peer(case, _DUMPS)


def compile_all(kernels: Iterable[Any], steps: Iterable[Any]) -> Iterable[dict[str, Any]]:
    """Yield results as they arrive, from two processes."""
    spawn = get_context("spawn")
    with ProcessPoolExecutor(1, spawn, _watch_kernels) as watched, ProcessPoolExecutor(1, spawn, hopper.prepare) as plain:
        jobs = [watched.submit(_compile, case) for case in kernels] + [plain.submit(_compile, case) for case in steps]
        for job in as_completed(jobs):
            yield job.result()


def describe(result: dict[str, Any]) -> list[str]:
    """Return the lines of a result."""
    if result["kind"] == "step":
        name = f"{result['model']}, {result['rows']} rows, {result['layers'] or 'all'} layers, {result['backend']}, "
        name += f"pages of {result['block_size']}, KV {result['kv_cache_dtype']}"
    else:
        name = f"head_dim {result['head_dim']}, tile 64 x {result['slots']}, {result['stages']} stages"
    line = f"{result['kind']:15} {name}: "
    if not result["compiled"]:
        return [line + "FAILED: " + result["error"].splitlines()[0]]
    line += f"{result['seconds']} s, memory {result['hbm_mib']:.0f} MiB, {result['temporary_mib']:g} of them temporary"
    if result["kind"] == "step":
        return [line + f", of {result['hbm_limit_mib']}: {'fits' if result['fits'] else 'DOES NOT FIT'}"]
    return [line, *(_describe_kernel(kernel) for kernel in result["kernels"])]


def _describe_kernel(kernel: dict[str, Any]) -> str:
    line = f"    {kernel['name']}: {kernel['registers']} registers, {kernel['spill_bytes']} bytes spilled, "
    line += f"{kernel['shared_bytes']:,} bytes of shared memory, {kernel['products']} HGMMA"
    for loop in kernel["loops"]:
        counted = f"{loop['longest']['products']} HGMMA" if loop["longest"]["products"] else "producer"
        least, most = (f"{loop[way]['instructions']} ({loop[way]['stalls']} cycles)" for way in ("shortest", "longest"))
        line += f"; loop, {counted}: {least} to {most}"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one head size, and steps of two layers")
    parser.add_argument("--only", choices=PARTS, action="append", help="part; repeatable; default: all")
    parser.add_argument("--layers", type=int, help="layers of a whole step; default: all of the model")
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE; - prints it instead of the table")
    args = parser.parse_args()
    try:
        hopper.prepare()
    except hopper.NoCompiler as error:
        sys.exit(str(error))
    from benchmarks.nvidia import peer, step

    wanted = args.only or PARTS
    head_dims = (128,) if args.quick else HEAD_DIMS
    kernels = [case for head_dim in head_dims for case in peer.peers(head_dim)] if "peers" in wanted else []
    layers = args.layers or (2 if args.quick else None)
    steps = list(step.steps("xla", 16, layers)) if "steps" in wanted else []
    results = []
    for result in compile_all(kernels, steps):
        results.append(result)
        if args.json != "-":
            print("\n".join(describe(result)), flush=True)
    if args.json == "-":
        print(json.dumps(results, indent=2))
    elif args.json:
        Path(args.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    sys.exit(not all(result["compiled"] and result.get("fits", True) for result in results))


if __name__ == "__main__":
    main()
