"""Names of GGUF files: their quantisation, the shards of one model, and `MODEL:QUANT`, which names one file among several."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import PurePosixPath

from chunkattn.errors import ModelError

GGUF_SUFFIX = ".gguf"
SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
"""End of the name of a shard: its number, from 1, and the number of shards."""

_NAMED = re.compile(r"(.*[^:/\\]):([\w.-]+)", re.DOTALL)
_QUANT = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|NVFP4\w*|BF16|F16|FP16|F32|FP32))$", re.IGNORECASE | re.ASCII
)
"""Quantisation at the end of a name, as llama.cpp's tools write it; `UD-` is Unsloth's."""
_BESIDE = re.compile(r"(^|[-._])(mmproj|imatrix)([-._]|$)", re.IGNORECASE)
"""Names of files that hold no language model: a projector of images, or statistics of a quantisation."""


def split_quant(model: str) -> tuple[str, str | None]:
    """Return the folder or hub id and the quantisation of `MODEL:QUANT`, such as `owner/name:Q4_K_M`.

    The quantisation is None for a model without one, and for a URL.

    Args:
        model: model as the user names it.
    """
    match = None if "://" in model else _NAMED.fullmatch(model)
    return (model, None) if match is None else (match[1], match[2])


def quant_of(name: str) -> str | None:
    """Return the quantisation in the name of a GGUF file, in capitals, or None.

    Args:
        name: name or relative path of the file.
    """
    match = _QUANT.search(_stem(name))
    return None if match is None else match[1].upper()


def has_quant(name: str, quant: str) -> bool:
    """Return whether the name of a GGUF file, or of its folder, ends in a quantisation, in small letters or capitals.

    Args:
        name: name or relative path of the file.
        quant: quantisation, such as `Q4_K_M`.
    """
    end = re.compile(rf"(?:^|[-._]){re.escape(quant)}$", re.IGNORECASE)
    return any(end.search(part) for part in (_stem(name), PurePosixPath(name).parent.name))


def gguf_models(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the GGUF language models among files: the sorted files of each, by the name without shard and suffix.

    Args:
        names: names or relative paths of files.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(GGUF_SUFFIX) and not _BESIDE.search(PurePosixPath(name).name):
            models.setdefault(str(PurePosixPath(name).with_name(_stem(name))), []).append(name)
    return models


def pick_gguf(names: Collection[str], quant: str, place: str) -> list[str]:
    """Return the files of the one GGUF model of a quantisation, the first shard first.

    Args:
        names: names or relative paths of the files there are.
        quant: quantisation, such as `Q4_K_M`.
        place: folder or hub id that holds the files, for the message.

    Raises:
        ModelError: no model or several have this quantisation.
    """
    models = gguf_models(names)
    matches = [files for files in models.values() if has_quant(files[0], quant)]
    exact = [files for files in matches if quant_of(files[0]) == quant.upper()]  # "Q4_K_XL" beside "UD-Q4_K_XL"
    matches = exact if len(exact) == 1 else matches
    if len(matches) == 1:
        return matches[0]
    if matches:
        listed = ", ".join(files[0] for files in matches)
        raise ModelError(
            f"{place} has {len(matches)} GGUF models of quantisation {quant!r} ({listed}); download one and pass its path"
        )
    there = f"it has {list_quants(names)}" if models else "it has no GGUF files at all; a revision goes into revision="
    raise ModelError(f"{place} has no GGUF file of quantisation {quant!r}; {there}")


def list_quants(names: Iterable[str]) -> str:
    """Return the quantisations of the GGUF models among files, for a message; a file without one gives its name.

    Args:
        names: names or relative paths of files.
    """
    return ", ".join(dict.fromkeys(quant_of(files[0]) or files[0] for files in gguf_models(names).values()))


def example_quant(names: Iterable[str]) -> str | None:
    """Return a quantisation among files for an example: `Q4_K_M`, or else the first; None if no name has one.

    Args:
        names: names or relative paths of files.
    """
    quants = [quant for files in gguf_models(names).values() if (quant := quant_of(files[0]))]
    return "Q4_K_M" if "Q4_K_M" in quants else next(iter(quants), None)


def _stem(name: str) -> str:
    """Return the name of a file without shard and suffix."""
    return re.sub(r"\.gguf$", "", SHARD.sub("", PurePosixPath(name).name), flags=re.IGNORECASE)
