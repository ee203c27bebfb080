"""The shape of a decoder: what each layer computes, and the parameters that it has."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from chunkattn.errors import ModelError
from chunkattn.models.mixers import Attention, GatedDeltaNet, Shapes, linear_shapes

Fused = tuple[tuple[str, tuple[str, ...]], ...]
"""Modules of a layer as checkpoints store them, each with the modules whose rows it holds one after another."""

EXPERTS = "experts"
"""Part of the names of the experts' parameters, in checkpoints before the number of an expert."""
ROUTERS = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")
"""Ends of the names of small matrices that decide about experts, which are never packed."""
TRANSPOSED = "transposed"
"""Last part of the names of stacked weights whose inputs come first, in place of `weight`."""
_INPUTS_FIRST = ("tpu",)
"""Platforms that multiply stacked weights with their inputs first, and would transpose others at each call."""
EMBEDDING, HEAD, CLASSES = "model.embed_tokens.weight", "lm_head.weight", "score.weight"
"""Names of the embedding, of a language model's head and of a classifier's, in Hugging Face checkpoints."""


@dataclass(frozen=True)
class Norms:
    """Norms around the two halves of a layer: names of each half's norm before it and after it, None for none."""

    before_mixer: str | None
    after_mixer: str | None
    before_feed_forward: str | None
    after_feed_forward: str | None

    @property
    def names(self) -> list[str]:
        """Return the names that there are."""
        names = self.before_mixer, self.after_mixer, self.before_feed_forward, self.after_feed_forward
        return [name for name in names if name is not None]


BEFORE = Norms("input_layernorm", None, "post_attention_layernorm", None)
"""Norms of what the two halves read, as in Llama."""
AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
"""Norms of what the two halves return, as in OLMo 2."""
AROUND = Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
"""Norms of both, as in Gemma 3."""


@dataclass(frozen=True)
class Mlp:
    """Gated MLP of a layer: SwiGLU or GEGLU, arXiv:2002.05202.

    Attributes:
        size: width.
        bias: whether the projections have biases.
        activation: function of the gate.
    """

    size: int
    bias: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"

    def parameters(self, hidden: int) -> Shapes:
        """Return the shapes of the layer's MLP.

        Args:
            hidden: width of the residual stream.
        """
        return self.named("mlp.", hidden)

    def named(self, prefix: str, hidden: int) -> Shapes:
        """Return the shapes of an MLP under another prefix than `mlp.`."""
        inward, outward = (self.size, hidden, self.bias), (hidden, self.size, self.bias)
        return linear_shapes(prefix, {"gate_proj": inward, "up_proj": inward, "down_proj": outward})

    @property
    def readers(self) -> list[str]:
        """Return the parameters that multiply the layer's input."""
        return ["mlp.gate_proj.weight", "mlp.up_proj.weight"]

    @property
    def columns(self) -> dict[int, str]:
        """Return the widths that devices divide, with their meaning."""
        return {self.size: "columns of the MLP"}


@dataclass(frozen=True)
class Experts:
    """Mixture of gated MLPs of a layer, of which a router picks some for every row (arXiv:1701.06538).

    A softmax over the logits of the picked experts alone is a softmax over all of them whose picked factors are normalised.

    Attributes:
        count: number of experts.
        used: experts of a row.
        size: width of an expert.
        is_normalised: whether the factors of a row's experts, a softmax over all, are divided by their sum.
        shared: MLP of all rows, whose output is added; None for none.
        gates_shared: whether the shared MLP's output is multiplied by the sigmoid of a product of the row.
        inputs_first: whether the weights are stored `[experts, in, out]`, as TPUs multiply them, instead of
            `[experts, out, in]`.
    """

    count: int
    used: int
    size: int
    is_normalised: bool = True
    shared: Mlp | None = None
    gates_shared: bool = False
    inputs_first: bool = False

    @property
    def leaf(self) -> str:
        """Return the last part of the names of the experts' parameters."""
        return TRANSPOSED if self.inputs_first else "weight"

    def parameters(self, hidden: int) -> Shapes:
        """Return the shapes of the router, and of the experts' stacked weights, `[experts, out, in]`.

        Args:
            hidden: width of the residual stream.
        """
        inward, outward = (self.size, hidden), (hidden, self.size)
        if self.inputs_first:
            inward, outward = outward, inward
        shapes: Shapes = {ROUTERS[0]: (self.count, hidden)}
        for part, shape in (("gate", inward), ("up", inward), ("down", outward)):
            shapes[f"mlp.{EXPERTS}.{part}_proj.{self.leaf}"] = (self.count, *shape)
        if self.shared is not None:
            shapes |= self.shared.named("mlp.shared_expert.", hidden)
        if self.gates_shared:
            shapes[ROUTERS[1]] = (1, hidden)
        return shapes

    @property
    def readers(self) -> list[str]:
        """Return the parameters that multiply the layer's input."""
        parts = [f"mlp.{EXPERTS}.gate_proj.{self.leaf}", f"mlp.{EXPERTS}.up_proj.{self.leaf}"]
        shared = ["mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"]
        return [ROUTERS[0], *parts, *(shared if self.shared is not None else [])]

    @property
    def columns(self) -> dict[int, str]:
        """Return the widths that devices divide, with their meaning."""
        shared = {} if self.shared is None else {self.shared.size: "columns of the shared expert"}
        return {self.size: "columns of an expert"} | shared


@dataclass(frozen=True)
class LayerSpec:
    """A layer: a mixer, which reads other tokens, and a feed-forward, which reads its own.

    Attributes:
        mixer: the mixer.
        feed_forward: the MLP of the feed-forward; None for a layer with experts alone.
        norms: norms around both halves.
        residual_scale: factor of what both halves add to the residual stream.
        experts: experts of the feed-forward, whose output is added to the MLP's; None for none.
    """

    mixer: Attention | GatedDeltaNet
    feed_forward: Mlp | None
    norms: Norms = BEFORE
    residual_scale: float = 1.0
    experts: Experts | None = None

    @property
    def feed_forwards(self) -> list[Mlp | Experts]:
        """Return the parts of the feed-forward."""
        return [part for part in (self.feed_forward, self.experts) if part is not None]

    @property
    def columns(self) -> dict[int, str]:
        """Return the widths of the feed-forward, which devices divide, with their meaning."""
        return {width: what for part in self.feed_forwards for width, what in part.columns.items()}

    def with_attention(self, **changes: Any) -> LayerSpec:
        """Return the layer with changed attributes of its attention; a recurrent layer as it is."""
        return replace(self, mixer=replace(self.mixer, **changes)) if isinstance(self.mixer, Attention) else self

    def parameters(self, hidden: int) -> Shapes:
        """Return the shapes of the layer's parameters.

        Args:
            hidden: width of the residual stream.
        """
        norms: Shapes = {f"{name}.weight": (hidden,) for name in self.norms.names}
        shapes = norms | self.mixer.parameters(hidden)
        for part in self.feed_forwards:
            shapes |= part.parameters(hidden)
        return shapes

    def row_products(self, hidden: int) -> int:
        """Return the products of a row with the layer's matrices; of experts, those of a row's own count.

        Args:
            hidden: width of the residual stream.
        """
        used = 0 if self.experts is None else self.experts.used
        shapes = self.parameters(hidden).values()
        return sum(math.prod(shape[-2:]) * (used if len(shape) == 3 else 1) for shape in shapes if len(shape) > 1)


@dataclass(frozen=True)
class DecoderSpec:
    """Shape of one decoder; sizes are in elements.

    Attributes:
        architecture: name of the Hugging Face class.
        vocab_size: number of token ids.
        hidden_size: width of the residual stream.
        layers: the layers, in order.
        norm_eps: epsilon of the RMS norms.
        tie_embeddings: whether the language model's head is the embedding.
        max_model_len: number of positions that the checkpoint supports.
        num_labels: number of classes of a sequence classifier; None for a language model.
        norm_offset: number added to the weights of norms.
        embedding_scale: factor of the embeddings, rounded to the dtype of the parameters.
        logit_scale: factor of a language model's logits.
        logit_cap: bound of a language model's logits, which a tanh reaches slowly; None for none.
        fused: modules that checkpoints store as one tensor, or under another name.
        interleaved: modules of `fused` that hold the rows of their parts in turn, each with the number of turns.
        is_nested: whether checkpoints hold the decoder as the language part of a multimodal model.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    tie_embeddings: bool
    max_model_len: int
    num_labels: int | None
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    fused: Fused = ()
    interleaved: tuple[tuple[str, int], ...] = ()
    is_nested: bool = False

    @property
    def num_layers(self) -> int:
        """Return the number of layers."""
        return len(self.layers)

    @property
    def attention(self) -> dict[int, Attention]:
        """Return the mixers of the layers with attention, by index."""
        return {index: layer.mixer for index, layer in enumerate(self.layers) if isinstance(layer.mixer, Attention)}

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Return the indices of the layers with attention."""
        return tuple(self.attention)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Return the indices of the recurrent layers."""
        return tuple(index for index, layer in enumerate(self.layers) if isinstance(layer.mixer, GatedDeltaNet))

    @property
    def recurrent(self) -> GatedDeltaNet | None:
        """Return the mixer that all recurrent layers share; None if there are none.

        Raises:
            ModelError: recurrent layers differ.
        """
        mixers = {layer.mixer for layer in self.layers if isinstance(layer.mixer, GatedDeltaNet)}
        if len(mixers) > 1:
            raise ModelError(f"{self.architecture}: recurrent layers of different sizes are not supported")
        return next(iter(mixers), None)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the sliding window of each layer with attention in tokens; None for full attention."""
        return tuple(mixer.window for mixer in self.attention.values())

    @property
    def sliding_window(self) -> int | None:
        """Return the checkpoint's sliding window in tokens, or None if no layer has a sliding window."""
        return next((w for w in self.windows if w is not None), None)

    @property
    def has_plain_logits(self) -> bool:
        """Return whether the logits are the products with the head, as they are."""
        return self.logit_scale == 1 and self.logit_cap is None

    @property
    def heads(self) -> tuple[int, int, int]:
        """Return `Attention.heads`, which are the same in all layers; without attention, those of the recurrent layers."""
        (heads,) = {mixer.heads for mixer in self.attention.values()} or {layer.mixer.heads for layer in self.layers}
        return heads

    def stored_module(self, module: str) -> str:
        """Return the module as which checkpoints store a module.

        Args:
            module: name of the module, such as `model.layers.0.mlp.up_proj`.
        """
        for stored, parts in self.fused:
            for part in parts:
                if module.endswith(f".{part}"):
                    return module.removesuffix(part) + stored
        return module

    def map(self, change: Callable[[LayerSpec], LayerSpec]) -> DecoderSpec:
        """Return the decoder with changed layers.

        Args:
            change: returns the new layer in place of one.
        """
        return replace(self, layers=tuple(map(change, self.layers)))

    def stored_for(self, platform: str) -> DecoderSpec:
        """Return the decoder with its experts' weights as a platform multiplies them.

        Args:
            platform: JAX's name of the platform.
        """
        if platform not in _INPUTS_FIRST:
            return self
        return self.map(lambda layer: replace(layer, experts=layer.experts and replace(layer.experts, inputs_first=True)))

    def parameters(self) -> Shapes:
        """Return the shape of every parameter by its name in checkpoints, `[out, in]` for a matrix."""
        shapes: Shapes = {EMBEDDING: (self.vocab_size, self.hidden_size)}
        for index, layer in enumerate(self.layers):
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.parameters(self.hidden_size).items()}
        shapes["model.norm.weight"] = (self.hidden_size,)
        if self.num_labels is not None:
            shapes[CLASSES] = (self.num_labels, self.hidden_size)
        elif not self.tie_embeddings:
            shapes[HEAD] = (self.vocab_size, self.hidden_size)
        return shapes
