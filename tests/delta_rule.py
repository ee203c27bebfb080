"""The gated delta rule token by token in float64: a witness of recurrent layers, and transformers with it."""

from contextlib import contextmanager
from importlib import import_module
from unittest.mock import patch

import numpy as np
import torch


def sequential(inputs, heads):
    """Return the outputs of a recurrent layer for one part from its first token, float64 `[T, Hv, dv]`.

    Args:
        inputs: `chunkattn.backends.recurrence.Inputs` of the part's rows.
        heads: `RecurrentSpec` or `GatedDeltaNet` with the sizes.
    """
    x = {name: np.asarray(value, np.float64) for name, value in inputs._asdict().items()}
    count, groups = len(x["q"]), heads.value_heads // heads.key_heads
    q, k, v = (_convolved(x[part], x[f"conv_{part}"]) for part in "qkv")
    q, k = (np.repeat(_unit(y.reshape(count, heads.key_heads, -1)), groups, axis=1) for y in (q, k))
    v = v.reshape(count, heads.value_heads, -1)
    beta, decay = 1 / (1 + np.exp(-x["b"])), np.exp(-np.exp(x["a_log"]) * np.logaddexp(0, x["a"] + x["dt_bias"]))
    state = np.zeros((heads.value_heads, heads.key_dim, heads.value_dim))
    out = np.empty_like(v)
    for row in range(count):
        state *= decay[row][:, None, None]
        written = beta[row][:, None] * (v[row] - np.einsum("hd,hde->he", k[row], state))
        state += k[row][:, :, None] * written[:, None]
        out[row] = np.einsum("hd,hde->he", q[row], state) * heads.key_dim**-0.5
    return out


def _convolved(x, taps):
    padded = np.pad(x, ((taps.shape[1] - 1, 0), (0, 0)))
    y = sum(padded[tap : tap + len(x)] * taps[:, tap] for tap in range(taps.shape[1]))
    return y / (1 + np.exp(-y))


def _unit(x):
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _rule(query, key, value, g, beta, **options):
    """Take the place of transformers' chunked rule."""
    groups = value.shape[2] // key.shape[2]
    q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    q, k = (x.repeat_interleave(groups, dim=2) for x in (q, k))
    state, outputs = torch.zeros(*value.shape[::2], key.shape[-1], value.shape[-1], dtype=value.dtype), []
    for row in range(value.shape[1]):
        state = state * g[:, row, :, None, None].exp()
        read = torch.einsum("bhd,bhde->bhe", k[:, row], state)
        written = beta[:, row, :, None] * (value[:, row] - read)
        state = state + torch.einsum("bhd,bhe->bhde", k[:, row], written)
        outputs.append(torch.einsum("bhd,bhde->bhe", q[:, row], state) * key.shape[-1] ** -0.5)
    return torch.stack(outputs, dim=1), None


@contextmanager
def in_float64(model):
    """Let a model of transformers compute in float64, where its code says float32, and token by token."""
    module = import_module(type(model).__module__)
    model.set_experts_implementation("eager")  # the grouped product has no float64
    with (
        patch.object(module, "torch_chunk_gated_delta_rule", _rule),
        patch.object(torch, "float32", torch.float64),
        patch.object(torch, "float", torch.float64),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield model.double()
