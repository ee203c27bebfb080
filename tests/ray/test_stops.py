"""Processes die or stop under load, and every request ends. The last file: it stops the service of the others."""

import asyncio
import os
import signal
import time

import pytest

from tests.ray.cluster import Processes, chunkattn, free_port, wait_for
from tests.ray.conftest import PROMPTS
from tests.ray.requests import ask

WHOLE_S = 30
"""Seconds until everything serves again. A loaded machine gets a multiple."""
ALLOWED = {
    "replica": {"complete", "error event", "503"},
    "engine": {"complete", "error event", "503"},
    "gateway": {"complete", "closed", "503"},
}


def generations(service):
    return {state["generation"] for state in service.ask("/health").json["replicas"].values()}


def is_whole(service, kind, count, killed, before):
    """Return whether as many processes of a kind run as before, all replicas are ready, and a new engine has told so."""
    living = service.processes.living(kind)
    if len(living) != count or killed in living:
        return False
    try:
        states = service.ask("/health").json["replicas"]
    except OSError:
        return False
    new = {state["generation"] for state in states.values()} - before
    return len(states) == 3 and all(s["ready"] for s in states.values()) and len(new) == (kind != "gateway")


@pytest.mark.parametrize("kind", ["replica", "engine", "gateway"])
def test_a_death_under_load(kind, replicas, load):
    before = replicas.processes.living(kind)
    killed, engines = before[0], generations(replicas)
    document = {"id": f"kept through {kind}".replace(" ", "-"), "text": "Rumi is a poet."}
    assert replicas.ask("/v1/cache/documents", {"prefix": "Read. ", "documents": [document]}).status == 200

    async def under_load(session):
        clients = [asyncio.create_task(load.client(session, seed)) for seed in range(8)]
        while load.outcomes["complete"] < 30:
            await asyncio.sleep(0.05)
            for client in clients:
                assert not client.done(), client.exception()
        began = time.monotonic()
        os.kill(killed, signal.SIGKILL)
        while not await asyncio.to_thread(is_whole, replicas, kind, len(before), killed, engines):
            assert time.monotonic() - began < 4 * WHOLE_S
            await asyncio.sleep(0.2)
        took = time.monotonic() - began
        count = load.outcomes["complete"]
        while load.outcomes["complete"] < count + 30:
            await asyncio.sleep(0.05)
        load.stopped = True
        await asyncio.gather(*clients)  # every request ends
        return took

    took = replicas.run(under_load)
    print(f"{kind}: whole after {took:.1f} s, {dict(load.outcomes)}")
    assert not load.wrong
    chunks = {"prefix": "Read. ", "documents": [{"id": document["id"]}], "question": "Who?"}
    assert replicas.ask("/v1/completions", {"chunks": chunks, "max_tokens": 1}).status == 200, "a stored id is lost"
    assert set(load.outcomes) <= ALLOWED[kind], load.outcomes
    failed = load.outcomes.total() - load.outcomes["complete"]
    assert failed <= {"replica": 8, "engine": 8, "gateway": 1000}[kind], load.outcomes


def test_sigterm_finishes_running_streams(replicas):
    """The last test of the file: it stops the service."""
    body = {"prompt": PROMPTS[0], "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}

    async def drained(session):
        tasks = [asyncio.create_task(ask(session, "/v1/completions", body)) for _ in range(6)]
        async with session.post("/v1/completions", json=body) as running:
            await running.content.readuntil(b"\n\n")
            replicas.processes.main.terminate()
            rest = (await running.read()).decode()
        return rest, await asyncio.gather(*tasks)

    rest, answers = replicas.run(drained)
    assert rest.endswith("data: [DONE]\n\n")
    for answer in answers:
        assert answer.status in (200, 503), answer
        assert answer.status == 503 or (answer.events[-1] == "[DONE]" and not any("error" in e for e in answer.events[:-1]))
    assert replicas.processes.main.wait(90) == 0
    wait_for(lambda: not replicas.processes.living(), 20, "ended")


def test_a_model_that_cannot_be_read_ends_the_command(tmp_path):
    processes = Processes(chunkattn("serve", "/nowhere/model", "--replicas", "2", "--port", str(free_port())), tmp_path / "log")
    try:
        assert processes.main.wait(60) == 2
        assert not processes.living()
    finally:
        processes.kill()
    assert "/nowhere/model" in processes.text().strip().splitlines()[-1]
    assert "Traceback" not in processes.text()
