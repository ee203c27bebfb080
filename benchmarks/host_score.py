"""Measure what the host does for a scoring call: time by part, programs sent to the device, and waits for it.

    python -m benchmarks.host_score [--devices cpu stub] [--query 2000] [--items 500] [--item-len 20] [--rounds 7]

`cpu` is the demo model on the native backend. Its programs share the processor with the host, so its host time leaves out the
programs and the waits. `stub` is an engine of as many arrays as Qwen3-0.6B has, with the GPU backend's metadata and a step that
computes nothing. Its host time leaves out the waits alone. Copies to a card and its launches come on top. The engines take
turns, each time with a new query and new items. The table has the fastest round of each.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.host_parts import Clock, demo_core, stub_core
from chunkattn.calls.frontend import Frontend
from chunkattn.calls.job import answer, drive
from chunkattn.calls.score_inputs import score_call
from chunkattn.engine.core import EngineCore
from chunkattn.models.loader import ModelFiles
from chunkattn.terminal.files import write_json
from chunkattn.terminal.progress import timed
from chunkattn.tools.bench.measure import round_name

PAGES = 600
WAIT, SEND = "wait for the device", "programs"
"""Parts that are no work of the host on `cpu`; on `stub`, sending the programs is."""


class Calls:
    """Scoring calls on one engine, from token ids to scores.

    Args:
        core: the engine.
    """

    def __init__(self, core: EngineCore) -> None:
        runner, self.clock = core.runner, Clock()
        self._core, self._rng = core, np.random.default_rng(0)
        files = ModelFiles(Path(), runner.spec, runner.dtype, tokenizer=None, eos_token_ids=())
        self._frontend = Frontend(core.config, files)
        self._frontend.connect(core.limits)
        self.run(40, 2, 4)  # so that only programs of the measured sizes are compiled later
        watch = self.clock.watch
        watch(core, "add", "requests")
        for name in ("plan", "admit"):
            watch(core.scheduler, name, name)
        watch(core.scheduler.fills, "commit", "commit")
        watch(core.builder, "build", "arrays")
        watch(runner.backend, "build_metadata", "metadata of the backend")
        for name in ("_step", "_gather", "_read_labels"):
            watch(runner, name, SEND)
        watch(runner, "fetch", WAIT)
        watch(core, "step", "rest of the steps")

    def run(self, query: int, items: int, item_len: int) -> float:
        """Score random items. Return the seconds of the call.

        Args:
            query: tokens of the query.
            items: number of items.
            item_len: tokens of an item.
        """
        vocab, core = self._core.limits.vocab_size, self._core
        before, after = (self._rng.integers(0, vocab, n).tolist() for n in (query, (items, item_len)))
        self.clock.reset()
        began = time.perf_counter()
        job = score_call(self._frontend, before, after, label_token_ids=[1, 2], algorithm="prefill_extend")
        drive(job.flow(), lambda question: answer(core, question))
        return time.perf_counter() - began


ENGINES = {"cpu": demo_core, "stub": stub_core}


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each engine, of its fastest round."""
    with timed("engines"):
        calls = {name: Calls(ENGINES[name](PAGES)) for name in args.devices}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in calls}
    for number in range(1 + args.rounds):
        for name, of_engine in calls.items():
            with timed(f"{name}, {round_name(number, args.rounds)}"):
                seconds = of_engine.run(args.query, args.items, args.item_len)
            clock = of_engine.clock
            outside = clock.spent[WAIT] + (clock.spent[SEND] if name == "cpu" else 0)
            parts = {label: round(1000 * spent, 2) for label, spent in sorted(clock.spent.items(), key=lambda x: -x[1])}
            parts["call outside of the engine"] = round(1000 * (seconds - sum(clock.spent.values())), 2)
            row: dict[str, Any] = {"device": name, "call_ms": round(1000 * seconds, 2)}
            row |= {"host_ms": round(1000 * (seconds - outside), 2), "waits": clock.calls[WAIT], "programs": clock.calls[SEND]}
            rounds[name].append(row | {"parts_ms": parts})
    return [min(of_engine[1:], key=lambda row: row["host_ms"]) for of_engine in rounds.values()]  # the first compiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", choices=[*ENGINES], nargs="+", default=[*ENGINES])
    parser.add_argument("--query", type=int, default=2000)
    parser.add_argument("--items", type=int, default=500)
    parser.add_argument("--item-len", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="write JSON to FILE; - prints it instead of the table")
    args = parser.parse_args()
    rows = measure(args)
    if not write_json(rows, args.json):
        return
    for row in rows:
        call, host = row["call_ms"], row["host_ms"]
        print(f"{row['device']}: call {call} ms, host {host} ms, {row['waits']} waits, {row['programs']} programs")
        for part, spent in row["parts_ms"].items():
            print(f"  {part:28}{spent:8.2f} ms")


if __name__ == "__main__":
    main()
