"""`ServeReplicas`: the connection of the gateway to the replicas, over a handle of Ray Serve."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Sequence
from contextvars import Context
from functools import partial
from itertools import count
from typing import Any

import grpc
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from chunkattn.gateway.replicas import Message, Outgoing, ReplicaGoneError, Report
from chunkattn.integrations.ray.membership import Ticket, membership

_ANSWER_S = 5.0
"""Seconds within which a replica must tell its state or its metrics."""
_GONE = (RayError, RayServeException, grpc.RpcError)
"""Errors of a call whose replica has died, is being stopped or cannot be reached."""


class ServeReplicas:
    """`Replicas` over a deployment of `Replica` with a `NamedRouter`.

    Args:
        handle: handle of the deployment.
        channel: the `channel` of the router's options.
    """

    def __init__(self, handle: DeploymentHandle[Any], channel: str) -> None:
        options = {"request_serialization": "pickle", "response_serialization": "pickle"}
        self._calls = handle.options(method_name="call", stream=True, **options)
        self._reports = handle.options(method_name="report", **options)
        self._metrics = handle.options(method_name="metrics", **options)
        self._handle, self._members = handle, membership(channel)
        self._numbers = count()
        self._read: dict[str, tuple[str, int]] = {}  # generation and version of the last report
        self._running: dict[asyncio.Future[Any], str] = {}  # replica by the future that ends a call
        self._closed = False

    async def open(self) -> None:
        """Connect. The handle connects by itself when it is made."""

    async def close(self) -> None:
        """Disconnect; running answers end with `ReplicaGoneError`."""
        self._closed = True
        for name in set(self._running.values()):
            self.drop(name)
        await self._handle.shutdown_async()

    def drop(self, name: str) -> None:
        """End the running requests of a replica with `ReplicaGoneError`."""
        for gone, where in self._running.items():
            if where == name and not gone.done():
                gone.set_exception(ReplicaGoneError(f"the gateway no longer waits for the replica {name}"))

    def names(self) -> Sequence[str]:
        """Return the names of the replicas that exist now, ready or not."""
        return self._members.names

    async def send(self, name: str, request: Outgoing) -> AsyncIterator[Message]:
        """Send a request and return its answer, message by message as they come. Closing the iterator aborts the request.

        Args:
            name: one of `names()`.
            request: the request.

        Raises:
            ReplicaGoneError: the replica is gone.
        """
        number, gone = self._enter(name)
        fields = (request.method, request.path, request.query, list(request.headers), request.body)
        answer = _apart(self._calls, fields, to=(name, number))
        reading: asyncio.Future[bytes] | None = None
        ended = False
        try:
            while True:
                reading = asyncio.ensure_future(anext(answer))
                await asyncio.wait({reading, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    gone.result()  # raises
                try:
                    batch = reading.result()
                except StopAsyncIteration:
                    ended = True
                    return
                except _GONE as error:
                    raise ReplicaGoneError(f"the replica {name} is gone: {type(error).__name__}") from error
                except asyncio.CancelledError:
                    raise ReplicaGoneError(f"the replica {name} has cancelled the request") from None
                for message in pickle.loads(batch):
                    yield message
        finally:
            self._leave(name, number, gone)
            if not ended:
                answer.cancel()
                if reading is not None and not reading.done():
                    reading.cancel()

    async def report(self, name: str) -> Report:
        """Return the state of a replica.

        Raises:
            ReplicaGoneError: the replica cannot be asked.
        """
        generation, version = self._read.get(name, ("", 0))
        report, version = await self._ask(self._reports, name, version)
        # All of it the next time, if what was read before is of another cache.
        self._read[name] = report.generation, version if report.generation == generation else 0
        return report

    async def metrics(self, name: str) -> str:
        """Return the metrics of a replica in Prometheus's text format.

        Raises:
            ReplicaGoneError: the replica cannot be asked.
        """
        return await self._ask(self._metrics, name)

    async def _ask(self, method: DeploymentHandle[Any], name: str, *arguments: Any) -> Any:
        number, gone = self._enter(name)
        answer = _apart(method, *arguments, to=(name, number))
        reading = asyncio.ensure_future(_result(answer))
        try:
            await asyncio.wait({reading, gone}, timeout=_ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                gone.result()
            if not reading.done():
                raise ReplicaGoneError(f"the replica {name} does not answer within {_ANSWER_S:g} s")
            return reading.result()
        except _GONE as error:
            raise ReplicaGoneError(f"the replica {name} is gone: {type(error).__name__}") from error
        finally:
            self._leave(name, number, gone)
            if not reading.done():
                answer.cancel()
                reading.cancel()

    def _enter(self, name: str) -> tuple[int, asyncio.Future[Any]]:
        if self._closed:
            raise ReplicaGoneError("the gateway is closing")
        number, gone = next(self._numbers), asyncio.get_running_loop().create_future()
        self._members.wait(number, Ticket(name, gone))
        self._running[gone] = name
        return number, gone

    def _leave(self, name: str, number: int, gone: asyncio.Future[Any]) -> None:
        self._members.settle(name, number)
        self._running.pop(gone, None)
        gone.cancel()


def _apart(method: DeploymentHandle[Any], *arguments: Any, **options: Any) -> Any:
    """Call a method outside of the request that is being answered.

    Ray tells calls that wait for a replica apart by the request in which they were made, so that a second one at the same time
    would wait for ever.
    """
    return Context().run(partial(method.remote, *arguments, **options))


async def _result(answer: Any) -> Any:
    return await answer
