"""The `quantization_config` of a Hugging Face folder: which modules are quantised, and how."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from chunkattn.errors import ModelError
from chunkattn.local_files import is_present, read_object
from chunkattn.models.quantized_formats import Scheme

_REMEDY = "use an unquantised checkpoint or a GGUF file of the model"
_PLACES = {"config.json": ("quantization_config", "compression_config"), "hf_quant_config.json": ("quantization",)}
"""Files and keys that hold the settings; the second file is ModelOpt's."""
_CACHE_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo")
"""Keys of a scheme of K/V, which says nothing about the weights."""
_Matches = Callable[[str, str], bool]
"""Returns whether a pattern names a module, from the pattern and the module's name."""


@dataclass(frozen=True)
class Quantization:
    """Schemes of the modules of a checkpoint.

    Attributes:
        method: `quant_method`.
        rules: names, patterns or classes of modules, with their scheme.
        ignored: patterns of the modules that are not quantised.
        matches: whether a pattern names a module.
        has_cache_scheme: whether the configuration names a scheme of K/V, too, which is not applied.
    """

    method: str
    rules: tuple[tuple[tuple[str, ...], Scheme], ...]
    ignored: tuple[str, ...] = ()
    matches: _Matches = field(default=lambda pattern, name: pattern == name, repr=False)
    has_cache_scheme: bool = field(default=False, repr=False)

    def scheme_of(self, names: Collection[str], kind: str) -> Scheme | None:
        """Return the scheme of a module; None for one that is not quantised.

        Args:
            names: names that the module has in files and in transformers.
            kind: its class in PyTorch.

        Raises:
            ModelError: the configuration gives the module two schemes.
        """
        if any(self.matches(pattern, name) or pattern == kind for pattern in self.ignored for name in names):
            return None
        found: dict[int, dict[Scheme, None]] = {}
        for targets, scheme in self.rules:
            for target in targets:
                if target in names:
                    found.setdefault(0, {})[scheme] = None
                elif any(self.matches(target, name) for name in names):
                    found.setdefault(1, {})[scheme] = None
                elif target == kind:
                    found.setdefault(2, {})[scheme] = None
        if not found:
            return None
        schemes = [*found[min(found)]]
        if len(schemes) > 1:
            raise ModelError(f"two config_groups name module {next(iter(names))!r}; {_REMEDY}")
        return schemes[0]


def quantization_of(folder: Path) -> Quantization | None:
    """Return the quantisation that a folder's `config.json` or `hf_quant_config.json` states; None for none.

    Args:
        folder: local folder of the checkpoint.

    Raises:
        ModelError: the quantisation is not supported.
    """
    for file, keys in _PLACES.items():
        fields = read_object(folder / file) if is_present(folder / file) else {}
        for part in (fields, fields.get("text_config")):
            for key in keys:
                if isinstance(part, dict) and part.get(key) is not None:
                    settings = _Settings(f"{folder / file}: {key}", part[key])
                    return _read(settings, "modelopt" if key == "quantization" else settings.get("quant_method", str, ""))
    return None


class _Settings:
    """An object of the configuration, whose values are read with their types checked.

    Args:
        where: file and key, for errors.
        fields: the object.

    Raises:
        ModelError: it is no object.
    """

    def __init__(self, where: str, fields: Any) -> None:
        self.where, self.fields = where, fields
        if not isinstance(fields, dict):
            raise self.fault(f"must be an object, got {fields!r}")

    def fault(self, text: str) -> ModelError:
        return ModelError(f"{self.where}: {text}; {_REMEDY}")

    def get(self, key: str, kind: type | tuple[type, ...], default: Any) -> Any:
        """Return the value of a key, or the default of a missing one and of null."""
        value = self.fields.get(key)
        if value is None:
            return default
        is_wrong = isinstance(value, bool) and kind is not bool and bool not in (kind if isinstance(kind, tuple) else ())
        if is_wrong or not isinstance(value, kind):
            raise self.fault(f"{key} has the wrong type: {value!r}")
        return value

    def names(self, *keys: str) -> tuple[str, ...]:
        """Return the list of the first key that there is; the empty one for none."""
        for key in keys:
            if (found := self.get(key, list, None)) is not None:
                if not all(isinstance(name, str) for name in found):
                    raise self.fault(f"{key} must be a list of names, got {found!r}")
                return tuple(found)
        return ()

    def one_of(self, key: str, value: Any, allowed: Collection[Any]) -> Any:
        if value not in allowed:
            known = ", ".join(map(str, allowed))
            raise self.fault(f"{key} {value!r} is not supported; supported are {known}")
        return value

    def refuse(self, key: str, why: str) -> None:
        if self.fields.get(key):
            raise self.fault(f"{key} is set: {why}")

    def size(self, key: str, default: int) -> int | None:
        """Return a number of inputs; None for all of them."""
        found = int(self.get(key, int, default))
        if found < 1 and found != -1:
            raise self.fault(f"{key} must be a positive integer or -1, got {found}")
        return None if found == -1 else found


def _read(settings: _Settings, method: str) -> Quantization:
    if method not in _METHODS:
        known = ", ".join(name for name in _METHODS if name != "bitsandbytes")
        raise settings.fault(f"quant_method {method!r} is not supported; supported are {known}")
    return replace(_METHODS[method](settings), has_cache_scheme=any(settings.fields.get(key) for key in _CACHE_KEYS))


def _fp8(settings: _Settings) -> Quantization:
    """Read the method `fp8` of transformers and vLLM.

    Source: `FineGrainedFP8Config` of https://github.com/huggingface/transformers
    """
    settings.one_of("fmt", settings.get("fmt", str, "e4m3"), ("e4m3", "float8_e4m3fn"))
    settings.one_of("activation_scheme", settings.get("activation_scheme", str, "dynamic"), ("dynamic", "static"))
    settings.one_of("expert_dtype", settings.get("expert_dtype", str, "fp8"), ("fp8",))
    scheme = Scheme("FP8", 8, _block(settings, "weight_block_size") or (None, None))
    return Quantization("fp8", _all(scheme), settings.names("modules_to_not_convert", "ignored_layers"), _begins_or_ends)


def _compressed(settings: _Settings) -> Quantization:
    """Read the method `compressed-tensors`.

    Source: `quantization/quant_config.py` of https://github.com/vllm-project/compressed-tensors
    """
    settings.refuse("transform_config", "rotations of activations are not supported")
    sparsity = _Settings(f"{settings.where}.sparsity_config", settings.get("sparsity_config", dict, {}))
    sparsity.one_of("format", sparsity.get("format", str, "dense"), ("dense",))
    rules = []
    for name, group in settings.get("config_groups", dict, {}).items():
        part = _Settings(f"{settings.where}.config_groups.{name}", group)
        form = part.get("format", str, settings.get("format", str, "dense"))
        if form != "dense" and part.get("weights", dict, None) is not None:
            weights = _Settings(f"{part.where}.weights", part.fields["weights"])
            rules.append((part.names("targets"), _compressed_scheme(weights, form)))
    return Quantization("compressed-tensors", tuple(rules), settings.names("ignore"), _equals_or_fits)


_NUMBERS = {
    ("float-quantized", "float", 8): "FP8",
    ("naive-quantized", "float", 8): "FP8",
    ("int-quantized", "int", 8): "INT8",
    ("naive-quantized", "int", 8): "INT8",
    ("pack-quantized", "int", 4): "packed integers",
    ("pack-quantized", "int", 8): "packed integers",
    ("nvfp4-pack-quantized", "float", 4): "NVFP4",
    ("mxfp4-pack-quantized", "float", 4): "MXFP4",
}
"""Formats by the format, type and bits of compressed-tensors."""
_GROUPS = {"NVFP4": 16, "MXFP4": 32}
"""Inputs of a scale in formats that have one size."""


def _compressed_scheme(weights: _Settings, form: str) -> Scheme:
    kind, bits = weights.get("type", str, "int").lower(), weights.get("num_bits", int, 8)
    if (form, kind, bits) not in _NUMBERS:
        listed = ", ".join(f"{name} ({kind}{bits})" for name, kind, bits in _NUMBERS)
        raise weights.fault(f"{kind}{bits} in format {form!r} is not supported; supported are {listed}")
    weights.refuse("dynamic", "weights cannot be quantised at run time")
    name, size = _NUMBERS[form, kind, bits], weights.size("group_size", -1)
    inferred = "tensor" if weights.fields.get("group_size") is None else "channel" if size is None else "group"
    strategy = weights.get("strategy", str, inferred).lower()
    known = ("group", "tensor_group") if name in _GROUPS else ("tensor", "channel", "group", "block")
    weights.one_of("strategy", strategy, known)
    if strategy in ("group", "tensor_group") and (size is None or size != _GROUPS.get(name, size)):
        raise weights.fault(f"group_size {size} is not supported with {name}; it must be {_GROUPS.get(name, 'positive')}")
    block: tuple[int | None, int | None] | None = {"tensor": (None, None), "channel": (1, None)}.get(strategy, (1, size))
    if strategy == "block" and (block := _block(weights, "block_structure")) is None:
        raise weights.fault("strategy 'block' needs block_structure")
    order = weights.get("actorder", (str, bool), False)
    order = order.lower() if isinstance(order, str) else order
    weights.one_of("actorder", order, (False, True, "weight", "group", "static", "dynamic"))
    is_symmetric = weights.get("symmetric", bool, True)
    if not is_symmetric and name not in ("INT8", "packed integers"):
        raise weights.fault(f"symmetric is false, which {name} does not have")
    assert block is not None
    return Scheme(name, bits, block, has_zeros=not is_symmetric, needs_order=order in (True, "group", "dynamic"))


_ALGORITHMS = {"NVFP4": Scheme("NVFP4 of ModelOpt", 4, (1, 16)), "FP8": Scheme("FP8", 8, (None, None)), None: None}
"""Schemes by the algorithm of ModelOpt; None where K/V alone has a scheme."""


def _modelopt(settings: _Settings) -> Quantization:
    """Read the method of NVIDIA's ModelOpt.

    Source: `modelopt/torch/export` of https://github.com/NVIDIA/Model-Optimizer
    """
    algorithm = settings.one_of("quant_algo", settings.get("quant_algo", str, None), _ALGORITHMS)
    if (scheme := _ALGORITHMS[algorithm]) is None:
        return Quantization("modelopt", ())
    groups = settings.get("config_groups", dict, {})
    sizes = {settings.get("group_size", int, 16)}
    for name, group in groups.items():
        part = _Settings(f"{settings.where}.config_groups.{name}", group)
        weights = _Settings(f"{part.where}.weights", part.get("weights", dict, {}))
        sizes.add(weights.get("group_size", int, 16))
        weights.one_of("num_bits", weights.get("num_bits", int, scheme.bits), (scheme.bits,))
    for size in sizes:
        settings.one_of("group_size", size, (16,))
    ignored = settings.names("ignore", "exclude_modules")
    return Quantization("modelopt", _all(scheme), ignored, lambda pattern, name: fnmatchcase(name, pattern))


def _awq(settings: _Settings) -> Quantization:
    """Read AutoAWQ's method in the order of its GEMM kernel.

    Source: `AwqConfig` of https://github.com/huggingface/transformers
    """
    settings.one_of("bits", settings.get("bits", int, settings.get("w_bit", int, 4)), (4,))
    form = settings.get("version", str, settings.get("format", str, "gemm"))
    settings.one_of("version", form.lower(), ("gemm",))
    if settings.get("backend", str, "auto") == "llm-awq":
        raise settings.fault("backend 'llm-awq' is not supported; only AutoAWQ's files are")
    settings.one_of("zero_point", settings.get("zero_point", bool, True), (True,))
    size = settings.size("group_size", settings.get("q_group_size", int, 128))
    ignored = settings.names("modules_to_not_convert")
    return Quantization("awq", _all(Scheme("AWQ", 4, (1, size), has_zeros=True)), ignored, _begins_or_ends)


def _gptq(settings: _Settings) -> Quantization:
    """Read GPTQ's method, whose first format stores zero points less 1.

    Source: `GPTQConfig` of https://github.com/huggingface/transformers
    """
    bits = settings.one_of("bits", settings.get("bits", int, None), (4, 8))
    form = settings.get("checkpoint_format", str, settings.get("format", str, "gptq")).lower()
    settings.one_of("checkpoint_format", form, ("gptq", "gptq_v2"))
    settings.one_of("pack_dtype", settings.get("pack_dtype", str, "int32"), ("int32",))
    settings.refuse("is_marlin_format", "Marlin's order is not supported")
    if others := [rule for rule in settings.get("dynamic", dict, {}) if not rule.startswith("-:")]:
        raise settings.fault(f"dynamic gives {others[0]!r} settings of its own, which are not supported")
    is_ordered = settings.get("desc_act", bool, False)
    block = 1, settings.size("group_size", 128)
    scheme = Scheme("GPTQ", bits, block, has_zeros=True, zero_shift=int(form == "gptq"), needs_order=is_ordered)
    return Quantization("gptq", _all(scheme))


def _bitsandbytes(settings: _Settings) -> Quantization:
    raise ModelError(
        f"{settings.where}: quant_method 'bitsandbytes' is not supported; convert the model, with PyTorch and bitsandbytes "
        'installed: python -c "from transformers import AutoModelForCausalLM as M; '
        "M.from_pretrained('MODEL').dequantize().save_pretrained('FOLDER')\""
    )


_METHODS: Mapping[str, Callable[[_Settings], Quantization]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "awq": _awq,
    "gptq": _gptq,
    "bitsandbytes": _bitsandbytes,
}
"""Readers of the settings by `quant_method`."""


def _all(scheme: Scheme) -> tuple[tuple[tuple[str, ...], Scheme], ...]:
    return ((("Linear", "Embedding"), scheme),)


def _block(settings: _Settings, key: str) -> tuple[int, int] | None:
    """Return the outputs and inputs of a block."""
    value = settings.get(key, (list, str), None)
    if value is None:
        return None
    sides = [int(side) for side in value.split("x") if side.isdecimal()] if isinstance(value, str) else value
    if len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
        raise settings.fault(f"{key} must be two positive integers, got {value!r}")
    rows, columns = sides
    return rows, columns


def _begins_or_ends(pattern: str, name: str) -> bool:
    """Return whether a name begins with a pattern's modules or ends as the pattern, as in `should_convert_module`."""
    try:
        begins = re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", name)
    except re.error:
        begins = None
    return begins is not None or name.endswith(pattern)


def _equals_or_fits(pattern: str, name: str) -> bool:
    """Return whether a pattern of compressed-tensors is a name, or a regular expression at its start behind `re:`."""
    if not pattern.startswith("re:"):
        return pattern == name
    try:
        return re.match(pattern.removeprefix("re:"), name) is not None
    except re.error as error:
        raise ModelError(f"quantization_config: {pattern!r} is no regular expression: {error}") from None
