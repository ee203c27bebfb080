"""Scoring: one query, many items, label log-probabilities as if each item were sent alone."""

from chunkattn.scoring.algorithms import ALGORITHMS, ScoreJob, ScorePart
from chunkattn.scoring.planner import ScorePlanner, ScoringJob

__all__ = ["ALGORITHMS", "ScoreJob", "ScorePart", "ScorePlanner", "ScoringJob"]
