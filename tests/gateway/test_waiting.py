"""Requests that no replica takes at the moment wait for one, as during an update of the replicas."""

import asyncio

import httpx
import pytest

from tests.gateway.rig import COMPLETE, Call, Replica, answered_by, ask, rig, run, until
from tests.gateway.test_relay import die, refusal

FORGET = {"prefix": "Read.", "documents": ["Ana"]}
STORE = FORGET | {"documents": [{"id": "one", "text": "Ana"}]}
ROUTES = {
    "completion": (COMPLETE, ask()),
    "stream": (COMPLETE, ask(stream=True)),
    "forget": ("/v1/cache/forget", FORGET),
    "store": ("/v1/cache/documents", STORE),
}


async def accept(call):
    """Answer as every route expects it."""
    await call.reply(data=[{"id": "one", "tokens": 1, "prefix_tokens": 1, "bytes": 1}])


def not_ready(replica):
    replica.report = {**replica.report, "ready": False}


def ready(replica):
    replica.report = {**replica.report, "ready": True}


def refuses(code):
    def change(replica):
        replica.answer = refusal(503, code)

    return change


def accepts(replica):
    replica.answer = accept


CHANGES = {
    "not ready": (not_ready, ready),
    "killed": (Replica.kill, Replica.open),
    "starting": (refuses("server_starting"), accepts),
    "degraded": (refuses("server_degraded"), accepts),
    "draining": (refuses("server_draining"), accepts),
}
"""Change after which the only replica takes no request, and the change that ends that."""
CASES = [
    (change, route)
    for change in CHANGES
    for route in ROUTES
    if change != "not ready" or route in ("completion", "stream")  # documents are sent to it all the same
]


async def is_waiting(made, count=1):
    await until(lambda: made.gateway.metrics.waiting._value.get() == count)


@pytest.mark.parametrize(("change", "route"), CASES)
def test_a_request_waits_for_the_only_replica(change, route):
    async def case():
        a, (begin, end) = Replica(), CHANGES[change]
        a.answer = accept
        async with rig(a, replica_wait_s=30) as made:
            begin(a)
            if change == "not ready":
                await made.ready()
            path, body = ROUTES[route]
            asked = asyncio.create_task(made.http.post(path, json=body))
            await asyncio.sleep(0.3)
            assert not asked.done()
            if (ended := end(a)) is not None:
                await ended
            assert (await asked).status_code == 200

    run(case)


def test_a_request_goes_to_the_new_replica_when_the_old_one_refuses():
    """The gateway does not know yet that the new replica is ready."""

    async def case():
        old, new = Replica("old"), Replica("new")
        not_ready(new)
        async with rig(old, new, wait=False, report_period_s=60, replica_wait_s=30) as made:
            await made.ready(old)
            old.answer = refusal(503, "server_draining")
            asked = asyncio.create_task(made.http.post(COMPLETE, json=ask()))
            await is_waiting(made)
            ready(new)
            assert answered_by(await asked) == new.port

    run(case)


@pytest.mark.parametrize(
    ("change", "code", "calls"),
    [
        (not_ready, "no_replica", 0),
        (Replica.kill, "engine_not_ready", 0),
        (refuses("server_draining"), "server_draining", None),
        (refuses("engine_not_ready"), "engine_not_ready", 1),  # work may have begun, and killed the engine
    ],
    ids=["not ready", "killed", "draining", "engine died"],
)
def test_waiting_ends(change, code, calls):
    async def case():
        a = Replica()
        period = 0.05 if change is not_ready else 60  # the gateway learns of the other changes from the request
        async with rig(a, replica_wait_s=0.3, max_tries=3, report_period_s=period) as made:
            change(a)
            if change is not_ready:
                await made.ready()
            answer = await made.http.post(COMPLETE, json=ask())
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, code)
            assert calls in (None, len(a.calls))

    run(case)


@pytest.mark.parametrize("end", [die, refusal(503, "engine_not_ready")], ids=["reset", "engine died"])
def test_no_replica_gets_a_request_twice_that_may_have_killed_it(monkeypatch, end):
    monkeypatch.setattr("chunkattn.gateway.http_replicas._IDLE_CLOSE_S", -1.0)

    async def case():
        a, b = Replica("a"), Replica("b")
        a.answer = b.answer = end
        async with rig(a, b, replica_wait_s=1000, max_tries=9) as made:
            answer = await made.http.post(COMPLETE, json=ask())
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_not_ready")
            assert [len(a.calls), len(b.calls)] == [1, 1]

    run(case)


def test_a_replica_that_refuses_is_asked_again_with_pauses():
    async def case():
        a = Replica()
        a.answer = refusal(503, "server_draining")
        async with rig(a, replica_wait_s=0.6) as made:
            assert (await made.http.post(COMPLETE, json=ask())).status_code == 503
            assert 2 <= len(a.calls) <= 4, "pauses of 0.1 s, 0.2 s and the rest"

    run(case)


WAITS = {
    "answered at last": (lambda replica: setattr(replica, "answer", accept), 30, 200),
    "no replica": (lambda replica: None, 0.3, 503),
}


@pytest.mark.parametrize("ends", WAITS)
@pytest.mark.parametrize("begin", [not_ready, refuses("server_draining")], ids=["not ready", "draining"])
def test_the_log_has_the_wait(caplog, ends, begin):
    async def case():
        a, (end, wait_s, status) = Replica(), WAITS[ends]
        async with rig(a, replica_wait_s=wait_s, server={"slow_request_s": 0.001}) as made:
            begin(a)
            if begin is not_ready:
                await made.ready()
            asked = asyncio.create_task(made.http.post(COMPLETE, json=ask()))
            await asyncio.sleep(0.2)
            end(a)
            if status == 200:
                ready(a)
            assert (await asked).status_code == status

    caplog.set_level("INFO", "chunkattn.server.access")
    run(case)
    fields = next(record.request for record in caplog.records if record.name == "chunkattn.server.access")
    assert fields["seconds"] / 2 < fields["wait_s"] <= fields["seconds"]
    assert fields["slow"] == "wait"


def test_a_full_replica_is_not_waited_for():
    async def case():
        a = Replica()
        a.answer = refusal(429, "queue_full")
        async with rig(a, replica_wait_s=30) as made:
            answer = await made.http.post(COMPLETE, json=ask())
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
            assert len(a.calls) == 1

    run(case)


def test_a_waiting_client_may_leave():
    async def case():
        a = Replica()
        not_ready(a)
        async with rig(a, wait=False, replica_wait_s=30) as made:
            with pytest.raises(httpx.ReadTimeout):
                await made.http.post(COMPLETE, json=ask(), timeout=0.3)
            await is_waiting(made, 0)
            assert made.gateway.state.metrics.running == 0

    run(case)


@pytest.mark.parametrize("answers", [True, False], ids=["refuses", "silent"])
def test_forgetting_ends_in_time_and_names_who_has_not_answered(answers):
    async def case():
        a, b = Replica("a"), Replica("b")
        a.answer, b.answer = accept, refusal(503, "server_draining") if answers else Call.wait_until_left
        async with rig(a, b, replica_wait_s=1000, server={"request_timeout_s": 0.3}) as made:
            answer = await made.http.post("/v1/cache/forget", json=FORGET)
            assert answer.status_code == 503
            assert f"still hold the documents: {b.url};" in answer.json()["error"]["message"]

    run(case)


def test_a_client_may_leave_while_replicas_forget():
    async def case():
        a = Replica()
        a.answer = Call.wait_until_left
        async with rig(a) as made:
            with pytest.raises(httpx.ReadTimeout):
                await made.http.post("/v1/cache/forget", json=FORGET, timeout=0.3)
            await until(lambda: a.calls[0].left.is_set())
            await until(lambda: made.gateway.state.metrics.running == 0)

    run(case)
