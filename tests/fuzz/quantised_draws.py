"""Random quantised folders, right and damaged: the logits of their twin in float32, or one error that names the fault."""

import json

import numpy as np
import torch

from chunkattn.config import EngineConfig
from chunkattn.errors import ModelError
from chunkattn.models.loader import open_files
from tests.fuzz.folders import TOLERANCE, SilentDifferenceError, dense_logits, numbered, tensors_of, transformers_logits, write
from tests.quantised_folders import KINDS, is_linear, quantise

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "phi3", "mistral3", "granite", "olmo2")
WRONG_SETTINGS = (
    {"quant_method": "quanto"},
    {"quant_method": "bitsandbytes"},
    {"transform_config": {"config_groups": {}}, "quant_algo": "W4A8_AWQ", "bits": 5, "fmt": "e5m2"},
    {"modules_to_not_convert": ["model", "language_model"], "ignore": ["Linear", "*layers*"], "checkpoint_format": "marlin"},
)
"""Changes of the settings, of which each format reads one."""


class Draw:
    """One random folder, and its twin in float32.

    Attributes:
        story: the choices, in words.
        is_right: whether the folder is undamaged.
    """

    def __init__(self, place, kind, seed):
        self.rng = rng = np.random.default_rng([seed, *kind.encode()])
        family = FAMILIES[rng.integers(len(FAMILIES))]
        self.story = [kind, family, f"seed {seed}"]
        tensors, keys = tensors_of(family, seed=seed % 3)
        tensors = numbered(tensors) if family.endswith("_moe") else tensors
        share = rng.random()
        chosen = {name for name, value in tensors.items() if is_linear(name, value) and rng.random() < share + 0.3}
        self.stored, plain = quantise(kind, tensors, rng, lambda name, value: name in chosen)
        settings = dict(KINDS[kind].config)
        left_out = sorted(name.removesuffix(".weight") for name in tensors.keys() - chosen if is_linear(name, tensors[name]))
        if not family.startswith("mistral3") and left_out:
            for key in ("ignore", "modules_to_not_convert"):
                if key in settings:
                    settings[key] = [*settings[key], *left_out]
        self.is_right = rng.random() < 0.5 or not chosen
        if not self.is_right:
            settings = self._damage(sorted(chosen), settings)
        self.folder = write(place / "q", self.stored, keys | {"quantization_config": settings}, int(rng.integers(1, 4)))
        self.twin = write(place / "p", plain, keys)

    def _damage(self, chosen, settings):
        """Change one tensor or the settings."""
        rng = self.rng
        module = chosen[rng.integers(len(chosen))].removesuffix("weight")
        leaves = sorted(n for n in self.stored if n.startswith(module) and not n.endswith(("bias", "input_scale")))
        if not leaves:
            self.is_right = True  # the format does not divide the matrix
            return settings
        name = leaves[rng.integers(len(leaves))]
        how = ("absent", "short", "long", "type", "not finite", "settings", "absent key")[rng.integers(7)]
        self.story.append(f"{how}: {name}")
        value = self.stored[name]
        if how == "absent":
            del self.stored[name]
            self.is_right = name.endswith("g_idx") and not settings.get("desc_act") and not settings.get("config_groups")
        elif how == "short" and value.ndim:
            self.stored[name] = value[:-1].clone()
        elif how == "long" and value.ndim:
            self.stored[name] = torch.cat([value, value[-1:]])
        elif how == "type":
            self.stored[name] = value.to(torch.float64)
        elif how == "not finite" and value.is_floating_point():
            changed = value.float().reshape(-1)
            is_narrow = value.dtype == torch.float8_e4m3fn  # which has no infinity
            changed[rng.integers(len(changed))] = np.nan if is_narrow else (np.nan, np.inf)[rng.integers(2)]
            self.stored[name] = changed.reshape(value.shape).to(value.dtype)
        elif how == "absent key":
            key = sorted(settings)[rng.integers(len(settings))]
            self.story.append(key)
            settings = {name: value for name, value in settings.items() if name != key}
        else:
            changes = WRONG_SETTINGS[rng.integers(len(WRONG_SETTINGS))]
            self.story.append(json.dumps(changes))
            settings = settings | changes
        return settings


def judge(draw):
    """Return "equal" or the text of our error.

    Raises:
        SilentDifferenceError: the logits are not those of the twin, or a right folder is refused.
    """
    expected = transformers_logits(draw.twin)
    if isinstance(expected, str):
        raise AssertionError(f"no witness: {expected}")
    try:
        decoder = open_files(EngineConfig(model=str(draw.folder), dtype="float32", skip_tokenizer_init=True)).load()
    except ModelError as error:
        if draw.is_right:
            raise SilentDifferenceError(f"a right folder is refused: {error}") from error
        return str(error)
    found = dense_logits(decoder)
    if not np.abs(found - expected).max() <= TOLERANCE:
        raise SilentDifferenceError(f"logits differ by {np.abs(found - expected).max():.2g}")
    return "equal"
