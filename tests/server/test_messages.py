"""`/v1/messages`: the chats that bodies become, and answers in Anthropic's form."""

import json

import pytest

from chunkattn.schema.anthropic import MessagesBody
from chunkattn.schema.generation import ChatBody
from chunkattn.server.message_form import MessageForm
from chunkattn.web.errors import ApiError
from tests.server.test_response_form import COMMON, USAGE, call, chunk

pytest_plugins = ["tests.told_engine"]

CHAT, MESSAGES, COUNT = "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"
USER = {"role": "user", "content": "Where is Ana?"}
BODY = {"messages": [USER], "max_tokens": 5}
FUNCTION = {"name": "find", "description": "Find.", "parameters": {"type": "object"}}
TOOL = {"name": "find", "description": "Find.", "input_schema": {"type": "object"}}
CALLED = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"who": "é"}'}}
SHARED_TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}


def block(text, **fields):
    return {"type": "text", "text": text, **fields}


def part(text):
    return {"type": "text", "text": text}


# Bodies, and the fields of the chats that they stand for.
CHATS = [
    ({}, {"messages": [USER]}),
    (
        {"system": "Be kind.", "stop_sequences": ["."]},
        {"messages": [{"role": "system", "content": "Be kind."}, USER], "stop": ["."]},
    ),
    (
        {"system": [block("Be kind.", cache_control={"type": "ephemeral"})]},
        {"messages": [{"role": "system", "content": [part("Be kind.")]}, USER]},
    ),
    (
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                        block("I look."),
                        {"type": "tool_use", "id": "c1", "name": "find", "input": {"who": "é"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": [block("Oslo")], "is_error": False},
                        block("And"),
                        block("Ben?"),
                    ],
                },
            ]
        },
        {
            "messages": [
                USER,
                {"role": "assistant", "reasoning_content": "Hm.", "content": [part("I look.")], "tool_calls": [CALLED]},
                {"role": "tool", "tool_call_id": "c1", "content": [part("Oslo")]},
                {"role": "user", "content": [part("And"), part("Ben?")]},
            ]
        },
    ),
    (
        {"messages": [USER, {"role": "assistant", "content": "Ana is"}]},
        {"messages": [USER, {"role": "assistant", "content": "Ana is"}], "continue_final_message": True},
    ),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "high"}},
        {"messages": [USER], "chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "high"},
    ),
    (
        {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"tone": "dry"}},
        {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False, "tone": "dry"}},
    ),
    (
        {"stream": True, "documents": ["a"], "top_k": 5, "metadata": {"user_id": "u"}, "tool_choice": {"type": "auto"}},
        {
            "messages": [USER],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "documents": ["a"],
            "top_k": 5,
        },
    ),
]
# Fields that a chat of the server may refuse.
TOOLED = [
    ({"tools": [TOOL], "tool_choice": {"type": "any"}}, {**SHARED_TOOLS, "tool_choice": "required"}),
    (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "find", "disable_parallel_tool_use": True}},
        {
            **SHARED_TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "find"}},
            "parallel_tool_calls": False,
        },
    ),
    ({"tools": [TOOL], "tool_choice": {"type": "none"}}, {**SHARED_TOOLS, "tool_choice": "none"}),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}},
    ),
]


@pytest.mark.parametrize(("body", "chat"), CHATS)
def test_a_body_becomes_a_chat(body, chat):
    made, expected = MessagesBody.model_validate(BODY | body).chat, ChatBody.model_validate({"max_tokens": 5, **chat})
    assert made.model_dump() == expected.model_dump()
    assert made.model_fields_set == expected.model_fields_set


@pytest.mark.parametrize(("body", "chat"), TOOLED)
def test_tools_and_formats_become_those_of_chats(body, chat):
    assert MessagesBody.translate(BODY | body) == {"messages": [USER], "max_tokens": 5, **chat}


def test_the_engine_gets_what_it_gets_of_a_chat(post, writer):
    body = BODY | {"documents": ["Ana is in Oslo.", "Rumi is a poet."], "stop_sequences": ["."]}
    chat = {name: value for name, value in body.items() if name != "stop_sequences"} | {"stop": ["."]}
    answers = [post(MESSAGES, body), post(CHAT, chat), post(MESSAGES, body | {"stream": True})]
    assert [answer.status_code for answer in answers] == [200] * 3
    first, second, third = writer.requests
    assert [*first.layout.token_ids] == [*second.layout.token_ids] == [*third.layout.token_ids]
    assert first.sampling == second.sampling == third.sampling
    message, content = answers[0].json(), answers[1].json()["choices"][0]["message"]["content"]
    assert message["content"] == [{"type": "text", "text": content, "citations": None}]
    assert message["usage"]["input_tokens"] == answers[1].json()["usage"]["prompt_tokens"]


def test_the_tokens_of_a_prompt_are_counted(post, writer):
    """The count is that of the prompt that the same message reads, with whatever is a part of it."""
    body = {"messages": [USER], "system": "Be kind.", "documents": ["Ana is in Oslo.", "Rumi is a poet."]}
    for fields in ({}, {"tools": [TOOL], "tool_choice": {"type": "any"}}, {"thinking": {"type": "disabled"}, "stream": True}):
        told = post(COUNT, body | fields).json()
        fields.pop("stream", None)
        fields.pop("tool_choice", None)
        usage = post(MESSAGES, body | fields | {"max_tokens": 2}).json()["usage"]
        assert told == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert len(writer.requests) == 3
    answer = post(COUNT, {"messages": []})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert answer.json()["type"] == "error"
    assert answer.headers["request-id"]


REFUSED = [
    ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}]}, "tools", "unsupported_parameter"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages", "unsupported_parameter"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "unsupported_parameter"),
    ({"messages": [{"role": "user"}]}, "messages", "missing_required_parameter"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"max_tokens": None}, "max_tokens", "missing_required_parameter"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"container": "c"}, "container", "unsupported_parameter"),
    ({"stop": ["a"], "stop_sequences": ["b"]}, "stop_sequences", "invalid_value"),
]


@pytest.mark.parametrize(("body", "param", "code"), REFUSED)
def test_errors_have_anthropic_s_form(post, body, param, code):
    answer = post(MESSAGES, BODY | body)
    told = answer.json()
    assert answer.status_code == 400
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert told["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    assert (told["error"]["param"], told["error"]["code"]) == (param, code)
    assert param in told["error"]["message"]


def test_other_errors_have_its_types(post):
    found = {}
    for status, options in ((404, {}), (413, {"max_body_bytes": 9}), (401, {"api_key": "k"})):
        answer = post(MESSAGES, BODY | {"model": "none"}, **options)
        assert answer.status_code == status
        found[status] = answer.json()["error"]["type"]
    assert found == {404: "not_found_error", 413: "request_too_large", 401: "authentication_error"}


# The form of answers


def events(text):
    found = []
    for one in text.removesuffix("\n\n").split("\n\n"):
        name, data = one.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def streamed(*chunks):
    form = MessageForm(COMMON)
    told = [{**one, "usage": USAGE} for one in [*chunks, {**COMMON, "choices": []}]]
    return events("".join(map(form.event, told)) + form.end)


def whole(message, finish_reason, stop_reason=None):
    choice = {"message": message, "finish_reason": finish_reason, "stop_reason": stop_reason}
    return MessageForm(COMMON).whole({"choices": iter([choice]), "usage": USAGE})


def begun(index, **fields):
    return {"type": "content_block_start", "index": index, "content_block": fields}


def grown(index, kind, **fields):
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **fields}}


def ended(index):
    return {"type": "content_block_stop", "index": index}


TOLD_USAGE = {
    "input_tokens": 4,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 5,
    "output_tokens": 4,
    "chunks": [{"tokens": 2, "cached_tokens": 2}],
}


def test_thinking_text_and_calls_are_blocks_in_their_order():
    found = streamed(
        chunk(role="assistant", content=""),
        chunk(reasoning_content="Hm."),
        chunk(content="I "),
        chunk(content="look."),
        chunk(**call(0, "f", '{"a"')),
        chunk(**call(0, arguments=": 1}")),
        chunk(**call(1, "g")),
        chunk("tool_calls"),
    )
    start = {"id": "msg_0123", "type": "message", "role": "assistant", "model": "m", "content": []}
    ends = {"stop_reason": None, "stop_sequence": None}
    assert found == [
        {"type": "message_start", "message": {**start, **ends, "usage": TOLD_USAGE}},
        begun(0, type="thinking", thinking="", signature=""),
        grown(0, "thinking_delta", thinking="Hm."),
        ended(0),
        begun(1, type="text", text="", citations=None),
        grown(1, "text_delta", text="I "),
        grown(1, "text_delta", text="look."),
        ended(1),
        begun(2, type="tool_use", id="call_0", name="f", input={}),
        grown(2, "input_json_delta", partial_json='{"a"'),
        grown(2, "input_json_delta", partial_json=": 1}"),
        ended(2),
        begun(3, type="tool_use", id="call_1", name="g", input={}),
        ended(3),
        {"type": "message_delta", "delta": ends | {"stop_reason": "tool_use"}, "usage": TOLD_USAGE},
        {"type": "message_stop"},
    ]
    calls = [*call(0, "f", '{"a": 1}')["tool_calls"], *call(1, "g")["tool_calls"]]
    message = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls}
    assert whole(message, "tool_calls") == {
        **start,
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "I look.", "citations": None},
            {"type": "tool_use", "id": "call_0", "name": "f", "input": {"a": 1}},
            {"type": "tool_use", "id": "call_1", "name": "g", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": TOLD_USAGE,
    }


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason", "expected"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", 7, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("length", None, ("max_tokens", None)),
    ],
)
def test_the_reason_of_the_end(finish_reason, stop_reason, expected):
    message = whole({"content": "Ana."}, finish_reason, stop_reason)
    assert (message["stop_reason"], message["stop_sequence"]) == expected
    last = chunk(finish_reason, content="Ana.")
    last["choices"][0]["stop_reason"] = stop_reason
    assert streamed(last)[-2]["delta"] == dict(zip(("stop_reason", "stop_sequence"), expected, strict=True))


def test_arguments_that_are_cut_are_empty():
    calls = call(0, "f", '{"a": ')["tool_calls"]
    assert whole({"content": None, "tool_calls": calls}, "length")["content"][0]["input"] == {}


def test_an_error_ends_the_stream():
    form = MessageForm(COMMON, "id-1")
    found = events(form.event({**chunk(content="Ana"), "usage": USAGE}) + form.failure(ApiError(503, "it died")) + form.end)
    error = {"message": "it died", "type": "overloaded_error", "param": None, "code": None}
    assert found[-1] == {"type": "error", "error": error, "request_id": "id-1"}
