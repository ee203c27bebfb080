"""The cost of steps: the area of their tiles, and `RateMeter`, which measures what they take on this machine."""

from __future__ import annotations

import time
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np

from chunkattn.backends.base import AttentionBatch
from chunkattn.backends.tiles import cut, spans, tile_ranges
from chunkattn.engine.messages import StepRates

TILE_ROWS, TILE_SLOTS = 256, 256
"""Tile size used to estimate the cost of attention: about the size that `xla` uses. Other sizes differ by a factor."""
_KEPT = 128
_LAST = 8
_TINY = 1e-12
_GUESS_WEIGHT = 0.5
"""Weight of the initial guess in the fit; an observation has weight 1."""


def tile_area(batch: AttentionBatch) -> int:
    """Return rows times slots of the tiles that a step visits. Decodes use no tiles and count 0.

    Args:
        batch: attention batch of the step.
    """
    runs = spans(batch)
    several = runs.size > 1
    if not several.any():
        return 0
    tiles = cut(runs.pick(several), TILE_ROWS)
    return int(tile_ranges(batch, tiles, TILE_SLOTS).counts.sum()) * TILE_ROWS * TILE_SLOTS


class RateMeter:
    """Meter that fits `StepRates` to measured step times, from an initial guess by the speed of one matrix product.

    The fit is non-negative least squares over relative errors.

    Source: Lawson and Hanson, Solving Least Squares Problems, 1974.

    Args:
        row_flops: floating-point operations of the model's matrices per row.
        pair_flops: floating-point operations of attention per row and slot.
        dtype: dtype of the matrices.
    """

    def __init__(self, row_flops: float, pair_flops: float, dtype: jnp.dtype) -> None:
        rate = _matmul_rate(dtype)
        # Attention reaches about a third of the speed of a matrix product.
        self._guess = np.asarray([1e-3, row_flops / rate, 3 * pair_flops / rate])
        # Steps with and without tiles are kept apart, since the many decode steps would displace all other steps.
        self._seen: dict[bool, deque[np.ndarray]] = {tiles: deque(maxlen=_KEPT) for tiles in (False, True)}
        self._pending, self._began = np.zeros(3), 0.0
        self._rates: StepRates | None = None

    @property
    def rates(self) -> StepRates:
        """Return the rates fitted to the steps measured so far."""
        if self._rates is None:
            self._rates = self._fitted()
        return self._rates

    def rows_within(self, seconds: float) -> int:
        """Return the number of rows of a step expected to take `seconds`, at the tile area per row of the last tiled steps.

        Args:
            seconds: time limit of the step.
        """
        last = np.sum([*self._seen[True]][-_LAST:] or np.zeros((1, 4)), axis=0)
        a_row = self.rates.row + self.rates.area * last[2] / max(last[1], 1)
        return int((seconds - self.rates.step) / max(a_row, _TINY))

    def add(self, began: float, rows: int, area: int) -> None:
        """Add a step that was sent to the device.

        Args:
            began: start of the step in seconds on the clock of `time.perf_counter`.
            rows: number of rows, padding included.
            area: rows times slots of the tiles that attention visits.
        """
        if not self._pending[0]:
            self._began = began
        self._pending += (1, rows, area)

    def finish(self, running: tuple[int, int] | None = None) -> None:
        """Record the time of the added steps, when the device has just finished them.

        Args:
            running: rows and area of the last step, if the device has just begun it; None if it has finished all.
        """
        left = np.zeros(3) if running is None else np.asarray([1.0, *running])
        done, now = self._pending - left, time.perf_counter()
        if done[0] > 0:
            self._record(done, now - self._began)
            self._pending, self._began = left, now

    def record(self, steps: int, rows: int, seconds: float) -> None:
        """Record the time of steps without tiles.

        Args:
            steps: number of steps.
            rows: number of rows of all steps, padding included.
            seconds: time that the steps took.
        """
        if steps:
            self._record(np.array([steps, rows, 0.0]), seconds)

    def _record(self, features: np.ndarray, seconds: float) -> None:
        self._seen[bool(features[2])].append(np.append(features, seconds))
        self._rates = None

    def forget(self) -> None:
        """Discard the added steps, because their time includes the compilation of a program."""
        self._pending = np.zeros(3)

    def _fitted(self) -> StepRates:
        from scipy.optimize import nnls  # a slow import, which callers of `tile_area` do not need

        features, targets = np.eye(3) * _GUESS_WEIGHT, np.full(3, _GUESS_WEIGHT)
        if any(self._seen.values()):
            seen = np.stack([*self._seen[False], *self._seen[True]])
            features = np.concatenate([features, seen[:, :3] * self._guess / seen[:, 3:]])
            targets = np.append(targets, np.ones(len(seen)))
        factors, _ = nnls(features, targets)
        return StepRates(*(factors * self._guess).tolist())


def _matmul_rate(dtype: jnp.dtype) -> float:
    """Measure the floating-point operations per second of a matrix product."""
    rows, size = 256, 1024
    a, b = jnp.ones((rows, size), dtype), jnp.ones((size, size), dtype)
    multiply = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32))
    multiply(a, b).block_until_ready()
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        multiply(a, b).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return 2 * rows * size * size / min(seconds)
