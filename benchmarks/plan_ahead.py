"""Measure what planning the next step while the device computes gains, with a device that is simulated by a sleep.

    python -m benchmarks.plan_ahead [--device-ms 2 5 10] [--samples 8 64] [--tokens 40] [--rounds 5] [--json FILE|-]

The programs of an engine run once for each size and then return the same values again. Before the host reads the values of a
step, it sleeps until `--device-ms` have passed since the step was sent. `now` plans every step after that, `ahead` while it
sleeps. Both take turns on one engine. Milliseconds of a step are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import jax
import numpy as np

from chunkattn import LLM, SamplingParams
from chunkattn.terminal.files import write_json
from chunkattn.terminal.progress import say

PROMPT = 200


class Device:
    """A device that takes a fixed time for a step, in place of the runner's programs.

    Args:
        runner: runner of the engine.
    """

    def __init__(self, runner: Any) -> None:
        self.seconds, self._sent = 0.0, 0.0
        self._runner, self._step, self._gather, self._sample = runner, runner._step, runner._gather, runner._sample
        self._fetch, self._known = runner.fetch, dict[Any, Any]()
        runner._step, runner._gather, runner._sample, runner.fetch = self.step, self.gather, self.sample, self.fetch

    def step(self, params: Any, caches: Any, stacks: Any, sent: Any, **static: Any) -> Any:
        """Return the values of the first step of this size, and the pool as it is."""
        size = "step", *(np.shape(array) for array in jax.tree.leaves(sent))
        if size not in self._known:
            *self._known[size], caches = self._step(params, caches, stacks, sent, **static)
        self._sent = time.perf_counter()
        return *self._known[size], caches

    def gather(self, hidden: Any, rows: Any) -> Any:
        """Return the rows that the first call of these sizes returned."""
        return self._first(("gather", len(hidden), len(rows)), self._gather, hidden, rows)

    def sample(self, params: Any, picked: Any, *given: Any, **static: Any) -> Any:
        """Return the tokens that the first call of this size returned."""
        return self._first(("sample", len(picked)), self._sample, params, picked, *given, **static)

    def fetch(self, values: Any) -> Any:
        """Plan ahead, sleep until the step is done, and return values."""
        if (meanwhile := self._runner.while_waiting) is not None:
            self._runner.while_waiting = None
            meanwhile()
        time.sleep(max(0.0, self._sent + self.seconds - time.perf_counter()))
        return self._fetch(values)

    def _first(self, key: Any, program: Any, *given: Any, **static: Any) -> Any:
        if key not in self._known:
            self._known[key] = program(*given, **static)
        return self._known[key]


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each number of samples and device time."""
    most = max(args.samples)
    llm = LLM(max_num_seqs=most, skip_tokenizer_init=True, kv_cache_memory_bytes=256 << 20, num_scheduler_steps=1)
    device, plan = Device(llm.core.runner), llm.core.ahead.plan
    prompts = [{"prompt_token_ids": [5 + n, *range(3, PROMPT + 3)]} for n in range(most)]
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False)
    rows = []
    for samples in args.samples:
        for device_ms in args.device_ms:
            spent: dict[str, list[float]] = {"now": [], "ahead": []}
            for _ in range(args.rounds):
                for way, step_ms in spent.items():
                    llm.core.ahead.plan = plan if way == "ahead" else lambda *_: None
                    device.seconds = device_ms / 1000
                    steps, began = llm.core.metrics.value("steps_total"), time.perf_counter()
                    llm.generate(prompts[:samples], params, use_tqdm=False)
                    took = time.perf_counter() - began
                    step_ms.append(1000 * took / (llm.core.metrics.value("steps_total") - steps))
            now, ahead = median(spent["now"]), median(spent["ahead"])
            ratios = [a / b for a, b in zip(spent["now"], spent["ahead"], strict=True)]
            rows.append(
                {"samples": samples, "device_ms": device_ms, "now_ms": round(now, 2), "ahead_ms": round(ahead, 2)}
                | {"ratio": round(median(ratios), 3), "range": [round(min(ratios), 3), round(max(ratios), 3)]}
            )
            say(json.dumps(rows[-1]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device-ms", nargs="+", type=float, default=[2.0, 5.0, 10.0])
    parser.add_argument("--samples", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--tokens", type=int, default=40, help="tokens of every answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write JSON to FILE; - prints it instead of the table")
    args = parser.parse_args()
    rows = measure(args)
    if not write_json(rows, args.json):
        return
    print("samples  device ms  planned now ms  ahead ms  times as fast")
    for row in rows:
        low, high = row["range"]
        print(
            f"{row['samples']:7}  {row['device_ms']:9.1f}  {row['now_ms']:14.2f}  {row['ahead_ms']:8.2f}  "
            f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})"
        )


if __name__ == "__main__":
    main()
