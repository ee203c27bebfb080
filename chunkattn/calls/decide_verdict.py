"""`MethodVerdict`: the method of decisions that a model takes by default, and the file that keeps it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from chunkattn.errors import ModelError
from chunkattn.local_files import read_object
from chunkattn.user_cache import beside_programs, keep_object

logger = logging.getLogger(__name__)

AUTO, HEAD = "auto", "head"
"""Methods of `LLM.decide`: the one that the model answers best by, and the one of a model with a trained head."""
_FOLDER = "decide_checks"
_LEAST_MASS = 0.5
"""Least mean label mass of letters: below it, the model wants to say something else."""


@dataclass(frozen=True)
class MethodVerdict:
    """Right answers of a model to the built-in questions, by method.

    Attributes:
        letters: questions that `letters` answers right.
        likelihood: questions that `likelihood` answers right; None if `letters` alone decided.
        label_mass: mean label mass of `letters`.
        questions: number of questions.
    """

    letters: int
    likelihood: int | None
    label_mass: float
    questions: int

    @property
    def method(self) -> str:
        """Return `letters` if they are right at least as often as likelihood and have enough label mass."""
        is_best = self.likelihood is None or self.letters >= self.likelihood
        return "letters" if is_best and self.label_mass >= _LEAST_MASS else "likelihood"

    @property
    def is_settled(self) -> bool:
        """Return whether `letters` alone decide: all are right, or their label mass is too small."""
        return self.letters == self.questions or self.label_mass < _LEAST_MASS

    def __str__(self) -> str:
        """Return the figures."""
        other = "" if self.likelihood is None else f", likelihood {self.likelihood}"
        return f"letters {self.letters}{other} of {self.questions} questions right; label mass of letters {self.label_mass:.2f}"


def read_verdict(key: Mapping[str, Any]) -> MethodVerdict | None:
    """Return the verdict with this key; None, with a warning if the file is damaged, if there is none.

    Args:
        key: all that the verdict depends on, as JSON.
    """
    file = _file(key)
    if not file.exists():
        return None
    try:
        stored = read_object(file, ModelError, "the verdict")
        if stored.pop("key", None) != key:
            raise ModelError(f"{file} is the verdict of another model")
        counts = [stored.get(name) for name in ("letters", "questions")]
        is_asked = type(stored.get("likelihood", "")) in (int, type(None))
        if not (is_asked and all(type(count) is int for count in counts)) or type(stored.get("label_mass")) is not float:
            raise ModelError(f"the verdict {file} is damaged: a figure is missing")
        return MethodVerdict(**stored)
    except (ModelError, TypeError) as error:
        logger.warning("decide_method auto: the model is asked again, because %s", error)
        return None


def write_verdict(key: Mapping[str, Any], verdict: MethodVerdict) -> None:
    """Keep a verdict in its file; a file that cannot be written is a warning.

    Args:
        key: see `read_verdict`.
        verdict: the verdict.
    """
    consequence = "decide_method auto: a verdict cannot be kept, so the next start asks again"
    keep_object(_file(key), {"key": key, **asdict(verdict)}, consequence)


def _file(key: Mapping[str, Any]) -> Path:
    digest = xxhash.xxh3_64_hexdigest(json.dumps(key, sort_keys=True).encode())
    return beside_programs(_FOLDER) / f"{digest}.json"
