"""Forms of the gated delta rule: float64 token by token, the same bits wherever steps end, and walks that are refused."""

import hashlib
import os
import subprocess
import sys
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkattn.backends.cpu import library
from chunkattn.backends.cpu.recurrence import NativeRecurrence
from chunkattn.backends.recurrence import BLOCK, RecurrentSpec, Walk
from chunkattn.backends.xla_recurrence import XlaRecurrence
from tests.backends.recurrence_witness import Layer, State, cut_steps, random_cuts, random_inputs, taken, witness
from tests.cpu_kernels import use

FORMS = {f"native {name}": (NativeRecurrence, name) for name in ("portable", "avx2", "avx512_bf16", "amx")}
FORMS["xla"] = XlaRecurrence, ""
"""Each form, and the native kernel it needs."""
SPECS = [
    RecurrentSpec(1, 1, 16, 16, 4),
    RecurrentSpec(2, 2, 128, 128, 4),
    RecurrentSpec(3, 6, 24, 64, 2),
    RecurrentSpec(1, 4, 64, 24, 3),
    RecurrentSpec(4, 12, 16, 128, 4),
]
SPEC = RecurrentSpec(2, 4, 24, 64, 4)
TOLERANCE = 2e-5
"""Largest error of an output or a value of a state, whose sizes are about 1."""


@pytest.fixture(params=list(FORMS))
def form(request):
    """One form after the other, where this machine computes it."""
    made, kernel = FORMS[request.param]
    if kernel and (reason := use(kernel)):
        pytest.skip(f"{request.param}: {reason}")
    yield made
    use("")


def close(found, expected):
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


def holds(layer, slot, state):
    """Check a slot against a state in float64."""
    matrix, window = layer.state(slot)
    close(matrix, state.matrix)
    for found, expected in zip(window, state.window, strict=True):
        np.testing.assert_array_equal(found, np.float32(expected))


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("decay", [0.02, 1.0])
def test_rows_equal_a_recurrence_in_float64(form, spec, decay):
    inputs = random_inputs(spec, 203, decay=decay)
    layer = Layer(form, spec)
    walks = [Walk(2, 150, 0, -1, 3, 1, 150, 0), Walk(152, 1, 0, -1, -1, -1, 1, 1), Walk(155, 47, 0, -1, 4, 0)]
    out = layer.step(inputs, walks)
    for walk in walks:
        rows = np.arange(walk.row, walk.row + walk.length)
        expected, state = witness(spec, inputs, rows, State.empty(spec))
        close(out[rows], expected)
        if walk.keep_at:
            holds(layer, walk.keep_slot, state)
    np.testing.assert_array_equal(out[[0, 1, 153, 154, 202]], 0)
    _, before = witness(spec, inputs, range(2, 2 + 2 * BLOCK), State.empty(spec))
    holds(layer, 3, before)
    assert not layer.state(4)[0].any()


@pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=() if spec in (SPECS[0], SPECS[2]) else pytest.mark.ci) for spec in SPECS], ids=str
)
def test_no_end_of_a_step_moves_a_bit(form, spec):
    """Parts in random pieces, in any company and order of rows, have the bits of parts that are computed at once."""
    rng = np.random.default_rng(spec.key_heads)
    counts = [200, 64, 65, 130]
    firsts = np.cumsum([0, *counts[:-1]])
    inputs = random_inputs(spec, sum(counts), decay=0.1)
    kept = [(200, 4), (64, 5), (64, 6), (130, 7)]
    parts = [(int(f), Walk(int(f), n, 0, -1, i, i, *kept[i])) for i, (f, n) in enumerate(zip(firsts, counts, strict=True))]
    layer = Layer(form, spec)
    whole = layer.step(inputs, [walk for _, walk in parts])
    states = [layer.state(slot) for slot in range(8)]
    for most in (1, 3, 17, 100):
        layer, out, seen = Layer(form, spec), np.full_like(whole, np.nan), 0
        for walks, rows in cut_steps(rng, parts, 120, most):
            found = layer.step(taken(inputs, rows), walks, len(parts))
            for walk in walks:
                given = rows[walk.row : walk.row + walk.length]
                out[given], seen = found[walk.row : walk.row + walk.length], seen + walk.length
        assert seen == sum(counts)
        np.testing.assert_array_equal(out, whole)
        for slot, (matrix, window) in enumerate(states):
            np.testing.assert_array_equal(layer.state(slot)[0], matrix)
            for found, expected in zip(layer.state(slot)[1], window, strict=True):
                np.testing.assert_array_equal(found, expected)


def test_parts_continue_the_states_that_others_keep(form):
    """Two parts read the state after a prefix, and a third one that of the second, in one step or in pieces."""
    spec, rng = SPEC, np.random.default_rng(5)
    inputs = random_inputs(spec, 400, decay=0.1)
    ranges = [range(75), range(75, 178), range(178, 306), range(306, 400)]
    walks = [Walk(0, 75, 0, -1, -1, -1, 75, 0), Walk(75, 103, 0, 0, 2, 1, 64, 3), Walk(178, 128, 0, 0, 4, 0, 128, 1)]
    walks.append(Walk(306, 94, 0, 1, 5, 2, 94, 6))
    _, prefix = witness(spec, inputs, ranges[0], State.empty(spec))
    second, _ = witness(spec, inputs, ranges[1], prefix)
    _, after_block = witness(spec, inputs, ranges[1][:64], prefix)
    third, state = witness(spec, inputs, ranges[2], prefix)
    fourth, last = witness(spec, inputs, ranges[3], state)

    layer = Layer(form, spec)
    layer.step(inputs, walks[:1])
    holds(layer, 0, prefix)
    out = layer.step(inputs, walks[1:3])
    close(out[75:178], second)
    close(out[178:306], third)
    holds(layer, 3, after_block)
    holds(layer, 1, state)
    holds(layer, 4, state)
    holds(layer, 0, prefix)
    assert not out[:75].any()
    out = layer.step(inputs, walks[3:])
    close(out[306:], fourth)
    holds(layer, 6, last)

    for most in (1, 40):
        other = Layer(form, spec)
        other.step(inputs, walks[:1])
        for some in (walks[1:3], walks[3:]):
            for cut, rows in cut_steps(rng, [(walk.row, walk) for walk in some], 100, most):
                found = other.step(taken(inputs, rows), cut)
                for walk in cut:
                    given = rows[walk.row : walk.row + walk.length]
                    if given[0] >= 306:
                        np.testing.assert_array_equal(found[walk.row : walk.row + walk.length], out[given])
        np.testing.assert_array_equal(other.state(6)[0], layer.state(6)[0])


def test_a_part_forks_at_the_end_of_a_block(form):
    """A walk reads the slot of a part whose block has just ended, and goes on from its token."""
    spec = SPEC
    inputs = random_inputs(spec, 140, decay=0.1)
    expected, _ = witness(spec, inputs, range(140), State.empty(spec))
    layer = Layer(form, spec)
    layer.step(inputs, [Walk(0, 127, 0, -1, 0, 0)])
    layer.step(inputs, [Walk(127, 1, 127, 0, 0, 0)])
    out = layer.step(inputs, [Walk(128, 12, 128, 0, 1, 1)])
    close(out[128:], expected[128:])
    own = layer.step(inputs, [Walk(128, 12, 128, 0, 0, 0)])
    np.testing.assert_array_equal(own, out)


def test_a_walk_in_place_reads_its_own_slot(form):
    """A part that begins with the state of its own slot takes the slot's window, not the seat's."""
    spec = SPEC
    inputs = random_inputs(spec, 130, decay=0.1)
    _, prefix = witness(spec, inputs, range(10), State.empty(spec))
    expected, _ = witness(spec, inputs, range(10, 130), prefix)
    layer = Layer(form, spec)
    layer.step(inputs, [Walk(0, 10, 0, -1, -1, -1, 10, 2), Walk(50, 9, 0, -1, 1, 3)])
    out = layer.step(inputs, [Walk(10, 2, 0, 2, 2, 3)])
    close(out[10:12], expected[:2])
    close(layer.step(inputs, [Walk(12, 118, 2, 2, 2, 3)])[12:], expected[2:])


def test_fast_decay_loses_nothing(form):
    """Decays of about -30 a row, and single ones of 0 among them, whose products with all others stay exact."""
    spec = SPEC
    inputs = random_inputs(spec, 190, decay=30.0)
    slow = np.random.default_rng(1).random(inputs.a.shape) < 0.5
    inputs = inputs._replace(a=np.where(slow, np.float32(-60), inputs.a + 3))
    expected, state = witness(spec, inputs, range(190), State.empty(spec))
    layer = Layer(form, spec)
    close(layer.step(inputs, [Walk(0, 190, 0, -1, -1, -1, 190, 0)]), expected)
    holds(layer, 0, state)


@pytest.mark.parametrize("name", ["q", "k", "v", "a", "b"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite(form, name, value):
    """It gets NaN in every head, and the rows behind it go on as if it had neither an input nor a write."""
    spec, bad = SPEC, [70, 71, 130]
    inputs = random_inputs(spec, 150, decay=0.1)
    spoilt = getattr(inputs, name).copy()
    spoilt[bad, 1] = value
    wrong = inputs._replace(**{name: spoilt})
    expected, state = witness(spec, wrong, range(150), State.empty(spec))
    assert np.isnan(expected[bad]).all()
    layer = Layer(form, spec)
    out = layer.step(wrong, [Walk(0, 150, 0, -1, 0, 0, 150, 1)])
    close(out, expected)
    holds(layer, 1, state)
    np.testing.assert_array_equal(out[:70], Layer(form, spec).step(inputs, [Walk(0, 150, 0, -1, 0, 0)])[:70])
    other, cut, most = Layer(form, spec), [], 9
    ends = random_cuts(np.random.default_rng(0), 150, most)
    for first, end in pairwise(ends):
        source, rows = 0 if first else -1, [*range(first, end), *[-1] * (first + most - end)]
        found = other.step(taken(wrong, rows), [Walk(0, end - first, first, source, 0, 0)])
        cut.append(found[: end - first])
    np.testing.assert_array_equal(np.concatenate(cut), out)


def test_softplus_of_large_and_small_inputs(form):
    spec = SPEC
    inputs = random_inputs(spec, 80, decay=0.01)
    a = np.random.default_rng(2).choice(np.float32([-200, -30, 15, 19, 21, 90, 500]), inputs.a.shape)
    inputs = inputs._replace(a=a)
    expected, _ = witness(spec, inputs, range(80), State.empty(spec))
    close(Layer(form, spec).step(inputs, [Walk(0, 80, 0, -1, -1, -1)]), expected)


WRONG = {
    "a row is in two walks": [Walk(0, 5, 0, -1, -1, -1), Walk(4, 2, 0, -1, -1, -1)],
    "rows are out of range": [Walk(95, 6, 0, -1, -1, -1)],
    "rows are out of range ": [Walk(-1, 6, 0, -1, -1, -1)],
    "rows are out of range  ": [Walk(2, 2**31 - 200, 0, -1, -1, -1)],
    "negative number of tokens": [Walk(0, -1, 0, -1, -1, -1)],
    "tokens are out of range": [Walk(0, 1, -64, -1, -1, -1)],
    "tokens are out of range ": [Walk(0, 5, 2**31 - 64, -1, -1, -1)],
    "a slot is out of range": [Walk(0, 1, 0, 8, -1, -1)],
    "a slot is out of range ": [Walk(0, 1, 0, -1, 8, 0)],
    "a slot is out of range  ": [Walk(0, 1, 0, -2, -1, -1)],
    "a slot is out of range   ": [Walk(0, 1, 0, -1, -1, -1, 1, 8)],
    "a seat is out of range": [Walk(0, 1, 0, -1, 0, 6)],
    "a slot without a seat": [Walk(0, 1, 0, -1, 0, -1)],
    "a seat without a slot": [Walk(0, 1, 0, -1, -1, 0)],
    "within a block that it does not continue": [Walk(0, 1, 5, 0, 1, 0)],
    "within a block that it does not continue ": [Walk(0, 1, 5, -1, -1, -1)],
    "a seat is in two walks": [Walk(0, 1, 0, -1, 0, 0), Walk(1, 1, 0, -1, 1, 0)],
    "is written, and used": [Walk(0, 1, 0, -1, 0, 0), Walk(1, 1, 0, 0, 1, 1)],
    "is written, and used ": [Walk(0, 1, 0, 3, 0, 0), Walk(1, 1, 0, -1, -1, -1, 1, 3)],
    "is written, and used  ": [Walk(0, 1, 0, 2, -1, -1, 1, 2)],
    "is written, and used   ": [Walk(0, 1, 0, -1, 2, 0, 1, 2)],
    "is written, and used    ": [Walk(0, 1, 0, 2, 2, 0), Walk(1, 1, 0, 2, 3, 1)],
    "kept neither at the end": [Walk(0, 9, 0, -1, -1, -1, 8, 2)],
    "kept neither at the end ": [Walk(0, 9, 64, 1, -1, -1, 64, 2)],
    "kept neither at the end  ": [Walk(0, 9, 0, -1, -1, -1, 64, 2)],
}


@pytest.mark.skipif(library.refusal() is not None, reason="no native library")
@pytest.mark.parametrize("message", WRONG)
def test_wrong_walks(message):
    layer, inputs = Layer(NativeRecurrence, SPEC), random_inputs(SPEC, 100)
    with pytest.raises(Exception, match=message.strip()):
        jax.block_until_ready(layer.step(inputs, WRONG[message]))


@pytest.mark.skipif(library.refusal() is not None, reason="no native library")
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("q", lambda x: x[:, 1:], "a wrong shape"),
        ("v", lambda x: x[1:], "a wrong shape"),
        ("b", lambda x: x[:, :1], "a wrong shape"),
        ("conv_k", lambda x: x[:, 1:], "a wrong shape"),
        ("dt_bias", lambda x: x[1:], "a wrong shape"),
        ("k", lambda x: jnp.asarray(x, jnp.bfloat16), "inputs of a recurrent layer are float32"),
    ],
)
def test_wrong_arrays(name, change, message):
    layer, inputs = Layer(NativeRecurrence, SPEC), random_inputs(SPEC, 100)
    wrong = inputs._replace(**{name: change(getattr(inputs, name))})
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(layer.step(wrong, [Walk(0, 1, 0, -1, -1, -1)]))


def digest():
    """Return a digest of the bits of a prefill beside decodes."""
    spec = RecurrentSpec(1, 4, 64, 64, 4)
    inputs, layer = random_inputs(spec, 200, decay=0.1), Layer(NativeRecurrence, spec)
    outs = [layer.step(inputs, [Walk(i, 1, 0, -1, i, i) for i in range(3)])]
    outs.append(layer.step(inputs, [Walk(0, 190, 0, -1, 5, 5), *(Walk(191 + i, 1, 1, i, i, i) for i in range(3))]))
    found = hashlib.sha256()
    for x in (*outs, *jax.tree.leaves(layer.cache)):
        found.update(np.asarray(x).tobytes())
    return found.hexdigest()


@pytest.mark.skipif(library.refusal() is not None, reason="no native library")
def test_the_number_of_threads_moves_no_bit():
    code = "from tests.backends.test_recurrence import digest; print(digest())"
    for threads in ("1", "5"):
        environment = {**os.environ, "NPROC": threads}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == digest()
