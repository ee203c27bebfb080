"""Scoring leaves nothing in the cache but its query, and label lists of any length share a step."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.special import log_softmax

from chunkattn import LLM, ChunkedPrompt, SamplingParams
from chunkattn.cache.disk.store import KVStore
from chunkattn.engine.kv_pool import fingerprint
from chunkattn.engine.messages import (
    GenerateRequest,
    PromptLogprobsOutput,
    RequestFailed,
    ScoreRequest,
    ScoreResult,
    TokenOutput,
)
from chunkattn.rope.positions import make_layout
from chunkattn.rope.rotary import RotarySpec
from tests.checkpoints import VOCAB
from tests.engine.test_cache import COLD, GREEDY, check_same, part
from tests.engine_writer import OPTIONS


def score_by_extension(llm, query, items):
    llm.score(query, items, label_token_ids=[1, 2], algorithm="prefill_extend", use_tqdm=False)


@pytest.mark.parametrize(("query_len", "item_lens"), [(16, (5, 11)), (16, (16, 16)), (7, (9, 16))])
def test_a_plain_prompt_reads_no_scored_item(engine, query_len, item_lens):
    rng = np.random.default_rng(0)
    llm = engine("qwen3")
    llm.reset_prefix_cache()
    query, items, tail = part(rng, query_len), [part(rng, n) for n in item_lens], part(rng, 3)
    score_by_extension(llm, query, items)
    prompt = {"prompt_token_ids": [*query, *items[0], *items[1], *tail]}
    warm = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert warm[0].num_cached_tokens <= query_len // 16 * 16
    check_same(warm, llm.generate(prompt, COLD, use_tqdm=False))


def test_a_chunk_is_no_scored_item(engine):
    """The items' joined tokens, as one chunk behind the same prefix: chunk keys have no page boundary of the query in them."""
    rng = np.random.default_rng(1)
    llm = engine("qwen3")
    llm.reset_prefix_cache()
    query, items = part(rng, 7), [part(rng, 5), part(rng, 11)]
    score_by_extension(llm, query, items)
    prompt = ChunkedPrompt(query, [[*items[0], *items[1]]], part(rng, 4))
    warm = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert warm[0].num_cached_tokens == len(query)
    check_same(warm, llm.generate(prompt, COLD, use_tqdm=False))


def test_no_scored_item_reaches_the_disk(checkpoint, tmp_path):
    rng = np.random.default_rng(2)
    query, items = part(rng, 7), [part(rng, 5), part(rng, 11)]
    prompt = ChunkedPrompt(query, [[*items[0], *items[1]]], part(rng, 4))

    def start():
        return LLM(str(checkpoint("qwen3")), max_logprobs=VOCAB, kv_store=tmp_path / "kv", **OPTIONS)

    llm = start()
    cold = llm.generate(prompt, COLD, use_tqdm=False)
    score_by_extension(llm, query, items)
    llm.generate(prompt, GREEDY, use_tqdm=False)
    llm.close()
    llm = start()
    warm = llm.generate(prompt, GREEDY, use_tqdm=False)
    llm.close()
    assert warm[0].num_cached_tokens == 23
    check_same(warm, cold)


def run_core(llm, *messages):
    """Every output of messages that share their steps."""
    for message in messages:
        llm.core.add(message)
    outputs = []
    while llm.core.has_work:
        outputs += llm.core.step()
    return outputs


def score_message(name, rng, length, labels, rows=None):
    layout = make_layout([], [], part(rng, length))
    return ScoreRequest(name, layout, np.asarray(rows or [length - 1]), (tuple(map(int, labels)),))


def test_label_lists_of_different_lengths_share_steps(engine):
    """A request read over several steps, beside others with longer and shorter lists, and a generation."""
    rng = np.random.default_rng(3)
    llm = engine("qwen3", max_num_batched_tokens=64)
    long = score_message("long", rng, 150, [1], rows=[3, 70, 149])
    many = [score_message(f"many{n}", rng, 20, np.arange(n) % VOCAB, rows=[5, 19]) for n in (3, 9, 3 * VOCAB)]
    text = GenerateRequest("text", make_layout([], [], part(rng, 10)), SamplingParams(max_tokens=4, ignore_eos=True))
    outputs = run_core(llm, long, *many, text)
    assert not [o for o in outputs if isinstance(o, RequestFailed)]
    assert sum(isinstance(o, TokenOutput) for o in outputs) == 4
    found = {o.request_id: o.logprobs for o in outputs if isinstance(o, ScoreResult)}
    for message in (long, *many):
        (alone,) = run_core(llm, message)
        assert found[message.request_id].shape == (len(message.rows), len(message.label_token_ids[0]))
        np.testing.assert_allclose(found[message.request_id], alone.logprobs, atol=1e-5)


def test_ranked_and_unranked_readouts_share_a_step(engine, oracle):
    """Prompts read with and without ranks, beside a generation that is sampled and answers that are discarded."""
    rng, llm = np.random.default_rng(4), engine("qwen3")
    llm.reset_prefix_cache()
    read = {"without": (0, 12), "text": (None, None), "all": (2, None), "few": (2, 15), "plain": (0, None), "other": (0, 3)}
    messages = {
        name: GenerateRequest(
            name,
            make_layout([], [], part(rng, 20)),
            SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=top),
            logprobs_from=start,
            prompt_only=start is not None,
        )
        for name, (top, start) in read.items()
    }
    steps, forward = [], llm.core.runner.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.core.runner, "forward", lambda batch: steps.append(1) or forward(batch))
        outputs = run_core(llm, *messages.values())
    assert len(steps) == 1
    tokens = {o.request_id: o.token_ids for o in outputs if isinstance(o, TokenOutput)}
    prompts = {o.request_id: o for o in outputs if isinstance(o, PromptLogprobsOutput)}
    for name, message in messages.items():
        ids, (top, start) = message.layout.token_ids, read[name]
        expected = log_softmax(oracle("qwen3").logits(ids), axis=-1)
        if start is None:
            assert tokens[name] == (expected[-1].argmax(),)
        if top is None:
            continue
        values, begin = prompts[name].logprobs, start or 1
        assert np.flatnonzero(prompts[name].known).tolist() == [*range(begin, len(ids))]
        rows, wanted = expected[begin - 1 : -1], ids[begin:]
        targets = rows[np.arange(len(rows)), wanted]
        np.testing.assert_allclose(values.target[begin:], targets, atol=1e-4)
        if start is None or top:
            assert (values.rank[begin:] == 1 + (rows > targets[:, None]).sum(-1)).all()
            best = np.argsort(-rows, axis=-1)[:, :top]
            assert (values.top_ids[begin:] == best).all()
            np.testing.assert_allclose(values.top[begin:], np.take_along_axis(rows, best, axis=-1), atol=1e-4)
        else:
            assert not values.rank.any()


def test_more_labels_than_tokens(engine):
    """Duplicates are allowed, so a list may be longer than the vocabulary."""
    llm = engine("qwen3")
    scores = llm.score([5, 6], [[7]], label_token_ids=[3] * (VOCAB + 1), use_tqdm=False).scores
    (expected,) = llm.score([5, 6], [[7]], label_token_ids=[3], use_tqdm=False).scores
    np.testing.assert_allclose(scores, [expected * (VOCAB + 1)], rtol=1e-6)


def test_the_fingerprint_names_values_not_their_texts(engine, monkeypatch):
    """NumPy prints a float32 in other ways from version to version; the code's own version counts."""
    spec = engine("qwen3").core.runner.spec
    assert fingerprint([np.float32(0.5), spec], []) == fingerprint([0.5, spec], [])
    before = fingerprint(spec, [])
    assert before != fingerprint(replace(spec, norm_eps=spec.norm_eps * 2), [])
    faster = RotarySpec(tuple(2 * frequency for frequency in spec.layers[0].mixer.rotary.inv_freq))
    assert before != fingerprint(spec.map(lambda layer: replace(layer, mixer=replace(layer.mixer, rotary=faster))), [])
    monkeypatch.setattr("chunkattn.engine.kv_pool.KV_VERSION", 1)
    assert before != fingerprint(spec, [])


def test_a_store_of_another_version_is_a_miss(checkpoint, tmp_path, monkeypatch):
    """Neither other code's K/V nor a record of another format is served; gc removes what it cannot read."""

    def cached():
        llm = LLM(str(checkpoint("qwen3")), max_logprobs=VOCAB, kv_store=tmp_path / "kv", **OPTIONS)
        out = llm.generate(ChunkedPrompt([3] * 20, [[4] * 20], [5]), GREEDY, use_tqdm=False)[0]
        llm.close()
        return out.num_cached_tokens

    with monkeypatch.context() as patch:
        patch.setattr("chunkattn.engine.kv_pool.KV_VERSION", 1)
        cached()
    with monkeypatch.context() as patch:
        patch.setattr("chunkattn.cache.disk.store.FORMAT", 1)
        assert cached() == 0
    with KVStore(tmp_path / "kv") as store:
        assert len(store.entries()) == 2
        before = store.num_bytes
        assert store.gc(max_bytes=1 << 30) == 0
        assert store.num_bytes < before
        assert len(store.entries()) == 2
    assert cached() == 0
    assert cached() == 40
