"""Paths, methods, other origins and names of the model; without an engine, whose routes answer 503."""

from urllib.parse import quote

import httpx
import pytest
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from chunkattn.async_llm import AsyncLLM
from chunkattn.cli import app as commands
from chunkattn.documents.routes import documents_router
from chunkattn.errors import ConfigError
from chunkattn.server.app import create_app
from chunkattn.server.routes import generation, page, scoring, status, tokens
from chunkattn.web.options import ServerConfig

ROUTES = [r for m in (generation, page, scoring, status, tokens) for r in m.router.routes]
ROUTES += documents_router(APIRoute).routes
READS = sorted({r.path for r in ROUTES if "GET" in r.methods} | {"/openapi.json"})
ORIGIN = "https://app.example"


def client(**options):
    return TestClient(create_app(AsyncLLM(), ServerConfig(**options)), base_url="http://localhost")


@pytest.mark.parametrize("path", READS)
def test_head_is_get_without_the_body(path):
    http = client()
    path = path.replace("{name:path}", "chunkattn-demo").replace("{name}", "page.js").replace("{document_id}", "x")
    read, head = http.get(path), http.head(path)
    assert (head.status_code, head.content) == (read.status_code, b"")
    assert head.headers["content-type"] == read.headers["content-type"]
    if path != "/metrics":  # which count the requests before
        assert head.headers["content-length"] == str(len(read.content))
    if path != "/openapi.json":  # the only route that FastAPI adds
        assert 'chunkattn_http_requests_total{route="other"' not in http.get("/metrics").text


def test_head_over_a_socket(demo_server):
    with demo_server.client() as http:
        for path in ("/v1/models", "/health", "/"):
            head = http.head(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-length"] == str(len(http.get(path).content))  # the connection goes on in step


def test_unknown_paths_and_methods_are_named():
    http = client()
    for path, near in (
        ("/completions", "/v1/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/embeddings", None),
        ("/v1/\u00e9\nx", None),
        ("/" + "x" * 5000, None),
    ):
        answer = http.post(quote(path), json={})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (404, "not_found", "not_found_error")
        assert ascii(path[:200])[1:-1] in error["message"]
        assert (f"did you mean {near}?" in error["message"]) == (near is not None)
        assert "/openapi.json" in error["message"]
        assert len(error["message"]) < 400
    for method, path, allowed in (
        ("GET", "/v1/completions", {"POST"}),
        ("PUT", "/v1/models", {"GET", "HEAD"}),
        ("PUT", "/v1/cache/documents", {"GET", "HEAD", "POST"}),
        ("POST", "/v1/cache/documents/x", {"GET", "HEAD", "PATCH", "DELETE"}),
        ("HEAD", "/v1/completions", {"POST"}),
        ("POST", "/openapi.json", {"GET", "HEAD"}),
    ):
        answer = http.request(method, path)
        assert answer.status_code == 405
        assert set(answer.headers["allow"].split(", ")) == allowed
        if method != "HEAD":
            error = answer.json()["error"]
            assert error["code"] == "method_not_allowed"
            assert all(word in error["message"] for word in (path, *allowed))


EVERY = sorted(
    {(m, r.path) for r in ROUTES for m in r.methods} | {("HEAD", path) for path in READS} | {("GET", "/openapi.json")}
)


@pytest.mark.parametrize(("method", "path"), [(method, path) for method, path in EVERY if path != "/"])
def test_a_slash_at_the_end_is_served_as_none(method, path):
    """A redirect would name the address of the server itself, which clients behind a proxy cannot reach."""
    path = path.replace("{name:path}", "chunkattn-demo").replace("{name}", "page.js").replace("{document_id}", "x")
    for root in ("", "/llm"):
        http = client(metrics_key="scrape", root_path=root)
        headers = {"Host": "10.0.0.7:8000", "X-Request-Id": "one"} if root else {"X-Request-Id": "one"}
        plain, slash, twice = (
            http.request(method, root + path + end, headers=headers, follow_redirects=False) for end in ("", "/", "//")
        )
        assert (plain.status_code, plain.status_code) == (slash.status_code, twice.status_code)
        assert plain.status_code not in (*range(300, 400), 405)
        if path not in ("/health", "/readyz"):  # which tell the time
            assert plain.content == slash.content


def test_the_page_below_a_proxys_path_has_its_slash():
    http = client(root_path="/llm")
    answer = http.get("/llm", headers={"Host": "localhost"}, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, "/llm/")
    assert http.get("/llm").text == http.get("/llm/").text == http.get("/").text


# Other origins

PREFLIGHT = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


def test_no_other_origin_may_by_default():
    http = client()
    assert http.options("/v1/completions", headers=PREFLIGHT).status_code == 405
    assert "access-control-allow-origin" not in http.get("/v1/models", headers={"Origin": ORIGIN}).headers


def test_a_preflight_needs_no_key_and_the_request_does():
    http = client(api_key="secret", allowed_origins=(ORIGIN,))
    asked = http.options("/v1/completions", headers=PREFLIGHT)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert "authorization" in asked.headers["access-control-allow-headers"].lower()
    refused = http.get("/v1/models", headers={"Origin": ORIGIN})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == ORIGIN  # a page can read the error
    allowed = http.get("/v1/models", headers={"Origin": ORIGIN, "Authorization": "Bearer secret"})
    assert allowed.status_code == 200
    assert "X-Request-Id" in allowed.headers["access-control-expose-headers"]
    assert http.options("/v1/completions", headers={**PREFLIGHT, "Origin": "https://evil.example"}).status_code == 400
    stranger = http.get("/v1/models", headers={"Origin": "https://evil.example", "Authorization": "Bearer secret"})
    assert "access-control-allow-origin" not in stranger.headers


def test_methods_headers_and_credentials_are_options():
    http = client(
        allowed_origins=(ORIGIN,), allowed_methods=("POST",), allowed_headers=("authorization",), allow_credentials=True
    )
    asked = http.options("/v1/completions", headers=PREFLIGHT)
    assert asked.headers["access-control-allow-credentials"] == "true"
    assert http.options("/v1/models", headers={**PREFLIGHT, "Access-Control-Request-Method": "DELETE"}).status_code == 400
    other = {**PREFLIGHT, "Access-Control-Request-Headers": "x-other"}
    assert http.options("/v1/completions", headers=other).status_code == 400
    with pytest.raises(ConfigError, match="name the origins"):
        ServerConfig(allowed_origins=("*",), allow_credentials=True)


# Names of the model


def test_every_name_is_listed_and_accepted_and_the_first_answers():
    http = client(served_model_name=("first", "second"))
    assert [m["id"] for m in http.get("/v1/models").json()["data"]] == ["first", "second"]
    assert http.get("/v1/models/second").json()["id"] == "second"
    for name, code in (("first", "server_starting"), ("second", "server_starting"), ("third", "model_not_found")):
        error = http.post("/v1/completions", json={"prompt": "x", "model": name}).json()["error"]
        assert error["code"] == code
    assert "'first' or 'second'" in error["message"]
    assert create_app(AsyncLLM(), ServerConfig(served_model_name="one")).state.server.model_name == "one"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((), ()),
        ("one", ("one",)),
        (["a", "b"], ("a", "b")),
        ('["a", "b"]', ("a", "b")),
        (['["a", "b"]', "c"], ("a", "b", "c")),
    ],
)
def test_options_of_several_texts(given, expected):
    assert ServerConfig(served_model_name=given).served_model_name == expected


@pytest.mark.parametrize("given", ["", ["a", ""], "[", '["a", 5]', '["a"', [5]])
def test_bad_options_of_several_texts(given):
    with pytest.raises(ConfigError, match="served_model_name"):
        ServerConfig(served_model_name=given)


def test_options_of_several_texts_from_flags_environment_and_file(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("chunkattn.server.run.serve", lambda options, config: seen.append(config))
    file = tmp_path / "serve.yaml"
    file.write_text("served_model_name: [a, b]\nallowed_origins: https://a.example\n")

    def serve(*arguments, **environment):
        result = CliRunner().invoke(commands, ["serve", *arguments], env=environment)
        assert result.exit_code == 0, result.output
        return seen.pop()

    assert serve().served_model_name == ()
    assert serve("--served-model-name", "a", "--served-model-name", "b").served_model_name == ("a", "b")
    assert serve("--allowed-origins", '["https://a.example", "*"]').allowed_origins == ("https://a.example", "*")
    assert serve(CHUNKATTN_SERVED_MODEL_NAME="a b").served_model_name == ("a", "b")
    config = serve("--config", str(file))
    assert (config.served_model_name, config.allowed_origins) == (("a", "b"), ("https://a.example",))
    assert serve("--config", str(file), "--served-model-name", "c").served_model_name == ("c",)


def test_tei_clients_read_the_limits(demo_server):
    told = httpx.get(demo_server.url + "/info").json()
    assert told["model_id"] == "chunkattn-demo"
    assert (told["max_input_length"], told["auto_truncate"]) == (512, False)
    assert told["max_client_batch_size"] == 10_000
    assert list(told["model_type"]) == ["reranker"]
    starting = client().get("/info")
    assert (starting.status_code, starting.json()["error"]["code"]) == (503, "server_starting")
