"""Rotation of computed keys to other positions.

RoPE multiplies each pair of a key's channels, as a complex number, by `z[position]`. A key moves from position `s` to `d` by
the factor `z[d] / z[s]`. Both come from the model's own table, so the result equals the key that the model computes at `d`,
whatever the scaling of the frequencies and the rounding of the table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Turn(NamedTuple):
    """Factors that move keys.

    Attributes:
        cos: float32 `[T, R/2]`, real parts, for `R` rotated channels.
        sin: float32 `[T, R/2]`, imaginary parts.
    """

    cos: torch.Tensor
    sin: torch.Tensor


class KeyRotation:
    """Rotation of one model's keys.

    Args:
        table: `[P, R]`, cosines and then sines of positions `0…P-1`.
        is_neox: whether channel `i` is paired with `i + R/2`; else channel `2i` with `2i + 1`.
    """

    def __init__(self, table: torch.Tensor, is_neox: bool) -> None:
        self._table = table
        self._is_neox = is_neox

    def turn(self, source: torch.Tensor, target: torch.Tensor) -> Turn:
        """Return the factors `z[target] / z[source]`.

        Args:
            source: int64 `[T]`, positions at which the keys were computed.
            target: int64 `[T]`, positions to which they move. `z[-p]` is the conjugate of `z[p]`.
        """
        a, b = self._table[source.to(self._table.device)].float().chunk(2, -1)
        c, d = self._table[target.abs().to(self._table.device)].float().chunk(2, -1)
        d = torch.where(target.to(d.device)[:, None] < 0, -d, d)
        norm = a * a + b * b
        return Turn((c * a + d * b) / norm, (d * a - c * b) / norm)

    def apply(self, key: torch.Tensor, turn: Turn, out: torch.Tensor, scratch: torch.Tensor) -> None:
        """Write the moved keys. The arithmetic is float32 for every type of the keys.

        Args:
            key: `[T, H, D]`.
            turn: factors of every token.
            out: `[T, H, D]`, receives the result; no alias of `key`.
            scratch: float32 `[2, T, H, R/2]`, overwritten.
        """
        cos, sin = turn.cos[:, None], turn.sin[:, None]
        rotated = 2 * cos.shape[-1]
        (x, y), (u, v) = self._pairs(key[..., :rotated]), self._pairs(out[..., :rotated])
        u.copy_(torch.mul(x, cos, out=scratch[0]).sub_(torch.mul(y, sin, out=scratch[1])))
        v.copy_(torch.mul(y, cos, out=scratch[0]).add_(torch.mul(x, sin, out=scratch[1])))
        out[..., rotated:].copy_(key[..., rotated:])

    def _pairs(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._is_neox:
            first, second = x.chunk(2, -1)
            return first, second
        return x[..., ::2], x[..., 1::2]
