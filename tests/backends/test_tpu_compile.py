"""The TPU kernels really compile, for real chips, by libtpu; `make test-tpu` installs it."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.launches import by_layer

pytestmark = [pytest.mark.tpu, pytest.mark.timeout(1800)]

KERNELS = ("--topology", "v6e", "--only", "kernels")


def compiled(*options):
    command = [sys.executable, "-m", "benchmarks.tpu_aot", *options, "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    ours = [case for case in found if case["kind"] not in ("splash", "ragged_paged")]
    assert not [(case["chip"], case["error"]) for case in ours if not case["compiled"]]
    return [case for case in found if case["compiled"]]


def check_pools(cases, chips):
    """The kernels write the pool in place."""
    cases = [case for case in cases if case["kind"] == "attention"]
    assert {case["chip"] for case in cases} == chips
    assert all(case["aliased_mib"] == case["pool_mib"] for case in cases)
    # A copy of the pool would be as large as the pool. Small pools show nothing, because a step needs some room of its own;
    # very many rows need a lot, which the last test covers.
    large = [case for case in cases if case["pool_mib"] >= 256 and case["rows"] <= 8192]
    assert {case["chip"] for case in large} == chips
    assert not [case for case in large if case["temporary_mib"] >= case["pool_mib"] / 2]


@pytest.fixture(scope="module")
def brief():
    """Our kernels on v6e."""
    return compiled(*KERNELS)


def test_kernels_compile_without_a_copy_of_the_pool(brief):
    check_pools(brief, {"v6e"})


def test_experts_are_not_copied():
    """Weights in checkpoints' order would be transposed at every call: as much again as a layer's experts."""
    cases = compiled("--topology", "v6e", "--only", "experts")
    assert [case["rows"] for case in cases] == [1, 64, 2048]
    assert all(case["temporary_mib"] < case["experts_mib"] / 2 for case in cases)


def test_states_of_a_recurrent_layer_are_written_in_place():
    cases = compiled("--topology", "v6e", "--only", "recurrent")
    assert {case["rows"] for case in cases} == {64, 2048}
    assert all(case["aliased_mib"] == case["pool_mib"] for case in cases)
    assert all(case["temporary_mib"] < case["pool_mib"] / 2 for case in cases)


def test_a_run_of_decodes_writes_the_pool_in_place():
    """Beside weights and pool, a run of two layers holds less than three arrays of logits."""
    command = [sys.executable, "-m", "benchmarks.tpu.decodes", "--rows", "64", "--layers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(done.stdout)
    assert run["compiled"], run
    assert run["aliased_mib"] == run["pool_mib"] > 1000
    assert not run["copies"]
    assert run["temporary_mib"] <= 100


def check_launches(cases, chips, decodes, prefills):
    """No program copies a weight, and a layer has few operations."""
    cases = [case for case in cases if case["kind"] == "launches"]
    assert {case["chip"] for case in cases} == chips
    for case in cases:
        assert case["weights"] == (1 if case["program"] == "labels" else 4 * case["layers"] + 1), case
        assert not case["copied_weights"], case
    layers = by_layer(cases)
    assert {(chip, program) for chip in chips for program in ("decodes", "step")} <= {(one.chip, one.program) for one in layers}
    for one in layers:
        most, mib = prefills if one.program == "step" else decodes
        assert 10 < one.launches <= most, one
        assert 30 <= one.mib <= mib, one  # 30 of them are weights
        assert one.rest <= (190 if one.program == "run" else 30), one  # with the branches of draws and log-probabilities


def test_programs_have_few_operations_and_copy_no_weight():
    check_launches(compiled("--topology", "v6e", "--only", "launches"), {"v6e"}, (35, 31), (42, 105))


@pytest.mark.exhaustive
def test_programs_of_other_chips_have_few_operations_and_copy_no_weight():
    check_launches(compiled("--topology", "v5e", "--only", "launches"), {"v5e"}, (35, 31), (42, 60))


@pytest.mark.exhaustive
def test_steps_of_two_layers_fit_the_chip():
    steps = [case for case in compiled("--topology", "v6e", "--only", "steps", "--layers", "2") if case["kind"] == "step"]
    assert {case["model"] for case in steps} == {"qwen3-0.6b", "llama-3-8b"}
    assert all(case["layers"] == 2 and case["fits"] for case in steps)


@pytest.mark.exhaustive
def test_kernels_compile_for_every_other_chip_without_a_copy_of_the_pool():
    check_pools(compiled("--only", "kernels", "--topology", "v5e", "--topology", "v5p"), {"v5e", "v5p"})


@pytest.fixture(scope="module")
def on_v6e():
    return compiled("--topology", "v6e")


@pytest.mark.exhaustive
def test_prefill_takes_no_more_bundles_than_splash_attention(on_v6e):
    for head_dim in (64, 128, 256):
        of = [case for case in on_v6e if case["kind"] != "step" and case["head_dim"] == head_dim]
        theirs = min(case["prefill"]["bundles_per_tile"] for case in of if case["kind"] == "splash")
        ours = [case for case in of if case["kind"] == "attention" and case["dtype"] == "bfloat16" and case["rows"] == 2048]
        plain = [case["prefill"] for case in ours if not case["kv_dtype"] and not case["weighs"] and case["block_size"] == 16]
        assert plain
        for prefill in plain:
            assert prefill["bundles_per_masked_tile"] <= theirs
            assert prefill["masked_with_copies"] <= theirs


def test_decode_waits_for_memory_and_not_for_bundles(brief):
    common = next(case for case in brief if case["kind"] == "attention")
    assert common["decode"]["bundles"] <= common["decode"]["bundles_while_copying"]


@pytest.mark.exhaustive
def test_whole_steps_fit_the_chip(on_v6e):
    steps = [case for case in on_v6e if case["kind"] == "step"]
    assert {case["model"] for case in steps} == {"qwen3-0.6b", "llama-3-8b"}
    assert all(case["fits"] for case in steps)
    # The pool is written in place: a step holds less beside weights and pool than a twentieth of them.
    assert all(case["temporary_mib"] < 0.05 * case["arguments_mib"] for case in steps)


def test_memory_of_131072_cached_tokens_grows_with_rows_alone(brief):
    long = [case for case in brief if case["kind"] == "attention" and case["width"] * case["block_size"] >= 131072]
    assert len(long) == 2
    for case in long:
        rows_mib = case["rows"] * (case["heads"] + 2 * case["kv_heads"]) * case["head_dim"] * 2 / 2**20
        assert case["temporary_mib"] <= 3 * rows_mib
