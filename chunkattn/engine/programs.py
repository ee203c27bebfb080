"""`ProgramCounts`: jitted functions with counts of their programs, which tell the user when an engine begins to compile."""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import jax

from chunkattn.models.shards import WHOLE, Shards

logger = logging.getLogger(__name__)

_TEXT = "the first call compiles its programs or loads them from disk, which takes seconds; later calls reuse them"


class ProgramCounts(Counter[str]):
    """Number of programs traced so far, by name. The first trace of an engine is announced, because its caller waits for it.

    The announcement is a line in the log at INFO. A terminal shows it without a log too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()  # the warm-up traces in several threads

    def count(self, name: str) -> None:
        """Count a program. A function that JAX traces calls it: it runs only while JAX traces."""
        with self._lock:
            self[name] += 1

    def jit(
        self,
        name: str,
        function: Callable[..., Any],
        shards: Shards,
        inputs: Sequence[Any] = (),
        outputs: Any = WHOLE,
        **options: Any,
    ) -> Any:
        """Return a jitted function on the devices of a model, whose traces count.

        Args:
            name: name of the count.
            function: function to trace.
            shards: devices of the model; see `Shards.map` for `inputs` and `outputs`.
            inputs: partitions of the first arguments.
            outputs: partition of the result.
            **options: options of `jax.jit`.
        """

        @wraps(function)
        def traced(*args: Any, **static: Any) -> Any:
            self.count(name)
            return function(*args, **static)

        return jax.jit(shards.map(traced, inputs, outputs), **options)

    def __setitem__(self, name: str, count: int) -> None:
        if not self:
            if logger.hasHandlers() or not sys.stderr.isatty():
                logger.info(_TEXT)
            else:
                print(f"chunkattn: {_TEXT}", file=sys.stderr, flush=True)
        super().__setitem__(name, count)
