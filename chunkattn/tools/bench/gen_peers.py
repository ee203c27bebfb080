"""Libraries beside `chunkattn bench gen`, which measure the same jobs in processes of their own interpreters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any

import jax

from chunkattn.tools.bench.cases import BenchJob
from chunkattn.tools.bench.measure import Progress
from chunkattn.tools.bench.peers import NOT_FOUND, PeerError, PeerProcess, find_python

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_PAUSE_S = 0.3
"""Seconds between two processes' jobs, because idle threads of OpenMP and XLA spin for a while."""
_SPARE_POSITIONS = 16
"""Positions of llama.cpp's context beyond the prompt and the generated tokens."""

Load = Callable[[BenchJob], dict[str, Any]]
"""Function from a job to the options with which the library must have been loaded."""


class GenPeer(ExitStack):
    """A library that takes turns with chunkattn.

    The process is started for the first job, and again for a job that needs other options. A failure ends the process, and the
    library measures nothing more in this case. The next case starts a new process, unless no process has ever started.

    Args:
        name: name in `peer_script.MODULES`.
        pythons: interpreters; the first with the library is used.
        load: returns the options of a job.
        progress: see `generate.run`.

    Attributes:
        name: name in `peer_script.MODULES`.
        version: version of the library; empty until it has started.
        is_installed: whether an interpreter has the library.
        notes: reasons for missing figures, and limitations of the others.
    """

    def __init__(self, name: str, pythons: Sequence[Path], load: Load, progress: Progress) -> None:
        super().__init__()
        self.name, self.version, self.notes = name, "", list[str]()
        self._python, self._load, self._progress = find_python(pythons, name), load, progress
        self._process: PeerProcess | None = None
        self._options: dict[str, Any] = {}
        self.is_installed = self._may_run = self._python is not None
        if not self.is_installed:
            self.notes.append(NOT_FOUND)

    def begin_case(self) -> None:
        """Allow a library that failed in the last case to start again, if it has ever started."""
        self._may_run |= bool(self.version)

    def measure(self, job: BenchJob, number: str) -> float | None:
        """Return the library's value of a job, or None without one.

        Args:
            job: the job.
            number: name of the round.
        """
        if not self._may_run:
            return None
        try:
            process = self._started(self._load(job))
            sleep(_PAUSE_S)
            with self._progress(f"{job.name}, {self.name}, {number}"):
                answer = process.run(job.batches, job.max_tokens, 2 if job.items else None)
            sleep(_PAUSE_S)
        except PeerError as error:
            self._may_run = False
            self._stop()
            self._note(f"{job.name}: failed: {error}")
            return None
        value = job.value(answer["seconds"], answer["decode_rate"])
        if value is None:
            self._note(f"{job.name}: the sequences did not decode together for as many tokens")
        return value

    def _started(self, options: dict[str, Any]) -> PeerProcess:
        """Return the process, loaded with these options."""
        if self._process is None or self._options != options:
            self._stop()
            assert self._python is not None
            with self._progress(f"start of {self.name}"):
                self._process = self.enter_context(PeerProcess(self._python, self.name, **options))
            self._options, self.version = options, self._process.version
            self._note(self._process.note)
        return self._process

    def _stop(self) -> None:
        self._process = None
        self.close()

    def _note(self, text: str) -> None:
        if text and text not in self.notes:
            self.notes.append(text)


def make_vllm(
    pythons: Sequence[Path], config: PretrainedConfig, dtype: str, limit: int, progress: Progress, *, reads_file: bool
) -> GenPeer:
    """Return vLLM on random weights.

    Args:
        pythons: interpreters.
        config: configuration of the model.
        dtype: dtype of weights and activations.
        limit: tokens of the longest sequence.
        progress: see `generate.run`.
        reads_file: whether chunkattn reads its weights from a file.
    """
    options = {"dtype": dtype, "max_model_len": limit, "max_num_batched_tokens": max(8192, limit)}
    options["config"] = config.to_dict()
    peer = GenPeer("vllm", pythons, lambda _: options, progress)
    if reads_file and peer.is_installed:
        peer.notes.append(f"random weights of the same shape in {dtype}")
    return peer


def make_llama(pythons: Sequence[Path], gguf: Callable[[], Path], progress: Progress) -> GenPeer:
    """Return llama.cpp, with as many slots as sequences decode together, and else one slot.

    Args:
        pythons: interpreters.
        gguf: returns the GGUF file.
        progress: see `generate.run`.
    """

    def load(job: BenchJob) -> dict[str, Any]:
        longest = max(len(prompt) for batch in job.batches for prompt in batch)
        context = longest + job.max_tokens + _SPARE_POSITIONS
        on_gpu = jax.default_backend() == "gpu"
        return {"gguf": str(gguf().absolute()), "context": context, "slots": job.sequences, "on_gpu": on_gpu}

    return GenPeer("llama.cpp", pythons, load, progress)
