"""The decoder: pre-norm transformer with grouped-query attention and a gated MLP.

The decoder works on a flat list of tokens `[T]` from any number of sequences. Attention is a callback, so the paged engine
and the training of the demo model share the decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count

import jax
import jax.numpy as jnp

from chunkattn.models.linear import multiply, multiply_several, rms_norm
from chunkattn.models.packed import Weight, unpacked
from chunkattn.models.shards import ONE_DEVICE, Shards
from chunkattn.models.spec import CLASSES, EMBEDDING, HEAD, Attention, DecoderSpec, Mlp
from chunkattn.rope.rotary import apply_rotary, rotary_tables

Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]
"""Callback from `(layer, q [T, heads, d], k [T, kv_heads, d], v [T, kv_heads, d])` to `[T, heads, d]`."""


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
    def head(self) -> Weight:
        """Return the weight of the logits of a language model, `[vocab, hidden]`."""
        return self.weights[EMBEDDING if self.spec.tie_embeddings else HEAD]

    def __call__(self, token_ids: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """Return the hidden states after the final norm, float32 `[T, hidden]`.

        Args:
            token_ids: int32 `[T]` token ids.
            positions: int32 `[T]` position ids.
            attend: attention callback, called once per layer, in order.
        """
        rotaries = dict.fromkeys(layer.mixer.rotary for layer in self.spec.layers)
        tables = {rotary: None if rotary is None else rotary_tables(rotary, positions) for rotary in rotaries}
        x = self.shards.embed(self.weights[EMBEDDING], token_ids)
        if self.spec.embedding_scale != 1:
            x = x * jnp.asarray(self.spec.embedding_scale, self.dtype).astype(jnp.float32)
        for index, layer in enumerate(self.spec.layers):
            name, norms, rotary = f"model.layers.{index}.", layer.norms, tables[layer.mixer.rotary]
            mix = partial(self._attention, layer.mixer, name=f"{name}self_attn.", rotary=rotary, attend=partial(attend, index))
            feed = partial(self._mlp, layer.feed_forward, name=f"{name}mlp.")
            for half, before, after in (
                (mix, norms.before_mixer, norms.after_mixer),
                (feed, norms.before_feed_forward, norms.after_feed_forward),
            ):
                y = half(x if before is None else self._norm(x, f"{name}{before}"))
                y = y if after is None else self._norm(y, f"{name}{after}")
                x = x + (y if layer.residual_scale == 1 else y * layer.residual_scale)
        return self._norm(x, "model.norm")

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Return the logits of hidden states `[N, hidden]`: float32 `[N, vocab]`, or `[N, num_labels]` for a classifier.

        Args:
            hidden: float32 `[N, hidden]` states after the final norm.
        """
        if self.spec.num_labels is not None:
            return multiply(hidden, self.weights[CLASSES])
        logits = self.shards.gather(multiply(hidden, self.head), self.spec.vocab_size)
        if self.spec.logit_scale != 1:
            logits = logits * self.spec.logit_scale
        if (cap := self.spec.logit_cap) is not None:
            logits = jnp.tanh(logits / cap) * cap
        return logits

    def _attention(
        self,
        spec: Attention,
        x: jax.Array,
        name: str,
        rotary: tuple[jax.Array, jax.Array] | None,
        attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    ) -> jax.Array:
        """Return an attention layer's output, float32 `[T, hidden]`, from an input of the same shape and dtype."""
        parts = self._several(x, [f"{name}{part}_proj" for part in "qkv"])
        if spec.qk_norm == "whole":
            parts[:2] = self._norm(parts[0], f"{name}q_norm"), self._norm(parts[1], f"{name}k_norm")
        q, k, v = (part.reshape(len(x), -1, spec.head_dim) for part in parts)
        if spec.qk_norm == "head":
            q, k = self._norm(q, f"{name}q_norm"), self._norm(k, f"{name}k_norm")
        if rotary is not None:
            q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        out = attend(q.astype(self.dtype), k.astype(self.dtype), v.astype(self.dtype))
        return self._linear(out.reshape(len(x), -1), f"{name}o_proj", self.shards.total)

    def _mlp(self, spec: Mlp, x: jax.Array, name: str) -> jax.Array:
        """Return the output of a gated MLP (arXiv:2002.05202), float32 `[T, hidden]`, from such an input."""
        gate, up = self._several(x, [f"{name}gate_proj", f"{name}up_proj"])
        gate = jax.nn.silu(gate) if spec.activation == "silu" else jax.nn.gelu(gate, approximate=True)
        return self._linear(gate * up, f"{name}down_proj", self.shards.total)

    def _linear(self, x: jax.Array, name: str, total: Callable[[jax.Array], jax.Array] = lambda y: y) -> jax.Array:
        """Return float32 `[N, out]` from `[N, in]`; `total` adds up the products of devices that divide the inputs."""
        return self._biased(total(multiply(x, self.weights[f"{name}.weight"])), name)

    def _several(self, x: jax.Array, names: list[str]) -> list[jax.Array]:
        """Return `_linear` of one input for each of several modules."""
        products = multiply_several(x, [self.weights[f"{name}.weight"] for name in names])
        return [self._biased(y, name) for y, name in zip(products, names, strict=True)]

    def _biased(self, y: jax.Array, name: str) -> jax.Array:
        """Add the bias of a module to its products, if it has one."""
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + unpacked(bias).astype(jnp.float32)

    def _norm(self, x: jax.Array, name: str) -> jax.Array:
        weight = unpacked(self.weights[f"{name}.weight"])
        if self.spec.norm_offset:
            weight = weight.astype(jnp.float32) + self.spec.norm_offset
        return rms_norm(x, weight, self.spec.norm_eps)


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
