"""The GPU kernels really compile, for an H100, by the CUDA compilers; `make test-gpu` installs them."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(1800)


def compiled(*options):
    command = [sys.executable, "-m", "benchmarks.gpu_aot", *options, "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert not [case["error"] for case in found if not case["compiled"]]
    return found


@pytest.fixture(scope="module")
def quick():
    """The common settings, and steps of two layers."""
    return compiled("--quick")


def of_kind(cases, kind):
    found = [case for case in cases if case["kind"] == kind]
    assert found
    return found


def test_the_peer_has_a_loop_with_a_mask_and_one_without(quick):
    for case in of_kind(quick, "attention_mgpu"):
        (kernel,) = case["kernels"]
        clear, masked, producer = kernel["loops"]
        products = case["head_dim"] // 16 + case["slots"] // 16
        assert clear["shortest"]["products"] == masked["longest"]["products"] == products
        assert clear["longest"]["instructions"] < masked["shortest"]["instructions"]
        assert producer["longest"]["copies"] == 2
        assert kernel["spill_bytes"] == 0


def test_steps_of_two_layers_fit_the_card(quick):
    steps = of_kind(quick, "step")
    assert {case["model"] for case in steps} == {"qwen3-0.6b", "llama-3-8b"}
    assert all(case["layers"] == 2 and case["fits"] for case in steps)


@pytest.mark.exhaustive
def test_whole_steps_fit_the_card():
    steps = of_kind(compiled("--only", "steps"), "step")
    assert {case["model"] for case in steps} == {"qwen3-0.6b", "llama-3-8b"}
    assert all(case["fits"] for case in steps)
    # The pool is written in place: a step holds less beside weights and pool than a twentieth of them.
    assert all(case["temporary_mib"] < 0.05 * case["arguments_mib"] for case in steps)
