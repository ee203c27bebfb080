"""Compile the GPU kernels and whole decoder steps for an H100, on a machine without a GPU.

    make test-gpu    # installs JAX and the CUDA compilers into .cache/gpu-env
    .cache/gpu-env/bin/python -m benchmarks.gpu_aot [--quick] [--only kernels] [--layers N] [--grid] [--json FILE|-]

The command compiles one layer's call of the kernels in the main settings, JAX's own `attention_mgpu` for comparison, a layer of
experts, and whole steps of Qwen3-0.6B and Llama-3-8B, and of Llama-3-8B and 70B shared by GPUs. It prints registers, spilled
bytes and shared memory of every kernel, and the instructions that a warp issues per tile of 64 rows and 128 slots: without a
mask, with one, and in the producer. Of programs of Qwen3-0.6B, it prints launches, bytes and CUDA graphs. Steps are compared
with the memory that JAX takes of the card's 80 GB. `--quick` compiles
the common settings and steps of two layers; `--grid` compiles every supported head_dim, page size and dtype instead. Counts
are the compiler's; nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.nvidia import hopper

PARTS = "kernels", "peers", "steps", "experts", "launches"
_PROCESSES = ("kernels", "peers"), ("steps", "experts"), ("launches",)
"""Parts that are compiled in the same process."""
HEAD_DIMS = 64, 128, 256
_DUMPS: Path | None = None
_THUNKS: Path | None = None


def _watch_kernels() -> None:
    """Set up the process that compiles kernels: it keeps what the compilers say about them."""
    global _DUMPS
    _DUMPS = Path(tempfile.mkdtemp(prefix="kernels-"))
    hopper.prepare(_DUMPS)


def _watch_thunks() -> None:
    """Set up the process that counts launches."""
    global _THUNKS
    _THUNKS = Path(tempfile.mkdtemp(prefix="thunks-"))
    hopper.prepare(thunks=_THUNKS)


def _compile(case: Any) -> dict[str, Any]:
    from benchmarks import experts_aot, launches
    from benchmarks.nvidia import attention, peer, step, thunks

    if isinstance(case, launches.LaunchCase):
        assert _THUNKS is not None
        read, backend = partial(thunks.read_thunks, _THUNKS), attention.CompiledBackend
        return launches.compile_launches(case, backend, hopper.JAX_BYTES, hopper.sharding(), read)
    if isinstance(case, step.GpuStep):
        return step.compile_step(case)
    if isinstance(case, experts_aot.ExpertsCase):
        return experts_aot.compile_experts(case, hopper.sharding(), inputs_first=False)
    assert _DUMPS is not None
    if isinstance(case, attention.Case):
        return attention.compile_case(case, _DUMPS)
    return peer.compile_peer(case, _DUMPS)


def compile_all(kernels: Iterable[Any], steps: Iterable[Any], counted: Iterable[Any] = ()) -> Iterable[dict[str, Any]]:
    """Yield results as they arrive, from three processes."""
    spawn = get_context("spawn")
    with (
        ProcessPoolExecutor(1, spawn, _watch_kernels) as watched,
        ProcessPoolExecutor(1, spawn, hopper.prepare) as plain,
        ProcessPoolExecutor(1, spawn, _watch_thunks) as counting,
    ):
        jobs = [watched.submit(_compile, case) for case in kernels] + [plain.submit(_compile, case) for case in steps]
        jobs += [counting.submit(_compile, case) for case in counted]
        for job in as_completed(jobs):
            yield job.result()


def describe(result: dict[str, Any]) -> list[str]:
    """Return the lines of a result."""
    if result["kind"] == "launches":
        name = f"{result['model']}, {result['program']} of {result['rows']} rows, {result['layers'] or 'all'} layers"
    elif result["kind"] == "step":
        name = f"{result['model']}, {result['rows']} rows, {result['layers'] or 'all'} layers, {result['backend']}, "
        name += f"pages of {result['block_size']}, KV {result['kv_cache_dtype']}"
        name += f", {result['gpus']} GPUs, collectives {dict(result['collectives'])}" if result["gpus"] > 1 else ""
    elif result["kind"] == "pallas_gpu":
        name = f"heads {result['heads']}/{result['kv_heads']} of {result['head_dim']}, pages of {result['block_size']}, "
        name += f"{result['dtype']}, {result['rows']} rows, {result['width']} pages a sequence"
        name += f", window {result['window']}" if result["window"] else ""
        name += ", chunks weighed" if result["weighs"] else ""
        name += ", batch invariant" if result["batch_invariant"] else ""
        name += ", run of decodes" if result["decodes"] else ""
        name += ", K/V in FP8" if result["kv_dtype"] else ""
    elif result["kind"] == "experts":
        name = f"{result['rows']} rows of a layer of experts of {result['experts_mib']} MiB"
    else:
        name = f"head_dim {result['head_dim']}, {result['stages']} stages"
    line = f"{result['kind']:15} {name}: "
    if not result["compiled"]:
        return [line + "FAILED: " + result["error"].splitlines()[0]]
    if result["kind"] == "launches":
        from benchmarks.launches import describe as counts

        return [line + counts(result)]
    line += f"{result['seconds']} s, memory {result['hbm_mib']:.0f} MiB, {result['temporary_mib']:g} of them temporary"
    if result["kind"] == "step":
        return [line + f", of {result['hbm_limit_mib']}: {'fits' if result['fits'] else 'DOES NOT FIT'}"]
    if result["kind"] == "experts":
        return [line]
    lines = [line, *(_describe_kernel(name, kernel) for name, kernel in result["kernels"].items())]
    if "decode_copy_cycles" in result:
        lines[-1] += f"; {result['decode_copy_cycles']} cycles pass while these slots come from memory"
    return lines


def _describe_kernel(name: str, kernel: dict[str, Any]) -> str:
    line = f"    {name:9} {kernel['registers']} registers, {kernel['spill_bytes']} bytes spilled, "
    line += f"{kernel['shared_bytes']:,} bytes of shared memory, {kernel['products'][0]} HGMMA per {kernel['slots']} slots; "
    counts = (f"{way} {kernel[way]} ({kernel[way + '_stalls']} cycles)" for way in ("clear", "masked", "producer"))
    line += f"per tile of 64 x 128: {', '.join(counts)}"
    return line + (f" or {kernel['producer_cleaning']} where it cleans or converts" if "producer_cleaning" in kernel else "")


def compare(results: list[dict[str, Any]]) -> list[str]:
    """Return lines with the most instructions per tile of our kernel over query tiles, beside the peer's."""
    peers = {r["head_dim"]: r["kernels"]["attention_mgpu"] for r in results if r["kind"] == "attention_mgpu" and r["compiled"]}
    ours: dict[tuple[int, int, str], list[dict[str, Any]]] = {}
    for result in results:
        kernels = result.get("kernels", {})
        if result["kind"] == "pallas_gpu" and "tiles" in kernels and result["head_dim"] in peers:
            kept = ", K/V in FP8" if result["kv_dtype"] else ""
            ours.setdefault((result["head_dim"], result["block_size"], kept), []).append(kernels["tiles"])
    lines = []
    for (head_dim, block_size, kept), kernels in sorted(ours.items()):
        parts = []
        for way in ("clear", "masked"):
            most, theirs = max(kernel[way] for kernel in kernels), peers[head_dim][way]
            parts.append(f"{way} {most} of attention_mgpu's {theirs} ({most / theirs:.3f})")
        lines.append(f"head_dim {head_dim}, pages of {block_size}{kept}: {', '.join(parts)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the common settings, and steps of two layers")
    parser.add_argument("--only", choices=PARTS, action="append", help="part; repeatable; default: all")
    parser.add_argument("--layers", type=int, help="layers of a whole step; default: all of the model")
    parser.add_argument("--grid", action="store_true", help="every supported head_dim, page size and dtype")
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE; - prints it instead of the table")
    args = parser.parse_args()
    try:
        hopper.prepare()
    except hopper.NoCompiler as error:
        sys.exit(str(error))
    from benchmarks import experts_aot, launches
    from benchmarks.nvidia import attention, peer, step

    parts: dict[str, Iterable[Any]] = {
        "kernels": islice(attention.cases(), 5) if args.quick else attention.cases(),
        "peers": (case for head_dim in ((128,) if args.quick else HEAD_DIMS) for case in peer.peers(head_dim)),
        "steps": step.steps(args.layers or (2 if args.quick else None)),
        "experts": experts_aot.cases("h100"),
        "launches": launches.cases("h100", 64, 640, runs=attention.CompiledBackend.advances, quick=args.quick),
    }
    if args.grid:
        parts = {"kernels": attention.grid()}
    chosen = [part for part in parts if part in (args.only or PARTS)]
    kernels, steps, counted = ([case for part in chosen if part in of for case in parts[part]] for of in _PROCESSES)
    results = []
    for result in compile_all(kernels, steps, counted):
        results.append(result)
        print("\n".join(describe(result)), flush=True, file=sys.stderr if args.json == "-" else sys.stdout)
    if args.json == "-":
        print(json.dumps(results, indent=2))
    else:
        print("\n".join(compare(results) + launches.describe_layers(results)))
        if args.json:
            Path(args.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    sys.exit(not all(result["compiled"] and result.get("fits", True) for result in results))


if __name__ == "__main__":
    main()
