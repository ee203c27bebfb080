"""Labels that are read from hidden states without keeping logits, against the whole logits in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkattn.backends.cpu import label_readout, linear

pytestmark = pytest.mark.skipif(not linear.any_rows(), reason="no AMX, on whose tiles alone rows are read at once")
read_labels = jax.jit(label_readout.read_labels)


def numbers(rng, rows, columns, scale=1.0):
    return jnp.asarray(scale * rng.standard_normal((rows, columns)), jnp.bfloat16)


@pytest.mark.parametrize(
    ("rows", "depth", "vocab", "width"),
    [(1, 1, 1, 1), (16, 64, 31, 2), (17, 96, 1024, 8), (300, 100, 2085, 2), (70, 4160, 1057, 256), (513, 48, 3000, 3)],
)
def test_labels_and_normalisers_are_those_of_the_logits(rows, depth, vocab, width):
    rng = np.random.default_rng(rows)
    hidden, head = numbers(rng, rows, depth), numbers(rng, vocab, depth, 8 / depth)
    labels = rng.integers(0, vocab, (rows, width)).astype(np.int32)
    labels[:, 0] = vocab - 1
    logits = np.float64(hidden) @ np.float64(head).T
    found, both = map(np.asarray, read_labels(hidden, head, labels))
    np.testing.assert_allclose(found, np.take_along_axis(logits, labels, 1), rtol=1e-5, atol=1e-4)
    same = np.asarray(jax.jit(linear.multiply)(hidden, head))  # longer lists take their logits from the product
    np.testing.assert_array_equal(found, np.take_along_axis(same, labels, 1))
    most = logits.max(-1)
    np.testing.assert_allclose(both[:, 0], most, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(both.sum(-1), most + np.log(np.exp(logits - most[:, None]).sum(-1)), rtol=1e-5, atol=1e-4)
    for some in ([rows - 1], [0], rng.permutation(rows)[: rows // 2 + 1], range(rows // 3, rows)):
        for part, whole in zip(read_labels(hidden[np.asarray(some)], head, labels[np.asarray(some)]), (found, both)):
            np.testing.assert_array_equal(part, whole[np.asarray(some)])


def test_padding_is_not_computed_and_unknown_ids_have_no_logit():
    rng = np.random.default_rng(0)
    hidden, head = numbers(rng, 40, 64), numbers(rng, 90, 64)
    labels = rng.integers(0, 90, (40, 2)).astype(np.int32)
    whole = read_labels(hidden, head, labels)
    labels[3, 0], labels[4, 1], labels[5], labels[20:] = 90, -1, -1, -1
    found, both = map(np.asarray, read_labels(hidden, head, labels))
    known = (labels >= 0) & (labels < 90)
    np.testing.assert_array_equal(found[known], np.asarray(whole[0])[known])
    assert np.isnan(found[~known]).all()
    np.testing.assert_array_equal(both[:20], whole[1][:20])
    assert np.isnan(both[20:]).all()
    assert np.isnan(read_labels(hidden, head, np.full_like(labels, -1))[1]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_marked_and_leaves_others_alone(bad):
    rng = np.random.default_rng(1)
    hidden, head = np.array(numbers(rng, 50, 64)), numbers(rng, 1500, 64)
    labels = np.zeros((50, 2), np.int32)
    whole = read_labels(hidden, head, labels)
    hidden[33, 5] = bad
    for found, before in zip(read_labels(hidden, head, labels), whole):
        np.testing.assert_array_equal(np.delete(found, 33, 0), np.delete(before, 33, 0))
    assert np.isnan(read_labels(hidden, head, labels)[1][33]).all()
    weight = np.array(head)
    weight[1400, 7] = bad
    assert np.isnan(read_labels(np.array(numbers(rng, 2, 64)), weight, labels[:2])[1]).all()


def test_extreme_logits_have_normalisers():
    hidden = np.zeros((5, 32), jnp.bfloat16)
    hidden[:, 0] = [1, -1, 1e30, -1e30, 1e-30]
    head = np.zeros((2100, 32), jnp.bfloat16)
    head[:, 0] = np.linspace(-300, 300, 2100)
    _, both = map(np.asarray, read_labels(hidden, head, np.zeros((5, 1), np.int32)))
    logits = np.float64(hidden) @ np.float64(head).T
    np.testing.assert_array_equal(both[:, 0], np.float32(logits.max(-1)))
    expected = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1))
    np.testing.assert_allclose(both[:, 1], expected, atol=1e-5)
