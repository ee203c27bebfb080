"""Stored documents over replicas: real applications in one process, which are killed, restarted and left out."""

import asyncio
import json
import time
from dataclasses import replace
from hashlib import blake2b
from types import SimpleNamespace

import httpx
import pytest

from chunkattn.documents.records import DocumentRecord, DocumentRecords, Prefix, Scope
from chunkattn.gateway import replica_keeper
from chunkattn.gateway.document_ids import with_texts
from chunkattn.gateway.document_requests import remote_id
from chunkattn.gateway.documents import GatewayDocuments
from chunkattn.gateway.replicas import Outgoing, ReplicaGoneError
from chunkattn.server.app import create_app
from chunkattn.web.errors import ApiError
from chunkattn.web.http_state import HttpState
from chunkattn.web.middleware import Gate
from chunkattn.web.options import ServerConfig

pytest_plugins = ["tests.told_engine", "tests.small_disk"]

URL = "/v1/cache/documents"
TEXTS = [f"{name} keeps {number} bees." for number, name in enumerate(("Ana", "Ben", "Cleo", "Dora", "Emil", "Fay"))]
ANA, BEN = "Bearer ana", "Bearer ben"


class Owners:
    """Rendezvous owners by a hash of its own, and what is to be forgotten."""

    def __init__(self, replicas):
        self.replicas, self.forgotten = replicas, []

    def owner(self, key):
        return max(self.replicas.names(), key=lambda name: blake2b(f"{name} {key}".encode()).digest())

    def forget(self, keys):
        self.forgotten += keys


class Apps:
    """Replicas that are applications in this process. Those in `down` are gone, those in `plain` have no such routes."""

    def __init__(self, llm, names):
        self.llm, self.apps, self.down, self.plain, self.told = llm, {}, set(), set(), []
        for name in names:
            self.start(name)

    def start(self, name):
        self.apps[name] = create_app(self.llm, ServerConfig(max_pinned_share=1.0))

    def names(self):
        return sorted(self.apps)

    async def send(self, name, request):
        await asyncio.sleep(0)
        if name in self.down:
            raise ReplicaGoneError(name)
        self.told.append((name, request.method, request.path))
        app = self.apps[name]
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            path = "/absent" if name in self.plain else request.path
            url = f"{path}?{request.query.decode()}"
            answer = await http.request(request.method, url, content=request.body, headers=list(request.headers))
        yield {"type": "http.response.start", "status": answer.status_code, "headers": []}
        for piece in (answer.content[:5], answer.content[5:]):
            yield {"type": "http.response.body", "body": piece, "more_body": True}

    def stored(self, name):
        """Documents of a replica, by their remote ids."""
        return {record.id: stored for record, stored in self.apps[name].state.server.keeper.documents.items()}

    def pinned(self):
        """Replicas of each pinned document, by its text."""
        found = {}
        for name in self.apps:
            keeper = self.apps[name].state.server.keeper
            for document in self.stored(name).values():
                if name not in self.down and keeper.has_pin(document):
                    found.setdefault(document.text, []).append(name)
        return found


class Cluster:
    """A gateway's documents over three replicas.

    Args:
        llm: the engine behind all replicas.
        path: of the records.
        **options: of `GatewayDocuments`.
    """

    def __init__(self, llm, path=None, replicas=None, config=None, **options):
        self.replicas = replicas or Apps(llm, ["a", "b", "c"])
        self.owners, self.path, self.records = Owners(self.replicas), path, DocumentRecords(path)
        config = config or ServerConfig()
        if "file" in options:
            config = replace(config, api_key_file=str(options.pop("file")))
        state = HttpState(config, 8)
        self.documents = GatewayDocuments(self.replicas, self.owners, self.records, state, **options)
        self.keeper = self.documents.keeper
        app = Gate(self.documents.app, state)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")

    async def __aenter__(self):
        await self.documents.open()
        return self

    async def __aexit__(self, *_):
        await self.documents.close()

    async def call(self, method, path=URL, body=None, auth=None, query=""):
        headers = {} if auth is None else {"Authorization": auth}
        content = {} if body is None else {"json": body}
        answer = await self.http.request(method, f"{path}?{query}", headers=headers, **content)
        return SimpleNamespace(status=answer.status_code, body=answer.json())

    async def post(self, *documents, auth=None, **fields):
        answer = await self.call("POST", body={"prefix": "Read.", "documents": list(documents), **fields}, auth=auth)
        assert answer.status == 200, answer.body
        return answer.body["data"]

    async def listed(self, auth=None, query=""):
        return [d["id"] for d in (await self.call("GET", auth=auth, query=query)).body["data"]]

    def home(self, text):
        """Owner of a document after the prefix."""
        return self.keeper._requests.owner(next(r for r in self.records if r.source == text))


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def named(*texts):
    return [{"id": f"note-{TEXTS.index(text)}", "text": text} for text in texts]


def test_documents_go_to_their_owners_and_are_listed_as_one(llm):
    async def main():
        async with Cluster(llm) as cluster:
            made = await cluster.post(*named(*TEXTS), pin=True)
            assert [d["id"] for d in made] == [f"note-{n}" for n in range(6)]
            assert all(d["tokens"] > 0 and d["prefix_tokens"] > 0 and d["pinned"] for d in made)
            places = cluster.replicas.pinned()
            assert places == {text: [cluster.home(text)] for text in TEXTS}
            assert len({name for own in places.values() for name in own}) > 1
            first = (await cluster.call("GET", query="limit=4")).body
            assert [d["id"] for d in first["data"]] == [f"note-{n}" for n in range(4)]
            assert first["has_more"]
            assert all(d["pinned"] is False and d["prefix"] == "Read." for d in first["data"])  # this engine caches nothing
            assert await cluster.listed(query="after=note-3") == ["note-4", "note-5"]
            one = (await cluster.call("GET", f"{URL}/note-2")).body
            assert one == first["data"][2]
            for query in ("limit=0", "limit=x", "limit=101"):
                assert (await cluster.call("GET", query=query)).status == 400
            assert (await cluster.call("GET", query="after=x")).status == 404
            assert (await cluster.call("PUT")).status == 405

    asyncio.run(main())


def test_a_refusal_by_one_owner_stores_nothing(llm):
    long = "word " * 9000

    async def main():
        async with Cluster(llm) as cluster:
            answer = await cluster.call("POST", body={"prefix": "Read.", "documents": [*TEXTS, long], "pin": True})
            assert answer.status == 400
            assert answer.body["error"]["code"] == "context_length_exceeded"
            assert len(cluster.records) == 0
            assert cluster.replicas.pinned() == {}
            assert all(not cluster.replicas.stored(name) for name in "abc")
            wrong = [
                {"documents": []},
                {"documents": ["x", ""]},
                {"documents": ["x", "y", "x"]},
                {"documents": [{"id": "n", "text": "x"}, {"id": "n", "text": "y"}]},
                {"documents": [{"id": "no space", "text": "x"}]},
                {"documents": [[2**31]]},
                {"documents": ["x"], "ttl_s": -1},
                {"documents": ["x"], "bogus": 1},
                [],
                None,
            ]
            for body in wrong:
                answer = await cluster.call("POST", body=body)
                assert answer.status == 400, body
                assert answer.body["error"]["message"]
            malformed = await cluster.http.post(URL, content=b"{", headers={"Content-Type": "application/json"})
            assert malformed.json()["error"]["code"] == "invalid_json"

    asyncio.run(main())


def test_every_route_gets_the_text_in_the_place_of_the_id(llm):
    async def main():
        async with Cluster(llm) as cluster:
            await cluster.post({"id": "a", "title": "Bees", "text": TEXTS[0]})
            await cluster.post({"id": "a", "text": "Of the tenant."}, cache_salt="tenant")
            await cluster.post([5, 6], prefix=[])
            ids = next(name for name in await cluster.listed() if name != "a")
            resolve, text = cluster.documents.resolve, f"Bees\n{TEXTS[0]}"
            chunks = {"chunks": {"documents": [{"id": "a"}, "x", {"id": ids, "title": None}], "question": "?"}}
            for path in ("/v1/completions", "/inspect"):
                assert resolve(path, chunks)["chunks"]["documents"] == [text, "x", [5, 6]]
            # Citations name a document by its id.
            (cited,) = chunks["chunks"]["documents"][:1]
            one = {"chunks": {"documents": [cited, "x"], "question": "?"}, "citations": "required"}
            assert resolve("/v1/completions", one)["chunks"]["documents"] == [{"id": "a", "text": text}, "x"]
            assert resolve("/v1/completions", {**one, "citations": False})["chunks"]["documents"] == [text, "x"]
            with pytest.raises(ApiError, match="an answer with citations takes texts alone"):
                resolve("/v1/completions", {**chunks, "citations": True})
            await cluster.post({"id": "c", "text": "Of three.", "cite_as": "three"}, citations=True)
            assert resolve("/v1/chat/completions", {"documents": [{"id": "c"}], "citations": {}})["documents"] == [
                {"id": "three", "text": "Of three."}
            ]
            block = {"type": "document", "source": {"type": "text", "data": "x"}, "citations": {"enabled": True}}
            named = {"documents": [{"id": "c"}]}
            for cites in ({"citations": True}, {"messages": [{"role": "user", "content": [block]}]}):
                assert resolve("/v1/messages", named | {"messages": []} | cites)["documents"] == [
                    {"id": "three", "text": "Of three."}
                ]
            for plain in ({"messages": [{"role": "user"}]}, {"citations": False, "messages": []}):
                assert resolve("/v1/messages", named | plain)["documents"] == ["Of three."]
            assert resolve("/v1/responses", named | {"input": "?", "citations": True})["documents"][0]["id"] == "three"
            body = {"documents": [{"id": "a"}, {"id": "a", "text": "own"}], "cache_salt": "tenant"}
            for path in ("/v1/chat/completions", "/v1/decisions", "/v1/systemone", "/v1/score", "/score"):
                assert resolve(path, body)["documents"] == ["Of the tenant.", {"id": "a", "text": "own"}]
            assert resolve("/v1/decisions", {"documents": [{"id": "a"}], "prompt_cache_key": "tenant"})["documents"] == [
                "Of the tenant."
            ]
            for path in ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking"):
                assert resolve(path, {"documents": [{"id": "a"}]})["documents"] == [{"id": "a", "text": text}]
                fields = {"documents": [{"id": "a"}], "rank_fields": ["body"]}
                assert resolve(path, fields)["documents"] == [{"id": "a", "body": text}]
                assert resolve(path, own := {**fields, "rank_fields": ["id"]}) is own
            for path, wrong in (
                ("/v1/rerank", {"documents": [{"id": ids}]}),
                ("/v1/score", {"documents": [{"id": ids}]}),
                ("/v1/rerank", {"documents": [{"id": "a"}], "rank_fields": ["x", "y"]}),
            ):
                with pytest.raises(ApiError) as error:
                    resolve(path, wrong)
                assert error.value.status == 400
            for plain in (
                None,
                [],
                {},
                {"chunks": None},
                {"chunks": {"documents": "x"}},
                {"documents": {"id": "a"}},
                {"prompt": "x"},
            ):
                for path in ("/v1/completions", "/v1/chat/completions", "/v1/models"):
                    assert resolve(path, plain) is plain

    asyncio.run(main())


def test_an_unknown_id_gets_the_answer_of_a_server(llm):
    async def main():
        async with Cluster(llm) as cluster:
            body = {"chunks": {"documents": ["x", {"id": "absent"}], "question": "?"}}
            request = Outgoing(
                "POST", "/v1/completions", b"", [(b"content-type", b"application/json")], json.dumps(body).encode()
            )
            messages = [message async for message in cluster.replicas.send("a", request)]
            theirs = json.loads(b"".join(message.get("body", b"") for message in messages))
            with pytest.raises(ApiError) as error:
                cluster.documents.resolve("/v1/completions", body)
            assert (error.value.status, error.value.body) == (404, theirs)

    asyncio.run(main())


def test_clients_of_other_keys_know_nothing_of_each_other(llm, tmp_path):
    (tmp_path / "keys").write_text("ana:ana\nben:ben\n")

    async def check(cluster):
        async with cluster:
            await cluster.post({"id": "n", "text": TEXTS[0]}, auth=ANA, pin=True)
            await cluster.post({"id": "n", "text": TEXTS[1]}, auth=BEN, pin=True)
            await cluster.post({"id": "n", "text": TEXTS[2]}, auth=BEN, cache_salt="other")
            assert set(cluster.replicas.pinned()) == set(TEXTS[:2]), "replicas without keys keep both"
            body = {"documents": [{"id": "n"}]}
            found = [cluster.documents.resolve("/v1/chat/completions", body, auth)["documents"] for auth in (ANA, BEN)]
            assert found == [[TEXTS[0]], [TEXTS[1]]]
            assert (await cluster.call("DELETE", f"{URL}/n", auth=ANA)).status == 200
            assert await cluster.listed(ANA) == []
            assert await cluster.listed(BEN) == ["n"]
            assert set(cluster.replicas.pinned()) == {TEXTS[1]}

    async def main():
        await check(Cluster(llm))
        keyed = Cluster(llm, file=tmp_path / "keys", config=ServerConfig(max_cached_documents_per_key=2))
        await check(keyed)
        assert (await keyed.call("GET", auth="Bearer eve")).status == 401
        await keyed.post("x", auth=ANA)
        answer = await keyed.call("POST", body={"documents": ["y", "z"]}, auth=ANA)
        assert answer.body["error"]["code"] == "too_many_documents"
        few = Cluster(llm, config=ServerConfig(max_cached_documents=2))
        await few.post("x", "y")
        assert (await few.call("POST", body={"prefix": "Read.", "documents": ["z"]})).status == 400
        await few.post("x")

    asyncio.run(main())


def test_deleted_documents_are_forgotten_by_every_replica_even_by_those_away(llm):
    async def main():
        async with Cluster(llm) as cluster:
            await cluster.post(*named(*TEXTS), pin=True)
            home = cluster.home(TEXTS[0])
            record = cluster.records.get(Scope(), "note-0")
            away, present = (name for name in "abc" if name != home)
            cluster.replicas.down = {home, away}
            del cluster.replicas.told[:]
            assert (await cluster.call("DELETE", f"{URL}/note-0")).body["deleted"]
            assert [told for told in cluster.replicas.told if told[0] == present] == [
                (present, "DELETE", f"{URL}/{remote_id(record)}"),
                (present, "POST", "/v1/cache/forget"),
            ]
            assert len(cluster.owners.forgotten) == 1
            assert (await cluster.call("DELETE", f"{URL}/note-0")).status == 404
            with pytest.raises(ApiError):
                cluster.documents.resolve("/v1/chat/completions", {"documents": [{"id": "note-0"}]})
            cluster.replicas.down = set()
            cluster.documents.on_change([home, away])
            await until(lambda: (away, "POST", "/v1/cache/forget") in cluster.replicas.told)
            await until(lambda: TEXTS[0] not in cluster.replicas.pinned())
            assert remote_id(record) not in cluster.replicas.stored(home)
            assert len(cluster.replicas.pinned()) == 5

    asyncio.run(main())


def test_pins_follow_their_owners(llm):
    async def main():
        async with Cluster(llm) as cluster:
            await cluster.post(*named(*TEXTS), pin=True)
            await cluster.post({"id": "free", "text": "Nobody needs me."})
            lost = cluster.home(TEXTS[0])
            cluster.replicas.start(lost)  # restarted: it holds nothing
            cluster.documents.on_change([lost])
            await until(lambda: cluster.replicas.pinned() == {text: [cluster.home(text)] for text in TEXTS})
            gone = cluster.replicas.apps.pop(lost)
            cluster.documents.on_change([lost])
            await until(lambda: cluster.replicas.pinned() == {text: [cluster.home(text)] for text in TEXTS})
            cluster.replicas.apps[lost] = gone
            cluster.documents.on_change([lost])
            await until(lambda: cluster.replicas.pinned() == {text: [cluster.home(text)] for text in TEXTS})

    asyncio.run(main())


def test_pins_of_a_replica_that_is_down_are_elsewhere_until_it_returns(llm):
    async def main():
        async with Cluster(llm) as cluster:
            down = cluster.replicas.down
            cluster.keeper.takes = lambda name: name not in down
            await cluster.post(*named(*TEXTS), pin=True)
            homes = cluster.replicas.pinned()
            lost = cluster.home(TEXTS[0])
            down.add(lost)
            cluster.documents.on_change([lost])
            await until(lambda: all(set(names) - down for names in cluster.replicas.pinned().values()))
            down.clear()
            cluster.documents.on_change([lost])
            await until(lambda: cluster.replicas.pinned() == homes)

    asyncio.run(main())


def test_a_replica_that_fails_is_tried_again(llm, monkeypatch):
    monkeypatch.setattr(replica_keeper, "_RETRY_S", (0.01,))

    async def main():
        async with Cluster(llm) as cluster:
            cluster.replicas.down = set("abc")
            answer = await cluster.call("POST", body={"prefix": "Read.", "documents": TEXTS})
            assert (answer.status, answer.body["error"]["code"]) == (503, "no_replica")
            assert len(cluster.records) == 0
            cluster.replicas.down = {"a"}
            assert all(d["pinned"] for d in await cluster.post(*TEXTS, pin=True))
            assert len(cluster.replicas.pinned()) == 6
            homes = {text: [cluster.home(text)] for text in TEXTS}
            assert ["a"] in homes.values()
            cluster.replicas.down = set()
            await until(lambda: cluster.replicas.pinned() == homes)

    asyncio.run(main())


def test_changes_reach_the_replica_and_lifetimes_end_everywhere(llm):
    async def main():
        async with Cluster(llm) as cluster:
            await cluster.post(*named(*TEXTS[:2]), ttl_s=1000)
            await cluster.post(*named(TEXTS[2]), ttl_s=1000)
            assert (await cluster.call("PATCH", f"{URL}/note-0", {"pinned": True})).status == 200
            assert cluster.replicas.pinned() == {TEXTS[0]: [cluster.home(TEXTS[0])]}
            (document,) = (d for d in cluster.replicas.stored(cluster.home(TEXTS[0])).values() if d.text == TEXTS[0])
            assert document.record.expires == pytest.approx(time.time() + 1000, abs=60)
            changed = await cluster.call("PATCH", f"{URL}/note-0", {"pinned": False, "ttl_s": "never"})
            assert (changed.body["expires"], changed.body["pinned"]) == (None, False)
            assert cluster.replicas.pinned() == {}
            stored = cluster.replicas.stored(cluster.home(TEXTS[0]))[document.record.id]
            assert stored.record.expires is None
            assert (await cluster.call("PATCH", f"{URL}/note-0", {"pinned": "yes"})).status == 400
            assert (await cluster.call("PATCH", f"{URL}/absent", {"pinned": True})).status == 404
            cluster.records.change(cluster.records.get(Scope(), "note-2"), pinned=True)
            assert (await cluster.call("PATCH", f"{URL}/note-1", {"ttl_s": 0.001})).status in (200, 404)
            await until(lambda: cluster.records.get(Scope(), "note-1") is None)
            await until(lambda: all(TEXTS[1] not in [d.text for d in cluster.replicas.stored(n).values()] for n in "abc"))
            assert await cluster.listed() == ["note-0", "note-2"]

    asyncio.run(main())


def test_a_new_gateway_has_every_document_and_pins_it_again(llm, tmp_path):
    async def main():
        async with Cluster(llm, tmp_path / "documents") as before:
            await before.post(*named(*TEXTS[:3]), pin=True, auth=ANA)
            await before.post(*named(*TEXTS[3:]), pin=True)
            await before.post({"id": "late", "text": "x"}, ttl_s=50)
            before.records.change(before.records.get(Scope(), "late"), expires=time.time() - 1)
        replicas = Apps(llm, ["a", "b", "c"])
        async with Cluster(llm, tmp_path / "documents", replicas) as after:
            await until(lambda: set(replicas.pinned()) == set(TEXTS[3:]))
            assert await after.listed() == ["note-3", "note-4", "note-5"]
            body = {"documents": [{"id": "note-0"}]}
            after.documents.note(ANA)
            assert after.documents.resolve("/v1/chat/completions", body, ANA)["documents"] == [TEXTS[0]]
            await until(lambda: set(replicas.pinned()) == set(TEXTS))  # its key is known from its first request on

    asyncio.run(main())


def test_replicas_without_such_routes_leave_the_records_alone(llm):
    async def main():
        async with Cluster(llm) as cluster:
            cluster.replicas.plain = set("abc")
            made = await cluster.post(*named(*TEXTS), pin=True)
            assert [(d["tokens"], d["cached"], d["pinned"]) for d in made] == [(None, False, False)] * 6
            assert len(await cluster.listed()) == 6
            assert cluster.documents.resolve("/v1/chat/completions", {"documents": [{"id": "note-1"}]})["documents"] == [
                TEXTS[1]
            ]
            assert (await cluster.call("DELETE", f"{URL}/note-1")).status == 200
            assert len(await cluster.listed()) == 5

    asyncio.run(main())


def test_records_that_the_disk_refuses_are_withdrawn(llm, tmp_path):
    async def main():
        async with Cluster(llm, tmp_path / "documents") as cluster:
            await cluster.post({"id": "n", "text": TEXTS[0]}, pin=True)
            rows = cluster.records._file.rows
            rows.execute("PRAGMA query_only = ON")
            answer = await cluster.call("POST", body={"prefix": "Read.", "documents": [*named(*TEXTS[1:])], "pin": True})
            assert (answer.status, answer.body["error"]["code"]) == (503, "document_store_failed")
            assert cluster.replicas.pinned() == {TEXTS[0]: [cluster.home(TEXTS[0])]}
            assert (await cluster.call("DELETE", f"{URL}/n")).status == 503
            assert await cluster.listed() == ["n"]
            rows.execute("PRAGMA query_only = OFF")
            assert (await cluster.call("DELETE", f"{URL}/n")).status == 200

    asyncio.run(main())


def test_documents_are_deleted_on_a_full_disk(llm, disk, fill):
    async def main():
        async with Cluster(llm, disk / "documents") as cluster:
            await cluster.post(*named(*TEXTS), pin=True)
            for number in range(len(TEXTS)):
                fill()
                assert (await cluster.call("DELETE", f"{URL}/note-{number}")).status == 200
            assert await cluster.listed() == []
            assert cluster.replicas.pinned() == {}

    asyncio.run(main())


def test_a_new_text_under_an_id_replaces_the_former_everywhere(llm):
    async def main():
        async with Cluster(llm) as cluster:
            for text in TEXTS:
                await cluster.post({"id": "n", "text": text}, pin=True)
                await until(lambda text=text: cluster.replicas.pinned() == {text: [cluster.home(text)]})
            assert len(cluster.owners.forgotten) == 5

    asyncio.run(main())


def test_text_of_a_record_is_found_once_for_each_place():
    record = DocumentRecord(Scope(), "a", Prefix("Read."), "text")
    body = {"documents": [{"id": "a"}, {"id": "a"}]}
    assert with_texts("/v1/score", body, {"a": record}.get)["documents"] == ["text", "text"]
    assert body == {"documents": [{"id": "a"}, {"id": "a"}]}


def test_documents_of_keys_removed_while_the_gateway_was_away_are_deleted(llm, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("ana:ana\nben:ben\n")

    async def main():
        options = {"path": tmp_path / "documents", "replicas": Apps(llm, ["a", "b", "c"])}
        async with Cluster(llm, **options, file=keys) as cluster:
            await cluster.post({"id": "a", "text": TEXTS[0]}, auth=ANA)
            await cluster.post({"id": "b", "text": TEXTS[1]}, auth=BEN)
        keys.write_text("ana:ana\n")
        async with Cluster(llm, **options, file=keys) as cluster:
            await until(lambda: len(cluster.records) == 1)
            assert await cluster.listed(auth=ANA) == ["a"]

    asyncio.run(main())


def test_headers_without_documents_take_no_memory(llm):
    async def main():
        async with Cluster(llm) as cluster:
            for number in range(20):
                cluster.documents.resolve("/v1/completions", {"prompt": "a"}, f"Bearer {number}")
                await cluster.call("POST", body={"documents": []}, auth=f"Bearer {number}")
            assert len(cluster.keeper.headers) == 0
            await cluster.post({"id": "a", "text": TEXTS[0]}, auth=ANA)
            assert len(cluster.keeper.headers) == 1

    asyncio.run(main())


def test_changes_at_once_keep_each_other(llm):
    async def main():
        async with Cluster(llm) as cluster:
            await cluster.post({"id": "a", "text": TEXTS[0]})
            changes = {"pinned": True}, {"ttl_s": 100.0}
            answers = await asyncio.gather(*(cluster.call("PATCH", f"{URL}/a", body=change) for change in changes))
            assert [answer.status for answer in answers] == [200, 200]
            (record,) = cluster.records
            assert record.pinned
            assert record.expires is not None

    asyncio.run(main())


def test_documents_of_token_ids_are_pinned_listed_and_deleted(llm):
    async def main():
        async with Cluster(llm) as cluster:
            (made,) = await cluster.post([5, 6, 7], prefix=[3], pin=True)
            (place,) = (name for name in "abc" if cluster.replicas.stored(name))
            assert set(cluster.replicas.stored(place)) == {made["id"]}
            (record,) = cluster.records
            assert cluster.keeper._misplaced() == []
            assert (await cluster.call("PATCH", f"{URL}/{made['id']}", body={"pinned": False})).status == 200
            keeper = cluster.replicas.apps[place].state.server.keeper
            assert not keeper.has_pin(cluster.replicas.stored(place)[record.id])
            assert (await cluster.call("DELETE", f"{URL}/{made['id']}")).status == 200
            assert not any(cluster.replicas.stored(name) for name in "abc")

    asyncio.run(main())


def test_a_client_that_leaves_leaves_nothing_at_the_replicas(llm):
    async def main():
        async with Cluster(llm) as cluster:
            engine = llm.client._worker
            engine.held = True
            asked = asyncio.create_task(cluster.post(*named(*TEXTS), pin=True))
            await until(lambda: engine.told.count("compute") == 6)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            engine.answer()
            await until(lambda: engine.told.count("unpin") == 6)
            await until(lambda: not any(cluster.replicas.stored(name) for name in "abc"))
            assert len(cluster.records) == 0

    asyncio.run(main())
