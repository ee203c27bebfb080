"""Where a model lies: a local folder, a GGUF file, or files that are downloaded from the hub."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from glob import escape
from os import PathLike
from pathlib import Path

from chunkattn.errors import ModelError
from chunkattn.gguf_names import GGUF_SUFFIX, pick_gguf, split_quant
from chunkattn.local_files import is_present
from chunkattn.models.foreign_files import explain_file, explain_files, explain_name, is_gguf, list_files
from chunkattn.models.gguf_file import find_gguf
from chunkattn.models.safetensors_folder import INDEX_FILE

logger = logging.getLogger(__name__)

DEMO_FOLDER = Path(__file__).parent / "demo"
"""Folder of the bundled demo model, in Hugging Face's format."""
# The model card tells what a reranker was tuned from. "model*" skips "consolidated.safetensors" and the like, which are second
# copies of the weights.
CHECKPOINT_FILES = (
    "model*.safetensors",
    "*.json",
    "*.model",
    "*.txt",
    "*.jinja",
    "README.md",
    "head.*",
    "readout.safetensors",
    "*adapter_model.safetensors",
)
"""Patterns of the files of a checkpoint on the hub."""


def resolve_path(
    model: str | PathLike[str] | None, revision: str | None = None, files: Sequence[str] = CHECKPOINT_FILES
) -> Path:
    """Return the local folder or GGUF file of a model; download a hub id to the hub's cache first.

    Args:
        model: local folder, GGUF file under any name, hub id, or folder or hub id with the quantisation of one of its GGUF
            files, such as `owner/name:Q4_K_M`; None for the bundled demo model.
        revision: revision on the hub.
        files: patterns of the files to download.

    Raises:
        ModelError: `model` is none of these, or it is a folder of several GGUF files.
    """
    if model is None:
        return DEMO_FOLDER
    local, model = Path(model).expanduser(), str(model)
    if is_present(local):
        return _folder(local) if local.is_dir() else _file(local)
    place, quant = split_quant(model)
    if quant is not None and is_present(folder := Path(place).expanduser()):
        return _quant_of_folder(folder, quant)
    if reason := explain_name(model):
        raise ModelError(f"model {model!r} is no local folder or file and no hub id: {reason}")
    return _checkpoint(model, revision, files) if quant is None else _quant_of_hub(place, quant, revision)


def _file(path: Path) -> Path:
    if is_gguf(path) or path.suffix.lower() == GGUF_SUFFIX:
        return path
    raise ModelError(f"{path} is no model: {explain_file(path)}")


def _folder(folder: Path) -> Path:
    """Return a folder, or its one GGUF model where it has no checkpoint. Safetensors count before GGUF files."""
    if not (folder / "config.json").exists():
        return find_gguf(folder) or folder
    if not (beside := sorted(path.name for path in folder.glob(f"*{GGUF_SUFFIX}"))):
        return folder
    if (folder / INDEX_FILE).exists() or any(folder.glob("*.safetensors")):
        logger.warning("%s: its safetensors are loaded, not %s; to load a GGUF file, pass its path", folder, ", ".join(beside))
        return folder
    gguf = find_gguf(folder) or folder
    logger.info("%s has a config.json and no safetensors: %s is loaded", folder, gguf.name)
    return gguf


def _quant_of_folder(folder: Path, quant: str) -> Path:
    if not folder.is_dir():
        raise ModelError(f"{folder} is a file, so it takes no quantisation; pass its path without ':{quant}'")
    return folder / pick_gguf(list_files(folder), quant, str(folder))[0]


def _quant_of_hub(hub_id: str, quant: str, revision: str | None) -> Path:
    """Return the GGUF file, or the first shard, of a quantisation on the hub, downloaded with its other shards."""
    files = pick_gguf(_listed(hub_id, revision), quant, hub_id)
    return download(hub_id, [escape(file) for file in files], revision) / files[0]


def _listed(hub_id: str, revision: str | None) -> list[str]:
    """Return the files of a repository, or those in the hub's cache where the hub cannot be asked.

    Raises:
        ModelError: there is no such repository.
    """
    from huggingface_hub import list_repo_files, snapshot_download

    try:
        return list(list_repo_files(hub_id, revision=revision))
    except Exception as error:  # the hub client raises many classes: not found, offline, invalid id
        try:
            return list_files(Path(snapshot_download(hub_id, revision=revision, local_files_only=True)))
        except Exception:
            raise _unknown(hub_id, error) from error


def _checkpoint(hub_id: str, revision: str | None, files: Sequence[str]) -> Path:
    """Return the folder of a checkpoint on the hub."""
    folder = download(hub_id, files, revision)
    wants_weights = any(pattern.endswith(".safetensors") for pattern in files)
    has_weights = any(folder.glob("model*.safetensors")) or not wants_weights
    if not (has_weights and (folder / "config.json").exists()) and (folder / "adapter_model.safetensors").exists():
        return folder  # an adapter, which names its base model
    if (folder / "config.json").exists() and has_weights:
        return folder
    missing = "model*.safetensors" if (folder / "config.json").exists() else "config.json"
    try:
        names = _listed(hub_id, revision)
    except ModelError:
        names = []
    reason = explain_files(names, hub_id) or f"of a repository of GGUF files, name one by its quantisation: '{hub_id}:Q4_K_M'"
    raise ModelError(f"model {hub_id!r} on the hub has no {missing}: {reason}")


def download(hub_id: str, patterns: Sequence[str], revision: str | None = None) -> Path:
    """Return the folder of a repository in the hub's cache, after the download of some of its files.

    Args:
        hub_id: owner and name on the hub.
        patterns: patterns of the files.
        revision: revision on the hub.

    Raises:
        ModelError: the hub has no such repository, or cannot be asked and the cache has none.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:  # the hub client raises many classes: not found, offline, invalid id
        raise _unknown(hub_id, error) from error


def _unknown(hub_id: str, error: Exception) -> ModelError:
    text = f"model {hub_id!r} is no local folder and cannot be loaded from the hub: {error}"
    if "/" not in hub_id:
        text += ". A name of Ollama is no hub id: pass the path of its blob, which `ollama show --modelfile NAME` prints"
    return ModelError(text)
