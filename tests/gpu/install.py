"""Install JAX with the CUDA compilers into an environment of its own: ``python install.py DIRECTORY``.

The environment compiles for NVIDIA GPUs and interprets their kernels, on a machine without a GPU. It has the libraries that
a compilation loads and leaves out those that only a running program needs (cuBLAS, cuDNN, NCCL and others).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

PYTHONS = (3, 12), (3, 13)
"""Versions of Python that `JAX` runs on and that the tests know."""
JAX = "jax==0.11.2"
# The plugin's own extra `with-cuda` asks for all libraries of a running program, so its requirements are left out.
PLUGIN = ["jax-cuda13-plugin==0.11.2", "jax-cuda13-pjrt==0.11.2"]
CUDA = ["nvidia-cuda-nvcc>=13,<14", "nvidia-nvvm>=13,<14", "nvidia-cuda-nvdisasm>=13,<14"]
# Packages that the tests need beside the project's own requirements. JAX's own GPU kernels import absl.
TOOLS = ["absl-py>=2", "pytest>=9", "pytest-timeout>=2.4", "pytest-xdist>=3.8", "hypothesis>=6.140"]
# Prints the folder of installed packages.
PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"
# Prints the version of the interpreter that runs it.
VERSION = "import sys; print(*sys.version_info[:2])"
# Prints the project's version and its requirements; every version in `PYTHONS` has tomllib.
PROJECT = (
    "import sys, tomllib; p = tomllib.load(sys.stdin.buffer)['project']; print(p['version'], *p['dependencies'], sep='\\n')"
)


def candidates(versions: Sequence[tuple[int, int]]) -> Iterator[Path]:
    """Yield interpreters: this one, those on PATH, and those that pyenv installed."""
    yield Path(sys.executable)
    names = [f"python{major}.{minor}" for major, minor in versions]
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        yield from (Path(folder) / name for name in names)
    installed = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for major, minor in versions:
        yield from (found / "bin" / "python" for found in sorted(installed.glob(f"{major}.{minor}*")))


def find_python(versions: Sequence[tuple[int, int]] = PYTHONS) -> Path | None:
    """Return the first interpreter of one of the versions, or None. A shim of pyenv may exist and refuse to run."""
    for python in candidates(versions):
        if python.is_file():
            done = subprocess.run([python, "-c", VERSION], capture_output=True, text=True, check=False)
            if done.returncode == 0 and tuple(map(int, done.stdout.split())) in versions:
                return python
    return None


def main(directory: Path, project: Path) -> None:
    """Create an environment with JAX, the CUDA compilers, the project's requirements and the test tools.

    Args:
        directory: folder of the environment.
        project: root of the project.
    """
    python = find_python()
    if python is None:
        known = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        sys.exit(f"the GPU tests need Python {known}, and there is none on PATH or under ~/.pyenv/versions; set PYTHON=...")
    subprocess.run([python, "-m", "venv", directory], check=True)
    made = str(directory / "bin" / "python")

    def run(*arguments: str, given: str = "") -> str:
        return subprocess.run([made, *arguments], input=given, stdout=subprocess.PIPE, text=True, check=True).stdout

    version, *requirements = run("-c", PROJECT, given=(project / "pyproject.toml").read_text()).splitlines()
    pip = "-m", "pip", "--quiet", "install"
    run(*pip, "--upgrade", "pip")
    run(*pip, JAX, *TOOLS, *requirements)
    run(*pip, "--no-deps", *PLUGIN, *CUDA)
    # The tests run against the checkout and need only its version. An editable installation would compile the native library.
    metadata = Path(run("-c", PACKAGES).strip()) / f"chunkattn-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: chunkattn\nVersion: {version}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(__file__).resolve().parents[2])
