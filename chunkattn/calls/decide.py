"""Decisions: typed questions about one state, each an isolated item behind the state, answered from label probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypedDict

import numpy as np

from chunkattn.calibration import LabelScale
from chunkattn.calls.algorithms import too_costly
from chunkattn.calls.decide_questions import METHODS, AnswerLabels, AskedQuestion, ask
from chunkattn.calls.decide_states import State, States, list_states, read_state
from chunkattn.calls.frontend import Frontend, check_priorities
from chunkattn.calls.job import Job
from chunkattn.calls.score import ScoreCall, ScoreCalls
from chunkattn.calls.state_calls import StateCalls
from chunkattn.decisions import DecisionOutput, Question
from chunkattn.errors import CapacityError, RequestError
from chunkattn.layout import Names
from chunkattn.outputs import ScoreOutput, ScoreUsage
from chunkattn.parsers.arguments import as_list, salt_key
from chunkattn.parsers.state_template import StateTemplate

_CONTENT_FREE = "N/A"
"""State without content, whose probabilities calibrate the labels."""
FITTED = "fitted"
"""Value of `calibrate` that applies the calibration of labels in the calibration file."""


class DecideOptions(TypedDict, total=False):
    """Options of `LLM.decide`, all by name.

    Attributes:
        system: content of a system message before the state; None for no such message.
        method: `"letters"` lists the options under letters, or levels under numbers, and reads the letters' probabilities.
            `"likelihood"` reads the probability of each option's own text as the answer; descriptions are not read.
            `"separate"` asks for each option alone whether it is right, and normalises the odds. All ask a predicate by yes or
            no.
        calibrate: divide the probability of each label by its probability behind the state "N/A" before they are normalised;
            with `"likelihood"` the probability of each text, and with `"separate"` the odds. `label_mass` stays as it is.
            `"fitted"` applies the calibration of labels in the calibration file instead (see `chunkattn calibrate`), with
            `"likelihood"` after that division.
        cache_salt: see `LLM.generate`.
        priority: see `LLM.generate`; one value for the call.
        chat_template_kwargs: variables of the chat template. `enable_thinking` and `thinking` default to False.
    """

    system: str | None
    method: str
    calibrate: bool | Literal["fitted"]
    cache_salt: str | None
    priority: int
    chat_template_kwargs: Mapping[str, Any] | None


def decide_call(
    frontend: Frontend,
    state: State | States,
    questions: Sequence[Question],
    *,
    system: str | None = None,
    method: str = "letters",
    calibrate: bool | Literal["fitted"] = False,
    cache_salt: str | None = None,
    priority: int = 0,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Job[DecisionOutput | list[DecisionOutput]]:
    """Check the arguments of `LLM.decide` and return the call, which scores questions as items behind each state.

    See `LLM.decide` and `DecideOptions` for the arguments.

    Raises:
        RequestError: an argument is malformed, the chat template is missing or unusable, or the checkpoint is a classifier. For
            a list of states the message names the state.
        CapacityError: the state or a question is too long, or the call would compute more than `max_tokens_per_call`.
    """
    limits, config = frontend.limits, frontend.config
    if limits.num_labels is not None:
        raise RequestError("this checkpoint is a sequence classifier and answers no questions; score it", param="questions")
    if method not in METHODS:
        raise RequestError(f"method must be one of {', '.join(METHODS)}, got {method!r}", param="method")
    if not isinstance(calibrate, bool) and calibrate != FITTED:
        raise RequestError(f"calibrate must be True, False or {FITTED!r}, got {calibrate!r}", param="calibrate")
    scales = frontend.label_scales if calibrate == FITTED else {}
    if calibrate == FITTED and not scales:
        reason = "this engine has no calibration file with labels; make one with chunkattn calibrate"
        raise RequestError(f"calibrate is {FITTED!r}, and {reason}", param="calibrate")
    if system is not None and (not isinstance(system, str) or not system.strip()):
        raise RequestError(f"system must be a string that is not empty, got {system!r}", param="system")
    states, given = list_states(state), as_list(questions, "questions")
    text = read_state(state) if states is None else ""
    if not given:
        raise RequestError("questions are empty", param="questions")
    limits.check_count(len(given), "questions", "questions")
    template = StateTemplate(frontend.plain, system, chat_template_kwargs)
    labels = AnswerLabels(template)
    parts = [f"question {number}" for number in range(len(given))]
    asked = [ask(question, method, labels, part) for question, part in zip(given, parts, strict=True)]
    _check_names(asked)
    listed = [part for question, part in zip(asked, parts, strict=True) for _ in question.items]
    limits.check_count(len(listed), "questions, with one for each option,", "questions")
    names = Names("state", "questions", "questions", "question", listed)
    items, reads, read = [], [], []
    for question, part in zip(asked, parts, strict=True):
        for number, pieces in enumerate(question.items):
            answer = template.answer(pieces, question.texts[number], part) if question.texts else []
            items.append(template.item(pieces, part) + answer[:-1])
            reads.append(max(len(answer), 1))
            read.append(tuple(answer) or question.label_ids)
    # The algorithm follows from the engine alone, so no other question can change it.
    algorithm = "prefill_extend" if config.enable_prefix_caching else "packed_segment"
    algorithm = "serial" if limits.sliding_window is not None else algorithm

    def make(prefix: list[int]) -> ScoreCall[ScoreOutput]:
        """Check the token ids of a state with the questions, and return its call."""
        limits.check_items(prefix, items, names)
        call = ScoreCall[ScoreOutput](
            frontend,
            prefix,
            items,
            [],
            read,
            algorithm=algorithm,
            cache_salt=cache_salt,
            priority=priority,
            names=names,
            reads=reads if method == "likelihood" else (),
        )
        if algorithm == "prefill_extend":
            _check_room(call)
        return call

    finish = partial(_decisions, asked, method, scales)
    divides = calibrate is True or (calibrate == FITTED and method == "likelihood")
    empty = [make(template.prefix(_CONTENT_FREE))] if divides else []
    if states is None:
        calls = [make(template.prefix(text)), *empty]
        costly = too_costly(calls, config.max_tokens_per_call)
        for call in calls:
            call.plan(costly)
        return ScoreCalls(calls, config.max_num_batched_tokens, finish)
    rank, key = check_priorities(priority, 1)[0], salt_key(cache_salt)
    tokens, prefixes = sum(call.tokens()[algorithm] for call in empty), []
    for number, own in enumerate(states):
        try:
            prefix = template.prefix(read_state(own))
            tokens += make(prefix).tokens()[algorithm]
        except RequestError as error:
            message = error.message if error.part == "state" else f": {error}"
            raise type(error)(message, param=error.param, part=f"state {number}") from None
        limits.check_tokens(tokens, f"the first {number + 1} states with their questions", "state")
        prefixes.append(np.asarray(prefix, np.int32))

    def make_planned(prefix: list[int]) -> ScoreCall[ScoreOutput]:
        call = make(prefix)
        call.plan({})
        return call

    for call in empty:
        call.plan({})
    return StateCalls(
        frontend,
        prefixes,
        make_planned,
        finish,
        empty=empty[0] if empty else None,
        item_tokens=sum(map(len, items)),
        extends=algorithm == "prefill_extend",
        salt_key=key,
        priority=rank,
    )


def _check_room(call: ScoreCall[ScoreOutput]) -> None:
    """Check that the KV pool has room for every item on pages of its own beside the state's pages.

    Raises:
        CapacityError: there is no room; the error names the question.
    """
    room = call.max_extend_tokens
    for number, item in enumerate(call.items):
        if len(item) > room:
            text = f" has {len(item)} tokens, the KV pool leaves room for {max(room, 0)} behind the state"
            raise CapacityError(text, param="questions", part=call.names.of(number))


def _decisions(
    asked: Sequence[AskedQuestion], method: str, scales: Mapping[str, LabelScale], outputs: Sequence[ScoreOutput]
) -> DecisionOutput:
    """Return the answers.

    Args:
        asked: the questions.
        method: see `DecideOptions`.
        scales: calibration of the labels by kind; empty for none.
        outputs: scores behind the state, and then behind the content-free state if the answers are calibrated.
    """
    rows = [iter(output.logprobs or []) for output in outputs]
    answers = []
    for question in asked:
        own, *empty = ([next(row) for _ in question.items] for row in rows)
        # With fitted labels, only texts are divided by their probability behind the content-free state.
        divided = bool(empty) and (not scales or question.kind == "likelihood")
        answers.append(question.answer(own, empty[0] if divided else None, scales.get(question.kind)))
    usages = [output.usage for output in outputs]
    usage = ScoreUsage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.computed_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
    )
    return DecisionOutput(answers, usage, method)


def _check_names(asked: Sequence[AskedQuestion]) -> None:
    seen = set[str]()
    for number, own in enumerate(asked):
        if (name := own.question.name) is not None and name in seen:
            raise RequestError(f": the name {name!r} is used before", param="questions", part=f"question {number}")
        if name is not None:
            seen.add(name)
