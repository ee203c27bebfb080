"""An engine with `auto` compares a kernel with `xla` before it takes the kernel, once for each machine and setting."""

import json
import logging
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from chunkattn import LLM, register_backend
from chunkattn.backends import AttentionSpec, available_backends, get_backend, registry
from chunkattn.backends.default_cache import FP8
from chunkattn.backends.reference import ReferenceBackend
from chunkattn.cli import app, check
from chunkattn.engine import verdicts
from chunkattn.engine.verdicts import Verdict

OPTIONS = {"skip_tokenizer_init": True, "max_num_batched_tokens": 64, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 20}
SCORED = 343
"""Rows of a step of packed scores, and of no other kind."""
ALL = ["prefill with chunks", "decode", "packed scores"]


@register_backend("kernel")
class Kernel(ReferenceBackend):
    """A kernel that `auto` takes in these tests. `fault` changes its results, or raises; `built` counts the compared steps."""

    checked_by_auto = True
    built = 0

    @staticmethod
    def fault(batch):
        """Return a factor of the results of a step."""
        return np.float32(1)

    def build_metadata(self, batch):
        type(self).built += 1
        return super().build_metadata(batch), self.fault(batch)

    def forward(self, q, k, v, cache, metadata, **options):
        out, cache = super().forward(q, k, v, cache, metadata[0], **options)
        return (out * metadata[1]).astype(out.dtype), cache


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """An empty folder of verdicts."""
    monkeypatch.setattr(verdicts, "verdict_folder", lambda: tmp_path / "cache" / "attention_checks")


@pytest.fixture
def start(monkeypatch, folder, checkpoint, caplog):
    """Start an engine with `auto`, and return the name of its backend, its lines of the log, and the steps it compared."""
    monkeypatch.setitem(registry._AUTO_ORDER, jax.default_backend(), ("kernel", "xla"))

    def begin(name="qwen3", **options):
        caplog.clear()
        Kernel.built = 0
        with caplog.at_level(logging.INFO, "chunkattn.engine"):
            llm = LLM(str(checkpoint(name)), **{**OPTIONS, **options})
        found = llm.core.runner.backend.name
        llm.close()
        return found, [(r.levelname, r.getMessage()) for r in caplog.records if "auto" in r.getMessage()], Kernel.built

    return begin


def key_of(weighs=False, batch_invariant=False, **changes):
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": jnp.dtype("float32"), "block_size": 16}
    return verdicts.verdict_key(Kernel(AttentionSpec(**{**sizes, **changes})), weighs=weighs, batch_invariant=batch_invariant)


def verdict_files():
    return sorted(verdicts.verdict_folder().glob("*"))


def warnings(lines):
    return [text for level, text in lines if level == "WARNING"]


@pytest.mark.ci
def test_a_right_kernel_is_taken_and_compared_until_its_verdict_is_lost(start):
    name, lines, built = start()
    assert (name, warnings(lines), built) == ("kernel", [], 2 + 4 + 2)
    assert re.search(r"kernel agrees with xla on this cpu: prefill with chunks \d.*, decode .* of 1e-05 allowed", lines[-1][1])
    (file,) = verdict_files()
    stored = json.loads(file.read_text())
    assert list(stored["found"]) == ALL
    name, lines, built = start()
    assert (name, built, len(lines)) == ("kernel", 0, 1)
    file.write_bytes(file.read_bytes()[:100])
    name, lines, built = start()
    (warning,) = warnings(lines)
    assert name == "kernel"
    assert built
    assert f"the kernel is compared with xla again, because the verdict {file} cannot be read" in warning
    assert json.loads(file.read_bytes())["key"] == stored["key"]
    assert verdict_files() == [file]


@pytest.mark.parametrize(
    ("kind", "is_wrong"),
    [
        ("decode", lambda batch: batch.num_rows == 3),
        ("packed scores", lambda batch: batch.num_rows == SCORED),
        pytest.param(
            "weighed question",
            lambda batch: batch.weighing is not None and (batch.weighing.scale != 1).any(),
            marks=pytest.mark.ci,
        ),
    ],
)
def test_a_kernel_that_is_wrong_in_one_kind_is_left(start, monkeypatch, kind, is_wrong):
    options = {"chunk_scale": 1.3} if kind == "weighed question" else {}
    monkeypatch.setattr(Kernel, "fault", staticmethod(lambda batch: np.float32(1.01 if is_wrong(batch) else 1)))
    name, lines, built = start(**options)
    (warning,) = warnings(lines)
    assert name == "xla"
    assert built
    (file,) = verdict_files()
    told = (
        rf"xla instead of kernel, which is not equal to it on this cpu: {kind} differs by 0\.\d+, allowed 1e-05; delete {file}"
    )
    assert re.search(told, warning)
    name, lines, built = start(**options)
    assert (name, warnings(lines), built) == ("xla", [warning], 0)
    assert start(attention_backend="kernel", **options) == ("kernel", [], 0)


def test_a_kernel_that_raises_or_gives_nan_is_left(start, monkeypatch):
    def fault(batch):
        if batch.num_rows == SCORED:
            raise ValueError("no such register")
        return np.float32("nan")

    monkeypatch.setattr(Kernel, "fault", staticmethod(fault))
    for _ in range(2):  # an error may pass, so it is not kept
        name, lines, built = start()
        (warning,) = warnings(lines)
        assert name == "xla"
        assert built
        assert not verdicts.verdict_folder().exists()
    assert "prefill with chunks differs by nan, allowed 1e-05; decode differs by nan" in warning
    assert "packed scores raised ValueError: no such register; the next start compares again" in warning


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "cannot be read"),
        (b"\xff\x00", "cannot be read"),
        (b"[]", "must be a JSON object"),
        (b'{"key": {}, "tolerance": 1e-5, "found": {}}', "is damaged: it lacks"),
        (b'{"key": {}, "tolerance": 1e-5, "found": {"decode": null}}', "is damaged: a difference"),
        (b'{"key": {}, "tolerance": 1e-5, "found": {"decode": 0.0}}', "is the verdict of another machine or setting"),
    ],
)
def test_damaged_verdicts_are_told(folder, caplog, content, told):
    key = key_of()
    assert verdicts.read_verdict(key) is None
    verdicts.write_verdict(key, Verdict(1e-5, {"decode": float("nan")}))
    assert verdicts.read_verdict(key).faults == ["decode differs by nan, allowed 1e-05"]
    assert not caplog.records
    verdicts.verdict_file(key).write_bytes(content)
    assert verdicts.read_verdict(key) is None
    (record,) = caplog.records
    assert told in record.getMessage()
    assert str(verdicts.verdict_file(key)) in record.getMessage()
    assert not list(verdicts.verdicts_here())


def test_a_verdict_that_cannot_be_written_holds_for_this_start(start, monkeypatch):
    verdicts.verdict_folder().parent.write_text("a file where the folder should be")
    monkeypatch.setattr(Kernel, "fault", staticmethod(lambda _: np.float32(2)))
    name, lines, built = start()
    written, wrong = warnings(lines)
    assert name == "xla"
    assert built
    assert "a verdict cannot be kept, so the next start compares again: " in written
    assert wrong.endswith("; the next start compares again")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "options", "kinds"),
    [
        (
            "qwen3",
            {"kv_cache_dtype": "fp8", "dtype": "bfloat16", "block_size": 64, "chunk_scale": 1.3},
            [*ALL, "weighed question"],
        ),
        ("mistral-window", {}, [f"{kind} within a window of 11 tokens" for kind in ALL]),
        (
            "qwen2-window",
            {"chunk_scale": 1.3},
            [*ALL, "weighed question", *(f"{kind} within a window of 9 tokens" for kind in ALL)],
        ),
    ],
)
def test_kinds_follow_the_engine(start, name, options, kinds):
    assert start(name, **options)[0] == "kernel"
    (file,) = verdict_files()
    stored = json.loads(file.read_text())
    assert set(stored["found"]) == set(kinds)
    settings = stored["key"]["settings"]
    assert settings["kv_dtype"] == ("float8_e4m3fn" if "kv_cache_dtype" in options else "float32")
    assert settings["block_size"] == options.get("block_size", 16)


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setenv("LIBTPU_INIT_ARGS", "--xla_other"),
        lambda patch: patch.setattr(verdicts, "_source", lambda backend: "other"),
        lambda patch: patch.setattr(verdicts, "version_of", lambda package: "9"),
        lambda patch: patch.setattr(
            jax, "devices", lambda: [SimpleNamespace(device_kind="v6e", client=jax.local_devices()[0].client)]
        ),
    ],
)
def test_another_machine_is_compared_anew(folder, change, monkeypatch):
    before = key_of()
    verdicts.write_verdict(before, Verdict(1e-5, {"decode": 0.0}))
    assert verdicts.read_verdict(key_of())
    assert len(list(verdicts.verdicts_here())) == 1
    change(monkeypatch)
    assert verdicts.read_verdict(key_of()) is None
    assert not list(verdicts.verdicts_here())


def test_other_settings_have_other_verdicts():
    keys = [key_of(), key_of(weighs=True), key_of(batch_invariant=True), key_of(head_dim=32), key_of(block_size=64)]
    keys += [key_of(kv_dtype=FP8), key_of(windows=(7,)), key_of(num_kv_heads=1), key_of(dtype=jnp.dtype("bfloat16"))]
    assert len({verdicts.verdict_file(key) for key in keys}) == len(keys)


def test_the_source_of_a_kernel_is_in_its_key(tmp_path, monkeypatch):
    module = tmp_path / "outside.py"
    monkeypatch.setitem(sys.modules, "outside", SimpleNamespace(__file__=str(module)))
    digests = []
    for text in ("1", "2"):
        module.write_text(text)
        digests.append(verdicts._source(type("Outside", (Kernel,), {"__module__": "outside"})))
    assert digests[0] != digests[1]


def test_kernels_for_chips_are_checked():
    checked = {name for name in available_backends() if get_backend(name).checked_by_auto}
    assert checked == {"pallas_gpu", "pallas_tpu", "kernel"}


def test_verdicts_lie_in_the_compile_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for kept, folder in (
        ("/cache/jax", "/cache/jax"),
        ("gs://bucket/jax", tmp_path / "chunkattn"),
        (None, tmp_path / "chunkattn" / "jax"),
    ):
        monkeypatch.setattr(verdicts.jax, "config", SimpleNamespace(jax_compilation_cache_dir=kept))
        assert verdicts.verdict_folder() == Path(folder) / "attention_checks"


def test_check_shows_verdicts(folder, monkeypatch):
    monkeypatch.setattr(check, "_kernels", lambda *_: [])
    monkeypatch.setattr(check, "_demo", lambda *_: [])
    run = partial(CliRunner().invoke, app, ["check"])
    assert "none: no engine has compared a kernel" in run().output
    verdicts.write_verdict(key_of(), Verdict(1e-5, {"decode": 2e-6}))
    shown = run()
    assert shown.exit_code == 0
    assert "right backend kernel, num_heads 4, num_kv_heads 2, head_dim 16, dtype float32" in shown.output
    assert "decode 2.0e-06 of 1e-05 allowed" in shown.output
    verdicts.write_verdict(key_of(weighs=True), Verdict(1e-5, {"decode": 2e-6, "weighed question": 0.5}))
    shown = run()
    assert shown.exit_code == 1
    assert "weighs True, batch_invariant False: weighed question differs by 0.5, allowed 1e-05" in shown.output
