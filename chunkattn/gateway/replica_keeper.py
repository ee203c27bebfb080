"""`ReplicaKeeper`: keeper of the stored documents of a gateway, over its replicas."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from fastapi import Request

from chunkattn.adapter_salt import salted
from chunkattn.documents.background import Background
from chunkattn.documents.keeper import Kept
from chunkattn.documents.records import DocumentRecord, DocumentRecords, Scope
from chunkattn.documents.routes import DOCUMENTS, FORGET
from chunkattn.fair_threads import FairThreads
from chunkattn.gateway.document_requests import DocumentRequests, Owners, beginning, remote_id, salt_of
from chunkattn.gateway.headers import outgoing_headers
from chunkattn.gateway.owner_headers import OwnerHeaders
from chunkattn.gateway.replica_answer import ReplicaAnswer, answer_of, refusal_of
from chunkattn.gateway.replicas import Outgoing, ReplicaGoneError, Replicas
from chunkattn.gateway.retries import is_passing, retried
from chunkattn.schema.base import Body
from chunkattn.web.errors import ApiError
from chunkattn.web.keys import Keys
from chunkattn.web.options import ServerConfig

logger = logging.getLogger(__name__)

_ENTRY_S = 5.0
"""Seconds that a replica has to tell whether it holds a document."""
_RETRY_S = (0.5, 1.0, 2.0, 5.0, 10.0)
_MOST_UNTOLD = 10_000
"""Documents about which a replica that cannot be reached is told later; the oldest go first."""
_TRY_ELSEWHERE = (429, 502, 503, 504)


class Place(NamedTuple):
    """Copy of a document at a replica.

    Attributes:
        name: name of the replica.
        record: the document.
    """

    name: str
    record: DocumentRecord


class ReplicaKeeper:
    """Keeper of documents over replicas; see `chunkattn.documents.keeper.Keeper`.

    A document is stored at the rendezvous owner of its routing key, under an id that is unique over all clients. A replica that
    cannot be reached when a document changes is told when it can be reached again.

    Args:
        replicas: the replicas.
        policy: routing policy.
        records: records of the documents.
        config: options of the gateway's HTTP server.
        keys: API keys of the gateway.
        patience_s: see `GatewayDocuments`.

    Attributes:
        takes: function that returns whether a replica takes requests.
        adapters: function that returns the names of the replicas' adapters.
        headers: Authorization headers of the documents' owners, which requests to replicas carry.
    """

    def __init__(
        self,
        replicas: Replicas,
        policy: Owners,
        records: DocumentRecords,
        config: ServerConfig,
        keys: Keys,
        patience_s: float,
    ) -> None:
        self._replicas, self._policy, self._records = replicas, policy, records
        self._timeout_s, self._patience_s = config.request_timeout_s, patience_s
        self.threads = FairThreads(1)
        self.takes: Callable[[str], bool] = lambda name: True
        self.adapters: Callable[[], Collection[str]] = lambda: ()
        self._places: dict[str, Place] = {}  # by remote id
        self._untold: dict[str, dict[DocumentRecord, None]] = {}  # documents about which a replica is told later
        self._background = Background()
        self._changed = asyncio.Event()
        self.headers = OwnerHeaders(keys, records, self._changed.set)
        self._requests = DocumentRequests(replicas, policy, self.headers, config.request_timeout_s)

    @property
    def is_ready(self) -> bool:
        """Return True: documents of an earlier process need no replica."""
        return True

    def check(self, body: Body | None, /) -> None:
        """Do nothing: the replicas check model and priority."""

    def close(self) -> None:
        """End the idle threads."""
        self.threads.close()

    def scope(self, request: Request, cache_salt: str | None, model: str | None) -> Scope:
        """Return the namespace of a client's document ids."""
        authorization, adapter = request.headers.get("authorization", ""), model if model in self.adapters() else None
        return Scope(self.headers.note(authorization, is_new=request.method == "POST"), salted(adapter, cache_salt))

    def _place(self, record: DocumentRecord) -> str | None:
        """Return the replica that stores a document, or should."""
        place = self._places.get(remote_id(record))
        return place.name if place is not None and place.name in self._replicas.names() else self._requests.owner(record)

    async def _post(self, records: Sequence[DocumentRecord], *, pin: bool, **fields: Any) -> ReplicaAnswer:
        """Post documents of one scope, prefix and owner to their owner, or to another replica if it cannot take them.

        Args:
            records: the documents.
            pin: whether to pin them.
            **fields: `priority` and `model`.

        Raises:
            ReplicaGoneError: no replica can be reached.
        """
        if pin:
            fields["pin"] = True
        if records[0].keep_states:
            fields["keep_states"] = True
        if (expires := records[0].expires) is not None:
            fields["ttl_s"] = max(0.001, expires - time.time())
        body = self._requests.body(records, **fields)
        request = await self.threads.run(self._requests.make, records[0], "POST", DOCUMENTS, body)
        if request is None:
            raise ReplicaGoneError("the owner of the documents has sent no request since the gateway started")
        first = self._requests.owner(records[0])
        names = sorted(self._replicas.names(), key=lambda name: (not self.takes(name), name != first))[:3]
        answer: ReplicaAnswer | None = None
        for name in names:
            try:
                answer = await self._requests.ask(name, records[0], request)
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
        before = self._places.get(remote_id(record))
        self._places[remote_id(record)] = Place(name, record)
        if before is not None and before.name != name and before.name in self._replicas.names():
            await self._tell(before.name, before.record)

    async def _patient_post(self, records: Sequence[DocumentRecord], **fields: Any) -> ReplicaAnswer:
        """Post documents, once a replica takes them; see `_post`.

        Raises:
            ApiError: 503, no replica can be reached.
        """

        async def attempt() -> ReplicaAnswer | None:
            try:
                return await self._post(records, **fields)
            except ReplicaGoneError:
                return None

        def is_final(answer: ReplicaAnswer | None) -> bool:
            return answer is not None and not is_passing(answer.status, answer.body)

        answer = await retried(attempt, is_final, self._patience_s)
        if answer is None:
            raise ApiError(503, "no replica can store the documents; try again", code="no_replica")
        return answer

    # Documents

    async def store(self, records: Sequence[DocumentRecord], *, priority: int, model: str | None) -> list[Kept]:
        """Store new documents at their owners, all or none, even if the caller is cancelled; they are then forgotten."""
        fields = {"priority": priority} | ({} if model is None else {"model": model})
        storing = self._background.start(self._store(records, fields))
        try:
            return await asyncio.shield(storing)
        except asyncio.CancelledError:
            self._background.start(self._withdraw(storing, records))
            raise

    async def _withdraw(self, storing: asyncio.Task[Any], records: Sequence[DocumentRecord]) -> None:
        await asyncio.wait([storing])
        if storing.exception() is None:
            await self.forget(records)

    async def _store(self, records: Sequence[DocumentRecord], fields: Mapping[str, Any]) -> list[Kept]:
        pin = records[0].pinned
        with self.headers.storing(records[0].scope.owner):
            await self.threads.run(lambda: [self._requests.route(record) for record in records])
            groups: dict[str | None, list[int]] = {}
            for number, record in enumerate(records):
                groups.setdefault(self._requests.owner(record), []).append(number)
            calls = [self._patient_post([records[n] for n in numbers], pin=pin, **fields) for numbers in groups.values()]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            kept, error = [Kept(prefix=beginning(record)) for record in records], None
            for numbers, answer in zip(groups.values(), answers, strict=True):
                if isinstance(answer, BaseException):
                    error = answer
                elif answer.status == 200:
                    for number, entry in zip(numbers, answer.body["data"], strict=True):
                        record = records[number]
                        record.tokens, record.prefix_tokens = entry.get("tokens"), entry.get("prefix_tokens")
                        record.num_bytes, prefix = entry.get("bytes"), entry.get("prefix", kept[number].prefix)
                        flags = bool(entry.get("was_cached")), bool(entry.get("state_kept"))
                        kept[number] = Kept(True, pin, prefix, *flags)
                elif not answer.is_unknown_route:
                    error = refusal_of(answer, numbers)
            if error is not None:
                await self.forget([record for record in records if self._is_placed(record)])
                raise error
            return kept

    def _is_placed(self, record: DocumentRecord) -> bool:
        """Return whether a replica stores a document."""
        place = self._places.get(remote_id(record))
        return place is not None and place.record is record

    async def look_up(self, records: Sequence[DocumentRecord]) -> list[Kept]:
        """Return the state of documents, as far as replicas can be asked."""

        async def ask(record: DocumentRecord) -> Kept:
            name, request = self._place(record), self._requests.make(record, "GET", f"{DOCUMENTS}/{remote_id(record)}")
            if name is not None and request is not None:
                with suppress(ReplicaGoneError):
                    answer = await self._requests.ask(name, record, request, _ENTRY_S)
                    if answer.status == 200 and isinstance(entry := answer.body, Mapping):
                        prefix = entry.get("prefix", beginning(record))
                        cached, pinned, kept = (bool(entry.get(name)) for name in ("cached", "pinned", "state_kept"))
                        return Kept(cached, pinned, prefix, state_kept=kept)
            return Kept(prefix=beginning(record))

        return list(await asyncio.gather(*map(ask, records)))

    async def pin(self, record: DocumentRecord) -> None:
        """Pin a document at its owner."""
        answer = await self._patient_post([record], pin=True)
        if answer.status != 200 and not answer.is_unknown_route:
            raise refusal_of(answer, [0])
        if self._records.get(record.scope, record.id) is not record:
            await self.forget([record])

    async def change(self, record: DocumentRecord) -> None:
        """Tell the replica of a document its lifetime, and that it is no longer pinned."""
        if (name := self._place(record)) is not None:
            await self._tell(name, record)

    async def forget(self, records: Sequence[DocumentRecord]) -> None:
        """Have every replica delete or forget documents. Replicas that cannot be reached are told later."""
        gone = []
        self._changed.set()  # a new document may be pinned elsewhere than at its owner, and have replaced one that is wanted
        for record in records:
            if self._is_placed(record):
                del self._places[remote_id(record)]
            current = self._records.get(record.scope, record.id)
            if (current is None or self._requests.route(current) != self._requests.route(record)) and not self._is_orphan(
                record
            ):
                gone.append(record)
        self._policy.forget([self._requests.route(record) for record in gone])
        await asyncio.gather(*(self._tell(name, record) for record in gone for name in self._replicas.names()))
        for record in records:
            self._settle(record)
        for owner in {record.scope.owner for record in records}:
            self.headers.drop(owner)

    def _is_orphan(self, record: DocumentRecord) -> bool:
        """Return whether no replica can be told about a document, because its owner's key was removed."""
        if is_lost := self.headers.is_lost(record):
            logger.warning("the K/V of a removed document stays until evicted: its owner's API key is not known")
        return is_lost

    async def erase(self, request: Request, records: Sequence[DocumentRecord], *, joins: bool) -> Any:
        """Have every replica forget contents, because copies may be anywhere. Return the answer of the first one."""
        headers, query = outgoing_headers(request.scope), request.scope.get("query_string", b"")
        outgoing = Outgoing("POST", FORGET, query, headers, await request.body())
        answers: dict[str, ReplicaAnswer | None] = {}

        async def known() -> list[str]:
            return list(self._replicas.names())

        async def tell(name: str) -> None:
            async def tell_once() -> ReplicaAnswer | None:
                with suppress(ReplicaGoneError):
                    return await answer_of(self._replicas, name, outgoing, self._timeout_s)
                return None

            def is_final(answer: ReplicaAnswer | None) -> bool:
                if answer is None:
                    return name not in self._replicas.names()
                return not is_passing(answer.status, answer.body)

            answers[name] = None
            answers[name] = await retried(tell_once, is_final, self._patience_s)

        with suppress(TimeoutError):  # then the replicas that have not answered are named
            async with asyncio.timeout(self._timeout_s):
                await asyncio.gather(*map(tell, await retried(known, bool, self._patience_s)))
        if not joins:  # the key of a joined chunk stays, as an estimate
            self._policy.forget([self._requests.route(record) for record in records])
        self.headers.drop(records[0].scope.owner)
        names = self._replicas.names()
        if missed := [n for n, answer in answers.items() if (n in names if answer is None else answer.status >= 500)]:
            text = f"replicas that cannot be reached may still hold the documents: {', '.join(missed)}; send the request again"
            raise ApiError(503, text, code="engine_not_ready")
        final = [answer for answer in answers.values() if answer is not None]
        if not final:
            raise ApiError(503, "there is no replica; try again", code="no_replica")
        if refused := next((answer for answer in final if answer.status >= 400), None):
            raise refusal_of(refused, range(len(records)))
        return final[0].body

    # Updates of replicas

    async def _tell(self, name: str, record: DocumentRecord) -> bool:
        """Tell a replica what has become of a document, now or when the replica can be reached. Return whether it knows."""
        is_told = await self._tell_now(name, record)
        if not is_told:
            untold = self._untold.setdefault(name, {})
            untold[record] = None
            if len(untold) > _MOST_UNTOLD:
                del untold[oldest := next(iter(untold))]
                self._settle(oldest)
            self._changed.set()
        return is_told

    async def _tell_now(self, name: str, record: DocumentRecord) -> bool:
        current, place = self._records.get(record.scope, record.id), self._places.get(remote_id(record))
        path, requests = f"{DOCUMENTS}/{remote_id(record)}", list[Outgoing | None]()
        is_here = place is not None and place.name == name
        if current is record and (place is None or is_here):
            left = "never" if record.expires is None else max(0.001, record.expires - time.time())
            change = {**salt_of(record), "ttl_s": left} | ({} if record.pinned else {"pinned": False})
            requests.append(self._requests.make(record, "PATCH", path, change))
        else:
            if not is_here:
                requests.append(self._requests.make(record, "DELETE", path))
            if current is not record:
                requests.append(self._requests.make(record, "POST", FORGET, self._requests.body([record])))
        for request in requests:
            try:
                if request is None or not (answer := await self._requests.ask(name, record, request)).is_final:
                    return False
            except ReplicaGoneError:
                return False
            if request.method == "DELETE" and answer.status == 200:
                break
        return True

    def _settle(self, record: DocumentRecord) -> None:
        """Note which replicas still hold a removed document."""
        self._records.settle(record, [name for name, records in self._untold.items() if record in records])

    async def restore(self) -> None:
        """Take up what replicas have missed before the gateway was started."""
        for record, names in list(self._records.owed.items()):
            if self._is_orphan(record):
                self._records.settle(record)
            else:
                for name in names or self._replicas.names():
                    self._untold.setdefault(name, {})[record] = None
        self._changed.set()

    def lose(self, names: Collection[str]) -> None:
        """Note that replicas came, went or restarted: what was stored there is to be stored again, where it is pinned."""
        self._places = {rid: place for rid, place in self._places.items() if place.name not in names}
        self._changed.set()

    def _misplaced(self) -> list[DocumentRecord]:
        """Return the pinned documents that are not at their owner, as far as their owners' headers are known."""
        records = []
        for record in self._records:
            if record.pinned and record.is_live and self.headers.get(record) is not None:
                owner, place = self._requests.owner(record), self._places.get(remote_id(record))
                if owner is None or place == (owner, record):
                    continue
                is_elsewhere = place is not None and place.record is record and self.takes(place.name)
                if self.takes(owner) or not is_elsewhere:  # else it waits for its owner there
                    records.append(record)
        return records

    async def run(self) -> None:
        """Pin misplaced documents again and tell replicas what they have missed, until cancelled."""
        failures = 0
        while True:
            if not failures:
                await self._changed.wait()
            self._changed.clear()
            work = *map(self._pin_again, self._misplaced()), *map(self._catch_up, list(self._untold))
            failures = 0 if all(await asyncio.gather(*work)) else failures + 1
            if failures:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_RETRY_S[min(failures, len(_RETRY_S)) - 1]):
                        await self._changed.wait()

    async def _pin_again(self, record: DocumentRecord) -> bool:
        """Pin one document at its owner. Return whether no further try is needed."""
        try:
            answer = await self._post([record], pin=True)
        except ReplicaGoneError:
            return False
        if answer.status == 200:
            if self._records.get(record.scope, record.id) is not record:
                await self.forget([record])
            elif not record.pinned:
                await self.change(record)
            return self._places.get(remote_id(record)) == (self._requests.owner(record), record)
        if not answer.is_final:
            return False
        if not answer.is_unknown_route:
            logger.warning("document %r cannot be pinned again: %s", record.id, answer.body)
        self._places[remote_id(record)] = Place(self._requests.owner(record) or "", record)
        return True

    async def _catch_up(self, name: str) -> bool:
        """Tell a replica what it has missed. Return whether it knows all that it can be told now."""
        if name not in self._replicas.names():
            return True
        for record in list(self._untold[name]):
            if self.headers.get(record) is not None:
                if not await self._tell_now(name, record):
                    return False
                self._untold[name].pop(record, None)
                self._settle(record)
                self.headers.drop(record.scope.owner)
        return True
