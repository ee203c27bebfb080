"""Comparison of the conditions, and its conclusion in one sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from chunkattn.calibration import Calibration
from chunkattn.evaluation.conditions import NONE, Condition
from chunkattn.evaluation.measures import Mean, containment, exact_match, mean_of, token_f1

LOGPROB = "logprob"
"""Name of the mean log-probability of a token of the gold answer."""

Values = Mapping[str, np.ndarray]
"""Values of the questions, float64 `[questions]`, by the name of the measure."""


@dataclass(frozen=True)
class Row:
    """One condition of a comparison, or one ranking.

    Attributes:
        name: name of the condition.
        means: mean of every measure.
        against_full: mean difference from full attention (for rankings: from the given order), measure by measure.
        against_control: mean difference from full attention with the same temperature and scale on its documents; None where
            both are 1, and for full attention.
    """

    name: str
    means: dict[str, Mean]
    against_full: dict[str, Mean] | None = None
    against_control: dict[str, Mean] | None = None


def answer_measures(texts: Sequence[str], answers: Sequence[Sequence[str]]) -> dict[str, np.ndarray]:
    """Return exact match, token F1 and containment of every text.

    Args:
        texts: text of the model for each question.
        answers: right answers of each question.
    """
    measures = {"exact match": exact_match, "F1": token_f1, "contained": containment}
    return {
        name: np.asarray([measure(text, right) for text, right in zip(texts, answers, strict=True)])
        for name, measure in measures.items()
    }


def compare(values: Mapping[Condition, Values]) -> list[Row]:
    """Return one row per condition, with intervals of the paired differences.

    Args:
        values: values of the same questions under every condition, full attention among them.
    """
    full = Condition("full")
    rows = []
    for condition, own in values.items():
        control = Condition("full", Calibration(0, *condition.weighing))
        controlled = condition.calibration.weighs and condition.kind != "full" and control in values
        rows.append(
            Row(
                condition.name,
                {name: mean_of(listed) for name, listed in own.items()},
                _difference(own, values[full]) if condition != full else None,
                _difference(own, values[control]) if controlled else None,
            )
        )
    return rows


def compare_rankings(given: Values, ranked: Values) -> list[Row]:
    """Return a row for the given order of the documents, and one for the model's.

    Args:
        given: measures of the given order.
        ranked: measures of the model's order, query by query as in `given`.
    """
    means = [{name: mean_of(listed) for name, listed in own.items()} for own in (given, ranked)]
    return [Row("given order", means[0]), Row("ranked", means[1], _difference(ranked, given))]


def _difference(own: Values, other: Values) -> dict[str, Mean]:
    return {name: mean_of(listed - other[name]) for name, listed in own.items()}


def conclusion(values: Mapping[Condition, Values], calibration: Calibration) -> str:
    """Return the loss to isolation, and what to set.

    Args:
        values: values as for `compare`, with the conditions of this calibration.
        calibration: gap, temperature and scale in question.
    """
    full, plain, own = (
        values[condition][LOGPROB] for condition in (Condition("full"), Condition("shared"), Condition("shared", calibration))
    )
    before = mean_of(plain - full)
    unit = "log-probability per token of the gold answer"
    if not before.has_interval:
        after = before if calibration == NONE else mean_of(own - full)
        return (
            f"Isolated documents {_verb(after)} {unit} against full attention: one question says nothing about others, so "
            "measure more."
        )
    if calibration == NONE:
        if before.high < 0:
            return (
                f"Isolated documents {_verb(before)} {unit} against full attention: run `chunkattn calibrate` on other "
                "questions and set what it finds."
            )
        return (
            f"Isolated documents {_verb(before)} {unit} against full attention, which is no measurable loss: leave gap, "
            "temperature and scale as they are."
        )
    after, gain = mean_of(own - full), mean_of(own - plain)
    text = (
        f"With {_settings(calibration)}, isolated documents {_verb(after)} {unit} against full attention, after "
        f"{before.mean:+.2f} without"
    )
    if calibration.weighs:
        control = mean_of(own - values[Condition("full", Calibration(0, *Condition("shared", calibration).weighing))][LOGPROB])
        text += f", and {control.mean:+.2f} {_interval(control)} against full attention with the same temperature and scale"
    if gain.low > 0:
        return f"{text}: set these values."
    if gain.high < 0:
        return f"{text}: these values make it worse, so keep the defaults."
    return f"{text}: the values help too little to be measured here, so leave the defaults."


def ranking_conclusion(rows: Sequence[Row]) -> str:
    """Return what the model's ranking is worth.

    Args:
        rows: rows of `compare_rankings`.
    """
    given, ranked = rows
    assert ranked.against_full is not None
    name, change = "NDCG@10", ranked.against_full["NDCG@10"]
    how = "raises" if change.low > 0 else "lowers" if change.high < 0 else "does not measurably change"
    return (
        f"The model's ranking {how} {name} of the given order, {given.means[name].mean:.3f} to {ranked.means[name].mean:.3f} "
        f"(difference {change.mean:+.3f}, {_interval(change)[1:-1]}), and every document is scored exactly as if it were sent "
        "alone, so isolation costs a ranking nothing and there is nothing to set."
    )


def _verb(change: Mean) -> str:
    return f"{'lose' if change.mean < 0 else 'gain'} {abs(change.mean):.2f} {_interval(change)} of"


def _interval(change: Mean) -> str:
    if not change.has_interval:
        return "(no interval)"
    return f"(95% interval {change.low:+.2f} to {change.high:+.2f})"


def _settings(calibration: Calibration) -> str:
    listed = [f"{name}={value:g}" for name, value in asdict(calibration).items()]
    return f"{', '.join(listed[:-1])} and {listed[-1]}"


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return rows as JSON objects. JSON has no infinity: the ends of a missing interval, and its error, are None.

    Args:
        rows: rows of a comparison.
    """
    return [_finite(asdict(row)) for row in rows]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
