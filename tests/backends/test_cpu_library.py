"""A native library that cannot be used: a reason, one warning and `xla`, whatever is called first."""

import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from chunkattn.backends import AttentionSpec, get_backend
from chunkattn.backends.cpu import build, label_readout, library, linear, normaliser
from tests.backends.first_calls import CALLS, ROWS, WEIGHT

HERE = Path(__file__).parent
HINT = "with a C++ compiler, `python -m chunkattn.backends.cpu.build` makes it"
FFI_MINOR = 99
"""A version of XLA's FFI that is newer than that of any JAX here."""

needs_compiler = pytest.mark.skipif(not build.compiler(), reason="no C++ compiler")


def stand_in(path, *flags, minor=1, sources=None):
    """Compile a library with the symbols of the native one."""
    digest = build.sources_digest() if sources is None else sources
    defined = [f"-DFFI_MINOR={minor}", f'-DSOURCES="{digest}"', *flags]
    headers = ["-isystem", build.ffi_headers()]
    command = [build.compiler(), "-shared", "-fPIC", *headers, *defined, HERE / "unusable_library.cc", "-o", path]
    subprocess.run(command, check=True)


def of_another_processor(path):
    stand_in(path)
    data = bytearray(path.read_bytes())
    data[18:20] = (0xF3).to_bytes(2, sys.byteorder)  # e_machine: RISC-V
    path.write_bytes(data)


FILES = {
    "absent": (lambda path: None, "chunkattn was installed without its native library"),
    "a folder": (Path.mkdir, "cannot be used with jaxlib"),
    "empty": (Path.touch, "cannot be used with jaxlib"),
    "text": (lambda path: path.write_text("no library"), "cannot be used with jaxlib"),
    "of another processor": (of_another_processor, "cannot be used with jaxlib"),
    "lacks a function of a system library": (lambda path: stand_in(path, "-DBROKEN"), "of_no_library"),
    "lacks an operator": (lambda path: stand_in(path, "-DOLD"), "is older than the package"),
    "of other sources": (lambda path: stand_in(path, sources="other"), "was compiled from other sources"),
    "of a newer JAX": (lambda path: stand_in(path, minor=FFI_MINOR), f"handler's API version (0.{FFI_MINOR})"),
    "fails when called": (stand_in, "the operator fails"),
}
CASES = [(name, "refusal") for name in FILES if name != "of a newer JAX"] + [("of a newer JAX", first) for first in CALLS]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Results of the calls with each file, in processes of their own."""
    arguments = []
    for number, (name, first) in enumerate(CASES):
        path = tmp_path_factory.mktemp("library") / f"{number}.so"
        FILES[name][0](path)
        arguments += [str(path), first]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent)}
    command = [sys.executable, HERE / "first_calls.py", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))


@needs_compiler
@pytest.mark.parametrize(("name", "first"), CASES)
def test_a_library_that_cannot_be_used_is_a_reason(outcomes, name, first):
    found = outcomes[name, first]
    assert FILES[name][1] in found["refusal"]
    assert HINT in found["refusal"]
    assert [found[name] for name in ("kernel_name", "linear", "label_readout", "normaliser", "product", "auto")] == [
        None,
        False,
        False,
        False,
        64,
        "xla",
    ]
    if first == "env":
        assert found["env"]["attention backend"] == "auto is xla for heads of 128 in bfloat16"
        assert found["env"]["native CPU kernel"] == f"none: {found['refusal']}"
        assert found["env"]["products of bfloat16"] == "XLA computes them"
        found["warnings"].pop()
    (warning,) = found["warnings"]
    assert warning == f"attention_backend auto: xla on cpu, because cpu cannot serve this model: {found['refusal']}"


def test_other_platforms_load_no_library(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(library, "_load", lambda: pytest.fail("loaded"))
    assert library.refusal() == "it runs on CPUs only, and JAX computes on gpu"
    assert library.kernel_name() is None
    assert not linear.serves(ROWS, WEIGHT)
    assert not label_readout.serves(WEIGHT)
    assert not normaliser.serves()
    assert get_backend("cpu").supports(AttentionSpec(4, 2, 32, jnp.dtype("float32"), 16)) == "it runs on CPUs only"


@pytest.mark.skipif(not build.LIBRARY.exists(), reason="no native library")
def test_the_library_of_this_checkout_is_used():
    assert library.refusal() is None


def test_the_digest_follows_every_source_and_flag(monkeypatch, tmp_path):
    seen = {build.sources_digest()}
    for file in build.SOURCES.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build.sources_digest() in seen
    (tmp_path / ".ffi.cc.swp").touch()  # of an editor
    assert build.sources_digest() in seen
    files = [*tmp_path.glob("*.cc"), *tmp_path.glob("*.h")]
    for file in files:
        file.write_bytes(file.read_bytes() + b"\n")
        seen.add(build.sources_digest())
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    seen.add(build.sources_digest())
    assert len(seen) == 1 + len(files) + 1
    monkeypatch.setattr(build, "SOURCES", tmp_path / "none")
    assert build.sources_digest() == ""


def test_a_library_that_does_not_load_replaces_none(monkeypatch, tmp_path):
    """The compiler is a command with arguments, as `ccache g++`. This one makes files that are no libraries."""
    code = tmp_path / "compiler.py"
    code.write_text("import sys; open(sys.argv[sys.argv.index('-o') + 1], 'w').write('no library')")
    monkeypatch.setenv("CXX", f"{sys.executable} {code}")
    to = tmp_path / "_native.so"
    to.write_text("before")
    with pytest.raises(build.BuildError, match=r"compiler.py made a library that cannot be loaded here: "):
        build.build(to)
    assert to.read_text() == "before"
    assert {file.name for file in tmp_path.iterdir()} == {"compiler.py", "_native.so"}


def test_the_build_needs_a_compiler(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler; install g\+\+ or clang\+\+"):
        build.build(tmp_path / "_native.so")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("python", "requirement"),
    [((3, 11), "jaxlib==0.10.2"), ((3, 14), "jaxlib==0.10.2"), ((3, 15), "jaxlib<0.13,>=0.10.2")],
)
def test_the_build_takes_the_oldest_headers(monkeypatch, python, requirement):
    name = "hatchling.builders.hooks.plugin.interface"  # the tests do without hatchling
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(BuildHookInterface=object))
    spec = importlib.util.spec_from_file_location("hatch_build", HERE.parent.parent / "hatch_build.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    dependencies = ["jaxtyping>=0.3", "jax>=0.10.2,<0.13", "numpy>=2.0"]
    assert hook.headers(dependencies, python) == requirement
