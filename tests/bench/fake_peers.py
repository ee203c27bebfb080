"""Interpreters with peers of the benchmarks that count instead of computing."""

import sys

from transformers import Qwen3Config

from chunkattn.tools.bench.geometry import sizes

TINY = Qwen3Config(
    **sizes(50, 8, 16, 2, 2, 1, 16, 10_000),  # the native backend takes heads of multiples of 16
    architectures=["Qwen3ForCausalLM"],
    tie_word_embeddings=True,
)
VLLM = """
import json, time
from types import SimpleNamespace

__version__ = "0.0"
print("a banner on stdout")


class SamplingParams:
    def __init__(self, **options):
        self.options = options


class LLM:
    def __init__(self, folder, **options):
        assert json.load(open(folder + "/config.json"))["vocab_size"] == 50
        self.llm_engine, self.requests = self, {}
        log(load=options)

    def add_request(self, name, prompt, params):
        log(tokens=len(prompt["prompt_token_ids"]), **params.options)
        self.requests[name] = [0, params.options["max_tokens"]]

    def has_unfinished_requests(self):
        return bool(self.requests)

    def step(self):
        time.sleep(0.001)
        outputs = []
        for name, counts in list(self.requests.items()):
            counts[0] += 1
            ended = counts[0] == counts[1]
            tokens = SimpleNamespace(token_ids=[0] * counts[0])
            outputs.append(SimpleNamespace(request_id=name, outputs=[tokens], finished=ended))
            if ended:
                del self.requests[name]
        if FAILS_AT and sum(1 for _ in open(LOG)) > FAILS_AT:
            raise RuntimeError("out of\\nmemory")
        return outputs


def log(**values):
    with open(LOG, "a") as file:
        file.write(json.dumps(values) + "\\n")
"""


XLLAMACPP = """
import json, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

__version__ = "0.1"


class CommonParams(SimpleNamespace):
    def __init__(self):
        super().__init__(model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace())


class Server:
    def __init__(self, params):
        assert open(params.model.path, "rb").read(4) == b"GGUF"
        assert params.cpuparams.n_threads == params.cpuparams_batch.n_threads >= 1
        log(load=[params.n_ctx, params.n_parallel, params.n_gpu_layers, params.cache_ram_mib])
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.listening_address = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        print("a banner on stdout")


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (self.path, body["stream"], body["ignore_eos"]) == ("/completion", True, True)
        for prompt in body["prompt"]:
            log(tokens=len(prompt), max_tokens=body["n_predict"], n_probs=body["n_probs"])
        fails = FAILS_AT and sum(1 for _ in open(LOG)) > FAILS_AT
        self.send_response(400 if fails else 200)
        self.end_headers()
        if fails:
            self.wfile.write(b"the context is too short")
            return
        for number in [*range(1, body["n_predict"] + 1), body["n_predict"]]:
            time.sleep(0.001)
            for index in range(len(body["prompt"])):
                event = {"index": index, "tokens_predicted": number}
                self.wfile.write(f"data: {json.dumps(event)}\\n\\ndata: null\\n\\n".encode())

    def log_message(self, *_):
        pass


def log(**values):
    with open(LOG, "a") as file:
        file.write(json.dumps(values) + "\\n")
"""


def fake_peer(folder, module, source, fails_at=0):
    """Make an interpreter with a module that fails after some calls. Return it, and the file of its calls."""
    log = folder / f"{module}.jsonl"
    (folder / f"{module}.py").write_text(f"LOG, FAILS_AT = {str(log)!r}, {fails_at}\n{source}")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} LD_PRELOAD= exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python, log


def fake_vllm(folder, fails_at=0):
    """`fake_peer` of vLLM."""
    return fake_peer(folder, "vllm", VLLM, fails_at)


def fake_llama(folder, fails_at=0):
    """`fake_peer` of llama.cpp."""
    return fake_peer(folder, "xllamacpp", XLLAMACPP, fails_at)
