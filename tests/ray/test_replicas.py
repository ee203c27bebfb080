"""Three replicas on one machine answer as one server does."""

import asyncio
import json
import re
import signal
import socket
from pathlib import Path

import grpc
import pytest

from tests.ray.cluster import wait_for
from tests.ray.requests import ask

PROMPT = "Rumi is a poet. What is the job of Rumi? Answer:"
BODY = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
JOB = {"prompt": PROMPT, "max_tokens": 400, "n": 8, "temperature": 1, "ignore_eos": True, "stream": True}
CHUNKS = {"prefix": "Read.", "documents": ["Rumi is a poet.", "Ada is a nurse."], "question": "What is the job of Ada? Answer:"}
JSON = {"Content-Type": "application/json"}

SAME = {
    "completion": ("/v1/completions", BODY, {}),
    "stream": ("/v1/completions", BODY | {"stream": True}, {}),
    "chunks": ("/v1/completions", {"chunks": CHUNKS, "max_tokens": 8, "temperature": 0}, {}),
    "several": ("/v1/completions", BODY | {"prompt": [PROMPT, "Ada is"], "n": 2}, {}),
    "score": ("/v1/score", {"query": "Rumi is a", "items": [" poet", " nurse"], "labels": [" yes", " no"]}, {}),
    "models": ("/v1/models", None, {}),
    "head": ("/v1/models", None, {"method": "HEAD"}),
    "schema": ("/openapi.json", None, {}),
    "no route": ("/nothing", None, {}),
    "wrong method": ("/v1/completions", None, {"method": "GET"}),
    "no JSON": ("/v1/completions", b'{"prompt":', {}),
    "unknown field": ("/v1/completions", BODY | {"max_token": 3}, {}),
    "unknown model": ("/v1/completions", BODY | {"model": "other"}, {}),
    "too long": ("/v1/completions", BODY | {"prompt": "word " * 4000}, {}),
    "6 MiB": ("/v1/completions", json.dumps({"prompt": "a " * (3 << 20)}).encode(), {}),
    "9 MiB": ("/v1/completions", json.dumps({"prompt": "a " * (9 << 19)}).encode(), {}),
    "no key": ("/v1/completions", BODY, {"headers": {"Authorization": ""}}),
    "wrong key": ("/v1/completions", BODY, {"headers": {"Authorization": "Bearer none"}}),
    "head of 60 kB": ("/v1/models", None, {"headers": {"X-Long": "a" * 60_000}}),
    "head of 70 kB": ("/v1/models", None, {"headers": {"X-Long": "a" * 70_000}}),
    "compressed": ("/v1/completions", b"no zstd", {"headers": {"Content-Encoding": "zstd"}}),
}


def plain(answer):
    """Return what two servers must agree on: not ids, times, and headers of the connection."""
    changing = rb'"(id|created|release_date|started)": ?("[^"]*"|\d+)'
    body = re.sub(changing, b"", answer.body)
    names = ("content-type", "retry-after", "www-authenticate", "allow", "x-content-type-options", "cache-control")
    if answer.headers.get("content-type", "").startswith("text/event-stream"):  # how many tokens an event holds is chance
        body = answer.text, answer.events[-1]
    return answer.status, body, {n: answer.headers.getall(n, []) for n in names}


@pytest.mark.parametrize("case", SAME)
def test_an_answer_equals_that_of_a_bare_server(case, replicas, bare):
    path, body, options = SAME[case]
    if case == "chunks":  # other tests ask the bare server the same
        body = body | {"cache_salt": "replicas"}
    wanted, found = bare.ask(path, body, **options), replicas.ask(path, body, **options)
    assert plain(found) == plain(wanted)


def test_the_request_id_is_the_clients_and_stands_once(replicas):
    answer = replicas.ask("/v1/completions", BODY, headers={"X-Request-Id": "mine"})
    assert answer.headers.getall("X-Request-Id") == ["mine"]
    assert len(replicas.ask("/v1/models").headers.getall("X-Request-Id")) == 1


def test_slow_headers_are_answered_with_408(replicas):
    host, port = replicas.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_connections_over_the_limit_are_refused(replicas):
    host, port = replicas.url.removeprefix("http://").split(":")
    clients = [socket.create_connection((host, int(port)), timeout=60) for _ in range(120)]
    try:
        assert any(c.recv(100).startswith(b"HTTP/1.1 503 ") for c in clients[-3:])
    finally:
        for client in clients:
            client.close()
    wait_for(lambda: replicas.ask("/health").status == 200, 20, "healthy")


def gauge(service, name):
    """Return the sum of a metric over the replicas."""
    text = service.ask("/metrics").body.decode()
    return sum(float(v) for v in re.findall(rf'^{name}{{replica="(?!gateway)[^"]*"[^}}]*}} (\S+)$', text, re.MULTILINE))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_request(stream, replicas):
    async def leave(session):
        task = asyncio.create_task(ask(session, "/v1/completions", JOB | {"stream": stream}))
        while not await running(session):
            assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def running(session):
        text = (await ask(session, "/metrics")).body.decode()
        return sum(map(float, re.findall(r'^chunkattn_requests_now{[^}]*state="running"[^}]*} (\S+)$', text, re.MULTILINE)))

    before = gauge(replicas, "chunkattn_generated_tokens_total")
    replicas.run(leave)
    wait_for(lambda: not gauge(replicas, "chunkattn_requests_now"), 20, "aborted")
    assert gauge(replicas, "chunkattn_generated_tokens_total") - before < 8 * 400


def test_one_scrape_has_the_metrics_of_every_replica(replicas):
    text = replicas.ask("/metrics").body.decode()
    names = set(re.findall(r'^chunkattn_requests_now{replica="([^"]*)"', text, re.MULTILINE))
    assert names == set(replicas.ask("/health").json["replicas"])
    assert len(names) == 3
    assert text.count("# TYPE chunkattn_requests_now ") == 1


def test_a_full_queue_is_a_429(replicas):
    """Ray's own default sends 5 requests to a replica, which would then never refuse one."""

    async def crowd(session):
        async def one(n):
            return await ask(session, "/v1/completions", BODY | {"prompt": f"{n} is", "max_tokens": 200})

        return await asyncio.gather(*map(one, range(99)))

    answers = replicas.run(crowd)
    assert {a.status for a in answers} == {200, 429}
    refused = [a for a in answers if a.status == 429]
    assert all(a.headers["Retry-After"] and a.json["error"]["code"] for a in refused)
    assert len(answers) - len(refused) > 3 * 5


def test_sighup_reads_the_keys_again(replicas, key_file):
    keys, own = key_file.read_text(), {"headers": {"Authorization": "Bearer carls-secret-key-of-32-characters"}}
    assert replicas.ask("/v1/models", **own).status == 401
    try:
        key_file.write_text(keys + "carl:carls-secret-key-of-32-characters\n")
        replicas.processes.main.send_signal(signal.SIGHUP)

        def known():
            answers = [replicas.ask("/v1/models", **own) for _ in range(9)]
            return all(a.status == 200 for a in answers)

        wait_for(known, 30, "known")
    finally:
        key_file.write_text(keys)
        replicas.processes.main.send_signal(signal.SIGHUP)


def test_ports_are_closed_to_strangers(replicas):
    """All ports are on loopback, but one of each replica and gateway, which asks for a token."""
    ours, strange = set(replicas.processes.living()), set()
    inodes = {}
    for number in ours:
        for link in Path(f"/proc/{number}/fd").iterdir():
            try:
                inodes[link.readlink().name] = number
            except OSError:
                continue
    for kind in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            (
                _,
                local,
                _,
                state,
                *_,
            ) = line.split()
            address, port = local.split(":")
            if state != "0A" or f"socket:[{line.split()[9]}]" not in inodes:
                continue
            loopback = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
            if address not in loopback:
                strange.add((int(port, 16), inodes[f"socket:[{line.split()[9]}]"]))
    serving = {*replicas.processes.living("replica"), *replicas.processes.living("gateway")}
    assert {number for _, number in strange} <= serving
    for port, _ in strange:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
            with pytest.raises(grpc.RpcError) as caught:
                call(b"", timeout=20)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
