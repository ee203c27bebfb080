"""Times of PyTorch's FlexAttention on the calls of `workloads`. The interpreter that has PyTorch runs this file.

    python flex_times.py < job.json

The job has `calls` (from `Call.facts`), `repeats`, and `device`. K and V are contiguous, without pages, and the calls of a
round read their copies in turn. Standard output gets one line of JSON: the version, a note on the comparison, and the seconds
of every round of every call, or its error. On a CPU nothing is compiled.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

CALLS = 20
"""Calls of one round."""
NOTE = "FlexAttention reads K and V where they lie; chunkattn's times include writing the new rows' K and V to pages"


def measure(torch: Any, call: dict[str, Any], device: str, repeats: int) -> list[float]:
    """Return the seconds of a call in every round."""
    flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
    attend, count = flex.flex_attention, 1
    if device == "cuda":
        # Programs of other calls would make this one compile for any size, or reach the limit of recompilations.
        torch.compiler.reset()
        attend, count = torch.compile(attend, dynamic=False), CALLS
    start = torch.tensor(call["row_start"], device=device)
    first, prefix = call["slots"] - call["rows"], call["prefix"]

    def visible(batch: Any, head: Any, row: Any, slot: Any) -> Any:
        return (slot <= row + first) & ((slot < prefix) | (slot >= start[row]))

    mask = flex.create_block_mask(visible, None, None, call["rows"], call["slots"], device=device)

    def random(heads: str, slots: str) -> Any:
        sizes = call["sequences"], call[heads], call[slots], call["head_dim"]
        return torch.randn(sizes, device=device, dtype=torch.bfloat16)

    q = random("heads", "rows")
    copies = [(random("kv_heads", "slots"), random("kv_heads", "slots")) for _ in range(call["copies"])]
    seconds = []
    for number in range(1 + repeats):
        began = time.perf_counter()
        for turn in range(count if number else 1):
            attend(q, *copies[turn % len(copies)], block_mask=mask, enable_gqa=True)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - began) / count)
    return seconds[1:]


def main() -> None:
    job = json.load(sys.stdin)
    torch: Any = importlib.import_module("torch")
    if job["device"] == "cuda" and not torch.cuda.is_available():
        print(json.dumps({"version": torch.__version__, "error": "this PyTorch sees no GPU"}))
        return
    rows = []
    for call in job["calls"]:
        row: dict[str, Any] = {"call": call["name"]}
        try:
            with torch.inference_mode():
                row["seconds"] = measure(torch, call, job["device"], job["repeats"])
        except Exception as error:  # a peer's error is a result
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        rows.append(row)
    print(json.dumps({"version": torch.__version__, "note": NOTE, "calls": rows}))


if __name__ == "__main__":
    main()
