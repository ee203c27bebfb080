"""The field `focus` of completions and chats, and what the usage tells of the choice."""

import asyncio
import json
import socket
import time

import httpx
import openai
import pytest

from chunkattn import DocumentPrompt, SamplingParams
from chunkattn.focus import MODES, Focus
from chunkattn.schema.generation import FocusOptions
from chunkattn.server.app import create_app
from chunkattn.web.options import ServerConfig
from tests.server_helpers import is_idle, wait_until

pytest_plugins = ["tests.told_engine"]

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
MODEL = "chunkattn-demo"
PREFIX = "Read the documents and answer the question."
DOCUMENTS = ["Rumi is a poet.", "", "Nila lives in Tunise.", "Lezudo likes honey and bread.", "Nila lives in Tunise."]
ASKED, QUESTION = "Where does Nila live?", "Where does Nila live? Answer:"
CHUNKS = {"prefix": PREFIX, "documents": DOCUMENTS, "question": QUESTION}
USER = {"role": "user", "content": ASKED}
GREEDY = SamplingParams(temperature=0, max_tokens=4)


def details(answer):
    assert answer.status_code == 200, answer.text
    return json.loads(answer.text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["usage"][
        "prompt_tokens_details"
    ]


def same_choice(shown, focus):
    """Compare the choice of an answer with that of the engine offline, which need not have computed as many tokens."""
    assert (shown["mode"], shown["score"], shown["documents"]) == (focus.mode, focus.score, focus.documents)
    assert shown["shown"] == focus.shown
    assert [score is None for score in shown["scores"]] == [score is None for score in focus.scores]
    pairs = zip(shown["scores"], focus.scores)
    assert all(a == pytest.approx(b, abs=1e-4) for a, b in pairs if b is not None)


@pytest.mark.parametrize("focus", [1, {"top_n": 2, "mode": "reread"}, {"top_n": 2, "mode": "only", "score": "relevance"}])
def test_answers_and_choices_are_those_of_the_engine(client, demo, focus):
    offline = demo.generate(DocumentPrompt(PREFIX, DOCUMENTS, QUESTION, focus), GREEDY)[0]
    asked = {"model": MODEL, "temperature": 0, "max_tokens": 4}
    done = client.completions.create(prompt="", **asked, extra_body={"chunks": CHUNKS, "focus": focus})
    assert done.choices[0].text == offline.outputs[0].text
    assert done.usage.prompt_tokens == len(offline.prompt_token_ids)
    same_choice(done.usage.prompt_tokens_details.focus, offline.focus)
    assert offline.focus.scores[1] is None
    offline = demo.chat([USER], GREEDY, documents=DOCUMENTS, focus=focus)[0]
    body = {"documents": DOCUMENTS, "focus": focus}
    events = list(
        client.chat.completions.create(
            messages=[USER], **asked, stream=True, stream_options={"include_usage": True}, extra_body=body
        )
    )
    assert "".join(e.choices[0].delta.content or "" for e in events[:-1]) == offline.outputs[0].text
    same_choice(events[-1].usage.prompt_tokens_details.focus, offline.focus)


def test_the_asynchronous_client(demo_server, demo):
    async def ask():
        async with openai.AsyncOpenAI(base_url=demo_server.url + "/v1", api_key="none", max_retries=0) as client:
            body = {"documents": DOCUMENTS, "focus": {"top_n": 1}}
            return await client.chat.completions.create(
                model=MODEL, messages=[USER], temperature=0, max_tokens=4, extra_body=body
            )

    done, offline = asyncio.run(ask()), demo.chat([USER], GREEDY, documents=DOCUMENTS, focus=1)[0]
    assert done.choices[0].message.content == offline.outputs[0].text
    same_choice(done.usage.prompt_tokens_details.focus, offline.focus)


def test_several_prompts_split_at_the_separator(http, demo):
    """Texts and token ids; each has a choice of its own. An error names the prompt without documents."""
    documents = [text for text in DOCUMENTS if text]
    texts = [" # # ".join([PREFIX, *documents, f"{asked} Answer:"]) for asked in (ASKED, "What does Lezudo like?")]
    parts = [[demo.parser.encode(part) for part in text.split(" # # ")] for text in texts]
    between = demo.parser.encode(" # # ")
    ids = [[*first, *(token for part in rest for token in (*between, *part))] for first, *rest in parts]
    for prompts in (texts, ids):
        body = {
            "prompt": prompts,
            "temperature": 0,
            "max_tokens": 4,
            "focus": {"top_n": 1, "mode": "reread"},
            "return_chunk_usage": True,
        }
        answer = http.post(COMPLETION, json=body)
        given = [{"prompt_token_ids": p} for p in prompts] if prompts is ids else prompts
        offline = demo.generate(given, GREEDY, focus={"top_n": 1, "mode": "reread"})
        assert [c["text"] for c in answer.json()["choices"]] == [o.outputs[0].text for o in offline]
        for shown, output in zip(details(answer)["focus"], offline, strict=True):
            same_choice(shown, output.focus)
        assert [len(own) for own in details(answer)["chunks"]] == [len(documents)] * 2
    assert [shown["documents"] for shown in details(answer)["focus"]] == [[1], [2]]
    error = http.post(COMPLETION, json={"prompt": [texts[0], "Where?"], "focus": 1}).json()["error"]
    assert (error["param"], error["code"]) == ("focus", "invalid_value")
    assert "prompt 1" in error["message"]


def test_the_prompt_of_an_answer_is_the_composed_one(http, demo):
    """Under `echo` and in log-probabilities; the samples share it."""
    for mode, scored in (("reread", None), ("only", 0)):
        focus = {"top_n": 1, "mode": mode}
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        offline = demo.generate(DocumentPrompt(PREFIX, DOCUMENTS, QUESTION, focus), params)[0]
        body = {"chunks": CHUNKS, "focus": focus, "max_tokens": 0, "echo": True, "logprobs": scored, "n": 2, "temperature": 0}
        answer = http.post(COMPLETION, json=body).json()
        assert [c["text"] for c in answer["choices"]] == [offline.prompt] * 2
        assert offline.prompt.count("Tunise") == (3 if mode == "reread" else 1)
        assert answer["usage"]["prompt_tokens"] == len(offline.prompt_token_ids)
        assert answer["usage"]["completion_tokens"] == 0
    found = answer["choices"][0]["logprobs"]
    pairs = zip(offline.prompt_token_ids, offline.prompt_logprobs)
    expected = [None if entry is None else entry[token].logprob for token, entry in pairs]
    assert [v is None for v in found["token_logprobs"]] == [v is None for v in expected]
    assert [v for v in found["token_logprobs"] if v] == pytest.approx([v for v in expected if v], abs=1e-4)


@pytest.mark.parametrize("stop", [{"stop_token_ids": [0]}, {"stop": ["<unk>"], "skip_special_tokens": False}])
def test_a_prompt_that_is_only_read_ends_by_its_length(http, stop):
    body = {"chunks": CHUNKS, "echo": True, "logprobs": 0, "max_tokens": 0, **stop}
    for stream in (False, True):
        text = http.post(COMPLETION, json=body | {"stream": stream}).text
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")] if stream else [text]
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
        assert all(c["stop_reason"] is None for c in choices)


def test_offsets_count_the_characters_of_documents_read_again(http):
    """The tokenizer puts a space before every text, which is not part of the prompt."""
    body = {"chunks": CHUNKS, "focus": {"top_n": 2, "mode": "reread"}, "max_tokens": 0, "echo": True, "logprobs": 0}
    choice = http.post(COMPLETION, json=body).json()["choices"][0]
    pieces = [*zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True)]
    begins = [PREFIX, *(text for text in DOCUMENTS if text), QUESTION]
    for text, begin in pieces:
        starts = any(choice["text"][begin:].startswith(part[:5]) for part in begins)
        shown = text.removeprefix(" ") if starts else text
        assert choice["text"][begin : begin + len(shown)] == shown


def test_an_order_of_the_caller_s_documents_changes_numbers_alone(http):
    order = [4, 3, 0, 1]
    body = {"messages": [USER], "temperature": 0, "max_tokens": 4, "return_chunk_usage": True, "seed": 1}
    one, other = (
        http.post(CHAT, json=body | {"documents": documents, "focus": {"top_n": 2, "mode": "only"}})
        for documents in (DOCUMENTS[:4], [DOCUMENTS[n] for n in order])
    )
    assert one.json()["choices"] == other.json()["choices"]
    choice, again = details(one)["focus"], details(other)["focus"]
    assert [DOCUMENTS[n] for n in choice["documents"]] == [DOCUMENTS[order[n]] for n in again["documents"]]
    assert [choice["scores"][n] for n in (2, 3, 0, 1)] == again["scores"]
    for answer, numbers in ((one, choice["documents"]), (other, again["documents"])):
        assert [chunk["document"] for chunk in details(answer)["chunks"]] == sorted(numbers)


def test_prompts_without_a_document_to_choose(http):
    for documents in ([], [""]):
        for score in ("likelihood", "relevance"):
            body = {"messages": [USER], "documents": documents, "max_tokens": 1, "focus": {"top_n": 1, "score": score}}
            choice = details(http.post(CHAT, json=body | {"return_chunk_usage": True}))
            assert (choice["focus"]["documents"], choice["focus"]["scores"]) == ([], [None] * len(documents))
            assert len(choice["chunks"]) == len(documents)


WRONG = [0, -1, True, 1.5, "2", [1], {"top_n": 0}, {"top_n": "2"}, {"top_n": True}]
WRONG += [{"top_n": 1, name: value} for name in ("mode", "score") for value in ("best", 5, [], "x" * 9999)]
BAD = [
    *((value, "focus", "invalid_value") for value in WRONG),
    ({}, "focus", "missing_required_parameter"),
    ({"mode": "only"}, "focus", "missing_required_parameter"),
    ({"top_n": 1, "count": 2}, "count", "unsupported_parameter"),
]


@pytest.mark.parametrize(("focus", "param", "code"), BAD, ids=lambda v: ascii(v)[:40])
def test_wrong_values_are_named(post, focus, param, code):
    for path, body in ((COMPLETION, {"chunks": CHUNKS}), (CHAT, {"messages": [USER], "documents": DOCUMENTS})):
        answer = post(path, body | {"focus": focus})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
        assert param in error["message"]
        assert len(error["message"]) < 600


def test_focus_needs_documents(post, writer):
    for path, body in ((COMPLETION, {"prompt": "Where?"}), (COMPLETION, {"prompt": [5, 6]}), (CHAT, {"messages": [USER]})):
        error = post(path, body | {"focus": 1}).json()["error"]
        assert (error["param"], error["code"]) == ("focus", "invalid_value")
        assert post(path, body | {"focus": None}).status_code == 200
    assert len(writer.requests) == 3


def test_null_is_no_focus(post, writer):
    body = {"chunks": CHUNKS, "max_tokens": 1}
    for focus in (None, {"top_n": 1, "mode": None, "score": None}):
        assert ("focus" in details(post(COMPLETION, body | {"focus": focus}))) == (focus is not None)
    assert len(writer.requests) == 1 + 3 + 1  # three different documents


def test_modes_are_those_of_the_package():
    fields = FocusOptions.model_json_schema()["properties"]
    assert {*fields["mode"]["enum"]} == {*MODES}
    assert (fields["mode"]["default"], fields["score"]["default"]) == (Focus(1).mode, Focus(1).score)


# Bounds


def test_log_probabilities_of_documents_read_again_are_bounded(post, llm, writer):
    """The bound holds the longest documents twice, and is checked before any work."""
    template = llm.frontend.parser.documents.size
    sizes = [len(text) + template for text in DOCUMENTS]
    size = len(PREFIX) + len(QUESTION) + sum(sizes)
    asked = {"chunks": CHUNKS, "max_tokens": 0, "prompt_logprobs": 1}
    for focus, expected in (
        (None, size),
        ({"top_n": 2, "mode": "only"}, size),
        (2, size),
        ({"top_n": 2, "mode": "reread"}, size + sum(sorted(sizes)[-2:])),
        ({"top_n": 10**30, "mode": "reread"}, size + sum(sizes)),
    ):
        body = asked if focus is None else asked | {"focus": focus}
        answer = post(COMPLETION, body, max_answer_values=2 * expected - 1)
        assert answer.status_code == 400
        assert f"would hold {2 * expected} numbers" in answer.json()["error"]["message"]
    text = " # # ".join([PREFIX, *DOCUMENTS, QUESTION])
    answer = post(
        COMPLETION,
        {"prompt": text, "max_tokens": 0, "prompt_logprobs": 0, "focus": {"top_n": 1, "mode": "reread"}},
        max_answer_values=len(text),
    )
    assert f"would hold {2 * len(text)} numbers" in answer.json()["error"]["message"]
    assert not writer.requests


@pytest.mark.parametrize("mode", MODES)
def test_tokens_that_fit_behind_short_documents_are_bounded(post, llm, mode):
    """Without `max_tokens`, as many tokens are generated as fit behind the documents that are chosen."""
    documents = ["a " * 200, "b"]
    body = {"messages": [USER], "logprobs": True, "focus": {"top_n": 1, "mode": mode}}
    shown = {"reread": documents, "only": documents[1:]}[mode]
    answers = [post(CHAT, body | {"documents": given}, max_answer_values=1) for given in (documents, shown)]
    most = [int(answer.json()["error"]["message"].split(" numbers")[0].split()[-1]) for answer in answers]
    assert most[0] == most[1] > llm.limits.max_model_len - 60 - (210 if mode == "reread" else 0)


def test_prompts_with_their_documents_twice_must_fit(post, llm, writer):
    """A prompt that fits, and does not with its longest document twice."""
    documents = [[5] * 50, [6] * (llm.limits.max_model_len - 100)]
    body = {"chunks": {"prefix": [4], "documents": documents, "question": [7, 8]}, "max_tokens": 1}
    for focus, status in ((None, 200), (1, 200), ({"top_n": 1, "mode": "reread"}, 400)):
        answer = post(COMPLETION, body | {"focus": focus})
        assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "read" in error["message"]


# Clients that leave while documents are scored


def scoring_only(writer):
    """Return whether every request so far reads the question behind a document."""
    return bool(writer.requests) and all(request.logprobs_from is not None for request in writer.requests)


@pytest.mark.parametrize("stream", [False, True])
def test_a_timeout_ends_the_choice(post, llm, writer, stream):
    writer.delay = 5
    for task in writer.tasks:
        task.cancel()
    body = {"messages": [USER], "documents": DOCUMENTS, "focus": 1, "stream": stream}

    async def ask():
        app = create_app(llm, ServerConfig(request_timeout_s=0.2))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            answer = await client.post(CHAT, json=body)
        for task in writer.tasks:
            task.cancel()
        return answer

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
    assert scoring_only(writer)
    assert sorted(writer.aborted) == sorted(request.request_id for request in writer.requests)
    assert not llm.client._calls


@pytest.mark.parametrize("heartbeats", [None, 0, 2])
def test_a_client_that_leaves_ends_the_choice(llm, writer, heartbeats):
    """Without a stream, before the first heartbeat of a stream, and behind it."""
    writer.delay = 30
    body = {"chunks": CHUNKS, "focus": 1, "stream": heartbeats is not None}
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": COMPLETION,
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "query_string": b"",
    }

    async def leave():
        gone, sent = asyncio.Event(), []
        given = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])

        async def receive():
            if (first := next(given, None)) is not None:
                return first
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message.get("body"))
            if heartbeats and sent.count(b": keep-alive\n\n") == heartbeats:
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
        assert scoring_only(writer)
        assert sorted(writer.aborted) == sorted(request.request_id for request in writer.requests)
        assert not llm.client._calls

    asyncio.run(leave())


@pytest.mark.ci
@pytest.mark.parametrize("score", ["likelihood", "relevance"])
def test_clients_that_leave_the_choice_leak_no_page(http, score):
    for n in range(6):
        documents = [f"Number {k} likes honey and lives in town {n}{score}. " * 6 for k in range(30)]
        body = {"messages": [USER], "documents": documents, "max_tokens": 2, "focus": {"top_n": 2, "score": score}}
        with socket.create_connection((http.base_url.host, http.base_url.port)) as connection:
            text = json.dumps(body).encode()
            lines = f"POST {CHAT} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {len(text)}"
            head = "".join(f"{line}\r\n" for line in (*lines, ""))
            connection.sendall(head.encode() + text)
            wait_until(lambda: not is_idle(http))
            time.sleep(0.02 * n)  # leaves at another place of the choice each time
        wait_until(lambda: is_idle(http))
    assert http.post(CHAT, json=body).status_code == 200


def test_salts_and_keys_separate_the_choice(post, writer):
    """Every request of the choice has the salt and the priority of the answer."""
    body = {"chunks": CHUNKS, "focus": 1, "cache_salt": "mine", "priority": 3}
    assert post(COMPLETION, body, priority_range=5).status_code == 200
    assert len(writer.requests) == 4
    assert len({(request.salt_key, request.priority) for request in writer.requests}) == 1
    assert (writer.requests[0].salt_key is not None, writer.requests[0].priority) == (True, 3)
