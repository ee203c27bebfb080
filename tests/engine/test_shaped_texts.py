"""Texts of given shapes in every kind of engine: each has the bits of its request alone, and its shape."""

import pytest

from chunkattn import LLM, LoRARequest, SamplingParams
from tests.adapter_files import make_adapter
from tests.shaped_texts import SHAPES, alone, asks, check, in_company, teach

KINDS = {
    "hybrid": ("qwen3_5", {}),
    "packed": ("qwen3", {"quantization": "int8"}),
    "hybrid bfloat16": ("qwen3_5", {"dtype": "bfloat16"}),
    "hybrid xla": ("qwen3_5", {"attention_backend": "xla"}),
    "hybrid experts": ("qwen3_5_moe", {}),
    "hybrid of other experts": ("qwen3_next", {}),
    "packed hybrid": ("qwen3_5", {"quantization": "int8", "dtype": "bfloat16"}),
    "bfloat16": ("qwen3", {"dtype": "bfloat16"}),
    "float16": ("qwen3", {"dtype": "float16"}),
    "xla": ("qwen3", {"attention_backend": "xla"}),
    "reference": ("qwen3", {"attention_backend": "reference"}),
    "fp8": ("qwen3", {"kv_cache_dtype": "fp8"}),
    "window": ("mistral-window", {}),
    "window bfloat16": ("gemma3-window", {"dtype": "bfloat16"}),
    "experts": ("qwen3-moe", {}),
    "experts bfloat16": ("qwen2-moe", {"dtype": "bfloat16"}),
    "offset": ("llama", {"position_strategy": "offset"}),
    "weighed": ("qwen3", {"chunk_temperature": 0.7, "chunk_scale": 1.3, "chunk_position_gap": 5}),
}
"""Checkpoint and options of an engine, by name; the first two in the quick tests."""
CASES = [*[*KINDS][:2], *(pytest.param(kind, marks=pytest.mark.ci) for kind in [*KINDS][2:])]


@pytest.mark.parametrize("kind", CASES)
def test_company_moves_no_bit(engine, monkeypatch, kind):
    name, options = KINDS[kind]
    llm = teach(engine(name, **options), monkeypatch)
    assert llm.core.limits.batch_invariant
    asked = asks(chunked="hybrid" not in kind)
    expected = alone(llm, asked)
    assert sum(reason == "stop" for samples in expected for *_, reason in samples) > len(asked) / 2
    assert in_company(llm, asked) == expected


@pytest.mark.ci
def test_adapters(checkpoint, oracle, tmp_path, monkeypatch):
    make_adapter(tmp_path / "a", oracle("qwen3").model, size=1.0)
    options = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 4 << 20, "max_num_batched_tokens": 128}
    llm = teach(LLM(str(checkpoint("qwen3")), lora_modules=(f"a={tmp_path / 'a'}",), **options), monkeypatch)
    adapted, asked = LoRARequest("a", 1), asks()
    expected = [alone(llm, asked, lora_request=which) for which in (None, adapted)]
    assert expected[0] != expected[1]
    which = [None, adapted] * (len(asked) // 2)
    found = in_company(llm, asked, lora_request=[None, *which, None])
    assert found == [expected[own is not None][number] for number, own in enumerate(which)]


@pytest.mark.parametrize("mode", ["only", "reread"])
def test_chosen_documents(engine, monkeypatch, mode):
    llm = teach(engine("qwen3"), monkeypatch)
    asked = [(prompt, params, name) for prompt, params, name in asks() if getattr(prompt, "chunks", ())]
    focus = {"top_n": 1, "mode": mode}
    expected = alone(llm, asked, focus=focus)
    assert in_company(llm, asked, focus=focus) == expected
    free = SamplingParams(temperature=0, max_tokens=1)
    chosen = [
        llm.generate(p, params, focus=focus, use_tqdm=False)[0].focus for p, *_ in asked[:1] for params in (free, asked[0][1])
    ]
    assert chosen[0] == chosen[1]


def test_witnesses_can_fail():
    class Ended:
        finish_reason, stop_reason, token_ids = "stop", None, [*b"in Paris"]

    for name in SHAPES:
        with pytest.raises(AssertionError):
            check(name, [Ended])
