"""Labels per item: scores against one transformers forward per item, rows of several tokens, and bad lists."""

from collections import Counter

import numpy as np
import pytest
import torch

from chunkattn.calls.algorithms import ALGORITHMS, ScoreInputs
from chunkattn.engine.messages import ScoreRequest, ScoreResult
from chunkattn.engine.row_reader import LABEL_WIDTHS
from chunkattn.errors import RequestError
from chunkattn.rope.positions import make_layout
from tests.checkpoints import VOCAB

COUNTS = (1, 2, 3, 8, 9, 40, LABEL_WIDTHS[-1], LABEL_WIDTHS[-1] + 1)
"""Numbers of labels: both sides of every width."""
INVARIANT = [name for name in ALGORITHMS if name != "packed_dense"]


@pytest.fixture
def job(rng):
    """A query, items with an empty and a repeated one, and the labels of each."""
    query = rng.integers(0, VOCAB, 30).tolist()
    items = [rng.integers(0, VOCAB, n).tolist() for n in (4, 9, 1, 20, 9, 0, 6, 3, 12)]
    items += [items[1], items[2], []]  # repeated with other labels, with the same, and empty with other labels
    labels = [rng.integers(0, VOCAB, COUNTS[n % len(COUNTS)]).tolist() for n in range(len(items))]
    labels[10] = labels[2]
    return query, items, labels


def logprobs(oracle, query, items, labels):
    """The log-probabilities of each item's labels, by definition."""
    rows = [torch.log_softmax(torch.as_tensor(oracle.logits([*query, *item])[-1]), -1).numpy() for item in items]
    return [row[own] for row, own in zip(rows, labels, strict=True)]


def check(result, expected):
    assert [len(row) for row in result.scores] == [len(row) for row in expected]
    for found, score, row in zip(result.logprobs, result.scores, expected, strict=True):
        np.testing.assert_allclose(found, row, atol=1e-4)
        np.testing.assert_allclose(score, np.exp(row), rtol=1e-3)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_scores_of_each_items_own_labels(algorithm, engine, oracle, job):
    query, items, labels = job
    llm, expected = engine("qwen3"), logprobs(oracle("qwen3"), *job)
    check(llm.score(query, items, label_token_ids=labels, algorithm=algorithm), expected)
    shares = llm.score(query, items, label_token_ids=labels, algorithm=algorithm, apply_softmax=True).scores
    for share, row in zip(shares, expected, strict=True):
        np.testing.assert_allclose(share, np.exp(row) / np.exp(row).sum(), atol=1e-5)


def test_lists_of_queries_and_packed_ids(engine, oracle, job):
    query, items, labels = job
    others = [[5, 6], [7]]
    llm, expected = engine("qwen3"), [logprobs(oracle("qwen3"), query, items, labels) for query in (query, [1, 2])]
    for given in (labels, [labels, labels]):
        for output, rows in zip(llm.score([query, [1, 2]], items, label_token_ids=given), expected, strict=True):
            check(output, rows)
    own = [labels, [[3], [4, 5]]]
    first, second = llm.score([query, [1, 2]], [items, others], label_token_ids=own)
    check(first, expected[0])
    check(second, logprobs(oracle("qwen3"), [1, 2], others, own[1]))
    delimited = engine("qwen3", multi_item_scoring_delimiter=0)
    found = delimited.score(packed_ids=[1, 2, 0, 5, 6, 0, 7, 0], label_token_ids=[[3], [4, 5]])
    check(found, logprobs(oracle("qwen3"), [1, 2], others, [[3], [4, 5]]))


def test_texts_arrays_and_item_first(demo, engine, oracle, job):
    query, items = "Find a person who likes figs.", ["Ana likes figs.", "Meru likes tea."]
    yes, no = demo.tokenizer.convert_tokens_to_ids(["▁yes", "▁no"])
    named = demo.score(query, items, labels=[["yes"], ("no", "yes")])
    assert named.logprobs == demo.score(query, items, label_token_ids=[[yes], [no, yes]], cache_salt="ids").logprobs
    query, items, _ = job
    array, expected = np.arange(2 * len(items)).reshape(-1, 2), []
    for item, own in zip(items, array, strict=True):
        expected += logprobs(oracle("qwen3"), item, [query], [own])
    check(engine("qwen3").score(query, items, label_token_ids=array, item_first=True), expected)


def test_a_long_list_reads_its_own_row_alone(engine, job, monkeypatch):
    """Rows beside it keep the programs of their own widths."""
    query, (item, *_), _ = job
    core, seen = engine("qwen3").core.runner, Counter()
    labels = [[3]] * 30 + [[4] * 9] * 29 + [[5] * (LABEL_WIDTHS[-1] + 1)]
    by_block = core._by_block

    def spy(program, hidden, rows, sizes, targets=None):
        seen["vocabulary" if program is core._read_vocabulary else targets.shape[1]] += len(rows)
        return by_block(program, hidden, rows, sizes, targets)

    monkeypatch.setattr(core, "_by_block", spy)
    options = {"label_token_ids": labels, "algorithm": "packed_segment", "cache_salt": "spied"}
    engine("qwen3").score(query, [[*item, number] for number in range(60)], **options)
    assert seen == {2: 30, 256: 29, "vocabulary": 1}


def test_an_item_with_two_lists_is_computed_twice():
    """`max_tokens_per_call` counts it so."""
    labels = [(5,), (6,), (5,), (5,)]
    tokens = ScoreInputs([1] * 10, [[2, 3], [2, 3], [2, 3], [4]], labels=labels, max_pack_tokens=1).tokens()
    assert tokens == {"serial": 5 + 30, "packed_segment": 5 + 30, "prefill_extend": 5 + 10, "packed_dense": 5 + 30}


def test_results_are_kept_by_the_items_labels(engine, job):
    query, items, labels = job
    llm, options = engine("qwen3"), {"algorithm": "packed_segment", "cache_salt": "kept by labels"}
    different = items[:5]
    first = llm.score(query, different, label_token_ids=labels[:5], **options)
    assert first.usage.cached_tokens == 0
    again = llm.score(query, different[::-1], label_token_ids=labels[:5][::-1], **options)
    assert again.logprobs == first.logprobs[::-1]
    assert again.usage.computed_tokens == 0
    changed = llm.score(query, different, label_token_ids=[labels[1], *labels[1:5]], **options)
    assert changed.logprobs[1:] == first.logprobs[1:]
    assert changed.usage.computed_tokens == len(query) + len(different[0])
    assert len(changed.logprobs[0]) == len(labels[1])
    # An item with two lists is two items.
    twice = llm.score(query, [different[3]] * 3, label_token_ids=[[1], [2], [1]], **options)
    assert twice.usage.computed_tokens == len(query) + 2 * len(different[3])
    assert twice.logprobs[0] == twice.logprobs[2] != twice.logprobs[1]


@pytest.mark.parametrize("share", [False, True])
def test_rows_of_an_option_of_several_tokens(share, engine, oracle, rng):
    """Row by row, each with its next token as its label, so that the sum is the log-probability of an option."""
    core, query, question = engine("qwen3").core, rng.integers(0, VOCAB, 30).tolist(), [7, 8, 9]
    options = [rng.integers(0, VOCAB, n).tolist() for n in (1, 4, 2)]
    items = [[*question, *option[:-1]] for option in options]
    layout, rows, labels = make_layout(query, items, [], "shared"), [], []
    for segment, option in zip(layout.segments[1:-1], options, strict=True):
        first = segment.start + len(question) - 1
        rows += range(first, first + len(option))
        labels += [(token,) for token in option]
    rows, labels = [*rows, rows[-1]], [*labels, (1, 2, 3)]  # the last row again, with other labels
    core.add(ScoreRequest("options", layout, np.asarray(rows), tuple(labels), np.arange(len(rows)), share_prefix=share))
    (result,) = [event for _ in iter(lambda: core.has_work, False) for event in core.step()]
    assert isinstance(result, ScoreResult)
    assert result.logprobs.shape == (len(rows), 3)
    assert np.isneginf(result.logprobs[:-1, 1:]).all()
    values = iter(result.logprobs[:, 0])
    for option in options:
        logits = torch.log_softmax(torch.as_tensor(oracle("qwen3").logits([*query, *question, *option])), -1).numpy()
        before = len(query) + len(question) - 1
        expected = sum(logits[before + n, token] for n, token in enumerate(option))
        assert sum(next(values) for _ in option) == pytest.approx(expected, abs=1e-4)
    (row,) = logprobs(oracle("qwen3"), query, items[-1:], [[1, 2, 3]])
    np.testing.assert_allclose(result.logprobs[-1], row, atol=1e-4)


@pytest.mark.parametrize(
    ("lists", "rows", "message"),
    [
        (((5,), (6,)), None, "2 lists of label_token_ids need row_labels"),
        (((5,), ()), [0, 1], "a list of label_token_ids is empty"),
        (((5,), (VOCAB,)), [0, 1], "token id 128"),
        (((5,), (6,)), [0, 2], "row_labels must name one of the 2 lists"),
        (((5,), (6,)), [-1, 0], "row_labels must name one of the 2 lists"),
        (((5,), (6,)), [0], "each of the 2 rows"),
    ],
)
def test_rows_without_a_list_are_refused(lists, rows, message, engine):
    core, layout = engine("qwen3").core, make_layout([], [], [1, 2, 3])
    with pytest.raises(RequestError, match=message):
        core.add(ScoreRequest("bad", layout, np.array([1, 2]), lists, None if rows is None else np.array(rows)))


ITEMS = {"query": [1, 2], "items": [[3], [4]]}
QUERIES = {"query": [[1], [2]], "items": [[[3]], [[4], [5]]]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({**ITEMS, "label_token_ids": [[5]]}, "label_token_ids holds 1 lists for 2 items"),
        ({**ITEMS, "label_token_ids": [[5], [6], [7]]}, "holds 3 lists for 2 items"),
        ({**ITEMS, "label_token_ids": [[5], []]}, "label_token_ids of item 1 must hold at least one token id"),
        ({**ITEMS, "label_token_ids": [[5], 6]}, r"label_token_ids\[1\] must be a list as other entries are, got 6"),
        ({**ITEMS, "label_token_ids": [5, [6]]}, r"label_token_ids\[0\] must be a list as other entries are, got 5"),
        ({**ITEMS, "label_token_ids": [[5], [1, True]]}, r"label_token_ids\[1\]\[1\] is not a token id: True"),
        ({**ITEMS, "label_token_ids": [[1], [True]]}, r"label_token_ids\[1\]\[0\] is not a token id: True"),
        ({**ITEMS, "label_token_ids": [[5], [-1]]}, r"label_token_ids\[1\]\[0\] is not a token id: -1"),
        ({**ITEMS, "label_token_ids": [[5], [5, VOCAB]]}, "label_token_ids of item 1: token id 128 at index 1 is outside"),
        ({**ITEMS, "label_token_ids": [[5], [5] * 1025]}, "label_token_ids of item 1 has 1025 entries, at most 1024"),
        ({**ITEMS, "label_token_ids": [[[5], [6]]]}, "label_token_ids holds lists of lists, which need a list"),
        ({**ITEMS, "label_token_ids": [[5, [6]], [7]]}, r"label_token_ids\[0\]\[1\] is not a token id: a list"),
        ({**ITEMS, "label_token_ids": [[5]] * 10_001}, "10001 label_token_ids lists exceed max_items_per_request"),
        ({**QUERIES, "label_token_ids": [[5], [6]]}, "label_token_ids holds 2 lists for 1 items"),
        ({**QUERIES, "label_token_ids": [[[5]]]}, "holds lists for 1 queries, not for 2"),
        ({**QUERIES, "label_token_ids": [[[5]], [[6]]]}, "label_token_ids of query 1 holds 1 lists for 2 items"),
        ({**QUERIES, "label_token_ids": [[[5]], [[6], []]]}, "label_token_ids of item 1 of query 1 must hold at least"),
        ({**QUERIES, "label_token_ids": [[[5]], [[6], [7, -1]]]}, r"label_token_ids\[1\]\[1\]\[1\] is not a token id"),
        ({**QUERIES, "label_token_ids": [[[5]], [6, 7]]}, r"label_token_ids\[1\]\[0\] must be a list"),
    ],
    ids=str,
)
def test_bad_lists(arguments, message, engine):
    llm = engine("qwen3")
    with pytest.raises(RequestError, match=message) as error:
        llm.score(**arguments)
    assert error.value.param == "label_token_ids"
    assert not llm.core.has_work


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([["yes"], []], "labels of item 1 must hold at least one label"),
        ([["yes"], ["no", 5]], r"labels\[1\]\[1\] must be a string, got int"),
        ([["yes"], ["no", ["yes"]]], r"labels\[1\]\[1\] must be a string, got list"),
        ([["yes"], "no"], r"labels\[1\] must be a list as other entries are, got 'no'"),
        ([["yes"], ["two words"]], "label 'two words' of item 1 is 7 tokens"),
        ([["yes"], np.array(["no"])], "labels of item 1 must be a list of strings, got ndarray"),
        ([["yes"], ["no"] * 1025], "labels of item 1 has 1025 entries"),
    ],
)
def test_bad_lists_of_texts(labels, message, demo):
    with pytest.raises(RequestError, match=message) as error:
        demo.score("a", ["b", "c"], labels=labels)
    assert error.value.param == "labels"
