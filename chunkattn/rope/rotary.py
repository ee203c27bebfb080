"""Rotary position embedding (RoFormer, arXiv:2104.09864) and its published scalings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chunkattn.errors import ModelError

_POSITIVE = (
    *("rope_theta", "factor", "attention_factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
)
"""Numbers among the parameters."""
_ZERO_IS_NONE = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Parameters in which a 0 stands for the default, as in transformers."""


def is_positive(value: object) -> bool:
    """Return whether a value is a number that stays positive, finite and normal in float32.

    Args:
        value: number of a configuration, or anything else.
    """
    limits = np.finfo(np.float32)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and float(limits.tiny) <= value <= float(limits.max)


@dataclass(frozen=True)
class RotarySpec:
    """Frequencies of one model's rotary embedding.

    Attributes:
        inv_freq: `head_dim / 2` frequencies in radians per position, each a float32.
        attention_factor: factor of cos and sin; 1.0 except under YaRN.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0

    @classmethod
    def of(cls, inv_freq: np.ndarray, attention_factor: float = 1.0) -> RotarySpec:
        """Return the rotary embedding of float32 frequencies `[head_dim / 2]`."""
        return cls(tuple(inv_freq.astype(np.float32).tolist()), attention_factor)


def make_rotary(
    params: Mapping[str, Any], head_dim: int, max_position_embeddings: int, length: int = 0, *, partial: bool = False
) -> RotarySpec:
    """Return the rotary embedding that a checkpoint's `rope_parameters` describe.

    Args:
        params: `rope_type`, `rope_theta` and the parameters of the type, named as in Hugging Face configurations.
        head_dim: size of an attention head.
        max_position_embeddings: value from the configuration. Type `dynamic` scales nothing, since no position is beyond
            it: scaling would make the frequencies of cached keys depend on the longest position of a call.
        length: number of positions in use. Type `longrope` takes its long factors if they are more than the original ones, for
            every prompt: cached keys have one set of frequencies.
        partial: whether the family rotates the share `partial_rotary_factor` of each head.

    Raises:
        ModelError: the scaling is not supported, or a parameter is missing or invalid.
    """
    rope_type = params.get("rope_type", params.get("type", "default"))
    # The supported families ignore the key where nothing is scaled, as their classes in transformers do.
    if not partial and rope_type != "default" and params.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("rope_parameters: partial_rotary_factor other than 1.0 is not supported")
    for name in _POSITIVE:
        value = params.get(name)
        if not (value is None or (name in _ZERO_IS_NONE and value == 0) or is_positive(value)):
            raise ModelError(f"rope_parameters: {name} must be a positive finite number, got {value!r}")
    try:
        rotated = int(head_dim * params.get("partial_rotary_factor", 1.0)) if partial else head_dim
        if not 2 <= rotated <= head_dim or rotated % 2:
            raise ValueError(f"partial_rotary_factor must rotate an even number of a head's {head_dim} elements")
        if rope_type == "longrope":
            spec = _longrope(params, rotated, max_position_embeddings, length)
        else:
            spec = _make_rotary(rope_type, params, rotated, max_position_embeddings)
        if not all(map(is_positive, (*spec.inv_freq, spec.attention_factor))):
            raise ValueError("frequencies and attention_factor must be positive and finite")
        return spec
    except ModelError:
        raise
    except KeyError as missing:
        raise ModelError(f"rope_parameters of type {rope_type!r} lack {missing}") from None
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise ModelError(f"rope_parameters {dict(params)} make no rotary embedding: {error}") from error


def _make_rotary(rope_type: str, params: Mapping[str, Any], head_dim: int, max_position_embeddings: int) -> RotarySpec:
    # Every step in float32, as in the reference implementations: at large positions the last bit of a frequency changes
    # the logits.
    base = np.float32(params["rope_theta"])
    inv_freq = np.float32(1.0) / base ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    if "factor" in params and params["factor"] is not None and not params["factor"] >= 1:
        raise ValueError("factor must be at least 1")
    if rope_type in ("default", "dynamic"):
        return RotarySpec.of(inv_freq)
    if rope_type == "linear":
        return RotarySpec.of(inv_freq / np.float32(params["factor"]))
    if rope_type == "llama3":
        return RotarySpec.of(_llama3(inv_freq, params, max_position_embeddings))
    if rope_type == "yarn":
        return _yarn(inv_freq, params, max_position_embeddings)
    raise ModelError(f"rope_type {rope_type!r} is not supported; supported are default, linear, dynamic, llama3 and yarn")


def _llama3(inv_freq: np.ndarray, params: Mapping[str, Any], max_positions: int) -> np.ndarray:
    """Scale frequencies as Llama 3.1: divide long wavelengths by `factor`, keep short wavelengths, blend between."""
    factor, low, high = params["factor"], params["low_freq_factor"], params["high_freq_factor"]
    if not low < high:
        raise ValueError("low_freq_factor must be below high_freq_factor")
    original = params.get("original_max_position_embeddings") or max_positions
    turns = original * inv_freq / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return ((1 - keep) * inv_freq / factor + keep * inv_freq).astype(np.float32)


def _yarn(inv_freq: np.ndarray, params: Mapping[str, Any], max_positions: int) -> RotarySpec:
    """Scale frequencies by YaRN (arXiv:2309.00071): interpolate slow dimensions, keep fast dimensions, sharpen attention."""
    head_dim, base = 2 * len(inv_freq), params["rope_theta"]
    original = params.get("original_max_position_embeddings") or max_positions
    factor = params.get("factor") or max_positions / original

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    first, last = dimension(params.get("beta_fast") or 32), dimension(params.get("beta_slow") or 1)
    if params.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp = (np.arange(len(inv_freq), dtype=np.float32) - first) / ((last - first) or 0.001)
    keep = 1.0 - np.clip(ramp, 0.0, 1.0)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention_factor = params.get("attention_factor")
    if attention_factor is None:
        over, under = params.get("mscale"), params.get("mscale_all_dim")
        attention_factor = mscale(over) / mscale(under) if over and under else mscale(1.0)
    scaled = (1 - keep) * inv_freq / np.float32(factor) + keep * inv_freq
    return RotarySpec.of(scaled, float(attention_factor))


def _longrope(params: Mapping[str, Any], rotated: int, max_positions: int, length: int) -> RotarySpec:
    """Divide each frequency by a factor of its own, for short or for long prompts (LongRoPE, arXiv:2402.13753)."""
    original = params["original_max_position_embeddings"]
    factor, attention_factor = params.get("factor") or max_positions / original, params.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    given = np.asarray(params["long_factor" if length > original else "short_factor"], np.float64)
    if given.shape != (rotated // 2,) or not all(map(is_positive, given.tolist())):
        raise ValueError(f"short_factor and long_factor must have {rotated // 2} positive factors")
    factors = given.astype(np.float32)
    exponents = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)
    return RotarySpec.of(np.float32(1.0) / (factors * np.float32(params["rope_theta"]) ** exponents), float(attention_factor))


def rotary_tables(spec: RotarySpec, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin of all rotation angles, once per step for all layers.

    Args:
        spec: frequencies of the model.
        positions: int32 `[T]` position ids.

    Returns:
        cos and sin, each float32 `[T, 1, head_dim / 2]`.
    """
    angles = positions.astype(jnp.float32)[:, None] * np.asarray(spec.inv_freq, np.float32)
    factor = np.float32(spec.attention_factor)
    # Without the barrier, XLA:CPU fuses the cosines into each of their uses and recomputes them per head. It does not fuse
    # concatenations.
    tables = jax.lax.optimization_barrier(jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1) * factor)  # type: ignore[no-untyped-call]
    cos, sin = jnp.split(tables[:, None], 2, axis=-1)
    return cos, sin


def apply_rotary(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate `x`, or the beginning of each head that the tables cover, in the half-split layout of Hugging Face checkpoints.

    Args:
        x: `[T, heads, head_dim]` queries or keys.
        cos: float32 `[T, 1, rotated / 2]`.
        sin: float32 `[T, 1, rotated / 2]`.

    Returns:
        The rotated array, of the shape and dtype of `x`.
    """
    if (rotated := 2 * cos.shape[-1]) < x.shape[-1]:
        return jnp.concatenate([apply_rotary(x[..., :rotated], cos, sin), x[..., rotated:]], axis=-1)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    halves = first * cos - second * sin, second * cos + first * sin
    # XLA:CPU fuses a stack; a concatenation copies and takes 10 times as long. On TPUs the stack is slower.
    rotated = jax.lax.platform_dependent(*halves, cpu=_stacked, default=_concatenated)
    return rotated.astype(x.dtype)


def _stacked(first: jax.Array, second: jax.Array) -> jax.Array:
    return jnp.stack([first, second], axis=-2).reshape(*first.shape[:-1], -1)


def _concatenated(first: jax.Array, second: jax.Array) -> jax.Array:
    return jnp.concatenate([first, second], axis=-1)
