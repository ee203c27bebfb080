"""The gateway over real sockets, in front of scripted replicas in the same event loop."""

import asyncio
import json
from collections.abc import Callable
from contextlib import asynccontextmanager
from functools import partial
from urllib.parse import urlsplit

import httpx
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from chunkattn.gateway.app import Gateway
from chunkattn.gateway.http_replicas import HttpReplicas
from chunkattn.gateway.options import GatewayOptions
from chunkattn.web.options import ServerConfig
from tests.http_rig import listening
from tests.patience import PATIENCE_S

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
QUICK = {"report_period_s": 0.05, "report_timeout_s": 0.5, "replica_wait_s": 0}


def run(case, seconds=60):
    """Run a case within a time limit."""

    async def bounded():
        async with asyncio.timeout(seconds):
            await case()

    asyncio.run(bounded())


async def until(condition):
    """Wait for a condition."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


def ask(documents=(), question="Where?", **fields):
    """Return the body of a completion over documents."""
    return {"chunks": {"prefix": "Read.", "documents": list(documents), "question": question}, **fields}


class Call:
    """One request at a replica, with the means to answer it.

    Attributes:
        method, path, query, headers, body: of the request, undecoded.
        left: set once the client has left.
    """

    def __init__(self, replica, scope, body, receive, send):
        self.replica, self.scope, self.body, self.receive, self.send = replica, scope, body, receive, send
        self.method, self.path, self.query = scope["method"], scope["raw_path"].decode(), scope["query_string"].decode()
        self.headers = [(name.decode("latin-1"), value) for name, value in scope["headers"]]
        self.left = asyncio.Event()

    def header(self, name):
        """Return all values of a header."""
        return [value.decode("latin-1") for key, value in self.headers if key == name]

    async def start(self, status=200, kind="application/json", headers=()):
        """Send the start of an answer."""
        listed = [(name.encode(), value.encode("latin-1")) for name, value in headers]
        if kind is not None:
            listed.append((b"content-type", kind.encode()))
        await self.send({"type": "http.response.start", "status": status, "headers": listed})

    async def write(self, body, more=True):
        """Send a piece of an answer."""
        await self.send({"type": "http.response.body", "body": body, "more_body": more})

    async def reply(self, status=200, headers=(), **fields):
        """Send a whole JSON answer."""
        body = json.dumps(fields).encode()
        await self.start(status, headers=[("content-length", str(len(body))), *headers])
        await self.write(body, more=False)

    async def refuse(self, status, code):
        """Send a whole error."""
        await self.reply(status, error={"message": "no", "code": code})

    async def event(self, **fields):
        """Send one event of a stream."""
        await self.write(b"data: " + json.dumps(fields).encode() + b"\n\n")

    async def wait_until_left(self):
        """Wait for the client to leave."""
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.left.set()

    def abort(self):
        """Reset the connection."""
        for connection in list(self.replica.connections):
            if connection.scope is self.scope:
                connection.transport.abort()


class Replica:
    """Scripted server.

    Attributes:
        answer: coroutine function that answers a `Call`; by default with the name of the replica.
        calls: requests so far, those for reports and token counts excepted.
        bytes_per_token: bytes of text per token that `/tokenize` tells; None answers 404.
        report: answer to `/v1/cache/report`; None answers 404.
        texts: bodies of further GET routes by path, such as `/metrics`.
        statuses: statuses of these routes; 200 by default.
        asked: paths of the requests for reports and texts so far.
        reads: whether the body of a request is read before it is answered.
        reporting: cleared to keep reports waiting.
        stopped: whether no request is answered, as by a process after SIGSTOP.
    """

    def __init__(self, name="a"):
        self.name = name
        self.answer: Callable = lambda call: call.reply(name=self.name)
        self.calls: list[Call] = []
        self.report: dict | None = {"generation": "1", "ready": True, "capacity": 1000}
        self.texts: dict[str, bytes] = {}
        self.statuses: dict[str, int] = {}
        self.asked: list[str] = []
        self.reads = True
        self.reporting = asyncio.Event()
        self.reporting.set()
        self.stopped = False
        self.bytes_per_token: float | None = None
        self.port = 0
        self._server = None
        self._state = ServerState()
        self._state.default_headers = [(b"date", b"Thu, 01 Jan 1970 00:00:00 GMT"), (b"server", b"scripted")]

    @property
    def url(self):
        """Return its base URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def connections(self):
        """Return the open connections."""
        return self._state.connections

    async def open(self):
        """Listen, on the same port after `kill`."""
        config = uvicorn.Config(self, interface="asgi3", log_config=None, access_log=False, lifespan="off", proxy_headers=False)
        config.load()
        make = partial(HttpToolsProtocol, config, self._state, {})
        self._server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def kill(self):
        """Stop to listen and reset all connections."""
        self._server.close()
        for connection in list(self.connections):
            connection.transport.abort()

    async def __call__(self, scope, receive, send):
        """Answer one request."""
        body = b""
        while self.reads and (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        call = Call(self, scope, body, receive, send)
        if self.stopped:
            await asyncio.Event().wait()
        if scope["path"] in self.texts or scope["path"] == "/v1/cache/report":
            self.asked.append(scope["path"])
            await self.reporting.wait()
            if scope["path"] in self.texts:
                await call.start(self.statuses.get(scope["path"], 200), "text/plain")
                text = self.texts[scope["path"]]
                await call.write(text[: len(text) // 2])
                await asyncio.sleep(0.001)  # so that one read does not return all of it
                await call.write(text[len(text) // 2 :], more=False)
            elif self.report is None:
                await call.refuse(404, "not_found")
            else:
                await call.reply(**self.report)
            return
        if scope["path"] == "/tokenize":
            self.asked.append(scope["path"])
            if self.bytes_per_token is None:
                await call.refuse(404, "not_found")
            else:
                await call.reply(count=round(len(json.loads(body)["prompt"].encode()) / self.bytes_per_token))
            return
        self.calls.append(call)
        await self.answer(call)


class Rig:
    """The gateway and its clients.

    Attributes:
        gateway: the gateway.
        http: client of the gateway.
        port: port of the gateway.
    """

    def __init__(self, gateway, http, port):
        self.gateway, self.http, self.port = gateway, http, port

    async def ready(self, *replicas):
        """Wait until exactly these replicas take requests."""
        wanted = {replica.url for replica in replicas}
        await until(lambda: set(self.gateway.watch.ready()) == wanted)

    @property
    def queued(self):
        """Return the bytes queued at all replicas."""
        return sum(map(self.gateway.policy.queued, self.gateway.watch.states))

    async def exchange(self, request):
        """Send bytes and return all that comes until the gateway closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        try:
            return await reader.read()
        finally:
            writer.close()


@asynccontextmanager
async def rig(*replicas, urls=None, server=None, transport=None, wait=True, **options):
    """Run the gateway in front of replicas.

    Args:
        replicas: replicas to start and to end with it.
        urls: their URLs, if others than their own.
        server: options of the gateway's HTTP server.
        transport: `Replicas` instead of those over HTTP.
        wait: whether to wait until all replicas are ready.
        options: options of the gateway.
    """
    for replica in replicas:
        await replica.open()
    config, given = ServerConfig(**(server or {})), GatewayOptions(**{**QUICK, **options})
    connection = transport or HttpReplicas(
        urls or [replica.url for replica in replicas],
        key=given.replica_key,
        resolve=given.resolve,
        connect_timeout_s=given.connect_timeout_s,
    )
    gateway = Gateway(connection, given, config)
    await gateway.open()
    headers = [(b"date", b"Fri, 02 Jan 1970 00:00:00 GMT"), (b"server", b"gateway")]
    try:
        async with listening(gateway.app, config, headers) as (port, _), client(port) as http:
            made = Rig(gateway, http, port)
            if wait and transport is None:
                await made.ready(*replicas)
            yield made
    finally:
        await gateway.close()
        for replica in replicas:
            replica.kill()


def client(port):
    """Return a client of a port of this machine."""
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, verify=False, trust_env=False)


def events(text):
    """Return the events of a stream as objects, `[DONE]` as a text."""
    found = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(event) if event != "[DONE]" else event for event in found]


def answered_by(answer):
    """Return the port of the replica that has answered."""
    return urlsplit(answer.headers["x-chunkattn-replica"]).port


def scripted(*answers):
    """Return two replicas that answer the first, second, ... of all requests by scripts."""
    a, b = Replica("a"), Replica("b")
    left = list(answers)

    async def answer(call):
        script = left.pop(0) if left else None
        await (script(call) if script else call.reply(name=call.replica.name))

    a.answer = b.answer = answer
    return a, b


def raw(method, target, *headers, body=b""):
    """Return the bytes of a request after which the connection closes."""
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", "Connection: close", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def parts(answer):
    """Return the status, the headers in lower case and the body of an answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    return int(first.split()[1]), [line.decode("latin-1").lower() for line in lines], body
