"""A step that draws no token is read while the device computes the next: one wait a step, and nobody notices."""

import dataclasses
import logging
from collections import Counter

import numpy as np
import pytest

from chunkattn import LLM, SamplingParams
from chunkattn.calls.algorithms import groups
from chunkattn.engine.completion import Completion
from chunkattn.engine.messages import GenerateRequest, RequestFailed, ScoreRequest, ScoreResult, TokenOutput
from chunkattn.engine.rates import RateMeter
from chunkattn.errors import RequestError
from chunkattn.parsers.arguments import check_ids, plain_ids
from chunkattn.rope.positions import make_layout
from tests.engine.test_cache import part

BUDGET = 64
LABELS = ((5, 6),)


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def llm(engine):
    llm = engine("qwen3", max_num_batched_tokens=BUDGET, max_num_seqs=4)
    llm.reset_prefix_cache()
    return llm


@pytest.fixture
def core(llm):
    return llm.core


@pytest.fixture
def events(core, monkeypatch):
    """Names of the steps, readouts and waits, in order."""
    seen = []
    for name in ("forward", "label_logprobs", "fetch"):
        original = getattr(core.runner, name)

        def noted(*args, name=name, original=original):
            seen.append(name)
            return original(*args)

        monkeypatch.setattr(core.runner, name, noted)
    return seen


def score(name, length, seed=0, **options):
    """Request that reads its last token, and two others if there are as many."""
    rows = np.unique(np.asarray([0, length // 2, length - 1]))
    return ScoreRequest(name, make_layout([], [], part(np.random.default_rng(seed), length)), rows, LABELS, **options)


def answers_of(core, messages):
    """Outputs by request, one for each."""
    answers = {}
    for message in messages:
        core.add(message)
    for _ in range(1000):
        for event in core.step():
            assert event.request_id not in answers, "answered twice"
            answers[event.request_id] = event
        core.scheduler.check()
        if not core.has_work:
            break
    assert core.scheduler.trie.num_available == core.limits.num_pages
    return answers


def test_a_step_is_read_behind_the_next(core, events):
    """All blocks of a step, here two, are sent before the only wait for it."""
    core.add(ScoreRequest("a", make_layout([], [], part(np.random.default_rng(0), 3 * BUDGET)), np.arange(3 * BUDGET), LABELS))
    core.add(score("b", 3 * BUDGET, 1))
    while core.has_work:
        core.step()
    steps = 6
    assert Counter(events) == {"forward": steps, "label_logprobs": steps, "fetch": steps}
    assert events == ["forward", "label_logprobs", *["forward", "label_logprobs", "fetch"] * (steps - 1), "fetch"]


def test_a_step_that_draws_is_read_at_once(core, events):
    core.add(score("a", 9))
    core.add(GenerateRequest("b", make_layout([], [], [1, 2]), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)))
    outputs = core.step()
    assert {type(output) for output in outputs} == {ScoreResult, TokenOutput}
    assert events == ["forward", "label_logprobs", "fetch"]
    core.abort("b")


def test_who_waits_takes_the_room_of_those_that_end(core, events):
    """Twelve requests, of which four may run: three steps, not more."""
    answers = answers_of(core, [score(str(n), 16, n) for n in range(12)])
    assert len(answers) == 12
    assert Counter(events)["forward"] == 3


def test_an_abort_before_the_values_are_read(core):
    """The aborted request is not answered, the other one is."""
    expected = answers_of(core, [score("b", 20, 1)])["b"].logprobs
    core.add(score("a", 20))
    core.add(score("b", 20, 1))
    assert core.step() == []
    ended = {outcome: core.metrics.value("requests_total", outcome=outcome) for outcome in ("aborted", "finished")}
    core.abort("a")
    outputs = core.step()
    assert [output.request_id for output in outputs] == ["b"]
    np.testing.assert_array_equal(outputs[0].logprobs, expected)
    assert not core.has_work
    core.scheduler.check()
    for outcome, before in ended.items():
        assert core.metrics.value("requests_total", outcome=outcome) == before + 1


def fail_reading(monkeypatch, core, guilty):
    """Raise where the values of a step are waited for, if `guilty` says so of the names of its requests."""
    original, finish = core.runner.fetch, Completion._finish
    reading = []

    def finishing(self, step, *args, **options):
        reading[:] = [{span.sample.request.request_id for span in step.spans}]
        return finish(self, step, *args, **options)

    def failing(arrays):
        values = original(arrays)
        if guilty(reading[0]):
            raise RuntimeError("injected")
        return values

    monkeypatch.setattr(Completion, "_finish", finishing)
    monkeypatch.setattr(core.runner, "fetch", failing)


def test_an_error_of_a_late_reading_fails_the_culprit(core, monkeypatch):
    """Though other requests are in the step that was sent meanwhile."""
    messages = [score("a", 50), score("guilty", 14, 1), score("c", 60, 2), score("d", 70, 3)]
    expected = answers_of(core, messages)
    core.reset_prefix_cache()
    fail_reading(monkeypatch, core, lambda names: "guilty" in names)
    answers = answers_of(core, messages)
    assert {name for name, answer in answers.items() if isinstance(answer, RequestFailed)} == {"guilty"}
    for name in answers.keys() - {"guilty"}:
        np.testing.assert_array_equal(answers[name].logprobs, expected[name].logprobs)


def test_requests_whose_reading_fails_together_end(core, monkeypatch):
    """Where each passes alone and any two fail, nobody waits for ever."""
    fail_reading(monkeypatch, core, lambda names: len(names) > 1)
    answers = answers_of(core, [score("a", 20), score("b", 20, 1), score("c", 20, 2)])
    assert len(answers) == 3


def test_requests_of_a_series_share_no_step(core, monkeypatch):
    """Their steps are those of asking for one after the other; another request fills the room that they leave."""
    spans = []
    build = core.builder.build

    def building(planned):
        spans.append([(span.sample.request.request_id[0], span.start, span.end) for span in planned])
        return build(planned)

    monkeypatch.setattr(core.builder, "build", building)
    series = [score(name, length, 7, series="s") for name, length in (("a", 70), ("b", 30), ("c", 90))]
    expected = {}
    for message in series:
        expected |= answers_of(core, [message])
    alone, spans[:] = [*spans], []
    answers = answers_of(core, series)
    assert spans == alone
    assert answers.keys() == expected.keys()
    for name, answer in answers.items():
        np.testing.assert_array_equal(answer.logprobs, expected[name].logprobs)
    spans.clear()
    answers_of(core, [*series, score("o", 40, 8)])
    assert all(len({name for name, _, _ in step} - {"o"}) <= 1 for step in spans)
    assert any(len(step) == 2 for step in spans)


@pytest.mark.parametrize("pages", [12, 64])
def test_answers_are_those_of_reading_at_once(checkpoint, pages):
    """Also where a text takes the pages of a scoring request that has been sent and not read."""
    options = {"skip_tokenizer_init": True, "max_num_batched_tokens": 32, "max_num_seqs": 6, "attention_backend": "cpu"}
    probe = LLM(str(checkpoint("qwen3")), **options, kv_cache_memory_bytes=1 << 20)
    rng, greedy = np.random.default_rng(5), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    made = []
    for number in range(24):
        at, length, name = int(rng.integers(0, 40)), int(rng.integers(5, 70)), str(number)
        if number % 3:
            priority = int(rng.integers(0, 2))
            made.append((at, dataclasses.replace(score(name, length, number), priority=priority)))
        else:
            made.append((at, GenerateRequest(name, make_layout([], [], part(rng, length)), greedy, priority=number % 2)))

    def run(at_once):
        llm = LLM(str(checkpoint("qwen3")), **options, kv_cache_memory_bytes=pages * probe.limits.page_bytes)
        core, answers = llm.core, {}
        if at_once:
            compute = core._compute

            def computing(*args):
                compute(*args)
                core.completion.complete_pending()

            core._compute = computing
        for step in range(2000):
            for _, message in [m for m in made if m[0] == step]:
                core.add(message)
            for event in core.step():
                if isinstance(event, TokenOutput):
                    answers.setdefault(event.request_id, []).extend(event.token_ids)
                else:
                    assert event.request_id not in answers
                    answers[event.request_id] = event.logprobs.tolist()
            core.scheduler.check()
            if step > 40 and not core.has_work:
                break
        assert not core.has_work
        return answers, core.scheduler.preemptions

    late, preempted = run(at_once=False)
    assert late == run(at_once=True)[0]
    assert len(late) == 24
    assert pages > 20 or preempted


def test_rates_leave_out_the_step_that_runs():
    """The time of a step that has ended counts for it alone."""
    meter = RateMeter(1e6, 1e3, np.dtype("float32"))
    meter.add(0.0, 100, 0)
    meter.add(1.0, 50, 10)
    meter.finish((50, 10))
    assert [row[:3].tolist() for row in meter._seen[False]] == [[1, 100, 0]]
    assert not meter._seen[True]
    meter.finish()
    assert [row[:3].tolist() for row in meter._seen[True]] == [[1, 50, 10]]
    meter.finish((50, 10))  # a compilation has dropped the others
    assert len(meter._seen[False]) == len(meter._seen[True]) == 1


def groups_one_by_one(lens, most, room, unit):
    """Ranges by a loop over the entries."""
    first = tokens = slots = 0
    for index, size in enumerate(lens):
        taken = -(-size // unit) * unit
        if index > first and (tokens + size > most or slots + taken > room):
            yield first, index
            first, tokens, slots = index, 0, 0
        tokens, slots = tokens + size, slots + taken
    if first < len(lens):
        yield first, len(lens)


def test_ranges_are_those_of_a_loop():
    rng = np.random.default_rng(3)
    for _ in range(300):
        lens = rng.integers(0, 40, rng.integers(0, 30)).tolist()
        bounds = int(rng.integers(1, 120)), int(rng.integers(1, 200)), int(rng.choice([1, 16]))
        assert list(groups(lens, *bounds)) == list(groups_one_by_one(lens, *bounds))


@pytest.mark.parametrize("bad", [[True], [1.0], [-1], [2**31], ["a"], (1, 2), np.asarray([1]), "ab"])
def test_lists_of_plain_ids_are_copied_at_once(bad):
    """Anything else is left to `check_ids`, which accepts it or says why not."""
    lists = [[1, 2], [], [3]]
    copies = plain_ids(lists, 5)
    assert copies == lists
    assert all(copy is not own for copy, own in zip(copies, lists, strict=True))
    assert plain_ids([*lists, bad], 5) is None
    assert plain_ids([[1] * 6], 5) is None
    try:
        assert check_ids(bad, "x") == list(bad)
    except RequestError:
        assert not isinstance(bad, (tuple, np.ndarray))
