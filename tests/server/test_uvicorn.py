"""The parts of uvicorn that `chunkattn/web/http.py` reads and overrides have the names and meanings that it relies on."""

import ast
import asyncio
import tomllib
from importlib.metadata import version
from pathlib import Path
from unittest.mock import Mock

import pytest
import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from chunkattn.web import exchange, http, listening

ROOT = Path(__file__).parents[2]
REQUEST = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n"
HTTPTOOLS = {"on_chunk_header"}
"""Callbacks of the parser, which uvicorn does not have."""


def class_of(module, name):
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def methods(cls):
    return {node.name for node in cls.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def read_from(cls, owner):
    """Attributes of `owner`, such as `self.cycle`, that a class reads or writes."""
    found = [node for node in ast.walk(cls) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == owner]
    return {node.attr for node in found}


def protocol_of(app):
    """uvicorn's own protocol, connected to a transport that goes nowhere."""
    config = uvicorn.Config(app, log_config=None, lifespan="off")
    transport = Mock(is_closing=Mock(return_value=False), get_extra_info=Mock(return_value=None))
    protocol = HttpToolsProtocol(config, ServerState(), {}, asyncio.get_running_loop())
    protocol.connection_made(transport)
    return protocol


async def waiting(scope, receive, send):
    await asyncio.Event().wait()


def test_what_the_protocol_reads_exists():
    async def main():
        protocol = protocol_of(waiting)
        protocol.data_received(REQUEST)
        cls = class_of(http, "BoundedHttp")
        own = {name for name in read_from(cls, "self") if name.startswith("_")} | methods(cls) | {"is_known"}
        names = read_from(cls, "self") - own
        assert {"cycle", "flow", "pipeline", "transport", "loop"} <= names
        assert [name for name in sorted(names) if not hasattr(protocol, name)] == []
        for part, added in (("cycle", {"drop"}), ("flow", {"hold", "release"})):
            names = read_from(cls, f"self.{part}") - added
            assert names
            assert [name for name in sorted(names) if not hasattr(getattr(protocol, part), name)] == []
        for task in protocol.tasks:
            task.cancel()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("module", "name", "base", "ours"),
    [
        (http, "BoundedHttp", HttpToolsProtocol, {"check_time", "is_idle", "refuse"} | HTTPTOOLS),
        (exchange, "Exchange", RequestResponseCycle, {"drop"}),
        (exchange, "HeldFlow", FlowControl, {"hold", "release"}),
        (listening, "Server", uvicorn.Server, set()),
    ],
)
def test_what_is_overridden_exists(module, name, base, ours):
    overridden = {method for method in methods(class_of(module, name)) if not method.startswith("_")} - ours
    assert overridden
    assert [method for method in sorted(overridden) if not hasattr(base, method)] == []
    assert [method for method in methods(class_of(module, name)) if method.startswith("_") and hasattr(base, method)] == [
        "__init__"
    ]


def test_the_protocol_moves_through_its_states():
    """A body in part, a whole one, a second request behind it, and an answer to the first."""
    answer = asyncio.Event()

    async def app(scope, receive, send):
        await answer.wait()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def main():
        protocol = protocol_of(app)
        assert protocol.cycle is None
        assert protocol in protocol.connections
        protocol.data_received(REQUEST + b"x")
        first = protocol.cycle
        assert (first.more_body, first.response_started, first.response_complete, first.keep_alive) == (
            True,
            False,
            False,
            True,
        )
        assert first.scope["http_version"] == "1.1"
        protocol.data_received(b"y")
        assert not first.more_body
        assert not protocol.flow.read_paused
        protocol.data_received(REQUEST + b"xy")
        assert protocol.cycle is not first
        assert [waiting[0] for waiting in protocol.pipeline] == [protocol.cycle]
        assert protocol.flow.read_paused
        answer.set()
        while protocol.pipeline or protocol.tasks:
            await asyncio.sleep(0)
        assert first.response_started
        assert first.response_complete
        assert not protocol.flow.read_paused
        protocol.send_400_response("no")
        protocol.transport.close.assert_called()

    asyncio.run(main())


def test_the_version_has_a_bound():
    """A new minor version of uvicorn may change its internals, so the bound rises after these tests have passed with it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (uvicorns,) = [Requirement(text) for text in project["dependencies"] if Requirement(text).name == "uvicorn"]
    major, minor, *_ = map(int, version("uvicorn").split("."))
    assert uvicorns.specifier.contains(version("uvicorn"))
    assert not uvicorns.specifier.contains(f"{major}.{minor + 1}.0")
