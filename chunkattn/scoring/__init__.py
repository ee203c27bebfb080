"""Scoring of many items against one query: label log-probabilities as if each item were sent alone."""

from chunkattn.scoring.algorithms import ALGORITHMS, QueryItems, ScorePart
from chunkattn.scoring.plan import QueryPlan
from chunkattn.scoring.planner import ScorePlanner

__all__ = ["ALGORITHMS", "QueryItems", "QueryPlan", "ScorePart", "ScorePlanner"]
