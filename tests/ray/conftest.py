import importlib.util
import sys
import time
from pathlib import Path

import pytest

from tests.ray import serve_cluster
from tests.ray.cluster import Processes, chunkattn, free_port
from tests.ray.requests import Load, Service

collect_ignore_glob = [] if importlib.util.find_spec("ray") else ["*.py"]
"""Ray has an extra of its own, which `make test` does not install."""
READY_S = 240
ENGINE = {"warmup": False, "kv_cache_memory_bytes": 32 << 20, "max_queued_requests": 32, "enable_chunk_aware": True}
PROMPTS = [
    f"{name} is a {job}. What is the job of {name}? Answer:" for name in ("Rumi", "Ada", "Ben") for job in ("poet", "nurse")
]
DOCUMENT = {"id": "kept", "text": "Rumi is a poet."}
CHUNKS = {"prefix": "Read. ", "documents": [{"id": "kept"}], "question": "Who?"}
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
    return {"api_key_file": key_file, "header_timeout_s": 1.5, "max_connections": 160}


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


@pytest.fixture(scope="module")
def config(tmp_path_factory, key_file):
    """Configuration of the application of `cluster`."""
    return serve_cluster.configuration(
        free_port(),
        engine=ENGINE,
        server={"api_key_file": str(key_file), "request_timeout_s": 300},
        gateway={"document_store": str(tmp_path_factory.mktemp("documents") / "store")},
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, config):
    """The application with two replicas on a Ray cluster."""
    made = serve_cluster.start(tmp_path_factory.mktemp("cluster") / "log", config)
    try:
        yield made
    finally:
        stop(made)
        made.remove_files()


@pytest.fixture
def load(bare):
    """Requests with the answers of a bare server."""
    body = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    return Load({prompt: bare.ask("/v1/completions", body | {"prompt": prompt}).text for prompt in PROMPTS})


@pytest.fixture
def stored(cluster, load):
    """Store a document, which some of the requests name by its id, and check at the end that the id is still known."""
    assert cluster.ask("/v1/cache/documents", {"prefix": "Read. ", "documents": [DOCUMENT]}).status == 200
    load.chunks = CHUNKS
    yield
    assert cluster.ask("/v1/completions", {"chunks": CHUNKS, "max_tokens": 1}).status == 200, "a stored id is lost"
    assert [d["id"] for d in cluster.ask("/v1/cache/documents").json["data"]] == ["kept"]


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
