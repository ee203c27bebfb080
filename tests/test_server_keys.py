"""Whom a server lets in, and what clients of different keys see and may hold."""

import pytest
from fastapi.testclient import TestClient

from chunkattn.async_llm import AsyncLLM
from chunkattn.server.app import create_app
from chunkattn.server.options import ServerConfig
from chunkattn.server.state import ServerState


def client_of(config=None, llm=None, **options):
    return TestClient(create_app(llm or AsyncLLM(), config), base_url="http://localhost", **options)


@pytest.mark.parametrize("path", ["/health", "/livez", "/readyz"])
def test_probes_need_no_key(path):
    client = client_of(ServerConfig(api_key="secret"))
    assert client.get(path).status_code in (200, 503)
    assert client.get("/metrics").status_code == 401
    assert client.get("/openapi.json", headers={"Authorization": "Bearer secret"}).json()["paths"][path]["get"]["security"] == []


def test_a_local_model_is_shown_by_its_folder_s_name(tmp_path):
    folder = tmp_path / "secret-place" / "my-model"
    folder.mkdir(parents=True)
    client = client_of(llm=AsyncLLM(str(folder) + "/"))
    answer = client.get("/v1/models")
    assert "secret-place" not in answer.text
    assert answer.json()["data"][0]["id"] == "my-model"
    assert client.get("/v1/models/my-model").status_code == 200
    state = ServerState(AsyncLLM(str(folder)), ServerConfig())
    state.check_model("my-model")
    assert ServerState(AsyncLLM("org/name"), ServerConfig()).model_name == "org/name"


def test_two_hosts_are_refused():
    for config in (ServerConfig(), ServerConfig(api_key="k"), ServerConfig(host="0.0.0.0")):
        client = client_of(config)
        answer = client.get("/livez", headers=[("Host", "localhost"), ("Host", "evil.example")])
        assert answer.status_code == 400
        assert "Host" in answer.json()["error"]["message"]


@pytest.mark.parametrize("host", ["127.0.0.2", "::1", "localhost", "::ffff:127.0.0.1"])
def test_every_loopback_address_checks_names(host):
    client = TestClient(create_app(AsyncLLM(), ServerConfig(host=host)), base_url="http://evil.example:8000")
    assert client.get("/v1/models").status_code == 403
    for name in ("localhost", "127.0.0.2:80", "[::1]:80", "127.0.0.1"):
        assert client.get("/v1/models", headers={"Host": name}).status_code == 200
    for name in ("127.0.0.1.evil.example", "localhost.evil.example", "[::1", "1.2.3.4"):
        assert client.get("/v1/models", headers={"Host": name}).status_code == 403


def test_answers_are_what_they_say_they_are():
    client = client_of()
    for path in ("/livez", "/nothing", "/openapi.json", "/static/app.js", "/metrics"):
        assert client.get(path).headers.get_list("x-content-type-options") == ["nosniff"], path
    policy = client.get("/").headers["content-security-policy"]
    assert "base-uri 'none'" in policy
    assert "form-action 'none'" in policy
