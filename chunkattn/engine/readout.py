"""Readouts of a step: the values of its rows, collected for each request until the request has all of its rows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from chunkattn.engine.compile_clock import COMPILING
from chunkattn.engine.grammars import Grammars
from chunkattn.engine.masks import mask_input, take_token
from chunkattn.engine.messages import (
    CachedTokens,
    EngineOutput,
    PromptLogprobsOutput,
    ScoreRequest,
    ScoreResult,
    StepRates,
    TokenLogprobs,
    TokenOutput,
)
from chunkattn.engine.metrics import EngineMetrics
from chunkattn.engine.rates import RateMeter
from chunkattn.engine.request import Request, Sample
from chunkattn.engine.row_reader import Reading
from chunkattn.engine.runner import Runner
from chunkattn.engine.sample_inputs import sampling_blocks
from chunkattn.engine.step import SampleRow, Step
from chunkattn.request_record import RequestStats

PromptValues = tuple[float, int, np.ndarray, np.ndarray]
"""Log-probability and rank of a prompt token, and ids and log-probabilities of the likeliest tokens."""
_Drawn = tuple[list[int], list[int | None], Reading[tuple[np.ndarray, TokenLogprobs | None, np.ndarray]]]
"""Rows of a block, the number of likeliest tokens that each asks for, and the readout of the block."""
_NOTHING = np.empty(0, np.float32)


@dataclass(frozen=True)
class StepResult:
    """Values read from one step.

    Attributes:
        finite: bool `[T]`, False for rows whose hidden state, or whose logits where they are read, are not finite.
        tokens: token and, if requested, its log-probabilities for each of `Step.samples`.
        scores: float32 log-probabilities or logits of the labels, or a classifier's logits, for each of `Step.scores`.
        prompt_logprobs: log-probability and rank of the token that each of `Step.prompt_logprobs` predicts, and ids and
            log-probabilities of the likeliest tokens. Where no rank is asked for, it is 0, and no likeliest token is there.
    """

    finite: np.ndarray
    tokens: list[tuple[int, TokenLogprobs | None]]
    scores: list[np.ndarray]
    prompt_logprobs: list[PromptValues]


def start_reading(
    runner: Runner, step: Step, hidden: jax.Array, finite: jax.Array, grammars: Grammars | None = None
) -> Reading[StepResult]:
    """Send all readouts of a step to the device, so that the host waits once for all.

    The host makes the arrays of the readouts while the device computes.

    Args:
        runner: runner that has run the step.
        step: the step.
        hidden: float32 `[T, hidden]` hidden states of the step.
        finite: bool `[T]`, whether all hidden values of a row are finite.
        grammars: grammars of the engine's requests; None if no request has one.
    """
    drawn: list[_Drawn] = []
    samples = [row for row in step.samples if not row[1].request.prompt_only]
    for block, parameters, edits in sampling_blocks(samples, runner.spec.vocab_size, runner.sample_sizes):
        rows, num_top = [row for row, _, _ in block], [sample.params.logprobs for _, sample, _ in block]
        with_logprobs = any(w is not None for w in num_top)
        mask = None if grammars is None else mask_input(block, len(parameters.top_k), runner.spec.vocab_size, grammars)
        drawn.append((rows, num_top, runner.sample(hidden, rows, parameters, edits, with_logprobs, mask)))
    scored = [row for row, _, _ in step.scores]
    scores = _start_scores(runner, step, hidden, scored) if scored else None
    predicting = [row for row, _, _ in step.prompt_logprobs]
    prompts = _start_prompts(runner, step, hidden, predicting) if predicting else None

    def finish(arrays: tuple[np.ndarray, list[Any], Any, Any]) -> StepResult:
        all_finite, of_drawn, of_scores, of_prompts = arrays
        all_finite = np.array(all_finite)
        tokens, read_scores, read_prompts = list[tuple[int, TokenLogprobs | None]](), list[np.ndarray](), list[PromptValues]()
        for (rows, num_top, reading), values in zip(drawn, of_drawn, strict=True):
            chosen, read, fine = reading.finish(values)
            logprobs = [None if w is None else _to_logprobs(read, i, w) for i, w in enumerate(num_top)]
            tokens += zip(chosen[: len(rows)].tolist(), logprobs, strict=True)
            all_finite[rows] &= fine[: len(rows)]
        in_order = iter(tokens)
        tokens = [(0, None) if sample.request.prompt_only else next(in_order) for _, sample, _ in step.samples]
        if scores is not None:
            read_scores, fine = scores.finish(of_scores)
            all_finite[scored] &= fine
        if prompts is not None:
            read_prompts, fine = prompts.finish(of_prompts)
            all_finite[predicting] &= fine
        return StepResult(all_finite, tokens, read_scores, read_prompts)

    of_drawn = [reading.arrays for _, _, reading in drawn]
    return Reading((finite, of_drawn, scores and scores.arrays, prompts and prompts.arrays), finish)


def _at_places(
    count: int, nothing: Any, readings: Sequence[tuple[Sequence[int], Reading[Any]]]
) -> Reading[tuple[list[Any], np.ndarray]]:
    """Return one readout of several.

    Args:
        count: number of rows.
        nothing: value of a row that no readout has.
        readings: places of some rows, and the readout of their values and of whether their logits are finite.
    """

    def finish(arrays: list[Any]) -> tuple[list[Any], np.ndarray]:
        values, finite = [nothing] * count, np.empty(count, bool)
        for (places, reading), of_reading in zip(readings, arrays, strict=True):
            found, finite[places] = reading.finish(of_reading)
            for place, value in zip(places, found, strict=True):
                values[place] = value
        return values, finite

    return Reading([reading.arrays for _, reading in readings], finish)


def _start_prompts(
    runner: Runner, step: Step, hidden: jax.Array, rows: list[int]
) -> Reading[tuple[list[PromptValues], np.ndarray]]:
    """Read the values of each row that predicts a prompt token, and whether its logits are finite."""
    ids = [int(request.layout.token_ids[index]) for _, request, index in step.prompt_logprobs]
    ranked = np.array([request.ranked for _, request, _ in step.prompt_logprobs])
    readings: list[tuple[Sequence[int], Reading[Any]]] = []
    if len(places := np.flatnonzero(ranked).tolist()):
        arrays, finish_read = runner.token_logprobs(hidden, [rows[p] for p in places], [ids[p] for p in places])

        def finish_ranked(arrays: Any) -> tuple[list[PromptValues], np.ndarray]:
            read, finite = finish_read(arrays)
            return [(target, rank, top_ids, top) for target, rank, top_ids, top in zip(*read, strict=True)], finite

        readings.append((places, Reading(arrays, finish_ranked)))
    if len(places := np.flatnonzero(~ranked).tolist()):
        arrays, finish_labels = runner.label_logprobs(hidden, [rows[p] for p in places], [(ids[p],) for p in places])

        def finish_plain(arrays: Any) -> tuple[list[PromptValues], np.ndarray]:
            logprobs, finite = finish_labels(arrays)
            return [(target, 0, _NOTHING, _NOTHING) for (target,) in logprobs], finite

        readings.append((places, Reading(arrays, finish_plain)))
    return _at_places(len(rows), (0.0, 0, _NOTHING, _NOTHING), readings)


def _start_scores(
    runner: Runner, step: Step, hidden: jax.Array, rows: list[int]
) -> Reading[tuple[list[np.ndarray], np.ndarray]]:
    """Read the values of each score row, and whether its logits are finite."""
    if runner.spec.num_labels is not None:
        return runner.class_logits(hidden, rows)
    scores = [(request.score, number) for _, request, number in step.scores if request.score]
    states = [place for place, (score, _) in enumerate(scores) if score.hidden]
    if not states:
        return _start_labels(runner, hidden, rows, scores)
    others = sorted({*range(len(rows))} - {*states})
    read = runner.hidden_states(hidden, [rows[place] for place in states])
    readings: list[tuple[Sequence[int], Reading[Any]]] = [(states, read)]
    if others:
        labelled = _start_labels(runner, hidden, [rows[p] for p in others], [scores[p] for p in others])
        readings.append((others, labelled))
    return _at_places(len(rows), _NOTHING, readings)


def _start_labels(
    runner: Runner, hidden: jax.Array, rows: list[int], scores: list[tuple[ScoreRequest, int]]
) -> Reading[tuple[list[np.ndarray], np.ndarray]]:
    """Read the labels of rows."""
    labels = [score.labels_of(number) for score, number in scores]
    logprobs = runner.label_logprobs(hidden, rows, labels)
    raw = [place for place, (score, _) in enumerate(scores) if score.raw]
    if not raw:
        return logprobs
    logits = runner.label_logits(hidden, [rows[place] for place in raw], [labels[place] for place in raw])

    def finish(arrays: tuple[Any, Any]) -> tuple[list[np.ndarray], np.ndarray]:
        values, finite = logprobs.finish(arrays[0])
        for place, value in zip(raw, logits.finish(arrays[1]), strict=True):
            values[place] = value
        return values, finite

    return Reading((logprobs.arrays, logits.arrays), finish)


def _to_logprobs(values: TokenLogprobs | None, row: int, num_top: int) -> TokenLogprobs:
    """Return the log-probabilities of one row, with `num_top` of the likeliest tokens."""
    assert values is not None
    rows = slice(row, row + 1)
    return TokenLogprobs(values.target[rows], values.rank[rows], values.top_ids[rows, :num_top], values.top[rows, :num_top])


def collect(step: Step, result: StepResult, taken: np.ndarray, meter: RateMeter) -> Iterator[EngineOutput]:
    """Give the rows of one step to their requests. Yield the outputs of the requests whose last row is among them.

    Args:
        step: the step.
        result: values read from the step.
        taken: bool `[T]`, whether the values of a row count.
        meter: meter whose rates score results carry.
    """
    for (row, request, index), scores in zip(step.scores, result.scores, strict=True):
        if taken[row] and (rows := _add_row(request, index, scores)):
            scored = score_result(request, rows, meter.rates)
            request.values = None  # not before: what fails is read again
            yield scored
    for (row, request, index), values in zip(step.prompt_logprobs, result.prompt_logprobs, strict=True):
        if taken[row] and (rows := _add_row(request, int(request.user_index[index]), values)):
            output = prompt_output(request, rows)
            request.values = None
            yield output


def _add_row(request: Request, index: int, values: object) -> dict[int, Any] | None:
    """Keep the values of a row. Return all rows of the request if the row was the last."""
    rows = request.values
    if rows is None:  # the request was answered before its sample restarted
        return None
    rows[index] = values
    return rows if len(rows) == len(request.logprob_rows if request.score is None else request.score.rows) else None


def score_result(request: Request, rows: dict[int, Any], rates: StepRates) -> ScoreResult:
    """Return label log-probabilities, or a classifier's logits, in the order of the request's rows."""
    values = np.full((len(rows), max(map(len, rows.values()))), -np.inf, np.float32)
    for number, row in rows.items():
        values[number, : len(row)] = row
    return ScoreResult(request.request_id, values, rates, int(request.computed.sum()), request_stats(request))


def prompt_output(request: Request, rows: dict[int, Any]) -> PromptLogprobsOutput:
    """Return the prompt log-probabilities collected, by token index in the user's order."""
    assert request.sampling is not None
    tokens, num_top = len(request.layout), request.sampling.prompt_logprobs or 0
    target, rank, known = np.zeros(tokens, np.float32), np.zeros(tokens, np.int32), np.zeros(tokens, bool)
    top_ids, top = np.zeros((tokens, num_top), np.int32), np.zeros((tokens, num_top), np.float32)
    for index, row in rows.items():
        target[index], rank[index], known[index] = row[0], row[1], True
        top_ids[index], top[index] = row[2][:num_top], row[3][:num_top]
    return PromptLogprobsOutput(request.request_id, TokenLogprobs(target, rank, top_ids, top), known)


def accept_tokens(
    row: SampleRow,
    drawn: tuple[int, ...],
    logprobs: TokenLogprobs | None,
    outputs: list[EngineOutput],
    metrics: EngineMetrics,
) -> Sample | None:
    """Append sampled tokens to their sample and to the outputs. Return the sample if the last token ends it.

    A request that only reads its prompt ends by its length. Its output has no token, and its sample a placeholder.

    Args:
        row: row that the tokens are sampled from.
        drawn: the tokens, of which none but the last ends the sample.
        logprobs: log-probabilities of the tokens, if requested.
        outputs: outputs of the step.
        metrics: metrics of the engine.
    """
    _, computed_by, number = row
    request, params, now = computed_by.request, computed_by.params, time.perf_counter()
    sample = next(s for s in request.samples if s.number == number)
    length, cached = len(sample.output_ids) + len(drawn), None
    stats, is_first = None, not sample.output_ids
    if is_first:
        cached = cached_tokens(request)
        if number == 0:
            if not request.prompt_only:
                request.first_token_at = now
                metrics.first_token.observe(now - request.added_at)
            metrics.count_cached(cached, request.layout)
    else:
        metrics.inter_token.observe_many((now - sample.last_token_at) / len(drawn), len(drawn))
    sample.last_token_at = now
    if is_first or request.known_stats != (COMPILING.count, request.preemptions):
        stats = request_stats(request)
    tokens, token, finish_reason, stop_reason = drawn, drawn[-1], None, None
    if request.prompt_only:  # nothing was sampled
        tokens, finish_reason = (), "length"
    elif length > params.min_tokens or request.grammar is not None:
        if token in params.stop_token_ids:
            finish_reason, stop_reason = "stop", token
        elif token in request.eos_token_ids and not params.ignore_eos:
            finish_reason = "stop"
    is_complete = finish_reason is None and request.grammar is not None and take_token(sample, token)
    if is_complete:
        finish_reason = "stop"
    if finish_reason is None and length >= request.max_tokens:
        finish_reason = "length"
    # Adjacent statements leave an interrupt little time between them.
    sample.output_ids += drawn
    name = request.request_id
    outputs.append(TokenOutput(name, number, tokens, logprobs, finish_reason, stop_reason, cached, stats, is_complete))
    return sample if finish_reason else None


def split_at_stops(
    sample: Sample, tokens: tuple[int, ...], logprobs: TokenLogprobs | None
) -> Iterator[tuple[tuple[int, ...], TokenLogprobs | None]]:
    """Yield tokens and their log-probabilities for one output each: one by one if a stop string may end the text at any."""
    if not sample.params.stop:
        if tokens:
            yield tokens, logprobs
        return
    for number, token in enumerate(tokens):
        values = None if logprobs is None else TokenLogprobs(*(x[number : number + 1] for x in logprobs))
        yield (token,), values


def request_stats(request: Request) -> RequestStats:
    """Return the waits and cache hits of a request so far. Call it in the engine's thread, whose compilations count."""
    request.known_stats = COMPILING.count, request.preemptions
    computed, layout = request.computed, request.layout
    chunks = computed[layout.prefix_len : layout.question_start]
    return RequestStats(
        queue_s=(request.admitted_at or time.perf_counter()) - request.added_at,
        first_token_s=None if request.first_token_at is None else request.first_token_at - request.added_at,
        compile_s=COMPILING.seconds(request.added_at),
        preemptions=request.preemptions,
        cached_tokens=len(computed) - int(computed.sum()),
        cached_chunk_tokens=len(chunks) - int(chunks.sum()),
    )


def cached_tokens(request: Request) -> CachedTokens:
    """Return the number of prompt tokens that the request did not compute, by part."""
    cached = ~request.computed
    prefix, *chunks, question = (int(cached[s.start : s.end].sum()) for s in request.layout.segments)
    order, kept = np.argsort(request.chunk_order).tolist(), request.kept_states
    states = () if kept is None else tuple(place in kept for place in order)
    return CachedTokens(prefix, tuple(chunks[place] for place in order), question, states)
