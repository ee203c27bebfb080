"""Quantised folders: weights by each format's formula, logits of transformers over those weights, and refusals."""

import json
import logging
import shutil
import tracemalloc

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from chunkattn.backends.cpu import library
from chunkattn.config import EngineConfig
from chunkattn.engine.plan import packed_bytes
from chunkattn.errors import ConfigError, ModelError
from chunkattn.models.loader import open_files, open_shape
from chunkattn.models.packed import Packed
from chunkattn.models.packing import Packing
from chunkattn.models.quantized_config import quantization_of
from chunkattn.models.quantized_formats import FORMATS, Scheme
from chunkattn.models.quantized_matrix import Matrix
from tests.fuzz.folders import SINGLE, TOLERANCE, dense_logits, numbered, tensors_of, transformers_logits, write
from tests.quantised_folders import KINDS, PACKED, is_linear, quantise

WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
"""Sizes that fill panels and blocks of packed weights."""
Q_PROJ = "model.layers.0.self_attn.q_proj"
needs_library = pytest.mark.skipif(library.refusal() is not None, reason="no native library")


def load(folder, packing=None, **options):
    files = open_files(EngineConfig(model=str(folder), **{"dtype": "float32", "skip_tokenizer_init": True, **options}))
    return files.load(packing=packing)


def config(keys, kind, **changes):
    return keys | {"quantization_config": KINDS[kind].config | changes}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A quantised folder, its twin in float32 and the twin's tensors, made once for each format, family and shape."""
    made = {}

    def get(kind, family="qwen3", chosen=is_linear, **shape):
        key = kind, family, chosen, *shape
        if key not in made:
            tensors, keys = tensors_of(family, **shape)
            tensors = numbered(tensors) if any(".experts." in name for name in tensors) else tensors
            stored, plain = quantise(kind, tensors, np.random.default_rng(3), chosen)
            place = tmp_path_factory.mktemp(kind)
            changes = {} if chosen is is_linear else {"ignore": [], "modules_to_not_convert": []}
            made[key] = write(place / "q", stored, config(keys, kind, **changes)), write(place / "p", plain, keys), plain
        return made[key]

    return get


@pytest.fixture
def damaged(folders, tmp_path):
    """Return a function that copies a quantised folder and changes its tensors or its configuration."""

    def make(kind, change=lambda tensors: None, *, named=None, **changes):
        folder = shutil.copytree(folders(kind)[0], tmp_path / "damaged", dirs_exist_ok=True)
        tensors = load_file(folder / SINGLE)
        change(tensors)
        save_file(tensors, folder / SINGLE)
        keys = json.loads((folder / "config.json").read_text())
        keys["quantization_config"] = named or keys["quantization_config"] | changes
        (folder / "config.json").write_text(json.dumps(keys))
        return folder

    return make


# Values


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_formula(kind, folders):
    folder, _, plain = folders(kind)
    for dtype in ("float32", "bfloat16", "float16"):
        for name, weight in load(folder, dtype=dtype).weights.items():
            expected = plain[name].numpy().astype(jnp.dtype(dtype))
            np.testing.assert_array_equal(np.asarray(weight), expected, err_msg=f"{name} {dtype}")


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_every_format(kind, folders):
    folder, twin, _ = folders(kind)
    expected = transformers_logits(twin)
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(dense_logits(load(folder)), expected, atol=TOLERANCE)


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3_moe", "qwen2_moe", "phi3", "gemma3", "mistral3", "llama", "granitemoehybrid"),
        *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
    ],
)
@pytest.mark.parametrize("kind", ["fp8", "fp8-edges", "ct-int4-asymmetric", "awq", "gptq-ordered", "ct-nvfp4"])
def test_logits_of_families(kind, family, folders):
    """Numbered experts, fused projections and names of multimodal models; routers stay as they are."""
    folder, twin, _ = folders(kind, family)
    np.testing.assert_allclose(dense_logits(load(folder)), transformers_logits(twin), atol=TOLERANCE)


def everything(name, value):
    return is_linear(name, value) or name in ("lm_head.weight", "model.embed_tokens.weight")


@pytest.mark.parametrize("kind", ["fp8", "ct-fp8-channel", "modelopt", "gptq"])
def test_heads_and_embeddings(kind, folders):
    targets = {"targets": ["Linear", "Embedding"]}
    folder, twin, plain = folders(kind, chosen=everything)
    if kind.startswith("ct"):
        keys = json.loads((folder / "config.json").read_text())
        keys["quantization_config"]["config_groups"]["group_0"] |= targets
        (folder / "config.json").write_text(json.dumps(keys))
    decoder = load(folder)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        np.testing.assert_array_equal(np.asarray(decoder.weights[name]), plain[name].numpy())
    np.testing.assert_allclose(dense_logits(decoder), transformers_logits(twin), atol=TOLERANCE)


@pytest.mark.parametrize("shape", [(256, 384), (128, 128)])
def test_blocks_of_fp8_by_transformers(shape):
    """Only sides that the blocks divide: transformers takes the block's size from the number of scales."""
    rng = np.random.default_rng(0)
    codes = torch.from_numpy(rng.normal(0, 60, shape)).to(torch.float8_e4m3fn)
    scales = torch.from_numpy(rng.random((shape[0] // 128, shape[1] // 128)) * 0.01).to(torch.bfloat16)
    matrix = Matrix(Scheme("FP8", 8, (128, 128)), {"weight": view(codes), "weight_scale_inv": view(scales)}, "folder")
    for dtype, same in ((torch.float32, np.float32), (torch.float16, np.float16)):
        expected = Fp8Dequantize(None)._dequantize_one(codes, scales, output_dtype=dtype).numpy()
        np.testing.assert_array_equal(matrix.read(np.dtype(same)), expected)


def test_blocks_of_mxfp4_by_transformers():
    rng = np.random.default_rng(0)
    blocks = torch.from_numpy(rng.integers(0, 256, (5, 4, 16)).astype(np.uint8))
    scales = torch.from_numpy(rng.integers(0, 254, (5, 4)).astype(np.uint8))
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].T
    tensors = {"weight_packed": view(blocks.reshape(5, 64)), "weight_scale": view(scales)}
    found = Matrix(Scheme("MXFP4", 4, (1, 32)), tensors, "folder").read(np.dtype(np.float32))
    np.testing.assert_array_equal(found, expected.numpy())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("ct") and "ordered" not in kind])
def test_matrices_by_compressed_tensors(kind):
    """The package takes no order of inputs any more."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    made = KINDS[kind].make(np.random.default_rng(1), 64, 128)
    group = KINDS[kind].config["config_groups"]["group_0"]
    compressor = BaseCompressor.get_value_from_registry(KINDS[kind].config["format"])
    found = compressor.decompress(made.tensors, QuantizationScheme(**group))["weight"]
    expected = torch.from_numpy(np.ascontiguousarray(made.values)).to(found.dtype)
    assert torch.equal(found, expected)


NAMES = {
    torch.float8_e4m3fn: ("F8_E4M3", ml_dtypes.float8_e4m3fn),
    torch.bfloat16: ("BF16", ml_dtypes.bfloat16),
    torch.float16: ("F16", np.float16),
    torch.float32: ("F32", np.float32),
    torch.int8: ("I8", np.int8),
    torch.uint8: ("U8", np.uint8),
    torch.int32: ("I32", np.int32),
    torch.int64: ("I64", np.int64),
}
"""Types of safetensors files and of NumPy."""


def view(tensor):
    name, dtype = NAMES[tensor.dtype]
    return name, tensor.reshape(-1).view(torch.uint8).numpy().view(dtype).reshape(tensor.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_matrix(kind, tmp_path):
    rng = np.random.default_rng(4)
    made = KINDS[kind].make(rng, 48, 96)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": KINDS[kind].config}))
    scheme = quantization_of(tmp_path).scheme_of(["module"], "Linear")
    tensors = {leaf: view(tensor) for leaf, tensor in made.tensors.items() if leaf in FORMATS[scheme.format].leaves}
    matrix = Matrix(scheme, tensors, "folder")
    whole = None if matrix.packed_format is None else matrix.blocks(())
    for _ in range(20):
        if whole is not None:
            first, last = sorted(rng.choice(4, 2, replace=False).tolist())
            size = whole.shape[1] // 3
            part = matrix.blocks((slice(5, 33), slice(first * 32, last * 32)))
            np.testing.assert_array_equal(part, whole[5:33, first * size : last * size])
        rows, columns = (slice(*sorted(rng.integers(0, size + 1, 2).tolist())) for size in (48, 96))
        np.testing.assert_array_equal(matrix.read(np.dtype(np.float32), (rows, columns)), made.values[rows, columns])


# Packed weights


@needs_library
@pytest.mark.parametrize("kind", KINDS)
def test_packed_values_are_the_dequantised_ones(kind, folders):
    folder, _, plain = folders(kind, **WIDE)
    decoder = load(folder, Packing())
    packed = {name: weight for name, weight in decoder.weights.items() if isinstance(weight, Packed)}
    assert {weight.format for weight in packed.values()} == ({PACKED[kind]} if kind in PACKED else set())
    assert len(packed) in (0, 14)
    for name, weight in packed.items():
        rows = np.asarray(weight.rows(jnp.arange(plain[name].shape[0], dtype=jnp.int32)))
        np.testing.assert_array_equal(rows, plain[name].numpy(), err_msg=name)


@needs_library
@pytest.mark.parametrize("kind", ["ct-int4", "gptq-columns"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "phi3"])
def test_packed_logits(kind, family, folders):
    changes = WIDE | ({"moe_intermediate_size": 32} if "moe" in family else {})
    folder, twin, _ = folders(kind, family, **changes)
    decoder = load(folder, Packing())
    assert sum(isinstance(weight, Packed) for weight in decoder.weights.values()) == 14
    np.testing.assert_allclose(dense_logits(decoder), transformers_logits(twin), atol=0.02)  # logits up to 10


@needs_library
def test_scales_beyond_float16_are_not_packed(damaged, caplog):
    def change(tensors):
        tensors[f"{Q_PROJ}.weight_scale"][0] = 1e-30

    folder = damaged("ct-int4", change)
    types = open_shape(EngineConfig(model=str(folder)))[2]
    assert types[f"{Q_PROJ}.weight"] == "packed integers"
    assert types["model.layers.1.self_attn.q_proj.weight"] == "Q4_0"
    assert types["model.norm.weight"] == "F32"


@needs_library
def test_options_of_packed_weights(folders):
    with pytest.raises(ConfigError, match=r"no matrix can be packed: .*FP8 has no packed format"):
        load(folders("fp8", **WIDE)[0], Packing(is_needed=True))
    rounded = load(folders("fp8", **WIDE)[0], Packing(rounds=True)).weights[f"{Q_PROJ}.weight"]
    assert rounded.format == "Q8_0"


@needs_library
@pytest.mark.parametrize("kind", ["ct-int4", "gptq-columns", "fp8"])
def test_a_plan_knows_what_is_packed(kind, folders):
    folder, options = str(folders(kind, **WIDE)[0]), {"dtype": "bfloat16"}
    planned = packed_bytes(EngineConfig(model=folder, **options), *open_shape(EngineConfig(model=folder, **options)))
    weights = load(folder, Packing(), **options).weights
    assert planned == (sum(weight.nbytes for weight in weights.values()) if kind in PACKED else None)


# Loading


def test_the_load_tells_what_it_reads(folders, caplog):
    with caplog.at_level(logging.INFO, logger="chunkattn"):
        load(folders("awq")[0])
    assert "14 matrices of AWQ, decoded at the load; activations are not quantised" in caplog.text


def test_modelopt_has_a_file_of_its_own(folders, tmp_path):
    folder, twin, _ = folders("modelopt")
    copy = shutil.copytree(folder, tmp_path / "model")
    keys = json.loads((copy / "config.json").read_text())
    del keys["quantization_config"]
    (copy / "config.json").write_text(json.dumps(keys))
    own = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}
    (copy / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": own}))
    np.testing.assert_allclose(dense_logits(load(copy)), transformers_logits(twin), atol=TOLERANCE)


def scales_of_cache(*, names, shape=()):
    def change(tensors):
        tensors |= {f"model.layers.{layer}.self_attn.{name}": torch.full(shape, 0.5) for layer in (0, 1) for name in names}

    return change


FLOAT8 = {"dynamic": False, "num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    ("kind", "names", "changes"),
    [
        ("modelopt", ("k_proj.k_scale", "v_proj.v_scale"), {"kv_cache_scheme": FLOAT8}),
        ("modelopt-fp8", ("k_proj.k_scale", "v_proj.v_scale"), {"kv_cache_quant_algo": "FP8"}),
        ("ct-fp8-channel", ("k_scale", "v_scale"), {"kv_cache_scheme": FLOAT8 | {"strategy": "tensor", "symmetric": True}}),
        ("fp8", ("kv_scale",), {}),
        ("ct-nvfp4", (), {"kv_cache_scheme": FLOAT8}),
    ],
)
def test_a_scheme_of_the_cache_is_no_scheme_of_weights(kind, names, changes, folders, damaged, caplog):
    folder = damaged(kind, scales_of_cache(names=names), **changes)
    with caplog.at_level(logging.WARNING, logger="chunkattn"):
        found = load(folder).weights
    told = [record.getMessage() for record in caplog.records if "K/V" in record.getMessage()]
    assert told == [f"{folder}: the checkpoint's scheme and scales of K/V are not used; K/V has the kv_cache_dtype"]
    assert "_scale" not in caplog.text
    for name, value in folders(kind)[2].items():
        if name in found:
            np.testing.assert_array_equal(found[name], value.numpy())


def test_a_scheme_of_the_cache_alone(folders, tmp_path):
    twin, plain = folders("modelopt")[1:]
    copy = shutil.copytree(twin, tmp_path / "model")
    own = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (copy / "hf_quant_config.json").write_text(json.dumps({"quantization": own}))
    np.testing.assert_array_equal(load(copy).weights[f"{Q_PROJ}.weight"], plain[f"{Q_PROJ}.weight"].numpy())


def test_the_settings_are_part_of_the_weights_sample(damaged, folders):
    samples = set()
    for folder in (folders("gptq")[0], damaged("gptq", checkpoint_format="gptq_v2")):
        samples.add(open_files(EngineConfig(model=str(folder), skip_tokenizer_init=True)).sample())
    assert len(samples) == 2


def traced_peak(folder):
    """Largest memory of the host during a load: finished weights, which JAX takes over, and one tensor."""
    files = open_files(EngineConfig(model=str(folder), dtype="bfloat16", skip_tokenizer_init=True))
    files.load()  # imports
    tracemalloc.start()
    files.load()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("kind", ["fp8", "ct-nvfp4", "awq", "gptq-ordered"])
def test_peak_memory_is_that_of_a_plain_folder(kind, tmp_path):
    """A matrix has 8 MiB, and decoding takes less beside it. Decoding it whole would take 16 MiB more for each step."""
    tensors, keys = tensors_of("qwen3", hidden_size=256, intermediate_size=16_384, head_dim=32)
    stored, _ = quantise(kind, tensors, np.random.default_rng(0))
    plain = write(tmp_path / "p", {name: value.to(torch.bfloat16) for name, value in tensors.items()}, keys)
    assert traced_peak(write(tmp_path / "q", stored, config(keys, kind))) < traced_peak(plain) + (8 << 20)


# Refusals


def drop(leaf):
    return lambda tensors: tensors.pop(f"{Q_PROJ}.{leaf}")


def put(leaf, change):
    def apply(tensors):
        tensors[f"{Q_PROJ}.{leaf}"] = change(tensors.get(f"{Q_PROJ}.{leaf}"))

    return apply


def filled(leaf, value, place=0):
    def apply(tensors):
        numbers = tensors[f"{Q_PROJ}.{leaf}"]
        tensors[f"{Q_PROJ}.{leaf}"] = changed = numbers.float() if numbers.is_floating_point() else numbers
        changed.view(-1)[place] = value
        tensors[f"{Q_PROJ}.{leaf}"] = changed.to(numbers.dtype)

    return apply


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("fp8", drop("weight_scale_inv"), "tensor 'weight_scale_inv' is missing"),
        ("ct-int8", drop("weight_scale"), "tensor 'weight_scale' is missing"),
        ("ct-int4", drop("weight_shape"), "tensor 'weight_shape' is missing"),
        ("ct-int4-asymmetric", drop("weight_zero_point"), "tensor 'weight_zero_point' is missing"),
        ("ct-int4-ordered", drop("weight_g_idx"), "tensor 'weight_g_idx' is missing"),
        ("ct-nvfp4", drop("weight_global_scale"), "tensor 'weight_global_scale' is missing"),
        ("modelopt", drop("weight_scale_2"), "tensor 'weight_scale_2' is missing"),
        ("awq", drop("qzeros"), "tensor 'qzeros' is missing"),
        ("gptq-ordered", drop("g_idx"), "tensor 'g_idx' is missing"),
        ("gptq", drop("qweight"), "tensor 'qweight' is missing"),
        ("fp8", put("weight_scale_inv", lambda t: t.repeat(2, 1)), r"has shape \[2, 1\] instead of \[1, 1\]"),
        ("ct-fp8-channel", put("weight_scale", lambda t: t[:-1]), r"has shape \[31, 1\] instead of \[32, 1\]"),
        ("ct-int4", put("weight_shape", lambda t: t + 8), "'weight_shape' is"),
        ("ct-int4-asymmetric", put("weight_zero_point", lambda t: t[:-1]), "'weight_zero_point' has shape"),
        ("awq", put("scales", lambda t: t[:, :-1].clone()), "'scales' has shape"),
        ("awq", put("qzeros", lambda t: t[:, :-1].clone()), "'qzeros' has shape"),
        ("gptq", put("g_idx", lambda t: t[:-1]), "'g_idx' has shape"),
        ("gptq", put("qweight", lambda t: t[:-1]), "'g_idx' has shape"),
        ("fp8", filled("weight_scale_inv", float("nan")), "'weight_scale_inv' holds NaN or infinite scales"),
        ("ct-fp8-tensor", filled("weight_scale", float("inf")), "'weight_scale' holds NaN or infinite scales"),
        ("awq", filled("scales", float("inf"), 7), "'scales' holds NaN or infinite scales"),
        ("modelopt", filled("weight_scale", float("nan"), 3), "'weight_scale' holds NaN or infinite scales"),
        ("ct-nvfp4", filled("weight_global_scale", 0), "'weight_global_scale' is 0.0; the file is damaged"),
        ("ct-mxfp4", filled("weight_scale", 255, 1), "holds NaN or infinite scales"),
        ("gptq", filled("qzeros", -1), "'qzeros' holds zero points of 16, which packages read in several ways"),
        ("gptq-ordered", filled("g_idx", 9, 2), "'g_idx' holds groups from 0 to 9, and there are 2"),
        ("ct-int4-ordered", filled("weight_g_idx", -1, 2), "'weight_g_idx' holds groups from -1 to 1"),
        ("gptq-ordered", filled("g_idx", -1, 2), "'g_idx' holds groups from -1"),
        ("fp8", put("weight", lambda t: t.float()), "'weight' is F32 instead of F8_E4M3"),
        ("fp8", put("weight", lambda t: t.to(torch.float8_e5m2)), "is F8_E5M2, which no supported quantisation has"),
        ("fp8", put("weight_scale", lambda _: torch.ones(1)), "'weight_scale' stand for the same scales"),
        ("ct-int4", put("weight_zero_point", lambda _: torch.ones(4, 1, dtype=torch.int32)), "says that there are none"),
        ("ct-int4", put("weight_zero_point", lambda _: torch.ones(32, dtype=torch.int32)), r"\[32\] instead of \[4, 1\]"),
        ("ct-int8", put("weight", lambda t: t[:0]), r"'weight' has shape \[0, 32\], which is that of no matrix"),
        ("ct-fp8-tensor", put("weight", lambda t: t[:, :0].clone()), r"'weight' has shape \[32, 0\], which is that of no"),
        ("gptq", put("qweight", lambda t: t[0].clone()), r"'qweight' has shape \[32\], which is that of no matrix"),
        ("modelopt", put("pre_quant_scale", lambda _: torch.ones(32)), "'pre_quant_scale', which NVFP4 of Mod"),
        ("gptq", put("weight_scale", lambda _: torch.ones(32)), "'weight_scale', which GPTQ does not have"),
    ],
)  # fmt: skip
def test_damaged_tensors(kind, change, message, damaged):
    folder = damaged(kind, change)
    tracemalloc.start()
    with pytest.raises(ModelError, match=rf"damaged: module '{Q_PROJ}'.*{message}|{message}"):
        load(folder)
    tracemalloc.stop()


_GROUP = {"targets": ["Linear"]}


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("fp8", {"quant_method": "hqq"}, "quant_method 'hqq' is not supported; supported are fp8, compressed-tensors, mod"),
        ("fp8", {"quant_method": "bitsandbytes"}, r"convert the model, .*dequantize\(\).save_pretrained"),
        ("fp8", {"quant_method": None}, "quant_method '' is not supported"),
        ("fp8", {"fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
        ("fp8", {"weight_block_size": [128]}, "weight_block_size must be two positive integers"),
        ("fp8", {"weight_block_size": 128}, "weight_block_size has the wrong type"),
        ("fp8", {"expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
        ("ct-int4", {"transform_config": {"config_groups": {}}}, "transform_config is set: rotations"),
        ("ct-int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "format 'sparse-24-bitmask' is not supported"),
        ("ct-int4", {"format": "marlin-24"}, "int4 in format 'marlin-24' is not supported"),
        ("ct-int4", {"config_groups": {"a": ["Linear"]}}, "config_groups.a: must be an object"),
        ("ct-int4", {"config_groups": {"a": {**_GROUP, "weights": {"num_bits": 3}}}}, "int3 in format 'pack-quantized'"),
        ("ct-int4", {"config_groups": {"a": {**_GROUP, "weights": {"num_bits": 4, "strategy": "token"}}}}, "strategy 'token'"),
        ("ct-int4", {"config_groups": {"a": {**_GROUP, "weights": {"num_bits": 4, "strategy": "group"}}}}, "group_size None"),
        ("ct-int4", {"config_groups": {}}, "is stored quantised, but quantization_config leaves it out"),
        ("ct-int4", {"ignore": ["re:.*q_proj"]}, "is stored quantised, but quantization_config leaves it out"),
        ("ct-int4", {"ignore": ["re:(("]}, "is no regular expression"),
        ("fp8", {"modules_to_not_convert": ["model.layers.0"]}, "is stored quantised, but quantization_config leaves it out"),
        ("modelopt", {"ignore": ["*self_attn*"]}, "is stored quantised, but quantization_config leaves it out"),
        ("modelopt", {"quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not supported; supported are NVFP4, FP8"),
        ("modelopt", {"quant_algo": None}, "is stored quantised, but quantization_config leaves it out"),
        ("modelopt-fp8", {"config_groups": {"a": {"weights": {"num_bits": 4}}}}, "num_bits 4 is not supported"),
        ("modelopt", {"group_size": 32}, "group_size 32 is not supported"),
        ("awq", {"bits": 8}, "bits 8 is not supported; supported are 4"),
        ("awq", {"version": "gemv"}, "version 'gemv' is not supported; supported are gemm"),
        ("awq", {"zero_point": False}, "zero_point False is not supported"),
        ("awq", {"group_size": 0}, "group_size must be a positive integer or -1, got 0"),
        ("awq", {"group_size": 32}, "48 inputs are no multiple of the group of 32"),
        ("gptq", {"bits": 3}, "bits 3 is not supported; supported are 4, 8"),
        ("gptq", {"bits": True}, "bits has the wrong type: True"),
        ("gptq", {"bits": 8}, "'scales' has shape"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported; supported are gptq, gptq_v2"),
        ("gptq", {"dynamic": {"+:.*down": {"bits": 8}}}, "dynamic gives '.:.*down' settings of its own"),
        ("gptq", {"pack_dtype": "int16"}, "pack_dtype 'int16'"),
    ],
)  # fmt: skip
def test_settings_that_are_refused(kind, changes, message, damaged):
    with pytest.raises(ModelError, match=f"config.json: quantization_config.*{message}|{message}"):
        load(damaged(kind, **changes))


def test_groups_of_modules(folders, damaged):
    """A name counts before a pattern, and a pattern before a class."""
    group = KINDS["ct-int4"].config["config_groups"]["group_0"]
    wrong = {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}
    named = {"a": wrong, "b": group | {"targets": [r"re:model\.layers.*"]}}
    expected = load(folders("ct-int4")[0]).weights
    for name, weight in load(damaged("ct-int4", config_groups=named)).weights.items():
        np.testing.assert_array_equal(weight, expected[name])
    with pytest.raises(ModelError, match=r"two config_groups name module 'model.layers.0.*'"):
        load(damaged("ct-int4", config_groups={"a": wrong, "b": group}))


def test_a_folder_without_its_settings(folders, tmp_path):
    for kind, message in (
        ("gptq", "is quantised, and config.json has no quantization_config"),
        ("fp8", "is F8_E4M3; supported"),
    ):
        folder = shutil.copytree(folders(kind)[0], tmp_path / kind)
        keys = json.loads((folder / "config.json").read_text())
        del keys["quantization_config"]
        (folder / "config.json").write_text(json.dumps(keys))
        with pytest.raises(ModelError, match=message):
            load(folder)
