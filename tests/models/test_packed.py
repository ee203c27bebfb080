"""Packed weights: logits against transformers on dequantised weights, the choice of what is packed, and loading.

`tests/backends` has the products alone.
"""

import copy
import logging
import re
from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from chunkattn import LLM, ChunkedPrompt, SamplingParams
from chunkattn.backends.cpu import library, packed
from chunkattn.config import EngineConfig
from chunkattn.engine.invariance import rows_agree
from chunkattn.errors import ConfigError, ModelError
from chunkattn.models import packing
from chunkattn.models.loader import open_files
from chunkattn.models.packed import Packed
from chunkattn.models.packing import Packing
from chunkattn.models.shards import Shards
from chunkattn.models.weights import save_weights
from tests.fuzz.folders import dense_logits
from tests.gguf_files import CONFIGS, Written, write

pytestmark = pytest.mark.skipif(library.refusal() is not None, reason="no native library")

KINDS = [Kind[name] for name in packed.FORMATS]
IDS = np.random.default_rng(5).integers(0, 128, 60)
MIXED = {
    "token_embd": Kind.Q6_K,
    "attn_v": Kind.Q6_K,
    "attn_output": Kind.Q5_0,
    "ffn_down": Kind.Q8_0,
    "attn_k": Kind.Q3_K,
    "ffn_up": Kind.F16,
}
"""Types of tensors beside Q4_K: those of real files, one that is not packed, and numbers."""
ENGINE = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 2 << 20, "max_num_batched_tokens": 128, "max_num_seqs": 8}
PROMPT = ChunkedPrompt([*range(20)], [[*range(30, 57)], [*range(60, 79)]], [5, 6, 7])
GREEDY = SamplingParams(temperature=0, max_tokens=4, logprobs=3)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A random model in a GGUF file of one type, made once."""
    made = {}

    def get(kind, name="llama-tied"):
        if (kind, name) not in made:
            path = tmp_path_factory.mktemp("packed") / f"{name}-{kind.name}.gguf"
            made[kind, name] = write(path, name, kind)
        return made[kind, name]

    return get


INT16 = Packing()


def load(path, chosen=INT16, **options):
    """The decoder of a file or folder under a packing."""
    files = open_files(EngineConfig(model=str(path), **{"dtype": "float32", "skip_tokenizer_init": True, **options}))
    return files.load(packing=chosen)


def formats(decoder):
    return {name: weight.format for name, weight in decoder.weights.items() if isinstance(weight, Packed)}


# Values


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_logits_of_every_format(kind, written):
    """A tied head is gathered and multiplied; the rows of queries and keys are stored in another order."""
    file = written(kind)
    expected = file.oracle().logits(IDS)
    assert np.std(expected) > 0.1
    decoder = load(file.path)
    assert {*formats(decoder).values()} == {kind.name}
    assert len(formats(decoder)) == 1 + 2 * 7
    np.testing.assert_allclose(dense_logits(decoder, IDS), expected, atol=1e-3)
    coarse = np.abs(dense_logits(load(file.path, Packing(digits=1)), IDS) - expected)
    assert 1e-3 < coarse.mean() < 0.1


@pytest.mark.parametrize(
    "name", ["llama", "llama-bias", "qwen2", "qwen3", "qwen3moe", "gemma3", "granite", "olmo2", "phi3", "ministral3"]
)
def test_logits_of_every_family(name, written):
    file = written(Kind.Q8_0, name)
    np.testing.assert_allclose(dense_logits(load(file.path), IDS), file.oracle().logits(IDS), atol=1e-3)


def test_a_file_of_many_types(tmp_path, caplog):
    file = Written(tmp_path / "model.gguf", CONFIGS["llama-tied"], Kind.Q4_K, kinds=MIXED)
    with caplog.at_level(logging.INFO, logger="chunkattn"):
        decoder = load(file.path)
    layer = {"q_proj": "Q4_K", "v_proj": "Q6_K", "o_proj": "Q5_0", "gate_proj": "Q4_K", "down_proj": "Q8_0"}
    found = {name.split(".")[-2]: form for name, form in formats(decoder).items()}
    assert found == layer | {"embed_tokens": "Q6_K"}
    assert "2 matrices packed as Q8_0, multiplied with int16" in caplog.text
    assert "2 matrices dequantised: Q3_K has no packed format" in caplog.text
    assert "2 matrices dequantised: F16 has no packed format" in caplog.text
    np.testing.assert_allclose(dense_logits(decoder, IDS), file.oracle().logits(IDS), atol=1e-3)


@pytest.mark.parametrize("up", [Kind.Q5_K, Kind.F16])
def test_experts_of_many_types(up, tmp_path):
    """Gate and inner layer of two types, or one of them as numbers; the router is never packed."""
    kinds = {"ffn_up_exps": up, "ffn_down_exps": Kind.Q6_K}
    file = Written(tmp_path / "model.gguf", CONFIGS["qwen3moe"], Kind.Q4_K, kinds=kinds)
    for rounds, form in ((False, {Kind.F16: None}.get(up, up.name)), (True, {Kind.F16: "Q8_0"}.get(up, up.name))):
        decoder = load(file.path, Packing(rounds=rounds))
        found = {name.split(".")[-2]: form for name, form in formats(decoder).items() if "mlp" in name}
        parts = {"gate_proj": "Q4_K", "up_proj": form, "down_proj": "Q6_K"}
        assert found == {part: form for part, form in parts.items() if form}
        assert decoder.weights["model.layers.0.mlp.experts.up_proj.weight"].shape == (6, 256, 256)
        bound = 1e-3 if form in (None, up.name) else 0.05
        np.testing.assert_allclose(dense_logits(decoder, IDS), file.oracle().logits(IDS), atol=bound)


def test_a_vocabulary_that_fills_no_panel(tmp_path):
    config = copy.deepcopy(CONFIGS["llama-tied"])
    config.vocab_size = 131
    file = Written(tmp_path / "model.gguf", config, Kind.Q4_0)
    decoder = load(file.path)
    assert decoder.head.shape == (144, 256)
    expected = file.oracle().logits([*IDS, 130])
    np.testing.assert_allclose(dense_logits(decoder, [*IDS, 130]), expected, atol=1e-3)


@torch.no_grad()
def rounded_oracle(oracle):
    """transformers over weights that the gguf package has rounded to Q8_0."""
    made = copy.deepcopy(oracle)
    for parameter in made.model.parameters():
        if parameter.ndim == 2:
            blocks = gguf.quants.quantize(parameter.numpy(), Kind.Q8_0)
            parameter.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, Kind.Q8_0)))
    return made


@pytest.mark.parametrize("name", ["llama-bias", "qwen3"])
def test_an_ordinary_checkpoint_is_rounded(name, checkpoint, oracle):
    decoder = load(checkpoint(name), Packing(rounds=True))
    assert {*formats(decoder).values()} == {"Q8_0"}
    expected = rounded_oracle(oracle(name)).logits(IDS)
    assert np.abs(oracle(name).logits(IDS) - expected).max() > 0.03
    np.testing.assert_allclose(dense_logits(decoder, IDS), expected, atol=3e-3)  # their logits are larger than those of files


def test_rounding_leaves_packed_formats_as_they_are(tmp_path):
    file = Written(tmp_path / "model.gguf", CONFIGS["llama-tied"], Kind.Q4_K, kinds=MIXED)
    found = {name.split(".")[-2]: form for name, form in formats(load(file.path, Packing(rounds=True))).items()}
    assert (found["q_proj"], found["k_proj"], found["up_proj"]) == ("Q4_K", "Q8_0", "Q8_0")


# Choice


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dtype": "bfloat16"}, Packing(2)),
        ({"dtype": "float16", "activations": "int8"}, Packing(1)),
        ({"dtype": "float32"}, None),
        ({"dtype": "float32", "weights": "packed"}, Packing(2, is_needed=True)),
        ({"dtype": "bfloat16", "weights": "dequantized"}, None),
        ({"dtype": "float32", "quantization": "int8"}, Packing(2, rounds=True)),
    ],
)
def test_what_is_packed(options, expected):
    config = EngineConfig(**options)
    assert Packing.of(config, jnp.dtype(config.dtype)) == expected


def test_machines_without_the_native_library(monkeypatch):
    monkeypatch.setattr(library, "refusal", lambda: "it runs on CPUs only, and JAX computes on gpu")
    assert Packing.of(EngineConfig(), jnp.dtype("bfloat16")) is None
    for options, named in (({"weights": "packed"}, "weights='packed'"), ({"quantization": "int8"}, "quantization='int8'")):
        with pytest.raises(ConfigError, match=rf"{named} needs the native library .* JAX computes on gpu; leave the option"):
            Packing.of(EngineConfig(**options), jnp.dtype("bfloat16"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int4"}, "weights 'int4' is unknown; choose one of auto, packed, dequantized"),
        ({"activations": "bfloat16"}, "activations 'bfloat16' is unknown; choose one of int16, int8"),
        ({"quantization": "awq"}, "quantization 'awq' is unknown; choose one of int8"),
        ({"quantization": "int8", "weights": "dequantized"}, "weights='dequantized' packs none"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_packed_by_name_needs_a_packed_format(checkpoint):
    with pytest.raises(ConfigError, match=r"weights='packed', but no matrix can be packed: F32 has no packed format"):
        LLM(str(checkpoint("llama")), weights="packed", **ENGINE)


def test_hosts_that_pack_other_matrices(written, monkeypatch):
    told = []
    monkeypatch.setattr(Shards, "agree", lambda self, value: told.append(value))
    for options in ({"dtype": "bfloat16"}, {"dtype": "bfloat16", "activations": "int8"}, {"dtype": "float32"}):
        with pytest.raises(ConfigError, match="the hosts pack different matrices; set weights='dequantized'"):
            LLM(str(written(Kind.Q8_0).path), **options, **ENGINE)
    assert len({*told}) == 3


def test_shapes_that_do_not_fit_stay_dequantised(tmp_path, checkpoint):
    config = copy.deepcopy(CONFIGS["llama-tied"])
    config.intermediate_size = 24  # the outputs of gate and up fill no panel, the inputs of down no block
    file = Written(tmp_path / "model.gguf", config, Kind.F32)
    decoder = load(file.path, Packing(rounds=True))
    assert not {name for name in formats(decoder) if "mlp" in name}
    expected = file.oracle().logits(IDS)
    assert np.abs(dense_logits(decoder, IDS) - expected).mean() < 0.05


# Loading


def test_matrices_are_read_in_pieces(written, monkeypatch):
    path = written(Kind.Q5_K).path
    whole = load(path)
    monkeypatch.setattr(packing, "_PIECE", 50 * 256)
    for name, weight in load(path).weights.items():
        if isinstance(weight, Packed):
            np.testing.assert_array_equal(weight.data, whole.weights[name].data, err_msg=name)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q6_K], ids=lambda kind: kind.name)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_scale_that_is_not_finite(kind, value, written, tmp_path):
    path, name = tmp_path / "model.gguf", "blk.1.ffn_down.weight"
    content = bytearray(written(kind).path.read_bytes())
    path.write_bytes(content)
    files = open_files(EngineConfig(model=str(path), skip_tokenizer_init=True))
    start = files.gguf.tensors[name].start + {Kind.Q8_0: 0, Kind.Q6_K: 208}[kind]
    content[start : start + 2] = np.float16(value).tobytes()
    (bad := tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(
        ModelError, match=r"bad.gguf: tensor 'model.layers.1.mlp.down_proj.weight' holds NaN or infinite values"
    ):
        load(bad)


def test_a_number_that_is_not_finite(tmp_path):
    value = np.zeros((256, 256), np.float32)
    value[3, 7] = np.inf
    path = Written(tmp_path / "model.gguf", CONFIGS["llama"], Kind.F32, tensors={"blk.0.ffn_up.weight": value}).path
    with pytest.raises(ModelError, match="NaN or infinite values"):
        load(path, Packing(rounds=True))


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no smaps")
def test_pages_of_the_file_are_given_back(tmp_path):
    config = copy.deepcopy(CONFIGS["llama"])
    config.vocab_size = 16_000  # the system maps a few pages around each that is read
    path = Written(tmp_path / "model.gguf", config, Kind.Q8_0).path
    files = open_files(EngineConfig(model=str(path), dtype="bfloat16", skip_tokenizer_init=True))
    files.load(packing=Packing())
    maps = Path("/proc/self/smaps").read_text().split("VmFlags")
    (held,) = {int(re.search(r"Rss: +(\d+) kB", part)[1]) for part in maps if str(path) in part}
    assert held * 1024 < 0.2 * path.stat().st_size


def test_packed_weights_are_not_saved(written, tmp_path):
    with pytest.raises(ModelError, match=r"is packed, which safetensors cannot hold; load the model with weights='dequant"):
        save_weights(load(written(Kind.Q8_0).path), tmp_path)


# Engines


def test_the_self_test_of_bits_has_packed_products(monkeypatch):
    kinds = (("Q4_K", 2), ("Q8_0", 1))
    assert rows_agree(jnp.dtype("float32"), 64, 100, kinds)
    original = packed.multiply_several
    wrong = lambda x, *args, **options: [y + (len(x) == 7) for y in original(x, *args, **options)]  # noqa: E731
    monkeypatch.setattr(packed, "multiply_several", wrong)
    rows_agree.cache_clear()
    assert not rows_agree(jnp.dtype("float32"), 64, 100, kinds)
    rows_agree.cache_clear()


@pytest.mark.ci
def test_a_store_of_another_form_misses(written, tmp_path):
    """K/V of packed weights depends on the integers of the rows; that of dequantised ones is another."""
    path, options = str(written(Kind.Q8_0, "qwen3").path), {**ENGINE, "kv_store": tmp_path / "kv", "dtype": "bfloat16"}
    forms = ({}, {"activations": "int8"}, {"weights": "dequantized"})
    cold = []
    for form in (*forms, *forms):
        llm = LLM(path, **options, **form)
        (output,) = llm.generate(PROMPT, GREEDY)
        assert llm.core.disk.writer.flush(30)
        llm.close()
        cold.append((output.num_cached_tokens, output.outputs[0].logprobs))
    tokens = 20 + 27 + 19
    assert [cached for cached, _ in cold] == [0, 0, 0, tokens, tokens, tokens]
    assert [values for _, values in cold[:3]] == [values for _, values in cold[3:]]
    assert cold[0][1] != cold[1][1] != cold[2][1]
