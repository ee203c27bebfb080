"""Calibration of a model, of its isolated chunks and of the labels of its decisions, and the file that keeps both."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from chunkattn.errors import ConfigError, shown
from chunkattn.gguf_names import GGUF_SUFFIX, has_quant, split_quant
from chunkattn.local_files import read_object

logger = logging.getLogger(__name__)

FILE_NAME = "chunk_calibration.json"
"""Name of the calibration file in a model's folder."""
OFF = "off"
"""Value of `chunk_calibration` that ignores the file in the model's folder."""
MAX_GAP = 2**31 - 2
"""Largest `chunk_position_gap`: position ids are int32."""
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0
"""Bounds of temperature and scale. Far beyond them, float32 scores overflow."""
LABELS = "labels"
"""Field of a calibration file that holds the calibration of labels."""
LABELS_REPORT = "labels_report"
"""Field of a calibration file with the data and figures behind the calibration of labels."""
LABEL_KINDS = "predicate", "letters", "digits", "likelihood", "separate"
"""Kinds of labels: yes and no of a predicate, letters and digits of options, texts of options, yes or no for each option."""


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


_CONSTANTS = tuple(asdict(Calibration()))


@dataclass(frozen=True)
class LabelScale:
    """Calibration of one kind of labels: `P(label) = softmax((s - bias) / temperature)` with the scores `s` of a question.

    Attributes:
        temperature: divisor of the scores.
        bias: score that is taken off each label, by the name of the label; 0 for other labels.
    """

    temperature: float = 1.0
    bias: Mapping[str, float] = field(default_factory=dict)

    def apply(self, scores: np.ndarray, names: Sequence[str]) -> np.ndarray:
        """Return the calibrated scores of a question's labels, float64 `[labels]`.

        Args:
            scores: score of each label, float64 `[labels]`.
            names: name of each label; empty where labels have no bias.
        """
        bias = [self.bias.get(name, 0.0) for name in names] or 0.0
        return (scores - np.asarray(bias)) / self.temperature


def calibration_of(model: str | None, option: str | None, revision: str | None = None) -> Calibration | None:
    """Return the calibration that a configuration names, or that lies in the model's folder; None if there is none.

    A folder can hold several GGUF files. A calibration found beside a GGUF file is ignored with a warning if its field `model`
    names another file.

    Args:
        model: local folder, local file, hub id or `MODEL:QUANT`; None for the bundled demo model.
        option: path of a calibration file, `"off"` for none, or None to look into the model's folder.
        revision: revision of the model on the hub.

    Raises:
        ConfigError: as `read_calibration`.
    """
    if (file := _calibration_file(model, option, revision)) is None:
        return None
    calibration = read_calibration(file)
    if option is None:
        logger.info("calibration found in %s: %s", file, calibration)
    return calibration


def label_scales_of(model: str | None, option: str | None, revision: str | None = None) -> dict[str, LabelScale]:
    """Return the calibration of labels by kind, one of `LABEL_KINDS`. See `calibration_of` for the arguments.

    Raises:
        ConfigError: as `read_calibration`.
    """
    file = _calibration_file(model, option, revision)
    return {} if file is None else read_label_scales(file)


def _calibration_file(model: str | None, option: str | None, revision: str | None) -> Path | None:
    """Return the calibration file that a configuration names, or that lies in the model's folder; None if there is none."""
    if option == OFF:
        return None
    if option is not None:
        return Path(option).expanduser()
    if model is None:
        return None
    name, quant = (model, None) if Path(model).expanduser().exists() else split_quant(model)
    place = Path(name).expanduser()
    if place.exists():
        file: Path | None = (place if place.is_dir() else place.parent) / FILE_NAME
    else:
        file = _hub_file(name, revision)
    if file is None or not file.exists():
        return None
    named = _object(file).get("model")
    is_of_another = not _has_quant(named, quant) if quant else place.is_file() and not _is_named(place, named)
    if is_of_another:
        logger.warning(
            "%s is ignored: it is the calibration of %r, not of %s; to use it anyway, name the file in chunk_calibration",
            file,
            named,
            model if quant else place.name,
        )
        return None
    return file


def _hub_file(model: str, revision: str | None) -> Path | None:
    """Return the calibration file of a model on the hub, or None if there is none or the hub cannot be asked."""
    if Path(model).suffix.lower() == GGUF_SUFFIX:  # a local file that is missing
        return None
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, FILE_NAME, revision=revision))
    except Exception as error:  # no such file or model, offline, an invalid id: loading the model reports what matters
        logger.debug("no calibration of %s on the hub: %s", model, error)
        return None


def _has_quant(named: Any, quant: str) -> bool:
    """Return whether a calibration's `model` may name a GGUF file of a quantisation: a folder or hub id names them all."""
    return not isinstance(named, str) or not named.lower().endswith(GGUF_SUFFIX) or has_quant(Path(named).as_posix(), quant)


def _is_named(file: Path, name: Any) -> bool:
    """Return whether a calibration's `model` names this GGUF file, or the folder that holds it."""
    return not isinstance(name, str) or any(
        Path(name).name in (place.name, place.parent.name) for place in (file, file.resolve())
    )


def read_calibration(path: Path) -> Calibration:
    """Read a calibration file: a JSON object with the fields of `Calibration`, and perhaps `labels`. Other fields are comments.

    Args:
        path: file to read.

    Raises:
        ConfigError: the file cannot be read, or a value is missing or out of range.
    """
    return _read(path)[0]


def read_label_scales(path: Path) -> dict[str, LabelScale]:
    """Return the calibration of labels in a calibration file, by kind; empty if the file has none.

    Args:
        path: file to read.

    Raises:
        ConfigError: as `read_calibration`.
    """
    return _read(path)[1]


def _read(path: Path) -> tuple[Calibration, dict[str, LabelScale]]:
    values = _object(path)
    try:
        return Calibration(**checked({name: values[name] for name in _CONSTANTS if name in values})), _label_scales(values)
    except ConfigError as error:
        raise ConfigError(f"chunk_calibration {path}: {error}") from None


def _object(path: Path) -> dict[str, Any]:
    """Return the fields of a calibration file.

    Raises:
        ConfigError: the file cannot be read, or holds neither a field of `Calibration` nor `labels`.
    """
    values = read_object(path, ConfigError, "chunk_calibration", unique=True)
    if not {*_CONSTANTS, LABELS} & values.keys():
        raise ConfigError(f"chunk_calibration {path} must be a JSON object with {', '.join(_CONSTANTS)}, or with {LABELS}")
    return values


def _label_scales(values: Mapping[str, Any]) -> dict[str, LabelScale]:
    labels = values.get(LABELS, {})
    if not isinstance(labels, dict) or (unknown := sorted(labels.keys() - set(LABEL_KINDS))):
        got = f"the kind {unknown[0]!r}" if isinstance(labels, dict) else shown(labels)
        raise ConfigError(f"{LABELS} must be an object with {', '.join(LABEL_KINDS)}, got {got}")
    return {kind: _label_scale(f"{LABELS}.{kind}", fields) for kind, fields in labels.items()}


def _label_scale(place: str, fields: Any) -> LabelScale:
    if not isinstance(fields, dict) or not fields.keys() <= {"temperature", "bias"}:
        raise ConfigError(f"{place} must be an object with temperature and bias, got {shown(fields)}")
    bias = fields.get("bias", {})
    if not isinstance(bias, dict):
        raise ConfigError(f"{place}.bias must be an object, got {shown(bias)}")

    def number(name: str, value: Any, low: float) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= MAX_WEIGHT:  # NaN is false
            raise ConfigError(f"{place}.{name} must be a number between {low:g} and {MAX_WEIGHT:g}, got {shown(value)}")
        return float(value)

    temperature = number("temperature", fields.get("temperature", 1.0), MIN_WEIGHT)
    return LabelScale(temperature, {name: number(f"bias.{name}", value, -MAX_WEIGHT) for name, value in bias.items()})


def write_calibration(path: Path, calibration: Calibration, notes: Mapping[str, Any]) -> None:
    """Write a calibration file. The calibration of labels in the file stays.

    Args:
        path: file to write.
        calibration: values that the engine reads.
        notes: further fields, such as the data and the figures behind the values.

    Raises:
        ConfigError: the file cannot be written.
    """
    kept = {name: value for name, value in _present(path).items() if name in (LABELS, LABELS_REPORT)}
    _write(path, {**asdict(calibration), **notes, **kept})


def write_label_scales(path: Path, scales: Mapping[str, LabelScale], model: str, report: Mapping[str, Any]) -> None:
    """Write the calibration of labels into a calibration file. The other fields of the file stay.

    Args:
        path: file to write.
        scales: calibration by kind of labels, one of `LABEL_KINDS`.
        model: name of the model.
        report: the data and the figures behind the values.

    Raises:
        ConfigError: the file cannot be written.
    """
    labels = {kind: asdict(scale) for kind, scale in scales.items()}
    _write(path, {**_present(path), "model": model, LABELS: labels, LABELS_REPORT: report})


def _present(path: Path) -> dict[str, Any]:
    return _object(path) if path.is_file() and path.stat().st_size else {}


def _write(path: Path, values: Mapping[str, Any]) -> None:
    try:
        path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from None


def checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `Calibration` fields, each in its type.

    Args:
        values: values by name.

    Raises:
        ConfigError: a value is no number or out of range.
    """
    numbers: dict[str, Any] = {}
    for name, value in values.items():
        whole = name == "chunk_position_gap"
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise ConfigError(f"{name} must be {'an integer' if whole else 'a number'}, got {shown(value)}")
        low, high = (0, MAX_GAP) if whole else (MIN_WEIGHT, MAX_WEIGHT)
        if not low <= value <= high:  # NaN compares false
            raise ConfigError(f"{name} must be between {low} and {high:.10g}, got {shown(value)}")
        numbers[name] = value if whole else float(value)
    return numbers
