"""Sliding windows with chunks, scores and decisions: a window counts position ids, whatever lies between in the prompt."""

import numpy as np
import pytest

from chunkattn import ChunkedPrompt, SamplingParams, make_layout
from chunkattn.engine.request import Request
from tests.checkpoints import VOCAB, WINDOWED, random_parts
from tests.engine.test_parity import GREEDY, check_greedy, engine_logits

QUICK = [("qwen2-window", "shared", "cpu")]
IN_CI = [(name, *way) for name in ("qwen2-window", "gemma3-window") for way in (("shared", "xla"), ("offset", "cpu"))]
IN_CI += [(name, "shared", "cpu") for name in WINDOWED if "nested" not in name]


def _matrix():
    for name in WINDOWED:
        for strategy in ("shared", "offset"):
            for backend in ("cpu", "xla", "reference"):
                case = name, strategy, backend
                marks = () if case in QUICK else pytest.mark.ci if case in IN_CI else pytest.mark.slow
                yield pytest.param(*case, marks=marks, id="-".join(case))


def random_layouts(rng, strategy, limit, count=50):
    """Parts and layouts of prompts whose chunks exceed the window, some by far."""
    made = []
    while len(made) < count:
        parts = random_parts(rng, longest=int(rng.choice([12, 40])))
        layout = make_layout(*parts, strategy)
        if layout.next_position + 32 <= limit:
            made.append((parts, layout))
    return made


@pytest.mark.parametrize(("name", "strategy", "backend"), list(_matrix()))
def test_chunked_prompts(name, strategy, backend, engine, oracle):
    """50 random layouts: raw logits, then 32 greedy tokens each, all in one batch."""
    llm = engine(name, position_strategy=strategy, attention_backend=backend)
    made = random_layouts(np.random.default_rng(2), strategy, llm.limits.max_model_len)
    for _, layout in made:
        np.testing.assert_allclose(engine_logits(llm, layout), oracle(name).chunked(layout), atol=1e-4)
    outs = llm.generate([ChunkedPrompt(*parts) for parts, _ in made], GREEDY)
    for (_, layout), out in zip(made, outs, strict=True):
        tokens = out.outputs[0].token_ids
        check_greedy(oracle(name).chunked(layout, tokens), len(layout), tokens)


def test_a_window_counted_in_tokens_is_another_model(engine, oracle, monkeypatch):
    """The engine, told that slots are positions, is far from transformers on these layouts: they would show it."""
    llm, worst = engine("qwen2-window", position_strategy="shared", attention_backend="cpu"), []
    llm.reset_prefix_cache()
    monkeypatch.setattr(Request, "page_positions", property(lambda self: 16 * np.arange(len(self.plan.page_len))))
    for _, layout in random_layouts(np.random.default_rng(2), "shared", llm.limits.max_model_len, count=9):
        worst.append(np.abs(engine_logits(llm, layout) - oracle("qwen2-window").chunked(layout)).max())
    assert max(worst) > 0.5


def test_a_gap_counts_as_distance(engine, oracle):
    llm, rng = engine("qwen2-window", position_strategy="shared", attention_backend="cpu"), np.random.default_rng(4)
    for gap in (3, 7, 8, 20):
        layout = make_layout(*random_parts(rng, longest=20), gap=gap)
        np.testing.assert_allclose(engine_logits(llm, layout), oracle("qwen2-window").chunked(layout), atol=1e-4)


def test_order_and_cache_move_no_bit(engine):
    rng = np.random.default_rng(6)
    prefix, question = rng.integers(0, VOCAB, 11).tolist(), rng.integers(0, VOCAB, 6).tolist()
    chunks = [rng.integers(0, VOCAB, n).tolist() for n in (30, 4, 17)]
    llm = engine("qwen2-window", position_strategy="shared", attention_backend="cpu")
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2)
    llm.reset_prefix_cache()
    cold, warm = (llm.generate(ChunkedPrompt(prefix, own, question), params)[0] for own in (chunks, chunks[::-1]))
    assert warm.num_cached_tokens > len(prefix)
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert repr(warm.outputs[0].logprobs) == repr(cold.outputs[0].logprobs)
