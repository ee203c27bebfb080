"""The decoder: pre-norm transformer with grouped-query attention or Gated DeltaNet, and a gated MLP.

The decoder works on a flat list of tokens `[T]` from any number of sequences. Attention and recurrence are callbacks, so the
paged engine and the training of the demo model share the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np

from chunkattn.backends.base import HeadInputs
from chunkattn.backends.recurrence import Inputs
from chunkattn.models.adapter_slots import RowAdapters
from chunkattn.models.experts import mix, route
from chunkattn.models.joined import joined_name, multiplied
from chunkattn.models.linear import add_rms_norm, gated, multiply, multiply_rounded, multiply_several, rms_norm, rows_dtype
from chunkattn.models.mixers import EXACT, RECURRENT, Attention, GatedDeltaNet, QueryGrowth
from chunkattn.models.packed import Weight, unpacked
from chunkattn.models.shards import ONE_DEVICE, Shards
from chunkattn.models.spec import (
    CLASSES,
    EMBEDDING,
    EXPERTS,
    HEAD,
    TRANSPOSED,
    DecoderSpec,
    Experts,
    LayerSpec,
    Mlp,
)
from chunkattn.rope.positions import PADDING
from chunkattn.rope.rotary import apply_rotary, rotary_tables

Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]
"""Callback from `(layer, q [T, heads, d], k [T, kv_heads, d], v [T, kv_heads, d])` to `[T, heads, d]`."""
AttendInputs = Callable[[int, HeadInputs], jax.Array]
"""As `Attend`, with heads that the callback itself normalises and rotates."""
Recur = Callable[[int, Inputs], jax.Array]
"""Callback from `(layer, inputs)` of a recurrent layer to float32 `[T, Hv, dv]`, before the gated norm."""
_GATES = ("gate", "up")


@dataclass(frozen=True)
class Decoder:
    """Causal language model or sequence classifier of any supported family.

    Attributes:
        spec: shape of the decoder.
        weights: parameters by the names of `DecoderSpec.parameters`, packed or of dtype `dtype`. Those of some modules may be
            joined, see `Joined`. Each layer has arrays of its own instead of a slice for a scan: XLA:CPU copies the slice of
            a stacked bf16 weight at every use.
        dtype: dtype of parameters, activations and KV. Rows stay float32 until a packed parameter multiplies them.
        shards: devices that share the parameters. On several, the methods run inside `Shards.map`, on one device's part.
        adapters: adapters of the rows of one step; None for none.
    """

    spec: DecoderSpec
    weights: dict[str, Weight]
    dtype: jnp.dtype
    shards: Shards = ONE_DEVICE
    adapters: RowAdapters | None = None

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
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        attend: Attend,
        attend_inputs: AttendInputs | None = None,
        recur: Recur | None = None,
    ) -> jax.Array:
        """Return the hidden states after the final norm, float32 `[T, hidden]`.

        Args:
            token_ids: int32 `[T]` token ids.
            positions: int32 `[T]` position ids; `PADDING` for a row without a token, whose result has no meaning.
            attend: attention callback, called once per layer with attention, in order.
            attend_inputs: callback to call instead, or None.
            recur: callback called once per recurrent layer, in order; a decoder without such layers needs none.
        """
        mixers = self.spec.attention.values()
        rotaries = dict.fromkeys(mixer.rotary for mixer in mixers)
        tables = {rotary: None if rotary is None else rotary_tables(rotary, positions) for rotary in rotaries}
        kinds = dict.fromkeys(mixer.growth for mixer in mixers)
        growths = {growth: None if growth is None else self._query_factors(growth, positions) for growth in kinds}
        x, added = self.shards.embed(self.weights[EMBEDDING], token_ids), None
        if self.spec.embedding_scale != 1:
            x = x * jnp.asarray(self.spec.embedding_scale, self.dtype).astype(jnp.float32)
        for index, layer in enumerate(self.spec.layers):
            name, norms, mixer = f"model.layers.{index}.", layer.norms, layer.mixer
            x, normed = self._add_norm(x, added, name, norms.before_mixer, mixer.readers)
            if isinstance(mixer, GatedDeltaNet):
                assert recur is not None, "a recurrent layer needs the callback"
                out = self._recurrent(partial(recur, index), normed, f"{name}{RECURRENT}")
            else:
                prepare, growth = attend_inputs and partial(attend_inputs, index), growths[mixer.growth]
                out = self._attention(
                    mixer, normed, f"{name}self_attn.", tables[mixer.rotary], growth, partial(attend, index), prepare
                )
            added = self._after(layer, out, name, norms.after_mixer)
            readers = [reader for part in layer.feed_forwards for reader in part.readers]
            x, normed = self._add_norm(x, added, name, norms.before_feed_forward, readers)
            out = self._feed_forward(layer, normed, f"{name}mlp.", positions != PADDING)
            added = self._after(layer, out, name, norms.after_feed_forward)
        return self._add_norm(x, added, "model.", "norm", [])[1]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Return the logits of hidden states `[N, hidden]`: float32 `[N, vocab]`, or `[N, num_labels]` for a classifier.

        Args:
            hidden: float32 `[N, hidden]` states after the final norm.
        """
        if self.spec.num_labels is not None:
            return multiply(hidden, self.head)
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
        growth: jax.Array | None,
        attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
        attend_inputs: Callable[[HeadInputs], jax.Array] | None,
    ) -> jax.Array:
        """Return the output of an attention layer, float32 `[T, hidden]`, from an input `[T, hidden]`."""
        q, k, v, gate = self._heads(spec, x, name)
        if attend_inputs is not None and rotary is not None and spec.is_plain:
            scales, rounded = self._scales(spec, name), self._are_rounded(spec, name)
            out = attend_inputs(HeadInputs(q, k, v, *scales, *rotary, self.spec.norm_eps, self.dtype, rounded))
        else:
            out = attend(*self._prepared(spec, name, q, k, v, rotary, growth))
        if gate is not None:
            out = out.astype(jnp.float32) * jax.nn.sigmoid(gate)
        return self._linear(out.reshape(len(x), -1), f"{name}o_proj", self.shards.total)

    def _recurrent(self, recur: Callable[[Inputs], jax.Array], x: jax.Array, name: str) -> jax.Array:
        """Return the output of a recurrent layer, float32 `[T, hidden]`, from an input `[T, hidden]`."""
        q, k, v, z, b, a = self._several(x, [f"{name}in_proj_{part}" for part in "qkvzba"])
        small = (f"{name}{part}" for part in ("conv_q.weight", "conv_k.weight", "conv_v.weight", "A_log", "dt_bias"))
        out = recur(Inputs(q, k, v, b, a, *(unpacked(self.weights[part]).astype(jnp.float32) for part in small)))
        normed = rms_norm(out, unpacked(self.weights[f"{name}norm.weight"]), self.spec.norm_eps).reshape(z.shape)
        product = gated(z, normed, self._dtype_into([f"{name}out_proj.weight"]))
        return self._linear(product, f"{name}out_proj", self.shards.total)

    def _heads(self, spec: Attention, x: jax.Array, name: str) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Return queries, keys, values and output gates, float32 `[T, heads, d]`, from the input `[T, hidden]` of a layer."""
        q, k, v = self._several(x, [f"{name}{part}_proj" for part in "qkv"])
        gate = None
        if spec.output_gate:
            q, gate = jnp.split(q.reshape(len(x), -1, 2 * spec.head_dim), 2, axis=-1)
            q = q.reshape(len(x), -1)
        if spec.qk_norm == "whole":
            q, k = (self._norm(y, f"{name}{part}_norm") for y, part in ((q, "q"), (k, "k")))
        q, k, v = (product.reshape(len(x), -1, spec.head_dim) for product in (q, k, v))
        return q, k, v, gate

    def _are_rounded(self, spec: Attention, name: str) -> bool:
        """Return whether `_heads` returns values of the model's dtype alone: those of `multiply_rounded`."""
        joined = self.weights.get(joined_name([f"{name}{part}_proj" for part in "qkv"]))
        changed = spec.qkv_bias or spec.qk_norm == "whole" or self.adapters is not None
        return joined is not None and not changed and self.dtype == jnp.bfloat16 == unpacked(joined).dtype

    def _scales(self, spec: Attention, name: str) -> tuple[jax.Array | None, jax.Array | None]:
        """Return the factors of the norms of each query and key head, if there are such norms."""
        if spec.qk_norm != "head":
            return None, None
        return self._scale(f"{name}q_norm"), self._scale(f"{name}k_norm")

    def _prepared(
        self,
        spec: Attention,
        name: str,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        rotary: tuple[jax.Array, jax.Array] | None,
        growth: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries, keys and values, normalised and rotated, in the model's dtype."""
        q_scale, k_scale = self._scales(spec, name)
        if q_scale is not None and k_scale is not None:
            q, k = (rms_norm(x, scale, self.spec.norm_eps) for x, scale in ((q, q_scale), (k, k_scale)))
        if rotary is not None:
            q, k = (apply_rotary(x, *rotary) for x in (q, k))
        if growth is not None:
            q = q * growth
        return q.astype(self.dtype), k.astype(self.dtype), v.astype(self.dtype)

    def _query_factors(self, growth: QueryGrowth, positions: jax.Array) -> jax.Array:
        """Return the factors of queries at positions `[T]`, float32 `[T, 1, 1]`."""
        # A table has the same bits for any number of rows, whatever the compiler makes of a logarithm.
        steps = np.arange(self.spec.max_model_len // growth.period + 1, dtype=np.float32)
        table = jnp.asarray(1 + np.float32(growth.beta) * np.log(1 + steps))
        return jnp.take(table, positions // growth.period, mode="clip")[:, None, None]

    def _feed_forward(self, layer: LayerSpec, x: jax.Array, name: str, is_used: jax.Array) -> jax.Array:
        """Return the output of a layer's feed-forward, float32 `[T, hidden]`, from an input `[T, hidden]`.

        Args:
            layer: shape of the layer.
            x: normalised rows.
            name: beginning of the names of the feed-forward's parameters.
            is_used: bool `[T]`, whether a row has a token. Other rows have no experts.
        """
        parts = [] if layer.feed_forward is None else [self._mlp(layer.feed_forward, x, name, self.shards.total)]
        if layer.experts is not None:
            parts.append(self._experts(layer.experts, x, name, is_used))
        return sum(parts[1:], parts[0])

    def _experts(self, spec: Experts, x: jax.Array, name: str, is_used: jax.Array) -> jax.Array:
        """Return the output of a layer's experts; see `_feed_forward`."""
        chosen, factors = route(multiply(x, self.weights[f"{name}gate.weight"]), spec)
        gate, up, down = (self.weights[f"{name}{EXPERTS}.{part}_proj.{spec.leaf}"] for part in ("gate", "up", "down"))
        chosen = jnp.where(is_used[:, None], chosen, spec.count)
        out = mix(x, chosen, factors, gate, up, down, spec, self.dtype)
        if spec.shared is not None:
            shared = self._mlp(spec.shared, x, f"{name}shared_expert.", lambda y: y)
            if spec.gates_shared:
                shared = shared * jax.nn.sigmoid(multiply(x, self.weights[f"{name}shared_expert_gate.weight"]))
            out = out + shared
        return self.shards.total(out)

    def _mlp(self, spec: Mlp, x: jax.Array, name: str, total: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Return the output of a gated MLP (arXiv:2002.05202); see `_feed_forward` and `_linear`."""
        gate, up = self._several(x, [f"{name}{part}_proj" for part in _GATES])
        if spec.activation == "silu":
            product = gated(gate, up, self._dtype_into([f"{name}down_proj.weight"]))
        else:
            product = jax.nn.gelu(gate, approximate=True) * up
        return self._linear(product, f"{name}down_proj", total)

    def _several(self, x: jax.Array, names: Sequence[str]) -> list[jax.Array]:
        """Return float32 `[N, out]` for each name, from one input `[N, in]`."""
        joined = joined_name(names)
        if joined in self.weights:
            product = (multiply if RECURRENT in joined else multiply_rounded)(x, unpacked(self.weights[joined]))
            products = multiplied(product, joined, self.spec, self.shards)
        else:
            products = multiply_several(x, [self.weights[f"{name}.weight"] for name in names])
        if self.adapters is not None:
            products = self.adapters.add(products, x, names)
        return [self._biased(product, name) for product, name in zip(products, names, strict=True)]

    def _linear(self, x: jax.Array, name: str, total: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Return float32 `[N, out]` from `[N, in]`; `total` adds up the products of devices that divide the inputs."""
        product = multiply(x, self.weights[f"{name}.weight"])
        if self.adapters is not None:
            (product,) = self.adapters.add([product], x, [name])
        return self._biased(total(product), name)

    def _biased(self, y: jax.Array, name: str) -> jax.Array:
        """Add the bias of a module to its products, if it has one."""
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + unpacked(bias).astype(jnp.float32)

    def _dtype_into(self, names: Sequence[str]) -> jnp.dtype:
        """Return the dtype of rows that parameters multiply; float32 if there is no parameter."""
        weights = [self.weights[name] for name in names if name in self.weights]  # joined weights are not packed
        return rows_dtype(weights, self.dtype if names else jnp.dtype("float32"))

    def _scale(self, name: str) -> jax.Array:
        """Return the factors of a norm."""
        weight = unpacked(self.weights[f"{name}.weight"])
        return weight.astype(jnp.float32) + self.spec.norm_offset if self.spec.norm_offset else weight

    def _norm(self, x: jax.Array, name: str) -> jax.Array:
        return rms_norm(x, self._scale(name), self.spec.norm_eps)

    def _after(self, layer: LayerSpec, y: jax.Array, name: str, norm: str | None) -> jax.Array:
        """Return what a half of a layer adds to the residual stream, from its output float32 `[T, hidden]`."""
        y = y if norm is None else self._norm(y, f"{name}{norm}")
        return y if layer.residual_scale == 1 else y * layer.residual_scale

    def _add_norm(
        self, x: jax.Array, added: jax.Array | None, name: str, norm: str | None, readers: Sequence[str]
    ) -> tuple[jax.Array, jax.Array]:
        """Return `x` plus what a layer adds, float32 `[N, hidden]`, and its norm, for the modules that multiply it."""
        if norm is None:
            x = x if added is None else x + added
            return x, x
        dtype = self._dtype_into([f"{name}{reader}" for reader in readers])
        scale, epsilon = self._scale(f"{name}{norm}"), self.spec.norm_eps
        return (x, rms_norm(x, scale, epsilon, dtype)) if added is None else add_rms_norm(x, added, scale, epsilon, dtype)


def random_decoder(spec: DecoderSpec, dtype: jnp.dtype, seed: int = 0) -> Decoder:
    """Return a decoder with random matrices, norms of ones, and biases of zeros. States of recurrent layers decay slowly.

    Args:
        spec: shape of the decoder.
        dtype: dtype of the parameters.
        seed: seed of the matrices.
    """
    spec = spec.stored_for(jax.default_backend())
    key, numbers, weights = jax.random.key(seed), count(), dict[str, Weight]()
    embedding = jax.nn.initializers.normal(spec.hidden_size**-0.5)
    linear = jax.nn.initializers.lecun_normal(in_axis=1, out_axis=0)
    experts = jax.nn.initializers.lecun_normal(in_axis=2, out_axis=1, batch_axis=0)
    transposed = jax.nn.initializers.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)
    for name, shape in spec.parameters().items():
        if name.endswith(EXACT):
            weights[name] = _decays(name, shape[0])
        elif len(shape) == 1:
            weights[name] = jnp.full(shape, 0 if name.endswith(".bias") else 1, dtype)
        else:
            draw = embedding if name == EMBEDDING else linear if len(shape) == 2 else experts
            draw = transposed if name.endswith(TRANSPOSED) else draw
            weights[name] = draw(jax.random.fold_in(key, next(numbers)), shape, dtype)
    return Decoder(spec, weights, dtype)


def _decays(name: str, heads: int) -> jax.Array:
    """Return a parameter of the decays of recurrent layers, float32 `[heads]`, as Mamba 2 starts (arXiv:2405.21060)."""
    if name.endswith("A_log"):
        return jnp.log(jnp.linspace(1, 16, heads, dtype=jnp.float32))
    return jnp.log(jnp.expm1(jnp.geomspace(1e-3, 1e-1, heads, dtype=jnp.float32)))
