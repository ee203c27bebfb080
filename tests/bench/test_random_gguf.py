"""Random GGUF files have the types of llama.cpp's quantiser and sane values. The gguf package reads both."""

from collections import Counter

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

from chunkattn.models.families import spec_from_config
from chunkattn.tools.bench.geometry import GEOMETRIES, sizes
from chunkattn.tools.bench.random_gguf import QUANTS, tensor_type, write_random
from tests.gguf_files import HYBRIDS
from tests.models.gguf_rig import opened

TIED = Qwen3Config(**sizes(70, 256, 288, 8, 4, 2, 64, 4096), architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True)


def types_of(quant, layers, *, tied):
    """Number of matrices of each type in a model whose rows divide into all blocks."""
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    names = [f"blk.{layer}.{part}.weight" for layer in range(layers) for part in parts]
    names += ["token_embd.weight"] if tied else ["token_embd.weight", "output.weight"]
    return Counter(tensor_type(quant, name, (512, 512), layers=layers, tied=tied) for name in names)


@pytest.mark.parametrize(
    ("quant", "expected"),
    [
        ("Q4_K_M", {"Q4_K": 193, "Q6_K": 33}),
        ("Q5_K_M", {"Q5_K": 193, "Q6_K": 33}),
        ("Q4_K_S", {"Q4_K": 217, "Q5_K": 8, "Q6_K": 1}),
        ("Q5_K_S", {"Q5_K": 225, "Q6_K": 1}),
        ("Q4_0", {"Q4_0": 225, "Q6_K": 1}),
        ("Q8_0", {"Q8_0": 226}),
        ("Q6_K", {"Q6_K": 226}),
    ],
)
def test_types_are_those_of_published_files(quant, expected):
    """Llama 3 8B as llama.cpp lists it when it loads a file of that quantisation."""
    assert types_of(quant, 32, tied=False) == expected


def test_a_tied_embedding_has_the_type_of_a_head():
    assert types_of("Q4_K_M", 28, tied=True) == {"Q4_K": 168, "Q6_K": 29}  # Qwen3-0.6B
    downs = [tensor_type("Q4_K_M", f"blk.{layer}.ffn_down.weight", (512, 512), layers=28, tied=True) for layer in range(28)]
    assert [layer for layer, kind in enumerate(downs) if kind == "Q6_K"] == [0, 1, 2, *range(5, 24, 3), *range(24, 28)]
    assert tensor_type("Q4_0", "token_embd.weight", (70, 256), layers=8, tied=False) == "Q4_0"


@pytest.mark.parametrize(("quant", "kind"), [("Q4_K_S", "Q5_0"), ("Q5_K_M", "Q8_0"), ("Q6_K", "Q8_0"), ("Q4_0", "Q4_0")])
def test_short_rows_have_a_type_of_short_blocks(quant, kind):
    name = "blk.0.attn_v.weight" if quant == "Q5_K_M" else "blk.7.attn_q.weight"
    assert tensor_type(quant, name, (64, 288), layers=8, tied=True) == kind
    assert tensor_type(quant, name, (64, 8), layers=8, tied=True) == "F16"


@pytest.mark.parametrize("quant", QUANTS)
def test_values_are_sane(quant, tmp_path):
    path = tmp_path / "model.gguf"
    write_random(TIED, quant, path)
    reader = gguf.GGUFReader(path)
    shapes = {tensor.name: tuple(reversed(tensor.shape.tolist())) for tensor in reader.tensors}
    assert Counter(shapes.values()) == Counter(spec_from_config(TIED).parameters().values())
    assert shapes["blk.3.ffn_down.weight"] == (256, 288)
    assert path.stat().st_size == reader.data_offset + sum(-(-tensor.n_bytes // 32) * 32 for tensor in reader.tensors)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            np.testing.assert_array_equal(values, 1.0)
            continue
        assert np.isfinite(values).all()
        assert abs(values.mean()) < 0.002, tensor.name
        assert 0.015 < values.std() < 0.025, tensor.name


def test_all_geometries_can_be_written(tmp_path):
    llama = LlamaConfig(**(TIED.to_dict() | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    own = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "model_type": "qwen3_moe"}
    experts = Qwen3MoeConfig(**(GEOMETRIES["small"].to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]} | own))
    for config in (GEOMETRIES["small"], llama, experts):
        write_random(config, "Q8_0", tmp_path / "model.gguf")
        assert len(gguf.GGUFReader(tmp_path / "model.gguf").tensors) > 10


@pytest.mark.parametrize(("name", "fused"), [("qwen35", "Q5_K"), ("qwen35moe", "Q5_K")])
def test_models_with_recurrent_layers(name, fused, tmp_path):
    path = tmp_path / "model.gguf"
    write_random(HYBRIDS[name], "Q4_K_M", path)
    assert opened(path).spec.layers == spec_from_config(HYBRIDS[name]).layers
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    types = {
        part: found[f"blk.0.{part}.weight"].tensor_type.name for part in ("attn_qkv", "attn_gate", "ssm_out", "ssm_conv1d")
    }
    assert types == {"attn_qkv": fused, "attn_gate": "Q4_K", "ssm_out": "Q4_K", "ssm_conv1d": "F32"}
    assert (found["blk.0.ssm_a"].data < -0.01).all()
    decoder = opened(path).load()
    assert decoder.weights.keys() == spec_from_config(HYBRIDS[name]).parameters().keys()
