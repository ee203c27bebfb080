"""The gateway to browsers and proxies: other origins, slashes, redirects, statuses of replicas, and encoded bodies."""

import asyncio
import gzip
import json
import zlib
from types import SimpleNamespace

import pytest
from backports import zstd
from fastapi.testclient import TestClient

from chunkattn.async_llm import AsyncLLM
from chunkattn.server.app import create_app
from chunkattn.web.options import ServerConfig
from tests.gateway.rig import COMPLETE, Replica, ask, parts, raw, rig, run, until

ORIGIN = "https://app.example"
PREFLIGHT = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
OPEN = [("access-control-allow-origin", "*"), ("access-control-allow-credentials", "true")]


def test_pages_of_other_origins():
    """The gateway decides which pages may read answers; the replicas' own permissions do not pass it."""

    async def case():
        a = Replica()
        a.answer = lambda call: call.reply(headers=OPEN, name="a")
        async with rig(a, server={"api_key": "k", "allowed_origins": (ORIGIN + "/",)}) as made:
            for path in (COMPLETE, "/v1/models", "/health", "/v1/cache/documents", "/metrics"):
                asked = await made.http.options(path, headers=PREFLIGHT)
                assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, ORIGIN)
            key = {"Authorization": "Bearer k"}
            for headers, status in ((key, 200), ({}, 401)):
                answer = await made.http.post(COMPLETE, json=ask(), headers={"Origin": ORIGIN, **headers})
                assert (answer.status_code, answer.headers.get_list("access-control-allow-origin")) == (status, [ORIGIN])
                assert "access-control-allow-credentials" not in answer.headers
                assert "X-Chunkattn-Replica" in answer.headers["access-control-expose-headers"]
            stranger = {"Origin": "https://evil.example", **key}
            answer = await made.http.post(COMPLETE, json=ask(), headers=stranger)
            assert not {name for name in answer.headers if name.startswith("access-control-allow")}
            assert (await made.http.options(COMPLETE, headers={**PREFLIGHT, **stranger})).status_code == 400
            assert all(call.method == "POST" for call in a.calls)

    run(case)


def test_without_origins_of_its_own_the_gateway_relays_the_replicas_permissions():
    async def case():
        a = Replica()
        a.answer = lambda call: call.reply(headers=OPEN, name="a")
        async with rig(a) as made:
            assert (await made.http.options(COMPLETE, headers=PREFLIGHT)).headers["access-control-allow-origin"] == "*"

    run(case)


def test_a_slash_at_the_end_is_served_as_none():
    async def case():
        a = Replica()
        a.texts["/metrics"] = b"# no metrics\n"
        async with rig(a) as made:
            for method, path in (("POST", COMPLETE), ("GET", "/v1/models"), ("GET", "/x"), ("PUT", "/a%2Fb"), ("GET", "/c%2F")):
                assert parts(await made.exchange(raw(method, f"{path}/?y=/")))[0] == 200
                assert (a.calls[-1].method, a.calls[-1].path, a.calls[-1].query) == (method, path, "y=/")
            count = len(a.calls)
            for path in ("/health", "/livez", "/readyz", "/metrics", "/v1/cache/documents"):
                plain, slash = [await made.http.request("HEAD", path + end) for end in ("", "/")]
                assert plain.status_code == slash.status_code != 404
            assert len(a.calls) == count
            assert (await made.http.get("/")).status_code == 200
            assert a.calls[-1].path == "/"

    run(case)


def test_redirects_of_a_replica_lead_to_the_gateway():
    async def case():
        a = Replica()
        async with rig(a, urls=None) as made:
            for given, expected in (
                (f"{a.url}/v1/models?x=/#y", "/v1/models?x=/#y"),
                (a.url, "/"),
                (a.url.upper().replace("HTTP", "Http") + "/UP", "/UP"),
                ("/v1/models", "/v1/models"),
                (f"{a.url}//evil.example/x", "/evil.example/x"),
                ("v1/models", "v1/models"),
                ("https://elsewhere.example/x", "https://elsewhere.example/x"),
                (f"http://127.0.0.1:{a.port + 1}/x", f"http://127.0.0.1:{a.port + 1}/x"),
                ("http://[", "http://["),
            ):
                a.answer = lambda call, given=given: call.reply(307, [("location", given)])
                answer = await made.http.get("/x", follow_redirects=False)
                assert (answer.status_code, answer.headers["location"]) == (307, expected)
            made.gateway.replicas._names[a.url] += "/llm"
            for path, expected in (("/llm/x", "/x"), ("/llm", "/"), ("/llmx", f"{a.url}/llmx"), ("/", f"{a.url}/")):
                assert made.gateway.replicas._seen(a.url, b"location", f"{a.url}{path}".encode()) == expected.encode()

    run(case)


def with_status(status):
    """Return a script that answers with any status, upgrade headers included."""

    async def answer(call):
        connection = next(c for c in call.replica.connections if c.scope is call.scope)
        upgrade = b"connection: upgrade\r\nupgrade: websocket\r\n" if status == "101" else b""
        body = b'data: {"number": 1}\n\n'
        head = b"HTTP/1.1 %s Odd\r\n%scontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"
        connection.transport.write(head % (status.encode(), upgrade, len(body)) + body)
        await asyncio.sleep(0.05)
        connection.transport.close()

    return answer


ODD = ("000", "099", "101", "600", "999")
"""Statuses that end no request. Others are no HTTP at all, or interim ones, whose replica is gone before its answer."""


@pytest.mark.parametrize("status", [*ODD, "103", "199", "1000", "20", "abc", "-20"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_status_that_ends_no_request_is_an_error_of_the_gateway(status, stream):
    async def case():
        a, b = Replica("a"), Replica("b")
        async with rig(a) as made:
            a.answer = with_status(status)
            answer = await made.http.post(COMPLETE, json=ask(["one"], stream=stream))
            expected = (502, "bad_gateway") if status in ODD else (503, "engine_not_ready")
            assert (answer.status_code, answer.json()["error"]["code"]) == expected
            await until(lambda: made.gateway.watch.ready())
            forgotten = await made.http.post("/v1/cache/forget", json={"prefix": "Read.", "documents": ["Ana"]})
            assert forgotten.status_code == 503
        async with rig(a, b) as made:  # another replica answers
            answers = [await made.http.post(COMPLETE, json=ask([str(n)], stream=stream)) for n in range(4)]
            assert [answer.status_code for answer in answers] == [200] * 4
            assert made.queued == 0

    run(case)


class OddReports(Replica):
    """Replica whose reports get another status once `status` is set."""

    status = None

    async def __call__(self, scope, receive, send):
        if self.status is not None and scope["path"] == "/v1/cache/report":
            await with_status(self.status)(SimpleNamespace(replica=self, scope=scope))
        else:
            await super().__call__(scope, receive, send)


@pytest.mark.parametrize("status", ["101", "999"])
def test_a_report_with_such_a_status_makes_no_replica_ready(status):
    async def case():
        a, b = OddReports("a"), Replica("b")
        async with rig(a, b) as made:
            a.status = status
            await until(lambda: made.gateway.watch.ready() == [b.url])

    run(case)


def double(body):
    return gzip.compress(zstd.compress(body))


CODINGS = [
    (["gzip"], gzip.compress, True),
    (["GZip"], gzip.compress, True),
    (["x-gzip"], gzip.compress, True),
    (["identity"], bytes, True),
    ([""], bytes, True),
    (["", "gzip", "identity"], gzip.compress, True),
    (["zstd", "gzip"], double, True),
    (["zstd, gzip"], double, True),
    (["zstd ,", "\tGZIP"], double, True),
    (["gzip", "zstd"], double, False),
    (["gzip", "gzip"], gzip.compress, False),
    (["gzip", "br"], gzip.compress, False),
    (["deflate", "gzip", "zstd"], lambda body: zstd.compress(gzip.compress(zlib.compress(body))), False),
]
"""Content-Encoding headers, the encoded body, and whether it can be read."""


@pytest.mark.parametrize(
    ("headers", "encode", "is_good"), CODINGS, ids=lambda value: getattr(value, "__name__", str(value)[:40])
)
def test_codings_in_several_headers_are_one_list_at_both_ends(headers, encode, is_good):
    """The server and the gateway read the same body, or refuse it with the same error."""
    listed = [("content-encoding", value) for value in headers]
    body = json.dumps({"model": "the-model", "chunks": {"prefix": "a", "documents": ["b"], "question": "c"}})
    content = encode(body.encode())
    app = TestClient(create_app(AsyncLLM(), ServerConfig()), base_url="http://localhost")
    told = app.post(COMPLETE, content=content, headers=[("content-type", "application/json"), *listed])

    async def case():
        a = Replica()
        async with rig(a) as made:
            head = [f"Content-Encoding: {value}" for value in headers]
            status, _, answer = parts(await made.exchange(raw("POST", COMPLETE, *head, body=content)))
            if is_good:
                assert (told.status_code, told.json()["error"]["code"]) == (404, "model_not_found")
                assert status == 200
                assert made.gateway.policy.num_pieces(a.url) == 2
                assert a.calls[0].body == content
            else:
                assert told.status_code in (400, 415)
                assert (status, json.loads(answer)["error"]) == (told.status_code, told.json()["error"])
                assert not a.calls

    run(case)


def test_replicas_are_left_before_their_own_limit():
    """A replica that closes first loses a request; uvicorn closes after 5 s by default, as vLLM's server does."""

    async def case():
        async with rig(Replica()) as made:
            assert made.gateway.replicas._session.connector._keepalive_timeout < 5 < ServerConfig().timeout_keep_alive

    run(case)
