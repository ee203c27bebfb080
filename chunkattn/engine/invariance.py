"""`Invariance`: whether the bits of a result depend on its request alone, and what that takes on this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chunkattn.backends.base import AttentionBackend
from chunkattn.backends.cpu import label_readout
from chunkattn.backends.cpu import packed as native
from chunkattn.engine.sample_inputs import SAMPLE_BUCKETS
from chunkattn.engine.sampling import READ_BUCKETS, normalised
from chunkattn.errors import ConfigError
from chunkattn.models.experts import mix, route
from chunkattn.models.linear import multiply, sums
from chunkattn.models.packed import Packed, Weight
from chunkattn.models.spec import DecoderSpec, Experts

logger = logging.getLogger(__name__)

_OUTPUTS, _PACKED_DEPTH = 80, 1280
_BLOCK_ROWS = tuple(sorted({*READ_BUCKETS, *SAMPLE_BUCKETS}))
_ROWS = tuple(sorted({2, 3, 7, *_BLOCK_ROWS, 300, 1024}))
_EXPERTS, _MIXED_ROWS, _PACKED_INNER = 5, (1, 7, 300, 1024), 256


@dataclass(frozen=True)
class Invariance:
    """The way an engine keeps the bits of results.

    Attributes:
        holds: whether the bits of a result depend on its request alone.
        one_size: whether all steps, and all blocks of rows that are read, have one size for that.
        own_pages: whether scored items begin on pages for that.
    """

    holds: bool
    one_size: bool
    own_pages: bool = False

    @classmethod
    def of(
        cls,
        option: bool | None,
        backend: AttentionBackend,
        model: DecoderSpec,
        dtype: jnp.dtype,
        weights: Iterable[Weight] = (),
    ) -> Invariance:
        """Resolve the option `batch_invariant` for a backend, a model and this machine.

        Args:
            option: the option; None keeps bits where that needs no padding.
            backend: attention backend of the engine.
            model: shape of the decoder.
            dtype: dtype of the model's unpacked weights.
            weights: the model's weights.

        Raises:
            ConfigError: the option is True, and the backend cannot keep bits.
        """
        if option is False or (option is None and not backend.keeps_bits):
            return cls(False, False)
        if not backend.keeps_bits:
            if backend.can_keep_bits:
                return cls(True, one_size=True, own_pages=True)
            raise ConfigError(
                f"batch_invariant True: the attention backend {backend.name!r} adds up a row in an order that follows the "
                "other rows of its step; choose attention_backend 'pallas_tpu' or 'pallas_gpu', or 'cpu', 'xla' or 'reference' "
                "on a CPU, or leave the option out"
            )
        packed = {(weight.format, weight.digits) for weight in weights if isinstance(weight, Packed)}
        depth = max(model.hidden_size, *(width for layer in model.layers for width in layer.columns))
        inner = max((layer.experts.size for layer in model.layers if layer.experts is not None), default=None)
        agree = rows_agree(dtype, depth, model.vocab_size, tuple(sorted(packed)), inner)
        if option is None and not agree:
            logger.warning(
                "the bits of results depend on what else is computed, because XLA's sums follow the number of rows on this "
                "machine; batch_invariant=True pads all steps to one size"
            )
        return cls(agree or option is True, one_size=not agree and option is True)


def _random_packed(
    rng: np.random.Generator,
    form: str,
    digits: int,
    outputs: int = _OUTPUTS,
    depth: int = _PACKED_DEPTH,
    count: int | None = None,
) -> Packed:
    """Return a packed matrix, or stacked matrices, of random bytes. Their mask keeps every scale below 1."""
    size = native.FORMATS[form].packed_bytes(outputs, depth) * (count or 1)
    data = rng.integers(0, 256, size, np.uint8) & np.uint8(0x3B)
    return Packed(jnp.asarray(data), form, outputs, depth, digits, count)


def _mixture(inner: int, dtype: jnp.dtype) -> Callable[..., tuple[jax.Array]]:
    """Return a function of rows, a router and experts of width `inner`."""
    spec = Experts(_EXPERTS, 2, inner)

    @jax.jit
    def mixture(x: jax.Array, router: jax.Array, gate: Weight, up: Weight, down: Weight) -> tuple[jax.Array]:
        return (mix(x, *route(multiply(x, router), spec), gate, up, down, spec, dtype),)

    return mixture


@cache
def rows_agree(
    dtype: jnp.dtype, depth: int, vocab_size: int, packed: tuple[tuple[str, int], ...] = (), inner: int | None = None
) -> bool:
    """Return whether products and sums of rows have one order of additions for any number of rows.

    The test compares the same rows in products and sums of several sizes, bit by bit.

    Args:
        dtype: dtype of the products.
        depth: depth of the products.
        vocab_size: length of the rows that readouts add up.
        packed: format and digits of packed products.
        inner: width of experts; None for a model without.
    """
    rng = np.random.default_rng(0)
    x = rng.random((_ROWS[-1], depth), np.float32) - 0.5
    weight = jnp.asarray(rng.random((_OUTPUTS, depth), np.float32) - 0.5, dtype)
    logits = rng.random((_BLOCK_ROWS[-1], vocab_size), np.float32)
    probes: list[tuple[Any, tuple[Any, ...], tuple[int, ...]]] = [
        (jax.jit(lambda x, weight: (multiply(x, weight), sums(x))), (x, weight), _ROWS),
        (jax.jit(lambda logits: normalised(logits[:, :1], logits)), (logits,), _BLOCK_ROWS),
    ]

    def random(*shape: int) -> jax.Array:
        return jnp.asarray(rng.random(shape, np.float32) - 0.5, dtype)

    if packed:
        matrices = [_random_packed(rng, *of) for of in packed]
        rows = x[:, :1] * rng.standard_normal((len(x), _PACKED_DEPTH), np.float32)
        probes.append(
            (jax.jit(lambda x, *matrices: tuple(multiply(x, matrix) for matrix in matrices)), (rows, *matrices), _ROWS)
        )
    if inner is not None:
        for hidden, width in ((depth, 64), (min(depth, 64), inner)):  # both sizes of a model together would take seconds
            inward = _EXPERTS, width, hidden
            weights = random(_EXPERTS, hidden), random(*inward), random(*inward), random(_EXPERTS, _OUTPUTS, width)
            probes.append((_mixture(width, dtype), (x[:, :hidden], *weights), _MIXED_ROWS))
    if inner is not None and packed:
        shapes = [(_PACKED_INNER, _PACKED_DEPTH)] * 2 + [(_OUTPUTS, _PACKED_INNER)]
        stacked = [_random_packed(rng, *of, *shape, _EXPERTS) for of, shape in zip(cycle(packed), shapes, strict=False)]
        probes.append((_mixture(_PACKED_INNER, dtype), (rows, random(_EXPERTS, _PACKED_DEPTH), *stacked), _MIXED_ROWS))
    if label_readout.serves(weight):
        read = jax.jit(lambda x, weight: label_readout.read_labels(x, weight, jnp.zeros((len(x), 1), jnp.int32)))
        probes.append((read, (x, weight), _ROWS))
    for compute, (inputs, *others), sizes in probes:
        whole = compute(inputs, *others)
        for size in sizes[:-1]:
            some = compute(inputs[:size], *others)
            if not all(np.array_equal(of, by[:size]) for of, by in zip(some, whole, strict=True)):
                return False
    return True
