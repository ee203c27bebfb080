"""Gated delta rule in plain XLA operations, for any platform.

Walks are cut into pieces, one per block that a walk touches. The writes of a block's rows solve a triangular system, whose
inverse follows from keys, decays and write strengths alone. One loop computes the inverses of all pieces, some together. A
second loop carries the states: a lane computes the pieces of one walk one after the other, then takes the next walk. Both
loops have a dynamic trip count.

A seat keeps the rows of an open block as they are before the inverse, so every step computes the whole block anew. Later rows
enter all products of a row with factors of zero, and the order of additions counts from the block's start, so a row has the
same bits whether the rows behind it are there or not.

Axes that `recurrence` and `recurrent_pieces` do not define: `P` pieces, `r` = `Hv // Hk`, `N` heads of all pieces of a group.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from chunkattn.backends.portable import on_cpu
from chunkattn.backends.recurrence import (
    BLOCK,
    NO_WALK,
    Inputs,
    Recurrence,
    RecurrentCache,
    RecurrentSpec,
    Seats,
    Slots,
    Window,
    allocate,
)
from chunkattn.backends.recurrent_pieces import OF_LANE, OF_ZEROS, Piece, Pieces, Saved, cut, rounded

MOST_PREPARED = 16
"""Pieces that are prepared together on an accelerator."""
_LEAST_LANES, _MOST_LANES = 2, 8
"""Limits of the number of lanes on an accelerator."""
LEAST_DECAY = -128.0
"""Least logarithm of a row's decay. The exponential function gives zero far above this value."""
_GRID = 512.0
"""Steps per unit of the coarse part of a decay: a sum of `BLOCK` coarse parts is exact in float32."""
_LEAF = 8
"""Rows of a block that are inverted by substitution."""
_COLUMNS = 8
"""Least columns of a product: XLA:CPU adds up a product of fewer in an order that follows the number of rows."""
_product = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class XlaRecurrence(Recurrence):
    """The form for devices without a kernel of their own.

    A seat's `values` are the values of its rows behind the convolution. Its `decay` has two numbers per head and row, one after
    the other: the logarithm of the decay, and the write strength.

    Args:
        spec: sizes of the layer.
        num_lanes: maximum number of lanes, and pieces that are prepared together; None chooses both by platform.
    """

    def __init__(self, spec: RecurrentSpec, num_lanes: int | None = None) -> None:
        super().__init__(spec)
        self._num_lanes = num_lanes

    def allocate(self, slots: int, seats: int) -> RecurrentCache:
        """Return the empty cache of one layer; see `Recurrence.allocate`."""
        cache = allocate(self.spec, slots, seats)
        gates = jnp.zeros((seats, BLOCK, 2 * self.spec.value_heads), jnp.float32)
        return cache._replace(seats=cache.seats._replace(decay=gates))

    def build(self, walks: Int32[np.ndarray, "B 8"], num_rows: int) -> Pieces:
        """Return the pieces of a step; see `Recurrence.build`."""
        walks = walks if len(walks) else np.array([NO_WALK], np.int32)
        # XLA:CPU takes as long for pieces together as one by one.
        together, lanes = (1, 1) if on_cpu() else (MOST_PREPARED, num_lanes(num_rows, len(walks)))
        return cut(self.spec, walks, num_rows, self._num_lanes or together, self._num_lanes or lanes)

    def forward(
        self, inputs: Inputs, cache: RecurrentCache, arrays: Pieces
    ) -> tuple[Float32[Array, "T Hv dv"], RecurrentCache]:
        """Return the outputs and the cache; see `Recurrence.forward`."""
        spec, num_rows, seats = self.spec, len(inputs.q), cache.seats
        good = jnp.stack([jnp.isfinite(x).all(-1) for x in (inputs.q, inputs.k, inputs.v, inputs.b, inputs.a)]).all(0)
        good = _extend(good, arrays.row)
        raw = self._raw(inputs, good, cache, arrays)
        rows = _rows(spec, inputs, raw, good, arrays.row)
        # A loop writes these pools. XLA would copy them at every iteration that also reads them.
        known = [x[jnp.maximum(arrays.from_seat, 0)] for x in (seats.keys, seats.values, seats.decay)]
        table = arrays.groups.reshape(-1, arrays.groups.shape[-1])
        together = arrays.groups.shape[1]

        def prepare(i: jax.Array, done: _Prepared) -> _Prepared:
            piece = Piece(*jnp.unstack(jax.lax.dynamic_index_in_dim(arrays.groups, i, keepdims=False), axis=-1))
            new = _prepare(spec, rows, known[0], known[2], piece)
            return _Prepared(*(jax.lax.dynamic_update_slice_in_dim(x, y, i * together, 0) for x, y in zip(done, new)))

        of_heads = len(table), spec.value_heads, BLOCK
        empty = _Prepared(*(jax.lax.empty((*of_heads, *n), jnp.float32) for n in ((2 * BLOCK,), (), ())))  # type: ignore[no-untyped-call]
        prepared: _Prepared = jax.lax.fori_loop(0, arrays.num_groups, prepare, empty)

        def advance(i: jax.Array, carry: _Carry) -> _Carry:
            turn = jax.lax.dynamic_index_in_dim(arrays.turns, i, keepdims=False)
            piece, of_pieces = Piece(*jnp.unstack(table[turn], axis=-1)), _Prepared(*(x[turn] for x in prepared))
            own = rows.k, rows.v, rows.gates
            keys, given, gates = (_blocks(new, piece, old[piece.walk]) for new, old in zip(own, known))
            return _advance(spec, rows, keys, given, gates, of_pieces, piece, carry)

        outputs = jnp.zeros((2 * BLOCK + num_rows, spec.value_heads, spec.value_dim), jnp.float32)
        states = jnp.zeros((arrays.turns.shape[1], *cache.slots.state.shape[1:]), jnp.float32)
        start = _Carry(outputs, states, cache.slots.state, seats.keys, seats.values, seats.decay)
        done: _Carry = jax.lax.fori_loop(0, arrays.iterations, advance, start)

        def save(window: Window, saved: Saved) -> Window:
            entries = saved.first[:, None] + jnp.arange(spec.taps - 1)
            return Window(*(old.at[saved.index].set(new[entries], mode="drop") for old, new in zip(window, raw)))

        slots = Slots(done.state, save(save(cache.slots.window, arrays.of_slots), arrays.of_keeps))
        seats = Seats(done.keys, done.values, done.gates, save(seats.window, arrays.of_seats))
        return done.outputs[BLOCK : BLOCK + num_rows], RecurrentCache(slots, seats)

    def _raw(self, inputs: Inputs, good: jax.Array, cache: RecurrentCache, arrays: Pieces) -> Window:
        """Return the inputs of the convolution of all extended rows, as `[E, heads, size]`."""
        raw = []
        for x, of_slots, of_seats in zip((inputs.q, inputs.k, inputs.v), cache.slots.window, cache.seats.window):
            seated, slotted = (at[:, None, None, None] for at in (arrays.from_seat, arrays.from_slot))
            from_seat = of_seats.at[jnp.maximum(arrays.from_seat, 0)].get(mode="clip")
            from_slot = of_slots.at[jnp.maximum(arrays.from_slot, 0)].get(mode="clip")
            window = jnp.where(seated >= 0, from_seat, jnp.where(slotted >= 0, from_slot, 0))
            own = jnp.where(good[:, None], _extend(x, arrays.row), 0).reshape(-1, *of_slots.shape[2:])
            raw.append(own.at[arrays.head].set(window, mode="drop"))
        return Window(*raw)


def num_lanes(num_rows: int, num_walks: int) -> int:
    """Return the number of lanes of a step on an accelerator: few where most rows may be those of one long prompt.

    Args:
        num_rows: rows of the step.
        num_walks: entries for walks.
    """
    return min(_MOST_LANES, max(_LEAST_LANES, _MOST_LANES * num_walks // num_rows))


class _Rows(NamedTuple):
    """Rows behind the convolution. Those that are not finite have zeros in all but `q`, and `good` is false."""

    q: Float32[Array, "E Hk dk"]
    k: Float32[Array, "E Hk dk"]
    v: Float32[Array, "E Hv dv"]
    gates: Float32[Array, "E 2*Hv"]
    good: Bool[Array, " E"]


class _Prepared(NamedTuple):
    """Factors of pieces that no state enters.

    Attributes:
        factors: inverse of the system, times the write strengths; behind it the products of queries and keys, decayed.
        since: decay from the block's start to each row.
        until: decay from each row to the block's end.
    """

    factors: Float32[Array, "P Hv BLOCK 2*BLOCK"]
    since: Float32[Array, "P Hv BLOCK"]
    until: Float32[Array, "P Hv BLOCK"]


class _Carry(NamedTuple):
    """Arrays that the loop over lanes writes in place: outputs with `BLOCK` rows around them, states of lanes, the cache's."""

    outputs: Float32[Array, "2*BLOCK+T Hv dv"]
    states: Float32[Array, "G Hv dk dv"]
    state: Float32[Array, "N Hv dk dv"]
    keys: Float32[Array, "M BLOCK Hk dk"]
    values: Float32[Array, "M BLOCK Hv dv"]
    gates: Float32[Array, "M BLOCK 2*Hv"]


def _rows(spec: RecurrentSpec, inputs: Inputs, raw: Window, good: jax.Array, row: jax.Array) -> _Rows:
    q, k, v = (_convolve(x, taps) for x, taps in zip(raw, (inputs.conv_q, inputs.conv_k, inputs.conv_v)))
    # Rows come last, so that a vector of XLA:CPU holds the same head.
    b, a = (jnp.where(good[:, None], _extend(x, row), 0).T for x in (inputs.b, inputs.a))
    beta = jnp.where(good, jax.nn.sigmoid(b), 0)
    rate = -jnp.exp(inputs.a_log)[:, None]
    decay = jnp.maximum(rate * jax.nn.softplus(a + inputs.dt_bias[:, None]), LEAST_DECAY)
    decay = jnp.where(good, decay, 0)
    of_rows = good[:, None, None]
    q, k = _normalise(q) * spec.key_dim**-0.5, jnp.where(of_rows, _normalise(k), 0)
    return _Rows(q, k, jnp.where(of_rows, v, 0), jnp.stack([decay, beta], 1).reshape(-1, len(good)).T, good)


def _convolve(x: Float32[Array, "E H d"], taps: Float32[Array, "H*d taps"]) -> Float32[Array, "E H d"]:
    count = taps.shape[-1]
    padded = jnp.pad(x, ((count - 1, 0), (0, 0), (0, 0)))
    total = jnp.zeros_like(x)
    for i in range(count):
        total = total + padded[i : i + len(x)] * taps[:, i].reshape(x.shape[1:])
    return jax.nn.silu(total)


def _normalise(x: Float32[Array, "E H d"]) -> Float32[Array, "E H d"]:
    squares = jnp.square(x).reshape(-1, x.shape[-1])
    # A product has one order of additions for any number of rows. XLA:CPU's own sums do not.
    ones = jnp.ones((x.shape[-1], _COLUMNS), jnp.float32)
    total = _product("nd,dc->nc", squares, ones)[:, :1].reshape(*x.shape[:-1], 1)
    return x * jax.lax.rsqrt(total + 1e-6)


def _blocks(own: Float32[Array, "E ..."], piece: Piece, known: jax.Array | float = 0.0) -> Float32[Array, "C BLOCK ..."]:
    """Return the rows of the pieces' blocks: those of a seat, those of the step, and zeros, in this order.

    Args:
        own: extended rows.
        piece: the pieces.
        known: rows before `begin`, or the number in their place.
    """
    of_block = jnp.arange(BLOCK)
    begin, end = (x.reshape(-1, 1, *[1] * (own.ndim - 1)) for x in (piece.begin, piece.end))
    of_block = of_block.reshape(-1, *[1] * (own.ndim - 1))
    found = jax.vmap(lambda at: jax.lax.dynamic_slice_in_dim(own, at, BLOCK))(piece.first)
    found = jnp.where((of_block >= begin) & (of_block < end), found, 0)
    return jnp.where(of_block < begin, known, found)


def _prepare(
    spec: RecurrentSpec,
    rows: _Rows,
    known_keys: Float32[Array, "B BLOCK Hk dk"],
    known_gates: Float32[Array, "B BLOCK 2*Hv"],
    piece: Piece,
) -> _Prepared:
    """Return the factors of a group of pieces.

    Heads of all pieces come last, so that an accelerator's vectors hold the same element of many small matrices.

    Args:
        spec: sizes of the layer.
        rows: extended rows.
        known_keys: keys of the walks' seats.
        known_gates: decays and write strengths of the walks' seats.
        piece: the pieces.
    """
    count, heads, per_key = len(piece.first), spec.key_heads, spec.value_heads // spec.key_heads
    q, k = _blocks(rows.q, piece), _blocks(rows.k, piece, known_keys[piece.walk])
    gates = _blocks(rows.gates, piece, known_gates[piece.walk]).reshape(count, BLOCK, heads, per_key, 2)
    num_values = count * spec.value_heads

    def of_values(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, rounded(num_values) - num_values)])

    decay, beta = of_values(jnp.moveaxis(gates, (4, 1, 3), (0, 1, 2)).reshape(2, BLOCK, -1))  # [BLOCK, N]; N = r * C * Hk
    products = _product("cihd,cjhd->chij", jnp.concatenate([q, k], 1), k)
    products = jnp.moveaxis(products, (2, 3), (0, 1)).reshape(2 * BLOCK, BLOCK, -1)
    q_k, k_k = jnp.split(of_values(jnp.concatenate([products] * per_key, -1)), 2)  # [BLOCK, BLOCK, N]

    since, pairs = _decays(decay)
    inverse = _inverse(jnp.where(jnp.tri(BLOCK, k=-1, dtype=bool)[..., None], beta[:, None] * k_k * pairs, 0))

    def by_head(x: jax.Array) -> jax.Array:
        split = x[..., :num_values].reshape(*x.shape[:-1], per_key, count, heads)
        return jnp.moveaxis(split, (-2, -1, -3), (0, 1, 2)).reshape(count, spec.value_heads, *x.shape[:-1])

    factors = jnp.concatenate([by_head(inverse * beta), by_head(q_k * pairs)], -1)
    return _Prepared(factors, by_head(since), by_head(pairs[-1]))


def _decays(decay: Float32[Array, "BLOCK N"]) -> tuple[Float32[Array, "BLOCK N"], Float32[Array, "BLOCK BLOCK N"]]:
    """Return the decay from the block's start to each row, and from each row `j` to a row `i >= j`.

    Sums of coarse parts are exact, and so are their differences; the fine parts and their sums are below 1/8. A difference of
    plain sums would lose the decay of a row behind rows of strong decay.
    """
    coarse = jnp.round(decay * _GRID) / _GRID
    lower = jnp.tri(BLOCK, dtype=jnp.float32)
    coarse, fine = (_product("ij,jn->in", lower, part) for part in (coarse, decay - coarse))
    across = (coarse[:, None] - coarse) + (fine[:, None] - fine)
    seen = jnp.tri(BLOCK, dtype=bool)[..., None]
    return jnp.exp(coarse + fine), jnp.where(seen, jnp.exp(jnp.where(seen, across, 0)), 0)


def _inverse(system: Float32[Array, "BLOCK BLOCK N"]) -> Float32[Array, "BLOCK BLOCK N"]:
    """Return the inverses of the identity plus strictly lower triangular matrices.

    Substitution inverts blocks of `_LEAF` rows. Then the inverses of neighbours are joined to those of blocks of twice the
    size. Unlike the powers of `system`, no factor is large where keys are alike.
    """
    size, count = _LEAF, BLOCK // _LEAF
    split = system.reshape(count, size, count, size, -1)
    leaves = jnp.stack([split[i, :, i] for i in range(count)])
    solved: list[jax.Array] = []
    for i, own in enumerate(jnp.eye(size, dtype=jnp.float32)[..., None]):
        row = jnp.broadcast_to(own, (count, *own.shape[:1], system.shape[-1]))
        for j, other in enumerate(solved):
            row = row - leaves[:, i, j, None] * other
        solved.append(row)
    found = jnp.stack(solved, 1)
    while size < BLOCK:
        count = BLOCK // (2 * size)
        split = system.reshape(count, 2, size, count, 2, size, -1)
        across = jnp.stack([split[i, 1, :, i, 0] for i in range(count)])
        upper, lower = found[0::2], found[1::2]
        corner = -_times(lower, _times(across, upper))
        top, bottom = (jnp.concatenate(parts, 2) for parts in ((upper, jnp.zeros_like(upper)), (corner, lower)))
        size, found = 2 * size, jnp.concatenate([top, bottom], 1)
    return found[0]


def _times(a: Float32[Array, "n i j N"], b: Float32[Array, "n j k N"]) -> Float32[Array, "n i k N"]:
    total = a[:, :, 0, None] * b[:, None, 0]
    for j in range(1, a.shape[2]):
        total = total + a[:, :, j, None] * b[:, None, j]
    return total


def _advance(
    spec: RecurrentSpec,
    rows: _Rows,
    keys: Float32[Array, "G BLOCK Hk dk"],
    given: Float32[Array, "G BLOCK Hv dv"],
    gates: Float32[Array, "G BLOCK 2*Hv"],
    prepared: _Prepared,
    piece: Piece,
    carry: _Carry,
) -> _Carry:
    """Compute one piece per lane.

    Args:
        spec: sizes of the layer.
        rows: extended rows.
        keys: keys of the blocks.
        given: values of the blocks before the inverse.
        gates: decays and write strengths of the blocks.
        prepared: factors of the pieces.
        piece: the pieces.
        carry: arrays to write.
    """
    per_value = partial(jnp.repeat, repeats=spec.value_heads // spec.key_heads, axis=1)
    q_by_value, k_by_value = (per_value(x.swapaxes(1, 2)) for x in (_blocks(rows.q, piece), keys))
    source = piece.source[:, None, None, None]
    pooled = jnp.where(source == OF_ZEROS, 0, carry.state[jnp.maximum(piece.source, 0)])
    state = jnp.where(source == OF_LANE, carry.states, pooled)

    inverse, q_k = jnp.split(prepared.factors, 2, -1)
    since, until = prepared.since[..., None], prepared.until[..., None]
    # Decays enter before the products: XLA:CPU may or may not fuse a product and a sum, as the rows of a seat have it.
    both = jnp.concatenate([since * q_by_value, since * k_by_value], 2)
    q_state, k_state = jnp.split(_product("ghid,ghde->ghie", both, state), 2, 2)
    values = _product("ghij,ghje->ghie", inverse, given.swapaxes(1, 2) - k_state)
    out = q_state + _product("ghij,ghje->ghie", q_k, values)
    after = since[:, :, -1:] * state + _product("ghjd,ghje->ghde", k_by_value, until * values)

    out = out.swapaxes(1, 2)
    outputs, of_block = carry.outputs, jnp.arange(BLOCK)[:, None, None]
    for lane, row in enumerate(piece.row):
        good = jax.lax.dynamic_slice_in_dim(rows.good, piece.first[lane], BLOCK)[:, None, None]
        old = jax.lax.dynamic_slice_in_dim(outputs, row, BLOCK)
        is_new = (of_block >= piece.begin[lane]) & (of_block < piece.end[lane])
        written = jnp.where(is_new, jnp.where(good, out[lane], jnp.nan), old)
        outputs = jax.lax.dynamic_update_slice_in_dim(outputs, written, row, 0)
    closed = (piece.end == BLOCK)[:, None, None, None]
    pool = carry.state.at[piece.slot].set(jnp.where(closed, after, state), mode="drop")
    return _Carry(
        outputs,
        after,
        pool.at[piece.keep_slot].set(after, mode="drop"),
        carry.keys.at[piece.open_seat].set(keys, mode="drop"),
        carry.values.at[piece.open_seat].set(given, mode="drop"),
        carry.gates.at[piece.open_seat].set(gates, mode="drop"),
    )


def _extend(x: jax.Array, row: jax.Array) -> jax.Array:
    return jnp.take(x, row, axis=0, mode="fill", fill_value=0)
