"""Measure the temporary memory of one attention call against the length of the prompt.

    python -m benchmarks.attention_memory

The figures come from XLA's memory analysis of the compiled call, for plain causal and chunked prompts. Memory is linear
for `xla`, and quadratic for `reference` and for `packed_dense`, which also gets a mask.
"""

from __future__ import annotations

import argparse
import json

import jax
import jax.numpy as jnp
import numpy as np

from chunkattn.backends import AttentionBatch, AttentionSpec, make_backend
from chunkattn.layout import ChunkLayout
from chunkattn.rope.positions import make_layout
from chunkattn.terminal.progress import timed

BLOCK = 16


def layout_of(tokens: int, kind: str) -> ChunkLayout:
    """Return the layout of a plain prompt, or of 16 chunks between a prefix and a question."""
    ids = np.zeros(tokens, np.int32)
    if kind == "plain":
        return make_layout([], [], ids)
    parts = np.split(ids, np.linspace(0, tokens, 19).astype(int)[1:-1])
    return make_layout(parts[0], parts[1:-1], parts[-1])


def temporary_bytes(backend: str, tokens: int, kind: str) -> int:
    """Return the bytes that XLA allocates besides arguments and results."""
    layout = layout_of(tokens, kind)
    attention = make_backend(backend, AttentionSpec(16, 8, 128, jnp.dtype("bfloat16"), BLOCK))
    pages = tokens // BLOCK
    batch = AttentionBatch(
        tokens,
        np.zeros(tokens, np.int32),
        np.arange(tokens, dtype=np.int32),
        layout.row_start,
        np.asarray([layout.prefix_len], np.int32),
        np.arange(pages, dtype=np.int32)[None],
        np.full((1, pages), BLOCK, np.int32),
        BLOCK,
    )
    q, k = (jax.ShapeDtypeStruct((tokens, h, 128), jnp.bfloat16) for h in (16, 8))
    cache = jax.eval_shape(lambda: attention.allocate(pages))
    call = jax.jit(lambda *a: attention.forward(*a, scale=0.1), donate_argnums=3)
    analysis = call.lower(q, k, k, cache, attention.build_metadata(batch)).compile().memory_analysis()
    return analysis.temp_size_in_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for backend, kind in (("xla", "plain"), ("xla", "chunks"), ("packed_dense", "chunks"), ("reference", "plain")):
        for tokens in (2048, 4096, 8192):
            with timed(f"{backend}, {kind}, {tokens} tokens"):
                mib = round(temporary_bytes(backend, tokens, kind) / 2**20, 1)
            rows.append({"backend": backend, "kind": kind, "tokens": tokens, "temporary_mib": mib})
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    print("backend       prompt  tokens  temporary MiB")
    for r in rows:
        print(f"{r['backend']:12}  {r['kind']:6}  {r['tokens']:6}  {r['temporary_mib']:13.1f}")


if __name__ == "__main__":
    main()
