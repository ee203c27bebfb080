"""Joined weights over several devices, which each have their own rows of every part: the platform is feigned."""

import jax
import numpy as np
import pytest

from chunkattn.config import EngineConfig
from chunkattn.engine.plan import Chip, plan
from chunkattn.models.joined import joined_weights, joins
from chunkattn.models.loader import open_files
from chunkattn.models.shards import Shards
from tests.checkpoints import VOCAB
from tests.parallel.answers import Answers
from tests.parallel.programs import bytes_by_device


@pytest.fixture
def joining(monkeypatch):
    """Sets whether weights are loaded as an accelerator loads them."""
    return lambda way: monkeypatch.setattr("chunkattn.models.weights.joins", (lambda platform: True) if way else joins)


@pytest.mark.ci
@pytest.mark.parametrize(("name", "size"), [("llama-bias", 2), ("llama-bias", 8), ("qwen3", 2), ("phi3", 4), ("qwen2-moe", 2)])
def test_answers_are_those_of_the_parts_on_one_device(name, size, wide, start, joining):
    one = Answers(start(wide(name)))
    joining(True)
    llm = start(wide(name), size)
    assert joined_weights(llm.core.runner.spec).keys() <= set(llm.core.runner._names)
    Answers(llm).check(one)


@pytest.mark.ci
def test_hybrids(checkpoint, start, joining):
    rng = np.random.default_rng(3)
    query, *items = (rng.integers(0, VOCAB, count).tolist() for count in (70, 3, 70, 20))

    def scores(llm):
        return llm.score(query, items, label_token_ids=[1, 2, 3], use_tqdm=False).scores

    one = scores(start(checkpoint("qwen3_5")))
    joining(True)
    llm = start(checkpoint("qwen3_5"), 2)
    assert sum("in_proj_qkvzba" in name for name in llm.core.runner._names) == 2
    np.testing.assert_allclose(scores(llm), one, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_parts_come_back(size, wide, joining):
    """Four devices share a KV head in pairs: the joined weight has its rows twice, and a part once."""
    files = open_files(EngineConfig(model=str(wide("qwen3")), dtype="float32", skip_tokenizer_init=True))
    plain = files.load().weights
    joining(True)
    decoder = files.load(Shards.over(jax.devices()[:size], files.spec))
    for name, joined in joined_weights(decoder.spec).items():
        assert decoder.weights[name].shape == joined.shape(decoder.shards)
        for part, values in joined.separate(decoder.weights[name], decoder.shards).items():
            np.testing.assert_array_equal(values, plain[part], err_msg=part)


def test_a_device_holds_what_is_planned(wide, start, joining):
    joining(True)
    llm = start(wide("qwen3"), 4)
    runner = llm.core.runner
    planned = plan(llm.config, runner.spec, runner.dtype, Chip("a chip", 1 << 30), 4)
    assert bytes_by_device(runner._params) == [planned.weight_bytes] * 4
