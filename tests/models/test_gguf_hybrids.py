"""GGUF files of models with recurrent layers: logits are those of the model that was written, by the converter's rules."""

import copy

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from chunkattn import LLM, SamplingParams
from chunkattn.backends.cpu import library
from chunkattn.errors import ModelError
from chunkattn.models.fused import split_tensors
from chunkattn.models.gguf_file import open_gguf
from chunkattn.models.gguf_spec import config_from_gguf
from chunkattn.models.gguf_tensors import GGUFTensors
from chunkattn.models.packed import Packed
from chunkattn.models.packing import Packing
from tests.delta_rule import in_float64
from tests.fuzz import folders
from tests.gguf_files import HYBRIDS, VOCAB, Written, write
from tests.models.gguf_rig import U32, dense_logits, opened, replaced, value_of

IDS = np.random.default_rng(5).integers(0, VOCAB, 90)


@torch.no_grad()
def exact_logits(file, ids=IDS):
    with in_float64(copy.deepcopy(file.model)) as double:
        return double(torch.as_tensor(ids)[None], use_cache=False).logits[0].numpy()


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0, Kind.Q4_K], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", HYBRIDS)
def test_logits(name, kind, written):
    """A block of Q8_0 holds columns of one value head, a block of Q4_K those of eight."""
    file = written(name, kind)
    expected = exact_logits(file)
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(dense_logits(file.path, IDS), expected, atol=1e-4)


@pytest.mark.skipif(library.refusal() is not None, reason="no native library")
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_K, Kind.Q6_K], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", HYBRIDS)
def test_packed_logits(name, kind, written):
    """Blocks within a value head move whole; a matrix whose blocks hold columns of several heads is dequantised."""
    file = written(name, kind)
    decoder = opened(file.path).load(packing=Packing())
    stays = name == "qwen3next" or kind in (Kind.Q8_0, Kind.Q4_0)
    for part, is_packed in (("q", True), ("z", True), ("b", False), ("a", False), ("out", stays)):
        module = "out_proj" if part == "out" else f"in_proj_{part}"
        weight = decoder.weights[f"model.layers.0.linear_attn.{module}.weight"]
        assert isinstance(weight, Packed) == is_packed, part
        assert not is_packed or weight.format == kind.name
    np.testing.assert_allclose(folders.dense_logits(decoder, IDS), exact_logits(file), atol=3e-3)
    rounded = opened(file.path).load(packing=Packing(rounds=True)).weights["model.layers.0.linear_attn.out_proj.weight"]
    assert rounded.format == (kind.name if stays else "Q8_0")


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0, Kind.Q4_K], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", HYBRIDS)
def test_parts_of_tensors(name, kind, written):
    """Every part of a moved tensor is the same part of the whole one."""
    files = opened(written(name, kind).path)
    tensors = split_tensors(GGUFTensors(files.gguf, files.spec), files.spec)
    for tensor in (name for name in tensors.names() if "linear_attn" in name):
        whole, shape = tensors.read(tensor, np.dtype(np.float32)), tensors.shape(tensor)
        assert whole.shape == shape
        for index in ((slice(3, 7),), (slice(1, shape[0] - 1), slice(32, 96))):
            np.testing.assert_array_equal(
                tensors.read(tensor, np.dtype(np.float32), index[: len(shape)]), whole[index[: len(shape)]]
            )
        if len(shape) == 2 and tensors.stored_type(tensor) == kind.name == "Q8_0":
            part = tensors.blocks(tensor, (slice(2, 7), slice(32, 96)))
            np.testing.assert_array_equal(dequantize(part, kind), whole[2:7, 32:96])


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0, Kind.Q4_K], ids=lambda kind: kind.name)
def test_as_many_value_heads_as_key_heads(kind, tmp_path):
    """Such files have all heads in place, and all their matrices are packed."""
    config = copy.deepcopy(HYBRIDS["qwen35"])
    config.linear_num_key_heads = 8
    file = Written(tmp_path / "model.gguf", config, kind)
    np.testing.assert_allclose(dense_logits(file.path, IDS), exact_logits(file), atol=1e-4)
    files = opened(file.path)
    tensors = GGUFTensors(files.gguf, files.spec)
    assert tensors.stored_type("model.layers.0.linear_attn.out_proj.weight") == kind.name


@pytest.mark.parametrize("name", HYBRIDS)
def test_blocks_that_predict_further_tokens_are_left_out(name, tmp_path):
    """The number of blocks counts them; neither the logits nor the loading need their tensors."""

    def change(writer):
        replaced(f"{name}.block_count", value_of(3, U32))(writer)
        writer.add_uint32(f"{name}.nextn_predict_layers", 1)

    drafts = {
        "blk.2.attn_norm.weight": np.ones(256, np.float32),
        "blk.2.nextn.eh_proj.weight": np.ones((256, 512), np.float32),
        "blk.2.nextn.hnorm.weight": np.ones(256, np.float32),
    }
    file = write(tmp_path / "model.gguf", name, change=change, tensors=drafts)
    assert opened(file.path).spec.num_layers == 2
    np.testing.assert_allclose(dense_logits(file.path, IDS), exact_logits(file), atol=1e-4)


@pytest.mark.parametrize(("listed", "kinds"), [([True, False], "ra"), ([False, True], "ar"), ([True, True, False], "rr")])
def test_a_list_of_recurrent_layers(listed, kinds, tmp_path):
    """A list counts more than the period; entries behind the last layer are those of blocks that predict further tokens."""

    def change(writer):
        writer.add_array("qwen35.attention.recurrent_layers", listed)

    spec = config_of(write(tmp_path / "model.gguf", "qwen35", change=change).path)
    assert "".join("r" if kind == "linear_attention" else "a" for kind in spec.layer_types) == kinds


def config_of(path):
    return config_from_gguf(open_gguf(path))


def test_attention_in_every_fourth_layer_by_default(tmp_path):
    def change(writer):
        del writer.kv_data[0]["qwen35.full_attention_interval"]
        replaced("qwen35.block_count", value_of(9, U32))(writer)

    norms = {f"blk.{layer}.attn_norm.weight": np.ones(256, np.float32) for layer in range(2, 9)}
    config = config_of(write(tmp_path / "model.gguf", "qwen35", change=change, tensors=norms).path)
    assert [index for index, kind in enumerate(config.layer_types) if kind == "full_attention"] == [3, 7]


def test_projections_of_old_files_of_qwen3_next(tmp_path):
    """Old files have queries, keys, values and gates as folders have them, the rows of one key head after another."""
    file = write(tmp_path / "new.gguf", "qwen3next", Kind.F32)
    fused = file.model.model.layers[0].linear_attn.in_proj_qkvz.weight.detach().numpy()
    tensors = {"blk.0.attn_qkv.weight": None, "blk.0.attn_gate.weight": None, "blk.0.ssm_in.weight": fused}
    old = write(tmp_path / "old.gguf", "qwen3next", Kind.F32, tensors=tensors)
    np.testing.assert_array_equal(dense_logits(old.path, IDS), dense_logits(file.path, IDS))


@pytest.mark.parametrize("name", ["qwen35moe", "qwen3next"])
def test_the_gate_of_a_shared_expert_is_a_vector_or_a_row(name, tmp_path):
    """llama.cpp's quantiser drops the axis of length 1 that its converter writes."""
    file = write(tmp_path / "row.gguf", name, Kind.F32)
    gates = {
        f"blk.{index}.ffn_gate_inp_shexp.weight": layer.mlp.shared_expert_gate.weight.detach().numpy()[0]
        for index, layer in enumerate(file.model.model.layers)
    }
    vectors = write(tmp_path / "vector.gguf", name, Kind.F32, tensors=gates)
    np.testing.assert_array_equal(dense_logits(vectors.path, IDS), dense_logits(file.path, IDS))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssm.inner_size": 250}, "ssm.inner_size 250 is no multiple of ssm.time_step_rank 8"),
        ({"ssm.time_step_rank": 0}, "ssm.inner_size 256 is no multiple of ssm.time_step_rank 0"),
        ({"ssm.group_count": 3}, "linear_num_value_heads 8 is not a multiple of linear_num_key_heads 3"),
        ({"ssm.state_size": 16}, r"in_proj_qkv.weight' has 384 rows, the configuration says 320"),
        ({"full_attention_interval": 0}, "full_attention_interval must be positive, got 0"),
        ({"nextn_predict_layers": 2}, "num_hidden_layers must be a positive integer, got 0"),
        ({"expert_count": 4}, "mixture-of-experts models are not supported"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_settings_that_are_refused(changes, message, tmp_path):
    def change(writer):
        for key, value in changes.items():
            replaced(f"qwen35.{key}", value_of(value, U32))(writer)

    with pytest.raises(ModelError, match=message):
        opened(write(tmp_path / "model.gguf", "qwen35", change=change).path).load()


@pytest.mark.parametrize(
    ("name", "tensor", "value", "message"),
    [
        ("qwen35", "blk.0.ssm_a", np.ones(8, np.float32), "A_log' holds NaN or infinite values; the file is damaged"),
        ("qwen35", "blk.0.ssm_a", None, "A_log' that Qwen3_5ForCausalLM needs is missing"),
        ("qwen35", "blk.0.ssm_dt.bias", np.ones(7, np.float32), r"dt_bias' has shape \[7\], the configuration says \[8\]"),
        ("qwen35", "blk.1.ssm_a", np.ones(8, np.float32), "'blk.1.ssm_a' has no place in Qwen3_5ForCausalLM"),
        ("qwen35", "blk.x.ssm_a", np.ones(8, np.float32), "3 layers of tensors, block_count says 2"),
        ("qwen35moe", "blk.0.ffn_up_shexp.weight", None, "shared_expert.up_proj.weight' .* is missing"),
    ],
)
def test_wrong_tensors(name, tensor, value, message, tmp_path):
    with pytest.raises(ModelError, match=message):
        opened(write(tmp_path / "model.gguf", name, tensors={tensor: value}).path).load()


@pytest.mark.parametrize("name", HYBRIDS)
def test_generation(name, written):
    """The engine's greedy tokens are those of transformers, in prompts of one step and of several."""
    file = written(name, Kind.Q8_0)
    options = {"max_num_batched_tokens": 64, "kv_cache_memory_bytes": 4 << 20, "state_cache_memory_bytes": 4 << 20}
    llm = LLM(str(file.path), dtype="float32", skip_tokenizer_init=True, max_num_seqs=4, **options)
    for count in (5, 90):
        prompt = IDS[:count].tolist()
        (out,) = llm.generate([{"prompt_token_ids": prompt}], SamplingParams(temperature=0, max_tokens=6))
        tokens = list(out.outputs[0].token_ids)
        logits = exact_logits(file, [*prompt, *tokens])
        assert tokens == logits[count - 1 : count - 1 + len(tokens)].argmax(-1).tolist()
