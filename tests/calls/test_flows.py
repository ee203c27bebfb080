"""Flows without an engine: stages within bounds, and flows that run together."""

from types import SimpleNamespace

import pytest

from chunkattn.calls.job import Ask, JobsInTurn, Returned, advance, bounded, drive, together


def request(name, size=1):
    return SimpleNamespace(request_id=name, size=size)


def asking(name, *sizes):
    """A flow of one stage for each size, which returns the answers."""
    answers = []
    for number, size in enumerate(sizes):
        answers += yield Ask([request(f"{name}{number}", size)])
    return answers


def answered(stages):
    """Return a function that answers a question by the ids of its requests, and keeps these ids in `stages`."""

    def answer(question):
        stages.append([own.request_id for own in question.requests])
        return stages[-1]

    return answer


def test_entries_are_bounded_by_every_sum():
    lists = [*bounded([3, 1, 1, 9, 1, 1, 1], (5, int), (2, lambda _: 1))]
    assert lists == [[3, 1], [1], [9], [1, 1], [1]]
    assert [*bounded([], (5, int))] == []
    assert [*bounded([7, 7], (None, int))] == [[7, 7]]


def test_entries_are_taken_one_by_one():
    taken = []
    first = next(bounded((taken.append(n) or n for n in range(9)), (3, lambda _: 1)))
    assert (first, taken) == ([0, 1, 2], [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("most", "expected"),
    [(None, [["a0", "b0", "c0"], ["a1", "c1"], ["c2"]]), (4, [["a0", "b0"], ["c0"], ["a1", "c1"], ["c2"]])],
)
def test_flows_run_together_stage_by_stage(most, expected):
    stages = []
    flows = [asking("a", 2, 1), asking("b", 2), asking("c", 1, 3, 9), asking("d")]
    results = drive(together(flows, most, lambda own: own.size), answered(stages))
    assert stages == expected
    assert results == [["a0", "a1"], ["b0"], ["c0", "c1", "c2"], []]


def test_jobs_run_in_turn():
    stages = []
    jobs = [SimpleNamespace(unit="items", total=n, done=n, flow=lambda n=n: asking(f"{n}.", *[1] * n)) for n in (1, 2)]
    job = JobsInTurn(jobs, lambda results: results[::-1])
    assert drive(job.flow(), answered(stages)) == [["2.0", "2.1"], ["1.0"]]
    assert stages == [["1.0"], ["2.0"], ["2.1"]]
    assert (job.unit, job.total, job.done) == ("items", 3, 3)


def test_the_end_of_a_flow_is_a_value():
    flow = asking("a", 1)
    question = advance(flow)
    question.take(question.requests[0], lambda *_: None)
    assert question.answer == question.requests
    assert advance(flow, ["answer"]) == Returned(["answer"])
    assert advance(asking("b")) == Returned([])
