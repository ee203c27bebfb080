"""Measure where the time of a decode step goes on an accelerator, under several flags of the compiler.

    python -m benchmarks.card [--geometry qwen3-0.6b] [--rows 8 64] [--calls 200] [--settings "as it is"] [--json FILE|-]

Run it first on a new card; it takes about five minutes. Every setting and number of rows runs in a process of its own. The
process calls the engine's step program on padding rows: with new NumPy arrays for every call, as the engine does, and with
arrays that lie on the device. For both it prints microseconds of a call:

- call_us: until the call returns
- each_us: until its results are there
- row_us: of a call among many in a row, whose results are waited for at the end

XLA's log says how often the program's CUDA graph was updated, and how long the updates took. On other devices there are none.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from chunkattn.terminal.progress import timed

SETTINGS = {
    "as it is": "",
    "no weights concatenated": "--xla_gpu_dot_merger_threshold_mb=0",
    "graph keeps temporaries": "--xla_gpu_command_buffer_update_mode=SKIP_TEMP",
    "graph keeps what stays": "--xla_gpu_command_buffer_update_mode=SKIP_PROFILED",
    "no graphs": "--xla_gpu_enable_command_buffer=",
}
"""Flags of the compiler by the name of the setting."""
LOG = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "command_buffer_thunk=3", "JAX_COMPILATION_CACHE_DIR": ""}
"""Variables under which XLA logs every update of a graph. A program from the compilation cache would hide the flags."""
WARM_UPS = 4
"""Calls before the timed ones: they compile the program and record the graph."""
_PAGES = 64
_MARK, _RESULT = "MARK ", "RESULT "
_UPDATE = re.compile(r"Updated command buffer in (\d+)")


def measure(geometry: str, rows: int, calls: int) -> dict[str, Any]:
    """Return the microseconds of a call of the step program in this process, and mark the parts of XLA's log."""
    import jax

    from chunkattn.tools.bench.geometry import make_core

    core = make_core(geometry, _PAGES, max_num_seqs=64)
    runner, width = core.runner, core.builder.width_buckets[-1]

    def run(inputs: Any) -> Any:
        hidden, finite, runner.pool.caches = runner._step(runner._params, runner.pool.caches, {}, *inputs, backend=None)
        return hidden, finite

    def new_arrays() -> Any:
        return core.builder.empty(rows, width)[:-1]

    on_device = jax.device_put(new_arrays())
    result: dict[str, Any] = {"rows": rows, "arrays": len(jax.tree.leaves(on_device))}
    for name, make in (("new arrays", new_arrays), ("arrays on the device", lambda: on_device)):
        for _ in range(WARM_UPS):
            jax.block_until_ready(run(make()))
        print(f"{_MARK}{name}", file=sys.stderr, flush=True)
        batches = [make() for _ in range(calls)]
        until_return, each = [], []
        for inputs in batches:
            began = time.perf_counter()
            outputs = run(inputs)
            until_return.append(time.perf_counter() - began)
            jax.block_until_ready(outputs)
            each.append(time.perf_counter() - began)
        began = time.perf_counter()
        for inputs in batches:
            outputs = run(inputs)
        jax.block_until_ready(outputs)
        in_a_row = (time.perf_counter() - began) / calls
        times = {"call_us": statistics.median(until_return), "each_us": statistics.median(each), "row_us": in_a_row}
        result[name] = {key: round(1e6 * value, 1) for key, value in times.items()}
    print(f"{_MARK}end", file=sys.stderr, flush=True)
    return result


def graph_updates(log: str, calls: int) -> dict[str, dict[str, float]]:
    """Return the number of updates of CUDA graphs and their microseconds, both for a call, by part of the log.

    Args:
        log: standard error of a process that ran `measure`.
        calls: timed calls of each kind; each part of the log has twice as many.
    """
    updates = {}
    for part in log.split(_MARK)[1:]:
        name, _, text = part.partition("\n")
        if name != "end":
            spent = [int(number) for number in _UPDATE.findall(text)]
            updates[name] = {
                "updates_a_call": len(spent) / (2 * calls),
                "update_us_a_call": round(sum(spent) / (2 * calls), 1),
            }
    return updates


def measure_apart(setting: str, geometry: str, rows: int, calls: int) -> dict[str, Any]:
    """Return the result of `measure` in a process with a setting's flags; a process that fails gives its last lines."""
    flags = " ".join([os.environ.get("XLA_FLAGS", ""), SETTINGS[setting]]).strip()
    command = [
        sys.executable,
        "-m",
        "benchmarks.card",
        "--here",
        f"--geometry={geometry}",
        f"--rows={rows}",
        f"--calls={calls}",
    ]
    env = {**os.environ, **LOG, "XLA_FLAGS": flags}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    result: dict[str, Any] = {"setting": setting, "flags": SETTINGS[setting]}
    lines = [line.removeprefix(_RESULT) for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if not lines:
        return {**result, "rows": rows, "error": done.stderr[-500:]}
    return {**result, **json.loads(lines[-1]), "graphs": graph_updates(done.stderr, calls)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--geometry", default="qwen3-0.6b", help="model shape, with random weights: qwen3-0.6b or small")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64], help="rows of a step")
    parser.add_argument("--calls", type=int, default=200, help="timed calls of each kind")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="settings to measure")
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE; - prints it instead of a line for each process")
    args = parser.parse_args()
    if min(*args.rows, args.calls) < 1:
        parser.error("--rows and --calls must be at least 1")
    if args.here:
        print(_RESULT + json.dumps(measure(args.geometry, args.rows[0], args.calls)))
        return
    results = []
    for setting in args.settings:
        for rows in args.rows:
            with timed(f"{setting}, {rows} rows"):
                results.append(measure_apart(setting, args.geometry, rows, args.calls))
            if args.json != "-":
                print(json.dumps(results[-1]), flush=True)
    text = json.dumps(results, indent=2)
    if args.json == "-":
        print(text)
    elif args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    sys.exit(any("error" in result for result in results))


if __name__ == "__main__":
    main()
