"""`make test-gpu` finds a Python that its packages run on, or says which it needs."""

import sys
from pathlib import Path

import pytest

from tests.gpu import install


@pytest.fixture
def interpreters(tmp_path, monkeypatch):
    """Make interpreters that print a version, and let them be all there are."""

    def make(*answers):
        found = []
        for number, answer in enumerate(answers):
            python = tmp_path / f"python{number}"
            python.write_text(f"#!/bin/sh\n{answer}\n")
            python.chmod(0o755)
            found.append(python)
        monkeypatch.setattr(install, "candidates", lambda versions: found)
        return found

    return make


def test_the_first_fitting_python_is_taken(interpreters):
    found = interpreters("echo 3 11", "exit 127", "echo 3 13", "echo 3 12")
    assert install.find_python() == found[2]


def test_a_missing_python_is_told_in_one_line(interpreters, tmp_path):
    interpreters("echo 3 11")
    with pytest.raises(SystemExit, match=r"Python 3\.12 or 3\.13, and there is none"):
        install.main(tmp_path / "env", Path())
    assert not (tmp_path / "env").exists()


def test_this_interpreter_and_those_of_path_and_pyenv_are_tried(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    (tmp_path / "versions" / "3.12.9").mkdir(parents=True)
    found = list(install.candidates(install.PYTHONS))
    assert found[0] == Path(sys.executable)
    assert tmp_path / "bin" / "python3.13" in found
    assert tmp_path / "versions" / "3.12.9" / "bin" / "python" in found
