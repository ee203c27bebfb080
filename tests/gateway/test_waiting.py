"""Requests that no replica takes at the moment wait for one, as during an update of the replicas."""

import asyncio

import httpx
import pytest

from tests.gateway.rig import COMPLETE, Replica, answered_by, ask, rig, run, until
from tests.gateway.test_relay import refusal

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
        (refuses("engine_not_ready"), "engine_not_ready", 3),  # work may have begun: `max_tries` applies
    ],
    ids=["not ready", "killed", "draining", "engine died"],
)
def test_waiting_ends(change, code, calls):
    async def case():
        a = Replica()
        async with rig(a, replica_wait_s=0.3, max_tries=3) as made:
            change(a)
            if change is not_ready:
                await made.ready()
            answer = await made.http.post(COMPLETE, json=ask())
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, code)
            assert calls in (None, len(a.calls))

    run(case)


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
