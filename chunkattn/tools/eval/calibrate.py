"""Calibration of a model and choice of a focus: search on one half of the questions, figures on the other half."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from chunkattn.calibration import Calibration
from chunkattn.errors import RequestError
from chunkattn.focus import Focus
from chunkattn.tools.eval.conditions import NONE, Condition, focus_conditions
from chunkattn.tools.eval.examiner import Examiner
from chunkattn.tools.eval.measures import mean_of
from chunkattn.tools.eval.report import (
    CONTAINED,
    LOGPROB,
    Values,
    advised,
    conclusion,
    focus_conclusion,
    focus_gain,
    loss,
)
from chunkattn.tools.eval.search import WEIGHTS, Trial, Weighing, search

FEWEST = 4
"""Smallest number of questions: two to search on, two to report."""
ENOUGH = 50
"""Smallest number of questions without a warning."""


@dataclass(frozen=True)
class Halves:
    """Places of the questions of the search, and of the questions of the report."""

    search: list[int]
    report: list[int]


def halves_of(count: int) -> Halves:
    """Return the two halves of `count` questions, drawn with a fixed seed and each in the data's order.

    Args:
        count: number of questions.

    Raises:
        RequestError: there are fewer than four questions.
    """
    if count < FEWEST:
        raise RequestError(f"calibrate needs at least {FEWEST} questions, got {count}")
    order = np.random.default_rng(0).permutation(count)
    return Halves(sorted(order[: count // 2].tolist()), sorted(order[count // 2 :].tolist()))


def few_questions(count: int) -> str | None:
    """Return the warning about few questions; None for `ENOUGH`.

    Args:
        count: number of questions.
    """
    if count >= ENOUGH:
        return None
    return (
        f"{count} questions are few: the search may find values that suit these questions alone, and the report shows only a "
        f"large gain; use at least {ENOUGH}, better 200"
    )


@dataclass(frozen=True)
class CalibrationResult:
    """Result of a calibration.

    Attributes:
        trials: all trials, the best first. Their values are means over the search half.
        halves: questions of search and report.
        values: values of the report half, by condition.
        contained: share of the search half's answers that contain the right one, by condition: isolated documents under
            `calibration`, and every focus that was tried. Empty if none was tried.
    """

    trials: list[Trial]
    halves: Halves
    values: dict[Condition, Values]
    contained: Mapping[Condition, float] = field(default_factory=dict)

    @property
    def best(self) -> Calibration:
        """Return the best calibration of the search."""
        return self.trials[0].calibration

    @property
    def calibration(self) -> Calibration:
        """Return the calibration to set: the best one if the report half shows a gain, else the one that changes nothing."""
        return self.best if advised(self.values, self.best) else NONE

    @property
    def best_focus(self) -> Condition | None:
        """Return the condition with the most right answers on the search half, the first of equals; None if none was tried."""
        return max(self.contained, key=self.contained.__getitem__, default=None)

    @property
    def focus(self) -> Focus | None:
        """Return the focus to use: the best one if the report half shows more right answers, else None."""
        best = self.best_focus
        if best is None or best.focus is None:
            return None
        return best.focus if mean_of(focus_gain(self.values, best)).sign > 0 else None

    @property
    def focus_conclusion(self) -> str | None:
        """Return what the report half says about the best focus; None if none was tried."""
        best = self.best_focus
        return None if best is None else focus_conclusion(self.values, best)

    @property
    def conclusion(self) -> str:
        """Return what the report half says about the best calibration."""
        if self.best == NONE:
            lost = mean_of(self.values[Condition("shared")][LOGPROB] - self.values[Condition("full")][LOGPROB])
            return (
                "No gap, temperature or scale that was tried is better than the defaults: keep the defaults. With them, "
                f"isolated documents {loss(lost)}."
            )
        return conclusion(self.values, self.best)

    def notes(self) -> dict[str, Any]:
        """Return conclusion and figures of the report half, for the calibration file."""
        shared, calibrated, full = (
            self.values[condition][LOGPROB]
            for condition in (Condition("shared"), Condition("shared", self.best), Condition("full"))
        )
        few = few_questions(len(self.halves.search) + len(self.halves.report))
        notes: dict[str, Any] = {
            "conclusion": self.conclusion,
            **({"warning": few} if few else {}),
            "best_of_the_search": asdict(self.best),
            "questions_of_the_search": len(self.halves.search),
            "questions_of_the_report": len(self.halves.report),
            "logprob_per_token_of_full_attention": round(float(full.mean()), 4),
        }
        differences = {
            "default_minus_full": shared - full,
            "calibrated_minus_full": calibrated - full,
            "calibrated_minus_default": calibrated - shared,
        }
        for name, values in differences.items():
            change = mean_of(values)
            notes[name] = round(change.mean, 4)
            notes[f"{name}_95"] = change.ends
        if self.contained:
            notes["focus"] = None if self.focus is None else asdict(self.focus)
            notes["focus_conclusion"] = self.focus_conclusion
            notes["contained_of_the_search"] = {tried.name: round(value, 4) for tried, value in self.contained.items()}
        return notes


def calibrate(
    examiner: Examiner,
    *,
    gaps: Sequence[int],
    weighs: bool = True,
    top_n: int = 0,
    scores: Sequence[str] = (),
    tried: Callable[[Trial], None] = lambda trial: None,
) -> CalibrationResult:
    """Search gap, temperature and scale on one half of the questions, and measure the best on the other half.

    Then the focus is chosen under the values to set, by the share of greedy answers that contain the right one.

    The objective of the search is the mean log-probability of a token of the gold answer under `shared` positions, over the
    search half. The documents of a group of questions are computed once for a gap and serve all temperatures and scales.

    Args:
        examiner: questions and engine, which is built with a temperature or scale other than 1 if `weighs`.
        gaps: gaps of the coarse grid.
        weighs: whether to search temperature and scale.
        top_n: largest number of documents that a focus chooses; 0 tries no focus.
        scores: names of the scores of a focus.
        tried: called after every trial.

    Raises:
        RequestError: there are fewer than four questions, or one does not fit the engine.
        ConfigError: no gap fits the model's positions.
        EngineError: a step failed.
    """
    halves = halves_of(len(examiner.questions))
    # Any weights show whether the control fits: it joins all documents into one chunk.
    control = [Condition("full", Calibration(0, WEIGHTS[-1], WEIGHTS[-1]))] if weighs else []
    focused = focus_conditions(NONE, top_n, scores, gold=False)
    examiner.check([Condition("full"), *control, Condition("shared"), *focused])

    def objective(gap: int, weighings: Sequence[Weighing]) -> list[float]:
        conditions = [Condition("shared", Calibration(gap, *weighing)) for weighing in weighings]
        values = examiner.examine(conditions, halves.search, texts=False)
        return [float(values[condition][LOGPROB].mean()) for condition in conditions]

    trials = search(objective, gaps=gaps, max_gap=examiner.max_gap, weighs=weighs, tried=tried)
    best = trials[0].calibration
    weights = Calibration(0, best.chunk_temperature, best.chunk_scale)
    conditions = [Condition("full"), Condition("full", weights), Condition("shared"), Condition("shared", best)]
    report = examiner.examine(list(dict.fromkeys(conditions)), halves.report, texts=False)
    result = CalibrationResult(trials, halves, report)
    if not focused:
        return result
    used = result.calibration  # the focus is tried under the values that are written
    listed = [Condition("shared", used), *focus_conditions(used, top_n, scores, gold=False)]
    values = examiner.examine(listed, halves.search, texts=True)
    contained = {condition: float(answers[CONTAINED].mean()) for condition, answers in values.items()}
    chosen = max(contained, key=contained.__getitem__)
    texts = list(dict.fromkeys([Condition("full"), Condition("shared", used), chosen]))
    return CalibrationResult(trials, halves, {**report, **examiner.examine(texts, halves.report, texts=True)}, contained)
