"""Scoring: one query, many items, label log-probabilities as if each item were sent alone."""

from chunkattn.scoring.algorithms import ALGORITHMS, ScoreJob, ScorePart
from chunkattn.scoring.selector import select_algorithm

__all__ = ["ALGORITHMS", "ScoreJob", "ScorePart", "select_algorithm"]
