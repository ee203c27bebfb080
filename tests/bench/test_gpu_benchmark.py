"""`python -m benchmarks.gpu`: it refuses machines without a GPU, counts what calls need, and runs small on a CPU."""

import json
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gpu
from benchmarks.nvidia import kernel_times
from benchmarks.nvidia.workloads import Call, Setting, calls, settings
from chunkattn.backends import AttentionSpec
from chunkattn.backends.pallas_gpu.backend import PallasGpuBackend
from chunkattn.tools.bench.geometry import default_block_size
from chunkattn.tools.bench.score import ScoreBench

ROOT = Path(__file__).parents[2]
CPU = {"name": "cpu", "platform": "cpu"}
H100 = {"name": "NVIDIA H100 80GB HBM3", "platform": "gpu"}
SPEC = AttentionSpec(32, 8, 128, jnp.dtype("bfloat16"), 64)


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


@pytest.fixture
def scripted(monkeypatch):
    """Replace every command by the source that `source(command)` returns, and shorten the time limits of all parts."""

    def replace(source, timeout_s=60):
        real = gpu.run
        monkeypatch.setattr(gpu, "run", lambda *command, **options: real(sys.executable, "-c", source(command), **options))
        monkeypatch.setattr(gpu, "TIMEOUT_S", dict.fromkeys(gpu.TIMEOUT_S, timeout_s))

    return replace


def test_a_command_that_hangs_ends_with_its_children_and_keeps_its_output():
    with pytest.raises(gpu.PartError, match=r"^did not end within 3 seconds; a kernel may hang$") as found:
        gpu.run("sh", "-c", "sleep 600 & echo $!; echo timing x >&2; wait", timeout_s=3)
    assert found.value.stderr == "timing x\n"
    status = Path(f"/proc/{int(found.value.output)}/stat")
    for _ in range(100):  # the kernel takes a moment
        if not status.exists() or status.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the child still runs")


def test_a_command_reads_what_is_given():
    assert gpu.run(sys.executable, "-c", "print(input())", given="a job", timeout_s=60) == "a job\n"


def test_a_folder_that_does_not_exist_is_refused_first(on, monkeypatch, tmp_path, capsys):
    on(CPU, "--small", "--json", tmp_path / "none" / "gpu.json")
    monkeypatch.setattr(gpu, "card", lambda: pytest.fail("something ran"))
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2
    assert "none/gpu.json does not exist" in capsys.readouterr().err


@pytest.mark.ci
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import sys; print('wrong: num_heads 4'); sys.exit(1)", "wrong: num_heads 4"),
        ("import time; print('right: num_heads 2', flush=True); time.sleep(600)", "did not end within 5 seconds"),
    ],
    ids=["wrong", "hangs"],
)
def test_attention_that_fails_the_check_is_not_measured(on, scripted, tmp_path, capsys, source, message):
    file = tmp_path / "gpu.json"
    on(H100, "--json", file)
    scripted(lambda _: source, timeout_s=5)
    with pytest.raises(SystemExit, match=f"nothing is measured: {message}"):
        gpu.main()
    assert "num_heads" in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert "num_heads" in report["check"]["lines"][0]
    assert message in report["check"]["error"]


def test_a_part_that_fails_is_reported_and_the_others_run(on, monkeypatch, tmp_path, capsys):
    file = tmp_path / "gpu.json"
    on(H100, "--json", file)
    monkeypatch.setattr(gpu, "check", lambda **_: {"lines": ["All is right."]})
    crash = "import sys; print(*range(100), sep='\\n', file=sys.stderr); raise SystemExit('no memory')"
    failed = {
        "programs": [{"setting": "fast", "error": "no such flag"}],
        "engine": [],
        "settings_to_set": [],
        "failed": ["fast"],
    }
    monkeypatch.setitem(gpu.RUN, "first", lambda _: failed)
    monkeypatch.setitem(gpu.RUN, "kernels", lambda _: json.loads(gpu.run(sys.executable, "-c", crash, timeout_s=60)))
    monkeypatch.setitem(gpu.RUN, "flex", lambda _: {"note": "a note", "calls": [{"call": "causal", "median_s": 0.002}]})
    monkeypatch.setitem(gpu.RUN, "gen", lambda _: json.loads("no JSON"))
    written = []
    case = {"algorithm": "serial", "cached": False, "items_per_s": 12.0, "peak_share": 0.5}
    monkeypatch.setitem(gpu.RUN, "score", lambda _: written.append(json.loads(file.read_text())) or {"cases": [case]})
    with pytest.raises(SystemExit, match="failed: first, kernels, gen"):
        gpu.main()
    report = json.loads(file.read_text())
    assert report["card"]["name"] == H100["name"]
    assert report["kernels"] == {"error": "no memory", "stderr": [*map(str, range(61, 100)), "no memory"]}
    assert report["gen"]["error"].startswith("JSONDecodeError: ")
    assert list(written[0]) == ["card", "small", "check", "first", "kernels", "flex", "gen"]
    printed = capsys.readouterr().out
    assert "first: fast: no such flag\nfirst: set no flags" in printed
    assert "flex: causal: 2 ms\nflex: a note\n" in printed
    assert "score: serial: 12 items/s, 50% of the peak" in printed


@pytest.mark.ci
def test_a_setting_that_hangs_keeps_its_first_calls_and_the_other_settings(scripted):
    causal, documents, _ = calls(small=True)
    rates = {"matmul_flops": 2 * causal.flops, "read_bytes_per_s": 1.0}
    row = {"backend": "xla", "block_size": 64, "call": causal.name, "median_s": 1.0}

    def source(command):
        if "--rates" in command:
            return f"print({json.dumps(rates)!r})"
        hang = f"import sys, time; print('timing {documents.name}', file=sys.stderr, flush=True); time.sleep(600)"
        number = int(command[command.index("--setting") + 1])
        return f"print({json.dumps(row)!r}, flush=True)\n{hang if number == 0 else ''}"

    scripted(source, timeout_s=5)
    found = gpu.kernels(gpu.Options([], None, small=True))
    first, hung, last = found["calls"]
    assert first == last == row | {"peak_share": 0.5}
    assert (hung["backend"], hung["call"]) == ("pallas_gpu", documents.name)
    assert hung["stderr"] == [f"timing {documents.name}"]
    (line,) = [line for line in gpu.lines("kernels", found) if "hang" in line]
    assert line == "kernels: pallas_gpu, pages of 16, documents: did not end within 5 seconds; a kernel may hang"


def test_a_peer_that_fails_is_printed():
    case = {"name": "decode 1", "median": 10.0, "unit": "tok/s", "peak_share": 0.5, "peers": {"vllm": {"ratio": None}}}
    found = {"peers": [{"name": "vllm", "notes": ["decode 1: failed: out of memory"]}], "cases": [case]}
    note, line = gpu.lines("gen", found)
    assert note == "gen: vllm: decode 1: failed: out of memory"
    assert line == "gen: decode 1: 10 tok/s, 50% of the peak"
    case["peers"]["vllm"]["ratio"] = 1.5
    assert gpu.lines("gen", found)[1] == f"{line}, 1.50 times vllm's speed"


@pytest.mark.ci
def test_the_command_leaves_the_gpu_to_its_parts():
    source = "import benchmarks.gpu, sys; b = sys.modules.get('jax._src.xla_bridge'); sys.exit(bool(b and b._backends))"
    assert subprocess.run([sys.executable, "-c", source], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("call", [*calls(small=True), Call("items", 2, 100, 60, 40, 20, heads=2, kv_heads=1, head_dim=64)])
def test_operations_are_those_of_the_visible_pairs(call):
    slot, start = np.arange(call.slots), call.row_start()[:, None]
    seen = (slot <= call.row_slot()[:, None]) & ((slot < call.prefix) | (slot >= start))
    assert call.flops == 4 * call.sequences * seen.sum() * call.heads * call.head_dim


def test_a_question_sees_everything_and_a_document_its_own():
    call = Call("documents", 1, 128, 128, 32, 32, 32)
    assert call.row_start().tolist() == [0] * 32 + [32] * 32 + [64] * 32 + [0] * 32


def test_shares_of_calls_count_against_measured_rates():
    causal, _, decode = calls(small=True)
    rows = [
        {"call": causal.name, "median_s": 1.0},
        {"call": decode.name, "error": "no"},
        {"call": decode.name, "median_s": 2.0},
    ]
    rates = {"matmul_flops": 2 * causal.flops, "read_bytes_per_s": decode.bytes}
    assert [row.get("peak_share") for row in gpu.with_shares(rows, rates, small=True)] == [0.5, None, 0.5]


def test_calls_read_more_than_the_l2_cache_holds():
    found = {call.name: call for call in calls()}
    assert found["decode 1 of 4,096"].copies == 12
    assert found["decode 64 of 4,096"].copies == 1
    assert all(call.copies * call.bytes >= 4 * 50e6 for call in found.values())


def test_copies_of_a_call_have_pages_of_their_own():
    call = Call("decode", 3, 100, 1)
    batches = [kernel_times.batch_of(call, 64, copy) for copy in range(2)]
    pages = [batch.block_tables[:3, :2].ravel().tolist() for batch in batches]
    assert pages == [list(range(6)), list(range(6, 12))]
    assert batches[1].page_len[:3, :2].tolist() == [[64, 36]] * 3


@pytest.mark.ci
def test_steps_are_as_large_as_the_engines():
    sizes = {call.name: kernel_times.batch_of(call, 64) for call in calls()}
    rows = [len(batch.row_seq) for batch in sizes.values()]
    assert rows == [8192, 8192, 128, 8192, 8, 16, 64]
    bench = ScoreBench("small", 256, dtype="float32", max_num_batched_tokens=8192)
    assert {len(batch.prefix_end) for batch in sizes.values()} == {bench.core.scheduler.max_spans}
    assert set(rows) <= set(bench.core.scheduler.sizes.buckets)


def test_xla_is_timed_with_the_engines_pages(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    pages = default_block_size("qwen3-0.6b")
    assert [s.block_size for small in (True, False) for s in settings(small=small) if s.backend == "xla"] == [pages, pages]


def test_a_tile_is_timed_on_the_calls_that_use_it():
    by_states = {states: Setting("pallas_gpu", 64, 64, 3, states) for states in (False, True)}
    used = {s: [call.name for call in calls() if kernel_times.uses_tile(call, setting)] for s, setting in by_states.items()}
    names = [call.name for call in calls()]
    assert used == {False: [names[0], names[1], names[3]], True: [names[2], *names[4:]]}
    backend = kernel_times.tiled(by_states[True])(SPEC)
    assert [(s.slots, s.stages) for s in (backend.block_shape, backend.decode_shape)] == [(64, 3)] * 2
    assert backend.tile_shape == PallasGpuBackend(SPEC).tile_shape


def test_a_tile_is_refused_where_the_kernel_cannot_run(monkeypatch):
    monkeypatch.setattr(PallasGpuBackend, "supports", classmethod(lambda *_: "the card is too old"))
    call = next(calls(small=True))
    row = kernel_times.row_of(call, Setting("pallas_gpu", 64, 64, 3), 1)
    assert row["error"] == "BackendError: the card is too old"
    assert row["traceback"][-1].endswith(row["error"])


@pytest.mark.parametrize("error", [RuntimeError(), NotImplementedError("no\nsuch thing")], ids=["empty", "lines"])
def test_any_error_of_a_call_is_its_result(monkeypatch, error):
    monkeypatch.setattr(kernel_times, "measure", lambda *_: (_ for _ in ()).throw(error))
    row = kernel_times.row_of(next(calls(small=True)), Setting("xla", 64), 1)
    assert row["error"] == f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


@pytest.mark.slow
def test_every_part_runs_small(on, tmp_path, capsys):
    file = tmp_path / "gpu.json"
    on(CPU, "--small", "--json", file)
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 0, capsys.readouterr().out
    report = json.loads(file.read_text())
    assert {row["program"] for row in report["first"]["programs"]} == {"step", "run"}
    assert [case["steps"] for part in report["first"]["engine"] for case in part["cases"]] == [1, 16, 16, 16, 16]
    assert {row["backend"] for row in report["kernels"]["calls"] if "median_s" in row} >= {"xla"}
    assert all("error" in row or "peak_share" in row for row in report["kernels"]["calls"])
    assert all("peak_share" in row for row in report["flex"]["calls"])
    assert "writing the new rows" in report["flex"]["note"]
    assert {case["unit"] for case in report["gen"]["cases"]} == {"s", "tok/s", "items/s"}
    assert {"serial", "prefill_extend"} <= {case["algorithm"] for case in report["score"]["cases"]}
