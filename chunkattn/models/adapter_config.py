"""`AdapterConfig`: the configuration of a LoRA adapter in the format of PEFT."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chunkattn.errors import ModelError
from chunkattn.local_files import is_present, read_object

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_HEADS = ("lm_head", "score", "classifier")
"""Modules to save that are heads. PEFT lists the two names of a classifier's head, of which a model has one."""
_IGNORED = (
    *(
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "inference_mode",
        "lora_dropout",
        "lora_ga_config",
    ),
    *("megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type"),
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "target_modules", "exclude_modules", "bias"),
    *("modules_to_save", "layers_to_transform", "layers_pattern", "init_lora_weights"),
)
"""Fields of a configuration that change nothing, or are read. Any other field that is set is refused."""
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base model's weights as they are."""
_NAMED = {"use_dora": "DoRA", "fan_in_fan_out": "a transposed weight", "alora_invocation_tokens": "an activated LoRA (aLoRA)"}
"""Fields in other words."""


@dataclass(frozen=True)
class AdapterConfig:
    """Configuration of an adapter: `fields` holds the object of its file."""

    file: Path
    fields: dict[str, Any]

    @staticmethod
    def read(folder: Path) -> AdapterConfig:
        """Return the checked configuration of a folder."""
        file = folder / CONFIG_FILE
        if not is_present(file):
            raise ModelError(f"{folder}: no {CONFIG_FILE}; an adapter is a folder that PEFT has saved")
        config = AdapterConfig(file, read_object(file))
        config.check()
        return config

    def check(self) -> None:
        """Refuse what is not supported, or malformed."""
        fields = self.fields
        if (kind := fields.get("peft_type")) != "LORA":
            raise self._wrong(f"peft_type {kind!r} is not supported; only LORA is")
        for name, value in fields.items():
            if name not in _IGNORED and value not in (None, False, [], {}):
                raise self._wrong(f"{name} is set: {_NAMED.get(name, 'it')} is not supported")
        if (bias := fields.get("bias", "none")) != "none":
            raise self._wrong(f"bias {bias!r} is not supported; only 'none' is")
        if (start := fields.get("init_lora_weights")) not in _STARTS:
            raise self._wrong(
                f"init_lora_weights {start!r} changes the base model's weights; convert the adapter (PEFT: save_pretrained "
                "with path_initial_model_for_weight_conversion)"
            )
        for name in fields.get("modules_to_save") or ():
            if name not in _HEADS:
                raise self._wrong(f"modules_to_save {name!r} is not supported; only a head ({', '.join(_HEADS)}) is")
        _number(self._wrong, "r", fields.get("r", 8), whole=True)
        _number(self._wrong, "lora_alpha", fields.get("lora_alpha", 8))
        for name, whole in (("rank_pattern", True), ("alpha_pattern", False)):
            if not isinstance(patterns := fields.get(name) or {}, dict):
                raise self._wrong(f"{name} must be an object, got {patterns!r}")
            for pattern, value in patterns.items():
                _number(self._wrong, f"{name} {pattern!r}", value, whole=whole)
                self._matches(rf"(.*\.)?({pattern})$", "")
        if not isinstance(fields.get("use_rslora", False), bool):
            raise self._wrong(f"use_rslora must be true or false, got {fields['use_rslora']!r}")
        for name in ("target_modules", "exclude_modules", "layers_pattern"):
            value = fields.get(name)
            if not (
                value is None or isinstance(value, str) or (isinstance(value, list) and all(type(v) is str for v in value))
            ):
                raise self._wrong(f"{name} must be a text or a list of texts, got {value!r}")
        layers = fields.get("layers_to_transform")
        if not (layers is None or type(layers) is int or (isinstance(layers, list) and all(type(n) is int for n in layers))):
            raise self._wrong(f"layers_to_transform must be a layer or a list of layers, got {layers!r}")
        if not fields.get("target_modules"):
            raise self._wrong("target_modules is empty")

    def rank(self, module: str) -> int:
        """Return the rank of a module, by the base model's name."""
        return int(self._by_pattern("rank_pattern", module, self.fields.get("r", 8)))

    def scale(self, module: str) -> float:
        """Return the factor of a module's product."""
        alpha, rank = self._by_pattern("alpha_pattern", module, self.fields.get("lora_alpha", 8)), self.rank(module)
        return float(alpha / (math.sqrt(rank) if self.fields.get("use_rslora") else rank))

    def targets(self, module: str) -> bool:
        """Return whether the adapter has factors of a module, as PEFT's `check_target_module_exists` does."""
        targets, excluded = self.fields["target_modules"], self.fields.get("exclude_modules") or []
        if self._names(excluded, module) or any(re.match(rf"(^|.*\.){name}($|\..*)", module) for name in self.saved):
            return False
        if isinstance(targets, str):
            is_head = module.rpartition(".")[2] in _HEADS
            return not is_head if targets.lower() == "all-linear" else self._names(targets, module)
        layers = self.fields.get("layers_to_transform")
        return self._names(targets, module) and (layers in (None, []) or self._is_in(layers, module))

    @property
    def saved(self) -> list[str]:
        """Return the modules that the adapter replaces."""
        return self.fields.get("modules_to_save") or []

    def _is_in(self, layers: int | list[int], module: str) -> bool:
        """Return whether a module lies in one of some layers."""
        patterns = self.fields.get("layers_pattern") or []
        for pattern in [patterns] if isinstance(patterns, str) else patterns or [r"[^.]*"]:
            if found := self._matches(rf"(?:^|.*?\.){pattern}\.(?P<layer>\d+)\.", module):
                return int(found["layer"]) in (layers if isinstance(layers, list) else [layers])
        return False

    def _names(self, names: str | list[str], module: str) -> bool:
        """Return whether a pattern, or a list of ends of names, names a module."""
        if isinstance(names, str):
            return self._matches(rf"(?:{names})\Z", module) is not None
        return any(module == name or module.endswith(f".{name}") for name in names)

    def _by_pattern(self, name: str, module: str, default: float) -> float:
        """Return the value of the first pattern that a module's name ends with."""
        for pattern, value in (self.fields.get(name) or {}).items():
            if self._matches(rf"(.*\.)?({pattern})$", module):
                return float(value)
        return default

    def _matches(self, pattern: str, text: str) -> re.Match[str] | None:
        try:
            return re.match(pattern, text)
        except re.error as error:
            raise self._wrong(f"{pattern!r} is no regular expression: {error}") from None

    def _wrong(self, text: str) -> ModelError:
        return ModelError(f"{self.file}: {text}")


def _number(wrong: Any, name: str, value: Any, *, whole: bool = False) -> None:
    """Check a number of a configuration."""
    fine = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not fine or (whole and value < 1):
        raise wrong(f"{name} must be {'a positive integer' if whole else 'a finite number'}, got {value!r}")
