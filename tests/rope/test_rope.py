"""Frequencies and rotation against transformers."""

from copy import deepcopy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from chunkattn.errors import ModelError
from chunkattn.rope.rotary import apply_rotary, make_rotary, rotary_tables
from tests.checkpoints import CHECKPOINTS

SCALINGS = [
    {"rope_type": "linear", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.7},
    {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
        "attention_factor": 1.3,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: f"{s['rope_type']}-{s['factor']:.0f}")
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_scaled_frequencies(scaling, theta):
    config = CHECKPOINTS["llama"].__class__(
        hidden_size=512, num_attention_heads=4, max_position_embeddings=131072, rope_parameters={"rope_theta": theta, **scaling}
    )
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    spec = make_rotary(config.rope_parameters, 128, config.max_position_embeddings)
    np.testing.assert_allclose(spec.inv_freq, expected.numpy(), rtol=1e-6)
    assert spec.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize("name", ["llama", "llama-yarn", "llama-llama3", "llama-linear"])
def test_rotation(name):
    config = CHECKPOINTS[name]
    rng = np.random.default_rng(0)
    positions = rng.integers(0, config.max_position_embeddings, 33)
    q, k = rng.standard_normal((2, 33, 3, 16)).astype(np.float32)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.as_tensor(positions)[None])
    expected = apply_rotary_pos_emb(*(torch.as_tensor(x).transpose(0, 1)[None] for x in (q, k)), cos, sin)
    spec = make_rotary(config.rope_parameters, 16, config.max_position_embeddings)
    tables = rotary_tables(spec, jnp.asarray(positions))
    for mine, theirs in zip((q, k), expected, strict=True):
        np.testing.assert_allclose(apply_rotary(jnp.asarray(mine), *tables), theirs[0].transpose(0, 1).numpy(), atol=2e-5)


def test_dynamic_scales_nothing_up_to_the_original():
    spec = make_rotary({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, 64, 512)
    base = make_rotary({"rope_theta": 1e4}, 64, 512)
    np.testing.assert_array_equal(spec.inv_freq, base.inv_freq)


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(("length", "uses"), [(256, "long_factor"), (64, "short_factor")])
def test_longrope_has_the_factors_of_the_positions_in_use(length, uses):
    """transformers changes them within a call; here the factors of its prompts are forced to be those of the engine."""
    rng = np.random.default_rng(0)
    factors = {name: (1 + rng.random(12)).tolist() for name in ("short_factor", "long_factor")}
    params = LONGROPE | {"partial_rotary_factor": 0.75}
    config = deepcopy(CHECKPOINTS["phi3"])
    config.original_max_position_embeddings = 64
    config.head_dim, config.rope_parameters = 32, params | dict.fromkeys(factors, factors[uses])
    expected, factor = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu")
    spec = make_rotary(params | factors, 32, 256, length, partial=True)
    np.testing.assert_allclose(spec.inv_freq, expected.numpy(), rtol=1e-6)
    assert spec.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"rope_type": "longrope", "rope_theta": 1e4}, "lack 'original_max_position_embeddings'"),
        (
            {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "short_factor": [1.0]},
            "32 positive",
        ),
        ({"rope_type": "linear", "rope_theta": 1e4}, "factor"),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_unsupported(params, message):
    with pytest.raises(ModelError, match=message):
        make_rotary(params, 64, 512)


def test_cosines_are_computed_once_a_step():
    """XLA:CPU recomputes what it fuses: in every layer, and for every head."""
    spec = make_rotary({"rope_theta": 1e4}, 64, 512)

    def layers(x, positions):
        tables = rotary_tables(spec, positions)
        for _ in range(3):
            x = apply_rotary(jnp.tanh(x), *tables)
        return x

    program = jax.jit(layers).lower(jnp.zeros((32, 4, 64)), jnp.zeros(32, jnp.int32)).compile().as_text()
    assert program.count(" cosine(") == program.count(" sine(") == 1
