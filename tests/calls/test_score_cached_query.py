"""`algorithm="auto"` asks the engine whether the query is cached, and computes no query that is."""

import asyncio

import numpy as np
import pytest

from chunkattn.async_llm import AsyncLLM
from chunkattn.calls.score_memory import ScoreMemory
from chunkattn.engine.messages import StepRates
from chunkattn.errors import RequestError
from tests.checkpoints import VOCAB

RATES = StepRates(step=1e-3, row=1e-3, area=1e-9)
LABELS = {"label_token_ids": [5, 6]}


def draw(seed, query=90, lens=(8, 8, 8)):
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCAB, query).tolist(), [rng.integers(0, VOCAB, n).tolist() for n in lens]


@pytest.fixture(autouse=True)
def rates(monkeypatch):
    """Rates that make a packed query and its items cheapest, unless the query is cached. The engine's measured rates vary."""
    monkeypatch.setattr(ScoreMemory, "rates", property(lambda _: RATES, lambda *_: None), raising=False)


@pytest.fixture
def llm(engine):
    return engine("qwen3", max_num_batched_tokens=128)


def rows_of(llm, *args, **options):
    """Return the result of a score call, and the rows that the engine computed for it."""
    before = computed(llm)
    result = llm.score(*args, **LABELS, use_tqdm=False, **options)
    return result, computed(llm) - before


def computed(llm):
    return sum(llm.core.metrics.value("tokens_total", kind=kind) for kind in ("prefill", "decode", "score"))


def check(llm, query, items, result):
    """The scores are those of an algorithm that reads no cache."""
    expected = llm.score(query, items, **LABELS, algorithm="packed_segment", cache_salt="other", use_tqdm=False)
    np.testing.assert_allclose(result.logprobs, expected.logprobs, atol=1e-4)


@pytest.mark.parametrize("how", ["precompute", "generate"])
def test_a_query_that_any_call_cached_is_not_computed_again(llm, how):
    query, items = draw(1 if how == "precompute" else 2)
    if how == "precompute":
        report = llm.precompute(query, [], pin=True, use_tqdm=False, priority=-3)
    else:
        llm.generate({"prompt_token_ids": [*query, 1]}, use_tqdm=False)
    result, rows = rows_of(llm, query, items)
    assert result.algorithm == "prefill_extend"
    partly = 0 if how == "precompute" else len(query) % 16  # the prompt's last block holds a token more
    assert rows == sum(map(len, items)) + partly
    assert (result.usage.computed_tokens, result.usage.cached_tokens) == (rows, len(query) - partly)
    check(llm, query, items, result)
    if how == "precompute":
        llm.unpin(report)


def test_the_answer_is_the_engines_own(llm):
    """No cache of another salt counts, and no query that was evicted, or only began to be cached."""
    query, items = draw(3)
    llm.precompute(query, [], cache_salt="theirs", use_tqdm=False)
    llm.precompute(query[:60], [], use_tqdm=False)
    asked = draw(4)[0]
    llm.precompute(asked, [], use_tqdm=False)
    llm.forget(asked, [])
    for prompt in (query, asked):
        result, rows = rows_of(llm, prompt, items)
        assert result.algorithm == "packed_segment"
        assert rows == len(prompt) + sum(map(len, items))
        check(llm, prompt, items, result)


def test_a_choice_follows_the_cache_and_changes_no_bit(llm):
    query, items = draw(5)
    first, _ = rows_of(llm, query, items)
    llm.precompute(query, [], use_tqdm=False)
    llm.frontend.scores.results.clear()
    again, _ = rows_of(llm, query, items)
    assert (first.algorithm, again.algorithm) == ("packed_segment", "prefill_extend")
    assert again.logprobs == first.logprobs


def test_lists_of_queries_are_asked_for_together(llm, monkeypatch):
    pairs = [draw(seed) for seed in range(10, 13)]
    llm.precompute(pairs[1][0], [], use_tqdm=False)
    asked, look_up = [], llm.core.look_up
    monkeypatch.setattr(llm.core, "look_up", lambda request, **how: asked.append(request) or look_up(request, **how))
    results, _ = rows_of(llm, [q for q, _ in pairs], [items for _, items in pairs])
    assert [r.algorithm for r in results] == ["packed_segment", "prefill_extend", "packed_segment"]
    assert [request.layout.token_ids.tolist() for request in asked] == [query for query, _ in pairs]
    for (query, items), result in zip(pairs, results, strict=True):
        check(llm, query, items, result)


def test_nothing_is_asked_where_the_answer_decides_nothing(llm, monkeypatch):
    query, items = draw(6)
    monkeypatch.setattr(llm.core, "look_up", None)
    for algorithm in ("serial", "packed_segment", "prefill_extend"):
        llm.score(query, items, **LABELS, algorithm=algorithm, use_tqdm=False)
        llm.frontend.scores.results.clear()
    assert llm.score(query, items, **LABELS, use_tqdm=False).algorithm == "prefill_extend"  # the query is remembered
    llm.score(draw(7, query=3)[0], draw(7, lens=(40, 40))[1], **LABELS, use_tqdm=False)
    llm.score(draw(8)[0], [], **LABELS, use_tqdm=False)


def test_async_calls_ask_between_steps(checkpoint):
    query, items = draw(9)

    async def main():
        options = {"skip_tokenizer_init": True, "max_num_batched_tokens": 128, "max_num_seqs": 16, "warmup": False}
        async with AsyncLLM(str(checkpoint("qwen3")), kv_cache_memory_bytes=8 << 20, **options) as llm:
            await llm.precompute(query, [], pin=True)
            cached = await llm.score(query, items, **LABELS)
            other = await llm.score(draw(20)[0], items, **LABELS)
            expected = await llm.score(query, items, **LABELS, algorithm="packed_segment")
            return cached, other, expected

    cached, other, expected = asyncio.run(main())
    assert (cached.algorithm, cached.usage.computed_tokens) == ("prefill_extend", sum(map(len, items)))
    assert other.algorithm == "packed_segment"
    np.testing.assert_allclose(cached.logprobs, expected.logprobs, atol=1e-4)


def test_precompute_takes_a_priority(llm, monkeypatch):
    sent, add = [], llm.core.add
    monkeypatch.setattr(llm.core, "add", lambda request, **how: sent.append(request.priority) or add(request, **how))
    llm.precompute([1, 2, 3], [[4], [5]], priority=7, use_tqdm=False)
    assert sent == [7, 7]
    with pytest.raises(RequestError, match="priority must be an integer"):
        llm.precompute([1], [], priority="high")
