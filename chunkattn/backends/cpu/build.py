"""Compile the native attention operator into this package: `python -m chunkattn.backends.cpu.build`.

Installing the package does the same where there is a C++ compiler (see `hatch_build.py`). This file imports only the standard
library, so that it runs before the package's dependencies are installed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "native"
LIBRARY = HERE / "_native.so"

FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math")
WARNINGS = ("-Wall", "-Wextra", "-Wno-psabi", "-Wno-ignored-attributes", "-Wno-uninitialized", "-Wno-maybe-uninitialized")
"""Warnings of our own files. The last two are false alarms within GCC's own headers of vector instructions."""
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "bf16")), "-mprefer-vector-width=512")
KERNELS = {
    "portable": (),
    "avx2": _AVX2,
    "avx512_bf16": _AVX512,
    "amx": (*_AVX512, "-mamx-tile", "-mamx-bf16"),
}
"""Compiler flags of each kernel for x86-64; other processors get the portable kernel alone."""
PARTS = ("attention", "dispatch", "groups", "packed", "packed_load", "recurrence")
"""Sources of every program that calls the kernels, without `.cc`."""
FFI_PARTS = ("ffi", "ffi_groups", "ffi_recurrence")
"""Sources of the operators as XLA calls them."""
_NO_CONTRACTION = ("-ffp-contract=off",)
"""Products of packed weights round at the same places in every kernel."""
PACKED_KERNELS = {
    "portable": _NO_CONTRACTION,
    "avx2": (*_NO_CONTRACTION, *_AVX2),
    "avx512": (
        *_NO_CONTRACTION,
        *_AVX2,
        *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni")),
        "-mprefer-vector-width=512",
    ),
}
"""Compiler flags of each kernel of packed weights for x86-64."""
ARM_PACKED_KERNELS = {"portable": _NO_CONTRACTION, "neon": (*_NO_CONTRACTION, "-march=armv8.2-a+dotprod")}
"""Compiler flags of each kernel of packed weights for 64-bit ARM."""


class BuildError(Exception):
    """The operator cannot be compiled here; the message says why."""


def compiler() -> str | None:
    """Return the command of the C++ compiler: `$CXX`, or the first of the usual names that is installed, or None."""
    named = os.environ.get("CXX")
    return named or next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)


def kernels() -> dict[str, tuple[str, ...]]:
    """Return the kernels for this machine's processor family, with their flags."""
    return KERNELS if _is_x86() else {"portable": ()}


def packed_kernels() -> dict[str, tuple[str, ...]]:
    """Return the kernels of packed weights for this machine's processor family, with their flags."""
    if _is_x86():
        return PACKED_KERNELS
    return ARM_PACKED_KERNELS if platform.machine().lower() in ("aarch64", "arm64") else {"portable": _NO_CONTRACTION}


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def sources_digest() -> str:
    """Return a digest of the sources and their flags, which the library keeps; "" where a package has no sources."""
    files = sorted(file for file in SOURCES.glob("*") if file.suffix in (".cc", ".h"))
    if not files:
        return ""
    digest = hashlib.sha256(repr((FLAGS, KERNELS, PACKED_KERNELS, ARM_PACKED_KERNELS)).encode())
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def ffi_headers() -> Path:
    """Return the folder of XLA's headers, which jaxlib brings.

    Raises:
        BuildError: jaxlib is not installed.
    """
    spec = find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("jaxlib is not installed; its headers are needed")
    return Path(spec.submodule_search_locations[0]) / "include"


def objects(cxx: str, folder: Path, names: tuple[str, ...], flags: tuple[str, ...] = FLAGS) -> list[Path]:
    """Compile every kernel and the given sources, and return the object files.

    Args:
        cxx: command of the compiler, which may have arguments.
        folder: folder for the object files.
        names: sources beside the kernels, without `.cc`.
        flags: flags of all files.

    Raises:
        BuildError: the compiler refuses a file; the message is its own.
    """
    jobs = [("kernel", name, extra) for name, extra in kernels().items()]
    jobs += [("packed_kernel", f"packed_{name}", extra) for name, extra in packed_kernels().items()]
    for_ffi = ("-isystem", str(ffi_headers()), f'-DCHUNKATTN_SOURCES="{sources_digest()}"') if "ffi" in names else ()
    own = dict.fromkeys(FFI_PARTS, for_ffi) | dict.fromkeys(("packed", "packed_load"), _NO_CONTRACTION)
    jobs += [(name, name, own.get(name, ())) for name in names]

    def one(job: tuple[str, str, tuple[str, ...]]) -> Path:
        source, name, extra = job
        to = folder / f"{name}.o"
        _run([*shlex.split(cxx), *flags, *WARNINGS, *extra, "-c", str(SOURCES / f"{source}.cc"), "-o", str(to)])
        return to

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(one, jobs))


def build(to: Path = LIBRARY) -> Path:
    """Compile the operator.

    Args:
        to: file of the library; it is replaced in one step, so that running processes keep the old one.

    Raises:
        BuildError: no compiler, no headers, the compiler refuses a file, or its library cannot be loaded here.
    """
    cxx = compiler()
    if cxx is None:
        raise BuildError("there is no C++ compiler; install g++ or clang++, or name one in CXX")
    with tempfile.TemporaryDirectory(dir=to.parent) as folder:
        made = Path(folder) / to.name
        files = objects(cxx, Path(folder), (*PARTS, *FFI_PARTS))
        runtime = () if sys.platform == "darwin" else ("-static-libstdc++", "-static-libgcc", "-Wl,--strip-all")
        _run([*shlex.split(cxx), "-shared", "-pthread", *runtime, *map(str, files), "-o", str(made)])
        try:
            ctypes.CDLL(str(made))
        except OSError as error:
            raise BuildError(f"{cxx} made a library that cannot be loaded here: {error}") from error
        made.replace(to)
    return to


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)


if __name__ == "__main__":
    try:
        print(build())
    except (BuildError, OSError) as error:
        sys.exit(f"the native attention operator was not built: {error}")
