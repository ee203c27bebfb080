"""One engine in this process: parity, and what must not go wrong around it."""

import pytest
from vllm import SamplingParams

from chunkattn.integrations.vllm.requests import PARAMS_KEY, EngineRequest
from tests.vllm.engines import COUNT, GREEDY, SAVE, check, differs, finish, flat, ids

ENGINE = {}

LAYOUTS = {
    "one chunk": (13, [7]),
    "three chunks": (13, [7, 31, 50]),
    "aligned": (32, [64, 96, 32]),
    "empty prefix": (0, [7, 31, 50, 1]),
    "one-token parts": (1, [1, 1, 2]),
    "empty chunks": (20, [0, 9, 0, 40]),
    "long prefix": (100, [120, 33, 50]),
    "sixteen chunks": (21, [3, 40, 17, 32, 5, 64, 1, 9, 33, 20, 11, 2, 50, 8, 30, 13]),
}


@pytest.mark.parametrize("positions", ["shared", "reordered"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(llama, model, rng, name, positions):
    prefix_len, chunk_lens = LAYOUTS[name]
    prefix, chunks, question = ids(rng, prefix_len), [ids(rng, n) for n in chunk_lens], ids(rng, 9)
    expected = model.answer(prefix, chunks, question, COUNT, positions)
    output = llama.answer(llama.plan(prefix, chunks, question, positions))
    check(output, expected)
    assert output.num_cached_tokens == prefix_len + sum(chunk_lens), "vLLM computed more than the question"
    if sum(n > 0 for n in chunk_lens) > 1:
        assert differs(expected, model.plain(flat(prefix, *chunks, question), 1)), "the control must differ"


@pytest.mark.parametrize("positions", ["shared", "reordered"])
def test_orders_subsets_and_repeats_compute_the_question_alone(llama, model, rng, positions):
    prefix, chunks = ids(rng, 19), [ids(rng, n) for n in (33, 12, 70)]
    llama.save(llama.plan(prefix, chunks, [1], positions))
    for order in ([0, 1, 2], [2, 1, 0], [1, 2], [2], [0, 0, 1], [2, 1, 2, 0, 2]):
        question = ids(rng, 5)
        picked = [chunks[number] for number in order]
        (output,) = llama.send(llama.plan(prefix, picked, question, positions).composed, params=GREEDY)
        check(output, model.answer(prefix, picked, question, COUNT, positions))
        assert output.num_cached_tokens >= len(flat(prefix, *picked))


def test_shared_answers_do_not_depend_on_the_order(llama, rng):
    prefix, chunks, question = ids(rng, 19), [ids(rng, n) for n in (33, 12, 70)], ids(rng, 5)
    answers = []
    for order in (chunks, chunks[::-1], [chunks[1], chunks[0], chunks[2]]):
        llama.reset()
        (completion,) = llama.answer(llama.plan(prefix, order, question)).outputs
        answers.append((list(completion.token_ids), completion.logprobs))
    assert answers[0] == answers[1] == answers[2]


def test_chunks_are_reused_behind_their_own_prefix_only(llama, model, rng):
    prefixes, chunks, question = [ids(rng, 19), ids(rng, 19)], [ids(rng, 40), ids(rng, 33)], ids(rng, 5)
    llama.save(llama.plan(prefixes[0], chunks, question))
    (output,) = llama.send(llama.plan(prefixes[1], chunks, question).composed, params=GREEDY)
    assert finish(output) == "error"
    check(llama.answer(llama.plan(prefixes[1], chunks, question)), model.answer(prefixes[1], chunks, question, COUNT))


def test_strategies_share_the_store(llama, model, rng):
    prefix, chunks, question = ids(rng, 19), [ids(rng, 40), ids(rng, 33)], ids(rng, 5)
    llama.save(llama.plan(prefix, chunks, question, "reordered"))
    (output,) = llama.send(llama.plan(prefix, chunks, question, "shared").composed, params=GREEDY)
    check(output, model.answer(prefix, chunks, question, COUNT, "shared"))


def test_plain_prompts_of_the_same_tokens_are_undisturbed(llama, model, rng):
    prefix, chunks, question = ids(rng, 32), [ids(rng, 64), ids(rng, 32)], ids(rng, 40)
    for positions in ("reordered", "shared"):
        plan = llama.plan(prefix, chunks, question, positions)
        plain, composed = model.plain(plan.composed.token_ids, COUNT), model.answer(prefix, chunks, question, COUNT, positions)
        assert differs(plain, composed)
        check(llama.plain(plan.composed.token_ids), plain)
        check(llama.answer(plan), composed)
        check(llama.plain(plan.composed.token_ids), plain)
        check(llama.send(plan.composed, params=GREEDY)[0], composed)  # from vLLM's own cache
        mixed = llama.run([(plan.composed, GREEDY), (EngineRequest(plan.composed.token_ids, None, None), GREEDY)])
        check(mixed[0], composed)
        check(mixed[1], plain)


def test_plain_prompt_in_the_middle_of_a_question(llama, model, rng):
    """The generated blocks of a composed prompt do not answer the plain prompt that continues it."""
    prefix, chunks, question = ids(rng, 32), [ids(rng, 64), ids(rng, 32)], ids(rng, 30)
    plan = llama.plan(prefix, chunks, question)
    long = SamplingParams(max_tokens=70, temperature=0, detokenize=False, ignore_eos=True)
    tokens = list(llama.answer(plan, long).outputs[0].token_ids)
    continued = [*plan.composed.token_ids, *tokens, 5]
    check(llama.plain(continued), model.plain(continued, COUNT))


def test_documents_and_prompts_in_one_call(llama, model, rng):
    """Composed requests wait for the producers of what they need, and only one request computes a document."""
    prefix, chunks = ids(rng, 21), [ids(rng, n) for n in (50, 45, 10)]
    questions = [ids(rng, n) for n in (4, 40, 9)]
    plans = [llama.plan(prefix, picked, q) for picked, q in zip([chunks, chunks[:2], chunks[::-1]], questions)]
    saves = plans[0].saves
    outputs = llama.run([*((save, SAVE) for save in saves), *((plan.composed, GREEDY) for plan in plans)])
    for output, picked, question in zip(outputs[len(saves) :], [chunks, chunks[:2], chunks[::-1]], questions):
        check(output, model.answer(prefix, picked, question, COUNT))
    assert llama.metric("waits") > 0


def test_aborted_producer_frees_its_waiters(llama, model, rng):
    prefix, chunks, question = ids(rng, 21), [ids(rng, 50), ids(rng, 45)], ids(rng, 9)
    plan = llama.plan(prefix, chunks, question)
    for number, save in enumerate(plan.saves):
        llama.add(f"save-{number}", save, SAVE)
    llama.add("composed", plan.composed, GREEDY)
    llama.llm.llm_engine.abort_request(["save-1"])
    outputs = llama.drain(limit=50)
    assert finish(outputs["composed"]) == "error"
    check(llama.answer(plan), model.answer(prefix, chunks, question, COUNT))


def test_second_producer_takes_over_from_an_aborted_one(llama, model, rng):
    prefix, chunks, question = ids(rng, 21), [ids(rng, 50)], ids(rng, 9)
    plan = llama.plan(prefix, chunks, question)
    llama.add("first", plan.saves[0], SAVE)
    llama.add("second", plan.saves[0], SAVE)
    llama.add("composed", plan.composed, GREEDY)
    llama.llm.llm_engine.abort_request(["first"])
    check(llama.drain(limit=50)["composed"], model.answer(prefix, chunks, question, COUNT))


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort_of_composed_requests(llama, model, rng, steps):
    prefix, chunks, question = ids(rng, 21), [ids(rng, 50)], ids(rng, 9)
    plan = llama.plan(prefix, chunks, question)
    llama.add("save", plan.saves[0], SAVE)
    llama.add("composed", plan.composed, GREEDY)
    for _ in range(steps):
        llama.llm.llm_engine.step()
    llama.llm.llm_engine.abort_request(["composed"])
    llama.drain(limit=50)
    check(llama.answer(plan), model.answer(prefix, chunks, question, COUNT))


def test_miss_is_refused_and_never_computed(llama, model, rng):
    prefix, chunks, question = ids(rng, 21), [ids(rng, 50), ids(rng, 45)], ids(rng, 9)
    plan = llama.plan(prefix, chunks, question)
    before = llama.metric("refused_requests")
    for _ in range(2):
        (output,) = llama.send(plan.composed, params=GREEDY)
        assert finish(output) == "error"
        assert not output.outputs[0].token_ids
    assert llama.metric("refused_requests") == before + 2
    llama.send(plan.saves[0])
    assert finish(llama.send(plan.composed, params=GREEDY)[0]) == "error"
    outputs = llama.run([(plan.composed, GREEDY), (plan.saves[1], SAVE)])  # waits: its producer is queued behind it
    check(outputs[0], model.answer(prefix, chunks, question, COUNT))


def test_partial_local_hit_loads_the_rest(llama, model, rng):
    """A question that changes within the cached blocks makes a load start in the middle of a chunk."""
    prefix, chunks = ids(rng, 21), [ids(rng, 150), ids(rng, 45), ids(rng, 3)]
    for positions in ("shared", "reordered"):
        plans = [llama.plan(prefix, chunks, ids(rng, n), positions) for n in (3, 30, 1)]
        for plan in plans:
            question = plan.composed.token_ids[len(flat(prefix, *chunks)) :]
            check(llama.answer(plan), model.answer(prefix, chunks, question, COUNT, positions))


def test_tenants_do_not_meet(llama, model, rng):
    prefix, chunks, question = ids(rng, 32), [ids(rng, 64), ids(rng, 32)], ids(rng, 9)
    expected = model.answer(prefix, chunks, question, COUNT)
    check(llama.answer(llama.plan(prefix, chunks, question, cache_salt="tenant a")), expected)
    for salt in (None, "tenant b", "tenant a "):
        plan = llama.plan(prefix, chunks, question, cache_salt=salt)
        (output,) = llama.send(plan.composed, params=GREEDY)
        assert finish(output) == "error", "a tenant learnt that another one holds the documents"
        check(llama.plain(plan.composed.token_ids, salt=salt), model.plain(plan.composed.token_ids, COUNT))
        check(llama.answer(plan), expected)


def test_plain_prompts_under_known_salts_poison_nothing(llama, model, rng):
    """Plain K/V that a client commits, under every salt that it can name, never serves a composed prompt."""
    prefix, chunks, question = ids(rng, 32), [ids(rng, 64), ids(rng, 32)], ids(rng, 40)
    plan = llama.plan(prefix, chunks, question, cache_salt="tenant")
    for salt in ("tenant", f"{PARAMS_KEY}/tenant", str(plan.composed.kv_transfer_params), *plan.composed.keys):
        check(llama.plain(plan.composed.token_ids, salt=salt), model.plain(plan.composed.token_ids, COUNT))
    check(llama.answer(plan), model.answer(prefix, chunks, question, COUNT))


def test_hash_salts_are_secret(llama, rng, monkeypatch):
    """The salt of a composed request's blocks depends on the request, and on a secret of the engine."""
    seen = []
    llama.spy(monkeypatch, lambda request: seen.append(request.cache_salt))
    prefix, chunks = ids(rng, 20), [ids(rng, 30), ids(rng, 30)]
    bounds = [20, 50, 80]

    def salts(**changes):
        fields = {"bounds": bounds, "positions": "shared", **changes}
        llama.send(EngineRequest(flat(prefix, *chunks, [1]), "tenant", {PARAMS_KEY: fields}))
        return seen.pop()

    first = salts()
    assert first == salts()
    assert first not in {salts(positions="reordered"), salts(bounds=[20, 51, 80]), salts(bounds=[20, 80]), "tenant"}
    monkeypatch.setattr(llama.scheduler, "_secret", b"another engine's")
    assert salts() != first


FORGED = {
    "no object": 3,
    "list": [1, 2],
    "null": None,
    "empty": {},
    "save text": {"save": "3", "positions": "shared"},
    "save float": {"save": 3.0, "positions": "shared"},
    "save bool": {"save": True, "positions": "shared"},
    "save negative": {"save": -1, "positions": "shared"},
    "save beyond": {"save": 1000, "positions": "shared"},
    "save huge": {"save": 2**63, "positions": "shared"},
    "both": {"save": 3, "bounds": [1, 2], "positions": "shared"},
    "unknown field": {"bounds": [1, 2], "positions": "shared", "salt": "tenant a"},
    "no positions": {"bounds": [1, 2]},
    "unknown positions": {"bounds": [1, 2], "positions": "offset"},
    "positions list": {"bounds": [1, 2], "positions": ["shared"]},
    "bounds text": {"bounds": "12", "positions": "shared"},
    "bounds empty": {"bounds": [], "positions": "shared"},
    "bounds zero": {"bounds": [0], "positions": "shared"},
    "bounds of text": {"bounds": ["1", "2"], "positions": "shared"},
    "bounds nested": {"bounds": [[1], [2]], "positions": "shared"},
    "bounds bool": {"bounds": [False, True], "positions": "shared"},
    "bounds equal": {"bounds": [1, 2, 2], "positions": "shared"},
    "bounds falling": {"bounds": [3, 2], "positions": "shared"},
    "bounds negative": {"bounds": [-1, 2], "positions": "shared"},
    "bounds at the end": {"bounds": [1, 40], "positions": "shared"},
    "bounds beyond": {"bounds": [1, 4000], "positions": "shared"},
    "too many bounds": {"bounds": list(range(100000)), "positions": "shared"},
    "never saved": {"bounds": [1, 30], "positions": "shared"},
}


@pytest.mark.parametrize("length", [40, 1])
def test_forged_parameters_are_refused_one_by_one(llama, model, rng, length):
    """Every hand-made field ends in an error for its own request, and the engine goes on."""
    token_ids = ids(rng, length)
    requests = [EngineRequest(token_ids, None, {PARAMS_KEY: fields}) for fields in FORGED.values()]
    outputs = llama.send(*requests, params=GREEDY)
    assert [finish(output) for output in outputs] == ["error"] * len(FORGED)
    check(llama.plain(token_ids), model.plain(token_ids, COUNT))
    for params in ({}, {"other": 1}, {"do_remote_prefill": False}):
        check(llama.send(EngineRequest(token_ids, None, params), params=GREEDY)[0], model.plain(token_ids, COUNT))


def test_refused_requests_leave_no_blocks_behind(llama, model, rng):
    """No later request finds blocks of a refused request."""
    prefix, chunks, question = ids(rng, 32), [ids(rng, 64), ids(rng, 32)], ids(rng, 9)
    plan = llama.plan(prefix, chunks, question)
    requests = [(plan.composed, GREEDY), *((save, SAVE) for save in plan.saves), (plan.composed, GREEDY)]
    refused = llama.plan(prefix, [chunks[1], ids(rng, 40)], question)
    outputs = llama.run([(refused.composed, GREEDY), *requests, (refused.composed, GREEDY)])
    assert finish(outputs[0]) == finish(outputs[-1]) == "error"
    for number in (1, -2):
        check(outputs[number], model.answer(prefix, chunks, question, COUNT))


def test_prompt_logprobs_of_a_loaded_prompt_are_refused(llama, model, rng):
    prefix, chunks, question = ids(rng, 21), [ids(rng, 50)], ids(rng, 9)
    plan = llama.plan(prefix, chunks, question)
    expected = model.answer(prefix, chunks, question, COUNT)
    check(llama.answer(plan), expected)
    params = SamplingParams(max_tokens=2, prompt_logprobs=1, detokenize=False)
    assert finish(llama.send(plan.composed, params=params)[0]) == "error"
    llama.llm.reset_prefix_cache()
    params = GREEDY.clone()
    params.skip_reading_prefix_cache = True  # vLLM would compute the prompt as a plain one
    check(llama.send(plan.composed, params=params)[0], expected)


def test_several_samples_of_one_prompt(llama, model, rng):
    prefix, chunks, question = ids(rng, 21), [ids(rng, 50), ids(rng, 40)], ids(rng, 9)
    plan = llama.plan(prefix, chunks, question)
    llama.save(plan)
    params = SamplingParams(n=3, max_tokens=COUNT, temperature=0.01, seed=1, detokenize=False, ignore_eos=True)
    (output,) = llama.send(plan.composed, params=params)
    assert len(output.outputs) == 3
    tokens, _ = model.answer(prefix, chunks, question, COUNT)
    assert [list(one.token_ids) for one in output.outputs] == [tokens] * 3


def test_reset_drops_the_store(llama, rng):
    prefix, chunks, question = ids(rng, 21), [ids(rng, 50)], ids(rng, 9)
    plan = llama.plan(prefix, chunks, question)
    llama.answer(plan)
    assert len(llama.worker.store) == 2
    llama.reset()
    assert finish(llama.send(plan.composed, params=GREEDY)[0]) == "error"
    assert not llama.worker.store


def test_metrics_count_bytes(llama, rng):
    names = ("saved_bytes", "saved_segments", "loaded_bytes", "loaded_segments", "loads")
    before = {name: llama.metric(name) for name in names}
    prefix, chunks, question = ids(rng, 21), [ids(rng, 50), ids(rng, 30)], ids(rng, 9)
    llama.answer(llama.plan(prefix, chunks, question))
    grown = {name: llama.metric(name) - before[name] for name in names}
    num_bytes = sum(kv.numel() * kv.element_size() for kv in llama.worker.store.values())
    assert num_bytes == 101 * 2 * 2 * 64 * 2 * 4  # tokens, layers, heads, channels, keys and values, float32
    segments = {"saved_segments": 3, "loaded_segments": 3, "loads": 1}
    assert grown == {"saved_bytes": num_bytes, "loaded_bytes": num_bytes, **segments}
    assert llama.metric("stored_bytes") == num_bytes
    assert llama.metric("stored_segments") == 3
    assert llama.metric("load_seconds") > 0
