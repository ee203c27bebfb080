"""Script that times another library. The library's own interpreter runs it, so it imports nothing of chunkattn.

    python peer_script.py transformers|vllm|llama.cpp < jobs.jsonl

It loads the library once and runs one job per line until stdin ends. The first line has the arguments of the library's `load_`
function; its answer has `version`. Every other line has `batches` (lists of prompts, which are lists of token ids) and, for
transformers, `labels`, for the others `max_tokens` and `logprobs`; its answer has `seconds` and, from vLLM and llama.cpp,
`decode_rate`. An answer is one line of JSON on stdout. What the library prints goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

MODULES = {"transformers": "transformers", "vllm": "vllm", "llama.cpp": "xllamacpp"}
"""Module of each library."""
Mark = tuple[float, int]
"""Time in seconds, and the tokens that a sequence has by then."""


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


def shared_rate(sequences: list[list[Mark]]) -> float | None:
    """Return the tokens per second of all sequences while all of them decode.

    `DecodeClock` reads the same rate where the tokens of a step come at one time. A stream brings them one after the other, so
    the rate of each sequence counts from its own first token to its own last token of the shared time.

    Args:
        sequences: marks of each sequence, one for each token that comes.

    Returns:
        The rate, or None if a sequence has fewer than two tokens in the shared time.
    """
    if not all(sequences):
        return None
    began, ended = max(marks[0][0] for marks in sequences), min(marks[-1][0] for marks in sequences)
    total = 0.0
    for marks in sequences:
        shared = [mark for mark in marks if began <= mark[0] <= ended]
        if len(shared) < 2:
            return None
        (first, before), *_, (last, after) = shared
        total += (after - before) / (last - first)
    return total


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


class LlamaServer(NamedTuple):
    """HTTP server of llama.cpp in this process.

    Attributes:
        server: the server, which runs as long as the object lives.
        url: its base URL.
    """

    server: Any
    url: str


def load_llama(gguf: str, context: int, slots: int, *, on_gpu: bool) -> LlamaServer:
    """Return a server of a GGUF file on all cores.

    Args:
        gguf: path of the file.
        context: positions of a sequence.
        slots: number of sequences that run at once.
        on_gpu: whether the layers may go to a GPU.
    """
    xllamacpp: Any = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.n_ctx, params.n_parallel = slots * context, slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count() or 1
    params.cache_ram_mib = 0  # no copies of a slot's K/V for later prompts
    if not on_gpu:
        params.n_gpu_layers = 0
    server = xllamacpp.Server(params)
    return LlamaServer(server, server.listening_address)


def run_llama(server: LlamaServer, job: dict[str, Any]) -> dict[str, Any]:
    """Run batches of prompts one after the other, and return their time in seconds and the decode rate of the last batch.

    A slot keeps the K/V of the prefix that its prompt shares with the prompt before. More prompts than slots wait for a slot.

    Raises:
        RuntimeError: the server refuses or fails a batch.
    """
    began, marks = time.perf_counter(), list[list[Mark]]()
    for batch in job["batches"]:
        marks = stream_llama(server.url, batch, job["max_tokens"], job["logprobs"] or 0)
    return {"seconds": time.perf_counter() - began, "decode_rate": shared_rate(marks)}


def stream_llama(url: str, prompts: list[list[int]], max_tokens: int, logprobs: int) -> list[list[Mark]]:
    """Generate from several prompts in one request, and return the marks of each sequence.

    Args:
        url: base URL of llama.cpp's server.
        prompts: token ids of each prompt.
        max_tokens: tokens to generate for each prompt.
        logprobs: number of likeliest tokens whose probabilities are returned.

    Raises:
        RuntimeError: the server refuses or fails the request.
    """
    body = {"prompt": prompts, "n_predict": max_tokens, "n_probs": logprobs, "stream": True, "cache_prompt": True}
    body |= {"temperature": 0, "ignore_eos": True}
    request = Request(f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
    sequences: list[list[Mark]] = [[] for _ in prompts]
    try:
        with urlopen(request) as answer:
            for line in answer:
                name, _, value = line.decode().strip().partition(": ")
                if name not in ("data", "error") or value in ("null", "[DONE]"):
                    continue
                event = json.loads(value)
                if name == "error" or "error" in event:
                    raise RuntimeError(str(event.get("error", event)))
                marks, count = sequences[event["index"]], event["tokens_predicted"]
                if count > (marks[-1][1] if marks else 0):  # the last event of a sequence brings no token
                    marks.append((time.perf_counter(), count))
    except HTTPError as error:
        raise RuntimeError(error.read().decode(errors="replace")) from error
    counts = [marks[-1][1] if marks else 0 for marks in sequences]
    if min(counts) < max_tokens:
        raise RuntimeError(f"generated {min(counts)} of {max_tokens} tokens")
    return sequences


LIBRARIES: dict[str, tuple[Callable[..., Any], Callable[..., dict[str, Any]]]] = {
    "transformers": (load_transformers, run_transformers),
    "vllm": (load_vllm, run_vllm),
    "llama.cpp": (load_llama, run_llama),
}
"""Functions of each library that load it and run a job."""


def main(peer: str) -> None:
    """Load a library and answer the jobs of stdin on stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        load, run = LIBRARIES[peer]
        model = load(**json.loads(sys.stdin.readline()))
        print(json.dumps({"version": importlib.import_module(MODULES[peer]).__version__}), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(run(model, json.loads(line))), file=answers, flush=True)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        raise


if __name__ == "__main__":
    main(sys.argv[1])
