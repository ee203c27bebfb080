"""From a model's name to its decoder and tokenizer."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jax.numpy as jnp

from chunkattn.errors import ModelError
from chunkattn.models.decoder import Decoder
from chunkattn.models.spec import DecoderSpec, spec_from_config
from chunkattn.models.weights import load_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

DEMO_FOLDER = Path(__file__).parent / "demo"
"""The bundled demo model, an ordinary Hugging Face folder."""


@dataclass(frozen=True)
class LoadedModel:
    """A decoder ready to run, and how to turn text into its tokens and back."""

    folder: Path
    spec: DecoderSpec
    decoder: Decoder
    tokenizer: PreTrainedTokenizerBase | None
    eos_token_ids: tuple[int, ...]


def load_model(
    model: str | None,
    *,
    tokenizer: str | None = None,
    revision: str | None = None,
    dtype: str = "auto",
    skip_tokenizer_init: bool = False,
) -> LoadedModel:
    """Load a checkpoint.

    Args:
        model: a local folder, a hub id, or None for the bundled demo model.
        tokenizer: where the tokenizer is, when not with the model.
        revision: hub revision.
        dtype: a dtype's name, or `"auto"` for the checkpoint's own.
        skip_tokenizer_init: load no tokenizer.

    Raises:
        ModelError: it cannot be found or read, or is not supported.
    """
    folder = resolve_folder(model, revision)
    config = read_config(folder)
    spec = spec_from_config(config)
    wanted = jnp.dtype(_checkpoint_dtype(config) if dtype == "auto" else dtype)
    return LoadedModel(
        folder=folder,
        spec=spec,
        decoder=load_weights(spec, folder, wanted),
        tokenizer=None if skip_tokenizer_init else load_tokenizer(tokenizer or str(folder)),
        eos_token_ids=_eos_token_ids(folder, config),
    )


def resolve_folder(model: str | None, revision: str | None = None) -> Path:
    """The local folder of a model; a hub id is downloaded to the hub's cache first.

    Raises:
        ModelError: neither a folder nor a model of the hub.
    """
    if model is None:
        return DEMO_FOLDER
    if Path(model).expanduser().is_dir():
        return Path(model).expanduser()
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub client raises a wide family: not found, offline, invalid id
        raise ModelError(f"model {model!r} is no local folder and cannot be had from the hub: {error}") from error


def read_config(folder: Path) -> PretrainedConfig:
    """The folder's `config.json`.

    Raises:
        ModelError: missing, unreadable, or of an unknown kind of model.
    """
    from transformers import AutoConfig

    if not (folder / "config.json").exists():
        raise ModelError(f"{folder}: no config.json; is this a Hugging Face model folder?")
    try:
        return AutoConfig.from_pretrained(folder)
    except Exception as error:  # validation errors of many classes
        raise ModelError(f"{folder / 'config.json'} cannot be read: {error}") from error


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A tokenizer from a folder or the hub, fast or SentencePiece.

    Raises:
        ModelError: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    advice = "pass tokenizer=..., or skip_tokenizer_init=True to work with token ids only"
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # missing files, unknown classes, broken vocabularies
        raise ModelError(f"the tokenizer of {name!r} cannot be loaded: {error}; {advice}") from error
    # Where its files are missing, transformers makes some tokenizers with an empty vocabulary.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ModelError(f"{name!r} has no tokenizer files; {advice}")
    return tokenizer


def _checkpoint_dtype(config: PretrainedConfig) -> str:
    dtype = getattr(config, "dtype", None) or "float32"
    return str(dtype).removeprefix("torch.")


def _eos_token_ids(folder: Path, config: PretrainedConfig) -> tuple[int, ...]:
    """End-of-sequence ids: the generation configuration's, else the model's."""
    found, file = config.eos_token_id, folder / "generation_config.json"
    if file.exists():
        try:
            found = json.loads(file.read_text()).get("eos_token_id") or found
        except (ValueError, AttributeError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
    if found is None:
        return ()
    return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)
