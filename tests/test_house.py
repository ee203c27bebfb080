"""The architecture as declared: imports run down, and stay light."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_imports_run_down():
    lint = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([lint], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_package_needs_no_torch_and_no_plotting():
    code = "import chunkattn.cli, sys; assert not {'torch', 'matplotlib'} & set(sys.modules), 'heavy import'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_parsers_options_and_bodies_need_no_jax():
    """The integration in vLLM imports them in vLLM's processes."""
    modules = "chunkattn.parsers, chunkattn.config, chunkattn.outputs, chunkattn.server.protocol.generation"
    code = f"import {modules}, sys; assert not {{'jax', 'flax', 'torch', 'transformers'}} & set(sys.modules), 'heavy import'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
