"""Records of stored documents, in memory and in a file that survives the process."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from chunkattn.documents.record import DocumentRecord, Prefix, RecordsError, RecordsInUseError, Scope
from chunkattn.documents.records_file import RecordsFile

__all__ = ["DocumentRecord", "DocumentRecords", "Prefix", "RecordsError", "RecordsInUseError", "Scope"]


class DocumentRecords:
    """Records of all documents of a server or gateway, in order of creation.

    Reads are answered from memory. Every change is first committed to the file: a change that has returned survives the end
    of the process by any signal. SQLite may lose the last changes when the machine itself stops, but keeps the file sound.
    One process at a time opens a file; the system releases the file when the process ends, however it ends.

    Only the owner of the file reads it. On a full disk new documents are refused and deletions succeed: they borrow the space
    of `PATH-reserve`.

    A removed or replaced document is owed until its keeper has forgotten its K/V. What is owed survives as the records do,
    except for deletions on a full disk.

    Args:
        path: file of the records, made when absent; None keeps the records in memory alone.

    Attributes:
        owed: removed documents whose K/V is not forgotten yet, with the places that hold it; no places stand for every place.

    Raises:
        ConfigError: the file is damaged, is no file of records, or has a newer version. It is left as it is.
        RecordsInUseError: the file is open in another process.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._scopes: dict[Scope, dict[str, DocumentRecord]] = {}
        self._prefixes: WeakValueDictionary[bytes, Prefix] = WeakValueDictionary()
        self._owners: Counter[str | None] = Counter()
        self.owed: dict[DocumentRecord, Sequence[str]] = {}
        self._file = None if self.path is None else RecordsFile(self.path)
        if self._file is not None:
            try:
                for record in self._file.read():
                    self._share(record)
                    self._keep(record)
                self.owed.update(self._file.read_owed())
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def hand_over(self) -> None:
        """Close the file so that another process can open it. Reads still work; changes raise `RecordsError`."""
        if self._file is not None:
            self._file.hand_over()

    def __len__(self) -> int:
        return self._owners.total()

    def __iter__(self) -> Iterator[DocumentRecord]:
        """Iterate over a copy of all records, scope by scope."""
        return iter([record for records in self._scopes.values() for record in records.values()])

    def count(self, owner: str | None) -> int:
        """Return the number of documents of an owner."""
        return self._owners[owner]

    def get(self, scope: Scope, document_id: str) -> DocumentRecord | None:
        """Return the record of an id, or None."""
        return self._scopes.get(scope, {}).get(document_id)

    def page(self, scope: Scope, after: str | None, limit: int) -> tuple[list[DocumentRecord], bool]:
        """Return up to `limit` live records of a scope, oldest first, and whether more follow.

        Args:
            scope: scope of the documents.
            after: id of the document before the first returned document; None starts at the oldest document.
            limit: number of records to return at most.

        Raises:
            KeyError: no document has the id `after`.
        """
        records = self._scopes.get(scope, {})
        left = iter(records.values())
        if after is not None:
            first = records[after]
            next(record for record in left if record is first)
        page = list(islice((record for record in left if record.is_live), limit + 1))
        return page[:limit], len(page) > limit

    def put(self, records: Sequence[DocumentRecord]) -> None:
        """Add records as a whole. A new record replaces the record of the same id and becomes the youngest.

        Args:
            records: records with distinct ids in each scope.

        Raises:
            RecordsError: the file did not take the records; none is added.
        """
        for record in records:
            self._share(record)
        if self._file is not None:
            self._file.put(records)
        for record in records:
            self._drop(record)
            self._keep(record)

    def change(self, record: DocumentRecord, **fields: Any) -> None:
        """Set fields of a kept record.

        Args:
            record: a kept record.
            **fields: values of `expires`, `pinned`, `tokens`, `prefix_tokens` or `num_bytes`.

        Raises:
            KeyError: the record is no longer kept.
            RecordsError: the file did not take the change; the record stays as it was.
        """
        if self.get(record.scope, record.id) is not record:
            raise KeyError(record.id)
        if self._file is not None:
            self._file.update(record, fields)
        for name, value in fields.items():
            setattr(record, name, value)

    def remove(self, records: Iterable[DocumentRecord]) -> None:
        """Remove records as a whole, or on a full disk in portions. Records that are no longer kept are skipped.

        Raises:
            RecordsError: the file did not take the change. The records that are still kept stay.
        """
        going = [record for record in records if self.get(record.scope, record.id) is record]
        if not going:
            return
        for removed in [going] if self._file is None else self._file.delete(going):
            for record in removed:
                self._drop(record)

    def settle(self, record: DocumentRecord, left: Sequence[str] = ()) -> None:
        """Note that the K/V of a removed record is forgotten.

        Args:
            record: the record; nothing happens if it is not owed.
            left: places that still hold the K/V.
        """
        if record not in self.owed:
            return
        if left:
            self.owed[record] = left
        else:
            del self.owed[record]
        if self._file is not None:
            self._file.settle(record, left)

    def owned(self, owners: Set[str | None]) -> list[DocumentRecord]:
        """Return the records of owners."""
        return [record for record in self if record.scope.owner in owners]

    def expired(self, now: float) -> list[DocumentRecord]:
        """Return the records whose lifetime has ended.

        Args:
            now: time in seconds since the epoch.
        """
        return [record for record in self if record.expires is not None and record.expires <= now]

    def _share(self, record: DocumentRecord) -> None:
        """Make the token ids of a record compact, and its prefix one object with all equal prefixes."""
        digest = hashlib.blake2b(record.prefix.encode(), digest_size=16).digest()
        prefix = self._prefixes.get(digest)
        if prefix is None:
            prefix = self._prefixes[digest] = replace(record.prefix, content=_compact(record.prefix.content))
        record.prefix, record.document = prefix, _compact(record.document)

    def _keep(self, record: DocumentRecord) -> None:
        self._scopes.setdefault(record.scope, {})[record.id] = record
        self._owners[record.scope.owner] += 1

    def _drop(self, record: DocumentRecord) -> None:
        records = self._scopes.get(record.scope, {})
        if (former := records.pop(record.id, None)) is not None:
            self._owners[record.scope.owner] -= 1
            self.owed[former] = ()
        if not records:
            self._scopes.pop(record.scope, None)
        if not self._owners[record.scope.owner]:
            del self._owners[record.scope.owner]


def _compact(content: Any) -> Any:
    """Return token ids as an int32 array, and other contents as they are."""
    is_ids = not isinstance(content, str) and len(content) > 0 and isinstance(content[0], int)
    return array("i", content) if is_ids else content
