"""Measure the error of packed weights and integer activations in a real model's log-probabilities.

    python -m benchmarks.packed_accuracy SmolLM2-135M-Instruct.Q4_1.gguf README.md docs/guides/rag.md

The benchmark compares the log-probabilities of every token of the vocabulary, at the first positions of some texts, with those
of float32 on dequantised weights. Decoders run without an engine, under plain causal attention. The command writes the
dequantised model to a temporary folder, to round it as an ordinary checkpoint.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from chunkattn.config import EngineConfig
from chunkattn.models.decoder import Decoder
from chunkattn.models.gguf_file import open_gguf
from chunkattn.models.gguf_spec import config_from_gguf
from chunkattn.models.loader import load_model_tokenizer, open_files
from chunkattn.models.packing import Packing
from chunkattn.models.weights import save_weights
from chunkattn.terminal.progress import say


def load(model: Path, dtype: str, packing: Packing | None = None) -> Decoder:
    """Return a decoder of a model under a packing."""
    return open_files(EngineConfig(model=str(model), dtype=dtype, skip_tokenizer_init=True)).load(packing=packing)


def logprobs(decoder: Decoder, texts: list[list[int]]) -> np.ndarray:
    """Return log-probabilities at all positions of texts, float64 `[positions, vocab]`."""

    def attend(_: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones((len(q), len(q)), bool)), scores, -jnp.inf)
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v).astype(decoder.dtype)

    run = jax.jit(lambda ids: jax.nn.log_softmax(decoder.logits(decoder(ids, jnp.arange(len(ids)), attend))))
    with jax.default_matmul_precision("highest"):
        return np.concatenate([np.asarray(run(jnp.asarray(ids)), np.float64) for ids in texts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("texts", type=Path, nargs="+", help="text files")
    parser.add_argument("--tokens", type=int, default=128, help="positions of each text")
    args = parser.parse_args()
    tokenizer = load_model_tokenizer(args.model)
    texts = [tokenizer(text.read_text(), add_special_tokens=False).input_ids[: args.tokens] for text in args.texts]
    plain = load(args.model, "float32")
    exact = logprobs(plain, texts)
    with tempfile.TemporaryDirectory() as folder:
        config_from_gguf(open_gguf(args.model)).save_pretrained(folder)
        save_weights(plain, Path(folder))
        cases = {
            "dequantized, bfloat16": load(args.model, "bfloat16"),
            "packed int16, float32": load(args.model, "float32", Packing()),
            "packed int16, bfloat16": load(args.model, "bfloat16", Packing()),
            "packed int8, bfloat16": load(args.model, "bfloat16", Packing(digits=1)),
            "rounded int16, bfloat16": load(Path(folder), "bfloat16", Packing(rounds=True)),
            "rounded int8, bfloat16": load(Path(folder), "bfloat16", Packing(digits=1, rounds=True)),
        }
    print(f"{len(exact)} positions of {len(texts)} texts\n{'':26}{'mean':>9}{'largest':>9}{'KL':>10}{'same first token':>18}")
    for name, decoder in cases.items():
        say(name)
        found = logprobs(decoder, texts)
        difference, same = np.abs(found - exact), (found.argmax(-1) == exact.argmax(-1)).mean()
        divergence = (np.exp(exact) * (exact - found)).sum(-1).mean()
        print(f"{name:26}{difference.mean():9.4f}{difference.max():9.3f}{divergence:10.1e}{same:18.1%}", flush=True)


if __name__ == "__main__":
    main()
