"""Decisions: typed questions about one state, each an isolated item behind the state, answered from label probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Any, Literal, TypedDict

import numpy as np

from chunkattn.adapter_salt import LoRARequest, salt_for
from chunkattn.calibration import LabelScale
from chunkattn.calls.decide_head import head_call
from chunkattn.calls.decide_items import DOCUMENTS, QuestionItems, StatesJob, read_documents
from chunkattn.calls.decide_method import MethodFirst, MethodJob
from chunkattn.calls.decide_questions import METHODS, AskedQuestion, ask, check_names, listed_questions, of_state
from chunkattn.calls.decide_verdict import AUTO, HEAD
from chunkattn.calls.frontend import Frontend, check_priorities
from chunkattn.calls.job import Job
from chunkattn.calls.score_job import ScoreJob, total_usage
from chunkattn.decisions import DecisionOutput, Question
from chunkattn.errors import RequestError, shown
from chunkattn.outputs import ScoreOutput
from chunkattn.parsers.joined import ISOLATED, is_joined, names_of_joined
from chunkattn.parsers.states import State, States, list_states, read_state

_CONTENT_FREE = "N/A"
"""State without content, whose probabilities calibrate the labels."""
FITTED = "fitted"
"""Value of `calibrate` that applies the calibration of labels in the calibration file."""


class DecideOptions(TypedDict, total=False):
    """Options of `LLM.decide`, all by name.

    Attributes:
        documents: texts or token ids that become chunks before the state, texts in the engine's `document_template`. The state
            and every question see all of them. Documents in the cache behind the same beginning of the chat template (see
            `LLM.chat`) are not computed again, in any order; None or an empty list for none.
        chunk_mode: see `LLM.generate`. `"joined"` makes one chunk of all documents.
        system: content of a system message before the documents or the state; None for no such message.
        method: `"auto"` is `"head"` for a decision model. For others it is `"letters"` or `"likelihood"`, whichever answers the
            built-in questions better (see `EngineConfig.decide_method`).
            `"letters"` lists the options under letters, or levels under numbers, and reads the letters' probabilities. A
            question with more options than there are letters is asked by `"likelihood"`.
            `"likelihood"` reads the probability of each option's own text as the answer; descriptions are not read.
            `"head"` asks by the prompt and the head of a decision model, options in the caller's order.
            `"separate"` asks for each option alone whether it is right, and normalises the odds. All ask a predicate by yes or
            no.
        calibrate: divide the probability of each label by its probability behind the state "N/A", without documents, before
            they are normalised; with `"likelihood"` the probability of each text, and with `"separate"` the odds. `label_mass`
            stays as it is. `"fitted"` applies the calibration of labels in the calibration file instead (see
            `chunkattn calibrate`), with `"likelihood"` after that division.
        cache_salt: see `LLM.generate`.
        lora_request: see `LLM.generate`; one adapter for the call.
        priority: see `LLM.generate`; one value for the call.
        chat_template_kwargs: variables of the chat template. `enable_thinking` and `thinking` default to False.
    """

    documents: Sequence[str | Sequence[int]] | None
    chunk_mode: str
    system: str | None
    method: str
    calibrate: bool | Literal["fitted"]
    cache_salt: str | None
    lora_request: LoRARequest | None
    priority: int
    chat_template_kwargs: Mapping[str, Any] | None


def decide_call(
    frontend: Frontend,
    state: State | States,
    questions: Sequence[Question],
    *,
    documents: Sequence[str | Sequence[int]] | None = None,
    chunk_mode: str = ISOLATED,
    system: str | None = None,
    method: str = AUTO,
    calibrate: bool | Literal["fitted"] = False,
    cache_salt: str | None = None,
    lora_request: LoRARequest | None = None,
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
    options = DecideOptions(
        documents=documents,
        chunk_mode=chunk_mode,
        system=system,
        calibrate=calibrate,
        cache_salt=salt_for(lora_request, cache_salt),
        priority=priority,
        chat_template_kwargs=chat_template_kwargs,
    )
    by = partial(_decide_by, frontend, state, questions, options)
    known = frontend.decide_method if method == AUTO else method
    return MethodFirst(method_job(frontend), by) if known is None else by(known)


def method_job(frontend: Frontend) -> MethodJob:
    """Return the job that finds the method of decisions by default.

    Args:
        frontend: frontend of the engine.
    """
    return MethodJob(frontend, lambda probe, method: decide_call(frontend, probe.state, probe.questions, method=method))


def _decide_by(
    frontend: Frontend, state: State | States, questions: Sequence[Question], options: DecideOptions, method: str
) -> Job[Any]:
    """Return the call by a method; see `decide_call`."""
    if method == HEAD:
        return head_call(frontend, state, questions, options)
    frontend.check_language_head("method")
    limits, calibrate, system, cache_salt = frontend.limits, options["calibrate"], options["system"], options["cache_salt"]
    if limits.num_labels is not None:
        raise RequestError("this checkpoint is a sequence classifier and answers no questions; score it", param="questions")
    if method not in METHODS:
        raise RequestError(f"method must be one of {', '.join((AUTO, *METHODS, HEAD))}, got {shown(method)}", param="method")
    if not isinstance(calibrate, bool) and calibrate != FITTED:
        raise RequestError(f"calibrate must be True, False or {FITTED!r}, got {shown(calibrate)}", param="calibrate")
    scales = frontend.label_scales if calibrate == FITTED else {}
    if calibrate == FITTED and not scales:
        reason = "this engine has no calibration file with labels; make one with chunkattn calibrate"
        raise RequestError(f"calibrate is {FITTED!r}, and {reason}", param="calibrate")
    if system is not None and (not isinstance(system, str) or not system.strip()):
        raise RequestError(f"system must be a string that is not empty, got {shown(system)}", param="system")
    states = list_states(state)
    text = read_state(state) if states is None else ""
    listed, parts = listed_questions(limits, questions)
    joins = is_joined(options["chunk_mode"])
    chunks = [] if options["documents"] is None else read_documents(frontend, options["documents"], joins=joins)
    labels = frontend.answer_labels(system, options["chat_template_kwargs"])
    template = labels.template
    asked = [ask(question, method, labels, part) for question, part in zip(listed, parts, strict=True)]
    check_names(listed)
    (rank,) = check_priorities(options["priority"], 1)
    documents = names_of_joined(DOCUMENTS) if joins else DOCUMENTS
    make = partial(QuestionItems, frontend, template, cache_salt=cache_salt, priority=rank)
    items = make(asked, parts, chunks, document_names=documents)
    finish = partial(_decisions, asked, method, scales)
    divided = [calibrate is True or (calibrate == FITTED and question.kind == "likelihood") for question in asked]
    empty = []
    if any(divided):
        some, names = [*compress(asked, divided)], [*compress(parts, divided)]
        free = make(some, names, [])
        ids = free.state_ids(_CONTENT_FREE)
        free.check(ids)
        empty = [free.behind_state(ids)]
    if states is None:
        ids = items.state_ids(text)
        items.check(ids)
        return ScoreJob(frontend, [items.behind_state(ids), *empty], finish, 1)
    tokens, state_ids = items.document_tokens + sum(call.tokens()[items.algorithm] for call in empty), []
    for number, entry in enumerate(states):
        with of_state(number):
            ids = items.state_ids(read_state(entry))
            items.check(ids)
        tokens += items.tokens(ids)
        limits.check_tokens(tokens, f"the first {number + 1} states with their questions", "state")
        state_ids.append(np.asarray(ids, np.int32))
    return StatesJob(frontend, state_ids, items, finish, empty=empty[0] if empty else None)


def _decisions(
    asked: Sequence[AskedQuestion], method: str, scales: Mapping[str, LabelScale], outputs: Sequence[ScoreOutput]
) -> DecisionOutput:
    """Return the answers.

    Args:
        asked: the questions.
        method: see `DecideOptions`.
        scales: calibration of the labels by kind; empty for none.
        outputs: scores behind the state, and then those behind the content-free state of the questions that are divided by
            them.
    """
    rows, *empty_rows = (iter(output.logprobs or []) for output in outputs)
    answers = []
    for question in asked:
        item_rows = [next(rows) for _ in question.items]
        # With fitted labels, only texts are divided by their probability behind the content-free state.
        is_divided = empty_rows and (not scales or question.kind == "likelihood")
        empty = [next(empty_rows[0]) for _ in question.items] if is_divided else None
        answers.append(question.answer(item_rows, empty, scales.get(question.kind)))
    return DecisionOutput(answers, total_usage(outputs), method)
