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
