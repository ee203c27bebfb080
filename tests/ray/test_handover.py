"""A gateway gives its stored documents up when it is being stopped, and only then."""

import asyncio

import pytest

from chunkattn.documents.records import DocumentRecord, DocumentRecords, Prefix, RecordsError, RecordsInUseError, Scope
from chunkattn.integrations.ray import handover

RECORD = DocumentRecord(Scope(), "kept", Prefix("Read."), "Rumi is a poet.")


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_waiting_gateway_gets_the_records_of_a_stopped_one(is_stopped, tmp_path, monkeypatch):
    monkeypatch.setattr(handover, "_UNWANTED_S", 0 if is_stopped else 1000)
    monkeypatch.setattr(handover, "_OPEN_S", 1000 if is_stopped else 0.5)
    path = str(tmp_path / "records")

    async def main():
        records = DocumentRecords(path)
        records.put([RECORD])
        former = handover.Handover(records)
        former.start()
        try:
            if not is_stopped:
                with pytest.raises(RecordsInUseError):
                    await handover.open_records(path)
                records.put([RECORD])
                return
            new = await handover.open_records(path)
            assert [found.id for found in new] == ["kept"]
            new.close()
            with pytest.raises(RecordsError):
                records.put([RECORD])
        finally:
            former.stop()
            records.close()

    asyncio.run(main())
    assert not list(tmp_path.glob("*.wanted"))
