"""Scalings of rotary embeddings in GGUF files, as llama.cpp reads them."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from chunkattn.errors import ModelError
from tests.checkpoints import force_factors
from tests.gguf_files import CONFIGS, VOCAB, Written, write
from tests.models.gguf_rig import dense_logits, opened

IDS = np.random.default_rng(5).integers(0, VOCAB, 90)


@pytest.mark.parametrize(("length", "used"), [(64, "short"), (256, "long")])
def test_longrope_of_a_file(length, used, written):
    """Factors and the factor of attention are those of the model that has the same factors for all lengths."""
    file = written("phi3-longrope", Kind.F32)
    expected = force_factors(file.model, used)(torch.as_tensor(IDS)[None]).logits[0].detach().numpy()
    np.testing.assert_allclose(dense_logits(file.path, IDS, max_model_len=length), expected, atol=1e-4)


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
