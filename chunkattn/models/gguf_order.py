"""`GGUFOrder`: where GGUF files have the rows and columns that llama.cpp's converter moves."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from chunkattn.models.mixers import RECURRENT
from chunkattn.models.spec import DecoderSpec

_HALVES = re.compile(r"self_attn\.([qk])_proj\.")
_VALUES = re.compile(rf"{re.escape(RECURRENT)}(in_proj_qkv|conv1d|in_proj_z|in_proj_a|in_proj_b|A_log|dt_bias)\b")
_BEHIND_KEYS = ("in_proj_qkv", "conv1d")
"""Tensors whose rows of value heads follow those of queries and keys."""
_OF_HEADS = ("in_proj_a", "in_proj_b", "A_log", "dt_bias")
"""Tensors with one row for each value head."""


@dataclass(frozen=True)
class GGUFOrder:
    """Order of the rows and columns of a family's files.

    Attributes:
        spec: shape of the decoder.
        interleaves: whether the two halves of each query and key head are interleaved.
        tiles: whether the value heads of a recurrent layer come in rounds, each with one value head of every key head. The
            decoder has the value heads of one key head side by side.
    """

    spec: DecoderSpec
    interleaves: bool
    tiles: bool

    def rows(self, name: str) -> np.ndarray | None:
        """Return the stored row of each row of a tensor, int `[rows]`; None for rows in order.

        Args:
            name: checkpoint name.
        """
        if self.interleaves and (found := _HALVES.search(name)):
            num_heads, num_kv_heads, head_dim = self.spec.heads
            heads = num_heads if found[1] == "q" else num_kv_heads
            return np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
        mixer, found = self.spec.recurrent, _VALUES.search(name)
        if not self._moves_values or mixer is None or found is None:
            return None
        values = self._values(1 if found[1] in _OF_HEADS else mixer.value_dim)
        keys = 2 * mixer.key_heads * mixer.key_dim if found[1] in _BEHIND_KEYS else 0
        return np.concatenate([np.arange(keys), keys + values])

    def columns(self, name: str) -> np.ndarray | None:
        """Return the stored column of each column of a tensor, int `[columns]`; None for columns in order.

        Args:
            name: checkpoint name.
        """
        mixer = self.spec.recurrent
        if not self._moves_values or mixer is None or not name.endswith(f"{RECURRENT}out_proj.weight"):
            return None
        return self._values(mixer.value_dim)

    @property
    def _moves_values(self) -> bool:
        mixer = self.spec.recurrent
        return self.tiles and mixer is not None and 1 < mixer.key_heads < mixer.value_heads

    def _values(self, size: int) -> np.ndarray:
        """Return the stored place of each element of the value heads, which have `size` elements each."""
        mixer = self.spec.recurrent
        assert mixer is not None
        rounds = mixer.value_heads // mixer.key_heads
        return np.arange(mixer.value_heads * size).reshape(rounds, mixer.key_heads, size).swapaxes(0, 1).reshape(-1)
