"""Probes, metrics and reports while the engine answers nothing, because it compiles, computes or hangs."""

import asyncio

import httpx
import pytest

from chunkattn.gateway.replica_metrics import ReplicaMetrics
from chunkattn.gateway.replicas import ReplicaGoneError
from chunkattn.remote import messages as wire
from chunkattn.schema.piece_keys import keys_of
from chunkattn.server.app import create_app
from chunkattn.web.options import ServerConfig

pytest_plugins = ["tests.told_engine"]

COMPILING, IDLE = wire.Heartbeat(30.0, "compiling"), wire.Heartbeat(0.0, None)


def stepping(seconds):
    return wire.Heartbeat(seconds, None)


class Blocked:
    """An engine that takes messages and answers none before `answer`."""

    def __init__(self, client):
        self.client, self.queries = client, []

    def send(self, messages):
        self.queries += [message.query_id for message in messages if hasattr(message, "query_id")]

    def answer(self, value):
        while self.queries:
            self.client._take(wire.Reply(self.queries.pop(0), value))


@pytest.fixture
def blocked(llm):
    llm.client._worker = Blocked(llm.client)
    return llm.client._worker


def serve(llm, case, **options):
    async def bounded():
        transport = httpx.ASGITransport(create_app(llm, ServerConfig(**options)))
        async with asyncio.timeout(60), httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await case(client)

    asyncio.run(bounded())


def test_metrics_are_the_last_known_ones_until_the_engine_answers(llm, blocked):
    async def case(client):
        assert "chunkattn_steps_total" not in (await client.get("/metrics")).text
        llm.client._take(wire.Snapshot("chunkattn_steps_total 1.0\n"))
        for _ in range(2):
            text = (await client.get("/metrics")).text
            assert "chunkattn_steps_total 1.0" in text
            assert "chunkattn_http_requests_now" in text
            assert float(text.partition("\nchunkattn_engine_metrics_age_seconds ")[2].partition("\n")[0]) > 0
        assert len(blocked.queries) == 1  # readers share one question
        blocked.answer("chunkattn_steps_total 2.0\n")
        await asyncio.sleep(0)
        llm.client._beat = COMPILING
        text = (await client.get("/metrics")).text
        assert "chunkattn_steps_total 2.0" in text
        assert "chunkattn_engine_compiling_seconds 30.0" in text

    serve(llm, case)


def test_metrics_of_an_engine_that_ends_are_the_servers_alone(llm, blocked):
    async def case(client):
        llm.client._take(wire.Snapshot("chunkattn_steps_total 1.0\n"))
        llm.client.state = "restarting"
        text = (await client.get("/metrics")).text
        assert "chunkattn_steps_total" not in text
        assert "chunkattn_http_requests_now" in text

    serve(llm, case)


def test_a_new_engine_has_no_metrics_of_the_one_before(llm, blocked, monkeypatch):
    async def case(client):
        llm.client._take(wire.Snapshot("chunkattn_steps_total 1.0\n"))
        await client.get("/metrics")  # waits for an answer still

        def refuse(context):
            raise OSError

        monkeypatch.setattr("chunkattn.remote.supervisor.WorkerProcess", refuse)
        await llm.client._run_worker(None)
        llm.client._worker, llm.client.state = blocked, "ready"
        text = (await client.get("/metrics")).text
        assert "chunkattn_steps_total" not in text
        assert len(blocked.queries) == 2, "the new engine is asked"

    serve(llm, case)


@pytest.mark.parametrize(
    ("beat", "silence", "longest", "status"),
    [
        (IDLE, 0.0, 0.0, "ready"),
        (IDLE, 4.0, 0.0, "ready"),
        (IDLE, 7.0, 0.0, "unresponsive"),
        (COMPILING, 0.0, 0.0, "ready"),
        (COMPILING, 7.0, 0.0, "unresponsive"),
        (stepping(14.0), 0.0, 0.0, "ready"),  # the first long step
        (stepping(16.0), 0.0, 0.0, "unresponsive"),
        (stepping(28.0), 0.0, 9.0, "unresponsive"),
        (stepping(28.0), 0.0, 10.0, "ready"),  # steps of this machine are slow
        (stepping(31.0), 0.0, 25.0, "unresponsive"),  # half of engine_hang_timeout_s
    ],
)
def test_probes_say_that_the_engine_does_not_answer(llm, blocked, beat, silence, longest, status):
    async def case(client):
        llm.client._beat, llm.client._silence, llm.client._longest_step_s = beat, silence, longest
        for path in ("/readyz", "/health"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["status"]) == (200 if status == "ready" else 503, status)
            assert ("reason" in answer.json()) == (status != "ready")
            assert answer.json().get("compiling_s") == (30.0 if beat is COMPILING else None)
        if status == "unresponsive":
            assert "unresponsive_after_s is 5" in answer.json()["reason"]
        assert (await client.get("/livez")).status_code == 200
        report = (await client.get("/v1/cache/report")).json()
        assert report["ready"], "it takes requests meanwhile"
        assert report["responsive"] == (status == "ready")

    serve(llm, case, report_documents=True)


def test_the_longest_step_is_learned_from_heartbeats(llm):
    client = llm.client
    for seconds, busy in ((2.0, None), (6.0, None), (0.1, None), (9.0, "compiling"), (0.2, None), (3.0, None), (0.0, None)):
        client._take(wire.Heartbeat(seconds, busy))
    assert client._longest_step_s == 6.0


def test_a_report_does_not_wait_for_the_engine(llm, blocked):
    async def case(client):
        keys = keys_of("/v1/completions", {"chunks": {"prefix": "Read.", "documents": ["Ana lives."], "question": "Where?"}})
        with client._transport.app.state.server.reports.sent(keys):
            assert (await client.get("/v1/cache/report")).json()["held"] == [list(piece) for piece in reversed(keys.pieces)]
        assert not blocked.queries

    serve(llm, case, report_documents=True)


def test_a_replica_that_is_slow_has_its_last_metrics():
    class Fake:
        def __init__(self):
            self.stuck = asyncio.Event()
            self.texts = {"a": "x 1\n", "b": "x 2\n"}

        async def metrics(self, name):
            if name == "b" and self.stuck.is_set():
                await asyncio.sleep(1000)
            if name not in self.texts:
                raise ReplicaGoneError(name)
            return self.texts[name]

    async def main():
        replicas = Fake()
        reader = ReplicaMetrics(replicas, timeout_s=1000)
        assert await reader.read(["a", "b"]) == replicas.texts
        replicas.stuck.set()
        replicas.texts["a"] = "x 3\n"
        assert await reader.read(["a", "b"]) == {"a": "x 3\n", "b": "x 2\n"}
        del replicas.texts["a"]
        assert await reader.read(["a", "b"]) == {"a": "", "b": "x 2\n"}
        assert await reader.read([]) == {}
        await reader.close()

    asyncio.run(main())
