"""Measure chunkattn on this machine's NVIDIA GPU, and write one JSON file with the card's name.

    python -m benchmarks.gpu [--python PYTHON] [--only first] [--block-size N] [--json FILE] [--small]

The command runs `chunkattn check` and stops if the attention of the card is wrong or hangs. It then measures:

- first: what the engine reaches beside floors and predictions, and which flags of the compiler to set; five minutes
- kernels: one layer's attention by backend, page size and tile, against the card's measured rates of products and reads
- flex: the same calls by PyTorch's FlexAttention, which writes no K and V
- gen: answers from documents, cold and warm, decode at 1, 16 and 64 sequences, and scoring, in turns with vLLM
- score: a query of 2,000 tokens and 500 items of 20 by every scoring algorithm

Every part runs in processes of its own, which end at a time limit. The file is written after each part, so a part that fails
loses no other. It keeps the last lines of standard error for a bug report.

`--python` names an interpreter with PyTorch or vLLM; it may be given again. A library that no interpreter has is left out.
`--small` runs everything on a few rows and on any device, to see that the command works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.card import AS_IT_IS, measure_all
from benchmarks.card import Options as CardOptions
from benchmarks.card import lines as first_lines
from benchmarks.nvidia.workloads import calls, settings
from benchmarks.processes import PartError, failure, run
from chunkattn.terminal.progress import timed
from chunkattn.tools.bench.peers import NOT_FOUND, find_python

PARTS = "first", "kernels", "flex", "gen", "score"
TIMEOUT_S = {"check": 1800, "kernels": 600, "flex": 1800, "gen": 7200, "score": 3600}
"""Time limit in seconds of a part's process, or of each setting's of `kernels`. `gen` outlasts the limit of vLLM's jobs."""
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
_CARD_TIMEOUT_S = 300


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


def card() -> dict[str, Any]:
    """Return the device's name and JAX's version; where there is a driver of NVIDIA, also what the driver says."""
    facts = json.loads(run(sys.executable, "-c", _CARD, timeout_s=_CARD_TIMEOUT_S))
    asked = "memory.total,driver_version,power.limit,clocks.max.sm,clocks.max.mem"
    try:
        answer = run("nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader", timeout_s=_CARD_TIMEOUT_S)
    except (OSError, PartError):
        return facts
    return facts | dict(zip(asked.split(","), (value.strip() for value in answer.splitlines()[0].split(",")), strict=True))


def check(*, small: bool) -> dict[str, Any]:
    """Return the lines of `chunkattn check`, with an error if the attention is wrong or hangs."""
    command = (sys.executable, "-m", "chunkattn", "check", *(("--cases", "1") if small else ()))
    try:
        return {"lines": run(*command, timeout_s=TIMEOUT_S["check"]).splitlines()}
    except PartError as error:
        return {"lines": error.output.splitlines(), **failure(error)}


def first(options: Options) -> dict[str, Any]:
    """Return the report of `benchmarks.card`."""
    chosen = CardOptions(block_size=options.block_size)
    if options.small:
        chosen = CardOptions("small", (8,), 4, (AS_IT_IS,), options.block_size, small=True)
    return measure_all(chosen, os.environ.get("XLA_FLAGS", ""))


def kernels(options: Options) -> dict[str, Any]:
    """Return the rates of the device, and the times of one layer's attention by setting.

    A setting that breaks the device or reaches the time limit keeps the calls before, and gets a row with the error.
    """
    small = ("--small", "--repeats", "1") if options.small else ()
    command = (sys.executable, "-m", "benchmarks.nvidia.kernel_times", *small)
    rates = json.loads(run(*command, "--rates", timeout_s=TIMEOUT_S["kernels"]))
    rows: list[dict[str, Any]] = []
    for number, setting in enumerate(settings(small=options.small)):
        broken = []
        try:
            with timed(f"kernels, setting {number}"):
                printed = run(*command, "--setting", str(number), timeout_s=TIMEOUT_S["kernels"])
        except PartError as error:
            printed, name = error.output, _unfinished(error.stderr)
            broken = [setting.facts() | {"call": name} | failure(error)]
        rows += [*(json.loads(line) for line in printed.splitlines() if line.startswith("{")), *broken]
    return rates | {"calls": with_shares(rows, rates, small=options.small)}


def _unfinished(stderr: str) -> str:
    """Return the name of the last call that `kernel_times` began."""
    begun = [line.removeprefix("timing ") for line in stderr.splitlines() if line.startswith("timing ")]
    return begun[-1] if begun else "the start"


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
    report = json.loads(run(python, _FLEX, given=json.dumps(job), timeout_s=TIMEOUT_S["flex"]))
    for row in report.get("calls", []):
        if "seconds" in row:
            row["median_s"] = statistics.median(row["seconds"])
    return report


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
    command = (sys.executable, "-m", "chunkattn", "bench", name, *chosen, *pages, "--json", "-")
    return json.loads(run(*command, timeout_s=TIMEOUT_S[name]))


RUN: dict[str, Callable[[Options], dict[str, Any]]] = {
    "first": first,
    "kernels": kernels,
    "flex": flex,
    "gen": gen,
    "score": score,
}


def with_shares(rows: list[dict[str, Any]], rates: dict[str, Any], *, small: bool) -> list[dict[str, Any]]:
    """Return the rows of calls, with shares of the rate that bounds a call where the call has a time.

    Args:
        rows: rows of `kernels` or `flex`.
        rates: the rates that `kernels` measured.
        small: whether the calls are the small ones.
    """
    known = {call.name: call for call in calls(small=small)}

    def share(row: dict[str, Any]) -> dict[str, Any]:
        if "median_s" not in row:
            return row
        call = known[row["call"]]
        needed = call.bytes / rates["read_bytes_per_s"] if call.decodes else call.flops / rates["matmul_flops"]
        return row | {"peak_share": needed / row["median_s"]}

    return [share(row) for row in rows]


def lines(part: str, report: dict[str, Any]) -> list[str]:
    """Return a part's result as lines."""
    if "error" in report:
        return [f"{part}: {report['error']}"]
    if part == "first":
        return [f"first: {text}" for text in first_lines(report)]
    if part in ("kernels", "flex"):
        return [f"{part}: {text}" for text in (*map(_call_line, report["calls"]), report.get("note")) if text]
    if part == "gen":
        notes = [f"gen: {peer['name']}: {note}" for peer in report["peers"] for note in peer["notes"]]
        return notes + [
            f"gen: {case['name']}: {case['median']:.4g} {case['unit']}, {case['peak_share']:.0%} of the peak"
            + "".join(f", {peer['ratio']:.2f} times {name}'s speed" for name, peer in case["peers"].items() if peer["ratio"])
            for case in report["cases"]
        ]
    return [
        f"score: {case['algorithm']}{', query cached' if case['cached'] else ''}: {case['items_per_s']:.4g} items/s, "
        f"{case['peak_share']:.0%} of the peak"
        for case in report["cases"]
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
    if args.json and not Path(args.json).absolute().parent.is_dir():
        parser.error(f"the folder of --json {args.json} does not exist")
    try:
        device = card()
    except PartError as error:
        sys.exit(f"JAX does not start: {error}\n{error.stderr}")
    print(", ".join(f"{name} {value}" for name, value in device.items()), flush=True)
    if device["platform"] != "gpu" and not args.small:
        sys.exit(f"benchmarks.gpu needs a GPU that JAX sees (pip install -e '.[cuda]'); JAX runs on {device['platform']}")
    name = re.sub(r"[^a-z0-9]+", "-", device["name"].lower()).strip("-")
    file = Path(args.json or f"gpu-{name}.json")
    report: dict[str, Any] = {"card": device, "small": args.small}

    def write() -> None:
        file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")

    write()  # a file that cannot be written shows before hours of work
    report["check"] = check(small=args.small)
    write()
    print("\n".join(report["check"]["lines"]), flush=True)
    if "error" in report["check"]:
        print("\n".join(report["check"]["stderr"]), flush=True)
        sys.exit(f"chunkattn check failed, so nothing is measured: {report['check']['error']}\nwritten to {file}")
    options = Options(args.python or [Path(sys.executable)], args.block_size, args.small)
    for part in [part for part in PARTS if part in (args.only or PARTS)]:
        print(f"{part}: running", flush=True)
        try:
            report[part] = RUN[part](options)
            if part == "flex" and "calls" in report[part] and "matmul_flops" in report.get("kernels", {}):
                report[part]["calls"] = with_shares(report[part]["calls"], report["kernels"], small=args.small)
            print("\n".join(lines(part, report[part])), flush=True)
        except Exception as error:  # the other parts still run
            report[part] = report.get(part, {}) | failure(error)
            print(f"{part}: {report[part]['error']}", flush=True)
        write()
    print(f"written to {file}")
    failed = [part for part in PARTS if {"error", "failed"} & report.get(part, {}).keys() and part != "flex"]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
