"""Runs `tests/parallel` in a process of eight virtual devices, since a process has one number of devices from its start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DEVICES = "--xla_force_host_platform_device_count=8"
# On two busy cores, eight devices may wait long for one another; XLA ends the process after 40 seconds by default.
PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=600"


@pytest.mark.parametrize(
    "tests",
    [
        "not ci and not slow",
        pytest.param("ci", marks=[pytest.mark.ci, pytest.mark.timeout(3600)]),
        pytest.param("slow", marks=[pytest.mark.slow, pytest.mark.timeout(14400)]),
    ],
)
def test_on_eight_devices(tests):
    flags = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES} {PATIENCE}"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-m", tests, "tests/parallel"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
