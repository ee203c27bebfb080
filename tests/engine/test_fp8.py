"""The KV pool in FP8: half the bytes, nearly the same answers, and the cache still changes nothing."""

import numpy as np
import pytest

from chunkattn import LLM, ChunkedPrompt, SamplingParams
from chunkattn.engine.kv_pool import page_bytes
from chunkattn.errors import ConfigError
from tests.engine.test_cache import part, run


@pytest.mark.parametrize(("dtype", "times"), [("bfloat16", 2), ("float32", 4)])
def test_pages_are_a_half_or_a_quarter(engine, dtype, times):
    llm, fp8 = (engine("qwen3", dtype=dtype, kv_cache_dtype=kept) for kept in ("auto", "fp8"))
    assert llm.core.runner.pool.page_bytes == times * fp8.core.runner.pool.page_bytes
    assert page_bytes(fp8.core.runner.backend, fp8.core.runner.spec.num_layers) == fp8.core.runner.pool.page_bytes
    assert fp8.limits.num_pages // times == llm.limits.num_pages
    assert llm.core.runner.fingerprint() != fp8.core.runner.fingerprint()


@pytest.mark.ci
@pytest.mark.parametrize("backend", ["xla", pytest.param("reference", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_answers_are_close(engine, backend, dtype):
    """Log-probabilities of a prompt over documents move a little, and do move."""
    rng = np.random.default_rng(0)
    prompts = [ChunkedPrompt(part(rng, 20), [part(rng, n) for n in (1, 30, 17)], part(rng, 25)) for _ in range(3)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for kept in ("auto", "fp8"):
        llm = engine("qwen3", dtype=dtype, kv_cache_dtype=kept, attention_backend=backend)
        outs = run(llm, prompts, params)
        found.append([e[t].logprob for o in outs for e, t in zip(o.prompt_logprobs, o.prompt_token_ids) if e is not None])
    difference = np.abs(np.subtract(*found))
    assert 1e-3 < difference.mean() < 0.1
    assert difference.max() < 0.5


@pytest.mark.slow
def test_the_demo_model_answers_as_before(demo):
    llm = LLM(enable_chunk_aware=True, kv_cache_memory_bytes=8 << 20, max_num_batched_tokens=512, kv_cache_dtype="fp8_e4m3")
    documents = "Nila lives in Tunise. # # Rumi is a poet. # # Lezudo lives in Pegelu."
    questions = ["Where does Nila live? Answer:", "What is the job of Rumi? Answer:", "Where does Lezudo live? Answer:"]
    prompts = [f"Read the documents and answer the question. # # {documents} # # {question}" for question in questions]
    params = SamplingParams(temperature=0, max_tokens=8)
    answers = [[o.outputs[0].text.strip() for o in engine.generate(prompts, params, use_tqdm=False)] for engine in (llm, demo)]
    assert answers[0] == answers[1] == ["Tunise", "poet", "Pegelu"]


def test_scores_are_close(engine):
    rng = np.random.default_rng(2)
    query, items = part(rng, 30), [part(rng, n) for n in (3, 20, 9)]
    found = [
        engine("qwen3", kv_cache_dtype=kept).score(query, items, label_token_ids=[1, 2]).logprobs for kept in ("auto", "fp8")
    ]
    assert 1e-4 < np.abs(np.subtract(*found)).max() < 0.3


@pytest.mark.parametrize("value", ["fp8_e5m2", "bfloat16", "FP8", "", None, 8])
def test_nonsense_is_refused(value):
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        LLM(kv_cache_dtype=value)
