"""Engines with little room: chunked prefill, preemption, eviction, stores that are too small."""

import pytest

from tests.vllm.engines import COUNT, GREEDY, SAVE, check, finish, ids

TOKEN = 2 * 2 * 64 * 2 * 4  # K/V bytes: layers, heads, channels, keys and values, float32
ENGINE = {
    "connector": {"max_store_bytes": 300 * TOKEN, "chunk_position_gap": 7},
    "max_num_batched_tokens": 64,
    "enable_chunked_prefill": True,
    "max_num_seqs": 8,
    "max_model_len": 512,
    "num_gpu_blocks_override": 40,
}


def test_chunked_prefill(llama, model, rng):
    prefix, chunks, question = ids(rng, 80), [ids(rng, 70), ids(rng, 90)], ids(rng, 150)
    for positions in ("shared", "reordered"):
        expected = model.answer(prefix, chunks, question, COUNT, positions, 7)
        check(llama.answer(llama.plan(prefix, chunks, question, positions)), expected)
        llama.reset()


def test_eviction_is_a_miss_and_then_computed_again(llama, model, rng):
    prefix, sets, question = ids(rng, 13), [[ids(rng, 70), ids(rng, 90)], [ids(rng, 80), ids(rng, 99)]], ids(rng, 9)
    plans = [llama.plan(prefix, chunks, question) for chunks in sets]
    expected = [model.answer(prefix, chunks, question, COUNT, gap=7) for chunks in sets]
    for plan, answer in zip(plans, expected):
        check(llama.answer(plan), answer)
    assert llama.metric("evicted_segments") > 0
    llama.llm.reset_prefix_cache()
    assert finish(llama.send(plans[0].composed, params=GREEDY)[0]) == "error"
    for plan, answer in zip(plans, expected):
        check(llama.answer(plan), answer)


def test_store_too_small_for_one_prompt(llama, model, rng):
    prefix, chunks, question = ids(rng, 13), [ids(rng, 150), ids(rng, 160)], ids(rng, 9)
    plan = llama.plan(prefix, chunks, question)
    for _ in range(2):
        llama.save(plan)
        assert finish(llama.send(plan.composed, params=GREEDY)[0]) == "error"
    few = llama.plan(prefix, chunks[:1], question)
    check(llama.answer(few), model.answer(prefix, chunks[:1], question, COUNT, gap=7))


def test_segment_larger_than_the_store_evicts_nothing(llama, rng):
    prefix, small, large = ids(rng, 13), ids(rng, 20), ids(rng, 301)
    llama.save(llama.plan(prefix, [small], [1]))
    held = llama.scheduler.index.keys()
    llama.save(llama.plan(prefix, [large], [1]))
    assert llama.scheduler.index.keys() == held


def test_recently_used_segments_stay(llama, rng):
    prefix, question = ids(rng, 13), ids(rng, 9)
    old, used, new = ids(rng, 90), ids(rng, 90), ids(rng, 150)
    llama.save(llama.plan(prefix, [used], question))
    llama.save(llama.plan(prefix, [old], question))
    llama.send(llama.plan(prefix, [used], question).composed)
    llama.save(llama.plan(prefix, [new], question))
    held = llama.scheduler.index.keys()
    assert set(llama.plan(prefix, [used, new], question).composed.keys) <= held
    assert not set(llama.plan(prefix, [old], question).composed.keys) <= held


@pytest.fixture
def preempted(shared_engine, monkeypatch):
    """Prompts of all requests that vLLM has preempted."""
    prompts, scheduler = [], shared_engine.core.scheduler
    preempt = scheduler._preempt_request
    monkeypatch.setattr(
        scheduler,
        "_preempt_request",
        lambda request, *rest, **named: (prompts.append(request.prompt_token_ids), preempt(request, *rest, **named)),
    )
    return prompts


@pytest.mark.parametrize("positions", ["shared", "reordered"])
def test_preemption(llama, model, rng, preempted, positions):
    """Requests that lose their blocks load them again, and continue as if nothing had happened."""
    prefix, chunks = ids(rng, 13), [ids(rng, n) for n in (40, 61, 33)]
    params = GREEDY.clone()
    params.max_tokens = 150
    orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0], [2, 1], [1, 2]]
    jobs = [([chunks[number] for number in order], ids(rng, 9)) for order in orders]
    plans = [llama.plan(prefix, picked, question, positions) for picked, question in jobs]
    llama.save(plans[0])
    outputs = llama.run([(plan.composed, params) for plan in plans])
    for output, (picked, question) in zip(outputs, jobs):
        check(output, model.answer(prefix, picked, question, 150, positions, 7))
    assert preempted


def test_preemption_after_eviction_is_an_error(llama, model, rng, preempted):
    """A preempted request whose documents are gone ends with an error; the others are right."""
    prefix, chunks = ids(rng, 13), [ids(rng, n) for n in (40, 35, 33)]
    params = GREEDY.clone()
    params.max_tokens = 370  # 16 blocks a request: four of them do not fit
    jobs = [([chunks[number] for number in order], ids(rng, 9)) for order in ([0, 1, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0])]
    plans = [llama.plan(prefix, picked, question, "reordered") for picked, question in jobs]
    llama.save(plans[0])
    for number, plan in enumerate(plans):
        llama.add(f"composed-{number}", plan.composed, params)
    for _ in range(20):
        llama.llm.llm_engine.step()
    assert len(llama.core.scheduler.running) == len(plans)
    other = llama.plan(ids(rng, 13), [ids(rng, 90), ids(rng, 90), ids(rng, 95)], [1])
    for number, request in enumerate([other.prefix, *other.saves]):
        llama.add(f"other-{number}", request, SAVE)
    outputs = llama.drain(limit=3000)
    assert not llama.scheduler.index.keys() & set(plans[0].composed.keys)
    answers = [outputs[f"composed-{number}"] for number in range(len(plans))]
    lost = [plan.composed.token_ids for plan, answer in zip(plans, answers) if finish(answer) == "error"]
    assert lost
    assert all(prompt in preempted for prompt in lost)
    for answer, (picked, question) in zip(answers, jobs):
        if finish(answer) != "error":
            check(answer, model.answer(prefix, picked, question, 370, "reordered", 7))
