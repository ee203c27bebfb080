"""Life of a connection: idle time, what arrives while the server closes, and answers that a closing server does not lose."""

import asyncio
import socket
import struct
import time
from types import SimpleNamespace

import pytest
import uvloop

from chunkattn.fair_shares import FairShares
from chunkattn.web import connection_limits
from chunkattn.web.bodies import SMALL_BODY
from chunkattn.web.keys import Keys, Shares
from chunkattn.web.options import ServerConfig
from tests.http_rig import listening, read_answer

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


def run(case):
    async def bounded():
        async with asyncio.timeout(30):
            await case()

    uvloop.run(bounded())


async def ask(reader, writer, request=GET):
    writer.write(request)
    return await read_answer(reader, "GET")


def test_an_idle_connection_closes_after_the_time_that_its_answers_tell():
    async def case():
        async with listening(hello, ServerConfig(timeout_keep_alive=1)) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(3):
                assert (await ask(reader, writer)).headers["keep-alive"] == "timeout=1"
                await asyncio.sleep(0.5)  # each request starts the time again
            assert await reader.read() == b""
            writer.close()

    run(case)


def test_pools_of_go_end_before_the_default():
    assert ServerConfig().timeout_keep_alive > 90


def test_a_request_that_has_arrived_is_answered_after_the_idle_time():
    """uvloop runs all timers that are due before it reads: here one that sends a request, then the connection's own."""

    async def case():
        loop = asyncio.get_running_loop()
        async with listening(hello, ServerConfig(timeout_keep_alive=0.3)) as (port, _):
            with socket.create_connection(("127.0.0.1", port), timeout=20) as client:

                def answer():
                    found = b""
                    while not found.endswith(b"hi"):
                        found += (more := client.recv(1000))
                        assert more, found
                    return found

                client.sendall(GET)
                await asyncio.to_thread(answer)
                loop.call_later(0.25, client.sendall, GET)
                await asyncio.sleep(0.2)
                time.sleep(0.3)
                assert (await asyncio.to_thread(answer)).startswith(b"HTTP/1.1 200 ")

    run(case)


@pytest.mark.parametrize(
    "head",
    [
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 8000000\r\n\r\n",
    ],
    ids=["no request", "early answer"],
)
def test_a_client_that_still_sends_reads_its_answer(head):
    """Closing at once would reset the connection, and with it the answer that the client has not read."""

    async def case():
        async with listening(hello, ServerConfig()) as (port, _):

            def client():
                with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
                    connection.sendall(head)
                    time.sleep(0.1)
                    for _ in range(20):
                        connection.sendall(b"x" * 100_000)
                        time.sleep(0.002)
                    return connection.recv(1 << 16)

            assert (await asyncio.to_thread(client)).startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 200 "))

    run(case)


def test_a_server_that_stops_answers_what_is_on_its_way():
    async def case():
        async with listening(hello, ServerConfig()) as (port, connections):
            pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            for reader, writer in pairs:
                assert "connection" not in (await ask(reader, writer)).headers
            protocols = list(connections)
            pairs[0][1].write(GET)
            pairs[1][1].write(GET[:9])
            await asyncio.sleep(0.01)
            for protocol in protocols:
                protocol.shutdown()
            await asyncio.sleep(0.02)
            pairs[1][1].write(GET[9:])
            for reader, writer in pairs[:2]:
                assert (await read_answer(reader, "GET")).body == b"hi"
                writer.close()
            reader, writer = pairs[2]
            writer.write(GET)
            answer = await read_answer(reader, "GET")
            assert (answer.body, answer.headers["connection"]) == (b"hi", "close")
            assert await reader.read() == b""
            writer.close()
            assert await pairs[1][0].read() == b""

    run(case)


def test_a_client_that_asks_first_may_send_no_body():
    """Its next bytes may be the body or another request, so an answer without the interim one ends the connection."""

    async def reads(scope, receive, send):
        await receive()
        await hello(scope, receive, send)

    async def case():
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n"
        for app, last in ((hello, "close"), (reads, None)):
            async with listening(app, ServerConfig()) as (port, _):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(head)
                if app is reads:
                    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
                    writer.write(b"abc")
                assert (await read_answer(reader, "POST")).headers.get("connection") == last
                writer.close()

    run(case)


def test_pipelined_requests_are_bounded_and_end_with_their_client():
    """A client that sends on while its first request runs is not read, and its leaving ends the first request."""
    left, started = [], []

    async def slow(scope, receive, send):
        started.append(scope)
        while (message := await receive())["type"] != "http.disconnect":
            if not message.get("more_body"):
                await asyncio.sleep(0)
        left.append(scope)

    async def case():
        async with listening(slow, ServerConfig()) as (port, connections):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET)
            await asyncio.sleep(0.1)
            for _ in range(200):
                writer.write(GET * 1000)
            await asyncio.sleep(0.3)
            assert writer.transport.get_write_buffer_size() > 0
            (protocol,) = connections
            assert len(protocol.pipeline) < 10_000
            writer.transport.abort()
            for protocol in list(connections):
                protocol.transport.abort()
            while not left:
                await asyncio.sleep(0.01)
            assert len(started) == 1

    run(case)


@pytest.mark.parametrize(("leaves", "last"), [(True, "http.disconnect"), (False, "http.request")])
def test_the_large_body_of_a_client_that_hung_up_is_not_handed_on(leaves, last):
    """A client that ends its sending alone waits for its answer."""
    ends = []

    async def reader(scope, receive, send):
        message = await receive()
        while message.get("more_body"):
            message = await receive()
        ends.append(message["type"])
        await hello(scope, receive, send)

    async def case():
        async with listening(reader, ServerConfig()) as (port, _):
            with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
                client.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n" + b"a" * 100_000)
                if leaves:
                    client.close()
                else:
                    client.shutdown(socket.SHUT_WR)
                while not ends:
                    await asyncio.sleep(0.01)
                assert ends == [last]
                if not leaves:
                    assert b" 200 " in await asyncio.to_thread(client.recv, 4096)

    run(case)


def test_a_large_body_over_its_keys_share_is_refused_by_its_head(tmp_path):
    """The application does not see it. Small bodies and other keys pass."""
    (tmp_path / "keys").write_text("a:first\nb:second\n")
    keys, bodies = Keys(None, str(tmp_path / "keys"), None), FairShares(5, most_waiting=1)
    seen = []

    async def noting(scope, receive, send):
        seen.append(dict(scope["headers"])[b"authorization"])
        await hello(scope, receive, send)

    async def case():
        await bodies.take("a", 5)
        waiting = asyncio.create_task(bodies.take("a", 5))
        await asyncio.sleep(0)
        async with listening(noting, ServerConfig(), keys=keys, shares=Shares(1, bodies)) as (port, _):
            for key, size, status in (("first", SMALL_BODY + 1, 429), ("first", 2, 200), ("second", SMALL_BODY + 1, 200)):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                head = f"POST / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nContent-Length: {size}\r\n\r\n"
                writer.write(head.encode())
                answer = await read_answer(reader, "POST")
                assert answer.status == status, (key, size)
                writer.close()
        assert seen == [b"Bearer first", b"Bearer second"]
        assert not waiting.done()
        waiting.cancel()

    run(case)


def test_large_bodies_of_a_key_whose_clients_leave_them_behind_are_refused_by_their_heads(tmp_path, monkeypatch):
    """The application does not see them. Small bodies and other keys pass, and after a while the key's large ones too."""
    monkeypatch.setattr(connection_limits, "_MOST_ABANDONED", 3)
    now = [time.monotonic()]
    monkeypatch.setattr(connection_limits, "time", SimpleNamespace(monotonic=lambda: now[0]))
    (tmp_path / "keys").write_text("a:first\nb:second\n")
    keys, ends = Keys(None, str(tmp_path / "keys"), None), []

    async def reading(scope, receive, send):
        while (message := await receive()).get("more_body"):
            pass
        ends.append(message["type"])
        await hello(scope, receive, send)

    def request(key, size, *, chunked=False):
        framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}"
        head = f"POST / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n{framing}\r\n\r\n".encode()
        return head + (b"%x\r\n" % size if chunked else b"") + b"a" * size + (b"\r\n0\r\n\r\n" if chunked else b"")

    async def status(port, *sent, **framing):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(*sent, **framing))
        answer = await read_answer(reader, "POST")
        writer.close()
        return answer.status

    def leave(port, data):
        """Send data and hang up, before the server's loop can read: a body's end and the client's come together."""
        with socket.socket() as client:
            client.settimeout(20)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            client.connect(("127.0.0.1", port))
            client.sendall(data)

    async def case():
        shares = Shares(1, FairShares(1 << 20))
        async with listening(reading, ServerConfig(), keys=keys, shares=shares) as (port, _):
            whole, chunked = request("first", 300_000), request("first", 80_000, chunked=True)
            for data in (whole, whole, whole[:100_000], chunked[:-9]):
                leave(port, data)
            while len(ends) < 4:
                await asyncio.sleep(0.01)
            assert [await status(port, "first", 80_000), await status(port, "first", 80_000, chunked=True)] == [429, 429]
            assert ends == ["http.disconnect"] * 4
            assert [await status(port, "first", 10), await status(port, "second", 80_000)] == [200, 200]
            now[0] += 1.0
            assert await status(port, "first", 80_000) == 200

    run(case)


def test_a_body_that_the_server_does_not_wait_for_counts_as_none_that_its_client_left(tmp_path, monkeypatch):
    monkeypatch.setattr(connection_limits, "_MOST_ABANDONED", 0)
    (tmp_path / "keys").write_text("a:first\n")
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer first\r\nContent-Length: 70000\r\n\r\n"

    async def reading(scope, receive, send):
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.request":
            await hello(scope, receive, send)

    async def case():
        keys, shares = Keys(None, str(tmp_path / "keys"), None), Shares(1, FairShares(1 << 20))
        async with listening(reading, ServerConfig(body_timeout_s=0.5), keys=keys, shares=shares) as (port, _):
            for sent, status in ((head, 408), (head + b"a" * 70_000, 200)):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(sent)
                assert (await read_answer(reader, "POST")).status == status
                writer.close()

    run(case)


@pytest.mark.parametrize("size", [70_000, 200_000, 400_000])
def test_a_connection_that_is_reset_before_its_body_is_read_ends(size):
    """Its reading may be paused, so that nothing else would tell."""
    ends = []

    async def late(scope, receive, send):
        await asyncio.sleep(0.2)
        while (message := await receive()).get("more_body"):
            pass
        ends.append(message["type"])
        await hello(scope, receive, send)

    async def case():
        async with listening(late, ServerConfig()) as (port, connections):
            client = socket.create_connection(("127.0.0.1", port), timeout=20)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            head = f"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n".encode()
            await asyncio.to_thread(client.sendall, head + b"a" * size)
            await asyncio.sleep(0.1)
            client.close()  # with a reset
            while connections or not ends:
                await asyncio.sleep(0.01)
            assert ends == ["http.disconnect"]

    run(case)
