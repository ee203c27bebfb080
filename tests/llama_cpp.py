"""llama.cpp's HTTP server over a GGUF file, as a witness.

llama.cpp comes with the wheel `xllamacpp`, which lies in an environment of its own. The server runs in a process of that
environment and listens on 127.0.0.1. Without the environment, `llama_server` skips the test: `make test-llama` installs it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

PYTHON = Path(os.environ.get("LLAMA_ENV", Path(__file__).parent.parent / ".cache" / "llama-env")) / "bin" / "python"
"""Interpreter with `xllamacpp`; the variable `LLAMA_ENV` names another environment."""

# Prints the address of the server, then serves until standard input ends. llama.cpp writes to standard output too, so the
# address goes to a copy of it.
_SERVER = """
import json, os, sys
told = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
import xllamacpp
params = xllamacpp.CommonParams()
for name, value in json.loads(sys.argv[1]).items():
    *path, last = name.split(".")
    place = params
    for part in path:
        place = getattr(place, part)
    kind = type(getattr(place, last))
    setattr(place, last, value if kind in (bool, int, float, str, list) else kind(value))
server = xllamacpp.Server(params)
print(server.listening_address, file=told, flush=True)
sys.stdin.read()
"""


class LlamaError(Exception):
    """llama.cpp refused the file or the request; the text is its log or its answer."""


@contextmanager
def llama_server(path: Path, **params: Any) -> Iterator[Callable[..., Any]]:
    """Serve a GGUF file with llama.cpp, and yield the function that posts JSON to a route and returns the JSON of the answer.

    Args:
        path: GGUF file, or the first shard.
        params: fields of `xllamacpp.CommonParams`, such as `embedding=True`. Fields of a field are written with a dot:
            `**{"sampling.n_probs": 5}`. Enumerations take their integer.

    Raises:
        LlamaError: llama.cpp cannot load the file, or answers a request with an error.
    """
    if not PYTHON.exists():
        pytest.skip(f"no llama.cpp at {PYTHON}; `make test-llama` installs it")
    chosen = {"model.path": str(path), "n_ctx": 0, "n_gpu_layers": 0, "warmup": False, "n_parallel": 1, **params}
    command = [PYTHON, "-c", _SERVER, json.dumps(chosen)]
    with (
        TemporaryFile("w+", errors="replace") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            if not address:
                process.wait()
                log.seek(0)
                raise LlamaError(log.read()[-2000:])
            yield lambda route, body: _post(address + route, body)
        finally:
            process.kill()


def _post(url: str, body: Any) -> Any:
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except HTTPError as error:
        raise LlamaError(error.read().decode(errors="replace")) from error
