"""Timing of other libraries on the same scoring workload, each in a process of its own interpreter."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from chunkattn.bench.geometry import GEOMETRIES
from chunkattn.bench.score import LABELS, Workload

PEERS = ("transformers", "vllm")
_SCRIPT = Path(__file__).with_name("peer_script.py")
_TIMEOUT_S = 3600.0
_PRELOADED_LIBRARIES = ("libtcmalloc_minimal.so.4", "libiomp5.so")
"""Libraries with which vLLM's decode is 1.6 times faster on CPUs."""


@dataclass(frozen=True)
class PeerCase:
    """Row of the peers' table, with medians over the repeats.

    Attributes:
        query: tokens of the query.
        items: number of items.
        item_len: tokens per item.
        peer: name of the library.
        version: version of the library.
        measured_items: number of timed items; `seconds` is scaled to all items.
        seconds: time of all items in seconds; None without a measurement.
        items_per_s: items per second; None without a measurement.
        note: reason for missing figures, or a limitation of them.
    """

    query: int
    items: int
    item_len: int
    peer: str
    version: str = ""
    measured_items: int = 0
    seconds: float | None = None
    items_per_s: float | None = None
    note: str = ""

    @property
    def name(self) -> str:
        """Return the library's name and version."""
        return f"{self.peer} {self.version}".strip()


def time_peer(
    pythons: Sequence[Path], peer: str, geometry: str, workload: Workload, *, measured_items: int, repeats: int
) -> PeerCase:
    """Measure one library in bfloat16. Failures are reported in the case's note.

    Args:
        pythons: interpreters; the first with the library is used.
        peer: name in `PEERS`.
        geometry: name of the model's geometry; the weights are random.
        workload: token counts of the scoring request.
        measured_items: number of items to score.
        repeats: number of timed runs, after a shorter run that is not timed.
    """
    python = next((p for p in pythons if _has(p, peer)), None)
    if python is None:
        return PeerCase(**asdict(workload), peer=peer, note="not measured: none of the interpreters given has it")
    config = GEOMETRIES[geometry]
    job = {
        **asdict(workload),
        "config": config.to_dict(),
        "measured_items": measured_items,
        "repeats": repeats,
        "labels": [label % config.vocab_size for label in LABELS],
    }
    # Spinning threads of torch lose much time on a machine with other load.
    added, note = _for_vllm(python) if peer == "vllm" else ({"OMP_WAIT_POLICY": "passive"}, "")
    try:
        with tempfile.TemporaryDirectory() as folder:
            result_file = Path(folder) / "result.json"
            subprocess.run(
                [python, _SCRIPT, peer, result_file],
                input=json.dumps(job),
                env=os.environ | {"HF_HUB_OFFLINE": "1"} | added,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=True,
            )
            result = json.loads(result_file.read_text())
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
        return PeerCase(**asdict(workload), peer=peer, note=f"failed: {last}")
    except (OSError, subprocess.TimeoutExpired) as error:
        return PeerCase(**asdict(workload), peer=peer, note=f"failed: {error}")
    seconds = statistics.median(result["seconds"])
    return PeerCase(
        **asdict(workload),
        peer=peer,
        version=result["version"],
        measured_items=measured_items,
        seconds=seconds * workload.items / measured_items,
        items_per_s=measured_items / seconds,
        note=note,
    )


def _has(python: Path, peer: str) -> bool:
    """Return whether an interpreter exists and has a library."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({peer!r}) is None)"
    try:
        return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _for_vllm(python: Path) -> tuple[dict[str, str], str]:
    """Return vLLM's fastest environment on CPUs, and a note on missing libraries."""
    folders = [python.parent.parent / "lib", *map(Path, ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/lib"))]
    found = {name: next((f / name for f in folders if (f / name).exists()), None) for name in _PRELOADED_LIBRARIES}
    missing = [name for name, path in found.items() if path is None]
    variables = {
        "LD_PRELOAD": " ".join(str(path) for path in found.values() if path),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "4",
    }
    return variables, f"without {' and '.join(missing)}, which make it faster" if missing else ""
