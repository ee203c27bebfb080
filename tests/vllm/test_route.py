"""`chunkattn route` in front of two vLLM servers: documents decide the server, in any order, and one server may die.

`GATEWAY_PYTHON` names an interpreter with the whole of chunkattn. An environment of vLLM needs only the plugin's part.
"""

import itertools
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import requests

from tests.vllm.test_server import DOCUMENTS, MESSAGES, ROOT, Server, expected, model, parser  # noqa: F401

pytestmark = pytest.mark.slow
OTHERS = ["Rumi has two houses.", "Rumi is old.", "Ana likes Rumi."]
CHAT = {"model": "demo", "messages": MESSAGES, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


class Gateway:
    """The gateway in a process of its own.

    Attributes:
        servers: servers behind it, by the name in the header of their answers.
    """

    def __init__(self, log, servers):
        self.servers = {}
        command = [
            os.environ.get("GATEWAY_PYTHON", sys.executable),
            "-m",
            "chunkattn",
            "route",
            *(server.url for server in servers),
            "--port",
            "0",
        ]
        self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
        self.url = None

    def wait(self, path, servers):
        for _ in range(240):
            assert self.process.poll() is None, "the gateway ended"
            if self.url is None and (found := re.search(r"is ready at (http://\S+)", path.read_text())):
                self.url = found[1]
            if self.url and sum(s["ready"] for s in self.replicas().values()) == len(servers):
                return
            time.sleep(0.25)
        raise AssertionError("the servers are not ready behind the gateway")

    def replicas(self):
        return requests.get(f"{self.url}/health", timeout=10).json()["replicas"]

    def chat(self, documents, **options):
        return requests.post(f"{self.url}/v1/chat/completions", json={**CHAT, "documents": documents, **options}, timeout=60)


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    path = tmp_path_factory.mktemp("servers")
    with (path / "a").open("w") as first, (path / "b").open("w") as second:
        made = [Server(first), Server(second)]
        try:
            for server in made:
                server.wait()
            yield made
        finally:
            for server in made:
                server.process.terminate()
            for server in made:
                server.process.wait(60)


@pytest.fixture(scope="module")
def gateway(servers, tmp_path_factory):
    path = tmp_path_factory.mktemp("gateway") / "log"
    with path.open("w") as log:
        made = Gateway(log, servers)
        try:
            made.wait(path, servers)
            yield made
        finally:
            made.process.terminate()
            print(path.read_text()[-4000:])
            assert made.process.wait(60) == 0


def test_documents_in_any_order_go_to_one_server(gateway, servers, parser, model):  # noqa: F811
    found = set()
    for order in itertools.permutations(DOCUMENTS):
        answer = gateway.chat(order)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == expected(model, parser.parse_chat(MESSAGES, list(order)))[0]
        found.add(answer.headers["x-chunkattn-replica"])
    assert len(found) == 1
    loads = sorted(server.metric("vllm:chunkattn_loaded_segments") for server in servers)
    assert loads[0] == 0 < loads[1], "the other server has seen no document"


def test_a_stream_has_the_tokens_of_the_answer(gateway):
    whole = gateway.chat(DOCUMENTS).json()["choices"][0]["message"]["content"]
    events = gateway.chat(DOCUMENTS, stream=True).text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    pieces = re.findall(r'"content":"(.*?)"', "".join(events))
    assert "".join(pieces) == whole


def test_errors_are_those_of_vllm(gateway, servers):
    body = {**CHAT, "documents": DOCUMENTS, "max_tokens": -1}
    direct, routed = (
        requests.post(f"{url}/v1/chat/completions", json=body, timeout=60) for url in (servers[0].url, gateway.url)
    )
    assert routed.status_code == direct.status_code == 400
    assert routed.json() == direct.json()


def test_another_server_answers_for_a_dead_one(gateway, servers, parser, model):  # noqa: F811
    """The last test of the file: it kills a server."""
    name = gateway.chat(OTHERS).headers["x-chunkattn-replica"]
    (dead,) = [server for server in servers if str(server.port) in name]
    os.kill(dead.process.pid, signal.SIGKILL)
    tokens = expected(model, parser.parse_chat(MESSAGES, OTHERS))[0]
    for _ in range(5):
        answer = gateway.chat(OTHERS)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == tokens
        assert answer.headers["x-chunkattn-replica"] != name
