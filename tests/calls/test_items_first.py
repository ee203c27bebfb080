"""Items before the query: scores against transformers, the bits of both forms, and what is computed, kept and refused."""

import asyncio
from itertools import pairwise

import numpy as np
import pytest

from chunkattn import LLM, AsyncLLM
from chunkattn.calls.job import LookUp, answer, drive
from chunkattn.calls.score_inputs import score_call
from chunkattn.engine.messages import PrecomputeRequest, ScoreRequest
from chunkattn.errors import CapacityError, RequestError
from tests.calls.test_scoring import check, one_forward_per_item, random_job
from tests.checkpoints import VOCAB

FORMS = ["auto", "serial", "prefill_extend"]
LABELS = [5, 6, 9]


def draw(seed, *lens):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).tolist() for n in lens]


@pytest.fixture
def llm(engine):
    """An engine with an empty cache."""
    made = engine("qwen3")
    assert made.reset_prefix_cache()
    return made


def score(llm, query, items, **options):
    """Score anew, whatever results are known."""
    llm.frontend.scores.results.clear()
    return llm.score(query, items, item_first=True, use_tqdm=False, **{"label_token_ids": LABELS, **options})


def rows_of(llm):
    """Rows that the engine has computed."""
    return sum(llm.core.metrics.value("tokens_total", kind=kind) for kind in ("prefill", "decode", "score"))


@pytest.mark.parametrize("name", ["qwen3", *(pytest.param(n, marks=pytest.mark.ci) for n in ("llama-yarn", "qwen2"))])
@pytest.mark.parametrize("algorithm", FORMS)
def test_scores_are_one_forward_per_item(name, algorithm, engine, oracle):
    rng = np.random.default_rng([len(name), len(algorithm)])
    for _ in range(6):
        query, items, labels = random_job(rng)
        expected = one_forward_per_item(oracle(name), query, items, labels, item_first=True)
        result = score(engine(name), query, items, label_token_ids=labels, algorithm=algorithm)
        assert set(result.algorithm.split("+")) <= {"serial", "prefill_extend"}
        check(result, expected)


def test_cached_items_are_read(llm, oracle):
    """An item is cached as a prefix: by `precompute`, by a prompt, or by an earlier call."""
    query, *items = draw(4, 8, 48, 50, 40, 35)
    llm.precompute(items[0], [], use_tqdm=False)
    llm.generate({"prompt_token_ids": [*items[1], 1]}, use_tqdm=False)  # its last block holds a token more
    result = score(llm, query, items)
    check(result, one_forward_per_item(oracle("qwen3"), query, items, LABELS, item_first=True))
    assert result.algorithm == "prefill_extend+serial"
    assert result.usage.prompt_tokens == 8 + 48 + 50 + 40 + 35
    assert result.usage.cached_tokens == 48 + 48
    assert result.usage.computed_tokens == 4 * 8 + 2 + 40 + 35
    assert set(result.predicted_seconds) == {"serial", "prefill_extend"}
    kept = score(llm, query, items, algorithm="prefill_extend")
    assert (kept.algorithm, kept.usage.computed_tokens) == ("prefill_extend", 4 * 8 + 40 + 35)
    for algorithm in ("auto", "prefill_extend"):
        warm = score(llm, [1, 2, 3], items, algorithm=algorithm)
        assert warm.algorithm == "prefill_extend"
        assert (warm.usage.computed_tokens, warm.usage.cached_tokens) == (4 * 3, 48 + 50 + 40 + 35)
    again = llm.score([1, 2, 3], items, label_token_ids=LABELS, item_first=True, use_tqdm=False)
    assert again.logprobs == warm.logprobs
    assert (again.usage.computed_tokens, again.usage.cached_tokens) == (0, again.usage.prompt_tokens)


def test_a_document_cached_behind_a_prefix_or_under_a_salt_is_another(llm, oracle):
    query, prefix, *items = draw(5, 8, 20, 48, 50)
    llm.precompute(prefix, items, use_tqdm=False)
    llm.precompute(items[0], [], cache_salt="theirs", use_tqdm=False)
    result = score(llm, query, items)
    assert (result.algorithm, result.usage.cached_tokens) == ("serial", 0)
    check(result, one_forward_per_item(oracle("qwen3"), query, items, LABELS, item_first=True))
    theirs = score(llm, query, items, cache_salt="theirs")
    assert theirs.algorithm == "prefill_extend+serial"
    assert theirs.logprobs == result.logprobs


@pytest.mark.parametrize("length", [70, 3])
def test_auto_keeps_no_item_and_follows_an_eviction(length, llm):
    query, item = draw(6, 8, length)
    for _ in range(2):
        assert score(llm, query, [item]).algorithm == "serial"
    score(llm, query, [item], algorithm="prefill_extend")
    assert score(llm, query, [item]).algorithm == "prefill_extend"
    llm.core.scheduler.trie.evict_all()
    assert score(llm, query, [item]).algorithm == "serial"


def test_an_item_evicted_between_its_stages_is_computed_again(llm, monkeypatch):
    query, *items = draw(7, 8, 70, 60, 50)
    expected = score(llm, query, items, algorithm="serial")
    step = llm.core.step

    def evicting():
        outputs = step()
        llm.core.scheduler.trie.evict_all()
        return outputs

    monkeypatch.setattr(llm.core, "step", evicting)
    assert score(llm, query, items, algorithm="prefill_extend").logprobs == expected.logprobs
    monkeypatch.undo()
    llm.core.scheduler.check()
    assert llm.reset_prefix_cache()


def test_repeated_items_and_labels_per_item(llm, oracle):
    query, first, second = draw(8, 10, 30, 20)
    items, lists = [first, second, first, first], [[5, 6], [7], [5, 6], [9, 5, 6]]
    rows = one_forward_per_item(oracle("qwen3"), query, items, list(range(VOCAB)), item_first=True)
    expected = [row[own] for row, own in zip(rows, lists, strict=True)]
    for algorithm in FORMS:
        result = score(llm, query, items, label_token_ids=lists, algorithm=algorithm, cache_salt=algorithm)
        for found, row in zip(result.logprobs, expected, strict=True):
            np.testing.assert_allclose(found, row, atol=1e-4)
        own, repeated = 30 + 20, 30 if algorithm == "prefill_extend" else 0  # in one stage, equal prefixes are computed once
        assert result.usage.prompt_tokens == 10 + 3 * 30 + 20
        assert result.usage.computed_tokens == 3 * 10 + own + 30 - repeated
        assert result.usage.cached_tokens == 30 + repeated


def test_lists_of_queries(llm, oracle):
    queries, items = draw(9, 5, 12), draw(10, 30, 0, 40)
    llm.precompute(items[0], [], use_tqdm=False)
    outputs = score(llm, queries, items)
    for query, output in zip(queries, outputs, strict=True):
        check(output, one_forward_per_item(oracle("qwen3"), query, items, LABELS, item_first=True))
        assert output.usage.prompt_tokens == len(query) + 70
        assert output.algorithm == "prefill_extend+serial"
    assert score(llm, queries, [[], [items[2]]])[0].scores == []


def test_an_item_without_tokens_is_the_query_alone(llm, oracle):
    (query,) = draw(11, 20)
    for algorithm in FORMS:
        result = score(llm, query, [[]], algorithm=algorithm)
        check(result, one_forward_per_item(oracle("qwen3"), query, [[]], LABELS))
        assert result.algorithm == "serial"
    assert score(llm, query, []).scores == []


@pytest.mark.parametrize(
    ("options", "engine_options", "message"),
    [
        (
            {"algorithm": "packed_segment"},
            {},
            "every item comes before the query, which leaves no shared prefix; use 'prefill_ext",
        ),
        ({"algorithm": "packed_dense", "items": []}, {}, "no shared prefix"),
        ({"algorithm": "magic", "items": []}, {}, "unknown algorithm"),
        (
            {"algorithm": "prefill_extend"},
            {"enable_prefix_caching": False},
            "keeps the item in the cache, and this engine has enable_prefix_caching=False; use 'serial'",
        ),
        ({"algorithm": "prefill_extend", "query": [1] * 90}, {"max_chunk_len": 64}, "the query of 90 tokens does not fit"),
        ({"items": [[1], [2] * 90]}, {"max_chunk_len": 64}, "item 1 has 90 tokens, max_chunk_len is 64"),
        ({"items": [[1], [2] * 250]}, {}, "item 1 has 250 tokens, max_model_len leaves room for 247 behind the query"),
        ({"query": []}, {}, "query is empty"),
    ],
    ids=str,
)
def test_what_is_refused(options, engine_options, message, engine):
    llm = engine("qwen3", **engine_options)
    with pytest.raises(RequestError, match=message):
        score(llm, **{"query": [1] * 9, "items": [[3] * 20], **options})
    assert not llm.core.has_work


def test_where_no_item_can_be_kept_auto_computes_all(engine, oracle):
    query, *items = draw(12, 70, 30, 20)
    expected = one_forward_per_item(oracle("qwen3"), query, items, LABELS, item_first=True)
    for options in ({"enable_prefix_caching": False}, {"max_chunk_len": 64}):
        result = score(engine("qwen3", **options), query, items)
        assert result.algorithm == "serial"
        check(result, expected)


def test_a_small_pool_serves_more_items_than_it_holds(engine, oracle):
    """Items are sent in groups that the pool can hold, cached ones first; an item that never fits is refused by its number."""
    llm = engine("qwen3", kv_cache_memory_bytes=24 * 16 * 1536)
    llm.reset_prefix_cache()
    query, *items = draw(13, 10, *[60] * 14)
    llm.precompute(items[-1], [], use_tqdm=False)
    llm.precompute(items[-2], [], use_tqdm=False)
    before = rows_of(llm)
    result = score(llm, query, items, algorithm="prefill_extend")
    check(result, one_forward_per_item(oracle("qwen3"), query, items, LABELS, item_first=True))
    assert result.usage.cached_tokens == 2 * 60
    assert result.usage.computed_tokens == 14 * 10 + 12 * 60
    assert rows_of(llm) - before == result.usage.computed_tokens, "no item is computed twice"
    llm.core.scheduler.check()


def test_stages_are_few_and_items_are_asked_for_together(llm, monkeypatch):
    """The items of a step's worth of rows share their stages: first what lacks of the items, then the queries."""
    query, *items = draw(14, 6, *[20] * 40)
    llm.precompute(items[39], [], use_tqdm=False)
    call = score_call(llm.frontend, query, items, label_token_ids=LABELS, item_first=True, algorithm="prefill_extend")
    asked, stages = [], []

    def ask(question):
        (asked if isinstance(question, LookUp) else stages).append(question.requests)
        return answer(llm.core, question)

    drive(call.flow(), ask)
    assert [len(requests) for requests in asked] == [32, 8]
    for number, stage in enumerate(stages):
        assert len({type(request) for request in stage}) == 1
        if isinstance(stage[0], ScoreRequest):
            assert {p.layout.token_ids.tobytes() for p in stages[number - 1]} >= {
                request.layout.token_ids[: request.layout.prefix_len].tobytes() for request in stage
            }
    kinds = [type(stage[0]) for stage in stages]
    assert len(kinds) <= 4
    assert all(before is not after for before, after in pairwise(kinds))
    assert isinstance(stages[0][0], PrecomputeRequest)
    assert stages[0][0].layout.token_ids.tolist() == items[39], "cached items come first"


def test_a_call_that_costs_too_much_names_the_items(engine):
    llm = engine("qwen3", max_tokens_per_call=300)
    with pytest.raises(CapacityError, match=r"'serial' .* 320 tokens.*fewer or shorter items") as caught:
        score(llm, [1] * 12, [[n] * 20 for n in range(10)])
    assert caught.value.param == "items"


def test_kept_items_survive_a_restart_on_disk(engine, checkpoint, tmp_path):
    query, *items = draw(15, 9, 40, 30)
    options = {"skip_tokenizer_init": True, "max_num_batched_tokens": 256, "max_num_seqs": 16, "kv_cache_memory_bytes": 8 << 20}
    found = []
    for _ in range(2):
        llm = LLM(str(checkpoint("qwen3")), kv_store=str(tmp_path), **options)
        found.append(score(llm, query, items, algorithm="prefill_extend"))
        llm.close()
    assert found[1].logprobs == found[0].logprobs == score(engine("qwen3"), query, items, algorithm="serial").logprobs
    assert [result.usage.cached_tokens for result in found] == [0, 70]


@pytest.mark.ci
def test_async_calls_ask_and_rank_alike(checkpoint, engine):
    query, *items = draw(16, 9, 40, 30)

    async def main():
        options = {"skip_tokenizer_init": True, "max_num_batched_tokens": 256, "max_num_seqs": 16, "warmup": False}
        async with AsyncLLM(str(checkpoint("qwen3")), kv_cache_memory_bytes=8 << 20, **options) as llm:
            await llm.precompute(items[0], [])
            return await llm.score(query, items, label_token_ids=LABELS, item_first=True)

    found = asyncio.run(main())
    assert (found.algorithm, found.usage.cached_tokens) == ("prefill_extend+serial", 40)
    assert found.logprobs == score(engine("qwen3"), query, items, algorithm="serial").logprobs
