"""`Adapter`: a LoRA adapter (arXiv:2106.09685) in the format of PEFT, checked against the shape of its base model."""

from __future__ import annotations

import logging
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
from chunkattn.local_files import cause_of, is_present
from chunkattn.models.adapter_config import CONFIG_FILE, WEIGHTS_FILE, AdapterConfig
from chunkattn.models.foreign_files import explain_name
from chunkattn.models.locate import download
from chunkattn.models.mixers import CONVOLUTIONS
from chunkattn.models.spec import CLASSES, EMBEDDING, EXPERTS, HEAD, ROUTERS, DecoderSpec
from chunkattn.models.stored_rows import StoredRows, stored_rows

logger = logging.getLogger(__name__)

_DTYPES = ("F32", "BF16", "F16", "F64")
_FACTOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
"""Name of a tensor of a factor: the base model's name of the module, and the factor."""
_HEAD = re.compile(r"(?:base_model\.model\.)?(lm_head|score)(?:\.modules_to_save)?(?:\.default)?\.weight")
_LAYERS = re.compile(r"((?:model\.|language_model\.)*)(layers\.\d+\..+)")
"""Name of a module of a layer: what model classes put before it, and the rest."""
_FOREIGN_TENSORS = {
    "lora_embedding_": "a LoRA of embeddings is not supported",
    "lora_magnitude_vector": "DoRA is not supported",
    "lora_bias": "biases in an adapter are not supported",
    ".bias": "biases in an adapter are not supported",
}


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
    config = AdapterConfig.read(folder)
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


class _Reader:
    """Reader of the tensors of an adapter.

    Args:
        file: file of the tensors.
        handle: the opened file.
        config: configuration of the adapter.
        spec: shape of the base model.
        values: see `read_adapter`.
    """

    def __init__(self, file: Path, handle: Any, config: AdapterConfig, spec: DecoderSpec, *, values: bool) -> None:
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
