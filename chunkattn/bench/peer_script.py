"""Script that times another library. The library's own interpreter runs it, so it imports nothing of chunkattn.

    python peer_script.py transformers|vllm RESULT < job.json
    python peer_script.py serve < jobs.jsonl

The first form times scoring. The job: `config` (a Hugging Face configuration), `query`, `items`, `item_len`, `measured_items`,
`repeats`, `labels`, and `options` of `vllm.LLM`. The result, `{"version": ..., "seconds": [...]}`, goes to a file, because the
library may write to stdout.

The second form loads vLLM once and runs one job per line until stdin ends. The first line has `config`, `dtype`,
`max_model_len`, `max_num_batched_tokens` and any other options of `vllm.LLM`; its answer has `version`. Every other line has
`batches` (lists of prompts, which are lists of token ids), `max_tokens` and `logprobs`; its answer has `seconds` and
`decode_rate`. An answer is one line of JSON on stdout. What the library prints goes to stderr.
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
    length = job["query"] + job["item_len"] + 16
    llm = load_vllm(job["config"], dtype="bfloat16", max_model_len=length, **job["options"])
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


def load_vllm(config: dict[str, Any], **options: Any) -> Any:
    """Return a `vllm.LLM` with random weights."""
    vllm: Any = importlib.import_module("vllm")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return vllm.LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            **{"enforce_eager": True, **options},
        )


def serve_vllm() -> None:
    """Load vLLM and answer the jobs of stdin on stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        vllm: Any = importlib.import_module("vllm")
        llm = load_vllm(**json.loads(sys.stdin.readline()))
        print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
        for line in sys.stdin:
            job = json.loads(line)
            params = vllm.SamplingParams(
                max_tokens=job["max_tokens"], temperature=0, ignore_eos=True, logprobs=job["logprobs"], detokenize=False
            )
            print(json.dumps(run_batches(llm.llm_engine, job["batches"], params)), file=answers, flush=True)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        raise


def run_batches(engine: Any, batches: list[list[list[int]]], params: Any) -> dict[str, Any]:
    """Run batches of prompts one after the other, each as a whole, and return their time in seconds and the decode rate."""
    clock = DecodeClock(len(batches[-1]))
    began = time.perf_counter()
    for number, batch in enumerate(batches):
        for index, prompt in enumerate(batch):
            engine.add_request(f"{number}-{index}", {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            counts = {output.request_id: len(output.outputs[0].token_ids) for output in outputs}
            clock.step(counts, ended=any(output.finished for output in outputs))
    return {"seconds": time.perf_counter() - began, "decode_rate": clock.rate}


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve_vllm()
        sys.exit()
    result = {"transformers": time_transformers, "vllm": time_vllm}[sys.argv[1]](json.load(sys.stdin))
    Path(sys.argv[2]).write_text(json.dumps(result))
