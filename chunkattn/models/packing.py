"""`Packing`: which matrices of a checkpoint are packed when it is loaded, and their reading."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from chunkattn.backends.cpu import library
from chunkattn.backends.cpu import packed as native
from chunkattn.errors import ConfigError, ModelError
from chunkattn.models.aligned import aligned_zeros
from chunkattn.models.mixers import UNPACKED
from chunkattn.models.packed import Packed, Weight
from chunkattn.models.shards import ONE_DEVICE, Index, Shards
from chunkattn.models.spec import CLASSES, ROUTERS

if TYPE_CHECKING:
    from chunkattn.config import EngineConfig

logger = logging.getLogger(__name__)

_DIGITS = {"int8": 1, "int16": 2}
"""Bytes of a value of a row, by the option `activations`."""
_PACKED_BY_AUTO = ("bfloat16", "float16")
"""Dtypes under which `weights="auto"` packs."""
_ROUNDED = "Q8_0"
"""Format of the matrices under `quantization="int8"`."""
_PIECE = 1 << 23
"""Elements that are read and packed at a time."""


@dataclass(frozen=True)
class Packing:
    """Choice of the matrices that are packed, and of the integers of rows.

    Attributes:
        digits: bytes of a value of the rows that are multiplied: 1 (int8) or 2 (int16).
        rounds: whether matrices that the checkpoint has in no packed format are rounded to blocks of 8 bits.
        is_needed: whether a model without a packed matrix is an error.
    """

    digits: int = 2
    rounds: bool = False
    is_needed: bool = False

    @staticmethod
    def of(config: EngineConfig, dtype: np.dtype) -> Packing | None:
        """Return the packing that the options ask for on this machine, or None for a dequantised model.

        Args:
            config: options of the engine.
            dtype: dtype of the model.

        Raises:
            ConfigError: packed weights are named, and this process cannot multiply them.
        """
        rounds, is_named = config.quantization is not None, config.weights == "packed"
        if config.weights == "dequantized" or not (rounds or is_named or dtype.name in _PACKED_BY_AUTO):
            return None
        if (reason := library.refusal()) is None:
            return Packing(_DIGITS[config.activations], rounds, is_named)
        if rounds or is_named:
            named = "weights='packed'" if is_named else f"quantization={config.quantization!r}"
            raise ConfigError(f"{named} needs the native library of CPUs: {reason}; leave the option out")
        return None

    def format_of(self, stored: str, part: tuple[int, ...]) -> tuple[str | None, str]:
        """Return the format in which a matrix is packed, or None and the reason why it is not packed.

        Args:
            stored: the file's name of the matrix's type.
            part: shape of one device's part.
        """
        form = stored if stored in native.FORMATS or not self.rounds else _ROUNDED
        if form not in native.FORMATS:
            return None, f"{stored} has no packed format"
        reason = native.refusal(form, *part)
        return (form, "") if reason is None else (None, f"{form}: {reason}")


def plan_packing(
    packing: Packing, types: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], shards: Shards = ONE_DEVICE
) -> dict[str, str]:
    """Return the format of every parameter that is packed, and log what is.

    Args:
        packing: how the model is packed.
        types: the file's name of each parameter's type.
        shapes: shape of each parameter.
        shards: devices that share the model.

    Raises:
        ConfigError: no parameter can be packed, and the options ask for packed weights by name.
    """
    formats: dict[str, str] = {}
    others: Counter[str] = Counter()
    for name, shape in shapes.items():
        if len(shape) < 2 or name == CLASSES or name.endswith((*ROUTERS, *UNPACKED)):
            continue
        found, reason = packing.format_of(types[name], shards.held(name, shape, native.ROWS)[-2:])
        if found is None:
            others[reason] += 1
        else:
            formats[name] = found
    if packing.is_needed and not formats:
        reasons = "; ".join(others)
        raise ConfigError(f"weights='packed', but no matrix can be packed: {reasons}; leave the option out")
    for name, count in Counter(formats.values()).most_common():
        logger.info("weights: %d matrices packed as %s, multiplied with int%d", count, name, 8 * packing.digits)
    for reason, count in others.most_common() if formats else ():
        logger.info("weights: %d matrices dequantised: %s", count, reason)
    return formats


def load_packed(
    packing: Packing,
    parameter: str,
    shape: tuple[int, ...],
    form: str,
    read: Callable[[Index], np.ndarray],
    shards: Shards,
    where: str,
) -> Packed:
    """Return a matrix, or stacked matrices, read and packed piece by piece. Each distinct part of a device is read once.

    Rows of zeros fill up the last panel, and a vocabulary that the number of devices does not divide. Zeros stand for zeros
    in every format.

    Args:
        packing: how the model is packed.
        parameter: name of the parameter in checkpoints.
        shape: shape of the whole matrix, or of all matrices.
        form: format of the blocks.
        read: reads blocks of rows and columns, uint8 `[rows, bytes]`. The index of stacked matrices begins with one of them.
        shards: devices that share the model.
        where: file and tensor, for errors.

    Raises:
        ModelError: a scale is NaN or infinite.
    """
    *stacked, outputs, depth = part = shards.held(parameter, shape, native.ROWS)
    axis, _ = shards.division(parameter)
    count, size = math.prod(stacked), native.FORMATS[form].packed_bytes(outputs, depth)
    step = max(native.ROWS, _PIECE // depth // native.ROWS * native.ROWS)

    def pack(number: int) -> np.ndarray:
        first = number * part[axis]
        held = slice(min(first, shape[axis]), min(first + part[axis], shape[axis]))
        is_columns = axis == len(shape) - 1
        rows, columns = (slice(0, shape[-2]), held) if is_columns else (held, slice(0, depth))
        out = aligned_zeros((count * size,), np.dtype(np.uint8))
        for matrix, begin in product(range(count), range(rows.start, rows.stop, step)):
            index = (slice(begin, min(begin + step, rows.stop)), columns)
            blocks = read((slice(matrix, matrix + 1), *index) if stacked else index)
            if missing := -len(blocks) % native.ROWS:
                blocks = np.pad(blocks, ((0, missing), (0, 0)))
            place = matrix * size + (begin - rows.start) * (size // outputs)
            try:
                native.pack(form, blocks, out[place : place + len(blocks) * (size // outputs)])
            except ModelError:
                raise ModelError(f"{where} holds NaN or infinite values; the file is damaged, get it again") from None
        return out

    data = shards.load_parts(parameter, count * size, pack)
    return Packed(data, form, outputs, depth, packing.digits, stacked[0] if stacked else None)


def forms_of(weights: Mapping[str, Weight]) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Return name, format, shape and digits of every packed parameter, which all hosts of a model must share."""
    return [(name, w.format, w.shape, w.digits) for name, w in weights.items() if isinstance(w, Packed)]
