"""Build hook: compiles the native attention operator. Without a C++ compiler, the package is installed without it."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILD = Path(__file__).parent / "chunkattn" / "backends" / "cpu" / "build.py"
JAXLIB = "jaxlib>=0.10.2,<0.13"
"""Requirement of the build, for XLA's headers: the versions of jax in pyproject.toml."""


def _build_module() -> ModuleType:
    """Return `chunkattn.backends.cpu.build` without importing the package, whose dependencies are not installed yet."""
    spec = importlib.util.spec_from_file_location("chunkattn_native_build", BUILD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class NativeHook(BuildHookInterface):
    """Adds the compiled operator to wheels and editable installs."""

    def dependencies(self) -> list[str]:
        """Return what the build needs beside hatchling; nothing without a compiler."""
        return [JAXLIB] if _build_module().compiler() else []

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
