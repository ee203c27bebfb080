"""The mixers of layers, which read other tokens: attention and Gated DeltaNet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from chunkattn.backends.recurrence import RecurrentSpec
from chunkattn.rope.rotary import RotarySpec

Shapes = dict[str, tuple[int, ...]]
"""Shape of each parameter by its name in Hugging Face checkpoints, `[out, in]` for a matrix."""

RECURRENT = "linear_attn."
"""Beginning of the names of a recurrent layer's parameters, inside the layer."""
CONVOLUTIONS = tuple(f"{RECURRENT}conv_{part}.weight" for part in "qkv")
"""Ends of the names of taps, which multiply no rows: `[channels, taps]`."""
EXACT = (f"{RECURRENT}A_log", f"{RECURRENT}dt_bias")
"""Ends of the names of parameters that are float32 in every model."""
_INWARD = ("q", "k", "v", "z", "b", "a")
_SMALL = ("b", "a")


@dataclass(frozen=True)
class QueryGrowth:
    """Factor of rotated queries, `1 + beta * log(1 + position // period)`, as in Llama 4.

    Attributes:
        beta: weight of the logarithm.
        period: number of positions that have one factor.
    """

    beta: float
    period: int


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention of a layer (arXiv:2305.13245); sizes are in elements.

    Attributes:
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads.
        head_dim: size of a head.
        scale: factor of the scores.
        rotary: frequencies of the rotary embedding; None for a layer that sees no positions.
        window: sliding window in tokens; None for full attention.
        qkv_bias: whether the query, key and value projections have biases.
        o_bias: whether the output projection has a bias.
        qk_norm: what is normalised of queries and keys: nothing, each head, or the whole projection.
        growth: factor of queries by their position; None for none.
        output_gate: whether the output is multiplied by the sigmoid of a gate. The query projection then has the rows of a
            head's query and of its gate, head by head.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rotary: RotarySpec | None
    window: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["head", "whole"] | None = None
    growth: QueryGrowth | None = None
    output_gate: bool = False

    @property
    def is_plain(self) -> bool:
        """Return whether the layer has full attention over heads that are rotated whole, and nothing more."""
        rotates_whole = self.rotary is not None and 2 * len(self.rotary.inv_freq) == self.head_dim
        return rotates_whole and self.window is None and self.growth is None

    @property
    def heads(self) -> tuple[int, int, int]:
        """Return the sizes that decide the shape of K/V and the kernel: query heads, KV heads and the size of a head."""
        return self.num_heads, self.num_kv_heads, self.head_dim

    @property
    def readers(self) -> list[str]:
        """Return the parameters that multiply the layer's input."""
        return [f"self_attn.{part}_proj.weight" for part in "qkv"]

    def parameters(self, hidden: int) -> Shapes:
        """Return the shapes of the layer's attention.

        Args:
            hidden: width of the residual stream.
        """
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        linear = {
            "q_proj": (2 * q_size if self.output_gate else q_size, hidden, self.qkv_bias),
            "k_proj": (kv_size, hidden, self.qkv_bias),
            "v_proj": (kv_size, hidden, self.qkv_bias),
            "o_proj": (hidden, q_size, self.o_bias),
        }
        normed = {"head": (self.head_dim, self.head_dim), "whole": (q_size, kv_size)}.get(self.qk_norm or "", ())
        norms: Shapes = {f"self_attn.{name}_norm.weight": (size,) for name, size in zip("qk", normed, strict=False)}
        return norms | linear_shapes("self_attn.", linear)


class GatedDeltaNet(NamedTuple):
    """Recurrent layer with the gated delta rule (arXiv:2412.06464); sizes are in elements.

    A tuple, which the messages between hosts tell from `Attention`.

    Attributes:
        key_heads: number of query and key heads.
        value_heads: number of value heads, a multiple of `key_heads`.
        key_dim: size of a query or key head.
        value_dim: size of a value head.
        taps: inputs that one output of the convolution reads.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4

    @property
    def readers(self) -> list[str]:
        """Return the parameters that multiply the layer's input."""
        return [f"{RECURRENT}in_proj_{part}.weight" for part in _INWARD]

    @property
    def heads(self) -> tuple[int, int, int]:
        """Return the sizes that attention would have, for a decoder without any: value heads, key heads and a key's size."""
        return self.value_heads, self.key_heads, self.key_dim

    def parameters(self, hidden: int) -> Shapes:
        """Return the shapes of the layer's parameters. A convolution's weight is `[channels, taps]`.

        Args:
            hidden: width of the residual stream.
        """
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        rows = dict(zip(_INWARD, (keys, keys, values, values, self.value_heads, self.value_heads), strict=True))
        linear = {f"in_proj_{part}": (count, hidden, False) for part, count in rows.items()}
        shapes = linear_shapes(RECURRENT, linear | {"out_proj": (hidden, values, False)})
        shapes |= {name: (rows[part], self.taps) for name, part in zip(CONVOLUTIONS, "qkv", strict=True)}
        shapes |= dict.fromkeys(EXACT, (self.value_heads,))
        return shapes | {f"{RECURRENT}norm.weight": (self.value_dim,)}

    def recurrence(self, shards_size: int = 1) -> RecurrentSpec:
        """Return the sizes of the layer on one device.

        Args:
            shards_size: number of devices that share the heads, a divisor of `key_heads`.
        """
        key_heads, value_heads = self.key_heads // shards_size, self.value_heads // shards_size
        return RecurrentSpec(key_heads, value_heads, self.key_dim, self.value_dim, self.taps)


UNPACKED = (*CONVOLUTIONS, *(f"{RECURRENT}in_proj_{part}.weight" for part in _SMALL))
"""Ends of the names of a recurrent layer's small matrices, which are never packed."""


def linear_shapes(prefix: str, modules: dict[str, tuple[int, int, bool]]) -> Shapes:
    """Return the shapes of linear modules.

    Args:
        prefix: beginning of the names.
        modules: rows, columns and whether there is a bias, by module.
    """
    weights: Shapes = {f"{prefix}{name}.weight": (rows, columns) for name, (rows, columns, _) in modules.items()}
    return weights | {f"{prefix}{name}.bias": (rows,) for name, (rows, _, has_bias) in modules.items() if has_bias}
