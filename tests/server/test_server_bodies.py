"""Bodies of requests: their encodings, their bounds, and the memory that a client may hold."""

import asyncio
import gzip
import json
import threading
import zlib

import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkattn.fair_shares import FairShares
from chunkattn.server.app import create_app
from chunkattn.web import json_shape
from chunkattn.web.bodies import SMALL_BODY
from chunkattn.web.content_codings import zstd
from chunkattn.web.json_shape import Shape, measure
from chunkattn.web.options import ServerConfig

pytest_plugins = ["tests.told_engine"]

LIMIT = 1 << 18


@pytest.fixture
def client(llm):
    return TestClient(create_app(llm, ServerConfig(max_body_bytes=LIMIT)), base_url="http://localhost")


def post(client, body, coding=None, path="/tokenize"):
    """Send a body as JSON."""
    headers = {"Content-Type": "application/json"} | ({} if coding is None else {"Content-Encoding": coding})
    return client.post(path, content=body, headers=headers)


def raw_deflate(data):
    """Deflate without zlib's header, as some clients send it."""
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


TEXTS = {"small": "Héllo wörld ", "large": "Where does Ana live? " * (3 * SMALL_BODY // 21)}
CHARSETS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be")
CODINGS = {None: bytes, "identity": bytes, "gzip": gzip.compress, "x-gzip": gzip.compress, "deflate": zlib.compress}
CODINGS |= {"zstd": zstd.compress, "gzip, zstd": lambda data: zstd.compress(gzip.compress(data))}
CODINGS |= {"Deflate": raw_deflate, "gzip, deflate": lambda data: zlib.compress(gzip.compress(data))}


@pytest.mark.parametrize("size", TEXTS)
def test_every_charset_and_coding_is_read_alike(client, demo, size):
    body = {"prompt": TEXTS[size][:20_000], "user": TEXTS[size][: SMALL_BODY // 2 if size == "large" else 5]}
    expected = demo.tokenizer(body["prompt"]).input_ids
    plain = json.dumps(body, ensure_ascii=False)
    for charset in CHARSETS:
        answer = post(client, plain.encode(charset))
        assert answer.status_code == 200, (charset, answer.text)
        assert answer.json()["tokens"] == expected
    for coding, encode in CODINGS.items():
        answer = post(client, encode(plain.encode()), coding)
        assert answer.status_code == 200, (coding, answer.text)
        assert answer.json()["tokens"] == expected


def wide_frame():
    """A frame whose decoder has to hold a window of 128 MiB."""
    packer = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})
    return packer.compress(b'{"prompt": "a"}') + packer.flush()  # of unknown length, so the window stays


BROKEN = {
    "unknown coding": (b"{}", "br", 415, "unsupported_encoding"),
    "not gzip": (b'{"prompt": "a"}', "gzip", 400, "invalid_encoding"),
    "cut": (gzip.compress(b'{"prompt": "a"}')[:-9], "gzip", 400, "invalid_encoding"),
    "more after the end": (gzip.compress(b"{}") + b"x", "gzip", 400, "invalid_encoding"),
    "not zstd": (b'{"prompt": "a"}', "zstd", 400, "invalid_encoding"),
    "zstd, cut": (zstd.compress(b'{"prompt": "a"}')[:-3], "zstd", 400, "invalid_encoding"),
    "more after a frame": (zstd.compress(b"{}") + b"x", "zstd", 400, "invalid_encoding"),
    "gzip called zstd": (gzip.compress(b'{"prompt": "a"}'), "zstd", 400, "invalid_encoding"),
    "zstd called gzip": (zstd.compress(b'{"prompt": "a"}'), "gzip", 400, "invalid_encoding"),
    "a wide window": (wide_frame(), "zstd", 400, "invalid_encoding"),
    "many codings": (b"{}", "gzip, gzip, gzip", 415, "unsupported_encoding"),
    "a bomb": (gzip.compress(b" " * (64 * LIMIT)), "gzip", 413, "request_too_large"),
    "a zstd bomb": (zstd.compress(b" " * (64 * LIMIT)), "zstd", 413, "request_too_large"),
    "two zstd bombs": (zstd.compress(zstd.compress(b" " * (1 << 26))), "zstd, zstd", 413, "request_too_large"),
    "two bombs": (gzip.compress(gzip.compress(b" " * (64 * LIMIT))), "gzip, gzip", 413, "request_too_large"),
    "not UTF-16": ('{"a"}'.encode("utf-16") + b"x", None, 400, "invalid_json"),
    "not UTF-8": (b'{"prompt": "\xff"}', None, 400, "invalid_json"),
    "not UTF-8, large": (b'{"prompt": "\xff' + b"a" * SMALL_BODY + b'"}', None, 400, "invalid_json"),
    "not JSON": (b'{"prompt": ', None, 400, "invalid_json"),
    "not JSON, large": (b'{"prompt": "' + b"a" * SMALL_BODY, None, 400, "invalid_json"),
    "deep": (b'{"chat_template_kwargs": {"a": ' + b"[" * 70 + b"]" * 70 + b"}}", None, 400, "body_too_complex"),
    "deep and cut": (b"[" * 20_000, None, 400, "body_too_complex"),
    "many objects": (json.dumps({"prompt": [{}] * 50_000}).encode(), None, 400, "body_too_complex"),
    "many values": (b'{"prompt": [' + b"1," * 110_000 + b"1]}", None, 400, "body_too_complex"),
    "many texts": (b'{"prompt": [' + b'"",' * 80_000 + b'""]}', None, 400, "body_too_complex"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_bodies_are_refused(client, name, monkeypatch):
    body, coding, status, code = BROKEN[name]
    if name == "many texts":
        monkeypatch.setattr("chunkattn.web.bodies._STRINGS_PER_ITEM", 1)
    if name == "many values":
        monkeypatch.setattr("chunkattn.web.bodies._MAX_VALUES", 100_000)
    answer = post(client, body, coding)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text


def test_large_bodies_are_validated_as_small_ones(client):
    """The same fault is told in the same words, whether it is found on the event loop or in a thread."""
    nan, surrogate = float("nan"), "\ud800"
    faults = ({"prompt": 1}, {"nonsense": 1, "prompt": "a"}, {"prompt": "a", "messages": []}, {}, [1])
    for fault in (*faults, {"prompt": surrogate}, {"prompt": "a", "nonsense": nan}, {"prompt": nan}):
        small = post(client, json.dumps(fault))
        padded = json.dumps(fault)[:-1] + " " * SMALL_BODY + json.dumps(fault)[-1]
        large = post(client, padded)
        assert small.status_code == large.status_code == 400
        assert small.json() == large.json()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('a\\",[]{}é', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a\\"', max_size=3), inner, max_size=3),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(VALUES, st.sampled_from([1, 2, 3, 5, 64]))
def test_the_shape_of_json_counts_its_values(value, piece):
    """In whatever pieces the text is measured."""

    def counted(value, depth=0):
        if isinstance(value, str):
            return Shape(0, 1, 0, depth)
        if not isinstance(value, (list, dict)):
            return Shape(0, 0, 0, depth)
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        parts = [counted(one, depth + 1) for one in inner]
        deepest = max([depth + 1, *(part.depth for part in parts)])
        commas = max(len(value) - 1, 0) + sum(part.values for part in parts)
        return Shape(1 + sum(p.containers for p in parts), sum(p.strings for p in parts), commas, deepest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_shape, "_PIECE", piece)
        assert measure(json.dumps(value).encode()) == counted(value)


def test_a_client_waits_for_room_and_others_do_not():
    """In the order of arrival; a body beyond the share passes alone; a client that leaves takes nothing."""

    async def main():
        shares, admitted = FairShares(10), []

        async def take(name, owner, size):
            await shares.take(owner, size)
            admitted.append(name)

        async def settle():
            for _ in range(5):
                await asyncio.sleep(0)

        await take("first", "a", 6)
        tasks = [asyncio.create_task(take(*one)) for one in (("big", "a", 30), ("small", "a", 1), ("other", "b", 10))]
        await settle()
        assert admitted == ["first", "other"]
        shares.give("a", 6)
        await settle()
        assert admitted == ["first", "other", "big"]
        shares.give("a", 30)
        await settle()
        assert admitted == ["first", "other", "big", "small"]
        gone = asyncio.create_task(take("gone", "a", 20))
        last = asyncio.create_task(take("last", "a", 9))
        await settle()
        gone.cancel()
        await settle()
        assert admitted[-1] == "last"
        shares.give("a", 1)
        shares.give("a", 9)
        late = asyncio.create_task(take("late", "b", 1))
        await settle()
        shares.give("b", 10)
        late.cancel()  # its turn has come, and it has not run yet
        await asyncio.gather(*tasks, last, gone, late, return_exceptions=True)
        assert not shares.held
        assert not shares._waiting

    asyncio.run(main())


def test_a_turn_that_comes_as_its_client_leaves_is_not_lost():
    """The timeout of one waiting request and the end of another fall into one pass of the event loop."""

    async def main():
        shares = FairShares(5)
        await shares.take("a", 5)
        waiting = asyncio.create_task(shares.take("a", 5))
        await asyncio.sleep(0)
        waiting.cancel()
        shares.give("a", 5)
        await asyncio.gather(waiting, return_exceptions=True)
        assert not shares.held
        assert not shares._waiting

    asyncio.run(main())


def test_few_requests_of_a_client_wait():
    async def main():
        shares = FairShares(5, most_waiting=2)
        await shares.take("a", 5)
        waiting = [asyncio.create_task(shares.take("a", 5)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await shares.take("a", 1)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.parametrize("coding", [None, "gzip"])
def test_an_inflated_or_chunked_body_takes_its_share_before_it_is_made(llm, coding):
    """A body of unknown size takes the room of the longest, and what it does not need goes back."""
    app = create_app(llm, ServerConfig(max_body_bytes=LIMIT, max_body_bytes_per_client=LIMIT, request_timeout_s=0.2))
    client, held = TestClient(app, base_url="http://localhost"), app.state.server.shares.bodies.held
    body = json.dumps({"prompt": "a", "user": "x" * (SMALL_BODY + 1)}).encode()
    body = iter([body]) if coding is None else gzip.compress(body)
    held["testclient"] = 1
    answer = post(client, body, coding)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "body_share_exceeded")
    held.clear()


def test_large_bodies_of_one_client_wait_for_each_other(llm):
    """A request that holds its body keeps the next large one out until its time is over; a small one passes."""
    app = create_app(llm, ServerConfig(max_body_bytes_per_client=1, request_timeout_s=0.2))
    client = TestClient(app, base_url="http://localhost")
    held = app.state.server.shares.bodies.held
    held["testclient"] = 1
    body = json.dumps({"prompt": "a" + " " * SMALL_BODY})
    answer = post(client, body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "body_share_exceeded")
    assert post(client, json.dumps({"prompt": "a"})).status_code == 200
    held.clear()
    assert post(client, body).status_code == 200
    assert not held


def test_a_slow_body_has_its_time_anew_once_it_has_room(llm):
    """The wait for room does not count; a sender that stalls or leaves is told so."""
    body = json.dumps({"prompt": "a" + " " * SMALL_BODY}).encode()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/tokenize", "query_string": b"", "client": ("a", 1), "headers": headers}
    config = ServerConfig(max_body_bytes=LIMIT, max_body_bytes_per_client=LIMIT, request_timeout_s=0.4)

    async def answered(pieces, held=0):
        app, sent, left = create_app(llm, config), [], list(pieces)
        shares = app.state.server.shares.bodies
        shares.held["a"] = held
        if held:
            asyncio.get_running_loop().call_later(0.3, shares.give, "a", held)

        async def receive():
            if not left:
                await asyncio.sleep(60)
            after, piece = left.pop(0)
            await asyncio.sleep(after)
            if piece is None:
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": piece, "more_body": piece != body[-9:]}

        async def send(message):
            sent.append(message)

        await app(dict(scope), receive, send)
        assert not shares.held
        return sent[0]["status"]

    async def main():
        begins, ends = (0.0, body[:-9]), (0.2, body[-9:])
        cases = answered([begins, ends]), answered([begins, ends], held=1), answered([begins]), answered([begins, (0.0, None)])
        assert await asyncio.gather(*cases) == [200, 200, 408, 499]

    asyncio.run(main())


def test_a_body_of_a_client_that_left_is_not_decoded(llm):
    """The request ends while other work keeps the decoder busy."""
    body = json.dumps({"prompt": "a" + " " * SMALL_BODY}).encode()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/tokenize", "query_string": b"", "client": ("a", 1), "headers": headers}

    async def main():
        app, free = create_app(llm), threading.Event()
        bodies = app.state.server.bodies
        busy = asyncio.create_task(bodies.decoder.run(free.wait))
        messages = iter([{"type": "http.request", "body": body}])

        async def receive():
            await asyncio.sleep(0)
            return next(messages, {"type": "http.disconnect"})

        async def send(message):
            assert message.get("status", 499) == 499

        await asyncio.wait_for(app(scope, receive, send), 20)
        assert not busy.done()
        free.set()
        await busy
        assert not app.state.server.shares.bodies.held

    asyncio.run(main())
