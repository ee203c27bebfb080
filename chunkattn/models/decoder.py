"""The decoder: pre-norm transformer with grouped-query attention and a gated MLP.

The decoder works on a flat list of tokens `[T]` from any number of sequences. Attention is a callback, so the paged engine
and the training of the demo model share the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import jax
import jax.numpy as jnp

from chunkattn.backends.base import HeadInputs
from chunkattn.models.linear import add_rms_norm, gated, multiply, multiply_several, rms_norm, rows_dtype
from chunkattn.models.packed import Weight, unpacked
from chunkattn.models.shards import ONE_DEVICE, Shards
from chunkattn.models.spec import CLASSES, EMBEDDING, HEAD, DecoderSpec
from chunkattn.rope.rotary import apply_rotary, rotary_tables

Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]
"""Callback from `(layer, q [T, heads, d], k [T, kv_heads, d], v [T, kv_heads, d])` to `[T, heads, d]`."""
AttendInputs = Callable[[int, HeadInputs], jax.Array]
"""As `Attend`, with heads that the callback itself normalises and rotates."""
_GATES = ("gate", "up")


@dataclass(frozen=True)
class Decoder:
    """Causal language model or sequence classifier of any supported family.

    Attributes:
        spec: shape of the decoder.
        weights: parameters by the names of `DecoderSpec.parameters`, packed or of dtype `dtype`. Each layer has arrays of its
            own instead of a slice for a scan: XLA:CPU copies the slice of a stacked bf16 weight at every use.
        dtype: dtype of parameters, activations and KV. Rows stay float32 until a packed parameter multiplies them.
        shards: devices that share the parameters. On several, the methods run inside `Shards.map`, on one device's part.
    """

    spec: DecoderSpec
    weights: dict[str, Weight]
    dtype: jnp.dtype
    shards: Shards = ONE_DEVICE

    @property
    def head_name(self) -> str:
        """Return the name of the weight of `logits`."""
        if self.spec.num_labels is not None:
            return CLASSES
        return EMBEDDING if self.spec.tie_embeddings else HEAD

    @property
    def head(self) -> Weight:
        """Return the weight of `logits`, `[vocab, hidden]` or `[num_labels, hidden]`."""
        return self.weights[self.head_name]

    def __call__(
        self, token_ids: jax.Array, positions: jax.Array, attend: Attend, attend_inputs: AttendInputs | None = None
    ) -> jax.Array:
        """Return the hidden states after the final norm, float32 `[T, hidden]`.

        Args:
            token_ids: int32 `[T]` token ids.
            positions: int32 `[T]` position ids.
            attend: attention callback, called once per layer, in order.
            attend_inputs: callback to call instead, or None.
        """
        cos, sin = rotary_tables(self.spec.rotary, positions)
        x, added = self.shards.embed(self.weights[EMBEDDING], token_ids), None
        for index in range(self.spec.num_layers):
            layer = f"model.layers.{index}."
            attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
            x, normed = self._add_norm(x, added, f"{layer}input_layernorm", [f"{attention}{part}_proj" for part in "qkv"])
            heads = self._heads(normed, attention, cos, sin)
            out = attend(index, *self._prepared(heads)) if attend_inputs is None else attend_inputs(index, heads)
            added = self._linear(out.reshape(len(x), -1), f"{attention}o_proj", self.shards.total)
            x, normed = self._add_norm(x, added, f"{layer}post_attention_layernorm", [f"{mlp}{part}_proj" for part in _GATES])
            added = self._mlp(normed, mlp)
        return self._add_norm(x, added, "model.norm", [])[1]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Return the logits of hidden states `[N, hidden]`: float32 `[N, vocab]`, or `[N, num_labels]` for a classifier.

        Args:
            hidden: float32 `[N, hidden]` states after the final norm.
        """
        if self.spec.num_labels is not None:
            return multiply(hidden, self.head)
        return self.shards.gather(multiply(hidden, self.head), self.spec.vocab_size)

    def _heads(self, x: jax.Array, name: str, cos: jax.Array, sin: jax.Array) -> HeadInputs:
        """Return the heads of an attention layer, from its input `[T, hidden]`."""
        products = self._several(x, [f"{name}{part}_proj" for part in "qkv"])
        q, k, v = (product.reshape(len(x), -1, self.spec.head_dim) for product in products)
        q_scale, k_scale = (self.weights.get(f"{name}{part}_norm.weight") for part in "qk")  # only of models with `qk_norm`
        scales = [None if scale is None else unpacked(scale) for scale in (q_scale, k_scale)]
        return HeadInputs(q, k, v, scales[0], scales[1], cos, sin, self.spec.norm_eps, self.dtype)

    def _prepared(self, heads: HeadInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries, keys and values, normalised and rotated, in the model's dtype."""
        q, k = heads.q, heads.k
        if heads.q_scale is not None and heads.k_scale is not None:
            q, k = (rms_norm(x, scale, heads.epsilon) for x, scale in ((q, heads.q_scale), (k, heads.k_scale)))
        q, k = (apply_rotary(x, heads.cos, heads.sin) for x in (q, k))
        return q.astype(heads.dtype), k.astype(heads.dtype), heads.v.astype(heads.dtype)

    def _mlp(self, x: jax.Array, name: str) -> jax.Array:
        """Return the output of a SwiGLU layer (arXiv:2002.05202), float32 `[T, hidden]`, from an input `[T, hidden]`."""
        gate, up = self._several(x, [f"{name}{part}_proj" for part in _GATES])
        product = gated(gate, up, self._dtype_into([f"{name}down_proj"]))
        return self._linear(product, f"{name}down_proj", self.shards.total)

    def _several(self, x: jax.Array, names: Sequence[str]) -> list[jax.Array]:
        """Return float32 `[N, out]` for each name, from one input `[N, in]`."""
        products = multiply_several(x, [self.weights[f"{name}.weight"] for name in names])
        return [self._biased(product, name) for product, name in zip(products, names, strict=True)]

    def _linear(self, x: jax.Array, name: str, total: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Return float32 `[N, out]` from `[N, in]`; `total` adds up the products of devices that divide the inputs."""
        return self._biased(total(multiply(x, self.weights[f"{name}.weight"])), name)

    def _biased(self, y: jax.Array, name: str) -> jax.Array:
        """Add the bias of a module to its products, if it has one."""
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + unpacked(bias).astype(jnp.float32)

    def _dtype_into(self, names: Sequence[str]) -> jnp.dtype:
        """Return the dtype of rows that modules multiply; float32 if there is no module."""
        return rows_dtype([self.weights[f"{name}.weight"] for name in names], self.dtype if names else jnp.dtype("float32"))

    def _add_norm(
        self, x: jax.Array, added: jax.Array | None, name: str, readers: Sequence[str]
    ) -> tuple[jax.Array, jax.Array]:
        """Return `x` plus what a layer adds, float32 `[N, hidden]`, and its norm, for the modules that multiply it."""
        scale, epsilon, dtype = unpacked(self.weights[f"{name}.weight"]), self.spec.norm_eps, self._dtype_into(readers)
        return (x, rms_norm(x, scale, epsilon, dtype)) if added is None else add_rms_norm(x, added, scale, epsilon, dtype)


def random_decoder(spec: DecoderSpec, dtype: jnp.dtype, seed: int = 0) -> Decoder:
    """Return a decoder with random matrices, norms of ones, and biases of zeros.

    Args:
        spec: shape of the decoder.
        dtype: dtype of the parameters.
        seed: seed of the matrices.
    """
    key, numbers, weights = jax.random.key(seed), count(), dict[str, Weight]()
    embedding = jax.nn.initializers.normal(spec.hidden_size**-0.5)
    linear = jax.nn.initializers.lecun_normal(in_axis=1, out_axis=0)
    for name, shape in spec.parameters().items():
        if len(shape) == 1:
            weights[name] = jnp.full(shape, 0 if name.endswith(".bias") else 1, dtype)
        else:
            draw = embedding if name == EMBEDDING else linear
            weights[name] = draw(jax.random.fold_in(key, next(numbers)), shape, dtype)
    return Decoder(spec, weights, dtype)
