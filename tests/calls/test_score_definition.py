"""Scores of text, in bfloat16 and after warm-up, against one transformers forward per item."""

import numpy as np
import pytest
import torch

from chunkattn import LLM
from chunkattn.calls.algorithms import ALGORITHMS
from chunkattn.models.loader import DEMO_FOLDER
from tests.checkpoints import VOCAB, Oracle

WORDS = ["Meru", "likes", "figs", "Böb", "東京", "plays", "the", "cello.", "Who", "is", "🦔", "naïve", "кот", "\u200b", "Ω?"]
STEPS = {"max_num_batched_tokens": 256, "kv_cache_memory_bytes": 16 << 20}


def random_text(rng, most):
    return " ".join(rng.choice(WORDS, rng.integers(0, most + 1)))


def random_request(rng, most=12):
    """A query and items, some of them empty, some twice."""
    items = [random_text(rng, int(rng.choice([0, 1, 15]))) for _ in range(rng.integers(1, most))]
    return f"Find {random_text(rng, 25)}", items + items[: rng.integers(0, 2)]


@pytest.fixture(scope="module")
def witness():
    return Oracle(DEMO_FOLDER)


def by_definition(witness, llm, query, items, labels):
    """float32 `[items, labels]` log-probabilities: texts tokenized separately, an item a forward."""
    encode = llm.tokenizer
    ids = [encode(text, add_special_tokens=False).input_ids for text in (query, *items)]
    logits = np.stack([witness.logits(ids[0] + item)[-1] for item in ids[1:]])
    return torch.log_softmax(torch.as_tensor(logits), -1).numpy()[:, labels]


def label_ids(llm):
    return [llm.tokenizer.convert_tokens_to_ids(t) for t in ("▁yes", "▁no")]


@pytest.fixture(scope="module")
def half():
    return LLM(dtype="bfloat16", **STEPS)


@pytest.mark.ci
def test_text_of_every_kind(witness):
    llm, rng = LLM(dtype="float32", **STEPS), np.random.default_rng(1)
    labels = label_ids(llm)
    for number in range(12):
        query, items = random_request(rng)
        expected = by_definition(witness, llm, query, items, labels)
        result = llm.score(query, items, label_token_ids=labels, algorithm=[*ALGORITHMS][number % len(ALGORITHMS)])
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)
        np.testing.assert_allclose(result.scores, np.exp(expected), atol=1e-5 * np.exp(expected).max())


@pytest.mark.ci
@pytest.mark.parametrize(
    "algorithm", [pytest.param(name, marks=() if name == "prefill_extend" else pytest.mark.slow) for name in ALGORITHMS]
)
def test_bfloat16(algorithm, half, witness):
    """Within 0.02, and 0.01 on average, of the model in float32: probabilities, and shares of the labels."""
    llm, rng = half, np.random.default_rng(2)
    labels, differences = label_ids(llm), []
    for _ in range(8):
        query, items = random_request(rng, most=20)
        expected = np.exp(by_definition(witness, llm, query, items, labels))
        for softmax in (False, True):
            wanted = expected / expected.sum(1, keepdims=True) if softmax else expected
            scores = llm.score(query, items, label_token_ids=labels, algorithm=algorithm, apply_softmax=softmax).scores
            differences += np.abs(scores - wanted).ravel().tolist()
    assert max(differences) <= 0.02
    assert np.mean(differences) <= 0.01


@pytest.mark.ci
def test_the_first_request_after_warm_up_compiles_nothing(checkpoint, rng):
    sizes = {"max_num_batched_tokens": 64, "max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 20}
    llm = LLM(str(checkpoint("qwen3")), skip_tokenizer_init=True, warmup=True, **sizes)
    before = dict(llm.core.runner.compiles)
    for algorithm in ("auto", *(name for name in ALGORITHMS if name != "packed_dense")):
        items = [rng.integers(0, VOCAB, n).tolist() for n in (5, 0, 1, *rng.integers(0, 9, 100))]
        llm.score(rng.integers(0, VOCAB, 40).tolist(), items, label_token_ids=[1, 2, 3], algorithm=algorithm)
    assert dict(llm.core.runner.compiles) == before
