"""Dumps of XLA's thunks: the launches of a program, and the CUDA graphs that hold them."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.nvidia.kernels import UnknownDump

_TOP, _ALL = re.compile(r"(?m)^\d+: (k\w+)"), re.compile(r"(?m)^\s*\d+: (k\w+)")
_GRAPH = "kCommandBuffer"


def read_thunks(folder: Path) -> dict[str, Any]:
    """Return the thunks of the largest program in a folder, and delete what the folder holds.

    `thunks` counts launches by kind, before they become CUDA graphs; `graphs` counts the graphs, and `outside_graphs` the
    launches beside graphs.

    Args:
        folder: folder given to `hopper.prepare`.

    Raises:
        UnknownDump: the compiler has written no thunks.
    """
    texts = []
    for pattern in ("*thunk_sequence.txt", "*thunk_sequence_after_thunk_passes.txt"):
        files = sorted(folder.glob(pattern), key=lambda file: file.stat().st_size)
        if not files:
            raise UnknownDump(f"{folder} has no {pattern}")
        texts.append(files[-1].read_text())
    shutil.rmtree(folder)
    folder.mkdir()
    before, top = Counter(_ALL.findall(texts[0])), Counter(_TOP.findall(texts[1]))
    graphs = top.pop(_GRAPH, 0)
    return {"thunks": dict(before), "graphs": graphs, "outside_graphs": sum(top.values())}
