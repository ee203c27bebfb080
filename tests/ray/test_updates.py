"""Updates of a cluster under load: no request is lost, and no stored document."""

import copy
from functools import partial

import pytest

from tests.ray.cluster import free_port
from tests.ray.conftest import ENGINE, stop
from tests.ray.requests import Load
from tests.ray.serve_cluster import configuration, start
from tests.ray.updates import replaced, under_load, with_deployments

PROMPTS = [f"{name} is a {job}. What is the job of {name}? Answer:" for name in ("Rumi", "Ada") for job in ("poet", "nurse")]
DOCUMENT = {"id": "kept", "text": "Rumi is a poet."}
CHUNKS = {"prefix": "Read. ", "documents": [{"id": "kept"}], "question": "Who?"}


@pytest.fixture(scope="module")
def config(tmp_path_factory, key_file):
    return configuration(
        free_port(),
        engine=ENGINE,
        server={"api_key_file": str(key_file), "request_timeout_s": 300},
        gateway={"document_store": str(tmp_path_factory.mktemp("documents") / "store")},
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, config):
    made = start(tmp_path_factory.mktemp("cluster") / "log", config)
    try:
        yield made
    finally:
        stop(made)
        made.remove_files()


@pytest.fixture
def load(cluster):
    body = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    return Load({prompt: cluster.ask("/v1/completions", body | {"prompt": prompt}).text for prompt in PROMPTS})


@pytest.fixture
def stored(cluster):
    """Store a document, and check at the end of the test that its id is still known."""
    assert cluster.ask("/v1/cache/documents", {"prefix": "Read. ", "documents": [DOCUMENT]}).status == 200
    yield
    assert cluster.ask("/v1/completions", {"chunks": CHUNKS, "max_tokens": 1}).status == 200, "a stored id is lost"
    assert [d["id"] for d in cluster.ask("/v1/cache/documents").json["data"]] == ["kept"]


@pytest.mark.slow
def test_ten_updates_lose_no_request(cluster, config, load, stored):
    changes = []
    for number in range(10):
        cpus = {"ray_actor_options": {"num_cpus": 0.9 - number / 100}}
        changed = with_deployments(config, {"Engine": cpus})
        changes.append((partial(cluster.deploy, changed), partial(replaced, cluster, "Engine")))
    under_load(cluster, load, changes, holds=False)
    assert set(load.outcomes) == {"complete"}, load.outcomes


def test_an_update_of_everything_loses_no_request(cluster, config, load, stored):
    changed = copy.deepcopy(config)
    changed["applications"][0]["args"]["engine"] = ENGINE | {"max_queued_requests": 33}
    held = under_load(cluster, load, [(partial(cluster.deploy, changed), partial(replaced, cluster, "Gateway", "Engine"))])
    assert held.status == 200
    assert set(load.outcomes) == {"complete"}, load.outcomes
