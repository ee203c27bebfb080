"""Measure what the host does for a decode: the time outside of programs and waits, of single steps and of runs, in turn.

    python -m benchmarks.host_decode [--samples 1 16 64] [--steps 1 4 8 16] [--tokens 256] [--rounds 7] [--json FILE|-]

The demo model generates greedily for plain prompts and prompts of chunks, with `num_scheduler_steps` of each of `--steps`. The
table has microseconds of a decode of all samples, the fastest and the median of the rounds: of the whole and of the host alone.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from chunkattn import LLM, ChunkedPrompt, SamplingParams
from chunkattn.engine.core import EngineCore
from chunkattn.terminal.progress import timed

_POOL_BYTES = 256 << 20
_PROMPT = 60
_PERIOD = 690
"""Token ids in use."""


class Clock:
    """Sum of the time in some functions, in seconds; that of nested calls counts once."""

    def __init__(self) -> None:
        self.spent, self._depth = 0.0, 0

    def watch(self, owner: Any, name: str) -> None:
        """Count the time in a method or function of `owner`."""
        original: Callable[..., Any] = getattr(owner, name)

        def clocked(*args: Any, **options: Any) -> Any:
            began, self._depth = time.perf_counter(), self._depth + 1
            try:
                return original(*args, **options)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.spent += time.perf_counter() - began

        setattr(owner, name, clocked)


def watch_device(core: EngineCore, clock: Clock) -> None:
    """Count the time in the programs of an engine, and in waits for their values."""
    runner = core.runner
    for name in ("_step", "_gather", "_sample", "_read_labels", "fetch", "read_decodes"):
        clock.watch(runner, name)
    if runner._decode is not None:
        runner._decode.on("cpu")
        programs = SimpleNamespace(**runner._decode._programs)
        clock.watch(programs, "cpu")
        runner._decode._programs["cpu"] = programs.cpu


def prompts(count: int) -> list[Any]:
    """Return plain prompts and prompts of chunks in turn."""
    found: list[Any] = []
    for number in range(count):
        ids = [5 + (7 * number + 11 * place * (number + 3)) % _PERIOD for place in range(_PROMPT)]
        third = _PROMPT // 3
        chunks = ChunkedPrompt(ids[:8], [ids[8:third], ids[third : 2 * third]], ids[2 * third :])
        found.append(chunks if number % 2 else {"prompt_token_ids": ids})
    return found


def measure(samples: int, steps: list[int], tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each of `steps`, of engines that generate in turn."""
    engines, clocks = {}, {}
    for most in steps:
        llm = LLM(max_num_seqs=64, skip_tokenizer_init=True, kv_cache_memory_bytes=_POOL_BYTES, num_scheduler_steps=most)
        llm.core.runs.limit_s = float("inf")  # a run has as many decodes as it may
        engines[most], clocks[most] = llm, Clock()
        watch_device(llm.core, clocks[most])
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    given = prompts(samples)
    spent: dict[int, list[tuple[float, float]]] = {most: [] for most in steps}
    for number in range(rounds + 1):
        for most, llm in engines.items():
            llm.core.reset_prefix_cache()
            clocks[most].spent, began = 0.0, time.perf_counter()
            llm.generate(given, params, use_tqdm=False)
            took = time.perf_counter() - began
            if number:  # the first round compiles
                spent[most].append((took, took - clocks[most].spent))
    rows = []
    for most, values in spent.items():
        row: dict[str, Any] = {"samples": samples, "num_scheduler_steps": most}
        for name, which in (("whole", 0), ("host", 1)):
            found = [1e6 * value[which] / tokens for value in values]
            row |= {f"{name}_us": round(min(found), 1), f"{name}_median_us": round(median(found), 1)}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE; - prints it")
    args = parser.parse_args()
    rows = []
    for samples in args.samples:
        with timed(f"{samples} samples"):
            rows += measure(samples, args.steps, args.tokens, args.rounds)
        for row in rows[-len(args.steps) :]:
            print(json.dumps(row), flush=True)
    if args.json and args.json != "-":
        Path(args.json).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
