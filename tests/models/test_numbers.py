"""Numbers of configurations that become arithmetic: each must be positive and finite, in `config.json` and GGUF metadata."""

import copy
import json
import math

import pytest
from transformers import Phi3Config

from chunkattn.config import EngineConfig
from chunkattn.errors import ModelError
from chunkattn.models.gguf_file import open_gguf
from chunkattn.models.gguf_spec import config_from_gguf, spec_from_gguf
from chunkattn.models.loader import open_shape
from tests.checkpoints import CHECKPOINTS
from tests.gguf_files import ALL, write

WRONG = (math.nan, math.inf, -math.inf, -1.0, 1e39, 1e-46, 0.0)
"""Two of them have no place among the normal float32 numbers."""

# config.json

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 64,
    "long_factor": [2.0] * 6,
    "short_factor": [1.5] * 6,
    "factor": 4.0,
    "attention_factor": 1.2,
}
CONFIGS = {
    **{name: config.to_dict() for name, config in CHECKPOINTS.items()},
    "llama-yarn-keys": CHECKPOINTS["llama"].to_dict() | {"rope_parameters": YARN},
    "llama-yarn-attention": CHECKPOINTS["llama"].to_dict() | {"rope_parameters": YARN | {"attention_factor": 1.5}},
    "phi3-longrope": Phi3Config(
        **CHECKPOINTS["phi3"].to_dict() | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}
    ).to_dict(),
}
LENGTHS = {"original_max_position_embeddings"}
"""Integers beside the RoPE parameters that belong to them."""
ZERO_IS_NONE = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "llama_4_scaling_beta"}
"""Numbers that 0 switches off, or back to their default, as in transformers."""


def numbers_of(keys, path=()):
    """Places of the numbers in a configuration that are no sizes: floats, and integers among the RoPE parameters."""
    for key, value in keys.items() if isinstance(keys, dict) else enumerate(keys):
        if isinstance(value, (dict, list)) and key not in ("vision_config", "id2label"):
            yield from numbers_of(value, (*path, key))
        elif isinstance(value, float) or (type(value) is int and ("rope_parameters" in path or key in LENGTHS)):
            yield (*path, key)


def with_value(keys, path, value):
    """A copy of a configuration with another value in one place."""
    made = copy.deepcopy(keys)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return made


@pytest.mark.parametrize("name", CONFIGS)
def test_numbers_of_a_configuration(name, tmp_path):
    keys = CONFIGS[name]

    def shapes(keys):
        """Shapes for a few positions and for all, which have factors of their own under longrope."""
        (tmp_path / "config.json").write_text(json.dumps(keys))
        return [open_shape(EngineConfig(model=str(tmp_path), max_model_len=length))[0] for length in (32, 256)]

    own, refused, loaded = shapes(keys), set(), set()
    for place in numbers_of(keys):
        for value in WRONG:
            try:
                found = shapes(with_value(keys, place, value))
            except ModelError:
                refused.add((place[-1], value))
            else:
                if found != own:  # else nothing reads the number
                    loaded.add((place[-1], value))
    assert loaded <= {(key, 0.0) for key in ZERO_IS_NONE}
    assert {("rms_norm_eps", value) for value in WRONG} <= refused
    assert {("rope_theta", value) for value in WRONG} <= refused


# GGUF

KEYS = (
    *("attention.layer_norm_rms_epsilon", "attention.scale", "attention.temperature_scale", "attention.clamp_kqv"),
    *("attention.max_alibi_bias", "attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"),
    *("logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale", "rope.freq_base", "rope.freq_base_swa"),
    *("rope.scale_linear", "rope.scaling.factor", "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"),
    *("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    *("rope.scaling.yarn_log_multiplier", "rope.scaling.original_context_length"),
)
"""Numbers of the metadata, after the architecture's prefix."""


@pytest.mark.parametrize("name", ALL)
def test_numbers_of_metadata(name, tmp_path):
    file = open_gguf(write(tmp_path / "model.gguf", name).path)
    given, architecture = dict(file.metadata.values), file.metadata.values["general.architecture"]

    def shapes():
        config = config_from_gguf(file)
        return [spec_from_gguf(file, config, length) for length in (32, 256)]

    own, floats = shapes(), {key for key, value in given.items() if isinstance(value, float)}
    assert floats <= {f"{architecture}.{key}" for key in KEYS}
    for key in (f"{architecture}.{key}" for key in KEYS):
        for value in WRONG:
            file.metadata.values |= {key: value}
            try:
                found = shapes()
            except ModelError:
                continue
            finally:
                file.metadata.values.clear()
                file.metadata.values |= given
            # The file loads if 0 stands for the default, or if nothing reads the number.
            assert value == 0 or found == own, (key, value)
