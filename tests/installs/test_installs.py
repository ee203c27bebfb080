"""Installations as users make them: versions of Python and JAX, `pip install .` and `-e .`, with and without a compiler."""

import re
import subprocess
import tomllib
import zipfile

import pytest

from chunkattn.backends.cpu import build
from tests.gpu.install import find_python
from tests.installs.environments import LIBRARY, ROOT, Environment, build_wheel, copy_checkout, headers

PYTHONS = (3, 11), (3, 12), (3, 13)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
(SUPPORTED,) = (line for line in PROJECT["dependencies"] if re.match(r"jax\W", line))
JAX = {
    "oldest": re.sub(r">=([\d.]+),.*", r"==\1", SUPPORTED),
    "cuda": re.sub(r"\[.*\]", "", PROJECT["optional-dependencies"]["cuda"][0]),
    "newest": SUPPORTED,
}
"""Requirements of JAX: the oldest version, the newest that the extra `cuda` allows, the newest."""
OLDEST_FFI = "0.3"
"""Version of XLA's FFI in the headers of the oldest supported jaxlib."""

pytestmark = pytest.mark.skipif(not build.compiler(), reason="no C++ compiler")


@pytest.mark.ci
def test_a_wheel_is_built_with_the_oldest_headers(tmp_path):
    wheel = build_wheel(copy_checkout(tmp_path / "checkout"), tmp_path / "wheels")
    assert "-py3-none-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        library = archive.extract(str(LIBRARY), tmp_path)
    program = tmp_path / "ffi_version"
    source = ROOT / "tests" / "installs" / "ffi_version.cc"
    subprocess.run([build.compiler(), *headers(), source, "-ldl", "-o", program], check=True)
    assert subprocess.run([program, library], capture_output=True, text=True, check=True).stdout.strip() == OLDEST_FFI


@pytest.fixture(scope="session")
def checkout(tmp_path_factory):
    """One folder for all environments: each editable installation replaces the library of the others."""
    return copy_checkout(tmp_path_factory.mktemp("source") / "checkout")


@pytest.fixture(scope="session")
def made():
    """Environments by version of Python and of JAX."""
    return {}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("jax", JAX)
@pytest.mark.parametrize("version", PYTHONS, ids=lambda version: ".".join(map(str, version)))
def test_installations(version, jax, checkout, made, tmp_path_factory):
    if not (python := find_python([version])):
        pytest.skip("no such Python on PATH or under ~/.pyenv/versions")
    environment = Environment(tmp_path_factory.mktemp("environment") / "venv", python)
    found = environment.resolves_to(JAX[jax])
    if (version, found) in made:
        pytest.skip(f"this Python gets jax {found} here, too")
    made[version, found] = environment
    for options in ([], ["--editable"]):
        for compiler in (False, True):
            (checkout / LIBRARY).unlink(missing_ok=True)
            environment.install(*options, checkout, f"jax=={found}", compiler=compiler)
            (*facts, backend, kernel), demo = environment.facts(), environment.run("chunkattn", "demo")
            given = " ".join([*options, "."])
            print(*facts, f"pip install {given}", "with a compiler" if compiler else "no compiler", backend, kernel, sep=" | ")
            assert facts[1] == f"jax {found}"
            assert demo.stdout.count("documents reversed: same") == 3
            warnings = [line for line in demo.stderr.splitlines() if "attention_backend auto" in line]
            if compiler:
                assert backend == "cpu"
                assert not warnings
            else:
                assert backend == "xla"
                assert kernel.startswith("chunkattn was installed without its native library")
                assert len(warnings) == 1
                assert kernel in warnings[0]
    told = environment.run("chunkattn", "env").stdout
    assert f"native CPU kernel:       {kernel}\n" in told
    for earlier in made.values():
        *facts, backend, kernel = earlier.facts()
        print("  with the same folder", *facts, backend, kernel, sep=" | ")
        assert backend == "cpu"
