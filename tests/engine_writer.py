"""An engine that fills a KV store for ever, to be killed: `python -m tests.engine_writer MODEL STORE`."""

import sys

import numpy as np

from chunkattn import LLM, ChunkedPrompt, SamplingParams

OPTIONS = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 2 << 20, "max_num_batched_tokens": 128, "max_num_seqs": 8}
PREFIX = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def document(number: int) -> list[int]:
    return np.random.default_rng(number).integers(0, 128, 20 + number % 40).tolist()


def main() -> None:
    llm = LLM(sys.argv[1], kv_store=sys.argv[2], kv_store_max_bytes=8 << 20, **OPTIONS)
    print("started", flush=True)
    number = 0
    while True:
        prompts = [ChunkedPrompt(PREFIX, [document(n % 100) for n in range(number + i, number + i + 3)], [7]) for i in range(4)]
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
        number += 4


if __name__ == "__main__":
    main()
