"""`chunkattn env` and `chunkattn check`."""

import os

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from chunkattn import testing
from chunkattn.backends import AttentionSpec, get_backend, register_backend
from chunkattn.backends.cpu import library, linear, packed
from chunkattn.backends.xla import XlaBackend
from chunkattn.cli import app, check, environment
from chunkattn.engine import invariance


@register_backend("half_as_large")
class HalfAsLarge(XlaBackend):
    """A backend whose results are wrong."""

    def forward(self, *args, **kwargs):
        out, cache = super().forward(*args, **kwargs)
        return out / 2, cache


def test_env_names_what_is_in_use(monkeypatch):
    monkeypatch.setenv("CHUNKATTN_API_KEY", "very secret")
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    result = CliRunner().invoke(app, ["env"])
    assert result.exit_code == 0, result.output
    lines = dict(line.split(":", 1) for line in result.output.splitlines() if ":" in line)
    assert {"chunkattn", "Python", "jax", "processor", "JAX devices", "attention backend", "compile cache"} <= lines.keys()
    expected = library.kernel_name() or f"none: {library.refusal()}"
    assert lines["native CPU kernel"].strip() == expected
    assert lines["CHUNKATTN_API_KEY"].strip() == "(set)"
    assert "very secret" not in result.output
    native = "native, on AMX tiles" if linear.any_rows() else f"few rows are native, in XLA's order: {linear.order()}"
    assert lines["products of bfloat16"].strip() == ("XLA computes them" if library.refusal() else native)
    formats = f"native products of {', '.join(packed.FORMATS)}"
    assert lines["packed weights"].strip() == (f"none: {library.refusal()}" if library.refusal() else formats)
    assert lines["same bits"].strip() == (
        f"kept by {'xla' if library.refusal() else 'cpu'} in float32, bfloat16 and float16: rows agree for any number of "
        "rows in products of depth 3,072 or sums of 1,000"
    )


def test_env_tells_where_bits_are_not_kept(monkeypatch):
    backend = get_backend("xla")(AttentionSpec(4, 2, 32, jnp.dtype("float32"), 16))
    monkeypatch.setattr(invariance, "rows_agree", lambda dtype, *_: dtype != jnp.bfloat16)
    assert environment._same_bits(backend).startswith("not kept in bfloat16 without batch_invariant=True: ")
    other = get_backend("packed_dense")(AttentionSpec(4, 2, 32, jnp.dtype("float32"), 16))
    assert environment._same_bits(other) == "not kept: the sums of packed_dense follow the step"
    tiled = get_backend("pallas_tpu")(AttentionSpec(4, 2, 128, jnp.dtype("float32"), 16))
    assert environment._same_bits(tiled) == "kept by pallas_tpu with batch_invariant=True: by default its sums follow the step"
    assert str(linear.Order(ascending=False, block=2048)) == "pair by pair in blocks of 2,048"
    assert str(linear.Order(ascending=True, block=1 << 30)) == "value by value in one block"
    monkeypatch.setattr(library, "refusal", lambda: None)
    monkeypatch.setattr(linear, "order", lambda: None)
    monkeypatch.setattr(library, "kernel_name", lambda: "avx2")
    assert environment._products() == "XLA computes them, because the native kernel lacks its order of additions for few rows"
    monkeypatch.setattr(library, "kernel_name", lambda: "amx")
    assert environment._products() == "native, on AMX tiles"
    monkeypatch.setattr(library, "refusal", lambda: "no compiler")
    assert environment._products() == "XLA computes them"


@pytest.fixture
def brief(monkeypatch):
    monkeypatch.setattr(check, "OPTIONS", check.OPTIONS[:1])


@pytest.mark.ci
def test_check_of_this_device(brief):
    result = CliRunner().invoke(app, ["check", "--cases", "1"])
    assert result.exit_code == 0, result.output
    assert "All is right." in result.output
    assert "right demo model: " in result.output


@pytest.mark.parametrize(("platform", "many_rows"), [("cpu", False), ("gpu", True), ("tpu", True)])
def test_steps_of_many_rows_are_left_to_accelerators(monkeypatch, platform, many_rows):
    tried = []
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(testing, "check_backend", lambda name, **options: tried.append(options) or 0.0)
    assert not check._kernels("reference", 1)
    assert len(tried) > len(check.MANY_ROWS)
    assert any("scale" in options for options in tried) == many_rows


@pytest.mark.skipif(library.refusal() is not None, reason="no native library")
def test_check_of_packed_products(monkeypatch, capsys):
    monkeypatch.setattr(packed, "FORMATS", {name: packed.FORMATS[name] for name in ("Q5_1", "Q6_K")})
    assert check._packed() == []
    assert capsys.readouterr().out.count("right packed") == 4
    original = packed.multiply
    for change, told in (
        (lambda y: y * 1.05, "relative error 5"),
        (lambda y: y + 1e-4 * (len(y) == 1), "a row alone has other"),
    ):
        monkeypatch.setattr(packed, "multiply", lambda *args, change=change, **options: change(original(*args, **options)))
        failures = check._packed()
        assert len(failures) == 4
        assert all(told in failure for failure in failures)


@pytest.mark.slow
def test_check_of_a_wrong_backend(brief):
    result = CliRunner().invoke(app, ["check", "--cases", "1", "--backend", "half_as_large"])
    assert result.exit_code == 1, result.output
    assert "wrong" in result.output
    assert "Report the lines above with these" in result.output
    assert "native CPU kernel" in result.output
