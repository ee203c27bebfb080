"""Contract of `/v1/cache`: a server and a gateway over one replica answer alike, status, codes, ids and texts."""

import asyncio
import gzip
import json

import httpx
import pytest

from chunkattn.gateway.app import Gateway
from chunkattn.gateway.options import GatewayOptions
from chunkattn.server.app import create_app
from chunkattn.web.options import ServerConfig

pytest_plugins = ["tests.told_engine"]

URL, FORGET = "/v1/cache/documents", "/v1/cache/forget"
JSON = {"Content-Type": "application/json"}
SYSTEM = {"role": "system", "content": "Be kind."}
ANA, BEN = ({"Authorization": f"Bearer {key}"} for key in ("ana", "ben"))
LONG = "word " * 9000


def post(*documents, path=URL, **fields):
    return "POST", path, {"json": {"prefix": "Read.", "documents": list(documents), **fields}}


def sent(content, **headers):
    return "POST", URL, {"content": content, "headers": {**JSON, **headers}}


STORED = [
    post("Ana keeps bees.", {"id": "b", "title": "Bees", "text": "Ben keeps five."}),
    post({"id": "twin", "text": "Ana keeps bees."}, {"id": "twin-2", "text": "Ana keeps bees."}),
    post([5, 6, 7], prefix=[3, 4]),
    post("Ana keeps bees.", prefix="", messages=[SYSTEM], chat_template_kwargs={"tone": "kind"}),
    post("Ana keeps bees.", prefix="", messages=[]),
    post({"id": "b", "text": "Of a tenant."}, cache_salt="tenant"),
    post({"id": "pinned", "text": "Cleo keeps eight."}, pin=True, ttl_s=1000),
    post({"id": "state", "text": "Gus keeps nine."}, pin=True, keep_states=True),
    post({"id": "unicode.:@-_", "text": "Dora keeps bees. \N{HONEYBEE}"}, priority=1, user="somebody"),
    sent(gzip.compress(json.dumps({"documents": ["Emil keeps bees."]}).encode()), **{"Content-Encoding": "gzip"}),
    sent(json.dumps({"documents": ["Fay keeps bees."]}).encode("utf-16")),
    ("GET", URL, {}),
    ("GET", f"{URL}?limit=2", {}),
    ("GET", f"{URL}?limit=3&after=b", {}),
    ("GET", f"{URL}?cache_salt=tenant", {}),
    ("GET", f"{URL}?cache_salt=nobody", {}),
    ("GET", f"{URL}/b", {}),
    ("GET", f"{URL}/b?cache_salt=tenant", {}),
    ("GET", f"{URL}/unicode.:@-_", {}),
    ("HEAD", f"{URL}/b", {}),
    ("HEAD", URL, {}),
    ("PATCH", f"{URL}/b", {"json": {"pinned": True}}),
    ("PATCH", f"{URL}/b", {"json": {"ttl_s": 50}}),
    ("PATCH", f"{URL}/b", {"json": {"ttl_s": "never", "pinned": False}}),
    ("PATCH", f"{URL}/b", {"json": {"pinned": True, "ttl_s": 9, "cache_salt": "tenant"}}),
    ("PATCH", f"{URL}/b", {"json": {}}),
    post({"id": "b", "text": "Another text."}),
    ("GET", URL, {}),
    ("DELETE", f"{URL}/b", {}),
    ("DELETE", f"{URL}/b?cache_salt=tenant", {}),
    ("GET", f"{URL}/b", {}),
    post({"id": "cited", "text": "Hal keeps ten."}, {"id": "as", "text": "Ida keeps two.", "cite_as": "i"}, citations=True),
    post("Hal keeps ten.", [8, 9], citations=True, prefix="", messages=[]),
    ("GET", f"{URL}/cited", {}),
    post("Ana keeps bees.", "Never stored.", path=FORGET),
    post({"id": "cited", "text": "Hal keeps ten."}, {"id": "x", "text": "Never stored."}, path=FORGET, citations=True),
]
"""Requests one after the other, with what they change."""
REFUSED = [
    *(("GET", f"{URL}?{query}", {}) for query in ("limit=0", "limit=101", "limit=x", "limit=", "after=absent", "after=")),
    ("GET", f"{URL}/absent", {}),
    ("GET", f"{URL}/{'x' * 200}", {}),
    ("GET", f"{URL}/a/b", {}),
    ("GET", f"{URL}/a%2Fb", {}),
    ("DELETE", f"{URL}/absent", {}),
    ("PATCH", f"{URL}/absent", {"json": {"pinned": True}}),
    *(
        ("PATCH", f"{URL}/twin", {"json": body})
        for body in ({"pinned": "yes"}, {"ttl_s": 0}, {"ttl_s": "ever"}, {"text": "x"}, [])
    ),
    ("PATCH", f"{URL}/twin", {}),
    *((method, URL, {}) for method in ("PUT", "DELETE", "PATCH")),
    *((method, f"{URL}/twin", {}) for method in ("POST", "PUT")),
    ("POST", URL, {}),
    ("POST", URL, {"content": b'{"documents": ["x"]}', "headers": {"Content-Type": "text/plain"}}),
    ("POST", URL, {"content": b'{"documents": ["x"]}'}),
    *map(sent, (b"{", b"[]", b"null", b'"x"', b"\xff", b"[" * 30)),
    sent(b"no", **{"Content-Encoding": "gzip"}),
    sent(b"no", **{"Content-Encoding": "br"}),
    *(
        post(*documents, path=path)
        for path in (URL, FORGET)
        for documents in (
            (),
            ("x", ""),
            ("x", []),
            ("x", "y", "x"),
            ("x", {"id": "a b", "text": "y"}),
            ("x", {"text": 5}),
            (None,),
        )
    ),
    *(("POST", FORGET, {"json": body}) for body in ([], {"pin": True, "documents": ["x"]}, {"documents": [{"id": "twin"}]})),
    post({"id": "n", "text": "x"}, {"id": "n", "text": "y"}),
    post({"id": "", "text": "x"}),
    post({"id": "x" * 129, "text": "x"}),
    post("x", [1, 2]),
    post("x", LONG),
    post([1, 2, 10**7], prefix=[3]),
    post([2**40], prefix=[3]),
    post([-1], prefix=[3]),
    *(post("x", ttl_s=value) for value in (0, -1, 1e10, "never", "x")),
    *(post("x", priority=value) for value in (-1, 5, 1.5)),
    post("x", pin="yes"),
    post("x", model="other"),
    post("x", bogus=1),
    post("x", messages=[SYSTEM]),
    post([1], prefix="", messages=[]),
    post("x", cache_salt="x" * 5000),
    post("x", chat_template_kwargs={"tools": []}),
    *(("POST", FORGET, {"json": {"documents": ["x"], "model": "other"}}),),
    post(*(f"Document {number}." for number in range(20))),
]
"""Requests that are refused and change nothing."""


class OneReplica:
    """Replica that is an application in this process."""

    def __init__(self, app):
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")

    def names(self):
        return ["one"]

    def drop(self, name):
        raise AssertionError(name)

    async def send(self, name, request):
        url, headers = f"{request.path}?{request.query.decode()}", list(request.headers)
        answer = await self.http.request(request.method, url, content=request.body, headers=headers)
        yield {"type": "http.response.start", "status": answer.status_code, "headers": []}
        yield {"type": "http.response.body", "body": answer.content}


def client(app):
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


async def behind_gateway(llm, config):
    """Return the client of a gateway over a server without keys, and the gateway."""
    replica = OneReplica(create_app(llm, ServerConfig(max_cached_documents=1000)))
    gateway = Gateway(replica, GatewayOptions(replica_wait_s=0), config)
    gateway.policy.set_replicas(["one"])
    await gateway.documents.open()
    return client(gateway.app), gateway


def plain(answer):
    """Return what an answer says, but for times."""
    body = answer.json() if answer.content else None
    for entry in body.get("data", [body]) if isinstance(body, dict) else ():
        if entry.pop("created", None) is not None:
            entry["expires"] = entry["expires"] is not None
    headers = {name: answer.headers.get(name) for name in ("Allow", "Retry-After", "Content-Type")}
    return answer.status_code, body, headers


async def compare(llm, cases, **options):
    """Send each case to a server and to a gateway. Return the answers."""
    config = ServerConfig(max_cached_documents=18, **options)
    http, gateway = await behind_gateway(llm, config)
    server, answers = client(create_app(llm, config)), []
    for method, path, request in cases:
        answers.append(plain(await server.request(method, path, **request)))
        assert plain(await http.request(method, path, **request)) == answers[-1], (method, path, str(request)[:200])
    await gateway.documents.close()
    return answers


def test_documents_are_stored_listed_changed_and_deleted_alike(llm):
    answers = asyncio.run(compare(llm, STORED))
    statuses = [status for status, _, _ in answers]
    assert statuses == [404 if case == ("GET", f"{URL}/b", {}) and n > 21 else 200 for n, case in enumerate(STORED)]
    first = answers[0][1]["data"][0]["id"]
    assert first.startswith("doc-")
    assert {first} < {entry["id"] for entry in answers[11][1]["data"]}


def test_requests_are_refused_alike(llm):
    answers = asyncio.run(compare(llm, [STORED[1], *REFUSED]))[1:]
    for case, (status, body, _) in zip(REFUSED, answers, strict=True):
        assert 400 <= status < 500, case
        assert body["error"]["message"], case
        assert body["error"]["code"], case


@pytest.mark.parametrize("keys", [(ANA, BEN)])
def test_holders_of_keys_are_strangers_to_each_other(llm, keys, tmp_path):
    (tmp_path / "keys").write_text("ana:ana\nben:ben\n")
    cases = []
    for headers in (*keys, {}, {"Authorization": "Bearer eve"}):
        for method, path, request in (post({"id": "a", "text": "A text."}), ("GET", URL, {}), ("GET", f"{URL}/a", {})):
            cases.append((method, path, {**request, "headers": headers}))
    cases += [("DELETE", f"{URL}/a", {"headers": ANA}), ("GET", URL, {"headers": ANA}), ("GET", URL, {"headers": BEN})]
    few = [(method, path, {**request, "headers": ANA}) for method, path, request in (post("x", "y"), post("z", "w", "v"))]
    answers = asyncio.run(compare(llm, cases + few, api_key_file=str(tmp_path / "keys"), max_cached_documents_per_key=3))
    assert [status for status, _, _ in answers] == [200] * 6 + [401] * 6 + [200] * 4 + [400]
    assert [len(body["data"]) for _, body, _ in answers[-4:-2]] == [0, 1]
