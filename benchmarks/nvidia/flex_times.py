"""Times of PyTorch's FlexAttention on the calls of `workloads`. The interpreter that has PyTorch runs this file.

    python flex_times.py < job.json

The job has `calls` (from `Call.facts`), `repeats`, and `device`. K and V are contiguous, without pages. Standard output gets
one line of JSON: the version, and the seconds of every round of every call, or its error. On a CPU nothing is compiled.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

CALLS = 20
"""Calls of one round."""


def measure(torch: Any, call: dict[str, Any], device: str, repeats: int) -> list[float]:
    """Return the seconds of a call in every round."""
    flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
    attend, count = (torch.compile(flex.flex_attention), CALLS) if device == "cuda" else (flex.flex_attention, 1)
    start = torch.tensor(call["row_start"], device=device)
    first, prefix = call["slots"] - call["rows"], call["prefix"]

    def visible(batch: Any, head: Any, row: Any, slot: Any) -> Any:
        return (slot <= row + first) & ((slot < prefix) | (slot >= start[row]))

    mask = flex.create_block_mask(visible, None, None, call["rows"], call["slots"], device=device)
    sizes = (("heads", "rows"), ("kv_heads", "slots"), ("kv_heads", "slots"))
    q, k, v = (
        torch.randn(call["sequences"], call[heads], call[rows], call["head_dim"], device=device, dtype=torch.bfloat16)
        for heads, rows in sizes
    )
    found = []
    for number in range(1 + repeats):
        began = time.perf_counter()
        for _ in range(count if number else 1):
            attend(q, k, v, block_mask=mask, enable_gqa=True)
        if device == "cuda":
            torch.cuda.synchronize()
        found.append((time.perf_counter() - began) / count)
    return found[1:]


def main() -> None:
    job = json.load(sys.stdin)
    torch: Any = importlib.import_module("torch")
    if job["device"] == "cuda" and not torch.cuda.is_available():
        print(json.dumps({"version": torch.__version__, "error": "this PyTorch sees no GPU"}))
        return
    found = []
    for call in job["calls"]:
        row: dict[str, Any] = {"call": call["name"]}
        try:
            with torch.inference_mode():
                row["seconds"] = measure(torch, call, job["device"], job["repeats"])
        except Exception as error:  # a peer's error is a result
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        found.append(row)
    print(json.dumps({"version": torch.__version__, "calls": found}))


if __name__ == "__main__":
    main()
