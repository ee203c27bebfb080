"""The compiled operators: found, loaded and registered with JAX once per process."""

from __future__ import annotations

import ctypes
import os
from functools import cache

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from chunkattn.backends.cpu.build import LIBRARY, sources_digest
from chunkattn.errors import BackendError

ATTENTION = "chunkattn_attention"
ATTEND_HEADS = "chunkattn_attend_heads"
FACTORS = "chunkattn_factors"
GATE = "chunkattn_gate"
GROUPS = "chunkattn_groups"
LARGEST = "chunkattn_largest"
MULTIPLY = "chunkattn_multiply"
MULTIPLY_SEVERAL = "chunkattn_multiply_several"
NORM = "chunkattn_norm"
NORMALISE = "chunkattn_normalise"
READ = "chunkattn_read"
PACKED_MULTIPLY = "chunkattn_packed_multiply"
PACKED_GATHER = "chunkattn_packed_gather"
PACKED_GROUPS = "chunkattn_packed_groups"
RECURRENCE = "chunkattn_recurrence"
"""Names of the operators in XLA programs. The library has each without underscores, its words capitalised."""
_OPERATORS = (
    *(ATTENTION, ATTEND_HEADS, FACTORS, GATE, GROUPS, LARGEST, MULTIPLY, MULTIPLY_SEVERAL, NORM, NORMALISE, READ),
    *(PACKED_MULTIPLY, PACKED_GATHER, PACKED_GROUPS, RECURRENCE),
)
KERNEL_VARIABLE = "CHUNKATTN_CPU_KERNEL"
"""Environment variable that picks a kernel by name, for tests; by default the best kernel of the machine runs."""
BUILD_HINT = "with a C++ compiler, `python -m chunkattn.backends.cpu.build` makes it"


@cache
def _load() -> ctypes.CDLL | str:
    """Return the library after registration with JAX, or the reason why there is none.

    Needs JAX's backends. Before JAX makes them, it only queues registrations, and their errors end its initialisation.
    """
    try:
        return _register()
    except BackendError as error:
        return str(error)
    except Exception as error:  # JAX refuses handlers of another version, when they are registered or when they are called
        problem = str(error).partition("\n")[0]
        return f"{LIBRARY.name} cannot be used with jaxlib {jaxlib.__version__}: {problem}; {BUILD_HINT}"


def _register() -> ctypes.CDLL:
    """Load the library, register its operators and call one.

    Raises:
        BackendError: the library is missing, is not of this package, or lacks the kernel that is named.
        Exception: the system cannot load the library, or JAX cannot use it.
    """
    if not LIBRARY.exists():
        raise BackendError(f"chunkattn was installed without its native library; {BUILD_HINT}")
    library = ctypes.cdll.LoadLibrary(str(LIBRARY))
    try:
        texts = library.chunkattn_use, library.chunkattn_kernel, library.chunkattn_packed_kernel, library.chunkattn_sources
        handlers = {name: getattr(library, name.title().replace("_", "")) for name in _OPERATORS}
        library.chunkattn_pack.restype = ctypes.c_bool
        library.chunkattn_quantize_q8_0.restype = None
    except AttributeError as error:
        raise BackendError(f"{LIBRARY.name} is older than the package; {BUILD_HINT}") from error
    for function in texts:
        function.restype = ctypes.c_char_p
    if (digest := sources_digest()) and library.chunkattn_sources() != digest.encode():
        raise BackendError(f"{LIBRARY.name} was compiled from other sources than the package has; {BUILD_HINT}")
    kernel = os.environ.get(KERNEL_VARIABLE, "")
    if why := library.chunkattn_use(kernel.encode()):
        raise BackendError(f"{KERNEL_VARIABLE}={kernel}: {why.decode()}")
    for name, handler in handlers.items():
        capsule = jax.ffi.pycapsule(handler)  # type: ignore[no-untyped-call]
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    _try_call()
    return library


def _try_call() -> None:
    """Call one operator, because JAX may find only at a call that it cannot run a handler."""
    out = jax.ShapeDtypeStruct((1, 2), jnp.float32)  # type: ignore[no-untyped-call]
    with jax.ensure_compile_time_eval():  # the caller may be tracing
        np.asarray(jax.ffi.ffi_call(NORMALISE, out)(np.zeros((1, 2), np.float32)))


def _loaded() -> ctypes.CDLL | str:
    """Return the library, or the reason why this process does not use it. Asking for the platform makes JAX's backends."""
    platform = jax.default_backend()
    return _load() if platform == "cpu" else f"it runs on CPUs only, and JAX computes on {platform}"


def refusal() -> str | None:
    """Return the reason why the operators cannot run in this process, or None if they can."""
    library = _loaded()
    return library if isinstance(library, str) else None


def kernel_name() -> str | None:
    """Return the name of the kernel in use, or None where the operators cannot run."""
    library = _loaded()
    return None if isinstance(library, str) else library.chunkattn_kernel().decode()


def packed_kernel_name() -> str | None:
    """Return the name of the kernel of packed weights in use, or None where the operators cannot run."""
    library = _loaded()
    return None if isinstance(library, str) else library.chunkattn_packed_kernel().decode()


def functions() -> ctypes.CDLL:
    """Return the library, whose operators are then registered.

    Raises:
        BackendError: the operators cannot run in this process.
    """
    library = _loaded()
    if isinstance(library, str):
        raise BackendError(library)
    return library
