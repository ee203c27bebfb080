"""Compile the TPU kernels and whole decoder steps for real chips, on a machine without a TPU.

    make .cache/libtpu/.installed    # the libtpu of the installed JAX
    PYTHONPATH=.cache/libtpu python -m benchmarks.tpu_aot [--topology v6e] [--quick] [--only kernels] [--layers N] [--grid]
        [--json FILE|-]

The command compiles for each chip: one layer's call of the kernels in the main settings, with the static schedule of their
inner loops; JAX's splash attention (with an equal mask) and ragged paged attention for comparison; whole steps of Qwen3-0.6B
and, where it fits, Llama-3-8B; a layer of experts; a recurrent layer; and programs of Qwen3-0.6B, whose operations and bytes it
counts. Failed compilations report the reason. `--quick` is the common case on v6e, in a few seconds; `--grid` compiles every
supported head_dim, page size and dtype instead. Shares are estimates from bundles; they are not measured on a chip.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import benchmarks.tpu  # noqa: F401  sets libtpu's environment
from benchmarks import experts_aot, launches, recurrent_aot
from benchmarks.tpu import attention, peers, step
from benchmarks.tpu.chips import CHIPS
from benchmarks.tpu.schedule import dump_schedules

PARTS = "kernels", "peers", "steps", "experts", "recurrent", "launches"
_SCHEDULES: Path | None = None


def _want_schedules() -> None:
    """Turn schedules on in the process that compiles kernels; the schedules of a whole step would take gigabytes."""
    global _SCHEDULES
    _SCHEDULES = dump_schedules()


def _compile(case: Any) -> dict[str, Any]:
    if isinstance(case, launches.LaunchCase):
        chip = CHIPS[case.chip]
        return launches.compile_launches(case, attention.compiled_backend(case.chip), chip.hbm_bytes, chip.sharding())
    if isinstance(case, step.Step):
        return step.compile_step(case)
    if isinstance(case, experts_aot.ExpertsCase):
        return experts_aot.compile_experts(case, CHIPS[case.chip].sharding(), inputs_first=True)
    if isinstance(case, recurrent_aot.RecurrentCase):
        return recurrent_aot.compile_recurrent(case, CHIPS[case.chip].sharding())
    if isinstance(case, attention.Case):
        return attention.compile_case(case, _SCHEDULES)
    assert _SCHEDULES is not None
    return peers.compile_peer(case, _SCHEDULES)


def compile_all(calls: Iterable[Any], without_schedules: Iterable[Any]) -> Iterable[dict[str, Any]]:
    """Yield results as they arrive, from two processes."""
    spawn = get_context("spawn")
    with (
        ProcessPoolExecutor(1, spawn, _want_schedules) as watched,
        ProcessPoolExecutor(1, spawn) as plain,
    ):
        jobs = [watched.submit(_compile, case) for case in calls] + [plain.submit(_compile, c) for c in without_schedules]
        for job in as_completed(jobs):
            yield job.result()


def describe(result: dict[str, Any]) -> str:
    """Return a result as one line."""
    if result["kind"] == "launches":
        name = f"{result['model']}, {result['program']} of {result['rows']} rows, {result['layers'] or 'all'} layers"
    elif result["kind"] == "step":
        name = f"{result['model']}, {result['rows']} rows, {result['width']} pages a sequence, KV {result['kv_cache_dtype']}"
    elif result["kind"] == "attention":
        kept = result["kv_dtype"] or result["dtype"]
        name = f"heads {result['heads']}/{result['kv_heads']} of {result['head_dim']}, pages of {result['block_size']}, "
        name += f"{result['dtype']} over {kept}, {result['rows']} rows, {result['width']} pages a sequence"
        name += f", window {result['window']}" if result["window"] else ""
        name += ", chunks weighed" if result["weighs"] else ""
        name += ", batch invariant" if result["batch_invariant"] else ""
    elif result["kind"] == "experts":
        name = f"{result['rows']} rows of a layer of experts of {result['experts_mib']} MiB"
    elif result["kind"] == "recurrent":
        name = f"{result['rows']} rows of {result['walks']} walks in a recurrent layer with a cache of {result['pool_mib']} MiB"
    elif result["kind"] == "splash":
        name = f"head_dim {result['head_dim']}, tile {result['rows']} x {result['slots']} by {result['compute']}"
    else:
        slots = result["kv_pages"] * result["block_size"]
        name = f"head_dim {result['head_dim']}, tile {result['queries']} x {slots}"
    line = f"{result['chip']}  {result['kind']:12}  {name}: "
    if not result["compiled"]:
        return line + "FAILED: " + result["error"].splitlines()[0]
    if result["kind"] == "launches":
        return line + launches.describe(result)
    line += f"{result['seconds']} s, HBM {result['hbm_mib']:.0f} MiB, {result['temporary_mib']:g} of them temporary"
    if result["kind"] == "step":
        return line + f", of {result['hbm_limit_mib']}: {'fits' if result['fits'] else 'DOES NOT FIT'}"
    if result["kind"] in ("experts", "recurrent"):
        return line
    line += f", VMEM {max(result['vmem_mib'].values(), default=0):g} MiB"
    if scalar := result.get("smem_kib"):
        line += f", SMEM {max(scalar.values()):g} KiB"
    if prefill := result.get("prefill"):
        share = prefill["inner_loop_mxu_peak_share"]
        line += f"; prefill {prefill['bundles_per_tile']} bundles a tile, {share:.0%} of the MXU's peak at most"
    if decode := result.get("decode"):
        line += f"; decode {decode['bundles']} bundles while {decode['bundles_while_copying']} pass for its bytes"
    return line + (f"; {result['unread']}" if "unread" in result else "")


def compare(results: list[dict[str, Any]]) -> list[str]:
    """Return lines with our bundles per tile beside the best of each peer's."""
    lines = []
    for chip in CHIPS:
        for head_dim in (64, 128, 256):
            of = [r for r in results if r.get("prefill") and (r["chip"], r["head_dim"]) == (chip, head_dim)]
            ours = [
                r["prefill"] for r in of if r["kind"] == "attention" and r["dtype"] == "bfloat16" and not r["kv_dtype"]
                and r["rows"] == 2048 and r["block_size"] == 16 and not r["weighs"]
            ]  # fmt: skip
            if not ours:
                continue
            line = f"{chip} head_dim {head_dim}: {ours[0]['bundles_per_tile']} bundles per visible 128 x 128 tile, "
            line += f"{ours[0]['bundles_per_masked_tile']} masked; with copies {ours[0]['with_copies']} and "
            line += f"{ours[0]['masked_with_copies']}"
            for kind in ("splash", "ragged_paged"):
                theirs = [r["prefill"]["bundles_per_tile"] for r in of if r["kind"] == kind]
                if theirs:
                    line += f"; {kind} {min(theirs)} ({ours[0]['bundles_per_tile'] / min(theirs):.2f} of it)"
            lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", choices=CHIPS, action="append", help="chip; repeatable; default: all")
    parser.add_argument("--quick", action="store_true", help="only the common case, on v6e or the chips of --topology")
    parser.add_argument("--only", choices=PARTS, action="append", help="part; repeatable; default: all")
    parser.add_argument("--layers", type=int, help="layers of a whole step; default: all of the model")
    parser.add_argument("--grid", action="store_true", help="every supported head_dim, page size and dtype, without schedules")
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE; - prints it instead of the table")
    args = parser.parse_args()
    chips = args.topology or (["v6e"] if args.quick else list(CHIPS))
    calls: list[Any] = []
    plain: list[Any] = []
    for chip in chips:
        if args.quick:
            calls.append(next(attention.cases(chip)))
        elif args.grid:
            plain += attention.grid(chip)
        else:
            parts = {
                "kernels": attention.cases(chip),
                "peers": (peer for head_dim in (64, 128, 256) for peer in peers.peers(chip, head_dim)),
                "steps": step.steps(chip, args.layers),
                "experts": experts_aot.cases(chip),
                "recurrent": recurrent_aot.cases(chip),
                "launches": launches.cases(chip, 16, 4096, runs=attention.PallasTpuBackend.advances, quick=True),
            }
            for part in args.only or PARTS:
                (calls if part in ("kernels", "peers") else plain).extend(parts[part])
    results = []
    for result in compile_all(calls, plain):
        results.append(result)
        print(describe(result), flush=True, file=sys.stderr if args.json == "-" else sys.stdout)
    if args.json == "-":
        print(json.dumps(results, indent=2))
    else:
        print("\n".join(compare(results) + launches.describe_layers(results)))
        if args.json:
            Path(args.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    if unread := {result["unread"] for result in results if "unread" in result}:
        sys.exit("\n".join(sorted(unread)))
    # A peer's tiles may be too large.
    ours = [result for result in results if result["kind"] not in ("splash", "ragged_paged")]
    sys.exit(not all(result["compiled"] and result.get("fits", True) for result in ours))


if __name__ == "__main__":
    main()
