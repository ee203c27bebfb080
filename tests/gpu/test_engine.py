"""The engine over the GPU kernel in Pallas' GPU interpreter."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("transformers")

from transformers import Qwen3Config

from chunkattn import LLM, ChunkedPrompt, SamplingParams
from chunkattn.backends.pallas_gpu.backend import PallasGpuBackend
from chunkattn.tools.bench import geometry

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TINY = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
OPTIONS = {"max_num_batched_tokens": 128, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 20, "max_model_len": 512}


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """Tokens, log-probabilities and scores of one random model by backend: chunks, their reuse, decodes and items."""
    config = Qwen3Config(num_key_value_heads=1, head_dim=64, max_position_embeddings=2048, **TINY, **geometry._COMMON)
    monkeypatch.setitem(geometry.GEOMETRIES, "tiny", config)
    geometry.save_model("tiny", tmp_path)
    rng = np.random.default_rng(0)
    prefix, one, two, question, plain = (rng.integers(5, 500, n).tolist() for n in (40, 70, 30, 20, 100))
    prompts = [ChunkedPrompt(prefix, [one, two], question), {"prompt_token_ids": plain}]
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=0)

    def run(backend, **options):
        llm = LLM(str(tmp_path), attention_backend=backend, dtype="bfloat16", **OPTIONS, **options)
        try:
            outs = [*llm.generate(prompts, params), llm.generate(ChunkedPrompt(prefix, [two, one], question), params)[0]]
            samples = [out.outputs[0] for out in outs]
            return SimpleNamespace(
                tokens=[sample.token_ids for sample in samples],
                logprobs=[[step[t].logprob for t, step in zip(s.token_ids, s.logprobs)] for s in samples],
                scores=llm.score(prefix, [one[:9], two[:5]], label_token_ids=[7, 9]).scores,
                cached=outs[-1].num_cached_tokens,
            )
        finally:
            llm.close()

    return run


@pytest.mark.parametrize(
    ("options", "whole"),
    [({}, False), ({}, True), ({"chunk_temperature": 0.7, "chunk_scale": 0.8}, False)],
    ids=["split", "whole", "weighed"],
)
def test_the_engine_answers_as_over_xla(answers, options, whole, monkeypatch):
    """Steps are too small for whole tiles, unless they are told otherwise."""
    if whole:
        monkeypatch.setattr(PallasGpuBackend, "block_splits", lambda self, batch: 1)
    ours, theirs = answers("pallas_gpu", **options), answers("xla", **options)
    assert ours.cached == theirs.cached > 100
    assert ours.tokens == theirs.tokens
    np.testing.assert_allclose(np.concatenate(ours.logprobs), np.concatenate(theirs.logprobs), atol=0.03)
    np.testing.assert_allclose(ours.scores, theirs.scores, rtol=0.03)
