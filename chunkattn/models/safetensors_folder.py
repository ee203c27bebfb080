"""A folder of safetensors files: which files count, and the tensors by the names of the decoder."""

from __future__ import annotations

import json
import logging
import mmap
import re
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from chunkattn.errors import ModelError
from chunkattn.local_files import cause_of, is_present
from chunkattn.models.foreign_files import explain_folder
from chunkattn.models.spec import HEAD

logger = logging.getLogger(__name__)

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
BASE_PREFIX = "model."
"""Prefix of the decoder's names in a checkpoint of a model with a head. Checkpoints of the bare model lack it."""
NESTED_PREFIX = "language_model."
"""Prefix of the decoder's names in a checkpoint of a multimodal model."""
_NESTED = re.compile(r"^(model\.language_model\.|language_model\.(model\.)?)(?=(embed_tokens|layers|norm)\.)")
"""Prefixes of the decoder's names, without its head, in checkpoints of multimodal models, whatever wrote them."""
_LEFT_OUT = ("mtp.", "model.visual.")
"""Prefixes of the names of parts that no decoder reads: heads that draft tokens, and a vision part beside a language model."""
_BASE_MODULES = ("embed_tokens.", "layers.", "norm.")
_HEAD_MODULE = HEAD.removesuffix("weight")
_DTYPES = ("F32", "BF16", "F16", "F64")

_CAUSES = (
    (r"(^|\.)lora_[AB]\.", "the folder holds a LoRA adapter; load its base model with the option `adapter`"),
    (r"\.(original_module|modules_to_save|base_layer)\.", "a PEFT model was saved unmerged; merge it (merge_and_unload)"),
    (r"^base_model\.model\.", "a PEFT model was saved unmerged; merge it (merge_and_unload) and save it again"),
    (r"^module\.", "the model was saved inside DistributedDataParallel; save model.module instead"),
    (r"^_orig_mod\.", "the model was saved inside torch.compile; save the uncompiled model instead"),
    (r"(^|\.)(language_model|text_model|visual|vision_tower)\.", "the folder holds a multimodal model; extract its text model"),
    (
        r"\.(qweight|qzeros|weight_packed|weight_scale|absmax)",
        "the checkpoint is quantised, and config.json has no quantization_config; get the whole folder again",
    ),
    (r"\.(qkv_proj|gate_up_proj|W_pack)\.", "projections are stored fused; split them as transformers names them"),
)
"""Patterns of foreign tensor names, with the likely cause and the remedy."""
_HEADS = {
    "lm_head.weight": (
        "score.weight",
        "the file holds a classifier; name its ...ForSequenceClassification class in architectures",
    ),
    "score.weight": ("lm_head.weight", "the file holds a language model; name its ...ForCausalLM class in architectures"),
}
"""Heads, each with the other kind of head and what it means that the file has this one instead."""
_NO_HEAD = (
    "the checkpoint holds the bare model, without a head; get the model with its head or, for a language model whose head is "
    "its embedding, set tie_word_embeddings to true in config.json"
)


class Shard:
    """An open safetensors file.

    Args:
        path: the file.
        handle: `safe_open` of the file.
    """

    def __init__(self, path: Path, handle: Any) -> None:
        self.path, self.handle = path, handle

    @cached_property
    def _mapped(self) -> tuple[mmap.mmap, dict[str, Any], int]:
        """The bytes of the file, its header and the start of its data. `safe_open` has checked the header."""
        with self.path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        start = 8 + int.from_bytes(mapped[:8], "little")
        return mapped, json.loads(mapped[8:start]), start

    def view(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Return a tensor as it lies in the file, of a type that `safe_open` may not have.

        Args:
            name: name in the file.
            dtype: NumPy's type of the elements.
        """
        mapped, header, start = self._mapped
        first, last = header[name]["data_offsets"]
        values = np.frombuffer(mapped, np.uint8, last - first, start + first)
        return values.view(dtype).reshape(header[name]["shape"])

    def release(self, name: str) -> None:
        """Let the system take back the memory of a tensor's pages that were read by `view`.

        Args:
            name: name in the file.
        """
        mapped, header, start = self._mapped
        first, last = (start + offset for offset in header[name]["data_offsets"])
        page = first // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mapped, "madvise") and last > first:
            mapped.madvise(mmap.MADV_DONTNEED, page, last - page)


class SafetensorsFolder:
    """Tensors of a folder of safetensors files, under the names of a model with a head.

    Attributes:
        path: the folder.
        needs_all: False: transformers ignores tensors without a place.
    """

    needs_all = False

    def __init__(self, folder: Path, stack: ExitStack, *, is_nested: bool = False) -> None:
        """Open the files, which stay open until `stack` closes.

        Args:
            folder: the folder.
            stack: holder of the open files.
            is_nested: whether the decoder is the language part of a multimodal model. Other parts are left out.

        Raises:
            ModelError: a file is missing or unreadable, or the files contradict each other.
        """
        self.path, self._is_nested = folder, is_nested
        self._stored: dict[str, tuple[Shard, str]] = {}
        places, self._lost = _places(folder, stack)
        if is_present(folder / "adapter_config.json"):
            logger.warning("%s holds an adapter beside the model, which is not applied; name it as `adapter`", folder)
        for name, shard in places.items():
            parameter = name
            if name.startswith(_LEFT_OUT):
                continue
            if is_nested:
                found = _NESTED.match(name)
                parameter = name[found.end() :] if found else name.removeprefix(NESTED_PREFIX)
                if not found and not parameter.startswith(_HEAD_MODULE):
                    continue
            if parameter.startswith(_BASE_MODULES):
                parameter = BASE_PREFIX + parameter
            if parameter in self._stored:
                raise ModelError(
                    f"{folder}: tensors {self._stored[parameter][1]!r} and {name!r} stand for the same parameter; drop one"
                )
            self._stored[parameter] = shard, name

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, `[out, in]` for a matrix.

        Args:
            name: name of the tensor.

        Raises:
            ModelError: the tensor holds no floating-point numbers.
        """
        shard, stored_name = self._stored[name]
        stored = shard.handle.get_slice(stored_name)
        if stored.get_dtype() not in _DTYPES:
            raise ModelError(f"{self.path}: tensor {stored_name!r} is {stored.get_dtype()}; supported are {', '.join(_DTYPES)}")
        return tuple(stored.get_shape())

    def read(self, name: str, dtype: np.dtype, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Return a tensor or a part of it, cast to `dtype` on the host. Numbers that `dtype` cannot hold become infinite.

        Args:
            name: name of the tensor.
            dtype: dtype of the returned array.
            index: slices of the first axes; only this part is read.
        """
        shard, stored_name = self._stored[name]
        stored = shard.handle.get_slice(stored_name)[index] if index else shard.handle.get_tensor(stored_name)
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(stored, dtype=dtype)

    def stored_type(self, name: str) -> str:
        """Return the file's name of a tensor's dtype, such as `BF16`.

        Args:
            name: name of the tensor.
        """
        shard, stored_name = self._stored[name]
        return str(shard.handle.get_slice(stored_name).get_dtype())

    def release(self, name: str) -> None:
        """Do nothing: the file's pages stay in memory until it closes.

        Args:
            name: name of the tensor.
        """

    def why_missing(self, name: str) -> str:
        """Return the prefix under which the folder holds a missing tensor, and the likely cause, as far as they can be told.

        Args:
            name: name of the missing tensor.
        """
        for listed in (name, name.removeprefix(BASE_PREFIX)):
            if listed in self._lost:
                return (
                    f"{INDEX_FILE} says that it is in {self._lost[listed]!r}, which lacks it; the index or the shard is stale: "
                    "get the folder again"
                )
        stored = self._stored if self._is_nested else [stored_name for _, stored_name in self._stored.values()]
        return explain_missing(name, stored)


def explain_missing(name: str, stored: Iterable[str]) -> str:
    """Return why a checkpoint may lack a tensor: a prefix that was found instead, and the likely cause.

    Args:
        name: name of the missing tensor.
        stored: names of the tensors of the checkpoint.
    """
    names, tail = sorted(stored), name.removeprefix(BASE_PREFIX)
    others = [other for other in names if other.endswith(f".{tail}")]
    hints = [f"the file has {o!r}: prefix {o.removesuffix(tail)!r} instead of {BASE_PREFIX!r}" for o in others[:1]]
    causes = [cause for pattern, cause in _CAUSES if any(re.search(pattern, other) for other in names)]
    if not causes and name in _HEADS:
        other, cause = _HEADS[name]
        foreign = [n for n in names if not n.startswith((BASE_PREFIX, *_BASE_MODULES))]
        causes = [cause if other in names else f"the head has another name, {foreign[0]!r}" if foreign else _NO_HEAD]
    return "; ".join([*hints, *causes[:1]]) or "the checkpoint is incomplete, get it again"


def _places(folder: Path, stack: ExitStack) -> tuple[dict[str, Shard], dict[str, str]]:
    """Return the open file of each stored tensor, and the shard of each tensor that the index lists and its shard lacks.

    As in transformers, the single file counts before an index. Among shards the index decides where a tensor is read.
    """
    if is_present(folder / SINGLE_FILE):
        single = _open(folder / SINGLE_FILE, stack)
        return dict.fromkeys(single.handle.keys(), single), {}
    if not is_present(folder / INDEX_FILE):
        raise ModelError(_no_weights(folder))
    listed = _weight_map(folder / INDEX_FILE)
    shards = {shard: _shard(folder, shard, stack) for shard in sorted(set(listed.values()))}
    places: dict[str, Shard] = {}
    for shard, opened in shards.items():
        for name in opened.handle.keys():  # noqa: SIM118 - no __iter__
            if listed.get(name, shard) != shard:
                continue
            if name in places:
                raise ModelError(
                    f"{folder}: tensor {name!r} is in several shards and not in {INDEX_FILE}; get the folder again"
                )
            places[name] = opened
    return places, {name: shard for name, shard in listed.items() if name not in places}


def _weight_map(index: Path) -> dict[str, str]:
    try:
        shards = json.loads(index.read_bytes())["weight_map"]
        if not shards or not all(isinstance(shard, str) for shard in shards.values()):
            raise TypeError("weight_map must map names of tensors to names of files")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        cause = cause_of(index, f"{type(error).__name__}: {error}")
        raise ModelError(f"{index}: not a safetensors index ({cause}); get it again") from error
    return {name: str(PurePosixPath(shard)) for name, shard in shards.items()}


def _shard(folder: Path, shard: str, stack: ExitStack) -> Shard:
    if Path(shard).name != shard:
        raise ModelError(f"{folder / INDEX_FILE}: shard {shard!r} must be the name of a file in the same folder")
    if not is_present(folder / shard):
        raise ModelError(f"{folder}: shard {shard!r} named in {INDEX_FILE} is missing; get it, or get the folder again")
    return _open(folder / shard, stack)


def _open(file: Path, stack: ExitStack) -> Shard:
    try:
        handle = stack.enter_context(safe_open(file, framework="np"))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: not a readable safetensors file ({cause_of(file, error)}); get it again") from error
    return Shard(file, handle)


def _no_weights(folder: Path) -> str:
    """Return the error of a folder without safetensors weights, with a remedy for what the folder has."""
    text = f"{folder}: no {SINGLE_FILE} and no {INDEX_FILE}; only safetensors checkpoints are read"
    return text if (reason := explain_folder(folder)) is None else f"{text}; {reason}"
