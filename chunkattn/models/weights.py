"""Reading of the decoder's parameters from safetensors folders and GGUF files, and writing as safetensors."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.flax import save_file

from chunkattn.backends.cpu.packed import quantize_q8_0
from chunkattn.errors import ModelError
from chunkattn.models.adapters import Adapter
from chunkattn.models.decoder import Decoder
from chunkattn.models.fused import SplitTensors, split_tensors
from chunkattn.models.gguf_file import GGUFFile, open_gguf
from chunkattn.models.gguf_tensors import GGUFTensors
from chunkattn.models.joined import joined_weights, joins
from chunkattn.models.merged import MergedTensors
from chunkattn.models.mixers import EXACT
from chunkattn.models.packed import Packed, Weight
from chunkattn.models.packing import Packing, load_packed, plan_packing
from chunkattn.models.quantized_folder import QuantizedFolder, open_folder
from chunkattn.models.safetensors_folder import BASE_PREFIX, NESTED_PREFIX, SINGLE_FILE, SafetensorsFolder
from chunkattn.models.shards import ONE_DEVICE, Index, Shards
from chunkattn.models.spec import EMBEDDING, HEAD, TRANSPOSED, DecoderSpec
from chunkattn.models.stacked import StackedExperts

logger = logging.getLogger(__name__)

_ROWS = 4096
"""Rows of the embedding and of the head that are compared at a time."""
TensorSource = SafetensorsFolder | SplitTensors | StackedExperts | GGUFTensors | MergedTensors
"""Tensors of one checkpoint, by their names in Hugging Face checkpoints."""


def load_weights(
    spec: DecoderSpec,
    source: Path | GGUFFile,
    dtype: jnp.dtype,
    shards: Shards = ONE_DEVICE,
    packing: Packing | None = None,
    adapter: Adapter | None = None,
) -> Decoder:
    """Return a decoder with a checkpoint's weights, read tensor by tensor, packed or cast to `dtype`.

    Host memory holds at most one tensor beside the finished tensors, or one device's part of a joined weight and a part of
    that. Of a tensor that devices divide, each part is read alone.

    Args:
        spec: shape of the decoder.
        source: local folder of the checkpoint, or its GGUF file, opened or not.
        dtype: dtype of the weights that are not packed.
        shards: devices that share the weights.
        packing: how matrices are packed; None packs none.
        adapter: adapter that is added to the weights in float32, before they are rounded; None for none.

    Raises:
        ConfigError: no matrix can be packed, and the options ask for packed weights by name.
        ModelError: a file or tensor is missing, unreadable, of the wrong shape or not finite.
    """
    if isinstance(source, Path) and source.is_file():
        source = open_gguf(source)
    with ExitStack() as stack:
        if isinstance(source, GGUFFile):
            tensors = split_tensors(GGUFTensors(source, spec), spec)
        else:
            tensors = split_tensors(open_folder(source, stack, is_nested=spec.is_nested), spec)
        return fill(spec, tensors if adapter is None else MergedTensors(tensors, adapter), dtype, shards, packing)


def fill(
    spec: DecoderSpec,
    source: TensorSource,
    dtype: jnp.dtype,
    shards: Shards = ONE_DEVICE,
    packing: Packing | None = None,
) -> Decoder:
    """Return a decoder with the tensors of a source; see `load_weights`.

    Args:
        spec: shape of the decoder. A head in the source that is not the embedding overrides `tie_embeddings`.
        source: tensors of the checkpoint.
        dtype: see `load_weights`.
        shards: devices that share the weights.
        packing: see `load_weights`.

    Raises:
        ConfigError: see `load_weights`.
        ModelError: a tensor is missing, unreadable, of the wrong shape or not finite.
    """
    spec, embedding = _tied(spec, source, dtype)
    spec = spec.stored_for(shards.devices[0].platform)
    shapes = spec.parameters()
    names = {name: f"{name.removesuffix(TRANSPOSED)}weight" if name.endswith(TRANSPOSED) else name for name in shapes}
    names[EMBEDDING] = embedding
    _check_names(source, spec, names.values())
    for parameter, name in names.items():
        expected, shape = shapes[parameter], source.shape(name)
        if parameter.endswith(TRANSPOSED):
            expected = expected[0], expected[2], expected[1]
        if shape != expected:
            raise ModelError(f"{source.path}: tensor {name!r} has shape {list(shape)}, the configuration says {list(expected)}")
    types = {parameter: source.stored_type(name) for parameter, name in names.items()}
    formats = {} if packing is None else plan_packing(packing, types, shapes, shards)
    weights: dict[str, Weight] = {}
    if joins(shards.devices[0].platform):
        for whole, joined in joined_weights(spec).items():
            if formats.keys() & joined.parts.keys():
                continue
            read = partial(joined.read, lambda part, index: _read_finite(source, names[part], dtype, index), dtype, shards)
            weights[whole] = shards.load(whole, joined.shape(shards), read)
            for part in joined.parts:
                source.release(names.pop(part))
    for parameter, name in names.items():
        if packing is not None and (form := formats.get(parameter)):
            read = partial(_rounded, source, name) if form != types[parameter] else partial(_stored, source, name)
            where = f"{source.path}: tensor {name!r}"
            weights[parameter] = load_packed(packing, parameter, shapes[parameter], form, read, shards, where)
        else:
            kept = jnp.dtype(jnp.float32) if parameter.endswith(EXACT) else dtype
            read = partial(_read_transposed if parameter.endswith(TRANSPOSED) else _read_finite, source, name, kept)
            weights[parameter] = shards.load(parameter, shapes[parameter], read)
        source.release(name)
    return Decoder(spec, weights, dtype, shards)


def _read_transposed(source: TensorSource, name: str, dtype: jnp.dtype, index: Index) -> np.ndarray:
    """Return stacked matrices `[count, in, out]` of a source that has them as `[count, out, in]`."""
    which, rows, columns = (*index, *[slice(None)] * 3)[:3]
    return np.ascontiguousarray(_read_finite(source, name, dtype, (which, columns, rows)).swapaxes(1, 2))


def _stored(source: TensorSource, name: str, index: Index) -> np.ndarray:
    """Return stored blocks of a matrix, uint8 `[rows, bytes]`."""
    source = source.base if isinstance(source, MergedTensors) else source
    assert isinstance(source, (GGUFTensors, SplitTensors, StackedExperts, QuantizedFolder))
    return source.blocks(name, index)


def _rounded(source: TensorSource, name: str, index: Index) -> np.ndarray:
    """Return numbers of a matrix rounded to blocks of Q8_0, uint8 `[rows, bytes]`."""
    dtype = jnp.bfloat16 if source.stored_type(name) == "BF16" else np.float32
    values = _read_finite(source, name, jnp.dtype(dtype), index)
    return quantize_q8_0(values.reshape(-1, values.shape[-1]))


def _read_finite(source: TensorSource, name: str, dtype: jnp.dtype, index: Index) -> np.ndarray:
    values = source.read(name, dtype, index)
    if not _is_finite(values):
        raise _not_finite(source, name, dtype, index)
    return values


def _tied(spec: DecoderSpec, source: TensorSource, dtype: jnp.dtype) -> tuple[DecoderSpec, str]:
    """Return the shape with the head that the source has, and the name of the embedding's tensor.

    As in transformers, a head that differs from the embedding is read although `tie_word_embeddings` is set, and a head
    without an embedding serves as both.
    """
    names = source.names()
    if not spec.tie_embeddings or spec.num_labels is not None or HEAD not in names:
        return spec, EMBEDDING
    if EMBEDDING not in names:
        return spec, HEAD
    shape = source.shape(EMBEDDING)
    pieces = [(slice(first, min(first + _ROWS, shape[0])),) for first in range(0, shape[0], _ROWS)]
    if shape == source.shape(HEAD) and all(
        np.array_equal(source.read(EMBEDDING, dtype, piece), source.read(HEAD, dtype, piece)) for piece in pieces
    ):
        return spec, EMBEDDING
    logger.warning(
        "%s: %r differs from the embedding, so the head is read although tie_word_embeddings is true", source.path, HEAD
    )
    return replace(spec, tie_embeddings=False), EMBEDDING


def _is_finite(values: np.ndarray) -> bool:
    """Return whether all numbers are finite, without an array of that many booleans.

    As integers, the bits of numbers of one sign are in the order of their magnitudes, and infinity and NaN come last.
    """
    if not values.size:
        return True
    bits, limits = np.ascontiguousarray(values), np.array([np.inf, -np.inf], values.dtype)
    signed, unsigned = (np.dtype(f"{kind}{values.itemsize}") for kind in "iu")
    largest, smallest = limits.view(signed)[0], limits.view(unsigned)[1]
    return bool(bits.view(signed).max() < largest and bits.view(unsigned).max() < smallest)


def _not_finite(source: TensorSource, name: str, dtype: jnp.dtype, index: Index) -> ModelError:
    if dtype.itemsize < 4 and _is_finite(source.read(name, jnp.dtype(np.float32), index)):
        return ModelError(
            f"{source.path}: tensor {name!r} holds numbers beyond the range of {dtype}; pass dtype='bfloat16' or 'float32'"
        )
    return ModelError(f"{source.path}: tensor {name!r} holds NaN or infinite values; the file is damaged, get it again")


def _check_names(source: TensorSource, spec: DecoderSpec, names: Iterable[str]) -> None:
    needed, stored = set(names), set(source.names())
    if missing := sorted(needed - stored):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        first = next((name for name in missing if name.startswith(BASE_PREFIX)), missing[0])
        why = source.why_missing(first)
        raise ModelError(f"{source.path}: tensor {first!r}{more} that {spec.architecture} needs is missing ({why})")
    unused = {n for n in stored - needed if n not in (HEAD, EMBEDDING) and not n.endswith("rotary_emb.inv_freq")}
    if unused and source.needs_all:
        raise ModelError(f"{source.path}: {spec.architecture} has no place for tensor {min(unused)!r}, {len(unused)} in all")
    if unused:
        logger.warning("%s: %d tensors are not used by %s, e.g. %r", source.path, len(unused), spec.architecture, min(unused))


def save_weights(model: Decoder, folder: Path) -> None:
    """Write the decoder's parameters to a folder as one Hugging Face safetensors file.

    Args:
        model: decoder to save.
        folder: existing folder to write to.

    Raises:
        ModelError: a parameter is packed.
    """
    joined, arrays = joined_weights(model.spec), dict[str, jax.Array]()
    for name, weight in model.weights.items():
        if not isinstance(weight, Packed):
            arrays |= joined[name].separate(weight, model.shards) if name in joined else {name: weight}
    if packed := [name for name, weight in model.weights.items() if isinstance(weight, Packed)]:
        raise ModelError(f"{min(packed)!r} is packed, which safetensors cannot hold; load the model with weights='dequantized'")
    for name in [name for name, weight in arrays.items() if weight.ndim == 3]:
        stacked, (before, module, leaf) = arrays.pop(name), name.rsplit(".", 2)
        for number, matrix in enumerate(stacked):
            arrays[f"{before}.{number}.{module}.weight"] = matrix if leaf == "weight" else matrix.T
    if model.spec.is_nested:
        arrays = {f"{NESTED_PREFIX}{name}": array for name, array in arrays.items()}
    save_file(arrays, folder / SINGLE_FILE, metadata={"format": "pt"})
