"""Script that times another library. The library's own interpreter runs it, so it imports nothing of chunkattn.

    python peer_script.py transformers|vllm < jobs.jsonl

It loads the library once and runs one job per line until stdin ends. The first line has `config` (a Hugging Face
configuration) and options of the library's model; its answer has `version`. Every other line has `batches` (lists of prompts,
which are lists of token ids) and, for vLLM, `max_tokens` and `logprobs`, for transformers `labels`; its answer has `seconds`
and, from vLLM, `decode_rate`. An answer is one line of JSON on stdout. What the library prints goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


class DecodeClock:
    """Clock of the tokens per second while all sequences decode.

    The time runs from the end of the step in which the last sequence gets its first token to the end of the step in which the
    first sequence ends. Prefill is not counted. chunkattn and its peers are measured with this class.

    Args:
        sequences: number of sequences that decode together.
    """

    def __init__(self, sequences: int) -> None:
        self._sequences, self._ended = sequences, False
        self._counts: dict[str, int] = {}
        self._marks: list[tuple[float, int]] = []

    def step(self, counts: dict[str, int], *, ended: bool) -> None:
        """Read the clock at the end of a step.

        Args:
            counts: tokens that each sequence of the step has generated so far, by the sequence's name.
            ended: whether a sequence has ended in the step.
        """
        if self._ended:
            return
        self._counts |= counts
        if counts and len(self._counts) == self._sequences:
            self._marks.append((time.perf_counter(), sum(self._counts.values())))
        self._ended = ended

    @property
    def rate(self) -> float | None:
        """Return the tokens per second of all sequences; None if fewer than two steps had all of them."""
        if len(self._marks) < 2:
            return None
        (began, before), *_, (ended, after) = self._marks
        return (after - before) / (ended - began)


def load_transformers(config: dict[str, Any]) -> Any:
    """Return a causal language model with random weights in bfloat16."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    torch.set_num_threads(os.cpu_count() or 1)
    shape = transformers.AutoConfig.for_model(**config)
    return transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


def run_transformers(model: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Run one forward pass per prompt, and return their time in seconds."""
    torch: Any = importlib.import_module("torch")
    began = time.perf_counter()
    for batch in job["batches"]:
        for prompt in batch:
            with torch.inference_mode():
                logits = model(torch.tensor([prompt]), logits_to_keep=1, use_cache=False).logits[0, -1]
                torch.log_softmax(logits.float(), -1)[job["labels"]].tolist()
    return {"seconds": time.perf_counter() - began}


def load_vllm(config: dict[str, Any], **options: Any) -> Any:
    """Return a `vllm.LLM` with random weights."""
    vllm: Any = importlib.import_module("vllm")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        defaults = {"enforce_eager": True, **options}
        return vllm.LLM(folder, load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=True, **defaults)


def run_vllm(llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Run batches of prompts one after the other, each as a whole, and return their time in seconds and the decode rate."""
    vllm: Any = importlib.import_module("vllm")
    params = vllm.SamplingParams(
        max_tokens=job["max_tokens"], temperature=0, ignore_eos=True, logprobs=job["logprobs"], detokenize=False
    )
    engine, clock = llm.llm_engine, DecodeClock(len(job["batches"][-1]))
    began = time.perf_counter()
    for number, batch in enumerate(job["batches"]):
        for index, prompt in enumerate(batch):
            engine.add_request(f"{number}-{index}", {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            counts = {output.request_id: len(output.outputs[0].token_ids) for output in outputs}
            clock.step(counts, ended=any(output.finished for output in outputs))
    return {"seconds": time.perf_counter() - began, "decode_rate": clock.rate}


def main(peer: str) -> None:
    """Load a library and answer the jobs of stdin on stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        load, run = {"transformers": (load_transformers, run_transformers), "vllm": (load_vllm, run_vllm)}[peer]
        model = load(**json.loads(sys.stdin.readline()))
        print(json.dumps({"version": importlib.import_module(peer).__version__}), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(run(model, json.loads(line))), file=answers, flush=True)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        raise


if __name__ == "__main__":
    main(sys.argv[1])
