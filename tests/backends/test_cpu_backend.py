"""The native attention of CPUs: every kernel that this machine runs against the reference and against double precision."""

import logging
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkattn.backends import AttentionSpec, get_backend, make_backend
from chunkattn.backends.cpu import build, library
from chunkattn.testing import check_backend, random_steps
from tests.cpu_kernels import use

NAMES = list(build.kernels())


OPTIONS = [
    {"cases": 20},
    {"weighs": True},
    {"dtype": "bfloat16", "weighs": True},
    {"kv_dtype": "float8_e4m3fn", "window": 7},
    {"kv_dtype": "float8_e4m3fn", "dtype": "bfloat16"},
    {"window": 7},
    {"dtype": "float16", "block_size": 4},
    {"num_heads": 6, "num_kv_heads": 2, "head_dim": 80, "dtype": "bfloat16"},
    {"num_heads": 8, "num_kv_heads": 1, "head_dim": 64, "block_size": 16, "scale": 4, "cases": 3, "weighs": True},
]


@pytest.mark.parametrize("options", OPTIONS[:5] + [pytest.param(o, marks=pytest.mark.ci) for o in OPTIONS[5:]], ids=str)
def test_kernels_equal_the_reference(kernel, options):
    check_backend("cpu", **{"cases": 6, **options})


def test_the_best_kernel_is_in_use():
    running = [name for name in NAMES if not use(name)]
    use("")
    assert library.kernel_name() == running[-1]
    assert "portable" in running


def test_unknown_kernels_are_refused():
    assert use("none") == "no kernel has that name"
    code = "from chunkattn.backends.cpu import library; print(library.refusal())"
    environment = {**os.environ, "CHUNKATTN_CPU_KERNEL": "none"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "CHUNKATTN_CPU_KERNEL=none: no kernel has that name"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 24}, "head_dim must be a multiple of 16 up to 256, got 24"),
        ({"head_dim": 272}, "head_dim must be a multiple of 16 up to 256, got 272"),
        ({"num_heads": 514, "num_kv_heads": 1}, "at most 256 query heads may share a KV head, got 514"),
        ({"dtype": jnp.dtype("float64")}, "it computes float32, bfloat16 and float16, not float64"),
    ],
    ids=str,
)
def test_other_models_run_on_xla(changes, reason, caplog):
    spec = replace(AttentionSpec(4, 2, 32, jnp.dtype("float32"), 16), **changes)
    assert get_backend("cpu").supports(spec) == reason
    with caplog.at_level(logging.WARNING, logger="chunkattn"):
        assert make_backend("auto", spec).name == "xla"
    assert f"xla on cpu, because cpu cannot serve this model: {reason}" in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neighbours_and_spans_change_no_bit(kernel, dtype):
    """Every row gets the same bits, whatever else is in its step and wherever its span was cut."""
    rng = np.random.default_rng(3)
    spec = AttentionSpec(4, 2, 32, jnp.dtype(dtype), 8)
    backend = get_backend("cpu")(spec)
    forward = jax.jit(backend.forward, static_argnames="scale")
    batch = max(random_steps(rng, scale=4), key=lambda b: b.num_rows)
    pages = int(batch.block_tables.max()) + 1
    rows = len(batch.row_seq)
    q, k, v = (jnp.asarray(rng.standard_normal((rows, heads, 32)), dtype) for heads in (4, 2, 2))
    filled = [jnp.asarray(rng.standard_normal(pool.shape), dtype) for pool in backend.allocate(pages)]
    bits = [x if dtype == "float32" else jax.lax.bitcast_convert_type(x, jnp.uint16) for x in filled]

    def run(picked):
        columns = [np.append(x[picked], np.zeros(rows - len(picked), np.int32)) for x in (batch.row_seq, batch.row_slot)]
        start = np.append(batch.row_start[picked], np.zeros(rows - len(picked), np.int32))
        part = replace(batch, num_rows=len(picked), row_seq=columns[0], row_slot=columns[1], row_start=start)
        given = (jnp.zeros_like(x).at[: len(picked)].set(x[picked]) for x in (q, k, v))
        out, cache = forward(*given, [jnp.array(x) for x in bits], backend.build_metadata(part), scale=0.2)
        return np.asarray(out, np.float32)[: len(picked)], cache

    whole, bits = run(np.arange(batch.num_rows))  # later runs find every row's K/V in the pool
    for seq in np.unique(batch.row_seq[: batch.num_rows]):
        own = np.flatnonzero(batch.row_seq[: batch.num_rows] == seq)
        for picked in filter(len, (own, own[len(own) // 3 :], own[: len(own) // 2], own[-1:])):
            np.testing.assert_array_equal(run(picked)[0], whole[picked])


def _check_program(folder, source, *flags):
    objects = build.objects(build.compiler(), folder, build.PARTS, (*build.FLAGS, "-g", *flags))
    program = folder / "check"
    own = ["-std=c++17", "-O2", "-g", *flags, "-I", build.SOURCES, Path(__file__).with_name(source)]
    subprocess.run([build.compiler(), *own, *objects, "-pthread", "-o", program], check=True)
    return program


@pytest.mark.slow
@pytest.mark.skipif(not build.compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("source", ["cpu_check.cc", "recurrence_check.cc"])
def test_kernels_equal_double_precision_on_any_number_of_threads(tmp_path, source):
    done = subprocess.run([_check_program(tmp_path, source), "6"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("portable     largest error ")
    assert len(done.stdout.splitlines()) == 4 if platform.machine() == "x86_64" else 1


PACKED_DIGEST = "290c4d931cb1224d"
"""Digest of the products of 12 rounds of `packed_check.cc` on x86-64, and on 64-bit ARM under QEMU."""


@pytest.mark.slow
@pytest.mark.skipif(not build.compiler(), reason="no C++ compiler")
def test_packed_products_have_one_result_on_every_kernel_and_processor(tmp_path):
    done = subprocess.run([_check_program(tmp_path, "packed_check.cc"), "12"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("kernels portable")
    assert done.stdout.splitlines()[-1] == f"digest {PACKED_DIGEST}"


@pytest.mark.slow
@pytest.mark.skipif(not build.compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
@pytest.mark.parametrize("source", ["cpu_check.cc", "packed_check.cc", "recurrence_check.cc"])
def test_sanitizers_find_nothing(tmp_path, source, sanitizers):
    program = _check_program(tmp_path, source, f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all")
    done = subprocess.run([program, "4"], capture_output=True, text=True, check=False)
    if "unexpected memory mapping" in done.stderr:  # TSan finds no room among random addresses
        done = subprocess.run(["setarch", "-R", program, "4"], capture_output=True, text=True, check=False)
        if "failed to set personality" in done.stderr:
            pytest.skip("ThreadSanitizer needs fixed addresses, which this system forbids")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "largest error" in done.stdout
    assert not done.stderr
