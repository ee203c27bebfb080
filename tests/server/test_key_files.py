"""Files of API keys: which are read, when, and what becomes of the documents of a removed key; the key of `/metrics`."""

import asyncio
import os
import threading
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from chunkattn.async_llm import AsyncLLM
from chunkattn.documents.records import Scope
from chunkattn.errors import ConfigError
from chunkattn.server.app import create_app
from chunkattn.web import key_file, keys
from chunkattn.web.errors import ApiError
from chunkattn.web.keys import Keys
from chunkattn.web.options import ServerConfig
from chunkattn.web.paths import OPEN_PATHS
from tests.documents.rig import add, registry_of

pytest_plugins = ["tests.told_engine"]


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def names_of(file):
    return [name for _, name, _ in key_file.read_key_file(str(file))]


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r"], ids=ascii)
def test_only_line_feeds_end_a_line(tmp_path, end):
    file = tmp_path / "keys"
    file.write_text(f"# a comment{end}eve:key-of-eve\nana:a\n", encoding="utf-8", newline="")
    assert names_of(file) == ["ana"]
    file.write_text(f"ana:a{end}eve:key-of-eve\n", encoding="utf-8", newline="")
    with pytest.raises(ConfigError) as error:
        names_of(file)
    assert "line 1" in str(error.value)
    assert "key-of-eve" not in str(error.value)


def test_files_of_other_systems_are_read(tmp_path):
    (tmp_path / "keys").write_bytes(b"\xef\xbb\xbf# keys\r\n\r\n ana:a \r\nben:b:c\r\n")
    (tmp_path / "link").symlink_to(tmp_path / "keys")
    entries = [(name, key) for _, name, key in key_file.read_key_file(str(tmp_path / "link"))]
    assert entries == [("ana", "a"), ("ben", "b:c")]


def test_only_regular_files_of_a_sane_size_are_read(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, "/dev/zero", "/dev/null"):
        with pytest.raises(ConfigError, match="is not a regular file"):
            Keys(None, str(path))
    (tmp_path / "bytes").write_bytes(b"ana:\xff\n")
    for path in (tmp_path / "absent", tmp_path / "bytes", f"{tmp_path}\0"):
        with pytest.raises(ConfigError, match="cannot be read"):
            Keys(None, str(path))
    (tmp_path / "keys").write_text("ana:a\n# and so on\n")
    monkeypatch.setattr(key_file, "MAX_BYTES", 10)
    with pytest.raises(ConfigError, match="more than 10 bytes"):
        Keys(None, str(tmp_path / "keys"))


def test_a_fifo_in_the_place_of_the_file_does_not_block(tmp_path, monkeypatch):
    """The path may change between the check and the opening."""
    os.mkfifo(tmp_path / "fifo")
    regular = (tmp_path / "keys").touch() or (tmp_path / "keys").stat()
    monkeypatch.setattr(key_file.Path, "stat", lambda _: regular)
    with pytest.raises(ConfigError, match="is not a regular file"):
        Keys(None, str(tmp_path / "fifo"))


def test_each_name_costs_a_lookup(monkeypatch):
    compared = 0

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other):
            nonlocal compared
            compared += 1
            return str(self) == str(other)

    monkeypatch.setattr(keys, "read_key_file", lambda _: [("line", Name(n), str(n)) for n in range(1000)])
    assert len(Keys(None, "file")) == 1000
    assert compared < 3000


def test_a_salt_belongs_to_name_and_key(tmp_path):
    """It is the same after a restart, so the K/V store is found again."""

    def salts(text):
        (tmp_path / "keys").write_text(text)
        made = Keys(None, str(tmp_path / "keys"))
        return [made.holder(f"Bearer {line.partition(':')[2]}").salt for line in text.splitlines()], made

    (ana, ben), made = salts("ana:a\nben:b")
    assert made.salt_of("ben") == ben
    with pytest.raises(ConfigError, match="cleo"):
        made.salt_of("cleo")
    assert salts("ben:b\nana:a")[0] == [ben, ana]
    assert len({ana, ben, *salts("ana:b\nben:a")[0]}) == 4


def test_the_loop_runs_on_while_the_file_is_read(tmp_path):
    """Calls during a read cause one more read, which begins after them."""
    (tmp_path / "keys").write_text("ana:a\n")
    made, running, go_on, reads = Keys(None, str(tmp_path / "keys")), threading.Event(), threading.Event(), []
    read = made.reload

    def slow():
        running.set()
        assert go_on.wait(30), "the loop is blocked"
        reads.append(found := read())
        return found

    made.reload = slow

    class NoDocuments:
        def delete_owned(self, owners):
            return 0

    async def main():
        reloader = keys.KeyReloader(made, NoDocuments().delete_owned)
        task = asyncio.create_task(reloader.run())
        reloader.ask()
        while not running.is_set():
            await asyncio.sleep(0.001)
        (tmp_path / "keys").write_text("ben:b\n")
        for _ in range(5):
            reloader.ask()
        go_on.set()
        while len(reads) < 2:
            await asyncio.sleep(0.001)
        assert made.holder("Bearer b").name == "ben"
        await asyncio.sleep(0.05)
        assert len(reads) == 2
        for bad in ("no key", None):  # a bad file and an unforeseen error both leave the keys
            if bad is None:
                made.reload = None
            (tmp_path / "keys").write_text(bad or "cleo:c")
            reloader.ask()
            await asyncio.sleep(0.05)
            assert not task.done()
        assert made.holder("Bearer b").name == "ben"
        task.cancel()

    asyncio.run(main())


@pytest.fixture
def owners(tmp_path):
    """Key file of two names, their documents' owners, and a function that removes the first key."""
    file = tmp_path / "keys"
    file.write_text("ana:1\nben:2\n")
    made = [Keys(None, str(file)).salt_of(name) for name in ("ana", "ben")]
    return str(file), *made


def test_documents_of_a_removed_key_are_freed(llm, owners):
    file, ana, ben = owners
    documents = registry_of(llm, api_key_file=file, max_cached_documents_per_key=1)
    told = llm.client._worker.told

    async def main():
        record = await add(documents, owner=ana, text="Oslo.", ttl_s=600, pin=True)
        other = await add(documents, owner=ben, text="Rome.", ttl_s=600, pin=True)
        timer = documents._timers[record]
        assert documents.delete_owned({ana}) == 1
        assert timer.cancelled()
        assert documents.page(Scope(ana, ana), None, 9) == ([], False)
        assert documents.page(Scope(ben, ben), None, 9) == ([other], False)
        assert not documents._timers[other].cancelled()
        while "forget" not in told:
            await asyncio.sleep(0.001)
        assert told.count("unpin") == told.count("forget") == 1
        assert documents.delete_owned({ana}) == 0
        await add(documents, owner=ana, text="Oslo.", pin=True)  # the quota is free again

    asyncio.run(main())


def test_documents_under_way_of_a_removed_key_are_not_stored(llm, owners):
    file, ana, ben = owners
    documents = registry_of(llm, api_key_file=file)
    engine = llm.client._worker
    told, engine.held = engine.told, True

    async def main():
        calls = [asyncio.create_task(add(documents, owner=owner, text="Oslo.", pin=True)) for owner in (ana, ben)]
        while told.count("compute") < 2:
            await asyncio.sleep(0.001)
        Path(file).write_text("ben:2\n")
        documents._keys.reload()
        documents.delete_owned({ana})
        engine.answer()
        gone, kept = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(gone, ApiError)
        assert (gone.status, gone.code) == (401, "invalid_api_key")
        assert kept.id == "a"
        while "forget" not in told:
            await asyncio.sleep(0.001)
        assert told.count("unpin") == told.count("forget") == 1
        assert documents.page(Scope(ana, ana), None, 9) == ([], False)
        keeper = documents.keeper
        assert not keeper.contents._users or set(keeper.contents._users) == {keeper.documents[kept].content}

    asyncio.run(main())


@pytest.mark.parametrize("api_key", [None, "secret"])
def test_metrics_have_a_key_of_their_own(api_key):
    app = create_app(AsyncLLM(), ServerConfig(api_key=api_key, metrics_key="watch"))
    client = TestClient(app, base_url="http://localhost")
    for key, status in ((None, 401), ("secret", 401), ("watch", 200)):
        assert client.get("/metrics", headers=bearer(key) if key else {}).status_code == status
    assert client.get("/metrics", auth=("prometheus", "watch")).status_code == 200
    assert "metrics key" in client.get("/metrics").json()["error"]["message"]
    assert client.get("/v1/models", headers=bearer("watch")).status_code == (200 if api_key is None else 401)
    for path in OPEN_PATHS:
        assert client.get(path).status_code in (200, 503)
    schema = app.openapi()
    assert ("security" in schema) == (api_key is not None)
    assert api_key or schema["paths"]["/metrics"]["get"]["security"]


def test_the_key_of_metrics_is_no_api_key(tmp_path):
    (tmp_path / "keys").write_text("ana:watch\n")
    for arguments in (("watch", None), (None, str(tmp_path / "keys"))):
        with pytest.raises(ConfigError, match="metrics_key"):
            Keys(*arguments, "watch")
