"""Script that times another library's scoring. The library's own interpreter runs it, so it imports nothing of chunkattn.

    python peer_script.py transformers|vllm RESULT < job.json

The job: `config` (a Hugging Face configuration), `query`, `items`, `item_len`, `measured_items`, `repeats`, `labels`. The
result, `{"version": ..., "seconds": [...]}`, goes to a file, because the library may write to stdout.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def ids(job: dict[str, Any], size: int) -> list[int]:
    """Return `size` random token ids."""
    return [random.randrange(job["config"]["vocab_size"]) for _ in range(size)]


def time_transformers(job: dict[str, Any]) -> dict[str, Any]:
    """Time one forward pass per item."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    torch.set_num_threads(os.cpu_count() or 1)
    config = transformers.AutoConfig.for_model(**job["config"])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()

    def score(count: int) -> float:
        query, items = ids(job, job["query"]), [ids(job, job["item_len"]) for _ in range(count)]
        began = time.perf_counter()
        for item in items:
            with torch.inference_mode():
                logits = model(torch.tensor([query + item]), logits_to_keep=1, use_cache=False).logits[0, -1]
                torch.log_softmax(logits.float(), -1)[job["labels"]].tolist()
        return time.perf_counter() - began

    score(1)
    return {"version": transformers.__version__, "seconds": [score(job["measured_items"]) for _ in range(job["repeats"])]}


def time_vllm(job: dict[str, Any]) -> dict[str, Any]:
    """Time the query with the first item, which fills the prefix cache, then all other items as one batch."""
    vllm: Any = importlib.import_module("vllm")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(job["config"]))
        llm = vllm.LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=job["query"] + job["item_len"] + 16,
            enforce_eager=True,
            enable_prefix_caching=True,
        )
    params = vllm.SamplingParams(max_tokens=1, temperature=0, logprobs=2, detokenize=False)

    def score(count: int) -> float:
        query = ids(job, job["query"])
        prompts = [{"prompt_token_ids": query + ids(job, job["item_len"])} for _ in range(count)]
        began = time.perf_counter()
        for batch in (prompts[:1], prompts[1:]):
            if batch:
                llm.generate(batch, params, use_tqdm=False)
        return time.perf_counter() - began

    score(min(8, job["measured_items"]))
    return {"version": vllm.__version__, "seconds": [score(job["measured_items"]) for _ in range(job["repeats"])]}


if __name__ == "__main__":
    result = {"transformers": time_transformers, "vllm": time_vllm}[sys.argv[1]](json.load(sys.stdin))
    Path(sys.argv[2]).write_text(json.dumps(result))
