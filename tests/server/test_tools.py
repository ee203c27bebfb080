"""Tools and reasoning over HTTP: prompts, grammars, answers and errors, over an engine that writes a given text."""

import json

import pytest

from chunkattn.errors import ConfigError
from chunkattn.schema.documents import CacheBody
from chunkattn.schema.parts import parts
from chunkattn.schema.piece_keys import keys_of
from chunkattn.server.app import create_app
from chunkattn.web.options import ServerConfig

pytest_plugins = ["tests.told_engine"]
pytestmark = pytest.mark.usefixtures("compiled")

CHAT, STORE = "/v1/chat/completions", "/v1/cache/documents"
USER = {"role": "user", "content": "Where is Ana?"}
FIND = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Find a person.",
        "parameters": {"type": "object", "properties": {"who": {"type": "string"}}, "required": ["who"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALLS = (
    '<tool_call>\n{"name": "find", "arguments": {"who": "Ana"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
CALLED = [("find", '{"who": "Ana"}'), ("now", "{}")]


def body_of(**fields):
    return {"messages": [USER], "tools": [FIND, NOW], "max_tokens": 200, **fields}


def answered(post, **fields):
    """Message of the answer, and why it ends."""
    answer = post(CHAT, body_of(**fields))
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice["message"], choice["finish_reason"]


def streamed(post, **fields):
    """The deltas of a stream put together as a client does, the first entry of each call, and why it ends."""
    answer = post(CHAT, body_of(stream=True, **fields))
    assert answer.status_code == 200, answer.text
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: {")]
    message, firsts, reasons = {"content": "", "reasoning_content": "", "calls": {}}, {}, []
    for choice in (event["choices"][0] for event in events):
        for name in ("content", "reasoning_content"):
            message[name] += choice["delta"].get(name) or ""
        for call in choice["delta"].get("tool_calls", ()):
            firsts.setdefault(call["index"], call)
            message["calls"].setdefault(call["index"], [call["function"].get("name"), ""])[1] += call["function"]["arguments"]
        reasons.append(choice["finish_reason"])
    assert not any(reasons[:-1])
    return message, firsts, reasons[-1]


def prompt(writer, demo):
    return demo.tokenizer.decode(writer.requests[-1].layout.token_ids).replace(" ", "")


# Answers


def test_calls_are_in_the_message(post, says):
    says(CALLS)
    message, reason = answered(post)
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]] == CALLED
    assert {c["type"] for c in message["tool_calls"]} == {"function"}
    assert len({c["id"] for c in message["tool_calls"]}) == 2
    assert all(c["id"].startswith("call_") for c in message["tool_calls"])
    assert message["content"] is None
    assert reason == "tool_calls"


def test_calls_are_streamed(post, says):
    says("I look. " + CALLS)
    message, firsts, reason = streamed(post)
    assert message["content"].strip() == "I look."
    assert [tuple(call) for call in message["calls"].values()] == CALLED
    assert [call["function"]["name"] for call in firsts.values()] == ["find", "now"]
    assert all(call["id"].startswith("call_") and call["type"] == "function" for call in firsts.values())
    assert reason == "tool_calls"


def test_a_limit_cuts_a_call_off(post, says):
    says(CALLS[:60], reason="length")
    message, reason = answered(post)
    assert reason == "length"
    assert message["tool_calls"][0]["function"]["arguments"].startswith('{"who": "A')


def test_one_call_unless_calls_are_parallel(post, says):
    says(CALLS)
    message, _ = answered(post, parallel_tool_calls=False)
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["find"]


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": None}, {"tools": []}])
def test_answers_without_tools_are_text(post, says, fields):
    says(CALLS)
    message, reason = answered(post, **fields)
    assert message["content"].strip() == CALLS
    assert "tool_calls" not in message
    assert reason == "stop"


def test_an_answer_without_a_call(post, says):
    says("Ana is here.")
    message, reason = answered(post)
    assert (message["content"].strip(), message["refusal"], reason) == ("Ana is here.", None, "stop")
    assert message.keys() == {"role", "content", "refusal"}
    message, firsts, reason = streamed(post)
    assert (message["content"].strip(), firsts, reason) == ("Ana is here.", {}, "stop")


# Prompts


def test_the_prompt_shows_the_tools_whatever_the_choice(post, says, writer, demo):
    says("x")
    prompts = []
    for choice in ("auto", "none", "required", {"type": "function", "function": {"name": "now"}}, None):
        answered(post, tool_choice=choice)
        prompts.append(prompt(writer, demo))
    assert len({*prompts}) == 1
    assert '"name":"find"' in prompts[0]
    answered(post, tools=None)
    assert "find" not in prompt(writer, demo)


def test_documents_stand_beside_tools(post, says, writer, demo):
    """The prefix before the documents holds the tools."""
    says(CALLS)
    message, _ = answered(post, documents=["Ana lives in Oslo.", "Ben lives in Rome."])
    assert len(message["tool_calls"]) == 2
    layout = writer.requests[-1].layout
    assert len(layout.chunk_lens) == 2
    assert '"name":"find"' in demo.tokenizer.decode(layout.token_ids[: layout.prefix_len]).replace(" ", "")


def test_a_turn_with_results_is_rendered(post, says, writer, demo):
    says("In Oslo.")
    call = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": '{"who": "Ana"}'}}
    turn = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Oslo"},
    ]
    answered(post, messages=[USER, *turn])
    shown = '<tool_call>{"name":"find","arguments":{"who":"Ana"}}</tool_call>'
    assert prompt(writer, demo).endswith(f"{shown}</s>OsloAnswer:")


def test_documents_are_stored_after_tools(post, says, writer, demo):
    """The prefix of a stored document is that of chats with the same tools."""
    says("x")
    answered(post, documents=["Ana lives in Oslo."])
    layout = writer.requests[-1].layout

    def prefix(**fields):
        body = CacheBody.model_validate({"messages": [], "documents": ["Ana lives in Oslo."], **fields})
        return demo.parser.parse_cache(body.start(), body.texts(), body.template_options())[0]

    assert prefix(tools=[FIND, NOW]) == [*layout.token_ids[: layout.prefix_len]]
    assert prefix(tools=[NOW, FIND]) != prefix(tools=[FIND, NOW])
    assert len(prefix()) < layout.prefix_len
    error = post(STORE, {"prefix": "Read.", "documents": ["a"], "tools": [FIND]}).json()["error"]
    assert "tools need messages" in error["message"]


def test_routing_keys_tell_tools_apart():
    """The keys of a document are equal where its K/V is: behind the same tools in the same order."""

    def keys(path, **body):
        pieces = keys_of(path, {"documents": ["Ana lives in Oslo."], **body}).pieces
        return {key for key, _ in pieces}

    chat = {"messages": [USER]}
    tooled = keys(CHAT, tools=[FIND, NOW], **chat)
    assert tooled == keys(CHAT, tools=[FIND, NOW], tool_choice="none", **chat)
    assert tooled == keys(
        CHAT, tools=[FIND, {**NOW, "function": {**NOW["function"], "strict": True, "description": None}}], **chat
    )
    assert not tooled & keys(CHAT, tools=[NOW, FIND], **chat)
    assert not tooled & keys(CHAT, **chat)
    assert keys(STORE, messages=[], tools=[FIND, NOW]) <= tooled
    assert keys(CHAT, tools=[], **chat) == keys(CHAT, **chat)
    assert parts(CHAT, {**chat, "tools": []}) == parts(CHAT, chat)


# Grammars


def shape(writer):
    return writer.requests[-1].sampling.structured_outputs


def test_grammars_enforce_calls(post, says, writer):
    says(CALLS)
    answered(post)
    assert shape(writer) is None
    answered(post, tool_choice="required")
    assert "find" in shape(writer).grammar
    assert "now" in shape(writer).grammar
    answered(post, tool_choice={"type": "function", "function": {"name": "now"}})
    assert "find" not in shape(writer).grammar
    strict = {**FIND, "function": {**FIND["function"], "strict": True}}
    answered(post, tools=[strict, NOW])
    assert "find" in shape(writer).grammar
    answered(post, tools=[strict, NOW], tool_choice="none")
    assert shape(writer) is None


def allowed(*names, mode="auto"):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_allowed_tools_are_the_only_ones_called(post, says, writer, demo):
    says(CALLS)
    answered(post)
    shown = prompt(writer, demo)
    for mode in ("auto", "required"):
        answered(post, tool_choice=allowed("now", mode=mode))
        assert "find" not in shape(writer).grammar
        assert "now" in shape(writer).grammar
        assert prompt(writer, demo) == shown
    answered(post, tool_choice=allowed("now", "find"))
    assert shape(writer) is None
    tools = [{"type": "function", **tool["function"]} for tool in (FIND, NOW)]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}
    answer = post("/v1/responses", {"input": "Where?", "tools": tools, "tool_choice": choice})
    assert answer.json()["tool_choice"] == choice
    assert "find" not in shape(writer).grammar


# Errors


def function(**fields):
    return {"type": "function", "function": fields}


ERRORS = [
    ({"tools": [function(description="x")]}, "tools", "name"),
    ({"tools": [function(name="a b")]}, "tools.0.function", "a tool's name has"),
    ({"tools": [function(name="")]}, "tools.0.function", "a tool's name has"),
    ({"tools": [FIND, FIND]}, "tools", "two tools have the name 'find'"),
    ({"tools": [function(name="f", parameters={"type": "array"})]}, "tools.0.function", "JSON schema of an object"),
    ({"tools": [function(name="f", parameters={"properties": [1]})]}, "tools.0.function", "properties"),
    ({"tools": [function(name="f", parameters={"required": "a"})]}, "tools.0.function", "`required`"),
    ({"tools": [function(name="f", parameters=[])]}, "tools", "parameters"),
    ({"tools": [{"type": "web_search"}]}, "tools", ""),
    ({"tools": [FIND] * 129}, "tools", "128"),
    ({"tool_choice": {"type": "function", "function": {"name": "lose"}}}, "tool_choice", "'lose', which is none of the tools"),
    ({"tool_choice": {"type": "function", "function": {"name": ""}}}, "tool_choice", "'', which is none of the tools"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", ""),
    ({"tool_choice": "always"}, "tool_choice", ""),
    ({"tool_choice": allowed("now", "lose")}, "tool_choice", "'lose', which is none of the tools"),
    ({"tool_choice": allowed()}, "tool_choice", ""),
    ({"tool_choice": allowed("now", mode="none")}, "tool_choice", ""),
    ({"tools": None, "tool_choice": allowed("now")}, "tool_choice", "'now', which is none of the tools"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"functions": [{"name": "f"}]}, "functions", "not supported"),
]


@pytest.mark.parametrize(("fields", "param", "text"), ERRORS)
def test_malformed_tools_are_refused(post, fields, param, text):
    answer = post(CHAT, body_of(**fields))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].startswith(param)
    assert text in error["message"]


def test_models_without_tools_refuse_them(post, demo, monkeypatch):
    error = post(CHAT, body_of(), tool_call_parser="none").json()["error"]
    assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
    assert "--tool-call-parser" in error["message"]
    assert post(CHAT, body_of(tool_choice="none"), tool_call_parser="none").status_code == 200
    monkeypatch.setattr(demo.tokenizer, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}")
    error = post(CHAT, body_of(), tool_call_parser="hermes").json()["error"]
    assert (error["param"], error["code"]) == ("tools", "message_not_rendered")
    assert "does not show tools" in error["message"]


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
def test_unknown_parsers_are_refused_at_the_start(llm, option):
    with pytest.raises(ConfigError, match=f"{option} 'banana' is unknown"):
        create_app(llm, ServerConfig(**{option: "banana"}))
