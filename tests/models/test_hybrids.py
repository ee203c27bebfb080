"""Models of attention and recurrent layers: logits against transformers in float64, their files, and their parts on devices."""

import copy
import json
import shutil
from dataclasses import replace

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file, save_file

from chunkattn.backends.cpu import library
from chunkattn.backends.recurrence import RecurrentSpec
from chunkattn.config import EngineConfig
from chunkattn.errors import ConfigError, ModelError
from chunkattn.models.adapter_slots import AdapterSlots, RowAdapters, SlotShape
from chunkattn.models.adapters import layer_matrices, read_adapter
from chunkattn.models.decoder import random_decoder
from chunkattn.models.loader import open_files
from chunkattn.models.mixers import Attention, GatedDeltaNet
from chunkattn.models.packed import Packed
from chunkattn.models.packing import Packing
from chunkattn.models.shards import KV_HEADS, ONE_DEVICE, Shards
from chunkattn.models.weights import load_weights, save_weights
from tests.adapter_files import linears, make_adapter
from tests.checkpoints import HYBRID, Oracle
from tests.delta_rule import in_float64
from tests.fuzz.folders import dense_logits

IDS = np.random.default_rng(3).integers(0, 128, 200)
SOME = IDS[:65]
COUNTS = (1, len(SOME), len(IDS))
"""Tokens of prompts. Each number of tokens has programs of its own."""
TEXT = "qwen3_5", "qwen3_5_moe", "qwen3_next"
DELTA_NET = GatedDeltaNet(2, 6, 16, 32, 4)


def files_of(folder, **options):
    return open_files(EngineConfig(model=str(folder), **{"dtype": "float32", "skip_tokenizer_init": True, **options}))


@torch.no_grad()
def exact_logits(model, ids):
    with in_float64(copy.deepcopy(model)) as double:
        return double(torch.as_tensor(ids)[None], use_cache=False).logits[0].numpy()


@pytest.fixture(scope="module")
def exact(oracle):
    """Logits of transformers in float64 for the tokens of `IDS`, each after those before it."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = exact_logits(oracle(name).model, IDS)
        return made[name]

    return get


@pytest.fixture
def copied(checkpoint, tmp_path):
    """A copy of a named checkpoint to change."""
    return lambda name: shutil.copytree(checkpoint(name), tmp_path / name)


def edit(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def rename(folder, change, **added):
    """Change the names of a folder's tensors, and add tensors to its first file."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        tensors = {change(name): tensor for name, tensor in load_file(file).items()}
        save_file(tensors | (added if file == files[0] else {}), file, metadata={"format": "pt"})
    places = {change(name): place for name, place in index["weight_map"].items()}
    index["weight_map"] = places | dict.fromkeys(added, files[0].name)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


# Logits


@pytest.mark.parametrize("name", HYBRID)
def test_plain_prompts_have_the_logits_of_transformers(name, checkpoint, oracle, exact):
    decoder, expected = files_of(checkpoint(name)).load(), exact(name)
    assert expected.dtype == np.float64
    assert np.std(expected) > 0.1
    ours, theirs = [], []
    for count in COUNTS:
        ours.append(dense_logits(decoder, IDS[:count]) - expected[:count])
        theirs.append(oracle(name).logits(IDS[:count]) - expected[:count])
    assert max(np.abs(x).max() for x in ours) < 2 * max(np.abs(x).max() for x in theirs) < 1e-4
    for own, other in zip(ours[1:], theirs[1:], strict=True):
        assert np.sqrt(np.mean(own**2)) < 2 * np.sqrt(np.mean(other**2))


@pytest.mark.parametrize(
    "change",
    [
        {"norm_offset": 0.0},
        {"interleaved": ()},
        {"taps": slice(None, None, -1)},
        {"A_log": 0.2},
        {"dt_bias": 0.2},
        {"linear_attn.norm.weight": 0.2},
    ],
    ids=str,
)
def test_a_wrong_setting_shows(change, checkpoint, exact):
    """The checkpoint's parameters have no trivial values, and some heads remember more than a hundred tokens."""
    folder = checkpoint("qwen3_next")
    files = files_of(folder)
    ((name, value),) = change.items()
    if name in ("norm_offset", "interleaved"):
        decoder = load_weights(replace(files.spec, **change), folder, jnp.dtype("float32"))
    else:
        decoder = files.load()
        for key, weight in decoder.weights.items():
            if name == "taps" and ".conv_" in key:
                decoder.weights[key] = weight[:, value]
            elif key.endswith(name):
                decoder.weights[key] = weight + value
    assert np.abs(dense_logits(decoder, IDS) - exact("qwen3_next"))[1:].max() > 0.05


def test_a_prompt_shows_what_a_head_remembers(checkpoint, oracle):
    """Another first token moves the logits of the two-hundredth through a model without attention between them."""
    decoder = files_of(checkpoint("qwen3_5")).load()
    spec = replace(decoder.spec, layers=decoder.spec.layers[:1])
    decoder = replace(decoder, spec=spec)
    one, other = (dense_logits(decoder, [first, *IDS[1:]])[-1] for first in (3, 4))
    assert np.abs(one - other).max() > 1e-4


# Shapes


def test_the_shape_of_a_hybrid(checkpoint):
    spec = files_of(checkpoint("qwen3_5")).spec
    assert (spec.attention_layers, spec.recurrent_layers, spec.windows) == ((1,), (0, 2), (None,))
    assert spec.recurrent == DELTA_NET
    assert spec.heads == (4, 2, 32)
    assert spec.recurrent.recurrence() == RecurrentSpec(2, 6, 16, 32, 4)
    assert spec.recurrent.recurrence(2) == RecurrentSpec(1, 3, 16, 32, 4)
    mixer = spec.layers[1].mixer
    assert isinstance(mixer, Attention)
    assert mixer.output_gate
    assert len(mixer.rotary.inv_freq) == 8


def test_a_shape_without_attention_and_one_of_two_kinds_of_recurrent_layers(checkpoint):
    spec = files_of(checkpoint("qwen3_5")).spec
    bare = spec.map(lambda layer: replace(layer, mixer=DELTA_NET))
    assert (bare.attention_layers, bare.windows, bare.heads) == ((), (), (6, 2, 16))
    assert Shards.absent(2, bare).size == 2
    with pytest.raises(ConfigError, match="2 key heads of the recurrent layers cannot be divided by"):
        Shards.absent(4, bare)
    mixed = replace(spec, layers=(spec.layers[0], replace(spec.layers[0], mixer=DELTA_NET._replace(taps=3))))
    with pytest.raises(ModelError, match="recurrent layers of different sizes are not supported"):
        _ = mixed.recurrent


def test_a_random_model_has_states_that_decay_slowly(checkpoint):
    spec = files_of(checkpoint("qwen3_5")).spec
    decoder = random_decoder(spec, jnp.dtype("bfloat16"))
    small = {name: decoder.weights[f"model.layers.0.linear_attn.{name}"] for name in ("A_log", "dt_bias")}
    assert {array.dtype.name for array in small.values()} == {"float32"}
    decays = np.exp(-np.exp(small["A_log"]) * np.logaddexp(0, small["dt_bias"]))
    assert 0.1 < decays.min() < decays.max() < 1
    assert np.isfinite(dense_logits(random_decoder(spec, jnp.dtype("float32")), SOME)).all()


# Files


@pytest.mark.parametrize("name", ["qwen3_5-nested", "qwen3_5_moe-nested"])
@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_a_multimodal_folder_is_read_without_its_other_parts(name, prefix, copied, exact, caplog):
    folder = copied(name)
    rename(folder, lambda tensor: tensor.replace("model.language_model.", prefix), **{"mtp.fc.weight": np.ones((2, 2))})
    decoder = files_of(folder).load()
    assert decoder.spec.is_nested
    np.testing.assert_allclose(dense_logits(decoder, IDS), exact(name), atol=1e-4)
    assert "not used" not in caplog.text


@pytest.mark.parametrize("name", TEXT)
def test_heads_that_draft_are_left_out(name, copied, caplog):
    folder = copied(name)
    added = {"mtp.layers.0.self_attn.q_proj.weight": np.ones((2, 2)), "model.visual.pos_embed.weight": np.ones((2, 2))}
    rename(folder, lambda tensor: tensor, **added)
    files_of(folder).load()
    assert "not used" not in caplog.text
    rename(folder, lambda tensor: tensor, **{"model.layers.0.extra.weight": np.ones((2, 2))})
    files_of(folder).load()
    assert "1 tensors are not used" in caplog.text


@pytest.mark.parametrize("name", ["qwen3_5-nested", "qwen3_next"])
def test_a_saved_model_loads_again(name, checkpoint, tmp_path):
    decoder = files_of(checkpoint(name)).load()
    shutil.copy(checkpoint(name) / "config.json", tmp_path)
    save_weights(decoder, tmp_path)
    np.testing.assert_array_equal(dense_logits(files_of(tmp_path).load(), IDS), dense_logits(decoder, IDS))


def test_stacked_experts_of_a_hybrid(copied, exact):
    """Checkpoints on the hub store all experts of a layer in one tensor."""
    folder = copied("qwen3_5_moe")
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(3):
        start = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            np.stack([tensors[f"{start}{number}.{part}_proj.weight"] for number in range(7)]) for part in ("gate", "up", "down")
        )
        stacked |= {f"{start}gate_up_proj": np.concatenate([gate, up], axis=1), f"{start}down_proj": down}
    for file in folder.glob("model*"):
        file.unlink()
    save_file(stacked, folder / "model.safetensors", metadata={"format": "pt"})
    np.testing.assert_allclose(dense_logits(files_of(folder).load(), IDS), exact("qwen3_5_moe"), atol=1e-4)


def test_decays_stay_float32(checkpoint):
    weights = files_of(checkpoint("qwen3_5"), dtype="bfloat16").load().weights
    kept = {name.rpartition(".")[2] for name, weight in weights.items() if weight.dtype == jnp.float32}
    assert kept == {"A_log", "dt_bias"}
    assert not np.array_equal(weights["model.layers.0.linear_attn.A_log"].astype(jnp.bfloat16).astype(jnp.float32),
                              weights["model.layers.0.linear_attn.A_log"])  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_value_heads": 5}, "linear_num_value_heads 5 is not a multiple of linear_num_key_heads 2"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be an integer above 1, got 1"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim must be an integer above 0, got 0"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer type 'sliding_attention' is not supported by Qwen3.5"),
        ({"layer_types": ["linear_attention"]}, "layer_types|num_hidden_layers"),
        ({"attn_output_gate": False}, "attn_output_gate is false: attention without an output gate is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported by Qwen3.5"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act 'gelu_pytorch_tanh' is not supported by recurrent layers"),
    ],
    ids=str,
)
def test_configurations_that_are_refused(changes, message, copied):
    folder = copied("qwen3_5")
    edit(folder, **changes)
    with pytest.raises(ModelError, match=message):
        files_of(folder)


def test_the_interval_of_attention_stands_for_the_types_of_layers(copied):
    folder = copied("qwen3_5")
    keys = json.loads((folder / "config.json").read_text())
    del keys["layer_types"]
    (folder / "config.json").write_text(json.dumps(keys | {"full_attention_interval": 3}))
    assert files_of(folder).spec.attention_layers == (2,)


def test_a_projection_of_the_wrong_height(copied):
    folder = copied("qwen3_next")
    for file in folder.glob("*.safetensors"):
        tensors = {n: t[:-1] if n.endswith("0.linear_attn.in_proj_ba.weight") else t for n, t in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"in_proj_ba.weight' has 11 rows, the configuration says 12"):
        files_of(folder).load()


# Packed weights

KEPT = ("in_proj_b.weight", "in_proj_a.weight", "in_proj_ba.weight", "mlp.gate.weight", "shared_expert_gate.weight")
"""Ends of the names of matrices that are not packed."""


def rounded(model):
    """A copy of a model with the packed matrices' values in blocks of 8 bits."""
    made = copy.deepcopy(model)
    for name, parameter in made.named_parameters():
        if parameter.ndim > 1 and not parameter.shape[-1] % 32 and not name.endswith(KEPT):
            blocks = gguf.quantize(parameter.detach().numpy(), gguf.GGMLQuantizationType.Q8_0)
            parameter.data = torch.as_tensor(gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0))
    return made


@pytest.mark.skipif(library.refusal() is not None, reason="no native library")
@pytest.mark.parametrize("name", TEXT)
def test_matrices_of_recurrent_layers_are_packed_but_the_small_ones(name, checkpoint, oracle):
    decoder = files_of(checkpoint(name)).load(packing=Packing(rounds=True))
    parts = {
        key.removeprefix("model.layers.0.linear_attn.").removesuffix(".weight"): isinstance(weight, Packed)
        for key, weight in decoder.weights.items()
        if "layers.0.linear_attn." in key
    }
    packed = {"in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z", "out_proj"}
    assert {part for part, is_packed in parts.items() if is_packed} == packed
    assert parts.keys() == packed | {"in_proj_b", "in_proj_a", "conv_q", "conv_k", "conv_v", "A_log", "dt_bias", "norm"}
    expected = exact_logits(rounded(oracle(name).model), SOME)
    assert np.abs(oracle(name).logits(SOME) - expected).mean() > 0.02
    assert np.abs(dense_logits(decoder, SOME) - expected).mean() < 1e-3


# Adapters


@pytest.mark.parametrize("name", [*TEXT, "qwen3_5-nested"])
def test_an_adapter_of_all_matrices(name, checkpoint, oracle, tmp_path):
    """Merged at the load, and by request, where rows without the adapter keep their bits."""
    ends = sorted({module.split(".", 3)[-1].rpartition(".")[2] for module in linears(oracle(name).model)})
    fused = ("in_proj_ba", "in_proj_qkvz") if name == "qwen3_next" else ("in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z")
    assert {*fused, "out_proj"} <= {*ends}
    witness = Oracle.__new__(Oracle)
    witness.model = make_adapter(tmp_path, oracle(name).model, ends, target_modules="all-linear")
    expected = witness.logits(SOME)
    assert np.abs(expected - oracle(name).logits(SOME)).max() > 0.1
    merged = files_of(checkpoint(name), adapter=str(tmp_path)).load()
    np.testing.assert_allclose(dense_logits(merged, SOME), expected, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("qwen3_next", marks=pytest.mark.ci)])
def test_an_adapter_by_request(name, checkpoint, oracle, tmp_path):
    parts = ("in_proj_qkv", "in_proj_qkvz", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_ba", "out_proj", "q_proj", "o_proj")
    ends = [part for part in parts if any(module.endswith(f".{part}") for module in linears(oracle(name).model))]
    witness = Oracle.__new__(Oracle)
    witness.model = make_adapter(tmp_path, oracle(name).model, ends)
    decoder = files_of(checkpoint(name)).load()
    slots = AdapterSlots(SlotShape(2, 4, layer_matrices(decoder.spec)), jnp.float32, ONE_DEVICE)
    adapter = read_adapter(tmp_path, decoder.spec)
    adapter.check_choosable(decoder.spec, 4)
    slots.put(1, adapter)
    plain = dense_logits(decoder, SOME)
    for slot, expected in ((1, witness.logits(SOME)), (2, plain), (0, plain)):
        rows = RowAdapters.of(slots.arrays, jnp.full(len(SOME), slot), 2)
        found = dense_logits(replace(decoder, adapters=rows), SOME)
        np.testing.assert_allclose(found, expected, atol=1e-4 if slot == 1 else 0)
    assert np.abs(plain - witness.logits(SOME)).max() > 0.1


def test_a_convolution_has_no_adapter(checkpoint):
    spec = files_of(checkpoint("qwen3_5")).spec
    names = {name.rpartition("linear_attn.")[2] for name in layer_matrices(spec) if "linear_attn" in name}
    assert names == {f"in_proj_{part}.weight" for part in "qkvzba"} | {"out_proj.weight"}


# Devices


def test_devices_divide_the_heads_of_recurrent_layers(checkpoint):
    spec = files_of(checkpoint("qwen3_5")).spec
    shards, everywhere = Shards.absent(2, spec), (KV_HEADS, "same_kv_head")
    held = {name: shards.held(name, shape) for name, shape in spec.parameters().items() if "layers.0.linear_attn" in name}
    of = {name.removeprefix("model.layers.0."): shape for name, shape in held.items()}
    expected = GatedDeltaNet(1, 3, 16, 32, 4).parameters(64)
    assert of == expected
    assert shards.partition("model.layers.0.linear_attn.A_log") == PartitionSpec(everywhere)
    assert shards.partition("model.layers.0.linear_attn.out_proj.weight") == PartitionSpec(None, everywhere)
    assert shards.partition("model.layers.0.linear_attn.norm.weight") == PartitionSpec()
    with pytest.raises(
        ConfigError, match=r"2 key heads of the recurrent layers cannot be .* tensor_parallel_size=4; use 1 or 2"
    ):
        Shards.absent(4, spec)
