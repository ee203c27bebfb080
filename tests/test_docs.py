"""The documentation's Python runs, and so does every `chunkattn` command in it."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chunkattn.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs" / "usage.md", ROOT / "docs" / "cache.md"]


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=() if p.stem != "usage" else pytest.mark.telling, id=p.name) for p in PAGES]
)
def test_python(page, capsys):
    names = {}
    code = blocks(page, "python")
    assert code
    for block in code:
        exec(compile(block, page.name, "exec"), names)
    if page.name == "README.md":
        answer, scores = capsys.readouterr().out.splitlines()
        assert answer.strip() == "Pegelu"
        assert [s > 0.5 for s in map(float, scores.strip("[]").split(","))] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("chunkattn.server.run.serve", lambda *_: None)  # it would not end; tests of the server start it
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "nila.txt").write_text("Nila lives in Tunise.\n")
    commands = [line for b in blocks(page, "bash") for line in b.splitlines() if line.startswith("chunkattn ")]
    assert len(commands) >= 3
    for command in commands:
        result = CliRunner().invoke(app, shlex.split(command, comments=True)[1:])
        assert result.exit_code == 0, f"{command}: {result.output}"


def test_links_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
