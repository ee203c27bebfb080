"""`chunkattn bench gen`: its jobs, its rounds in turns with vLLM, and its table. No figure is asserted."""

import json
import re
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from transformers import Qwen3Config
from typer.testing import CliRunner

from chunkattn.cli import app
from chunkattn.engine.messages import GenerateRequest
from chunkattn.rope.positions import make_layout
from chunkattn.tools.bench import generate, geometry, peer_script, peers
from chunkattn.tools.bench.cases import GenerateBench
from chunkattn.tools.bench.generate import GenCase, run
from chunkattn.tools.bench.peer_script import DecodeClock
from chunkattn.tools.bench.peers import PeerError, PeerProcess
from chunkattn.tools.bench.score import needed_flops
from chunkattn.tools.bench.sizes import CASES, Setup, Sizes

TINY = Qwen3Config(
    architectures=["Qwen3ForCausalLM"],
    vocab_size=50,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,  # the native backend takes multiples of 16
    max_position_embeddings=10_000,
    tie_word_embeddings=True,
)
SIZES = Sizes((20, 40), 3, 20, 4, 5, (1, 3), 10, 4, 20, 6, 3)
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
VLLM = """
import json, time
from types import SimpleNamespace

__version__ = "0.0"
print("a banner on stdout")


class SamplingParams:
    def __init__(self, **options):
        self.options = options


class LLM:
    def __init__(self, folder, **options):
        assert json.load(open(folder + "/config.json"))["vocab_size"] == 50
        self.llm_engine, self.requests = self, {}
        log(load=options)

    def add_request(self, name, prompt, params):
        log(tokens=len(prompt["prompt_token_ids"]), **params.options)
        self.requests[name] = [0, params.options["max_tokens"]]

    def has_unfinished_requests(self):
        return bool(self.requests)

    def step(self):
        time.sleep(0.001)
        outputs = []
        for name, counts in list(self.requests.items()):
            counts[0] += 1
            ended = counts[0] == counts[1]
            tokens = SimpleNamespace(token_ids=[0] * counts[0])
            outputs.append(SimpleNamespace(request_id=name, outputs=[tokens], finished=ended))
            if ended:
                del self.requests[name]
        if FAILS_AT and sum(1 for _ in open(LOG)) > FAILS_AT:
            raise RuntimeError("out of\\nmemory")
        return outputs


def log(**values):
    with open(LOG, "a") as file:
        file.write(json.dumps(values) + "\\n")
"""


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(geometry.GEOMETRIES, "tiny", TINY)
    monkeypatch.setattr(generate, "_PAUSE_S", 0.0)


def fake_vllm(tmp_path, fails_at=0):
    """Make an interpreter with a module `vllm` that counts instead of computing. Return it, and the file of its calls."""
    log = tmp_path / "calls.jsonl"
    (tmp_path / "vllm.py").write_text(f"LOG, FAILS_AT = {str(log)!r}, {fails_at}\n{VLLM}")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} LD_PRELOAD= exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python, log


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
def test_rounds_take_turns_with_vllm(tmp_path):
    python, log = fake_vllm(tmp_path)
    report = run(SETUP, SIZES, pythons=[Path("/nowhere/python"), python])
    assert [case.name for case in report.cases] == NAMES
    assert report.peer == "vllm 0.0"
    for case in report.cases:
        assert len(case.values) == len(case.peer_values) == 2
        faster = case.peer_median / case.median if case.unit == "s" else case.median / case.peer_median
        assert case.ratio == pytest.approx(faster)
        assert case.compiles == 0
        assert case.cached == (64 if "warm" in case.name else 0)
        assert case.peak_share > 0
        assert case.peak_mib > 10
    loaded, *calls = map(json.loads, log.read_text().splitlines())
    assert loaded["load"]["max_num_batched_tokens"] == 8192
    assert loaded["load"]["max_model_len"] == 70 + 16
    assert loaded["load"]["dtype"] == "float32"
    # One untimed round and two timed rounds of each case.
    prompts = [*[20] * 3, *[40] * 3, *[69] * 6, *[10] * 12, *[23] * 18]
    assert [call["tokens"] for call in calls] == prompts
    assert [call["max_tokens"] for call in calls] == [1] * 12 + [13] * 12 + [1] * 18
    assert {call["logprobs"] for call in calls[-18:]} == {2}


@pytest.mark.slow
def test_vllm_that_fails_has_no_figures_and_says_why(tmp_path):
    python, _ = fake_vllm(tmp_path, fails_at=3)
    report = run(SETUP, replace(SIZES, case=("prefill",)), pythons=[python])
    assert report.peer_note == "failed: RuntimeError: out of memory"
    assert [(len(case.values), case.peer_values, case.ratio) for case in report.cases] == [(2, (), None)] * 2
    report = run(replace(SETUP, repeats=1), replace(SIZES, case=("prefill",)), pythons=[Path("/nowhere/python")])
    assert report.peer_note == "not measured: none of the interpreters given has it"


def test_vllm_shares_a_gpu_and_may_use_cuda_graphs(tmp_path, monkeypatch):
    monkeypatch.setattr(peers.jax, "default_backend", lambda: "gpu")
    python, log = fake_vllm(tmp_path)
    with PeerProcess(python, "vllm", "tiny", max_model_len=20) as process:
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
        PeerProcess(python, "vllm", "tiny")
    with pytest.raises(PeerError, match="No such file"):
        PeerProcess(Path("/nowhere/python"), "vllm", "tiny")


@pytest.mark.ci
def test_table_and_json(tmp_path):
    python, _ = fake_vllm(tmp_path)
    target = tmp_path / "cases.json"
    options = ["--case", "score", "--case", "rag", "--peers", "--peer-python", str(python), "--json", str(target)]
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
        "peer: vllm 0.0",
        "prefix alone",
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
    assert report["cases"][0]["peer_median"] is None
    assert "peer" not in report["facts"]


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
    ],
    ids=lambda options: options[-1],
)
def test_bad_options(options):
    result = CliRunner().invoke(app, ["bench", "gen", "--geometry", "tiny", *options])
    assert result.exit_code == 2, result.output
