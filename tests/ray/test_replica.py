"""Ray stops a former replica when the constructor of its successor returns: not before that one takes requests."""

import asyncio
from functools import partial
from types import SimpleNamespace

import pytest

from chunkattn.errors import EngineDeadError
from chunkattn.integrations.ray import replica as module
from chunkattn.integrations.ray.replica import NOT_STARTED, Replica


@pytest.mark.parametrize("fails", [False, True])
def test_a_replica_has_started_when_it_takes_requests(fails, monkeypatch):
    monkeypatch.setattr(module, "_POLL_S", 0)
    states = ["starting", "warming", "degraded", "ready"]
    told = []

    def probe(*, warm):
        told.append(states[len(told)])
        return told[-1]

    llm = SimpleNamespace(state="failed" if fails else "ready", client=SimpleNamespace(reason="no memory"))
    made = SimpleNamespace(_state=SimpleNamespace(probe=probe), llm=llm)
    made.check_health = partial(Replica.check_health, made)
    if fails:
        with pytest.raises(EngineDeadError, match=f"{NOT_STARTED}.*no memory"):
            asyncio.run(Replica._wait_until_ready(made))
    else:
        asyncio.run(Replica._wait_until_ready(made))
        assert told == states


@pytest.mark.parametrize(
    ("status", "ready", "responsive"),
    [("ready", True, True), ("unresponsive", True, False), ("warming", False, True), ("draining", False, True)],
)
def test_a_report_tells_a_replica_in_a_long_step_from_one_that_takes_no_requests(status, ready, responsive):
    def told(since):
        models = {"adapters": ["a"], "decide_method": "letters"}
        return {"generation": "1", "capacity": 1, "held": [[7, 8]], "version": since + 1, **models}

    made = SimpleNamespace(_state=SimpleNamespace(probe=lambda *, warm: status, reports=SimpleNamespace(report=told)))
    report, version = asyncio.run(Replica.report(made, 4))
    assert (report.ready, report.responsive, report.held, version) == (ready, responsive, {7: 8}, 5)
    assert (report.adapters, report.decide_method) == (("a",), "letters")
