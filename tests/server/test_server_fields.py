"""Fields of completions and chats, over an engine that computes nothing and remembers its requests."""

import asyncio
import json

import openai.types
import openai.types.chat
import openai.types.responses
import pytest

from chunkattn import SamplingParams
from chunkattn.calls.generate import generate_job
from chunkattn.calls.likelihood import likelihood_job
from chunkattn.errors import CapacityError, ConfigError
from chunkattn.schema.generation import ChatBody, CompletionBody, ContentPart, Message
from chunkattn.schema.responses import ResponsesBody
from chunkattn.server.app import create_app
from chunkattn.web.events import event_of
from chunkattn.web.options import ServerConfig

pytest_plugins = ["tests.told_engine"]

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "Where does Ana live?"}
BODIES = {COMPLETION: {"prompt": "Where does Ana live?", "max_tokens": 2}, CHAT: {"messages": [USER], "max_tokens": 2}}


def told(request):
    """Return the fields of a request to the engine that decide its answer."""
    return [*request.layout.token_ids], request.sampling, request.salt_key, request.priority, request.prompt_only


TEXT, OBJECT = "x" * 1024, {"a": {"b": [1] * 5}}
# For each field without effect: values that are accepted, and values that are refused by name.
SHARED = {
    "metadata": ([OBJECT, {str(n): n for n in range(64)}], [5, "x", {str(n): n for n in range(65)}]),
    "store": ([True, False], ["x"]),
    "service_tier": (["auto", "priority", TEXT], [5, TEXT + "x"]),
    "safety_identifier": ([TEXT], [TEXT + "x"]),
    "prompt_cache_key": ([TEXT], [TEXT + "x", 5]),
    "prompt_cache_retention": (["in_memory", "24h"], [24]),
    "prompt_cache_options": ([{"mode": "implicit", "ttl": "30m"}], ["x"]),
    "request_id": ([TEXT], [5]),
    "session_id": ([TEXT], [5]),
    "use_beam_search": ([False], [True]),
    "early_stopping": ([False], [True]),
    "length_penalty": ([1, 1.0], [2, True]),
    "bad_words": ([[]], [["x"]]),
    "spaces_between_special_tokens": ([True], [False]),
    "return_token_ids": ([False], [True]),
}
OF_COMPLETIONS = {"best_of": ([1], [2]), "suffix": ([""], ["x"])}
OF_CHATS = {
    "functions": ([[]], [[{"name": "f"}]]),
    "function_call": (["none"], ["auto"]),
    "modalities": ([["text"]], [["text", "audio"], []]),
    "verbosity": (["medium"], ["low"]),
    "prediction": ([{"type": "content", "content": "x"}], ["x"]),
    "add_special_tokens": ([False], [True]),
}
OF_MESSAGES = {
    "id": (["msg_1", TEXT], [5]),
    "annotations": ([[]], [[{"type": "url_citation"}]]),
    "refusal": ([""], ["I cannot."]),
    "cache_control": ([{"type": "ephemeral"}], ["x"]),
}
OF_PARTS = {"cache_control": ([{"type": "ephemeral"}, None], ["x"]), "prompt_cache_breakpoint": ([{"mode": "explicit"}], ["x"])}


def bodies_with(place, name, value):
    """Bodies that hold a field in its place."""
    if place == "message":
        return {CHAT: BODIES[CHAT] | {"messages": [USER | {name: value}]}}
    if place == "part":
        part = {"type": "text", "text": USER["content"], name: value}
        return {CHAT: BODIES[CHAT] | {"messages": [{"role": "user", "content": [part]}]}}
    paths = {"shared": (COMPLETION, CHAT), "completion": (COMPLETION,), "chat": (CHAT,)}[place]
    return {path: BODIES[path] | {name: value} for path in paths}


PLACES = {"shared": SHARED, "completion": OF_COMPLETIONS, "chat": OF_CHATS, "message": OF_MESSAGES, "part": OF_PARTS}
FIELDS = [(place, name) for place, fields in PLACES.items() for name in fields]


@pytest.mark.parametrize(("place", "name"), FIELDS)
def test_fields_without_effect(post, writer, place, name):
    """The engine's request is the same with the field as without it; other values are refused by name, with a code."""
    accepted, refused = PLACES[place][name]
    for value in [*accepted, None]:
        for path, body in bodies_with(place, name, value).items():
            writer.requests.clear()
            for sent in (BODIES[path], body):
                answer = post(path, sent)
                assert answer.status_code == 200, answer.text
            first, second = map(told, writer.requests)
            assert first == second
    for value in refused:
        for path, body in bodies_with(place, name, value).items():
            answer = post(path, body)
            assert answer.status_code == 400, (value, answer.text)
            error = answer.json()["error"]
            assert error["code"] in ("unsupported_parameter", "invalid_value")
            assert error["param"] == name or (place in ("message", "part") and error["param"] == "messages")
            assert name in error["message"] or place == "part"  # pydantic names the first branch of the content's union


def without_effect(model):
    return {name for name, field in model.model_fields.items() if "accepted" in (field.json_schema_extra or {})}


def test_the_table_is_tested_whole():
    assert without_effect(CompletionBody) == {*SHARED, *OF_COMPLETIONS}
    assert without_effect(ChatBody) == {*SHARED, *OF_CHATS}
    assert without_effect(Message) == {*OF_MESSAGES}
    assert without_effect(ContentPart) == {*OF_PARTS}


def test_every_parameter_of_openai_is_known_or_refused_for_a_reason():
    """A new release of the client brings its new parameters to this list."""
    changes_the_answer = {"audio", "moderation", "web_search_options"}
    needs_state = {"conversation", "previous_response_id", "prompt", "background_options", "context_management"}
    is_openai_s = {"access_programs", "image"}
    refused = changes_the_answer | needs_state | is_openai_s
    for body, params in (
        (ChatBody, openai.types.chat.completion_create_params.CompletionCreateParamsStreaming),
        (CompletionBody, openai.types.completion_create_params.CompletionCreateParamsStreaming),
        (ResponsesBody, openai.types.responses.response_create_params.ResponseCreateParamsStreaming),
    ):
        assert {*params.__annotations__} | {*params.__mro__[0].__annotations__} >= {"stream"}
        names = {name for kind in params.__orig_bases__ for name in kind.__annotations__} | {*params.__annotations__}
        assert len(names) > 15
        assert names - {*body.model_fields} - refused == set()


def test_best_of_is_the_number_of_samples(post):
    body = {"prompt": "x", "max_tokens": 2, "n": 3}
    assert len(post(COMPLETION, body | {"best_of": 3}).json()["choices"]) == 3
    error = post(COMPLETION, body | {"best_of": 1}).json()["error"]
    assert (error["param"], error["code"]) == ("best_of", "unsupported_parameter")


def test_prompt_cache_key_is_no_salt(post, writer):
    for body in ({}, {"prompt_cache_key": "a"}, {"cache_salt": "a"}, {"cache_salt": "a", "prompt_cache_key": "b"}):
        assert post(CHAT, BODIES[CHAT] | body).status_code == 200
    salts = [request.salt_key for request in writer.requests]
    assert salts[0] is salts[1] is None
    assert salts[2] == salts[3] is not None


# Messages


def test_histories_of_tools_are_accepted(post, demo, monkeypatch):
    template = (
        "{% for m in messages %}[{{ m.role }} {{ m.tool_call_id }}{{ m.reasoning_content }}]{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.id }}:{{ c.function.name }}({{ c.function.arguments.who }}){% endfor %}"
        "{% endfor %}"
    )
    monkeypatch.setattr(demo.tokenizer, "chat_template", template)
    function = {"name": "find", "arguments": '{"who": "Ana"}'}
    call = {"id": "call_1", "type": "function", "function": function}
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call | {"index": 0}], "refusal": None, "reasoning": "Hm."},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "in Oslo"}], "name": "find"},
        {"role": "assistant", "content": "Oslo.", "annotations": [], "audio": None, "function_call": None, "tool_calls": None},
        USER,
    ]
    expected = "[user ]Where does Ana live?[assistant Hm.]call_1:find(Ana)[tool call_1]in Oslo[assistant ]Oslo."
    answer = post("/tokenize", {"messages": history})
    assert answer.status_code == 200, answer.text
    text = demo.tokenizer.decode(answer.json()["tokens"])
    assert expected.replace(" ", "") in text.replace(" ", "")
    assert post(CHAT, {"messages": history}).status_code == 200
    error = post(CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": [call] * 129}]}).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "invalid_value")


def test_messages_that_are_not_rendered_have_a_code(post, demo, monkeypatch):
    template = "{% for m in messages if m.role != 'tool' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    monkeypatch.setattr(demo.tokenizer, "chat_template", template)
    messages = [USER, {"role": "tool", "tool_call_id": "x", "content": "in Oslo"}, USER]
    for body in ({"messages": messages}, {"messages": messages, "documents": ["a"]}, {"messages": messages, "stream": True}):
        answer = post(CHAT, body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("messages", "message_not_rendered")
        assert "message 1 (tool)" in error["message"]
    error = post(CHAT, {"messages": [{"role": "banana", "content": "x"}, USER]}).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "invalid_value")
    assert "banana" in error["message"]


# Prompts and log-probabilities


@pytest.fixture
def leading(demo, monkeypatch):
    """The token that the tokenizer seems to put before texts; the demo's own puts none."""
    token = demo.tokenizer("Where", add_special_tokens=False).input_ids[0]
    monkeypatch.setattr(demo.frontend.parser, "_leading", [token])
    monkeypatch.setattr(demo.frontend.parser.encode, "leading_ids", [token])
    return token


@pytest.mark.parametrize("chunked", [False, True])
def test_add_special_tokens(post, writer, demo, leading, chunked):
    prompt = "Read. # # Ana lives in Oslo. # # Where?" if chunked else "Where does Ana live?"
    parts = prompt.split(" # # ")
    ids = [token for part in parts for token in demo.tokenizer(part, add_special_tokens=False).input_ids]
    for body, expected in (
        ({}, [leading, *ids]),
        ({"add_special_tokens": True}, [leading, *ids]),
        ({"add_special_tokens": False}, ids),
    ):
        assert post(COMPLETION, {"prompt": prompt, **body}).status_code == 200
        assert post(COMPLETION, {"prompt": [prompt, prompt], **body}).status_code == 200
        assert [[*request.layout.token_ids] for request in writer.requests[-3:]] == [expected] * 3
        shown = post("/inspect", {"prompt": prompt, **body}).json()["parts"]
        assert [token["id"] for part in shown for token in part["tokens"]] == expected


def test_offsets_of_a_prompt_that_begins_with_a_leading_token(post, demo, leading):
    """The token has no text if the tokenizer put it there, and is text of the prompt otherwise."""
    body = {"prompt": "Where does Ana live?", "echo": True, "logprobs": 1, "max_tokens": 0}
    first = len(demo.tokenizer.decode([leading]))
    for add, begin in ((True, [0, 0, first]), (False, [0, first])):
        choice = post(COMPLETION, body | {"add_special_tokens": add}).json()["choices"][0]
        assert choice["text"] == body["prompt"]
        assert choice["logprobs"]["text_offset"][: len(begin)] == begin


def test_log_probabilities_of_a_prompt_as_long_as_the_model(post, llm):
    size = llm.limits.max_model_len
    for most, body in ((0, {"echo": True, "logprobs": 0}), (0, {"prompt_logprobs": 0}), (1, {})):
        answer = post(COMPLETION, {"prompt": [5] * (size - most), "max_tokens": most, **body})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == size - most
        answer = post(COMPLETION, {"prompt": [5] * (size - most + 1), "max_tokens": most, **body})
        assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_prompt_as_long_as_the_model_is_read_by_the_engine(demo):
    """The log-probabilities are those of two shorter prompts: of its tokens, and of its last tokens as an answer."""
    ids = [5 + n * 7 % 300 for n in range(demo.limits.max_model_len)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    parsed = demo.frontend.parse([{"prompt_token_ids": ids}], None)
    job = generate_job(demo.frontend, parsed, params, prompt_only=True)
    assert job.tokens == len(ids)
    (found,) = demo.run(job)
    assert not found.outputs[0].token_ids
    (short,) = demo.generate([{"prompt_token_ids": ids[:-1]}], params)
    values = [entry[token].logprob for token, entry in zip(ids[1:], found.prompt_logprobs[1:])]
    expected = [entry[token].logprob for token, entry in zip(ids[1:-1], short.prompt_logprobs[1:])]
    assert values[:-1] == pytest.approx(expected, abs=1e-4)
    prompt = demo.frontend.parse([{"prompt_token_ids": ids[:-2]}], None)
    (answer,) = demo.run(likelihood_job(demo.frontend, prompt, [ids[-2:]]))
    assert values[-2:] == pytest.approx(answer.tolist(), abs=1e-4)
    with pytest.raises(CapacityError, match="max_model_len"):
        likelihood_job(demo.frontend, prompt, [[*ids[-2:], 5]])


def test_log_probabilities_without_max_tokens_count_what_can_be_generated(post, llm):
    size = llm.limits.max_model_len
    body = {"messages": [{"role": "user", "content": "x " * (size // 8)}], "logprobs": True, "top_logprobs": 4}
    prompt = post(CHAT, body).json()["usage"]["prompt_tokens"]
    exact = (size - prompt) * 5
    assert exact < size * 5 - 500
    assert post(CHAT, body, max_answer_values=exact).status_code == 200
    for stream in (False, True):
        answer = post(CHAT, body | {"stream": stream}, max_answer_values=exact - 1)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("top_logprobs", "invalid_value")
        assert f"{exact} numbers" in error["message"]


def test_tokens_as_token_ids(post):
    asked = {"return_tokens_as_token_ids": True}
    found = post(COMPLETION, BODIES[COMPLETION] | asked | {"logprobs": 2}).json()["choices"][0]["logprobs"]
    plain = post(COMPLETION, BODIES[COMPLETION] | {"logprobs": 2}).json()["choices"][0]["logprobs"]
    assert found["tokens"] == ["token_id:7", "token_id:8"]
    assert {*found["top_logprobs"][0]} == {"token_id:7", "token_id:9", "token_id:10"}
    assert (found["text_offset"], found["token_logprobs"]) == (plain["text_offset"], plain["token_logprobs"])
    body = BODIES[CHAT] | {"logprobs": True, "top_logprobs": 1}
    content = post(CHAT, body | asked).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["token_id:7", "token_id:8"]
    assert content[0]["top_logprobs"][0]["token"] == "token_id:9"
    without = post(CHAT, body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [entry["bytes"] for entry in without]
    assert [entry["token"] for entry in without] != [entry["token"] for entry in content]


# Streams


def events(answer):
    assert answer.status_code == 200, answer.text
    return answer.text.split("\n\n")


def test_a_silent_stream_has_heartbeats(post, writer):
    writer.delay = 0.3
    for path, body in BODIES.items():
        found = events(post(path, body | {"stream": True}, stream_heartbeat_s=0.05))
        assert found[:2] == [": keep-alive"] * 2
        data = [event for event in found if event != ": keep-alive"]
        assert data[-2:] == ["data: [DONE]", ""]
        assert json.loads(data[0].removeprefix("data: "))["object"]
        assert ": keep-alive" not in events(post(path, body | {"stream": True}))
        assert ": keep-alive" not in events(post(path, body | {"stream": True}, stream_heartbeat_s=60))
        assert ": keep-alive" not in post(path, body, stream_heartbeat_s=0.05).text


def test_errors_before_the_first_heartbeat_have_their_status(post, writer):
    for path, body in ((COMPLETION, {"prompt": "x " * 3000}), (COMPLETION, {"prompt": ["x", ""]}), (CHAT, {"messages": []})):
        answer = post(path, body | {"stream": True}, stream_heartbeat_s=5)
        assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")
    assert not writer.requests


def test_errors_behind_a_heartbeat_are_events(post, writer):
    writer.delay = 5
    found = events(post(CHAT, BODIES[CHAT] | {"stream": True}, stream_heartbeat_s=0.05, request_timeout_s=0.3))
    data = [event for event in found if event != ": keep-alive"]
    assert len(data) < len(found)
    assert json.loads(data[0].removeprefix("data: "))["error"]["code"] == "timeout"
    assert data[1:] == ["data: [DONE]", ""]


@pytest.mark.parametrize("heartbeats", [0, 2])
def test_a_client_that_leaves_a_silent_stream_frees_its_request(llm, writer, heartbeats):
    """Before the first heartbeat and behind it."""
    writer.delay = 30
    body = json.dumps(BODIES[COMPLETION] | {"stream": True}).encode()
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": COMPLETION,
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "query_string": b"",
    }

    async def leave():
        gone, told_parts, given = asyncio.Event(), [], iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive():
            if (first := next(given, None)) is not None:
                return first
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            told_parts.append(message.get("body"))
            if heartbeats and told_parts.count(b": keep-alive\n\n") == heartbeats:
                gone.set()

        app = create_app(llm, ServerConfig(stream_heartbeat_s=0.05 if heartbeats else 30))
        answer = asyncio.create_task(app(scope, receive, send))
        async with asyncio.timeout(20):
            while not writer.requests:
                await asyncio.sleep(0.01)
            if not heartbeats:
                gone.set()
            await answer
        for task in writer.tasks:
            task.cancel()
        assert told_parts.count(b": keep-alive\n\n") == heartbeats
        assert not llm.client._calls
        assert writer.aborted == [writer.requests[0].request_id]

    asyncio.run(leave())


def test_event_data_has_no_line_ends():
    text = "a\u2028b\u2029c\x85d\x0be\x1cf\ré"
    event = event_of({"text": text})
    assert len(event.splitlines()) == 2
    assert json.loads(event.removeprefix("data: ")) == {"text": text}
    assert "é" in event


def test_heartbeats_need_a_time():
    for seconds in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="stream_heartbeat_s must be at least 0"):
            ServerConfig(stream_heartbeat_s=seconds)
