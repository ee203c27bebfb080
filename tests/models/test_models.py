"""Checkpoints: what is loaded, in which dtype, and what a broken one says."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from chunkattn import LLM, SamplingParams
from chunkattn.config import EngineConfig
from chunkattn.errors import BackendError, ChunkAttnError, ConfigError, ModelError
from chunkattn.models.loader import DEMO_FOLDER, open_files
from chunkattn.models.weights import save_weights
from tests.checkpoints import CHECKPOINTS, make_checkpoint

TINY = {"skip_tokenizer_init": True, "max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 20, "max_num_batched_tokens": 32}


@pytest.fixture
def broken(checkpoint, tmp_path):
    """A copy of a checkpoint to break."""
    return shutil.copytree(checkpoint("qwen3"), tmp_path / "model")


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_shard(folder, name, change):
    """Apply `change` to the tensors of the shard that holds `name`."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    file = folder / index[name]
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def loads(folder):
    return open_files(EngineConfig(model=str(folder), skip_tokenizer_init=True)).load()


def test_weights_are_read_in_the_asked_dtype(checkpoint):
    for dtype in ("auto", "bfloat16", "float16"):
        decoder = open_files(EngineConfig(model=str(checkpoint("qwen3")), dtype=dtype, skip_tokenizer_init=True)).load()
        kinds = {leaf.dtype for leaf in decoder.weights.values()}
        assert kinds == {jnp.dtype("float32" if dtype == "auto" else dtype)}


def test_bfloat16_checkpoints_round_trip(checkpoint, tmp_path):
    shutil.copy(checkpoint("qwen3") / "config.json", tmp_path)
    decoder = open_files(EngineConfig(model=str(checkpoint("qwen3")), dtype="bfloat16", skip_tokenizer_init=True)).load()
    save_weights(decoder, tmp_path)
    again = open_files(EngineConfig(model=str(tmp_path), dtype="bfloat16", skip_tokenizer_init=True)).load()
    assert decoder.weights.keys() == again.weights.keys()
    for name, weight in decoder.weights.items():
        np.testing.assert_array_equal(weight.view(jnp.uint16), again.weights[name].view(jnp.uint16))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.ci)])
def test_half_precision_is_close_to_float32(checkpoint, dtype):
    prompt, params = {"prompt_token_ids": list(range(20))}, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    values = [
        [
            next(iter(e.values())).logprob
            for e in LLM(str(checkpoint("qwen3")), dtype=d, **TINY).generate(prompt, params)[0].prompt_logprobs[1:]
        ]
        for d in ("float32", dtype)
    ]
    np.testing.assert_allclose(*values, atol=0.1 if dtype == "bfloat16" else 0.02)
    assert values[0] != values[1]


def test_a_single_file_checkpoint(tmp_path, oracle):
    folder = make_checkpoint(CHECKPOINTS["qwen3"], tmp_path, max_shard_size="1GB")
    assert (folder / "model.safetensors").exists()
    out = LLM(str(folder), **TINY).generate({"prompt_token_ids": [1, 2]}, SamplingParams(temperature=0, max_tokens=1))
    assert out[0].outputs[0].token_ids == [int(oracle("qwen3").logits([1, 2])[-1].argmax())]


def test_unsupported_architecture(broken):
    edit_config(broken, architectures=["MambaForCausalLM"])
    with pytest.raises(ModelError, match=r"'MambaForCausalLM' is not supported; supported are LlamaForCausalLM"):
        loads(broken)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantiz"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}}, "longrope"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"hidden_size": 32}, "has shape"),
        ({"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ({"layer_types": ["sliding_attention"] * 3}, "need a sliding_window"),
        ({"head_dim": -2}, "head_dim must be"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be a positive integer"),
        ({"dtype": "float64"}, "checkpoint dtype 'float64'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0}}, "factor"),
        ({"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}, r"'model.layers.3.*' and 10 more .* is missing"),
    ],
    ids=str,
)
def test_unsupported_or_wrong_configuration(broken, changes, message):
    edit_config(broken, **changes)
    with pytest.raises(ModelError, match=message):
        loads(broken)


def test_wrong_shape(broken):
    name = "model.norm.weight"
    edit_shard(broken, name, lambda tensors: tensors.update({name: np.zeros(7, np.float32)}))
    with pytest.raises(ModelError, match=rf"'{name}' has shape \[7\], the configuration says \[64\]"):
        loads(broken)


def test_integer_weights_are_refused(broken):
    name = "model.norm.weight"
    edit_shard(broken, name, lambda tensors: tensors.update({name: np.zeros(64, np.int8)}))
    with pytest.raises(ModelError, match=rf"'{name}' is I8; supported are F32"):
        loads(broken)


def test_end_of_sequence_ids(broken, tmp_path):
    edit_config(broken, eos_token_id=5, vocab_size=1024)
    assert open_files(EngineConfig(model=str(broken), skip_tokenizer_init=True)).eos_token_ids == (5,)
    file = broken / "generation_config.json"
    for value, expected in ((0, (0,)), ([7, 0], (7, 0))):  # 0 is a token like any other
        file.write_text(json.dumps({"eos_token_id": value}))
        assert open_files(EngineConfig(model=str(broken), skip_tokenizer_init=True)).eos_token_ids == expected
    with_tokenizer = open_files(EngineConfig(model=str(broken), tokenizer=str(DEMO_FOLDER)))
    assert with_tokenizer.eos_token_ids == (7, 0, with_tokenizer.tokenizer.eos_token_id)
    for value in ("x", True, 1.5, [None, {}]):
        file.write_text(json.dumps({"eos_token_id": value}))
        with pytest.raises(ModelError, match="eos_token_id must be integers"):
            loads(broken)
    for text in ("[]", "{", "[" * 10**6):
        file.write_text(text)
        with pytest.raises(ModelError, match=r"generation_config\.json"):
            loads(broken)


def test_options_are_checked_before_weights_are_read(broken):
    """The weights are gone: only the option can be what is complained about."""
    for file in broken.glob("*.safetensors"):
        file.unlink()
    for options in ({"attention_backend": "nope"}, {"max_model_len": 10**6}, {"chunk_separator": ""}):
        with pytest.raises((ConfigError, BackendError)):
            LLM(str(broken), skip_tokenizer_init=True, **options)


def test_missing_and_unreadable_files(broken):
    shard = sorted(broken.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match=f"{shard.name}: not a readable safetensors file"):
        loads(broken)
    shard.unlink()
    with pytest.raises(ModelError, match=f"shard '{shard.name}' .* is missing"):
        loads(broken)
    (broken / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelError, match="not a safetensors index"):
        loads(broken)
    (broken / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match="only safetensors"):
        loads(broken)
    (broken / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        loads(broken)
    (broken / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config.json"):
        loads(broken)


def test_no_such_model():
    with pytest.raises(ModelError, match="no local folder and cannot be loaded from the hub"):
        LLM("nobody/nothing")


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_a_checkpoint_without_a_tokenizer(name, checkpoint):
    with pytest.raises(ModelError, match=r"tokenizer.*skip_tokenizer_init"):
        LLM(str(checkpoint(name)))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"attention_backend": "nope"}, BackendError, "unknown attention_backend 'nope'"),
        ({"dtype": "int8"}, ConfigError, "dtype 'int8'"),
        ({"position_strategy": "zigzag"}, ConfigError, "unknown position_strategy 'zigzag'"),
        ({"block_size": 12}, ConfigError, "power of two"),
        ({"max_num_seqs": 0}, ConfigError, "max_num_seqs"),
        ({"chunk_separator": ""}, ConfigError, "chunk_separator"),
        ({"chunk_separator": 5}, ConfigError, "chunk_separator must be of type str, got 5"),
        ({"enable_chunk_aware": "yes"}, ConfigError, "enable_chunk_aware must be of type bool"),
        ({"max_num_seqs": 65, "max_num_batched_tokens": 64}, ConfigError, "less than max_num_seqs"),
        ({"max_num_seqs": True}, ConfigError, "max_num_seqs must be of type int"),
        ({"multi_item_scoring_delimiter": -1}, ConfigError, "at least 0"),
        ({"max_model_len": 100_000}, ConfigError, "exceeds the 512 positions"),
        ({"kv_cache_memory_bytes": 10}, ConfigError, "less than one page"),
        ({"tensor_paralel_size": 2}, ConfigError, "unknown option 'tensor_paralel_size'"),
    ],
    ids=str,
)
def test_bad_engine_options(options, error, message):
    with pytest.raises(error, match=message) as caught:
        LLM(**options)
    assert isinstance(caught.value, ChunkAttnError)


def test_the_demo_is_an_ordinary_folder():
    """transformers loads it, and says the same."""
    from transformers import AutoTokenizer

    from tests.checkpoints import Oracle

    text = "Read the documents and answer the question. Where does Meru live? Answer:"
    ids = AutoTokenizer.from_pretrained(DEMO_FOLDER)(text).input_ids
    logits = Oracle(DEMO_FOLDER).logits(ids)
    llm = LLM(kv_cache_memory_bytes=1 << 20)
    out = llm.generate(text, SamplingParams(temperature=0, max_tokens=1, logprobs=0))[0].outputs[0]
    assert out.token_ids == [int(logits[-1].argmax())]
    assert sum(f.stat().st_size for f in DEMO_FOLDER.iterdir()) <= 10 * 10**6


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_row_s_operations_are_those_of_the_layers_matrices(engine, oracle, name):
    layers = oracle(name).model.model.layers
    weights = sum(module.weight.numel() for module in layers.modules() if isinstance(module, torch.nn.Linear))
    assert engine(name).core.runner.row_flops == 2 * weights
