"""`Verdict`: the result of a kernel's comparison with `xla` on one machine, kept in a file beside the compiled programs."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import xxhash

from chunkattn.backends.base import AttentionBackend
from chunkattn.backends.registry import get_backend
from chunkattn.distributions import version_of
from chunkattn.errors import ChunkAttnError, ModelError
from chunkattn.local_files import read_object
from chunkattn.user_cache import beside_programs, keep_object

logger = logging.getLogger(__name__)

_FOLDER = "attention_checks"
_COMPILER_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_SETTINGS = "settings"
"""Field of a key with what differs between the engines of one machine. The other fields describe machine and software."""


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison.

    Attributes:
        tolerance: largest difference that is allowed.
        found: by kind of step, the largest absolute difference, or the error that was raised.
    """

    tolerance: float
    found: dict[str, float | str]

    @property
    def raised(self) -> bool:
        """Return whether a kind of step has raised an error."""
        return any(isinstance(by, str) for by in self.found.values())

    @property
    def faults(self) -> list[str]:
        """Return a text for every kind of step that is wrong."""
        faults = []
        for kind, by in self.found.items():
            if isinstance(by, str):
                faults.append(f"{kind} raised {by}")
            elif not by <= self.tolerance:  # NaN, too
                faults.append(f"{kind} differs by {by:.3g}, allowed {self.tolerance:.0e}")
        return faults

    def __str__(self) -> str:
        """Return the faults, or the differences if there are none."""
        if self.faults:
            return "; ".join(self.faults)
        return f"{', '.join(f'{kind} {by:.1e}' for kind, by in self.found.items())} of {self.tolerance:.0e} allowed"


def verdict_folder() -> Path:
    """Return the folder of verdicts: in JAX's compile cache, or in the user's cache if that is off or remote."""
    return beside_programs(_FOLDER)


def verdict_key(backend: AttentionBackend, *, weighs: bool, batch_invariant: bool) -> dict[str, Any]:
    """Return all that a verdict depends on, as JSON: chip, versions, source, compiler flags and settings."""
    spec = backend.spec
    settings = {
        "backend": backend.name,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "dtype": spec.dtype.name,
        "kv_dtype": spec.cache_dtype.name,
        "block_size": spec.block_size,
        "windows": list(spec.windows),
        "weighs": weighs,
        "batch_invariant": batch_invariant,
    }
    return {**_machine(), "source": _source(type(backend)), _SETTINGS: settings}


def _machine() -> dict[str, Any]:
    device = jax.devices()[0]
    packages = {name: version_of(name) for name in ("jax", "jaxlib", "libtpu")}
    flags = {name: os.environ.get(name, "") for name in _COMPILER_FLAGS}
    return {"chip": device.device_kind, "runtime": device.client.platform_version, **packages, **flags}


def _source(backend: type[AttentionBackend]) -> str:
    """Return a digest of the source of the backends, of their comparison, and of the module of a foreign backend."""
    root = Path(__file__).parent.parent
    files = [*sorted(root.glob("backends/**/*.py")), root / "testing.py", root / "engine" / "self_check.py"]
    if module_file := getattr(sys.modules.get(backend.__module__), "__file__", None):
        files.append(Path(module_file))
    digest = xxhash.xxh3_128()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def verdict_file(key: dict[str, Any]) -> Path:
    """Return the file of the verdict with this key."""
    digest = xxhash.xxh3_64_hexdigest(json.dumps(key, sort_keys=True).encode())
    return verdict_folder() / f"{key[_SETTINGS]['backend']}-{digest}.json"


def read_verdict(key: dict[str, Any]) -> Verdict | None:
    """Return the verdict with this key, or None with a warning if the file is damaged, or None if there is no file."""
    file = verdict_file(key)
    if not os.path.exists(file):  # False, too, in a folder that cannot be read
        return None
    try:
        stored_key, verdict = _load(file)
        if stored_key != key:
            raise ModelError(f"{file} is the verdict of another machine or setting")
    except ModelError as error:
        logger.warning("attention_backend auto: the kernel is compared with xla again, because %s", error)
        return None
    return verdict


def _load(file: Path) -> tuple[dict[str, Any], Verdict]:
    """Return key and verdict of a file.

    Raises:
        ModelError: the file cannot be read, or holds no verdict.
    """
    stored = read_object(file, ModelError, "the verdict")
    key, tolerance, found = stored.get("key"), stored.get("tolerance"), stored.get("found")
    if not (isinstance(key, dict) and isinstance(tolerance, float) and isinstance(found, dict) and found):
        raise ModelError(f"the verdict {file} is damaged: it lacks a key, a tolerance or differences")
    if not all(isinstance(by, (float, str)) for by in found.values()):
        raise ModelError(f"the verdict {file} is damaged: a difference is neither a number nor an error")
    return key, Verdict(tolerance, found)


def write_verdict(key: dict[str, Any], verdict: Verdict) -> None:
    """Keep a verdict in its file; a file that cannot be written is a warning."""
    consequence = "attention_backend auto: a verdict cannot be kept, so the next start compares again"
    keep_object(verdict_file(key), {"key": key, **asdict(verdict)}, consequence)


def verdicts_here() -> Iterator[tuple[str, Verdict, Path]]:
    """Yield settings, verdict and file of every verdict that holds for this machine, its versions and this source."""
    machine = _machine()
    for file in sorted(verdict_folder().glob("*.json")):
        try:
            key, verdict = _load(file)
            settings = key[_SETTINGS]
            source = _source(get_backend(settings["backend"]))
        except (ChunkAttnError, KeyError, TypeError):  # damaged, or of a backend that this process lacks
            continue
        if key == {**machine, "source": source, _SETTINGS: settings}:
            yield ", ".join(f"{name} {value}" for name, value in settings.items()), verdict, file
