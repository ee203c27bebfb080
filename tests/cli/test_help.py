"""`--help` of every command: nothing is cut, whatever the width of the terminal."""

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields

import pytest
import typer

from chunkattn import LLM, AsyncLLM
from chunkattn.calls.decide import DecideOptions
from chunkattn.calls.precompute import LookupOptions, PrecomputeOptions
from chunkattn.calls.rerank import RerankOptions
from chunkattn.calls.score_inputs import ScoreOptions
from chunkattn.cli import app
from chunkattn.config import EngineConfig
from chunkattn.options import descriptions, options_of
from chunkattn.web.options import ServerConfig
from tests.patience import PATIENCE_S


def commands(command=None, *names) -> Iterator:
    """Names and definition of every command and group."""
    command = command or typer.main.get_command(app)
    yield names, command
    for name, subcommand in getattr(command, "commands", {}).items():
        yield from commands(subcommand, *names, name)


ALL = dict(commands())


def words(text):
    return " ".join(text.split())


def check(command, shown, width):
    lines = shown.splitlines()
    assert max(map(len, lines)) <= width, max(lines, key=len)
    assert "…" not in shown
    for parameter in command.params:
        assert words(parameter.help or "") in words(shown)
        if parameter.param_type_name == "option":
            starts = [line.strip() for line in lines if line.startswith("  -")]
            for flag in (*parameter.opts, *parameter.secondary_opts):
                assert any(flag in start.replace(",", "").split() for start in starts), flag
    for subcommand in getattr(command, "commands", {}).values():
        assert words(subcommand.help.partition("\n\n")[0]) in words(shown)


@pytest.mark.parametrize("names", ALL, ids=lambda names: "-".join(names) or "chunkattn")
@pytest.mark.parametrize("width", [None, 60, 80, 200])
def test_help_cuts_nothing(names, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width)) if width else monkeypatch.delenv("COLUMNS", raising=False)
    ALL[()].main([*names, "--help"], "chunkattn", standalone_mode=False)
    check(ALL[names], capsys.readouterr().out, width or 80)


def test_help_names_the_panels_of_serve(capsys):
    ALL[()].main(["serve", "--help"], "chunkattn", standalone_mode=False)
    shown = capsys.readouterr().out
    titles = [line[:-1] for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles[:3] == ["Arguments", "Options", "Server"]
    assert {"Model", "Devices", "Prompts and scoring", "Steps and warm-up", "KV cache"} == set(titles[3:])


def test_help_without_a_terminal():
    variables = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [sys.executable, "-m", "chunkattn", "serve", "--help"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=variables, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    check(ALL["serve",], done.stdout, 80)


def test_every_field_of_the_configurations_is_an_option_of_serve():
    options = {option.name: option for option in ALL["serve",].params}
    for cls in (EngineConfig, ServerConfig):
        for field in fields(cls):
            option, default = options[field.name], field.default
            assert option.default == (list(default) if isinstance(default, tuple) else default), field.name
            assert option.help, field.name


def test_options_have_the_types_of_their_fields():
    options = options_of(EngineConfig)
    for name, right, wrong in (
        ("warmup", (True, None), (1, "on")),
        ("seed", (0, 2**40), (True, None, 1.0)),
        ("block_size", (16, None), (True, 16.0)),
        ("max_decode_gap_s", (1, 0.5), (True, None, "1")),
        ("dtype", ("auto",), (None, 1)),
    ):
        assert all(map(options[name].accepts, right)), name
        assert not any(map(options[name].accepts, wrong)), name
    assert options["block_size"].type_name == "int | None"
    assert options["kv_store_max_bytes"].flag == "--kv-store-max-bytes"
    assert options["kv_store_max_bytes"].help == "Size limit of the kv_store folder in bytes."


@pytest.mark.parametrize("llm", [LLM, AsyncLLM])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("score", ScoreOptions),
        ("rerank", RerankOptions),
        ("decide", DecideOptions),
        ("precompute", PrecomputeOptions),
        ("lookup", LookupOptions),
        ("forget", LookupOptions),
    ],
)
def test_calls_list_their_options(llm, name, options):
    """Python's `help` shows every option of a call with its default and its text."""
    method = getattr(llm, name)
    parameters = inspect.signature(method).parameters
    assert "options" not in parameters
    assert {*options.__annotations__} <= {*parameters}
    assert all(parameters[p].default is not inspect.Parameter.empty for p in options.__annotations__)
    assert descriptions(options).items() <= descriptions(method).items()
    assert inspect.getdoc(method).count("Raises:") == 1
