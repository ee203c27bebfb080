"""Batches in which every part is a sequence of its own: equal to the given ones, and each part at the start of a KV tile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkattn.backends import AttentionSpec, get_backend
from chunkattn.backends.own_sequences import own_sequences
from chunkattn.testing import random_steps

TILE = 32


@pytest.mark.ci
@pytest.mark.parametrize("weighs", [False, True])
def test_attention_stays_the_same(weighs):
    backend, rng = get_backend("reference")(AttentionSpec(4, 2, 16, jnp.dtype("float32"), 8)), np.random.default_rng(3)
    forward = jax.jit(backend.forward, static_argnames="scale")
    for _ in range(6):
        caches = [jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), backend.allocate(96)) for _ in range(2)]
        for batch in random_steps(rng, weighs=weighs):
            q, k, v = (rng.standard_normal((96, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
            given = batch, own_sequences(batch, TILE)
            assert [len(b.row_seq) for b in given] == [96, 96]
            np.testing.assert_array_equal(*(b.flat_slots() for b in given))
            found = []
            for place, of in enumerate(given):
                out, caches[place] = forward(q, k, v, caches[place], backend.build_metadata(of), scale=0.25)
                found.append(out[: batch.num_rows])
            np.testing.assert_allclose(found[1], found[0], atol=1e-5)


def test_parts_begin_on_tiles():
    for batch in random_steps(np.random.default_rng(5)):
        own = own_sequences(batch, TILE)
        for row in range(batch.num_rows):
            seq, slot, new = batch.row_seq[row], batch.row_slot[row], own.row_seq[row]
            before = batch.prefix_end[seq]
            assert own.prefix_end[new] == before
            if slot < before:
                assert own.row_slot[row] == slot
                continue
            start = max(batch.row_start[row], before)
            start = next(s for s in range(start, slot + 1) if s % 8 < batch.page_len[seq, s // 8])
            assert own.row_slot[row] - own.row_start[row] == slot - start
            assert own.row_start[row] % TILE == start % 8
