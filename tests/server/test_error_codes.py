"""Errors of HTTP requests: one fault has one code on every route, and the answer says which field and text it is about."""

import ast
import json
import re
from pathlib import Path

import httpx
import pytest

PACKAGE = Path(__file__).parents[2] / "chunkattn"
FOLDERS = [PACKAGE / name for name in ("server", "web", "schema", "documents", "gateway", "integrations/ray")]
"""Folders with code that may answer with an error."""

COMPLETION, CHAT, SCORE, RERANK = "/v1/completions", "/v1/chat/completions", "/v1/score", "/v1/rerank"
DECISIONS = "/v1/decisions"
GENERATIVE, CACHE, TOKENIZE, DETOKENIZE, INSPECT = (
    "/generative_scoring",
    "/v1/cache/documents",
    "/tokenize",
    "/detokenize",
    "/inspect",
)
LONG = "Ana lives in Oslo. " * 400
LONE = "a\ud800"
USER, LABELS = {"role": "user", "content": "x"}, {"labels": ["yes", "no"]}
NOT_TEXT = {"z": 1}


ASKED = {"type": "predicate", "instructions": "a"}


def said(text):
    return {"role": "assistant", "content": text}


# Each fault stands in the second text where a field holds several, so the answer has to name place 1.
SECOND = {
    "chunks": lambda text: (COMPLETION, {"chunks": {"documents": ["a", text], "question": "q"}}),
    "completion": lambda text: (COMPLETION, {"prompt": ["a", text]}),
    "inspected chunks": lambda text: (INSPECT, {"chunks": {"documents": ["a", text], "question": "q"}}),
    "chat documents": lambda text: (CHAT, {"messages": [USER], "documents": ["a", text]}),
    "items": lambda text: (SCORE, {"query": "x", "items": ["a", text], **LABELS}),
    "items of a second query": lambda text: (SCORE, {"query": ["x", "y"], "items": [["a"], ["a", text]], **LABELS}),
    "generative": lambda text: (GENERATIVE, {"query": "x", "items": ["a", text], "label_token_ids": [1]}),
    "pairs": lambda text: (SCORE, {"text_1": "x", "text_2": ["a", text]}),
    "pairs of two queries": lambda text: (SCORE, {"queries": ["x", "y"], "documents": ["a", text]}),
    "rerank": lambda text: (RERANK, {"query": "x", "documents": ["a", text]}),
    "rerank of texts": lambda text: ("/rerank", {"query": "x", "texts": ["a", text]}),
    "questions": lambda text: (DECISIONS, {"input": "x", "questions": [ASKED, {**ASKED, "instructions": text}]}),
    "stored": lambda text: (CACHE, {"prefix": "x", "documents": ["a", text]}),
}
MESSAGES = {
    "chat": lambda text: (CHAT, {"messages": [USER, said(text), USER]}),
    "tokenized chat": lambda text: (TOKENIZE, {"messages": [USER, said(text), USER]}),
}
ALONE = {
    "prompt": lambda text: (COMPLETION, {"prompt": text}),
    "query of items": lambda text: (SCORE, {"query": text, "items": ["a"], **LABELS}),
    "query of pairs": lambda text: (SCORE, {"text_1": text, "text_2": ["a"]}),
    "input of decisions": lambda text: (DECISIONS, {"input": text, "questions": [ASKED]}),
    "query of documents": lambda text: (RERANK, {"query": text, "documents": ["a"]}),
    "query of texts": lambda text: ("/rerank", {"query": text, "texts": ["a"]}),
    "prefix": lambda text: (COMPLETION, {"chunks": {"prefix": text, "documents": ["a"], "question": "q"}}),
    "question": lambda text: (COMPLETION, {"chunks": {"documents": ["a"], "question": text}}),
}
TOO_LONG_TO_TOKENIZE = {"tokenized chat", "inspected chunks"}
"""These answer for any length."""


@pytest.fixture(scope="module")
def post(demo_server):
    with demo_server.client() as http:

        def send(path, body):
            headers = {"Content-Type": "application/json"}
            answer = http.post(path, content=json.dumps(body).encode(), headers=headers)
            assert answer.status_code == 400, (path, answer.text)
            return answer.json()["error"]

        yield send


def names(value):
    """Every field name in a body."""
    if isinstance(value, dict):
        return {*value} | {n for v in value.values() for n in names(v)}
    return {n for v in value for n in names(v)} if isinstance(value, list) else set()


@pytest.mark.parametrize("place", SECOND)
def test_a_fault_in_a_list_is_named_by_its_place(place, post):
    for text, code in ((LONE, "invalid_value"), (LONG, "context_length_exceeded"), (5, "invalid_value")):
        if text is LONG and place in TOO_LONG_TO_TOKENIZE:
            continue
        path, body = SECOND[place](text)
        error = post(path, body)
        assert error["code"] == code, error
        assert error["param"] in names(body), error
        assert re.search(r"\b1\b", error["message"]), error


@pytest.mark.parametrize("place", SECOND)
def test_an_unknown_field_is_named_with_its_path(place, post):
    path, body = SECOND[place]("b")
    error = post(path, {**body, "zz": 1})
    assert (error["code"], error["param"]) == ("unsupported_parameter", "zz")
    assert "zz" in error["message"]


@pytest.mark.parametrize("place", MESSAGES)
def test_a_fault_in_a_message_is_named_by_its_place(place, post):
    for text in (LONE, 5, [{"type": "text", "text": 5}]):
        error = post(*MESSAGES[place](text))
        assert (error["code"], error["param"]) == ("invalid_value", "messages")
        assert re.search(r"\b1\b", error["message"]), error
    path, body = MESSAGES[place]("b")
    del body["messages"][1]["role"]
    error = post(path, body)
    assert (error["code"], error["message"]) == ("missing_required_parameter", "messages.1.role is missing")
    body["messages"][1] = {**said("b"), "zz": 1}
    assert post(path, body)["message"] == "messages.1.zz is not supported by this server"


def test_a_long_chat_is_about_its_messages(post):
    error = post(CHAT, {"messages": [USER, said(LONG), USER]})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize("place", ALONE)
def test_a_fault_in_a_single_text_has_its_field(place, post):
    for text, code in ((LONE, "invalid_value"), (LONG, "context_length_exceeded")):
        path, body = ALONE[place](text)
        error = post(path, body)
        assert error["code"] == code, error
        assert error["param"] in names(body), error
    if place in ("prefix", "question"):
        assert f"the {place}" in post(*ALONE[place](LONE))["message"]


REQUIRED = [
    (COMPLETION, {}, "prompt"),
    (CHAT, {}, "messages"),
    (SCORE, {}, "label_token_ids"),
    (SCORE, {"items": ["x"], **LABELS}, "query"),
    (SCORE, {"query": "x", **LABELS}, "items"),
    (SCORE, {"query": "x", "items": ["y"]}, "label_token_ids"),
    (GENERATIVE, {"items": ["x"], "label_token_ids": [1]}, "query"),
    (GENERATIVE, {"query": "x", "items": ["y"]}, "label_token_ids"),
    (DECISIONS, {"questions": [ASKED]}, "input"),
    (DECISIONS, {"input": "x"}, "questions"),
    (RERANK, {"documents": ["x"]}, "query"),
    (RERANK, {"query": "x"}, "documents"),
    (TOKENIZE, {}, "prompt"),
    (DETOKENIZE, {}, "tokens"),
    (INSPECT, {}, "prompt"),
    (CACHE, {"prefix": "x"}, "documents"),
]


@pytest.mark.parametrize(("path", "body", "param"), REQUIRED)
def test_a_missing_field_has_one_code(path, body, param, post):
    error = post(path, body)
    assert (error["code"], error["param"]) == ("missing_required_parameter", param)


def test_a_chunk_that_is_too_long_has_the_code_of_what_cannot_fit(engine):
    from chunkattn.errors import CapacityError

    llm = engine("llama", max_chunk_len=4)
    with pytest.raises(CapacityError, match="item 0 has 5 tokens, max_chunk_len is 4"):
        llm.score([1], [[1] * 5], label_token_ids=[1])


def test_bytes_that_are_no_request_get_a_code(demo_server):
    import socket

    address = httpx.URL(demo_server.url)
    with socket.create_connection((address.host, address.port), timeout=30) as connection:
        connection.sendall(b"\x00\x01 nonsense\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "invalid_http"


# The source


def calls():
    """Every construction of an `ApiError` where fields are read, with its file."""
    for file in sorted(file for folder in FOLDERS[:4] for file in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ApiError":
                yield file.name, node


def sources():
    """The text of every file that may answer with an error."""
    return [f.read_text() for folder in FOLDERS for f in folder.rglob("*.py")]


def codes():
    """Every code that the server and the gateway give to an error by name."""
    found = {code for text in sources() for code in re.findall(r'code="(\w+)"', text)}
    return found | set(re.findall(r'\d{3}: "(\w+)"', (PACKAGE / "web" / "errors.py").read_text())) - {"authentication_error"}


WITHOUT_A_FIELD = {
    "invalid_http",
    "invalid_json",
    "invalid_encoding",
    "body_too_complex",
    "invalid_host",
    "invalid_path",
    "websocket_not_supported",
    "no_tokenizer",
    "missing_required_parameter",
}
"""Codes of errors about the whole request. Of a missing field, `param` is None only if there is no body."""


def test_every_400_of_the_source_has_a_code_and_a_field():
    seen = 0
    for file, call in calls():
        if not (isinstance(call.args[0], ast.Constant) and call.args[0].value == 400):
            continue
        given = {k.arg: k.value for k in call.keywords}
        seen += 1
        assert "code" in given, (file, call.lineno)
        code = getattr(given["code"], "value", None)
        assert "param" in given or code in WITHOUT_A_FIELD, (file, call.lineno)
    assert seen > 20


def test_the_table_of_codes_is_complete():
    """Each code of the source is in the table of the reference, and each code of the table in the source."""
    page = (PACKAGE.parent / "docs" / "reference" / "http.md").read_text()
    rows = re.findall(r"^\| (\d{3}) \| `(\w+)` \|", page, re.MULTILINE)
    table, states = {code for _, code in rows}, {f"server_{state}" for state in ("starting", "degraded", "draining")}
    types = {"not_found_error", "rate_limit_error", "permission_error", "overloaded_error", "timeout_error"}
    assert codes() - types <= table
    text = "".join(sources())
    assert {code for code in table - states if f'"{code}"' not in text} == set()
    assert states <= table
    statuses = [status for status, _ in rows]
    assert statuses == sorted(statuses)
