"""`chunkattn bench gen` beside llama.cpp itself, on random files. No figure is asserted."""

from contextlib import nullcontext

import pytest
from transformers import Qwen3Config

from chunkattn.tools.bench import geometry
from chunkattn.tools.bench.cases import BenchJob
from chunkattn.tools.bench.gen_peers import make_llama
from chunkattn.tools.bench.generate import run
from chunkattn.tools.bench.random_gguf import QUANTS, write_random
from chunkattn.tools.bench.sizes import FileOptions, Setup, Sizes
from tests.gguf_files import HYBRIDS
from tests.llama_cpp import PYTHON

CONFIG = Qwen3Config(
    architectures=["Qwen3ForCausalLM"],
    vocab_size=300,
    hidden_size=256,
    intermediate_size=288,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=1000,
    tie_word_embeddings=True,
)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    if not PYTHON.exists():
        pytest.skip(f"no llama.cpp at {PYTHON}; `make test-llama` installs it")
    monkeypatch.setitem(geometry.GEOMETRIES, "quantized", CONFIG)


@pytest.mark.parametrize(
    ("config", "quant"),
    [*((CONFIG, quant) for quant in QUANTS), (HYBRIDS["qwen35"], "Q4_K_M"), (HYBRIDS["qwen35moe"], "Q4_K_M")],
    ids=lambda value: value if isinstance(value, str) else value.model_type,
)
def test_llama_cpp_runs_random_files(config, quant, tmp_path):
    path = tmp_path / "model.gguf"
    write_random(config, quant, path)
    job = BenchJob("decode 3", "tok/s", lambda: None, [[[5, 6, 7, 8]] * 3], 13)
    with make_llama([PYTHON], lambda: path, nullcontext) as peer:
        assert peer.measure(job, "") > 0
    assert peer.version
    assert not peer.notes


def test_every_case_has_a_figure_of_llama_cpp():
    sizes = Sizes((20,), 3, 20, 4, 5, (1, 3), 10, 4, 20, 6, 3)
    report = run(Setup("quantized", repeats=1), sizes, FileOptions(gguf="Q4_K_M"), pythons=[PYTHON])
    assert [(case.name.split()[0], len(case.peers["llama.cpp"].values)) for case in report.cases] == [
        *(("prefill", 1), ("rag", 1), ("rag", 1), ("decode", 1), ("decode", 1), ("score", 1))
    ]
    assert report.peers[1].notes == ()
    assert report.file.startswith("quantized-Q4_K_M.gguf, 1 MiB, matrices: ")


def test_a_case_that_llama_cpp_refuses_is_empty_and_the_next_one_runs(tmp_path):
    path = tmp_path / "model.gguf"
    write_random(CONFIG, "Q8_0", path)
    unknown = BenchJob("prefill 2", "s", lambda: None, [[[5, 300]]])  # no such token
    known = BenchJob("prefill 3", "s", lambda: None, [[[5, 6, 7]]])
    with make_llama([PYTHON], lambda: path, nullcontext) as peer:
        assert peer.measure(unknown, "") is None
        assert peer.measure(known, "") is None  # the same case
        peer.begin_case()
        assert peer.measure(known, "") > 0
    (note,) = peer.notes
    assert note.startswith("prefill 2: failed: ")
