"""Backends by name: built in, registered by decorator, or found by entry point."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import jax

from chunkattn.backends.base import AttentionBackend, AttentionSpec
from chunkattn.errors import BackendError

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "chunkattn.backends"

ON_REQUEST = {"packed_dense": "chunkattn.backends.packed_dense"}
"""Modules of the backends that one scoring request may name beside the engine's own, by name. They neither read nor write the
cache, and each is an algorithm of scoring, too."""

_BUILT_IN = {
    **ON_REQUEST,
    "cpu": "chunkattn.backends.cpu.backend",
    "pallas_gpu": "chunkattn.backends.pallas_gpu.backend",
    "pallas_tpu": "chunkattn.backends.pallas_tpu.backend",
    "reference": "chunkattn.backends.reference",
    "xla": "chunkattn.backends.xla",
}
"""Modules of the built-in backends, imported on first use."""
_REGISTERED: dict[str, type[AttentionBackend]] = {}

_AUTO_ORDER = {"tpu": ("pallas_tpu", "xla"), "gpu": ("pallas_gpu", "xla"), "cpu": ("cpu", "xla")}
_AUTO_ELSEWHERE = ("xla",)
"""Backends that `auto` tries, in order, by platform. The first backend that supports the model serves it."""
_NVIDIA = Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/version")
"""Files that the NVIDIA driver makes."""


def register_backend(name: str) -> Callable[[type[AttentionBackend]], type[AttentionBackend]]:
    """Return a class decorator that makes a backend available as `attention_backend=name`.

    Raises:
        BackendError: another class already has that name, or the class is not a subclass of `AttentionBackend`.
    """

    def register(cls: type[AttentionBackend]) -> type[AttentionBackend]:
        if not (isinstance(cls, type) and issubclass(cls, AttentionBackend)):
            raise BackendError(f"backend {name!r} must be a subclass of AttentionBackend, got {cls!r}")
        known = _REGISTERED.get(name)
        taken = known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__)
        if name == "auto" or taken or (name in _BUILT_IN and cls.__module__ != _BUILT_IN[name]):
            raise BackendError(f"a backend named {name!r} is already registered")
        cls.name = name
        _REGISTERED[name] = cls
        return cls

    return register


def available_backends() -> list[str]:
    """Return the names of all built-in, registered and entry-point backends."""
    return sorted({*_BUILT_IN, *_REGISTERED, *(p.name for p in entry_points(group=ENTRY_POINT_GROUP))})


def get_backend(name: str) -> type[AttentionBackend]:
    """Return the backend class called `name`, loading its module or entry point if needed.

    Raises:
        BackendError: the name is unknown, or its entry point cannot be loaded.
    """
    if name not in _REGISTERED and name in _BUILT_IN:
        try:
            import_module(_BUILT_IN[name])
        except Exception as error:  # another JAX may lack what a kernel needs
            raise BackendError(f"backend {name!r} cannot be loaded: {error!r}") from error
    if name not in _REGISTERED:
        for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
            try:
                register_backend(name)(point.load())
            except Exception as error:  # the import of a foreign module may raise anything
                raise BackendError(f"backend {name!r} ({point.value}) cannot be loaded: {error}") from error
            break
    if name not in _REGISTERED:
        raise BackendError(f"unknown attention_backend {name!r}; available are auto, {', '.join(available_backends())}")
    return _REGISTERED[name]


def refusal(cls: type[AttentionBackend], spec: AttentionSpec, weighs: bool) -> str | None:
    """Return the reason why a backend cannot serve a model, or None if it can."""
    if weighs and not cls.weighs:
        others = "pallas_gpu, pallas_tpu, reference and xla do"
        return f"{cls.name} computes no chunk_temperature or chunk_scale other than 1; {others}"
    return cls.supports(spec)


def _unused_gpu(platform: str) -> list[str]:
    """Return the reason why an NVIDIA GPU of this machine is not used, if there is one."""
    if platform != "cpu" or os.environ.get("JAX_PLATFORMS") or not any(path.exists() for path in _NVIDIA):
        return []
    return ["JAX sees no GPU: there is an NVIDIA driver, but JAX's CUDA plugin is missing or fails (docs/guides/gpu.md)"]


def make_backend(name: str, spec: AttentionSpec, *, weighs: bool = False) -> AttentionBackend:
    """Make a backend for `spec`: the named backend, or for `"auto"` the platform's first backend that supports `spec`.

    Args:
        name: name of a backend, or `"auto"`.
        spec: properties to support.
        weighs: whether the batches will have a `weighing`.

    Raises:
        BackendError: the name is unknown, or the backend does not support `spec`; the message gives the reason.
    """
    if name != "auto":
        if reason := refusal(cls := get_backend(name), spec, weighs):
            raise BackendError(f"attention_backend {name!r} cannot serve this model: {reason}")
        return cls(spec)
    platform = jax.default_backend()
    refused = _unused_gpu(platform)
    for candidate in _AUTO_ORDER.get(platform, _AUTO_ELSEWHERE):
        try:
            cls = get_backend(candidate)
        except BackendError as error:
            refused.append(str(error))
            continue
        if reason := refusal(cls, spec, weighs):
            refused.append(f"{candidate} cannot serve this model: {reason}")
            continue
        why = f"because {'; '.join(refused)}" if refused else "the first choice there"
        logger.log(
            logging.WARNING if refused else logging.INFO, "attention_backend auto: %s on %s, %s", candidate, platform, why
        )
        return cls(spec)
    raise BackendError(f"no attention backend on {platform}: {'; '.join(refused)}")
