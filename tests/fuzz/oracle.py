"""Independent answers by Hugging Face transformers. They need PyTorch, which is not where GPU kernels are interpreted."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import torch

from chunkattn import ChunkLayout
from tests.checkpoints import Oracle
from tests.fuzz.rig import Subject


class Transformers:
    """Hugging Face transformers in float32 under a 4D mask. A `witness.Witness`."""

    name = "transformers"

    def __init__(self, model: Path, subject: Subject) -> None:
        self.tolerance, self._oracle, self._recurrent = subject.tolerance, Oracle(model), subject.recurrence is not None

    def logprobs(self, layout: ChunkLayout) -> np.ndarray:
        """See `Witness`."""
        if not self._recurrent:
            return np.asarray(jax.nn.log_softmax(self._oracle.chunked(layout)))
        assert sum(map(bool, layout.chunk_lens)) < 2  # so that every token sees all before it
        ids, positions = (torch.as_tensor(x)[None] for x in (layout.token_ids, layout.positions))
        with torch.no_grad():
            # Without a mask, a gap between positions would begin another sequence.
            logits = self._oracle.model(ids, torch.ones_like(ids), position_ids=positions, use_cache=False).logits[0]
        return logits.log_softmax(-1).numpy()
