"""The compiled operators: found, loaded and registered with JAX once per process."""

from __future__ import annotations

import ctypes
import os
from functools import cache

import jax

from chunkattn.backends.cpu.build import LIBRARY

ATTENTION = "chunkattn_attention"
MULTIPLY = "chunkattn_multiply"
NORMALISE = "chunkattn_normalise"
READ = "chunkattn_read"
"""Names of the operators in XLA programs."""
KERNEL_VARIABLE = "CHUNKATTN_CPU_KERNEL"
"""Environment variable that picks a kernel by name, for tests; by default the best kernel of the machine runs."""
BUILD_HINT = "with a C++ compiler, `python -m chunkattn.backends.cpu.build` makes it"


@cache
def _load() -> ctypes.CDLL | str:
    """Return the loaded library, or the reason why there is none."""
    if not LIBRARY.exists():
        return f"chunkattn was installed without its native library; {BUILD_HINT}"
    try:
        library = ctypes.cdll.LoadLibrary(str(LIBRARY))
    except OSError as error:
        return f"{LIBRARY.name} cannot be loaded: {error}"
    try:
        library.chunkattn_use.restype = library.chunkattn_kernel.restype = ctypes.c_char_p
        handlers = {
            ATTENTION: library.ChunkattnAttention,
            MULTIPLY: library.ChunkattnMultiply,
            NORMALISE: library.ChunkattnNormalise,
            READ: library.ChunkattnRead,
        }
    except AttributeError:
        return f"{LIBRARY.name} is older than the package; {BUILD_HINT}"
    wanted = os.environ.get(KERNEL_VARIABLE, "")
    if why := library.chunkattn_use(wanted.encode()):
        return f"{KERNEL_VARIABLE}={wanted}: {why.decode()}"
    for name, handler in handlers.items():
        capsule = jax.ffi.pycapsule(handler)  # type: ignore[no-untyped-call]
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    return library


def refusal() -> str | None:
    """Return the reason why the operator cannot run in this process, or None if it can."""
    found = _load()
    return found if isinstance(found, str) else None


def kernel_name() -> str | None:
    """Return the name of the kernel in use, or None without the library."""
    found = _load()
    return None if isinstance(found, str) else found.chunkattn_kernel().decode()
