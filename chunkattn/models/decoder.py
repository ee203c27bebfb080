"""The decoder: pre-norm transformer with grouped-query attention and a gated MLP.

The decoder works on a flat list of tokens `[T]` from any number of sequences. Attention is a callback, so the paged engine
and the training of the demo model share the module.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from chunkattn.models.linear import Linear, RMSNorm, multiply
from chunkattn.models.spec import DecoderSpec
from chunkattn.rope.rotary import apply_rotary, rotary_tables

Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]
"""Callback from `(layer, q [T, heads, d], k [T, kv_heads, d], v [T, kv_heads, d])` to `[T, heads, d]`."""


class Attention(nnx.Module):
    """Attention layer: projections, optional per-head norms and RoPE around the `attend` callback."""

    def __init__(self, spec: DecoderSpec, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = Linear(spec.hidden_size, q_size, spec.qkv_bias, dtype, rngs)
        self.k_proj = Linear(spec.hidden_size, kv_size, spec.qkv_bias, dtype, rngs)
        self.v_proj = Linear(spec.hidden_size, kv_size, spec.qkv_bias, dtype, rngs)
        self.o_proj = Linear(q_size, spec.hidden_size, spec.o_bias, dtype, rngs)
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps, dtype)
            self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps, dtype)
        self.head_dim, self.qk_norm, self.dtype = spec.head_dim, spec.qk_norm, dtype

    def __call__(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    ) -> jax.Array:
        """Return the layer's output, float32 `[T, hidden]`.

        Args:
            x: float32 `[T, hidden]`.
            cos: float32 `[T, 1, head_dim / 2]`.
            sin: float32 `[T, 1, head_dim / 2]`.
            attend: attention callback with the layer bound: `(q, k, v)` to `[T, heads, d]`.
        """
        q, k, v = (p(x).reshape(len(x), -1, self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        out = attend(q.astype(self.dtype), k.astype(self.dtype), v.astype(self.dtype))
        return self.o_proj(out.reshape(len(x), -1))


class MLP(nnx.Module):
    """SwiGLU layer (arXiv:2002.05202)."""

    def __init__(self, spec: DecoderSpec, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.gate_proj = Linear(spec.hidden_size, spec.intermediate_size, spec.mlp_bias, dtype, rngs)
        self.up_proj = Linear(spec.hidden_size, spec.intermediate_size, spec.mlp_bias, dtype, rngs)
        self.down_proj = Linear(spec.intermediate_size, spec.hidden_size, spec.mlp_bias, dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the layer's output, float32 `[T, hidden]`, from an input of the same shape and dtype."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nnx.Module):
    """Transformer layer: attention and MLP, each after a norm, each added to the float32 residual stream."""

    def __init__(self, spec: DecoderSpec, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps, dtype)
        self.self_attn = Attention(spec, dtype, rngs)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps, dtype)
        self.mlp = MLP(spec, dtype, rngs)

    def __call__(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    ) -> jax.Array:
        """Return the residual stream after the layer, float32 `[T, hidden]`; see `Attention` for the arguments."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nnx.Module):
    """Causal language model or sequence classifier of any supported family; parameter names follow the checkpoints."""

    def __init__(self, spec: DecoderSpec, dtype: jnp.dtype = jnp.float32, *, rngs: nnx.Rngs) -> None:
        self.spec, self.dtype = spec, jnp.dtype(dtype)
        self.embed_tokens = nnx.Embed(
            spec.vocab_size,
            spec.hidden_size,
            param_dtype=dtype,
            embedding_init=nnx.initializers.normal(spec.hidden_size**-0.5),
            rngs=rngs,
        )
        # One array per layer instead of a stacked scan: XLA:CPU copies the slice of a stacked bf16 weight at every use.
        self.layers = nnx.List([DecoderLayer(spec, dtype, rngs) for _ in range(spec.num_layers)])
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, dtype)
        if spec.num_labels is not None:
            self.score = Linear(spec.hidden_size, spec.num_labels, False, dtype, rngs)
        elif not spec.tie_embeddings:
            self.lm_head = Linear(spec.hidden_size, spec.vocab_size, False, dtype, rngs)

    def __call__(self, token_ids: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """Return the hidden states after the final norm, float32 `[T, hidden]`.

        Args:
            token_ids: int32 `[T]` token ids.
            positions: int32 `[T]` position ids.
            attend: attention callback, called once per layer, in order.
        """
        cos, sin = rotary_tables(self.spec.rotary, positions)
        x = self.embed_tokens(token_ids).astype(jnp.float32)
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, partial(attend, index))
        return self.norm(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Return the logits of hidden states `[N, hidden]`: float32 `[N, vocab]`, or `[N, num_labels]` for a classifier.

        Args:
            hidden: float32 `[N, hidden]` states after the final norm.
        """
        if self.spec.num_labels is not None:
            return self.score(hidden)
        if not self.spec.tie_embeddings:
            return self.lm_head(hidden)
        return multiply(hidden, self.embed_tokens.embedding[...])
