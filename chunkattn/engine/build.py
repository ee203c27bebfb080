"""From options and a checkpoint to a running `EngineCore`."""

from __future__ import annotations

import logging
from pathlib import Path

import jax
import jax.numpy as jnp

from chunkattn.backends import AttentionSpec, make_backend
from chunkattn.backends.base import FP8
from chunkattn.cache.disk.store import MIN_BYTES, KVStore
from chunkattn.config import EngineConfig
from chunkattn.engine.compile_cache import enable_compile_cache
from chunkattn.engine.core import EngineCore
from chunkattn.engine.disk_tier import DiskTier
from chunkattn.engine.runner import Runner, page_bytes
from chunkattn.errors import ConfigError
from chunkattn.models.loader import ModelFiles, open_model
from chunkattn.models.spec import DecoderSpec

logger = logging.getLogger(__name__)

_DEFAULT_KV_BYTES = 1 << 30
_DEFAULT_KV_TOKENS = 1 << 18
_ACCELERATOR_SHARE = 0.85


def open_files(config: EngineConfig) -> ModelFiles:
    """The checkpoint of a configuration, its weights not read yet.

    Raises:
        ModelError: it cannot be loaded.
    """
    return open_model(
        config.model,
        tokenizer=config.tokenizer,
        revision=config.revision,
        dtype=config.dtype,
        skip_tokenizer_init=config.skip_tokenizer_init,
    )


def build_core(config: EngineConfig, files: ModelFiles) -> EngineCore:
    """Load the weights and make the engine.

    Raises:
        ConfigError: options that contradict the checkpoint or the machine.
        BackendError: the attention backend is unknown or does not support the model.
    """
    enable_compile_cache()
    # Everything that can be wrong with the options is found before the weights are read.
    max_model_len = _max_model_len(config, files.spec)
    backend = make_backend(config.attention_backend, attention_spec(config, files.spec, files.dtype))
    store = _open_store(config)
    decoder = files.load()
    # Of the memory the weights leave, as many as the backend can count.
    num_pages = min(_num_pages(config, page_bytes(backend, files.spec.num_layers)), backend.max_pages)
    runner = Runner(decoder, backend, num_pages, config.max_logprobs)
    return EngineCore(runner, config, max_model_len, DiskTier(store, runner) if store else None)


def _open_store(config: EngineConfig) -> KVStore | None:
    if config.kv_store is None:
        return None
    if config.kv_store_max_bytes < MIN_BYTES:
        raise ConfigError(f"kv_store_max_bytes must be at least {MIN_BYTES}, got {config.kv_store_max_bytes}")
    return KVStore(Path(config.kv_store).expanduser(), max_bytes=config.kv_store_max_bytes)


def _max_model_len(config: EngineConfig, spec: DecoderSpec) -> int:
    limit = spec.max_model_len if spec.rotary.max_positions is None else min(spec.max_model_len, spec.rotary.max_positions)
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(f"max_model_len {config.max_model_len} exceeds the {limit} positions the checkpoint is made for")
    return config.max_model_len or limit


def attention_spec(config: EngineConfig, model: DecoderSpec, dtype: jnp.dtype) -> AttentionSpec:
    """What a configuration asks of the attention backend of a model of `dtype`."""
    return AttentionSpec(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
        block_size=config.block_size,
        windows=tuple(dict.fromkeys(model.windows)),
        kv_dtype=None if config.kv_cache_dtype == "auto" else FP8,
    )


def _num_pages(config: EngineConfig, per_page: int) -> int:
    """Pages of the KV pool: what fits the memory it may have."""
    memory = config.kv_cache_memory_bytes or _default_kv_bytes(per_page, config.block_size)
    if memory < per_page:
        raise ConfigError(f"kv_cache_memory_bytes {memory} is less than one page of {per_page} bytes")
    num_pages = memory // per_page
    logger.info("KV pool: %d pages of %d tokens, %.2f GiB", num_pages, config.block_size, num_pages * per_page / 2**30)
    return num_pages


def _default_kv_bytes(per_page: int, block_size: int) -> int:
    """85% of an accelerator's memory less what the weights take; on CPU 1 GiB, or less where that is beyond 256K tokens."""
    stats = jax.devices()[0].memory_stats() or {}
    if jax.default_backend() != "cpu" and "bytes_limit" in stats:
        return int(stats["bytes_limit"] * _ACCELERATOR_SHARE) - stats.get("bytes_in_use", 0)
    return max(min(_DEFAULT_KV_BYTES, _DEFAULT_KV_TOKENS // block_size * per_page), per_page)
