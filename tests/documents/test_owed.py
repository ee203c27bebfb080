"""Deletions that are owed when a process ends are made up for after the next start."""

import asyncio
import logging

from chunkattn.documents.records import DocumentRecord, DocumentRecords, Prefix, Scope
from tests.documents.rig import add, registry_of
from tests.gateway.test_documents import TEXTS, URL, Apps, Cluster, named, until

pytest_plugins = ["tests.told_engine"]


def test_a_server_forgets_after_its_start_what_it_owed(llm, tmp_path):
    options = {"document_store": str(tmp_path / "documents")}
    engine = llm.client._worker

    async def main():
        before = registry_of(llm, **options)
        records = [await add(before, name, f"Text of {name}.") for name in "abcd"]
        await add(before, "twin", "Text of c.")
        engine.held = True  # the engine never answers
        for record in records[:3]:
            before._expire(record)
        await until(lambda: engine.told.count("forget") == 2)
        before.close()
        engine.held, engine.waiting = False, []
        engine.told.clear()
        after = registry_of(llm, **options)
        await after.restore()
        await until(lambda: not after.records.owed)
        assert engine.told.count("forget") == 2
        assert [record.id for record in after.page(Scope(), None, 9)[0]] == ["d", "twin"]
        after.close()
        assert DocumentRecords(options["document_store"]).owed == {}

    asyncio.run(main())


def test_a_document_stored_again_is_not_forgotten(llm, tmp_path):
    options = {"document_store": str(tmp_path / "documents")}

    async def main():
        before = registry_of(llm, **options)
        record = await add(before)
        before.records.remove([record])  # and the process ends
        before.close()
        after = registry_of(llm, **options)
        llm.client.state = "starting"
        assert not after.restored
        llm.client.state = "ready"
        llm.client._worker.held = True
        await after.restore()
        adding = asyncio.create_task(add(after))
        await until(lambda: "compute" in llm.client._worker.told)
        llm.client._worker.answer()
        await adding
        await until(lambda: not after.records.owed)
        after.close()

    asyncio.run(main())


def test_a_gateway_tells_a_replica_after_its_start_what_it_missed(llm, tmp_path):
    path, replicas = tmp_path / "documents", Apps(llm, ["a", "b", "c"])

    async def main():
        async with Cluster(llm, path, replicas) as before:
            await before.post(*named(*TEXTS), pin=True)
            home = before.home(TEXTS[0])
            replicas.down = {home}
            assert (await before.call("DELETE", f"{URL}/note-0")).status == 200
        assert TEXTS[0] in {stored.text for stored in replicas.stored(home).values()}
        replicas.down = set()
        async with Cluster(llm, path, replicas) as after:
            await until(lambda: TEXTS[0] not in replicas.pinned())
            await until(lambda: not after.records.owed)
            assert len(replicas.pinned()) == 5

    asyncio.run(main())


def test_a_gateway_gives_up_on_owners_whose_keys_are_gone(llm, tmp_path, caplog):
    (tmp_path / "keys").write_text("ana:ana\n")
    records = DocumentRecords(tmp_path / "documents")
    records.put([DocumentRecord(Scope("ben:2"), "a", Prefix("Read."), "A text.")])
    records.close()

    async def main():
        async with Cluster(llm, tmp_path / "documents", file=tmp_path / "keys") as cluster:
            assert len(cluster.records) == 0
            assert not cluster.records.owed

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert "documents of 1 removed API keys are deleted" in caplog.text
    assert "API key is not known" in caplog.text
