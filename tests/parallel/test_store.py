"""The K/V store of an engine over several devices."""

import pytest

from chunkattn import ChunkedPrompt, SamplingParams
from tests.parallel.answers import OPTIONS

PROMPT = ChunkedPrompt([5, 6, 7, 8] * 5, [[n + 9, *range(n + 20, n + 50)] for n in range(3)], [3, 4])
PARAMS = SamplingParams(temperature=0, max_tokens=4, logprobs=1)


def answer(start, folder, size, store):
    """Answer in a new engine. Return the tokens, the bits of their log-probabilities, and the parts found on disk."""
    llm = start(folder, size, kv_store=str(store), attention_backend="cpu")
    sample = llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0]
    assert llm.core.disk.writer.flush(30)
    counts = llm.core.disk.counts
    assert counts["damaged"] == counts["failed"] == 0
    llm.close()
    logprobs = [at[token].logprob for at, token in zip(sample.logprobs, sample.token_ids, strict=True)]
    return sample.token_ids, [float(x).hex() for x in logprobs], counts["hit"]


@pytest.mark.ci
@pytest.mark.parametrize("size", [2, 4])
def test_another_number_of_devices_finds_nothing(wide, start, tmp_path, size):
    """The K/V of two devices has other bits than that of one or four, in pages of the same shape."""
    assert OPTIONS["max_num_batched_tokens"] < len(PROMPT.prefix) + sum(map(len, PROMPT.chunks))
    written = answer(start, wide("qwen3"), size, tmp_path)
    assert written[2] == 0
    for other in {1, 2, 8} - {size}:
        tokens, _, hits = answer(start, wide("qwen3"), other, tmp_path)
        assert tokens == written[0]
        assert hits == 0
    assert answer(start, wide("qwen3"), size, tmp_path) == (*written[:2], 4)
