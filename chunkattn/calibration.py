"""`Calibration`: how a model reads isolated chunks best, and the file that keeps it."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chunkattn.errors import ConfigError

logger = logging.getLogger(__name__)

FILE_NAME = "chunk_calibration.json"
"""Name of the calibration file in a model's folder."""
OFF = "off"
"""Value of `chunk_calibration` that ignores the file in the model's folder."""


@dataclass(frozen=True)
class Calibration:
    """Constants of a model under isolated chunks. The defaults change nothing.

    Attributes:
        chunk_position_gap: positions left free between the prefix and every chunk, under `shared` positions.
        chunk_temperature: divisor of the attention scores between the question and chunk tokens.
        chunk_scale: factor of the log-sum-exp of those scores. The chunks' weight in the softmax is its exponential.

    Source of temperature and scale: APE, arXiv:2502.05431.
    """

    chunk_position_gap: int = 0
    chunk_temperature: float = 1.0
    chunk_scale: float = 1.0

    @property
    def weighs(self) -> bool:
        """Return whether temperature or scale change what a question sees of its chunks."""
        return (self.chunk_temperature, self.chunk_scale) != (1.0, 1.0)


def calibration_of(model: str | None, option: str | None) -> Calibration | None:
    """Return the calibration that a configuration names, or that lies in the model's folder; None if there is none.

    Args:
        model: local folder, local file or hub id; None for the bundled demo model.
        option: path of a calibration file, `"off"` for none, or None to look into the model's folder.

    Raises:
        ConfigError: as `read_calibration`.
    """
    if option == OFF:
        return None
    if option is not None:
        return read_calibration(Path(option).expanduser())
    if model is None:
        return None
    place = Path(model).expanduser()
    file = (place if place.is_dir() else place.parent) / FILE_NAME
    if not (place.exists() and file.is_file()):
        return None
    found = read_calibration(file)
    logger.info("calibration found in %s: %s", file, found)
    return found


def read_calibration(path: Path) -> Calibration:
    """Read a calibration file: a JSON object with the fields of `Calibration`. Other fields are comments.

    Args:
        path: file to read.

    Raises:
        ConfigError: the file cannot be read, or a value is missing or out of range.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"chunk_calibration {path} cannot be read: {error}") from None
    names = list(asdict(Calibration()))
    if not isinstance(values, dict) or not set(names) & set(values):
        raise ConfigError(f"chunk_calibration {path} must be a JSON object with {', '.join(names)}")
    try:
        return Calibration(**checked({name: values[name] for name in names if name in values}))
    except ConfigError as error:
        raise ConfigError(f"chunk_calibration {path}: {error}") from None


def write_calibration(path: Path, calibration: Calibration, notes: Mapping[str, Any]) -> None:
    """Write a calibration file.

    Args:
        path: file to write.
        calibration: values that the engine reads.
        notes: further fields, such as the data and the figures behind the values.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = json.dumps({**asdict(calibration), **notes}, indent=2, ensure_ascii=False) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from None


def checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `Calibration` fields, each in its type.

    Args:
        values: values by name.

    Raises:
        ConfigError: a value is no number or out of range.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        whole = name == "chunk_position_gap"
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise ConfigError(f"{name} must be {'an integer' if whole else 'a number'}, got {value!r}")
        if whole and value < 0:
            raise ConfigError(f"{name} must be at least 0, got {value}")
        if not whole and not (value > 0 and math.isfinite(value)):  # NaN compares false
            raise ConfigError(f"{name} must be above 0 and finite, got {value}")
        found[name] = value if whole else float(value)
    return found
