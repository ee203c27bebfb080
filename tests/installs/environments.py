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
ASK = "from chunkattn.backends.cpu import library; print(library.refusal(), library.kernel_name())"
"""Program that prints why the native library is not used, and its kernel."""


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

    def facts(self) -> dict[str, str]:
        """Return the lines of `chunkattn env`."""
        lines = self.run("chunkattn", "env").stdout.splitlines()
        return {name: value.strip() for name, value in (line.split(":", 1) for line in lines)}

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
