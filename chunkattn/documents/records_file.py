"""File of the records of stored documents: an SQLite database that takes changes whole, and deletions on a full disk."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from chunkattn.documents.record import DocumentRecord, Prefix, RecordsError, RecordsInUseError, Scope, decode, encode
from chunkattn.errors import ConfigError
from chunkattn.private_files import Reserve, allocate, create_private, make_private

logger = logging.getLogger(__name__)

_APPLICATION_ID = 0x63_61_64_73
"""Number that SQLite keeps in the header of the file and tells a file of records from other databases."""
_VERSION = 4
"""Version of the tables. Version 1 has no table `owed`, version 2 no column `keep_states`, and version 3 no `cite_as`."""
_RESERVE_BYTES = 512 << 10
"""Bytes kept for deletions on a full disk. A deletion writes the changed pages, about 20 of 4 KiB for a document."""
_COLUMNS = "scope, id, prefix, document, created, expires, pinned, tokens, prefix_tokens, num_bytes, keep_states"
_SCHEMA = """
CREATE TABLE prefixes (number INTEGER PRIMARY KEY, content BLOB NOT NULL UNIQUE);
CREATE TABLE documents (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    scope BLOB NOT NULL,
    id TEXT NOT NULL,
    prefix INTEGER NOT NULL REFERENCES prefixes (number),
    document BLOB NOT NULL,
    created REAL NOT NULL,
    expires REAL,
    pinned INTEGER NOT NULL,
    tokens INTEGER,
    prefix_tokens INTEGER,
    num_bytes INTEGER,
    UNIQUE (scope, id)
);
CREATE INDEX documents_by_prefix ON documents (prefix);
"""
_OWED = """
CREATE TABLE owed (
    scope BLOB NOT NULL,
    id TEXT NOT NULL,
    prefix BLOB NOT NULL,
    document BLOB NOT NULL,
    created REAL NOT NULL,
    places BLOB NOT NULL,
    PRIMARY KEY (scope, id, created)
)
"""
"""Table of deleted documents whose K/V is not forgotten yet."""
_KEEP_STATES = "ALTER TABLE documents ADD COLUMN keep_states INTEGER NOT NULL DEFAULT 0"


class RecordsFile:
    """Open file of records.

    Args:
        path: see `DocumentRecords`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = _open(path)
        self._handed_over = False
        self._reserve = Reserve(Path(f"{path}-reserve"), _RESERVE_BYTES)
        # Closing a descriptor releases the process's locks on the file, so it opens after SQLite and closes after it.
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        make_private(path, Path(f"{path}-wal"))
        if not self._reserve.fill():
            logger.warning("the disk of the document store %s is full: it takes no new documents until space is free", path)

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self.rows.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def hand_over(self) -> None:
        """Close the file, and refuse later changes."""
        self._handed_over = True
        self.close()

    def read(self) -> Iterator[DocumentRecord]:
        """Yield the records in order of creation.

        Raises:
            ConfigError: a row cannot be read.
        """
        with self._reading() as rows:
            prefixes = dict(rows.execute("SELECT number, content FROM prefixes"))
            for scope, name, prefix, document, created, expires, pinned, *sizes, keeps in rows.execute(
                f"SELECT {_COLUMNS} FROM documents ORDER BY number"
            ):
                content, cite_as = _decoded(document)
                parts = Scope(*decode(scope)), name, Prefix(*decode(prefixes[prefix])), content
                record = DocumentRecord(*parts, created, expires, bool(pinned), *sizes)
                record.keep_states, record.cite_as = bool(keeps), cite_as
                yield record

    def read_owed(self) -> Iterator[tuple[DocumentRecord, list[str]]]:
        """Yield the deleted documents whose K/V is not forgotten, with the places that hold it.

        Raises:
            ConfigError: a row cannot be read.
        """
        with self._reading() as rows:
            for scope, name, prefix, document, created, places in rows.execute("SELECT * FROM owed"):
                content, cite_as = _decoded(document)
                record = DocumentRecord(Scope(*decode(scope)), name, Prefix(*decode(prefix)), content, created)
                record.cite_as = cite_as
                yield record, decode(places)

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        try:
            yield self.rows
        except (sqlite3.Error, ValueError, TypeError, LookupError) as error:
            text = f"document store {self.path} is damaged: {error}; restore a copy, or name another file"
            raise ConfigError(text) from None

    def put(self, records: Sequence[DocumentRecord]) -> None:
        """Insert the rows of records as a whole, each in place of the row of the same id, which is owed.

        Raises:
            RecordsError: the file did not take the records.
        """
        with self._change(grows=True) as rows:
            for record in records:
                _delete(rows, record)
                _insert(rows, record)

    def update(self, record: DocumentRecord, fields: Mapping[str, Any]) -> None:
        """Write new values of some fields of a record.

        Raises:
            RecordsError: the file did not take the change.
        """
        columns = ", ".join(f"{name} = ?" for name in fields)
        with self._change() as rows:
            values = (*fields.values(), encode(record.scope), record.id)
            rows.execute(f"UPDATE documents SET {columns} WHERE scope = ? AND id = ?", values)

    def settle(self, record: DocumentRecord, left: Sequence[str]) -> None:
        """Write the places that still hold the K/V of a deleted document; without any, delete its row.

        A change that the file does not take is logged: the K/V is then forgotten again after the next start.
        """
        set_places = "UPDATE owed SET places = ?" if left else "DELETE FROM owed"
        values = (*([encode(left)] if left else []), encode(record.scope), record.id, record.created)
        try:
            with self._transaction() as rows:
                rows.execute(f"{set_places} WHERE scope = ? AND id = ? AND created = ?", values)
        except (sqlite3.Error, RecordsError) as error:
            logger.warning("%s", self._not_taken(error))

    @contextmanager
    def _change(self, *, grows: bool = False) -> Iterator[sqlite3.Connection]:
        """Commit the changes of the context's body as a whole.

        Args:
            grows: whether the change adds rows. The file then gets its final size and the reserve its own before the commit,
                so neither moving the log into the file nor a deletion needs new space.

        Raises:
            RecordsError: the file did not take the changes.
        """
        try:
            if grows and not self._handed_over and not self._reserve.fill():
                raise OSError("the disk is full; free some space")
            with self._transaction(grows=grows) as rows:
                yield rows
        except (sqlite3.Error, OSError) as error:
            raise self._not_taken(error) from None

    def delete(self, records: Sequence[DocumentRecord]) -> Iterator[Sequence[DocumentRecord]]:
        """Delete the rows of records, and yield the records whose rows are deleted: all at once, or on a full disk in portions.

        Raises:
            RecordsError: the file did not take the change, or not all of it.
        """
        portions, is_begun = [records], False
        while portions:
            portion = portions.pop()
            try:
                try:
                    self._delete_rows(portion)
                except (sqlite3.Error, OSError) as error:
                    if not _is_full(error):
                        raise
                    with self._reserve.lent():
                        self._delete_rows(portion, on_full_disk=True)
            except sqlite3.Error as error:
                if len(portion) == 1 or not _is_full(error):
                    raise self._not_taken(error, is_begun=is_begun) from None
                middle = len(portion) // 2
                portions += [portion[middle:], portion[:middle]]
            else:
                is_begun = True
                yield portion

    def _delete_rows(self, records: Sequence[DocumentRecord], *, on_full_disk: bool = False, is_owed: bool = True) -> None:
        """Delete the rows of records in one transaction.

        Args:
            records: records to delete.
            is_owed: whether the file keeps the documents as owed.
            on_full_disk: whether to write as little as possible, and to give the space of the log back.
        """
        if not on_full_disk:
            with self._transaction(grows=is_owed) as rows:
                for record in records:
                    _delete(rows, record, is_owed=is_owed)
            return
        ((overwrites,),) = self.rows.execute("PRAGMA secure_delete").fetchall()
        self.rows.execute("PRAGMA secure_delete = OFF").fetchall()  # zeros over a document need as much space as the document
        try:
            self._delete_rows(records, is_owed=False)
        finally:
            self.rows.execute(f"PRAGMA secure_delete = {overwrites}").fetchall()
        with suppress(sqlite3.Error):
            self.rows.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    @contextmanager
    def _transaction(self, *, grows: bool = False) -> Iterator[sqlite3.Connection]:
        """Commit the changes of the context's body as a whole; see `_change`."""
        if self._handed_over:
            raise RecordsError(f"document store {self.path} is in use by a new process; nothing was changed, try again")
        self.rows.execute("BEGIN IMMEDIATE")
        try:
            yield self.rows
            if grows:
                self._allocate()
            self.rows.execute("COMMIT")
        except BaseException:
            if self.rows.in_transaction:  # SQLite rolls back by itself after some errors
                self.rows.execute("ROLLBACK")
            raise

    def _allocate(self) -> None:
        """Allocate the pages of the open transaction in the file, to which SQLite moves them from its log later.

        Raises:
            OSError: the disk has no room.
        """
        ((pages,),), ((size,),) = (self.rows.execute(f"PRAGMA {name}").fetchall() for name in ("page_count", "page_size"))
        if (have := os.fstat(self._descriptor).st_size) < pages * size:
            try:
                allocate(self._descriptor, have, pages * size)
            except OSError as error:
                os.ftruncate(self._descriptor, have)
                raise OSError(f"the disk has no room for it: {error.strerror}") from None

    def _not_taken(self, error: Exception, *, is_begun: bool = False) -> RecordsError:
        if isinstance(error, RecordsError):
            return error
        outcome = "only a part was deleted; try again" if is_begun else "nothing was changed"
        return RecordsError(f"document store {self.path} did not take the change: {error}; {outcome}")


def _is_full(error: sqlite3.Error | OSError) -> bool:
    """Return whether a change failed because a disk, a quota or a file size limit is exhausted."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorname", "") in ("SQLITE_FULL", "SQLITE_IOERR_WRITE")
    return not isinstance(error, RecordsError)


def _insert(rows: sqlite3.Connection, record: DocumentRecord) -> None:
    """Insert the row of a record, and its prefix unless there is an equal one."""
    prefix = record.prefix.encode()
    rows.execute("INSERT OR IGNORE INTO prefixes (content) VALUES (?)", (prefix,))
    ((number,),) = rows.execute("SELECT number FROM prefixes WHERE content = ?", (prefix,))
    sizes = record.tokens, record.prefix_tokens, record.num_bytes, record.keep_states
    values = (
        *(encode(record.scope), record.id, number, _encoded(record)),
        *(record.created, record.expires, record.pinned, *sizes),
    )
    rows.execute(f"INSERT INTO documents ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)


def _encoded(record: DocumentRecord) -> bytes:
    """Return the content of a record as bytes, in an object with `cite_as` if it has one."""
    content = record.source
    return encode(content if record.cite_as is None else {"content": content, "cite_as": record.cite_as})


def _decoded(value: bytes) -> tuple[Any, str | None]:
    """Return content and `cite_as` of `_encoded`."""
    content = decode(value)
    return (content["content"], content["cite_as"]) if isinstance(content, Mapping) else (content, None)


def _delete(rows: sqlite3.Connection, record: DocumentRecord, *, is_owed: bool = True) -> None:
    """Delete the row of an id, and its prefix if no other row has it; keep the document as owed."""
    key = encode(record.scope), record.id
    if is_owed:
        rows.execute(
            "INSERT OR REPLACE INTO owed SELECT scope, id, content, document, created, ? FROM documents "
            "JOIN prefixes ON prefixes.number = prefix WHERE scope = ? AND id = ?",
            (encode([]), *key),
        )
    for (prefix,) in list(rows.execute("SELECT prefix FROM documents WHERE scope = ? AND id = ?", key)):
        rows.execute("DELETE FROM documents WHERE scope = ? AND id = ?", key)
        unused = "number = ? AND NOT EXISTS (SELECT 1 FROM documents WHERE prefix = ?)"
        rows.execute(f"DELETE FROM prefixes WHERE {unused}", (prefix, prefix))


def _open(path: Path) -> sqlite3.Connection:
    """Return the connection to a file of records, made when absent.

    Raises:
        ConfigError: see `DocumentRecords`.
    """
    name = f"document store {path}"
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{name} is not a regular file; name a file")
        create_private(path)
        file = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
    except (sqlite3.Error, OSError, ValueError) as error:
        raise ConfigError(f"{name} cannot be opened: {error}; the folder must exist and be writable") from None
    try:
        file.execute("PRAGMA locking_mode = EXCLUSIVE")
        file.execute("BEGIN EXCLUSIVE")
        ((application,),), ((version,),) = (file.execute(f"PRAGMA {n}").fetchall() for n in ("application_id", "user_version"))
        ((tables,),) = file.execute("SELECT count(*) FROM sqlite_master").fetchall()
        is_new = not (application or version or tables)
        if not is_new and application != _APPLICATION_ID:
            raise ConfigError(f"{name} is a database of another program; name another file")
        if version > _VERSION:
            raise ConfigError(f"{name} has version {version}, and this program reads version {_VERSION}; name another file")
        if is_new:
            for statement in _SCHEMA.split(";"):
                file.execute(statement)
            file.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        if version < 2:
            file.execute(_OWED)
        if version < 3:
            file.execute(_KEEP_STATES)
        if version < _VERSION:
            file.execute(f"PRAGMA user_version = {_VERSION}")
        file.execute("COMMIT")
        file.execute("PRAGMA journal_mode = WAL")
        file.execute("PRAGMA synchronous = NORMAL")
        file.execute("BEGIN IMMEDIATE")  # holds the lock of the log from now on
        file.execute("COMMIT")
        ((outcome,), *_) = file.execute("PRAGMA quick_check").fetchall()
        if outcome != "ok":
            raise ConfigError(f"{name} is damaged: {outcome}; restore a copy, or name another file")
    except sqlite3.Error as error:
        file.close()
        raise _explain(name, error) from None
    except ConfigError:
        file.close()
        raise
    return file


def _explain(name: str, error: sqlite3.Error) -> ConfigError:
    """Return the error of a file that cannot be opened."""
    match getattr(error, "sqlite_errorname", "").split("_")[:2]:
        case ["SQLITE", "BUSY" | "LOCKED"]:
            return RecordsInUseError(f"{name} is in use by another process; give each server a file of its own")
        case ["SQLITE", "NOTADB"]:
            return ConfigError(f"{name} is a file of another kind, or damaged; name another file")
        case ["SQLITE", "CORRUPT"]:
            return ConfigError(f"{name} is damaged: {error}; restore a copy, or name another file")
    return ConfigError(f"{name} cannot be opened: {error}; the folder must exist and be writable")
