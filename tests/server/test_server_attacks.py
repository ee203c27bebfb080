"""Attacks of clients on a server, and their cost to the others."""

import asyncio
import gc
import json
import socket
import threading
import time
import tracemalloc
from contextlib import contextmanager, suppress
from functools import partial

import msgspec
import pytest
import uvicorn
import uvloop
from fastapi.testclient import TestClient

from chunkattn.calls.precompute import PrecomputeJob
from chunkattn.documents.records import Scope
from chunkattn.server import contents
from chunkattn.server.app import create_app
from chunkattn.server.json_answer import json_answer
from chunkattn.server.state import ServerState
from chunkattn.web.connection_limits import ConnectionLimits
from chunkattn.web.http import BoundedHttp
from chunkattn.web.keys import Caller
from chunkattn.web.options import ServerConfig
from tests.documents.rig import add, registry_of
from tests.patience import PATIENCE_S
from tests.server_helpers import wait_until

pytest_plugins = ["tests.told_engine"]


def test_a_late_forget_spares_a_document_added_again(llm, monkeypatch):
    """The forgetting is held where its request has been decided on and not yet sent."""
    entered, go, slow = threading.Event(), threading.Event(), False
    precompute = contents.PrecomputeJob

    def held(*args, **options):
        if slow and not entered.is_set():
            entered.set()
            assert go.wait(60)
        return precompute(*args, **options)

    monkeypatch.setattr(contents, "PrecomputeJob", held)

    async def main():
        nonlocal slow
        documents = registry_of(llm)
        await add(documents)
        slow = True
        deleting = asyncio.create_task(documents.delete(Scope(), "a"))
        await asyncio.to_thread(entered.wait, 60)
        slow = False
        again = await add(documents)
        go.set()
        await deleting
        assert documents.get(Scope(), "a") is again
        told = llm.client._worker.told
        assert told[-1] == "compute", told
        await documents.delete(Scope(), "a")
        assert told[-1] == "forget"

    asyncio.run(main())


def test_a_caller_that_leaves_before_its_report_pins_nothing(llm, monkeypatch):
    entered, go, result = threading.Event(), threading.Event(), PrecomputeJob.result

    def held(self):
        entered.set()
        assert go.wait(60)
        return result(self)

    async def main():
        filling = asyncio.create_task(llm.precompute("Read.", ["A text."], pin=True))
        monkeypatch.setattr(PrecomputeJob, "_check_room", lambda self, names: None)
        monkeypatch.setattr(PrecomputeJob, "result", held)
        await asyncio.to_thread(entered.wait, 60)
        filling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await filling
        go.set()
        assert llm.client._worker.told == ["compute", "unpin"]

    asyncio.run(main())


BAD_BODIES = [
    ("/v1/completions", b'{"prompt": "%s", "tools": 1}'),
    ("/v1/completions", b'{"prompt": "%s"'),
    ("/v1/completions", b'{"prompt": "%s", "temperature": "hot"}'),
    ("/v1/completions", b'{"prompt": "%s", "prompt_logprobs": 1, "stream": true}'),
    ("/v1/completions", b'{"prompt": ["%s", 1]}'),
    ("/v1/completions", b'{"prompt": "%s", "model": "other"}'),
    ("/v1/score", b'{"text_1": "%s"}'),
    ("/v1/completions", b'{"prompt": "\xff%s"}'),
    ("/v1/cache/documents", b'{"documents": ["%s", ""], "prefix": 1}'),
    ("/v1/completions", b'{"prompt": "%s%s%s"}'),
]


@pytest.mark.parametrize(("path", "body"), BAD_BODIES, ids=lambda v: ascii(v)[:50])
def test_a_refused_body_is_freed_at_once(llm, path, body):
    """Not by the garbage collector, before which others like it pile up."""
    size = 1 << 20
    app = create_app(llm, ServerConfig(max_body_bytes=2 * size))
    content = body.replace(b"%s", b"x" * size)

    async def ask():
        async def receive():
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message):
            statuses.append(message.get("status"))

        statuses = []
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"", "scheme": "http"}
        await app(scope, receive, send)
        assert 400 <= statuses[0] < 500

    async def main():
        await ask()
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(4):
                await ask()
            await asyncio.sleep(0.05)  # a thread may still be on its way out of the call that reported the error
            assert tracemalloc.get_traced_memory()[0] - before < size
        finally:
            tracemalloc.stop()
            gc.enable()

    asyncio.run(main())


# Connections


@contextmanager
def serving(app, **options):
    """An app behind the server's protocol, on uvloop as the server itself. Yields the address."""
    config = ServerConfig(**options)
    limits = ConnectionLimits(config, config.max_connections)
    http = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", http=partial(BoundedHttp, limits=limits))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(http)

        async def main():
            watching = asyncio.create_task(limits.watch(server.server_state.connections))
            await server.serve([listening])
            watching.cancel()

        thread = threading.Thread(target=uvloop.run, args=(main(),))
        thread.start()
        wait_until(lambda: server.started)
        try:
            yield listening.getsockname()
        finally:
            server.should_exit = server.force_exit = True
            thread.join(PATIENCE_S)


def answering(seen, size=2, seconds=0.0):
    """An app that reads the request, takes its time, and answers; notes a client that leaves meanwhile."""

    async def app(scope, receive, send):
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.disconnect":
            return
        if seconds:
            leaving = asyncio.ensure_future(receive())
            await asyncio.wait({leaving}, timeout=seconds)
            seen.append("left" if leaving.done() else "waited")
            leaving.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
        for sent in range(0, size, 1 << 20):
            await send({"type": "http.response.body", "body": b"x" * min(1 << 20, size - sent), "more_body": True})
        await send({"type": "http.response.body"})
        seen.append("sent")

    return app


def read_all(connection):
    found = b""
    with suppress(ConnectionError):
        while more := connection.recv(1 << 16):
            found += more
    return found


GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"\r\n", POST, POST + b"x" * 9], ids=ascii)
def test_slow_senders_are_cut_off(sent):
    with (
        serving(answering([]), header_timeout_s=0.5, body_timeout_s=0.5) as address,
        socket.create_connection(address, timeout=PATIENCE_S) as connection,
    ):
        connection.sendall(sent)
        answer = read_all(connection)
        assert b"HTTP/1.1 408" in answer
        assert b"_timeout_s 0.5" in answer


def test_a_body_is_read_to_its_end_after_an_early_answer():
    """The application answers without reading, after more of the body has come than is kept ahead of it."""

    async def app(scope, receive, send):
        if scope["type"] == "http":
            await asyncio.sleep(0.3 if scope["method"] == "POST" else 0)
            await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})

    size = 16 << 20
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % size
    with serving(app) as address, socket.create_connection(address, timeout=30) as connection:
        connection.sendall(head + b"x" * size + GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert read_all(connection).count(b"HTTP/1.1 413") == 2


def test_an_empty_line_keeps_no_connection():
    with (
        serving(answering([]), header_timeout_s=0.5) as address,
        socket.create_connection(address, timeout=PATIENCE_S) as connection,
    ):
        connection.sendall(GET)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        connection.sendall(b"\r\n")
        assert b"HTTP/1.1 408" in read_all(connection)


def test_a_client_that_stops_reading_is_cut_off():
    seen = []
    with (
        serving(answering(seen, 64 << 20), write_timeout_s=0.5) as address,
        socket.create_connection(address, timeout=PATIENCE_S) as connection,
    ):
        connection.sendall(GET)
        time.sleep(2)
        assert len(read_all(connection)) < 64 << 20


def test_connections_are_limited(caplog):
    with serving(answering([]), max_connections=2) as address:
        kept = [socket.create_connection(address, timeout=PATIENCE_S) for _ in range(2)]
        for connection in kept:
            connection.sendall(GET)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        for _ in range(3):
            with socket.create_connection(address, timeout=PATIENCE_S) as over:
                assert read_all(over).startswith(b"HTTP/1.1 503")
        for connection in kept:
            connection.close()
        wait_until(lambda: b"200" in asked(address))
    assert sum("max_connections 2" in record.getMessage() for record in caplog.records) == 1


def asked(address):
    with socket.create_connection(address, timeout=PATIENCE_S) as connection:
        connection.sendall(GET)
        return connection.recv(1 << 16)


@pytest.mark.parametrize("leaves", [False, True], ids=["half closed", "gone"])
def test_who_sends_no_more_gets_the_answer(leaves):
    """And who has left takes the work along: both begin with the same packet."""
    seen = []
    with serving(answering(seen, seconds=20.0 if leaves else 1.0)) as address:
        connection = socket.create_connection(address, timeout=PATIENCE_S)
        connection.sendall(GET)
        time.sleep(0.2)
        if leaves:
            connection.close()
            wait_until(lambda: seen, 15)
            assert seen[0] == "left"
        else:
            connection.shutdown(socket.SHUT_WR)
            answer = read_all(connection)
            assert b"HTTP/1.1 200" in answer
            assert answer.endswith(b"xx")


# Large answers


def test_a_large_answer_is_written_in_pieces(llm, monkeypatch):
    """Each piece is short, for the encoder holds Python's lock; and what is written is the same."""
    longest, encode = 0, msgspec.json.encode

    def noted(value):
        nonlocal longest
        if isinstance(value, list):
            longest = max(longest, len(value) * len(value[0]))
        return encode(value)

    monkeypatch.setattr(msgspec.json, "encode", noted)
    body = {"id": "x", "scores": [[i / 7, i / 3] for i in range(40_000)], "usage": {"a": 1}}
    sent = []

    async def main():
        async def send(message):
            sent.append(message)

        state = ServerState(llm, ServerConfig())
        caller = Caller(None, state.shares, owner="a")
        await (await json_answer(state, caller, lambda: body, 80_000))({"type": "http"}, None, send)
        assert state.shares.bodies.held["a"] > 0
        caller.leave()
        assert not state.shares.bodies.held

    asyncio.run(main())
    written = b"".join(message.get("body", b"") for message in sent)
    assert json.loads(written) == body
    assert dict(sent[0]["headers"])[b"content-length"] == str(len(written)).encode()
    assert len(sent) > 4
    assert 0 < longest <= 20_000


def test_an_answer_that_would_be_too_large_is_refused(llm):
    client = TestClient(create_app(llm, ServerConfig(max_answer_values=100)), base_url="http://localhost")
    for body in (
        {"query": "x", "items": ["y"] * 26, "label_token_ids": [1, 2, 3, 4]},
        {"query": ["x", "z"], "items": ["y"] * 13, "label_token_ids": [1, 2, 3, 4]},
        {"query": ["x", "z"], "items": [["y"] * 13] * 2, "label_token_ids": [1, 2, 3, 4]},
        {"query": "x", "items": ["y"] * 13, "label_token_ids": [1, 2, 3, 4], "return_logprobs": True},
        {"query": "x", "items": ["y"] * 2, "label_token_ids": [[1], [1] * 103]},
        {"query": ["x", "z"], "items": ["y"] * 2, "label_token_ids": [[1], [1] * 51]},
        {"query": ["x", "z"], "items": [["y"], ["y"]], "label_token_ids": [[[1] * 102], [[1, 2]]]},
        {"query": ["x", "z"], "items": [[], ["y"]], "labels": [[], [["no"] * 52]], "return_logprobs": True},
    ):
        answer = client.post("/v1/score", json=body)
        assert answer.status_code == 400
        assert "104 numbers, max_answer_values is 100" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a"] * 2, "n": 2, "max_tokens": 9, "logprobs": 2, "stream": True}),
        ("/v1/completions", {"prompt": "a", "n": 2, "max_tokens": 17, "logprobs": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "max_tokens": 101}),
    ],
)
def test_logprobs_of_an_answer_are_bounded(llm, path, body):
    client = TestClient(create_app(llm, ServerConfig(max_answer_values=100)), base_url="http://localhost")
    answer = client.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "logprobs"
    assert "max_answer_values is 100" in answer.json()["error"]["message"]
