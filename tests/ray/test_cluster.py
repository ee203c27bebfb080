"""The application on a cluster, behind Ray's HAProxy, deployed as the guide says."""

import asyncio
import copy
import json
import os
import re
import signal
import time

import aiohttp
import pytest

from tests.ray.cluster import free_port, wait_for
from tests.ray.conftest import ENGINE, stop
from tests.ray.requests import Answer, Load, ask
from tests.ray.serve_cluster import configuration, start
from tests.ray.test_replicas import BODY, SAME, plain

pytestmark = pytest.mark.slow

WHOLE_S = 30
"""Seconds until everything serves again. A loaded machine gets a multiple."""
UPDATE_S = 240
PROMPTS = [f"{name} is a {job}. What is the job of {name}? Answer:" for name in ("Rumi", "Ada") for job in ("poet", "nurse")]
STREAM = BODY | {"max_tokens": 400, "stream": True}
DOCUMENT = {"id": "kept", "text": "Rumi is a poet."}
CHUNKS = {"prefix": "Read. ", "documents": [{"id": "kept"}], "question": "Who?"}


@pytest.fixture(scope="session")
def config(tmp_path_factory, key_file):
    return configuration(
        free_port(),
        engine=ENGINE,
        server={"api_key_file": str(key_file), "request_timeout_s": 300},
        gateway={"document_store": str(tmp_path_factory.mktemp("documents") / "store")},
    )


@pytest.fixture(scope="session")
def cluster(tmp_path_factory, config):
    made = start(tmp_path_factory.mktemp("cluster") / "log", config)
    try:
        yield made
    finally:
        stop(made)
        made.remove_files()


@pytest.fixture
def load(bare):
    body = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    return Load({prompt: bare.ask("/v1/completions", body | {"prompt": prompt}).text for prompt in PROMPTS})


@pytest.fixture
def stored(cluster):
    """Store a document, and check at the end of the test that its id is still known."""
    assert cluster.ask("/v1/cache/documents", {"prefix": "Read. ", "documents": [DOCUMENT]}).status == 200
    yield
    assert cluster.ask("/v1/completions", {"chunks": CHUNKS, "max_tokens": 1}).status == 200, "a stored id is lost"
    assert [d["id"] for d in cluster.ask("/v1/cache/documents").json["data"]] == ["kept"]


def under_load(cluster, load, change, is_done, seconds):
    """Run 6 clients while `change` takes effect, and hold a request that began before until it has."""

    async def main(session):
        clients = [asyncio.create_task(load.client(session, seed)) for seed in range(6)]

        async def until(count):
            while load.outcomes["complete"] < count:
                await asyncio.sleep(0.05)
                for client in clients:
                    assert not client.done(), client.exception()

        await until(20)
        held, go = await hold(session)
        began = time.monotonic()
        await asyncio.to_thread(change)
        while not await asyncio.to_thread(is_done):
            assert time.monotonic() - began < seconds, load.outcomes
            await asyncio.sleep(0.2)
        print(f"took {time.monotonic() - began:.1f} s, {dict(load.outcomes)}")
        await until(load.outcomes["complete"] + 20)
        load.stopped = True
        await asyncio.gather(*clients)  # every request ends
        go.set()
        return (await asyncio.gather(held, return_exceptions=True))[0]

    answer = cluster.run(main)
    assert not load.wrong
    return answer


async def hold(session):
    """Send a request but for the end of its body. Return the task of its answer, and the event that ends the body."""
    body, go, begun = json.dumps(BODY).encode(), asyncio.Event(), asyncio.Event()

    async def parts():
        yield body[:9]
        begun.set()
        await go.wait()
        yield body[9:]

    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    timeout = aiohttp.ClientTimeout(total=2 * UPDATE_S)

    async def send():
        async with session.post("/v1/completions", data=parts(), headers=headers, timeout=timeout) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    task = asyncio.create_task(send())
    await begun.wait()
    return task, go


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
        held = under_load(cluster, load, lambda: cluster.deploy(changed), is_known, WHOLE_S * 4)
    finally:
        key_file.write_text(keys)
    assert held.status == 200
    assert set(load.outcomes) == {"complete"}, load.outcomes
    cluster.wait_until_running()
    assert {d: cluster.replicas_of(d) for d in before} == before


def test_a_new_gateway_takes_over_the_stored_documents(cluster, config, load, stored):
    """The former gateway still answers a request then: it holds neither the update nor the stored documents."""
    changed = with_deployments(config, {"Gateway": {"ray_actor_options": {"num_cpus": 0.01}}})
    held = under_load(cluster, load, lambda: cluster.deploy(changed), replaced(cluster, "Gateway"), UPDATE_S)
    assert held.status == 200
    assert set(load.outcomes) <= {"complete", "503"}, load.outcomes


@pytest.mark.slow
def test_a_changed_option_replaces_all_replicas(cluster, config, load, stored):
    changed = copy.deepcopy(config)
    changed["applications"][0]["args"]["engine"] = ENGINE | {"max_queued_requests": 33}
    held = under_load(cluster, load, lambda: cluster.deploy(changed), replaced(cluster, "Gateway", "Engine"), UPDATE_S)
    assert held.status == 200
    assert set(load.outcomes) <= {"complete", "503"}, load.outcomes


def with_deployments(config, options):
    changed = copy.deepcopy(config)
    changed["applications"][0]["deployments"] = [{"name": name} | given for name, given in options.items()]
    return changed


def replaced(cluster, *deployments):
    """Return a function that tells whether the deployments have new replicas alone, and everything serves."""
    before = {name: cluster.replicas_of(name) for name in deployments}

    def is_done():
        state = cluster.application()
        assert state["status"] != "DEPLOY_FAILED", state["message"]
        new = {name: cluster.replicas_of(name) for name in before}
        return all(len(new[n]) == len(before[n]) and not new[n] & before[n] for n in before) and cluster.is_whole()

    return is_done


def test_a_killed_gateway_comes_back(cluster, load, stored):
    (killed,) = cluster.processes.living("gateway")

    def is_done():
        living = cluster.processes.living("gateway")
        return len(living) == 1 and living != [killed] and cluster.is_whole()

    under_load(cluster, load, lambda: os.kill(killed, signal.SIGKILL), is_done, WHOLE_S * 4)
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
