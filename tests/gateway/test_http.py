"""HTTP through the gateway: headers, paths and bodies."""

import asyncio
import gzip
import json

import pytest
from backports import zstd

from chunkattn.gateway.app import Gateway
from chunkattn.gateway.http_replicas import HttpReplicas
from chunkattn.gateway.options import GatewayOptions
from chunkattn.web.options import ServerConfig
from chunkattn.web.tracing import RequestSpan
from tests.gateway.rig import COMPLETE, Replica, ask, parts, raw, rig, run, until


def test_request_headers_of_one_hop_stay_with_the_client():
    async def case():
        a = Replica()
        async with rig(a) as made:
            request = raw(
                "POST",
                COMPLETE,
                "Connection: X-Private, keep-alive",
                "X-Private: 1",
                "Keep-Alive: timeout=5",
                "TE: trailers",
                "Proxy-Connection: keep-alive",
                "Expect: 100-continue",
                "X-Forwarded-For: 6.6.6.6",
                "X-Forwarded-Proto: https",
                "X-Request-Id: mine",
                "X-Chunkattn-Replica: spoofed",
                "Accept-Encoding: gzip",
                "X-Twice: one",
                "X-Twice: two",
                "X-Latin: caf\xe9",
                body=b"{}",
            )
            assert parts((await made.exchange(request)).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n"))[0] == 200
            (call,) = a.calls
            names = {name for name, _ in call.headers}
            assert names == {
                *("host", "content-length", "accept-encoding", "x-twice", "x-latin"),
                *("x-request-id", "x-forwarded-for", "x-forwarded-proto"),
            }
            assert call.header("host") == [f"127.0.0.1:{a.port}"]
            assert call.header("content-length") == ["2"]
            assert call.header("x-forwarded-for") == ["127.0.0.1"]
            assert call.header("x-forwarded-proto") == ["http"]
            assert call.header("x-request-id") == ["mine"]
            assert call.header("x-twice") == ["one", "two"]
            assert dict(call.headers)["x-latin"] == "caf\xe9".encode()  # the field's bytes are text of no known encoding

    run(case)


def test_answer_headers_of_one_hop_stay_with_the_replica():
    async def case():
        a = Replica()
        own = [("connection", "X-Private"), ("x-private", "1"), ("keep-alive", "timeout=5"), ("x-request-id", "theirs")]
        a.answer = lambda call: call.reply(201, [*own, ("set-cookie", "a=1"), ("set-cookie", "b=2"), ("trailer", "x")], ok=True)
        async with rig(a) as made:
            status, headers, body = parts(await made.exchange(raw("GET", "/x", "X-Request-Id: mine")))
            assert (status, json.loads(body)) == (201, {"ok": True})
            assert sorted(headers) == sorted(
                [
                    *("date: fri, 02 jan 1970 00:00:00 gmt", "server: gateway", "content-length: 12", "connection: close"),
                    *("content-type: application/json", "set-cookie: a=1", "set-cookie: b=2", "x-request-id: mine"),
                    *("x-content-type-options: nosniff", f"x-chunkattn-replica: {a.url}"),
                ]
            )

    run(case)


@pytest.mark.parametrize("status", [204, 304])
def test_an_answer_without_a_body(status):
    async def case():
        a = Replica()

        async def empty(call):
            await call.send({"type": "http.response.start", "status": status, "headers": [(b"etag", b"1")]})
            await call.write(b"", more=False)

        async def sized(call):  # RFC 9110, 8.6: a 304 may tell the length of the 200
            connection = next(c for c in a.connections if c.scope is call.scope)
            connection.transport.write(b"HTTP/1.1 %d Fine\r\netag: 1\r\ncontent-length: 7\r\n\r\n" % status)
            connection.transport.close()

        async with rig(a) as made:
            for a.answer in (empty, sized):
                kept = raw("GET", "/x").replace(b"Connection: close\r\n", b"")
                found, headers, body = parts(await made.exchange(kept + raw("GET", "/livez")))
                assert found == status
                assert "etag: 1" in headers
                assert body.startswith(b"HTTP/1.1 200 OK"), "the connection is kept"
                assert not any(line.startswith("transfer-encoding") for line in headers)

    run(case)


def test_head_has_the_length_and_no_body():
    async def case():
        a = Replica()
        async with rig(a) as made:
            status, headers, body = parts(await made.exchange(raw("HEAD", "/v1/models")))
            assert (status, body) == (200, b"")
            assert "content-length: 13" in headers
            assert a.calls[0].method == "HEAD"
            for path in ("/health", "/metrics"):
                status, headers, body = parts(await made.exchange(raw("HEAD", path)))
                assert (status, body) == (200, b"")
                assert "content-length: 0" not in headers
            assert (await made.http.post("/health")).status_code == 405

    run(case)


@pytest.mark.parametrize(
    "target",
    [
        "/a%2Fb//c/../d%20e?x=%2F&y=a+b&z",
        "/v1/models/%C3%BC%F0%9F%98%80",
        "//evil.example/x",
        "/a;b=1,c@d:e?u=http://x/?y",
        "/%00%0d%0a?%00",
        "/?",
    ],
)
def test_paths_and_queries_arrive_unchanged(target):
    async def case():
        a = Replica()
        async with rig(a) as made:
            assert parts(await made.exchange(raw("GET", target)))[0] == 200
            path, _, query = target.partition("?")
            assert (a.calls[0].path, a.calls[0].query) == (path, query)

    run(case)


def test_a_base_url_with_a_path_and_a_request_below_a_root_path():
    async def case():
        a = Replica()
        await a.open()
        a.texts["/llm/v1/cache/report"] = b'{"generation": "1", "ready": true}'
        async with rig(urls=[f"{a.url}/llm/"]) as made:
            await until(lambda: made.gateway.watch.ready())
            await made.http.post(COMPLETE, json=ask(["one"]))
            await made.http.post("/root" + COMPLETE, json=ask(["two"]))
            assert [call.path for call in a.calls] == ["/llm" + COMPLETE, "/llm/root" + COMPLETE]
            assert made.gateway.policy.num_pieces(f"{a.url}/llm") == 3  # one prefix and two documents

    run(case)


def test_a_target_that_is_no_path_is_a_400():
    async def case():
        a = Replica()
        async with rig(a) as made:
            status, _, _ = parts(await made.exchange(raw("OPTIONS", "*")))
            assert status == 400
            assert not a.calls
            assert made.gateway.watch.ready() == [a.url]

    run(case)


def test_encoded_bodies_have_the_keys_of_plain_ones():
    async def case():
        a = Replica()
        async with rig(a) as made:
            body = json.dumps(ask(["one " * 50, "two " * 50])).encode()
            await made.http.post(COMPLETE, content=body)
            pieces = made.gateway.policy.num_pieces(a.url)
            assert pieces == 3
            for coding, encode in {"gzip": gzip.compress, "zstd": zstd.compress, "GZIP": gzip.compress}.items():
                content = encode(body)
                answer = await made.http.post(COMPLETE, content=content, headers={"content-encoding": coding})
                assert answer.status_code == 200
                assert a.calls[-1].body == content
                assert a.calls[-1].header("content-encoding") == [coding]
            assert made.gateway.policy.num_pieces(a.url) == pieces
            await made.http.post(COMPLETE, content=json.dumps(ask(["three " * 50])).encode("utf-16"))  # a server reads it, too
            assert made.gateway.policy.num_pieces(a.url) == pieces + 1
            forgotten = gzip.compress(json.dumps({"prefix": "Read.", "documents": ["one " * 50]}).encode())
            encoded = {"content-encoding": "gzip", "content-type": "application/json"}
            await made.http.post("/v1/cache/forget", content=forgotten, headers=encoded)
            assert made.gateway.policy.num_pieces(a.url) == pieces
            for coding, status in {"br": 415, "gzip": 400}.items():
                answer = await made.http.post(COMPLETE, content=b"no", headers={"content-encoding": coding})
                assert answer.status_code == status
            bomb = gzip.compress(b" " * (9 << 20))
            assert (await made.http.post(COMPLETE, content=bomb, headers={"content-encoding": "gzip"})).status_code == 413

    run(case)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[1, 2]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"prompt": "\\ud800"}', b'{"documents": [[]]}'),
        *(
            b'{"chunks": 7, "documents": 3}',
            b'{"chunks": {"documents": [{"text": 3}]}}',
            b'{"n": 1e999, "i": %s}' % (b"9" * 400),
        ),
    ],
)
def test_a_body_that_cannot_be_read_is_for_the_replica(body):
    async def case():
        a = Replica()
        a.answer = lambda call: call.refuse(422, "invalid")
        async with rig(a) as made:
            assert (await made.http.post(COMPLETE, content=body)).json()["error"]["code"] == "invalid"
            assert a.calls[0].body == body

    run(case)


def test_a_chunked_body_arrives_whole():
    async def case():
        a = Replica()

        async def pieces():
            for _ in range(3):
                yield b"x" * 100_000

        async with rig(a) as made:
            assert (await made.http.post("/upload", content=pieces())).status_code == 200
            assert a.calls[0].body == b"x" * 300_000
            assert a.calls[0].header("content-length") == ["300000"]
            assert not a.calls[0].header("transfer-encoding")

    run(case)


def test_upgrades_are_not_relayed():
    async def case():
        a = Replica()
        async with rig(a) as made:
            upgrade = raw("GET", "/x", "Upgrade: h2c", "HTTP2-Settings: AA").replace(
                b": close", b": Upgrade, HTTP2-Settings, close"
            )
            assert parts(await made.exchange(upgrade))[0] == 200  # a plain answer
            assert not {"upgrade", "connection", "http2-settings"} & {name for name, _ in a.calls[0].headers}

    run(case)


def test_a_websocket_is_closed():
    """uvicorn opens one where its WebSocket extra is installed."""

    async def case():
        sent = []

        async def receive():
            return {"type": "websocket.connect"}

        async def send(message):
            sent.append(message)

        gateway = Gateway(HttpReplicas(["http://127.0.0.1:1"]), GatewayOptions(), ServerConfig())
        await gateway.app({"type": "websocket", "path": "/ws", "headers": []}, receive, send)
        assert [message["type"] for message in sent] == ["websocket.close"]

    run(case)


def test_the_log_names_the_replica_that_answered(caplog):
    caplog.set_level("INFO", "chunkattn.server.access")

    async def case():
        a = Replica()
        async with rig(a) as made:
            assert parts(await made.exchange(raw("POST", COMPLETE, "X-Request-Id: mine", body=b"{}")))[0] == 200
            await made.exchange(raw("GET", "/livez"))
            own, other = [record for record in caplog.records if record.name == "chunkattn.server.access"]
            assert f"(mine) from {a.url} policy=document tries=1 document_bytes=0 missing_bytes=0 " in own.getMessage()
            assert own.request["replica"] == a.url
            assert own.request["first_byte_s"] >= 0
            assert "from" not in other.getMessage()

    run(case)


TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_slow_answer_is_the_replicas_and_says_where_it_went(caplog):
    caplog.set_level("INFO", "chunkattn.server.access")

    async def case():
        a = Replica()

        async def late(call):
            await asyncio.sleep(0.3)  # far longer than the gateway's own part, on a busy machine too
            await call.reply()

        a.answer = late
        async with rig(a, server={"slow_request_s": 1e-9}) as made:
            body = json.dumps(ask(["Ana lives in Oslo.", "Bo."])).encode()
            for _ in range(2):
                await made.exchange(raw("POST", COMPLETE, "Content-Type: application/json", body=body))
            first, again = [r.request for r in caplog.records if r.name == "chunkattn.server.access"]
            assert first["slow"] == again["slow"] == "replica"
            assert first["document_bytes"] == first["missing_bytes"] > 0 == again["missing_bytes"]

    run(case)


@pytest.mark.parametrize("recorded", [False, True])
def test_the_replica_gets_the_clients_trace_or_the_gateways_span(monkeypatch, recorded):
    if recorded:
        monkeypatch.setattr(RequestSpan, "outgoing", lambda self: [(b"traceparent", b"00-own-own-01")])

    async def case():
        a = Replica()
        async with rig(a) as made:
            await made.exchange(raw("POST", COMPLETE, f"traceparent: {TRACEPARENT}", "tracestate: x=1", body=b"{}"))
            assert a.calls[0].header("traceparent") == (["00-own-own-01"] if recorded else [TRACEPARENT])
            assert a.calls[0].header("tracestate") == ["x=1"]

    run(case)
