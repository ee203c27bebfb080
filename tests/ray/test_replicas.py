"""Three replicas on one machine: connections, clients that leave, keys and ports."""

import asyncio
import re
import signal
import socket
from pathlib import Path

import grpc
import pytest

from tests.ray.cluster import wait_for
from tests.ray.requests import ask
from tests.ray.test_answers import PROMPT

JOB = {"prompt": PROMPT, "max_tokens": 400, "n": 8, "temperature": 1, "ignore_eos": True, "stream": True}


def test_slow_headers_are_answered_with_408(replicas):
    host, port = replicas.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_connections_over_the_limit_are_refused(replicas):
    host, port = replicas.url.removeprefix("http://").split(":")
    clients = [socket.create_connection((host, int(port)), timeout=60) for _ in range(180)]
    try:
        assert any(c.recv(100).startswith(b"HTTP/1.1 503 ") for c in clients[:3])  # the oldest of those without a request
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
        while not task.done() and not await running(session):
            pass
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def running(session):
        text = (await ask(session, "/metrics")).body.decode()
        return sum(map(float, re.findall(r'^chunkattn_requests_now{[^}]*state="running"[^}]*} (\S+)$', text, re.MULTILINE)))

    for _ in range(20):
        before = gauge(replicas, "chunkattn_generated_tokens_total")
        replicas.run(leave)
        wait_for(lambda: not gauge(replicas, "chunkattn_requests_now"), 20, "aborted")
        if gauge(replicas, "chunkattn_generated_tokens_total") - before < 8 * 400:
            return  # else the answer was whole before its client had left
    raise AssertionError("no request was aborted")


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
