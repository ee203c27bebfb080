"""Settings and names of tensors that families have of their own. The engine's tests have the logits."""

import json
import shutil
from dataclasses import fields, replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import Phi3Config

from chunkattn import LLM
from chunkattn.config import EngineConfig
from chunkattn.errors import ConfigError, ModelError
from chunkattn.models.decoder import Decoder
from chunkattn.models.loader import open_files
from chunkattn.models.shards import Shards
from chunkattn.models.weights import save_weights
from tests.checkpoints import CHECKPOINTS, Oracle, force_factors, make_checkpoint
from tests.fuzz.folders import dense_logits

IDS = np.random.default_rng(3).integers(0, 128, 70)


def files_of(folder, **options):
    return open_files(EngineConfig(model=str(folder), dtype="float32", skip_tokenizer_init=True, **options))


def edit(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_text(folder, **changes):
    text = json.loads((folder / "config.json").read_text())["text_config"]
    edit(folder, text_config=text | changes)


@pytest.fixture
def copied(checkpoint, tmp_path):
    """A copy of a named checkpoint to change."""
    return lambda name: shutil.copytree(checkpoint(name), tmp_path / name)


# longrope


@pytest.fixture(scope="module")
def longrope(tmp_path_factory):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 32,
        "long_factor": np.linspace(1, 5, 6).tolist(),
        "short_factor": np.linspace(1, 1.5, 6).tolist(),
    }
    changes = {"rope_parameters": rope, "original_max_position_embeddings": 32, "max_position_embeddings": 128}
    config = Phi3Config(**{**CHECKPOINTS["phi3"].to_dict(), **changes})
    return make_checkpoint(config, tmp_path_factory.mktemp("longrope"))


@pytest.mark.parametrize(("length", "used"), [(32, "short"), (33, "long"), (128, "long")])
def test_longrope_has_one_set_of_factors_for_all_prompts(length, used, longrope):
    """transformers takes the short factors for 20 tokens and the long ones for 70; here it has one set of both."""
    oracle = Oracle(longrope)
    own = [oracle.logits(IDS[:count]) for count in (20, 70)]
    oracle.model = force_factors(oracle.model, used)
    decoder = files_of(longrope, max_model_len=length).load()
    for count, switched in zip((20, 70), own, strict=True):
        expected = oracle.logits(IDS[:count])
        np.testing.assert_allclose(dense_logits(decoder, IDS[:count]), expected, atol=1e-4)
        assert (np.abs(expected - switched).max() < 1e-5) == ((used == "long") == (count == 70))


def test_an_engine_takes_the_factors_of_its_length(longrope):
    oracle = Oracle(longrope)
    model = oracle.model
    for length, used in ((32, "short"), (128, "long")):
        llm = LLM(str(longrope), max_model_len=length, skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 20)
        (scores,) = llm.score(IDS[:9].tolist(), [IDS[9:20].tolist()], label_token_ids=[3, 99]).scores
        oracle.model = force_factors(model, used)
        row = oracle.logits(IDS[:20])[-1].astype(np.float64)
        np.testing.assert_allclose(scores, np.exp(row - np.logaddexp.reduce(row))[[3, 99]], rtol=1e-5)


# Teeth: what a family adds moves the logits by far more than the tolerance


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma", {"norm_offset": 0.0}),
        ("gemma3-window", {"norm_offset": 0.0}),
        ("gemma", {"embedding_scale": 1.0}),
        ("gemma3-window", {"logit_cap": None}),
        ("granite4", {"logit_scale": 1.0}),
        ("ministral3", {"growth": None}),
        ("granite4", {"rotary": None}),
        ("granite", {"scale": 32**-0.5}),
        ("seed_oss", {"o_bias": False}),
    ],
    ids=str,
)
def test_a_setting_that_is_left_out_shows(name, change, checkpoint, oracle):
    decoder = files_of(checkpoint(name)).load()
    expected = oracle(name).logits(IDS)
    np.testing.assert_allclose(dense_logits(decoder, IDS), expected, atol=1e-4)
    whole = change.keys() <= {field.name for field in fields(decoder.spec)}
    spec = decoder.spec
    spec = replace(spec, **change) if whole else spec.map(lambda layer: replace(layer, mixer=replace(layer.mixer, **change)))
    wrong = Decoder(spec, {name: decoder.weights[name] for name in spec.parameters()}, decoder.dtype)
    assert np.abs(dense_logits(wrong, IDS) - expected).max() > 0.05


# Multimodal folders


@pytest.mark.parametrize("name", ["gemma3-nested-window", "mistral3-nested"])
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "language_model."])
def test_names_of_multimodal_folders(name, prefix, copied, caplog):
    """All that transformers writes or has written. The vision part is left out without a word."""
    folder = copied(name)
    expected = Oracle(folder).logits(IDS)
    count = 0
    for file in folder.glob("*.safetensors"):
        tensors = {n.replace("language_model.model.", prefix): tensor for n, tensor in load_file(file).items()}
        count += len(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("language_model.model.", prefix))
    decoder = files_of(folder).load()
    assert count > len(decoder.weights) + 10
    np.testing.assert_allclose(dense_logits(decoder, IDS), expected, atol=1e-4)
    assert "not used" not in caplog.text


def test_a_saved_language_part_loads_again(checkpoint, tmp_path):
    source = checkpoint("gemma3-nested-window")
    shutil.copy(source / "config.json", tmp_path)
    decoder = files_of(source).load()
    save_weights(decoder, tmp_path)
    np.testing.assert_array_equal(dense_logits(files_of(tmp_path).load(), IDS), dense_logits(decoder, IDS))


def test_the_dtype_and_the_ends_of_a_multimodal_folder(copied):
    """They are at the top, or with the text."""
    folder = copied("gemma3-nested-window")
    edit(folder, dtype="float16", eos_token_id=[5, 9])
    files = open_files(EngineConfig(model=str(folder), skip_tokenizer_init=True))
    assert (files.dtype, files.eos_token_ids) == ("float16", (5, 9))
    edit(folder, dtype=None, eos_token_id=None)
    edit_text(folder, dtype="bfloat16", eos_token_id=7)
    files = open_files(EngineConfig(model=str(folder), skip_tokenizer_init=True))
    assert (files.dtype, files.eos_token_ids) == ("bfloat16", (7,))


def test_multimodal_folders_that_are_refused(copied):
    folder = copied("mistral3-nested")
    config = (folder / "config.json").read_text()

    def refused(message, change=edit, **changes):
        (folder / "config.json").write_text(config)
        change(folder, **changes)
        with pytest.raises(ModelError, match=message):
            files_of(folder)

    refused("text_config: model_type 'llama' of a mistral3 model must be mistral or mi", edit_text, model_type="llama")
    refused(
        "'Mistral3ForSequenceClassification' of model_type 'mistral3' is not",
        architectures=["Mistral3ForSequenceClassification"],
    )
    refused("quant_method 'bitsandbytes' is not supported", quantization_config={"quant_method": "bitsandbytes"})
    refused("text_config: configuration: num_hidden_layers must be a positive", edit_text, num_hidden_layers=0)
    refused("model_type 'gemma4' is not supported; supported are .*Gemma3ForConditionalGeneration", model_type="gemma4")
    (folder / "config.json").write_text(config)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("language_model.model.norm", "language_model.model.other"))
    for file in folder.glob("*.safetensors"):
        tensors = {n.replace("model.norm", "model.other"): tensor for n, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"'model.norm.weight' .* is missing \(the checkpoint is incomplete, get"):
        files_of(folder).load()


# Gemma 3, Granite 4, Ministral 3, OLMo 2


@pytest.mark.parametrize("name", ["gemma3-window", "gemma3-nested-window"])
def test_the_length_of_gemma_3_includes_the_factor_of_its_scaling(name, copied):
    folder = copied(name)
    scaled = {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}
    change = edit_text if "nested" in name else edit
    change(folder, rope_parameters={"full_attention": scaled, "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}})
    files = files_of(folder)
    assert files.spec.max_model_len == 256
    np.testing.assert_allclose(dense_logits(files.load(), IDS), Oracle(folder).logits(IDS), atol=1e-4)


def test_granite_4_without_rotary_embedding(copied):
    folder = copied("granite4")
    edit(folder, position_embedding_type=None)
    decoder = files_of(folder).load()
    np.testing.assert_allclose(dense_logits(decoder, IDS), Oracle(folder).logits(IDS), atol=1e-4)
    assert {layer.mixer.rotary for layer in decoder.spec.layers} == {None}


def test_granite_4_with_recurrent_layers(copied):
    folder = copied("granite4")
    edit(folder, layer_types=["mamba", "attention", "mamba"])
    with pytest.raises(ModelError, match="layer type 'linear_attention' is not supported by Granite 4; only full_attention is"):
        files_of(folder)


def test_queries_of_ministral_3_need_their_factor(copied):
    folder = copied("ministral3")
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    for beta in (-0.1, "0.1", None):
        edit(folder, rope_parameters=rope | {"llama_4_scaling_beta": beta})
        with pytest.raises(ModelError, match="llama_4_scaling_beta must be 0 or a positive finite number"):
            files_of(folder)
    edit(folder, rope_parameters=rope | {"llama_4_scaling_beta": 0})
    np.testing.assert_allclose(dense_logits(files_of(folder).load(), IDS), Oracle(folder).logits(IDS), atol=1e-4)


def test_norms_over_all_heads_need_one_device(checkpoint):
    with pytest.raises(ConfigError, match="norms over all heads cannot be divided by tensor_parallel_size=2; use 1"):
        Shards.absent(2, files_of(checkpoint("olmo2")).spec)
