"""`HttpReplicas`: replicas by URL. Each is a server of chunkattn, or of vLLM with chunkattn's plugin."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
from multidict import CIMultiDict
from yarl import URL

from chunkattn.errors import ConfigError
from chunkattn.gateway.replica_reports import read_metrics, read_models, read_report
from chunkattn.gateway.replicas import BadStatusError, Message, NotSentError, Outgoing, ReplicaGoneError, Report

logger = logging.getLogger(__name__)

T = TypeVar("T")

_RESOLVE_S = 5.0
_METRICS_S = 30.0
_MOST_REPORT = 16 << 20
"""Bytes of a report or of metrics that the gateway reads at most."""
_KEEP_ALIVE_S = 4.0
"""Time in seconds after which an idle connection is closed, before uvicorn closes it by default: 5 s."""
_IDLE_CLOSE_S = 1.0
"""Time in seconds up to which a broken connection counts as one that the replica had closed while it was idle."""
_LONGEST_HEAD = 1 << 16
"""Bytes of one header of an answer."""
_ERRORS = (aiohttp.ClientError, OSError, asyncio.IncompleteReadError, EOFError)
_FINAL = range(200, 600)
"""Statuses that end a request. 101 would end HTTP, and other numbers of three digits mean nothing to a client."""
_WITHOUT_REPORT = (401, 403, 404, 405)
_PORTS = {"http": 80, "https": 443}
_SKIPPED = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
"""Headers that aiohttp adds by itself; the client's own are relayed."""


def check_url(url: str) -> str:
    """Return the base URL of a replica without a slash at its end.

    Raises:
        ConfigError: it is no http or https URL, or has credentials, a query or a fragment.
    """
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  (raises where the port is no number)
    except ValueError as error:
        raise ConfigError(f"{url!r} is no URL: {error}") from None
    if parts.scheme not in _PORTS or not parts.hostname or re.search(r"[\s\x00-\x1f\x7f]", url):
        raise ConfigError(f"a replica is given as http://host:port, got {url!r}")
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(f"{url!r} must have no credentials, query or fragment; give a key as --replica-key")
    return url.rstrip("/")


def _place(url: str) -> tuple[object, ...]:
    """Return what two URLs of one replica have in common."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme), parts.path


class _Plain(NamedTuple):
    """Fields of `Report` of a replica without `/v1/cache/report`, and until when they count."""

    started: str = ""
    capacity: int | None = None
    until: float = 0.0
    adapters: tuple[str, ...] = ()
    decide_method: str | None = None


class _Running:
    """Running request, which `drop` ends.

    A timeout without a time interrupts the waiting. Another task around every wait would cost more than the wait itself.
    """

    def __init__(self) -> None:
        self._dropped = False
        self._waiting: asyncio.Timeout | None = None

    async def wait(self, waiting: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine.

        Raises:
            TimeoutError: the request was dropped.
        """
        async with asyncio.timeout(0 if self._dropped else None) as self._waiting:
            try:
                return await waiting
            finally:
                self._waiting = None

    def drop(self, closed: object = None) -> None:
        """End the request. aiohttp leaves a reader waiting if a chunked body is malformed, and only closes the connection."""
        self._dropped = True
        if self._waiting is not None:
            self._waiting.reschedule(0)


class HttpReplicas:
    """Connection to replicas by URL. The URL is the name of a replica; `--resolve` puts the address into it.

    Args:
        urls: base URLs.
        key: API key of the gateway's own requests.
        resolve: take every address of a host as a replica.
        connect_timeout_s: time limit of a connection in seconds.

    Raises:
        ConfigError: a URL is malformed or given twice, or there is none.
    """

    def __init__(
        self, urls: Sequence[str], *, key: str | None = None, resolve: bool = False, connect_timeout_s: float = 3.0
    ) -> None:
        self._urls = [check_url(url) for url in urls]
        if not self._urls:
            raise ConfigError("give the URL of at least one replica, such as http://127.0.0.1:8001")
        places = list(map(_place, self._urls))
        if double := next((url for n, url in enumerate(self._urls) if places[n] in places[:n]), None):
            raise ConfigError(f"the replica {double} is given twice")
        if resolve and (secure := next((url for url in self._urls if url.startswith("https:")), None)):
            raise ConfigError(f"--resolve cannot check the certificate of an address; {secure} needs http, or no --resolve")
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._resolve, self._connect_timeout_s = resolve, connect_timeout_s
        self._names: dict[str, str] = {} if resolve else {url: url for url in self._urls}  # URL by name
        self._addresses: dict[str, list[str]] = {}  # URLs of the addresses of each host, for `resolve`
        self._read: dict[str, tuple[str, int]] = {}  # generation and version of the last report
        self._running: dict[str, set[_Running]] = {}
        self._plain: dict[str, _Plain] = {}  # replicas without /v1/cache/report, see `_plain_report`
        self._resolving: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Make the connection pool; resolve the host names once."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_SKIPPED,
            max_line_size=_LONGEST_HEAD,
            max_field_size=_LONGEST_HEAD,
        )
        if self._resolve:
            await self._look_up()
            self._resolving = asyncio.create_task(self._keep_resolving())

    async def close(self) -> None:
        """Close all connections; running answers end with `ReplicaGoneError`."""
        if self._resolving is not None:
            self._resolving.cancel()
        for name in list(self._running):
            self.drop(name)
        await self._session.close()

    def names(self) -> Sequence[str]:
        """Return the URLs of the replicas."""
        return list(self._names)

    def drop(self, name: str) -> None:
        """End the running requests of a replica with `ReplicaGoneError`."""
        for running in list(self._running.get(name, ())):
            running.drop()

    async def send(self, name: str, request: Outgoing) -> AsyncIterator[Message]:
        """Send a request and return its answer, message by message as they come; see `Replicas.send`.

        Raises:
            ReplicaGoneError: the replica is gone.
            BadStatusError: the status of its answer ends no request.
        """
        if name not in self._names:
            raise NotSentError(f"{name} is no replica any more")
        running = _Running()
        self._running.setdefault(name, set()).add(running)
        answer: aiohttp.ClientResponse | None = None
        closed: asyncio.Future[None] | None = None
        complete = False
        try:
            answer = await running.wait(self._request(name, request))
            protocol = None if answer.connection is None else answer.connection.protocol
            if protocol is not None and (closed := protocol.closed) is not None:
                closed.add_done_callback(running.drop)
                closed.add_done_callback(_retrieve)
            _check_status(name, answer.status)
            headers = [(key.lower(), self._seen(name, key.lower(), value)) for key, value in answer.raw_headers]
            yield {"type": "http.response.start", "status": answer.status, "headers": headers}
            while piece := await running.wait(answer.content.readany()):
                yield {"type": "http.response.body", "body": piece, "more_body": True}
            complete = True
            yield {"type": "http.response.body", "body": b"", "more_body": False}
        except aiohttp.ClientConnectorError as error:
            raise NotSentError(_described(name, error)) from error
        except _ERRORS as error:
            raise ReplicaGoneError(_described(name, error)) from error
        finally:
            self._running[name].discard(running)
            if not self._running[name]:
                del self._running[name]
            if closed is not None:
                closed.remove_done_callback(running.drop)
            if answer is not None:
                if complete:
                    answer.release()
                else:
                    answer.close()  # the replica sees that nobody waits any more

    def _seen(self, name: str, header: bytes, value: bytes) -> bytes:
        """Return the value of a header as clients see it: a redirect to the replica leads to the same path at the gateway."""
        if header != b"location":
            return value
        with suppress(ValueError):
            *base, prefix = _place(self._names[name])
            target = urlsplit(value.decode("latin-1"))
            *place, path = _place(value.decode("latin-1"))
            below = str(path).removeprefix(str(prefix)) or "/"
            if base == place and str(path).startswith(str(prefix)) and below.startswith("/"):
                below = "/" + below.lstrip("/")  # two slashes would begin the name of a host
                return target._replace(scheme="", netloc="", path=below).geturl().encode("latin-1")
        return value

    async def _request(self, name: str, request: Outgoing) -> aiohttp.ClientResponse:
        """Send a request; once more on a new connection if the replica had closed an idle one."""
        query = b"?" + request.query if request.query else b""
        url = URL(self._names[name] + request.path + query.decode("latin-1"), encoded=True)
        headers: CIMultiDict[str] = CIMultiDict((k.decode("latin-1"), v.decode("latin-1")) for k, v in request.headers)
        for last in (False, True):
            began = time.monotonic()
            try:
                return await self._session.request(
                    request.method, url, data=request.body or None, headers=headers, allow_redirects=False
                )
            except (aiohttp.ServerDisconnectedError, ConnectionResetError):
                if last or time.monotonic() - began > _IDLE_CLOSE_S:  # later, the replica may have died of the request
                    raise
        raise AssertionError

    async def report(self, name: str) -> Report:
        """Return the state of a replica, from `/v1/cache/report` or else from `/health` and `/metrics`.

        Raises:
            ReplicaGoneError: the replica cannot be asked.
        """
        try:
            if name in self._plain:
                return await self._plain_report(name)
            generation, version = self._read.get(name, ("", 0))
            status, body = await self._get(name, f"/v1/cache/report?since={version}")
            if status in _WITHOUT_REPORT:
                self._warn_refused(name, status)
                return await self._plain_report(name)
            if status != 200:
                raise ReplicaGoneError(f"{name} answers {status} to its report")
            report, version = read_report(body)
            if report.generation != generation:  # all of it, since what was read before is of another cache
                self._read[name] = report.generation, 0
            else:
                self._read[name] = generation, version
            return report
        except ReplicaGoneError:
            self._plain.pop(name, None)
            raise

    def _warn_refused(self, name: str, status: int) -> None:
        """Tell once that a replica refuses the gateway's key: without its state, capacity and metrics are unknown."""
        if status in (401, 403) and name not in self._plain:
            logger.warning(
                "replica %s answers %d to the gateway's own requests; set --replica-key to one of its keys", name, status
            )

    async def _plain_report(self, name: str) -> Report:
        """Return the state of a replica that has no `/v1/cache/report`. Metrics and models are read at first, and each 30 s."""
        status, body = await self._get(name, "/health")
        generation, unresponsive = "", False
        with suppress(msgspec.DecodeError, TypeError, AttributeError):
            answer = msgspec.json.decode(body)
            unresponsive = answer.get("status") == "unresponsive"
            generation = f"{answer.get('started', '')} {answer.get('engine_restarts', '')}"
        plain = self._plain.get(name, _Plain())
        if status == 200 and time.monotonic() > plain.until:
            started, capacity, models = plain.started, plain.capacity, (plain.adapters, plain.decide_method)
            metrics_status, text = await self._get(name, "/metrics")
            if metrics_status == 200:
                started, capacity = read_metrics(text.decode("utf-8", "replace"))
            models_status, listed = await self._get(name, "/v1/models")
            if models_status == 200:
                models = read_models(listed)
            plain = self._plain[name] = _Plain(started, capacity, time.monotonic() + _METRICS_S, *models)
        ready = status == 200 or unresponsive
        _, capacity, _, adapters, method = plain
        return Report(f"{generation} {plain.started}", ready, capacity, {}, not unresponsive, adapters, method)

    async def metrics(self, name: str) -> str:
        """Return the metrics of a replica in Prometheus's text format.

        Raises:
            ReplicaGoneError: the replica cannot be asked, or refuses the gateway's key.
        """
        status, body = await self._get(name, "/metrics")
        if status != 200:
            raise ReplicaGoneError(f"{name} answers {status} to /metrics")
        return body.decode("utf-8", "replace")

    async def _get(self, name: str, path: str) -> tuple[int, bytes]:
        try:
            async with self._session.get(self._names[name] + path, headers=self._headers, allow_redirects=False) as answer:
                _check_status(name, answer.status)
                return answer.status, await _whole(answer.content)
        except KeyError:
            raise ReplicaGoneError(f"{name} is no replica any more") from None
        except _ERRORS as error:
            raise ReplicaGoneError(_described(name, error)) from error

    # Host names

    async def _keep_resolving(self) -> None:
        while True:
            await asyncio.sleep(_RESOLVE_S)
            await self._look_up()

    async def _look_up(self) -> None:
        """Take every address of every host as a replica. A host that cannot be looked up keeps its addresses."""
        for base in self._urls:
            parts = urlsplit(base)
            try:
                entries = await asyncio.get_running_loop().getaddrinfo(
                    parts.hostname, parts.port or 80, type=socket.SOCK_STREAM
                )
            except (OSError, UnicodeError) as error:
                logger.warning("%s cannot be looked up, and keeps its addresses: %s", parts.hostname, error)
                continue
            addresses = []
            for address in sorted({str(entry[4][0]) for entry in entries}):
                shown = f"[{address}]" if ":" in address else address
                addresses.append(f"http://{shown}:{parts.port or 80}{parts.path}")
            self._addresses[base] = addresses
        self._names = {url: url for addresses in self._addresses.values() for url in addresses}
        for known in (self._read, self._plain):
            for name in known.keys() - self._names.keys():
                known.pop(name)


def _retrieve(closed: asyncio.Future[None]) -> None:
    """Take the error of a closed connection, which asyncio would log; the answer's reader has it, too."""
    if not closed.cancelled():
        closed.exception()


async def _whole(content: aiohttp.StreamReader) -> bytes:
    """Return the body of an answer of the gateway's own.

    Raises:
        ReplicaGoneError: it is too long.
    """
    body = bytearray()
    while piece := await content.readany():
        body += piece
        if len(body) > _MOST_REPORT:
            raise ReplicaGoneError(f"its report or metrics exceed {_MOST_REPORT} bytes")
    return bytes(body)


def _check_status(name: str, status: int) -> None:
    """Check that a status ends a request.

    Raises:
        BadStatusError: it does not.
    """
    if status not in _FINAL:
        raise BadStatusError(f"the replica {name} answers with status {status}, which ends no request; 200 to 599 do")


def _described(name: str, error: BaseException) -> str:
    return f"{name}: {type(error).__name__}"
