"""Engines with little room: chunked prefill, preemption, eviction, stores that are too small."""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import pytest

from tests.vllm.engines import COUNT, GREEDY, SAVE, check, engine, finish, ids

TOKEN = 2 * 2 * 64 * 2 * 4  # K/V bytes: layers, heads, channels, keys and values, float32


@pytest.fixture
def model(witness):
    return witness("llama")


@pytest.fixture(scope="module")
def tight_engine(checkpoint):
    with engine(
        checkpoint("llama"),
        {"max_store_bytes": 300 * TOKEN, "chunk_position_gap": 7},
        max_num_batched_tokens=64,
        enable_chunked_prefill=True,
        max_num_seqs=8,
        max_model_len=512,
        num_gpu_blocks_override=40,
    ) as made:
        yield made


@pytest.fixture
def tight(tight_engine):
    tight_engine.reset()
    yield tight_engine
    tight_engine.check_idle()


def test_chunked_prefill(tight, model, rng):
    prefix, chunks, question = ids(rng, 80), [ids(rng, 70), ids(rng, 90)], ids(rng, 150)
    for positions in ("shared", "reordered"):
        expected = model.answer(prefix, chunks, question, COUNT, positions, 7)
        check(tight.answer(tight.plan(prefix, chunks, question, positions)), expected)
        tight.reset()


def test_eviction_is_a_miss_and_then_computed_again(tight, model, rng):
    prefix, sets, question = ids(rng, 13), [[ids(rng, 70), ids(rng, 90)], [ids(rng, 80), ids(rng, 99)]], ids(rng, 9)
    plans = [tight.plan(prefix, chunks, question) for chunks in sets]
    expected = [model.answer(prefix, chunks, question, COUNT, gap=7) for chunks in sets]
    for plan, answer in zip(plans, expected):
        check(tight.answer(plan), answer)
    assert tight.metric("evicted_segments") > 0
    tight.llm.reset_prefix_cache()
    assert finish(tight.send(plans[0].composed, params=GREEDY)[0]) == "error"
    for plan, answer in zip(plans, expected):
        check(tight.answer(plan), answer)


def test_store_too_small_for_one_prompt(tight, model, rng):
    prefix, chunks, question = ids(rng, 13), [ids(rng, 150), ids(rng, 160)], ids(rng, 9)
    plan = tight.plan(prefix, chunks, question)
    for _ in range(2):
        tight.save(plan)
        assert finish(tight.send(plan.composed, params=GREEDY)[0]) == "error"
    few = tight.plan(prefix, chunks[:1], question)
    check(tight.answer(few), model.answer(prefix, chunks[:1], question, COUNT, gap=7))


def test_segment_larger_than_the_store_evicts_nothing(tight, rng):
    prefix, small, large = ids(rng, 13), ids(rng, 20), ids(rng, 301)
    tight.save(tight.plan(prefix, [small], [1]))
    held = tight.scheduler.index.keys()
    tight.save(tight.plan(prefix, [large], [1]))
    assert tight.scheduler.index.keys() == held


def test_recently_used_segments_stay(tight, rng):
    prefix, question = ids(rng, 13), ids(rng, 9)
    old, used, new = ids(rng, 90), ids(rng, 90), ids(rng, 150)
    tight.save(tight.plan(prefix, [used], question))
    tight.save(tight.plan(prefix, [old], question))
    tight.send(tight.plan(prefix, [used], question).composed)
    tight.save(tight.plan(prefix, [new], question))
    held = tight.scheduler.index.keys()
    assert set(tight.plan(prefix, [used, new], question).composed.keys) <= held
    assert not set(tight.plan(prefix, [old], question).composed.keys) <= held


@pytest.mark.parametrize("positions", ["shared", "reordered"])
def test_preemption(tight, model, rng, monkeypatch, positions):
    """Requests that lose their blocks load them again, and continue as if nothing had happened."""
    scheduler, preempted = tight.core.scheduler, []
    preempt = scheduler._preempt_request
    monkeypatch.setattr(scheduler, "_preempt_request", lambda *a, **k: (preempted.append(a[0].request_id), preempt(*a, **k)))
    prefix, chunks = ids(rng, 13), [ids(rng, n) for n in (40, 61, 33)]
    params = GREEDY.clone()
    params.max_tokens = 150
    orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0], [2, 1], [1, 2]]
    jobs = [([chunks[number] for number in order], ids(rng, 9)) for order in orders]
    plans = [tight.plan(prefix, picked, question, positions) for picked, question in jobs]
    tight.save(plans[0])
    outputs = tight.run([(plan.composed, params) for plan in plans])
    for output, (picked, question) in zip(outputs, jobs):
        check(output, model.answer(prefix, picked, question, 150, positions, 7))
    assert preempted


def test_preemption_after_eviction_is_an_error_or_right(tight, model, rng):
    """A preempted request whose documents are gone ends with an error; all others are right."""
    prefix, sets = ids(rng, 13), [[ids(rng, 60), ids(rng, 50)] for _ in range(4)]
    params = GREEDY.clone()
    params.max_tokens = 60
    plans = [tight.plan(prefix, chunks, ids(rng, 9)) for chunks in sets]
    pairs = []
    for plan in plans:
        pairs += [(plan.prefix, SAVE), *((save, SAVE) for save in plan.saves), (plan.composed, params)]
    outputs = tight.run(pairs)[3::4]
    for output, plan, chunks in zip(outputs, plans, sets):
        if finish(output) != "error":
            question = plan.composed.token_ids[-9:]
            check(output, model.answer(prefix, chunks, question, 60, gap=7))
    assert any(finish(output) != "error" for output in outputs)
