"""Documents of a server that is started again on its document store."""

import asyncio
import signal
import time

import httpx
import pytest

from chunkattn.documents.records import Scope
from chunkattn.errors import ConfigError
from chunkattn.parsers import PromptParser
from chunkattn.server.app import create_app
from chunkattn.server.contents import as_ids
from chunkattn.web.options import ServerConfig
from tests.server_helpers import SMALL, ServerProcess, wait_until

pytest_plugins = ["tests.told_engine", "tests.small_disk"]

URL = "/v1/cache/documents"
TEXT = "Ana lives in Oslo and keeps three bees."
CHAT = {"messages": [{"role": "system", "content": "Read."}], "chat_template_kwargs": {"tone": "kind"}}


class Restarts:
    """Servers on one document store, one after the other.

    Args:
        llm: the engine of all of them.
        path: of the store.
        options: of the servers.
    """

    def __init__(self, llm, path, **options):
        self.llm, self.options, self.app = llm, {"document_store": str(path), **options}, None

    async def start(self, key=None, **options):
        """End the server before, as a kill would, and start the next. Returns its client."""
        if self.app is not None:
            self.app.state.server.documents.close()
        self.app = create_app(self.llm, ServerConfig(**self.options | options))
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        transport = httpx.ASGITransport(self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)

    async def restored(self, *args, **options):
        """Start a server and wait for its documents."""
        http = await self.start(*args, **options)
        await self.app.state.server.documents.restore()
        return http

    @property
    def keeper(self):
        """Keeper of the present server."""
        return self.app.state.server.keeper

    def stored(self, name):
        """A document of the present server, as its engine sees it."""
        return self.keeper.documents[self.app.state.server.documents.get(Scope(), name)]


@pytest.fixture
def restarts(llm, tmp_path):
    made = Restarts(llm, tmp_path / "documents")
    yield made
    made.app.state.server.documents.close()


async def put(http, *documents, **options):
    answer = await http.post(
        URL, json={"documents": documents, **({} if "messages" in options else {"prefix": "Read."}), **options}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


async def listed(http, **params):
    return (await http.get(URL, params=params)).json()["data"]


def test_documents_of_every_form_survive(restarts):
    async def main():
        http = await restarts.restored()
        before = [
            *await put(http, {"id": "text", "title": "Bees", "text": TEXT}, TEXT),
            *await put(http, [5, 6, 7], prefix=[3, 4]),
            *await put(http, {"id": "chat", "text": TEXT}, **CHAT),
            *await put(http, {"id": "first", "text": TEXT}, [5, 6], messages=[]),
            *await put(http, {"id": "late", "text": TEXT}, ttl_s=1000),
        ]
        await put(http, {"id": "text", "text": "of another tenant"}, cache_salt="tenant")
        contents = {name: restarts.stored(name).content for name in (d["id"] for d in before)}
        told = len(restarts.llm.client._worker.told)
        http = await restarts.restored()
        assert set(restarts.llm.client._worker.told[told:]) <= {"look up"}, "nothing is computed"
        ours = [{k: v for k, v in d.items() if k not in ("was_cached", "cached")} for d in before]
        assert [{k: v for k, v in d.items() if k != "cached"} for d in await listed(http)] == ours
        assert contents == {name: restarts.stored(name).content for name in contents}
        assert restarts.stored("text").source == f"Bees\n{TEXT}"
        assert [d["id"] for d in await listed(http, cache_salt="tenant")] == ["text"]
        assert [record.id for record in restarts.app.state.server.documents._timers] == ["late"]

    asyncio.run(main())


def test_ids_are_those_of_the_new_tokenizer(restarts, monkeypatch):
    parse = PromptParser.parse_cache

    def other(self, *args):
        prefix, chunks = parse(self, *args)
        return [9, *prefix], [[8, *chunk] for chunk in chunks]

    async def main():
        http = await restarts.restored()
        await put(http, {"id": "a", "text": TEXT})
        before = restarts.stored("a")
        monkeypatch.setattr(PromptParser, "parse_cache", other)
        await restarts.restored()
        after = restarts.stored("a")
        assert (as_ids(after.content[1]), after.chunk.tolist()) == ([9, *as_ids(before.content[1])], [8, *before.chunk])

    asyncio.run(main())


def test_documents_that_no_longer_fit_stay_in_the_file_until_deleted(restarts, monkeypatch, caplog):
    parse = PromptParser.parse_cache

    def shrunk(self, prefix, documents, *args):
        found = parse(self, prefix, documents, *args)
        return found[0], [[10**9] if "bees" in document else chunk for document, chunk in zip(documents, found[1], strict=True)]

    async def main():
        http = await restarts.restored()
        await put(http, {"id": "a", "text": TEXT}, {"id": "b", "text": "Ben."}, {"id": "c", "text": TEXT + " And more."})
        with monkeypatch.context() as patch:
            patch.setattr(PromptParser, "parse_cache", shrunk)
            http = await restarts.restored()
            assert [d["id"] for d in await listed(http)] == ["b"]
            assert "document 'a' of the document store cannot be used" in caplog.text
            answer = await http.get(f"{URL}/a")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "document_not_found")
            assert "token id" in answer.json()["error"]["message"]
            chunks = {"documents": [{"id": "a"}], "question": "Who?"}
            answer = await http.post("/v1/completions", json={"chunks": chunks})
            assert "cannot use it" in answer.json()["error"]["message"]
            assert (await http.delete(f"{URL}/a")).status_code == 200
        http = await restarts.restored()
        assert [d["id"] for d in await listed(http)] == ["b", "c"]

    asyncio.run(main())


def test_expired_deleted_and_replaced_documents_never_come_back(restarts):
    async def main():
        http = await restarts.restored()
        await put(http, *({"id": name, "text": f"{TEXT} {name}"} for name in "abcd"))
        await put(http, {"id": "c", "text": "Another text."})
        await http.delete(f"{URL}/a")
        await http.patch(f"{URL}/b", json={"ttl_s": 50})
        await http.patch(f"{URL}/d", json={"ttl_s": 50})
        restarts.keeper.records.change(restarts.stored("b").record, expires=time.time() - 1)
        http = await restarts.restored()
        assert [d["id"] for d in await listed(http)] == ["d", "c"]
        assert restarts.stored("c").source == "Another text."
        assert (await http.get(f"{URL}/d")).json()["expires"] < time.time() + 50

    asyncio.run(main())


def test_nothing_is_missed_before_the_documents_are_restored(restarts):
    """Requests by id get a 503, and so does the readiness probe."""

    async def main():
        http = await restarts.restored()
        await put(http, {"id": "a", "text": TEXT})
        http = await restarts.start()
        chunks = {"documents": [{"id": "a"}], "question": "Who?"}
        calls = [
            http.get(f"{URL}/a"),
            http.get(URL),
            http.delete(f"{URL}/a"),
            http.post(URL, json={"documents": ["x"]}),
            http.post("/v1/completions", json={"chunks": chunks}),
            http.post("/v1/rerank", json={"query": "Who?", "documents": [{"id": "a"}]}),
            http.get("/readyz"),
        ]
        documents = restarts.app.state.server.documents
        restarts.llm.client.state = "starting"
        for answer in [await call for call in calls]:
            assert answer.status_code == 503, answer.text
        assert documents._restoring is None
        restarts.llm.client.state = "ready"
        first = await http.get(f"{URL}/a")
        assert (first.status_code, first.headers["Retry-After"]) == (503, "1")
        await documents.restore()
        assert (await http.get(f"{URL}/a")).status_code == 200
        assert (await http.get("/readyz")).status_code == 200

    asyncio.run(main())


def test_pinned_documents_are_pinned_again(restarts):
    async def main():
        http = await restarts.restored()
        await put(http, *({"id": name, "text": f"{TEXT} {name}"} for name in "abc"), pin=True)
        await put(http, {"id": "d", "text": TEXT})
        await http.patch(f"{URL}/b", json={"pinned": False})
        await http.patch(f"{URL}/d", json={"pinned": True})
        engine = restarts.llm.client._worker
        engine.held = True
        http = await restarts.restored()
        while not engine.waiting:
            await asyncio.sleep(0)
        unpin = asyncio.create_task(http.patch(f"{URL}/c", json={"pinned": False}))
        while restarts.stored("c").record.pinned:
            await asyncio.sleep(0)
        engine.answer()
        assert (await unpin).status_code == 200
        await restarts.keeper._pinning
        assert [name for name in "abcd" if restarts.keeper.has_pin(restarts.stored(name))] == ["a", "d"]

    asyncio.run(main())


def test_documents_of_removed_keys_are_deleted_and_of_others_kept(restarts, tmp_path):
    keys = tmp_path / "keys"

    async def main():
        http = await restarts.restored()
        await put(http, {"id": "open", "text": TEXT})
        keys.write_text("ana:a\nben:b\n")
        for key in "ab":
            http = await restarts.restored(key, api_key_file=str(keys))
            assert await listed(http) == []
            await put(http, {"id": key, "text": TEXT})
        keys.write_text("ana:new\nben:b\n")
        http = await restarts.restored("b", api_key_file=str(keys))
        assert [d["id"] for d in await listed(http)] == ["b"]
        keys.write_text("ana:a\nben:b\n")
        http = await restarts.restored("a", api_key_file=str(keys))
        assert await listed(http) == []
        http = await restarts.restored()
        assert [d["id"] for d in await listed(http)] == ["open"]
        assert {r.id for r in restarts.app.state.server.documents.records} == {"open", "b"}

    asyncio.run(main())


def test_a_full_disk_stores_nothing_and_loses_nothing(restarts):
    async def main():
        http = await restarts.restored()
        await put(http, {"id": "a", "text": TEXT})
        documents = restarts.app.state.server.documents
        rows = documents.records._file.rows
        rows.execute("PRAGMA query_only = ON")  # SQLite refuses every change
        told = restarts.llm.client._worker.told
        answers = [
            await http.post(URL, json={"documents": [{"id": "b", "text": "Ben."}], "pin": True}),
            await http.delete(f"{URL}/a"),
            await http.patch(f"{URL}/a", json={"pinned": True}),
            await http.patch(f"{URL}/a", json={"ttl_s": 5}),
        ]
        for answer in answers:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "document_store_failed")
        while told.count("forget") < 1:  # the K/V of b
            await asyncio.sleep(0)
        assert told.count("unpin") == 2
        rows.execute("PRAGMA query_only = OFF")
        found = await listed(http)
        assert [(d["id"], d["pinned"], d["expires"]) for d in found] == [("a", False, None)]
        await put(http, {"id": "b", "text": "Ben."})
        http = await restarts.restored()
        assert [d["id"] for d in await listed(http)] == ["a", "b"]

    asyncio.run(main())


def test_documents_are_deleted_on_a_full_disk(restarts, disk, fill):
    restarts.options["document_store"] = str(disk / "documents")

    async def main():
        http = await restarts.restored()
        await put(http, *({"id": name, "text": f"{name} lives in Oslo."} for name in "abc"), pin=True)
        fill()
        assert (await http.delete(f"{URL}/a")).status_code == 200
        fill()
        http = await restarts.restored()
        assert [d["id"] for d in await listed(http)] == ["b", "c"]
        fill()
        assert (await http.delete(f"{URL}/b")).status_code == 200
        answer = await http.post(URL, json={"documents": [{"id": "d", "text": "Ben. " * 99}]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "document_store_failed")
        http = await restarts.restored()
        assert [d["id"] for d in await listed(http)] == ["c"]

    asyncio.run(main())


def test_two_servers_do_not_share_a_store(restarts):
    async def main():
        await restarts.restored()
        with pytest.raises(ConfigError, match="in use by another process"):
            create_app(restarts.llm, ServerConfig(**restarts.options))

    asyncio.run(main())


@pytest.mark.ci
def test_a_killed_server_has_its_documents_again(tmp_path):
    options = *SMALL, f"--document-store={tmp_path / 'documents'}"
    server = ServerProcess(*options)
    with server.client() as http:
        body = {"prefix": "Read.", "documents": [{"id": "a", "text": TEXT}], "pin": True}
        assert http.post(URL, json=body).status_code == 200
        chunks = {"prefix": "Read.", "documents": [{"id": "a"}], "question": "Where does Ana live?"}
        ask = {"chunks": chunks, "max_tokens": 4, "temperature": 0}
        before = http.post("/v1/completions", json=ask).json()["choices"]
    server.signal(signal.SIGKILL)
    server.process.wait()
    server = ServerProcess(*options)
    with server.client() as http:
        assert http.post("/v1/completions", json=ask).json()["choices"] == before
        wait_until(lambda: http.get(f"{URL}/a").json()["pinned"])
    assert server.close() == 0
