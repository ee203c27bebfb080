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

    Args:
        path: file of the records, made when absent; None keeps the records in memory alone.

    Raises:
        ConfigError: the file is damaged, is no file of records, or has another version. It is left as it is.
        RecordsInUseError: the file is open in another process.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._scopes: dict[Scope, dict[str, DocumentRecord]] = {}
        self._prefixes: WeakValueDictionary[bytes, Prefix] = WeakValueDictionary()
        self._owners: Counter[str | None] = Counter()
        self._file = None if self.path is None else RecordsFile(self.path)
        if self._file is not None:
            try:
                for record in self._file.read():
                    self._keep(self._shared(record))
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
        """Return up to `limit` records of a scope, oldest first, and whether more follow.

        Args:
            scope: scope of the documents.
            after: id of the document before the first returned document; None starts at the oldest document.
            limit: number of records to return at most.

        Raises:
            KeyError: no document has the id `after`.
        """
        own = self._scopes.get(scope, {})
        if after is not None and after not in own:
            raise KeyError(after)
        left = iter(own.values())
        if after is not None:
            next(record for record in left if record.id == after)
        found = list(islice(left, limit + 1))
        return found[:limit], len(found) > limit

    def put(self, records: Sequence[DocumentRecord]) -> list[DocumentRecord]:
        """Add records as a whole. A new record replaces the record of the same id and becomes the youngest.

        Args:
            records: records with distinct ids in each scope.

        Returns:
            The records as they are kept.

        Raises:
            RecordsError: the file did not take the records; none is added.
        """
        kept = [self._shared(record) for record in records]
        if self._file is not None:
            self._file.put(kept)
        for record in kept:
            self._drop(record)
            self._keep(record)
        return kept

    def change(self, record: DocumentRecord, **fields: Any) -> DocumentRecord:
        """Return a record with new values of some fields, kept in the place of the former.

        Args:
            record: a kept record.
            **fields: values of `expires`, `pinned`, `tokens`, `prefix_tokens` or `num_bytes`.

        Raises:
            KeyError: the record is no longer kept.
            RecordsError: the file did not take the change; the record stays as it was.
        """
        if self.get(record.scope, record.id) is not record:
            raise KeyError(record.id)
        changed = replace(record, **fields)
        if self._file is not None:
            self._file.update(record, fields)
        self._scopes[record.scope][record.id] = changed
        return changed

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

    def owned(self, owners: Set[str | None]) -> list[DocumentRecord]:
        """Return the records of owners."""
        return [record for record in self if record.scope.owner in owners]

    def expired(self, now: float) -> list[DocumentRecord]:
        """Return the records whose lifetime has ended.

        Args:
            now: time in seconds since the epoch.
        """
        return [record for record in self if record.expires is not None and record.expires <= now]

    def _shared(self, record: DocumentRecord) -> DocumentRecord:
        """Return the record with compact token ids; records of equal prefixes share one."""
        digest = hashlib.blake2b(record.prefix.encode(), digest_size=16).digest()
        prefix = self._prefixes.get(digest)
        if prefix is None:
            given = record.prefix
            prefix = self._prefixes[digest] = replace(given, content=_compact(given.content))
        return replace(record, prefix=prefix, document=_compact(record.document))

    def _keep(self, record: DocumentRecord) -> None:
        self._scopes.setdefault(record.scope, {})[record.id] = record
        self._owners[record.scope.owner] += 1

    def _drop(self, record: DocumentRecord) -> None:
        own = self._scopes.get(record.scope, {})
        if own.pop(record.id, None) is not None:
            self._owners[record.scope.owner] -= 1
        if not own:
            self._scopes.pop(record.scope, None)
        if not self._owners[record.scope.owner]:
            del self._owners[record.scope.owner]


def _compact(content: Any) -> Any:
    """Return token ids as an int32 array, and other contents as they are."""
    is_ids = not isinstance(content, str) and len(content) > 0 and isinstance(content[0], int)
    return array("i", content) if is_ids else content
