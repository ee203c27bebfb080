"""Places of stored documents: which replica stores each one, and what replicas have yet to be told."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlencode
from weakref import WeakKeyDictionary

from chunkattn.documents.records import DocumentRecord, DocumentRecords
from chunkattn.gateway.replicas import Outgoing, ReplicaGoneError, Replicas
from chunkattn.gateway.retries import error_code
from chunkattn.schema.piece_keys import keys_of
from chunkattn.web.fair_turns import FairTurns

logger = logging.getLogger(__name__)

DOCUMENTS = "/v1/cache/documents"
FORGET = "/v1/cache/forget"
_CONCURRENT = 16
"""Requests about documents that are under way at one replica at once; half of them of one client."""
_RETRY_S = (0.5, 1.0, 2.0, 5.0, 10.0)
_MOST_OWED = 10_000
"""Requests kept for a replica that cannot be reached; the oldest go first."""
_UNKNOWN_ROUTE = (404, 405)
_TRY_ELSEWHERE = (429, 502, 503, 504)


class Owners(Protocol):
    """Part of the routing policy that documents need."""

    def owner(self, key: int) -> str:
        """Return the rendezvous owner of a key."""

    def forget(self, keys: Iterable[int]) -> None:
        """Drop keys from the record of every replica."""


class Answer(NamedTuple):
    """Whole answer.

    Attributes:
        status: HTTP status.
        body: decoded JSON body; None for a body that is no JSON.
        headers: further headers.
    """

    status: int
    body: Any
    headers: Sequence[tuple[bytes, bytes]] = ()

    @property
    def is_unknown_route(self) -> bool:
        """Return whether the replica has no such route, as vLLM's servers."""
        return self.status in _UNKNOWN_ROUTE and error_code(self.body) not in ("document_not_found", "model_not_found")


@dataclass
class Credentials:
    """Authorization headers with which the gateway asks replicas on behalf of owners.

    Attributes:
        own: header for all owners; None uses the header of the owner's last request, which is kept in memory alone.
    """

    own: bytes | None = None

    def __post_init__(self) -> None:
        self._seen: dict[str, bytes] = {}

    def note(self, owner: str | None, header: bytes) -> bool:
        """Remember the header of an owner's request. Return whether it is the owner's first."""
        if owner is None or self._seen.get(owner) == header:
            return False
        is_first = owner not in self._seen
        self._seen[owner] = header
        return is_first

    def drop(self, owner: str | None) -> None:
        """Forget the header of an owner without documents."""
        if owner is not None:
            self._seen.pop(owner, None)

    def of(self, owner: str | None) -> bytes | None:
        """Return the header for an owner's documents; b"" for none, None if it is not known yet."""
        if self.own is not None:
            return self.own
        return b"" if owner is None else self._seen.get(owner)


async def ask(replicas: Replicas, name: str, request: Outgoing, timeout: float) -> Answer:
    """Return the whole answer of a replica.

    Raises:
        ReplicaGoneError: the replica is gone, or has not answered in time.
    """
    status, body = 0, bytearray()
    messages: AsyncIterator[Mapping[str, Any]] = replicas.send(name, request)
    try:
        async with asyncio.timeout(timeout):
            async for message in messages:
                status = message.get("status", status)
                body += message.get("body", b"")
    except TimeoutError:
        raise ReplicaGoneError(f"replica {name} has not answered within {timeout:g} s") from None
    finally:
        if (close := getattr(messages, "aclose", None)) is not None:
            with suppress(ReplicaGoneError):
                await close()
    try:
        return Answer(status, json.loads(bytes(body) or b"null"))
    except ValueError:
        return Answer(status, None)


def remote_id(record: DocumentRecord) -> str:
    """Return the id of a document at replicas, unique over all clients of the gateway."""
    place = json.dumps([*record.scope, record.id]).encode()
    return f"gw-{blake2b(place, digest_size=16).hexdigest()}"


class Places:
    """Places of the documents of a gateway.

    Args:
        replicas: the replicas.
        policy: routing policy.
        records: records of all documents.
        credentials: Authorization headers.
        timeout: time limit of one request to a replica in seconds.
    """

    def __init__(
        self, replicas: Replicas, policy: Owners | None, records: DocumentRecords, credentials: Credentials, timeout: float
    ) -> None:
        self._replicas, self.policy, self._records = replicas, policy, records
        self._credentials, self._timeout = credentials, timeout
        self._placed: dict[str, str] = {}  # replica by remote id
        self._owed: dict[str, list[Outgoing]] = {}
        self._keys: WeakKeyDictionary[DocumentRecord, int] = WeakKeyDictionary()
        self._turns: dict[str, FairTurns] = {}
        self.is_ready: Callable[[str], bool] = lambda name: True
        self._changed = asyncio.Event()

    # Keys and places

    def body(self, records: Sequence[DocumentRecord], **fields: Any) -> dict[str, Any]:
        """Return the body that names prefix and documents of records with one prefix and scope, with their remote ids."""
        prefix = records[0].prefix
        start = {"messages": prefix.source} if prefix.is_chat else {"prefix": prefix.source}
        options = {"chat_template_kwargs": dict(prefix.template_options)} if prefix.template_options else {}
        salt = {} if records[0].scope.cache_salt is None else {"cache_salt": records[0].scope.cache_salt}
        documents = [{"id": remote_id(r), "text": r.document} if isinstance(r.document, str) else r.source for r in records]
        return {**start, "documents": documents, **options, **salt, **fields}

    def key(self, record: DocumentRecord) -> int:
        """Return the routing key of a document."""
        if record not in self._keys:
            header = self._credentials.of(record.scope.owner) or b""
            pieces = keys_of(DOCUMENTS, self.body([record]), header.decode("latin-1")).pieces
            self._keys[record] = pieces[-1][0] if pieces else 0
        return self._keys[record]

    def owner(self, record: DocumentRecord) -> str | None:
        """Return the rendezvous owner of a document; None without replicas."""
        if self.policy is None or not self._replicas.names():
            return None
        try:
            return self.policy.owner(self.key(record))
        except (LookupError, ValueError):  # the policy knows no replica yet
            return None

    def place(self, record: DocumentRecord) -> str | None:
        """Return the replica that stores a document, or should."""
        placed = self._placed.get(remote_id(record))
        return placed if placed in self._replicas.names() else self.owner(record)

    # Requests

    def request(self, record: DocumentRecord, method: str, path: str, body: Any = None, query: Any = None) -> Outgoing | None:
        """Return a request on behalf of a document's owner, or None if the owner's header is not known."""
        if (header := self._credentials.of(record.scope.owner)) is None:
            return None
        headers = [(b"content-type", b"application/json")] if body is not None else []
        headers += [(b"authorization", header)] if header else []
        content = b"" if body is None else json.dumps(body).encode()
        return Outgoing(method, path, urlencode(query or {}).encode(), headers, content)

    def about(self, record: DocumentRecord, method: str, body: Any = None) -> Outgoing | None:
        """Return a request about one stored document; see `request`."""
        salt = {} if record.scope.cache_salt is None else {"cache_salt": record.scope.cache_salt}
        query = None if body is not None else salt
        return self.request(
            record, method, f"{DOCUMENTS}/{remote_id(record)}", None if body is None else {**salt, **body}, query
        )

    async def ask(self, name: str, request: Outgoing, timeout: float | None = None) -> Answer:
        """Return the answer of a replica; few requests to it are under way at once.

        Args:
            name: the replica.
            request: the request.
            timeout: time limit in seconds; None takes that of a client's request.

        Raises:
            ReplicaGoneError: the replica is gone.
        """
        async with self._turns.setdefault(name, FairTurns(_CONCURRENT)).turn():
            return await ask(self._replicas, name, request, timeout or self._timeout)

    async def store(self, records: Sequence[DocumentRecord], **fields: Any) -> Answer:
        """Post documents of one scope, prefix and owner to their owner, or to another replica if it cannot take them.

        Args:
            records: the documents.
            **fields: fields of the body: `pin`, `ttl_s`, `priority`, `model`.

        Raises:
            ReplicaGoneError: no replica can be reached.
        """
        request = self.request(records[0], "POST", DOCUMENTS, self.body(records, **fields))
        if request is None:
            raise ReplicaGoneError("the owner of the documents has sent no request since the gateway started")
        first = self.owner(records[0])
        names = [*([first] if first is not None else []), *(n for n in self._replicas.names() if n != first)]
        names = sorted(names, key=lambda name: not self.is_ready(name))[:3]
        answer: Answer | None = None
        for name in names:
            try:
                answer = await self.ask(name, request)
            except ReplicaGoneError as error:
                logger.warning("documents cannot be stored at replica %s: %s", name, error)
                continue
            if answer.status == 200:
                await asyncio.gather(*(self._move(record, name) for record in records))
            if answer.status not in _TRY_ELSEWHERE:
                return answer
        if answer is None:
            raise ReplicaGoneError("no replica can store the documents now")
        return answer

    async def _move(self, record: DocumentRecord, name: str) -> None:
        """Note that a replica stores a document; another replica that stored it before deletes it."""
        rid = remote_id(record)
        before, self._placed[rid] = self._placed.get(rid), name
        delete = self.about(record, "DELETE")
        if before not in (None, "", name) and before in self._replicas.names() and delete is not None:
            await self.tell(before or "", delete)

    async def tell(self, name: str, request: Outgoing) -> None:
        """Tell a replica something, or keep it until the replica can be reached."""
        try:
            answer = await self.ask(name, request)
            if answer.status < 500 and answer.status != 429:
                return
        except ReplicaGoneError:
            pass
        self._owe(name, request)

    async def forget(self, records: Sequence[DocumentRecord]) -> None:
        """Have every replica delete or forget removed documents. Replicas that cannot be reached are told later."""
        calls = []
        for record in records:
            is_gone = self._records.get(record.scope, record.id) is None
            if is_gone:
                self._placed.pop(remote_id(record), None)
            delete = self.about(record, "DELETE")
            forget = self.request(record, "POST", FORGET, self.body([record]))
            if delete is None or forget is None:
                logger.warning("the K/V of a removed document stays until evicted: its owner's API key is not known")
                continue
            # A new document of the id has taken the place of the former one, whose content is to be forgotten alone.
            calls += [self._erase(name, delete if is_gone else None, forget) for name in self._replicas.names()]
            if self.policy is not None:
                self.policy.forget([self.key(record)])
        await asyncio.gather(*calls)

    async def _erase(self, name: str, delete: Outgoing | None, forget: Outgoing) -> None:
        """Have a replica delete a document that it may store, and forget its content if it does not."""
        if delete is not None:
            try:
                if (await self.ask(name, delete)).status == 200:
                    return
            except ReplicaGoneError:
                self._owe(name, delete)
        await self.tell(name, forget)

    def _owe(self, name: str, request: Outgoing) -> None:
        owed = self._owed.setdefault(name, [])
        owed.append(request)
        del owed[:-_MOST_OWED]
        self._changed.set()

    # Changes of the replicas

    def lost(self, names: Collection[str]) -> None:
        """Note that replicas came, went or restarted: what was stored there is to be stored again, where it is pinned."""
        self._placed = {rid: name for rid, name in self._placed.items() if name not in names}
        self._changed.set()

    def wake(self) -> None:
        """Look again for pinned documents without a place."""
        self._changed.set()

    def misplaced(self) -> list[DocumentRecord]:
        """Return the pinned documents that are not at their owner, as far as their owners' headers are known."""
        found = []
        for record in self._records:
            if record.pinned and self._credentials.of(record.scope.owner) is not None:
                owner = self.owner(record)
                place = self._placed.get(remote_id(record))
                if owner is None or place == owner:
                    continue
                if self.is_ready(owner) or place is None or not self.is_ready(place):  # else it waits for its owner there
                    found.append(record)
        return found

    async def run(self) -> None:
        """Pin misplaced documents again and tell replicas what they have missed, until cancelled."""
        failures = 0
        while True:
            if not failures:
                await self._changed.wait()
            self._changed.clear()
            done = await asyncio.gather(
                *(self._pin(record) for record in self.misplaced()), *(self._pay(name) for name in list(self._owed))
            )
            failures = 0 if all(done) else failures + 1
            if failures:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_RETRY_S[min(failures, len(_RETRY_S)) - 1]):
                        await self._changed.wait()

    async def _pin(self, record: DocumentRecord) -> bool:
        """Pin one document at its owner. Return whether no further try is needed."""
        left = {} if record.expires is None else {"ttl_s": max(0.001, record.expires - time.time())}
        try:
            answer = await self.store([record], pin=True, **left)
        except ReplicaGoneError:
            return False
        if answer.is_unknown_route:
            self._placed[remote_id(record)] = self.owner(record) or ""
            return True
        kept = self._records.get(record.scope, record.id)
        if answer.status == 200 and (kept is None or not kept.pinned):
            where, request = self._placed.get(remote_id(record)), self.about(record, "PATCH", {"pinned": False})
            if kept is None:
                await self.forget([record])
            elif where is not None and request is not None:
                await self.tell(where, request)
        after = self._placed.get(remote_id(record))
        if 400 <= answer.status < 500 and answer.status != 429:
            logger.warning("document %r cannot be pinned again: %s", record.id, answer.body)
            self._placed[remote_id(record)] = self.owner(record) or ""
            return True
        return answer.status == 200 and after == self.owner(record)

    async def _pay(self, name: str) -> bool:
        """Tell a replica what it has missed. Return whether it knows everything now."""
        if name not in self._replicas.names():
            return True
        for request in self._owed.pop(name, []):
            is_back = self._placed.get(request.path.rpartition("/")[2]) == name  # stored there again meanwhile
            if request.method != "DELETE" or not is_back:
                await self.tell(name, request)
        return name not in self._owed
