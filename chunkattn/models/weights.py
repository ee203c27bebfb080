"""Reading of the decoder's parameters from safetensors folders and GGUF files, and writing as safetensors."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file

from chunkattn.errors import ModelError
from chunkattn.models.decoder import Decoder
from chunkattn.models.gguf_file import GGUFFile, is_gguf, open_gguf
from chunkattn.models.gguf_spec import GGUFTensors
from chunkattn.models.spec import DecoderSpec

logger = logging.getLogger(__name__)

_DTYPES = ("F32", "BF16", "F16", "F64")
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


def checkpoint_name(path: Iterable[Any]) -> str:
    """Return the checkpoint's name of the parameter at `path` in the decoder's state.

    Args:
        path: keys of the parameter in the state, from the outermost in.

    >>> checkpoint_name(("layers", 3, "self_attn", "q_proj", "weight"))
    'model.layers.3.self_attn.q_proj.weight'
    """
    *parents, leaf = map(str, path)
    name = ".".join([*parents, "bias" if leaf == "bias" else "weight"])
    return name if parents[0] in ("lm_head", "score") else f"model.{name}"


def _files(folder: Path) -> list[Path]:
    """Return the folder's safetensors files, from the index if the folder has an index.

    Raises:
        ModelError: a file is missing, or the index is malformed.
    """
    index = folder / INDEX_FILE
    if not index.exists():
        if not (folder / SINGLE_FILE).exists():
            raise ModelError(f"{folder}: no {SINGLE_FILE} and no {INDEX_FILE}; only safetensors checkpoints are read")
        return [folder / SINGLE_FILE]
    try:
        names = sorted(map(str, set(json.loads(index.read_text())["weight_map"].values())))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index}: not a safetensors index ({type(error).__name__}: {error})") from error
    if missing := [n for n in names if not (folder / n).exists()]:
        raise ModelError(f"{folder}: shard {missing[0]!r} named in {INDEX_FILE} is missing ({len(missing)} in all)")
    return [folder / n for n in names]


class TensorSource(Protocol):
    """Tensors of one checkpoint, by their names in Hugging Face checkpoints."""

    path: Path

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, `[out, in]` for a matrix.

        Args:
            name: name of the tensor.
        """

    def read(self, name: str, dtype: jnp.dtype) -> np.ndarray:
        """Return a tensor, cast to `dtype` on the host.

        Args:
            name: name of the tensor.
            dtype: dtype of the returned array.
        """


class _SafetensorsFolder:
    """Tensors of a folder of safetensors files."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.path, self._where = folder, dict[str, Any]()
        for file in _files(folder):
            try:
                handle = stack.enter_context(safe_open(file, framework="np"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file}: not a readable safetensors file ({error})") from error
            self._where.update((name, handle) for name in handle.keys())  # noqa: SIM118 - no __iter__

    def names(self) -> Collection[str]:
        return self._where.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._where[name].get_slice(name)
        if stored.get_dtype() not in _DTYPES:
            raise ModelError(f"{self.path}: tensor {name!r} is {stored.get_dtype()}; supported are {', '.join(_DTYPES)}")
        return tuple(stored.get_shape())

    def read(self, name: str, dtype: jnp.dtype) -> np.ndarray:
        return np.asarray(self._where[name].get_tensor(name), dtype=dtype)


def load_weights(spec: DecoderSpec, source: Path | GGUFFile, dtype: jnp.dtype) -> Decoder:
    """Return a decoder with a checkpoint's weights, read tensor by tensor and cast to `dtype`.

    Host memory holds at most one tensor beside the finished tensors.

    Args:
        spec: shape of the decoder.
        source: local folder of the checkpoint, or its GGUF file, opened or not.
        dtype: dtype of the loaded weights.

    Raises:
        ModelError: a file or tensor is missing, unreadable or of the wrong shape.
    """
    if isinstance(source, Path) and is_gguf(source):
        source = open_gguf(source)
    if isinstance(source, GGUFFile):
        return fill(spec, GGUFTensors(source, spec), dtype)
    with ExitStack() as stack:
        return fill(spec, _SafetensorsFolder(source, stack), dtype)


def fill(spec: DecoderSpec, source: TensorSource, dtype: jnp.dtype) -> Decoder:
    """Return a decoder with the tensors of a source; see `load_weights`.

    Args:
        spec: shape of the decoder.
        source: tensors of the checkpoint.
        dtype: dtype of the loaded weights.

    Raises:
        ModelError: a tensor is missing, unreadable or of the wrong shape.
    """
    model = nnx.eval_shape(lambda: Decoder(spec, dtype, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    wanted = {checkpoint_name(path): (path, leaf) for path, leaf in nnx.to_flat_state(state)}
    _check_names(source, spec, wanted.keys())
    loaded = []
    for name, (path, leaf) in wanted.items():
        expected, found = leaf.shape, source.shape(name)
        if found != expected:
            raise ModelError(f"{source.path}: tensor {name!r} has shape {list(found)}, the configuration says {list(expected)}")
        # A copy on the device, independent of the file.
        loaded.append((path, leaf.replace(jnp.array(source.read(name, dtype)))))
    return nnx.merge(graph, nnx.from_flat_state(loaded))


def _check_names(source: TensorSource, spec: DecoderSpec, names: Iterable[str]) -> None:
    wanted, found = set(names), set(source.names())
    if missing := sorted(wanted - found):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{source.path}: tensor {missing[0]!r}{more} that {spec.architecture} needs is missing")
    unused = {n for n in found - wanted if n != "lm_head.weight" and not n.endswith("rotary_emb.inv_freq")}
    if unused:
        logger.warning("%s: %d tensors are not used by %s, e.g. %r", source.path, len(unused), spec.architecture, min(unused))


def save_weights(model: Decoder, folder: Path) -> None:
    """Write the decoder's parameters to a folder as one Hugging Face safetensors file.

    Args:
        model: decoder to save.
        folder: existing folder to write to.
    """
    tensors = {checkpoint_name(path): jnp.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model))}
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
