"""Measure what an engine reaches on an accelerator, beside floors and predictions, and which flags of the compiler to set.

    python -m benchmarks.card [--geometry qwen3-0.6b] [--rows 8 64] [--calls 200] [--settings "as it is"] [--json FILE|-]

`benchmarks.gpu` runs it first. Every setting of flags runs in a process of its own. The process calls the engine's programs on
sequences of 150 tokens: a step of decodes, and a run of 16 decodes. It calls them with new NumPy arrays for every call, as the
engine does, and with arrays that lie on the device. For both it prints microseconds of a decode:

- call_us: until the call returns
- each_us: until its results are there
- row_us: of a call among many in a row, whose results are waited for at the end

`kernels_us` is the time in which the device is busy. XLA runs no CUDA graphs while it is measured. XLA's log says how often a
program's CUDA graph was updated, and how long the updates took. On other devices there are none.

Then an engine runs the cases of `benchmarks.nvidia.floors`, decodes also without runs. The last line names the flags to set.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.nvidia.floors import SIZES, Floors, Rates, in_unit
from benchmarks.nvidia.programs import MARK, MOST_ROWS, measure
from benchmarks.processes import PartError, complete, failure
from chunkattn.terminal.progress import timed

AS_IT_IS = "as it is"
SETTINGS = {
    AS_IT_IS: "",
    "no weights concatenated": "--xla_gpu_dot_merger_threshold_mb=0",
    "graph keeps temporaries": "--xla_gpu_command_buffer_update_mode=SKIP_TEMP",
    "graph keeps what stays": "--xla_gpu_command_buffer_update_mode=SKIP_PROFILED",
    "no graphs": "--xla_gpu_enable_command_buffer=",
    "no loops in graphs": "--xla_gpu_enable_command_buffer="
    "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,DYNAMIC_SLICE_FUSION",
}
"""Flags of the compiler by the name of the setting."""
LOG = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "command_buffer_thunk=3", "JAX_COMPILATION_CACHE_DIR": ""}
"""Variables under which XLA logs every update of a graph. A program from the compilation cache would hide the flags."""
TIMEOUT_S = 900
"""Time limit in seconds of a process."""
WORTH = 0.97
"""Share of the time of a decode at which a setting is worth its flags."""
_SMALL = replace(
    SIZES,
    documents=2,
    document_tokens=20,
    prefix_tokens=4,
    question_tokens=5,
    sequences=(1,),
    prompt_tokens=10,
    decode_tokens=4,
    query=20,
    items=4,
    item_len=4,
)
_RESULT = "RESULT "
_UPDATE = re.compile(r"Updated command buffer in (\d+)")


@dataclass(frozen=True)
class Options:
    """Options of the command.

    Attributes:
        geometry: model shape.
        rows: rows of a step; settings with flags run the first number alone, because compiling takes most of the time.
        calls: timed decodes of each kind.
        settings: names in `SETTINGS`.
        block_size: tokens per KV page; None for the engine's default.
        small: whether the engine runs tiny cases.
    """

    geometry: str = "qwen3-0.6b"
    rows: tuple[int, ...] = (8, 64)
    calls: int = 200
    settings: tuple[str, ...] = tuple(SETTINGS)
    block_size: int | None = None
    small: bool = False


def engine(options: Options, steps: int) -> dict[str, Any]:
    """Return the report of an engine's cases, as JSON.

    Args:
        options: options of the command.
        steps: `num_scheduler_steps` of the engine; 1 measures decodes alone.
    """
    from chunkattn.tools.bench import generate
    from chunkattn.tools.bench.geometry import spec_of
    from chunkattn.tools.bench.sizes import Setup

    sizes = _SMALL if options.small else SIZES
    sizes = replace(sizes, case=("decode",)) if steps == 1 else sizes
    setup = Setup(options.geometry, block_size=options.block_size, repeats=1 if options.small else 3)
    report = asdict(generate.run(setup, sizes, engine={"num_scheduler_steps": steps}))
    rates = Rates(report["read_bytes_per_s"], report["matmul_flops"])
    figures = Floors(spec_of(options.geometry), rates).figures(sizes)
    by_name = {figure.name: {"floor": figure.floor, "predicted": figure.predicted} for figure in figures}
    rows = [{"steps": steps, **case, **by_name[case["name"]]} for case in report["cases"]]
    return {**asdict(rates), "cases": rows}


def graph_updates(log: str) -> dict[str, dict[str, float]]:
    """Return the number of updates of CUDA graphs and their microseconds, both for a call, by part of the log.

    Args:
        log: standard error of a process that ran `measure`. Each part names its timed calls of one kind, and has twice as many.
    """
    updates = {}
    for part in log.split(MARK)[1:]:
        head, _, text = part.partition("\n")
        calls, _, name = head.partition(" ")
        if name != "end":
            spent = [int(number) for number in _UPDATE.findall(text)]
            updates[name] = {
                "updates_a_call": len(spent) / (2 * int(calls)),
                "update_us_a_call": round(sum(spent) / (2 * int(calls)), 1),
            }
    return updates


def apart(options: Options, *words: str, env: dict[str, str] | None = None) -> tuple[list[Any], str, dict[str, Any]]:
    """Return the results of a process of this command, its standard error, and its error, if there is one, as JSON."""
    command = [sys.executable, "-m", "benchmarks.card", f"--geometry={options.geometry}", f"--calls={options.calls}", *words]
    command += [f"--block-size={options.block_size}"] if options.block_size else []
    command += ["--small"] if options.small else []
    error: dict[str, Any] = {}
    try:
        output, log = complete(*command, timeout_s=TIMEOUT_S, env=env)
    except PartError as found:
        output, log, error = found.output, found.stderr, failure(found)
    lines = [line.removeprefix(_RESULT) for line in output.splitlines() if line.startswith(_RESULT)]
    return [json.loads(line) for line in lines], log, error


def under_setting(name: str, options: Options, given: str) -> list[dict[str, Any]]:
    """Return the times of every program in a process with a setting's flags. A process that fails gives a row with its error.

    Args:
        name: name in `SETTINGS`.
        options: options of the command.
        given: flags of the environment.
    """
    rows = [f"--rows={rows}" for rows in (options.rows[:1] if SETTINGS[name] else options.rows)]
    env = LOG | {"XLA_FLAGS": f"{given} {SETTINGS[name]}".strip()}
    results, log, error = apart(options, f"--here={name}", *rows, env=env)
    updates, setting = graph_updates(log), {"setting": name, "flags": SETTINGS[name]}
    for row in results:
        place = f", {row['program']} of {row['rows']}"
        row["graphs"] = {part.removesuffix(place): found for part, found in updates.items() if part.endswith(place)}
    return [setting | row for row in results] + ([setting | error] if error else [])


def measure_all(options: Options, given: str) -> dict[str, Any]:
    """Return the report of the whole command.

    Args:
        options: options of the command.
        given: flags of the environment.
    """
    rows: list[dict[str, Any]] = []
    for name in options.settings:
        with timed(f"programs, {name}"):
            rows += under_setting(name, options, given)
    report: dict[str, Any] = {"programs": rows, "engine": []}
    for steps in (1, 16):
        with timed(f"engine, up to {steps} decodes in a program"):
            results, _, error = apart(options, f"--steps={steps}")
        report["engine"] += [{"steps": steps, **error}] if error else results
    failed = [row.get("setting", "engine") for row in rows + report["engine"] if "error" in row]
    return report | {"settings_to_set": recommended(rows)} | ({"failed": failed} if failed else {})


def recommended(rows: list[dict[str, Any]]) -> list[str]:
    """Return the settings under which a decode takes less time, the best first.

    Args:
        rows: rows of `under_setting`.
    """
    known: dict[str, dict[tuple[str, int], float]] = {}
    for row in rows:
        if "error" not in row:
            known.setdefault(row["setting"], {})[row["program"], row["rows"]] = row["new arrays"]["row_us"]
    broken = {row["setting"] for row in rows if "error" in row}
    base, ratios = known.get(AS_IT_IS, {}), dict[str, float]()
    for name, of_setting in known.items():
        if name not in broken and of_setting.keys() <= base.keys():
            ratios[name] = statistics.geometric_mean([us / base[key] for key, us in of_setting.items()])
    return sorted((name for name in ratios if ratios[name] <= WORTH), key=lambda name: ratios[name])


def lines(report: dict[str, Any]) -> list[str]:
    """Return a report as lines."""
    found = [_program_line(row) for row in report["programs"]]
    for part in report["engine"]:
        label = "single steps" if part.get("steps") == 1 else "runs"
        if "error" in part:
            found.append(f"engine, {label}: {part['error']}")
            continue
        for case in part["cases"]:
            ways = f", {'single steps' if case['steps'] == 1 else 'runs'}" if case["unit"] == "tok/s" else ""
            values = [in_unit(case[key], case["unit"]) for key in ("median", "floor", "predicted")]
            share = case["median"] / case["predicted"] if case["unit"] != "s" else case["predicted"] / case["median"]
            text = f"{values[0]}; floor {values[1]}; predicted {values[2]}, of which it reaches {share:.0%}"
            found.append(f"{case['name']}{ways}: {text}")
    best = report["settings_to_set"]
    advice = f'set XLA_FLAGS="{SETTINGS[best[0]]}" ({best[0]})' if best else "set no flags: none makes decodes faster"
    others = f"; also faster on their own: {', '.join(best[1:])}" if best[1:] else ""
    return [*found, advice + others]


def _program_line(row: dict[str, Any]) -> str:
    """Return the times of a program as a line."""
    if "error" in row:
        return f"{row['setting']}: {row['error']}"
    new, there, graphs = row["new arrays"], row["arrays on the device"], row["graphs"].get("new arrays", {})
    text = f"{row['setting']}, {row['program']} of {row['rows']}: {new['row_us']:,.0f} us a decode"
    text += f", waited for {new['each_us']:,.0f}, with arrays on the device {there['row_us']:,.0f}"
    text += f", {graphs.get('updates_a_call', 0):g} updates of graphs a call"
    kernels = row.get("kernels_us")
    return text + (f", kernels {kernels:,.0f} us, {kernels / new['row_us']:.0%} of it" if kernels else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--here", choices=SETTINGS, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--geometry", default="qwen3-0.6b", help="model shape, with random weights: qwen3-0.6b or small")
    parser.add_argument(
        "--rows", type=int, action="extend", nargs="+", help="rows of a step; settings with flags run the first; default: 8 64"
    )
    parser.add_argument("--calls", type=int, default=200, help="timed decodes of each kind")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="settings to measure")
    parser.add_argument("--block-size", type=int, help="tokens per KV page of the engine; default: its own")
    parser.add_argument("--small", action="store_true", help="run tiny cases, to see that the command works")
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE; - prints it instead of lines")
    args = parser.parse_args()
    rows = tuple(args.rows or (8, 64))
    if min(*rows, args.calls) < 1 or max(rows) > MOST_ROWS:
        parser.error(f"--rows and --calls must be at least 1, and --rows at most {MOST_ROWS}")
    options = Options(args.geometry, rows, args.calls, tuple(args.settings), args.block_size, args.small)
    if args.here:
        for number in rows:
            for result in measure(args.geometry, number, args.calls, traces=args.here == AS_IT_IS):
                print(_RESULT + json.dumps(result), flush=True)
        return
    if args.steps:
        print(_RESULT + json.dumps(engine(options, args.steps)))
        return
    report = measure_all(options, os.environ.get("XLA_FLAGS", ""))
    text = json.dumps(report, indent=2)
    print(text if args.json == "-" else "\n".join(lines(report)))
    if args.json and args.json != "-":
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    sys.exit("failed" in report)


if __name__ == "__main__":
    main()
