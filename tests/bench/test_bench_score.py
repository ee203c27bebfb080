"""`chunkattn bench score` and the benchmarks beside it: their arithmetic, and that they run. No figure is asserted."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from itertools import chain
from pathlib import Path

import pytest
from transformers import Qwen3Config
from typer.testing import CliRunner

from benchmarks.document_first import measure as measure_documents
from benchmarks.score_auto import Query, draw
from benchmarks.score_auto import measure as measure_auto
from chunkattn.cli import app
from chunkattn.tools.bench import geometry
from chunkattn.tools.bench.measure import peak_bytes, reset_peak, resident_bytes
from chunkattn.tools.bench.peers import time_peer
from chunkattn.tools.bench.score import ScoreBench, ScoreCase, needed_flops, run
from chunkattn.tools.bench.sizes import ScoreWorkload, Setup
from tests.bench import fake_peers
from tests.flows import stages_of

ROOT = Path(__file__).parents[2]
TINY = Qwen3Config(**fake_peers.TINY.to_dict() | {"head_dim": 4})
SMALL = ["--geometry", "tiny", "--query", "20", "--item-len", "3", "--repeats", "1", "--kv-tokens", "1024"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(geometry.GEOMETRIES, "tiny", TINY)


@pytest.mark.ci
def test_operations_are_those_counted_by_hand():
    bench = ScoreBench("tiny", 256, dtype="float32", max_num_batched_tokens=64)
    # Multiplications of a row: q 8x8, k and v 8x4, o 8x8, three matrices 8x16. Of a pair: 2 heads of 4, scores and values.
    row, pair, head = 2 * 2 * (64 + 2 * 32 + 64 + 3 * 128), 2 * 2 * 2 * 2 * 4, 2 * 8 * 50
    query, items = [1, 2, 3], [[4, 5], [6, 7]]
    behind = (4 + 5) * 2  # pairs of the items' rows: three of the query, and their own
    expected = {
        "serial": 10 * row + 2 * 15 * pair + 2 * head,
        "packed_segment": 7 * row + (6 + behind) * pair + 2 * head,
        "packed_dense": 7 * row + (6 + behind) * pair + 2 * head,
        "prefill_extend": 7 * row + (6 + behind) * pair + 2 * head,
    }
    for name, flops in expected.items():
        bench.frontend.scores.results.clear()  # the flow before left its made-up results
        requests = [*chain.from_iterable(stages_of(bench.call(query, items, name)))]
        assert needed_flops(bench.core.runner, requests, 0) == flops, name
    bench.run(query, items, "prefill_extend")
    warm = bench.run(query, items, "prefill_extend")
    assert (warm.output.usage.computed_tokens, warm.output.usage.cached_tokens) == (4, 3)
    assert warm.flops == 4 * row + behind * pair + 2 * head


@pytest.mark.ci
def test_documents_first_are_measured_with_their_tokens_cached():
    bench = ScoreBench("tiny", 1024, dtype="float32", max_num_batched_tokens=64)
    found = measure_documents(bench, [bench.ids(40) for _ in range(5)], query_len=4, rounds=1)
    assert found["tokens"] == {
        "documents first": {"computed": 5 * 4, "cached": 5 * 40},
        "query first": {"computed": 4 + 5 * 40, "cached": 0},
    }
    assert found["ratio"] == found["ratios"][0] > 0
    assert found["ratio"] == pytest.approx(found["seconds"]["query first"] / found["seconds"]["documents first"])


@pytest.mark.slow
def test_cases_of_a_workload():
    names = ["serial", "packed_segment", "prefill_extend", "packed_dense"]
    (cases,) = run(Setup("tiny", repeats=1), [ScoreWorkload(20, 12, 3)], names, serial_items=4, kv_tokens=1024)
    found = {case.name: case for case in cases}
    assert list(found) == ["serial", "packed_segment", "prefill_extend", "prefill_extend, cached", "packed_dense"]
    rows = {"serial": 12 * 23, "prefill_extend, cached": 36}
    for name, case in found.items():
        assert case.compiles == 0
        assert case.rows == rows.get(name, 20 + 36)
        assert case.items_per_s == pytest.approx(12 / case.seconds)
        assert case.speedup == pytest.approx(found["serial"].seconds / case.seconds)
        assert case.measured_items == (4 if name == "serial" else 12)
        assert 0 < case.peak_share < 1
        assert (case.predicted_s is None) == (name == "packed_dense")
        assert case.peak_mib > 10
    assert sum(case.auto for case in cases if not case.cached) == 1


@pytest.mark.parametrize(
    "options",
    [
        ["--query", "9000", "--algorithm", "packed_dense"],  # more than its mask may have
        ["--query", "9999"],
        ["--algorithm", "fast"],
        ["--items", "0"],
        ["--dtype", "int8"],
        ["--json", "no/such/folder.json"],
    ],
    ids=lambda options: options[-1],
)
def test_bad_options(options):
    result = CliRunner().invoke(app, ["bench", "score", "--geometry", "tiny", *options])
    assert result.exit_code == 2, result.output


@pytest.mark.slow
def test_table_json_and_picture(tmp_path):
    target, picture = tmp_path / "cases.json", tmp_path / "cases.png"
    options = [*SMALL, "--items", "4", "--items", "9", "--peers", "--json", str(target), "--png", str(picture)]
    result = CliRunner().invoke(app, ["bench", "score", *options])
    assert result.exit_code == 0, result.output
    for text in ("query 20, 9 items of 3", "query cached", "of peak", "serial: 4 items timed", "vllm: not measured"):
        assert text in result.output
    report = json.loads(target.read_text())
    assert len(report["cases"]) == 10
    assert set(report["cases"][0]) == {field.name for field in fields(ScoreCase)}
    assert [peer["peer"] for peer in report["peers"]] == ["transformers", "vllm"] * 2
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_json_alone(tmp_path):
    options = [*SMALL, "--items", "4", "--algorithm", "packed_segment", "--json", "-", "--png", str(tmp_path / "bars.png")]
    result = CliRunner().invoke(app, ["bench", "score", *options])
    (case,) = json.loads(result.stdout)["cases"]
    told = re.findall(r"^query \d+, 4 x \d+, packed_segment, (.*): \d+\.\d s$", result.stderr, flags=re.MULTILINE)
    assert told == ["warm-up", *(f"round {n} of {len(told) - 1}" for n in range(1, len(told)))]
    assert len(result.stderr.splitlines()) == len(told) > 1
    assert case["algorithm"] == "packed_segment"
    assert case["speedup"] is None
    assert (tmp_path / "bars.png").exists()


def test_memory():
    assert resident_bytes() is None or 0 < resident_bytes() <= peak_bytes()
    reset_peak()
    before = peak_bytes()
    held = bytearray(64 << 20)
    assert peak_bytes() >= before + len(held) // 2 or not Path("/proc/self/clear_refs").exists()


def test_a_peer_that_fails_says_why():
    options = {"measured_items": 1, "repeats": 1}
    case = time_peer([Path("/nowhere/python")], "vllm", "tiny", ScoreWorkload(5, 2, 3), **options)
    assert (case.seconds, case.note) == (None, "not measured: none of the interpreters given has it")
    # A module of that name, but not a peer.
    case = time_peer([Path(sys.executable)], "json", "tiny", ScoreWorkload(5, 2, 3), **options)
    assert case.seconds is None
    assert case.note == "failed: KeyError: 'json'"


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["prefill_extend", "packed_segment"])
def test_memory_grows_with_the_budget_and_not_with_items(algorithm):
    bench = ScoreBench("tiny", 8192, dtype="float32", max_num_batched_tokens=512)
    runs = [bench.run(bench.ids(100), bench.items(ScoreWorkload(100, items, 5)), algorithm) for items in (500, 500, 5000)]
    assert runs[2].peak <= 1.1 * runs[1].peak


@pytest.mark.slow
def test_transformers_as_a_peer():
    case = time_peer([Path(sys.executable)], "transformers", "tiny", ScoreWorkload(5, 6, 3), measured_items=2, repeats=1)
    assert case.note == ""
    assert case.seconds == pytest.approx(6 / case.items_per_s)


@pytest.mark.slow
def test_a_cell_of_the_grid_and_its_picture(tmp_path):
    bench = ScoreBench("tiny", 1024, dtype="float32", max_num_batched_tokens=64)
    rows = [
        measure_auto(bench, Query(tokens, cached), ScoreWorkload(tokens, 6, 3), 1, 50)
        for tokens, cached in ((1, False), (20, False), (20, True))
    ]
    for row in rows:
        assert set(row["seconds"]) == set(row["predicted_seconds"])
        assert row["ratio"] == row["seconds"][row["auto"]] / min(row["seconds"].values())
    draw(rows, 1.0, "tiny", tmp_path / "grid.png")
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("callers", [8, 32])
def test_concurrent_callers(callers):
    options = ["--callers", str(callers), "--seconds", "20", "--aborts", "--stream", "--variants", "1", "--budget", "512"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.score_load", *options, "--json", "-"],
        cwd=ROOT,
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout
    (result,) = json.loads(done.stdout)
    assert result["errors"] == {}
    assert result["aborted"] > 0
    assert all(found["count"] for found in result["requests"].values())
    assert result["longest_gap_ms"] > 0
