"""Records of stored documents: what is needed to compute them again, in memory and in a file that survives the process."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from chunkattn.errors import ChunkAttnError, ConfigError

_APPLICATION_ID = 0x63_61_64_73
"""Number that SQLite keeps in the header of the file and tells a file of records from other databases."""
_VERSION = 1
_COLUMNS = "scope, id, prefix, document, created, expires, pinned, tokens, prefix_tokens, num_bytes"
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


class RecordsError(ChunkAttnError, OSError):
    """Change of the records that the file did not take, for example because the disk is full. Nothing was changed."""


class RecordsInUseError(ConfigError):
    """File of records that another process has open."""


class Scope(NamedTuple):
    """Namespace of document ids.

    Attributes:
        owner: client that owns the documents; None for a server that does not tell clients apart.
        cache_salt: salt under which the documents are cached.
    """

    owner: str | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, eq=False)
class Prefix:
    """Prefix of a stored document, as the client gave it.

    Attributes:
        content: text, int32 token ids, or chat messages.
        is_chat: whether the content is the chat messages before the first user message, perhaps none.
        template_options: variables of the chat template.
    """

    content: str | Sequence[int] | Sequence[Mapping[str, Any]]
    is_chat: bool = False
    template_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> Any:
        """Return the text, the list of token ids or the list of messages."""
        return self.content if isinstance(self.content, str) else list(self.content)

    def encode(self) -> bytes:
        """Return the prefix as bytes; equal prefixes have equal bytes."""
        return _encode([self.source, self.is_chat, dict(self.template_options)])


@dataclass(frozen=True, eq=False)
class DocumentRecord:
    """Stored document.

    Attributes:
        scope: namespace of the id.
        id: name of the document, unique in its scope.
        prefix: prefix that the document follows.
        document: text without the document template, or int32 token ids.
        created: creation time in seconds since the epoch.
        expires: expiry time in seconds since the epoch; None for a document without a lifetime.
        pinned: whether the client wants the document's K/V protected from eviction.
        tokens: token count of the document as last computed; None if unknown.
        prefix_tokens: token count of the prefix as last computed; None if unknown.
        num_bytes: bytes of the document's K/V as last computed; None if unknown.
    """

    scope: Scope
    id: str
    prefix: Prefix
    document: str | Sequence[int]
    created: float = field(default_factory=time.time)
    expires: float | None = None
    pinned: bool = False
    tokens: int | None = None
    prefix_tokens: int | None = None
    num_bytes: int | None = None

    @property
    def source(self) -> str | list[int]:
        """Return the text or the token ids of the document."""
        return self.document if isinstance(self.document, str) else list(self.document)


class DocumentRecords:
    """Records of all documents of a server or gateway, in order of creation.

    Reads are answered from memory. Every change is first committed to the file: a change that has returned survives the end
    of the process by any signal. SQLite may lose the last changes when the machine itself stops, but keeps the file sound.
    One process at a time opens a file; the system releases the file when the process ends, however it ends.

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
        self._file = None if self.path is None else _File(self.path)
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
            self._file.rows.close()
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
            with self._file.change() as rows:
                for record in kept:
                    _delete(rows, record)
                    _insert(rows, record)
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
            named = ", ".join(f"{name} = ?" for name in fields)
            values = (*fields.values(), _encode(record.scope), record.id)
            with self._file.change() as rows:
                rows.execute(f"UPDATE documents SET {named} WHERE scope = ? AND id = ?", values)
        self._scopes[record.scope][record.id] = changed
        return changed

    def remove(self, records: Iterable[DocumentRecord]) -> None:
        """Remove records as a whole. Records that are no longer kept are skipped.

        Raises:
            RecordsError: the file did not take the change; all records stay.
        """
        going = [record for record in records if self.get(record.scope, record.id) is record]
        if not going:
            return
        if self._file is not None:
            with self._file.change() as rows:
                for record in going:
                    _delete(rows, record)
        for record in going:
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


class _File:
    """Open file of records.

    Args:
        path: see `DocumentRecords`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = _open(path)
        self._handed_over = False

    def hand_over(self) -> None:
        """Close the file, and refuse later changes."""
        self._handed_over = True
        self.rows.close()

    def read(self) -> Iterator[DocumentRecord]:
        """Yield the records in order of creation.

        Raises:
            ConfigError: a row cannot be read.
        """
        try:
            prefixes = dict(self.rows.execute("SELECT number, content FROM prefixes"))
            for scope, name, prefix, document, created, expires, pinned, *sizes in self.rows.execute(
                f"SELECT {_COLUMNS} FROM documents ORDER BY number"
            ):
                places = Scope(*_decode(scope)), name, Prefix(*_decode(prefixes[prefix])), _decode(document)
                yield DocumentRecord(*places, created, expires, bool(pinned), *sizes)
        except (sqlite3.Error, ValueError, TypeError, LookupError) as error:
            text = f"document store {self.path} is damaged: {error}; restore a copy, or name another file"
            raise ConfigError(text) from None

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """Commit the changes of the context's body as a whole.

        Raises:
            RecordsError: the file did not take the changes.
        """
        if self._handed_over:
            raise RecordsError(f"document store {self.path} is in use by a new process; nothing was changed, try again")
        try:
            self.rows.execute("BEGIN IMMEDIATE")
            try:
                yield self.rows
                self.rows.execute("COMMIT")
            except BaseException:
                if self.rows.in_transaction:  # SQLite rolls back by itself after some errors
                    self.rows.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            text = f"document store {self.path} did not take the change: {error}; nothing was changed"
            raise RecordsError(text) from None


def _insert(rows: sqlite3.Connection, record: DocumentRecord) -> None:
    """Insert the row of a record, and its prefix unless there is an equal one."""
    prefix = record.prefix.encode()
    rows.execute("INSERT OR IGNORE INTO prefixes (content) VALUES (?)", (prefix,))
    ((number,),) = rows.execute("SELECT number FROM prefixes WHERE content = ?", (prefix,))
    sizes = record.tokens, record.prefix_tokens, record.num_bytes
    values = (
        *(_encode(record.scope), record.id, number, _encode(record.source)),
        *(record.created, record.expires, record.pinned, *sizes),
    )
    rows.execute(f"INSERT INTO documents ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)


def _delete(rows: sqlite3.Connection, record: DocumentRecord) -> None:
    """Delete the row of an id, and its prefix if no other row has it."""
    key = _encode(record.scope), record.id
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
        if not is_new and version != _VERSION:
            raise ConfigError(f"{name} has version {version}, and this program reads version {_VERSION}; name another file")
        if is_new:
            for statement in _SCHEMA.split(";"):
                file.execute(statement)
            file.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            file.execute(f"PRAGMA user_version = {_VERSION}")
        file.execute("COMMIT")
        file.execute("PRAGMA journal_mode = WAL")
        file.execute("PRAGMA synchronous = NORMAL")
        file.execute("BEGIN IMMEDIATE")  # holds the lock of the log from now on
        file.execute("COMMIT")
        ((found,), *_) = file.execute("PRAGMA quick_check").fetchall()
        if found != "ok":
            raise ConfigError(f"{name} is damaged: {found}; restore a copy, or name another file")
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


def _compact(content: Any) -> Any:
    """Return token ids as an int32 array, and other contents as they are."""
    is_ids = not isinstance(content, str) and len(content) > 0 and isinstance(content[0], int)
    return array("i", content) if is_ids else content


def _encode(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _decode(value: bytes) -> Any:
    return json.loads(value.decode("utf-8", "surrogatepass"))
