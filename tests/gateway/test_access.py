"""Limits and access at the gateway: heads, bodies, API keys and the Host check."""

import asyncio
import socket

from chunkattn.web.paths import OPEN_PATHS
from tests.gateway.rig import COMPLETE, Replica, parts, raw, rig, run, until


def test_slow_and_long_heads():
    async def case():
        a = Replica()
        async with rig(a, server={"header_timeout_s": 0.2}) as made:
            assert parts(await made.exchange(b"GET / HTTP/1.1\r\nHost: local"))[0] == 408
            assert parts(await made.exchange(raw("GET", "/x", f"X-Long: {'x' * 60_000}")))[0] == 200
            assert a.calls[0].header("x-long") == ["x" * 60_000]
            assert parts(await made.exchange(raw("GET", "/x", f"X-Long: {'x' * 70_000}")))[0] == 400
            assert parts(await made.exchange(b"nonsense\r\n\r\n"))[0] == 400
            assert len(a.calls) == 1

    run(case)


def test_long_answer_heads_are_relayed():
    async def case():
        a = Replica()
        a.answer = lambda call: call.reply(200, [("x-long", "y" * 30_000)])
        async with rig(a) as made:
            assert len((await made.http.get("/x")).headers["x-long"]) == 30_000

    run(case)


def test_keys_and_their_file(tmp_path):
    async def case():
        a, file = Replica(), tmp_path / "keys"
        file.write_text("ana:one\n")
        async with rig(a, server={"api_key_file": str(file), "metrics_key": "scrape"}) as made:

            async def status(path, key=None):
                headers = {} if key is None else {"authorization": f"Bearer {key}"}
                return (await made.http.get(path, headers=headers)).status_code

            assert [await status("/x"), await status("/x", "two"), await status("/x", "one")] == [401, 401, 200]
            assert a.calls[0].header("authorization") == ["Bearer one"]
            assert len(a.calls) == 1
            assert [await status(path) for path in OPEN_PATHS] == [200] * 4
            assert (await made.http.post("/ping")).status_code == 200
            assert [await status("/metrics"), await status("/metrics", "one"), await status("/metrics", "scrape")] == [
                401,
                401,
                200,
            ]
            file.write_text("ana:two\n")
            made.gateway.state.keys.reload()
            assert [await status("/x", "one"), await status("/x", "two")] == [401, 200]

    run(case)


def test_a_name_that_is_not_this_machine():
    async def case():
        async with rig(Replica()) as made:
            answer = await made.http.get("/x", headers={"host": "evil.example"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")

    run(case)


def test_bodies_are_limited():
    async def case():
        a = Replica()

        async def pieces():
            for _ in range(3):
                yield b"x" * 500

        async with rig(a, server={"max_body_bytes": 1000}) as made:
            for content in (b"x" * 1001, pieces()):
                answer = await made.http.post(COMPLETE, content=content)
                assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
            assert (await made.http.post(COMPLETE, content=b"x" * 1000)).status_code == 200
            assert len(a.calls) == 1

    run(case)


def test_bodies_of_one_client_share_memory():
    """A body beyond the client's share is read once another request has ended."""

    async def case():
        a, go = Replica(), asyncio.Event()

        async def wait(call):
            await go.wait()
            await call.reply()

        a.answer = wait
        async with rig(a, server={"max_body_bytes_per_client": 150_000}) as made:
            asking = [asyncio.create_task(made.http.post("/x", content=b"x" * 100_000)) for _ in range(3)]
            await until(lambda: a.calls)
            assert (await made.http.get("/health")).status_code == 200  # small requests pass
            assert len(a.calls) == 1
            go.set()
            assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200] * 3

    run(case)


def test_a_client_that_stops_sending_still_gets_its_answer():
    async def case():
        a, closed = Replica(), asyncio.Event()

        async def wait(call):
            await closed.wait()
            await call.reply(ok=True)

        a.answer = wait
        async with rig(a) as made:
            reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
            writer.write(raw("GET", "/x"))
            await until(lambda: a.calls)
            writer.get_extra_info("socket").shutdown(socket.SHUT_WR)
            closed.set()
            assert (await reader.read()).endswith(b'{"ok": true}')
            writer.close()

    run(case)


def test_routes_about_all_clients_are_not_relayed():
    async def case():
        a = Replica()
        async with rig(a) as made:
            for path in ("/v1/cache/report", "/v1/cache/report/", "/metrics/other", "/metrics%2F"):
                assert (await made.http.get(path)).status_code == 404
        assert a.calls == []

    run(case)


def test_bodies_that_no_json_has_reach_the_replica_as_they_are():
    async def case():
        a = Replica()
        async with rig(a) as made:
            for body in (b'{"prompt": "\xff"}', b"[" * 100_000):
                headers = {"content-type": "application/json"}
                assert (await made.http.post(COMPLETE, content=body, headers=headers)).status_code == 200
                assert a.calls[-1].body == body
                assert (await made.http.post("/v1/cache/documents", content=body, headers=headers)).status_code == 400

    run(case)
