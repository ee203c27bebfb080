"""What steps cost on this machine, learnt from the steps themselves."""

from __future__ import annotations

import time
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import nnls

from chunkattn.backends.base import AttentionBatch
from chunkattn.backends.tiles import Tiles, cut, spans, tile_ranges
from chunkattn.engine.messages import StepRates

TILE_ROWS, TILE_SLOTS = 256, 256
"""Of the tiles whose area counts as attention's work: those of `xla` in large steps; others differ by a factor."""

_KEPT = 128
_LAST = 8
_TINY = 1e-12
_GUESS_WEIGHT = 0.5
"""Of the first guess, against one for every observation."""


def tile_area(batch: AttentionBatch) -> int:
    """Rows times slots of the tiles a step visits; decodes, which no tile is computed for, count for nothing."""
    runs = spans(batch)
    several = runs.size > 1
    if not several.any():
        return 0
    tiles = cut(Tiles(runs.row[several], runs.size[several]), TILE_ROWS)
    return int(tile_ranges(batch, tiles, TILE_SLOTS).counts.sum()) * TILE_ROWS * TILE_SLOTS


class RateMeter:
    """Fits `StepRates` to what steps took, from a first guess by the speed of one matrix product.

    Non-negative least squares (Lawson and Hanson, 1974) over relative errors.

    Args:
        row_flops: of the model's matrices, a row.
        pair_flops: of attention, a row and a slot.
        dtype: of the matrices.
    """

    def __init__(self, row_flops: float, pair_flops: float, dtype: jnp.dtype) -> None:
        rate = _matmul_rate(dtype)
        # Attention runs at about a third of the speed.
        self._guess = np.asarray([1e-3, row_flops / rate, 3 * pair_flops / rate])
        # Of steps with and without tiles apart: decodes would soon be all that is remembered.
        self._seen: dict[bool, deque[np.ndarray]] = {tiles: deque(maxlen=_KEPT) for tiles in (False, True)}
        self._pending, self._began = np.zeros(3), 0.0
        self._rates: StepRates | None = None

    @property
    def rates(self) -> StepRates:
        """The fit of what has been seen."""
        if self._rates is None:
            self._rates = self._fitted()
        return self._rates

    def rows_within(self, seconds: float) -> int:
        """Rows of a step that is expected to take so long, with as many tiles a row as the last such steps had."""
        last = np.sum([*self._seen[True]][-_LAST:] or np.zeros((1, 4)), axis=0)
        a_row = self.rates.row + self.rates.area * last[2] / max(last[1], 1)
        return int((seconds - self.rates.step) / max(a_row, _TINY))

    def add(self, began: float, rows: int, area: int) -> None:
        """A step of `rows` rows, padding included, was sent to the device; it began at that `time.perf_counter()`."""
        if not self._pending[0]:
            self._began = began
        self._pending += (1, rows, area)

    def finish(self) -> None:
        """The device has just done all that was added."""
        if self._pending[0]:
            seen = np.append(self._pending, time.perf_counter() - self._began)
            self._seen[bool(self._pending[2])].append(seen)
            self._pending, self._rates = np.zeros(3), None

    def forget(self) -> None:
        """What was added does not count: a program was compiled meanwhile."""
        self._pending = np.zeros(3)

    def _fitted(self) -> StepRates:
        features, wanted = np.eye(3) * _GUESS_WEIGHT, np.full(3, _GUESS_WEIGHT)
        if any(self._seen.values()):
            seen = np.stack([*self._seen[False], *self._seen[True]])
            features = np.concatenate([features, seen[:, :3] * self._guess / seen[:, 3:]])
            wanted = np.append(wanted, np.ones(len(seen)))
        factors, _ = nnls(features, wanted)
        return StepRates(*(factors * self._guess).tolist())


def _matmul_rate(dtype: jnp.dtype) -> float:
    """Floating-point operations a second of a matrix product."""
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
