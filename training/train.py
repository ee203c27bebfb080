"""Train the demo model: `python -m training.train --out FOLDER`.

One sequence holds prefix, documents and questions (or query and items) under the chunk-isolated mask and shared positions,
from the first step on. Several consecutive questions over the same documents, and one label per item, make supervision
dense.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from transformers import AutoTokenizer, Qwen3Config

from chunkattn.layout import ChunkLayout
from chunkattn.models.decoder import Decoder, random_decoder
from chunkattn.models.spec import spec_from_config
from chunkattn.models.weights import save_weights
from chunkattn.rope.positions import make_layout
from training.tokenizer import train_tokenizer
from training.world import EOS, PREFIX, World

LABEL_WEIGHT = 4.0
"""Loss weight of an item's yes/no label, against 1.0 for a token of an answer: labels are few."""


class Batch(NamedTuple):
    """Padded sequences of length `L`. Padding rows see only themselves and carry no loss.

    Attributes:
        token_ids: int32 `[B, L]`.
        positions: int32 `[B, L]`.
        row_start: int32 `[B, L]`, first token a row sees beyond the prefix.
        prefix_len: int32 `[B]`, tokens of the prefix.
        targets: int32 `[B, L]`, next tokens.
        weights: float32 `[B, L]`, loss weights.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    row_start: np.ndarray
    prefix_len: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


class Stage(NamedTuple):
    """A stretch of the curriculum.

    Attributes:
        steps: training steps.
        length: padded length in tokens.
        documents: least and most documents of a world.
        most_facts: most facts of a document.
        questions: questions of a sequence.
        text_weight: loss weight of ordinary text. Early stages weigh text high, because names repeated within a document
            teach copying long before answers do.
    """

    steps: int
    length: int
    documents: tuple[int, int]
    most_facts: int
    questions: int
    text_weight: float


class Sampler:
    """A source of layouts with targets, made from random worlds."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.eos = self.tokenizer.convert_tokens_to_ids(EOS)
        self.yes, self.no = (self._ids(w)[0] for w in ("yes", "no"))
        self.world = World(seed, held_out=False)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def _reading(self, documents: int, stage: Stage) -> tuple[ChunkLayout, np.ndarray, np.ndarray]:
        reading = self.world.reading(documents, stage.questions, stage.most_facts)
        question: list[int] = []
        answers: list[tuple[int, int]] = []
        for asked in reading.questions:
            question += self._ids(asked.text)
            answers.append((len(question) - 1, len(question) + len(self._ids(asked.answer))))
            question += [*self._ids(asked.answer), self.eos]
        layout = make_layout(self._ids(PREFIX), [self._ids(d) for d in reading.documents], question)
        targets, weights = _next_tokens(layout, stage.text_weight)
        for start, end in answers:
            weights[layout.question_start + start : layout.question_start + end] = 1.0
        return layout, targets, weights

    def _judging(self, items: int, stage: Stage) -> tuple[ChunkLayout, np.ndarray, np.ndarray]:
        judging = self.world.judging(items, stage.most_facts)
        layout = make_layout(self._ids(judging.query), [self._ids(i) for i in judging.items], [])
        targets, weights = _next_tokens(layout, stage.text_weight)
        for segment, label in zip(layout.segments[1:], judging.labels, strict=False):
            targets[segment.end - 1] = self.yes if label else self.no
            weights[segment.end - 1] = LABEL_WEIGHT
        return layout, targets, weights

    def batch(self, size: int, stage: Stage) -> Batch:
        """Return `size` sequences, half reading and half judging, that fit the stage's length."""
        out = Batch(*(np.zeros((size, stage.length), d) for d in (np.int32,) * 3 + (np.int32, np.int32, np.float32)))
        out = out._replace(prefix_len=np.zeros(size, np.int32))
        out.row_start[:] = np.arange(stage.length)
        for i in range(size):
            make = self._reading if i % 2 else self._judging
            while True:
                layout, targets, weights = make(self.world.rng.randint(*stage.documents), stage)
                if len(layout) <= stage.length:
                    break
            t = len(layout)
            out.token_ids[i, :t], out.positions[i, :t] = layout.token_ids, layout.positions
            out.row_start[i, :t], out.prefix_len[i] = layout.row_start, layout.prefix_len
            out.targets[i, :t], out.weights[i, :t] = targets, weights
        return out


def _next_tokens(layout: ChunkLayout, weight: float) -> tuple[np.ndarray, np.ndarray]:
    """Return next-token targets within each part, weighted as text; the last token of a part has weight 0."""
    weights = np.full(len(layout), weight, np.float32)
    weights[[s.end - 1 for s in layout.segments if s.end > s.start]] = 0.0
    return np.roll(layout.token_ids, -1), weights


def loss_fn(model: Decoder, batch: Batch) -> jax.Array:
    """Return the weighted mean cross-entropy under the dense chunk-isolated mask."""
    size, length = batch.token_ids.shape
    i, k = jnp.arange(length)[:, None], jnp.arange(length)[None]
    prefix_end, row_start = batch.prefix_len[:, None, None], batch.row_start[:, :, None]
    mask = (k <= i) & ((k < prefix_end) | (k >= row_start))

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q, k, v = (x.reshape(size, length, *x.shape[1:]) for x in (q, k, v))
        out = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])
        return out.reshape(size * length, *out.shape[2:])

    hidden = model(batch.token_ids.reshape(-1), batch.positions.reshape(-1), attend)
    losses = optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), batch.targets.reshape(-1))
    weights = batch.weights.reshape(-1)
    return (losses * weights).sum() / weights.sum()


def demo_config(vocab_size: int) -> Qwen3Config:
    """Return the demo's architecture: Qwen3, because its per-head norms allow a high learning rate in a small model."""
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        rope_theta=10000.0,
        dtype="float32",
    )


CURRICULUM = (
    Stage(1500, 80, (1, 3), 3, 2, 0.5),
    Stage(1500, 160, (2, 6), 3, 4, 0.2),
    Stage(2000, 240, (2, 8), 3, 5, 0.05),
)


def batches(sampler: Sampler, batch_size: int, scale: float) -> Iterator[Batch]:
    """Yield the batches of the whole curriculum in order."""
    for stage in CURRICULUM:
        for _ in range(int(stage.steps * scale)):
            yield sampler.batch(batch_size, stage)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the curriculum's steps")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    train_tokenizer(args.out)
    sampler = Sampler(args.out, args.seed)
    config = demo_config(len(sampler.tokenizer))
    config.save_pretrained(args.out)
    spec = spec_from_config(config)
    dtype = jnp.dtype("float32")
    params = random_decoder(spec, dtype, args.seed).weights
    print(f"{sum(p.size for p in params.values()):,} parameters", flush=True)
    steps = sum(int(s.steps * args.scale) for s in CURRICULUM)
    schedule = optax.warmup_cosine_decay_schedule(0.0, args.learning_rate, 200, steps, args.learning_rate / 50)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.05))
    state = optimizer.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(lambda p: loss_fn(Decoder(spec, p, dtype), batch))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    began, losses = time.perf_counter(), []
    for number, batch in enumerate(batches(sampler, args.batch_size, args.scale), 1):
        params, state, loss = step(params, state, batch)
        losses.append(loss)
        if number % 50 == 0:
            mean = float(jnp.stack(losses).mean())
            seconds = round(time.perf_counter() - began)
            print(json.dumps({"step": number, "of": steps, "loss": round(mean, 4), "s": seconds}), flush=True)
            losses = []
        if number % 500 == 0 or number == steps:
            save_weights(Decoder(spec, params, dtype), args.out)


if __name__ == "__main__":
    main()
