"""`python -m benchmarks.gpu`: it refuses machines without a GPU, counts what calls need, and runs small on a CPU."""

import json
import sys

import numpy as np
import pytest

from benchmarks import gpu
from benchmarks.nvidia.workloads import Call, calls

CPU = {"name": "cpu", "platform": "cpu"}


@pytest.fixture
def on(monkeypatch):
    """Let the command see a device, and pass it options."""

    def see(card, *options):
        monkeypatch.setattr(gpu, "card", lambda: card)
        monkeypatch.setattr(sys, "argv", ["gpu", *map(str, options)])

    return see


def test_a_machine_without_a_gpu_is_refused_in_one_line(on, monkeypatch):
    on(CPU)
    monkeypatch.setattr(gpu, "check", lambda **_: pytest.fail("something ran"))
    with pytest.raises(SystemExit, match=r"^benchmarks\.gpu needs a GPU that JAX sees .* JAX runs on cpu$"):
        gpu.main()


def test_wrong_attention_is_not_measured(on, monkeypatch, capsys):
    on({"name": "NVIDIA H100 80GB HBM3", "platform": "gpu"})
    wrong = "import sys; print('wrong: num_heads 4'); sys.exit(1)"
    real = gpu.subprocess.run
    monkeypatch.setattr(gpu.subprocess, "run", lambda *_, **options: real([sys.executable, "-c", wrong], **options))
    with pytest.raises(SystemExit, match="nothing is measured"):
        gpu.main()
    assert "wrong: num_heads 4" in capsys.readouterr().out


def test_a_part_that_fails_is_told_and_the_others_run(on, monkeypatch, tmp_path, capsys):
    file = tmp_path / "gpu.json"
    on({"name": "NVIDIA H100 80GB HBM3", "platform": "gpu"}, "--json", file, "--only", "gen", "--only", "score")
    monkeypatch.setattr(gpu, "check", lambda **_: ["All is right."])
    monkeypatch.setitem(gpu.RUN, "gen", lambda _: json.loads(gpu.run(sys.executable, "-c", "raise SystemExit('no memory')")))
    case = {"algorithm": "serial", "cached": False, "items_per_s": 12.0, "peak_share": 0.5}
    monkeypatch.setitem(gpu.RUN, "score", lambda _: {"cases": [case]})
    with pytest.raises(SystemExit, match="failed: gen"):
        gpu.main()
    report = json.loads(file.read_text())
    assert report["card"]["name"] == "NVIDIA H100 80GB HBM3"
    assert report["gen"] == {"error": "no memory"}
    assert "score: serial: 12 items/s, 50% of the peak" in capsys.readouterr().out


@pytest.mark.parametrize("call", [*calls(small=True), Call("items", 2, 100, 60, 40, 20, heads=2, kv_heads=1, head_dim=64)])
def test_operations_are_those_of_the_visible_pairs(call):
    slot, start = np.arange(call.slots), call.row_start()[:, None]
    seen = (slot <= call.row_slot()[:, None]) & ((slot < call.prefix) | (slot >= start))
    assert call.flops == 4 * call.sequences * seen.sum() * call.heads * call.head_dim


def test_a_question_sees_everything_and_a_document_its_own():
    call = Call("documents", 1, 128, 128, 32, 32, 32)
    assert call.row_start().tolist() == [0] * 32 + [32] * 32 + [64] * 32 + [0] * 32


def test_shares_of_a_peer_count_against_our_rates():
    causal, _, decode = calls(small=True)
    found = {"version": "2.13", "calls": [{"call": causal.name, "seconds": [1.0]}, {"call": decode.name, "error": "no"}]}
    shares = gpu.with_shares(found, {"matmul_flops": 2 * causal.flops, "read_bytes_per_s": 1.0}, small=True)
    assert [row.get("peak_share") for row in shares["calls"]] == [0.5, None]


@pytest.mark.telling
def test_every_part_runs_small(on, tmp_path, capsys):
    file = tmp_path / "gpu.json"
    on(CPU, "--small", "--json", file)
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 0, capsys.readouterr().out
    report = json.loads(file.read_text())
    assert {row["backend"] for row in report["kernels"]["calls"] if "median_s" in row} >= {"xla"}
    assert all("peak_share" in row for row in report["flex"]["calls"])
    assert {case["unit"] for case in report["gen"]["cases"]} == {"s", "tok/s", "items/s"}
    assert {"serial", "prefill_extend"} <= {case["algorithm"] for case in report["score"]["cases"]}
