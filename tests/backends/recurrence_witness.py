"""The gated delta rule token by token in float64, and random walks that the forms of recurrent layers compute."""

from dataclasses import dataclass
from functools import cache

import jax
import numpy as np

from chunkattn.backends.recurrence import BLOCK, NO_WALK, Inputs, Walk


@dataclass
class State:
    """A state after some token, in float64, and the inputs of the convolution before the next one."""

    matrix: np.ndarray
    window: list

    @classmethod
    def empty(cls, spec):
        sizes = (spec.key_heads * spec.key_dim,) * 2 + (spec.value_heads * spec.value_dim,)
        window = [np.zeros((spec.taps - 1, size)) for size in sizes]
        return cls(np.zeros((spec.value_heads, spec.key_dim, spec.value_dim)), window)


def silu(x):
    return x / (1 + np.exp(-x))


def witness(spec, inputs, rows, state):
    """Return the outputs of consecutive rows, and the state behind them, both in float64."""
    given = Inputs(*(np.float64(x) for x in inputs))
    per_key, matrix, window = spec.value_heads // spec.key_heads, state.matrix.copy(), list(state.window)
    outputs = []
    for row in rows:
        finite = all(np.isfinite(x[row]).all() for x in given[:5])
        heads = []
        for i, taps in enumerate((given.conv_q, given.conv_k, given.conv_v)):
            own = given[i][row] if finite else np.zeros(given[i].shape[1])
            seen = np.concatenate([window[i], own[None]])
            window[i] = seen[1:]
            heads.append(silu((seen.T * taps).sum(axis=1)))
        if not finite:
            outputs.append(np.full((spec.value_heads, spec.value_dim), np.nan))
            continue
        q, k = (x.reshape(spec.key_heads, spec.key_dim) for x in heads[:2])
        q, k = (np.repeat(x / np.sqrt((x * x).sum(axis=1, keepdims=True) + 1e-6), per_key, axis=0) for x in (q, k))
        v, beta = heads[2].reshape(spec.value_heads, spec.value_dim), 1 / (1 + np.exp(-given.b[row]))
        decay = np.exp(-np.exp(given.a_log) * np.logaddexp(0, given.a[row] + given.dt_bias))
        matrix *= decay[:, None, None]
        written = (v - np.einsum("hkv,hk->hv", matrix, k)) * beta[:, None]
        matrix += k[:, :, None] * written[:, None]
        outputs.append(np.einsum("hkv,hk->hv", matrix, q) / np.sqrt(spec.key_dim))
    return np.array(outputs), State(matrix, window)


def random_inputs(spec, rows, seed=0, decay=1.0):
    """Return inputs of a layer; a row's decays are about `-decay` in logarithms."""
    rng = np.random.default_rng(seed)
    keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
    of_rows = [rng.standard_normal((rows, size)) for size in (keys, keys, values, spec.value_heads, spec.value_heads)]
    taps = [rng.standard_normal((size, spec.taps)) for size in (keys, keys, values)]
    gates = np.log(decay) + rng.uniform(-1, 0.5, spec.value_heads), rng.standard_normal(spec.value_heads)
    return Inputs(*(np.float32(x) for x in (*of_rows, *taps, *gates)))


@cache
def compiled(form, spec):
    """Return a form and its jitted function; layers of one form and spec share the programs."""
    made = form(spec)
    return made, jax.jit(made.forward, donate_argnums=1)


class Layer:
    """A form with a cache, which computes steps of random rows."""

    def __init__(self, form, spec, slots=8, seats=6):
        self.spec = spec
        self.form, self.forward = compiled(form, spec)
        self.cache = self.form.allocate(slots, seats)

    def step(self, inputs, walks, width=None):
        """Return the outputs of the rows of a step; `width` walks are told at least."""
        rows = len(inputs.q)
        walks = [*walks, *[NO_WALK] * ((width or len(walks)) - len(walks))]
        arrays = self.form.build(np.array(walks, np.int32).reshape(-1, 8), rows)
        out, self.cache = self.forward(inputs, self.cache, arrays)
        return np.asarray(out)

    def state(self, slot):
        """Return the matrix of a slot and its window, as arrays of float32."""
        slots = self.cache.slots
        return np.asarray(slots.state[slot]), [np.asarray(x[slot]).reshape(self.spec.taps - 1, -1) for x in slots.window]


def taken(inputs, rows):
    """Return inputs whose rows are those of `rows`; a negative number stands for a row of infinities."""
    rows = np.asarray(rows)
    of_rows = [np.where((rows < 0)[:, None], np.float32(np.inf), x[np.maximum(rows, 0)]) for x in inputs[:5]]
    return Inputs(*of_rows, *inputs[5:])


def random_cuts(rng, count, most=BLOCK):
    """Return the ends of random steps over `count` tokens."""
    ends = [0]
    while ends[-1] < count:
        ends.append(min(count, ends[-1] + int(rng.integers(1, most + 1))))
    return ends


def cut_steps(rng, parts, width, most=BLOCK):
    """Yield steps that compute parts in random pieces: the walks, and the row of `inputs` for each row of the step.

    Args:
        rng: source of randomness.
        parts: of each part its first row in the inputs, and its walk as if it were computed at once.
        width: rows of every step.
        most: tokens of a walk at most.
    """
    done = [0] * len(parts)
    while any(d < walk.length for d, (_, walk) in zip(done, parts, strict=True)):
        walks, rows = [], []
        for i in rng.permutation(len(parts)):
            first, whole = parts[i]
            count = min(whole.length - done[i], int(rng.integers(0, most + 1)), width - len(rows))
            if count <= 0:
                continue
            rows += [-1] * int(rng.integers(0, min(2, width - len(rows) - count) + 1))
            source = whole.source if done[i] == 0 else whole.slot
            keeps = done[i] < whole.keep_at <= done[i] + count
            kept = (whole.keep_at, whole.keep_slot) if keeps else (0, -1)
            walks.append(Walk(len(rows), count, done[i], source, whole.slot, whole.seat, *kept))
            rows += range(first + done[i], first + done[i] + count)
            done[i] += count
        yield walks, rows + [-1] * (width - len(rows))
