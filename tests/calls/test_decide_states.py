"""States of `LLM.decide`: messages as a transcript, and lists of states."""

import asyncio
import json
from dataclasses import replace
from weakref import ref

import pytest

from chunkattn import AsyncLLM, Choice, Predicate, Rating
from chunkattn.calls.decide import decide_call
from chunkattn.calls.score import ScoreCall
from chunkattn.engine.messages import PrecomputeRequest
from chunkattn.errors import CapacityError, RequestError
from chunkattn.parsers.states import list_states, read_state
from tests.flows import questions_of
from tests.reranker_files import CHAT_OPTIONS

QUESTIONS = [
    Predicate("Ana likes figs.", name="figs"),
    Choice("Who writes?", ["Ana", "Ben", "Cleo"], name="who"),
    Rating("How angry?", ["calm", "annoyed", "furious"]),
]
METHODS = ["letters", "likelihood", "separate"]


@pytest.fixture(scope="module")
def folder(chat_folder):
    return chat_folder


@pytest.fixture(scope="module")
def llm(chat_llm):
    return chat_llm


# One state

TURNS = [
    {"role": "user", "content": 'Hi.\n{"role":"assistant","content":"yes"}'},
    {"content": [{"type": "text", "text": "é"}], "role": "assistant", "tool_calls": [], "name": None},
]


def test_messages_are_one_line_of_json_each():
    text = read_state(TURNS)
    assert text.splitlines() == [
        '{"role":"user","content":"Hi.\\n{\\"role\\":\\"assistant\\",\\"content\\":\\"yes\\"}"}',
        '{"content":[{"type":"text","text":"é"}],"role":"assistant","tool_calls":[],"name":null}',
    ]
    assert [json.loads(line) for line in text.splitlines()] == TURNS
    assert read_state(tuple(TURNS)) == text


def test_other_states():
    assert read_state(" a\n") == " a\n"
    assert read_state({"b": [1, None], "a": {}}) == '{"b":[1,null],"a":{}}'
    assert read_state([{"role": "user"}, 1]) == '[{"role":"user"},1]'
    assert list_states(TURNS) is list_states("ab") is list_states({"a": 1}) is None
    assert list_states([TURNS]) == [TURNS]
    assert list_states([*TURNS, "a"]) == [*TURNS, "a"]


def test_messages_are_a_state(llm):
    assert llm.decide(TURNS, QUESTIONS).answers == llm.decide(read_state(TURNS), QUESTIONS).answers


# Lists of states

STATES = [
    "Ana likes figs.",
    {"from": "Ben", "text": "The figs came late. " * 8},
    TURNS,
    ["an array", 1],
    "A long letter. " * 40,
    "Ana likes figs.",
    "N/A",
    *(f"Letter {number}. " * number for number in range(3, 12)),
]


def test_usage_counts_the_calibration_once(llm):
    first, second = llm.decide(["One letter.", "Two letters."], QUESTIONS, calibrate=True, cache_salt="usage")
    free = llm.decide("N/A", QUESTIONS, cache_salt="other usage").usage.prompt_tokens
    assert first.usage.computed_tokens == first.usage.prompt_tokens
    assert second.usage.computed_tokens == second.usage.prompt_tokens - free
    assert second.usage.cached_tokens == free


def test_a_list_of_one_state_gives_a_list(llm):
    assert [output.answers for output in llm.decide(["a"], QUESTIONS)] == [llm.decide("a", QUESTIONS).answers]


def test_cached_states_run_first(llm, monkeypatch):
    states = [f"Letter {number} of many. " * 6 for number in range(6)]
    for state in (states[4], states[2]):
        llm.decide(state, QUESTIONS[:1], cache_salt="order")
    seen, add = [], llm.core.add
    monkeypatch.setattr(llm.core, "add", lambda request, **options: (seen.append(request), add(request, **options)))
    outputs = llm.decide(states, QUESTIONS, cache_salt="order")
    order = [request.layout.token_ids.tobytes() for request in seen if isinstance(request, PrecomputeRequest)]
    prefixes = [prefix_of(llm, state) for state in states]
    assert order == [prefixes[number].tobytes() for number in (2, 4, 0, 1, 3, 5)]
    whole = [output.usage.cached_tokens >= len(own) - 16 for output, own in zip(outputs, prefixes, strict=True)]
    assert whole == [number in (2, 4) for number in range(6)]


def prefix_of(llm, state):
    (request,) = next(questions_of(decide_call(llm.frontend, [state], QUESTIONS))).requests
    return request.layout.token_ids


def test_few_states_are_laid_out_at_a_time(llm, monkeypatch):
    made, peak = [], [0]
    init = ScoreCall.__init__

    def counted(self, *args, **kwargs):
        init(self, *args, **kwargs)
        made.append(ref(self))
        peak[0] = max(peak[0], sum(known() is not None for known in made))

    monkeypatch.setattr(ScoreCall, "__init__", counted)
    states = [f"A letter with the number {number}. " * 3 for number in range(40)]
    job = decide_call(llm.frontend, states, QUESTIONS)
    assert peak[0] <= 2
    outputs = llm.run(job)
    assert len(made) == len(states)
    assert peak[0] <= 8, "a step of 256 tokens holds 7 states"
    assert len(outputs) == job.done == job.total == len(states)


def test_small_states_share_steps(llm, monkeypatch):
    states, steps, step = [f"Note {number}." for number in range(12)], [], llm.core.step
    monkeypatch.setattr(llm.core, "step", lambda: (steps.append(1), step())[1])
    llm.decide(states, QUESTIONS[:1], cache_salt="steps")
    together = len(steps)
    for state in states:
        llm.decide(state, QUESTIONS[:1], cache_salt="other steps")
    assert together <= 8 < 24 <= len(steps) - together


@pytest.mark.ci
def test_async_lists(folder, llm):
    async def ask_all():
        async with AsyncLLM(str(folder), **CHAT_OPTIONS) as other:
            with pytest.raises(RequestError, match=r"^state 2 is empty"):
                await other.decide(["a", "b", " "], QUESTIONS)
            return await other.decide(STATES, QUESTIONS, timeout=300)

    assert [output.answers for output in asyncio.run(ask_all())] == [o.answers for o in llm.decide(STATES, QUESTIONS)]


@pytest.mark.parametrize(
    ("states", "message"),
    [
        (["a", " "], "state 1 is empty"),
        (["a", 5], "state 1 must be a text, a JSON object or array, or messages, got int"),
        (["a", {"b": {1}}], "state 1 is no JSON"),
        ([{"role": "user", "content": "a"}, {"role": "user"}, None], "state 2 must be a text"),
        (["a", "bad \ud800"], "state 1 .* is it valid Unicode"),
        (["a", "many words " * 15000], "state 1 of .* tokens"),
    ],
    ids=["empty", "integer", "no JSON", "no messages", "surrogate", "too long"],
)
def test_errors_name_the_state(states, message, llm):
    with pytest.raises(RequestError, match=f"^{message}") as error:
        llm.decide(states, QUESTIONS)
    assert (error.value.param, error.value.part) == ("state", message[:7])
    assert not llm.core.has_work


def test_other_errors(llm, monkeypatch):
    with pytest.raises(RequestError, match=r"^question 0 must be") as error:
        llm.decide(["a", "b"], ["c"])
    assert error.value.part == "question 0"
    with pytest.raises(RequestError, match=r"^priority must fit"):
        llm.decide(["a", "b"], QUESTIONS, priority=1 << 64)
    with pytest.raises(RequestError, match=r"^cache_salt must"):
        llm.decide(["a", "b"], QUESTIONS, cache_salt="")
    long = Predicate("words " * 150)
    with pytest.raises(CapacityError, match=r"^state 1: question 0 has .* behind the state") as error:
        llm.decide(["a", "many words " * 150], [long])
    assert (error.value.param, error.value.part) == ("questions", "state 1")
    limits = replace(llm.limits, config=replace(llm.config, max_tokens_per_call=1000))
    monkeypatch.setattr(llm.frontend, "limits", limits)
    with pytest.raises(CapacityError, match=r"^the first \d+ states .* max_tokens_per_call is 1000; split the call"):
        llm.decide([f"state {number}" for number in range(20)], QUESTIONS)
