"""One `LLM` shared by threads: calls of every kind at once give what they give alone."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from chunkattn import ChunkedPrompt, SamplingParams
from chunkattn.calls.generate import GenerateJob
from tests.engine.test_cache import part

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def test_calls_of_several_threads(engine):
    rng = np.random.default_rng(0)
    llm = engine("qwen3")
    documents = [part(rng, n) for n in (9, 16, 33, 20)]

    def generate(number):
        prompt = ChunkedPrompt([1, 2], [documents[number % 4], documents[(number + 1) % 4]], [number, 3])
        return llm.generate(prompt, PARAMS, use_tqdm=False)[0].outputs[0].token_ids

    def score(number):
        return llm.score([1, 2], [[number], [3, 4]], label_token_ids=[5], use_tqdm=False).scores

    def manage(number):
        llm.unpin(llm.precompute([1, 2], documents, pin=True, use_tqdm=False))
        llm.forget([1, 2], [documents[number % 4]])
        assert "chunkattn_steps" in llm.metrics()
        return llm.lookup([1, 2], documents).total_bytes

    calls = [(call, number) for number in range(6) for call in (generate, score, manage)]
    expected = [call(number) for call, number in calls]
    llm.reset_prefix_cache()
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda c: c[0](c[1]), calls))
    for (call, _), mine, theirs in zip(calls, found, expected, strict=True):
        if call is score:
            np.testing.assert_allclose(mine, theirs, rtol=1e-5)
        else:
            assert mine == theirs
    llm.core.scheduler.check()
    assert llm.reset_prefix_cache()


def test_a_call_that_fails_does_not_wait_for_another_threads_call(engine, monkeypatch):
    llm, failed = engine("qwen3"), threading.Event()

    def flow(self):
        raise ZeroDivisionError
        yield

    monkeypatch.setattr(GenerateJob, "flow", flow)

    def call():
        with pytest.raises(ZeroDivisionError):
            llm.generate({"prompt_token_ids": [1]}, PARAMS, use_tqdm=False)
        failed.set()

    with llm._lock:
        thread = threading.Thread(target=call)
        thread.start()
        assert failed.wait(30)
    thread.join()
