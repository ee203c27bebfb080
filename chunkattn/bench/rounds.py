"""Names of rounds, for the progress of a benchmark."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

Progress = Callable[[str], AbstractContextManager[object]]
"""Function from a round's name to the context manager in which the round runs; `contextlib.nullcontext` reports nothing."""


def round_name(number: int, rounds: int) -> str:
    """Return the name of a round.

    Args:
        number: 0 for the round that compiles, which is not counted.
        rounds: number of counted rounds.
    """
    return f"round {number} of {rounds}" if number else "warm-up"
