"""The gated delta rule of XLA against a sequential float64 witness, and its bits under cuts, company and order."""

from dataclasses import dataclass, field
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkattn.backends.recurrence import BLOCK, NO_WALK, Inputs, RecurrentSpec, Walk
from chunkattn.backends.xla_recurrence import XlaRecurrence

ROWS, WALKS = 160, 4
SPECS = [RecurrentSpec(1, 3, 16, 8, 2), RecurrentSpec(2, 4, 8, 24, 4), RecurrentSpec(3, 3, 24, 16, 3)]
BY_ROW = ("q", "k", "v", "b", "a")


CASES = [
    pytest.param(spec, lanes, marks=() if lanes == quick else pytest.mark.ci, id=f"{number}-{lanes}")
    for number, (spec, quick) in enumerate(zip(SPECS, (1, 3, 3), strict=True))
    for lanes in (1, 3)
]
"""Sizes and numbers of lanes."""


@cache
def compiled(spec, num_lanes):
    """Return the form and its jitted function; layers of one form share the programs."""
    form = XlaRecurrence(spec, num_lanes)
    return form, jax.jit(form.forward, donate_argnums=1)


def layer(spec, rng):
    """Parameters without rows."""
    keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
    taps = [rng.standard_normal((size, spec.taps)) for size in (keys, keys, values)]
    rest = rng.uniform(-3, 1, spec.value_heads), rng.standard_normal(spec.value_heads)
    return Inputs(*[None] * len(BY_ROW), *(x.astype(np.float32) for x in (*taps, *rest)))


def rows(spec, params, count, rng):
    """Inputs of `count` rows of a part."""
    keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
    sizes = (keys, keys, values, spec.value_heads, spec.value_heads)
    return params._replace(**{name: rng.standard_normal((count, size)).astype(np.float32) for name, size in zip(BY_ROW, sizes)})


def joined(*parts):
    return parts[0]._replace(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in BY_ROW})


def first(part, count):
    return part._replace(**{name: getattr(part, name)[:count] for name in BY_ROW})


def witness(spec, part):
    """Outputs and last state, one row after the other in float64."""
    part = Inputs(*(np.asarray(x, np.float64) for x in part))
    count, groups = len(part.q), spec.value_heads // spec.key_heads
    good = np.all([np.isfinite(getattr(part, name)).all(-1) for name in BY_ROW], 0)

    def convolved(x, taps, heads):
        padded = np.concatenate([np.zeros((spec.taps - 1, x.shape[1])), np.where(good[:, None], x, 0)])
        total = sum(padded[i : i + count] * taps[:, i] for i in range(spec.taps))
        return (total / (1 + np.exp(-total))).reshape(count, heads, -1)

    def normalised(x):
        return np.repeat(x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6), groups, 1)

    q = normalised(convolved(part.q, part.conv_q, spec.key_heads)) * spec.key_dim**-0.5
    k = normalised(convolved(part.k, part.conv_k, spec.key_heads))
    v = convolved(part.v, part.conv_v, spec.value_heads)
    beta, g = 1 / (1 + np.exp(-part.b)), -np.exp(part.a_log) * np.logaddexp(part.a + part.dt_bias, 0)
    state, out = np.zeros((spec.value_heads, spec.key_dim, spec.value_dim)), np.full(v.shape, np.nan)
    for i in np.flatnonzero(good):
        state = state * np.exp(g[i])[:, None, None]
        written = beta[i][:, None] * (v[i] - np.einsum("hd,hde->he", k[i], state))
        state = state + k[i][:, :, None] * written[:, None]
        out[i] = np.einsum("hd,hde->he", q[i], state)
    return out, state


@dataclass
class Layer:
    """A layer that computes parts in steps of one shape. Part `p` has slot and seat `p`."""

    spec: RecurrentSpec
    num_rows: int = ROWS
    num_walks: int = WALKS
    num_lanes: int = 1
    slots: int = 8
    cache: object = None
    at: dict = field(default_factory=dict)

    def __post_init__(self):
        self.form, self.step = compiled(self.spec, self.num_lanes)
        self.reset()

    def reset(self):
        self.cache, self.at = self.form.allocate(self.slots, self.slots), {}
        # Begin with garbage in slots and seats, as earlier requests leave it.
        self.cache = jax.tree.map(lambda x: jnp.full_like(x, 7), self.cache)

    def walk(self, part, count, slot=None, source=-1, **more):
        at, slot = self.at.get(part, 0), part if slot is None else slot
        self.at[part] = at + count
        return Walk(0, count, at, slot if at else source, slot, slot, **more)

    def run(self, parts, walks, rng=None):
        """Outputs of each walk, of rows at places that `rng` draws; all other rows are not finite and stay zero."""
        counts = np.array([walk.length for walk in walks])
        gaps, places = np.zeros(len(walks) + 1, int), np.arange(len(walks))
        if rng is not None:
            gaps = rng.multinomial(self.num_rows - counts.sum(), [1 / len(gaps)] * len(gaps))
            places = rng.permutation(len(walks))
        row, placed = 0, [None] * len(walks)
        for gap, place in zip(gaps, places):
            placed[place] = walks[place]._replace(row=row + gap)
            row += gap + walks[place].length
        inputs = parts[0]._replace(
            **{name: np.full((self.num_rows, getattr(parts[0], name).shape[1]), np.nan, np.float32) for name in BY_ROW}
        )
        for part, walk in zip(parts, placed):
            for name in BY_ROW:
                getattr(inputs, name)[walk.row : walk.row + walk.length] = getattr(part, name)[walk.at : walk.at + walk.length]
        table = np.array(placed + [NO_WALK] * (self.num_walks - len(walks)), np.int32)
        out, self.cache = self.step(inputs, self.cache, self.form.build(table, self.num_rows))
        out = np.array(out)
        found = [out[walk.row : walk.row + walk.length].copy() for walk in placed]
        for walk in placed:
            out[walk.row : walk.row + walk.length] = 0
        np.testing.assert_array_equal(out, 0)
        return found

    def outputs(self, parts, cuts, rng=None):
        """Outputs of all parts; `cuts` has for each part where its walks end. Parts wait for room in the step."""
        self.reset()
        left = {p: [*np.diff([0, *ends])] for p, ends in enumerate(cuts)}
        found = {p: [] for p in left}
        while left:
            order = list(left) if rng is None else list(rng.permutation(list(left)))
            room, chosen = self.num_rows, []
            for p in order[: self.num_walks]:
                if left[p][0] <= room and (not chosen or rng is None or rng.random() < 0.8):
                    room -= left[p][0]
                    chosen.append(p)
            walks = [self.walk(p, int(left[p].pop(0))) for p in chosen]
            for p, out in zip(chosen, self.run([parts[p] for p in chosen], walks, rng)):
                found[p].append(out)
            left = {p: counts for p, counts in left.items() if counts}
        return [np.concatenate(out) for out in found.values()]


def random_cuts(length, rng):
    ends = np.unique([*rng.integers(1, length + 1, rng.integers(1, 6)), length])
    pieces = np.concatenate([[end] if end - start <= ROWS else [start + ROWS, end] for start, end in zip([0, *ends], ends)])
    return [int(end) for end in pieces]


def close(found, expected, tolerance=2e-5):
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * max(1, np.nanmax(np.abs(expected))))


def at_once(lengths):
    """Cuts that only keep a walk within a step."""
    return [[*range(ROWS, length, ROWS), length] for length in lengths]


def equal(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(("spec", "num_lanes"), CASES)
def test_rows_are_the_witness_and_keep_their_bits(spec, num_lanes):
    rng = np.random.default_rng(1)
    params = layer(spec, rng)
    lengths = [1, 150, 64, 65, 300, 7]
    parts = [rows(spec, params, length, rng) for length in lengths]
    ours = Layer(spec, num_lanes=num_lanes)
    whole = ours.outputs(parts, at_once(lengths))
    for part, out in zip(parts, whole):
        close(out, witness(spec, part)[0])
    for _ in range(6):
        equal(ours.outputs(parts, [random_cuts(length, rng) for length in lengths], rng), whole)
    equal(ours.outputs(parts, [range(1, length + 1) for length in lengths], rng), whole)


def test_bits_are_those_of_any_size_of_step():
    spec, rng = RecurrentSpec(3, 6, 8, 24, 4), np.random.default_rng(2)
    lengths = [90, 5, 131]
    params = layer(spec, rng)
    parts = [rows(spec, params, length, rng) for length in lengths]
    whole = Layer(spec, 512, 3).outputs(parts, [[length] for length in lengths])
    equal(Layer(spec, 1, 1).outputs(parts, [range(1, length + 1) for length in lengths]), whole)
    equal(Layer(spec, 7, 5).outputs(parts, [[*range(3, length, 3), length] for length in lengths], rng), whole)


@pytest.mark.parametrize(("spec", "num_lanes"), CASES)
def test_kept_states_are_continued(spec, num_lanes):
    rng = np.random.default_rng(3)
    params = layer(spec, rng)
    prefix, others = rows(spec, params, 150, rng), [rows(spec, params, count, rng) for count in (3, 70, 64)]
    ours = Layer(spec, num_lanes=num_lanes)
    (whole,) = ours.outputs([prefix], [[150]])
    ours.reset()
    # One walk keeps the state amid its rows, the next one at its end.
    ours.run([prefix], [ours.walk(0, 140, keep_at=128, keep_slot=4)], rng)
    ours.run([prefix], [ours.walk(0, 10, keep_at=150, keep_slot=5)], rng)
    close(ours.cache.slots.state[5], witness(spec, prefix)[1])

    # The kept block boundary continues the part itself, with the same bits.
    again = Walk(0, 22, 128, 4, 6, 6)
    ours.at = {}
    equal(ours.run([prefix], [again], rng), [whole[128:]])
    # Several walks continue from the end; one of them is cut, and all keep their own ends.
    found = ours.run(others, [ours.walk(p, 2, p, source=5) for p in range(3)], rng)
    rest = [ours.walk(p, len(part.q) - 2, p, keep_at=len(part.q), keep_slot=p) for p, part in enumerate(others)]
    found = [np.concatenate(both) for both in zip(found, ours.run(others, rest, rng))]
    for p, (part, out) in enumerate(zip(others, found)):
        expected, state = witness(spec, joined(prefix, part))
        close(out, expected[150:])
        close(ours.cache.slots.state[p], state)
    # Walks that no step continues compute the same bits.
    ended = [Walk(0, len(part.q), 0, 5, -1, -1) for part in others]
    equal(ours.run(others, ended, rng), found)


def test_a_walk_that_ends_saves_its_kept_state_alone():
    spec, rng = SPECS[1], np.random.default_rng(4)
    params = layer(spec, rng)
    part = rows(spec, params, 130, rng)
    ours = Layer(spec)
    before = jax.tree.map(np.array, ours.cache)
    ours.run([part], [Walk(0, 130, 0, -1, -1, -1, 128, 3)], rng)
    close(ours.cache.slots.state[3], witness(spec, first(part, 128))[1])
    for kept, x in zip(ours.cache.slots.window, (part.q, part.k, part.v)):
        np.testing.assert_array_equal(kept[3].reshape(spec.taps - 1, -1), x[128 - (spec.taps - 1) : 128])
    after = jax.tree.map(np.array, ours.cache)
    for old, new in zip(jax.tree.leaves(before.slots), jax.tree.leaves(after.slots)):
        np.testing.assert_array_equal(np.delete(new, 3, 0), np.delete(old, 3, 0))
    equal(jax.tree.leaves(after.seats), jax.tree.leaves(before.seats))


def test_rows_behind_strong_decay_are_exact():
    """A row of decay exp(-30) and more amid rows that hardly decay: differences of plain sums would lose five digits."""
    spec, rng = RecurrentSpec(1, 2, 16, 16, 2), np.random.default_rng(5)
    params = layer(spec, rng)._replace(a_log=np.zeros(2, np.float32), dt_bias=np.zeros(2, np.float32))
    part = rows(spec, params, 256, rng)
    strong = rng.random(part.a.shape) < 0.4
    part = part._replace(a=np.where(strong, rng.choice([30.0, 97.3, 4e3, 1e30], part.a.shape), -5).astype(np.float32))
    ours = Layer(spec, 256, 1)
    (out,) = ours.outputs([part], [[256]])
    close(out, witness(spec, part)[0], 2e-6)
    (cut,) = ours.outputs([part], [[100, 101, 250, 256]], rng)
    np.testing.assert_array_equal(cut, out)


@pytest.mark.parametrize("write", [40.0, 5.0, 0.0])
def test_rows_of_equal_keys_are_exact(write):
    """No row decays, and every key is the same: powers of the system would be as large as 1e17."""
    spec, rng = RecurrentSpec(1, 2, 16, 16, 2), np.random.default_rng(9)
    params = layer(spec, rng)
    part = rows(spec, params, 192, rng)
    part = part._replace(k=np.repeat(part.k[:1], 192, 0), b=np.full_like(part.b, write), a=np.full_like(part.a, -60))
    ours = Layer(spec, 256, 1)
    (out,) = ours.outputs([part], [[192]])
    close(out, witness(spec, part)[0], 2e-6)
    (cut,) = ours.outputs([part], [[1, 70, 127, 129, 192]], rng)
    np.testing.assert_array_equal(cut, out)


@pytest.mark.parametrize(("spec", "num_lanes"), CASES)
def test_rows_that_are_not_finite_touch_no_other_row(spec, num_lanes):
    rng = np.random.default_rng(6)
    params = layer(spec, rng)
    lengths = [150, 67, 12]
    parts = [rows(spec, params, length, rng) for length in lengths]
    ours = Layer(spec, num_lanes=num_lanes)
    sound = ours.outputs(parts, at_once(lengths))
    bad = [[5, 40, 64, 129], [63, 64], [0]]
    for part, places in zip(parts, bad):
        for place in places:
            x = getattr(part, rng.choice(BY_ROW))
            x[place, rng.integers(x.shape[1])] = rng.choice([np.nan, np.inf, -np.inf])
    found = ours.outputs(parts, at_once(lengths))
    for part, places, out, before in zip(parts, bad, found, sound):
        np.testing.assert_array_equal(np.isnan(out).all((1, 2)), np.isin(np.arange(len(out)), places))
        np.testing.assert_array_equal(out[: places[0]], before[: places[0]])
        close(out, witness(spec, part)[0])
    for _ in range(3):
        equal(ours.outputs(parts, [random_cuts(length, rng) for length in lengths], rng), found)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(ours.cache))


def test_a_layer_writes_its_pools_in_place():
    """A copy of the states would be as large as the pool."""
    spec = RecurrentSpec(1, 2, 16, 16)
    ours, params = Layer(spec, 64, 4, slots=4096), layer(spec, np.random.default_rng(7))
    inputs = rows(spec, params, 64, np.random.default_rng(7))
    program = ours.step.lower(inputs, ours.cache, ours.form.build(np.array([NO_WALK] * 4, np.int32), 64)).compile()
    memory = program.memory_analysis()
    pool = sum(x.nbytes for x in jax.tree.leaves(ours.cache))
    assert memory.alias_size_in_bytes == pool
    assert memory.temp_size_in_bytes < pool / 32


@pytest.mark.parametrize("num_lanes", [1, 3])
def test_sizes_follow_from_the_sizes_of_the_arguments(num_lanes):
    """Also where every walk of two rows touches two blocks."""
    form, rng = XlaRecurrence(SPECS[0], num_lanes), np.random.default_rng(8)
    for num_rows, num_walks in ((1, 1), (2, 1), (64, 40), (200, 3)):
        shapes = set()
        for _ in range(50):
            count = rng.multinomial(num_rows, [1 / (num_walks + 1)] * (num_walks + 1))[:num_walks]
            pairs = np.minimum(count, 2)
            for counts, at in ((count, rng.integers(0, 999, num_walks)), (pairs, np.full(num_walks, BLOCK - 1))):
                at = np.where(counts > 0, at, 0)
                table = np.stack([np.cumsum(counts) - counts, counts, at, *[np.arange(num_walks)] * 3, 0 * at, 0 * at - 1], -1)
                built = form.build(table.astype(np.int32), num_rows)
                touched = np.where(counts > 0, (at + counts - 1) // BLOCK - at // BLOCK + 1, 0).sum()
                assert (built.groups[..., 4] > built.groups[..., 3]).sum() == touched
                shapes.add(tuple(x.shape for x in jax.tree.leaves(built)))
        assert len(shapes) == 1
