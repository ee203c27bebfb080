"""The application on a cluster, behind Ray's HAProxy, deployed as the guide says."""

import asyncio
import copy
import os
import re
import signal

import pytest

from tests.ray.cluster import wait_for
from tests.ray.conftest import ENGINE
from tests.ray.requests import ask
from tests.ray.test_replicas import BODY, SAME, plain
from tests.ray.updates import under_load, with_deployments

pytestmark = pytest.mark.slow

WHOLE_S = 30
"""Seconds until everything serves again. A loaded machine gets a multiple."""
STREAM = BODY | {"max_tokens": 400, "stream": True}


@pytest.mark.parametrize("case", [case for case in SAME if case != "head of 70 kB"])
def test_an_answer_equals_that_of_a_bare_server(case, cluster, bare):
    path, body, options = SAME[case]
    wanted, found = bare.ask(path, body, **options), cluster.ask(path, body, **options)
    assert plain(found) == plain(wanted)


def test_a_long_head_is_refused(cluster):
    answer = cluster.ask("/v1/models", headers={"X-Long": "a" * 70_000})
    assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_http")


def test_the_request_id_is_the_clients_and_stands_once(cluster):
    answer = cluster.ask("/v1/completions", BODY, headers={"X-Request-Id": "mine"})
    assert answer.headers.getall("X-Request-Id") == ["mine"]
    assert len(cluster.ask("/v1/models").headers.getall("X-Request-Id")) == 1


def test_one_scrape_has_the_metrics_of_every_replica(cluster):
    def names():
        text = cluster.ask("/metrics").body.decode()
        return set(re.findall(r'^chunkattn_http_requests_now{replica="(?!gateway")([^"]*)"', text, re.MULTILINE))

    assert names() == cluster.replicas_of("Engine")
    assert len(names()) == 2


def test_a_document_is_forgotten_at_every_replica(cluster):
    """Calls to all replicas from one request."""
    documents = [{"text": "Rumi is a nurse."}]
    answer = cluster.ask("/v1/cache/forget", {"prefix": "Read. ", "documents": documents})
    assert answer.status == 200


def test_a_full_queue_is_a_429(cluster):
    async def crowd(session):
        bodies = [BODY | {"prompt": f"{n} is", "max_tokens": 200} for n in range(99)]
        return await asyncio.gather(*[ask(session, "/v1/completions", b) for b in bodies])

    answers = cluster.run(crowd)
    assert {a.status for a in answers} == {200, 429}


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
