"""Calibration of labels: temperatures and biases, fitted on one half of the decisions and measured on the other half."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64
from scipy.optimize import minimize
from scipy.special import log_softmax

from chunkattn.calibration import LABEL_KINDS, MAX_WEIGHT, MIN_WEIGHT, LabelScale
from chunkattn.calls.decide_questions import ask
from chunkattn.errors import RequestError
from chunkattn.llm import LLM
from chunkattn.tools.eval.calibrate import halves_of
from chunkattn.tools.eval.data import Decisions
from chunkattn.tools.eval.decisions import Way, WayAnswers
from chunkattn.tools.eval.measures import Mean, mean_of

SOURCES = Way("letters"), Way("likelihood", True), Way("separate")
"""Ways whose probabilities are calibrated. The first also gives the predicates."""
RIDGE = 1.0
"""Weight of half the squared biases against the summed log loss, so that a label that is seldom seen keeps a small bias."""
FEWEST = 20
"""Smallest number of questions of a kind to fit."""


@dataclass(frozen=True)
class LabelSample:
    """Scores of the labels of one question.

    Attributes:
        line: place of the question's line.
        names: name of each label; empty where labels have no bias.
        scores: log-probability of each label up to a constant.
        right: place of the right label.
    """

    line: int
    names: Sequence[str]
    scores: Float64[np.ndarray, " N"]
    right: int


@dataclass(frozen=True)
class Fit:
    """Calibration of one kind of labels.

    Attributes:
        scale: calibration, fitted on the first half of the lines.
        before: log loss of a question of the other half, without it.
        after: the same with it.
        change: mean difference, line by line.
    """

    scale: LabelScale
    before: float
    after: float
    change: Mean

    @property
    def is_kept(self) -> bool:
        """Return whether the other half shows a gain."""
        return self.change.sign < 0

    def notes(self) -> dict[str, Any]:
        """Return the figures for the calibration file."""
        return {
            "log_loss_before": round(self.before, 4),
            "log_loss_after": round(self.after, 4),
            "change_95": self.change.ends,
            "lines_of_the_report": self.change.count,
            "kept": self.is_kept,
        }


def samples_of(
    llm: LLM, lines: Sequence[Decisions], answers: Mapping[Way, WayAnswers], template_options: Mapping[str, Any] | None = None
) -> dict[str, list[LabelSample]]:
    """Return the scores of all questions by the kind of their labels.

    Args:
        llm: engine.
        lines: questions and right answers.
        answers: answers in the ways of `SOURCES`.
        template_options: variables of the chat template.
    """
    labels, samples = llm.frontend.answer_labels(None, template_options), dict[str, list[LabelSample]]()
    for way in SOURCES:
        for place, (line, shares) in enumerate(zip(lines, answers[way].shares, strict=True)):
            asked_in_line = zip(line.questions, line.answers, shares, strict=True)
            for number, (question, right, values) in enumerate(asked_in_line):
                asked = ask(question, way.method, labels, f"question {number}")
                if asked.kind == "predicate" and way != SOURCES[0]:
                    continue
                if asked.kind == "likelihood" and way.method != "likelihood":  # more options than letters, and no division
                    continue
                scores = np.log(np.maximum(values[asked.order], 1e-30))
                samples.setdefault(asked.kind, []).append(LabelSample(place, asked.names, scores, asked.order.index(right)))
    return {kind: samples[kind] for kind in LABEL_KINDS if kind in samples}


def calibrate_labels(samples: Mapping[str, Sequence[LabelSample]], lines: int) -> dict[str, Fit]:
    """Fit each kind of labels on one half of the lines, and measure it on the other half.

    Args:
        samples: result of `samples_of`.
        lines: number of lines.

    Raises:
        RequestError: there are fewer than four lines, or no kind has `FEWEST` questions in each half.
    """
    search, fits = {*halves_of(lines).search}, {}
    for kind, listed in samples.items():
        halves = [[sample for sample in listed if (sample.line in search) == first] for first in (True, False)]
        if min(map(len, halves)) < FEWEST:
            continue
        scale = fit(halves[0])
        values: dict[int, list[tuple[float, float]]] = {}
        for sample in halves[1]:
            values.setdefault(sample.line, []).append((log_loss(sample, LabelScale()), log_loss(sample, scale)))
        before, after = np.asarray([np.mean(line, axis=0) for line in values.values()]).T
        fits[kind] = Fit(scale, float(before.mean()), float(after.mean()), mean_of(after - before))
    if not fits:
        counts = ", ".join(f"{kind} {len(listed)}" for kind, listed in samples.items())
        text = f"a calibration of labels needs {FEWEST} questions of a kind in each half of the lines; there are {counts}"
        raise RequestError(text)
    return fits


def fit(samples: Sequence[LabelSample]) -> LabelScale:
    """Return the temperature and the biases with the smallest log loss.

    The biases of the labels that occur are bounded by a ridge of weight `RIDGE`. Their mean is 0.

    Args:
        samples: questions of one kind.

    Source: temperature and vector scaling, Guo et al., arXiv:1706.04599.
    """
    names = sorted({name for sample in samples for name in sample.names})
    places = [np.asarray([names.index(name) for name in sample.names], int) for sample in samples]

    def loss(values: np.ndarray) -> tuple[float, np.ndarray]:
        temperature, bias = np.exp(values[0]), values[1:]
        total, slope = RIDGE * float(bias @ bias) / 2, np.concatenate([[0.0], RIDGE * bias])
        for sample, labels in zip(samples, places, strict=True):
            z = (sample.scores - (bias[labels] if names else 0.0)) / temperature
            logs = log_softmax(z)
            total -= logs[sample.right]
            change = np.exp(logs)
            change[sample.right] -= 1
            slope[0] -= change @ z
            if names:
                np.subtract.at(slope, labels + 1, change / temperature)
        return total, slope

    bounds = [(np.log(MIN_WEIGHT), np.log(MAX_WEIGHT)), *[(-MAX_WEIGHT, MAX_WEIGHT)] * len(names)]
    values = minimize(loss, np.zeros(len(names) + 1), jac=True, bounds=bounds, method="L-BFGS-B").x
    bias = values[1:] - values[1:].mean() if names else values[1:]
    temperature = float(np.clip(np.exp(values[0]), MIN_WEIGHT, MAX_WEIGHT))
    return LabelScale(round(temperature, 4), {name: round(float(value), 4) for name, value in zip(names, bias, strict=True)})


def log_loss(sample: LabelSample, scale: LabelScale) -> float:
    """Return the negative log-probability of the right label, in nats.

    Args:
        sample: scores of a question.
        scale: calibration of its labels.
    """
    return -float(log_softmax(scale.apply(sample.scores, sample.names))[sample.right])


def notes_of(fits: Mapping[str, Fit], data: str) -> dict[str, Any]:
    """Return data and figures for the calibration file."""
    return {"data": data, **{kind: {**asdict(fit.scale), **fit.notes()} for kind, fit in fits.items()}}
