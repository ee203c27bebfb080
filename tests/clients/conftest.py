import os
from pathlib import Path

# Keep the clients from sending telemetry and from waiting for a model hub.
os.environ |= {
    "HF_HUB_OFFLINE": "0",  # else huggingface_hub refuses to ask a server on this machine
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "POSTHOG_DISABLED": "1",
}

import httpx
import pytest

from tests.server_helpers import SMALL, ServerProcess

PYTHON = str(Path(os.environ.get("SERVER_PYTHON", ".venv/bin/python")).absolute())

NAMES = (
    "chunkattn-demo",
    # the default models of clients whose model cannot be left out
    "gpt-3.5-turbo",
    "gpt-5-mini",
    "BAAI/bge-reranker-v2-m3",
    "rerank-english-v3.0",
    "rerank-v3.5",
    "jina-reranker-v1-base-en",
    "gpt-6-luna",
    "jev-latest",
    "dummy",  # huggingface_hub's, without a model
)


@pytest.fixture(scope="session")
def server():
    """Server of the demo model, started with the main environment's Python."""
    names = [f"--served-model-name={name}" for name in NAMES]
    made = ServerProcess(*SMALL, *names, python=PYTHON, HF_HUB_OFFLINE="1")
    yield made.url
    assert made.close() == 0


class Gateway(ServerProcess):
    """`chunkattn route` on a free port."""

    command = "route"


@pytest.fixture(scope="session")
def gateway(server):
    """Gateway before the server."""
    made = Gateway(server, python=PYTHON)
    yield made.url
    assert made.close() == 0


@pytest.fixture(scope="session")
def post(server):
    """The witness: the same questions by plain HTTP."""
    with httpx.Client(base_url=server, timeout=120) as http:

        def send(path, body):
            answer = http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        yield send
