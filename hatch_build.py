"""Build hook: compiles the native attention operator. Without a C++ compiler, the package is installed without it."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.requirements import Requirement

BUILD = Path(__file__).parent / "chunkattn" / "backends" / "cpu" / "build.py"
NEWEST_PYTHON = (3, 14)
"""Newest Python for which the oldest supported jaxlib has wheels. Newer ones take the newest supported headers."""


def _build_module() -> ModuleType:
    """Return `chunkattn.backends.cpu.build` without importing the package, whose dependencies are not installed yet."""
    spec = importlib.util.spec_from_file_location("chunkattn_native_build", BUILD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def headers(dependencies: list[str], python: tuple[int, int] = sys.version_info[:2]) -> str:
    """Return the build's requirement of jaxlib, for XLA's headers: the oldest version that the package supports.

    XLA calls libraries that were compiled with older headers and refuses those of newer ones. So one library serves every
    supported version of jax, and environments with different versions can share the folder of an editable installation.

    Args:
        dependencies: requirements of the package.
        python: version of the interpreter.
    """
    (supported,) = (r.specifier for r in map(Requirement, dependencies) if r.name == "jax")
    (oldest,) = (bound.version for bound in supported if bound.operator == ">=")
    return f"jaxlib=={oldest}" if python <= NEWEST_PYTHON else f"jaxlib{supported}"


class NativeHook(BuildHookInterface):
    """Adds the compiled operator to wheels and editable installs."""

    def dependencies(self) -> list[str]:
        """Return what the build needs beside hatchling; nothing without a compiler."""
        return [headers(self.metadata.core.dependencies)] if _build_module().compiler() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the operator. A failure is a warning: the `xla` backend serves instead."""
        native = _build_module()
        try:
            made = native.build()
        except (native.BuildError, OSError) as error:
            self.app.display_warning(f"chunkattn: the native attention operator for CPUs was not built: {error}")
            return
        build_data["artifacts"].append(str(made.relative_to(self.root)))
        build_data["pure_python"] = False
        # The library uses no interface of Python, so one wheel serves all its versions.
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
