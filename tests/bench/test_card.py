"""`benchmarks.card`: times of programs and of an engine on any device, updates of graphs, floors, predictions and advice."""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import Qwen3Config

from benchmarks import card
from benchmarks.nvidia import floors, programs
from benchmarks.processes import PartError, complete
from chunkattn.engine.runner import Runner
from chunkattn.models.decoder import random_decoder
from chunkattn.tools.bench import generate
from chunkattn.tools.bench.geometry import GEOMETRIES, sizes, spec_of

H100 = floors.Rates(2.74e12, 673e12)
SMALL = replace(floors.SIZES, prefix_tokens=3, documents=3, document_tokens=5, question_tokens=4, query=7, items=3, item_len=2)


@pytest.fixture
def tiny(monkeypatch):
    """Return the name of a model shape that compiles soon."""
    config = Qwen3Config(**sizes(64, 32, 64, 1, 2, 1, 16, 4096), architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True)
    monkeypatch.setitem(GEOMETRIES, "tiny", config)
    return "tiny"


@pytest.mark.ci
def test_programs_are_timed(tiny, monkeypatch, capsys):
    monkeypatch.setattr(Runner, "_packs", lambda *_: True)  # as on a card
    rows = list(programs.measure(tiny, 8, 4, traces=True))
    assert [(row["program"], row["rows"], row["kernels_us"]) for row in rows] == [("step", 8, None), ("run", 8, None)]
    for row in rows:
        for way in ("new arrays", "arrays on the device"):
            assert row[way].keys() == {"call_us", "each_us", "row_us"}
            assert min(row[way].values()) > 0
    marks = [line for line in capsys.readouterr().err.splitlines() if line.startswith("MARK ")]
    assert marks[:3] == ["MARK 4 new arrays, step of 8", "MARK 4 arrays on the device, step of 8", "MARK 0 end"]
    assert marks[3] == "MARK 2 new arrays, run of 8"


@pytest.mark.ci
@pytest.mark.parametrize(("steps", "names"), [(1, 1), (16, 4)])
def test_an_engine_is_measured_beside_floors(tiny, monkeypatch, steps, names):
    monkeypatch.setattr(generate, "matmul_rate", lambda _: 1e12)
    monkeypatch.setattr(generate, "read_rate", lambda: 1e11)
    found = card.engine(card.Options(tiny, small=True), steps)
    assert len(found["cases"]) == names
    for case in found["cases"]:
        assert case["median"] > 0
        slower = case["floor"] < case["predicted"] if case["unit"] == "s" else case["floor"] > case["predicted"] > 0
        assert slower, case


def test_updates_of_graphs_are_counted_by_part():
    update = "I0000 command_buffer_thunk.cc:289] Updated command buffer in {} μs; num_commands=9\n"
    log = (
        f"{update.format(7)}MARK 2 new arrays, step of 8\n{update.format(10)}other\n{update.format(30)}"
        f"MARK 1 arrays on the device, step of 8\n{update.format(5)}MARK 0 end\n{update.format(9)}"
    )
    assert card.graph_updates(log) == {
        "new arrays, step of 8": {"updates_a_call": 0.5, "update_us_a_call": 10.0},
        "arrays on the device, step of 8": {"updates_a_call": 0.5, "update_us_a_call": 2.5},
    }


def test_the_busy_time_of_the_first_device_is_that_of_all_its_streams():
    def line(name, *spans):
        return SimpleNamespace(name=name, events=[SimpleNamespace(start_ns=a, duration_ns=b - a) for a, b in spans])

    planes = [
        SimpleNamespace(name="/host:CPU", lines=[line("Stream of words", (0, 99))]),
        SimpleNamespace(name="/device:GPU:1", lines=[line("Stream #1", (0, 50))]),
        SimpleNamespace(
            name="/device:GPU:0", lines=[line("Stream #1", (0, 4), (10, 12)), line("Stream #2", (3, 6)), line("Steps", (0, 90))]
        ),
    ]
    assert programs.union(programs.device_spans(planes)) == 8
    assert programs.device_spans(planes[:1]) == []


def _row(setting, us, program="run", rows=8):
    times = {"call_us": 1.0, "each_us": us, "row_us": us}
    return {
        "setting": setting,
        "program": program,
        "rows": rows,
        "new arrays": times,
        "arrays on the device": times,
        "graphs": {},
    }


def test_flags_are_named_where_decodes_are_faster():
    rows = [_row("as it is", 100), _row("as it is", 50, "step"), _row("as it is", 300, rows=64)]
    rows += [_row("no graphs", 98), _row("no graphs", 50, "step")]  # too little
    rows += [_row("graph keeps temporaries", 60), _row("graph keeps temporaries", 60, "step")]
    rows += [_row("graph keeps what stays", 40), _row("graph keeps what stays", 50, "step")]
    rows += [_row("no weights concatenated", 10), {"setting": "no weights concatenated", "error": "it hangs"}]
    best = card.recommended(rows)
    assert best == ["graph keeps what stays", "graph keeps temporaries"]
    report = {"programs": rows, "engine": [{"steps": 1, "error": "no memory"}], "settings_to_set": best}
    *others, advice = card.lines(report)
    assert advice.startswith(f'set XLA_FLAGS="{card.SETTINGS[best[0]]}" (graph keeps what stays); also faster')
    assert "engine, single steps: no memory" in others
    assert "no weights concatenated: it hangs" in others
    assert card.lines(report | {"settings_to_set": card.recommended(rows[:5])})[-1].startswith("set no flags")


def test_an_unknown_flag_is_named():
    text = "Check failed: Flag parsing failed.\\nusage: x\\nFlags:\\n  many"
    with pytest.raises(PartError, match=r"^Check failed: Flag parsing failed\.$"):
        complete(sys.executable, "-c", f"import sys; sys.exit('{text}')", timeout_s=60)


def test_an_h100s_decodes_are_predicted():
    found = {figure.name: figure for figure in floors.Floors(spec_of("qwen3-0.6b"), H100).figures(floors.SIZES)}
    for sequences in (1, 16, 64):
        kept = 596_049_920 * 2 + sequences * 149 * 28 * 2 * 8 * 128 * 2
        figure = found[f"decode {sequences}"]
        assert figure.floor == pytest.approx(sequences * 2.74e12 / kept, rel=1e-6)
        assert figure.predicted == pytest.approx(sequences / (kept / 0.85 / 2.74e12 + 310 * 1.3e-6), rel=1e-6)


def test_bytes_of_weights_are_those_of_the_model():
    model = random_decoder(spec_of("small"), np.dtype("float32"))
    counted = sum(weight.size for weight in model.weights.values())
    assert floors.Floors(model.spec, H100).weight_bytes == 2 * counted


def test_pairs_are_those_of_masks():
    causal = np.tri
    documents = np.zeros((22, 22), bool)
    documents[:3, :3] = causal(3)
    for first in (3, 8, 13):
        documents[first : first + 5, :3] = True
        documents[first : first + 5, first : first + 5] = causal(5)
    documents[18:] = causal(22)[18:]
    assert (floors.cold(SMALL).rows, floors.cold(SMALL).pairs) == (22, documents.sum())
    assert (floors.warm(SMALL).rows, floors.warm(SMALL).pairs) == (4, documents[18:].sum())
    assert floors.warm(SMALL).kv_tokens == 18
    items = sum(7 + row for _ in range(3) for row in (1, 2))
    assert (floors.scores(SMALL).rows, floors.scores(SMALL).pairs) == (13, causal(7).sum() + items)


def test_the_floor_of_other_work_is_the_longer_of_reads_and_products():
    of = floors.Floors(spec_of("qwen3-0.6b"), H100)
    question, prompt = floors.Work(8, 0, 1, 0), floors.Work(20_000, 0, 1, 0)
    assert of.seconds(question)[0] == of.weight_bytes / 2.74e12
    layers = 28 * (1024 * (2 * 2048 + 2 * 1024) + 3 * 1024 * 3072)
    assert of.seconds(prompt)[0] == pytest.approx((2 * 20_000 * layers + 2 * 1024 * 151936) / 673e12)
    moved = 10 * of.weight_bytes + 112 * 1024 * 28 * 20_000
    assert of.seconds(prompt)[1] == pytest.approx(of.seconds(prompt)[0] + moved / 0.85 / 2.74e12 + 10 * 310 * 1.3e-6)


@pytest.mark.parametrize("options", [["--rows", "0"], ["--rows", "65"], ["--calls", "0"], ["--settings", "fast"]])
def test_bad_options(options, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["card", *options])
    with pytest.raises(SystemExit) as ended:
        card.main()
    assert ended.value.code == 2, capsys.readouterr()


@pytest.mark.slow
def test_the_command_runs_its_processes():
    options = ["--geometry", "small", "--small", "--rows", "8", "--calls", "2", "--settings", "as it is", "--json", "-"]
    done = subprocess.run([sys.executable, "-m", "benchmarks.card", *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    assert [(row["setting"], row["program"]) for row in report["programs"]] == [("as it is", "step"), ("as it is", "run")]
    assert {way for row in report["programs"] for way in row["graphs"]} == {"new arrays", "arrays on the device"}
    assert [case["steps"] for part in report["engine"] for case in part["cases"]] == [1, 16, 16, 16, 16]
