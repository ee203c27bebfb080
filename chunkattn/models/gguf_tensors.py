"""`GGUFTensors`: the tensors of a GGUF file under the names of Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from chunkattn.models.gguf_families import DRAFTS, GGUF_FAMILIES
from chunkattn.models.gguf_file import GGUFFile
from chunkattn.models.gguf_order import GGUFOrder
from chunkattn.models.gguf_spec import CLASSIFIER, ROPE_FACTORS
from chunkattn.models.mixers import RECURRENT
from chunkattn.models.spec import CLASSES, HEAD, ROUTERS, DecoderSpec


class GGUFTensors:
    """Tensors of a GGUF file under the names of Hugging Face checkpoints, with rows in their order.

    Attributes:
        path: path of the file.
        needs_all: True: llama.cpp reads every tensor, such as a bias of one layer.
    """

    needs_all = True

    def __init__(self, file: GGUFFile, spec: DecoderSpec) -> None:
        """Name the tensors of the file.

        Raises:
            ModelError: the file has a tensor that the decoder does not read, which could change its answers.
        """
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        self.path, self._file, self._spec = file.path, file, spec
        architecture = file.need("general.architecture", str)
        family = GGUF_FAMILIES[architecture]
        self._order = GGUFOrder(spec, family.interleaves, family.tiles)
        kind = next(k for k, name in MODEL_ARCH_NAMES.items() if name == architecture)
        places = get_tensor_name_map(kind, spec.num_layers)
        listed = [name.rpartition(".")[0] for name in (HEAD, *spec.parameters()) if name != CLASSES]
        # Both forms of a fused module, for llama.cpp reads both; where they have one name, it is the fused one's.
        modules = {places.get_name(module): module for module in (*listed, *map(spec.stored_module, listed))}
        if spec.num_labels is not None:
            modules[CLASSIFIER] = "score"
        exact: dict[str, str] = {}
        for layer in spec.recurrent_layers:
            prefix = f"model.layers.{layer}.{RECURRENT}"
            exact[f"{places.get_name(f'{prefix}A_log')}"] = f"{prefix}A_log"
            exact[f"{places.get_name(f'{prefix}dt_proj')}.bias"] = f"{prefix}dt_bias"
        drafts = spec.num_layers if DRAFTS in family.reads else None
        self._names: dict[str, str] = {}
        for name in file.tensors.keys() - {ROPE_FACTORS, *family.rope_tensors}:
            if name in exact:
                self._names[exact[name]] = name
                continue
            if drafts is not None and _block(name) >= drafts:
                continue
            module, _, leaf = name.rpartition(".")
            if module not in modules or leaf not in ("weight", "bias"):
                raise file.fault(f"tensor {name!r} has no place in {spec.architecture}; the model is unsupported")
            self._names[f"{modules[module]}.{leaf}"] = name

    def names(self) -> Collection[str]:
        """Return the checkpoint names of all tensors."""
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, `[out, in]` for a matrix.

        Args:
            name: checkpoint name.
        """
        shape = self._file.shape(self._names[name])
        return (1, *shape) if name.endswith(ROUTERS[1]) and len(shape) == 1 else shape

    def read(self, name: str, dtype: np.dtype, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Return a tensor or a part of it, dequantised, with its rows in the checkpoint's order.

        Args:
            name: checkpoint name.
            dtype: dtype of the returned array.
            index: slices of the first axes; only the blocks of this part are read.
        """
        if len(shape := self.shape(name)) == 3:
            which, rows, columns = (*index, *[slice(None)] * 3)[:3]
            matrices = self._file.read(self._names[name], dtype, _flat(shape, which, rows), columns)
            return matrices.reshape(len(range(*which.indices(shape[0]))), -1, matrices.shape[-1])
        rows, columns = (*index, slice(None), slice(None))[:2]
        stored, order, across = self._names[name], self._order.rows(name), self._order.columns(name)
        if len(self._file.shape(stored)) < len(shape):  # a matrix of one row, stored without the axis
            return self._file.read(stored, dtype)[None][rows, columns]
        places = rows if order is None else order[rows]
        if name.endswith(f"{RECURRENT}A_log"):  # files hold what the softplus is multiplied by
            with np.errstate(all="ignore"):
                return np.log(-self._file.read(stored, np.dtype(np.float64), places)).astype(dtype)
        if self._spec.norm_offset and name.endswith("norm.weight") and not name.endswith(f"{RECURRENT}norm.weight"):
            # Files hold what these norms multiply by.
            return (self._file.read(stored, np.dtype(np.float32), places) - np.float32(self._spec.norm_offset)).astype(dtype)
        if across is not None:
            return self._file.read(stored, dtype, places)[:, across[columns]]
        return self._file.read(stored, dtype, places, columns)

    def stored_type(self, name: str) -> str:
        """Return GGUF's name of the type of a tensor, such as `Q4_K`.

        Blocks that hold columns of several value heads cannot be moved, so the type of such a matrix is F32.

        Args:
            name: checkpoint name.
        """
        from gguf import GGML_QUANT_SIZES

        kind, mixer = self._file.tensors[self._names[name]].tensor_type, self._spec.recurrent
        if mixer is not None and self._order.columns(name) is not None and mixer.value_dim % GGML_QUANT_SIZES[kind][0]:
            return "F32"
        return kind.name

    def blocks(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Return the blocks of a part of a quantised matrix, uint8 `[rows, bytes]`, with its rows in the checkpoint's order.

        Args:
            name: checkpoint name.
            index: rows and columns, whole blocks; of stacked matrices, matrices before them.
        """
        from gguf import GGML_QUANT_SIZES

        if len(shape := self.shape(name)) == 3:
            which, rows, columns = index
            return self._file.blocks(self._names[name], _flat(shape, which, rows), columns)
        rows, columns = index
        stored, order, across = self._names[name], self._order.rows(name), self._order.columns(name)
        places = rows if order is None else order[rows]
        if across is None:
            return self._file.blocks(stored, places, columns)
        block, size = GGML_QUANT_SIZES[self._file.tensors[stored].tensor_type]
        blocks = self._file.blocks(stored, places, slice(None))
        moved = blocks.reshape(len(blocks), -1, size)[:, across[columns][::block] // block]
        return moved.reshape(len(blocks), -1)

    def release(self, name: str) -> None:
        """Give back the memory that the file's pages of a tensor take.

        Args:
            name: checkpoint name.
        """
        self._file.tensors[self._names[name]].release()

    def why_missing(self, name: str) -> str:
        """Return the likely cause of a missing tensor: the file is incomplete.

        Args:
            name: checkpoint name.
        """
        return "the file is incomplete, get it again"


def _block(name: str) -> int:
    """Return the number of a tensor's block, -1 for a tensor outside of all blocks."""
    kind, number, *_ = *name.split("."), ""
    return int(number) if kind == "blk" and number.isdecimal() else -1


def _flat(shape: tuple[int, ...], which: slice, rows: slice) -> np.ndarray:
    """Return the places of rows of stacked matrices among the rows of all."""
    return np.arange(shape[0] * shape[1]).reshape(shape[:2])[which, rows].reshape(-1)
