"""Timing of other libraries on the same workload, each in a process of its own interpreter."""

from __future__ import annotations

import json
import os
import select
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import jax
import numpy as np

from chunkattn.tools.bench.geometry import GEOMETRIES
from chunkattn.tools.bench.peer_script import MODULES
from chunkattn.tools.bench.score import LABELS
from chunkattn.tools.bench.sizes import ScoreWorkload

PEERS = ("transformers", "vllm")
"""Libraries beside `chunkattn bench score`."""
NOT_FOUND = "not measured: none of the interpreters given has it"
_SCRIPT = Path(__file__).with_name("peer_script.py")
_TIMEOUT_S = 3600.0
_CLOSE_S = 60.0
_GPU_SHARE = 0.45
"""Share of a GPU's memory for vLLM. JAX needs `XLA_CLIENT_MEM_FRACTION=0.45` to leave as much."""
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
    pythons: Sequence[Path], peer: str, geometry: str, workload: ScoreWorkload, *, measured_items: int, repeats: int
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
    case = partial(PeerCase, **asdict(workload), peer=peer)
    if (python := find_python(pythons, peer)) is None:
        return case(note=NOT_FOUND)
    config, is_vllm = GEOMETRIES[geometry], peer == "vllm"
    vocab, options = config.vocab_size, {"dtype": "bfloat16", "max_model_len": workload.query + workload.item_len + 16}
    rng, seconds = np.random.default_rng(), list[float]()
    try:
        with PeerProcess(python, peer, config=config.to_dict(), **(options if is_vllm else {})) as process:
            for count in (min(8 if is_vllm else 1, measured_items), *repeat(measured_items, repeats)):
                query = rng.integers(0, vocab, workload.query)
                prompts = [[*query.tolist(), *rng.integers(0, vocab, workload.item_len).tolist()] for _ in range(count)]
                # vLLM gets the first item before the others, so that the query is in its cache.
                batches = [batch for batch in (prompts[:1], prompts[1:]) if batch]
                answer = process.run(batches, 1, len(LABELS), labels=[label % vocab for label in LABELS])
                seconds.append(answer["seconds"])
    except PeerError as error:
        return case(note=f"failed: {error}")
    median = statistics.median(seconds[1:])
    return case(
        version=process.version,
        measured_items=measured_items,
        seconds=median * workload.items / measured_items,
        items_per_s=measured_items / median,
        note=process.note,
    )


class PeerError(Exception):
    """A peer's process could not run a job."""


class PeerProcess(AbstractContextManager["PeerProcess"]):
    """A library in a process of its own interpreter. It keeps the model between jobs, so that rounds can take turns with it.

    Args:
        python: interpreter with the library.
        peer: name in `MODULES`.
        **options: arguments of the library's `load_` function in `peer_script`.

    Attributes:
        version: version of the library.
        note: libraries that would make the peer faster and are missing, or an empty text.

    Raises:
        PeerError: the library does not start.
    """

    def __init__(self, python: Path, peer: str, **options: Any) -> None:
        variables: dict[str, str] = {}
        self.note = ""
        if peer == "transformers":
            # Spinning threads of torch lose much time on a machine with other load.
            variables = {"OMP_WAIT_POLICY": "passive"}
        elif peer == "vllm" and jax.default_backend() == "gpu":
            options = {"gpu_memory_utilization": _GPU_SHARE, "enforce_eager": False, **options}  # CUDA graphs
        elif peer == "vllm":
            variables, self.note = _for_cpus(python)
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  `close` closes it
        try:
            self._process = subprocess.Popen(
                [python, _SCRIPT, peer],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=os.environ | {"HF_HUB_OFFLINE": "1"} | variables,
                text=True,
                start_new_session=True,  # so that `close` can end the library's own processes too
            )
        except OSError as error:
            self._errors.close()
            raise PeerError(str(error)) from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._jobs, self._answers = self._process.stdin, self._process.stdout
        try:
            self.version = self._ask(options)["version"]
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, batches: list[list[list[int]]], max_tokens: int, logprobs: int | None = None, labels: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Run batches of prompts one after the other, each as a whole.

        Args:
            batches: token ids of each prompt of each batch.
            max_tokens: tokens to generate for each prompt.
            logprobs: number of likeliest tokens whose log-probabilities are returned; None returns none.
            labels: token ids whose log-probabilities transformers returns.

        Returns:
            `seconds` of all batches, and from vLLM and llama.cpp `decode_rate`, the tokens per second of the last batch while
            all of its sequences decode.

        Raises:
            PeerError: the library failed.
        """
        return self._ask({"batches": batches, "max_tokens": max_tokens, "logprobs": logprobs, "labels": [*labels]})

    def close(self) -> None:
        """End the process. A process that does not end in time is killed."""
        with suppress(OSError, subprocess.TimeoutExpired):
            self._jobs.close()
            self._process.wait(_CLOSE_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._answers.close()
        self._errors.close()

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        limit = time.monotonic() + _TIMEOUT_S
        with suppress(BrokenPipeError):
            self._jobs.write(json.dumps(job) + "\n")
            self._jobs.flush()
        # A child of a dead process may hold the pipe open, so reading alone may never end.
        while not select.select([self._answers], [], [], 1.0)[0]:
            if self._process.poll() is not None:
                break
            if time.monotonic() > limit:
                raise PeerError(f"no answer within {_TIMEOUT_S:.0f} seconds")
        else:
            if line := self._answers.readline():
                answer = json.loads(line)
                if "error" in answer:
                    raise PeerError(" ".join(answer["error"].split()))
                return answer
        self._process.wait()
        self._errors.seek(0)
        raise PeerError((self._errors.read().strip().splitlines() or [f"exit code {self._process.returncode}"])[-1])


def find_python(pythons: Sequence[Path], peer: str) -> Path | None:
    """Return the first interpreter that has a library, or None."""
    return next((python for python in pythons if _has(python, peer)), None)


def _has(python: Path, peer: str) -> bool:
    """Return whether an interpreter exists and has a library."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({MODULES.get(peer, peer)!r}) is None)"
    try:
        return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _for_cpus(python: Path) -> tuple[dict[str, str], str]:
    """Return vLLM's fastest environment on CPUs, and a note on missing libraries."""
    folders = [python.parent.parent / "lib", *map(Path, ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/lib"))]
    libraries = {name: next((f / name for f in folders if (f / name).exists()), None) for name in _PRELOADED_LIBRARIES}
    missing = [name for name, path in libraries.items() if path is None]
    variables = {
        "LD_PRELOAD": " ".join(str(path) for path in libraries.values() if path),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "4",
    }
    return variables, f"without {' and '.join(missing)}, which would make it faster" if missing else ""
