"""Adapters that are merged at the load, against transformers with W + s B A, and against PEFT."""

import json
import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

from chunkattn import LLM
from chunkattn.config import EngineConfig
from chunkattn.errors import ModelError
from chunkattn.models import adapters, weights
from chunkattn.models.loader import open_files
from chunkattn.models.packing import Packing
from tests.adapter_files import linears, make_adapter, make_peft, save_adapter
from tests.fuzz.folders import dense_logits
from tests.gguf_files import write

IDS = np.random.default_rng(3).integers(0, 128, 40)


def files_of(folder, adapter, **options):
    options = {"dtype": "float32", "skip_tokenizer_init": True, **options}
    return open_files(EngineConfig(model=str(folder), adapter=str(adapter), **options))


def logits_of(model) -> np.ndarray:
    with torch.no_grad():
        return model(torch.as_tensor(IDS)[None]).logits[0].numpy()


def ends_of(oracle, name) -> list[str]:
    return sorted({module.split(".", 3)[-1].rpartition(".")[2] for module in linears(oracle(name).model)})


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen3", "phi3", "granite4", "qwen2-moe", "qwen3-moe", "gemma3-window"),
        *("mistral3-nested", "gemma3-nested-window"),
    ],
)
def test_a_merged_adapter_is_transformers_with_its_products(name, checkpoint, oracle, tmp_path):
    """All matrices of every kind of names: plain, fused, of a shared expert, and of a multimodal model."""
    witness = make_adapter(tmp_path, oracle(name).model, ends_of(oracle, name), target_modules="all-linear")
    decoder = files_of(checkpoint(name), tmp_path).load()
    assert np.abs(logits_of(witness) - oracle(name).logits(IDS)).max() > 0.1
    np.testing.assert_allclose(dense_logits(decoder, IDS), logits_of(witness), atol=1e-4)


@pytest.mark.parametrize(
    "case",
    [
        {"r": 8, "lora_alpha": 32, "use_rslora": True},
        {
            "target_modules": r".*\.layers\.[02]\..*(q|v)_proj",
            "ends": tuple(f"{n}.self_attn.{m}_proj" for n in (0, 2) for m in "qv"),
        },
        {"layers_to_transform": [1], "layers_pattern": "layers", "ends": ("1.self_attn.q_proj",), "target_modules": ["q_proj"]},
        {"layers_to_transform": 1, "ends": ("1.self_attn.q_proj",), "target_modules": ["q_proj"]},
        {"ends": ("q_proj", "lm_head")},
        {
            "exclude_modules": ["0.self_attn.q_proj", "2.self_attn.q_proj"],
            "target_modules": ["q_proj"],
            "ends": ("1.self_attn.q_proj",),
        },
        {
            "rank_pattern": {"1.self_attn.q_proj": 7},
            "alpha_pattern": {"v_proj": 11},
            "rank": lambda name: 7 if name.endswith("1.self_attn.q_proj") else 4,
            "scale": lambda name: (11 if "v_proj" in name else 6) / (7 if name.endswith("1.self_attn.q_proj") else 4),
        },
    ],
    ids=["rslora", "regex", "layers", "layer", "head", "excluded", "patterns"],
)
def test_the_fields_of_a_configuration_count(case, checkpoint, oracle, tmp_path):
    witness = make_adapter(tmp_path, oracle("qwen3").model, **case)
    if "lm_head" in case.get("ends", ()):  # tied: only the head has the product
        assert witness.lm_head.weight is not witness.model.embed_tokens.weight
    decoder = files_of(checkpoint("qwen3"), tmp_path).load()
    np.testing.assert_allclose(dense_logits(decoder, IDS), logits_of(witness), atol=1e-4)


def test_a_head_to_save_replaces_the_head(checkpoint, oracle, tmp_path):
    witness = make_adapter(tmp_path, oracle("qwen3").model, modules_to_save=["lm_head"])
    head = torch.randn(128, 64, generator=torch.Generator().manual_seed(5)) * 0.1
    tensors = load_file(tmp_path / "adapter_model.safetensors") | {"base_model.model.lm_head.weight": head}
    save_adapter(tmp_path, json.loads((tmp_path / "adapter_config.json").read_text()), tensors)
    witness.lm_head.weight = torch.nn.Parameter(head)
    decoder = files_of(checkpoint("qwen3"), tmp_path).load()
    np.testing.assert_allclose(dense_logits(decoder, IDS), logits_of(witness), atol=1e-4)


def test_a_sum_is_rounded_once(checkpoint, oracle, tmp_path):
    witness = make_adapter(tmp_path, oracle("llama").model, dtype=torch.bfloat16)
    decoder = files_of(checkpoint("llama"), tmp_path, dtype="bfloat16").load()
    name = "model.layers.1.self_attn.q_proj.weight"
    merged = witness.get_parameter(name).to(torch.bfloat16)
    ours = torch.as_tensor(np.asarray(decoder.weights[name], np.float32))
    rounded_first = witness.get_parameter(name) - oracle("llama").model.get_parameter(name)
    rounded_first = (oracle("llama").model.get_parameter(name).to(torch.bfloat16) + rounded_first.to(torch.bfloat16)).float()
    differing = (ours != merged.float()).float().mean()
    assert differing < 0.01  # sums of float32 in another order may round to a neighbour
    assert (ours != rounded_first).float().mean() > 0.1


def test_packed_matrices_that_an_adapter_touches_are_dequantised(tmp_path, caplog):
    """A Q8_0 file keeps its blocks but for the touched matrices, and the log says so."""
    written = write(tmp_path / "base.gguf", "qwen3", Kind.Q8_0)
    witness = make_adapter(tmp_path / "adapter", written.model)
    with caplog.at_level(logging.INFO, "chunkattn"):
        files = files_of(written.path, tmp_path / "adapter", dtype="bfloat16")
        decoder = files.load(packing=Packing())
    assert "merged into 4 matrices; 4 of them are blocks in the file and are dequantised" in caplog.text
    kinds = {name: type(weight).__name__ for name, weight in decoder.weights.items() if name.endswith("_proj.weight")}
    assert {name.split(".")[-2] for name, kind in kinds.items() if kind != "Packed"} == {"q_proj", "v_proj"}
    whole = files_of(written.path, tmp_path / "adapter").load()
    np.testing.assert_allclose(dense_logits(whole, IDS), logits_of(witness), atol=1e-4)


def test_the_fingerprint_and_the_sample_know_the_adapter(checkpoint, oracle, tmp_path):
    prints = set()
    for seed in (1, 2):
        make_adapter(tmp_path / str(seed), oracle("qwen3").model, seed=seed)
        files = files_of(checkpoint("qwen3"), tmp_path / str(seed))
        options = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 20}
        llm = LLM(str(checkpoint("qwen3")), adapter=tmp_path / str(seed), **options)
        prints |= {files.sample(), llm.core.runner.fingerprint()}
    assert len(prints) == 4


def rewrite(folder: Path, change, **fields) -> None:
    """Change the tensors and the fields of an adapter."""
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text()) | fields
    save_adapter(folder, config, change(tensors) or tensors)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("fields", "change", "message"),
    [
        ({"use_dora": True}, None, "DoRA is not supported"),
        ({"peft_type": "IA3"}, None, "peft_type 'IA3' is not supported; only LORA is"),
        ({"fan_in_fan_out": True}, None, "a transposed weight is not supported"),
        ({"bias": "all"}, None, "bias 'all' is not supported"),
        ({"init_lora_weights": "pissa"}, None, "'pissa' changes the base model's weights"),
        ({"modules_to_save": ["embed_tokens"]}, None, "modules_to_save 'embed_tokens' is not supported; only a head"),
        ({"target_parameters": ["experts.down_proj"]}, None, "target_parameters is set"),
        ({"alora_invocation_tokens": [1]}, None, "activated LoRA"),
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, None, r"o_proj', which target_modules names, are missing"),
        ({"target_modules": ["v_proj"]}, None, r"q_proj' is not among the target_modules"),
        ({"r": 5}, None, r"shape \[4, 64\], base model and adapter_config.json say \[5, 64\]"),
        ({"r": 0}, None, "r must be a positive integer, got 0"),
        ({"lora_alpha": "x"}, None, "lora_alpha must be a finite number"),
        ({"target_modules": "("}, None, "no regular expression"),
        ({}, lambda t: t.pop(FIRST) is None, r"lora_A of 'model.layers.0.self_attn.q_proj' is missing"),
        ({}, lambda t: t.update({FIRST: t[FIRST][:, :9]}), r"shape \[4, 9\]"),
        ({}, lambda t: t.update({FIRST.replace("q_proj", "w_proj"): t[FIRST]}), r"w_proj' is missing"),
        ({}, lambda t: t.update({FIRST.replace("lora_A.weight", "lora_magnitude_vector"): t[FIRST]}), "DoRA"),
        ({}, lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": t[FIRST]}), "LoRA of embeddings"),
        ({}, lambda t: t.update({"base_model.model.model.norm.weight": t[FIRST]}), "for a head only"),
        ({}, lambda t: t.update({"base_model.model.score.weight": t[FIRST]}), "no place for the head"),
        (
            {},
            lambda t: t.update({FIRST.replace("layers.0", "layers.7").replace("_A", f): t[FIRST] for f in ("_A", "_B")}),
            "no matrix",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(fields, change, message, checkpoint, oracle, tmp_path):
    make_adapter(tmp_path, oracle("qwen3").model)
    rewrite(tmp_path, change or (lambda tensors: None), **fields)
    with pytest.raises(ModelError, match=message) as caught:
        files_of(checkpoint("qwen3"), tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_values_are_read_once_and_checked(checkpoint, oracle, tmp_path, monkeypatch):
    """Opening the files reads the shapes alone, and the load reads each tensor once."""
    read, whole = [], adapters.safe_open

    class Counted:
        def __init__(self, *args, **options):
            self._handle = whole(*args, **options)

        def __enter__(self):
            self._handle.__enter__()
            return self

        def __exit__(self, *raised):
            self._handle.__exit__(*raised)

        def __getattr__(self, name):
            return getattr(self._handle, name)

        def get_tensor(self, name):
            read.append(name)
            return self._handle.get_tensor(name)

    monkeypatch.setattr(adapters, "safe_open", Counted)
    make_adapter(tmp_path, oracle("qwen3").model)
    files = files_of(checkpoint("qwen3"), tmp_path)
    files.sample()
    assert read == []
    files.load()
    assert len(read) == len(set(read)) == 12
    rewrite(tmp_path, lambda t: t.update({FIRST: t[FIRST] * torch.nan}))
    files = files_of(checkpoint("qwen3"), tmp_path)
    monkeypatch.setattr(weights, "load_weights", None)  # no weight of the base model is read before the error
    with pytest.raises(ModelError, match=f"{tmp_path}.*NaN or infinite"):
        files.load()


def test_a_folder_without_an_adapter_is_refused(checkpoint, tmp_path):
    with pytest.raises(ModelError, match=r"no adapter_config\.json"):
        files_of(checkpoint("qwen3"), tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "target_modules": ["q_proj"]}')
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80")
    with pytest.raises(ModelError, match=r"adapter_model\.bin is a pickle"):
        files_of(checkpoint("qwen3"), tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x80")
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        files_of(checkpoint("qwen3"), tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "down_proj"], "r": 3, "lora_alpha": 5},
        {"target_modules": "all-linear", "use_rslora": True},
        {"target_modules": r".*1\.self_attn\.(k|o)_proj"},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 2], "rank_pattern": {"0.self_attn.q_proj": 2}},
        {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"0.self_attn.q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
        {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    ],
)
def test_an_adapter_of_peft_is_peft(fields, checkpoint, oracle, tmp_path):
    model = make_peft(tmp_path, oracle("llama").model, seed=1, **fields)
    decoder = files_of(checkpoint("llama"), tmp_path).load()
    assert np.abs(logits_of(model) - oracle("llama").logits(IDS)).max() > 0.1
    assert math.isfinite(logits_of(model).sum())
    np.testing.assert_allclose(dense_logits(decoder, IDS), logits_of(model), atol=1e-4)
