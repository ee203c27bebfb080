"""A server below a path of a proxy, and what its page learns from it."""

from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient

from chunkattn.async_llm import AsyncLLM
from chunkattn.errors import ConfigError
from chunkattn.server.app import create_app
from chunkattn.web.options import ServerConfig
from chunkattn.web.paths import OPEN_PATHS

pytest_plugins = ["tests.told_engine"]


def client_of(llm=None, **options):
    return TestClient(create_app(llm or AsyncLLM(), ServerConfig(**options)), base_url="http://localhost")


@pytest.mark.parametrize("below", ["/llm", "/a/b", ""])
def test_routes_answer_with_and_without_the_path(below):
    """A proxy may strip its path, or not."""
    client = client_of(root_path=below, api_key="k", metrics_key="m")
    key, metrics = ({"Authorization": f"Bearer {name}"} for name in "km")
    for prefix in {"", below}:
        for path in ("/", "/static/app.js", "/static/page.json", "/v1/models", "/openapi.json"):
            assert client.get(prefix + path, headers=key).status_code == 200
            assert client.get(prefix + path).status_code == 401
        for path in OPEN_PATHS:
            assert client.get(prefix + path).status_code in (200, 503)
        assert client.get(f"{prefix}/metrics", headers=metrics).status_code == 200
        assert client.get(f"{prefix}/metrics", headers=key).status_code == 401
    if below:
        assert client.get(below, headers=key, follow_redirects=False).headers["location"].endswith(f"{below}/")
        assert client.get("/openapi.json", headers=key).json()["servers"] == [{"url": below}]
        wrong = client.get(f"{below}/v1/score", headers=key)
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        for path in (f"{below}x/health", f"/x{below}/health"):
            assert client.get(path).status_code == 401


@pytest.mark.parametrize("bad", ["llm", "/llm/", "/", "//llm", "/a b", "/a?b", "http://x"])
def test_bad_root_paths(bad):
    with pytest.raises(ConfigError, match="root_path"):
        ServerConfig(root_path=bad)


def test_the_page_names_no_path_of_its_own():
    """An absolute path would leave the proxy's."""
    page = client_of()
    for name in (
        "",
        *(f"static/{name}.js" for name in ("app", "api", "status", "generate", "inspect", "score", "rerank", "decide")),
    ):
        text = page.get(f"/{name}").text
        assert not any(f"{quote}/{route}" in text for quote in "\"'`" for route in ("static", "v1", "inspect", "health"))


def test_the_page_learns_of_a_chat_template(llm):
    assert client_of().get("/static/page.json").json() == {
        "separator": " # # ",
        "max_logprobs": 20,
        "chat_template": None,
        "chat_by_default": False,
    }
    client = client_of(llm)  # the demo model completes texts, and its template is there for those who send messages
    found = client.get("/static/page.json").json()
    assert found == {"separator": " # # ", "max_logprobs": 20, "chat_template": True, "chat_by_default": False}
    made, template = llm.frontend, llm.frontend.tokenizer.chat_template
    object.__setattr__(llm.config, "model", "an/instruct-model")
    assert client.get("/static/page.json").json()["chat_by_default"] is True
    for tokenizer in (None, SimpleNamespace(chat_template=None), SimpleNamespace(chat_template="")):
        llm._frontend = SimpleNamespace(tokenizer=tokenizer)
        found = client.get("/static/page.json").json()
        assert (found["chat_template"], found["chat_by_default"]) == (False, False)
    assert made.tokenizer.chat_template == template
