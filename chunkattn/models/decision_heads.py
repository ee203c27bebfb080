"""Heads of decision models: functions from hidden states to one score for each option, on the host in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Float64

from chunkattn.errors import ModelError

POINTER = "q.weight", "q.bias", "k.weight", "k.bias"
"""Tensors of a pointer head."""


@dataclass(frozen=True, eq=False)
class LinearHead:
    """Scores of codes, which are the same for all questions, at one token.

    Attributes:
        weight: one row for each code.
        bias: one number for each code; None for none.
        starts: row of the first code of each kind of question. The options of a question have the rows from there on.
        cap: limit `c` of the scores, which become `c tanh(score / c)`; None for none.

    Source: `JevForDecision` of transformers 5.24.
    """

    weight: Float64[np.ndarray, "V H"]
    bias: Float64[np.ndarray, " V"] | None
    starts: Mapping[str, int]
    cap: float | None = None

    def scores(self, hidden: Float32[np.ndarray, "1 H"], kind: str, count: int) -> Float64[np.ndarray, " N"]:
        """Return the scores of a question's options.

        Args:
            hidden: hidden state of the token.
            kind: `choice`, `score` or `noul`.
            count: number of options.
        """
        rows = slice(self.starts[kind], self.starts[kind] + count)
        scores = self.weight[rows] @ hidden[-1].astype(np.float64)
        if self.bias is not None:
            scores = scores + self.bias[rows]
        return np.asarray(scores if self.cap is None else self.cap * np.tanh(scores / self.cap))


@dataclass(frozen=True, eq=False)
class PointerHead:
    """Scaled product of a query, at the last token, with a key at the end of each option.

    Attributes:
        query: weight and bias of the query.
        key: weight and bias of the keys.

    Source: `PointerHead` of jaredpalmer/kev: `(K h_option) . (Q h_decide) / sqrt(d)`.
    """

    query: tuple[Float64[np.ndarray, "D H"], Float64[np.ndarray, " D"]]
    key: tuple[Float64[np.ndarray, "D H"], Float64[np.ndarray, " D"]]

    def scores(self, hidden: Float32[np.ndarray, "R H"], kind: str, count: int) -> Float64[np.ndarray, " N"]:
        """Return the scores of a question's options.

        Args:
            hidden: hidden states at the end of each option, and then of the token that decides.
            kind: kind of the question, which changes nothing.
            count: number of options.
        """
        states = hidden.astype(np.float64)
        query = self.query[0] @ states[count] + self.query[1]
        keys = states[:count] @ self.key[0].T + self.key[1]
        return np.asarray(keys @ query / np.sqrt(len(query)))


def make_pointer(tensors: Mapping[str, np.ndarray], hidden: int, place: str) -> PointerHead:
    """Return the pointer head of named tensors.

    Args:
        tensors: tensors by the names of `POINTER`.
        hidden: size of the model's hidden states.
        place: file of the tensors, for error messages.

    Raises:
        ModelError: a tensor is missing, of another shape or not finite.
    """
    if missing := [name for name in POINTER if name not in tensors]:
        raise ModelError(f"{place}: the pointer head lacks {missing[0]!r}; get the file again")
    size = tensors["q.weight"].shape[0] if tensors["q.weight"].ndim else 0
    wanted = {"q.weight": (size, hidden), "q.bias": (size,), "k.weight": (size, hidden), "k.bias": (size,)}
    found = {name: checked(tensors[name], shape, f"{place}: {name!r}") for name, shape in wanted.items()}
    return PointerHead((found["q.weight"], found["q.bias"]), (found["k.weight"], found["k.bias"]))


def checked(tensor: np.ndarray, shape: tuple[int, ...], place: str) -> np.ndarray:
    """Return a tensor in float64.

    Args:
        tensor: the tensor.
        shape: shape that it must have.
        place: file and name of the tensor, for error messages.

    Raises:
        ModelError: the shape is another one, or a number is not finite.
    """
    if tensor.shape != shape or not tensor.size:
        raise ModelError(f"{place} has the shape {list(tensor.shape)}, and the model needs {list(shape)}; get the file again")
    values = tensor.astype(np.float64)
    if not np.isfinite(values).all():
        raise ModelError(f"{place} holds a number that is not finite; get the file again")
    return values
