"""`Relay`: ASGI application that sends each request to the replica with the most of it in its cache, and relays the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from chunkattn.gateway.documents import GatewayDocuments
from chunkattn.gateway.headers import outgoing_headers, relayed_start
from chunkattn.gateway.metrics import GatewayMetrics
from chunkattn.gateway.options import GatewayOptions
from chunkattn.gateway.policy import Policy
from chunkattn.gateway.replicas import BadStatusError, NotSentError, Outgoing, ReplicaGoneError, Replicas
from chunkattn.gateway.retries import NOT_BEGUN, error_code, pause_s
from chunkattn.gateway.stream_tail import StreamTail
from chunkattn.gateway.text_measure import TextMeasure
from chunkattn.gateway.watch import Watch
from chunkattn.request_record import RECORD
from chunkattn.schema.parts import decides_by_default, documents_of
from chunkattn.schema.piece_keys import Keys, keys_of
from chunkattn.web.bodies import SMALL_BODY, UnreadableError, is_json, is_quick
from chunkattn.web.content_codings import codings_of
from chunkattn.web.errors import ApiError, too_large
from chunkattn.web.http_state import HttpState
from chunkattn.web.keys import Caller
from chunkattn.web.time_limit import ClientLeftError, TimeLimitError, time_limit

_ELSEWHERE = {503: None, 429: "queue_full"}
"""Statuses after which another replica is tried, with the code that the error must have; None for any."""
_MOST_REFUSAL = 1 << 16
"""Bytes of a refusal that is kept until another replica answers; longer ones are relayed."""


@dataclass
class _Answering:
    """Progress of one answer.

    Attributes:
        path: path of the request.
        request_id: id of the request.
        status: status sent to the client; 0 before.
        stream: end of the events sent; None for an answer that is no stream of server-sent events.
        complete: whether its last byte was sent.
    """

    path: str
    request_id: str
    status: int = 0
    stream: StreamTail | None = None
    complete: bool = False


@dataclass
class _Tried:
    """Tries of one replica by one request.

    Attributes:
        at: end of the last try, in seconds of the monotonic clock.
        count: number of tries.
        begun: whether the replica may have begun with the request, so the request may be what ended it.
    """

    at: float = 0.0
    count: int = 0
    begun: bool = False


class Relay:
    """ASGI application in front of replicas.

    Args:
        replicas: connection to the replicas.
        policy: policy that ranks them.
        watch: their states.
        options: options of the gateway.
        metrics: metrics of the gateway.
        state: options and bounds of the gateway's HTTP server.
        documents: stored documents.
        measure: takes samples of documents.
    """

    def __init__(
        self,
        replicas: Replicas,
        policy: Policy,
        watch: Watch,
        options: GatewayOptions,
        metrics: GatewayMetrics,
        state: HttpState,
        documents: GatewayDocuments,
        measure: TextMeasure,
    ) -> None:
        self._replicas, self._policy, self._watch, self._options = replicas, policy, watch, options
        self._metrics, self._config, self._bodies = metrics, state.config, state.bodies
        self._documents, self._measure = documents, measure
        self._relays_cors = not state.config.allowed_origins  # else the gateway decides which pages may read its answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request. If the client leaves, the request to the replica is aborted.

        Raises:
            ApiError: the request is refused, no replica has answered, or an answer ended early.
        """
        body = await self._bodies.receive(scope, receive)
        progress = _Answering(scope["path"], scope.get("state", {}).get("request_id", ""))
        try:
            async with time_limit(receive, self._config.request_timeout_s):
                request, keys, by_default = await self._read(scope, body)
                await self._relay(request, keys, by_default, send, progress)
        except ClientLeftError:
            return
        except TimeLimitError as error:
            await _end(progress, error, send)

    async def _read(self, scope: Scope, body: bytes) -> tuple[Outgoing, Keys, bool]:
        """Return the request to a replica, its routing keys, and whether the default method of decisions answers it.

        Raises:
            ApiError: the body cannot be read, is too large, or names a document that is not stored.
        """
        path, headers = scope["path"], dict(scope["headers"])
        listed, keys = outgoing_headers(scope), Keys()
        by_default = "/v1/models" in path and bool(self._candidates({}, True))  # the answer tells the method
        if body and scope["method"] == "POST" and is_json(headers.get(b"content-type", b"application/json").decode("latin-1")):
            authorization = headers.get(b"authorization", b"").decode("latin-1")
            resolved, keys, by_default = await self._resolved(scope, path, body, authorization)
            if resolved is not None:
                body, listed = resolved, [(name, value) for name, value in listed if name != b"content-encoding"]
        raw = (scope.get("raw_path") or path.encode()).decode("latin-1")
        return Outgoing(scope["method"], raw, scope.get("query_string", b""), listed, body), keys, by_default

    async def _resolved(self, scope: Scope, path: str, body: bytes, authorization: str) -> tuple[bytes | None, Keys, bool]:
        """Return a body with texts in the places of ids, None for one without ids; and what `_read` returns beside it.

        Raises:
            ApiError: see `_read`.
        """
        self._documents.note(authorization)

        def measured(value: Any) -> tuple[Any, int]:
            return value, self._documents.added_bytes(path, value, authorization)

        try:
            value, added = await self._bodies.decode(scope, body, measured)
        except UnreadableError:  # the replica answers with the proper error
            return None, Keys(), False
        if added > self._config.max_body_bytes:
            raise too_large(self._config.max_body_bytes)
        if added:
            caller: Caller = scope["state"]["caller"]
            await caller.hold_bytes(len(body) + added, self._config.request_timeout_s)

        def prepared() -> tuple[bytes | None, Keys, bool]:
            resolved = self._documents.resolve(path, value, authorization)
            keys = keys_of(
                path, resolved, authorization, separator=self._options.chunk_separator, adapters=self._watch.adapters
            )
            return None if resolved is value else msgspec.json.encode(resolved), keys, decides_by_default(path, value)

        for document in documents_of(path, value)[:1]:
            self._measure.offer(document.get("text") if isinstance(document, Mapping) else document)
        quick = added <= SMALL_BODY and not codings_of(scope["headers"]) and is_quick(body)
        return await self._bodies.in_turn(prepared, quick=quick)

    async def _relay(self, request: Outgoing, keys: Keys, by_default: bool, send: Send, progress: _Answering) -> None:
        """Send a request to one replica after the other until one answers.

        Raises:
            ApiError: no replica has answered, or an answer ended early.
        """
        tried, refusal, reason = dict[str, _Tried](), None, "no replica takes requests"
        bad_status: BadStatusError | None = None
        left_s, left = self._options.replica_wait_s, self._options.max_tries
        while left:
            names = self._candidates(tried, by_default)
            may_wait = bad_status is None and (refusal is None or refusal[0]["status"] == 503)
            if not names and may_wait and left_s > 0 and self._may_come(tried, by_default):
                began = time.monotonic()
                names = await self._wait(tried, by_default, left_s)
                left_s -= time.monotonic() - began
            if not names:
                break
            began = time.perf_counter()
            name = self._policy.rank(keys, names)[0]
            self._metrics.decision.observe(time.perf_counter() - began)
            attempts = tried.setdefault(name, _Tried())
            if attempts.count:
                began = time.monotonic()
                await self._pause(min(pause_s(attempts.count - 1), max(left_s, 0.0)))
                left_s -= time.monotonic() - began
            attempts.count, attempts.at = attempts.count + 1, float("inf")
            others = left > 1 and bool(self._candidates(tried, by_default))
            elsewhere = {503: left_s > 0 or others, 429: others}
            left -= 1
            began = time.monotonic()
            try:
                refusal = await self._try(name, request, keys, send, progress, elsewhere)
            except BadStatusError as error:
                bad_status, refusal, is_free = error, None, False
                self._metrics.retries.labels("502").inc()
            except ReplicaGoneError as error:
                refusal, is_free = None, isinstance(error, NotSentError)
                self._watch.note_lost(name)
                if progress.complete:
                    return
                if progress.status:
                    self._metrics.cut.inc()
                    text = "the replica of this answer is gone; send the request again"
                    await _end(progress, ApiError(503, text, code="engine_not_ready"), send)
                    return
                reason = f"the replica is gone ({error})"
                self._metrics.retries.labels("gone").inc()
            else:
                if refusal is None:
                    return
                if is_free := _code(refusal) in NOT_BEGUN:
                    self._watch.note_lost(name)
                self._metrics.retries.labels(str(refusal[0]["status"])).inc()
            attempts.at, attempts.begun = time.monotonic(), not is_free
            if is_free and left_s > 0:
                left, left_s = left + 1, left_s - (attempts.at - began)
        if refusal is not None:
            for message in refusal:
                await send(message)
            return
        if bad_status is not None:
            raise ApiError(502, str(bad_status), code="bad_gateway")
        code = "engine_not_ready" if tried else "no_replica"
        if not tried and by_default and self._candidates(tried, False):
            method = self._watch.decide_method
            reason = f"no replica that decides by {method}, as most do, takes requests; name a method to ask the others"
        raise ApiError(503, f"{reason}; try again", code=code)

    def _candidates(self, tried: Mapping[str, _Tried], by_default: bool) -> list[str]:
        """Return the replicas to send to: those not tried yet, or else those that refused it unread and have reported since.

        A replica that may have begun with the request gets it only once: the request may be what ended the replica. Decisions
        by the default method never go to a replica of another one.
        """
        states, others = self._watch.states, self._others(by_default)

        def may(name: str) -> bool:
            before = tried.get(name)
            return before is None or (not before.begun and states[name].heard > before.at)

        names = self._watch.candidates(may, others)
        return [name for name in names if name not in tried] or names

    def _others(self, by_default: bool) -> Collection[str]:
        """Return the replicas that decide by another method than most, for a request that the default method answers."""
        return self._watch.deciding_otherwise() if by_default else ()

    def _may_come(self, tried: Mapping[str, _Tried], by_default: bool) -> bool:
        """Return whether there is a replica that may take the request later, or none at all at the moment."""
        names = self._watch.states.keys() - self._others(by_default)
        return not names or any(name not in tried or not tried[name].begun for name in names)

    async def _wait(self, tried: Mapping[str, _Tried], by_default: bool, seconds: float) -> list[str]:
        """Return the replicas to send to as soon as there is one; none after `seconds`."""
        with self._metrics.waiting.track_inprogress(), _waiting():
            return await self._watch.until(lambda: self._candidates(tried, by_default), seconds)

    async def _pause(self, seconds: float) -> None:
        with self._metrics.waiting.track_inprogress(), _waiting():
            await asyncio.sleep(seconds)

    async def _try(
        self, name: str, request: Outgoing, keys: Keys, send: Send, progress: _Answering, elsewhere: Mapping[int, bool]
    ) -> list[Message] | None:
        """Relay the answer of one replica. Return the answer instead, unsent, if another replica should be tried.

        Args:
            name: the replica.
            request: the request.
            keys: its routing keys.
            send: channel to the client.
            progress: progress of the answer.
            elsewhere: for the status of a refusal, whether another replica is tried then.

        Raises:
            ReplicaGoneError: the replica is gone.
            BadStatusError: the status of its answer ends no request.
        """
        self._metrics.sent.labels(name).inc()
        missing, asked = self._policy.missing(name, keys), sum(size for _, size in keys.pieces)
        self._metrics.asked.inc(asked)
        self._metrics.missing.inc(missing)
        record, began = RECORD.get(), time.perf_counter()
        if record is not None:
            tries, wait_s = record.route.get("tries", 0) + 1, record.route.get("wait_s", 0.0)
            record.route = {"policy": self._options.policy, "tries": tries, "document_bytes": asked, "missing_bytes": missing}
            record.route |= {"queued_bytes": self._policy.queued(name), "wait_s": wait_s}
        work = self._policy.sent(name, keys, time.monotonic())
        computed = False
        try:
            async with aclosing(self._replicas.send(name, request)) as messages:  # type: ignore[type-var]
                async for message in messages:
                    if not progress.status:
                        if record is not None:
                            record.route["first_byte_s"] = time.perf_counter() - began
                        if elsewhere.get(message["status"]):
                            kept: list[Message] = [relayed_start(message, name, self._relays_cors)]
                            size = 0
                            async for part in messages:
                                kept.append(dict(part))
                                if (size := size + len(part.get("body", b""))) > _MOST_REFUSAL:
                                    break
                            if size <= _MOST_REFUSAL and _is_refusal(kept):
                                return kept
                            for held in kept:
                                await send(held)
                                _note(progress, held)
                            continue
                        message = relayed_start(message, name, self._relays_cors)
                        computed = message["status"] < 400
                    await send(message)  # type: ignore[arg-type]
                    _note(progress, message)
            return None
        finally:
            self._policy.done(name, work, computed=computed)


@contextmanager
def _waiting() -> Iterator[None]:
    """Add the time of a `with` statement to `wait_s` of the request's line in the log."""
    began = time.perf_counter()
    try:
        yield
    finally:
        if (record := RECORD.get()) is not None:
            record.route["wait_s"] = record.route.get("wait_s", 0.0) + time.perf_counter() - began


def _note(progress: _Answering, message: Any) -> None:
    if message["type"] == "http.response.start":
        progress.status = message["status"]
        kind = next((value for key, value in message["headers"] if key == b"content-type"), b"")
        progress.stream = StreamTail() if kind.startswith(b"text/event-stream") else None
    else:
        progress.complete = not message.get("more_body", False)
        if progress.stream is not None:
            progress.stream.add(message.get("body", b""))


def _is_refusal(messages: list[Message]) -> bool:
    """Return whether an answer means that another replica may answer better."""
    code = _ELSEWHERE[messages[0]["status"]]
    return code is None or _code(messages) == code


def _code(messages: list[Message]) -> str | None:
    """Return the error code of a refusal; None if it has none."""
    try:
        return error_code(msgspec.json.decode(b"".join(m.get("body", b"") for m in messages)))
    except msgspec.DecodeError:
        return None


async def _end(progress: _Answering, error: ApiError, send: Send) -> None:
    """End an answer with an error: as the answer, as the last event of a stream, or by cutting the connection.

    Raises:
        ApiError: the answer has not begun, or is no stream.
    """
    if progress.complete:
        return
    if progress.stream is None:
        raise error
    events = progress.stream.ending(error, progress.path, progress.request_id)
    await send({"type": "http.response.body", "body": events, "more_body": False})
