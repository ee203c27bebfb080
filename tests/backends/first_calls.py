"""Run one call after another in processes that have called nothing else: `python first_calls.py FILE CALL FILE CALL …`.

Each FILE is used as the native library. CALL is the first call, and all others follow. Prints one JSON object a process.
"""

import json
import logging
import os
import sys
from itertools import takewhile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from chunkattn.backends import AttentionSpec, make_backend
from chunkattn.backends.cpu import label_readout, library, linear, normaliser
from chunkattn.cli.environment import environment
from chunkattn.models.linear import multiply

ROWS, WEIGHT = np.ones((2, 64), jnp.bfloat16), np.ones((64, 64), jnp.bfloat16)
SPEC = AttentionSpec(4, 2, 32, jnp.dtype("bfloat16"), 16)


class Warnings(logging.Handler):
    """Keeps warnings of the package."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


CALLS = {
    "refusal": library.refusal,
    "kernel_name": library.kernel_name,
    "linear": lambda: linear.serves(ROWS, WEIGHT),
    "label_readout": lambda: label_readout.serves(WEIGHT),
    "normaliser": normaliser.serves,
    "product": lambda: float(jax.jit(multiply)(ROWS, WEIGHT)[1, 5]),
    "auto": lambda: make_backend("auto", SPEC).name,
    "env": lambda: dict(takewhile(lambda line: line[0] != "same bits", environment())),  # whose probe takes seconds
}


def run(file, first):
    """Return what each call returned, or the exception of the one that raised, and the warnings."""
    library.LIBRARY = Path(file)
    kept = Warnings()
    logging.getLogger("chunkattn").addHandler(kept)
    found = {}
    # The environment makes a backend of its own, whose warning is not counted.
    for name in (first, *(other for other in CALLS if other not in (first, "env"))):
        try:
            found[name] = CALLS[name]()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return {**found, "warnings": kept.texts}


if __name__ == "__main__":
    for file, first in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        if child := os.fork():  # JAX has made no backend yet, so it has no threads
            os.waitpid(child, 0)
            continue
        print(json.dumps(run(file, first)), flush=True)
        os._exit(0)
