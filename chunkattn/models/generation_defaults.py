"""Sampling defaults of a model: those of its `generation_config.json`, of another folder, or of a GGUF file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chunkattn.config import GENERATION_AUTO, GENERATION_NONE
from chunkattn.errors import ConfigError, ModelError, RequestError
from chunkattn.local_files import is_present, read_object, read_present
from chunkattn.models.gguf_file import GGUFFile
from chunkattn.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

FILE_NAME = "generation_config.json"
_BOTH = {name: name for name in ("top_k", "top_p", "min_p")}
_TAKEN = {
    "temperature": "temperature",
    **_BOTH,
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Keys that vLLM takes as defaults, each with the name in `SamplingParams`."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("typical_p", "top_h", "encoder_repetition_penalty", "guidance_scale", "num_beams", "do_sample"), (1,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("min_length", "min_new_tokens", "penalty_alpha", "presence_penalty", "frequency_penalty"), (0,)),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "stop_strings", "sequence_bias"), ([], {})),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "dola_layers"), ()),
}
"""Keys that are not applied, each with the values that change nothing; null changes nothing either."""
_GGUF = "general.sampling."
_GGUF_TAKEN = {"temp": "temperature", **_BOTH, "penalty_repeat": "repetition_penalty"}
"""Keys of a GGUF file behind `general.sampling.`, each with the name in `SamplingParams`."""


def read_generation_config(option: str, path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the generation configuration that counts, and its file; an empty one where the model has none.

    Args:
        option: `generation_config` of the engine.
        path: local folder of the checkpoint, or its GGUF file.

    Raises:
        ModelError: the file of the model cannot be read.
        ConfigError: the folder of the option has no such file, or it cannot be read.
    """
    if option in (GENERATION_AUTO, *GENERATION_NONE):
        file = path / FILE_NAME
        return file, read_present(file)
    named = Path(option).expanduser()
    file = named if named.is_file() else named / FILE_NAME
    if not is_present(file):
        raise ConfigError(f"generation_config must be 'auto', 'none' or a folder with {FILE_NAME}; there is no file {file}")
    return file, read_object(file, ConfigError, "generation_config")


def sampling_defaults(option: str, file: Path, config: Mapping[str, Any], gguf: GGUFFile | None) -> dict[str, Any]:
    """Return the model's defaults of `SamplingParams`, by name. One log line tells them, and the keys that are not applied.

    Args:
        option: `generation_config` of the engine.
        file: file of the generation configuration.
        config: the generation configuration.
        gguf: opened GGUF file, whose metadata count with `"auto"`; None for a folder.

    Raises:
        ModelError: a value is out of range.
    """
    if option in GENERATION_NONE:
        return {}
    source, taken, unused = str(file), _TAKEN, [key for key, value in config.items() if _counts(key, value)]
    if gguf is not None and option == GENERATION_AUTO:
        names = [key.removeprefix(_GGUF) for key in gguf.metadata.values if key.startswith(_GGUF)]
        config = {name: gguf.get(f"{_GGUF}{name}", (int, float, str)) for name in names}
        source, taken, unused = str(gguf.path), _GGUF_TAKEN, [name for name in names if name not in _GGUF_TAKEN]
    defaults = {parameter: _number(config[name]) for name, parameter in taken.items() if config.get(name) is not None}
    try:
        checked = SamplingParams(**defaults)
    except RequestError as error:
        raise ModelError(f"{source}: {error}; correct the file, or ignore it with generation_config='none'") from None
    defaults = {name: getattr(checked, name) for name in defaults}
    if defaults or unused:
        text = ", ".join(f"{name} {value:g}" for name, value in defaults.items()) or "none"
        level = logging.WARNING if unused else logging.INFO
        rest = f"; not applied: {', '.join(unused)}" if unused else ""
        logger.log(level, "sampling defaults of the model, for requests that leave them out, from %s: %s%s", source, text, rest)
    return defaults


def _counts(key: str, value: Any) -> bool:
    return key in _NEUTRAL and value is not None and value not in _NEUTRAL[key]


def _number(value: Any) -> Any:
    """Return a whole number as an int: some files write `top_k` and `max_new_tokens` as floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
