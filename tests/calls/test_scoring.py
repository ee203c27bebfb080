"""Scores against one transformers forward per item; isolation; every kind of bad input."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from chunkattn.backends import AttentionBatch
from chunkattn.backends.packed_dense import PackedDenseBackend
from chunkattn.calls import score
from chunkattn.calls.algorithm_choice import STEADY, predict, refusals, select_algorithm
from chunkattn.calls.algorithms import ALGORITHMS, AUTO, ScoreInputs, packed_segment, prefill_extend
from chunkattn.calls.score import ScoreCall
from chunkattn.calls.score_memory import digests
from chunkattn.engine.messages import GenerateRequest, ScoreRequest, ScoreResult, StepRates
from chunkattn.engine.rates import tile_area
from chunkattn.engine.step_sizes import StepSizes, buckets
from chunkattn.errors import ConfigError, RequestError
from chunkattn.llm import LLM
from chunkattn.rope.positions import make_layout
from chunkattn.sampling_params import SamplingParams
from tests.checkpoints import VOCAB
from tests.flows import stages_of

SHARING = [name for name in ALGORITHMS if name != "serial"]


def one_forward_per_item(oracle, query, items, labels, item_first=False):
    """float32 `[items, labels]` log-probabilities by definition."""
    rows = []
    for item in items:
        ids = [*item, *query] if item_first else [*query, *item]
        rows.append(torch.log_softmax(torch.as_tensor(oracle.logits(ids)[-1]), -1).numpy()[labels])
    return np.array(rows)


def random_job(rng, most_items=14):
    query = rng.integers(0, VOCAB, rng.integers(1, 60)).tolist()
    count = round(most_items ** rng.random())
    items = [rng.integers(0, VOCAB, rng.integers(0, rng.choice([1, 2, 25]))).tolist() for _ in range(count)]
    if rng.random() < 0.3:
        items.append(items[0])
    labels = rng.integers(0, VOCAB, rng.integers(1, 7)).tolist()
    return query, items, labels


def check(result, expected):
    logprobs, scores = np.array(result.logprobs), np.array(result.scores)
    np.testing.assert_allclose(logprobs, expected, atol=1e-4)
    np.testing.assert_allclose(scores, np.exp(expected), atol=1e-5 * np.exp(expected).max())


@pytest.mark.exhaustive
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_requests_of_up_to_a_thousand_items(algorithm, engine, oracle):
    rng, llm = np.random.default_rng([*ALGORITHMS].index(algorithm)), engine("qwen3")
    for _ in range(30):
        query, items, labels = random_job(rng, most_items=1000)
        expected = one_forward_per_item(oracle("qwen3"), query, items, labels)
        check(llm.score(query, items, label_token_ids=labels, algorithm=algorithm), expected)


@pytest.mark.parametrize("name", ["qwen3", *(pytest.param(n, marks=pytest.mark.ci) for n in ("llama-yarn", "qwen2"))])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_scores_are_one_forward_per_item(name, algorithm, engine, oracle):
    rng = np.random.default_rng([len(name), len(algorithm)])
    llm = engine(name)
    for _ in range(15):
        query, items, labels = random_job(rng)
        expected = one_forward_per_item(oracle(name), query, items, labels)
        result = llm.score(query, items, label_token_ids=labels, algorithm=algorithm)
        assert result.algorithm == algorithm
        check(result, expected)
        normalised = llm.score(query, items, label_token_ids=labels, algorithm=algorithm, apply_softmax=True)
        shares = np.exp(expected) / np.exp(expected).sum(1, keepdims=True)
        np.testing.assert_allclose(normalised.scores, shares, atol=1e-5)


def test_offset_positions_score_the_same(engine, oracle):
    query, items, labels = random_job(np.random.default_rng(9))
    llm = engine("qwen3", position_strategy="offset")
    check(llm.score(query, items, label_token_ids=labels), one_forward_per_item(oracle("qwen3"), query, items, labels))


@pytest.mark.parametrize("count", [120, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_items_are_split_into_packs(count, engine, oracle, monkeypatch):
    rng = np.random.default_rng(10)
    items = [rng.integers(0, VOCAB, rng.integers(0, 6)).tolist() for _ in range(count)]
    llm = engine("qwen3")
    bounds = score._bounds
    sizes = {"max_pack_tokens": 300, "max_batch_tokens": 100}
    monkeypatch.setattr(score, "_bounds", lambda *args: bounds(*args) | sizes)
    expected = one_forward_per_item(oracle("qwen3"), [1, 2, 3], items, [4, 5])
    for algorithm in SHARING:
        result = llm.score([1, 2, 3], items, label_token_ids=[4, 5], algorithm=algorithm)
        assert result.usage.prompt_tokens == 3 + sum(map(len, items))
        check(result, expected)


def test_packs_respect_their_size():
    items = [[1] * n for n in (5, 100, 3, 3, 0, 9)]
    packs = list(packed_segment(ScoreInputs([7] * 10, items, max_pack_tokens=30), range(6)))
    assert [len(layout) for layout, _, _ in packs] == [15, 110, 25]
    assert [sorted(places) for _, _, places in packs] == [[0], [1], [2, 3, 4, 5]]
    batches = list(prefill_extend(ScoreInputs([7] * 10, items, max_batch_tokens=15), range(6)))
    assert [(layout.prefix_len, len(layout), sorted(places)) for layout, _, places in batches] == [
        (10, 15, [0]),
        (10, 110, [1]),
        (10, 25, [2, 3, 5]),
        (0, 10, [4]),
    ]
    *_, (layout, rows, places) = prefill_extend(ScoreInputs([7] * 40, [[], [1], []]), range(3))
    assert (layout.prefix_len, len(layout), rows.tolist(), places) == (32, 40, [39, 39], [0, 2])
    (layout, _, places), _ = packed_segment(ScoreInputs([7] * 10, items, max_pack_tokens=30), [1, 3])
    assert (len(layout), places) == (110, [1])


@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS])
def test_isolation(algorithm, engine):
    """Other items of the same length change no bit; of other lengths, next to nothing."""
    rng = np.random.default_rng(11)
    llm = engine("qwen3")
    query = rng.integers(0, VOCAB, 30).tolist()
    items = [rng.integers(0, VOCAB, n).tolist() for n in (4, 9, 1, 20, 9, 0, 6)]

    def run(items):
        return np.array(llm.score(query, items, label_token_ids=[3, 4, 5], algorithm=algorithm).logprobs)

    base = run(items)
    np.testing.assert_array_equal(run(items), base)
    for changed in range(len(items)):
        if not items[changed]:
            continue
        other = [list(i) for i in items]
        other[changed] = ((np.array(other[changed]) + rng.integers(1, VOCAB, len(other[changed]))) % VOCAB).tolist()
        result = run(other)
        others = [i for i in range(len(items)) if i != changed]
        np.testing.assert_array_equal(result[others], base[others])
        assert np.abs(result[changed] - base[changed]).max() > 1e-3
    longer = run([*items[:2], [*items[2], 1, 2, 3], *items[3:]])
    others = [0, 1, 3, 4, 5, 6]
    np.testing.assert_allclose(np.exp(longer[others]), np.exp(base[others]), atol=1e-6)
    np.testing.assert_allclose(np.exp(run(items[2:])), np.exp(base[2:]), atol=1e-6)
    order = rng.permutation(len(items))
    np.testing.assert_allclose(np.exp(run([items[i] for i in order])), np.exp(base[order]), atol=1e-6)


def test_text_is_tokenized_part_by_part(demo):
    labels = [demo.tokenizer.convert_tokens_to_ids(t) for t in ("▁yes", "▁no")]
    query, items = "Find a person who likes figs.", ["Böb 東 likes figs.", "", "Meru likes tea."]
    text = demo.score(query, items, label_token_ids=labels, algorithm="packed_segment")
    ids = [demo.tokenizer(t, add_special_tokens=False).input_ids for t in (query, *items)]
    assert text == demo.score(ids[0], ids[1:], label_token_ids=labels, algorithm="packed_segment", cache_salt="ids")
    with pytest.raises(RequestError, match="query is empty"):
        demo.score("", items, label_token_ids=labels)


def test_no_items(engine):
    result = engine("qwen3").score([1], [], label_token_ids=[2])
    assert (result.scores, result.logprobs) == ([], [])


def test_scores_may_underflow_but_log_probabilities_do_not(checkpoint, tmp_path):
    """Logits thousands apart: exp gives 0.0, the log-probabilities beside it are finite."""
    folder = shutil.copytree(checkpoint("qwen3"), tmp_path / "model")
    file = next(f for f in folder.glob("*.safetensors") if "model.norm.weight" in load_file(f))
    tensors = load_file(file)
    tensors["model.norm.weight"] *= 1e4
    save_file(tensors, file)
    llm = LLM(str(folder), skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 20)
    result = llm.score([1, 2], [[3]], label_token_ids=list(range(VOCAB)))
    assert np.isfinite(result.logprobs).all()
    assert min(result.logprobs[0]) < -1000
    assert min(result.scores[0]) == 0.0


def test_the_limit_of_an_item_does_not_depend_on_the_algorithm(engine):
    llm = engine("qwen3", max_chunk_len=4)
    for algorithm in ("auto", *ALGORITHMS):
        for items in ([[2] * 6], [[3], [2] * 6]):
            with pytest.raises(RequestError, match=f"item {len(items) - 1} has 6 tokens, max_chunk_len is 4"):
                llm.score([1], items, label_token_ids=[5], algorithm=algorithm)


def test_items_may_come_from_an_iterator(engine):
    llm = engine("qwen3")
    given, listed = (llm.score([1], items, label_token_ids=[5]) for items in (([i] for i in (2, 3)), [[2], [3]]))
    assert given.logprobs == listed.logprobs


def test_leading_special_tokens_begin_the_sequence(demo):
    """With a tokenizer that writes BOS: before the query, or before the item where that comes first."""
    encode = demo.parser.encode
    encode.leading_ids = [1]
    try:
        query, item = (encode(t) for t in ("Find a person.", "Meru likes tea."))
        for first, ids in ((False, [1, *query, *item]), (True, [1, *item, *query])):
            text = demo.score("Find a person.", ["Meru likes tea."], label_token_ids=[5], item_first=first)
            expected = demo.score(ids[:1], [ids[1:]], label_token_ids=[5]).logprobs
            np.testing.assert_allclose(text.logprobs, expected, atol=1e-4)
    finally:
        encode.leading_ids = []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"query": []}, "query is empty"),
        ({"query": None}, "needs a query"),
        ({"items": None}, "needs a query and items"),
        ({"items": "abc"}, "must be a list"),
        ({"items": ["text"]}, "all text or all token ids"),
        ({"items": [[1], [-5]]}, r"items\[1\]\[0\]"),
        ({"items": [[3], [4], [VOCAB]]}, "item 2: token id 128 is outside the vocabulary"),
        ({"query": [VOCAB], "items": []}, "query: token id 128"),
        ({"items": [[3], [1] * 300]}, "item 1 has 300 tokens, max_model_len leaves room for 254 behind the query"),
        ({"items": [[3], [1] * 300], "algorithm": "serial"}, "item 1 has 300 tokens, max_model_len leaves room for 254"),
        ({"label_token_ids": []}, "at least one"),
        ({"label_token_ids": [True]}, r"label_token_ids\[0\]"),
        ({"label_token_ids": [1.5]}, r"label_token_ids\[0\]"),
        ({"label_token_ids": [VOCAB]}, "label_token_ids: token id 128 at index 0 is outside"),
        ({"items": [], "label_token_ids": [10**6]}, "label_token_ids: token id 1000000"),
        ({"algorithm": "magic"}, "unknown algorithm"),
        ({"items": [[1]] * 10_001}, "max_items_per_request 10000"),
        ({"packed_ids": [1, 0, 2, 0]}, "multi_item_scoring_delimiter"),
    ],
    ids=str,
)
def test_bad_requests(arguments, message, engine):
    llm = engine("qwen3")
    with pytest.raises(RequestError, match=message):
        llm.score(**{"query": [1, 2], "items": [[3], [4]], "label_token_ids": [5], **arguments})
    assert not llm.core.has_work
    assert llm.score([1, 2], [[3], [4]], label_token_ids=[5, 5]).scores[0][0] > 0


def test_delimited_sequences(engine):
    """A packed sequence means its query and items; delimiter 0 is as good as any, and never seen by the model."""
    llm = engine("qwen3", multi_item_scoring_delimiter=0)
    plain = engine("qwen3").score([5, 6], [[7], [], [8, 9]], label_token_ids=[3])
    packed = llm.score(packed_ids=[5, 6, 0, 7, 0, 0, 8, 9, 0], label_token_ids=[3])
    assert packed.logprobs == plain.logprobs
    flipped = llm.score([5, 6], [[7], [], [8, 9]], label_token_ids=[3], item_first=True)
    items_first = engine("qwen3").score([5, 6], [[7], [], [8, 9]], label_token_ids=[3], item_first=True)
    assert (flipped.logprobs, flipped.algorithm) == (items_first.logprobs, "serial")
    assert flipped.logprobs != plain.logprobs
    for arguments, message in (
        ({"packed_ids": [5, 6, 7], "label_token_ids": [3]}, "no delimiter"),
        ({"packed_ids": [5, 0], "query": [1], "label_token_ids": [3]}, "instead of query"),
        ({"packed_ids": [5, 0, 6, 0], "item_first": True, "label_token_ids": [3]}, "item_first needs query and items"),
        ({"query": [5], "items": [[6], [0]], "label_token_ids": [3]}, "item 1 contains the delimiter"),
        ({"query": [5, 0], "items": [[6]], "label_token_ids": [3]}, "query contains the delimiter"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.score(**arguments)


def test_a_delimiter_that_text_cannot_stand_for_is_refused_at_start():
    with pytest.raises(ConfigError, match="tokenizes to"):
        LLM(multi_item_scoring_delimiter=200, kv_cache_memory_bytes=1 << 20)
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        LLM(multi_item_scoring_delimiter=99999, kv_cache_memory_bytes=1 << 20)


SLOW = StepRates(step=1e-3, row=1e-3, area=1e-9)


def chosen(job, rates=SLOW, *, cached=False, budget=2048, **options):
    refused = refusals(job, **{"caching": True, "backends": {}, **options})
    costs = predict(job, rates, StepSizes(buckets(8, budget, 2), 256))
    return select_algorithm("auto", refused, *costs, query_cached=cached, item_first=job.item_first)[0]


def test_auto_takes_what_is_cheapest():
    """The two workloads every scoring system is asked about, and what changes the answer."""
    long, short = ScoreInputs([1] * 2000, [[2] * 20] * 500), ScoreInputs([1] * 100, [[2] * 100] * 10)
    assert chosen(long) == "prefill_extend"
    assert chosen(short) == "packed_segment"
    # The same whatever the cache holds, where little is to be gained from it; else what gains.
    assert chosen(short, cached=True) == "packed_segment"
    assert chosen(ScoreInputs([1] * 2000, [[2] * 20] * 3)) == "prefill_extend"
    huge_step = replace(SLOW, step=1.0)
    assert [chosen(ScoreInputs([1] * 900, [[2] * 20] * 5), huge_step, cached=c) for c in (False, True)] == [
        "packed_segment",
        "prefill_extend",
    ]
    assert chosen(long, caching=False) == "packed_segment"
    turned = ScoreInputs([1] * 2000, [[2]], item_first=True)  # whatever it costs: else no item is kept
    assert [chosen(turned, rates, cached=c) for rates in (SLOW, huge_step) for c in (False, True)] == [
        "serial",
        "prefill_extend",
    ] * 2
    assert chosen(turned, cached=True, caching=False) == "serial"


def test_auto_says_what_it_expected(engine):
    result = engine("qwen3").score([1] * 40, [[2] * 3] * 20, label_token_ids=[5])
    assert set(result.predicted_seconds) == set(AUTO)
    assert min(result.predicted_seconds.values()) > 0
    assert result.predicted_seconds[result.algorithm] <= STEADY * min(result.predicted_seconds.values())


def test_the_same_request_gives_the_same_bits_whatever_was_learnt_since(engine):
    llm = engine("qwen3")
    rng = np.random.default_rng(21)
    query, items = rng.integers(0, VOCAB, 50).tolist(), [rng.integers(0, VOCAB, 5).tolist() for _ in range(4)]
    first = llm.score(query, items, label_token_ids=[5])
    algorithms = {first.algorithm}
    for rates in (StepRates(1.0, 1e-9, 1e-12), StepRates(1e-9, 1.0, 1e-12), StepRates(1e-9, 1e-9, 1.0)):
        llm.frontend.scores.rates = rates
        llm.frontend.scores.results.clear()
        again = llm.score(query, items, label_token_ids=[5])
        assert again.logprobs == first.logprobs
        algorithms.add(again.algorithm)
    assert len(algorithms) > 1


def test_a_query_is_cached_for_the_next_request(engine, oracle):
    llm = engine("qwen3", max_num_batched_tokens=64, max_num_seqs=4)
    rng = np.random.default_rng(20)
    query = rng.integers(0, VOCAB, 100).tolist()
    for cached in (0, 100):
        items = [rng.integers(0, VOCAB, n).tolist() for n in (7, 0, 30, 90, 1)]
        result = llm.score(query, items, label_token_ids=[5 + cached], algorithm="prefill_extend")
        assert result.usage.cached_tokens == cached
        # The empty item is read off the query's last token, computed again with those on its page.
        assert result.usage.computed_tokens == 100 - cached + 128 + 4
        check(result, one_forward_per_item(oracle("qwen3"), query, items, [5 + cached]))
    salted = llm.score(query, [[1]], label_token_ids=[5], algorithm="prefill_extend", cache_salt="mine")
    assert salted.usage.cached_tokens == 0


def test_rows_of_a_shared_prefix_are_refused(engine):
    """They would never be computed, and nobody answered."""
    core, layout = engine("qwen3").core, make_layout([1, 2, 3], [[4], [5]], [])
    with pytest.raises(RequestError, match="row 2 lies in the 3 tokens that other requests share"):
        core.add(ScoreRequest("shared", layout, np.array([2, 3]), ((5,),), share_prefix=True))
    assert not core.has_work


def test_decodes_are_no_attention_work():
    """A decode is no tile: counted as one it would make tiles look cheap."""
    zero, table = np.zeros(2, np.int32), np.zeros((2, 64), np.int32)
    slots = np.full(8, 1000, np.int32)
    decodes = AttentionBatch(2, np.arange(2, dtype=np.int32), slots[:2], zero, zero, table, table + 16, 16)
    span = AttentionBatch(8, slots * 0, np.arange(993, 1001, dtype=np.int32), slots * 0, zero, table, table + 16, 16)
    assert (tile_area(decodes), tile_area(span)) == (0, 4 * 256 * 256)


def test_a_query_nearly_as_large_as_the_pool(engine, oracle):
    """An item without room behind the query is scored another way, and refused where the algorithm is named."""
    rng = np.random.default_rng(22)
    llm = engine("qwen3", max_num_batched_tokens=64, max_num_seqs=4, kv_cache_memory_bytes=12 * 16 * 1536)
    room = llm.limits.num_pages * llm.limits.block_size
    query = rng.integers(0, VOCAB, room - 24).tolist()
    assert len(query) % 16 == 8
    for sizes, fits in (((3, 2, 5) * 4, True), ((17, 3), False)):
        items = [rng.integers(0, VOCAB, n).tolist() for n in sizes]
        expected = one_forward_per_item(oracle("qwen3"), query, items, [5])
        check(llm.score(query, items, label_token_ids=[5]), expected)
        if fits:
            check(llm.score(query, items, label_token_ids=[5], algorithm="prefill_extend"), expected)
        else:
            with pytest.raises(RequestError, match=r"the longest item of 17 tokens does not fit the KV pool .* room for 16"):
                llm.score(query, items, label_token_ids=[5], algorithm="prefill_extend")


def test_prefill_extend_needs_a_cache(engine):
    llm = engine("qwen3", enable_prefix_caching=False)
    with pytest.raises(RequestError, match="enable_prefix_caching=False; use 'packed_segment'"):
        llm.score([1], [[2], [3]], label_token_ids=[5], algorithm="prefill_extend")


def test_a_dense_pack_has_a_limit(checkpoint, monkeypatch):
    monkeypatch.setattr(PackedDenseBackend, "max_rows", 40)
    llm = LLM(str(checkpoint("qwen3")), skip_tokenizer_init=True, dtype="float32", kv_cache_memory_bytes=1 << 20)
    packs = ScoreCall(llm.frontend, [1] * 30, [[2, n] for n in range(9)], [(5,)] * 9, algorithm="packed_dense")
    packs.plan({})
    assert [len(request.layout) for stage in stages_of(packs) for request in stage] == [40, 38]
    assert llm.score([1] * 30, [[2] * 10] * 3, label_token_ids=[5], algorithm="packed_dense").algorithm == "packed_dense"
    with pytest.raises(RequestError, match=r"longest item are 41 tokens, a pack has at most 40"):
        llm.score([1] * 30, [[2], [2] * 11], label_token_ids=[5], algorithm="packed_dense")


def test_a_dense_pack_takes_no_pages_and_is_refused_before_any_work(engine, oracle):
    rng = np.random.default_rng(23)
    query, items = rng.integers(0, VOCAB, 100).tolist(), [rng.integers(0, VOCAB, 20).tolist() for _ in range(10)]
    small = engine("qwen3", kv_cache_memory_bytes=12 * 16 * 1536)
    assert small.limits.kv_tokens == 192
    check(
        small.score(query, items, label_token_ids=[5], algorithm="packed_dense"),
        one_forward_per_item(oracle("qwen3"), query, items, [5]),
    )
    bytes_kept = engine("qwen3", kv_cache_dtype="fp8")
    with pytest.raises(RequestError, match="packed_dense reads no cache, so K/V must stay float32"):
        bytes_kept.score(query, items, label_token_ids=[5], algorithm="packed_dense")
    pack = ScoreRequest("pack", make_layout(query, items, []), np.array([150]), ((5,),), backend="packed_dense")
    with pytest.raises(RequestError, match="packed_dense reads no cache"):
        bytes_kept.core.add(pack)
    with pytest.raises(RequestError, match="a request cannot name the attention backend 'xla'"):
        small.core.add(replace(pack, backend="xla"))
    narrow = replace(small.limits, backends={"packed_dense": (None, 200)})
    with pytest.raises(RequestError, match="packed_dense: a pack of 300 tokens exceeds the limit of 200 rows"):
        narrow.check(pack)


def test_dense_packs_take_turns_with_other_requests(engine):
    core = engine("qwen3").core
    text = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    core.add(GenerateRequest("text", make_layout([], [], [1, 2]), text))
    for name in "abc":
        core.add(ScoreRequest(name, make_layout([1], [[2], [3]], []), np.array([2]), ((5,),), backend="packed_dense"))
    core.abort("b")
    events = [event for _ in range(8) for event in core.step()]
    assert not core.has_work
    assert [e.request_id for e in events if isinstance(e, ScoreResult)] == ["a", "c"]
    scored = [step for step, event in enumerate(events) if isinstance(event, ScoreResult)]
    assert scored in ([0, 2], [1, 3])


def test_the_engine_s_own_algorithm(engine):
    llm = engine("qwen3", score_algorithm="packed_dense")
    assert llm.score([1], [[2], [3]], label_token_ids=[5]).algorithm == "packed_dense"
    assert llm.score([1], [[2], [3]], label_token_ids=[5], algorithm="auto").algorithm != "packed_dense"
    with pytest.raises(ConfigError, match="score_algorithm 'magic' is unknown"):
        LLM(score_algorithm="magic", kv_cache_memory_bytes=1 << 20)


def test_the_order_of_query_and_items_decides_no_other_call():
    """A call with the items first leaves no choice of an algorithm for a call with the query first."""
    first, last = ScoreInputs([5, 6], [[7]]), ScoreInputs([7], [[5, 6]], item_first=True)
    assert not {*digests(first, None)} & {*digests(last, None)}
    assert {*digests(first, None)} == {*digests(ScoreInputs([5, 6], [[8]]), None)}
    turned = ScoreInputs([5, 6], [[7]], item_first=True)
    assert digests(first, None)[0] == digests(turned, None)[0], "the cache holds the same tokens for both"
    assert digests(first, None)[1] != digests(turned, None)[1]
