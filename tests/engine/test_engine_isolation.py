"""After a failed step its requests run again apart: those that fail alone fail, the others end as if nothing had been."""

import logging
from itertools import product

import numpy as np
import pytest

from chunkattn import SamplingParams
from chunkattn.engine import readout
from chunkattn.engine.messages import GenerateRequest, PrecomputeRequest, RequestFailed, ScoreRequest, ScoreResult, TokenOutput
from chunkattn.rope.positions import PADDING, make_layout
from tests.engine.test_cache import part

TEXT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
NAMES = [f"text{n}" for n in range(4)]


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def core(engine):
    llm = engine("qwen3", max_num_batched_tokens=64)
    llm.reset_prefix_cache()
    return llm.core


def messages():
    rng = np.random.default_rng(0)
    texts = [GenerateRequest(n, make_layout([], [], part(rng, 20 + 30 * i)), TEXT) for i, n in enumerate(NAMES)]
    chunked = GenerateRequest("chunked", make_layout(part(rng, 5), [part(rng, 40), part(rng, 9)], [3, 4]), TEXT)
    score = ScoreRequest("score", make_layout([], [], part(rng, 70)), np.asarray([9, 69]), ((5, 6),))
    return [*texts, chunked, score, PrecomputeRequest("fill", make_layout(part(rng, 30), [], []))]


def run(core, late=()):
    """Answers by request: tokens, label log-probabilities or the failure."""
    for message in messages():
        core.add(message)
    answers, late = {}, list(late)
    while core.has_work:
        for event in core.step():
            name = event.request_id
            if isinstance(event, TokenOutput):
                answers.setdefault(name, []).extend(event.token_ids)
            else:
                assert name not in answers or isinstance(answers[name], list), "answered twice"
                answers[name] = event
        core.scheduler.check()
        if late:
            core.add(late.pop())
    assert core.scheduler.trie.num_available == core.limits.num_pages
    return answers


def same(answer, expected):
    if isinstance(expected, ScoreResult):
        np.testing.assert_allclose(answer.logprobs, expected.logprobs, atol=1e-5)
    elif isinstance(expected, list):
        assert answer == expected
    else:
        assert type(answer) is type(expected)


def fail_for(monkeypatch, core, stage, culprits, after=0):
    """Every step with a culprit in it raises once the first `after` of them have passed."""
    original, seen, build = getattr(core.runner, stage), [], core.builder.build
    present = []

    def building(spans):
        present[:] = {s.sample.request.request_id for s in spans}
        return build(spans)

    def failing(*args):
        result = original(*args)  # consumes the pool
        if culprits & set(present):
            seen.append(1)
            if len(seen) > after:
                raise RuntimeError("injected")
        return result

    monkeypatch.setattr(core.builder, "build", building)
    monkeypatch.setattr(core.runner, stage, failing)


CULPRITS = [{"text1"}, {"text0", "chunked"}, {"late"}]
FAULTS = [
    ("forward", {"fill"}),
    ("forward", {"score"}),
    ("label_logprobs", {"score"}),
    *product(["forward", "sample"], CULPRITS),
]


@pytest.mark.parametrize(("stage", "culprits"), FAULTS)
def test_only_the_culprits_fail(core, monkeypatch, stage, culprits):
    late = GenerateRequest("late", make_layout([], [], [9, 8, 7]), TEXT)
    expected = run(core, [late])
    core.reset_prefix_cache()
    fail_for(monkeypatch, core, stage, culprits)
    answers = run(core, [late])
    assert {n for n, a in answers.items() if isinstance(a, RequestFailed)} == culprits
    assert answers.keys() == expected.keys()
    for name in answers.keys() - culprits:
        same(answers[name], expected[name])


def test_a_culprit_fails_late(core, monkeypatch):
    """In the midst of its text, when all run together: what it has said is kept, and the others go on with theirs."""
    expected = run(core)
    core.reset_prefix_cache()
    fail_for(monkeypatch, core, "sample", {"text0"}, after=4)
    answers = run(core)
    assert [n for n, a in answers.items() if isinstance(a, RequestFailed)] == ["text0"]
    for name in answers.keys() - {"text0"}:
        same(answers[name], expected[name])


def test_a_passing_fault_fails_nobody(core, monkeypatch):
    expected = run(core)
    core.reset_prefix_cache()
    original, calls = core.runner.forward, []

    def failing(batch):
        calls.append(batch)
        hidden = original(batch)
        if len(calls) in (3, 9):
            raise RuntimeError("injected")
        return hidden

    monkeypatch.setattr(core.runner, "forward", failing)
    answers = run(core)
    assert len(calls) > 9
    for name, answer in expected.items():
        same(answers[name], answer)


def test_requests_that_fail_together_only_end(core, monkeypatch):
    """Where each passes alone and any two fail, nobody waits for ever."""
    original = core.runner.forward
    width = []

    def failing(batch):
        if width[0] > 1:
            raise RuntimeError("injected")
        return original(batch)

    build = core.builder.build

    def building(spans):
        width[:] = [len({s.sample.request for s in spans})]
        return build(spans)

    monkeypatch.setattr(core.builder, "build", building)
    monkeypatch.setattr(core.runner, "forward", failing)
    answers = run(core)
    assert sum(isinstance(a, RequestFailed) for a in answers.values()) >= 2
    assert not core.has_work


def test_rows_of_padding_have_no_position(core, monkeypatch):
    """With a position, they would take places in the groups of experts."""
    build, padding = core.builder.build, []

    def building(spans):
        step = build(spans)
        padding.extend(step.arrays.positions[step.num_rows :])
        assert (step.arrays.positions[: step.num_rows] >= 0).all()
        return step

    monkeypatch.setattr(core.builder, "build", building)
    run(core)
    assert padding
    assert set(padding) == {PADDING}


def test_a_suspect_may_be_aborted(core, monkeypatch):
    expected = run(core)
    core.reset_prefix_cache()
    fail_for(monkeypatch, core, "forward", {"text1"})
    for message in messages():
        core.add(message)
    core.step()
    assert core.scheduler.alone is not None
    for name in list(core.requests)[:3]:
        core.abort(name)
    answers = {}
    while core.has_work:
        for event in core.step():
            if isinstance(event, TokenOutput):
                answers.setdefault(event.request_id, []).extend(event.token_ids)
    assert core.scheduler.alone is None
    assert answers["text3"] == expected["text3"]


def test_a_readout_that_fails_once_loses_no_answer(core, monkeypatch):
    """Two requests are complete in one step, and the second one's result cannot be made the first time."""
    rng, original, calls = np.random.default_rng(1), readout.score_result, []
    scores = [ScoreRequest(n, make_layout([], [], part(rng, 12)), np.asarray([11]), ((5,),)) for n in ("first", "second")]

    def failing(request, *args):
        calls.append(request.request_id)
        if len(calls) == 2:
            raise MemoryError
        return original(request, *args)

    monkeypatch.setattr(readout, "score_result", failing)
    for message in scores:
        core.add(message)
    answers = []
    while core.has_work:
        answers += core.step()
    assert calls[:2] == ["first", "second"]
    assert sorted(a.request_id for a in answers if isinstance(a, ScoreResult)) == ["first", "second"]
    assert len(answers) == 2
