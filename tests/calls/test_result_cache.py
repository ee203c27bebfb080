"""Repeated items are scored once: results against transformers, token counts, and everything that a result depends on."""

import numpy as np
import pytest

from chunkattn.calls.algorithms import ALGORITHMS, ScoreInputs
from chunkattn.calls.score_memory import ResultCache, item_keys
from tests.calls.test_scoring import check, one_forward_per_item
from tests.checkpoints import VOCAB

LABELS = [3, 4, 5]


@pytest.fixture(scope="module")
def repeated():
    """A query, 14 different items, and 30 items of which 17 are one and the same; an empty one occurs twice."""
    rng = np.random.default_rng(45)
    query = rng.integers(0, VOCAB, 40).tolist()
    different = [rng.integers(0, VOCAB, 5 + n).tolist() for n in range(12)] + [[]]
    items = [*different, different[3], [], *[different[3]] * 15]
    return query, different, [items[place] for place in rng.permutation(len(items))]


@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS])
def test_copies_are_scored_once(algorithm, engine, oracle, repeated):
    query, different, items = repeated
    expected = one_forward_per_item(oracle("qwen3"), query, items, LABELS)
    own, every = sum(map(len, different)), sum(map(len, items))
    options = {"label_token_ids": LABELS, "algorithm": algorithm, "cache_salt": f"copies {algorithm}"}
    once = engine("qwen3").score(query, different, **{**options, "cache_salt": f"once {algorithm}"})
    first, again = [engine("qwen3").score(query, items, **options) for _ in range(2)]
    check(first, expected)
    assert len({tuple(row) for row, item in zip(first.logprobs, items, strict=True) if item == different[3]}) == 1
    assert first.usage.prompt_tokens == 40 + every
    if first.algorithm == once.algorithm:  # auto measures its rates
        assert first.usage.computed_tokens == once.usage.computed_tokens
    assert first.usage.cached_tokens == every - own
    # The same call again: the same bits, and nothing is computed.
    assert (again.logprobs, again.scores, again.algorithm) == (first.logprobs, first.scores, first.algorithm)
    assert (again.usage.computed_tokens, again.usage.cached_tokens) == (0, 40 + every)


def test_new_items_are_scored_among_known_ones(engine, oracle, repeated):
    query, different, _ = repeated
    options = {"label_token_ids": LABELS, "algorithm": "packed_segment", "cache_salt": "some"}
    llm = engine("qwen3")
    llm.score(query, different[2:7], **options)
    found = llm.score(query, different, **options)
    check(found, one_forward_per_item(oracle("qwen3"), query, different, LABELS))
    assert found.usage.computed_tokens == len(query) + sum(map(len, [*different[:2], *different[7:]]))


def test_known_items_are_scored_again_where_the_layout_decides_the_bits(engine, repeated):
    query, different, _ = repeated
    options = {"label_token_ids": LABELS, "algorithm": "packed_dense", "cache_salt": "evicted"}
    llm = engine("qwen3")
    first = llm.score(query, different, **options)
    llm.frontend.scores.results._rows.popitem()
    again = llm.score(query, different, **options)
    assert again.logprobs == first.logprobs
    assert again.usage.computed_tokens == first.usage.computed_tokens


def test_what_a_result_depends_on(engine, oracle, repeated):
    query, different, _ = repeated
    llm, items = engine("qwen3"), different[:3]
    base = {"label_token_ids": LABELS, "algorithm": "serial", "cache_salt": "base"}
    llm.score(query, items, **base)
    for change in (
        {"label_token_ids": LABELS[::-1]},
        {"label_token_ids": LABELS[:2]},
        {"item_first": True},
        {"algorithm": "packed_dense"},
        {"cache_salt": "other"},
        {"cache_salt": None},
    ):
        options = {**base, **change}
        found = llm.score(query, items, **options)
        assert found.usage.cached_tokens == 0, change
        check(found, one_forward_per_item(oracle("qwen3"), query, items, options["label_token_ids"], "item_first" in change))
    for other in (query[1:], [*query, 1]):
        assert llm.score(other, items, **base).usage.cached_tokens == 0
    # A token that moves between query and item leaves the sequence as it was, but not the query.
    assert llm.score(query[:-1], [[query[-1], *item] for item in items], **base).usage.cached_tokens == 0
    assert llm.score(query, items, **base, apply_softmax=True).usage.computed_tokens == 0


def test_a_reset_forgets_results(engine, repeated):
    query, different, _ = repeated
    options = {"label_token_ids": LABELS, "algorithm": "packed_segment", "cache_salt": "reset"}
    llm = engine("qwen3")
    llm.score(query, different, **options)
    assert llm.reset_prefix_cache()
    assert llm.score(query, different, **options).usage.cached_tokens == 0


def test_without_prefix_caching_copies_alone_are_spared(engine, oracle, repeated):
    query, different, items = repeated
    llm = engine("qwen3", enable_prefix_caching=False)
    for _ in range(2):
        result = llm.score(query, items, label_token_ids=LABELS)
        check(result, one_forward_per_item(oracle("qwen3"), query, items, LABELS))
        assert result.usage.cached_tokens == sum(map(len, items)) - sum(map(len, different))


# The cache itself


def test_results_are_bounded_and_the_oldest_go_first():
    row = np.arange(4, dtype=np.float32)
    cache = ResultCache(True, max_bytes=3 * (row.nbytes + 256))
    for key in (b"a", b"b", b"c"):
        cache.put(key, row)
    assert cache.get([b"a"])  # used again, so `b` is the oldest
    cache.put(b"c", row + 1)
    cache.put(b"d", row)
    assert cache.get([b"a", b"b", b"c", b"d"]).keys() == {b"a", b"c", b"d"}
    cache.put(b"e", np.zeros(1000, np.float32))
    assert b"e" not in cache.get([b"e"])
    cache.clear()
    for number in range(5):
        cache.put(bytes([number]), row)
    assert len(cache.get([bytes([number]) for number in range(5)])) == 3


def test_results_that_are_not_finite_are_not_kept():
    cache = ResultCache(True)
    for value in (np.nan, np.inf, -np.inf):
        cache.put(b"a", np.array([0, value], np.float32))
    assert not cache.get([b"a"])


def test_a_kept_result_is_a_copy():
    """A row of a batch would keep the batch, and change with it."""
    batch, cache = np.zeros((100, 2), np.float32), ResultCache(True)
    cache.put(b"a", batch[0])
    batch[:] = 1
    assert cache.get([b"a"])[b"a"].tolist() == [0, 0]


def test_keys_tell_apart_what_joins_to_the_same_tokens():
    jobs = [
        ScoreInputs([1, 2], [[3]], labels=[(5, 6)]),
        ScoreInputs([1], [[2, 3]], labels=[(5, 6)]),
        ScoreInputs([3], [[1, 2]], labels=[(5, 6)], item_first=True),
        ScoreInputs([1, 2], [[3]], labels=[(5, 6)], item_first=True),
    ]
    jobs += [ScoreInputs([1, 2], [[3]], labels=[own]) for own in ((6, 5), (56,), (5,))] + [ScoreInputs([1, 2], [[3]])]
    jobs += [ScoreInputs([1, 2], [item], labels=[own]) for item, own in (([6, 3], (5,)), ([], (5, 6, 3)), ([1, 5, 3], ()))]
    keys = [item_keys(job, "auto", None)[0] for job in jobs]
    keys += [item_keys(jobs[0], name, salt)[0] for name, salt in (("serial", None), ("auto", "None"), ("auto", "s"))]
    assert len({*keys}) == len(keys)
    assert item_keys(jobs[0], "auto", None) == keys[:1]
    lists = ([[3], [4]], [[3], [5]], [[3], [4, 5]], [[3, 4], [5]], [[3], [3]])
    others = [ScoreInputs([1, 2], items, labels=[(5, 6), (5, 6)]) for items in lists]
    others += [ScoreInputs([1, 2], [[3], [4]], labels=[(5, 6), own]) for own in ((5,), (6, 5))]
    keys = [item_keys(job, "auto", None)[0] for job in others]
    assert len({*keys}) == len(keys)
    apart = {item_keys(job, name, None, whole=False)[0] for job in (*others[:3], *others[5:]) for name in ("auto", "serial")}
    assert apart == {*item_keys(jobs[0], "packed_segment", None, whole=False)}
    assert not apart & {*keys, *item_keys(others[0], "auto", "s", whole=False)}
