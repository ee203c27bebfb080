"""Checks of the image that need no build."""

import json
import re
import subprocess
import sys
import threading
import tomllib
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chunkattn.cli import app
from chunkattn.config import EngineConfig
from chunkattn.remote.hosts.group_secret import VARIABLE
from chunkattn.web.options import ServerConfig
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
DOCS = (ROOT / "docs" / "guides" / "serving.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def values(instruction):
    """Return the arguments of an instruction, each time it occurs."""
    return re.findall(rf"^{instruction} +(.+)$", DOCKERFILE.replace("\\\n", " "), flags=re.MULTILINE)


def test_what_the_wheel_needs_is_copied():
    copied = {name for value in values("COPY") if "--from" not in value for name in value.split()[:-1]}
    assert all((ROOT / name).exists() for name in copied)
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {
        "pyproject.toml",
        "hatch_build.py",
        PROJECT["project"]["readme"],
        *PROJECT["project"]["license-files"],
        *packages,
    } == copied
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignored
    assert {line[1:] for line in ignored if line.startswith("!")} == copied


def test_the_command_serves(monkeypatch):
    for name in ("CHUNKATTN_HOST", "CHUNKATTN_PORT", "CHUNKATTN_API_KEY", "CHUNKATTN_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    taken = []
    monkeypatch.setattr("chunkattn.server.run.serve", lambda _, config: taken.append(config))
    ((program,),) = map(json.loads, values("ENTRYPOINT"))
    assert program in PROJECT["project"]["scripts"]
    (command,) = map(json.loads, values("CMD"))
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert [(config.host, str(config.port)) for config in taken] == [("0.0.0.0", *values("EXPOSE"))]


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_check(status, code):
    class Health(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

    (check,) = values("HEALTHCHECK")
    program, *arguments = json.loads(check[check.index("[") :])
    assert program == "python"
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        command = [sys.executable, *(text.replace(*values("EXPOSE"), str(server.server_port)) for text in arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
        server.shutdown()
        thread.join()
    assert done.returncode == code, done.stderr


def test_what_is_documented_exists():
    extras = set(re.findall(r"EXTRAS=(\w+)", DOCKERFILE + DOCS))
    assert extras
    assert extras <= set(PROJECT["project"]["optional-dependencies"])
    named = set(re.findall(r"CHUNKATTN_([A-Z_]+)", DOCKERFILE + DOCS))
    options = {f.name.upper() for cls in (EngineConfig, ServerConfig) for f in fields(cls)}
    assert "API_KEY" in named
    assert named <= options | {VARIABLE.removeprefix("CHUNKATTN_")}
