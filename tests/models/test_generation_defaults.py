"""`generation_config`: the model's sampling defaults where a request leaves a parameter out, as in vLLM."""

import json
import shutil

import gguf
import pytest

from chunkattn import LLM, EngineConfig, SamplingParams
from chunkattn.errors import ConfigError, ModelError
from chunkattn.models.loader import open_files
from chunkattn.schema.generation import ChatBody, CompletionBody
from tests.gguf_files import CONFIGS, Kind, Written
from tests.reranker_files import CHAT_OPTIONS

VALUES = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.05}
FILE = {**VALUES, "do_sample": True, "max_new_tokens": 99, "eos_token_id": [7, 8], "transformers_version": "5.0.0"}


def write(folder, values):
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture
def model(checkpoint, tmp_path):
    return shutil.copytree(checkpoint("qwen3"), tmp_path / "model")


def opened(model, **options):
    return open_files(EngineConfig(model=model, skip_tokenizer_init=True, **options))


@pytest.mark.parametrize(
    ("values", "expected", "unused"),
    [
        (FILE, {**VALUES, "max_tokens": 99}, ""),
        ({"eos_token_id": 7}, {}, ""),
        ({"temperature": None, "top_k": 20.0, "max_new_tokens": 5.0}, {"top_k": 20, "max_tokens": 5}, ""),
        ({"do_sample": False, "temperature": 0}, {"temperature": 0.0}, "do_sample"),
        ({"no_repeat_ngram_size": 3, "typical_p": 0.9, "top_p": 0.5}, {"top_p": 0.5}, "no_repeat_ngram_size, typical_p"),
        ({"num_beams": 1, "no_repeat_ngram_size": 0, "typical_p": 1.0, "suppress_tokens": []}, {}, ""),
        ({"num_beams": 4, "suppress_tokens": [1], "forced_eos_token_id": 2, "min_new_tokens": 3}, {}, "num_beams, suppress"),
    ],
    ids=str,
)
def test_the_defaults_of_a_folder(values, expected, unused, model, caplog):
    """One log line names what counts, and what the engine has not."""
    caplog.set_level("INFO", "chunkattn")
    assert opened(write(model, values)).sampling == expected
    told = [record for record in caplog.records if "sampling defaults" in record.message]
    assert len(told) == bool(expected or unused)
    if unused:
        assert f"; not applied: {unused}" in told[0].message
        assert told[0].levelname == "WARNING"


@pytest.mark.parametrize(
    ("values", "message"),
    [({"temperature": -1}, "temperature must be"), ({"top_p": "x"}, "top_p must be"), ({"top_k": True}, "top_k must be")],
    ids=str,
)
def test_wrong_defaults_name_the_file(values, message, model):
    with pytest.raises(ModelError, match=rf"generation_config.json: {message}.*generation_config='none'"):
        opened(write(model, values))
    assert opened(model, generation_config="none").sampling == {}


def test_where_the_defaults_come_from(model, tmp_path):
    """`none` leaves the end-of-sequence ids of the model, as vLLM's `vllm` does; a folder brings its own."""
    write(model, FILE)
    (other := tmp_path / "other").mkdir()
    write(other, {"top_k": 3, "eos_token_id": 11})
    for option, sampling, ids in (
        ("auto", {**VALUES, "max_tokens": 99}, (7, 8)),
        ("none", {}, (7, 8)),
        ("vllm", {}, (7, 8)),
        (other, {"top_k": 3}, (11,)),
        (other / "generation_config.json", {"top_k": 3}, (11,)),
    ):
        files = opened(model, generation_config=option)
        assert (files.sampling, files.eos_token_ids[: len(ids)]) == (sampling, ids)
    with pytest.raises(ConfigError, match=r"'auto', 'none' or a folder with generation_config.json; there is no file nowhere/"):
        opened(model, generation_config="nowhere")


def test_the_defaults_of_a_gguf_file(tmp_path, caplog):
    def change(writer):
        writer.add_float32(gguf.Keys.General.SAMPLING_TEMP, 0.5)
        writer.add_int32(gguf.Keys.General.SAMPLING_TOP_K, 20)
        writer.add_float32(gguf.Keys.General.SAMPLING_PENALTY_REPEAT, 1.5)
        writer.add_float32(gguf.Keys.General.SAMPLING_XTC_THRESHOLD, 0.5)

    path = Written(tmp_path / "a.gguf", CONFIGS["qwen3"], Kind.F32, change=change).path
    assert opened(path).sampling == {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.5}
    assert "not applied: xtc_threshold" in caplog.text
    assert opened(path, generation_config="none").sampling == {}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize(
    ("kind", "content"), [(CompletionBody, {"prompt": "a"}), (ChatBody, {"messages": []})], ids=["text", "chat"]
)
def test_a_field_of_a_body_left_out_or_null_has_the_default(name, kind, content):
    for given, expected in (({}, VALUES[name]), ({name: None}, VALUES[name]), ({name: 1}, 1)):
        params = kind.model_validate({**content, **given}).sampling(VALUES, max_tokens=3, logprobs=None)
        assert getattr(params, name) == expected
        assert params.max_tokens == 3
        others = {other: value for other, value in VALUES.items() if other != name}
        assert {other: getattr(params, other) for other in others} == others


def test_calls_without_parameters_take_the_defaults(chat_folder, tmp_path):
    """The likeliest tokens at a high temperature, by `top_k`. `max_new_tokens` bounds what fits; given parameters are whole."""
    folder = write(shutil.copytree(chat_folder, tmp_path / "model"), {"temperature": 3.0, "top_k": 1, "max_new_tokens": 9})
    llm = LLM(folder, **CHAT_OPTIONS)
    expected = SamplingParams(temperature=3, top_k=1, max_tokens=9)
    assert llm.get_default_sampling_params() == expected
    messages = [{"role": "user", "content": "Paris is a city."}]
    for call, prompt in ((llm.generate, "Paris is a city"), (llm.chat, messages)):
        found, same, plain = (
            call(prompt, params)[0].outputs[0].token_ids for params in (None, expected, SamplingParams(temperature=3))
        )
        assert found == same
        assert found != plain[: len(found)]
        assert len(found) == 9
    long = {"prompt_token_ids": [5] * (llm.limits.max_model_len - 4)}
    assert len(llm.generate(long)[0].outputs[0].token_ids) <= 5
    scores = llm.score("Paris", [" is"], labels=["yes", "no"]).scores
    llm.close()
    plain = LLM(folder, generation_config="none", **CHAT_OPTIONS)
    assert plain.get_default_sampling_params() == SamplingParams()
    assert plain.score("Paris", [" is"], labels=["yes", "no"]).scores == scores
    plain.close()
