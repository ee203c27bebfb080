import importlib.util
import sys
import time
from pathlib import Path

import pytest

from tests.ray.cluster import Processes, chunkattn, free_port
from tests.ray.requests import Service

collect_ignore_glob = [] if importlib.util.find_spec("ray") else ["test_*.py"]
"""Ray has an extra of its own, which `make test` does not install."""
READY_S = 240
ENGINE = {"warmup": False, "kv_cache_memory_bytes": 32 << 20, "max_queued_requests": 32, "enable_chunk_aware": True}
KEYS = "anna:anna-secret-key-of-32-characters\nben:bens-secret-key-of-32-characters\n"


def flags(options):
    for name, value in options.items():
        name = name.replace("_", "-")
        yield from [f"--{name}"] if value is True else [f"--no-{name}"] if value is False else [f"--{name}", str(value)]


@pytest.fixture(scope="session")
def key_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(KEYS)
    return path


@pytest.fixture(scope="session")
def server_options(key_file):
    return {"api_key_file": key_file, "header_timeout_s": 1.5, "max_connections": 100}


@pytest.fixture(scope="session")
def bare(tmp_path_factory, server_options):
    """One server without Ray, with the options of the replicas."""
    service = start(tmp_path_factory.mktemp("bare"), ENGINE | server_options | {"report_documents": True})
    yield service
    stop(service)


@pytest.fixture(scope="session")
def replicas(tmp_path_factory, server_options):
    """Three replicas on one machine."""
    service = start(tmp_path_factory.mktemp("replicas"), ENGINE | server_options | {"replicas": 3, "drain_timeout_s": 60})
    yield service
    stop(service)


def start(folder, options):
    port = free_port()
    processes = Processes(chunkattn("serve", "--port", str(port), *flags(options)), folder / "log")
    try:
        processes.wait_for_line("is ready at", READY_S)
    except BaseException:
        processes.kill()
        raise
    return Service(f"http://127.0.0.1:{port}", processes)


def stop(service):
    try:
        if service.processes.main.poll() is None:
            service.processes.main.terminate()
            service.processes.main.wait(90)
    finally:
        until = time.monotonic() + 20  # Ray's helpers end when they notice
        while service.processes.living() and time.monotonic() < until:
            time.sleep(0.1)
        left = [Path(f"/proc/{n}/cmdline").read_bytes() for n in service.processes.living()]
        service.processes.kill()
    assert not left


def pytest_configure(config):
    assert sys.platform == "linux", "the tests read /proc"
