"""A third attention backend, registered from outside the package.

It handles every row on its own with `jax.vmap`: simple, slow, right. `check_backend`
judges it against the reference, then a model generates with it.

An installed package can do the same with an entry point instead of the decorator:

    [project.entry-points."chunkattn.backends"]
    per_row = "my_package:PerRowBackend"
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from chunkattn import LLM, AttentionBackend, SamplingParams, register_backend
from chunkattn.backends.default_cache import read_pages, write_pages
from chunkattn.testing import check_backend


class Rows(NamedTuple):
    """Per row: its slot, where its own part starts, its sequence's pages; padding rows see nothing."""

    slot: jax.Array
    start: jax.Array
    prefix_end: jax.Array
    pages: jax.Array
    page_len: jax.Array
    flat_slots: jax.Array


@register_backend("per_row")
class PerRowBackend(AttentionBackend):
    """One dense softmax per row."""

    @classmethod
    def supports(cls, spec):
        if any(w is not None for w in spec.windows):
            return "sliding windows are not implemented"
        return None

    def build_metadata(self, batch):
        flat = batch.flat_slots()
        seq = batch.row_seq
        return Rows(batch.row_slot, batch.row_start, batch.prefix_end[seq], batch.block_tables[seq], batch.page_len[seq], flat)

    def forward(self, q, k, v, cache, metadata, *, scale, window=None):
        cache = write_pages(cache, k, v, metadata.flat_slots)
        groups, block_size = q.shape[1] // k.shape[1], self.spec.block_size

        def one_row(query, row):
            keys, values = (x.reshape(-1, *x.shape[2:]) for x in read_pages(cache, row.pages, query.dtype))
            slots = jnp.arange(len(keys))
            seen = (slots <= row.slot) & ((slots < row.prefix_end) | (slots >= row.start))
            seen &= row.flat_slots >= 0  # a padding row sees nothing, for what is there may be NaN
            seen &= slots % block_size < jnp.repeat(row.page_len, block_size)
            keys, values = (jnp.repeat(jnp.where(seen[:, None, None], x, 0), groups, axis=1) for x in (keys, values))
            scores = jnp.einsum("hd,khd->hk", query, keys, precision="highest") * scale
            weights = jax.nn.softmax(jnp.where(seen, scores, -1e30))
            return jnp.einsum("hk,khd->hd", weights, values, precision="highest").astype(query.dtype)

        return jax.lax.map(lambda pair: one_row(*pair), (q, metadata)), cache


if __name__ == "__main__":
    print(f"largest difference from reference: {check_backend('per_row'):.1e}")
    llm = LLM(enable_chunk_aware=True, attention_backend="per_row", max_num_batched_tokens=256)
    documents = "Nila lives in Tunise. # # Rumi lives in Limuzo."
    prompt = f"Read the documents and answer the question. # # {documents} # # Where does Rumi live? Answer:"
    print(llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text.strip())
