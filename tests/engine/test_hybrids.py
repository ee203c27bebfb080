"""Bits of models with recurrent layers: nothing but a call's own tokens moves one."""

import numpy as np
import pytest

from chunkattn import LLM, ChunkedPrompt, SamplingParams
from chunkattn.backends.xla_recurrence import XlaRecurrence
from chunkattn.engine.state_pool import state_bytes
from tests.checkpoints import VOCAB

RNG = np.random.default_rng(8)


def draw(count):
    return RNG.integers(0, VOCAB, count).tolist()


SYSTEM, DOCUMENT, QUESTION = draw(75), draw(90), draw(9)
PLAIN = [draw(n) for n in (3, 64, 129)]
ITEMS = [draw(n) for n in (1, 70, 33, 128, 2, 64)]
GREEDY = SamplingParams(temperature=0, max_tokens=70, logprobs=3, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, seed=4, n=3, max_tokens=66, logprobs=2, ignore_eos=True)


def text(output):
    """Tokens of every sample with the bits of their log-probabilities."""
    return [
        (list(o.token_ids), [sorted((t, np.float32(p.logprob).tobytes()) for t, p in step.items()) for step in o.logprobs])
        for o in output.outputs
    ]


def scores(values):
    return [np.asarray(row, np.float32).tobytes() for row in values.scores]


def calls(llm):
    """One call of each kind after the other, with all bits of their answers."""
    answers = [text(o) for prompt in PLAIN for o in llm.generate([{"prompt_token_ids": prompt}], GREEDY)]
    answers += [text(o) for o in llm.generate([ChunkedPrompt(SYSTEM, [DOCUMENT], QUESTION)], GREEDY)]
    answers += [text(o) for o in llm.generate([ChunkedPrompt(SYSTEM, [], QUESTION)], DRAWN)]
    return [*answers, scores(llm.score(SYSTEM, ITEMS, label_token_ids=[1, 2, 3]))]


def together(llm):
    """The same answers from calls whose requests share steps."""
    prompts = [*({"prompt_token_ids": ids} for ids in PLAIN), ChunkedPrompt(SYSTEM, [DOCUMENT], QUESTION)]
    prompts += [ChunkedPrompt(SYSTEM, [], QUESTION), ChunkedPrompt(SYSTEM, [draw(17)], QUESTION)]
    *outputs, _ = llm.generate(prompts, [GREEDY] * 4 + [DRAWN, GREEDY])
    order = np.random.default_rng(0).permutation(len(ITEMS)).tolist()
    shuffled = scores(llm.score(SYSTEM, [ITEMS[i] for i in order], label_token_ids=[1, 2, 3]))
    return [*map(text, outputs), [shuffled[order.index(i)] for i in range(len(ITEMS))]]


KINDS = [("qwen3_5", "float32"), pytest.param("qwen3_5_moe", "bfloat16", marks=pytest.mark.ci)]


@pytest.mark.parametrize(("name", "dtype"), [*KINDS, pytest.param("qwen3_next", "bfloat16", marks=pytest.mark.ci)])
def test_bits(name, dtype, engine, checkpoint, tmp_path):
    """Steps of any size, company, the cache, the order of items, preemption and the disk move no bit."""
    llm = engine(name, dtype=dtype)
    expected = calls(llm)
    assert llm.core.scheduler.states.num_kept
    assert calls(llm) == expected, "warm"
    llm.reset_prefix_cache()
    assert together(llm) == expected, "in company"
    assert together(llm) == expected, "in company, warm"

    few_pages = engine(name, dtype=dtype, max_num_batched_tokens=40, kv_cache_memory_bytes=21 * llm.limits.page_bytes)
    assert together(few_pages) == expected, "in small steps and company"
    assert few_pages.core.scheduler.preemptions, "the pool was large enough for all"

    slot, seat = state_bytes(llm.core.runner.states.recurrence, 2)
    few_states = engine(name, dtype=dtype, state_cache_memory_bytes=11 * slot + 4 * seat)
    assert few_states.core.scheduler.states.num_seats == 4
    assert calls(few_states) + together(few_states) == 2 * expected, "with few states"
    assert few_states.core.scheduler.states.evictions, "the states were never short"

    folder = {"kv_store": str(tmp_path), "skip_tokenizer_init": True, "dtype": dtype, "max_num_batched_tokens": 256}
    for reads in (False, True):
        stored = LLM(str(checkpoint(name)), kv_cache_memory_bytes=8 << 20, max_num_seqs=16, max_logprobs=128, **folder)
        assert calls(stored) == expected, "with a store"
        assert (stored.core.disk.counts["hit"] > 0) == reads
        stored.core.close_disk()


@pytest.mark.ci
def test_bits_of_the_form_that_xla_computes(engine, monkeypatch):
    """Machines without the native library have the same promise; there, `test_bits` holds it in the quick tests, too."""
    for module in ("build", "runner"):
        monkeypatch.setattr(f"chunkattn.engine.{module}.make_recurrence", XlaRecurrence)
    llm = engine("qwen3_5", dtype="float32", max_num_seqs=15)
    assert isinstance(llm.core.runner.states.recurrence, XlaRecurrence)
    expected = calls(llm)
    llm.reset_prefix_cache()
    assert together(llm) == expected, "in company"
    small = engine("qwen3_5", dtype="float32", max_num_seqs=15, max_num_batched_tokens=40)
    assert together(small) == expected, "in small steps and company"
