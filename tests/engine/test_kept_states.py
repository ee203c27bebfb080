"""States that precomputed documents keep, what lookups count as cached, and pins of more states than there are."""

import numpy as np
import pytest

from chunkattn import LLM, ChunkedPrompt, SamplingParams
from chunkattn.engine.messages import PrecomputeRequest
from chunkattn.errors import CapacityError, RequestError
from tests.checkpoints import VOCAB

OPTIONS = {
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 4 << 20,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 1,
    "max_logprobs": 4,
}
GREEDY = SamplingParams(temperature=0, max_tokens=2)
SLOTS = 9


@pytest.fixture(scope="module")
def llm(checkpoint):
    """An engine with `SLOTS` slots."""
    folder = str(checkpoint("qwen3_5"))
    states = LLM(folder, **OPTIONS, state_cache_memory_bytes=1 << 18).core.runner.states
    size = (1 << 18) + (SLOTS - states.num_slots) * states.slot_bytes
    made = LLM(folder, **OPTIONS, state_cache_memory_bytes=size)
    assert made.limits.state_slots == SLOTS
    yield made
    made.core.scheduler.check()
    assert made.reset_prefix_cache()


@pytest.fixture(autouse=True)
def _empty(llm):
    llm.reset_prefix_cache()


def parts(seed, *lengths):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).tolist() for length in lengths]


def computed(llm):
    """Return the prompt tokens that steps have computed so far."""
    llm.core.metrics_text()
    return llm.core.metrics.value("tokens_total", kind="prefill")


def kept(report):
    return [document.state_kept for document in report.documents]


def cached(report):
    return [document.was_cached for document in report.documents]


def test_a_document_keeps_its_state_only_when_asked(llm):
    prefix, *documents, question = parts(1, 40, 90, 30, 64, 5)
    assert kept(llm.precompute(prefix, documents, use_tqdm=False)) == [False] * 3
    assert llm.core.scheduler.states.num_kept == 1, "the prefix's"
    assert cached(llm.lookup(prefix, documents)) == [True] * 3
    assert cached(llm.lookup(prefix, documents, keep_states=True)) == [False] * 3
    (out,) = llm.generate([ChunkedPrompt(prefix, documents[:1], question)], GREEDY, use_tqdm=False)
    assert out.num_cached_tokens == 40, "the document is computed again for its state"
    report = llm.precompute(prefix, documents, keep_states=True, use_tqdm=False)
    assert (kept(report), cached(report)) == ([True] * 3, [True, False, False])
    found = llm.lookup(prefix, documents, keep_states=True)
    assert (kept(found), cached(found)) == ([True] * 3, [True] * 3)
    (out,) = llm.generate([ChunkedPrompt(prefix, documents[1:2], question)], GREEDY, use_tqdm=False)
    assert out.num_cached_tokens == 70
    assert (report.state_bytes, report.state_slots) == (llm.core.runner.states.slot_bytes, SLOTS)


def test_a_model_without_recurrent_layers_accepts_the_wish(engine):
    prefix, *documents = parts(2, 20, 30, 17)
    report = engine("qwen3").precompute(prefix, documents, keep_states=True, pin=True, use_tqdm=False)
    engine("qwen3").unpin(report)
    assert (kept(report), report.state_bytes, report.state_slots, report.fits) == ([False] * 2, 0, 0, 2)
    assert cached(engine("qwen3").lookup(prefix, documents, keep_states=True)) == [True] * 2
    with pytest.raises(RequestError, match="keep_states must be True or False"):
        engine("qwen3").precompute(prefix, documents, keep_states="yes")


def test_a_lookup_counts_the_tokens_that_are_not_computed_again(llm):
    """Few slots, so that states are evicted whose K/V stays."""
    rng = np.random.default_rng(3)
    prefixes, documents = parts(4, 40, 64, 70, 130, 1), parts(5, 90, 30, 64, 150)
    missing = hits = 0
    for number in range(60):
        prefix = prefixes[rng.integers(len(prefixes))]
        chosen = [documents[rng.integers(len(documents))]] * int(rng.integers(0, 2))
        options = {"keep_states": bool(rng.integers(2))}
        message = next(job_requests(llm, prefix, chosen, **options))
        found, before = llm.core.look_up(message), computed(llm)
        llm.precompute(prefix, chosen, use_tqdm=False, **options)
        rows = computed(llm) - before
        assert rows == len(message.layout) - found.total, (number, found)
        missing, hits = missing + (0 < rows < len(message.layout)), hits + (rows == 0)
    assert missing > 5
    assert hits > 5
    assert llm.core.scheduler.states.evictions > 5


def job_requests(llm, prefix, documents, **options):
    from chunkattn.calls.precompute import precompute_job

    for stage in precompute_job(llm.frontend, prefix, documents, **options).stages():
        assert all(isinstance(request, PrecomputeRequest) for request in stage)
        yield from stage


def test_pins_hold_no_more_states_than_there_are(llm):
    prefix, *documents = parts(6, 20, *[5] * SLOTS)
    report = llm.lookup(prefix, documents, keep_states=True)
    assert report.fits == SLOTS - 2, "one state is the prefix's, and one a running request's"
    with pytest.raises(CapacityError, match=rf"the {SLOTS + 1} states .* holds {SLOTS} of .* raise state_cache_memory_bytes"):
        llm.precompute(prefix, documents, keep_states=True, pin=True, use_tqdm=False)
    assert not llm.core.pins
    first = llm.precompute(prefix, documents[:3], keep_states=True, pin=True, use_tqdm=False)
    with pytest.raises(CapacityError, match=r"states of pinned documents leave too few.* raise state_cache_memory_bytes"):
        llm.precompute(prefix, documents[3:8], keep_states=True, pin=True, use_tqdm=False)
    assert sorted(llm.core.pins) == sorted(first.pin_ids), "the call that failed pins nothing"
    second = llm.precompute(prefix, documents[3:7], keep_states=True, pin=True, use_tqdm=False)
    llm.core.scheduler.check()
    plain, *others = parts(7, 30, 20, 20, 20)
    llm.generate([{"prompt_token_ids": ids} for ids in (plain, *others)], GREEDY, use_tqdm=False)
    assert kept(llm.lookup(prefix, documents[:7])) == [True] * 7, "pinned states stay"
    llm.unpin(first)
    llm.unpin(second)
    llm.precompute(prefix, documents[7:], keep_states=True, pin=True, use_tqdm=False)


def test_metrics_count_slots_and_evictions(llm):
    value = llm.core.metrics.value

    def slots():
        llm.metrics()
        return [value("state_slots", state=state) for state in ("free", "cached", "used")]

    assert slots() == [SLOTS, 0, 0]
    prefix, *documents = parts(8, 20, *[5] * 12)
    pinned = llm.precompute(prefix, documents[:2], keep_states=True, pin=True, use_tqdm=False)
    assert slots() == [SLOTS - 3, 0, 3]
    before = value("state_evictions_total")
    llm.precompute(prefix, documents[2:], keep_states=True, use_tqdm=False)
    free, idle, used = slots()
    assert (free + idle, used) == (SLOTS - 3, 3)
    assert value("state_evictions_total") - before == 10 - idle
    llm.unpin(pinned)
    assert slots()[2] == 0
