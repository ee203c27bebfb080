"""Answers on their way through the gateway: streams, time limits, clients that leave, slow readers and connections."""

import asyncio
import json

import httpx
import pytest

from tests.gateway.rig import COMPLETE, Replica, ask, events, rig, run, scripted, until


@pytest.mark.parametrize("streams", [False, True], ids=["waiting", "streaming"])
def test_a_replica_that_hangs_loses_its_requests(streams):
    async def hang(call):
        if streams:
            await call.start(kind="text/event-stream")
            await call.event(number=1)
        call.replica.stopped = True
        await call.wait_until_left()

    async def case():
        a, b = scripted(hang)
        async with rig(a, b, report_timeout_s=0.1, hang_timeout_s=0.2) as made:
            answer = await made.http.post(COMPLETE, json=ask(["one"], stream=streams))
            first, other = (a, b) if a.stopped else (b, a)
            if streams:
                assert [*events(answer.text)[0], events(answer.text)[-1]] == ["number", "[DONE]"]
                assert "error" in events(answer.text)[1]
            else:
                assert answer.json() == {"name": other.name}
            await asyncio.wait_for(first.calls[0].left.wait(), 10)
            assert made.gateway.watch.ready() == [other.url]
            assert made.queued == 0
            first.stopped = False
            await made.ready(a, b)

    run(case)


def test_events_are_relayed_as_they_come():
    async def case():
        a, seen = Replica(), asyncio.Event()

        async def stream(call):
            await call.start(kind="text/event-stream")
            await call.event(number=1)
            await asyncio.wait_for(seen.wait(), 20)  # the second event needs the first to arrive
            await call.event(number=2)
            await call.write(b"", more=False)

        a.answer = stream
        async with rig(a) as made, made.http.stream("POST", COMPLETE, json=ask(stream=True)) as answer:
            got = ""
            async for text in answer.aiter_text():
                got += text
                seen.set()
            assert events(got) == [{"number": 1}, {"number": 2}]

    run(case)


@pytest.mark.parametrize("streams", [False, True], ids=["waiting", "streaming"])
def test_a_client_that_leaves_ends_the_request(streams):
    async def case():
        a = Replica()

        async def answer(call):
            leaving = asyncio.create_task(call.wait_until_left())
            if streams:
                await call.start(kind="text/event-stream")
                while not leaving.done():  # a closed connection is noticed by what is written to it
                    await call.event(number=1)
                    await asyncio.sleep(0.005)
            await leaving

        a.answer = answer
        async with rig(a) as made:
            began = asyncio.Event()

            async def client():
                async with made.http.stream("POST", COMPLETE, json=ask(["long " * 100], stream=streams)) as answer:
                    async for _ in answer.aiter_text():
                        began.set()

            asking = asyncio.create_task(client())
            await (began.wait() if streams else until(lambda: a.calls))
            assert made.queued > 0
            asking.cancel()
            await asyncio.wait_for(a.calls[0].left.wait(), 10)
            await until(lambda: made.queued == 0)
            assert made.gateway.watch.ready() == [a.url], "a client took the replica away"

    run(case)


@pytest.mark.parametrize("streams", [False, True], ids=["waiting", "streaming"])
def test_a_request_has_a_time_limit(streams):
    async def case():
        a = Replica()

        async def wait(call):
            if streams:
                await call.start(kind="text/event-stream")
                await call.event(number=1)
            await call.wait_until_left()

        a.answer = wait
        async with rig(a, server={"request_timeout_s": 0.1}) as made:
            answer = await made.http.post(COMPLETE, json=ask(stream=streams))
            if streams:
                _, error, end = events(answer.text)
                assert (answer.status_code, error["error"]["code"], end) == (200, "timeout", "[DONE]")
            else:
                assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
            await asyncio.wait_for(a.calls[0].left.wait(), 10)
            assert made.queued == 0
            assert made.gateway.watch.ready() == [a.url]

    run(case)


def test_a_slow_reader_stops_the_replica():
    """The gateway holds a few buffers of a long answer, not all of it."""

    async def case():
        a, written = Replica(), 0

        async def flood(call):
            nonlocal written
            await call.start(kind="application/octet-stream")
            for _ in range(400):
                await call.write(b"x" * (1 << 16))
                written += 1 << 16
            await call.write(b"", more=False)

        a.answer = flood
        async with rig(a) as made:
            async with made.http.stream("GET", "/flood") as answer:
                pieces = answer.aiter_raw(1 << 16)
                got, before = len(await anext(pieces)), -1
                while before != written:  # until nothing moves any more
                    before = written
                    await asyncio.sleep(0.1)
                assert written < 16 << 20, "the whole answer lies in memory"
                async for piece in pieces:
                    got += len(piece)
            assert got == 400 << 16

    run(case)


def test_requests_never_share_an_answer():
    async def case():
        a, b = Replica("a"), Replica("b")

        async def echo(call):
            number = json.loads(call.body)["number"]
            if number % 5 == 0:
                await call.refuse(503, "again")
                return
            await asyncio.sleep(number % 3 / 1000)
            if number % 7 == 0:
                call.abort()
            await call.reply(number=number)

        a.answer = b.answer = echo
        async with rig(a, b) as made:

            async def one(number):
                answer = await made.http.post(COMPLETE, json=ask([str(number % 4)], number=number))
                return answer.status_code != 200 or answer.json() == {"number": number}

            assert all(await asyncio.gather(*map(one, range(60))))
            await until(lambda: made.queued == 0)
            assert (await made.http.post(COMPLETE, json=ask(number=1))).json() == {"number": 1}

    run(case)


def test_connections_are_kept_and_stale_ones_replaced():
    async def case():
        a = Replica()
        async with rig(a) as made:
            for _ in range(3):
                assert (await made.http.post(COMPLETE, json=ask())).status_code == 200
            ports = {call.scope["client"][1] for call in a.calls}
            assert len(ports) <= 2, "a connection for every request"  # the watch has one, too
            a.kill()
            await a.open()  # restarted at once, before any report
            assert (await made.http.post(COMPLETE, json=ask())).status_code == 200

    run(case)


def test_a_connection_that_closes_under_a_request_is_replaced():
    """A server may close an idle connection in the moment in which a request is sent over it."""

    async def case():
        a = Replica()
        async with rig(a) as made:
            await made.http.post(COMPLETE, json=ask())

            async def close_first(call):
                if len(a.calls) == 2:
                    call.abort()
                else:
                    await call.reply(name="again")

            a.answer = close_first
            assert (await made.http.post(COMPLETE, json=ask())).json() == {"name": "again"}
            assert len(a.calls) == 3

    run(case)


def test_a_body_that_ends_with_its_connection_is_whole():
    async def case():
        a = Replica()

        async def old(call):
            transport = next(c for c in a.connections if c.scope is call.scope).transport
            transport.write(b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * 500_000)
            transport.close()

        a.answer = old
        async with rig(a) as made:
            assert len((await made.http.get("/x")).content) == 500_000

    run(case)


def test_a_body_that_is_not_chunked_as_it_says_is_cut():
    async def case():
        a, seen = Replica(), asyncio.Event()

        async def spoil(call):
            await call.start()
            await call.write(b"{")
            await seen.wait()
            connection = next(c for c in a.connections if c.scope is call.scope)
            connection.transport.write(b"no chunk at all\r\n\r\n")
            await call.wait_until_left()

        a.answer = spoil
        async with rig(a) as made:
            async with made.http.stream("POST", COMPLETE, json=ask()) as answer:
                pieces = answer.aiter_raw()
                assert await anext(pieces) == b"{"
                seen.set()
                with pytest.raises(httpx.RemoteProtocolError):
                    await anext(pieces)
            await asyncio.wait_for(a.calls[0].left.wait(), 10)

    run(case)


def test_a_replica_that_refuses_a_body_early_stays():
    async def case():
        a = Replica()
        a.reads, a.answer = False, lambda call: call.reply(413, [("connection", "close")], error={"code": "body_too_large"})
        async with rig(a) as made:
            for _ in range(3):
                answer = await made.http.post(COMPLETE, json=ask(["x" * (6 << 20)]))
                assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
                assert made.gateway.watch.ready() == [a.url]

    run(case)
