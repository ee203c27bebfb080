"""Mixtures of experts: a router picks a few MLPs for every row, and the row's result is the weighted sum of their outputs.

The bits of a row depend on that row alone. Each product adds up a row in one order for any number of rows, and the outputs of a
row's experts are added in the order in which the router ranks them.

Axes: `T` rows, `K` experts of a row, `M` pairs of a row and an expert, `E` experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from chunkattn.backends.cpu import groups as native
from chunkattn.models.linear import dot, gated, rows_dtype, sums
from chunkattn.models.packed import Packed, Weight
from chunkattn.models.spec import Experts

_TILE, _LARGEST_TILE = 16, 128
"""Rows of a product on CPUs, and the least and most on GPUs."""
_COPIED = 32
"""Weights that GPUs copy at a time."""


def route(logits: Float32[Array, "T E"], spec: Experts) -> tuple[Int32[Array, "T K"], Float32[Array, "T K"]]:
    """Return the experts of every row, the likeliest first, and the factors of their outputs.

    Args:
        logits: logits of the router.
        spec: the experts.
    """
    highest, chosen = jax.lax.top_k(logits, spec.used)
    factors = jnp.exp(highest - highest[:, :1])
    total = factors if spec.is_normalised else jnp.exp(logits - highest[:, :1])
    return chosen, factors / sums(total)


def mix(
    x: Float[Array, "T hidden"],
    chosen: Int32[Array, "T K"],
    factors: Float32[Array, "T K"],
    gate: Weight,
    up: Weight,
    down: Weight,
    spec: Experts,
    dtype: jnp.dtype,
) -> Float32[Array, "T hidden"]:
    """Return every row's weighted sum of its experts' outputs. An expert is a SwiGLU layer (arXiv:2002.05202).

    Args:
        x: rows.
        chosen: experts of every row; `spec.count` for none, which adds nothing.
        factors: factors of their outputs.
        gate: weights of the experts' gates, `[E, inner, hidden]`, or `[E, hidden, inner]` if inputs come first.
        up: weights of the experts' inner layers, as `gate`.
        down: weights of the experts' outputs, `[E, hidden, inner]`, or `[E, inner, hidden]`.
        spec: the experts.
        dtype: dtype of weights that are not packed.
    """
    count, used = chosen.shape
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.sum(flat[:, None] == jnp.arange(spec.count), axis=0, dtype=jnp.int32)
    rows = (order // used).astype(jnp.int32)
    inward, inner = multiply_groups(x, rows, sizes, [gate, up], spec.inputs_first)
    inner = gated(inward, inner, rows_dtype([down], dtype))
    (outputs,) = multiply_groups(inner, jnp.arange(len(rows), dtype=jnp.int32), sizes, [down], spec.inputs_first)
    places = jnp.argsort(order)
    by_row = outputs[places].reshape(count, used, -1) * factors[..., None]
    by_row = jax.lax.platform_dependent(by_row, chosen, cpu=_rounded, default=lambda products, _: products)
    by_row = jnp.where((chosen < spec.count)[..., None], by_row, 0)  # products of no group may be anything
    return sum((by_row[:, k] for k in range(1, used)), by_row[:, 0])  # in one order for any number of rows


def _rounded(products: Float32[Array, "T K hidden"], chosen: Int32[Array, "T K"]) -> Float32[Array, "T K hidden"]:
    """Return products that are not rounded together with a later sum, which LLVM would do or not by the number of rows."""
    unknown_zero = jnp.minimum(chosen, 0)[..., None]
    bits = jax.lax.bitcast_convert_type(products, jnp.int32) ^ unknown_zero
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def multiply_groups(
    x: Float[Array, "N in"],
    rows: Int32[Array, " M"],
    sizes: Int32[Array, " E"],
    weights: Sequence[Weight],
    inputs_first: bool = False,
) -> list[Float32[Array, "M out"]]:
    """Return products of pairs of a row and a group, which has weights of its own, accumulated in float32.

    Args:
        x: rows.
        rows: row of each pair; the pairs of a group are neighbours.
        sizes: pairs of each group. The products of the pairs behind those of the last group have no meaning.
        weights: weights of each group, `[E, out, in]`, of one dtype or all packed.
        inputs_first: whether the weights are `[E, in, out]`.
    """
    packed = [weight for weight in weights if isinstance(weight, Packed)]
    plain = [weight for weight in weights if not isinstance(weight, Packed)]
    if packed and plain:
        products = iter(multiply_groups(x, rows, sizes, packed)), iter(multiply_groups(x, rows, sizes, plain))
        return [next(products[not isinstance(weight, Packed)]) for weight in weights]
    if packed:
        data, formats, outputs = zip(*((w.data, w.format, w.outputs) for w in packed), strict=True)
        x, digits = x.astype(jnp.float32), packed[0].digits
        return native.multiply_packed(x, rows, sizes, *data, formats=formats, outputs=outputs, digits=digits)
    x = x.astype(plain[0].dtype)
    ragged, tiled, batched = (partial(form, inputs_first=inputs_first) for form in (_ragged, _tiled, _batched))
    on_cpu = native.multiply if not inputs_first and native.serves(x, plain) else tiled
    found: list[jax.Array] = jax.lax.platform_dependent(x, rows, sizes, *plain, cpu=on_cpu, tpu=ragged, default=batched)
    return found


def _ragged(x: jax.Array, rows: jax.Array, sizes: jax.Array, *weights: jax.Array, inputs_first: bool) -> list[jax.Array]:
    """Return XLA's own products, which have a kernel on TPUs alone: elsewhere they multiply every row with every weight."""
    numbers = jax.lax.RaggedDotDimensionNumbers(  # type: ignore[no-untyped-call]
        dot_dimension_numbers=(((1,), (1 if inputs_first else 2,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    x = x[rows]
    return [
        jax.lax.ragged_dot_general(x, weight, sizes, numbers, precision=precision, preferred_element_type=jnp.float32)
        for weight in weights
    ]


def _batched(x: jax.Array, rows: jax.Array, sizes: jax.Array, *weights: jax.Array, inputs_first: bool) -> list[jax.Array]:
    """Return the products of tiles of rows with copies of their weights, some tiles in a batched product, for GPUs."""
    groups, pairs = len(sizes), len(rows)
    tile = min(max(_TILE, 1 << (pairs // groups).bit_length()), _LARGEST_TILE)
    ends, tiles = jnp.cumsum(sizes), -(-sizes // tile)
    last_tile = jnp.cumsum(tiles)
    count = min(groups, pairs) + pairs // tile
    if count > _COPIED:  # no remainder: a product of another size may add up in another order
        count = -(-count // _COPIED) * _COPIED
    number, pair = jnp.arange(count), jnp.arange(pairs)
    group = jnp.minimum(jnp.searchsorted(last_tile, number, side="right"), groups - 1)
    begin = ends[group] - sizes[group] + (number - last_tile[group] + tiles[group]) * tile
    given = x[rows[jnp.clip(begin[:, None] + jnp.arange(tile), 0, pairs - 1)]]
    own = jnp.minimum(jnp.searchsorted(ends, pair, side="right"), groups - 1)
    offset = pair - ends[own] + sizes[own]
    places = (last_tile - tiles)[own] + offset // tile, offset % tile
    numbers = (((1,), (0 if inputs_first else 1,)), ((), ()))
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def product(weight: jax.Array) -> jax.Array:
        def one_tile(of: tuple[jax.Array, jax.Array]) -> jax.Array:
            return jax.lax.dot_general(of[0], weight[of[1]], numbers, precision=precision, preferred_element_type=jnp.float32)

        return jax.lax.map(one_tile, (given, group), batch_size=_COPIED)[places]

    return [product(weight) for weight in weights]


def _tiled(x: jax.Array, rows: jax.Array, sizes: jax.Array, *weights: jax.Array, inputs_first: bool) -> list[jax.Array]:
    """Return the products tile by tile, for CPUs, where XLA's own multiply every row with every weight."""
    ends, tiles = jnp.cumsum(sizes), -(-sizes // _TILE)
    last_tile, padded = jnp.cumsum(tiles), jnp.pad(x[rows], ((0, _TILE), (0, 0)))

    def product(weight: jax.Array) -> jax.Array:
        weight = weight.swapaxes(1, 2) if inputs_first else weight
        # As integers: XLA:CPU widens 16-bit weights, and would widen all of them ahead of the loop.
        stored = jax.lax.bitcast_convert_type(weight, jnp.dtype(f"uint{8 * weight.dtype.itemsize}"))

        def one_tile(number: jax.Array, out: jax.Array) -> jax.Array:
            group = jnp.searchsorted(last_tile, number, side="right")
            begin = ends[group] - sizes[group] + (number - last_tile[group] + tiles[group]) * _TILE
            values = dot(
                jax.lax.dynamic_slice_in_dim(padded, begin, _TILE), jax.lax.bitcast_convert_type(stored[group], weight.dtype)
            )
            kept = jax.lax.dynamic_slice_in_dim(out, begin, _TILE)
            values = jnp.where((begin + jnp.arange(_TILE) < ends[group])[:, None], values, kept)
            return jax.lax.dynamic_update_slice_in_dim(out, values, begin, axis=0)

        out = jnp.zeros((len(padded), weight.shape[1]), jnp.float32)
        return jax.lax.fori_loop(0, last_tile[-1], one_tile, out)[: len(rows)]

    return [product(weight) for weight in weights]
