"""A follower makes the calls that an engine tells: its pages and its programs become the engine's."""

import copy
from collections import Counter
from typing import get_args

import jax
import numpy as np
import pytest
from transformers import AutoModelForSequenceClassification

from chunkattn import LLM, Choice, ChunkedPrompt, SamplingParams
from chunkattn.engine.follower import Follower
from chunkattn.engine.host_calls import CopyStates, Forward, HostCall, ReadClasses, ReadHidden
from chunkattn.models.loader import open_files
from chunkattn.remote.hosts.group_messages import CALLS as FRAMES
from tests.checkpoints import CHECKPOINTS, make_checkpoint
from tests.decision_models import make_base, pointer_head, save_kev
from tests.parallel.answers import ALGORITHMS, DRAWN, GREEDY, OPTIONS, Answers

FORKED = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=4, logit_bias={5: 2.0}, min_tokens=2, logprobs=0)


class Told:
    """Calls that an engine tells, as they arrive on another host."""

    def __init__(self):
        self.calls, self.sizes = [], []

    def tell(self, call):
        frame = FRAMES.encode([call])
        self.calls += FRAMES.decode(frame)
        self.sizes.append(len(frame))


@pytest.fixture
def told():
    return Told()


def lead(llm, told):
    llm.core.runner.tell = llm.core.runner.pool._tell = told.tell


def pools(llm):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(llm.core.runner.pool.caches)]


@pytest.mark.parametrize("backend", ["cpu", pytest.param("xla", marks=pytest.mark.slow)])
def test_pages_and_programs_are_equal(checkpoint, told, backend):
    options = OPTIONS | {"attention_backend": backend, "batch_invariant": False}
    first, other = LLM(str(checkpoint("qwen3")), **options), LLM(str(checkpoint("qwen3")), **options)
    lead(first, told)
    first.warm_up(use_tqdm=False)
    answers = Answers(first, ALGORITHMS, (GREEDY, DRAWN, FORKED))
    first.core._recover([])
    answers.check(Answers(first, ALGORITHMS, (GREEDY, DRAWN, FORKED)), tolerance=0)
    follower = Follower(other.core)
    for call in told.calls:
        follower.run(call)
    for own, theirs in zip(pools(first), pools(other), strict=True):
        np.testing.assert_array_equal(own, theirs)
    assert pools(first)[0].any()
    assert first.core.runner.compiles == other.core.runner.compiles
    kinds = Counter(type(call) for call in told.calls)
    assert set(kinds) == set(get_args(HostCall)) - {ReadClasses, ReadHidden, CopyStates}
    assert {call.backend for call in told.calls if isinstance(call, Forward)} == {None, "packed_dense"}


def test_a_decision_model_is_followed(tmp_path, told):
    make_base(tmp_path, "qwen3")
    save_kev(tmp_path, "base", pointer_head())
    options = {name: value for name, value in OPTIONS.items() if name != "skip_tokenizer_init"}
    first, other = LLM(str(tmp_path), **options), LLM(str(tmp_path), **options)
    lead(first, told)
    first.decide("Ana likes figs.", [Choice("Who?", ["Ana", "Ben"])], use_tqdm=False)
    follower = Follower(other.core)
    for call in told.calls:
        follower.run(call)
    assert any(isinstance(call, ReadHidden) for call in told.calls)
    assert first.core.runner.compiles == other.core.runner.compiles


def test_a_hybrid_is_followed(checkpoint, told):
    first, other = LLM(str(checkpoint("qwen3_5")), **OPTIONS), LLM(str(checkpoint("qwen3_5")), **OPTIONS)
    lead(first, told)
    first.core.runner.states._tell = told.tell
    prompt = ChunkedPrompt([*range(2, 90)], [[5, 6, 7]], [8, 9])
    first.generate(prompt, SamplingParams(n=2, seed=1, max_tokens=5, ignore_eos=True), use_tqdm=False)
    first.core._recover([])
    first.generate(prompt, FORKED, use_tqdm=False)
    follower = Follower(other.core)
    for call in told.calls:
        follower.run(call)
    assert any(isinstance(call, CopyStates) for call in told.calls)
    for own, theirs in zip(jax.tree.leaves(first.core.runner.caches), jax.tree.leaves(other.core.runner.caches), strict=True):
        np.testing.assert_array_equal(np.asarray(own), np.asarray(theirs))
    assert first.core.runner.compiles == other.core.runner.compiles


def test_a_classifier_is_followed(tmp_path, told):
    config = copy.deepcopy(CHECKPOINTS["qwen3"])
    config.num_labels, config.pad_token_id = 3, 0
    folder = make_checkpoint(config, tmp_path, auto=AutoModelForSequenceClassification)
    first, other = LLM(str(folder), **OPTIONS), LLM(str(folder), **OPTIONS)
    lead(first, told)
    first.score([3, 4, 5], [[6, 7], [8]], use_tqdm=False)
    follower = Follower(other.core)
    for call in told.calls:
        follower.run(call)
    assert any(isinstance(call, ReadClasses) for call in told.calls)
    assert first.core.runner.compiles == other.core.runner.compiles


def test_padding_is_not_sent(checkpoint, told):
    """A decode of one sequence sends its own pages, whatever the width of the tables."""
    llm = LLM(str(checkpoint("qwen3")), **OPTIONS | {"attention_backend": "cpu", "kv_cache_memory_bytes": 64 << 20})
    lead(llm, told)
    llm.generate({"prompt_token_ids": [*range(2, 90)]}, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    steps = [(call, size) for call, size in zip(told.calls, told.sizes, strict=True) if isinstance(call, Forward)]
    whole = [sum(leaf.nbytes for leaf in call.leaves) for call, _ in steps]
    assert max(size for _, size in steps[-8:]) < 2048
    assert min(whole) > 8192


def test_samples_of_checkpoints_differ(checkpoint, tmp_path):
    files = [open_files(LLM(str(checkpoint(name)), **OPTIONS).config) for name in ("qwen3", "llama")]
    assert files[0].sample() == files[0].sample() != files[1].sample()
