"""`chunkattn route` as a process of its own: options, signals and drains."""

import asyncio
import os
import signal
from collections import Counter
from urllib.parse import urlsplit

import httpx
import pytest
from typer.testing import CliRunner

from chunkattn.cli import app
from tests.gateway.rig import COMPLETE, Replica, ask, events, run
from tests.patience import PATIENCE_S
from tests.server_helpers import SMALL, ServerProcess


class Route(ServerProcess):
    """`chunkattn route` on a free port. Waiting for its start blocks, so it needs a thread beside scripted replicas."""

    command = "route"


def test_a_drain_ends_running_requests_and_refuses_new_ones(tmp_path):
    async def case():
        a, go, file = Replica(), asyncio.Event(), tmp_path / "keys"
        await a.open()
        file.write_text("ana:one\n")

        async def stream(call):
            await call.start(kind="text/event-stream")
            await call.event(number=1)
            await go.wait()
            await call.event(number=2)
            await call.write(b"", more=False)

        a.answer = stream
        route = await asyncio.to_thread(Route, a.url, "--report-period-s=0.05", f"--api-key-file={file}", "--log-format=json")
        try:
            headers = {"authorization": "Bearer one"}
            async with httpx.AsyncClient(base_url=route.url, timeout=PATIENCE_S, headers=headers) as http:
                async with asyncio.timeout(30):
                    while (await http.get("/health")).status_code != 200:
                        await asyncio.sleep(0.02)
                file.write_text("ben:two\nana:one\n")
                route.signal(signal.SIGHUP)
                await asyncio.to_thread(route.wait_for, "read again: 2 keys", 30)
                async with http.stream("POST", COMPLETE, json=ask(stream=True)) as answer:
                    pieces = answer.aiter_text()
                    got = await anext(pieces)
                    route.signal(signal.SIGTERM)
                    await asyncio.to_thread(route.wait_for, "draining: 1 requests", 30)
                    refused = await http.post(COMPLETE, json=ask(), headers={"authorization": "Bearer two"})
                    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_draining")
                    assert refused.headers["connection"] == "close"
                    assert (await http.get("/readyz")).status_code == 503
                    assert (await http.get("/livez")).status_code == 200
                    go.set()
                    got += "".join([text async for text in pieces])
                    assert events(got) == [{"number": 1}, {"number": 2}]
                    assert len(a.calls) == 1
                    assert answer.headers["server"] == "uvicorn"
                    assert len(answer.headers.get_list("date")) == 1
            assert await asyncio.to_thread(route.process.wait, 30) == 0
        finally:
            await asyncio.to_thread(route.close)
            a.kill()
        assert not any('"level": "error"' in line.lower() or "Traceback" in line for line in route.log), route.log

    run(case)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "http://host:port"),
        (["http://a:1", "http://a:1"], "given twice"),
        (["http://a:1", "--policy=best"], "unknown"),
        ([], "Missing argument"),
    ],
)
def test_wrong_arguments_end_with_one_clear_line(arguments, message):
    result = CliRunner().invoke(app, ["route", *arguments])
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")
    assert "Traceback" not in result.output


def body(number, stream):
    """Return one of 24 requests over some of six documents."""
    names = ["Ana", "Ben", "Cleo", "Dan", "Eve", "Fay"]
    documents = [f"{names[(number + n) % 6]} lives in house {n}. " * 8 for n in range(3)]
    asked = {"temperature": 1, "seed": number, "max_tokens": 24, "ignore_eos": True, "stream": stream}
    return ask(documents[:: 1 if number % 2 else -1], f"Who lives where? {number % 4}", **asked)


def ended(answer, stream):
    """Return the text of an answer, and the code of the error that it ended with."""
    if answer.status_code != 200:
        assert answer.status_code in (429, 503), answer.text
        return None, answer.json()["error"]["code"]
    if not stream:
        return answer.json()["choices"][0]["text"], None
    *listed, end = events(answer.text)
    assert end == "[DONE]"
    if "error" in listed[-1]:
        return None, listed[-1]["error"]["code"]
    return "".join(event["choices"][0]["text"] for event in listed if event["choices"]), None


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_restarts_and_deaths_of_two_servers():
    """Restarts one by one lose no request; a killed engine and a killed server leave none without answer or error.

    Each answer equals that of a server. The gateway is not asked before the next server is stopped.
    """

    async def load(http, expected, seen, stopping):
        number = 0

        async def client(place):
            nonlocal number
            while not stopping.is_set():
                number += 1
                stream, asked = (place + number) % 2 == 1, number % 24
                answer = await http.post(COMPLETE, json=body(asked, stream))  # raises on an unclean end
                text, error = ended(answer, stream)
                assert text == (None if error else expected[asked])
                seen[error or answer.headers["x-chunkattn-replica"]] += 1
                if error:
                    await asyncio.sleep(0.1)

        await asyncio.gather(*map(client, range(8)))

    async def case():
        servers = [ServerProcess(*SMALL, "--report-documents") for _ in range(2)]
        urls = [server.url for server in servers]
        route = Route(*urls, "--report-period-s=2")
        try:
            async with httpx.AsyncClient(base_url=servers[0].url, timeout=PATIENCE_S) as http:
                plain = [await http.post(COMPLETE, json=body(number, stream=False)) for number in range(24)]
                expected = [ended(answer, stream=False)[0] for answer in plain]
                assert len(set(expected)) == 24
            async with httpx.AsyncClient(
                base_url=route.url, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=16)
            ) as http:

                async def ready():
                    told = (await http.get("/health")).json()["replicas"]
                    return [told[server.url]["ready"] for server in servers]

                while await ready() != [True, True]:
                    await asyncio.sleep(0.05)
                seen, stopping = Counter(), asyncio.Event()
                loading = asyncio.create_task(load(http, expected, seen, stopping))

                async def more(count=16):
                    wanted = seen.total() + count
                    while seen.total() < wanted and not loading.done():
                        await asyncio.sleep(0.02)

                await more(40)
                for place in (0, 1):
                    servers[place].signal(signal.SIGTERM)
                    assert await asyncio.to_thread(servers[place].process.wait, 60) == 0
                    options = [*SMALL, "--report-documents", f"--port={urlsplit(urls[place]).port}"]
                    servers[place] = await asyncio.to_thread(ServerProcess, *options)
                await more(40)
                assert set(seen) == set(urls), seen
                while await ready() != [True, True]:
                    await asyncio.sleep(0.05)
                os.kill(servers[0].engine_pid, signal.SIGKILL)
                await more()
                while await ready() != [True, True]:
                    await asyncio.sleep(0.05)
                await more()
                os.kill(servers[1].process.pid, signal.SIGKILL)
                while await ready() != [True, False]:
                    await asyncio.sleep(0.05)
                await more()  # with those that it had begun
                before = seen.copy()
                await more()
                assert set(seen - before) == {servers[0].url}, "one server is enough"
                stopping.set()
                await loading
        finally:
            codes = [process.close() for process in (route, *servers)]
        assert codes == [0, 0, -signal.SIGKILL]
        assert not [line for line in route.log if "Traceback" in line], "".join(route.log)

    run(case, 280)
