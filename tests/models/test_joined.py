"""Weights that accelerators hold as one: the platform is feigned, the products are those of a CPU."""

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from chunkattn.config import EngineConfig
from chunkattn.models.adapter_slots import AdapterSlots, RowAdapters, SlotShape
from chunkattn.models.adapters import layer_matrices, read_adapter
from chunkattn.models.joined import joined_name, joined_weights, joins
from chunkattn.models.linear import dot, multiply, multiply_rounded
from chunkattn.models.loader import open_files
from chunkattn.models.locate import DEMO_FOLDER
from chunkattn.models.packed import Packed
from chunkattn.models.packing import Packing
from chunkattn.models.safetensors_folder import SafetensorsFolder
from chunkattn.models.shards import ONE_DEVICE
from chunkattn.models.weights import save_weights
from tests.adapter_files import linears, make_adapter
from tests.checkpoints import Oracle
from tests.fuzz.folders import dense_logits

IDS = np.random.default_rng(3).integers(0, 128, 70)
FAMILIES = ["qwen3", "llama-bias", "phi3", "olmo2", "gemma3-window", "qwen2-moe", "qwen3_5", "qwen3_next"]
"""One weight a tensor, biases, stored fused, norms of whole projections, GELU, a shared expert, hybrids with output gates."""


def files_of(folder, **options):
    return open_files(EngineConfig(model=str(folder), **{"dtype": "float32", "skip_tokenizer_init": True} | options))


@pytest.fixture
def joining(monkeypatch):
    """Loads weights as an accelerator does."""
    monkeypatch.setattr("chunkattn.models.weights.joins", lambda platform: True)


def test_cpus_alone_keep_the_parts():
    assert [joins(platform) for platform in ("cpu", "gpu", "tpu")] == [False, True, True]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_parts(name, joining, checkpoint, oracle):
    decoder = files_of(checkpoint(name)).load()
    whole = joined_weights(decoder.spec)
    assert whole.keys() <= decoder.weights.keys()
    assert not {part for joined in whole.values() for part in joined.parts} & decoder.weights.keys()
    modules = {name.split(".")[-2] for name in whole}
    assert modules == {"qkv_proj", "gate_up_proj"} | ({"in_proj_qkvzba"} if name in ("qwen3_5", "qwen3_next") else set())
    np.testing.assert_allclose(dense_logits(decoder, IDS), oracle(name).logits(IDS), atol=1e-4)


def test_products_are_rounded_once():
    """Both ways, that of CPUs and that of accelerators, round sums to the nearest bfloat16."""
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((9, 64), (32, 64)))
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    for found in (multiply_rounded(x, weight), dot(x, weight, jnp.bfloat16)):
        found = np.asarray(found, np.float64)
        assert (np.abs(found - exact) <= np.abs(exact) * (2**-8 + 1e-6) + 1e-4).all()
        assert (found == np.asarray(jnp.asarray(found, jnp.bfloat16), np.float64)).all()
    half = jnp.asarray(weight, jnp.float16)
    np.testing.assert_array_equal(multiply_rounded(x, half), multiply(x, half))


def divergence(expected, found):
    """Mean Kullback-Leibler divergence of distributions over the vocabulary, from logits `[T, vocab]`."""
    expected, found = (x - np.logaddexp.reduce(x, axis=1, keepdims=True) for x in np.float64((expected, found)))
    return (np.exp(expected) * (expected - found)).sum(axis=1).mean()


def test_rounded_products_cost_no_quality(joining, monkeypatch):
    """The trained demo model in bfloat16, against transformers in float32: rounding adds little to that of weights and rows."""
    text = (Path(__file__).parents[2] / "README.md").read_text()[:1500]
    files = open_files(EngineConfig(model=str(DEMO_FOLDER), dtype="bfloat16"))
    ids = np.asarray(files.tokenizer(text)["input_ids"][:250])
    expected, decoder = Oracle(DEMO_FOLDER).logits(ids), files.load()
    rounded = dense_logits(decoder, ids)
    monkeypatch.setattr("chunkattn.models.decoder.multiply_rounded", multiply)
    exact = dense_logits(decoder, ids)
    assert not np.array_equal(rounded, exact)
    assert divergence(expected, rounded) < 1.25 * divergence(expected, exact)
    assert (rounded.argmax(1) == expected.argmax(1)).mean() > (exact.argmax(1) == expected.argmax(1)).mean() - 0.01


def test_experts_stay_apart(joining, checkpoint):
    """A row's experts are products of groups; the shared expert is one of all rows."""
    weights = files_of(checkpoint("qwen2-moe")).load().weights
    assert {"shared_expert" in name for name in weights if "gate_up_proj" in name} == {True}
    assert any(".experts.gate_proj" in name for name in weights)
    assert not any(".experts.gate_up_proj" in name for name in weights)


def test_parts_follow_one_another(checkpoint, joining):
    decoder, name = files_of(checkpoint("llama-bias")).load(), "model.layers.1.self_attn."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chunkattn.models.weights.joins", joins)
        plain = files_of(checkpoint("llama-bias")).load().weights
    parts = [np.asarray(plain[f"{name}{part}_proj.weight"]) for part in "qkv"]
    np.testing.assert_array_equal(decoder.weights[f"{name}qkv_proj.weight"], np.concatenate(parts))
    assert joined_name([f"{name}{part}_proj" for part in "qkv"]) == f"{name}qkv_proj.weight"


def test_every_tensor_is_read_once(checkpoint, joining, monkeypatch):
    reads, read = [], SafetensorsFolder.read
    monkeypatch.setattr(SafetensorsFolder, "read", lambda self, name, *rest: reads.append(name) or read(self, name, *rest))
    spec = files_of(checkpoint("qwen3")).load().spec
    assert sorted(name for name in reads if name != "model.embed_tokens.weight") == sorted(
        name for name in spec.parameters() if name != "model.embed_tokens.weight"
    )


def test_saved_parts_are_those_of_the_checkpoint(checkpoint, joining, tmp_path):
    source = checkpoint("qwen3_5")
    save_weights(files_of(source).load(), tmp_path)
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chunkattn.models.weights.joins", joins)
        saved, plain = files_of(tmp_path).load().weights, files_of(source).load().weights
    assert saved.keys() == plain.keys()
    for name, weight in plain.items():
        np.testing.assert_array_equal(saved[name], weight, err_msg=name)


@pytest.mark.parametrize("name", ["llama-bias", "phi3", "qwen3_5"])
def test_adapters_change_the_parts(name, checkpoint, oracle, joining, tmp_path):
    """Merged at the load, and by request."""
    ends = ("q_proj", "v_proj", "up_proj", "qkv_proj", "in_proj_z", "in_proj_b")
    witness, own = Oracle.__new__(Oracle), linears(oracle(name).model)
    ends = tuple(end for end in ends if any(module.endswith(f".{end}") for module in own))
    witness.model = make_adapter(tmp_path, oracle(name).model, ends)
    expected = witness.logits(IDS)
    assert np.abs(expected - oracle(name).logits(IDS)).max() > 0.1
    merged = files_of(checkpoint(name), adapter=str(tmp_path)).load()
    assert joined_weights(merged.spec).keys() <= merged.weights.keys()
    np.testing.assert_allclose(dense_logits(merged, IDS), expected, atol=1e-4)
    decoder = files_of(checkpoint(name)).load()
    rank = json.loads((tmp_path / "adapter_config.json").read_text())["r"]
    slots = AdapterSlots(SlotShape(2, rank, layer_matrices(decoder.spec)), jnp.float32, ONE_DEVICE)
    slots.put(1, read_adapter(tmp_path, decoder.spec))
    rows = replace(decoder, adapters=RowAdapters.of(slots.arrays, jnp.full(len(IDS), 1), 2))
    np.testing.assert_allclose(dense_logits(rows, IDS), expected, atol=1e-4)


def test_packed_parts_stay_apart(written, joining):
    """The native library multiplies packed matrices in one call."""
    files = files_of(written("qwen3", Kind.Q8_0).path, dtype="bfloat16")
    decoder = files.load(packing=Packing())
    assert decoder.weights.keys() == decoder.spec.parameters().keys()
    assert all(isinstance(weight, Packed) for name, weight in decoder.weights.items() if name.endswith("_proj.weight"))
    whole = files_of(written("qwen3", Kind.Q8_0).path).load()
    assert not any(isinstance(weight, Packed) for weight in whole.weights.values())
    assert joined_weights(whole.spec).keys() <= whole.weights.keys()
    witness = Oracle.__new__(Oracle)
    witness.model = written("qwen3", Kind.Q8_0).model
    np.testing.assert_allclose(dense_logits(whole, IDS), witness.logits(IDS), atol=1e-4)
