"""`chunkattn bench gen`: its jobs, its rounds in turns with vLLM and llama.cpp, and its table. No figure is asserted."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from transformers import Qwen3Config
from typer.testing import CliRunner

from chunkattn.cli import app
from chunkattn.engine.messages import GenerateRequest
from chunkattn.errors import ConfigError
from chunkattn.rope.positions import make_layout
from chunkattn.tools.bench import gen_peers, geometry, peer_script, peers
from chunkattn.tools.bench.cases import GenerateBench
from chunkattn.tools.bench.generate import GenCase, run
from chunkattn.tools.bench.peer_script import DecodeClock, shared_rate
from chunkattn.tools.bench.peers import PeerError, PeerProcess
from chunkattn.tools.bench.random_gguf import write_random
from chunkattn.tools.bench.score import needed_flops
from chunkattn.tools.bench.sizes import CASES, FileOptions, Setup, Sizes
from tests.bench.fake_peers import TINY, fake_llama, fake_vllm
from tests.gguf_files import Written

SIZES = Sizes((20, 40), 3, 20, 4, 5, (1, 3), 10, 4, 20, 6, 3)
PICKS = {
    "tensors": {"cls.output.weight": np.ones((2, 8), np.float32)},
    "change": lambda writer: writer.add_pooling_type(gguf.PoolingType.RANK),
}
"""Options of `Written` that make a file a classifier's."""
SETUP = Setup("tiny", "float32", repeats=2)
SMALL = [
    *("--geometry", "tiny", "--dtype", "float32", "--repeats", "2", "--prefill", "20", "--prefill", "40"),
    *("--documents", "3", "--document-tokens", "20", "--prefix-tokens", "4", "--question-tokens", "5"),
    *("--sequences", "1", "--sequences", "3", "--prompt-tokens", "10", "--decode-tokens", "4"),
    *("--query", "20", "--items", "6", "--item-len", "3"),
]
NAMES = [
    *("prefill 20", "prefill 40", "rag cold 3 x 20 + 5", "rag warm 3 x 20 + 5"),
    *("decode 1", "decode 3", "score 20 + 6 x 3"),
]


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(geometry.GEOMETRIES, "tiny", TINY)
    monkeypatch.setattr(gen_peers, "_PAUSE_S", 0.0)


def test_the_decode_clock_counts_the_steps_that_all_sequences_share(monkeypatch):
    times = iter(range(100))
    monkeypatch.setattr(peer_script.time, "perf_counter", lambda: float(next(times)))
    clock = DecodeClock(2)
    assert clock.rate is None
    clock.step({"a": 1}, ended=False)  # b is not there yet
    clock.step({"a": 2, "b": 1}, ended=False)
    assert clock.rate is None
    clock.step({}, ended=False)
    clock.step({"a": 4, "b": 3}, ended=False)
    clock.step({"a": 5, "b": 4}, ended=True)
    clock.step({"b": 5}, ended=True)
    assert clock.rate == (9 - 3) / 2


def test_streams_have_the_rate_of_the_time_that_they_share():
    """Tokens of one step at one time give what `DecodeClock` reads; a sequence's delay within the step changes nothing."""
    first, second = [(0.0, 1), (1.0, 2), (2.0, 3), (3.0, 4), (4.0, 5)], [(2.0, 1), (3.0, 2), (4.0, 3), (5.0, 4)]
    assert shared_rate([first, second]) == 2.0
    assert shared_rate([first, [(when + 0.01, count) for when, count in second]]) == pytest.approx(2.0)
    assert shared_rate([[(0.0, 1), (2.0, 5)]]) == 2.0  # tokens that came together
    assert shared_rate([first, [(4.0, 1), (5.0, 2)]]) is None
    assert shared_rate([first, []]) is None


@pytest.mark.ci
def test_jobs_of_documents_share_them_in_a_new_order():
    bench = GenerateBench(SETUP, replace(SIZES, case=("rag",)))
    cold, warm = bench.rag()
    ((first,),), ((second,),) = cold.batches, warm.batches
    assert len(first) == len(second) == SIZES.rag_tokens == 69
    assert first[:4] == second[:4]
    assert first[4:24] == second[44:64]
    assert first[24:64] == second[4:44]
    assert first[64:] != second[64:]
    assert (cold.measure().cached, warm.measure().cached) == (0, 64)


@pytest.mark.ci
def test_plain_prompts_of_documents_find_the_prefix_alone():
    bench = GenerateBench(SETUP, replace(SIZES, prefix_tokens=16, case=("plain",)))
    cold, warm = bench.plain()
    assert [job.name for job in (cold, warm)] == ["plain cold 3 x 20 + 5", "plain warm 3 x 20 + 5"]
    assert cold.measure().flops > bench.rag()[0].measure().flops  # every document sees those before it
    assert (cold.measure().cached, warm.measure().cached) == (0, 16)


def test_operations_of_a_prompt_count_its_first_token():
    bench = GenerateBench(SETUP, replace(SIZES, case=("prefill",)))
    runner, (job,) = bench.engine.core.runner, bench.prefill(20)
    pairs = 20 * 21 / 2
    assert job.measure().flops == 20 * runner.row_flops + pairs * runner.pair_flops + 2 * 8 * 50
    layout = make_layout([1, 2], [[3], [4]], [5])
    request = GenerateRequest("", layout, None)
    assert needed_flops(runner, [request], 0) == 5 * runner.row_flops + (1 + 2 + 3 + 3 + 5) * runner.pair_flops + 2 * 8 * 50
    assert runner.weight_bytes == 4 * (50 * 8 + 8 + 2 * (2 * 8 * 32 + 2 * 8 * 16 + 3 * 128 + 2 * 8 + 2 * 16))


@pytest.mark.slow
def test_rounds_take_turns_with_peers(tmp_path):
    python, vllm_log = fake_vllm(tmp_path)
    _, llama_log = fake_llama(tmp_path)
    report = run(SETUP, SIZES, pythons=[Path("/nowhere/python"), python])
    assert [case.name for case in report.cases] == NAMES
    assert [(peer.name, peer.version, peer.notes) for peer in report.peers] == [
        ("vllm", "0.0", report.peers[0].notes),
        ("llama.cpp", "0.1", ()),
    ]
    for case in report.cases:
        assert [*case.peers] == ["vllm", "llama.cpp"]
        for peer in case.peers.values():
            assert len(case.values) == len(peer.values) == 2
            faster = peer.median / case.median if case.unit == "s" else case.median / peer.median
            assert peer.ratio == pytest.approx(faster)
        assert case.compiles == 0
        assert case.cached == (64 if "warm" in case.name else 0)
        assert case.peak_share > 0
        assert case.peak_mib > 10
    loaded, *calls = map(json.loads, vllm_log.read_text().splitlines())
    assert loaded["load"]["max_num_batched_tokens"] == 8192
    assert loaded["load"]["max_model_len"] == 70 + 16
    assert loaded["load"]["dtype"] == "float32"
    # One untimed round and two timed rounds of each case.
    prompts = [*[20] * 3, *[40] * 3, *[69] * 6, *[10] * 12, *[23] * 18]
    assert [call["tokens"] for call in calls] == prompts
    assert [call["max_tokens"] for call in calls] == [1] * 12 + [13] * 12 + [1] * 18
    assert {call["logprobs"] for call in calls[-18:]} == {2}
    calls = [json.loads(line) for line in llama_log.read_text().splitlines()]
    # A server of as many slots as sequences decode together, each of the prompt, the answer and some positions.
    lengths = [(37, 1), (57, 1), (86, 1), (39, 1), (3 * 39, 3), (40, 1)]
    assert [call["load"] for call in calls if "load" in call] == [[size, slots, 0, 0] for size, slots in lengths]
    calls = [call for call in calls if "tokens" in call]
    assert [call["tokens"] for call in calls] == prompts
    assert [call["max_tokens"] for call in calls] == [1] * 12 + [13] * 12 + [1] * 18
    assert [call["n_probs"] for call in calls] == [0] * 24 + [2] * 18


@pytest.mark.ci
def test_a_peer_that_fails_starts_again_for_the_next_case(tmp_path):
    python, _ = fake_vllm(tmp_path, fails_at=3)
    _, log = fake_llama(tmp_path, fails_at=3)
    sizes = replace(SIZES, case=("prefill",))
    report = run(replace(SETUP, repeats=3), sizes, pythons=[python])
    vllm, llama = report.peers
    assert list(vllm.notes[-2:]) == [f"prefill {n}: failed: RuntimeError: out of memory" for n in (20, 40)]
    assert list(llama.notes) == [f"prefill {n}: failed: RuntimeError: the context is too short" for n in (20, 40)]
    # The first case fails in its third round, the second in its first; then nothing more is asked.
    assert [call.get("tokens") for call in map(json.loads, log.read_text().splitlines())] == [None, 20, 20, 20, None, 40]
    for case in report.cases:
        assert len(case.values) == 3
        assert {(peer.values, peer.median, peer.ratio) for peer in case.peers.values()} == {((), None, None)}


@pytest.mark.ci
def test_peers_without_an_interpreter_have_no_figures_and_say_why():
    sizes = replace(SIZES, prefill=(20,), case=("prefill",))
    report = run(replace(SETUP, repeats=1), sizes, pythons=[Path("/nowhere/python")])
    assert [peer.notes for peer in report.peers] == [("not measured: none of the interpreters given has it",)] * 2
    assert report.cases[0].peers == {}


@pytest.mark.ci
def test_a_gguf_file_is_measured(tmp_path):
    fake_vllm(tmp_path)
    python, log = fake_llama(tmp_path)
    path, sizes = tmp_path / "model.gguf", replace(SIZES, prefill=(20,), case=("prefill",))
    write_random(geometry.GEOMETRIES["tiny"], "F32", path)
    report = run(replace(SETUP, geometry="small"), sizes, FileOptions(model=path), pythons=[python])
    assert report.weight_bytes == 4 * (50 * 8 + 8 + 2 * (2 * 8 * 32 + 2 * 8 * 16 + 3 * 128 + 2 * 8 + 2 * 16))
    assert report.file == "model.gguf, 0 MiB, matrices: 15 F32"
    assert [len(peer.values) for peer in report.cases[0].peers.values()] == [2, 2]
    assert len(log.read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("change", "message"), [({}, "a sequence of 21 tokens is longer than the 20"), (PICKS, "a classifier")]
)
def test_files_that_cannot_run_are_refused(tmp_path, change, message):
    path = Written(tmp_path / "model.gguf", Qwen3Config(**{**TINY.to_dict(), "max_position_embeddings": 20}), **change).path
    with pytest.raises(ConfigError, match=message):
        run(SETUP, replace(SIZES, prefill=(20 - bool(change),), case=("prefill",)), FileOptions(model=path))


def test_vllm_shares_a_gpu_and_may_use_cuda_graphs(tmp_path, monkeypatch):
    monkeypatch.setattr(peers.jax, "default_backend", lambda: "gpu")
    python, log = fake_vllm(tmp_path)
    with PeerProcess(python, "vllm", config=TINY.to_dict(), max_model_len=20) as process:
        process.run([[[1, 2]]], 2)
    options = json.loads(log.read_text().splitlines()[0])["load"]
    assert process.note == ""  # no library that only CPUs need is missing
    assert (options["enforce_eager"], options["max_model_len"]) == (False, 20)
    assert options["gpu_memory_utilization"] < 0.5


@pytest.mark.ci
def test_the_pool_holds_the_pages_that_prompts_of_any_page_size_need():
    bench = GenerateBench(replace(SETUP, block_size=64), replace(SIZES, case=CASES))
    assert bench.engine.core.config.block_size == 64
    found = [job.measure() for make in bench.makers() for job in make()]
    assert found[3].cached == 4 + 3 * 20  # the prefix and the documents of `rag warm`


def test_a_process_that_dies_is_noticed(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nsleep 60 &\necho the reason >&2\nexit 3\n")  # a child holds the pipes
    python.chmod(0o755)
    with pytest.raises(PeerError, match="the reason"):
        PeerProcess(python, "vllm")
    with pytest.raises(PeerError, match="No such file"):
        PeerProcess(Path("/nowhere/python"), "vllm")


@pytest.mark.ci
def test_table_and_json(tmp_path):
    fake_vllm(tmp_path)
    python, _ = fake_llama(tmp_path)
    target = tmp_path / "cases.json"
    options = ["--case", "score", "--case", "rag", "--peers", "--peer-python", str(python), "--json", str(target)]
    options += ["--gguf", "F32"]
    result = CliRunner().invoke(app, ["bench", "gen", *SMALL, *options])
    assert result.exit_code == 0, result.output
    for text in (
        *(names := [*NAMES[2:4], NAMES[-1]]),
        "items/s",
        "ratio",
        "GFLOP/s",
        "GB/s",
        "to read 256 MiB",
        "peak host memory",
        "tiny F32, float32: median",
        "vllm: 0.0",
        "random weights of the same shape in float32",
        "llama.cpp: 0.1",
        "prefix alone",
        "file: tiny-F32.gguf",
    ):
        assert text in result.output
    assert "…" not in result.output  # nothing is cut at 80 columns
    assert "programs compiled in timed rounds: 0" in result.output
    report = json.loads(target.read_text())
    assert [set(case) for case in report["cases"]] == [{field.name for field in fields(GenCase)}] * len(names)
    assert report["facts"]["processor"]


@pytest.mark.slow
def test_json_alone_of_one_case():
    result = CliRunner().invoke(app, ["bench", "gen", *SMALL, "--case", "decode", "--json", "-"])
    report = json.loads(result.stdout)
    assert [case["name"] for case in report["cases"]] == ["decode 1", "decode 3"]
    told = [re.fullmatch(r"(.*): \d+\.\d s", line)[1] for line in result.stderr.splitlines()]
    assert told == [f"{case}, {n}" for case in ("decode 1", "decode 3") for n in ("warm-up", "round 1 of 2", "round 2 of 2")]
    assert report["cases"][0]["peers"] == {}
    assert "vllm" not in report["facts"]


@pytest.mark.parametrize(
    "options",
    [
        ["--case", "fast"],
        ["--prefill", "10000"],
        ["--documents", "1"],
        ["--decode-tokens", "1"],
        ["--items", "0"],
        ["--dtype", "int8"],
        ["--json", "no/such/folder.json"],
        ["--gguf", "Q4_K"],
        ["--model", "no/such/model.gguf"],
        ["--gguf", "Q8_0", "--model", __file__],
    ],
    ids=lambda options: options[-1],
)
def test_bad_options(options):
    result = CliRunner().invoke(app, ["bench", "gen", "--geometry", "tiny", *options])
    assert result.exit_code == 2, result.output
