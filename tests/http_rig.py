"""An ASGI application behind the project's HTTP/1.1 connections, in the event loop of the test, and a client of raw bytes."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import uvicorn
from uvicorn.server import ServerState

from chunkattn.web.connection_limits import ConnectionLimits
from chunkattn.web.http import BoundedHttp


@asynccontextmanager
async def listening(app, config, headers=(), **known):
    """Serve an application on a free port of 127.0.0.1.

    Args:
        app: ASGI application.
        config: options of the server.
        headers: headers of every answer.
        **known: keys and shares of the limits.

    Yields:
        The port and the open connections.
    """
    web = uvicorn.Config(app, interface="asgi3", log_config=None, access_log=False, lifespan="off", proxy_headers=False)
    web.load()
    state, limits = ServerState(), ConnectionLimits(config, config.max_connections, **known)
    state.default_headers = list(headers)
    make = partial(BoundedHttp, limits=limits, config=web, server_state=state, app_state={})
    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    checking = asyncio.create_task(limits.watch(state.connections))
    try:
        yield server.sockets[0].getsockname()[1], state.connections
    finally:
        checking.cancel()
        server.close()
        for connected in list(state.connections):
            connected.transport.abort()


@dataclass
class Answer:
    """One answer as it came.

    Attributes:
        status: HTTP status.
        headers: values by name in lower case.
        body: body without its framing.
    """

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


async def read_answer(reader, method):
    """Return the next answer of a connection, without interim ones; None at its end.

    Args:
        reader: stream of the connection.
        method: method of the request.
    """
    while True:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise
            return None
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        answer = Answer(int(first.split()[1]), {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines)})
        if answer.status >= 200:
            break
        assert answer.status == 100
    if method == "HEAD" or answer.status in (204, 304):
        return answer
    if "content-length" in answer.headers:
        answer.body = await reader.readexactly(int(answer.headers["content-length"]))
    elif answer.headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readuntil(b"\r\n"), 16):
            answer.body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    else:
        answer.body = await reader.read()
    return answer
