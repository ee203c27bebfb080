"""Answers to chats in the form of the Responses API: every answer and event is valid by the types of OpenAI's SDK."""

import json

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import ConfigDict, TypeAdapter

from chunkattn.schema.responses import ResponsesBody
from chunkattn.server.response_form import MAX_REPEATED_LOGPROBS, ResponseForm
from chunkattn.web.errors import ApiError

EVENTS = TypeAdapter(ResponseStreamEvent, config=ConfigDict(strict=True))
RESPONSE = TypeAdapter(Response)
COMMON = {"id": "chatcmpl-0123", "created": 1_700_000_000, "model": "m"}
USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 4,
    "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": 5, "chunks": [{"tokens": 2, "cached_tokens": 2}]},
}
LOGPROB = {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": [{"token": "b", "logprob": -0.5, "bytes": [98]}]}


def repeated(**fields):
    return ResponsesBody.model_validate({"input": "Who?", **fields}).repeated | {"temperature": 0.5, "top_p": 1.0}


def chunk(finish_reason=None, logprobs=None, **delta):
    told = logprobs and {"content": logprobs}
    return {**COMMON, "choices": [{"index": 0, "delta": delta, "logprobs": told, "finish_reason": finish_reason}]}


def call(index, name=None, arguments=""):
    begun = {} if name is None else {"id": f"call_{index}", "type": "function"}
    function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
    return {"tool_calls": [{"index": index, **begun, "function": function}]}


def events(text):
    """Events of a stream, each checked against its name and the SDK's type."""
    found = []
    for number, block in enumerate(text.removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        EVENTS.validate_python(event)
        found.append(event)
    return found


def streamed(*chunks, **fields):
    form = ResponseForm(COMMON, repeated(**fields))
    return events("".join(map(form.event, [*chunks, {**COMMON, "choices": [], "usage": USAGE}])) + form.end)


def whole(message, finish_reason="stop", logprobs=None, **fields):
    told = logprobs and {"content": logprobs}
    choice = {"index": 0, "message": message, "logprobs": told, "finish_reason": finish_reason}
    made = ResponseForm(COMMON, repeated(**fields)).whole({**COMMON, "choices": iter([choice]), "usage": USAGE})
    RESPONSE.validate_python(made)
    return made


def kinds(found):
    return [event["type"].removeprefix("response.") for event in found]


OPENED, TEXT = ["created", "in_progress"], ["output_item.added", "content_part.added", "output_text.delta"]
CLOSED = ["output_text.done", "content_part.done", "output_item.done"]
THOUGHT = ["output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"]
CALLED = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]


def test_text():
    found = streamed(chunk(role="assistant", content=""), chunk(content="An"), chunk(content="a."), chunk("stop"))
    assert kinds(found) == [*OPENED, *TEXT, "output_text.delta", *CLOSED, "completed"]
    assert [event["delta"] for event in found if "delta" in event] == ["An", "a."]
    item = {"id": "msg_012300", "type": "message", "role": "assistant", "status": "completed"}
    content = [{"type": "output_text", "text": "Ana.", "annotations": [], "logprobs": []}]
    response = found[-1]["response"]
    assert response["output"] == [{**item, "content": content}]
    assert found[0]["response"] == response | {"status": "in_progress", "output": [], "usage": None}
    assert response["usage"] == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 5, "cache_write_tokens": 0, "chunks": [{"tokens": 2, "cached_tokens": 2}]},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 13,
    }
    assert whole({"role": "assistant", "content": "Ana."}) == response
    assert (response["id"], response["created_at"], response["store"]) == ("resp_0123", 1_700_000_000, False)


def test_reasoning_text_and_calls_are_items_in_their_order():
    chunks = [
        chunk(role="assistant", content=""),
        chunk(reasoning_content="Hm."),
        chunk(content="I look."),
        chunk(**call(0, "f")),
        chunk(**call(0, arguments='{"a"')),
        chunk(**call(0, arguments=": 1}")),
        chunk(**call(1, "g", "{}")),
        chunk("tool_calls"),
    ]
    found = streamed(*chunks)
    calls = [*CALLED[:2], "function_call_arguments.delta", *CALLED[2:], *CALLED]
    assert kinds(found) == [*OPENED, *THOUGHT, "output_item.done", *TEXT, *CLOSED, *calls, "completed"]
    thought, said, first, second = found[-1]["response"]["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert said["content"][0]["text"] == "I look."
    assert [(c["call_id"], c["name"], c["arguments"]) for c in (first, second)] == [
        ("call_0", "f", '{"a": 1}'),
        ("call_1", "g", "{}"),
    ]
    places = [event["output_index"] for event in found if event["type"] == "response.output_item.done"]
    assert places == [0, 1, 2, 3]
    assert len({item["id"] for item in found[-1]["response"]["output"]}) == 4
    listed = [*call(0, "f", '{"a": 1}')["tool_calls"], *call(1, "g", "{}")["tool_calls"]]
    message = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": listed}
    assert whole(message, "tool_calls") == found[-1]["response"]
    assert whole({"role": "assistant", "content": None, "tool_calls": listed}, "tool_calls")["output"][0]["name"] == "f"


def test_an_answer_that_is_cut_is_incomplete():
    found = streamed(chunk(content="Ana"), chunk("length"))
    assert kinds(found)[-1] == "incomplete"
    response = found[-1]["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [response["status"], response["output"][0]["status"]] == ["incomplete"] * 2
    assert whole({"role": "assistant", "content": "Ana"}, "length") == response


def test_an_answer_without_text_is_an_empty_message():
    found = streamed(chunk(role="assistant", content=""), chunk("stop"))
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == ""
    assert whole({"role": "assistant", "content": ""}) == found[-1]["response"]


def logprob_of(text):
    return {"token": text, "logprob": -1.0, "bytes": [*text.encode()], "top_logprobs": []}


def test_log_probabilities_of_reasoning_and_calls_open_no_message():
    """Tokens of reasoning, of markers and of calls are no part of the message, in a stream as in a whole answer."""
    hm, end, rome, comma, call_tag, arguments = map(logprob_of, ("Rome?", "</think>", "Rome", "?", "<tool_call>", "{}"))
    found = streamed(
        chunk(reasoning_content="Rome?", logprobs=[hm]),
        chunk(content="", logprobs=[end]),
        chunk(reasoning_content=" No.", logprobs=[hm]),
        chunk(content="", logprobs=[end]),
        chunk(content="Rome", logprobs=[rome]),
        chunk(content="?", logprobs=[comma]),
        chunk(content="", logprobs=[call_tag]),
        chunk(**call(0, "f", "{}"), logprobs=[arguments]),
        chunk("tool_calls", logprobs=[end]),
    )
    response = found[-1]["response"]
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
    assert response["output"][1]["content"][0]["logprobs"] == [rome, comma]
    message = {"role": "assistant", "reasoning_content": "Rome? No.", "content": "Rome?", **call(0, "f", "{}")}
    told = whole(message, "tool_calls", [hm, end, hm, end, rome, comma, call_tag, arguments, end])
    assert told["output"] == response["output"]


def test_log_probabilities_belong_to_the_text():
    end = LOGPROB | {"token": "</s>", "bytes": [60, 47, 115, 62]}
    found = streamed(chunk(content="a", logprobs=[LOGPROB]), chunk(content="", logprobs=[end]), chunk("stop"))
    deltas = [event["logprobs"] for event in found if event["type"] == "response.output_text.delta"]
    assert deltas == [[LOGPROB], [end]]
    response = found[-1]["response"]
    assert response["output"][0]["content"][0]["logprobs"] == [LOGPROB, end]
    assert whole({"role": "assistant", "content": "a"}, logprobs=[LOGPROB, end]) == response


def test_the_end_of_a_stream_repeats_few_log_probabilities():
    """A whole answer has all: it is encoded outside the event loop."""
    most = MAX_REPEATED_LOGPROBS // 2  # two of each token
    for count in (most, most + 1):
        found = streamed(*[chunk(content="a", logprobs=[LOGPROB])] * count, chunk("stop"))
        assert all(event["logprobs"] for event in found if event["type"] == "response.output_text.delta")
        repeated = [LOGPROB] * count if count == most else []
        assert found[-1]["response"]["output"][0]["content"][0]["logprobs"] == repeated
        message = whole({"role": "assistant", "content": "a" * count}, logprobs=[LOGPROB] * count)["output"][0]
        assert len(message["content"][0]["logprobs"]) == count


@pytest.mark.parametrize(
    ("status", "code"), [(500, "server_error"), (504, "server_error"), (429, "rate_limit_exceeded"), (400, "invalid_prompt")]
)
@pytest.mark.parametrize("begun", [False, True])
def test_an_error_ends_the_stream(status, code, begun):
    form = ResponseForm(COMMON, repeated(), "id-1")
    text = form.event(chunk(content="Ana")) if begun else ""
    found = events(text + form.failure(ApiError(status, "it broke", param="input", code="broken")) + form.end)
    assert kinds(found) == [*OPENED, *(TEXT if begun else []), "failed", "error"]
    failed, error = found[-2:]
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": code, "message": "it broke"}
    assert (error["message"], error["code"], error["param"]) == ("it broke", "broken", "input")
    assert error["error"]["message"] == "it broke"


def test_an_answer_repeats_the_request():
    told = repeated(
        instructions="Be brief.",
        metadata={"a": "b"},
        reasoning={"effort": "low"},
        max_output_tokens=5,
        user="u",
        stop="x",
    )
    assert told["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    assert (told["instructions"], told["metadata"], told["max_output_tokens"]) == ("Be brief.", {"a": "b"}, 5)
    assert (told["reasoning"]["effort"], told["user"], told["tool_choice"], told["tools"]) == ("low", "u", "auto", [])
    assert (told["store"], told["previous_response_id"], told["truncation"]) == (False, None, "disabled")


def test_an_answer_repeats_nothing_long():
    long = repeated(instructions="x" * (1 << 16), metadata={"a": "b"}, user="u")
    assert (long["instructions"], long["metadata"], long["user"], long["tools"]) == (None, {}, None, [])
    RESPONSE.validate_python(
        ResponseForm(COMMON, long).whole({"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}], "usage": USAGE})
    )
