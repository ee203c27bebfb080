"""GGUF files: weights and logits against transformers' own GGUF loading, tokenizers against the originals, and errors."""

import json
import tracemalloc

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.dequant import GGML_BLOCK
from transformers.integrations.gguf.dequant import dequantize as torch_dequantize
from typer.testing import CliRunner

from chunkattn import LLM, ChunkedPrompt, SamplingParams, make_layout
from chunkattn.cli import app
from chunkattn.config import EngineConfig
from chunkattn.errors import ModelError
from chunkattn.models import gguf_metadata
from chunkattn.models.gguf_file import open_gguf
from chunkattn.models.loader import DEMO_FOLDER, load_tokenizer, open_files, open_shape
from chunkattn.parsers.encode import PartEncoder
from chunkattn.remote.messages import Checkpoint
from tests import tokenizer_texts
from tests.checkpoints import force_factors, random_parts
from tests.fuzz import folders
from tests.gguf_files import CONFIGS, FAMILIES, HALVES, VOCAB, Written, write

IDS = np.random.default_rng(5).integers(0, VOCAB, 90)
WRITTEN = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1)


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """A named random model in a GGUF file, made once."""
    made: dict[tuple, Written] = {}

    def get(name, kind=Kind.F16):
        if (name, kind) not in made:
            made[name, kind] = write(tmp_path_factory.mktemp("gguf") / f"{name}-{kind.name}.gguf", name, kind)
        return made[name, kind]

    return get


def opened(path, **options):
    return open_files(EngineConfig(model=str(path), **{"dtype": "float32", "skip_tokenizer_init": True, **options}))


def dense_logits(path, ids, **options):
    """Logits `[T, vocab]` of a file's decoder under plain causal attention: no engine, no compilation of steps."""
    return folders.dense_logits(opened(path, **options).load(), ids)


# Weights


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


@pytest.mark.parametrize(("length", "used"), [(64, "short"), (256, "long")])
def test_longrope_of_a_file(length, used, written):
    """Factors and the factor of attention are those of the model that has the same factors for all lengths."""
    file = written("phi3-longrope", Kind.F32)
    expected = force_factors(file.model, used)(torch.as_tensor(IDS)[None]).logits[0].detach().numpy()
    np.testing.assert_allclose(dense_logits(file.path, IDS, max_model_len=length), expected, atol=1e-4)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w.add_rope_scaling_factor(4.0),
            "phi3.rope.scaling.factor 4.0 beside the tensor 'rope_factors_long.weight' is not",
        ),
        (lambda w: w.add_float32("phi3.rope.scale_linear", 2.0), "phi3.rope.scale_linear 2.0 beside the tensor"),
        (lambda w: w.add_rope_scaling_yarn_ext_factor(1.0), "linear with yarn_ext_factor other than 0.0"),
        (lambda w: w.add_rope_scaling_yarn_attn_factor(1.5), "linear with yarn_attn_factor other than 1.0"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "yarn beside the tensor 'rope_factors_long.weight'"),
        (lambda w: w.add_string("phi3.rope.scaling.type", "other"), "'other' .* supported are none, linear, yarn, longrope"),
    ],
    ids=["factor", "former name", "yarn's share", "yarn's attention", "yarn", "type"],
)
def test_scalings_beside_factors_are_refused(change, message, tmp_path):
    """llama.cpp applies both."""
    path = write(tmp_path / "model.gguf", "phi3-longrope", change=change).path
    with pytest.raises(ModelError, match=message):
        opened(path)


@pytest.mark.parametrize(("kind", "factor"), [("linear", 0.0), ("longrope", 1.0), ("none", 4.0)])
def test_scalings_beside_factors_that_change_nothing(kind, factor, tmp_path, written):
    def change(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(factor)

    path = write(tmp_path / "model.gguf", "phi3-longrope", change=change).path
    assert opened(path).spec == opened(written("phi3-longrope").path).spec


def test_longrope_without_its_factors(tmp_path):
    change = lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)  # noqa: E731
    path = write(tmp_path / "model.gguf", "phi3", change=change).path
    with pytest.raises(ModelError, match=r"needs the tensors rope_factors_long.weight and rope_factors_short.weight, which"):
        opened(path)


@pytest.mark.parametrize("own", [gguf.GGUFWriter.add_rope_scaling_factor, gguf.GGUFWriter.add_rope_freq_base_swa])
def test_windows_of_all_positions_that_olmo_2_rotates_otherwise(own, tmp_path):
    """llama.cpp scales the rotary embedding of the layers without a window only."""
    for change in (lambda w: w.add_sliding_window(256), lambda w: own(w, 4.0) and None):
        assert opened(write(tmp_path / "model.gguf", "olmo2", change=change).path).spec.windows == (None, None)

    def both(writer):
        writer.add_sliding_window(256)
        own(writer, 4.0)

    path = write(tmp_path / "both.gguf", "olmo2", change=both).path
    with pytest.raises(ModelError, match=r"olmo2.attention.sliding_window beside RoPE scaling or rope.freq_base_swa is not"):
        opened(path)


def test_a_file_of_one_set_of_factors(tmp_path):
    for name, message in (
        ("long", "tensor 'rope_factors_long.weight' is missing"),
        ("short", r"shape \[7\], the metadata say"),
    ):
        tensors = {f"rope_factors_{name}.weight": None if name == "long" else np.ones(7, np.float32)}
        path = write(tmp_path / "model.gguf", "phi3-longrope", tensors=tensors).path
        with pytest.raises(ModelError, match=message):
            opened(path)


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


# Tokenizers

TEXTS = (
    "The year 1987  5 and 12345, isn't it?",
    "  two spaces\n\n\tand a tab 3.14 ",
    "cafe\u0301 na\u00efve \u4f60\u597d \U0001f600",
    "",
    "HELLO's we'LL <s> <|im_start|>user\nhi<|im_end|> <think>no</think> xylophone",
)
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
CONTROLS, DEFINED = ["<|im_start|>", "<|im_end|>", "<\uff5cend\u2581of\u2581text\uff5c>"], ["<think>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"


def original(pre):
    """A byte-level BPE as a family's `tokenizer.json` has it."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    split = {"llama-bpe": LLAMA3, "qwen2": QWEN2}.get(pre)
    first = [pre_tokenizers.Split(Regex(split), "isolated")] if split else []
    first += [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=[], show_progress=False)
    tokenizer.train_from_iterator([" ".join(TEXTS[:4]) * 3, "caf\u00e9 " * 9], trainer)
    # A word that no merge makes: Llama 3 takes it whole, the other families never.
    content = json.loads(tokenizer.to_str())
    content["model"]["vocab"]["\u0120xylophone"] = tokenizer.get_vocab_size()
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens(CONTROLS)
    tokenizer.add_tokens(DEFINED)
    return tokenizer


def gguf_of(tokenizer, pre, path, last=lambda writer: None, **keys):
    content = json.loads(tokenizer.to_str())
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    kinds = [3 if t in CONTROLS else 4 if t in DEFINED else 1 for t in tokens]

    def change(writer):
        writer.add_tokenizer_model("gpt2")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
        writer.add_bos_token_id(tokens.index("<|im_start|>"))
        writer.add_eos_token_id(tokens.index("<|im_end|>"))
        writer.add_uint32("tokenizer.ggml.eot_token_id", tokens.index(CONTROLS[2]))
        writer.add_chat_template(TEMPLATE)
        for key, value in keys.items():
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        last(writer)

    config = type(CONFIGS["llama"])(**{**CONFIGS["llama"].to_dict(), "vocab_size": 1024})
    return Written(path, config, change=change).path


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_byte_level_tokenizers(pre, tmp_path):
    """Ids, decoded texts, special tokens and chats are those of the tokenizer that the file was made from."""
    source = original(pre)
    path = gguf_of(source, pre, tmp_path / "model.gguf")
    files = opened(path, skip_tokenizer_init=False)
    for text in (*TEXTS, *CONTROLS):
        ids = source.encode(text, add_special_tokens=False).ids
        assert files.tokenizer(text, add_special_tokens=False).input_ids == ids
        assert files.tokenizer.decode(ids) == source.decode(ids, skip_special_tokens=False)
    encoder = PartEncoder(files.tokenizer)
    assert set(encoder.special.ids) == set(CONTROLS)
    assert set(encoder.added.ids) == {*CONTROLS, *DEFINED}
    start, end, other = (source.token_to_id(t) for t in CONTROLS)
    assert files.eos_token_ids == (end, other)
    assert encoder.leading_ids == ([start] if pre == "llama-bpe" else [])
    original_tokenizer = PreTrainedTokenizerFast(tokenizer_object=source, chat_template=TEMPLATE)
    messages = [{"role": "user", "content": "Is it 1987?"}]
    chats = [t.apply_chat_template(messages, tokenize=False) for t in (files.tokenizer, original_tokenizer)]
    assert chats[0] == chats[1] != ""
    assert len(load_tokenizer(str(path))) == len(files.tokenizer)


def test_the_file_says_whether_bos_comes_first(tmp_path):
    source = original("gpt-2")
    for value in (True, False):
        path = gguf_of(source, "gpt-2", tmp_path / f"{value}.gguf", add_bos_token=value)
        encoder = PartEncoder(load_tokenizer(str(path)))
        assert encoder.leading_ids == ([source.token_to_id("<|im_start|>")] if value else [])


def sentencepiece_file(path, proto, **keys):
    def change(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list([piece.piece for piece in proto.pieces])
        writer.add_token_scores([piece.score for piece in proto.pieces])
        writer.add_token_types([piece.type for piece in proto.pieces])
        writer.add_bos_token_id(proto.trainer_spec.bos_id)
        writer.add_eos_token_id(proto.trainer_spec.eos_id)
        writer.add_unk_token_id(proto.trainer_spec.unk_id)
        for key, value in keys.items():
            writer.add_bool(f"tokenizer.ggml.{key}", value)

    config = type(CONFIGS["llama"])(**{**CONFIGS["llama"].to_dict(), "vocab_size": len(proto.pieces)})
    return Written(path, config, change=change).path


@pytest.mark.parametrize("space", [True, False])
def test_sentencepiece_tokenizers(space, tmp_path):
    """Ids and decoded texts are those of SentencePiece itself, with and without the space before a text."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString((DEMO_FOLDER / "tokenizer.model").read_bytes())
    proto.normalizer_spec.add_dummy_prefix = space
    witness = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    tokenizer = load_tokenizer(str(sentencepiece_file(tmp_path / "model.gguf", proto, add_space_prefix=space)))
    for text in (*tokenizer_texts.TEXTS, *tokenizer_texts.random_texts(30)):
        ids = witness.encode(text)
        assert tokenizer(text, add_special_tokens=False).input_ids == ids
        assert tokenizer.decode(ids) == witness.decode(ids)
    encoder = PartEncoder(tokenizer)
    assert set(encoder.special.ids) == {"<unk>", "<s>", "</s>"}
    assert encoder.leading_ids == [proto.trainer_spec.bos_id]
    without = sentencepiece_file(tmp_path / "without.gguf", proto, add_bos_token=False)
    assert PartEncoder(load_tokenizer(str(without))).leading_ids == []


# Errors


def refused(tmp_path, message, name="llama", **options):
    path = Written(tmp_path / "model.gguf", CONFIGS[name], **options).path
    with pytest.raises(ModelError, match=message) as caught:
        opened(path).load()
    assert str(path) in str(caught.value)


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


def scaled(tmp_path, name="llama", **keys):
    """A file with keys of RoPE scaling and no others."""

    def change(writer):
        for key, value in keys.items():
            key = f"llama.rope.{'' if key == 'scale_linear' else 'scaling.'}{key}"
            writer.add_string(key, value) if isinstance(value, str) else writer.add_float32(key, value)

    return Written(tmp_path / "model.gguf", CONFIGS[name], change=change).path


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({}, 1.0),
        ({"factor": 4.0}, 4.0),
        ({"factor": 1.0}, 1.0),
        ({"factor": 0.0}, 1.0),
        ({"scale_linear": 2.0}, 2.0),
        ({"scale_linear": 2.0, "factor": 4.0}, 4.0),
        ({"scale_linear": 2.0, "factor": 0.0}, 1.0),
        ({"type": "linear"}, 1.0),
        ({"type": "linear", "scale_linear": 2.0}, 2.0),
        ({"type": "none", "factor": 4.0}, 1.0),
        ({"type": "none", "scale_linear": 2.0}, 1.0),
        ({"factor": 4.0, "yarn_ext_factor": 0.0, "attn_factor": 1.0}, 4.0),
    ],
    ids=str,
)
def test_linear_scaling_is_llama_cpps(keys, factor, tmp_path):
    """The type is linear where the file names none, and "none" ignores the factor."""
    spec = opened(scaled(tmp_path, **keys)).spec
    plain = 1 / 10000.0 ** (np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(spec.layers[0].mixer.rotary.inv_freq, plain / factor, rtol=1e-6)
    assert spec.max_model_len == 256 * factor


def test_logits_of_a_file_with_a_factor_and_no_type(tmp_path, written):
    np.testing.assert_array_equal(
        dense_logits(scaled(tmp_path, factor=4.0), IDS), dense_logits(written("llama-linear").path, IDS)
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"type": "yarn", "factor": 4.0, "yarn_ext_factor": 0.5}, "yarn with yarn_ext_factor other than 1.0 is not"),
        ({"factor": 4.0, "yarn_ext_factor": 1.0}, "linear with yarn_ext_factor other than 0.0 is not"),
        ({"type": "none", "attn_factor": 1.5}, "none with attn_factor other than 1.0 is not"),
    ],
    ids=str,
)
def test_scalings_that_are_refused_by_name(keys, message, tmp_path):
    path = scaled(tmp_path, **keys)
    with pytest.raises(ModelError, match=message):
        opened(path)


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


def test_unsupported_tokenizers(tmp_path):
    source = original("gpt-2")
    for pre in ("unheard-of", None):
        path = gguf_of(source, pre, tmp_path / "model.gguf")
        with pytest.raises(ModelError, match=rf"tokenizer.ggml.pre {pre!r} is not among the supported .*; pass tokenizer="):
            opened(path, skip_tokenizer_init=False)
        assert opened(path, skip_tokenizer_init=False, tokenizer=str(DEMO_FOLDER)).tokenizer is not None
    path = Written(tmp_path / "bare.gguf", CONFIGS["llama"]).path
    with pytest.raises(ModelError, match=r"bare.gguf has no tokenizer; pass tokenizer="):
        opened(path, skip_tokenizer_init=False)
    path = Written(tmp_path / "bert.gguf", CONFIGS["llama"], change=lambda w: w.add_tokenizer_model("bert")).path
    with pytest.raises(ModelError, match="tokenizer 'bert' is not supported; supported are gpt2 and llama"):
        opened(path, skip_tokenizer_init=False)


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


def replaced(name, value):
    """Change of a writer's key that exists."""
    return lambda writer: writer.kv_data[0].__setitem__(name, value)


def value_of(value, kind, sub_type=None):
    return gguf.gguf_writer.GGUFValue(value, kind, sub_type)


U32, I32, ARRAY, TEXT = (gguf.GGUFValueType[name] for name in ("UINT32", "INT32", "ARRAY", "STRING"))


@pytest.mark.parametrize("kind", ["eos", "bos", "unknown", "padding", "eot", "eom", "fim_pad"])
@pytest.mark.parametrize("found", [-1, 2**32 - 1, -2, 10**6])
def test_special_ids(kind, found, tmp_path):
    """-1 is no token, in either spelling; other ids outside the vocabulary are errors."""
    entry = value_of(found, I32 if found < 0 else U32)
    path = gguf_of(original("gpt-2"), "gpt-2", tmp_path / "model.gguf", last=replaced(f"tokenizer.ggml.{kind}_token_id", entry))
    if found in (-2, 10**6):
        with pytest.raises(ModelError, match=rf"model.gguf: tokenizer.ggml.{kind}_token_id {found} is outside the"):
            opened(path, skip_tokenizer_init=False)
        return
    files = opened(path, skip_tokenizer_init=False)
    named = {"eos": "eos", "bos": "bos", "unknown": "unk", "padding": "pad"}.get(kind, "cls")
    assert getattr(files.tokenizer, f"{named}_token_id") is None
    source = original("gpt-2")
    end, other = (source.token_to_id(token) for token in CONTROLS[1:])
    assert set(files.eos_token_ids) == {end, other} - ({other} if kind == "eot" else set())


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


def test_a_text_ends_where_the_vocabulary_says(tmp_path):
    """`tests/llama` compares the whole table with llama.cpp."""
    tokens = ["<unk>", "a", "</s>", "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|file_sep|>", "b"]

    def change(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_eos_token_id(9)

    path = Written(tmp_path / "model.gguf", CONFIGS["llama"], change=change).path
    assert sorted(opened(path).eos_token_ids) == [2, 3, 4, 6, 7, 8, 9]


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


def test_folders_of_gguf_files(tmp_path, written):
    source = written("llama").path
    (tmp_path / "a.gguf").write_bytes(source.read_bytes())
    assert opened(tmp_path).path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(source.read_bytes())
    with pytest.raises(ModelError, match=r"holds 2 GGUF models \(a.gguf, b.gguf\); pass the path of one file"):
        opened(tmp_path)


def test_the_tokenizer_of_a_folder_of_one_gguf_file(tmp_path):
    """As `tokenizer`, and in `chunkattn inspect`, which takes the model's own or another."""
    source = original("gpt-2")
    (folder := tmp_path / "model").mkdir()
    path = gguf_of(source, "gpt-2", folder / "model.gguf")
    assert len(load_tokenizer(str(folder))) == len(load_tokenizer(str(path)))
    shown = [
        CliRunner().invoke(app, ["inspect", "xylophone", *options]).stdout
        for options in (["--model", str(folder)], ["--model", str(path)], ["--tokenizer", str(folder)])
    ]
    assert shown[0] == shown[1] == shown[2] != CliRunner().invoke(app, ["inspect", "xylophone"]).stdout
    gguf_of(source, "gpt-2", folder / "other.gguf")
    with pytest.raises(ModelError, match="holds 2 GGUF models"):
        load_tokenizer(str(folder))
    PreTrainedTokenizerFast(tokenizer_object=source).save_pretrained(folder)  # the original's files, for both
    assert load_tokenizer(str(folder)).get_vocab() == source.get_vocab()
