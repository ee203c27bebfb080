"""`OwnerHeaders`: the Authorization headers with which a gateway acts for the owners of stored documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b

from chunkattn.documents.records import DocumentRecord, DocumentRecords
from chunkattn.web.keys import Keys


class OwnerHeaders:
    """Authorization headers of the owners of documents, kept in memory alone.

    After a restart of the gateway, the documents of an owner wait for the owner's first request. Headers of clients without
    documents are not kept.

    Args:
        keys: API keys of the gateway. Without named keys, a digest of the header is the owner.
        records: records of the documents.
        on_new: called when the header of one more owner is known.
    """

    def __init__(self, keys: Keys, records: DocumentRecords, on_new: Callable[[], None]) -> None:
        self._keys, self._records, self._on_new = keys, records, on_new
        self._headers: dict[str, bytes] = {}  # by owner
        self._storing: Counter[str | None] = Counter()  # calls that store documents, by owner

    def __len__(self) -> int:
        return len(self._headers)

    def owner_of(self, authorization: str) -> str | None:
        """Return the owner of a request's documents: the salt of a named key, or a digest of the header; None for neither."""
        if self._keys.file is not None and (holder := self._keys.holder(authorization)) is not None:
            return holder.salt
        if not authorization:
            return None
        return blake2b(authorization.encode("latin-1", "replace"), digest_size=16, person=b"owner").hexdigest()

    def note(self, authorization: str, *, is_new: bool = False) -> str | None:
        """Remember the header of a request whose owner has documents. Return the owner.

        Args:
            authorization: Authorization header of the request.
            is_new: whether the request may make an owner.
        """
        owner = self.owner_of(authorization)
        if owner is not None and (is_new or self._has_documents(owner)):
            if owner not in self._headers:
                self._on_new()
            self._headers[owner] = authorization.encode("latin-1", "replace")
        return owner

    def get(self, record: DocumentRecord) -> bytes | None:
        """Return the header for a document; b"" for none, None if it is not known yet."""
        return b"" if record.scope.owner is None else self._headers.get(record.scope.owner)

    def is_lost(self, record: DocumentRecord) -> bool:
        """Return whether no request about a document can be made any more, because its owner's key was removed."""
        return self._keys.file is not None and self.get(record) is None and record.scope.owner not in self._keys.salts

    @contextmanager
    def storing(self, owner: str | None) -> Iterator[None]:
        """Keep the header of an owner whose documents are being stored; they come into the records afterwards."""
        self._storing[owner] += 1
        is_stored = False
        try:
            yield
            is_stored = True
        finally:
            self._storing -= Counter([owner])
            if not is_stored:
                self.drop(owner)

    def drop(self, owner: str | None) -> None:
        """Forget the header of an owner without documents."""
        if owner is not None and not self._storing[owner] and not self._has_documents(owner):
            self._headers.pop(owner, None)

    def _has_documents(self, owner: str | None) -> bool:
        return bool(self._records.count(owner)) or any(record.scope.owner == owner for record in self._records.owed)
