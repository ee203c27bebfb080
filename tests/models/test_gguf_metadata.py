"""Metadata of GGUF files: settings that are refused by name, wrong values, and damaged files."""

import tracemalloc

import gguf
import numpy as np
import pytest

from chunkattn import LLM
from chunkattn.errors import ModelError
from chunkattn.models import gguf_metadata
from chunkattn.models.gguf_file import open_gguf
from chunkattn.models.loader import DEMO_FOLDER
from tests.gguf_files import CONFIGS, Written, write
from tests.models.gguf_rig import (
    ARRAY,
    CONTROLS,
    I32,
    TEXT,
    U32,
    gguf_of,
    opened,
    original,
    refused,
    replaced,
    sentencepiece_file,
    value_of,
)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "qwen2",
            lambda w: w.add_sliding_window(32),
            r"qwen2.attention.sliding_window 32 is not supported; use the model's saf",
        ),
        ("smollm3", lambda w: w.add_sliding_window(32), r"smollm3.attention.sliding_window 32 is not supported"),
        ("phi3-window", lambda w: w.add_sliding_window_pattern(2), "phi3.attention.sliding_window_pattern is not supported"),
        ("gemma3", lambda w: w.add_sliding_window_pattern([True] * 3), "sliding_window_pattern has 3 entries for 7 layers"),
        ("granite", lambda w: w.add_bool("granite.rope.scaling.finetuned", False), "Granite without rotary embedding"),
        (
            "mistral3",
            lambda w: w.add_attn_temperature_scale(0.1),
            "temperature_scale is set, which needs RoPE scaling of type yarn",
        ),
        ("gemma", lambda w: w.add_final_logit_softcapping(30.0), "gemma.final_logit_softcapping is set: soft caps of logits"),
        (
            "gemma3",
            lambda w: w.add_attn_logit_softcapping(50.0),
            "gemma3.attn_logit_softcapping is set: soft caps of attention",
        ),
        ("llama", lambda w: w.add_attn_temperature_scale(0.1), "llama.attention.temperature_scale is set: scores that grow"),
    ],
)
def test_settings_that_a_family_does_not_have(name, change, message, tmp_path):
    path = write(tmp_path / "model.gguf", name, change=change).path
    with pytest.raises(ModelError, match=message):
        opened(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_expert_count(4), "llama.expert_count is set: mixture-of-experts models are not supported"),
        (lambda w: w.add_type("adapter"), "general.type 'adapter'"),
        (lambda w: w.add_causal_attention(False), "bidirectional"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "RoPE scaling 'longrope'"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "original_context_length' is missing"),
        (lambda w: w.add_key_length(32), "rope.dimension_count 64 other than the head size 32"),
        (lambda w: w.add_string("llama.logit_scale", "x"), "'llama.logit_scale' has the wrong type, str"),
        (lambda w: w.kv_data[0]["llama.embedding_length"].__setattr__("value", 258), "describe no valid llama model"),
    ],
    ids=["experts", "adapter", "bidirectional", "longrope", "yarn", "head", "type", "width"],
)
def test_unsupported_metadata(change, message, tmp_path):
    refused(tmp_path, message, change=change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID), "routers without softmax are not supported"),
        (lambda w: w.add_expert_shared_count(1), "expert_shared_count is set: shared experts are not supported"),
        (lambda w: w.add_expert_weights_scale(2.0), "scaled factors of experts"),
        (lambda w: w.add_expert_weights_norm(False), "expert_weights_norm is false"),
        (lambda w: w.kv_data[0].pop("qwen3moe.expert_used_count"), "expert_used_count' is missing"),
        (lambda w: w.kv_data[0]["qwen3moe.expert_count"].__setattr__("value", 5), "has shape"),
    ],
    ids=["sigmoid", "shared", "scale", "factors", "used", "count"],
)
def test_unsupported_experts(change, message, tmp_path):
    refused(tmp_path, message, "qwen3moe", change=change)


def test_an_unsupported_architecture(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ModelError, match=r"GGUF architecture 'mamba' is not supported; supported are llama, mistral3, qwen2, q"
    ):
        opened(tmp_path / "model.gguf")


def test_truncated_files(tmp_path):
    """A file cut anywhere says that it is truncated, and where it is."""
    whole = gguf_of(original("smollm"), "smollm", tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    header = whole.index(b"blk.0.attn_q.weight")
    for length in [0, 3, 4, 8, 20, 24, *range(30, header, header // 12), header, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut.gguf (cannot be read as GGUF|is no GGUF file|: GGUF version)") as caught:
            opened(path, skip_tokenizer_init=False)
        assert "get it again" in str(caught.value)


def check_damage(path, whole, places, rng):
    """A wrong byte in the metadata: the file loads, or there is a `ModelError` and nothing else. Returns the errors."""
    errors = []
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            opened(path, skip_tokenizer_init=False)
        except ModelError as error:
            errors.append(str(error))
    assert [error for error in errors if str(path) not in error] == []
    assert max(map(len, errors)) < 2000
    return len(errors)


@pytest.fixture(scope="module")
def small_files(tmp_path_factory):
    """Bytes of a file of each kind of vocabulary, and where its metadata end."""
    from sentencepiece import sentencepiece_model_pb2

    folder = tmp_path_factory.mktemp("small")
    proto = sentencepiece_model_pb2.ModelProto.FromString((DEMO_FOLDER / "tokenizer.model").read_bytes())
    paths = [gguf_of(original("smollm"), "smollm", folder / "bpe.gguf"), sentencepiece_file(folder / "spm.gguf", proto)]
    return [(whole, whole.index(b"blk.1.ffn_up.weight")) for whole in (path.read_bytes() for path in paths)]


def test_damaged_headers(small_files, tmp_path):
    rng = np.random.default_rng(7)
    for whole, end in small_files:
        places = [*range(24), *rng.integers(24, 900, 50), *rng.integers(24, end, 50)]
        assert check_damage(tmp_path / "damaged.gguf", whole, places, rng) > 40


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_damaged_headers_at_length(seed, small_files, tmp_path):
    rng = np.random.default_rng(seed)
    for whole, end in small_files:
        places = [*rng.integers(0, 900, 250), *rng.integers(0, end, 250)]
        assert check_damage(tmp_path / "damaged.gguf", whole, places, rng) > 100


@pytest.mark.parametrize("length", [2**20, 2**40, 2**63, 2**64 - 1])
@pytest.mark.parametrize("key", [b"tokenizer.ggml.tokens", b"tokenizer.ggml.token_type", b"tokenizer.ggml.merges"])
def test_lengths_beyond_the_file(key, length, small_files, tmp_path):
    """A length is compared with the size of the file before anything is allocated."""
    whole = bytearray(small_files[0][0])
    place = whole.index(key) + len(key) + 8  # after the types of the value and of its elements
    whole[place : place + 8] = length.to_bytes(8, "little")
    (path := tmp_path / "long.gguf").write_bytes(whole)
    tracemalloc.start()
    with pytest.raises(ModelError, match=r"long.gguf cannot be read as GGUF .*get it again"):
        open_gguf(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_metadata_are_parsed_once_and_stay_in_the_file(small_files, tmp_path, monkeypatch):
    (path := tmp_path / "model.gguf").write_bytes(small_files[0][0])
    parsed = []
    real = gguf_metadata.GGUFMetadata.__init__
    monkeypatch.setattr(gguf_metadata.GGUFMetadata, "__init__", lambda self, path: (parsed.append(path), real(self, path))[1])
    opened(path, skip_tokenizer_init=False).load()
    assert parsed == [path]

    def change(writer):
        writer.add_array("tokenizer.ggml.tokens", [f"word{i}" for i in range(50_000)])

    path = Written(tmp_path / "large.gguf", CONFIGS["llama"], change=change).path
    open_gguf(path)
    tracemalloc.start()
    file = open_gguf(path)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    assert file.array("tokenizer.ggml.tokens", str)[49_999] == "word49999"
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (lambda w: w.kv_data[0]["tokenizer.ggml.tokens"].value.__setitem__(9, CONTROLS[2]), "tokens 9 and .* are both"),
        (lambda w: w.kv_data[0]["tokenizer.ggml.tokens"].value.__setitem__(260, "a"), "are both 'a'"),
        (replaced("tokenizer.ggml.tokens", value_of([1, 2], ARRAY, I32)), "tokens' must hold str, not int"),
        (replaced("tokenizer.ggml.tokens", value_of("a b", TEXT)), "tokens' has the wrong type, str"),
        (replaced("tokenizer.ggml.token_type", value_of(["a"], ARRAY, TEXT)), "token_type' must hold int, not str"),
        (replaced("tokenizer.ggml.token_type", value_of([1, 1], ARRAY, I32)), "token_type has 2 entries for"),
        (replaced("tokenizer.ggml.merges", value_of(["ab"], ARRAY, TEXT)), "cannot be converted"),
        (replaced("tokenizer.ggml.merges", value_of(["a ☃"], ARRAY, TEXT)), "cannot be converted"),
        (replaced("tokenizer.ggml.model", value_of(3, U32)), "model' has the wrong type, int"),
        (replaced("tokenizer.ggml.eos_token_id", value_of("1", TEXT)), "eos_token_id' has the wrong type, str"),
        (replaced("tokenizer.chat_template", value_of([1], ARRAY, I32)), "chat_template' has the wrong type, list"),
        (replaced("llama.attention.head_count_kv", value_of(["a", "a"], ARRAY, TEXT)), "head_count_kv' must hold int, not str"),
        (replaced("llama.attention.head_count_kv", value_of([2, 1], ARRAY, U32)), "head_count_kv differs between layers"),
        (replaced("llama.attention.head_count_kv", value_of("2", TEXT)), "head_count_kv' has the wrong type, str"),
        (replaced("llama.block_count", value_of([True, True], ARRAY, gguf.GGUFValueType.BOOL)), "must hold int, not bool"),
        (replaced("general.alignment", value_of(24, U32)), "general.alignment must be a power of two, got 24"),
        (replaced("general.alignment", value_of("32", TEXT)), "general.alignment must be a power of two, got '32'"),
    ],
    ids=range(17),
)
def test_wrong_values(last, message, tmp_path):
    path = gguf_of(original("gpt-2"), "gpt-2", tmp_path / "model.gguf", last=last)
    with pytest.raises(ModelError, match=message) as caught:
        opened(path, skip_tokenizer_init=False)
    assert str(path) in str(caught.value)


def test_heads_given_for_each_layer(tmp_path):
    last = replaced("llama.attention.head_count_kv", value_of([2, 2], ARRAY, U32))
    assert opened(gguf_of(original("gpt-2"), "gpt-2", tmp_path / "model.gguf", last=last)).spec.heads[1] == 2


def test_files_that_are_no_gguf(tmp_path):
    path = tmp_path / "model.gguf"
    with pytest.raises(ModelError, match=r"model.gguf' .* there is no such file"):
        LLM(str(path))
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match=r"model.gguf is no GGUF file: it begins with b'PK"):
        LLM(str(path))
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(100))
    with pytest.raises(ModelError, match=r"GGUF version 1 is not supported"):
        LLM(str(path))
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(100))
    with pytest.raises(ModelError, match=r"only little-endian files of version 2 or 3"):
        LLM(str(path))
