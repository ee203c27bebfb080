"""Activation functions of rerankers: what sentence-transformers and vLLM make of a logit, by PyTorch's names."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
from scipy.special import expit, log_expit, log_softmax, softmax

from chunkattn.errors import ModelError

logger = logging.getLogger(__name__)

ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Identity": lambda logits: logits,
    "Sigmoid": expit,
    "Tanh": np.tanh,
    "Softmax": lambda logits: softmax(logits, axis=-1),
    "LogSigmoid": log_expit,
    "LogSoftmax": lambda logits: log_softmax(logits, axis=-1),
    "ReLU": lambda logits: np.maximum(logits, 0.0),
    "Softplus": lambda logits: np.logaddexp(logits, 0.0),
}
"""Functions of float64 logits `[..., classes]`, by the name of the class in `torch.nn`."""


def activation_of(path: object, place: str) -> str | None:
    """Return the name in `ACTIVATIONS` of a class that a configuration names; None, with a warning, for code outside PyTorch.

    Args:
        path: name of the class, such as `torch.nn.modules.activation.Sigmoid`; None for none.
        place: file and key that name it, for messages.

    Raises:
        ModelError: the class is PyTorch's, but not supported.
    """
    if path is None:
        return None
    name = str(path).rpartition(".")[2]
    if not isinstance(path, str) or not path.startswith("torch."):
        logger.warning("%s: %r is code outside PyTorch, which is not run; the default activation applies", place, path)
        return None
    if name not in ACTIVATIONS:
        raise ModelError(f"{place}: the activation function {path!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    return name
