"""Search for the gap, temperature and scale under which a model reads isolated documents best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from chunkattn.calibration import Calibration
from chunkattn.errors import ConfigError

GAPS = (0, 16, 64, 256)
"""Gaps of the coarse grid."""
WEIGHTS = (1.0, 0.8, 0.6)
"""Temperatures and scales of the coarse grid."""
STEPS = (0.1, 0.05)
"""Steps of temperature and scale around the best trial so far."""
LOWEST = 0.1
"""Smallest temperature and scale."""
_MOST_MOVES = 4

Weighing = tuple[float, float]
Objective = Callable[[int, Sequence[Weighing]], Sequence[float]]
"""Function from a gap and pairs of temperature and scale to the value of each pair; higher is better. One call per gap, because
cached documents serve all pairs of one gap."""


class Trial(NamedTuple):
    """Value of one calibration."""

    calibration: Calibration
    value: float


def search(
    objective: Objective,
    *,
    gaps: Sequence[int] = GAPS,
    max_gap: int | None = None,
    weighs: bool = True,
    tried: Callable[[Trial], None] = lambda trial: None,
) -> list[Trial]:
    """Try a coarse grid, then the neighbours of the best trial, with ever smaller steps.

    The coarse grid is `gaps` times `WEIGHTS` for temperature and scale. Then half and twice the best gap are tried, and the
    neighbours of the best temperature and scale in steps of 0.1 until none is better (at most four moves), then of 0.05.

    Args:
        objective: value of calibrations.
        gaps: gaps of the coarse grid.
        max_gap: largest gap that the model's positions allow; None sets no limit.
        weighs: whether to search temperature and scale; otherwise both stay 1.
        tried: called after every trial.

    Returns:
        All trials, the best first. Of equal trials, the earlier comes first.

    Raises:
        ConfigError: no gap is allowed.
    """
    allowed = [gap for gap in gaps if max_gap is None or gap <= max_gap]
    if not allowed:
        raise ConfigError(f"no gap of {list(gaps)} fits the model's positions, which leave {max_gap}")
    trials: dict[Calibration, float] = {}

    def best() -> Calibration:
        return max(trials, key=lambda calibration: trials[calibration])

    def attempt(gap: int, weighings: Sequence[Weighing]) -> None:
        new = [w for w in dict.fromkeys(weighings) if Calibration(gap, *w) not in trials]
        if not new or (max_gap is not None and gap > max_gap):
            return
        for weighing, value in zip(new, objective(gap, new), strict=True):
            calibration = Calibration(gap, *weighing)
            trials[calibration] = value
            tried(Trial(calibration, value))

    coarse = [(t, s) for t in WEIGHTS for s in WEIGHTS] if weighs else [(1.0, 1.0)]
    for gap in allowed:
        attempt(gap, coarse)
    start = best()
    nearby = [start.chunk_position_gap // 2, 2 * start.chunk_position_gap] if start.chunk_position_gap else [GAPS[1] // 2]
    for gap in nearby:
        attempt(gap, _around(start, STEPS[0]) if weighs else coarse)
    for step in STEPS if weighs else ():
        for _ in range(_MOST_MOVES):
            centre = best()
            attempt(centre.chunk_position_gap, _around(centre, step))
            if best() == centre:
                break
    return sorted((Trial(*trial) for trial in trials.items()), key=lambda trial: -trial.value)


def _around(centre: Calibration, step: float) -> list[Weighing]:
    """Return temperature and scale of a calibration, and their eight neighbours."""
    moves = (0.0, -step, step)
    weighings = [(round(centre.chunk_temperature + t, 6), round(centre.chunk_scale + s, 6)) for t in moves for s in moves]
    return [(t, s) for t, s in weighings if min(t, s) >= LOWEST]
