"""Loading of a model's configuration, tokenizer and weights, by folder, GGUF file or hub id."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import xxhash

from chunkattn.adapter_salt import folders_of
from chunkattn.errors import ConfigError, ModelError
from chunkattn.local_files import is_present, read_object
from chunkattn.models.adapter_config import CONFIG_FILE, WEIGHTS_FILE
from chunkattn.models.adapters import Adapter, adapter_folder, read_adapter
from chunkattn.models.decision_files import DecisionModel, read_decision
from chunkattn.models.families import FAMILIES, NESTED, language_part, spec_from_config, unsupported
from chunkattn.models.foreign_files import explain_folder
from chunkattn.models.fused import split_tensors
from chunkattn.models.generation_defaults import read_generation_config, sampling_defaults
from chunkattn.models.gguf_file import GGUFFile, open_gguf
from chunkattn.models.gguf_spec import config_from_gguf, spec_from_gguf
from chunkattn.models.gguf_tensors import GGUFTensors
from chunkattn.models.gguf_tokenizer import tokenizer_from_gguf
from chunkattn.models.locate import DEMO_FOLDER, resolve_path
from chunkattn.models.quantized_config import quantization_of
from chunkattn.models.quantized_folder import open_folder
from chunkattn.models.reranker import RerankerTraits, traits_of_folder, traits_of_gguf
from chunkattn.models.safetensors_folder import SafetensorsFolder
from chunkattn.models.shards import ONE_DEVICE, Shards
from chunkattn.models.spec import HEAD, DecoderSpec
from chunkattn.models.tokenizer import check_rows, load_tokenizer
from chunkattn.parsers.chat_template import own_template

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from chunkattn.config import EngineConfig
    from chunkattn.models.decoder import Decoder
    from chunkattn.models.packing import Packing

logger = logging.getLogger(__name__)

_PIECES, _PIECE_BYTES = 256, 4096
"""Number and size of the pieces of a file that `ModelFiles.sample` reads."""
CHECKPOINT_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelFiles:
    """Checkpoint with its configuration and tokenizer; `load` reads the weights.

    Attributes:
        path: local folder of the checkpoint, or its GGUF file.
        spec: shape of the decoder.
        dtype: dtype of unpacked weights, activations and KV.
        tokenizer: tokenizer of the model, or None if skipped.
        eos_token_ids: tokens that end a text.
        gguf: opened GGUF file, or None for a folder.
        reranker: rerank template and class names of the checkpoint.
        sampling: the model's defaults of `SamplingParams`, by name.
        decision: head and prompt of a decision model; None for another model.
        has_language_head: whether the logits of the vocabulary have a meaning.
        adapter: folder of an adapter that is merged into the weights; None for none.
        adapters: folders of the adapters of `lora_modules`, by name.
    """

    path: Path
    spec: DecoderSpec
    dtype: jnp.dtype
    tokenizer: PreTrainedTokenizerBase | None
    eos_token_ids: tuple[int, ...]
    gguf: GGUFFile | None = None
    reranker: RerankerTraits = field(default_factory=RerankerTraits)
    sampling: dict[str, Any] = field(default_factory=dict)
    decision: DecisionModel | None = None
    has_language_head: bool = True
    adapter: Path | None = None
    adapters: Mapping[str, Path] = field(default_factory=dict)

    def load(self, shards: Shards = ONE_DEVICE, packing: Packing | None = None) -> Decoder:
        """Return the decoder with its weights.

        Args:
            shards: devices that share the weights.
            packing: how matrices are packed; None packs none.

        Raises:
            ConfigError: no matrix can be packed, and the options ask for packed weights by name.
            ModelError: a file or tensor is missing, unreadable or of the wrong shape.
        """
        from chunkattn.models.weights import load_weights  # imports kernels, which a server's process does not need

        adapter = None if self.adapter is None else read_adapter(self.adapter, self.spec)
        return load_weights(self.spec, self.gguf or self.path, self.dtype, shards, packing, adapter)

    def sample(self) -> bytes:
        """Return 16 bytes that differ between most checkpoints of one shape: a hash of pieces of the weights' files."""
        quantization = None if self.path.is_file() else quantization_of(self.path)  # says what the files' numbers stand for
        digest = xxhash.xxh3_128(b"" if quantization is None else repr(quantization).encode())
        merged = [] if self.adapter is None else [self.adapter / CONFIG_FILE, self.adapter / WEIGHTS_FILE]
        for file in [*([self.path] if self.path.is_file() else sorted(self.path.glob("*.safetensors"))), *merged]:
            size = file.stat().st_size
            digest.update(f"{size}".encode())
            with file.open("rb") as opened:
                for number in range(_PIECES):
                    opened.seek(size * number // _PIECES)
                    digest.update(opened.read(_PIECE_BYTES))
        return digest.digest()


def open_files(options: EngineConfig) -> ModelFiles:
    """Read the configuration and tokenizer of a checkpoint, so errors show before the weights are loaded.

    Args:
        options: options of the engine.

    Raises:
        ModelError: the model cannot be found or read, or is not supported.
    """
    place = resolve_path(options.model, options.revision)
    path, adapter = _base_of(place, options)
    file, config, spec = _configuration(path, options.max_model_len)
    if options.skip_tokenizer_init:
        loaded = None
    elif file is not None and options.tokenizer is None:
        loaded = tokenizer_from_gguf(file)
    else:
        own = place if is_present(place / "tokenizer_config.json") else path  # an adapter may have a tokenizer of its own
        loaded = load_tokenizer(options.tokenizer or str(own))
    if loaded is not None:
        check_rows(loaded, spec.vocab_size, options.tokenizer or str(path))
    template = options.chat_template
    if template is not None:
        if loaded is None:
            raise ConfigError("chat_template needs a tokenizer, and skip_tokenizer_init loads none")
        loaded.chat_template = template = own_template(loaded, template)
    if path.resolve() == DEMO_FOLDER.resolve():
        reranker = RerankerTraits("plain")
    elif file is not None:
        reranker = traits_of_gguf(file, config, spec, template)
    else:
        reranker = traits_of_folder(path, options.model, config, spec, loaded)
    generation_file, generation = read_generation_config(options.generation_config, path)
    generates = spec.num_labels is None
    decision = None if file is not None else read_decision(place, spec.hidden_size, config.model_type)
    if decision is not None and decision.adapter is not None:
        if adapter is not None:
            raise ConfigError(f"{place} has an adapter of its own, {decision.adapter.name}; adapter= cannot name another one")
        adapter = decision.adapter
    if adapter is not None:
        read_adapter(adapter, spec, values=False)  # its errors show before the weights are loaded
    adapters = open_adapters(options, spec)
    has_head = decision is None or decision.head is None or spec.tie_embeddings or _has_head(path)
    if not has_head:
        spec = replace(spec, tie_embeddings=True)  # nobody reads the logits
    return ModelFiles(
        path=path,
        spec=spec,
        dtype=_dtype(config, options),
        tokenizer=loaded,
        eos_token_ids=_eos_token_ids(generation_file, generation, config, loaded),
        gguf=file,
        reranker=reranker,
        sampling=sampling_defaults(options.generation_config, generation_file, generation, file) if generates else {},
        decision=decision,
        has_language_head=has_head,
        adapter=adapter,
        adapters={name: own.path for name, own in adapters.items()},
    )


def open_adapters(options: EngineConfig, spec: DecoderSpec) -> dict[str, Adapter]:
    """Return the adapters of `lora_modules` by name, checked and without their values. Those of hub ids are downloaded.

    Args:
        options: options of the engine.
        spec: shape of the base model.

    Raises:
        ConfigError: requests cannot choose an adapter.
        ModelError: as `read_adapter`.
    """
    places = folders_of(options.lora_modules)
    adapters = {name: read_adapter(adapter_folder(place), spec, values=False) for name, place in places.items()}
    for adapter in adapters.values():
        adapter.check_choosable(spec, options.max_lora_rank)
    return adapters


def _base_of(place: Path, options: EngineConfig) -> tuple[Path, Path | None]:
    """Return the path of the base model, and the folder of the adapter that is merged into it; None for none.

    Args:
        place: path of the model. A folder of an adapter alone stands for its base model with the adapter.
        options: options of the engine.

    Raises:
        ConfigError: the model is an adapter, and the options name another one.
        ModelError: a base model or an adapter cannot be found.
    """
    alone = is_present(place / WEIGHTS_FILE) and not any(place.glob("model*.safetensors"))  # may have its base's config.json
    if not is_present(place / CONFIG_FILE) or (is_present(place / "config.json") and not alone):
        return place, None if options.adapter is None else adapter_folder(options.adapter)
    if options.adapter is not None:
        raise ConfigError(f"model {place} is an adapter, so adapter= cannot name another one; pass the base model as model")
    fields = read_object(place / CONFIG_FILE)
    base, revision = fields.get("base_model_name_or_path"), fields.get("revision")
    if not isinstance(base, str) or not base:
        raise ModelError(
            f"{place}: no config.json; {CONFIG_FILE} names no base_model_name_or_path; pass the base as model, this as adapter"
        )
    try:
        return resolve_path(base, revision if isinstance(revision, str) else None), place
    except ModelError as error:
        raise ModelError(f"{place}: the base model {base!r} of this adapter: {error}") from None


def _has_head(folder: Path) -> bool:
    """Return whether a folder has the head of a language model."""
    with ExitStack() as stack:
        return HEAD in SafetensorsFolder(folder, stack).names()


def open_shape(options: EngineConfig) -> tuple[DecoderSpec, jnp.dtype, dict[str, str]]:
    """Return the shape and the dtype of a model from its configuration alone. Of a hub id, only that is downloaded.

    The third value is the type of each parameter by its name, if the model is a GGUF file or a quantised local folder.

    Args:
        options: options of the engine: `model`, `revision`, `adapter` and `dtype` count.

    Raises:
        ModelError: the configuration cannot be found or read, or is not supported.
    """
    place = resolve_path(options.model, options.revision, files=["config.json"])
    path, adapter = _base_of(place, options)
    file, config, spec = _configuration(path, options.max_model_len)
    if file is None:
        types = _quantised_types(path, spec)
    else:
        tensors = split_tensors(GGUFTensors(file, spec), spec)
        types = {name: tensors.stored_type(name) for name in tensors.names()}
    if adapter is not None:
        touched = read_adapter(adapter, spec, values=False).touched
        spec = replace(spec, tie_embeddings=spec.tie_embeddings and HEAD not in touched)
        types |= dict.fromkeys(touched, "F32") if types else {}  # sums are no blocks
    return spec, _dtype(config, options), types


def _quantised_types(folder: Path, spec: DecoderSpec) -> dict[str, str]:
    """Return the type of each parameter of a quantised folder; nothing of another, or of one without its weights."""
    if quantization_of(folder) is None or not any(folder.glob("model*.safetensors")):
        return {}
    with ExitStack() as stack:
        tensors = split_tensors(open_folder(folder, stack, is_nested=spec.is_nested), spec)
        names = tensors.names()
        return {name: tensors.stored_type(name) if name in names else "missing" for name in spec.parameters()}


def _configuration(path: Path, max_model_len: int | None) -> tuple[GGUFFile | None, PretrainedConfig, DecoderSpec]:
    """Return the opened GGUF file, if the path is one, the configuration and the shape of a model.

    Raises:
        ModelError: the configuration cannot be read, or is not supported.
    """
    if path.is_file():
        file = open_gguf(path)
        config = config_from_gguf(file)
        return file, config, spec_from_gguf(file, config, max_model_len)
    config = read_config(path)
    quantization_of(path)  # an error here comes before any download of weights, and before their reading
    try:
        return None, language_part(config), spec_from_config(config, max_model_len)
    except ModelError as error:
        raise ModelError(f"{path / 'config.json'}: {error}") from None


def _dtype(config: PretrainedConfig, options: EngineConfig) -> jnp.dtype:
    return jnp.dtype(_checkpoint_dtype(config) if options.dtype == "auto" else options.dtype)


def read_config(folder: Path) -> PretrainedConfig:
    """Return the configuration in a folder's `config.json`.

    Args:
        folder: local folder of the checkpoint.

    Raises:
        ModelError: the file is missing, unreadable, or of an unknown kind of model.
    """
    from transformers import AutoConfig

    file = folder / "config.json"
    if not is_present(file):
        raise ModelError(f"{folder}: no config.json; {explain_folder(folder) or 'is this a Hugging Face model folder?'}")
    fields = read_object(file)
    kind, named = fields.get("model_type"), fields.get("architectures")
    if named is not None and not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        raise ModelError(f"{file}: architectures must be a list of strings, got {named!r}")
    if not isinstance(kind, str):
        raise ModelError(f"{file}: model_type must be one of {', '.join([*FAMILIES, *NESTED])}, got {kind!r}")
    # transformers would advise to run the code of a repository, or to install another version, for kinds that it lacks.
    if kind not in FAMILIES and kind not in NESTED:
        raise ModelError(f"{file}: {unsupported(f'model_type {kind!r}')}")
    for key in ("dtype", "torch_dtype"):
        if fields.get(key) not in (None, *CHECKPOINT_DTYPES, "float64"):
            known = ", ".join(CHECKPOINT_DTYPES)
            raise ModelError(f"{file}: {key} {fields[key]!r} is not supported; write one of {known}, or null, into the file")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # validation errors of many classes
        raise ModelError(f"{file} cannot be read: {error}") from error


def load_model_tokenizer(
    model: str | PathLike[str] | None, tokenizer: str | PathLike[str] | None = None
) -> PreTrainedTokenizerBase:
    """Return the tokenizer that `open_files` would load, without the checkpoint.

    Args:
        model: local folder, GGUF file or hub id; None for the bundled demo model.
        tokenizer: folder, GGUF file or hub id of the tokenizer; None for the model's own.

    Raises:
        ModelError: the tokenizer cannot be loaded.
    """
    is_local = model is None or Path(model).expanduser().exists()
    return load_tokenizer(tokenizer or (resolve_path(model) if is_local else str(model)))


def _checkpoint_dtype(config: PretrainedConfig) -> str:
    dtype = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    if dtype not in CHECKPOINT_DTYPES:
        raise ModelError(f"checkpoint dtype {dtype!r} is not supported; pass dtype= one of {', '.join(CHECKPOINT_DTYPES)}")
    return dtype


def _eos_token_ids(
    file: Path, generation: Mapping[str, Any], config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[int, ...]:
    """Return the end-of-sequence ids: the generation configuration's, or else the model's, and the tokenizer's.

    Args:
        file: file of the generation configuration, for the message.
        generation: the generation configuration.
        config: configuration of the checkpoint.
        tokenizer: tokenizer of the model, or None.

    Raises:
        ModelError: an id is no integer.
    """
    fields = config.eos_token_id if generation.get("eos_token_id") is None else generation["eos_token_id"]
    ids = list(fields) if isinstance(fields, (list, tuple)) else [fields]
    ids.append(None if tokenizer is None else tokenizer.eos_token_id)
    ids = [i for i in ids if i is not None]
    if not all(type(i) is int for i in ids):
        raise ModelError(f"{file.parent}: eos_token_id must be integers, got {fields!r}")
    return tuple(dict.fromkeys(ids))
