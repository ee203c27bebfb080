"""Bodies of `/v1/responses` and `/v1/messages` at the gateway: where they go, their keys, and how their answers end."""

import json

import pytest

from chunkattn.gateway.stream_tail import StreamTail
from chunkattn.schema.piece_keys import Keys, keys_of
from chunkattn.web.errors import ApiError
from chunkattn.web.keys import authorization_of, with_bearer
from tests.gateway.rig import CHAT, Replica, answered_by, events, rig, run, until

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
DOCUMENTS = [f"document {number} " * 50 for number in range(4)]
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where?"}
ASKED = {"documents": DOCUMENTS, "cache_salt": "s"}
BODIES = {
    CHAT: {"messages": [SYSTEM, USER], **ASKED},
    RESPONSES: {"instructions": "Be brief.", "input": "Where?", **ASKED},
    MESSAGES: {"system": "Be brief.", "messages": [USER], "max_tokens": 5, **ASKED},
}
ERROR = ApiError(503, "the replica is gone", code="engine_not_ready")


def named(kind, number=None, **fields):
    """Event of a stream as a server sends it."""
    numbered = {} if number is None else {"sequence_number": number}
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **numbered, **fields})}\n\n".encode()


CUT = {
    RESPONSES: named("response.created", 0) + named("response.output_text.delta", 1, delta="event: x"),
    MESSAGES: named("message_start") + named("content_block_delta", delta={"text": "a"}),
}
WHOLE = {
    RESPONSES: CUT[RESPONSES] + named("response.incomplete", 2, response={"output": "a" * 1000}),
    MESSAGES: CUT[MESSAGES] + named("message_stop"),
}


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_a_body_has_the_keys_of_the_chat_that_it_stands_for(path):
    chat = keys_of(CHAT, BODIES[CHAT])
    assert len(chat.pieces) == 1 + len(DOCUMENTS)
    assert keys_of(path, BODIES[path]) == chat
    assert keys_of(f"/root{path}", BODIES[path]) == chat
    assert keys_of(path, BODIES[path] | {"cache_salt": "t"}) != chat
    assert keys_of(path, {"documents": DOCUMENTS}) == Keys()


def test_requests_of_all_apis_go_to_the_replica_with_their_documents():
    async def case():
        a, b = Replica("a"), Replica("b")
        async with rig(a, b) as made:
            first = answered_by(await made.http.post(CHAT, json=BODIES[CHAT]))
            for _ in range(3):
                for path, body in BODIES.items():
                    assert answered_by(await made.http.post(path, json=body)) == first

    run(case)


def test_anthropic_s_key_is_a_bearer_token():
    async def case():
        a = Replica()
        async with rig(a, server={"api_key": "one"}) as made:

            async def post(path, *headers):
                answer = await made.http.post(path, json=BODIES[path], headers=list(headers))
                return answer.status_code, answer.json()

            assert (await post(MESSAGES, ("x-api-key", "one")))[0] == 200
            assert a.calls[-1].header("authorization") == ["Bearer one"]
            assert a.calls[-1].header("x-api-key") == []
            assert (await post(MESSAGES, ("authorization", "Bearer one"), ("x-api-key", "two")))[0] == 200
            assert (await post(MESSAGES, ("authorization", "Bearer two"), ("x-api-key", "one")))[0] == 401
            assert (await post(MESSAGES, ("x-api-key", "one"), ("x-api-key", "one")))[0] == 400
            assert (await post(RESPONSES, ("x-api-key", "one")))[0] == 401
            status, refusal = await post(MESSAGES, ("x-api-key", "two"))
            assert (status, refusal["type"], refusal["error"]["type"]) == (401, "error", "authentication_error")
            assert len(a.calls) == 2

    run(case)


def test_connections_know_the_holder_of_either_header():
    bearer, own = (b"authorization", b"Bearer one"), (b"x-api-key", b"one")
    for headers in ([bearer], [own], [bearer, (b"x-api-key", b"two")]):
        assert authorization_of(headers) == "Bearer one"
    assert authorization_of([own, own]) == authorization_of([]) == ""
    assert with_bearer([(b"a", b"b"), own]) == [(b"a", b"b"), bearer]


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize("is_whole", [False, True])
def test_a_stream_that_its_replica_leaves_ends_in_the_form_of_its_api(path, is_whole):
    sent = (WHOLE if is_whole else CUT)[path]

    async def case():
        a = Replica()

        async def leave(call):
            await call.start(kind="text/event-stream")
            await call.write(sent)
            await relayed(len(sent))
            call.abort()

        a.answer = leave
        got = bytearray()

        async def relayed(size):
            await until(lambda: len(got) >= size)

        async with rig(a) as made, made.http.stream("POST", path, json=BODIES[path] | {"stream": True}) as answer:
            async for part in answer.aiter_raw():
                got.extend(part)
        added = bytes(got).removeprefix(sent).decode()
        if is_whole:
            assert added == ""
            return
        (error,) = events(added)
        assert added.startswith("event: error\n")
        assert (error["type"], error["error"]["code"]) == ("error", "engine_not_ready")
        assert error.get("sequence_number") == (2 if path == RESPONSES else None)

    run(case)


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_the_end_of_a_stream_is_known_however_it_is_split(path, size):
    for sent, is_whole in ((CUT[path], False), (WHOLE[path], True), (WHOLE[path][:-1], False)):
        tail = StreamTail()
        for start in range(0, len(sent), size):
            tail.add(sent[start : start + size])
        assert tail.is_whole == is_whole
        ending = tail.ending(ERROR, path, "id").decode()
        assert ending.startswith("" if is_whole else "event: error" if sent == CUT[path] else "\n\nevent: error")
        assert bool(ending) != is_whole
        if path == RESPONSES:
            assert tail.next_number == (2 if sent == CUT[path] else 3)


def test_streams_of_chats_end_as_they_did():
    tail = StreamTail()
    tail.add(b'data: {"a": 1}\n\n')
    assert tail.ending(ERROR, CHAT, "id").endswith(b"\n\ndata: [DONE]\n\n")
    tail.add(b"data: [DO")
    tail.add(b"NE]\n\n")
    assert tail.ending(ERROR, CHAT, "id") == b""


TEXTS = [f"document {number} " * 50 for number in range(3)]
BLOCKS = [
    {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": TEXTS[0]},
        "title": "One",
        "context": "Of 2020.",
        "citations": {"enabled": True},
    },
    {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": TEXTS[1]}] * 2}},
    {"type": "document", "source": {"type": "content", "content": TEXTS[2]}},
]
AS_DOCUMENTS = [{"title": "One", "text": f"Of 2020.\n{TEXTS[0]}"}, f"{TEXTS[1]}\n{TEXTS[1]}", TEXTS[2]]


@pytest.mark.parametrize("citations", [None, True, "required", {"instruction": "Cite!"}])
def test_cited_documents_have_the_keys_of_those_of_a_chat(citations):
    cited = {"citations": citations} if citations else {}
    chat = {"messages": [SYSTEM, USER], "cache_salt": "s", "citations": citations or True}
    expected = keys_of(CHAT, chat | {"documents": AS_DOCUMENTS})
    turns = [{"role": "user", "content": [*BLOCKS, {"type": "text", "text": "Where?"}]}]
    asked = {"system": "Be brief.", "messages": turns, "max_tokens": 5, "cache_salt": "s", **cited}
    assert keys_of(MESSAGES, asked) == expected
    assert len(expected.pieces) == 1 + len(AS_DOCUMENTS)
    own = {"documents": AS_DOCUMENTS[:1], "messages": [{"role": "user", "content": [*BLOCKS[1:], *turns[0]["content"][-1:]]}]}
    assert keys_of(MESSAGES, asked | own | {"citations": citations or True}) == expected
    response = {"instructions": "Be brief.", "input": "Where?", "documents": AS_DOCUMENTS, "cache_salt": "s"}
    assert keys_of(RESPONSES, response | {"citations": citations or True}) == expected
    assert keys_of(RESPONSES, response) != expected
    assert keys_of(MESSAGES, asked | {"citations": False}) == keys_of(RESPONSES, response)
