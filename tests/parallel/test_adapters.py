"""Adapters by request over several devices, against one device."""

import numpy as np
import pytest

from chunkattn import LoRARequest, SamplingParams
from tests.adapter_files import make_adapter
from tests.checkpoints import VOCAB, Oracle

GREEDY = SamplingParams(temperature=0, max_tokens=6)
ENDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.ci
@pytest.mark.parametrize("size", [2, 4])
def test_devices_share_adapters(size, wide, start, tmp_path, rng):
    """Factors of outputs are divided as the outputs are, and those of inputs as the inputs; merged weights agree."""
    folder, adapter = wide("qwen3"), tmp_path / "a"
    make_adapter(adapter, Oracle(folder).model, ENDS)
    one, several = (start(folder, n, attention_backend="cpu", lora_modules=(f"a={adapter}",)) for n in (1, size))
    merged = start(folder, size, attention_backend="cpu", adapter=str(adapter))
    query, items = rng.integers(0, VOCAB, 20).tolist(), [rng.integers(0, VOCAB, 7).tolist() for _ in range(3)]
    a, found = LoRARequest("a", 1), []
    for who in (None, a):
        scores = [llm.score(query, items, label_token_ids=[3, 99], lora_request=who).logprobs for llm in (one, several)]
        np.testing.assert_allclose(scores[1], scores[0], atol=1e-4)
        found.append(np.asarray(scores[1]))
    np.testing.assert_allclose(merged.score(query, items, label_token_ids=[3, 99]).logprobs, found[1], atol=1e-4)
    assert np.abs(found[0] - found[1]).max() > 0.01
    prompts = [{"prompt_token_ids": item} for item in items]
    together = several.generate(prompts, GREEDY, lora_request=[a, None, a])
    several.reset_prefix_cache()
    for prompt, who, output in zip(prompts, (a, None, a), together, strict=True):
        assert several.generate(prompt, GREEDY, lora_request=who)[0].outputs[0].token_ids == output.outputs[0].token_ids
