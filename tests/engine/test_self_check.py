"""An engine with `auto` compares a kernel with `xla` before it takes the kernel, once for each machine and setting."""

import json
import logging

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from chunkattn import LLM, register_backend
from chunkattn.backends import AttentionSpec, get_backend, registry
from chunkattn.backends.xla import XlaBackend
from chunkattn.cli import app, check
from chunkattn.engine import self_check, verdicts

OPTIONS = {"skip_tokenizer_init": True, "max_num_batched_tokens": 64, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 20}
ALL = ["prefill with chunks", "decode", "packed scores"]


@register_backend("kernel")
class Kernel(XlaBackend):
    """A kernel that `auto` takes in these tests. `fault` changes its results, or raises."""

    checked_by_auto = True
    built = 0

    @staticmethod
    def fault(batch, metadata):
        """Return a factor of the results of a step."""
        return jnp.ones(())

    def build_metadata(self, batch):
        type(self).built += 1
        metadata = super().build_metadata(batch)
        return metadata, self.fault(batch, metadata)

    def forward(self, q, k, v, cache, metadata, **options):
        out, cache = super().forward(q, k, v, cache, metadata[0], **options)
        return (out * metadata[1]).astype(out.dtype), cache


@pytest.fixture
def start(monkeypatch, tmp_path, checkpoint, caplog):
    """Start an engine with `auto`, and return the name of its backend, its lines of the log, and the steps it compared."""
    monkeypatch.setitem(registry._AUTO_ORDER, jax.default_backend(), ("kernel", "xla"))
    monkeypatch.setattr(verdicts, "verdict_folder", lambda: tmp_path / "cache" / "attention_checks")

    def begin(name="qwen3", **options):
        caplog.clear()
        Kernel.built = 0
        with caplog.at_level(logging.INFO, "chunkattn.engine"):
            llm = LLM(str(checkpoint(name)), **{**OPTIONS, **options})
        found = llm.core.runner.backend.name
        llm.close()
        return found, [(r.levelname, r.getMessage()) for r in caplog.records if "auto" in r.getMessage()], Kernel.built

    return begin


def verdict_files():
    return sorted(verdicts.verdict_folder().glob("*"))


def warnings(lines):
    return [text for level, text in lines if level == "WARNING"]


def test_a_right_kernel_is_taken_and_compared_once(start):
    name, lines, built = start()
    assert (name, warnings(lines)) == ("kernel", [])
    assert built == 2 + 4 + 2
    assert (
        "kernel agrees with xla on this cpu: prefill with chunks 0.0e+00, decode 0.0e+00, packed scores 0.0e+00" in lines[1][1]
    )
    (file,) = verdict_files()
    assert list(json.loads(file.read_text())["found"]) == ALL
    name, lines, built = start()
    assert (name, built, len(lines)) == ("kernel", 0, 1)


@pytest.mark.parametrize(
    ("kind", "is_wrong"),
    [
        ("decode", lambda batch: batch.num_rows <= 4),
        ("packed scores", lambda batch: batch.num_rows > 4 and batch.row_start[batch.num_rows - 1] > 0),
        ("weighed question", lambda batch: batch.weighing is not None and (batch.weighing.scale != 1).any()),
    ],
)
def test_a_kernel_that_is_wrong_in_one_kind_is_left(start, monkeypatch, kind, is_wrong):
    options = {"chunk_scale": 1.3} if kind == "weighed question" else {}
    monkeypatch.setattr(Kernel, "fault", staticmethod(lambda batch, _: jnp.float32(1.01 if is_wrong(batch) else 1)))
    name, lines, built = start(**options)
    (warning,) = warnings(lines)
    assert name == "xla"
    assert built
    assert f"xla instead of kernel, which is not equal to it on this cpu: {kind} differs by 0.01" in warning
    assert f", allowed 1e-05; delete {verdict_files()[0]} to compare again" in warning
    assert warning.count("differs") == (2 if kind == "decode" and options else 1)
    name, lines, built = start(**options)
    assert (name, warnings(lines), built) == ("xla", [warning], 0)
    assert start(attention_backend="kernel", **options) == ("kernel", [], 0)


@pytest.mark.parametrize("fault", [ValueError("no such register"), float("nan")])
def test_a_kernel_that_raises_or_gives_nan_is_left(start, monkeypatch, fault):
    def fail(batch, metadata):
        if isinstance(fault, Exception):
            raise fault
        return jnp.float32(fault)

    monkeypatch.setattr(Kernel, "fault", staticmethod(fail))
    name, lines, _ = start()
    (warning,) = warnings(lines)
    told = "raised ValueError: no such register" if isinstance(fault, Exception) else "differs by nan, allowed 1e-05"
    assert name == "xla"
    assert all(f"{kind} {told}" in warning for kind in ALL)
    assert start()[::2] == ("xla", 0)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "cannot be read"),
        (b"\xff\x00", "cannot be read"),
        (b'{"key": {}, "tolerance": 1e-5, "found": {}}', "is damaged: it lacks"),
        (b'{"key": {}, "tolerance": 1e-5, "found": {"decode": null}}', "is damaged: a difference"),
        (b'{"key": {}, "tolerance": 1e-5, "found": {"decode": 0.0}}', "is the verdict of another machine or setting"),
    ],
)
def test_a_damaged_verdict_is_replaced(start, content, told):
    start()
    (file,) = verdict_files()
    whole = file.read_bytes()
    file.write_bytes(content)
    name, lines, built = start()
    (warning,) = warnings(lines)
    assert name == "kernel"
    assert built
    assert "the kernel is compared with xla again, because" in warning
    assert str(file) in warning
    assert told in warning
    assert json.loads(file.read_bytes()) == json.loads(whole)
    assert verdict_files() == [file]


def test_a_verdict_that_cannot_be_written_is_found_again(start, monkeypatch):
    verdicts.verdict_folder().parent.write_text("a file where the folder should be")
    for _ in range(2):
        name, lines, built = start()
        (warning,) = warnings(lines)
        assert name == "kernel"
        assert built
        assert "a verdict cannot be kept, so the next start compares again: " in warning
    monkeypatch.setattr(Kernel, "fault", staticmethod(lambda *_: jnp.float32(2)))
    assert warnings(start()[1])[1].endswith("; the next start compares again")


@pytest.mark.parametrize(
    ("name", "options", "kinds"),
    [
        (
            "qwen3",
            {"kv_cache_dtype": "fp8", "dtype": "bfloat16", "block_size": 64, "chunk_scale": 1.3},
            [*ALL, "weighed question"],
        ),
        ("mistral-window", {}, ["prefill within a window of 11 tokens", "decode within a window of 11 tokens"]),
        (
            "qwen2-window",
            {},
            ["prefill", "decode", "prefill within a window of 9 tokens", "decode within a window of 9 tokens"],
        ),
    ],
)
def test_kinds_follow_the_engine(start, name, options, kinds):
    assert start(name, **options)[0] == "kernel"
    (file,) = verdict_files()
    stored = json.loads(file.read_text())
    assert set(stored["found"]) == set(kinds)
    settings = stored["key"]["settings"]
    assert settings["kv_dtype"] == ("float8_e4m3fn" if options else "float32")
    assert settings["block_size"] == options.get("block_size", 16)


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(jax, "__version__", "9"),
        lambda patch: patch.setenv("LIBTPU_INIT_ARGS", "--xla_other"),
        lambda patch: patch.setattr(verdicts, "_source", lambda backend: "other"),
        lambda patch: patch.setattr(verdicts, "version", lambda package: "9"),
    ],
)
def test_another_machine_is_compared_anew(change, monkeypatch):
    backend = Kernel(AttentionSpec(4, 2, 16, jnp.dtype("float32"), 16))
    before = verdicts.verdict_key(backend, weighs=False, batch_invariant=False)
    assert verdicts.verdict_file(before) != verdicts.verdict_file({**before, "chip": "TPU v6 lite"})
    change(monkeypatch)
    assert verdicts.verdict_key(backend, weighs=False, batch_invariant=False) != before


def test_kernels_for_chips_are_checked():
    assert get_backend("pallas_tpu").checked_by_auto
    assert get_backend("pallas_gpu").checked_by_auto
    assert not get_backend("cpu").checked_by_auto


def test_check_shows_verdicts(start, monkeypatch):
    monkeypatch.setattr(check, "_kernels", lambda *_: [])
    monkeypatch.setattr(check, "_demo", lambda *_: [])
    run = CliRunner().invoke
    assert "no engine has compared a kernel" in run(app, ["check"]).output
    start()
    shown = run(app, ["check"])
    assert shown.exit_code == 0
    assert "right backend kernel, num_heads 4, num_kv_heads 2, head_dim 32, dtype float32" in shown.output
    monkeypatch.setattr(Kernel, "fault", staticmethod(lambda *_: jnp.float32(2)))
    start(chunk_scale=1.3)
    shown = run(app, ["check"])
    assert shown.exit_code == 1
    assert "weighs True, batch_invariant False: prefill with chunks differs by" in shown.output
    monkeypatch.setattr(verdicts, "_source", lambda backend: "other")
    assert "no engine has compared a kernel" in run(app, ["check"]).output


def test_every_kind_reaches_every_row():
    for kind in ("prefill with chunks", "decode", "packed scores", "weighed question"):
        steps = self_check._steps(kind, 16, plain=False, weighs=kind == "weighed question")
        sizes = {(len(step.row_seq), step.block_tables.shape) for step in steps}
        assert len(sizes) == (1 if kind in ("prefill with chunks", "packed scores") else 2)
        assert len(sizes | {(1024, steps[0].block_tables.shape), (8, steps[0].block_tables.shape)}) == 2
