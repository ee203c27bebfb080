"""The GPU kernels really compile, for an H100, by the CUDA compilers; `make test-gpu` installs them."""

import json
import subprocess
import sys

import pytest

from benchmarks.launches import by_layer
from benchmarks.nvidia.hopper import SHARED_MEMORY_BYTES

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


def test_experts_are_not_copied_whole(quick):
    cases = of_kind(quick, "experts")
    assert {case["rows"] for case in cases} == {1, 64, 2048}
    assert all(case["temporary_mib"] < case["experts_mib"] for case in cases)


def check_kinds(case, kinds, told):
    """Steps of few rows are split; those with weighed rows use tiles where their states would exceed the limit."""
    many = case["rows"] * case["heads"] > 64 * 132
    if case["decodes"]:
        assert kinds == {"decodes"}, told
        return
    assert ("tiles" in kinds) == many or (case["weighs"] and "tiles" in kinds), told
    assert ("blocks" in kinds) == (case["weighs"] or "tiles" not in kinds), told


def check_kernels(cases):
    """No kernel spills, each fits shared memory and multiplies as often as it must, and the pool is written in place."""
    for case in cases:
        names = (
            "head_dim",
            "block_size",
            "dtype",
            "heads",
            "kv_heads",
            "rows",
            "window",
            "weighs",
            "batch_invariant",
            "decodes",
        )
        told = {name: case[name] for name in names}
        check_kinds(case, set(case["kernels"]), told)
        for name, kernel in case["kernels"].items():
            assert kernel["spill_bytes"] == 0, (told, name, kernel)
            assert kernel["shared_bytes"] <= SHARED_MEMORY_BYTES, (told, name, kernel)
            assert kernel["products"] == [kernel["products_needed"]], (told, name, kernel)
        prepares = case["kv_dtype"] is None and case["window"] is None
        assert [kernel["spill_bytes"] for kernel in case["preparing"]] == [0] * prepares, (told, case["preparing"])
        assert case["aliased_mib"] == case["pool_mib"], told
        # A copy of the pool would be as large as the pool. Small pools show nothing: a step needs some room of its own, and
        # more for the states of weighed rows.
        small = case["pool_mib"] < (1024 if case["weighs"] else 256)
        small |= case["batch_invariant"]  # every row may be a block of queries of its own
        assert small or case["rows"] > 8192 or case["temporary_mib"] < case["pool_mib"] / 2, told


def check_instructions(cases, peers):
    """The loops over query tiles of heads of 128 issue few instructions more than JAX's own kernel."""
    (peer,) = (case["kernels"]["attention_mgpu"] for case in peers if case["head_dim"] == 128)
    tiles = [case for case in cases if case["head_dim"] == 128 and "tiles" in case["kernels"]]
    ours = [(case["block_size"], case["kernels"]["tiles"]) for case in tiles]
    assert ours
    for block_size, kernel in ours:
        clear, masked = (1.05, 1.45) if block_size == 64 else (1.1, 1.5)  # pages of 64 are those to use
        assert kernel["clear"] <= clear * peer["clear"], (block_size, kernel)
        assert kernel["masked"] <= masked * peer["masked"], (block_size, kernel)


def test_kernels_fit_the_card_without_spills_or_a_copy_of_the_pool(quick):
    cases = of_kind(quick, "pallas_gpu")
    assert {case["weighs"] for case in cases} == {False, True}
    assert {"tiles" in case["kernels"] for case in cases} == {False, True}
    check_kernels(cases)


def test_loops_are_nearly_as_short_as_those_of_jax(quick):
    check_instructions(of_kind(quick, "pallas_gpu"), of_kind(quick, "attention_mgpu"))


def test_the_peer_multiplies_with_a_mask_and_without(quick):
    for case in of_kind(quick, "attention_mgpu"):
        kernel = case["kernels"]["attention_mgpu"]
        assert kernel["products"] == [case["head_dim"] // 16 + case["slots"] // 16]
        assert kernel["clear"] < kernel["masked"]
        assert kernel["spill_bytes"] == 0


def test_steps_of_two_layers_fit_the_card(quick):
    steps = [case for case in of_kind(quick, "step") if case["gpus"] == 1]
    assert {case["model"] for case in steps} == {"qwen3-0.6b", "llama-3-8b"}
    assert {case["backend"] for case in steps} == {"pallas_gpu", "xla"}
    assert all(case["layers"] == 2 and case["fits"] and not case["collectives"] for case in steps)


def test_gpus_that_share_a_model_add_up_twice_a_layer(quick):
    """The fifth sum is the embedding's. No weight is gathered, and each pool is written in place."""
    shared = [case for case in of_kind(quick, "step") if case["gpus"] > 1]
    assert {case["gpus"] for case in shared} == {2, 4}
    for case in shared:
        assert case["collectives"] == {"all-reduce": 5}, case
        assert case["fits"], case
        pages = 2 * case["layers"] * case["pages"] * (8 // case["gpus"]) * 64 * 128 * 2
        assert case["aliased_mib"] == round(pages / 2**20, 1), case


@pytest.fixture(scope="module")
def counted(quick):
    """Programs of two and four layers."""
    return of_kind(quick, "launches")


def test_a_program_is_one_graph_of_few_launches(counted):
    """HLO and thunks, which the compiler writes apart, give the same counts."""
    assert {(case["program"], case["rows"]) for case in counted} == {("decodes", 8), ("run", 8), ("step", 2048), ("labels", 64)}
    for case in counted:
        assert (case["graphs"], case["outside_graphs"]) == (1, 0), case
        assert case["program"] == "run" or case["launches"] == sum(case["thunks"].values()), case
    layers = {one.program: one for one in by_layer(counted)}
    for program, (most, mib, rest) in {"decodes": (10, 105, 12), "run": (10, 42, 104), "step": (10, 260, 10)}.items():
        one = layers[program]  # a run has the branches of draws and log-probabilities beside its layers
        assert 8 < one.launches <= most, one
        assert 25 < one.mib <= mib, one  # 30 of them are weights
        assert one.rest <= rest, one
    whole = {program: one.rest + 28 * one.launches for program, one in layers.items()}
    assert whole["decodes"] <= 300
    assert whole["run"] <= 400
    assert all(case["temporary_mib"] <= 100 for case in counted if case["program"] == "run")
    assert len({case["aliased_mib"] for case in counted if case["program"] in ("run", "decodes") and case["layers"] == 2}) == 1
    (labels,) = (case for case in counted if case["program"] == "labels")
    assert labels["launches"] <= 10


def test_no_program_copies_a_weight(counted):
    """Four matrices of a layer are looked at, and the embedding."""
    for case in counted:
        assert case["weights"] == (1 if case["program"] == "labels" else 4 * case["layers"] + 1), case
        assert not case["copied_weights"], case


@pytest.mark.exhaustive
def test_every_supported_setting_compiles():
    check_kernels(compiled("--grid"))


@pytest.mark.exhaustive
def test_long_and_wide_steps_compile():
    found = compiled("--only", "kernels", "--only", "peers")
    cases = of_kind(found, "pallas_gpu")
    check_kernels(cases)
    check_instructions(cases, of_kind(found, "attention_mgpu"))


@pytest.mark.exhaustive
def test_whole_steps_fit_the_card():
    steps = of_kind(compiled("--only", "steps"), "step")
    assert {case["model"] for case in steps} == {"qwen3-0.6b", "llama-3-8b", "llama-3-70b"}
    assert all(case["fits"] for case in steps)
    # The pool is written in place: a step holds less beside weights and pool than a twentieth of them.
    assert all(case["temporary_mib"] < 0.05 * case["arguments_mib"] for case in steps)
