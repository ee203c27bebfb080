"""Decisions: typed questions about one state, each an isolated item behind the state, answered from label probabilities."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypedDict

from chunkattn.calls.algorithms import too_costly
from chunkattn.calls.decide_questions import METHODS, AnswerLabels, AskedQuestion, ask
from chunkattn.calls.frontend import Frontend
from chunkattn.calls.score import ScoreCall, ScoreCalls
from chunkattn.decisions import DecisionOutput, Question
from chunkattn.errors import CapacityError, RequestError
from chunkattn.layout import Names
from chunkattn.outputs import ScoreOutput, ScoreUsage
from chunkattn.parsers.arguments import as_list
from chunkattn.parsers.state_template import StateTemplate

State = str | Mapping[str, Any] | Sequence[Any]
"""State of `LLM.decide`: a text, or a JSON object or array."""

_CONTENT_FREE = "N/A"
"""State without content, whose probabilities calibrate the labels."""


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
        cache_salt: see `LLM.generate`.
        priority: see `LLM.generate`; one value for the call.
        chat_template_kwargs: variables of the chat template. `enable_thinking` and `thinking` default to False.
    """

    system: str | None
    method: str
    calibrate: bool
    cache_salt: str | None
    priority: int
    chat_template_kwargs: Mapping[str, Any] | None


def decide_call(
    frontend: Frontend,
    state: State,
    questions: Sequence[Question],
    *,
    system: str | None = None,
    method: str = "letters",
    calibrate: bool = False,
    cache_salt: str | None = None,
    priority: int = 0,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> ScoreCalls[DecisionOutput]:
    """Check the arguments of `LLM.decide` and return the call, which scores questions as items behind the state.

    See `LLM.decide` and `DecideOptions` for the arguments.

    Raises:
        RequestError: an argument is malformed, the chat template is missing or unusable, or the checkpoint is a classifier.
        CapacityError: the state or a question is too long, or the call would compute more than `max_tokens_per_call`.
    """
    limits, config = frontend.limits, frontend.config
    if limits.num_labels is not None:
        raise RequestError("this checkpoint is a sequence classifier and answers no questions; score it", param="questions")
    if method not in METHODS:
        raise RequestError(f"method must be one of {', '.join(METHODS)}, got {method!r}", param="method")
    if system is not None and (not isinstance(system, str) or not system.strip()):
        raise RequestError(f"system must be a string that is not empty, got {system!r}", param="system")
    text, given = _read_state(state), as_list(questions, "questions")
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
    prefixes = [template.prefix(own) for own in ([text, _CONTENT_FREE] if calibrate else [text])]
    items, reads, read = [], [], []
    for question, part in zip(asked, parts, strict=True):
        for number, pieces in enumerate(question.items):
            answer = template.answer(pieces, question.texts[number], part) if question.texts else []
            items.append(template.item(pieces, part) + answer[:-1])
            reads.append(max(len(answer), 1))
            read.append(tuple(answer) or question.label_ids)
    for prefix in prefixes:
        limits.check_items(prefix, items, names)
    # The algorithm follows from the engine alone, so no other question can change it.
    algorithm = "prefill_extend" if config.enable_prefix_caching else "packed_segment"
    algorithm = "serial" if limits.sliding_window is not None else algorithm
    calls = [
        ScoreCall[ScoreOutput](
            frontend,
            prefix,
            items,
            read,
            algorithm=algorithm,
            cache_salt=cache_salt,
            priority=priority,
            names=names,
            reads=reads if method == "likelihood" else (),
        )
        for prefix in prefixes
    ]
    if algorithm == "prefill_extend":
        _check_room(calls[0])
    costly = too_costly(calls, config.max_tokens_per_call)
    for call in calls:
        call.plan(costly)
    return ScoreCalls(calls, config.max_num_batched_tokens, partial(_decisions, asked, method))


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


def _decisions(asked: Sequence[AskedQuestion], method: str, outputs: Sequence[ScoreOutput]) -> DecisionOutput:
    """Return the answers.

    Args:
        asked: the questions.
        method: see `DecideOptions`.
        outputs: scores behind the state, and then behind the content-free state if the answers are calibrated.
    """
    rows = [iter(output.logprobs or []) for output in outputs]
    answers = []
    for question in asked:
        own, *empty = ([next(row) for _ in question.items] for row in rows)
        answers.append(question.answer(own, empty[0] if empty else None))
    usages = [output.usage for output in outputs]
    usage = ScoreUsage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.computed_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
    )
    return DecisionOutput(answers, usage, method)


def _read_state(state: Any) -> str:
    """Return the text of a state.

    Raises:
        RequestError: the state is empty, or neither text nor JSON.
    """
    if isinstance(state, str):
        text = state
    elif isinstance(state, (Mapping, list, tuple)):
        entries = [] if isinstance(state, Mapping) else [*state]
        if entries and all(isinstance(entry, Mapping) and {"role", "content"} <= entry.keys() for entry in entries):
            raise RequestError("state must be text or JSON, got messages; join their contents to one text", param="state")
        try:
            text = json.dumps(state, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"state is no JSON: {error}", param="state") from error
    else:
        raise RequestError(f"state must be a string, or a JSON object or array, got {type(state).__name__}", param="state")
    if not text.strip():
        raise RequestError("the state is empty", param="state")
    return text


def _check_names(asked: Sequence[AskedQuestion]) -> None:
    seen = set[str]()
    for number, own in enumerate(asked):
        if (name := own.question.name) is not None and name in seen:
            raise RequestError(f": the name {name!r} is used before", param="questions", part=f"question {number}")
        if name is not None:
            seen.add(name)
