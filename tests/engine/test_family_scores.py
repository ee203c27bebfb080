"""Scores of every family: each algorithm scores an item as if it were sent alone. bge-reranker-v2-gemma is a Gemma."""

import numpy as np
import pytest

from chunkattn.calls.algorithms import ALGORITHMS
from tests.checkpoints import CHUNKABLE, NESTED, VOCAB, WINDOWED

LABELS = [3, 99, 7]
NAMES = (*WINDOWED, *CHUNKABLE, *NESTED)
QUICK = (WINDOWED[0], "gemma")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.ci) for name in NAMES])
@pytest.mark.parametrize("item_first", [False, True])
def test_every_algorithm_scores_items_as_if_alone(name, item_first, engine, oracle):
    rng = np.random.default_rng(5)
    query, items = rng.integers(0, VOCAB, 21).tolist(), [rng.integers(0, VOCAB, n).tolist() for n in (1, 5, 17, 40, 16)]
    llm = engine(name)
    for algorithm in ("auto", "serial", "prefill_extend") if item_first else ("auto", *ALGORITHMS):
        found = llm.score(query, items, label_token_ids=LABELS, algorithm=algorithm, item_first=item_first)
        for item, scores in zip(items, found.scores, strict=True):
            logits = oracle(name).logits([*item, *query] if item_first else [*query, *item])[-1].astype(np.float64)
            expected = np.exp(logits - logits.max())
            np.testing.assert_allclose(scores, (expected / expected.sum())[LABELS], rtol=1e-5, atol=1e-7)
