"""GGUF files: weights and logits against transformers' own GGUF loading."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers.integrations.gguf.dequant import GGML_BLOCK
from transformers.integrations.gguf.dequant import dequantize as torch_dequantize

from chunkattn import LLM, ChunkedPrompt, SamplingParams, make_layout
from chunkattn.config import EngineConfig
from chunkattn.errors import ModelError
from chunkattn.models.gguf_file import open_gguf
from chunkattn.models.loader import open_shape
from chunkattn.remote.messages import Checkpoint
from tests.checkpoints import random_parts
from tests.gguf_files import CONFIGS, FAMILIES, HALVES, VOCAB, Written, write
from tests.models.gguf_rig import dense_logits, opened, refused

IDS = np.random.default_rng(5).integers(0, VOCAB, 90)
WRITTEN = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_every_family(name, written):
    file = written(name)
    expected = file.oracle().logits(IDS)
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(dense_logits(file.path, IDS), expected, atol=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_files_that_transformers_does_not_read(name, written):
    """The witness is the model that was written: rows, norms and settings are llama.cpp's, by its converter's rules."""
    file = written(name, Kind.Q8_0)
    expected = file.oracle().logits(IDS)
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(dense_logits(file.path, IDS), expected, atol=1e-4)
    spec, _, types = open_shape(EngineConfig(model=str(file.path)))
    assert {types[name] for name, shape in spec.parameters().items() if len(shape) > 1} == {"Q8_0"}


def test_a_pattern_of_windows(tmp_path):
    """A period, or a list of the layers with windows."""
    for pattern, expected in ((3, "wwfwwfw"), ([True, False, True, True, False, False, True], "wfwwffw"), (0, "wwwwwww")):
        change = lambda writer, pattern=pattern: writer.add_sliding_window_pattern(pattern)  # noqa: E731
        spec = opened(write(tmp_path / "model.gguf", "gemma3", change=change).path).spec
        assert "".join("f" if window is None else "w" for window in spec.windows) == expected


def test_the_length_of_gemma_3_includes_the_factor_of_its_scaling(written):
    assert opened(written("gemma3-linear", Kind.Q8_0).path).spec.max_model_len == 256


def test_the_frequencies_of_windows(tmp_path):
    path = write(tmp_path / "model.gguf", "gemma3", change=lambda w: w.add_rope_freq_base_swa(500.0)).path
    for layer in opened(path).spec.layers:
        base = 500.0 if layer.mixer.window else 1e6
        np.testing.assert_allclose(layer.mixer.rotary.inv_freq, base ** -(np.arange(0, 32, 2) / 32), rtol=1e-6)


@pytest.mark.parametrize(("layers", "scale"), [(7, 32**-0.5), (62, 64**-0.5)])
def test_the_scale_of_gemma_3_27b_is_by_hidden_size_and_heads(layers, scale, tmp_path):
    """llama.cpp and its converter tell that model by its 62 layers; no key does."""

    def change(writer):
        writer.kv_data[0]["gemma3.block_count"].value = layers

    norms = {f"blk.{layer}.attn_norm.weight": np.ones(256, np.float32) for layer in range(7, layers)}
    spec = opened(write(tmp_path / "model.gguf", "gemma3", change=change, tensors=norms).path).spec
    assert {layer.mixer.scale for layer in spec.layers} == {scale}


@pytest.mark.parametrize("kind", [*WRITTEN, *HALVES], ids=lambda kind: kind.name)
def test_logits_of_every_quantisation(kind, written):
    file = written("llama", kind)
    expected = file.oracle().logits(IDS)
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(dense_logits(file.path, IDS), expected, atol=1e-3)


@pytest.mark.parametrize("kind", [kind for kind in (*WRITTEN, *HALVES) if int(kind) in GGML_BLOCK], ids=lambda kind: kind.name)
def test_blocks_are_those_of_another_implementation(kind, written):
    """transformers' PyTorch code for packed weights shares nothing with the gguf package."""
    file = open_gguf(written("llama", kind).path)
    blocks = np.array(file.tensors["blk.1.ffn_up.weight"].data)
    expected = torch_dequantize(torch.from_numpy(blocks), int(kind)).numpy().reshape(256, 256)
    np.testing.assert_allclose(file.read("blk.1.ffn_up.weight", np.dtype(np.float32)), expected, atol=1e-6)


def test_large_tensors_are_read_in_pieces(written, monkeypatch):
    file = open_gguf(written("llama", Kind.Q8_0).path)
    rows = np.random.default_rng(0).permutation(256)
    whole = file.read("blk.0.ffn_up.weight", np.dtype(np.float32))
    monkeypatch.setattr("chunkattn.models.gguf_file._PIECE", 7 * 256)
    np.testing.assert_array_equal(file.read("blk.0.ffn_up.weight", np.dtype(np.float32), rows), whole[rows])


@pytest.mark.parametrize(("kind", "dtype"), [(Kind.F32, "float32"), (Kind.F16, "float16"), (Kind.Q8_0, "bfloat16")])
def test_auto_takes_the_dtype_of_the_file(kind, dtype, written):
    assert opened(written("llama", kind).path, dtype="auto").dtype == dtype


def test_generation_plain_and_chunked(written):
    """The engine's greedy tokens on a quantised file are those of transformers, under a 4D mask for chunks."""
    rng = np.random.default_rng(6)
    file = written("llama", Kind.Q4_1)
    oracle = file.oracle()
    llm = LLM(
        str(file.path), dtype="float32", skip_tokenizer_init=True, max_num_batched_tokens=64, kv_cache_memory_bytes=4 << 20
    )
    parts = [([], [], IDS[:40].tolist()), *(random_parts(rng, most_chunks=6) for _ in range(5))]
    layouts = [make_layout(*p) for p in parts]
    outs = llm.generate([ChunkedPrompt(*p) for p in parts], SamplingParams(temperature=0, max_tokens=12))
    for layout, out in zip(layouts, outs, strict=True):
        tokens = out.outputs[0].token_ids
        logits = oracle.chunked(layout, tokens)
        assert tokens == logits[len(layout) - 1 : len(layout) - 1 + len(tokens)].argmax(-1).tolist()


def test_a_worker_loads_the_file(written):
    """The engine's process gets the path, and the shape with Llama 3's frequencies, in its first message."""
    files = opened(written("llama-llama3").path)
    checkpoint = Checkpoint.of(files)
    assert checkpoint.path == str(files.path)
    found, expected = (f.load().weights for f in (checkpoint.files(), files))
    assert found.keys() == expected.keys()
    assert len(found) > 20
    for name, weight in found.items():
        np.testing.assert_array_equal(weight, expected[name])


def test_shards(tmp_path, written):
    whole = Written(tmp_path / "model.gguf", CONFIGS["llama"], split_max_tensors=8)
    shards = sorted(tmp_path.glob("*.gguf"))
    assert len(shards) > 2
    assert shards[0].name.startswith("model-00001-of-")
    for given in (shards[0], tmp_path):
        np.testing.assert_array_equal(dense_logits(given, IDS), dense_logits(written("llama").path, IDS))
    with pytest.raises(ModelError, match=rf"is shard 2 of {len(shards)}; pass the first shard, {shards[0].name}"):
        opened(shards[1])
    shards[2].unlink()
    with pytest.raises(ModelError, match=rf"shard .*{shards[2].name} is missing"):
        opened(shards[0])
    assert whole.path.name == "model.gguf"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.1.attn_q.weight": None}, r"tensor 'model.layers.1.self_attn.q_proj.weight' .* is missing"),
        ({"token_embd.weight": None}, "tensor 'token_embd.weight' is missing"),
        ({"blk.0.attn_q_norm.weight": np.ones(64, np.float32)}, "tensor 'blk.0.attn_q_norm.weight' has no place in LlamaFor"),
        ({"blk.1.attn_q.bias": np.ones(256, np.float32)}, "has no place for tensor 'model.layers.1.self_attn.q_proj.bias'"),
        ({"blk.0.ffn_up.bias": np.ones(256, np.float32)}, "has no place for tensor 'model.layers.0.mlp.up_proj.bias'"),
        ({"output.bias": np.ones(128, np.float32)}, "has no place for tensor 'lm_head.bias'"),
        ({"blk.2.attn_norm.weight": np.ones(256, np.float32)}, "3 layers of tensors, block_count says 2"),
        ({"blk.0.attn_norm.weight": np.ones(7, np.float32)}, r"has shape \[7\], the configuration says \[256\]"),
        ({"blk.0.attn_norm.weight": np.full(256, np.nan, np.float32)}, "holds NaN or infinite values; the file is damaged"),
        ({"blk.0.attn_norm.weight": np.ones(256, np.int8)}, "type I8, which the gguf package cannot dequantise"),
        ({"rope_freqs.weight": np.zeros(32, np.float32)}, "must hold 32 positive factors"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_wrong_tensors(tensors, message, tmp_path):
    refused(tmp_path, message, tensors=tensors)


def test_folders_of_gguf_files(tmp_path, written):
    source = written("llama").path
    (tmp_path / "a.gguf").write_bytes(source.read_bytes())
    assert opened(tmp_path).path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(source.read_bytes())
    with pytest.raises(ModelError, match=r"holds 2 GGUF models \(a.gguf, b.gguf\); pass the path of one file"):
        opened(tmp_path)
