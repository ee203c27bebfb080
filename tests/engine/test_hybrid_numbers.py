"""Numbers of models with recurrent layers against transformers in float64, whose delta rule goes token by token."""

import copy

import numpy as np
import pytest
import torch

from chunkattn import SamplingParams, make_layout
from tests.checkpoints import VOCAB
from tests.delta_rule import in_float64
from tests.engine.test_parity import engine_logits

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")


class Distances:
    """The largest distances of an engine and of transformers' float32 from transformers' float64."""

    def __init__(self, model):
        self.model, self.ours, self.theirs = model, 0.0, 0.0
        self._known = {}

    def logits(self, ids):
        """Logits in float64 and in float32, `[T, vocab]` each."""
        if (key := tuple(ids)) not in self._known:
            with torch.no_grad(), in_float64(copy.deepcopy(self.model)) as double:
                exact = double(torch.tensor([ids]), use_cache=False).logits[0].numpy()
            with torch.no_grad():
                single = self.model(torch.tensor([ids]), use_cache=False).logits[0].double().numpy()
            self._known = {key: (exact, single)}
        return self._known[key]

    def add(self, ids, got):
        """Compare logits of all tokens, or the log-probabilities after the last one."""
        exact, single = self.logits(ids)
        if np.ndim(got) == 1:
            exact, single = (x[-1] - np.logaddexp.reduce(x[-1]) for x in (exact, single))
        self.ours = max(self.ours, np.abs(got - exact).max())
        self.theirs = max(self.theirs, np.abs(single - exact).max())


def compare(llm, model, prompts):
    """The distances over random prompts: plain ones, items behind a prefix, and 2 to 5 turns that go on from kept states."""
    rng, distances, everything = np.random.default_rng(5), Distances(model), list(range(VOCAB))

    def draw(low, high):
        return rng.integers(0, VOCAB, rng.integers(low, high)).tolist()

    for number in range(prompts):
        if number % 3 == 0:
            ids = draw(1, 200)
            distances.add(ids, engine_logits(llm, make_layout([], [], ids)))
        elif number % 3 == 1:
            prefix, items = draw(1, 130), [draw(1, 100) for _ in range(3)]
            for item, scores in zip(items, llm.score(prefix, items, label_token_ids=everything).scores, strict=True):
                distances.add(prefix + item, np.log(scores))
        else:
            ids = draw(1, 80)
            for turn in range(rng.integers(2, 6)):
                params = SamplingParams(temperature=0, max_tokens=int(rng.integers(2, 20)), logprobs=VOCAB, ignore_eos=True)
                out = llm.generate([{"prompt_token_ids": ids}], params)[0]
                assert not turn or len(ids) < 96 or out.num_cached_tokens, "a turn computed everything again"
                first = out.outputs[0].logprobs[0]
                distances.add(ids, np.asarray([first[token].logprob for token in everything]))
                ids = ids + list(out.outputs[0].token_ids) + draw(1, 20)
    return distances


@pytest.mark.parametrize(
    ("name", "prompts"),
    [("qwen3_5", 6)] + [pytest.param(name, 50, marks=pytest.mark.slow, id=f"{name}-50") for name in FAMILIES],
)
def test_numbers(name, prompts, engine, oracle):
    distances = compare(engine(name, max_num_batched_tokens=64), oracle(name).model, prompts)
    print(f"{name}, {prompts} prompts: ours {distances.ours:.1e}, transformers' float32 {distances.theirs:.1e}")
    assert 0 < distances.ours <= 2 * distances.theirs
