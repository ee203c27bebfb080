"""Classifiers, the engine's own process and the command line over several devices."""

import asyncio
import copy

import numpy as np
import pytest
from transformers import AutoModelForSequenceClassification
from typer.testing import CliRunner

from chunkattn import AsyncLLM
from chunkattn.cli import app
from chunkattn.errors import ConfigError
from tests.async_helpers import last
from tests.checkpoints import CHECKPOINTS, make_checkpoint
from tests.parallel.answers import GREEDY, OPTIONS, prompts


@pytest.mark.ci
@pytest.mark.parametrize("name", ["llama", pytest.param("mistral-window", marks=pytest.mark.slow)])
def test_a_classifier(start, tmp_path, name):
    config = copy.deepcopy(CHECKPOINTS[name])
    config.num_labels = 3  # fewer than the devices
    folder = make_checkpoint(config, tmp_path, auto=AutoModelForSequenceClassification)
    query, items = [3, 4, 5, 6], [[7, 8], [9], [10, 11, 12]]
    found = [start(folder, size, attention_backend="xla").score(query, items, use_tqdm=False).logits for size in (1, 4)]
    np.testing.assert_allclose(*found, atol=1e-4)


@pytest.mark.ci
def test_an_engine_in_a_process_of_its_own(wide, start):
    folder, prompt = str(wide("qwen3")), prompts()[1]
    expected = start(folder, 2).generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0]

    async def ask():
        async with AsyncLLM(folder, tensor_parallel_size=2, warmup=False, **OPTIONS) as llm:
            return (await last(llm.generate(prompt, GREEDY))).outputs[0]

    found = asyncio.run(ask())
    assert found.token_ids == expected.token_ids
    assert found.logprobs == expected.logprobs
    with pytest.raises(ConfigError, match="8 attention heads cannot be divided by tensor_parallel_size=3; use 1, 2, 4 or 8"):
        asyncio.run(refused(folder))


async def refused(folder):
    async with AsyncLLM(folder, tensor_parallel_size=3, **OPTIONS):
        pass


@pytest.mark.ci
def test_the_command_line():
    command = ["generate", "Ana lives in Oslo. # # Where does Ana live?", "--max-tokens", "2"]
    found = [CliRunner().invoke(app, [*command, "--tensor-parallel-size", size]) for size in ("1", "2", "16")]
    assert [done.exit_code for done in found] == [0, 0, 2]
    assert found[0].stdout == found[1].stdout
    assert "tensor_parallel_size=16 needs as many devices" in found[2].output
