"""Shapes of texts over HTTP, in the engine's process."""

import json
from concurrent.futures import ThreadPoolExecutor

import jsonschema

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "n"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Where does Ana live?"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
COMPACT = {"json": SCHEMA, "disable_any_whitespace": True}


def chat(**options):
    return {"messages": MESSAGES, "max_tokens": 200, "seed": 3, **options}


def test_chats_and_completions(http):
    body = http.post(CHAT, json=chat(structured_outputs=COMPACT, n=3)).json()
    texts = [choice["message"]["content"] for choice in body["choices"] if choice["finish_reason"] == "stop"]
    assert texts
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    body = http.post(CHAT, json=chat(response_format=FORMAT, temperature=0)).json()
    assert body["choices"][0]["finish_reason"] in ("stop", "length")
    assert body["choices"][0]["message"]["content"].startswith("{")
    assert http.post(CHAT, json=chat(response_format={"type": "text"}, max_tokens=2)).status_code == 200
    body = http.post(CHAT, json=chat(response_format={"type": "json_object"}, max_tokens=5)).json()
    assert body["choices"][0]["message"]["content"].startswith("{")
    given = {"prompt": ["x", "y"], "max_tokens": 30, "structured_outputs": {"choice": ["ja", "nein"]}}
    assert {choice["text"] for choice in http.post(COMPLETION, json=given).json()["choices"]} <= {"ja", "nein"}


def test_streams_and_stop_strings(client):
    options = {"model": "chunkattn-demo", "messages": MESSAGES, "max_tokens": 200, "seed": 3}
    whole = client.chat.completions.create(**options, extra_body={"structured_outputs": COMPACT}).choices[0]
    stream = client.chat.completions.create(**options, stream=True, extra_body={"structured_outputs": COMPACT})
    text = "".join(event.choices[0].delta.content or "" for event in stream)
    assert text == whole.message.content
    stopped = client.chat.completions.create(**options, stop=['"city"'], extra_body={"structured_outputs": COMPACT}).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == ("{", "stop")


def chain(length):
    defs = {f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**defs, f"a{length}": {"type": "string"}}}


REFUSED = {
    "deep": {"json": '{"items":' * 300 + "{}" + "}" * 300},
    "references": {"json": chain(1000)},
    "wide": {"json": {"type": "object", "properties": {f"k{i}": {} for i in range(5000)}}},
    "multiples": {"json": {"type": "object", "properties": {f"k{i}": {"multipleOf": 7919 + 2 * i} for i in range(300)}}},
    "recursive": {"json": {"$ref": "#"}},
    "terminals": {"grammar": "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(1000)) + 'R1000: "a"\n'},
    "rules": {"grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(9000)) + 'r9000: "a"\n'},
    "regex": {"regex": "(a{1,1000}){1,1000}(?=b)"},
    "large": {"json": {"enum": ["a" * (8 << 10)] * 1000}},
    "no JSON": {"json": "{"},
    "several": {"json": {}, "regex": "a"},
    "none": {},
    "unknown": {"schema": {}},
    "no object": [],
}


def test_bad_shapes_are_refused_while_others_go_on(http, demo_server):
    with ThreadPoolExecutor(1) as beside:
        bystander = beside.submit(http.post, COMPLETION, json={"prompt": "x", "max_tokens": 200, "ignore_eos": True})
        for name, shape in REFUSED.items():
            answer = http.post(CHAT, json=chat(structured_outputs=shape))
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "structured_outputs"), (name, error)
        streamed = http.post(CHAT, json=chat(structured_outputs={"regex": "(a"}, stream=True))
        assert streamed.status_code == 400
        assert "unclosed group" in streamed.json()["error"]["message"]
        assert bystander.result().json()["usage"]["completion_tokens"] == 200
    for response_format in (
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_object", "json_schema": {"schema": {}}},
        {"type": "json_schema", "json_schema": {"schema": {"type": 3}}},
        {"type": "json_schema", "json_schema": {"schema": {}, "name": 5}},
        {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}},
    ):
        answer = http.post(CHAT, json=chat(response_format=response_format))
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "response_format"), error
    for name in ("json", "regex", "choice", "grammar"):
        error = http.post(CHAT, json=chat(**{f"guided_{name}": "x"})).json()["error"]
        assert error["param"] == f"guided_{name}"
        assert f'structured_outputs: {{"{name}"' in error["message"]
    both = http.post(CHAT, json=chat(response_format={"type": "json_object"}, structured_outputs=COMPACT))
    assert both.status_code == 400
    assert "exclude each other" in both.json()["error"]["message"]
