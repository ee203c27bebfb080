"""A server that is ready once it is warm, by its option or by the probe's."""

import asyncio

import httpx
import pytest
from fastapi.testclient import TestClient

from chunkattn.async_llm import AsyncLLM
from chunkattn.errors import ConfigError
from chunkattn.server import run
from chunkattn.server.app import create_app
from chunkattn.web.listening import listen
from chunkattn.web.options import ServerConfig
from tests.patience import PATIENCE_S

pytest_plugins = ["tests.told_engine"]


@pytest.mark.parametrize("path", ["/readyz", "/health"])
@pytest.mark.parametrize(("option", "query"), [(True, ""), (True, "?warm=0"), (False, "?warm=1"), (False, "?warm=true")])
def test_probes_wait_for_the_warm_up(llm, path, option, query):
    app = create_app(llm, ServerConfig(ready_when_warm=option))
    client = TestClient(app, base_url="http://localhost")
    for warmup in (None, (0, 3), (2, 3)):
        llm.client.warmup = warmup
        answer = client.get(path + query)
        assert (answer.status_code, answer.json()["status"], answer.json()["warm"]) == (503, "warming", False)
        assert client.get(path).status_code == (503 if option else 200)
        app.state.server.check_ready()  # requests are accepted
        assert client.get("/livez").status_code == 200
    llm.client.warmup = (3, 3)
    answer = client.get(path + query)
    assert (answer.status_code, answer.json()["status"], answer.json()["warm"]) == (200, "ready", True)
    llm.client.state = "restarting"
    assert client.get(path + query).json()["status"] == "degraded"
    assert client.get(path + "?warm=perhaps").status_code == 400


def test_a_server_without_warm_up_cannot_wait_for_it():
    with pytest.raises(ConfigError, match="ready_when_warm"):
        create_app(AsyncLLM(warmup=False), ServerConfig(ready_when_warm=True))
    client = TestClient(create_app(AsyncLLM(warmup=False)), base_url="http://localhost")
    answer = client.get("/readyz?warm=1")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "warm")
    assert client.get("/readyz").status_code == 503


@pytest.mark.parametrize("option", [True, False])
def test_the_line_comes_when_the_server_is_ready_in_this_sense(llm, monkeypatch, capsys, option):
    opened = []

    async def open_engine():
        opened.append(llm)

    async def close():
        pass

    monkeypatch.setattr(llm, "open", open_engine)
    monkeypatch.setattr(llm, "close", close)
    config = ServerConfig(ready_when_warm=option, port=0)

    async def main():
        listening = listen(config)
        serving = asyncio.create_task(run._serve(llm, config, listening))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        shown = ""
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            while not opened or (await http.get("/livez")).status_code != 200:
                await asyncio.sleep(0.01)
            llm.client.warmup = (1, 2)
            for _ in range(3):
                await asyncio.sleep(0.1)  # several polls
            shown = capsys.readouterr().out
            assert ("is ready at" in shown) == (not option)
            assert (await http.get("/readyz")).status_code == (503 if option else 200)
            llm.client.warmup = (2, 2)
            while "is ready at" not in shown:
                await asyncio.sleep(0.01)
                shown += capsys.readouterr().out
            assert (await http.get("/readyz")).status_code == 200
        assert shown.count("is ready at") == 1
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        listening.close()

    asyncio.run(asyncio.wait_for(main(), 60))
