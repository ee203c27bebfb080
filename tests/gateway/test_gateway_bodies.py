"""Bounds of the gateway on bodies, and their cost to other clients: objects, ids, lists of documents and idle connections."""

import asyncio
import gzip
import json
import threading
import tracemalloc

import pytest

from chunkattn.documents.records import DocumentRecord, Prefix, Scope
from chunkattn.fair_shares import OWNER, FairShares
from chunkattn.gateway import relay
from chunkattn.web import bodies
from chunkattn.web.bodies import SMALL_BODY
from chunkattn.web.options import ServerConfig
from tests.gateway.rig import COMPLETE, Replica, ask, rig, run, until
from tests.http_rig import listening

LARGE = ask(["x" * SMALL_BODY])


def keep(made, text, owner=None):
    """Record a document at the gateway alone."""
    made.gateway.documents.registry.records.put([DocumentRecord(Scope(owner), "a", Prefix("Read."), text)])


@pytest.mark.parametrize("count", [20_000, 400_000])
def test_what_ids_expand_to_is_summed_before_it_is_built(count):
    """The larger body has more objects than are read at all."""

    async def case():
        a = Replica()
        async with rig(a) as made:
            keep(made, "x" * 10_000)
            packed = gzip.compress(json.dumps(ask([{"id": "a"}] * count)).encode())
            headers = {"content-type": "application/json", "content-encoding": "gzip"}
            tracemalloc.start()
            try:
                answer = await made.http.post(COMPLETE, content=packed, headers=headers)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
            assert peak < 50 << 20
            assert not a.calls
            assert not made.gateway.state.shares.bodies.held

    run(case)


def test_texts_in_the_places_of_ids_take_the_clients_share():
    async def case():
        a, go = Replica(), asyncio.Event()

        async def wait(call):
            await go.wait()
            await call.reply()

        a.answer = wait
        async with rig(a, server={"max_body_bytes_per_client": 1}) as made:
            keep(made, "x" * 100_000)
            asking = [asyncio.create_task(made.http.post(COMPLETE, json=ask([{"id": "a"}]))) for _ in range(3)]
            await until(lambda: a.calls)
            assert len(made.gateway.state.shares.bodies._waiting["127.0.0.1"]) == 2
            go.set()
            for answer in await asyncio.gather(*asking):
                assert answer.status_code == 200
            assert [json.loads(call.body)["chunks"]["documents"] for call in a.calls] == [["x" * 100_000]] * 3

    run(case)


@pytest.mark.parametrize("place", [(bodies, "_decoded"), (relay, "keys_of")], ids=["decoding", "routing keys"])
def test_a_large_body_is_read_beside_the_event_loop(monkeypatch, place):
    """Other requests are answered meanwhile, whatever the coding."""
    entered, go, work = threading.Event(), threading.Event(), getattr(*place)

    def held(*args, **options):
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            assert go.wait(60)
        return work(*args, **options)

    async def case():
        a = Replica()
        async with rig(a) as made:
            for content, coding in ((json.dumps(LARGE).encode(), None), (gzip.compress(json.dumps(LARGE).encode()), "gzip")):
                entered.clear()
                go.clear()
                monkeypatch.setattr(*place, held)
                headers = {"content-type": "application/json", **({} if coding is None else {"content-encoding": coding})}
                asking = asyncio.create_task(made.http.post(COMPLETE, content=content, headers=headers))
                await asyncio.to_thread(entered.wait, 60)
                assert (await made.http.post(COMPLETE, json=ask(["one"]))).status_code == 200
                go.set()
                assert (await asking).status_code == 200
                assert a.calls[-1].body == content

    run(case)


def test_one_client_holds_half_of_the_places():
    """The next client's turn comes with the next free place, however many pieces wait for another one."""

    async def main():
        turns, entered, go = FairShares(2, 4), [], asyncio.Event()

        async def work(owner):
            OWNER.set(owner)
            async with turns.turn():
                entered.append(owner)
                await go.wait()

        async def begin(owner):
            task = asyncio.create_task(work(owner))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return task

        many = [await begin("many") for _ in range(10)]
        assert entered == ["many"] * 2
        tasks = [await begin(owner) for owner in ("one", "two", "three")]
        assert entered == ["many"] * 2 + ["one", "two"]
        many[-1].cancel()  # waits
        many[0].cancel()  # runs
        await asyncio.gather(many[0], many[-1], return_exceptions=True)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert entered[4:] in (["three"], ["many"])
        go.set()
        await asyncio.gather(*many, *tasks, return_exceptions=True)
        assert len(entered) == 12
        assert not turns.held
        assert not turns._waiting

    asyncio.run(main())


def test_lists_of_one_client_do_not_hold_up_another(tmp_path):
    """The replica answers none of the one client's questions about documents."""

    async def case():
        a, asked = Replica(), []

        async def answer(call):
            asked.append(call.header("authorization"))
            if call.header("authorization") == ["Bearer many"]:
                await call.wait_until_left()
            await call.reply(cached=True)

        a.answer = answer
        (tmp_path / "keys").write_text("many:many\none:one\n")
        async with rig(a, server={"api_key_file": str(tmp_path / "keys")}) as made:
            for key in ("many", "one"):
                owner = made.gateway.documents.keeper.headers.owner_of(f"Bearer {key}")
                records = [DocumentRecord(Scope(owner), f"d{n}", Prefix("Read."), "x") for n in range(100)]
                made.gateway.documents.registry.records.put(records)
            many, one = ({"Authorization": f"Bearer {key}"} for key in ("many", "one"))
            asking = [asyncio.create_task(made.http.get("/v1/cache/documents", headers=many)) for _ in range(3)]
            await until(lambda: asked)
            found = await made.http.get("/v1/cache/documents/d7", headers=one)
            assert (found.status_code, found.json()["cached"]) == (200, True)
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    run(case)


async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


async def asked(port, path="/x"):
    """Return the answer to a request on a new connection, and its writer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return (await reader.read(1 << 16)).split(b"\r\n")[0], writer


def test_connections_that_send_nothing_keep_nobody_out():
    """The oldest of them is closed. Known connections stay, and probes get in while all of these are taken."""

    async def case():
        async with listening(hello, ServerConfig(max_connections=32)) as (port, _):
            first, known = await asked(port)
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
            for _ in range(3):
                told, writer = await asked(port)
                assert told == b"HTTP/1.1 200 OK"
                writer.close()
            assert first == b"HTTP/1.1 200 OK"
            assert (await idle[0][0].read()).startswith(b"HTTP/1.1 503")
            for _, writer in idle:
                writer.close()
            await asyncio.sleep(0.05)
            kept = [known, *[(await asked(port))[1] for _ in range(31)]]
            told, refused = await asked(port)
            assert told.startswith(b"HTTP/1.1 503")
            for path in ("/health", "/llm/readyz/"):
                told, writer = await asked(port, path)
                assert told == b"HTTP/1.1 200 OK"
                writer.close()
            for writer in [refused, *kept]:
                assert not writer.is_closing()
                writer.close()

    run(case)
