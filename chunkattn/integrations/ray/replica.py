"""`Replica`: one engine and the unchanged server application, as a deployment of Ray Serve."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ray import serve

from chunkattn.async_llm import AsyncLLM
from chunkattn.errors import ChunkAttnError, EngineDeadError
from chunkattn.gateway.replicas import Message, Report
from chunkattn.integrations.ray.keys import ReloadsKeys
from chunkattn.integrations.ray.logs import set_up_logs
from chunkattn.server.app import create_app
from chunkattn.server.routes import status
from chunkattn.server.run import find_decide_method
from chunkattn.web.options import ServerConfig

_HIGH_WATER = 1 << 16
"""Bytes of an answer that wait for the gateway before the application's `send` waits, as uvicorn's limit for a connection."""
_ABORT_S = 5.0
"""Seconds that the application has to end a request whose client has left."""

_POLL_S = 0.1

NOT_STARTED = "the engine did not start: "
"""Text before the reason why a replica could not start."""


class Replica(ReloadsKeys):
    """Engine with the server application. The gateway calls `call` with a request and relays the messages.

    The application's own limits apply at the gateway or here: see the guide "Replicas on Ray Serve".

    Args:
        engine: options of `AsyncLLM`, including the model.
        server: options of `ServerConfig`. `host` and `port` are ignored: the replica listens nowhere, and the gateway checks
            the Host header.

    Raises:
        EngineDeadError: the engine cannot start, for example because its model cannot be loaded.
    """

    async def __init__(self, engine: Mapping[str, Any], server: Mapping[str, Any]) -> None:  # type: ignore[misc]
        # A loopback host refuses other names.
        config = replace(ServerConfig(**server), host="0.0.0.0", report_documents=True)
        set_up_logs(config.log_format)
        options = dict(engine)
        if options.get("kv_store") is not None:
            options["kv_store"] = str(_own_folder(options["kv_store"]))
        self.llm = AsyncLLM(**options)
        try:
            await self.llm.open()
        except ChunkAttnError as error:  # Ray shows the whole traceback, with all causes
            raise EngineDeadError(f"{NOT_STARTED}{error}") from None
        await find_decide_method(self.llm)
        self._app = create_app(self.llm, config)
        self._state = self._app.state.server
        await self._wait_until_ready()
        self.start_reloading(self._state.keys, self._state.documents.delete_owned)

    async def _wait_until_ready(self) -> None:
        """Wait until the application takes requests. Ray stops a former replica as soon as this constructor has returned.

        Raises:
            EngineDeadError: the engine has failed meanwhile.
        """
        while self._state.probe(warm=False) != "ready":
            try:
                await self.check_health()
            except EngineDeadError as error:
                raise EngineDeadError(f"{NOT_STARTED}{error}") from None
            await asyncio.sleep(_POLL_S)

    async def ready_name(self) -> str | None:
        """Return the name of the model once the application is ready, and warm with `ready_when_warm`; None before."""
        return self._state.model_name if self._state.probe(warm=False) == "ready" else None

    async def check_health(self) -> None:
        """Raise if the engine cannot come back. An engine that is starting again is healthy: its requests get 503.

        Raises:
            EngineDeadError: three starts of the engine have failed, or its supervisor has.
        """
        if self.llm.state in ("failed", "closed"):
            raise EngineDeadError(f"the engine has {self.llm.state}: {self.llm.client.reason}")

    async def __del__(self) -> None:
        """Close the engine. Ray calls this method after the running requests, or when their time is over."""
        with suppress(AttributeError):  # the constructor failed before it made the rest
            await self.llm.close()
            self._state.bodies.decoder.close()
            self.stop_reloading()

    async def report(self, since: int = 0, to: Any = None) -> tuple[Report, int]:
        """Return the state of this replica, and its version.

        Args:
            since: version of an earlier report of this replica; only what was sent later is returned.
            to: the router's argument.
        """
        report, status = self._state.reports.report(since), self._state.probe(warm=False)
        ready, responsive = status in ("ready", "unresponsive"), status != "unresponsive"
        held, adapters, method = dict(report["held"]), tuple(report["adapters"]), report["decide_method"]
        return Report(report["generation"], ready, report["capacity"], held, responsive, adapters, method), report["version"]

    async def metrics(self, to: Any = None) -> str:
        """Return the metrics of engine and application in Prometheus's text format.

        Args:
            to: the router's argument.
        """
        return bytes((await status.metrics(self._state)).body).decode()

    async def call(
        self, request: tuple[str, str, bytes, Sequence[tuple[bytes, bytes]], bytes], to: Any = None
    ) -> AsyncIterator[bytes]:
        """Run the application on a request, and yield pickled lists of ASGI messages: those that wait together in one list.

        Closing the iterator, which Ray does when the gateway cancels the call, disconnects the application's client.

        Args:
            request: method, path, query, headers and body; see `chunkattn.gateway.replicas.Outgoing`.
            to: the router's argument.
        """
        method, path, query, headers, body = request
        answer = _Answer(body)
        scope = _scope(method, path, query, headers)
        running = asyncio.create_task(self._app(scope, answer.receive, answer.send))
        running.add_done_callback(answer.end)
        try:
            while batch := await answer.take():
                yield pickle.dumps(batch, protocol=5)
            await running
        finally:
            answer.disconnect()
            if not running.done():
                await asyncio.wait({running}, timeout=_ABORT_S)
                running.cancel()


class _Answer:
    """The ASGI channels of one request: its whole body in, its messages out in batches."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._gone = asyncio.Event()
        self._waiting: list[dict[str, Any]] = []
        self._size, self._ended = 0, False
        self._filled, self._room = asyncio.Event(), asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        """Return the body, then wait for the client to leave."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Add a message, and wait while too much of the answer waits."""
        last = self._waiting[-1] if self._waiting else None
        if last is not None and last["type"] == message["type"] == "http.response.body":
            last["body"] += message.get("body", b"")
            last["more_body"] = message.get("more_body", False)
        else:
            added = dict(message)
            if added["type"] == "http.response.body":
                added["body"] = bytes(added.get("body", b""))
            self._waiting.append(added)
        self._size += len(message.get("body", b""))
        self._filled.set()
        while self._size > _HIGH_WATER and not self._gone.is_set():
            self._room.clear()
            await self._room.wait()

    def end(self, _: Any) -> None:
        """Note that no message follows."""
        self._ended = True
        self._filled.set()

    def disconnect(self) -> None:
        """Tell the application that the client has left."""
        self._gone.set()
        self._room.set()

    async def take(self) -> list[dict[str, Any]]:
        """Return the waiting messages, at least one; an empty list at the end."""
        while not self._waiting and not self._ended:
            self._filled.clear()
            await self._filled.wait()
        taken, self._waiting, self._size = self._waiting, [], 0
        self._room.set()
        return taken


def _scope(method: str, path: str, query: bytes, headers: Sequence[tuple[bytes, bytes]]) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode("latin-1"),
        "query_string": query,
        "root_path": "",
        "headers": [(b"host", b"replica"), *(header for header in headers if header[0] != b"host")],  # HTTP/1.1 demands one
        "client": None,
        "server": None,
        "state": {},
    }


def _own_folder(folder: str) -> Path:
    """Return the folder of this replica's KV store: replicas share no store, and a replica's successor has its rank."""
    rank = serve.get_replica_context().rank
    return Path(folder).expanduser() / f"replica-{0 if rank is None else rank.rank}"
