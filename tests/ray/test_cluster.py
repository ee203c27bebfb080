"""The application on a cluster, behind Ray's HAProxy, deployed as the guide says."""

import asyncio
import copy
import os
import signal

import pytest

from tests.ray.cluster import wait_for
from tests.ray.conftest import ENGINE
from tests.ray.requests import ask
from tests.ray.test_answers import BODY
from tests.ray.updates import under_load, with_deployments

pytestmark = pytest.mark.slow

WHOLE_S = 30
"""Seconds until everything serves again. A loaded machine gets a multiple."""
STREAM = BODY | {"max_tokens": 400, "stream": True}


def test_a_document_is_forgotten_at_every_replica(cluster):
    """Calls to all replicas from one request."""
    documents = [{"text": "Rumi is a nurse."}]
    answer = cluster.ask("/v1/cache/forget", {"prefix": "Read. ", "documents": documents})
    assert answer.status == 200


def test_a_changed_user_config_reads_the_keys_again(cluster, config, key_file, load, stored):
    """No replica is replaced, and no request notices."""
    own = {"headers": {"Authorization": "Bearer carls-secret-key-of-32-characters"}}
    keys, before = key_file.read_text(), {d: cluster.replicas_of(d) for d in ("Gateway", "Engine")}
    assert cluster.ask("/v1/models", **own).status == 401

    def is_known():
        return all(cluster.ask("/v1/models", **own).status == 200 for _ in range(9))

    try:
        key_file.write_text(keys + "carl:carls-secret-key-of-32-characters\n")
        changed = with_deployments(config, {"Gateway": {"user_config": {"keys": 1}}})
        held = under_load(cluster, load, [(lambda: cluster.deploy(changed), lambda: is_known)])
    finally:
        key_file.write_text(keys)
    assert held.status == 200
    assert set(load.outcomes) == {"complete"}, load.outcomes
    cluster.wait_until_running()
    assert {d: cluster.replicas_of(d) for d in before} == before


def test_a_killed_gateway_comes_back(cluster, load, stored):
    (killed,) = cluster.processes.living("gateway")

    def is_done():
        living = cluster.processes.living("gateway")
        return len(living) == 1 and living != [killed] and cluster.is_whole()

    under_load(cluster, load, [(lambda: os.kill(killed, signal.SIGKILL), lambda: is_done)])
    assert set(load.outcomes) <= {"complete", "closed", "503", "500 of HAProxy"}, load.outcomes


def test_deletion_finishes_running_streams(cluster, config):
    async def deleted(session):
        tasks = [asyncio.create_task(ask(session, "/v1/completions", STREAM)) for _ in range(6)]
        async with session.post("/v1/completions", json=STREAM) as running:
            await running.content.readuntil(b"\n\n")
            await asyncio.to_thread(cluster.deploy, config | {"applications": []})
            rest = (await running.read()).decode()
        return rest, await asyncio.gather(*tasks)

    rest, answers = cluster.run(deleted)
    assert rest.endswith("data: [DONE]\n\n")
    assert '"error"' not in rest
    assert {a.status for a in answers} <= {200, 503, 404}
    assert all(a.events[-1] == "[DONE]" for a in answers if a.status == 200)
    wait_for(lambda: not any(cluster.processes.living(kind) for kind in ("replica", "gateway", "engine")), 90, "ended")


@pytest.mark.slow
def test_a_model_that_cannot_load_fails_the_deployment(cluster, config):
    """The last test of the cluster: it leaves no application."""
    changed = copy.deepcopy(config)
    changed["applications"][0]["args"]["engine"] = ENGINE | {"model": "/nowhere/model"}
    cluster.deploy(changed)
    wait_for(lambda: cluster.application().get("status") == "DEPLOY_FAILED", 120, "failed")
    text = cluster.application()["deployments"]["Engine"]["message"]
    print(text)
    reason = text.strip().splitlines()[-1]
    assert "/nowhere/model" in reason
    assert "the engine did not start" in reason
    cluster.deploy(config | {"applications": []})
