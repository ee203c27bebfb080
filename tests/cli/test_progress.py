"""Benchmarks report each round on stderr, and transformers gives no advice that is not needed."""

import ast
import io
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from chunkattn import LLM, SamplingParams
from chunkattn.engine.programs import ProgramCounts
from chunkattn.terminal import progress
from chunkattn.terminal.commands import log_to_stderr
from chunkattn.terminal.progress import Rounds, timed
from chunkattn.tools.bench.measure import round_name
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
AT_ONCE = {"decide_eval_data", "gpu_aot", "random_model", "serve_attacks", "tpu_aot", "trace_calls", "visited_tiles"}
"""Scripts that print a line as soon as a case has ended, or that take a few seconds."""


def test_a_round_is_a_line_without_a_terminal(capsys):
    with Rounds() as rounds:
        for number in range(3):
            with rounds(f"decode 1, {round_name(number, 2)}"):
                assert len(capsys.readouterr().err.splitlines()) == min(number, 1)  # of the round before
    assert re.fullmatch(r"decode 1, round 2 of 2: \d+\.\d s\n", capsys.readouterr().err)


def test_a_terminal_shows_the_round_under_way_and_no_lines(monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(progress.sys, "stderr", screen)
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=screen, force_terminal=True, width=80))
    with Rounds() as rounds, rounds("decode 1, round 1 of 2"):
        rounds._status.renderable  # noqa: B018
        assert "decode 1, round 1 of 2" in str(rounds._status.renderable.text)
    assert "round 1 of 2:" not in screen.getvalue()


def test_a_round_that_fails_has_no_time(capsys):
    with pytest.raises(ValueError, match="broken"), timed("decode 1"):
        raise ValueError("broken")
    assert capsys.readouterr().err == ""


def test_every_script_reports_its_cases():
    scripts = [f for f in (ROOT / "benchmarks").glob("*.py") if '__name__ == "__main__"' in f.read_text(encoding="utf-8")]
    assert {f.stem for f in scripts} > AT_ONCE
    for script in scripts:
        tree = ast.parse(script.read_text(encoding="utf-8"))
        called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        assert called & {"timed", "told", "say"} or script.stem in AT_ONCE, script.name


WITHOUT_TORCH = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.partition(".")[0] == "torch" else find_spec(name, *rest)
sys.modules["torch"] = None
"""


@pytest.mark.parametrize(
    "code",
    [
        "import transformers",
        "import chunkattn; import transformers",
        "from chunkattn.server import texts",
        "from chunkattn.tools.bench import geometry",
        "from chunkattn.cli import app; app(['inspect', 'a # # b # # c'], standalone_mode=False)",
    ],
)
def test_transformers_does_not_advise_to_install_pytorch(code):
    done = subprocess.run(
        [sys.executable, "-c", f"{WITHOUT_TORCH}\n{code}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=PATIENCE_S,
        check=True,
    )
    assert ("PyTorch was not found" in done.stdout + done.stderr) == (code == "import transformers")


def test_other_lines_of_transformers_stay():
    code = "import chunkattn, transformers; transformers.logging.get_logger('transformers').warning('something else')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S, check=True
    )
    assert "something else" in done.stderr


@pytest.mark.parametrize(
    ("configured", "terminal", "printed"), [(True, True, False), (False, True, True), (False, False, False)]
)
def test_the_first_call_tells_that_it_compiles(configured, terminal, printed, monkeypatch, capsys, caplog):
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda self: configured)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    with caplog.at_level(logging.INFO):
        counts = ProgramCounts()
        for name in ("step", "step", "read"):
            counts[name] += 1
    assert counts == {"step": 2, "read": 1}
    said = capsys.readouterr().err if printed else caplog.text
    assert said.count("the first call compiles its programs") == 1
    assert (capsys.readouterr().err == "") or printed


def test_an_engine_announces_its_first_programs(caplog):
    log_to_stderr(verbose=False)
    with caplog.at_level(logging.INFO, "chunkattn.engine.core"):
        llm = LLM(kv_cache_memory_bytes=8 << 20)
        assert "compiles its programs" not in caplog.text
        for _ in range(2):
            llm.generate("Nila lives in", SamplingParams(max_tokens=1), use_tqdm=False)
    assert caplog.text.count("the first call compiles its programs") == 1
    assert re.findall(r"a step compiled or loaded (\d+) programs", caplog.text)
