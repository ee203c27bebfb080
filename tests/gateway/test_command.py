"""Command `chunkattn route`: its keys."""

import pytest
from typer.testing import CliRunner

from chunkattn.cli import app


@pytest.mark.parametrize("name", ["API_KEY", "API_KEY_FILE", "METRICS_KEY", "REPLICA_KEY"])
def test_an_empty_key_variable_is_refused(name, monkeypatch):
    monkeypatch.setattr("chunkattn.gateway.run.route", lambda *_: None)
    assert CliRunner().invoke(app, ["route", "http://a:1"]).exit_code == 0
    monkeypatch.setenv(f"CHUNKATTN_{name}", "")
    answer = CliRunner().invoke(app, ["route", "http://a:1"])
    assert answer.exit_code != 0
    assert f"CHUNKATTN_{name} is set but empty" in answer.output
