"""States of recurrent layers in the cache: kept where a text ends, computed once, never taken from another request."""

import re
from contextlib import closing

import numpy as np
import pytest

from chunkattn import LLM, ChunkedPrompt, SamplingParams
from chunkattn.backends.recurrence import BLOCK
from chunkattn.cache.trie import BlockTrie
from chunkattn.engine.messages import GenerateRequest, PrecomputeRequest, ScoreRequest, ScoreResult, TokenOutput
from chunkattn.engine.states import States
from chunkattn.errors import ConfigError
from chunkattn.rope.positions import make_layout
from tests.checkpoints import VOCAB
from tests.fuzz.fuzzer import spoil

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=4)
OPTIONS = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_logprobs": 16, "state_cache_memory_bytes": 4 << 20}


@pytest.fixture
def llm(engine):
    """An engine whose cache is empty before and after."""
    llm = engine("qwen3_5", **OPTIONS)
    yield llm
    llm.core.scheduler.check()
    assert llm.reset_prefix_cache()
    states = llm.core.scheduler.states
    assert (states.num_free, states.num_free_seats) == (states.num_slots, states.num_seats)


def drawn(seed, *counts):
    """Return random token ids, a list of each length."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, count).tolist() for count in counts]


def answer(llm, ids, **changes):
    """Return the output of a plain prompt."""
    params = SamplingParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": 4, **changes})
    return llm.generate([{"prompt_token_ids": ids}], params)[0]


def values(output):
    """Return tokens and log-probabilities of an output, bit for bit."""
    return [
        (sample.token_ids, [{token: entry.logprob for token, entry in row.items()} for row in sample.logprobs])
        for sample in output.outputs
    ]


def test_an_interrupt_at_a_fork_leaves_no_copy_behind(llm, monkeypatch):
    """The forks of the interrupted step must not be copied into the tracks of the steps after it."""
    ids, before = drawn(0, 100, 20)
    expected = [
        (sample.token_ids, sample.cumulative_logprob) for sample in answer(llm, ids, n=3, temperature=1, seed=1).outputs
    ]
    llm.reset_prefix_cache()
    llm.core.scheduler.states.reset()
    answer(llm, before)  # after the interrupt, the same tracks have other numbers
    core, pool = llm.core, llm.core.runner.pool
    tokens, logprobs = [[] for _ in range(3)], [0.0] * 3

    def interrupted(pairs):
        raise KeyboardInterrupt

    params = SamplingParams(temperature=1, seed=1, max_tokens=8, ignore_eos=True, logprobs=4, n=3)
    core.add(GenerateRequest("three", make_layout([], [], ids), params))
    with monkeypatch.context() as patch:
        patch.setattr(pool, "copy_pages", interrupted)
        core.step()  # begins the prompt
        with pytest.raises(KeyboardInterrupt):
            core.step()
    while core.has_work:
        for event in core.step():
            tokens[event.sample] += event.token_ids
            logprobs[event.sample] += float(event.logprobs.target.sum())
    assert list(zip(tokens, logprobs, strict=True)) == expected


@pytest.mark.parametrize("item_first", [False, True])
def test_scores_have_the_same_bits_by_every_algorithm(llm, item_first):
    """An item, even an empty one, has the bits of an item behind the query's state, whatever computes both."""
    query, *items = drawn(1, 50, 33, 1, 70, 5, 200)
    items.append([])
    found = {}
    for algorithm in ("serial", "packed_segment", "prefill_extend"):
        if item_first and algorithm == "packed_segment":
            continue
        llm.reset_prefix_cache()
        llm.frontend.scores.forget_cached()
        result = llm.score(query, items, label_token_ids=[1, 2], algorithm=algorithm, item_first=item_first)
        assert algorithm in result.algorithm  # an empty item before the query is computed serially
        found[algorithm] = result.logprobs
    assert all(own == found["serial"] for own in found.values())


def test_many_short_items_fit_a_small_pool(checkpoint):
    """Every item takes a page, so that a call of many items must become several packs."""
    with closing(LLM(str(checkpoint("qwen3_5")), skip_tokenizer_init=True, **OPTIONS, kv_cache_memory_bytes=1 << 18)) as llm:
        query, items = drawn(2, 40)[0], drawn(3, *[1] * 300)
        assert llm.core.limits.num_pages < len(items)
        whole = llm.score(query, items, label_token_ids=[1, 2], algorithm="packed_segment").logprobs
        assert whole == llm.score(query, items, label_token_ids=[1, 2], algorithm="serial").logprobs


@pytest.mark.parametrize("how", ["length", "eos", "stop"])
def test_the_state_stays_where_a_text_ends(llm, how):
    """The next turn of a chat goes on from the last whole block of the text before, however it ended."""
    (ids,) = drawn(4, 100)
    whole = answer(llm, ids, max_tokens=60).outputs[0].token_ids
    llm.reset_prefix_cache()
    last = next(n for n in range(45, 60) if whole[n] not in whole[:n]) if how == "eos" else 50
    if how == "length":
        answer(llm, ids, max_tokens=last)
    elif how == "eos":
        answer(llm, ids, max_tokens=60, stop_token_ids=[whole[last]])
    else:
        end_in_the_middle(llm, ids, last)
    longer = ids + whole[: last - 1] + [3, 2, 1]
    again = answer(llm, longer)
    assert again.num_cached_tokens == (len(ids) + last - 2) // BLOCK * BLOCK > len(ids)
    llm.reset_prefix_cache()
    assert values(again) == values(answer(llm, longer))


def end_in_the_middle(llm, ids, tokens):
    """Generate tokens of a prompt, and end its only sample as a stop string does."""
    core, count = llm.core, 0
    core.add(GenerateRequest("stopped", make_layout([], [], ids), SamplingParams(temperature=0, max_tokens=60)))
    while count < tokens:
        count += sum(isinstance(event, TokenOutput) for event in core.step())
    core.stop("stopped", 0)
    assert not core.has_work or not core.requests


@pytest.mark.parametrize("order", ["together", "one step later"])
def test_a_part_that_two_requests_share_is_computed_once(llm, order):
    """The second request waits for the state of the first, even if both come at once."""
    prefix, first, second = drawn(5, 200, 20, 30)
    core, counted = llm.core, []
    forward = core.builder.build

    def build(spans):
        counted.append(sum(span.end - span.start for span in spans))
        return forward(spans)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core.builder, "build", build)
        for number, document in enumerate((first, second)):
            core.add(PrecomputeRequest(f"of {number}", make_layout(prefix, [document], [])))
            if order != "together":
                core.step()
        while core.has_work:
            core.step()
    assert sum(counted) == len(prefix) + len(first) + len(second)


def test_a_damaged_state_is_written_to_the_store_again(checkpoint, tmp_path):
    """A state that the store has lost is computed, kept there again, and read after a restart."""
    prefix, document, question = drawn(6, 96, 80, 9)
    prompt, options = ChunkedPrompt(prefix, [document], question), {"skip_tokenizer_init": True, **OPTIONS}
    with closing(LLM(str(checkpoint("qwen3_5")), kv_store=tmp_path, **options)) as llm:
        cold = values(llm.generate([prompt], GREEDY)[0])
        disk = llm.core.disk
        assert disk.writer.flush(30)
        states = {entry.key for entry in disk.store.entries() if entry.kind == "state"}
        assert len(states) == 2
        spoil(disk.store, states)
        llm.reset_prefix_cache()
        assert values(llm.generate([prompt], GREEDY)[0]) == cold
        assert disk.writer.flush(30)
        assert disk.store.damaged == 2
        assert {entry.key for entry in disk.store.entries() if entry.kind == "state"} == states
        llm.reset_prefix_cache()
        warm = llm.generate([prompt], GREEDY)[0]
        assert values(warm) == cold
        assert warm.num_cached_tokens == len(prefix) + len(document)
        assert disk.store.damaged == 2


@pytest.fixture
def tight(checkpoint):
    """An engine with the least memory of states: one seat and four slots."""
    least = {"state_cache_memory_bytes": 1, "kv_cache_memory_bytes": 1 << 17, "skip_tokenizer_init": True}
    with pytest.raises(ConfigError, match="bytes that one prompt needs") as error:
        LLM(str(checkpoint("qwen3_5")), **OPTIONS | least)
    least["state_cache_memory_bytes"] = int(re.search(r"the (\d+) bytes", str(error.value))[1])
    with closing(LLM(str(checkpoint("qwen3_5")), **OPTIONS | least)) as llm:
        states = llm.core.scheduler.states
        assert (states.num_seats, states.num_slots) == (1, 4)
        yield llm
        llm.core.scheduler.check()
        assert llm.reset_prefix_cache()
        assert states.num_free == 4


def test_a_request_that_waits_for_a_seat_evicts_nothing(tight):
    """A request without a seat takes no pages from the cache while it waits."""
    core, (runs, waits) = tight.core, drawn(7, 20, 150)
    trie = core.scheduler.trie
    for ids in drawn(8, *[100] * 12):  # fill the pool with cached prompts
        answer(tight, ids, max_tokens=1)
    assert trie.num_free < len(waits) // core.limits.block_size
    core.add(GenerateRequest("runs", make_layout([], [], runs), SamplingParams(max_tokens=10, ignore_eos=True)))
    core.step()
    core.add(GenerateRequest("waits", make_layout([], [], waits), SamplingParams(max_tokens=1)))
    before = trie.evictions
    while "runs" in core.requests:
        core.step()
    assert trie.evictions == before
    while core.has_work:
        core.step()
    assert trie.evictions > before


def test_an_aborted_request_holds_no_state(tight):
    """The step of an aborted request is still on the device when the next request needs every slot."""
    core, (ids, parts) = tight.core, drawn(9, 240, 60)
    answer(tight, ids[:100], max_tokens=1)
    core.add(GenerateRequest("aborted", make_layout([], [], ids), SamplingParams(max_tokens=1)))
    core.step()  # goes on from the state of the first 64 tokens
    core.abort("aborted")
    layout = make_layout(parts[:20], [parts[20:40]], parts[40:])
    core.add(ScoreRequest("scored", layout, np.array([59]), ((1, 2),), share_prefix=True, state_len=10))
    events = []
    while core.has_work:
        events += core.step()
    assert [type(event) for event in events] == [ScoreResult]


def test_pinned_states_that_leave_too_few_are_named(tight):
    """A request that lacks states because of pins says so."""
    core, (ids, documents) = tight.core, drawn(10, 20, 30)
    layout = make_layout(documents[:10], [documents[10:20], documents[20:]], [], "offset")
    core.add(PrecomputeRequest("pinned", layout, pin=True, keep_states=True))
    while core.has_work:
        core.step()
    answer(tight, ids, max_tokens=1)  # one slot is left
    score = make_layout(ids[:10], [], ids[10:])
    core.add(ScoreRequest("scored", score, np.array([19]), ((1, 2),)))
    (failed,) = core.step()
    assert "states of pinned documents leave too few" in failed.reason
    assert "state_cache_memory_bytes" in failed.reason
    core.unpin(["pinned"])


def test_the_state_used_last_is_evicted_last():
    """A new state counts as used, though its block has never been released."""
    states, trie = States(3, 1), BlockTrie(4)
    old, new, next_one = (trie.new(16, keep=True) for _ in range(3))
    first = states.keep(old, 16, ready=True)
    trie.release([old])
    second = states.keep(new, 16, ready=True)
    assert states.new_slot() is not None  # the last free one
    third = states.keep(next_one, 16, ready=True)
    assert third.slot == first.slot
    assert states.find(new) is second
    states.let_go(states.hold(second))
    assert states.new_slot() == third.slot
