"""Measure what the host does for a decode: the time outside of programs and waits, of single steps and of runs, in turn.

    python -m benchmarks.host_decode [--samples 1 16 64] [--steps 1 4 8 16] [--tokens 256] [--rounds 7] [--json FILE|-]

The demo model generates greedily for plain prompts and prompts of chunks, with `num_scheduler_steps` of each of `--steps`. The
table has microseconds of a decode of all samples, the fastest and the median of the rounds: of the whole and of the host alone.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from types import SimpleNamespace
from typing import Any

from benchmarks.host_parts import Clock
from chunkattn import LLM, ChunkedPrompt, SamplingParams
from chunkattn.engine.core import EngineCore
from chunkattn.terminal.files import write_json
from chunkattn.terminal.progress import timed

_POOL_BYTES = 256 << 20
_PROMPT = 60
_PERIOD = 690
"""Token ids in use."""
DEVICE = "device"
"""Label of the time in programs and in waits for their values."""


def watch_device(core: EngineCore, clock: Clock) -> None:
    """Count the time in the programs of an engine, and in waits for their values."""
    runner = core.runner
    for name in ("_step", "_gather", "_sample", "_read_labels", "fetch", "read_decodes"):
        clock.watch(runner, name, DEVICE)
    if runner._decode is not None:
        runner._decode.on("cpu")
        programs = SimpleNamespace(**runner._decode._programs)
        clock.watch(programs, "cpu", DEVICE)
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
            clocks[most].reset()
            began = time.perf_counter()
            llm.generate(given, params, use_tqdm=False)
            took = time.perf_counter() - began
            if number:  # the first round compiles
                spent[most].append((took, took - clocks[most].spent[DEVICE]))
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
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE; - prints it instead of lines")
    args = parser.parse_args()
    rows = []
    for samples in args.samples:
        with timed(f"{samples} samples"):
            rows += measure(samples, args.steps, args.tokens, args.rounds)
    if write_json(rows, args.json):
        for row in rows:
            print(json.dumps(row))


if __name__ == "__main__":
    main()
