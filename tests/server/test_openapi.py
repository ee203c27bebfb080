"""`/openapi.json` is true: requests made from it, and the answers held against it."""

import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings, strategies
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from chunkattn.async_llm import AsyncLLM
from chunkattn.server.app import create_app
from chunkattn.web.errors import ErrorResponse, MessagesErrorResponse
from chunkattn.web.options import ServerConfig
from chunkattn.web.paths import OPEN_PATHS
from tests.patience import PATIENCE_S
from tests.server_helpers import ServerProcess

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
# Nothing goes on beyond 64 positions, whatever it asks for; and few sizes of steps are few programs to compile.
TINY = (
    "--enable-chunk-aware",
    "--max-model-len=64",
    "--max-num-seqs=4",
    "--max-num-batched-tokens=64",
    f"--kv-cache-memory-bytes={8 << 20}",
    "--no-warmup",
)
# All but what the description leaves out: older names of described routes (/score, /rerank, /v2/rerank), and /static.
DESCRIBED = schemathesis.openapi.from_dict(create_app(AsyncLLM()).openapi())
OPERATIONS = [found.ok() for found in DESCRIBED.get_all_operations()]
EXAMPLES = settings(max_examples=50, database=None, suppress_health_check=[*HealthCheck])
"""Health checks are about time, and about how seldom a body is valid."""


SOUND = {
    "/v1/completions": {"prompt": "Ana lives in", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Where?"}], "max_tokens": 4},
    "/v1/responses": {"input": "Where?", "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "Where?"}], "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Where?"}]},
    "/v1/score": {"query": "Who?", "items": ["Ana", "Ben"], "labels": ["yes"]},
    "/generative_scoring": {"query": [5, 6], "items": [[7], [8, 9]], "label_token_ids": [3]},
    "/v1/rerank": {"query": "Who?", "documents": ["Ana", "Ben"]},
    "/v1/decisions": {"input": "Ana.", "questions": [{"type": "predicate", "instructions": "Is it Ana?"}]},
    "/v1/systemone": {"state": "Ana.", "questions": {"ana": {"type": "noul", "instructions": "Is it Ana?"}}},
    "/v1/cache/documents": {"prefix": "Read.", "documents": ["Ana", "Ben"]},
    "/v1/cache/forget": {"prefix": "Read.", "documents": ["Ana", "Ben"]},
    "/tokenize": {"prompt": "Ana"},
    "/detokenize": {"tokens": [5, 6]},
    "/inspect": {"prompt": "Read. # # Ana # # Ben # # Who?"},
}


@pytest.fixture(scope="module")
def server():
    made = ServerProcess(*TINY)
    yield made
    assert made.close() == 0


@pytest.mark.ci
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_answers_are_as_described(server, operation):
    @EXAMPLES
    @given(case=operation.as_strategy())
    def check(case):
        response = case.call(base_url=server.url, timeout=PATIENCE_S)  # a program may have to be compiled
        case.validate_response(response, checks=CHECKS)
        # A stream has told its status when a step fails.
        assert b'"code": "internal_error"' not in response.content

    check()


@pytest.mark.ci
@pytest.mark.parametrize("path", SOUND)
def test_one_odd_field_in_a_sound_body(server, path):
    """Most random bodies get no further than the first check of many; these go deeper."""
    operation = DESCRIBED[path]["POST"]
    answered = set()

    @EXAMPLES
    @given(case=operation.as_strategy(), data=strategies.data())
    def check(case, data):
        given_fields = case.body if isinstance(case.body, dict) else {}
        odd = data.draw(strategies.sets(strategies.sampled_from(sorted({*given_fields} - {"model"}) or ["user"]), max_size=2))
        case.body = {**SOUND[path], **{name: given_fields.get(name) for name in odd}}
        response = case.call(base_url=server.url, timeout=PATIENCE_S)
        case.validate_response(response, checks=CHECKS)
        assert b'"code": "internal_error"' not in response.content
        answered.add(response.status_code)

    check()
    assert {200, 422 if path == "/v1/systemone" else 400} <= answered


def operations(app):
    told = app.openapi()
    return {(method, path): o for path, found in told["paths"].items() for method, o in found.items()}


def test_errors_are_described():
    found = operations(create_app(AsyncLLM()))
    assert len(found) > 12
    for (_, path), operation in found.items():
        answers = operation["responses"]
        assert {"401", "403", "413", "500"} <= set(answers)
        assert ("422" in answers) == (path == "/v1/systemone")
        for status, answer in answers.items():
            if status >= "400" and (status, path) not in {("503", path) for path in OPEN_PATHS}:
                name = "MessagesErrorResponse" if path.startswith("/v1/messages") else "ErrorResponse"
                assert answer["content"]["application/json"]["schema"]["$ref"].endswith(f"/{name}")
    assert "application/json" not in found["get", "/metrics"]["responses"]["200"]["content"]
    for path in ("completions", "chat/completions", "responses", "messages"):
        content = found["post", f"/v1/{path}"]["responses"]["200"]["content"]
        assert set(content) == {"application/json", "text/event-stream"}


@pytest.mark.parametrize(
    ("status", "method", "path", "config", "request_options"),
    [
        (400, "post", "/v1/rerank", {}, {"content": b"{"}),
        (400, "get", "/v1/cache/documents", {}, {"params": {"limit": "many"}}),
        (401, "get", "/v1/models", {"api_key": "secret"}, {}),
        (403, "get", "/v1/models", {}, {"headers": {"Host": "evil.example"}}),
        (404, "get", "/v1/models/{name}", {}, {}),
        (413, "post", "/v1/completions", {"max_body_bytes": 3}, {"json": {"prompt": "x"}}),
        (503, "post", "/v1/chat/completions", {}, {"json": {"messages": [{"role": "user", "content": "x"}]}}),
        (400, "post", "/v1/responses", {}, {"json": {"input": "x", "conversation": "c"}}),
        (503, "post", "/v1/responses", {}, {"json": {"input": "x"}}),
        (400, "post", "/v1/messages", {}, {"json": {"messages": [], "max_tokens": 1}}),
        (401, "post", "/v1/messages", {"api_key": "secret"}, {"headers": {"X-Api-Key": "wrong"}}),
        (403, "post", "/v1/messages", {}, {"headers": {"Host": "evil.example"}}),
        (413, "post", "/v1/messages", {"max_body_bytes": 3}, {"json": {"messages": []}}),
        (503, "post", "/v1/messages", {}, {"json": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}}),
    ],
)
def test_errors_look_as_described(status, method, path, config, request_options):
    """Requests that need no engine, and no luck."""
    app = create_app(AsyncLLM(), ServerConfig(**config))
    answer = TestClient(app, base_url="http://localhost").request(method, path, **request_options)
    assert answer.status_code == status
    model = MessagesErrorResponse if path.startswith("/v1/messages") else ErrorResponse
    model.model_validate_json(answer.content, strict=True, extra="forbid")
    assert str(status) in operations(app)[method, path]["responses"]


def test_a_wrong_query_parameter_is_named():
    client = TestClient(create_app(AsyncLLM()), base_url="http://localhost")
    error = client.get("/v1/cache/documents", params={"limit": "many"}).json()["error"]
    assert (error["param"], error["code"]) == ("limit", "invalid_value")


def test_a_key_is_described_where_one_is_asked_for():
    open_to_all, locked = (create_app(AsyncLLM(), ServerConfig(api_key=key)).openapi() for key in (None, "secret"))
    assert "security" not in open_to_all
    assert locked["security"] == [{"bearer": []}, {"basic": []}]
    schemes = locked["components"]["securitySchemes"]
    assert {name: s.get("scheme", s["type"]) for name, s in schemes.items()} == {
        "bearer": "bearer",
        "basic": "basic",
        "x-api-key": "apiKey",
    }
    assert locked["paths"]["/v1/messages"]["post"]["security"] == [{name: []} for name in schemes]
    unlocked = [path for path, found in locked["paths"].items() if found.get("get", {}).get("security") == []]
    assert sorted(unlocked) == sorted(OPEN_PATHS)
