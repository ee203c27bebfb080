"""Decisions of a data file by every method, measured against the right answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

import numpy as np
from jaxtyping import Float64

from chunkattn.calls.decide import FITTED, DecideOptions
from chunkattn.calls.decide_questions import METHODS, ask
from chunkattn.calls.decide_verdict import HEAD
from chunkattn.decisions import Answer, Choice, PredicateAnswer
from chunkattn.decisions import Question as Asked
from chunkattn.llm import LLM
from chunkattn.parsers.states import OneState, read_state
from chunkattn.tools.eval.data import Decisions, at_line
from chunkattn.tools.eval.measures import Mean, mean_of, percentile_interval
from chunkattn.tools.eval.report import Row, interval_text
from chunkattn.tools.eval.results import Results, result_key

BINS = 10
"""Bins of the expected calibration error, of equal width."""
_RESAMPLES = 2_000
_SEED = 0

Calibrate = bool | Literal["fitted"]
Shares = list[Float64[np.ndarray, " N"]]
"""Probabilities of the options of each question of a line, in the data's order."""


@dataclass(frozen=True)
class Way:
    """Method and calibration of `LLM.decide`."""

    method: str
    calibrate: Calibrate = False

    @property
    def name(self) -> str:
        """Return the name in tables, such as `likelihood, N/A`."""
        return self.method + {False: "", True: ", N/A", FITTED: ", fitted"}[self.calibrate]


WAYS = tuple(Way(method, calibrate) for method in METHODS for calibrate in (False, True))
"""Every method without and with division by the probabilities behind the content-free state."""


def ways_of(llm: LLM) -> list[Way]:
    """Return the ways that an engine can answer in; the first is the baseline.

    Args:
        llm: engine; with a calibration of labels it has three more ways, and a decision model has its head first.
    """
    frontend = llm.frontend
    head = [Way(HEAD)] if frontend.head_prompts is not None else []
    if not frontend.has_language_head:
        return head
    fitted = [Way(method, cast("Calibrate", FITTED)) for method in METHODS if frontend.label_scales]
    return [*head, *sorted([*WAYS, *fitted], key=lambda way: METHODS.index(way.method))]


@dataclass(frozen=True)
class WayAnswers:
    """Answers to all questions of a file in one way.

    Attributes:
        shares: probabilities of each line's questions.
        turned: the same for the options in reverse order, put into the data's order.
    """

    shares: list[Shares]
    turned: list[Shares]


def examine(
    llm: LLM,
    lines: Sequence[Decisions],
    ways: Sequence[Way],
    results: Results,
    advance: Callable[[int], None],
    template_options: Mapping[str, Any] | None = None,
) -> dict[Way, WayAnswers]:
    """Ask all questions in every way.

    Args:
        llm: engine.
        lines: states, questions and right answers.
        ways: methods and calibrations.
        results: earlier results; new results are added.
        advance: called with 1 after every line.
        template_options: variables of the chat template.

    Raises:
        RequestError: a line cannot be asked. The message names the line.
        EngineError: a step failed.
    """
    engine = [llm.core.runner.fingerprint().hex(), llm.config.model]
    scales = {kind: asdict(scale) for kind, scale in llm.frontend.label_scales.items()}
    answers = {way: WayAnswers([], []) for way in ways}
    for line in lines:
        text, names = read_state(line.state), [*map(repr, line.questions)]
        for way, answer in answers.items():
            with at_line(line.line):
                tokens = _tokens(llm, line.state, line.questions, way.method, template_options)
                fit = [scales] if way.calibrate == FITTED else []
                key = result_key("decisions", *engine, text, names, tokens, way.method, way.calibrate, *fit)
                if key not in results:
                    values = [
                        _ask(llm, OneState(line.state), asked, way, template_options)
                        for asked in (line.questions, _turned(line.questions))
                    ]
                    results.add([{"key": key, "line": line.line, "way": way.name, "shares": values[0], "turned": values[1]}])
            answer.shares.append([np.asarray(shares) for shares in results[key]["shares"]])
            turned = zip(line.questions, results[key]["turned"], strict=True)
            answer.turned.append([np.asarray(shares[::-1] if isinstance(q, Choice) else shares) for q, shares in turned])
        advance(1)
    return answers


def _tokens(
    llm: LLM, state: Any, questions: Sequence[Asked], method: str, template_options: Mapping[str, Any] | None
) -> list[Sequence[int]]:
    """Return the token ids of a line's prompts and labels, which follow from the tokenizer and its chat template.

    Of a head, they are those of its own prompts, and the head's digest comes first.
    """
    if method == HEAD:
        assert llm.frontend.head_prompts is not None
        return llm.frontend.head_prompts.tokens(state, questions)
    labels, plain = llm.frontend.answer_labels(None, template_options), llm.frontend.plain
    tokens: list[Sequence[int]] = [labels.template.prefix(read_state(state))]
    for number, question in enumerate(questions):
        asked = ask(question, method, labels, part := f"question {number}")
        tokens += [asked.label_ids, *(labels.template.item(pieces, part) for pieces in asked.items)]
        tokens += [plain.fill(["", text], part, "questions") for text in asked.texts]
    return tokens


def _ask(
    llm: LLM, state: OneState, questions: Sequence[Asked], way: Way, template_options: Mapping[str, Any] | None
) -> list[list[float]]:
    options: DecideOptions = {"method": way.method, "calibrate": way.calibrate, "chat_template_kwargs": template_options}
    output = llm.decide(state, questions, use_tqdm=False, **options)
    return [shares_of(answer) for answer in output.answers]


def shares_of(answer: Answer) -> list[float]:
    """Return the probabilities of an answer in the caller's order; of a predicate, those of yes and no."""
    if isinstance(answer, PredicateAnswer):
        return [answer.probability, 1 - answer.probability]
    return [*answer.probabilities.values()]


def _turned(questions: Sequence[Asked]) -> list[Asked]:
    return [replace(q, options=[*q.options][::-1]) if isinstance(q, Choice) else q for q in questions]


# Measures


def compare(lines: Sequence[Decisions], answers: dict[Way, WayAnswers]) -> list[Row]:
    """Return one row per way, with intervals of the paired differences from the first way. A line is the unit of an interval.

    Args:
        lines: questions and right answers.
        answers: answers in every way.
    """
    values = {way: _values(lines, answer) for way, answer in answers.items()}
    base = next(iter(values.values()))
    rows = []
    for way, measures in values.items():
        means = {name: mean_of(listed) for name, listed in measures.items()}
        means = {"accuracy": means.pop("accuracy"), "Brier": means.pop("Brier"), "ECE": _ece(lines, answers[way]), **means}
        changes = {name: mean_of(measures[name] - base[name]) for name in ("accuracy", "Brier")}
        rows.append(Row(way.name, means, None if measures is base else changes))
    return rows


def _values(lines: Sequence[Decisions], answers: WayAnswers) -> dict[str, np.ndarray]:
    """Return the mean of every measure over the questions of each line, float64 `[lines]`."""
    pairs = [list(zip(line.answers, shares, strict=True)) for line, shares in zip(lines, answers.shares, strict=True)]
    values = {
        "accuracy": np.asarray([np.mean([shares.argmax() == right for right, shares in line]) for line in pairs]),
        "Brier": np.asarray([np.mean([brier(shares, right) for right, shares in line]) for line in pairs]),
    }
    flips = []
    for line, shares, turned in zip(lines, answers.shares, answers.turned, strict=True):
        places = [n for n, asked in enumerate(line.questions) if isinstance(asked, Choice)]
        if places:
            flips.append(np.mean([shares[n].argmax() != turned[n].argmax() for n in places]))
    return {**values, "flips": np.asarray(flips)} if flips else values


def brier(shares: Float64[np.ndarray, " N"], right: int) -> float:
    """Return the sum of the squared differences between the probabilities and the right answer: 0 to 2.

    Args:
        shares: probability of each option.
        right: place of the right option.

    Source: Brier, "Verification of forecasts expressed in terms of probability", Monthly Weather Review 78 (1950).
    """
    return float(np.square(shares).sum() - 2 * shares[right] + 1)


def ece(tops: Float64[np.ndarray, " Q"], hits: Float64[np.ndarray, " Q"]) -> float:
    """Return the expected calibration error over `BINS` bins of equal width.

    Args:
        tops: probability of the likeliest option of each question.
        hits: 1 where the likeliest option is right, else 0.

    Source: Guo et al., "On calibration of modern neural networks", arXiv:1706.04599.
    """
    bins = np.minimum((tops * BINS).astype(int), BINS - 1)
    return float(np.abs(np.bincount(bins, hits - tops, BINS)).sum() / len(tops))


def _ece(lines: Sequence[Decisions], answers: WayAnswers) -> Mean:
    """Return the expected calibration error with its percentile bootstrap interval over the lines."""
    tops = [np.asarray([share.max() for share in shares]) for shares in answers.shares]
    places = [np.asarray([share.argmax() for share in shares]) for shares in answers.shares]
    hits = [(place == line.answers).astype(np.float64) for place, line in zip(places, lines, strict=True)]
    value, count = ece(np.concatenate(tops), np.concatenate(hits)), len(lines)
    if count < 2:
        return Mean(value, -np.inf, np.inf, np.inf, count)
    rng, errors = np.random.default_rng(_SEED), []
    for _ in range(_RESAMPLES):
        drawn = rng.integers(0, count, count)
        errors.append(ece(np.concatenate([tops[n] for n in drawn]), np.concatenate([hits[n] for n in drawn])))
    return Mean(value, *percentile_interval(errors), float(np.std(errors)), count)


def conclusion(rows: Sequence[Row], count: int) -> str:
    """Return which way answers best, and whether the questions tell it from the first way.

    Args:
        rows: rows of `compare`.
        count: number of lines.
    """
    base, best = rows[0], max(rows, key=lambda row: row.means["accuracy"].mean)
    right = f"{best.means['accuracy'].mean:.3f}"
    if best is base or best.against_full is None:
        return f"No way answers more questions right than {base.name}, with an accuracy of {right}."
    change = best.against_full["accuracy"]
    doubt = "" if change.sign else f", but {count} lines cannot tell this difference from none"
    return (
        f"{best.name} answers most questions right: accuracy {right}, {change.mean:+.3f} {interval_text(change, 3)} "
        f"against {base.name}{doubt}."
    )
