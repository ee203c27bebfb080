"""Replicas on one machine, and the application on a cluster, answer as one server does."""

import asyncio
import json
import re

import pytest

from tests.ray.cluster import wait_for
from tests.ray.requests import ask

PROMPT = "Rumi is a poet. What is the job of Rumi? Answer:"
BODY = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
CHUNKS = {"prefix": "Read.", "documents": ["Rumi is a poet.", "Ada is a nurse."], "question": "What is the job of Ada? Answer:"}

USER = {"role": "user", "content": "What is the job of Ada?"}
NAMED = [{"id": f"d{number}", "text": text} for number, text in enumerate(CHUNKS["documents"])]
BLOCKS = [{"type": "document", "source": {"type": "text", "data": text}} for text in CHUNKS["documents"]]
CITED = {"citations": {"mode": "required", "instruction": "", "within": 8}, "temperature": 0}

SAME = {
    "completion": ("/v1/completions", BODY, {}),
    "stream": ("/v1/completions", BODY | {"stream": True}, {}),
    "chunks": ("/v1/completions", {"chunks": CHUNKS, "max_tokens": 8, "temperature": 0}, {}),
    "cited chat": ("/v1/chat/completions", {"messages": [USER], "documents": NAMED, "max_tokens": 32, **CITED}, {}),
    "cited response": ("/v1/responses", {"input": USER["content"], "documents": NAMED, "max_output_tokens": 32, **CITED}, {}),
    "cited message": ("/v1/messages", {"messages": [{"role": "user", "content": BLOCKS}, USER], "max_tokens": 32, **CITED}, {}),
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


REPLICAS = {"replicas": 3, "cluster": 2}


@pytest.fixture(params=["replicas", pytest.param("cluster", marks=pytest.mark.slow)])
def service(request):
    return request.getfixturevalue(request.param)


def plain(answer):
    """Return what two servers must agree on: not ids, times, and headers of the connection."""
    changing = rb'"(id|created|created_at|release_date|started)": ?("[^"]*"|\d+)'
    body = re.sub(changing, b"", answer.body)
    names = ("content-type", "retry-after", "www-authenticate", "allow", "x-content-type-options", "cache-control")
    if answer.headers.get("content-type", "").startswith("text/event-stream"):  # how many tokens an event holds is chance
        body = answer.text, answer.events[-1]
    return answer.status, body, {n: answer.headers.getall(n, []) for n in names}


@pytest.mark.parametrize("case", SAME)
def test_an_answer_equals_that_of_a_bare_server(case, service, bare, request):
    path, body, options = SAME[case]
    if case == "chunks" or "cited" in case:  # other tests ask the bare server the same
        body = body | {"cache_salt": f"{case} {request.node.callspec.params['service']}"}
    answer = service.ask(path, body, **options)
    if "cited" in case:
        assert b'"document_index"' in answer.body or b'"citations"' in answer.body
    if case == "head of 70 kB" and "cluster" in request.node.callspec.id:  # HAProxy refuses it
        assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_http")
    else:
        assert plain(answer) == plain(bare.ask(path, body, **options))


def test_the_request_id_is_the_clients_and_stands_once(service):
    answer = service.ask("/v1/completions", BODY, headers={"X-Request-Id": "mine"})
    assert answer.headers.getall("X-Request-Id") == ["mine"]
    assert len(service.ask("/v1/models").headers.getall("X-Request-Id")) == 1


def test_one_scrape_has_the_metrics_of_every_replica(service, request):
    count = REPLICAS[request.node.callspec.params["service"]]

    def names():
        text = service.ask("/metrics").body.decode()
        assert text.count("# TYPE chunkattn_http_requests_now ") == 1
        return set(re.findall(r'^chunkattn_http_requests_now{replica="(?!gateway")([^"]*)"', text, re.MULTILINE))

    wait_for(lambda: len(names()) == count and names() == set(service.ask("/health").json["replicas"]), 60, "scraped")


def test_a_full_queue_is_a_429(service, request):
    """Ray's own default sends 5 requests to a replica, which would then never refuse one.

    All connections may open before one brings its key, so they must be fewer than three quarters of `max_connections`.
    """

    async def crowd(session):
        bodies = [BODY | {"prompt": f"{n} is", "max_tokens": 200} for n in range(99)]
        return await asyncio.gather(*[ask(session, "/v1/completions", body) for body in bodies])

    answers = service.run(crowd)
    assert {a.status for a in answers} == {200, 429}
    refused = [a for a in answers if a.status == 429]
    assert all(a.headers["Retry-After"] and a.json["error"]["code"] for a in refused)
    assert len(answers) - len(refused) > REPLICAS[request.node.callspec.params["service"]] * 5
