"""`python -m benchmarks.plan_ahead`: the simulated device computes a program once for each size."""

from argparse import Namespace

import pytest

from benchmarks import plan_ahead


@pytest.mark.ci
def test_a_step_takes_the_time_of_the_device(monkeypatch):
    made = []
    monkeypatch.setattr(plan_ahead, "Device", lambda runner: made.append(device(runner)) or made[-1])
    (row,) = plan_ahead.measure(Namespace(samples=[2], device_ms=[3.0], tokens=4, rounds=2))
    assert (row["samples"], row["device_ms"]) == (2, 3.0)
    assert min(row["now_ms"], row["ahead_ms"]) >= 3
    rows = {key[1][0] for key in made[0]._known if key[0] == "step"}
    assert len(rows) > 1
    assert {len(values[0]) for key, values in made[0]._known.items() if key[0] == "step"} == rows


device = plan_ahead.Device
