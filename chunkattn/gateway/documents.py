"""Stored documents over replicas: `/v1/cache/documents` answered by the gateway, and ids replaced by texts."""

from __future__ import annotations

import asyncio
import heapq
import json
import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from typing import Any
from urllib.parse import parse_qs

from starlette.types import Receive, Send
from starlette.types import Scope as ASGIScope

from chunkattn.documents.records import DocumentRecord, DocumentRecords, Prefix, RecordsError, Scope
from chunkattn.gateway.document_answers import RefusedError, decoded, entry, renumbered, settled, unavailable, validated
from chunkattn.gateway.document_ids import Find, bytes_of_ids, salt_of, with_texts
from chunkattn.gateway.document_places import DOCUMENTS, Answer, Credentials, Owners, Places
from chunkattn.gateway.replicas import Outgoing, ReplicaGoneError, Replicas
from chunkattn.gateway.retries import is_passing, retried
from chunkattn.schema.documents import CacheBody, ChangeBody
from chunkattn.web.bodies import Bodies, is_json
from chunkattn.web.errors import ApiError
from chunkattn.web.keys import Keys
from chunkattn.web.middleware import route_path
from chunkattn.web.options import ServerConfig

logger = logging.getLogger(__name__)

_LONGEST_SLEEP_S = 60.0
_MAX_PAGE = 100
_ENTRY_S = 5.0
"""Seconds that a replica has to tell whether it holds a document."""


class GatewayDocuments:
    """Documents that clients store at a gateway, each computed and pinned at the replica that owns it.

    The records are the gateway's own: a document exists from the answer to its POST until it is deleted or expires, whatever
    becomes of the replicas. Prompts hold texts when they reach a replica, so every replica can answer them.

    A replica that cannot be reached when a document is deleted is told when it can be reached again. The gateway keeps that in
    memory: after a restart of the gateway in between, the copy stays at the replica until its cache evicts it.

    Args:
        replicas: connection to the replicas.
        policy: routing policy, whose `set_replicas` is called by others; None leaves it to `use`.
        records: records of the documents, which survive the gateway if they have a file.
        config: limits: `max_cached_documents`, `max_cached_documents_per_key` and `request_timeout_s`.
        keys: named API keys that the gateway checks; None tells clients apart by their Authorization headers.
        authorization: Authorization header for requests that the gateway makes by itself; None uses the header of the
            documents' owner, which the gateway knows once the owner has sent a request.
        patience_s: time in seconds for which a POST or a PATCH asks again while no replica takes documents.
        bodies: reader of the bodies of `app`; None makes one.
    """

    def __init__(
        self,
        replicas: Replicas,
        policy: Owners | None,
        records: DocumentRecords,
        config: ServerConfig | None = None,
        *,
        keys: Keys | None = None,
        authorization: bytes | None = None,
        patience_s: float = 0.0,
        bodies: Bodies | None = None,
    ) -> None:
        self._replicas, self._records, self._keys = replicas, records, keys
        self._config = config or ServerConfig()
        self._patience_s, self._bodies = patience_s, bodies or Bodies(self._config)
        self._credentials = Credentials(authorization)
        self.places = Places(replicas, policy, records, self._credentials, self._config.request_timeout_s)
        self._coming: Counter[str | None] = Counter()
        self._expiries = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    def use(self, policy: Owners) -> None:
        """Set the routing policy."""
        self.places.policy = policy

    async def open(self) -> None:
        """Start expiry and repinning; delete the documents of keys that were removed meanwhile. The replicas must be open."""
        if self._keys is not None and self._keys.file is not None:
            removed = {record.scope.owner for record in self._records} - self._keys.salts - {None}
            if removed:
                logger.warning("the documents of %d removed API keys are deleted", len(removed))
                self.delete_owned({owner for owner in removed if owner is not None})
        self._tasks |= {asyncio.create_task(self._expire()), asyncio.create_task(self.places.run())}
        self.on_change(self._replicas.names())

    async def close(self) -> None:
        """End the tasks and close the records."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._records.close()

    def on_change(self, names: Collection[str]) -> None:
        """Note that replicas came, went or restarted; pinned documents are posted to their owners again.

        Args:
            names: names of these replicas.
        """
        self.places.lost(names)

    def note(self, authorization: str) -> None:
        """Remember the Authorization header of a request whose owner has documents."""
        self._note(Scope(self._owner(authorization)), authorization)

    def added_bytes(self, path: str, body: Any, authorization: str = "") -> int:
        """Return the bytes of the contents that `resolve` puts into a body. May run in a thread."""
        return bytes_of_ids(path, body, self._finder(path, body, authorization)) if isinstance(body, Mapping) else 0

    def resolve(self, path: str, body: Any, authorization: str = "") -> Any:
        """Return a body with the contents of stored documents in the places of their ids; the same object if it names none.

        May run in a thread.

        Args:
            path: path of the request.
            body: decoded JSON body.
            authorization: Authorization header of the request.

        Raises:
            ApiError: as `with_texts`.
        """
        return with_texts(path, body, self._finder(path, body, authorization)) if isinstance(body, Mapping) else body

    def _finder(self, path: str, body: Mapping[str, Any], authorization: str) -> Find:
        scope = Scope(self._owner(authorization), salt_of(path, body))
        return lambda name: self._live(scope, name)

    @staticmethod
    def handles(path: str) -> bool:
        """Return whether the gateway answers a path by itself."""
        return path == DOCUMENTS or path.startswith(f"{DOCUMENTS}/")

    async def app(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        """Answer a request of a client, as an ASGI application for the paths of `handles`.

        Raises:
            ApiError: the body cannot be read, or the client has left.
        """
        body, value = await self._bodies.receive(scope, receive), None
        if body and is_json(dict(scope["headers"]).get(b"content-type", b"").decode("latin-1")):
            value = await self._bodies.decode(scope, body, lambda value: value)
        request = Outgoing(scope["method"], route_path(scope), scope.get("query_string", b""), scope["headers"])
        answer = await self.answer(request, value)
        content = b"" if scope["method"] == "HEAD" else json.dumps(answer.body).encode()
        listed = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode()), *answer.headers]
        await send({"type": "http.response.start", "status": answer.status, "headers": listed})
        await send({"type": "http.response.body", "body": content})

    async def answer(self, request: Outgoing, body: Any = None) -> Answer:
        """Return the answer to a request whose path `handles` names.

        Args:
            request: request of a client, with its path decoded.
            body: decoded JSON body; None decodes that of the request.
        """
        try:
            return Answer(200, await self._answer(request, decoded(request.body) if body is None else body))
        except ApiError as error:
            headers = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
            return Answer(error.status, error.body, headers)
        except RecordsError as error:
            failed = ApiError(503, str(error), code="document_store_failed")
            return Answer(failed.status, failed.body)
        except RefusedError as error:
            return error.answer

    async def _answer(self, request: Outgoing, body: Any) -> Any:
        authorization = dict(request.headers).get(b"authorization", b"").decode("latin-1")
        owner = self._owner(authorization)
        query = {name: values[-1] for name, values in parse_qs(request.query.decode("latin-1")).items()}
        scope = Scope(owner, query.get("cache_salt"))
        self._note(scope, authorization, is_post=request.method == "POST")
        name = request.path.removeprefix(DOCUMENTS).removeprefix("/")
        match request.method, bool(name):
            case "POST", False:
                try:
                    return await self._post(owner, body)
                finally:
                    if not self._records.count(owner) and not self._coming[owner]:
                        self._credentials.drop(owner)
            case "GET" | "HEAD", False:
                return await self._list(scope, query)
            case "GET" | "HEAD", True:
                return (await self._entries([self._get(scope, name)]))[0]
            case "PATCH", True:
                return await self._patch(owner, name, body)
            case "DELETE", True:
                await self._remove([self._get(scope, name)])
                return {"id": name, "object": "cache.document.deleted", "deleted": True}
        allowed = "DELETE, GET, HEAD, PATCH" if name else "GET, HEAD, POST"
        text = f"{request.path} takes {allowed.replace(', ', ' or ')}, not {request.method}"
        raise ApiError(405, text, code="method_not_allowed", Allow=allowed)

    # Scopes

    def _owner(self, authorization: str) -> str | None:
        """Return the owner of a request's documents: the salt of a named key, or a digest of the header; None for neither."""
        if self._keys is not None and self._keys.file is not None:
            holder = self._keys.holder(authorization)
            if holder is None:
                raise ApiError(401, "a valid API key is needed: send 'Authorization: Bearer KEY'", code="invalid_api_key")
            return holder.salt
        if not authorization:
            return None
        return blake2b(authorization.encode("latin-1", "replace"), digest_size=16, person=b"owner").hexdigest()

    def _note(self, scope: Scope, authorization: str, *, is_post: bool = False) -> None:
        """Remember the header of an owner with documents: headers of all others would fill the memory."""
        if not is_post and not self._records.count(scope.owner):
            return
        if self._credentials.note(scope.owner, authorization.encode("latin-1", "replace")):
            self.places.wake()

    def _live(self, scope: Scope, name: str) -> DocumentRecord | None:
        """Return the record of an id that has not expired."""
        found = self._records.get(scope, name)
        return None if found is None or (found.expires or float("inf")) <= time.time() else found

    def _get(self, scope: Scope, name: str) -> DocumentRecord:
        if (found := self._live(scope, name)) is None:
            text = f"there is no document {name[:128]!r} under this salt"
            raise ApiError(404, text, param="document_id", code="document_not_found")
        return found

    # Routes

    async def _post(self, owner: str | None, given: Any) -> dict[str, Any]:
        body = validated(CacheBody, given)
        scope = Scope(owner, body.cache_salt)
        records = self._made(scope, body)
        new = sum(self._records.get(scope, record.id) is None for record in records)
        self._check_count(owner, new)
        self._coming[owner] += new
        try:
            answers = await self._stored(records, body)
        finally:
            self._coming[owner] -= new
            if not self._coming[owner]:
                del self._coming[owner]
        entries = []
        for number, record in enumerate(records):
            told = answers[number] or {}
            sizes = told.get("tokens"), told.get("prefix_tokens"), told.get("bytes")
            records[number] = replace(record, tokens=sizes[0], prefix_tokens=sizes[1], num_bytes=sizes[2])
        before = [old for record in records if (old := self._records.get(scope, record.id)) is not None]
        if self._keys is not None and self._keys.file is not None and owner not in self._keys.salts:
            await self._withdraw(records)
            raise ApiError(401, "the API key was removed while the documents were computed", code="invalid_api_key")
        try:
            kept = self._records.put(records)
        except RecordsError:
            await self._withdraw(records)
            raise
        self._expiries.set()
        self.places.wake()
        changed = [old for old in before if self.places.key(old) not in {self.places.key(record) for record in kept}]
        await self.places.forget(changed)
        for record, found in zip(kept, answers, strict=True):
            known = found is not None
            own = entry(record, found or {}, cached=known, pinned=known and record.pinned)
            entries.append({**own, "was_cached": bool(found and found.get("was_cached"))})
        prompt = (kept[0].prefix_tokens or 0) + sum(record.tokens or 0 for record in kept)
        usage = {"prompt_tokens": prompt, "completion_tokens": 0, "total_tokens": prompt}
        return {"object": "list", "data": entries, "usage": usage}

    def _made(self, scope: Scope, body: CacheBody) -> list[DocumentRecord]:
        """Return the records of a POST.

        Raises:
            ApiError: 400, a document is empty, or repeats an id or a content.
        """
        prefix = Prefix(body.start(), body.messages is not None, body.chat_template_kwargs)
        expires = None if body.ttl_s is None else time.time() + body.ttl_s
        digest, made, seen = blake2b(prefix.encode(), digest_size=16).digest(), list[DocumentRecord](), dict[str, int]()
        for number, (name, source) in enumerate(zip(body.ids(), body.texts(), strict=True)):
            if not source:
                raise ApiError(400, f"documents.{number} is empty", param="documents", code="invalid_value")
            content = json.dumps(source).encode()
            own = f"doc-{blake2b(content, digest_size=12, key=digest).hexdigest()}"
            try:
                record = DocumentRecord(scope, name or own, prefix, source, expires=expires, pinned=body.pin)
                first = min(seen.setdefault(f"id {record.id}", number), seen.setdefault(f"content {own}", number))
            except OverflowError:
                raise ApiError(400, f"documents.{number} has an id that is no token", param="documents") from None
            if first < number:
                text = f"documents.{number} has the id or the content of documents.{first}"
                raise ApiError(400, text, param="documents", code="invalid_value")
            made.append(record)
        return made

    async def _stored(self, records: Sequence[DocumentRecord], body: CacheBody) -> list[Mapping[str, Any] | None]:
        """Store new documents at their owners, all or none. Return each one's entry; None where replicas store none.

        Raises:
            RefusedError: a replica refused documents.
            ApiError: 503, no replica can be reached.
        """
        groups: dict[str | None, list[int]] = {}
        for number, record in enumerate(records):
            groups.setdefault(self.places.owner(record), []).append(number)
        fields = body.model_dump(include={"pin", "ttl_s", "priority", "model"}, exclude_unset=True)
        calls = [self._store([records[n] for n in numbers], **fields) for numbers in groups.values()]
        results = await settled(calls)
        found: list[Mapping[str, Any] | None] = [None] * len(records)
        failed: Exception | None = None
        for numbers, result in zip(groups.values(), results, strict=True):
            if isinstance(result, ReplicaGoneError):
                failed = ApiError(
                    503, "no replica can store the documents; try again", code="no_replica", **{"Retry-After": "1"}
                )
            elif isinstance(result, Answer) and result.status == 200 and isinstance(result.body, Mapping):
                for number, own in zip(numbers, result.body["data"], strict=True):
                    found[number] = own
            elif isinstance(result, Answer) and not result.is_unknown_route:
                failed = RefusedError(renumbered(result, numbers))
            elif isinstance(result, BaseException):
                failed = failed or unavailable("the documents cannot be stored; try again")
                logger.error("documents cannot be stored", exc_info=result)
        if failed is not None:
            await self._withdraw([record for record, own in zip(records, found, strict=True) if own is not None])
            raise failed
        return found

    async def _store(self, records: Sequence[DocumentRecord], **fields: Any) -> Answer:
        """Store documents as `Places.store`, once a replica takes them.

        Raises:
            ReplicaGoneError: no replica can be reached.
        """

        async def attempt() -> Answer | ReplicaGoneError:
            try:
                return await self.places.store(records, **fields)
            except ReplicaGoneError as error:
                return error

        def is_final(result: Answer | ReplicaGoneError) -> bool:
            return isinstance(result, Answer) and not is_passing(result.status, result.body)

        result = await retried(attempt, is_final, self._patience_s)
        if isinstance(result, ReplicaGoneError):
            raise result
        return result

    async def _withdraw(self, records: Sequence[DocumentRecord]) -> None:
        """Remove documents that were stored at replicas and are not recorded. A former document of the id is pinned again."""
        gone = [record for record in records if self._records.get(record.scope, record.id) is None]
        await asyncio.shield(asyncio.ensure_future(self.places.forget(gone)))
        if len(gone) < len(records):
            self.places.lost(self._replicas.names())

    def _check_count(self, owner: str | None, new: int) -> None:
        """Check that `new` more documents fit the limits.

        Raises:
            ApiError: 400, a limit is exceeded.
        """
        limits = [("max_cached_documents", self._config.max_cached_documents, len(self._records) + self._coming.total())]
        if self._keys is not None and self._keys.file is not None:
            most = self._config.max_cached_documents_per_key
            limits.append(("max_cached_documents_per_key", most, self._records.count(owner) + self._coming[owner]))
        for option, most, before in limits:
            if before + new > most:
                text = f"{new} documents more would exceed {option} {most}; delete some first"
                raise ApiError(400, text, param="documents", code="too_many_documents")

    async def _list(self, scope: Scope, query: Mapping[str, str]) -> dict[str, Any]:
        limit = query.get("limit", str(_MAX_PAGE))
        if not (limit.isdecimal() and 1 <= int(limit) <= _MAX_PAGE):
            raise ApiError(
                400, f"limit: a whole number from 1 to {_MAX_PAGE}, got {limit!r}", param="limit", code="invalid_value"
            )
        try:
            found, more = self._records.page(scope, query.get("after"), int(limit))
        except KeyError:
            self._get(scope, query.get("after", ""))
            raise
        return {"object": "list", "data": await self._entries(found), "has_more": more}

    async def _patch(self, owner: str | None, name: str, given: Any) -> dict[str, Any]:
        body = validated(ChangeBody, given)
        record = self._get(Scope(owner, body.cache_salt), name)
        fields: dict[str, Any] = {}
        if body.ttl_s is not None:
            fields["expires"] = None if body.ttl_s == "never" else time.time() + body.ttl_s
        if body.pinned is not None:
            fields["pinned"] = body.pinned
        if body.pinned:
            left = {"ttl_s": body.ttl_s} if isinstance(body.ttl_s, float) else {}
            if body.ttl_s is None and record.expires is not None:
                left = {"ttl_s": max(0.001, record.expires - time.time())}
            try:
                answer = await self._store([record], pin=True, **left)
            except ReplicaGoneError:
                raise unavailable("no replica can pin the document; try again") from None
            if answer.status != 200 and not answer.is_unknown_route:
                raise RefusedError(answer)
        if fields:
            # Another PATCH may have changed the record meanwhile, or a POST its content.
            current = self._records.get(record.scope, record.id)
            if current is None or self.places.key(current) != self.places.key(record):
                await self.places.forget([record])
                raise self._gone(record)
            record = self._records.change(current, **fields)
        self._expiries.set()
        change = {"ttl_s": body.ttl_s} | ({"pinned": False} if body.pinned is False else {})
        told = self.places.about(record, "PATCH", {n: v for n, v in change.items() if v is not None})
        where = self.places.place(record)
        if told is not None and where is not None and not body.pinned and fields:
            await self.places.tell(where, told)
        return (await self._entries([record]))[0]

    @staticmethod
    def _gone(record: DocumentRecord) -> ApiError:
        text = f"there is no document {record.id!r} under this salt"
        return ApiError(404, text, param="document_id", code="document_not_found")

    async def _remove(self, records: Sequence[DocumentRecord]) -> None:
        """Remove records, and then have the replicas forget the documents, even if the caller is cancelled.

        Raises:
            RecordsError: the records were not removed.
        """
        self._records.remove(records)
        task = asyncio.ensure_future(self.places.forget(records))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    def delete_owned(self, owners: Collection[str]) -> int:
        """Delete the documents of owners whose keys are no longer valid. Return their number."""
        going = self._records.owned(set(owners))
        task = asyncio.ensure_future(self._remove(going))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return len(going)

    async def _entries(self, records: Sequence[DocumentRecord]) -> list[dict[str, Any]]:
        """Return the entries of documents; `cached` and `pinned` are asked of the replicas."""

        async def asked(record: DocumentRecord) -> dict[str, Any]:
            name, request = self.places.place(record), self.places.about(record, "GET")
            found: Mapping[str, Any] = {}
            if name is not None and request is not None:
                with suppress(ReplicaGoneError):
                    answer = await self.places.ask(name, request, _ENTRY_S)
                    if answer.status == 200 and isinstance(answer.body, Mapping):
                        found = answer.body
            return entry(record, found, cached=bool(found.get("cached")), pinned=bool(found.get("pinned")))

        return list(await asyncio.gather(*(asked(record) for record in records)))

    async def _expire(self) -> None:
        """Delete documents at the ends of their lifetimes, until cancelled."""
        while True:
            self._expiries.clear()
            now = time.time()
            if gone := self._records.expired(now):
                try:
                    await self._remove(gone)
                except RecordsError as error:
                    logger.error("%s", error)
            next_ones = heapq.nsmallest(1, (r.expires for r in self._records if r.expires is not None and r.expires > now))
            sleep = min(_LONGEST_SLEEP_S, *(end - now for end in next_ones), _LONGEST_SLEEP_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(sleep):  # `wait_for` may lose a cancellation
                    await self._expiries.wait()
