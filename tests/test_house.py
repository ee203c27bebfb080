"""The house as declared: imports run down and stay light, and all checks are the same everywhere."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
IMPORTS = """
import importlib, pkgutil
import chunkattn
from jax._src.xla_bridge import backends_are_initialized

for module in pkgutil.walk_packages(chunkattn.__path__, "chunkattn."):
    if module.name != "chunkattn.__main__" and not module.name.endswith("._native"):  # no modules to import
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:  # of a package that the tests do not install, such as vLLM
            assert not error.name.startswith("chunkattn"), error
        assert not backends_are_initialized(), module.name
"""


def test_imports_run_down():
    lint = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([lint], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_package_needs_no_torch_and_no_plotting():
    code = "import chunkattn.cli, sys; assert not {'torch', 'matplotlib'} & set(sys.modules), 'heavy import'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_parsers_options_and_bodies_need_no_jax():
    """The integration in vLLM imports them in vLLM's processes."""
    modules = "chunkattn.parsers, chunkattn.config, chunkattn.outputs, chunkattn.schema.generation"
    code = f"import {modules}, sys; assert not {{'jax', 'flax', 'torch', 'transformers'}} & set(sys.modules), 'heavy import'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.ci
def test_imports_start_no_devices():
    """A process that only imports the package keeps no accelerator from another one."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_workflow_runs_what_ci_runs():
    targets = re.findall(r"^ *make ([\w-]+)(?: >.*)?$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(targets) > 5
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]["make"]
    assert job["steps"][-1] == {"run": "make ${{ matrix.part }}"}
    assert job["strategy"]["matrix"] == {"part": targets}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert set(targets) <= set(re.findall(r"^([\w-]+):", makefile, flags=re.MULTILINE))


def test_every_folder_of_tests_runs():
    folders = {path.parent.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/**/test_*.py")}
    named = set(re.findall(r"[\w-]+", (ROOT / "Makefile").read_text(encoding="utf-8")))
    assert folders - named == {"parallel"}  # which a test of `engine` runs


def test_commits_are_checked_with_the_pinned_ruff():
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert [name for name in extras["test"] if name.startswith("ruff")] == ["ruff==" + repo["rev"].removeprefix("v")]
