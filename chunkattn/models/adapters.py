"""`Adapter`: a LoRA adapter (arXiv:2106.09685) in the format of PEFT, checked against the shape of its base model."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from chunkattn.errors import ConfigError, ModelError
from chunkattn.local_files import cause_of, is_present, read_object
from chunkattn.models.foreign_files import explain_name
from chunkattn.models.locate import download
from chunkattn.models.mixers import CONVOLUTIONS
from chunkattn.models.spec import CLASSES, EMBEDDING, EXPERTS, HEAD, ROUTERS, DecoderSpec
from chunkattn.models.stored_rows import StoredRows, stored_rows

logger = logging.getLogger(__name__)

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_DTYPES = ("F32", "BF16", "F16", "F64")
_FACTOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
"""Name of a tensor of a factor: the base model's name of the module, and the factor."""
_HEAD = re.compile(r"(?:base_model\.model\.)?(lm_head|score)(?:\.modules_to_save)?(?:\.default)?\.weight")
_LAYERS = re.compile(r"((?:model\.|language_model\.)*)(layers\.\d+\..+)")
"""Name of a module of a layer: what model classes put before it, and the rest."""
_HEADS = ("lm_head", "score", "classifier")
"""Modules to save that are heads. PEFT lists the two names of a classifier's head, of which a model has one."""
_FOREIGN_TENSORS = {
    "lora_embedding_": "a LoRA of embeddings is not supported",
    "lora_magnitude_vector": "DoRA is not supported",
    "lora_bias": "biases in an adapter are not supported",
    ".bias": "biases in an adapter are not supported",
}
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
class Delta:
    """Product that an adapter adds to a matrix, `scale * b @ a`.

    Attributes:
        a: factor of the inputs, `[r, in]`, in the dtype of the file.
        b: factor of the outputs, `[out, r]`.
        scale: factor of the product.
    """

    a: np.ndarray
    b: np.ndarray
    scale: float

    def part(self, rows: slice, columns: slice) -> np.ndarray:
        """Return some rows and columns of the product, float32."""
        b, a = (np.asarray(x, np.float32) for x in (self.b[rows], self.a[:, columns]))
        return (b @ a) * np.float32(self.scale)


@dataclass(frozen=True)
class Adapter:
    """Adapter whose tensors fit the base model.

    Attributes:
        path: folder of the adapter.
        deltas: product for each matrix, by the name of the decoder's parameter and, for stacked matrices, by expert.
        heads: heads in place of the base model's, by the name of the parameter.
    """

    path: Path
    deltas: Mapping[tuple[str, int | None], Delta]
    heads: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Return the largest rank."""
        return max((len(delta.a) for delta in self.deltas.values()), default=0)

    @cached_property
    def digest(self) -> str:
        """Return 32 hexadecimal digits that identify the products."""
        digest = blake2b(digest_size=16)
        for key, delta in sorted(self.deltas.items(), key=repr):
            digest.update(f"{key} {delta.scale!r} {delta.a.dtype} {delta.a.shape} {delta.b.dtype} {delta.b.shape}".encode())
            digest.update(delta.a.tobytes())
            digest.update(delta.b.tobytes())
        return digest.hexdigest()

    @property
    def touched(self) -> set[str]:
        """Return the names of the parameters that the adapter changes."""
        return {name for name, _ in self.deltas} | self.heads.keys()

    def check_choosable(self, spec: DecoderSpec, max_rank: int) -> None:
        """Check that requests can choose the adapter.

        Args:
            spec: shape of the base model.
            max_rank: largest rank.

        Raises:
            ConfigError: its rank is too large, or it has more than products of the layers' matrices.
        """
        if self.rank > max_rank:
            raise ConfigError(f"adapter {self.path}: rank {self.rank} exceeds max_lora_rank {max_rank}; raise it")
        if others := self.touched - layer_matrices(spec).keys():
            text = f"changes {min(others)!r}, which no request can choose; merge it at the load (adapter=)"
            raise ConfigError(f"adapter {self.path} {text}")


@dataclass(frozen=True)
class _Place:
    """Rows of a stored module's outputs that are a parameter of the decoder."""

    parameter: str
    rows: StoredRows
    inputs: int


def _whole(parameter: str, rows: int) -> StoredRows:
    return StoredRows(parameter, 0, rows, rows, 1)


def adapter_folder(place: str | PathLike[str]) -> Path:
    """Return the local folder of an adapter; the files of a hub id are downloaded to the hub's cache first.

    Args:
        place: local folder, or hub id.

    Raises:
        ModelError: there is no such folder, and the hub has no such repository.
    """
    local = Path(place).expanduser().absolute()
    if is_present(local):
        return local
    if reason := explain_name(str(place)):
        raise ModelError(f"adapter {str(place)!r} is no local folder and no hub id: {reason}")
    return download(str(place), (CONFIG_FILE, WEIGHTS_FILE))


def layer_matrices(spec: DecoderSpec) -> dict[str, tuple[int, int]]:
    """Return the shapes of the matrices of layers that multiply all rows, which an adapter by request may change."""
    shapes = {name: shape for name, shape in spec.parameters().items() if len(shape) == 2 and ".layers." in name}
    others = *ROUTERS, *CONVOLUTIONS
    return {n: (s[0], s[1]) for n, s in shapes.items() if not n.endswith(others) and f".{EXPERTS}." not in n}


def read_adapter(folder: Path, spec: DecoderSpec, *, values: bool = True) -> Adapter:
    """Return the adapter in a folder.

    Args:
        folder: local folder of the adapter.
        spec: shape of the base model.
        values: whether values are read and checked; otherwise the adapter has zeros, which take no memory.

    Raises:
        ModelError: a file is missing or unreadable, the adapter is of an unsupported kind, or a tensor is missing, unknown, of
            another shape than the base model needs, or not finite.
    """
    config = _Config.read(folder)
    file = folder / WEIGHTS_FILE
    if not is_present(file):
        pickled = (folder / "adapter_model.bin").exists()
        why = "; adapter_model.bin is a pickle, which is not read: load it with PEFT and save it again" if pickled else ""
        raise ModelError(f"{folder}: no {WEIGHTS_FILE}{why}")
    with ExitStack() as stack:
        try:
            handle = stack.enter_context(safe_open(file, framework="np"))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: not a readable safetensors file ({cause_of(file, error)}); get it again") from error
        return Adapter(folder, *_Reader(file, handle, config, spec, values=values).read())


@dataclass(frozen=True)
class _Config:
    """Configuration of an adapter: `fields` holds the object of its file."""

    file: Path
    fields: dict[str, Any]

    @staticmethod
    def read(folder: Path) -> _Config:
        """Return the checked configuration of a folder."""
        file = folder / CONFIG_FILE
        if not is_present(file):
            raise ModelError(f"{folder}: no {CONFIG_FILE}; an adapter is a folder that PEFT has saved")
        config = _Config(file, read_object(file))
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


class _Reader:
    """Reader of the tensors of an adapter.

    Args:
        file: file of the tensors.
        handle: the opened file.
        config: configuration of the adapter.
        spec: shape of the base model.
        values: see `read_adapter`.
    """

    def __init__(self, file: Path, handle: Any, config: _Config, spec: DecoderSpec, *, values: bool) -> None:
        self._file, self._handle, self._config, self._spec, self._values = file, handle, config, spec, values
        self._shapes = spec.parameters()
        self._places: dict[str, list[_Place]] = {}
        head = HEAD if spec.num_labels is None else CLASSES
        rows = {head: _whole(head, spec.vocab_size), **stored_rows(spec)}
        for parameter, shape in {**self._shapes, head: self._shapes.get(head, (spec.vocab_size, spec.hidden_size))}.items():
            is_matrix = parameter.endswith(".weight") and len(shape) == 2 and not parameter.endswith(CONVOLUTIONS)
            if is_matrix and parameter not in (EMBEDDING, CLASSES):
                stored = rows[parameter].name.removesuffix(".weight")
                self._places.setdefault(stored, []).append(_Place(parameter, rows[parameter], shape[1]))

    def read(self) -> tuple[dict[tuple[str, int | None], Delta], dict[str, np.ndarray]]:
        """Return the products and the heads."""
        factors: dict[str, dict[str, str]] = {}
        heads: dict[str, np.ndarray] = {}
        for name in self._handle.keys():  # noqa: SIM118 - no __iter__
            if found := _FACTOR.fullmatch(name):
                factors.setdefault(found[1], {})[found[2]] = name
            elif found := _HEAD.fullmatch(name):
                heads |= self._head(f"{found[1]}.weight", name)
            else:
                raise self._wrong(f"tensor {name!r} is unknown{self._why(name)}")
        if not factors:
            raise self._wrong("the file holds no lora_A and lora_B")
        for name in ("lm_head", "score"):
            if name in self._config.saved and f"{name}.weight" in set(self._own_heads) - heads.keys():
                raise self._wrong(f"tensor of {name!r}, which modules_to_save names, is missing")
        deltas = dict(entry for module, names in factors.items() for entry in self._deltas(module, names))
        self._check_complete(factors)
        return deltas, heads

    @property
    def _own_heads(self) -> tuple[str]:
        """Return the head that the base model has."""
        return (HEAD,) if self._spec.num_labels is None else (CLASSES,)

    def _why(self, name: str) -> str:
        """Return the reason why a tensor has no place, or nothing."""
        if found := next((why for part, why in _FOREIGN_TENSORS.items() if part in name), None):
            return f": {found}"
        return ": modules_to_save is supported for a head only" if ".lora_" not in name else ""

    def _head(self, parameter: str, name: str) -> dict[str, np.ndarray]:
        if parameter not in self._own_heads:
            raise self._wrong(f"{self._spec.architecture} has no place for the head {name!r}")
        expected = self._shapes.get(parameter, (self._spec.vocab_size, self._spec.hidden_size))
        return {parameter: self._tensor(name, expected)}

    def _deltas(self, module: str, names: dict[str, str]) -> Iterator[tuple[tuple[str, int | None], Delta]]:
        """Yield the products of a module."""
        if missing := {"A", "B"} - names.keys():
            raise self._wrong(f"tensor lora_{min(missing)} of {module!r} is missing")
        places, expert = self._placed(module)
        if not places:
            raise self._wrong(f"{self._spec.architecture} has no matrix {module!r}")
        if not self._config.targets(module):
            raise self._wrong(f"{module!r} is not among the target_modules of {CONFIG_FILE}")
        rank = self._config.rank(module)
        a = self._tensor(names["A"], (rank, places[0].inputs))
        b = self._tensor(names["B"], (places[0].rows.stored, rank))
        for place in places:
            yield (place.parameter, expert), Delta(a, place.rows.of(b), self._config.scale(module))

    def _placed(self, module: str) -> tuple[list[_Place], int | None]:
        """Return the places of a module, and the number of its expert, by the base model's name."""
        if (found := _LAYERS.fullmatch(module)) and ("language_model." in found[1]) <= self._spec.is_nested:
            module = f"model.{found[2]}"
        elif self._spec.is_nested:
            module = module.removeprefix("language_model.")
        before, _, last = module.rpartition(f".{EXPERTS}.")
        number, _, part = last.partition(".")
        shape = self._shapes.get(parameter := f"{before}.{EXPERTS}.{part}.weight")
        if shape is None or not number.isdecimal() or int(number) >= shape[0]:
            return self._places.get(module, []), None
        return [_Place(parameter, _whole(parameter, shape[1]), shape[2])], int(number)

    def _check_complete(self, factors: Mapping[str, Any]) -> None:
        """Check that every matrix that the configuration targets has factors."""
        prefix = next((found[1] for module in factors if (found := _LAYERS.fullmatch(module))), "model.")
        for module in self._places:
            name = prefix + module.removeprefix("model.") if module.startswith("model.") else module
            is_router = f"{name}.weight".endswith(ROUTERS)  # of which transformers makes matrices or not
            if name not in factors and not is_router and self._config.targets(name):
                raise self._wrong(f"tensors of {name!r}, which target_modules names, are missing")

    def _tensor(self, name: str, expected: tuple[int, ...]) -> np.ndarray:
        stored = self._handle.get_slice(name)
        if (kind := stored.get_dtype()) not in _DTYPES:
            raise self._wrong(f"tensor {name!r} is {kind}; supported are {', '.join(_DTYPES)}")
        if (shape := tuple(stored.get_shape())) != expected:
            raise self._wrong(f"tensor {name!r} has shape {list(shape)}, base model and {CONFIG_FILE} say {list(expected)}")
        if not self._values:
            return np.broadcast_to(np.float32(0), expected)
        values: np.ndarray = self._handle.get_tensor(name)
        if not np.isfinite(np.asarray(values, np.float32)).all():
            raise self._wrong(f"tensor {name!r} holds NaN or infinite values; the file is damaged, get it again")
        return values

    def _wrong(self, text: str) -> ModelError:
        return ModelError(f"{self._file}: {text}")
