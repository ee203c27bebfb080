"""LoRA adapters in `ChunkLLM`: documents of one adapter never serve another."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm.lora.request import LoRARequest

from chunkattn import DocumentPrompt
from chunkattn.integrations.vllm import ChunkLLM
from tests.vllm.test_chunk_llm import COUNT, DEMO, DOCUMENTS, GREEDY, OPTIONS, PREFIX, QUESTION, check, parts
from tests.vllm.witness import Witness

RANK, ALPHA = 8, 16
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def make_adapter(folder, merged, seed):
    """Save a random adapter in PEFT's format, and the demo model with the adapter added to its weights."""
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    torch.manual_seed(seed)
    weights = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] not in TARGETS:
            continue
        size_out, size_in = module.weight.shape
        a, b = 0.1 * torch.randn(RANK, size_in), 0.1 * torch.randn(size_out, RANK)
        weights[f"base_model.model.{name}.lora_A.weight"], weights[f"base_model.model.{name}.lora_B.weight"] = a, b
        with torch.no_grad():
            module.weight += ALPHA / RANK * b @ a
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(TARGETS)}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "bias": "none", "base_model_name_or_path": str(DEMO)}))
    model.save_pretrained(merged)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(merged)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Witness by LoRA request, with that of the model itself under None."""
    made = {None: Witness(DEMO)}
    for number, name in enumerate(("first", "second"), 1):
        folder = tmp_path_factory.mktemp(name)
        make_adapter(folder / "adapter", folder / "merged", number)
        made[LoRARequest(name, number, str(folder / "adapter"))] = Witness(folder / "merged")
    return made


@pytest.fixture(scope="module")
def llm():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK, "max_model_len": 512}
        made = ChunkLLM(str(DEMO), enable_chunk_aware=True, **OPTIONS, **options)
        yield made
        made.close()


def test_each_adapter_answers_from_its_own_documents(llm, adapters):
    prompt = DocumentPrompt(PREFIX, DOCUMENTS, QUESTION)
    other_order = DocumentPrompt(PREFIX, DOCUMENTS[::-1], QUESTION)
    first, chunks, last = parts(llm, prompt)
    expected = {lora: witness.answer(first, chunks, last, COUNT) for lora, witness in adapters.items()}
    (base, one, two) = (logprobs for _, logprobs in expected.values())
    assert min(np.abs(a - b).max() for a, b in ((base, one), (base, two), (one, two))) > 1e-2, "the adapters do nothing"
    for form, cached in ((prompt, False), (prompt, True), (other_order, True)):
        for lora, answer in expected.items():
            (output,) = llm.generate(form, GREEDY, lora_request=lora)
            check(output, answer)
            assert output.num_cached_chunk_tokens == (output.chunk_lens if cached else (0,) * len(chunks))
