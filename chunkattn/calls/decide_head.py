"""Decisions by a model's own head: its prompts as items behind each state, and its scores as answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from scipy.special import logsumexp, softmax

from chunkattn.calls.decide_questions import answered, check_names, check_question, listed_questions, of_state
from chunkattn.calls.decide_verdict import HEAD
from chunkattn.calls.frontend import Frontend, check_priorities
from chunkattn.calls.head_prompts import HeadItem, HeadPrompts
from chunkattn.calls.job import Job
from chunkattn.calls.score import ScoreCall
from chunkattn.calls.score_job import ScoreJob, total_usage
from chunkattn.decisions import DecisionOutput, Predicate, Question
from chunkattn.errors import RequestError
from chunkattn.layout import Names
from chunkattn.models.decision_prompts import AskedOptions
from chunkattn.outputs import ScoreOutput
from chunkattn.parsers.states import json_state, list_states

Finish = Callable[[Sequence[ScoreOutput]], DecisionOutput]
"""Function that makes the answers about a state from the outputs of its calls."""

_OWN = {
    "documents": "its prompt has no place for documents; put them into the state",
    "system": "its prompt has no system message",
    "calibrate": "its head has temperatures of its own",
    "chat_template_kwargs": "its prompt has no variables",
}
"""Options of decisions that a head does not take, with the reason."""


def head_call(frontend: Frontend, state: Any, questions: Sequence[Question], options: Mapping[str, Any]) -> Job[Any]:
    """Check the arguments of `LLM.decide`, and return the call that asks by the model's own prompt and head.

    Args:
        frontend: frontend of the engine.
        state: see `LLM.decide`.
        questions: see `LLM.decide`.
        options: see `chunkattn.calls.decide.DecideOptions`.

    Raises:
        RequestError: the model has no head, an argument is malformed, or it is one that a head does not take.
        CapacityError: the state or a question is too long, or the call would compute more than `max_tokens_per_call`.
    """
    prompts = frontend.head_prompts
    if prompts is None:
        raise RequestError("method is 'head', and this model has no head for decisions", param="method")
    for name, reason in _OWN.items():
        if options.get(name):
            raise RequestError(f"{name} is not for a decision model: {reason}", param=name)
    (rank,) = check_priorities(options["priority"], 1)
    states, (listed, parts) = list_states(state), listed_questions(frontend.limits, questions)
    for question, part in zip(listed, parts, strict=True):
        check_question(question, part)
    check_names(listed)
    asked = [prompts.asked(question, part) for question, part in zip(listed, parts, strict=True)]
    make = partial(_state_calls, frontend, prompts, listed, asked, parts, cache_salt=options["cache_salt"], priority=rank)
    if states is None:
        calls, finish = make(json_state(state))
        return ScoreJob(frontend, calls, finish, 1)
    all_calls, ends, tokens = list[ScoreCall](), list[tuple[int, Finish]](), 0
    for number, entry in enumerate(states):
        with of_state(number):
            calls, finish = make(json_state(entry))
        tokens += sum(call.tokens()[call.algorithm] for call in calls)
        frontend.limits.check_tokens(tokens, f"the first {number + 1} states with their questions", "state")
        all_calls += calls
        ends.append((len(calls), finish))

    def decisions(outputs: Sequence[ScoreOutput]) -> list[DecisionOutput]:
        left = iter(outputs)
        return [finish([*islice(left, count)]) for count, finish in ends]

    return ScoreJob(frontend, all_calls, decisions, 1)


def _state_calls(
    frontend: Frontend,
    prompts: HeadPrompts,
    questions: Sequence[Question],
    asked: Sequence[AskedOptions],
    parts: Sequence[str],
    state: Any,
    *,
    cache_salt: str | None,
    priority: int,
) -> tuple[list[ScoreCall], Finish]:
    """Return the calls of one state, one for all questions with the same tokens before them, and how they become answers."""
    try:
        items = prompts.items(state, asked, parts)
    except RecursionError:
        raise RequestError(" nests too deep", param="state", part="state") from None
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number, item in enumerate(items):
        groups.setdefault((item.prefix, item.reader is None), []).append(number)
    algorithm = "prefill_extend" if frontend.config.enable_prefix_caching else "packed_segment"
    calls = []
    for numbers in groups.values():
        own = [items[number] for number in numbers]
        prefix, readers = list(own[0].prefix), [item.reader for item in own if item.reader is not None]
        names = Names("state", "questions", "questions", "question", [parts[number] for number in numbers])
        frontend.limits.check_items(prefix, [item.item for item in own], names)
        calls.append(
            ScoreCall(
                frontend,
                prefix,
                [item.item for item in own],
                [item.labels for item in own],
                algorithm=algorithm,
                cache_salt=cache_salt,
                priority=priority,
                names=names,
                readers=readers,
            )
        )
    return calls, partial(_decision, questions, asked, items, [*groups.values()])


def _decision(
    questions: Sequence[Question],
    asked: Sequence[AskedOptions],
    items: Sequence[HeadItem],
    groups: Sequence[Sequence[int]],
    outputs: Sequence[ScoreOutput],
) -> DecisionOutput:
    """Return the answers about one state from the scores of each group of questions."""
    rows: dict[int, Sequence[float]] = {}
    for numbers, output in zip(groups, outputs, strict=True):
        rows |= zip(numbers, output.logits if output.logits is not None else output.logprobs or [], strict=True)
    answers = []
    for number, question in enumerate(questions):
        scores, item = np.asarray(rows[number], np.float64), items[number]
        shares = np.asarray(softmax(scores / item.temperature))
        mass = float(np.exp(logsumexp(scores))) if item.reader is None else 1.0
        if isinstance(question, Predicate):
            options = asked[number].options
            shares = shares[[options.index("true"), options.index("false")]]
        answers.append(answered(question, shares, range(len(shares)), mass, HEAD))
    return DecisionOutput(answers, total_usage(outputs), HEAD)
