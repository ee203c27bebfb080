"""The option `batch_invariant`, the test of the machine behind it, and products and norms bit by bit."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkattn import LLM
from chunkattn.backends import AttentionSpec, get_backend, make_backend, registry
from chunkattn.backends.cpu import label_readout, library
from chunkattn.backends.cpu import linear as native
from chunkattn.backends.cpu.normaliser import normaliser
from chunkattn.engine import invariance
from chunkattn.engine.invariance import Invariance, rows_agree
from chunkattn.engine.sampling import READ_BUCKETS, normalised
from chunkattn.errors import ConfigError
from chunkattn.models.linear import dot, multiply, rms_norm, sums
from tests.cpu_kernels import use
from tests.tiled_backend import OwnSequences

SPEC = AttentionSpec(4, 2, 32, jnp.dtype("float32"), 16)


@pytest.mark.skipif(library.refusal() is not None, reason="no native library")
@pytest.mark.parametrize(("depth", "outputs"), [(1024, 300), (96, 43), (3072, 96), (8192 + 32, 65), (32, 9600)])
def test_few_rows_have_the_bits_of_many(kernel, depth, outputs):
    rng = np.random.default_rng(depth)
    weight = jnp.asarray(0.02 * rng.standard_normal((outputs, depth)), jnp.bfloat16)
    x = jnp.asarray(rng.standard_normal((600, depth)), jnp.bfloat16)
    order, few = native.order(), range(1, native.MAX_ROWS + 1)
    if native.any_rows():
        multiply, others = jax.jit(native.multiply), (*few, 17, 31, 33, 161, 257, 599)
        expected = np.asarray(multiply(x, weight))
    elif use("amx") is None:  # XLA multiplies on tiles here, in whose order these kernels cannot add up
        use(kernel)
        order = native.Order(ascending=False, block=2048)
        multiply, others = jax.jit(partial(native._native, by=order)), few
        expected = np.asarray(multiply(x[: few[-1]], weight))
    else:
        assert order is not None, "XLA adds up products of this machine in an order that no kernel has"
        multiply, others = jax.jit(native.multiply), few
        expected = np.asarray(jax.jit(dot)(x, weight))
    np.testing.assert_allclose(expected, (np.float64(x) @ np.float64(weight).T)[: len(expected)], atol=1e-4)
    for rows in others:
        np.testing.assert_array_equal(multiply(x[:rows], weight), expected[:rows])


@pytest.mark.skipif(library.refusal() is not None, reason="no native library")
@pytest.mark.parametrize("vocab", [1, 15, 1000, 151_936])
def test_normalisers_of_few_rows_have_the_bits_of_many(kernel, vocab):
    rng = np.random.default_rng(vocab)
    logits = (10 * rng.standard_normal((70, vocab))).astype(np.float32)
    logits[0], logits[1, :-1], logits[2] = 90, -3e38, np.float32(1e38) * np.linspace(-1, 1, vocab)
    whole = np.asarray(jax.jit(normaliser)(logits))
    exact = logits.astype(np.float64)
    np.testing.assert_array_equal(whole[:, 0], logits.max(-1))
    np.testing.assert_allclose(whole[:, 1], np.log(np.exp(exact - exact.max(-1, keepdims=True)).sum(-1)), rtol=1e-6, atol=1e-6)
    for rows in (1, 2, 16, 69):
        np.testing.assert_array_equal(jax.jit(normaliser)(logits[-rows:]), whole[-rows:])
    for bad in (np.nan, np.inf, -np.inf):
        logits[40, rng.integers(vocab)] = bad
        found = np.asarray(jax.jit(normaliser)(logits))
        assert not np.isfinite(found[40]).any()
        np.testing.assert_array_equal(np.delete(found, 40, 0), np.delete(whole, 40, 0))


@pytest.mark.skipif(library.refusal() is not None or native.any_rows(), reason="no kernel that multiplies few rows alone")
def test_deep_products_of_few_outputs_are_left_to_xla():
    x, found = jnp.zeros((2, 8192 + 32), jnp.bfloat16), native.order()
    blocks = found.block < x.shape[1]
    assert native.serves(x, jnp.zeros((64, x.shape[1]), jnp.bfloat16))
    assert native.serves(x, jnp.zeros((63, x.shape[1]), jnp.bfloat16)) == (not blocks)


def test_another_order_is_noticed(monkeypatch):
    """Where XLA adds up in an order that the operator does not have, XLA computes few rows, too; AMX tiles compute all."""
    monkeypatch.setattr(native, "any_rows", lambda: False)
    native.order.cache_clear()
    x, weight = jnp.zeros((2, 64), jnp.bfloat16), jnp.zeros((32, 64), jnp.bfloat16)
    assert native.serves(x, weight) == (library.refusal() is None)
    native.order.cache_clear()
    monkeypatch.setattr(native, "_xla", lambda x, weight: dot(x[:, ::-1], weight[:, ::-1]))
    try:
        assert native.order() is None
        assert not native.serves(x, weight)
    finally:
        native.order.cache_clear()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("depth", "outputs"), [(64, 1), (64, 3), (1024, 2), (1024, 96), (4096, 17)])
def test_products_and_sums_have_one_order(dtype, depth, outputs):
    rng = np.random.default_rng(depth + outputs)
    weight, x = (jnp.asarray(rng.standard_normal((n, depth)), dtype) for n in (outputs, 300))
    compute = jax.jit(lambda x: (multiply(x, weight), sums(x.astype(jnp.float32))))
    for whole, *some in zip(compute(x), *(compute(x[:rows]) for rows in (1, 2, 3, 4, 9, 64))):
        for part in some:
            np.testing.assert_array_equal(part, whole[: len(part)])
    np.testing.assert_allclose(compute(x)[0], np.float32(x) @ np.float32(weight).T, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(compute(x)[1][:, 0], np.float32(x).sum(-1, dtype=np.float64), rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(not native.any_rows(), reason="no AMX, whose tiles alone compute any depth")
@pytest.mark.parametrize(("depth", "outputs"), [(1, 1), (48, 3), (1040, 40), (2100, 70)])
def test_any_depth_has_one_order(depth, outputs):
    rng = np.random.default_rng(depth)
    weight, x = (jnp.asarray(rng.standard_normal((n, depth)), jnp.bfloat16) for n in (outputs, 300))
    whole = np.asarray(jax.jit(multiply)(x, weight))
    np.testing.assert_allclose(whole, np.float64(x) @ np.float64(weight).T, rtol=1e-3, atol=1e-3)
    for rows in (1, 2, 9, 31, 64, 299):
        np.testing.assert_array_equal(jax.jit(multiply)(x[:rows], weight), whole[:rows])


def test_norms_have_one_order():
    norm, rng = partial(rms_norm, scale=jnp.ones(128, jnp.bfloat16), epsilon=1e-6), np.random.default_rng(0)
    x = rng.standard_normal((40, 3, 128)).astype(np.float32)
    whole = jax.jit(norm)(x)
    np.testing.assert_allclose(whole, x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6), rtol=1e-5)
    for rows in (1, 2, 7):
        np.testing.assert_array_equal(jax.jit(norm)(x[:rows]), whole[:rows])


def test_what_the_option_comes_to(demo, monkeypatch, caplog):
    cpu, other = make_backend("auto", SPEC), get_backend("packed_dense")(SPEC)

    def of(wanted, backend=cpu):
        return Invariance.of(wanted, backend, demo.core.runner.spec, SPEC.dtype)

    assert of(None) == of(True) == Invariance(True, one_size=False)
    assert of(False) == of(None, other) == Invariance(False, one_size=False)
    with pytest.raises(ConfigError, match="the attention backend 'packed_dense' adds up a row"):
        of(True, other)
    tiled = get_backend("pallas_tpu")(dataclasses.replace(SPEC, head_dim=128))
    assert of(True, tiled) == Invariance(True, one_size=True, own_pages=True)
    assert of(None, tiled) == Invariance(False, one_size=False)
    assert not caplog.records
    monkeypatch.setattr(invariance, "rows_agree", lambda *_: False)
    assert of(None) == Invariance(False, one_size=False)
    assert "batch_invariant=True pads all steps" in caplog.text
    assert of(True) == Invariance(True, one_size=True)


def _few_sums(x):
    """Few rows are added up in another order."""
    return x[:, ::-1].sum(-1, keepdims=True) if len(x) < 9 else sums(x)


def _sampled(some, logits):
    """More rows than are ever read together have other last digits than the rows that are."""
    values, finite = normalised(some, logits)
    return values * (1 + 2**-20 * (len(logits) > READ_BUCKETS[-1])), finite


@pytest.mark.parametrize("depth", [64, 700])
@pytest.mark.parametrize(("name", "fault"), [("sums", _few_sums), ("normalised", _sampled)])
def test_rows_that_disagree_are_noticed(monkeypatch, name, fault, depth):
    rows_agree.cache_clear()
    assert rows_agree(jnp.dtype("float32"), depth, 300)
    monkeypatch.setattr(invariance, name, fault)
    rows_agree.cache_clear()
    try:
        assert not rows_agree(jnp.dtype("float32"), depth, 300)
    finally:
        rows_agree.cache_clear()


@pytest.mark.skipif(not native.any_rows(), reason="no AMX, on whose tiles alone labels are read without logits")
def test_label_readouts_that_disagree_are_noticed(monkeypatch):
    def fault(hidden, head, labels):
        logits, normalisers = read_labels(hidden, head, labels)
        return logits, normalisers * (1 + 2**-20 * (len(hidden) < 9))

    rows_agree.cache_clear()
    assert rows_agree(jnp.dtype("bfloat16"), 64, 300)
    read_labels = label_readout.read_labels
    monkeypatch.setattr(label_readout, "read_labels", fault)
    rows_agree.cache_clear()
    try:
        assert not rows_agree(jnp.dtype("bfloat16"), 64, 300)
    finally:
        rows_agree.cache_clear()


@pytest.mark.ci
@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-4), ("bfloat16", 0.05)])
def test_steps_of_one_size(checkpoint, monkeypatch, dtype, error):
    """On a machine whose products depend on the number of rows, True pads every step and every block of rows read."""
    monkeypatch.setattr(invariance, "rows_agree", lambda *_: False)
    options = {"skip_tokenizer_init": True, "max_num_batched_tokens": 48, "max_num_seqs": 4, "kv_cache_memory_bytes": 4 << 20}
    options["dtype"] = dtype
    llm = LLM(str(checkpoint("qwen3")), batch_invariant=True, **options)
    assert llm.core.scheduler.sizes.buckets == (48,)
    forward, sizes = llm.core.runner.forward, set()
    monkeypatch.setattr(llm.core.runner, "forward", lambda batch: sizes.add(len(batch.token_ids)) or forward(batch))
    found = llm.score([1, 2, 3], [[4], [5, 6]], label_token_ids=[7], use_tqdm=False)
    free = LLM(str(checkpoint("qwen3")), **options)
    expected = free.score([1, 2, 3], [[4], [5, 6]], label_token_ids=[7], use_tqdm=False)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=error)
    assert len(llm.generate([{"prompt_token_ids": [1, 2]}], use_tqdm=False)[0].outputs[0].token_ids) > 0
    assert sizes == {48}
    assert llm.core.runner.picked_sizes == READ_BUCKETS[-1:]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral-window", "qwen3"])
def test_own_sequences_change_no_score(checkpoint, monkeypatch, name):
    monkeypatch.setitem(registry._REGISTERED, "own", OwnSequences)
    monkeypatch.setattr(OwnSequences, "name", "own")
    options = {"skip_tokenizer_init": True, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 4 << 20}
    rng, found = np.random.default_rng(0), []
    query, items = rng.integers(2, 90, 37).tolist(), [rng.integers(2, 90, n).tolist() for n in (12, 1, 30)]
    for invariant in (True, False):
        llm = LLM(str(checkpoint(name)), attention_backend="own", batch_invariant=invariant, **options)
        found.append(llm.score(query, items, label_token_ids=[7, 8], use_tqdm=False).logprobs)
    np.testing.assert_allclose(*found, atol=1e-4)
