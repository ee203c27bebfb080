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
FILES = sorted(path.name for path in (ROOT / "tests" / "parallel").glob("test_*.py"))
QUICK, IN_CI = ("test_refusals.py",), ("test_loading.py", "test_store.py")


def run(tests, *files):
    flags = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES} {PATIENCE}"
    paths = [f"tests/parallel/{file}" for file in files] or ["tests/parallel"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-m", tests, *paths]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.ci
def test_on_eight_devices():
    run("not ci and not slow")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "file",
    [pytest.param(file, marks=pytest.mark.ci if file in IN_CI else pytest.mark.slow) for file in FILES if file not in QUICK],
)
def test_at_more_length(file):
    run("ci and not slow", file)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("file", ["test_company.py", "test_engines.py", "test_parity.py", "test_programs.py"])
def test_at_full_length(file):
    run("slow", file)
