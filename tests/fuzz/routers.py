"""Experts of one pass that a witness takes over.

A router picks the experts with the highest logits. Where two at the edge nearly tie, rounding decides, and another expert gives
other values. A witness takes the experts of the pass that it judges, and checks each choice with its own logits.
"""

from contextlib import contextmanager
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from chunkattn.models import decoder
from chunkattn.models.experts import route


class Routing:
    """Experts that each router chose, layer by layer, and what a witness finds of these choices.

    Attributes:
        choices: number of rows and layers whose experts the witness has taken over.
        ties: those which are not the witness's own.
        largest: most by which a chosen expert's logit lies below that of one left out, by the witness's logits.
    """

    def __init__(self) -> None:
        self._chosen: list[np.ndarray] = []
        self._rows: int | None = None
        self.choices = self.ties = 0
        self.largest = 0.0

    def _record(self, logits: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """Keep the experts `[T, K]` of the next router."""
        self._chosen.append(np.array(chosen))
        return self._chosen[-1]

    def _take(self, logits: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """Return the kept experts of the next router, judged by the witness's logits `[T, E]`."""
        kept, taken = self._chosen.pop(0), np.array(chosen)
        rows = len(taken) if self._rows is None else self._rows
        given = taken[:rows] = kept[:rows]
        others = np.array(logits[:rows], np.float64)
        lowest = np.take_along_axis(others, given, axis=1).min(axis=1)
        np.put_along_axis(others, given, -np.inf, axis=1)
        short = others.max(axis=1) - lowest
        self.choices += len(short)
        self.ties += int((short > 0).sum())
        self.largest = max(self.largest, float(short.max(initial=0.0)))
        return taken

    def recorded(self):
        """Keep the experts that decoders choose, while the context lasts."""
        return self._asked(self._record)

    def replayed(self, rows):
        """Have decoders take over the kept experts; rows behind the first `rows` are padding."""
        self._rows = rows  # not in the program, which other numbers of rows share
        return self._asked(self._take)

    @contextmanager
    def _asked(self, ask):
        """Have decoders ask the host for the experts of their rows."""

        def choose(logits, spec):
            chosen, _ = route(logits, spec)
            chosen = io_callback(ask, jax.ShapeDtypeStruct(chosen.shape, chosen.dtype), logits, chosen)
            factors = jnp.take_along_axis(jax.nn.softmax(logits), chosen, axis=1)
            return chosen, factors / factors.sum(axis=1, keepdims=True) if spec.is_normalised else factors

        with patch.object(decoder, "route", choose):
            yield self

    @contextmanager
    def forced(self, model):
        """Have a model of transformers take over the kept experts."""

        def take(router, args, output):
            logits = output[0]
            chosen = output[2].new_tensor(self._take(logits.numpy(), output[2].numpy()))
            factors = logits.softmax(-1).gather(1, chosen)
            return (
                logits,
                factors / factors.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else factors,
                chosen,
            )

        routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
        hooks = [router.register_forward_hook(take) for router in routers]
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()
