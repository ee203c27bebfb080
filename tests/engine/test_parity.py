"""Logits and greedy tokens against transformers, for every family, scaling, strategy and backend."""

import numpy as np
import pytest

from chunkattn import ChunkedPrompt, SamplingParams, make_layout
from chunkattn.engine.messages import GenerateRequest
from tests.checkpoints import CHECKPOINTS, CHUNKABLE, HYBRID, NESTED, VOCAB, random_parts

GREEDY = SamplingParams(temperature=0, max_tokens=32)


def engine_logits(llm, layout):
    """Raw logits `[T, vocab]` of a prompt in the user's order, from the engine's own step."""
    core = llm.core
    core.add(GenerateRequest("probe", layout, SamplingParams(max_tokens=1, prompt_logprobs=0)))
    core.scheduler.admit()
    request = core.requests["probe"]
    try:
        logits = np.zeros((len(layout), VOCAB), np.float32)
        while spans := core.scheduler.plan():
            hidden = core.runner.forward(core.builder.build(spans).arrays)[0]
            rows = np.concatenate([request.user_index[span.start : span.end] for span in spans])
            logits[rows] = core.runner._model(core.runner._params, None).logits(hidden)[: len(rows)]
            core.scheduler.fills.commit()
        assert request.samples[0].num_computed == len(layout)
        return logits
    finally:
        core.abort("probe")


def check_greedy(logits, prompt_len, tokens):
    """Every token is the argmax of the logits before it, so the whole text is the greedy one."""
    expected = logits[prompt_len - 1 : prompt_len - 1 + len(tokens)].argmax(-1)
    assert tokens == expected.tolist()


# The other families' plain prompts take the programs that their chunked prompts take.
PLAIN = ("llama", "mistral-window", "qwen2-window")


ATTENDING = [name for name in CHECKPOINTS if name not in HYBRID]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in PLAIN else pytest.mark.ci) for n in ATTENDING])
def test_plain_prompts(name, engine, oracle):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (1, 2, 17, 90)]
    llm = engine(name)
    for ids in prompts:
        np.testing.assert_allclose(engine_logits(llm, make_layout([], [], ids)), oracle(name).logits(ids), atol=1e-4)
    for ids, out in zip(prompts, llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY), strict=True):
        tokens = out.outputs[0].token_ids
        assert len(tokens) == 32
        check_greedy(oracle(name).logits(ids + tokens), len(ids), tokens)


STATIC_SCALING = ("llama-linear", "llama-llama3")
"""Their rotary tables are other numbers, nothing else; plain prompts show them right."""

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""One checkpoint of each family; the others vary biases or rotary tables."""


def _matrix():
    for name in (*CHUNKABLE, *NESTED):
        for strategy in ("shared", "offset"):
            for backend in ("xla", "reference"):
                checked = backend == "xla" and (name == "qwen3" or strategy == "shared") and name not in STATIC_SCALING
                quick = checked and name == "qwen3" and strategy == "shared"
                shows = checked and name in ("llama", "qwen2", "qwen3")
                marks = () if quick else pytest.mark.ci if shows else pytest.mark.slow
                yield pytest.param(name, strategy, backend, marks=marks, id=f"{name}-{strategy}-{backend}")


@pytest.mark.parametrize(("name", "strategy", "backend"), list(_matrix()))
def test_chunked_prompts(name, strategy, backend, engine, oracle):
    """50 random layouts of 0 to 20 chunks: raw logits, then 32 greedy tokens each, all in one batch."""
    rng = np.random.default_rng(2)
    llm = engine(name, position_strategy=strategy, attention_backend=backend)
    layouts = []
    while len(layouts) < 50:
        parts = random_parts(rng)
        layout = make_layout(*parts, strategy)
        if layout.next_position + 32 <= llm.limits.max_model_len:
            layouts.append((parts, layout))
    for _, layout in layouts:
        np.testing.assert_allclose(engine_logits(llm, layout), oracle(name).chunked(layout), atol=1e-4)
    outs = llm.generate([ChunkedPrompt(*parts) for parts, _ in layouts], GREEDY)
    for (_, layout), out in zip(layouts, outs, strict=True):
        assert out.prompt_token_ids == layout.token_ids.tolist()
        tokens = out.outputs[0].token_ids
        check_greedy(oracle(name).chunked(layout, tokens), len(layout), tokens)


def test_each_chunk_is_prefix_and_chunk_alone(engine, oracle):
    """The logits of a chunk's tokens are those of prefix + chunk as a plain prompt."""
    rng = np.random.default_rng(3)
    prefix, chunks, question = rng.integers(0, VOCAB, 9), [rng.integers(0, VOCAB, n) for n in (5, 1, 14)], [7]
    layout = make_layout(prefix, chunks, question)
    logits = engine_logits(engine("qwen3"), layout)
    for segment, chunk in zip(layout.segments[1:], chunks, strict=False):
        alone = oracle("qwen3").logits([*prefix, *chunk])[len(prefix) :]
        np.testing.assert_allclose(logits[segment.start : segment.end], alone, atol=1e-4)


def test_more_tokens_than_positions(engine, oracle):
    """64 chunks of 8 times max_position_embeddings tokens in all, under shared positions."""
    rng = np.random.default_rng(4)
    llm = engine("qwen3")
    parts = rng.integers(0, VOCAB, 8).tolist(), [rng.integers(0, VOCAB, 32).tolist() for _ in range(64)], [1, 2, 3]
    layout = make_layout(*parts)
    assert len(layout) > 8 * llm.limits.max_model_len > 8 * layout.next_position
    tokens = llm.generate(ChunkedPrompt(*parts), GREEDY)[0].outputs[0].token_ids
    check_greedy(oracle("qwen3").chunked(layout, tokens), len(layout), tokens)
