"""Comparison of the conditions, and its conclusion in one sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from chunkattn.calibration import Calibration
from chunkattn.tools.eval.conditions import GOLD, NONE, Condition
from chunkattn.tools.eval.data import Question
from chunkattn.tools.eval.measures import FEW, Mean, containment_of_all, exact_match, mean_of, token_f1

LOGPROB = "logprob"
"""Name of the mean log-probability of a token of the gold answer."""
CONTAINED = "contained"
"""Name of the share of answers that contain the right one."""
RECALL = "recall"
"""Name of the share of the gold documents that a focus chooses."""
SMALL = 0.1
"""Loss per token of the gold answer that an evaluation should be able to tell."""
_UNIT = "log-probability per token of the gold answer"

Values = Mapping[str, np.ndarray]
"""Values of the questions, float64 `[questions]`, by the name of the measure."""


@dataclass(frozen=True)
class Row:
    """One condition of a comparison, or one ranking.

    Attributes:
        name: name of the condition.
        means: mean of every measure.
        against_full: mean difference from full attention (for rankings: from the given order; for decisions: from the first
            way), measure by measure.
        against_control: mean difference from full attention with the same temperature and scale on its documents; None where
            both are 1, and for full attention.
    """

    name: str
    means: dict[str, Mean]
    against_full: dict[str, Mean] | None = None
    against_control: dict[str, Mean] | None = None


def answer_measures(texts: Sequence[str], questions: Sequence[Question]) -> dict[str, np.ndarray]:
    """Return exact match, token F1 and containment of every text.

    Args:
        texts: text of the model for each question.
        questions: questions with their right answers. A question of several parts has the containment 1 only for a text that
            contains every part.
    """
    pairs = list(zip(texts, questions, strict=True))
    return {
        "exact match": np.asarray([exact_match(text, question.answers) for text, question in pairs]),
        "F1": np.asarray([token_f1(text, question.answers) for text, question in pairs]),
        CONTAINED: np.asarray([containment_of_all(text, question.alternatives) for text, question in pairs]),
    }


def compare(values: Mapping[Condition, Values]) -> list[Row]:
    """Return one row per condition, with intervals of the paired differences.

    Args:
        values: values of the same questions under every condition, full attention among them.
    """
    full = Condition("full")
    rows = []
    for condition, measures in values.items():
        control = Condition("full", Calibration(0, *condition.weighing))
        controlled = condition.calibration.weighs and condition.kind != "full" and control in values
        rows.append(
            Row(
                condition.name,
                {name: mean_of(numbers) for name, numbers in measures.items()},
                _difference(measures, values[full]) if condition != full else None,
                _difference(measures, values[control]) if controlled else None,
            )
        )
    return rows


def compare_rankings(before: Values, ranked: Values) -> list[Row]:
    """Return a row for the given order of the documents, and one for the model's.

    Args:
        before: measures of the given order.
        ranked: measures of the model's order, query by query as in `before`.
    """
    means = [{name: mean_of(values) for name, values in measures.items()} for measures in (before, ranked)]
    return [Row("given order", means[0]), Row("ranked", means[1], _difference(ranked, before))]


def _difference(values: Values, other: Values) -> dict[str, Mean]:
    return {name: mean_of(listed - other[name]) for name, listed in values.items() if name in other}


def advised(values: Mapping[Condition, Values], calibration: Calibration) -> bool:
    """Return whether the questions show that a calibration is better than the defaults.

    Args:
        values: values as for `conclusion`.
        calibration: gap, temperature and scale in question.
    """
    return calibration != NONE and _gain(values, calibration).sign > 0


def conclusion(values: Mapping[Condition, Values], calibration: Calibration) -> str:
    """Return the loss to isolation, and what to set.

    Args:
        values: values as for `compare`, with the conditions of this calibration.
        calibration: gap, temperature and scale in question.
    """
    before = mean_of(_logprobs(values, NONE) - values[Condition("full")][LOGPROB])
    if calibration == NONE:
        if before.sign < 0:
            advice = "run `chunkattn calibrate` on other questions and set what it finds"
        elif before.sign > 0 or _suffices(before):
            advice = "leave gap, temperature and scale as they are"
        else:
            advice = _more(before, "loss")
        return f"Isolated documents {loss(before)}: {advice}."
    after, gain = mean_of(_logprobs(values, calibration) - values[Condition("full")][LOGPROB]), _gain(values, calibration)
    doubt = "" if after.sign else f" ({_untold(after, 'loss')})"
    text = (
        f"With {_settings(calibration)}, isolated documents {_verb(after)} {_UNIT} against full attention{doubt}, after "
        f"{before.mean:+.2f} without"
    )
    if calibration.weighs:
        control = values[Condition("full", Calibration(0, calibration.chunk_temperature, calibration.chunk_scale))][LOGPROB]
        change = mean_of(_logprobs(values, calibration) - control)
        text += f", and {change.mean:+.2f} {interval_text(change)} against full attention with the same temperature and scale"
    text += f". The values change the log-probability by {gain.mean:+.2f} {interval_text(gain)}"
    return _advice(text, gain, "set these values", "keep the defaults")


def _advice(text: str, gain: Mean, change: str, keep: str) -> str:
    """Return a sentence that ends with what to do: to change something if the questions show a gain, else to keep it."""
    if gain.sign > 0:
        return f"{text}: {change}."
    if gain.sign < 0:
        return f"{text}, which makes it worse: {keep}."
    more = "" if _suffices(gain) else f", or {_more(gain, 'gain')}"
    return f"{text}, but {_untold(gain, 'gain')}: {keep}{more}."


def loss(change: Mean) -> str:
    """Return the loss of isolated documents as the end of a sentence, with what the questions cannot tell.

    Args:
        change: mean difference from full attention.
    """
    doubt = "" if change.sign else f", but {_untold(change, 'loss')}"
    return f"{_verb(change)} {_UNIT} against full attention{doubt}"


def focus_gain(values: Mapping[Condition, Values], best: Condition) -> np.ndarray:
    """Return how much more often a focus has the right answer than isolated documents under the same calibration.

    Args:
        values: values by condition, texts measured.
        best: condition of the focus.
    """
    return values[best][CONTAINED] - values[Condition("shared", best.calibration)][CONTAINED]


def focus_conclusion(values: Mapping[Condition, Values], best: Condition) -> str:
    """Return what a focus is worth on questions that did not choose it.

    Args:
        values: values by condition, texts measured, full attention among them.
        best: condition with the most right answers on other questions; without a focus, isolated documents had the most.
    """
    share, against_full = _contained(values, best)
    if best.focus is None:
        return f"No focus that was tried has more right answers than isolated documents: {share} contain it, {against_full}."
    gain = mean_of(focus_gain(values, best))
    text = (
        f"With a focus, {best.focus.name}, {share} of the answers contain the right one: {gain.mean:+.2f} "
        f"{interval_text(gain)} against isolated documents, {against_full}"
    )
    return _advice(text, gain, f"pass focus={asdict(best.focus)}", "leave it off")


def _contained(values: Mapping[Condition, Values], condition: Condition) -> tuple[str, str]:
    """Return the share of answers that contain the right one, and its difference from full attention."""
    shares, full = values[condition][CONTAINED], values[Condition("full")][CONTAINED]
    change = mean_of(shares - full)
    doubt = "" if change.sign else ", which these questions cannot tell from none"
    return f"{shares.mean():.2f}", f"{change.mean:+.2f} {interval_text(change)} against full attention{doubt}"


def focus_hint(values: Mapping[Condition, Values]) -> str:
    """Return the focus with the most right answers on the questions themselves, as a reason to choose one on others.

    Args:
        values: values by condition, texts measured, full attention and some focus among them.
    """
    tried = [condition for condition in values if condition.focus is not None and condition.focus.score != GOLD]
    best = max(tried, key=lambda condition: values[condition][CONTAINED].mean())
    share, against_full = _contained(values, best)
    return (
        f"Of {len(tried)} ways to focus, {best.name} has the most right answers here: {share} contain it, {against_full}. "
        "The best of several looks better than it is: `chunkattn calibrate --focus` chooses on one half of your questions and "
        "measures on the other."
    )


def ranking_conclusion(rows: Sequence[Row]) -> str:
    """Return what the model's ranking is worth.

    Args:
        rows: rows of `compare_rankings`.
    """
    before, ranked = rows
    assert ranked.against_full is not None
    name, change = "NDCG@10", ranked.against_full["NDCG@10"]
    how = "raises" if change.mean > 0 else "lowers" if change.mean < 0 else "keeps"
    doubt = "" if change.sign else f", but {_untold(change, 'change', 'queries', 3)}"
    return (
        f"The model's ranking {how} {name} of the given order, {before.means[name].mean:.3f} to {ranked.means[name].mean:.3f} "
        f"(difference {change.mean:+.3f}, {interval_text(change, 3)[1:-1]}){doubt}. Every document is scored exactly as if it "
        "were sent alone, so isolation costs a ranking nothing and there is nothing to set."
    )


def _logprobs(values: Mapping[Condition, Values], calibration: Calibration) -> np.ndarray:
    return values[Condition("shared", calibration)][LOGPROB]


def _gain(values: Mapping[Condition, Values], calibration: Calibration) -> Mean:
    return mean_of(_logprobs(values, calibration) - _logprobs(values, NONE))


def _untold(change: Mean, kind: str, asked: str = "questions", digits: int = 2) -> str:
    """Return what the questions of a difference without a sign cannot tell.

    Args:
        change: mean of the differences.
        kind: what is looked for: a loss, a gain or a change.
        asked: plural name of what is counted.
        digits: digits after the point.
    """
    one = {"questions": "question", "queries": "query"}[asked]
    if change.count == 1:
        return f"one {one} tells nothing about other {asked}"
    if not change.has_interval:
        return f"the same difference for all {change.count} {asked} does not show how much others vary"
    return f"{change.count} {asked} cannot tell a {kind} of {_size(change.resolution, digits)} from none"


def _suffices(change: Mean) -> bool:
    """Return whether more questions are not needed: a few alike ones may hide how much others vary."""
    return change.resolution <= SMALL and change.count >= FEW


def _more(change: Mean, kind: str) -> str:
    """Return the advice to measure more, with the number of questions that have a resolution of `SMALL`, at least `FEW`.

    The number is `(1.96 * sd / SMALL)²`, with the standard deviation `sd` of the differences and the normal distribution's
    quantile, and two more because Student's quantile is larger. It is rounded up to two digits.
    """
    if not change.has_interval:
        return "measure more questions"
    needed = max(math.ceil((1.96 * change.error / SMALL) ** 2 * change.count) + 2, change.count + 1, FEW)
    unit = 10 ** max(len(str(needed)) - 2, 0)
    return f"measure about {-(-needed // unit) * unit:,} questions, which can tell a {kind} of {SMALL}"


def _verb(change: Mean) -> str:
    return f"{'gain' if change.mean > 0 else 'lose'} {_size(abs(change.mean))} {interval_text(change)} of"


def _size(value: float, digits: int = 2) -> str:
    least = 10.0**-digits
    return f"less than {least:g}" if value < least / 2 else f"{value:.{digits}f}"


def interval_text(change: Mean, digits: int = 2) -> str:
    """Return the interval of a difference in parentheses.

    Args:
        change: mean of the differences.
        digits: digits after the point.
    """
    if not change.has_interval:
        return "(no interval)"
    return f"(95% interval {change.low:+.{digits}f} to {change.high:+.{digits}f})"


def _settings(calibration: Calibration) -> str:
    listed = [f"{name}={value:g}" for name, value in asdict(calibration).items()]
    return f"{', '.join(listed[:-1])} and {listed[-1]}"


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return rows as JSON objects. Every difference has its `resolution` as well.

    JSON has no infinity: the ends of a missing interval, its error and its resolution are None.

    Args:
        rows: rows of a comparison.
    """
    listed = [asdict(row, dict_factory=_finite) for row in rows]
    for row, fields in zip(rows, listed, strict=True):
        for place in ("against_full", "against_control"):
            for name, change in (getattr(row, place) or {}).items():
                fields[place][name] |= _finite([("resolution", change.resolution)])
    return listed


def _finite(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in fields}
