"""Mixtures of experts: against a definition, the bits of a row in any company, and loading."""

import json
import math
import shutil
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from chunkattn.backends.cpu import library
from chunkattn.config import EngineConfig
from chunkattn.engine.invariance import rows_agree
from chunkattn.engine.plan import CHIPS, plan
from chunkattn.errors import ModelError
from chunkattn.models import experts
from chunkattn.models.experts import mix, route
from chunkattn.models.linear import multiply
from chunkattn.models.loader import open_files
from chunkattn.models.packed import Packed
from chunkattn.models.spec import Experts
from chunkattn.models.weights import save_weights
from tests.checkpoints import CHECKPOINTS, make_checkpoint
from tests.fuzz import routers
from tests.fuzz.folders import dense_logits

HIDDEN, INNER = 64, 96
IDS = np.random.default_rng(5).integers(0, 128, 60)


def layer(rng, experts, dtype):
    shapes = (experts, HIDDEN), (experts, INNER, HIDDEN), (experts, INNER, HIDDEN), (experts, HIDDEN, INNER)
    return [jnp.asarray(rng.standard_normal(shape) / shape[-1] ** 0.5, dtype) for shape in shapes]


def run(x, weights, spec):
    router, *rest = weights
    chosen, factors = route(multiply(jnp.asarray(x, jnp.float32), router), spec)
    return mix(jnp.asarray(x), chosen, factors, *rest, spec, router.dtype)


@pytest.mark.parametrize(
    "spec", [Experts(7, 3, INNER), Experts(7, 3, INNER, is_normalised=False), Experts(7, 1, INNER)], ids=str
)
@pytest.mark.parametrize("rows", [1, 50])
def test_definition(rows, spec):
    rng = np.random.default_rng(rows)
    weights, x = layer(rng, 7, jnp.float32), rng.standard_normal((rows, HIDDEN)).astype(np.float32)
    found = np.asarray(jax.jit(lambda x: run(x, weights, spec))(x))
    router, gate, up, down = (np.asarray(w, np.float64) for w in weights)
    for row, value in zip(x.astype(np.float64), found, strict=True):
        logits = router @ row
        scores = np.exp(logits) / np.exp(logits).sum()
        best = np.argsort(-scores)[: spec.used]
        factors = scores[best] / (scores[best].sum() if spec.is_normalised else 1)
        inner = [gate[e] @ row for e in best]
        expected = sum(
            f * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ row))) for f, e, g in zip(factors, best, inner, strict=True)
        )
        np.testing.assert_allclose(value, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_has_the_same_bits_in_any_company(dtype):
    rng, spec = np.random.default_rng(0), Experts(16, 4, INNER)
    weights, x = layer(rng, 16, dtype), rng.standard_normal((300, HIDDEN)).astype(np.float32)
    compute = jax.jit(lambda x: run(x, weights, spec))
    whole = np.asarray(compute(x))
    for rows in (1, 7, 16, 33):
        for first in (0, 150):
            np.testing.assert_array_equal(np.asarray(compute(x[first : first + rows])), whole[first : first + rows])
    crowded = np.concatenate([x[:5], np.repeat(x[5:6], 200, axis=0)])  # some experts get nearly all rows
    np.testing.assert_array_equal(np.asarray(compute(crowded))[:5], whole[:5])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_without_experts(dtype):
    """They add nothing, and change no bit of the others."""
    rng, spec = np.random.default_rng(0), Experts(6, 2, INNER)
    weights, x = layer(rng, 6, dtype), jnp.asarray(rng.standard_normal((20, HIDDEN)), dtype)
    chosen, factors = route(multiply(x, weights[0]), spec)
    compute = jax.jit(lambda chosen: mix(x, chosen, factors, *weights[1:], spec, weights[0].dtype))
    whole, some = compute(chosen), compute(chosen.at[3:11].set(6))
    np.testing.assert_array_equal(some[3:11], 0)
    np.testing.assert_array_equal(np.delete(some, np.s_[3:11], axis=0), np.delete(whole, np.s_[3:11], axis=0))


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.ci), "bfloat16"])
def test_the_self_test_of_bits_has_experts(dtype, monkeypatch):
    packed = () if library.refusal() else (("Q4_K", 2), ("Q8_0", 2))
    original = experts.multiply_groups
    assert rows_agree(jnp.dtype(dtype), 64, 100, packed, INNER)

    def plant(is_wrong):
        def wrong(x, rows, sizes, weights, *args):
            follows = 1 + 2.0**-20 * (sizes.max() > 100)  # the last digits follow the size of a group
            products = original(x, rows, sizes, weights, *args)
            return [y * follows if is_wrong(w) else y for y, w in zip(products, weights, strict=True)]

        monkeypatch.setattr(experts, "multiply_groups", wrong)
        rows_agree.cache_clear()

    for kind in (INNER, *(form for form, _ in packed[1:])):
        plant(lambda weight, kind=kind: kind == (weight.format if isinstance(weight, Packed) else weight.shape[2]))
        assert not rows_agree(jnp.dtype(dtype), 64, 100, packed, INNER)
    rows_agree.cache_clear()


@pytest.mark.parametrize("inputs_first", [False, True])
@pytest.mark.parametrize("form", [experts._tiled, experts._batched, experts._ragged])
@pytest.mark.parametrize("sizes", [[2, 0, 3], [0, 1, 0], [40, 0, 17, 130, 1, 0, 16]], ids=str)
def test_forms_of_each_platform(form, sizes, inputs_first):
    """CPUs, GPUs and TPUs; some pairs have no group."""
    rng, groups = np.random.default_rng(2), len(sizes)
    x, weight = rng.standard_normal((9, 24), np.float32), rng.standard_normal((groups, 20, 24), np.float32)
    rows, group = rng.integers(0, 9, sum(sizes) + 4).astype(np.int32), np.repeat(np.arange(groups), sizes)
    stored = jnp.asarray(weight.swapaxes(1, 2) if inputs_first else weight)
    compute = jax.jit(partial(form, inputs_first=inputs_first))
    (found,) = compute(jnp.asarray(x), jnp.asarray(rows), jnp.asarray(sizes, jnp.int32), stored)
    expected = np.einsum("pd,pod->po", x[rows[: len(group)]], weight[group])
    np.testing.assert_allclose(found[: len(group)], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 16, 32, 2048])
@pytest.mark.parametrize(("count", "used"), [(60, 4), (128, 8)])
def test_gpus_multiply_tiles_in_products_of_one_size(rows, count, used):
    """A remainder would be a product of another size, and which tiles fall into it follows the company of a row."""
    shapes = ((rows, 24), jnp.bfloat16), ((rows * used,), jnp.int32), ((count,), jnp.int32), ((count, 20, 24), jnp.bfloat16)
    program = jax.jit(partial(experts._batched, inputs_first=False)).lower(*(jax.ShapeDtypeStruct(*of) for of in shapes))
    assert program.as_text().count("stablehlo.dot_general") == 1


# Loading


def loads(folder, **options):
    return open_files(EngineConfig(model=str(folder), skip_tokenizer_init=True, **options)).load()


@pytest.fixture
def broken(checkpoint, tmp_path):
    """A copy of a checkpoint to break, in one file."""
    config = CHECKPOINTS["qwen3-moe"]
    return make_checkpoint(config, tmp_path / "model", max_shard_size="1GB")


def rename(folder, change):
    """Replace the tensors of a folder of one file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def stack(tensors):
    """Store the experts of each layer as transformers holds them."""
    for index in (0, 2):
        name = f"model.layers.{index}.mlp.experts."
        gate, up, down = (
            np.stack([tensors.pop(f"{name}{e}.{part}_proj.weight") for e in range(7)]) for part in ("gate", "up", "down")
        )
        tensors[f"{name}gate_up_proj"], tensors[f"{name}down_proj"] = np.concatenate([gate, up], axis=1), down


def test_both_ways_of_storing_experts(broken, oracle):
    expected = oracle("qwen3-moe").logits(IDS)
    assert "model.layers.2.mlp.experts.6.up_proj.weight" in load_file(broken / "model.safetensors")
    np.testing.assert_allclose(dense_logits(loads(broken), IDS), expected, atol=1e-4)
    rename(broken, stack)
    np.testing.assert_allclose(dense_logits(loads(broken), IDS), expected, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen2-moe", "qwen3-moe-raw"])
def test_other_mixtures(name, checkpoint, oracle):
    """A shared expert with a gate; factors that do not add up to one, in every second layer."""
    np.testing.assert_allclose(dense_logits(loads(checkpoint(name)), IDS), oracle(name).logits(IDS), atol=1e-4)


def test_an_expert_swapped(broken, oracle):
    """The oracle tells one expert from another."""

    def swap(tensors):
        names = [f"model.layers.0.mlp.experts.{e}.down_proj.weight" for e in (2, 5)]
        tensors.update(zip(names, [tensors[name] for name in reversed(names)], strict=True))

    rename(broken, swap)
    assert np.abs(dense_logits(loads(broken), IDS) - oracle("qwen3-moe").logits(IDS)).max() > 0.01


def test_a_witness_takes_over_experts(checkpoint, oracle, monkeypatch):
    """Its logits are those of a pass that takes another expert, and tell how far the expert was from being chosen."""

    def second_best(logits, spec):
        chosen, factors = route(logits, replace(spec, used=spec.used + 1))
        return chosen[:, :-1].at[5, -1].set(chosen[5, -1]), factors

    monkeypatch.setattr(routers, "route", second_best)
    witness = oracle("qwen3-moe")
    with routers.Routing().recorded() as routing:
        found = dense_logits(loads(checkpoint("qwen3-moe")), IDS)
    assert np.abs(found - witness.logits(IDS)).max() > 0.01
    with routing.forced(witness.model):
        np.testing.assert_allclose(found, witness.logits(IDS), atol=1e-4)
    assert (routing.choices, routing.ties) == (2 * len(IDS), 2)
    assert routing.largest > 1e-3


def test_saved_weights_are_those_of_transformers(checkpoint, tmp_path):
    folder = checkpoint("qwen3-moe")
    shutil.copy(folder / "config.json", tmp_path)
    save_weights(loads(folder), tmp_path)
    saved, given = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict() for path in (tmp_path, folder))
    assert saved.keys() == given.keys()
    assert all(torch.equal(saved[name], value) for name, value in given.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.2.mlp.experts.3.up_proj.weight"), "7; expert 3 is missing"),
        (lambda t: t.pop("model.layers.0.mlp.gate.weight"), "'model.layers.0.mlp.gate.weight' .* is missing"),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.3.up_proj.weight": np.zeros((7, 64), np.float32)}),
            "of two experts differ in shape",
        ),
        (
            lambda t: (stack(t), t.update({"model.layers.0.mlp.experts.gate_up_proj": np.zeros((7, 60, 64), np.float32)})),
            r"has shape \[7, 60, 64\], the configuration says 64 rows",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.3.up_proj.weight": np.full((32, 64), np.nan, np.float32)}),
            "holds NaN or infinite values",
        ),
        (
            lambda t: (stack(t), t.update({"model.layers.0.mlp.experts.3.down_proj.weight": np.zeros((64, 32), np.float32)})),
            r"experts.down_proj' and '.*experts.3.down_proj.weight' stand for the same parameter; drop one",
        ),
    ],
)
def test_broken_tensors(broken, change, message):
    rename(broken, change)
    with pytest.raises(ModelError, match=message):
        loads(broken)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": 9}, "has 7 experts, the configuration says 9; expert 7 is missing"),
        ({"num_local_experts": 0}, "num_experts must be a positive integer, got 0"),
        ({"num_experts_per_tok": 8}, "num_experts_per_tok 8 is more than num_experts 7"),
        ({"moe_intermediate_size": 33}, "has shape"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer"),
        ({"mlp_only_layers": [3]}, "mlp_only_layers must be a list of layers below 3"),
        ({"mlp_only_layers": []}, "'model.layers.1.mlp.experts.down_proj.weight' and 3 more .* is missing"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act 'gelu_pytorch_tanh' is not supported by experts"),
    ],
    ids=str,
)
def test_wrong_configurations(broken, changes, message):
    file = broken / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ModelError, match=message):
        loads(broken)


def test_a_plan_divides_experts(checkpoint):
    spec = open_files(EngineConfig(model=str(checkpoint("qwen3-moe")), skip_tokenizer_init=True)).spec
    total = sum(math.prod(shape) for shape in spec.parameters().values())
    one, two = (plan(EngineConfig(), spec, jnp.dtype("bfloat16"), CHIPS["v6e"], size) for size in (1, 2))
    assert one.weight_bytes == 2 * total
    assert 0.5 * one.weight_bytes < two.weight_bytes < 0.51 * one.weight_bytes


def test_the_operations_of_a_row_are_those_of_its_experts(checkpoint):
    spec = loads(checkpoint("qwen3-moe")).spec
    attention, expert, dense = 64 * (128 + 64 + 64 + 128), 3 * 64 * 32, 3 * 64 * 96
    assert [each.row_products(64) for each in spec.layers] == [
        attention + 7 * 64 + 3 * expert,
        attention + dense,
        attention + 7 * 64 + 3 * expert,
    ]
    experts = replace(spec.layers[0].experts, shared=replace(spec.layers[1].feed_forward, size=48))
    shared = replace(spec.layers[0], experts=experts)
    assert shared.row_products(64) == attention + 7 * 64 + 3 * expert + 3 * 64 * 48
