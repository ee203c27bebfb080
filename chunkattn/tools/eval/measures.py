"""Measures of answers and rankings, and intervals of their means."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from chunkattn.errors import ConfigError

CONFIDENCE = 0.95
RESAMPLES = 9_999
FEW = 50
"""With fewer questions, the interval of a mean is Student's. The bootstrap's is too narrow: of 4 normal values, a 95% interval
holds the mean 82% of the time, of 12 values 90%."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """Return a text in lower case, without punctuation and articles, with single spaces.

    Source: the evaluation script of SQuAD, arXiv:1606.05250.

    >>> normalized("The  Cat's hat.")
    'cats hat'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _compared(text: str, answer: str) -> tuple[str, str]:
    """Return text and answer after normalization.

    Normalization leaves nothing of an answer such as "A". Then both keep punctuation and articles, in lower case.
    """
    if right := normalized(answer):
        return normalized(text), right
    return " ".join(text.lower().split()), " ".join(answer.lower().split())


def exact_match(text: str, answers: Sequence[str]) -> float:
    """Return 1 if a text equals one of the answers after normalization, else 0.

    Args:
        text: text of the model.
        answers: right answers.
    """
    return _best(text, answers, lambda words, answer: words == answer)


def containment(text: str, answers: Sequence[str]) -> float:
    """Return 1 if a text contains the words of one of the answers in order after normalization, else 0.

    Args:
        text: text of the model.
        answers: right answers.
    """
    return _best(text, answers, lambda words, answer: f" {answer} " in f" {words} ")


def containment_of_all(text: str, parts: Sequence[Sequence[str]]) -> float:
    """Return 1 if a text contains an alternative of every part of the answer, else 0.

    Args:
        text: text of the model.
        parts: alternatives of every part.
    """
    return min(containment(text, alternatives) for alternatives in parts)


def token_f1(text: str, answers: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall of a text's words, for the answer with the highest value.

    Args:
        text: text of the model.
        answers: right answers.
    """
    return _best(text, answers, _f1)


def _f1(words: str, answer: str) -> float:
    listed, right = words.split(), answer.split()
    if not (listed and right):
        return float(listed == right)
    return 2 * (Counter(listed) & Counter(right)).total() / (len(listed) + len(right))


def _best(text: str, answers: Sequence[str], measure: Callable[[str, str], float]) -> float:
    """Return the highest value of a measure over the answers, after normalization."""
    return float(max(measure(*_compared(text, answer)) for answer in answers))


RECALL_AT = (1, 5, 10)
RANKING_MEASURES = ("MRR", "NDCG@10", *(f"recall@{k}" for k in RECALL_AT))


def check_ranking_measures() -> None:
    """Check that the library of the ranking measures is installed.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import ir_measures  # noqa: F401
    except ImportError as error:
        raise ConfigError("ranking measures need ir-measures: pip install ir-measures") from error


def ranking_measures(order: Sequence[int], relevance: Sequence[int]) -> dict[str, float]:
    """Return the measures of one ranking, by the names of `RANKING_MEASURES`.

    A ranking without a relevant document has 0 everywhere.

    Args:
        order: places of the documents, the best first.
        relevance: grade of each document; grades of at least 1 are relevant.

    Raises:
        ConfigError: the library of the measures is not installed.
    """
    check_ranking_measures()
    import ir_measures
    from ir_measures import RR, Qrel, R, ScoredDoc, nDCG

    names = {RR: "MRR", nDCG @ 10: "NDCG@10", **{R @ k: f"recall@{k}" for k in RECALL_AT}}
    qrels = [Qrel("q", str(place), grade) for place, grade in enumerate(relevance)]
    run = [ScoredDoc("q", str(place), float(-rank)) for rank, place in enumerate(order)]
    if not any(relevance):
        return dict.fromkeys(RANKING_MEASURES, 0.0)
    return {names[value.measure]: value.value for value in ir_measures.iter_calc(list(names), qrels, run)}


@dataclass(frozen=True)
class Mean:
    """Mean over the questions, with its uncertainty.

    Attributes:
        mean: mean.
        low: lower end of the 95% interval; minus infinity for one question, and for several without spread.
        high: upper end; infinity for one question, and for several without spread.
        error: standard error; infinity for one question, 0 for several without spread.
        count: number of questions.
    """

    mean: float
    low: float
    high: float
    error: float
    count: int

    @property
    def has_interval(self) -> bool:
        """Return whether there are several questions, and their values differ."""
        return math.isfinite(self.low)

    @property
    def ends(self) -> list[float] | None:
        """Return the rounded ends of the interval for files; None without an interval."""
        return [round(self.low, 4), round(self.high, 4)] if self.has_interval else None

    @property
    def sign(self) -> int:
        """Return 1 or -1 if the interval lies above or below zero, and 0 if it contains zero or is missing."""
        return (self.low > 0) - (self.high < 0)

    @property
    def resolution(self) -> float:
        """Return the distance from zero that these questions can tell, infinity without an interval.

        The resolution is half the width of the interval: with this number of questions and this spread, only a mean farther
        from zero has an interval without zero. For fewer than `FEW` questions, it is `t * sd / sqrt(n)`, with the 97.5%
        quantile `t` of Student's distribution with `n - 1` degrees of freedom and the standard deviation `sd` of the values.
        Where the bootstrap's interval is lopsided, the wider side counts.
        """
        return max(self.mean - self.low, self.high - self.mean)


def percentile_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Return the 95% interval of resampled values."""
    tail = 50 * (1 - CONFIDENCE)
    low, high = map(float, np.percentile(values, [tail, 100 - tail]))
    return low, high


def mean_of(values: Sequence[float] | np.ndarray, *, seed: int = 0) -> Mean:
    """Return the mean of one value a question, with its 95% interval.

    For a paired comparison of two conditions, the values are the differences of each question. The interval is Student's for
    fewer than `FEW` values, else the bootstrap's (bias-corrected and accelerated). Values without spread have none, because
    they do not show how much others would vary.

    Args:
        values: at least one finite value.
        seed: seed of the resampling.

    Source: Student, "The probable error of a mean", Biometrika 6 (1908); SciPy's `scipy.stats.bootstrap`.
    """
    from scipy.stats import bootstrap, t

    listed = np.asarray(values, np.float64)
    mean, count = float(listed.mean()), len(listed)
    if count < 2 or np.ptp(listed) == 0:
        return Mean(mean, -math.inf, math.inf, 0.0 if count > 1 else math.inf, count)
    if count < FEW:
        error = float(listed.std(ddof=1)) / math.sqrt(count)
        half = float(t.ppf((1 + CONFIDENCE) / 2, count - 1)) * error
        return Mean(mean, mean - half, mean + half, error, count)
    result = bootstrap(
        (listed,), np.mean, n_resamples=RESAMPLES, confidence_level=CONFIDENCE, batch=1000, rng=np.random.default_rng(seed)
    )
    low, high = map(float, result.confidence_interval)
    if not (np.isfinite(low) and np.isfinite(high)):  # no correction exists where almost all values are equal
        low, high = percentile_interval(result.bootstrap_distribution)
    return Mean(mean, low, high, float(result.standard_error), count)
