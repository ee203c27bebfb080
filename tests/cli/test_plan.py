"""`chunkattn plan`: the memory of a model on devices that are not there."""

import re

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from chunkattn.cli import app

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
    """Return the cells of each row by device and number of devices."""
    found = [re.split(r"  +", line.strip()) for line in output.splitlines() if re.match(r" *(v5e|v5p|v6e|h100),", line)]
    return {(cells[0].split(",")[0], int(cells[1])): cells[2:] for cells in found}


def test_weights_and_tokens_are_those_counted_by_hand(folder):
    code, output = run(folder)
    assert code == 0, output
    found = rows(output)
    assert found["v5e", 1][2:] == ["too large"]
    for device, size, memory, page in [("v6e", 1, 32 * GIB, 16), ("v6e", 4, 32 * GIB, 16), ("v5p", 8, 95 * GIB, 16)]:
        weights, _, pool, pages, tokens, _ = found[device, size]
        # The norms, 65 of 4,096, are on every device.
        held = 2 * ((PARAMETERS - 65 * 4096) / size + 65 * 4096)
        fit = int((0.85 * memory - held) // (TOKEN * page / size))
        assert (weights, pages, tokens) == (f"{held / GIB:.2f}", f"{fit:,}", f"{fit * page:,}")
        assert pool == f"{fit * page * TOKEN / size / GIB:.2f}"
    assert float(found["v6e", 16][1]) == pytest.approx(1.034, abs=0.001)  # two devices share each KV head


def test_options_count(folder):
    plain, narrow = (rows(run(folder, "--device", "v6e", *more)[1]) for more in ([], ["--kv-cache-dtype", "fp8"]))
    assert narrow.keys() == plain.keys()
    pages = [int(found["v6e", 2][3].replace(",", "")) for found in (plain, narrow)]
    assert abs(pages[1] - 2 * pages[0]) <= 1
    assert list(rows(run(folder, "--device", "H100", "--tensor-parallel-size", "2")[1])) == [("h100", 2)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "v7"], "unknown device 'v7'; known are v5e, v5p, v6e, h100"),
        (["--tensor-parallel-size", "3"], "32 attention heads cannot be divided by tensor_parallel_size=3; use 1, 2, 4"),
    ],
)
def test_what_cannot_be_planned_is_refused(folder, arguments, message):
    code, output = run(folder, *arguments)
    assert code == 2
    assert message in output
