"""Virtual environments with the project installed from a copy of the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore")
"""Files that an installation needs beside the package."""
LIBRARY = Path("chunkattn", "backends", "cpu", "_native.so")
ASK = """
import importlib.metadata, platform
import jax.numpy as jnp
from chunkattn.backends import AttentionSpec, make_backend
from chunkattn.backends.cpu import library

print(f"Python {platform.python_version()}")
print(*(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib")), sep="\\n")
print(make_backend("auto", AttentionSpec(16, 8, 128, jnp.dtype("bfloat16"), 16)).name)
print(library.kernel_name() or library.refusal())
"""
"""Program that prints versions, the backend that `auto` takes, and the native kernel or why there is none."""


def copy_checkout(to: Path) -> Path:
    """Copy what the package is built from, without a native library."""
    to.mkdir()
    for name in COPIED:
        shutil.copy(ROOT / name, to)
    shutil.copytree(ROOT / "chunkattn", to / "chunkattn", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return to


class Environment:
    """A virtual environment.

    Args:
        folder: folder to make.
        python: interpreter to make it with.
    """

    def __init__(self, folder: Path, python: Path) -> None:
        self.folder, self.bin = folder, folder / "bin"
        subprocess.run([python, "-m", "venv", folder], check=True)

    def run(self, *command: str | Path, compiler: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment in its own folder.

        Args:
            command: name of the program, and its arguments.
            compiler: whether it finds the machine's programs beside those of the environment.

        Raises:
            AssertionError: the program fails.
        """
        variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "CHUNKATTN_CPU_KERNEL")}
        variables["PIP_NO_COMPILE"] = "1"
        path = f"{self.bin}{os.pathsep}{variables['PATH']}" if compiler else str(self.bin)
        if not compiler:
            variables.pop("CXX", None)
        program = [self.bin / command[0], *command[1:]]
        done = subprocess.run(
            program, env={**variables, "PATH": path}, cwd=self.folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{' '.join(map(str, program))}\n{done.stdout}\n{done.stderr}"
        return done

    def install(self, *arguments: str | Path, compiler: bool = True) -> None:
        """Install with pip."""
        self.run("python", "-m", "pip", "--quiet", "install", *arguments, compiler=compiler)

    def facts(self) -> list[str]:
        """Return the lines of `ASK`."""
        return self.run("python", "-c", ASK).stdout.splitlines()

    def resolves_to(self, requirement: str) -> str:
        """Return the version that pip would install for a requirement without its own requirements."""
        done = self.run("python", "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", requirement)
        (name,) = (line for line in done.stdout.splitlines() if line.startswith("Would install "))
        return name.rpartition("-")[2]


def headers() -> list[str]:
    """Return options of a compiler for the headers of the installed jaxlib."""
    import jax

    return ["-isystem", str(jax.ffi.include_dir())]


def build_wheel(checkout: Path, to: Path) -> Path:
    """Build a wheel in isolation and return its file."""
    command = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "--wheel-dir", to, checkout]
    subprocess.run(command, check=True)
    (wheel,) = to.glob("*.whl")
    return wheel
