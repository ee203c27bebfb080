"""Models with recurrent layers over two devices: the numbers of one device, and the same bits for any steps and warm."""

import numpy as np
import pytest

from chunkattn import ChunkedPrompt, SamplingParams
from tests.checkpoints import VOCAB

RNG = np.random.default_rng(3)
SYSTEM, DOCUMENT, QUESTION, PLAIN = (RNG.integers(0, VOCAB, n).tolist() for n in (70, 40, 8, 90))
ITEMS = [RNG.integers(0, VOCAB, n).tolist() for n in (3, 70, 20)]
DRAWN = SamplingParams(temperature=0.8, seed=1, n=2, max_tokens=9, logprobs=1)


def answers(llm):
    outputs = llm.generate([{"prompt_token_ids": PLAIN}, ChunkedPrompt(SYSTEM, [DOCUMENT], QUESTION)], DRAWN, use_tqdm=False)
    samples = [sample for output in outputs for sample in output.outputs]
    texts = [(s.token_ids, [max(p.logprob for p in step.values()) for step in s.logprobs]) for s in samples]
    return texts, llm.score(SYSTEM, ITEMS, label_token_ids=[1, 2, 3], use_tqdm=False).scores


@pytest.mark.ci
def test_two_devices(checkpoint, start):
    folder = checkpoint("qwen3_5")
    texts, scores = answers(start(folder, 1))
    llm = start(folder, 2)
    expected = answers(llm)
    assert llm.core.runner.states.caches[0].slots.state.sharding.shard_shape((4, 6, 1, 1)) == (4, 3, 1, 1)
    assert [tokens for tokens, _ in expected[0]] == [tokens for tokens, _ in texts]
    np.testing.assert_allclose(expected[1], scores, rtol=1e-4)
    assert answers(llm) == expected, "warm"
    assert answers(start(folder, 2, max_num_batched_tokens=40)) == expected, "in small steps"
