"""`chunkattn plan`: the memory of a model on devices that are not there."""

import os
import re

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig, Qwen3_5TextConfig
from typer.testing import CliRunner

from chunkattn.backends.cpu import library
from chunkattn.cli import app
from chunkattn.config import EngineConfig
from chunkattn.engine.build import take_gpu_memory
from chunkattn.engine.plan import CHIPS, chip_of, packed_bytes
from chunkattn.errors import ConfigError
from chunkattn.models.loader import open_shape
from tests.adapter_files import make_adapter, save_adapter
from tests.gguf_files import CONFIGS, Written

VARIABLE, DEPRECATED = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
GIB = 1 << 30
PARAMETERS = 8_030_261_248
"""Number of parameters of Llama-3-8B, in the index of its checkpoint."""
TOKEN = 2 * 32 * 8 * 128 * 2
"""Bytes of a token's K/V in bfloat16: 32 layers, 8 KV heads of 128."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The configuration of Llama-3-8B, without weights and tokenizer."""
    made = tmp_path_factory.mktemp("llama-3-8b")
    sizes = {"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192}
    LlamaConfig(**sizes, **heads, architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained(made)
    return str(made)


def run(*arguments):
    result = CliRunner().invoke(app, ["plan", *arguments], terminal_width=120)
    return result.exit_code, result.output


def rows(output):
    """Return the cells of each row, of all tables, by device and number of devices."""
    found: dict[tuple[str, int], list[str]] = {}
    for line in output.splitlines():
        if re.match(r" *[a-z0-9-]+, \d+ ", line):
            device, size, *cells = re.split(r"  +", line.strip())
            found.setdefault((device.split(",")[0], int(size)), []).extend(cells)
    return found


def test_weights_and_tokens_are_those_counted_by_hand(folder):
    code, output = run(folder)
    assert code == 0, output
    found = rows(output)
    assert found["v5e", 1][2:] == ["too large"]
    assert {device for device, _ in found} == {"v5e", "v5p", "v6e", "l4", "a100", "h100", "h200"}
    # Steps have 15% of the memory, at most 6 GiB; JAX takes 92% of a GPU.
    for device, size, memory, page in [
        ("v6e", 1, 0.85 * 32 * GIB, 16),
        ("v6e", 4, 0.85 * 32 * GIB, 16),
        ("v5p", 8, 89 * GIB, 16),
        ("l4", 2, 0.85 * 0.92 * 21.9 * GIB, 64),
        ("h100", 1, (0.92 * 79.1 - 6) * GIB, 64),
        ("h200", 2, (0.92 * 139.7 - 6) * GIB, 64),
    ]:
        weights, _, pool, pages, tokens, _ = found[device, size]
        # The norms, 65 of 4,096, are on every device.
        held = 2 * ((PARAMETERS - 65 * 4096) / size + 65 * 4096)
        fit = int((memory - held) // (TOKEN * page / size))
        assert (weights, pages, tokens) == (f"{held / GIB:.2f}", f"{fit:,}", f"{fit * page:,}")
        assert pool == f"{fit * page * TOKEN / size / GIB:.2f}"
    assert float(found["v6e", 16][1]) == pytest.approx(1.034, abs=0.001)  # two devices share each KV head


@pytest.mark.skipif(library.refusal() is not None, reason="no native library")
def test_the_packed_weights_of_a_gguf_file(tmp_path, folder):
    path = str(Written(tmp_path / "model.gguf", CONFIGS["llama-tied"], Kind.Q4_K).path)
    # Q4_K has 4.625 bits a weight here, and norms have 16: 5 of 256.
    packed = (128 * 256 + 2 * (4 * 256 + 2 * 128 + 2 * 256) * 256) * 4.625 / 8 + 5 * 256 * 2
    assert f"A CPU packs the weights in {packed / GIB:.2f} GiB" in run(path)[1]
    assert "A CPU packs" not in run(path, "--weights", "dequantized")[1] + run(path, "--dtype", "float32")[1] + run(folder)[1]
    matrices = PARAMETERS - 65 * 4096
    assert (
        f"A CPU packs the weights in {(matrices * 8.5 / 8 + 65 * 4096 * 2) / GIB:.2f} GiB"
        in run(folder, "--quantization", "int8")[1]
    )


@pytest.mark.skipif(library.refusal() is not None, reason="no native library")
def test_matrices_with_a_merged_adapter_are_not_packed(tmp_path):
    written = Written(tmp_path / "model.gguf", CONFIGS["llama-tied"], Kind.Q4_K)
    ends = ["q_proj", "lm_head"]
    make_adapter(tmp_path / "a", written.model, ends, target_modules=ends)
    plain, merged = (EngineConfig(model=str(written.path), adapter=adapter) for adapter in (None, str(tmp_path / "a")))
    before, after = (packed_bytes(config, *open_shape(config)) for config in (plain, merged))
    # Both layers' q_proj, and a head of its own beside the tied embedding.
    assert after - before == 2 * 256 * 256 * (2 - 4.625 / 8) + 128 * 256 * 2


def test_slots_of_adapters_count(folder, tmp_path):
    """Llama-3-8B with slots for all matrices, and for those of one adapter: factors of inputs and of outputs on each device."""
    tensors = {
        f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_{factor}.weight": torch.ones(shape)
        for n in range(32)
        for factor, shape in (("A", (1, 4096)), ("B", (4096, 1)))
    }
    fields = {"peft_type": "LORA", "r": 1, "target_modules": ["q_proj"]}
    save_adapter(tmp_path / "a", fields, tensors)
    few = [f"--lora-modules={name}={tmp_path / 'a'}" for name in "xyz"]
    plain = rows(run(folder, "--device=v6e")[1])
    for options, rank, sums in (
        # q, k and v, o, gate and up, down: inputs and outputs that a device holds
        (
            ["--enable-lora", "--max-loras=3", *few[:1]],
            128,
            {1: 8192 + 2 * 5120 + 8192 + 3 * 18432, 2: 6144 + 2 * 4608 + 6144 + 3 * 11264},
        ),
        (few, 1024, {1: 4096 + 4096, 2: 4096 + 2048}),
    ):
        found = rows(run(folder, "--device=v6e", *options, f"--max-lora-rank={rank}")[1])
        for size, values in sums.items():
            added = 32 * 3 * rank * values * 2
            held = 2 * ((PARAMETERS - 65 * 4096) / size + 65 * 4096) + added
            assert found["v6e", size][0] == f"{held / GIB:.2f}"
            assert float(found["v6e", size][2]) == pytest.approx(float(plain["v6e", size][2]) - added / GIB, abs=0.02)
    save_adapter(tmp_path / "b", {**fields, "r": 2}, tensors)
    for options, message in (
        ([f"--adapter={tmp_path / 'b'}"], "adapter_config.json say [2, 4096]"),
        ([f"--lora-modules=b={tmp_path / 'b'}"], "adapter_config.json say [2, 4096]"),
        ([f"--lora-modules=a={tmp_path / 'a'}", "--max-lora-rank=0"], "max_lora_rank"),
    ):
        code, output = run(folder, *options)
        assert code == 2
        assert message in " ".join(output.split())


def test_options_count(folder):
    plain, narrow = (rows(run(folder, "--device", "v6e", *more)[1]) for more in ([], ["--kv-cache-dtype", "fp8"]))
    assert narrow.keys() == plain.keys()
    pages = [int(found["v6e", 2][3].replace(",", "")) for found in (plain, narrow)]
    assert abs(pages[1] - 2 * pages[0]) <= 1
    assert list(rows(run(folder, "--device", "H100", "--tensor-parallel-size", "2")[1])) == [("h100", 2)]
    tokens = [
        int(rows(run(folder, "--device", "h200", "--tensor-parallel-size", "1", *more)[1])["h200", 1][4].replace(",", ""))
        for more in ([], ["--gpu-memory-utilization", "0.75"])
    ]
    assert (tokens[0] - tokens[1]) * TOKEN == pytest.approx(0.17 * 139.7 * GIB, rel=1e-3)


@pytest.mark.parametrize("name", ["NVIDIA A100 80GB", "a100-80gb", "A100"])
def test_a_device_has_the_names_of_its_maker(name):
    assert chip_of(name) == ("a100", CHIPS["a100"])


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({}, {VARIABLE: "0.8"}),
        ({VARIABLE: "0.5"}, {VARIABLE: "0.5"}),
        ({DEPRECATED: "0.5"}, {DEPRECATED: "0.5"}),
        ({VARIABLE: ""}, {VARIABLE: "0.8"}),
    ],
    ids=str,
)
def test_jax_takes_the_share_that_is_asked_for(given, taken, monkeypatch):
    environment = dict(given)
    monkeypatch.setattr(os, "environ", environment)
    take_gpu_memory(EngineConfig(gpu_memory_utilization=0.8))
    assert {name: value for name, value in environment.items() if name in (VARIABLE, DEPRECATED)} == taken
    take_gpu_memory(EngineConfig(gpu_memory_utilization=0.45))  # as a child process does, which inherits the variables
    second = {name: value.replace("0.8", "0.45") for name, value in taken.items()}
    assert {name: value for name, value in environment.items() if name in (VARIABLE, DEPRECATED)} == second
    environment[DEPRECATED] = "0.3"
    take_gpu_memory(EngineConfig(gpu_memory_utilization=0.45))
    assert (VARIABLE in environment) == (VARIABLE in given and given[VARIABLE] != "")  # JAX refuses both of them
    for share in (0, 1.01, float("nan")):
        with pytest.raises(ConfigError, match="gpu_memory_utilization must be above 0"):
            EngineConfig(gpu_memory_utilization=share)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "v7"], "unknown device 'v7'; known are v5e, v5p, v6e, t4, a10g"),
        (["--tensor-parallel-size", "3"], "32 attention heads cannot be divided by tensor_parallel_size=3; use 1, 2, 4"),
    ],
)
def test_what_cannot_be_planned_is_refused(folder, arguments, message):
    code, output = run(folder, *arguments)
    assert code == 2
    assert message in output


def test_a_hybrid_has_states_beside_the_pool(tmp_path):
    """Qwen3.5-4B: 24 of 32 layers are recurrent, with 32 heads of 128 x 128 and the last 3 inputs of their convolutions."""
    heads = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    sizes = {"vocab_size": 248_320, "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32}
    attention = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256}
    names = {"architectures": ["Qwen3_5ForCausalLM"], "dtype": "bfloat16"}
    Qwen3_5TextConfig(**sizes, **heads, **attention, **names).save_pretrained(tmp_path)
    convolved = 2 * 16 * 128 + 32 * 128
    state = 24 * 4 * (32 * 128 * 128 + 3 * convolved)
    seat = 24 * 4 * (64 * (16 * 128 + 32 * 128 + 32) + 3 * convolved)  # the open block's keys, values and decays
    memory = 40 * state + 8 * seat
    options = ["--device", "h100", "--max-num-seqs", "8", "--state-cache-memory-bytes", str(memory)]
    code, output = run(str(tmp_path), "--tensor-parallel-size", "1", *options)
    assert code == 0, output
    assert rows(output)["h100", 1][-3:] == [f"{state / 2**20:.2f}", "32", "8"]
    assert "--state-cache-memory-bytes" in output
    pool = float(rows(output)["h100", 1][2])
    _, more = run(str(tmp_path), "--tensor-parallel-size", "1", *options[:-1], str(memory + 100 * state))
    assert rows(more)["h100", 1][-2:] == ["132", "8"]
    assert pool - float(rows(more)["h100", 1][2]) == pytest.approx(100 * state / GIB, abs=0.02)
    _, halves = run(str(tmp_path), "--tensor-parallel-size", "2", *options)
    assert rows(halves)["h100", 2][-3] == f"{state / 2 / 2**20:.2f}"
