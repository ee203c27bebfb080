"""Framing of HTTP/1.1: each request gets exactly one answer, and no byte of a body is ever a request.

Two applications are asked: the server without an engine, and the gateway in front of a scripted replica.
"""

import asyncio
import hashlib
import json
import random
import socket
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import ClassVar

import pytest

from chunkattn.async_llm import AsyncLLM
from chunkattn.server.app import create_app
from chunkattn.web.options import ServerConfig
from tests.gateway.rig import Replica, rig, run
from tests.http_rig import listening, read_answer

COMPLETE = "/v1/completions"
H2C = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
WEBSOCKET = "Connection: Upgrade\r\nUpgrade: websocket\r\n"
OFFERS = {
    "none": "",
    "h2c": H2C,
    "h2c close": H2C.replace("Upgrade, ", "close, Upgrade, "),
    "tls": "Upgrade: TLS/1.0\r\nConnection: upgrade\r\n",
    "several": "upgrade: foo/2, h2c,bar\r\nCONNECTION: keep-alive, UPGRADE\r\n",
    "two headers": "Upgrade: h2c\r\nUpgrade: IRC/6.9\r\nConnection: keep-alive\r\nConnection: upgrade\r\n",
    "not of this hop": "Upgrade: websocket\r\n",
    "empty": "Upgrade:\r\nConnection: upgrade\r\n",
    "websocket": WEBSOCKET,
    "whole websocket": WEBSOCKET + "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n",
    "websocket among others": "Upgrade: h2c, WebSocket/13\r\nConnection: keep-alive,Upgrade\r\n",
    "settings alone": "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n",
}
STOLEN = b"GET /stolen HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: stolen\r\n\r\n"
HOST = "Host: localhost\r\n"
JSON = "Content-Type: application/json\r\n"
CHUNKED = "Transfer-Encoding: chunked\r\n"
FAULTS = {
    "no HTTP": (b"nonsense\r\n\r\n", 400),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "HTTP/2.0": (f"GET /livez HTTP/2.0\r\n{HOST}\r\n".encode(), 505),
    "HTTP/0.9": (b"GET /livez\r\n\r\n", 505),
    "HTTP/1.2": (f"GET /livez HTTP/1.2\r\n{HOST}\r\n".encode(), 400),
    "CONNECT": (f"CONNECT localhost:80 HTTP/1.1\r\n{HOST}\r\n".encode(), 501),
    "no target": (f"GET livez HTTP/1.1\r\n{HOST}\r\n".encode(), 400),
    "two framings": (f"POST {COMPLETE} HTTP/1.1\r\n{HOST}Content-Length: 3\r\n{CHUNKED}\r\n".encode(), 400),
    "two framings, turned": (f"POST {COMPLETE} HTTP/1.1\r\n{HOST}{CHUNKED}Content-Length: 3\r\n\r\n".encode(), 400),
    "two framings of an upgrade": (f"POST / HTTP/1.1\r\n{HOST}{H2C}Content-Length: 3\r\n{CHUNKED}\r\n".encode(), 400),
    "two lengths": (f"POST / HTTP/1.1\r\n{HOST}Content-Length: 3\r\nContent-Length: 4\r\n\r\n".encode(), 400),
    "list of lengths": (f"POST / HTTP/1.1\r\n{HOST}Content-Length: 3, 3\r\n\r\n".encode(), 400),
    "signed length": (f"POST / HTTP/1.1\r\n{HOST}Content-Length: +3\r\n\r\n".encode(), 400),
    "hexadecimal length": (f"POST / HTTP/1.1\r\n{HOST}Content-Length: 0x3\r\n\r\n".encode(), 400),
    "huge length": (f"POST / HTTP/1.1\r\n{HOST}Content-Length: {'9' * 30}\r\n\r\n".encode(), 400),
    "identity": (f"POST / HTTP/1.1\r\n{HOST}Transfer-Encoding: identity\r\n\r\n".encode(), 400),
    "chunked twice": (f"POST / HTTP/1.1\r\n{HOST}{CHUNKED}{CHUNKED}\r\n".encode(), 400),
    "chunked not last": (f"POST / HTTP/1.1\r\n{HOST}Transfer-Encoding: chunked, gzip\r\n\r\n".encode(), 400),
    "another coding": (f"POST / HTTP/1.1\r\n{HOST}Transfer-Encoding: gzip, chunked\r\n\r\n".encode(), 501),
    "another coding of an upgrade": (f"POST / HTTP/1.1\r\n{HOST}{H2C}Transfer-Encoding: gzip, chunked\r\n\r\n".encode(), 501),
    "chunked HTTP/1.0": (f"POST / HTTP/1.0\r\n{HOST}{CHUNKED}\r\n0\r\n\r\n".encode(), 400),
    "space before colon": (f"POST / HTTP/1.1\r\n{HOST}Content-Length : 3\r\n\r\n".encode(), 400),
    "folded header": (f"POST / HTTP/1.1\r\n{HOST}X: a\r\n Content-Length: 3\r\n\r\n".encode(), 400),
    "bare LF": (b"GET /livez HTTP/1.1\nHost: localhost\n\n", 400),
    "bare LF in headers": (b"GET /livez HTTP/1.1\r\nHost: localhost\nX: y\r\n\r\n", 400),
    "bare CR": (b"GET /livez HTTP/1.1\r\nHost: localhost\rX: y\r\n\r\n", 400),
    "NUL": (b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: \x00\r\n\r\n", 400),
    "bad chunk": (f"POST {COMPLETE} HTTP/1.1\r\n{HOST}{CHUNKED}\r\n0x3\r\nabc\r\n".encode(), 400),
    "bad end of chunk": (f"POST {COMPLETE} HTTP/1.1\r\n{HOST}{CHUNKED}\r\n3\r\nabcd\r\n".encode(), 400),
    "bad chunk of an upgrade": (f"POST {COMPLETE} HTTP/1.1\r\n{HOST}{H2C}{CHUNKED}\r\n3\r\nabcd\r\n".encode(), 400),
}
"""Bytes that are no request, and the status of the one answer after which the connection closes."""


@dataclass(frozen=True)
class Message:
    """One request, and the answer that it must get.

    Attributes:
        method: its method.
        head, body: its bytes.
        name: its X-Request-Id, which the answer repeats; None for bytes that are no request.
        status: status of the answer.
        told: text that the body of the answer holds.
        is_last: whether the connection ends after it.
    """

    method: str
    head: bytes
    body: bytes
    name: str | None
    status: int
    told: str = ""
    is_last: bool = False


def framed(body, chunks):
    """Return the header of a body and its bytes; `chunks` are sizes, or None for a Content-Length."""
    if chunks is None:
        return f"Content-Length: {len(body)}\r\n", body
    found, left = b"", body
    for size in [*chunks, len(body)]:
        piece, left = left[:size], left[size:]
        found += b"%x;x=y\r\n%s\r\n" % (len(piece), piece) if piece else b""
    return CHUNKED, found + b"0\r\nX-Request-Id: stolen\r\nAuthorization: Bearer stolen\r\n\r\n"


def post(asked, name, text=STOLEN, *, offer="none", chunks=None, path=COMPLETE, extra=""):
    """Return a POST whose body the application reads and tells, or does not read."""
    body = json.dumps({"model": f"m-{name}", "prompt": text.decode()}).encode() if path == COMPLETE else text
    header, content = framed(body, chunks)
    head = f"POST {path} HTTP/1.1\r\n{HOST}{JSON}{extra}{OFFERS[offer]}{header}X-Request-Id: {name}\r\n\r\n".encode()
    told = asked.told(name, body) if path == COMPLETE else ""
    is_last = "close" in offer or "close" in extra
    return Message("POST", head, content, name, asked.statuses[path], told, is_last)


def get(asked, name, *, offer="none", method="GET", path="/livez", body=b"", extra=""):
    """Return a request whose body, if it has one, has no meaning."""
    header = f"Content-Length: {len(body)}\r\n" if body else ""
    head = f"{method} {path} HTTP/1.1\r\n{OFFERS[offer]}{HOST}{extra}{header}X-Request-Id: {name}\r\n\r\n".encode()
    status = 400 if method == "GET" and offer.endswith(("websocket", "others")) else 200
    told = "websocket_not_supported" if status == 400 else ""
    return Message(method, head, body, name, status, told, "close" in offer or "close" in extra)


class Server:
    """The server without an engine. It reads a body to the name of its model, which it does not know."""

    statuses: ClassVar = {COMPLETE: 404, "/nothing": 404, "/livez": 405}

    def __init__(self, port, stolen):
        self.port, self.stolen = port, stolen

    @staticmethod
    def told(name, body):
        return f"m-{name}"


class Gateway(Server):
    """The gateway. Its replica tells the digest of the body."""

    statuses: ClassVar = {COMPLETE: 200, "/nothing": 200, "/livez": 405}

    @staticmethod
    def told(name, body):
        return hashlib.sha256(body).hexdigest()


@asynccontextmanager
async def served(kind, **options):
    """Serve one of the two applications."""
    stolen = []

    def note(path, headers):
        stolen.extend(value for name, value in headers if b"stolen" in value)
        stolen.extend([path] if "stolen" in path else [])

    if kind is Gateway:
        replica = Replica()

        async def answer(call):
            note(call.path, call.scope["headers"])
            await call.reply(digest=hashlib.sha256(call.body).hexdigest())

        replica.answer = answer
        async with rig(replica, server=options, report_period_s=1.0) as made:
            yield Gateway(made.port, stolen)
        return
    config = ServerConfig(**options)
    app = create_app(AsyncLLM(), config)

    async def noted(scope, receive, send):
        await app(scope, receive, send)
        note(scope["path"], scope["headers"])

    async with listening(noted, config) as (port, _):
        yield Server(port, stolen)


BOTH = pytest.mark.parametrize("kind", [Server, Gateway], ids=["server", "gateway"])


async def exchange(asked, messages, rng, *, in_turn=False, half_close=False, behind=b""):
    """Send requests on one connection and check that each one has its answer, and that nothing else comes.

    Args:
        asked: server or gateway.
        messages: requests of the connection.
        rng: decides how the bytes are cut.
        in_turn: whether a request waits for the answer before it, with its body after its head.
        half_close: whether the client ends its sending behind the last request.
        behind: bytes behind the last request, which get no answer.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", asked.port)
    writer.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    is_last = any(message.is_last for message in messages)

    async def send(content):
        with suppress(ConnectionError):
            while content:
                size = rng.choice((1, 7, 40, 200, 1000, len(content)))
                writer.write(content[:size])
                content = content[size:]
                await asyncio.sleep(rng.choice((0, 0, 0, 0.001)))

    async def send_all():
        await send(b"".join(message.head + message.body for message in messages) + behind)
        if half_close:
            with suppress(OSError):
                writer.write_eof()

    async def check(message):
        answer = await read_answer(reader, message.method)
        assert answer is not None, message
        assert (answer.status, answer.headers.get("x-request-id")) == (message.status, message.name), (message, answer)
        assert message.told in answer.body.decode(), (message, answer)
        if message.name is None or message.status >= 400:
            assert message.method == "HEAD" or set(json.loads(answer.body)) == {"error"}
        if not half_close:
            ends = "close" in answer.headers.get("connection", "")
            assert ends == message.is_last
            assert ends or answer.headers["keep-alive"].startswith("timeout=")

    try:
        if in_turn:
            for message in messages:
                await send(message.head)
                await asyncio.sleep(rng.choice((0, 0.002)))
                await asyncio.gather(send(message.body), check(message))
            await send(behind)
            if half_close:
                writer.write_eof()
        else:
            sending = asyncio.create_task(send_all())
            for message in messages:
                await check(message)
            await sending
        if is_last or half_close:
            assert await reader.read() == b""
    finally:
        writer.close()
    assert not asked.stolen


@BOTH
def test_offers_to_upgrade_are_ignored_with_their_bodies(kind):
    """Each offer on each kind of request, the body in the segment of the head and behind it, and another request after it."""
    bodies = {"empty": b"", "small": STOLEN, "large": STOLEN * 2000}

    async def case():
        async with served(kind) as asked:
            rng, number = random.Random(5), 0
            for offer in OFFERS:
                for size, text in bodies.items():
                    for chunks in (None, [], [1, 30]):
                        for path in asked.statuses:
                            names = [f"n-{(number := number + 1)}", f"n-{number}-next"]
                            message = post(asked, names[0], text, offer=offer, chunks=chunks, path=path)
                            after = [] if message.is_last else [get(asked, names[1])]
                            await exchange(
                                asked,
                                [message, *after],
                                rng if size != "large" else Whole(),
                                in_turn=number % 2 == 0,
                                behind=STOLEN if message.is_last else b"",
                            )
                for message in (get(asked, "get", offer=offer), get(asked, "body", offer=offer, body=STOLEN)):
                    await exchange(asked, [message], rng, behind=b"" if not message.is_last else STOLEN)

    run(case, 120)


class Whole:
    """Sends all bytes at once."""

    def choice(self, options):
        """Return the last size or no pause."""
        return options[-1] if options[-1] >= 1 else 0


@BOTH
@pytest.mark.parametrize("name", FAULTS)
def test_bytes_that_are_no_request_get_one_answer_behind_the_others(kind, name):
    """Nothing behind them is a request: one who reads the framing differently in front would let a client hide one there."""
    head, status = FAULTS[name]

    async def case():
        async with served(kind) as asked:
            fault = Message("POST", head, b"", None, status, "", True)
            for before in ([], [post(asked, "one")], [post(asked, "one"), get(asked, "two")]):
                await exchange(asked, [*before, fault], Whole(), behind=STOLEN * 3)

    run(case)


@BOTH
def test_the_host_of_an_absolute_target_counts(kind):
    async def case():
        async with served(kind) as asked:
            for target, host, status in (
                ("http://localhost:8000/livez", "evil.example", 200),
                ("HTTP://LOCALHOST/livez", "localhost", 200),
                ("http://evil.example/livez", "localhost", 403),
                ("http://localhost", "localhost", 200),
                ("ftp://localhost/livez", "localhost", 400),
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", asked.port)
                writer.write(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
                answer = await read_answer(reader, "GET")
                assert answer.status == status, (target, answer)
                writer.close()

    run(case)


@BOTH
def test_http_1_0(kind):
    """No chunks, no interim answers, and the connection closes."""

    async def case():
        async with served(kind) as asked:
            for head in ("GET /livez HTTP/1.0\r\nHost: localhost\r\n", "GET /metrics HTTP/1.0\r\nHost: localhost\r\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", asked.port)
                writer.write(f"{head}Connection: keep-alive\r\nExpect: 100-continue\r\n\r\n".encode())
                answer = await read_answer(reader, "GET")
                assert (answer.status, answer.headers["connection"]) == (200, "close")
                assert "transfer-encoding" not in answer.headers
                assert await reader.read() == b""
                writer.close()

    run(case)


def test_a_stream_in_http_1_0_ends_with_the_connection():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in (b"a", b"", b"bc"):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"d"})

    async def case():
        async with listening(app, ServerConfig()) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert head.lower().split(b"\r\n") == [b"http/1.1 200 ok", b"connection: close"]
            assert body == b"abcd"
            writer.close()

    run(case)


def draw(asked, rng, name):
    """Return a random request."""
    kind = rng.randrange(6)
    offer = rng.choice(["none", "none", *(offer for offer in OFFERS if "close" not in offer)])
    text = STOLEN * rng.choice((0, 1, 1, 3, 40, 2000))
    chunks = rng.choice((None, None, [], [1], [rng.randrange(1, 99) for _ in range(rng.randrange(9))]))
    if kind < 3:
        path = rng.choice([COMPLETE, COMPLETE, *asked.statuses])
        return post(asked, name, text, offer=offer, chunks=chunks, path=path)
    if kind == 3:
        return get(asked, name, offer=offer, method="HEAD")
    return get(asked, name, offer=offer, body=rng.choice((b"", STOLEN, STOLEN * 50)))


@BOTH
@pytest.mark.parametrize("count", [250, pytest.param(2000, marks=pytest.mark.ci)])
def test_random_connections(kind, count):
    """Random requests, cut at random places, pipelined or in turn, with random ends of their connections."""
    if count == 250 and kind is Gateway:
        count = 150

    async def connection(asked, number, rng):
        count = rng.randrange(1, 6)
        messages = [draw(asked, rng, f"r-{number}-{index}") for index in range(count)]
        end, in_turn, behind, half_close = rng.randrange(5), rng.random() < 0.5, b"", False
        if end == 0:  # the client says that it closes
            messages[-1] = post(asked, f"r-{number}-close", extra="Connection: close\r\n")
            behind = STOLEN
        elif end == 1:
            half_close = True
        elif end == 2:
            head, status = rng.choice(list(FAULTS.values()))
            messages.append(Message("POST", head, b"", None, status, "", True))
            behind = STOLEN * rng.randrange(3)
        elif end == 3 and not in_turn:  # a request without its end
            half_close = True
            behind = rng.choice(
                (b"GET /sto", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99\r\nHost: localhost\r\n\r\n" + STOLEN)
            )
            messages = messages[:-1] or messages
        await exchange(asked, messages, rng, in_turn=in_turn, half_close=half_close, behind=behind)
        return len(messages)

    async def case():
        async with served(kind) as asked:
            done, number, rng = 0, 0, random.Random(65)
            while done < count:
                batch = [connection(asked, number + index, random.Random(rng.random())) for index in range(16)]
                done, number = done + sum(await asyncio.gather(*batch)), number + 16

    run(case, 300)
