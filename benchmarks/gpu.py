"""Measure chunkattn on this machine's NVIDIA GPU, and write one JSON file with the card's name.

    python -m benchmarks.gpu [--python PYTHON] [--only kernels] [--block-size N] [--json FILE] [--small]

The command runs `chunkattn check` and stops if the attention of the card is wrong. It then measures:

- kernels: one layer's attention by backend, page size and tile, against the card's measured rates of products and reads
- flex: the same calls by PyTorch's FlexAttention
- gen: answers from documents, cold and warm, decode at 1, 16 and 64 sequences, and scoring, in turns with vLLM
- score: a query of 2,000 tokens and 500 items of 20 by every scoring algorithm

`--python` names an interpreter with PyTorch or vLLM; it may be given again. A library that no interpreter has is left out.
`--small` runs everything on a few rows and on any device, to see that the command works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.nvidia.workloads import calls
from chunkattn.bench.peers import NOT_FOUND, find_python

PARTS = "kernels", "flex", "gen", "score"
SEQUENCES = 1, 16, 64
SMALL = (
    *("--geometry", "small", "--dtype", "float32", "--repeats", "1"),
    *("--query", "20", "--items", "4", "--item-len", "4"),
)
SMALL_GEN = (
    *("--documents", "2", "--document-tokens", "20", "--prefix-tokens", "4", "--question-tokens", "5"),
    *("--prompt-tokens", "10", "--decode-tokens", "2", "--sequences", "1"),
)
_FLEX = Path(__file__).parent / "nvidia" / "flex_times.py"
_CARD = """
import json, jax
device = jax.devices()[0]
print(json.dumps({
    "name": device.device_kind,
    "platform": jax.default_backend(),
    "capability": str(getattr(device, "compute_capability", "")),
    "devices": len(jax.devices()),
    "jax": jax.__version__,
}))
"""
"""Script that names the device. It runs in a process of its own, because JAX keeps most of a GPU's memory until it ends."""
_MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.45"}
"""Share of the memory for a process of ours, which vLLM may run beside."""


class PartError(Exception):
    """A part of the benchmark failed; the message is the last line that it printed."""


@dataclass(frozen=True)
class Options:
    """Options of the command.

    Attributes:
        pythons: interpreters that may have PyTorch or vLLM.
        block_size: slots per page of the engine; None for its default.
        small: whether to run on a few rows.
    """

    pythons: list[Path]
    block_size: int | None
    small: bool


def run(*command: str | Path, given: str = "") -> str:
    """Run a Python command and return its standard output.

    Raises:
        PartError: the command failed.
    """
    environment = {**_MEMORY, **os.environ}
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        said = [line.strip("│ ") for line in (done.stderr or done.stdout).splitlines() if re.search(r"\w", line)]
        raise PartError(said[-1] if said else f"exit code {done.returncode}")
    return done.stdout


def card() -> dict[str, Any]:
    """Return the device's name and JAX's version; where there is a driver of NVIDIA, also what the driver says."""
    found = json.loads(run(sys.executable, "-c", _CARD))
    asked = "memory.total,driver_version,power.limit,clocks.max.sm,clocks.max.mem"
    try:
        said = run("nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader")
    except (OSError, PartError):
        return found
    return found | dict(zip(asked.split(","), (value.strip() for value in said.splitlines()[0].split(",")), strict=True))


def check(*, small: bool) -> list[str]:
    """Print what `chunkattn check` says, and return its lines. If the attention is wrong, the process ends."""
    command = (sys.executable, "-m", "chunkattn", "check", *(("--cases", "1") if small else ()))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout + done.stderr, flush=True)
    if done.returncode:
        sys.exit("chunkattn check failed, so nothing is measured")
    return done.stdout.splitlines()


def kernels(options: Options) -> dict[str, Any]:
    """Return the times of one layer's attention."""
    small = ("--small", "--repeats", "1") if options.small else ()
    return json.loads(run(sys.executable, "-m", "benchmarks.nvidia.kernel_times", *small))


def flex(options: Options) -> dict[str, Any]:
    """Return the times of FlexAttention, or the reason why there are none."""
    python = find_python(options.pythons, "torch")
    if python is None:
        return {"error": NOT_FOUND}
    job = {
        "calls": [call.facts() for call in calls(small=options.small)],
        "repeats": 1 if options.small else 5,
        "device": "cpu" if options.small else "cuda",
    }
    return json.loads(run(python, _FLEX, given=json.dumps(job)))


def gen(options: Options) -> dict[str, Any]:
    """Return the report of `chunkattn bench gen`."""
    chosen = [word for case in ("rag", "decode", "score") for word in ("--case", case)]
    if options.small:
        chosen += [*SMALL, *SMALL_GEN]
    else:
        chosen += ["--geometry", "qwen3-0.6b", "--items", "500"]
        chosen += [word for number in SEQUENCES for word in ("--sequences", str(number))]
    pythons = [word for python in options.pythons for word in ("--peer-python", str(python))]
    return _bench("gen", *chosen, *(["--peers", *pythons] if pythons else []), block_size=options.block_size)


def score(options: Options) -> dict[str, Any]:
    """Return the report of `chunkattn bench score`."""
    return _bench("score", *(SMALL if options.small else ("--geometry", "qwen3-0.6b")), block_size=options.block_size)


def _bench(name: str, *chosen: str, block_size: int | None) -> dict[str, Any]:
    pages = ("--block-size", str(block_size)) if block_size else ()
    return json.loads(run(sys.executable, "-m", "chunkattn", "bench", name, *chosen, *pages, "--json", "-"))


RUN: dict[str, Callable[[Options], dict[str, Any]]] = {"kernels": kernels, "flex": flex, "gen": gen, "score": score}


def with_shares(found: dict[str, Any], rates: dict[str, Any], *, small: bool) -> dict[str, Any]:
    """Return FlexAttention's times with medians and shares of the rates that `kernels` measured."""
    known = {call.name: call for call in calls(small=small)}
    rows = []
    for row in found.get("calls", []):
        if "seconds" in row:
            call, median = known[row["call"]], statistics.median(row["seconds"])
            needed = call.bytes / rates["read_bytes_per_s"] if call.decodes else call.flops / rates["matmul_flops"]
            row = row | {"median_s": median, "peak_share": needed / median}
        rows.append(row)
    return found | {"calls": rows}


def lines(part: str, found: dict[str, Any]) -> list[str]:
    """Return a part's result as lines."""
    if "error" in found:
        return [f"{part}: {found['error']}"]
    if part in ("kernels", "flex"):
        return [f"{part}: {_call_line(row)}" for row in found["calls"]]
    if part == "gen":
        return [
            f"gen: {case['name']}: {case['median']:.4g} {case['unit']}, {case['peak_share']:.0%} of the peak"
            + (f", {case['ratio']:.2f} times vLLM's speed" if case["ratio"] else "")
            for case in found["cases"]
        ]
    return [
        f"score: {case['algorithm']}{', query cached' if case['cached'] else ''}: {case['items_per_s']:.4g} items/s, "
        f"{case['peak_share']:.0%} of the peak"
        for case in found["cases"]
    ]


def _call_line(row: dict[str, Any]) -> str:
    name = row["call"]
    if "backend" in row:
        name = f"{row['backend']}, pages of {row['block_size']}, "
        name += f"tile of {row['slots']} slots in {row['stages']} stages, " if "slots" in row else ""
        name += row["call"]
    if "error" in row:
        return f"{name}: {row['error']}"
    share = f", {row['peak_share']:.0%} of the peak" if "peak_share" in row else ""
    return f"{name}: {1000 * row['median_s']:.4g} ms{share}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, action="append", help="interpreter with PyTorch or vLLM; repeatable")
    parser.add_argument("--only", choices=PARTS, action="append", help="part; repeatable; default: all")
    parser.add_argument("--block-size", type=int, help="tokens per KV page of gen and score; default: the engine's")
    parser.add_argument("--json", metavar="FILE", help="file of the results; default: gpu-NAME.json, with the card's name")
    parser.add_argument("--small", action="store_true", help="run on a few rows and on any device")
    args = parser.parse_args()
    device = card()
    print(", ".join(f"{name} {value}" for name, value in device.items()), flush=True)
    if device["platform"] != "gpu" and not args.small:
        sys.exit(f"benchmarks.gpu needs a GPU that JAX sees (pip install -e '.[cuda]'); JAX runs on {device['platform']}")
    checked = check(small=args.small)
    options = Options(args.python or [Path(sys.executable)], args.block_size, args.small)
    report: dict[str, Any] = {"card": device, "small": args.small, "check": checked}
    for part in [part for part in PARTS if part in (args.only or PARTS)]:
        try:
            report[part] = RUN[part](options)
        except PartError as error:
            report[part] = {"error": str(error)}
        if part == "flex" and "calls" in report.get("kernels", {}):
            report[part] = with_shares(report[part], report["kernels"], small=args.small)
        print("\n".join(lines(part, report[part])), flush=True)
    name = re.sub(r"[^a-z0-9]+", "-", device["name"].lower()).strip("-")
    file = Path(args.json or f"gpu-{name}.json")
    file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"written to {file}")
    failed = [part for part in PARTS if "error" in report.get(part, {}) and part != "flex"]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
