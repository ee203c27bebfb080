"""Decisions by the default method go to the replicas that take the method of most; a method by name goes to any."""

import pytest

from chunkattn.gateway import watch
from chunkattn.schema.parts import decides_by_default
from tests.gateway.rig import COMPLETE, Replica, answered_by, rig, run, until

DECISIONS, SYSTEM_ONE = "/v1/decisions", "/v1/systemone"
QUESTIONS = [{"type": "predicate", "instructions": "Ana likes figs."}]


def replicas(*methods):
    """Return replicas that report these default methods."""
    made = [Replica(str(number)) for number in range(len(methods))]
    for replica, method in zip(made, methods, strict=True):
        replica.report = {**replica.report, "decide_method": method}
    return made


async def decide(made, text, **fields):
    return await made.http.post(DECISIONS, json={"input": text, "questions": QUESTIONS, **fields})


@pytest.mark.parametrize(
    ("methods", "asked"),
    [
        (["likelihood", "letters", "likelihood"], {0, 2}),
        (["likelihood", "letters"], {1}),
        (["likelihood", None, "letters", "likelihood"], {0, 1, 3}),
        (["head", "head"], {0, 1}),
    ],
)
def test_replicas_of_another_method_get_no_decisions_by_default(methods, asked, caplog):
    async def case():
        listed = replicas(*methods)
        async with rig(*listed) as made:
            ports = {replica.port: number for number, replica in enumerate(listed)}
            for send in (
                lambda text: decide(made, text),
                lambda text: decide(made, text, method="auto"),
                lambda text: made.http.post(SYSTEM_ONE, json={"state": text, "questions": {}}),
                lambda text: made.http.get("/v1/models"),
            ):
                answers = [await send(f"state {number} " * 50) for number in range(24)]
                assert {ports[answered_by(answer)] for answer in answers} == asked
            for send in (
                lambda text: decide(made, text, method="letters"),
                lambda text: made.http.post(COMPLETE, json={"prompt": text}),
            ):
                answers = [await send(f"other {number} " * 50) for number in range(24)]
                assert {ports[answered_by(answer)] for answer in answers} == {*range(len(methods))}
            told = (await made.http.get("/health")).json()["replicas"]
            assert [told[replica.url]["decide_method"] for replica in listed] == methods
        odd = {replica.url for number, replica in enumerate(listed) if number not in asked}
        warned = [record.getMessage() for record in caplog.records if "by another method" in record.getMessage()]
        assert bool(warned) == bool(odd)
        assert not odd or all(url in warned[-1] for url in odd)

    run(case)


def test_a_method_does_not_change_while_its_replicas_are_gone():
    async def case():
        a, b, c = replicas("letters", "letters", "likelihood")
        async with rig(a, b, c) as made:
            a.kill()
            b.kill()
            await made.ready(c)
            refused = await decide(made, "one")
            assert refused.status_code == 503
            assert "no replica that decides by letters, as most do, takes requests" in refused.json()["error"]["message"]
            assert (await decide(made, "one", method="letters")).status_code == 200
            assert answered_by(await made.http.get("/v1/models")) == c.port
            await a.open()
            await made.ready(a, c)
            assert answered_by(await decide(made, "one")) == a.port
            c.report = {**c.report, "decide_method": "letters"}
            await until(lambda: not made.gateway.watch.deciding_otherwise())
            assert {answered_by(await decide(made, f"two {number} " * 50)) for number in range(24)} == {a.port, c.port}

    run(case)


def test_replicas_that_stay_away_have_no_say(monkeypatch):
    monkeypatch.setattr(watch, "_GONE_S", 0.2)

    async def case():
        a, b, c = replicas("letters", "letters", "likelihood")
        async with rig(a, b, c) as made:
            a.kill()
            b.kill()
            await until(lambda: made.gateway.watch.decide_method == "likelihood")
            assert answered_by(await decide(made, "one")) == c.port

    run(case)


def test_late_replicas_of_the_method_are_asked_rather_than_ready_ones_of_another():
    async def case():
        a, b, c = replicas("letters", "letters", "likelihood")
        async with rig(a, b, c, report_period_s=60) as made:
            for late in (a, b):
                made.gateway.watch.states[late.url].lost = True
            assert made.gateway.watch.candidates() == [c.url]
            assert {*made.gateway.watch.candidates(others=made.gateway.watch.deciding_otherwise())} == {a.url, b.url}

    run(case)


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (DECISIONS, {}, True),
        (f"/root{SYSTEM_ONE}", {"method": "auto"}, True),
        (DECISIONS, {"method": "letters"}, False),
        (COMPLETE, {}, False),
        (DECISIONS, [], False),
        ("/other", {}, False),
    ],
)
def test_which_bodies_leave_the_method_to_the_replica(path, body, expected):
    assert decides_by_default(path, body) is expected
