"""Chunk gap: a chunk's own request sees the prefix moved back."""

import pytest
import torch

from chunkattn.integrations.vllm.requests import PARAMS_KEY, EngineRequest, plan_prompt
from tests.vllm.engines import COUNT, GREEDY, SAVE, check, differs, finish, flat, ids

GAP = 100
ENGINE = {"connector": {"chunk_position_gap": GAP}, "enable_prompt_embeds": True}


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


def test_forged_saves_of_the_same_tokens_poison_nothing(llama, model, rng):
    """Saves of a client that splits the tokens elsewhere, or leaves the gap out, come before the real ones."""
    prefix, chunk, question = ids(rng, 32), ids(rng, 64), ids(rng, 9)
    plan = llama.plan(prefix, [chunk], question)
    for positions in ("shared", "reordered"):
        for prefix_len in (0, 1, 31, 32, 33, 96):
            if (positions, prefix_len) == ("shared", 32):
                continue  # the real requests
            for token_ids in (flat(prefix, chunk)[:prefix_len], flat(prefix, chunk)):
                fields = {"save": prefix_len, "positions": positions}
                if token_ids:
                    (output,) = llama.send(EngineRequest(token_ids, None, {PARAMS_KEY: fields}))
                    assert finish(output) == "length"
    check(llama.answer(plan), model.answer(prefix, [chunk], question, COUNT, gap=GAP))


def test_refused_embeddings_of_one_token(llama):
    """A prompt of embeddings has no token ids to name its K/V."""
    params = SAVE.clone()
    params.extra_args = {"kv_transfer_params": {PARAMS_KEY: {"save": 1, "positions": "shared"}}}
    for count in (1, 40):
        (output,) = llama.llm.generate([{"prompt_embeds": torch.zeros(count, 128)}], [params], use_tqdm=False)
        assert finish(output) == "error"
