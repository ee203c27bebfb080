"""Python runs this module at its start if PYTHONPATH names its folder. Each engine step then sleeps `SLOW_STEP_S` seconds.

The sleep stands for an accelerator, so that several engines on one machine do not share its processor.
"""

from __future__ import annotations

import os
import sys
import time
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_MODULE = "chunkattn.engine.runner"
_SECONDS = float(os.environ.get("SLOW_STEP_S", "0"))


class _Slow(MetaPathFinder, Loader):
    """Finder that changes the runner's module when it is imported."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        runner: Any = module
        forward, decode = runner.Runner.forward, runner.Runner.decode

        def slow(self: Any, arrays: Any) -> Any:
            time.sleep(_SECONDS)
            return forward(self, arrays)

        def slow_run(self: Any, arrays: Any, **options: Any) -> Any:
            time.sleep(_SECONDS * int(arrays.limit))
            return decode(self, arrays, **options)

        runner.Runner.forward, runner.Runner.decode = slow, slow_run


if _SECONDS:
    sys.meta_path.insert(0, _Slow())
