"""Independent answers by Hugging Face transformers. They need PyTorch, which is not where GPU kernels are interpreted."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from chunkattn import ChunkLayout
from tests.checkpoints import Oracle
from tests.fuzz.rig import Subject


class Transformers:
    """Hugging Face transformers in float32 under a 4D mask. A `witness.Witness`."""

    name = "transformers"

    def __init__(self, model: Path, subject: Subject) -> None:
        self.tolerance, self._oracle = subject.tolerance, Oracle(model)

    def logprobs(self, layout: ChunkLayout) -> np.ndarray:
        """See `Witness`."""
        return np.asarray(jax.nn.log_softmax(self._oracle.chunked(layout)))
