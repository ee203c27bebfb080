"""Construction of an `EngineCore` from options and a checkpoint, and of the cache for its compiled programs."""

from __future__ import annotations

import logging
import os
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from chunkattn.backends import AttentionSpec, make_backend
from chunkattn.backends.cpu.recurrence import NativeRecurrence
from chunkattn.backends.default_cache import FP8
from chunkattn.backends.recurrent import make_recurrence
from chunkattn.cache.disk.store import KVStore
from chunkattn.config import EngineConfig
from chunkattn.engine.adapters import LoadedAdapters
from chunkattn.engine.core import EngineCore
from chunkattn.engine.disk_tier import DiskTier
from chunkattn.engine.host_calls import Tell
from chunkattn.engine.kv_pool import page_bytes
from chunkattn.engine.runner import Runner
from chunkattn.engine.self_check import checked
from chunkattn.engine.state_pool import state_bytes
from chunkattn.engine.states import MOST_SOURCES
from chunkattn.errors import ConfigError
from chunkattn.models.loader import ModelFiles
from chunkattn.models.packing import Packing, forms_of
from chunkattn.models.shards import ONE_DEVICE, Shards, indivisible, one_of
from chunkattn.models.spec import DecoderSpec
from chunkattn.user_cache import compile_cache

logger = logging.getLogger(__name__)

_DEFAULT_KV_BYTES, _DEFAULT_STATE_BYTES = 1 << 30, 2 << 30
_DEFAULT_KV_TOKENS = 1 << 18
_STEP_SHARE, _MOST_STEP_BYTES = 0.15, 6 << 30
"""Share of an accelerator's memory that steps have, and the bytes that suffice them on a large device."""
_FRACTION, _DEPRECATED_FRACTION = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""Variables of JAX with the share of a GPU's memory that it takes when it starts. JAX refuses both at once."""
_OWN_FRACTION = "_CHUNKATTN_MEM_FRACTION"
"""Variable with the share that an engine of this process or of its parent has set."""
_BLOCK_SIZES = {"gpu": 64}
"""Default page size by platform: on a GPU, one copy brings a page, and small pages cost a copy instruction each."""
_BLOCK_SIZE = 16
"""Default page size elsewhere."""
_JAX_SHORTEST_COMPILE_S = 1.0
"""JAX's default for the compile time in seconds below which a program is not written to the cache."""


def build_core(config: EngineConfig, files: ModelFiles, tell: Tell | None = None) -> EngineCore:
    """Load the weights and return the engine.

    The hosts of a model call this function together, after JAX has started on all of them.

    Args:
        config: options of the engine.
        files: checkpoint of `config`.
        tell: see `Runner`.

    Raises:
        ConfigError: an option contradicts the checkpoint or the machine.
        BackendError: the attention backend is unknown or does not support the model.
    """
    enable_compile_cache()
    take_gpu_memory(config)
    if config.host_index:
        _write_compile_cache_here()
    # Check all options before the slow reading of the weights.
    max_model_len = _max_model_len(config, files.spec)
    if (gap := config.calibration.chunk_position_gap) >= max_model_len:
        raise ConfigError(f"chunk_position_gap {gap} leaves no position for a chunk; max_model_len is {max_model_len}")
    shards = make_shards(config, files.spec)
    spec = attention_spec(config, files.spec, files.dtype, shards)
    backend = make_backend(config.attention_backend, spec, weighs=config.calibration.weighs)
    if config.attention_backend == "auto" and backend.checked_by_auto:
        backend = checked(backend, weighs=config.calibration.weighs, batch_invariant=bool(config.batch_invariant))
        if not shards.least(backend.name != "xla"):  # a verdict of one host counts for all
            backend = make_backend("xla", spec, weighs=config.calibration.weighs)
    packing = Packing.of(config, files.dtype)
    adapters = LoadedAdapters.read(files)
    store = _open_store(config)
    decoder = files.load(shards, packing)
    if not shards.agree(zlib.crc32(repr(forms_of(decoder.weights)).encode()) >> 1):
        raise ConfigError("the hosts pack different matrices; set weights='dequantized', or install the native library on all")
    loaded = LoadedAdapters.of(config, files, shards, adapters)
    # The weights are loaded first: the pool takes a share of the memory that they leave. The backend limits the page count.
    per_page, bytes_left = page_bytes(backend, len(files.spec.attention_layers)), _bytes_left(shards)
    tracks = num_tracks(config, files.spec, shards.size, bytes_left)
    tracks = tracks._replace(slots=shards.least(tracks.slots), seats=shards.least(tracks.seats))
    if bytes_left is not None:
        bytes_left -= tracks.num_bytes
    num_pages = shards.least(min(_num_pages(config, per_page, spec.block_size, shards, bytes_left), backend.max_pages))
    slots = loaded.slots if loaded else None
    runner = Runner(decoder, backend, num_pages, config.max_logprobs, config.batch_invariant, tell, slots, tracks.counts)
    if not shards.agree(runner.invariance.holds):
        raise ConfigError("the processors of the hosts add up in different orders; set batch_invariant=False on all of them")
    if runner.states is not None and not shards.agree(isinstance(runner.states.recurrence, NativeRecurrence)):
        raise ConfigError("some hosts lack the native library for recurrent layers; install it on all of them")
    return EngineCore(runner, config, max_model_len, DiskTier(store, runner) if store else None, loaded)


def _open_store(config: EngineConfig) -> KVStore | None:
    if config.kv_store is None:
        return None
    return KVStore(Path(config.kv_store).expanduser(), max_bytes=config.kv_store_max_bytes)


def _max_model_len(config: EngineConfig, spec: DecoderSpec) -> int:
    limit = spec.max_model_len
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(f"max_model_len {config.max_model_len} exceeds the {limit} positions the checkpoint is made for")
    return config.max_model_len or limit


def make_shards(config: EngineConfig, model: DecoderSpec) -> Shards:
    """Return the devices that share the model, the first ones that JAX sees, an equal number on each host.

    Args:
        config: options of the engine.
        model: shape of the decoder.

    Raises:
        ConfigError: there are fewer devices, or the model cannot be divided over that many.
    """
    devices, size, hosts = jax.devices(), config.tensor_parallel_size, config.num_hosts
    by_host: dict[int, list[jax.Device]] = {}
    for device in devices:
        by_host.setdefault(device.process_index, []).append(device)
    each = min(map(len, by_host.values()))
    if size > hosts * each:
        sizes = [n for n in range(hosts, hosts * each + 1, hosts) if not indivisible(n, model)]
        here = f"{each} {devices[0].platform} device" + "s" * (each > 1) + f" on each of {hosts} hosts" * (hosts > 1)
        hint = f"use {one_of(sizes)}" if sizes else "no number of them that all hosts share divides the model"
        raise ConfigError(f"tensor_parallel_size={size} needs as many devices, and JAX sees {here}; {hint}")
    return Shards.over([device for local in by_host.values() for device in local[: size // hosts]], model)


def attention_spec(config: EngineConfig, model: DecoderSpec, dtype: jnp.dtype, shards: Shards = ONE_DEVICE) -> AttentionSpec:
    """Return what a configuration requires of the attention backend of a model of `dtype`, on each of its devices.

    Args:
        config: options of the engine.
        model: shape of the decoder.
        dtype: dtype of weights and activations.
        shards: devices that share the model.
    """
    num_heads, num_kv_heads, head_dim = model.heads
    return AttentionSpec(
        num_heads=num_heads // shards.size,
        num_kv_heads=num_kv_heads // shards.kv_size,
        head_dim=head_dim,
        dtype=dtype,
        block_size=config.block_size or default_block_size(jax.default_backend()),
        windows=tuple(dict.fromkeys(model.windows)),
        kv_dtype=None if config.kv_cache_dtype == "auto" else FP8,
    )


def default_block_size(platform: str) -> int:
    """Return the default page size in tokens on a platform of JAX."""
    return _BLOCK_SIZES.get(platform, _BLOCK_SIZE)


class Tracks(NamedTuple):
    """Slots and seats of recurrent layers.

    Attributes:
        slots: number of slots, of running samples and kept states.
        seats: number of seats, the limit on running samples.
        slot_bytes: bytes of a slot on each device.
        seat_bytes: bytes of a seat on each device.
    """

    slots: int = 0
    seats: int = 0
    slot_bytes: int = 0
    seat_bytes: int = 0

    @property
    def counts(self) -> tuple[int, int]:
        """Return the numbers of slots and seats."""
        return self.slots, self.seats

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all on each device."""
        return self.slots * self.slot_bytes + self.seats * self.seat_bytes


def num_tracks(config: EngineConfig, model: DecoderSpec, num_devices: int, bytes_left: int | None) -> Tracks:
    """Return the slots and seats that fit `state_cache_memory_bytes`; none for a model without recurrent layers.

    By default every sample that may run has a track, and as many states are kept as give it three, in 2 GiB or a quarter of an
    accelerator's memory. A single prompt needs a track and the states after prefix, chunk and the beginning of its question.

    Args:
        config: options of the engine.
        model: shape of the decoder.
        num_devices: number of devices that share the heads.
        bytes_left: bytes that an accelerator has left for pages and states; None for a CPU.

    Raises:
        ConfigError: the memory is less than one prompt needs.
    """
    if model.recurrent is None:
        return Tracks()
    slot, seat = state_bytes(make_recurrence(model.recurrent.recurrence(num_devices)), len(model.recurrent_layers))
    least, memory = seat + (1 + MOST_SOURCES) * slot, config.state_cache_memory_bytes
    if memory is None:
        most = _DEFAULT_STATE_BYTES if bytes_left is None else bytes_left // 4
        memory = max(least, min(most, config.max_num_seqs * (seat + (1 + MOST_SOURCES) * slot)))
    if memory < least:
        raise ConfigError(
            f"state_cache_memory_bytes {memory} is less than the {least} bytes that one prompt needs: {1 + MOST_SOURCES} "
            f"states of {slot} bytes and the {seat} of its open block"
        )
    seats = max(1, min(config.max_num_seqs, (memory - MOST_SOURCES * slot) // (seat + 2 * slot)))
    tracks = Tracks((memory - seats * seat) // slot, seats, slot, seat)
    text = "states: %d slots and %d seats, %.2f GiB on each device"
    logger.info(text, *tracks.counts, tracks.num_bytes / 2**30)
    return tracks


def _num_pages(config: EngineConfig, per_page: int, block_size: int, shards: Shards, bytes_left: int | None) -> int:
    """Return the number of pages that fit the memory of the KV pool on each device; `per_page` counts one device's bytes."""
    if not per_page:  # no layer has K/V
        return _DEFAULT_KV_TOKENS // block_size
    memory = config.kv_cache_memory_bytes or bytes_left
    if memory is None:  # a CPU
        memory = max(min(_DEFAULT_KV_BYTES, _DEFAULT_KV_TOKENS // block_size * per_page), per_page)
    if memory < per_page:
        raise ConfigError(f"kv_cache_memory_bytes {memory} is less than one page of {per_page} bytes")
    num_pages = memory // per_page
    devices = f" on each of {shards.size} devices" if shards.size > 1 else ""
    logger.info("KV pool: %d pages of %d tokens, %.2f GiB%s", num_pages, block_size, num_pages * per_page / 2**30, devices)
    return num_pages


def _bytes_left(shards: Shards) -> int | None:
    """Return the bytes of each accelerator that neither steps need nor anything has; None for a CPU.

    Of several devices, the one with the least to give decides. A CPU's pool has 1 GiB, but no more than 256K tokens need.
    """
    memories = [device.memory_stats() or {} for device in shards.devices if device.process_index == jax.process_index()]
    if jax.default_backend() != "cpu" and all("bytes_limit" in stats for stats in memories):
        return min(bytes_beside_steps(stats["bytes_limit"]) - stats.get("bytes_in_use", 0) for stats in memories)
    return None


def bytes_beside_steps(limit: int) -> int:
    """Return the bytes of an accelerator for weights and KV pool. The temporary arrays of steps have the rest.

    Args:
        limit: bytes that JAX gives to programs.
    """
    return limit - min(int(limit * _STEP_SHARE), _MOST_STEP_BYTES)


def take_gpu_memory(config: EngineConfig) -> None:
    """Have JAX take the share `gpu_memory_utilization` of each GPU's memory, unless the user's variables name a share.

    A process inherits the variables of its parent, so a share that another engine has set does not count as the user's.
    """
    share = os.environ.pop(_OWN_FRACTION, None)
    if share is not None and os.environ.get(_FRACTION) == share:
        del os.environ[_FRACTION]
    if not any(os.environ.get(name) for name in (_FRACTION, _DEPRECATED_FRACTION)):  # JAX takes an empty value for none
        os.environ[_FRACTION] = os.environ[_OWN_FRACTION] = str(config.gpu_memory_utilization)


def enable_compile_cache() -> None:
    """Keep every compiled program in the user's cache folder, so that the next start loads them.

    Options set by `JAX_COMPILATION_CACHE_DIR` and JAX's other environment variables or by `jax.config` take precedence.
    """
    options = {
        "jax_compilation_cache_dir": (None, str(compile_cache())),
        "jax_persistent_cache_min_compile_time_secs": (_JAX_SHORTEST_COMPILE_S, 0.0),
    }
    for name, (default, value) in options.items():
        if name.upper() not in os.environ and getattr(jax.config, name) == default:
            jax.config.update(name, value)  # type: ignore[no-untyped-call]


def _write_compile_cache_here() -> None:
    """Make JAX write the programs of this process to its compile cache, although the process is not number 0 of its group.

    JAX lets process 0 alone write, for file systems that all processes share. Here each machine has a folder of its own, and on
    a CPU each process has its own keys, so a host that follows would compile every program at each start.
    """
    from jax._src import compiler, distributed

    class OwnWriter:
        process_id = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(distributed.global_state, name)

    if compiler.__dict__.get("distributed") is distributed:
        compiler.distributed = SimpleNamespace(global_state=OwnWriter())  # type: ignore[assignment]
    else:
        logger.warning("this JAX keeps no compiled programs on host %d; its starts take longer", jax.process_index())
