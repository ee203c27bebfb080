"""Tools with the `openai` client against a server of the demo model: enforced calls, streams, and a turn with a result."""

import json

import jsonschema
import pytest
from openai import OpenAI

from tests.patience import PATIENCE_S

WHERE = {
    "type": "object",
    "properties": {
        "who": {"type": "string", "minLength": 1, "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["who", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "find", "parameters": WHERE}},
    {
        "type": "function",
        "function": {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
    },
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
MESSAGES = [{"role": "user", "content": "Where does Nila live?"}]
DOCUMENTS = ["Nila lives in Tunise.", "Rumi is a poet."]


@pytest.fixture(scope="module")
def chat(demo_server):
    """A function that asks the server, by default for enforced calls at temperature 1."""
    with OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", timeout=PATIENCE_S, max_retries=0) as client:

        def ask(**fields):
            asked = {
                "messages": MESSAGES,
                "tools": TOOLS,
                "tool_choice": "required",
                "temperature": 1,
                "max_tokens": 120,
                **fields,
            }
            return client.chat.completions.create(model="chunkattn-demo", **asked)

        yield ask


def check(calls):
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_enforced_calls_are_valid(chat):
    """Every sample that ends by itself holds calls, one or more, whose arguments fit their schemas."""
    ended = 0
    for choice in chat(n=8, seed=3, parallel_tool_calls=False).choices:
        assert choice.finish_reason in ("tool_calls", "length")
        if choice.finish_reason == "tool_calls":
            ended += 1
            assert choice.message.content is None
            assert len(choice.message.tool_calls) == 1
            check(choice.message.tool_calls)
    assert ended >= 6
    named = chat(
        n=4, seed=4, tool_choice={"type": "function", "function": {"name": "find"}}, extra_body={"documents": DOCUMENTS}
    )
    done = [choice.message for choice in named.choices if choice.finish_reason == "tool_calls"]
    assert len(done) >= 2
    assert {call.function.name for message in done for call in message.tool_calls} == {"find"}


def test_streams_have_the_calls_of_whole_answers(chat):
    options = {"seed": 5, "parallel_tool_calls": False, "tool_choice": {"type": "function", "function": {"name": "find"}}}
    (whole,) = chat(**options).choices
    entries = [entry for event in chat(stream=True, **options) for entry in event.choices[0].delta.tool_calls or ()]
    assert entries[0].function.name == "find"
    assert entries[0].id
    assert not any(entry.id or entry.function.name for entry in entries[1:])
    assert "".join(entry.function.arguments for entry in entries) == whole.message.tool_calls[0].function.arguments
    assert len(entries) > 2


def test_a_result_goes_back(chat):
    """The messages of a turn with a call and its result, as the client holds them, are accepted."""
    message = (
        chat(seed=6, parallel_tool_calls=False, tool_choice={"type": "function", "function": {"name": "now"}})
        .choices[0]
        .message
    )
    (call,) = message.tool_calls
    turn = [message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "It is noon."}]
    answer = chat(messages=[*MESSAGES, *turn], tool_choice="none", max_tokens=8, extra_body={"documents": DOCUMENTS})
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None


def test_a_schema_that_no_grammar_takes_is_refused(chat):
    bad = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "banana"}}}},
    }
    with pytest.raises(Exception, match="400") as caught:
        chat(tools=[bad])
    assert caught.value.body["param"] == "tools"
