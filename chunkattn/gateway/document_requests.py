"""`DocumentRequests`: requests of a gateway to its replicas about stored documents."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, Protocol
from urllib.parse import urlencode
from weakref import WeakKeyDictionary

from chunkattn.adapter_salt import split
from chunkattn.documents.records import DocumentRecord
from chunkattn.documents.routes import DOCUMENTS
from chunkattn.fair_shares import FairShares
from chunkattn.gateway.owner_headers import OwnerHeaders
from chunkattn.gateway.replica_answer import ReplicaAnswer, answer_of
from chunkattn.gateway.replicas import Outgoing, Replicas
from chunkattn.schema.piece_keys import keys_of

_CONCURRENT = 8
"""Requests about the documents of one owner that are under way at one replica at once; of all owners twice as many."""
_SHOWN_CHARS = 1024
"""Characters of a prefix that an entry shows while no replica can be asked."""


class Owners(Protocol):
    """Part of the routing policy that documents need."""

    def owner(self, key: int) -> str:
        """Return the rendezvous owner of a key."""

    def forget(self, keys: Iterable[int]) -> None:
        """Drop keys from the record of every replica."""


class DocumentRequests:
    """Requests about stored documents: their bodies, the replicas that own the documents, and the answers.

    Args:
        replicas: the replicas.
        policy: routing policy.
        headers: Authorization headers of the documents' owners, which the requests carry.
        timeout_s: seconds within which a replica must answer.
    """

    def __init__(self, replicas: Replicas, policy: Owners, headers: OwnerHeaders, timeout_s: float) -> None:
        self._replicas, self._policy, self._headers, self._timeout_s = replicas, policy, headers, timeout_s
        self._routing_keys: WeakKeyDictionary[DocumentRecord, int] = WeakKeyDictionary()
        self._turns: dict[str, FairShares] = {}  # by replica

    def body(self, records: Sequence[DocumentRecord], **fields: Any) -> dict[str, Any]:
        """Return the body that names prefix and documents of records with one prefix and scope, with their remote ids."""
        prefix = records[0].prefix
        start = {"messages": prefix.source} if prefix.is_chat else {"prefix": prefix.source}
        variables = dict(prefix.template_options)
        options = {
            name: value
            for name, value in (("tools", variables.pop("tools", None)), ("chat_template_kwargs", variables))
            if value
        }
        cited = {} if records[0].cite_as is None else {"citations": True}
        return {**start, "documents": [*map(_sent, records)], **options, **cited, **salt_of(records[0]), **fields}

    def route(self, record: DocumentRecord) -> int:
        """Return the routing key of a document."""
        if (key := self._routing_keys.get(record)) is None:
            header = self._headers.get(record) or b""
            fields = salt_of(record)
            adapters = (fields["model"],) if "model" in fields else ()
            pieces = keys_of(DOCUMENTS, self.body([record]), header.decode("latin-1"), adapters=adapters).pieces
            key = self._routing_keys[record] = pieces[-1][0] if pieces else 0
        return key

    def owner(self, record: DocumentRecord) -> str | None:
        """Return the rendezvous owner of a document; None without replicas."""
        try:
            return self._policy.owner(self.route(record)) if self._replicas.names() else None
        except (LookupError, ValueError):  # the policy knows no replica yet
            return None

    def make(self, record: DocumentRecord, method: str, path: str, body: Any = None) -> Outgoing | None:
        """Return a request on behalf of a document's owner, or None if the owner's header is not known.

        Args:
            record: the document.
            method: HTTP method.
            path: path of the request.
            body: body of the request; without one, the salt is in the query.
        """
        if (header := self._headers.get(record)) is None:
            return None
        headers = [(b"authorization", header)] if header else []
        if body is None:
            return Outgoing(method, path, urlencode(salt_of(record)).encode(), headers)
        return Outgoing(method, path, b"", [(b"content-type", b"application/json"), *headers], json.dumps(body).encode())

    async def ask(self, name: str, record: DocumentRecord, request: Outgoing, timeout_s: float | None = None) -> ReplicaAnswer:
        """Return the answer of a replica to a request about a document.

        Raises:
            ReplicaGoneError: the replica is gone, or has not answered in time.
        """
        async with self._turns.setdefault(name, FairShares(_CONCURRENT, 2 * _CONCURRENT)).turn():
            return await answer_of(self._replicas, name, request, timeout_s or self._timeout_s)


def _sent(record: DocumentRecord) -> Any:
    """Return a document as it is sent to replicas."""
    if not isinstance(record.document, str):
        return record.source
    cite_as = {} if record.cite_as is None else {"cite_as": record.cite_as}
    return {"id": remote_id(record), "text": record.document, **cite_as}


def remote_id(record: DocumentRecord) -> str:
    """Return the id of a document at replicas, unique over all clients of the gateway.

    Token ids have no field for an id: replicas give them the same automatic id as the gateway.
    """
    if not isinstance(record.document, str):
        return record.id
    place = json.dumps([*record.scope, record.id]).encode()
    return f"gw-{blake2b(place, digest_size=16).hexdigest()}"


def salt_of(record: DocumentRecord) -> dict[str, str]:
    """Return the fields of a body, or of a query, that name the adapter and the salt of a document, as far as it has them."""
    adapter, salt = split(record.scope.cache_salt)
    return {name: value for name, value in (("model", adapter), ("cache_salt", salt)) if value is not None}


def beginning(record: DocumentRecord) -> str | None:
    """Return the beginning of a prefix of text."""
    content = record.prefix.content
    return content[:_SHOWN_CHARS] if isinstance(content, str) else None
