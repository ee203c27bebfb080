"""Time the first token of vLLM over documents in a new order: documents reused, against vLLM's own prefill of the same tokens.

    python -m benchmarks.vllm_reuse --dtype bfloat16

Runs in an environment with vLLM (`make test-vllm` makes one), in one process. Every round shuffles the documents, asks a new
question, and times two prompts. The composed prompt of `ChunkLLM` loads its documents from the store. The plain prompt has the
same tokens, and nothing is cached. The weights are random, so the answers mean nothing.

`load` is the connector's part of the composed prompt. `read`, `rotate` and `write` are the parts of `load`, timed in further
rounds, because a clock around every layer costs time itself.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from chunkattn.terminal.progress import say

GEOMETRIES = {
    "medium": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64},
    "large": {
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
VOCAB = 4096


def make_model(folder: str, geometry: str, dtype: str) -> dict[str, int]:
    """Save a Llama of random weights, and return its sizes."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = GEOMETRIES[geometry]
    config = LlamaConfig(
        **sizes, vocab_size=VOCAB, intermediate_size=2 * sizes["hidden_size"], max_position_embeddings=16384, eos_token_id=None
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)
    return sizes


class Clock:
    """Seconds spent in a method, call by call."""

    def __init__(self, owner: Any, name: str) -> None:
        self.calls: list[float] = []
        self._owner, self._name, self._method = owner, name, getattr(owner, name)
        setattr(owner, name, self._timed)

    def _timed(self, *args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return self._method(*args, **options)
        finally:
            self.calls.append(time.perf_counter() - began)

    def remove(self) -> None:
        """Put the method back."""
        setattr(self._owner, self._name, self._method)


def seconds(call: Callable[[], Any]) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def spread(values: list[float]) -> dict[str, float]:
    """Return median, least and greatest value."""
    return {"median": statistics.median(values), "least": min(values), "greatest": max(values)}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the measured times in seconds and the sizes in bytes."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the connector's parts are timed in this process
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from chunkattn import ChunkedPrompt
    from chunkattn.integrations.vllm import ChunkLLM

    rng = random.Random(options.seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(count)]

    with tempfile.TemporaryDirectory() as folder:
        sizes = make_model(folder, options.geometry, options.dtype)
        llm = ChunkLLM(
            folder, skip_tokenizer_init=True, dtype=options.dtype, enforce_eager=True, max_model_len=8192,
            block_size=options.block_size, max_num_batched_tokens=8192, max_store_bytes=8 << 30,
        )  # fmt: skip
    worker = get_kv_transfer_group().worker_side
    greedy = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    prefix, documents = tokens(options.prefix), [tokens(options.tokens) for _ in range(options.documents)]

    def composed(question: list[int]) -> None:
        llm.generate(ChunkedPrompt(prefix, documents, question), greedy)

    def plain(question: list[int]) -> None:
        ids = [*prefix, *(token for document in documents for token in document), *question]
        llm.llm.generate([{"prompt_token_ids": ids}], [greedy], use_tqdm=False)

    plain(tokens(options.question))  # warm up
    llm.llm.reset_prefix_cache()
    cold = seconds(lambda: llm.precompute(prefix, documents))
    composed(tokens(options.question))
    load = Clock(worker, "_load")
    warm, full, again, loads = [], [], [], []

    def told(case: str, number: int, call: Callable[[], Any]) -> float:
        taken = seconds(call)
        say(f"{case}, round {number + 1} of {options.rounds}: {taken:.1f} s")
        return taken

    for number in range(options.rounds):
        rng.shuffle(documents)
        question = tokens(options.question)
        llm.llm.reset_prefix_cache()
        load.calls.clear()
        warm.append(told("composed", number, lambda q=question: composed(q)))
        loads.append(sum(load.calls))
        again.append(told("same order", number, lambda: composed(tokens(options.question))))
        llm.llm.reset_prefix_cache()
        full.append(told("plain", number, lambda q=question: plain(q)))
    load.remove()

    parts: dict[str, list[float]] = {"rotate": [], "write": [], "whole": []}
    for number in range(options.rounds):
        rng.shuffle(documents)
        llm.llm.reset_prefix_cache()
        clocks = {
            "rotate": Clock(worker._rotation, "apply"),
            "write": Clock(worker._layout, "write"),
            "whole": Clock(worker, "_load"),
        }
        told("parts of a load", number, lambda: composed(tokens(options.question)))
        for name, clock in clocks.items():
            clock.remove()
            parts[name].append(sum(clock.calls))
    parts["read"] = [whole - r - w for whole, r, w in zip(parts["whole"], parts["rotate"], parts["write"])]

    held = options.prefix + options.documents * options.tokens
    item = 2 if options.dtype == "bfloat16" else 4
    arithmetic = sizes["num_hidden_layers"] * 2 * sizes["num_key_value_heads"] * sizes["head_dim"] * item * held
    stored = sum(t.numel() * t.element_size() for t in worker.store.values())
    return {
        "geometry": options.geometry,
        "dtype": options.dtype,
        "prompt_tokens": held + options.question,
        "rounds": options.rounds,
        "save_all": cold,
        "composed": spread(warm),
        "plain": spread(full),
        "ratio": spread([f / w for f, w in zip(full, warm)]),
        "same_order_new_question": spread(again),
        "load": spread(loads),
        "read": spread(parts["read"]),
        "rotate": spread(parts["rotate"]),
        "write": spread(parts["write"]),
        "store_bytes": stored,
        "store_bytes_by_arithmetic": arithmetic,
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=GEOMETRIES, default="medium")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=500, help="tokens of a document")
    parser.add_argument("--prefix", type=int, default=50, help="tokens of the prefix")
    parser.add_argument("--question", type=int, default=20, help="tokens of the question")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measure(options)
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    for name, value in figures.items():
        if isinstance(value, dict):
            unit = "" if name == "ratio" else " s"
            print(f"{name:26} {value['median']:.4g}{unit} ({value['least']:.4g} to {value['greatest']:.4g})")
        else:
            print(f"{name:26} {value:.4g} s" if isinstance(value, float) else f"{name:26} {value}")


if __name__ == "__main__":
    main()
