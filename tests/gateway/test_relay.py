"""Requests that the gateway sends on: replicas that refuse and die, before and behind the start of an answer."""

import asyncio

import httpx
import pytest

from tests.gateway.rig import COMPLETE, Replica, answered_by, ask, events, rig, run, scripted, until


async def die(call):
    call.abort()


async def half_head(call):
    connection = next(c for c in call.replica.connections if c.scope is call.scope)
    connection.transport.write(b"HTTP/1.1 200 OK\r\ncontent-le")
    connection.transport.close()


async def garbage(call):
    connection = next(c for c in call.replica.connections if c.scope is call.scope)
    connection.transport.write(b"SSH-2.0-OpenSSH_9.6\r\n")
    connection.transport.close()


def refusal(status, code):
    return lambda call: call.refuse(status, code)


@pytest.mark.parametrize(
    "first",
    [die, half_head, garbage, refusal(503, "engine_not_ready"), refusal(429, "queue_full")],
    ids=["reset", "half a head", "not HTTP", "503", "queue full"],
)
def test_another_replica_answers(first):
    async def case():
        a, b = scripted(first, first if first in (die, half_head) else None)  # one more try on a new connection
        async with rig(a, b) as made:
            answer = await made.http.post(COMPLETE, json=ask(["one"]))
            assert answer.status_code == 200
            others = [replica for replica in (a, b) if replica.port == answered_by(answer)]
            assert answer.json() == {"name": others[0].name}
            assert all((a.calls, b.calls)), "the first one answered"
            assert made.queued == 0

    run(case)


@pytest.mark.parametrize("code", ["queue_share_exceeded", "body_share_exceeded"])
def test_a_429_that_another_replica_would_give_too_is_relayed(code):
    async def case():
        a, b = scripted(refusal(429, code))
        async with rig(a, b) as made:
            answer = await made.http.post(COMPLETE, json=ask(["one"]))
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, code)
            assert len(a.calls) + len(b.calls) == 1

    run(case)


def test_a_429_without_an_error_object_is_relayed():
    async def case():
        a, b = scripted(lambda call: call.reply(429, error="slow down"))
        async with rig(a, b) as made:
            answer = await made.http.post(COMPLETE, json=ask(["one"]))
            assert (answer.status_code, answer.json()) == (429, {"error": "slow down"})

    run(case)


def test_the_last_refusal_is_relayed_if_all_refuse():
    async def case():
        a, b = scripted(refusal(503, "first"), lambda call: call.reply(503, [("retry-after", "7")], error={"code": "last"}))
        async with rig(a, b) as made:
            answer = await made.http.post(COMPLETE, json=ask(["one"]))
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "last")
            assert answer.headers["retry-after"] == "7"
            assert (len(a.calls), len(b.calls)) == (1, 1)

    run(case)


def test_a_refusal_too_long_to_keep_is_relayed_whole():
    async def case():
        a, b = scripted(lambda call: call.reply(503, error={"message": "x" * 300_000}))
        async with rig(a, b) as made:
            answer = await made.http.post(COMPLETE, json=ask(["one"]))
            assert answer.status_code == 503
            assert len(answer.json()["error"]["message"]) == 300_000

    run(case)


def test_tries_are_bounded():
    async def case():
        replicas = [Replica(str(number)) for number in range(5)]
        for replica in replicas:
            replica.answer = refusal(503, "full")
        async with rig(*replicas, max_tries=3) as made:
            assert (await made.http.post(COMPLETE, json=ask(["one"]))).status_code == 503
            assert sum(len(replica.calls) for replica in replicas) == 3

    run(case)


def test_no_replica_is_a_503_that_says_so():
    async def case():
        a = Replica()
        a.report = {"generation": "1", "ready": False}
        async with rig(a, wait=False) as made:
            answer = await made.http.post(COMPLETE, json=ask())
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
            assert "retry-after" in answer.headers
            assert not a.calls

    run(case)


def test_a_stream_whose_replica_dies_ends_with_an_error_event():
    async def case():
        seen = asyncio.Event()

        async def stream_and_die(call):
            await call.start(kind="text/event-stream; charset=utf-8")
            await call.event(number=1)
            await seen.wait()
            call.abort()

        a, b = scripted(stream_and_die)
        async with rig(a, b) as made:
            got = ""
            async with made.http.stream("POST", COMPLETE, json=ask(["one"], stream=True)) as answer:
                async for text in answer.aiter_text():  # raises on an unclean end
                    got += text
                    seen.set()
            one, error, end = events(got)
            assert answer.status_code == 200
            assert one == {"number": 1}
            assert end == "[DONE]"
            assert error["error"]["code"] == "engine_not_ready"
            assert made.queued == 0
            assert len(a.calls) + len(b.calls) == 1
            await until(lambda: len(made.gateway.watch.ready()) == 2)  # both still report

    run(case)


@pytest.mark.parametrize("written", ['data: {"half', "data: [DONE]"], ids=["half an event", "its end"])
def test_a_stream_whose_replica_dies_behind(written):
    """Half an event does not spoil the error event; a whole stream has no error."""

    async def case():
        a, seen = Replica(), asyncio.Event()

        async def stream_and_die(call):
            await call.start(kind="text/event-stream")
            await call.write(f"{written}\n\n".encode() if "DONE" in written else written.encode())
            await seen.wait()
            call.abort()

        a.answer = stream_and_die
        async with rig(a) as made, made.http.stream("POST", COMPLETE, json=ask(stream=True)) as answer:
            got = ""
            async for text in answer.aiter_text():
                got += text
                seen.set()
            found = [event for event in got.split("\n\n") if event]
            assert found[0] == written
            assert found[-1] == "data: [DONE]"
            assert len(found) == (1 if "DONE" in written else 3)

    run(case)


@pytest.mark.parametrize("length", [True, False], ids=["length", "chunked"])
def test_another_answer_whose_replica_dies_is_cut(length):
    async def half(call):
        await call.start(headers=[("content-length", "100")] if length else [])
        await call.write(b'{"half": ')
        await asyncio.sleep(0.01)
        call.abort()

    async def case():
        a, b = scripted(half)
        async with rig(a, b) as made:
            with pytest.raises(httpx.RemoteProtocolError):
                await made.http.post(COMPLETE, json=ask(["one"]))
            assert len(a.calls) + len(b.calls) == 1
            assert (await made.http.post(COMPLETE, json=ask(["one"]))).status_code == 200

    run(case)


def test_every_replica_forgets():
    """Copies may be anywhere. A replica that cannot be reached is named."""

    async def case():
        replicas = Replica("a"), Replica("b"), Replica("c")
        async with rig(*replicas) as made:
            body = {"prefix": "Read.", "documents": ["Ana", "Bo"]}
            assert (await made.http.post("/v1/cache/forget", json=body)).status_code == 200
            assert [[(call.method, call.path) for call in r.calls] for r in replicas] == [[("POST", "/v1/cache/forget")]] * 3

    run(case)
