"""Checkpoint folders: whatever their files and keys, transformers' logits or one clear error."""

import copy
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from chunkattn.config import EngineConfig
from chunkattn.errors import ModelError
from chunkattn.models.loader import open_files
from tests.fuzz.draws import KEYS, LLAMA3
from tests.fuzz.folders import (
    CLASSIFIED,
    EMBEDDING,
    FAMILIES,
    HEAD,
    INDEX,
    NESTED,
    NORM,
    SINGLE,
    TOLERANCE,
    decoder_keys,
    dense_logits,
    judge,
    tensors_of,
    transformers_logits,
    write,
)


def edit(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


QUICK = "llama", "qwen3"
LIKE_OTHERS = "mistral", "qwen2", "gemma", "granite", "olmo2", "qwen3_5_moe_text", "seed_oss", "smollm3", *NESTED
"""Families whose keys are all read as those of a family that CI has."""
MARKS = dict.fromkeys(FAMILIES, pytest.mark.ci) | dict.fromkeys(QUICK, ()) | dict.fromkeys(LIKE_OTHERS, pytest.mark.slow)
ONCE = [pytest.param(family, marks=MARKS[family]) for family in FAMILIES]


@pytest.fixture(scope="module")
def model():
    """Tensors and keys of a family, made once."""
    made = {}

    def get(family="llama"):
        if family not in made:
            made[family] = tensors_of(family)
        tensors, keys = made[family]
        return {name: value.clone() for name, value in tensors.items()}, copy.deepcopy(keys)

    return get


# Keys of the configuration

MIXTURES = "qwen2_moe", "qwen3_moe"
GEMMA = ("gemma", "gemma3_text", "gemma3")
HYBRIDS = "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"
REFUSED = {
    "theta null": {family: "make no rotary embedding" for family in FAMILIES if family != "ministral3"},
    "no number of heads": dict.fromkeys(FAMILIES, "has shape")
    | dict.fromkeys(("mistral", "ministral3", *GEMMA, "mistral3"), "num_key_value_heads")
    | dict.fromkeys((*MIXTURES, *HYBRIDS), "num_key_value_heads")
    | {"phi3": "tensor 'model.layers.0.self_attn.qkv_proj.weight' has 64 rows, the configuration says 96"},
    "gelu": {family: "hidden_act 'gelu' is not supported" for family in FAMILIES if family not in GEMMA},
    "parameters and scaling": {"phi3": "must be one of ['longrope'], got linear"}
    | dict.fromkeys(GEMMA[1:], "cannot be read: 'full_attention'"),
    "bidirectional": dict.fromkeys(GEMMA, "use_bidirectional_attention"),
    "a factor of 0": dict.fromkeys(("granite", "granitemoehybrid"), "residual_multiplier must be a positive finite number"),
    "gelu by tanh": dict.fromkeys(MIXTURES, "not supported by experts")
    | dict.fromkeys(HYBRIDS, "not supported by recurrent layers"),
    "a layer without experts": dict.fromkeys((*MIXTURES, "qwen3_next"), "'model.layers.1.mlp.down_proj.weight' and 2 more"),
    "experts in every second layer": dict.fromkeys(
        (*MIXTURES, "qwen3_next"), "'model.layers.0.mlp.down_proj.weight' and 2 more"
    ),
    "more experts than there are": dict.fromkeys((*MIXTURES, *HYBRIDS[1:]), "num_experts_per_tok 7 is more than num_experts 6"),
    "no experts": dict.fromkeys((*MIXTURES, *HYBRIDS[1:]), "num_experts must be a positive integer, got 0"),
    "layer types": dict.fromkeys(("granitemoehybrid", *HYBRIDS), "layer type 'sliding_attention' is not supported by"),
    "layer types switched off": dict.fromkeys(("qwen2", "qwen2_moe", "qwen3"), "need a sliding_window")
    | dict.fromkeys(("granitemoehybrid", *HYBRIDS), "layer type 'sliding_attention' is not supported by"),
    "window null": dict.fromkeys(GEMMA[1:], "need a sliding_window"),
    "experts": {"qwen3_moe": "has shape"} | {"granitemoehybrid": "num_local_experts 4: experts are not supported by Granite 4"},
    "a width of shared experts": {"granitemoehybrid": "has 80 rows, the configuration says 48"},
    "partial rotary, unscaled": {"ministral3": "partial_rotary_factor"},
    "partial rotary": {"ministral3": "llama_4_scaling_beta"},
    "queries that grow": {"phi3": "`rope_parameters`"},
}
"""Errors by the name of the case and the family."""
SCALED = [case for case in KEYS if case.startswith(("linear", "two", "dynamic", "yarn", "llama3"))]
REFUSED |= {case: {"phi3": "`rope_parameters`", "ministral3": "llama_4_scaling_beta"} for case in SCALED}
for _case in ("scaling without type", "parameters and scaling"):
    REFUSED[_case] = REFUSED.get(_case, {}) | {"ministral3": "llama_4_scaling_beta"}
for _case in (case for case in KEYS if case.startswith(("window switched", "window of", "window nearly", "a pattern"))):
    REFUSED[_case] = {"granitemoehybrid": "layer type 'linear_attention' is not supported by Granite 4"}
    REFUSED[_case] |= dict.fromkeys(HYBRIDS, "tensor 'model.layers.1.linear_attn.A_log' and 12 more")


@pytest.mark.parametrize("family", ONCE)
@pytest.mark.parametrize("case", KEYS)
def test_a_key_means_what_the_family_s_class_makes_of_it(family, case, model, tmp_path):
    tensors, keys = model(family)
    changes = KEYS[case]
    changed = keys if "architectures" in changes else decoder_keys(keys)
    if "rope_theta" in changes or "rope_scaling" in changes:
        changed.pop("rope_parameters")
        changed["rope_theta"] = 10000.0
    changed |= changes
    found = judge(write(tmp_path / "model", tensors, keys))
    refused = REFUSED.get(case, {}).get(family, "")
    assert refused in found if refused else found == "equal"


@pytest.mark.parametrize("changes", [{"mlp_only_layers": [0]}, {"decoder_sparse_step": 2, "norm_topk_prob": False}], ids=str)
def test_layers_with_experts_and_without(changes, tmp_path):
    tensors, keys = tensors_of("qwen3_moe", **changes)
    assert judge(write(tmp_path / "model", tensors, keys)) == "equal"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_causal": False}, "bidirectional"),
        ({"per_layer_config": {"0": {"intermediate_size": 24}}}, "per_layer_config"),
        ({"transformers_weights": "other.safetensors"}, "transformers_weights 'other.safetensors'"),
        ({"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}}, "partial_rotary_factor"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}, "rope_parameters": None}, "low_freq_factor must be below"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"architectures": ["MistralForCausalLM"]}, "name two families"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
        ({"architectures": ["LlamaForTokenClassification"]}, "is not supported"),
        ({"model_type": "other", "auto_map": {"AutoConfig": "code.C"}}, "config.json: model_type 'other' is not supported"),
        ({"model_type": None, "architectures": None}, "model_type must be one of"),
        ({"head_dim": 16}, "has shape"),
        ({"torch_dtype": "torch.float16"}, "torch_dtype 'torch.float16' is not supported; write one of float32"),
        *(
            ({"rope_scaling": scaling, "rope_parameters": None, "rope_theta": 1e4}, "rope")
            for scaling in (
                {"type": "linear", "factor": None},
                {"type": "linear", "factor": float("inf")},
                {"type": "yarn", "factor": float("inf"), "original_max_position_embeddings": 16},
                {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": "16"},
            )
        ),
        ({"vocab_size": 65}, "has shape"),
    ],
    ids=str,
)
def test_keys_that_are_refused(changes, message, model, tmp_path):
    folder = write(tmp_path / "model", *model())
    edit(folder, **changes)
    assert message in judge(folder)


def test_no_code_of_a_repository_runs_and_nothing_is_read_from_standard_input(model, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("standard input was read"))
    folder = write(tmp_path / "model", *model())
    (folder / "code.py").write_text("raise SystemExit('the code of the repository ran')")
    edit(folder, auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"})
    assert judge(folder) == "equal"
    edit(folder, model_type="unheard_of")
    assert "trust_remote_code" not in judge(folder)


@pytest.mark.parametrize("text", ["[]", "3", "{", '{"model_type": [3]}', "\xff", "[" * 100_000], ids=lambda text: text[:20])
def test_configurations_that_are_no_json_object(text, model, tmp_path):
    folder = write(tmp_path / "model", *model())
    (folder / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelError, match=r"config\.json"):
        open_files(EngineConfig(model=str(folder), skip_tokenizer_init=True))


# Files


def test_a_single_file_counts_before_a_stale_index(model, tmp_path):
    tensors, keys = model()
    folder = write(tmp_path / "model", tensors_of("llama", seed=1)[0], keys, shards=2)
    write(folder, tensors, keys)
    assert judge(folder) == "equal"
    for shard in folder.glob("model-*"):
        shard.unlink()
    assert judge(folder) == "equal"


def test_the_index_decides_among_shards(model, tmp_path):
    """A stale copy in another shard is not read, wherever it lies."""
    tensors, keys = model()
    folder = write(tmp_path / "whole", tensors, keys)
    expected = transformers_logits(folder)
    for shard in (1, 2, 3):
        sharded = write(tmp_path / f"{shard}", tensors, keys, shards=3)
        file = sharded / f"model-{shard:05}-of-00003.safetensors"
        listed = json.loads((sharded / INDEX).read_text())["weight_map"]
        stale = {name: value + 1 for name, value in tensors.items() if listed[name] != file.name}
        save_file(load_file(file) | stale, file, metadata={"format": "pt"})
        found = dense_logits(open_files(EngineConfig(model=str(sharded), dtype="float32", skip_tokenizer_init=True)).load())
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda listed: listed.update({NORM: next(s for s in listed.values() if s != listed[NORM])}), "which lacks it"),
        (lambda listed: listed.update({"model.layers.9.weight": listed[HEAD]}), "equal"),  # nobody needs the tensor
        (lambda listed: listed.update({name: f"./{shard}" for name, shard in listed.items()}), "equal"),
        (lambda listed: listed.update({NORM: "../model.safetensors"}), "must be the name of a file"),
        (lambda listed: listed.update({NORM: 3}), "not a safetensors index"),
        (lambda listed: listed.clear(), "not a safetensors index"),
        (lambda listed: listed.pop(NORM), "equal"),  # the shard has the tensor, and no other shard has
    ],
    ids=["other shard", "no such tensor", "dots", "other folder", "number", "empty", "incomplete"],
)
def test_an_index_that_contradicts_the_shards(change, message, model, tmp_path):
    folder = write(tmp_path / "model", *model(), shards=2)
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))
    assert message in judge(folder)


def test_an_unlisted_tensor_in_two_shards_is_refused(model, tmp_path):
    tensors, keys = model()
    folder = write(tmp_path / "model", tensors, keys, shards=2)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"].pop(NORM)
    (folder / INDEX).write_text(json.dumps(index))
    for file in folder.glob("model-*.safetensors"):
        save_file(load_file(file) | {NORM: tensors[NORM]}, file, metadata={"format": "pt"})
    assert f"tensor '{NORM}' is in several shards" in judge(folder)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["pytorch_model.bin"], r"pickled weights .* python -c .*save_pretrained"),
        (["pytorch_model-00001-of-00002.bin"], r"pickled weights .* python -c .*save_pretrained"),
        (["consolidated.safetensors"], "Mistral's own names"),
        (["model-00001-of-00002.safetensors"], "get model.safetensors.index.json, too"),
        (["adapter_config.json", "adapter_model.safetensors"], "adapter_config.json cannot be read"),
    ],
)
def test_folders_without_weights_say_what_to_do(files, message, model, tmp_path):
    folder = write(tmp_path / "model", *model())
    (folder / SINGLE).unlink()
    for file in files:
        (folder / file).touch()
    with pytest.raises(ModelError, match=message):
        open_files(EngineConfig(model=str(folder), skip_tokenizer_init=True)).load()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", SINGLE, INDEX])
def test_links_without_a_target_are_no_missing_files(name, model, tmp_path):
    """A copy of the hub's cache may hold its links without the files that they point to."""
    folder = write(tmp_path / "model", *model())
    if name == INDEX:
        (folder / SINGLE).unlink()
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "blobs" / "0123")
    with pytest.raises(ModelError, match=rf"{name} is a link to .*0123, which does not exist"):
        open_files(EngineConfig(model=str(folder), skip_tokenizer_init=True)).load()


@pytest.mark.parametrize("name", [SINGLE, INDEX])
def test_pointers_of_git_lfs_are_named(name, model, tmp_path):
    folder = write(tmp_path / "model", *model())
    (folder / SINGLE).unlink()
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 17\n")
    with pytest.raises(ModelError, match=r"pointer of Git LFS: run `git lfs pull`"):
        open_files(EngineConfig(model=str(folder), skip_tokenizer_init=True)).load()


def test_odd_indexes_end_in_one_error(model, tmp_path):
    folder = write(tmp_path / "model", *model(), shards=2)
    listed = json.loads((folder / INDEX).read_text())
    listed["weight_map"][NORM] = "m" * 300
    (folder / INDEX).write_text(json.dumps(listed))
    assert "File name too long" in judge(folder)
    (folder / INDEX).unlink()
    (folder / INDEX).mkdir()
    assert "not a safetensors index" in judge(folder)


# Heads and names


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", ["equal", "other", "none", "alone"])
@pytest.mark.parametrize("prefix", ["model.", ""])
def test_tied_and_untied_heads(tied, head, prefix, model, tmp_path):
    tensors, keys = model()
    if head == "equal":
        tensors[HEAD] = tensors[EMBEDDING].clone()
    if head == "none":
        del tensors[HEAD]
    if head == "alone":
        del tensors[EMBEDDING]
    named = {name if name == HEAD else prefix + name.removeprefix("model."): value for name, value in tensors.items()}
    found = judge(write(tmp_path / "model", named, keys | {"tie_word_embeddings": tied}))
    if head == "none" and not tied:
        assert f"'{HEAD}' that LlamaForCausalLM needs is missing (the checkpoint holds the bare model" in found
    elif head == "alone" and not tied:
        assert f"'{EMBEDDING}' that LlamaForCausalLM needs is missing" in found
    else:
        assert found == "equal"


@pytest.mark.parametrize("family", [family for family in ONCE if family.values[0] in CLASSIFIED])
@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("prefix", ["model.", ""])
def test_classifiers_with_and_without_the_prefix(family, labels, prefix, tmp_path):
    tensors, keys = tensors_of(family, auto=AutoModelForSequenceClassification, num_labels=labels, tie_word_embeddings=True)
    named = {prefix + n.removeprefix("model.") if n.startswith("model.") else n: t for n, t in tensors.items()}
    assert judge(write(tmp_path / "model", named, keys)) == "equal"


@pytest.mark.parametrize("named", [["Qwen3Model"], None, []])
def test_checkpoints_of_the_bare_model(named, model, tmp_path):
    tensors, keys = model("qwen3")
    del tensors[HEAD]
    bare = {name.removeprefix("model."): value for name, value in tensors.items()}
    assert judge(write(tmp_path / "model", bare, keys | {"architectures": named, "tie_word_embeddings": True})) == "equal"


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        (lambda name: f"base_model.model.{name}", r"prefix 'base_model.model.model.' instead of 'model.'; a PEFT model"),
        (lambda name: f"module.{name}", r"prefix 'module.model.' instead of 'model.'; the model was saved inside Distr"),
        (lambda name: f"_orig_mod.{name}", "inside torch.compile"),
        (lambda name: name.replace("model.", "model.language_model."), "a multimodal model"),
        (lambda name: name.replace("model.", "transformer."), "prefix 'transformer.' instead of 'model.'"),
        (lambda name: name.replace("q_proj.", "qkv_proj."), "stored fused"),
        (lambda name: name.replace("proj.weight", "proj.qweight"), "quantised"),
        (lambda name: name.replace("proj.weight", "proj.lora_A.weight"), "LoRA adapter"),
        (lambda name: name.replace("lm_head", "score"), "the file holds a classifier"),
        (lambda name: name.replace("lm_head", "lm_head.modules_to_save"), "a PEFT model was saved unmerged"),
        (lambda name: name.replace("lm_head", "output"), "the head has another name, 'output.weight'"),
    ],
    ids=[
        "peft",
        "ddp",
        "compile",
        "multimodal",
        "foreign",
        "fused",
        "quantised",
        "adapter",
        "classifier",
        "saved modules",
        "other head",
    ],
)
def test_missing_tensors_say_why(rename, message, model, tmp_path):
    tensors, keys = model()
    folder = write(tmp_path / "model", {rename(name): value for name, value in tensors.items()}, keys)
    with pytest.raises(ModelError, match=message):
        open_files(EngineConfig(model=str(folder), skip_tokenizer_init=True)).load()


def test_two_names_of_one_parameter_are_refused(model, tmp_path):
    tensors, keys = model()
    tensors["norm.weight"] = tensors[NORM] + 1
    assert "stand for the same parameter" in judge(write(tmp_path / "model", tensors, keys))


# Numbers


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_weights_that_are_not_finite(value, kind, model, tmp_path):
    tensors, keys = model()
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = value
    tensors = {name: tensor.to(kind) for name, tensor in tensors.items()}
    folder = write(tmp_path / "model", tensors, keys)
    for dtype in ("float32", "bfloat16", "float16"):
        with pytest.raises(ModelError, match=rf"{folder}: tensor '{name}' holds NaN or infinite values; the file is damaged"):
            open_files(EngineConfig(model=str(folder), dtype=dtype, skip_tokenizer_init=True)).load()


@pytest.mark.parametrize("value", [70_000.0, -70_000.0])
def test_weights_beyond_the_range_of_the_engine_s_dtype(value, model, tmp_path):
    tensors, keys = model()
    tensors[NORM][7] = value
    folder = write(tmp_path / "model", tensors, keys)
    with pytest.raises(ModelError, match=rf"'{NORM}' holds numbers beyond the range of float16; pass dtype='bfloat16'"):
        open_files(EngineConfig(model=str(folder), dtype="float16", skip_tokenizer_init=True)).load()
    for dtype in ("bfloat16", "float32"):
        open_files(EngineConfig(model=str(folder), dtype=dtype, skip_tokenizer_init=True)).load()
