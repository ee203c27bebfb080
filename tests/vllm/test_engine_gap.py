"""Chunk gap: a chunk's own request sees the prefix moved back."""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import pytest

from chunkattn.integrations.vllm.requests import PARAMS_KEY, plan_prompt
from tests.vllm.engines import COUNT, GREEDY, SAVE, check, differs, engine, finish, flat, ids

GAP = 100


@pytest.fixture(scope="module")
def shared_engine(checkpoint):
    with engine(checkpoint("llama"), {"chunk_position_gap": GAP}) as made:
        yield made


@pytest.fixture
def llama(shared_engine):
    shared_engine.reset()
    yield shared_engine
    shared_engine.check_idle()


@pytest.fixture
def model(witness):
    return witness("llama")


@pytest.mark.parametrize("prefix_len", [0, 1, 13, 32, 150])
@pytest.mark.parametrize("chunk_lens", [[7], [40, 31, 50], [200, 3], [0, 9], [0]])
def test_gap(llama, model, rng, prefix_len, chunk_lens):
    prefix, chunks, question = ids(rng, prefix_len), [ids(rng, n) for n in chunk_lens], ids(rng, 9)
    expected = model.answer(prefix, chunks, question, COUNT, gap=GAP)
    output = llama.answer(llama.plan(prefix, chunks, question))
    check(output, expected)
    if prefix:
        assert output.num_cached_tokens == prefix_len + sum(chunk_lens), "vLLM computed more than the question"
        assert differs(expected, model.answer(prefix, chunks, question, 1)), "the gap must matter"
    ordinary = flat(prefix, *chunks, question)
    check(llama.plain(ordinary), model.plain(ordinary, COUNT))


def test_reordered_positions_have_no_gap(llama, model, rng):
    prefix, chunks, question = ids(rng, 20), [ids(rng, 40), ids(rng, 9)], ids(rng, 9)
    for positions in ("shared", "reordered", "shared"):
        expected = model.answer(prefix, chunks, question, COUNT, positions, GAP)
        check(llama.answer(llama.plan(prefix, chunks, question, positions)), expected)


def test_chunks_of_another_gap_are_not_used(llama, rng):
    prefix, chunks, question = ids(rng, 20), [ids(rng, 40)], ids(rng, 9)
    llama.save(llama.plan(prefix, chunks, question, "reordered"))  # without gap
    (output,) = llama.send(llama.plan(prefix, chunks, question).composed, params=GREEDY)
    assert finish(output) == "error"


def test_client_without_the_gap_is_refused(llama, rng):
    """The engine's gap counts: a save request without a stored prefix is refused, not computed without a gap."""
    plan = plan_prompt(ids(rng, 20), [ids(rng, 40)], ids(rng, 9))
    assert plan.prefix is None
    assert finish(llama.send(plan.saves[0])[0]) == "error"
    assert not len(llama.scheduler.index)


def test_all_requests_in_one_call(llama, model, rng):
    prefix, chunks, question = ids(rng, 20), [ids(rng, 40), ids(rng, 33)], ids(rng, 9)
    plan = llama.plan(prefix, chunks, question)
    outputs = llama.run([(plan.prefix, SAVE), *((save, SAVE) for save in plan.saves), (plan.composed, GREEDY)])
    check(outputs[-1], model.answer(prefix, chunks, question, COUNT, gap=GAP))


def test_aborted_prefix_ends_all_that_wait(llama, model, rng):
    prefix, chunks, question = ids(rng, 20), [ids(rng, 40), ids(rng, 33)], ids(rng, 9)
    plan = llama.plan(prefix, chunks, question)
    requests = {"prefix": plan.prefix, "one": plan.saves[0], "two": plan.saves[1], "composed": plan.composed}
    for name, request in requests.items():
        llama.add(name, request, GREEDY if name == "composed" else SAVE)
    llama.llm.llm_engine.abort_request(["prefix"])
    outputs = llama.drain(limit=50)
    assert [finish(outputs[name]) for name in ("one", "two", "composed")] == ["error"] * 3
    check(llama.answer(plan), model.answer(prefix, chunks, question, COUNT, gap=GAP))


def test_gapped_blocks_answer_no_plain_prompt(llama, model, rng):
    """A save request under the gap commits its blocks where a plain prompt of the same tokens does not find them."""
    prefix, chunks = ids(rng, 32), [ids(rng, 64)]
    llama.save(llama.plan(prefix, chunks, [1]))
    ordinary = flat(prefix, *chunks, ids(rng, 3))
    check(llama.plain(ordinary), model.plain(ordinary, COUNT))


def test_plain_blocks_serve_no_gapped_save(llama, model, rng):
    prefix, chunks, question = ids(rng, 32), [ids(rng, 64)], ids(rng, 9)
    llama.plain(flat(prefix, *chunks, [1]))
    check(llama.answer(llama.plan(prefix, chunks, question)), model.answer(prefix, chunks, question, COUNT, gap=GAP))


def test_forged_save_of_a_foreign_prefix_length(llama, rng):
    prefix, chunk = ids(rng, 32), ids(rng, 64)
    plan = llama.plan(prefix, [chunk], [1])
    llama.save(plan)
    (save,) = plan.saves
    for prefix_len in (0, 1, 31, 33, 96):
        save.kv_transfer_params[PARAMS_KEY]["save"] = prefix_len
        llama.send(save)
    held = llama.scheduler.index.keys()
    assert set(plan.composed.keys) <= held
    llama.check_idle()
