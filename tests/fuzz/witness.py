"""Independent answers: one sequence at a time, on an engine that shares nothing."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from chunkattn import ChunkLayout, SamplingParams, make_layout
from chunkattn.config import make_config
from chunkattn.engine.build import build_core
from chunkattn.engine.core import EngineCore
from chunkattn.engine.messages import EngineOutput, ScoreRequest, ScoreResult
from chunkattn.models.loader import open_files
from tests.fuzz.calls import RERANK_LABELS, Ask, Call, Generate, Sample, Score, continued
from tests.fuzz.decisions import Decide, expected_answers, numbers_of, prompts, rows_of
from tests.fuzz.focus import Choose, best, composed, score_of, scored_layout
from tests.fuzz.patterns import pattern_of
from tests.fuzz.rig import VOCAB, Subject, forced
from tests.fuzz.routers import Routing

_MOST_SAMPLED = 48
_REMEMBERED = 4000
_TIES = 0.02
"""Largest share of routers' choices that rounding may change."""


class Difference(Exception):
    """An answer that is not what the witness gives, or a broken invariant.

    Attributes:
        ask: whose answer it is; None of an invariant.
    """

    def __init__(self, what: str, ask: Ask | None = None) -> None:
        super().__init__(what)
        self.ask = ask


class Witness(Protocol):
    """Knows the right log-probabilities, within a tolerance."""

    name: str
    tolerance: float

    def logprobs(self, layout: ChunkLayout) -> np.ndarray:
        """float32 `[T, vocab]`: the next token's log-probabilities at every token of a layout that ends in a question."""
        ...


class ColdEngine:
    """An idle engine without a cache that runs one sequence alone, in one pass under a dense mask.

    A dense pass has no pages, spans or schedule, so it shares with the engine under test the model alone. Answers are
    remembered by content. A model with recurrent layers runs the prompt as one part, with the form of these layers that is not
    under test. Where the model has experts, the pass takes over those of an engine with the attention backend and
    the weights under test.

    Attributes:
        tolerance: see `Witness`.
        routing: experts that were taken over; None for a model without.
    """

    name = "an engine that shares nothing"

    def __init__(self, model: Path, subject: Subject) -> None:
        self.tolerance = subject.tolerance
        self.routing, self._bound = None, subject.router_tolerance
        self._recurrent = subject.recurrence is not None
        with forced(None if subject.recurrence is None else "xla" if subject.recurrence == "native" else "native"):
            self._core = _idle_engine(model, dtype=subject.dtype)
        if subject.experts is not None:
            tested = {"quantization": subject.quantization, "attention_backend": subject.backend, "block_size": subject.block}
            with forced(subject.recurrence):
                self.routing, self._tested = Routing(), _idle_engine(model, dtype=subject.dtype, **tested)
        self._known: OrderedDict[tuple, np.ndarray] = OrderedDict()

    def logprobs(self, layout: ChunkLayout) -> np.ndarray:
        """See `Witness`."""
        if self._recurrent:
            assert sum(map(bool, layout.chunk_lens)) < 2  # so that every token sees all before it
            layout = replace(layout, prefix_len=0, chunk_lens=(), question_len=len(layout))
        key = layout.token_ids.tobytes(), layout.positions.tobytes(), layout.prefix_len, layout.chunk_lens
        if key not in self._known:
            backend = None if self._recurrent else "packed_dense"
            every = ScoreRequest("", layout, np.arange(len(layout)), (tuple(range(VOCAB)),), backend=backend)
            if self.routing is None:
                self._known[key] = _run(self._core, every)
            else:
                with self.routing.recorded():
                    _run(self._tested, replace(every, backend=None))
                with self.routing.replayed(len(layout)):
                    self._known[key] = _run(self._core, every)
                self._check_routing(self.routing)
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return self._known[key]

    def _check_routing(self, routing: Routing) -> None:
        """Check the experts that the engine under test has chosen."""
        if not routing.largest <= self._bound:
            raise Difference(f"a router's logit of an expert lies {routing.largest:.3g} below one left out")
        if routing.ties > max(10, _TIES * routing.choices):
            raise Difference(f"{routing.ties} of {routing.choices} choices of experts are not those of {self.name}")


def _idle_engine(model: Path, **options: Any) -> EngineCore:
    """Return an engine without a cache that computes a prompt in one step."""
    options |= {"enable_prefix_caching": False, "kv_cache_memory_bytes": 1 << 20, "skip_tokenizer_init": True}
    config = make_config(str(model), options)
    return build_core(config, open_files(config))


def _run(core: EngineCore, request: ScoreRequest) -> np.ndarray:
    """Return the log-probabilities of one request."""
    core.add(request)
    events = list[EngineOutput]()
    while core.has_work:
        events += core.step()
    (event,) = events
    assert isinstance(event, ScoreResult), event
    return event.logprobs


def check(call: Call, witness: Witness) -> None:
    """Compare a finished call with a witness.

    Raises:
        Difference: by more than its tolerance, or a token the witness would not have chosen.
    """
    try:
        _check(call, witness)
    except Difference as difference:
        difference.ask = call.ask
        raise


def _check(call: Call, witness: Witness) -> None:
    if isinstance(call.ask, Generate):
        layout = _check_choice(call, call.ask, witness) if isinstance(call.ask, Choose) else call.ask.layout(call.positions)
        for number, sample in enumerate(call.samples):
            rows = witness.logprobs(continued(layout, sample.tokens[:-1]))
            _check_sample(sample, number, call.ask.sampling, rows[len(layout) - 1 :], witness)
        if call.ask.sampling.prompt_logprobs is not None:
            _check_prompt(call, layout, rows, witness)
    elif isinstance(call.ask, Score):
        _check_scores(call, call.ask, witness)
    elif isinstance(call.ask, Decide):
        _check_decision(call, call.ask, witness)


def _check_choice(call: Call, ask: Choose, witness: Witness) -> ChunkLayout:
    """Compare scores, choice and composed prompt, which is returned."""
    found, documents = call.result[0].focus, ask.prompt.chunks
    if [score is None for score in found.scores] != [not document for document in documents]:
        raise Difference(f"the documents with scores are other ones: {found.scores}")
    scores = {document: score for document, score in zip(documents, found.scores, strict=True) if document}
    own = [scores[document] for document in documents if document]
    if own != [score for score in found.scores if score is not None]:
        raise Difference(f"equal documents have other scores: {found.scores}")
    layouts = [scored_layout(ask, document, call.positions) for document in ask.candidates]
    expected = [score_of(ask, witness.logprobs(layout), RERANK_LABELS) for layout in layouts]
    _compare(np.array([scores[document] for document in ask.candidates]), np.array(expected), "scores of documents", witness)
    chosen = best(ask, scores)
    if found.documents != [documents.index(document) for document in chosen]:
        raise Difference(f"documents {found.documents} are chosen by the scores {found.scores}")
    layout, last = composed(ask, chosen, call.positions), call.requests[call.job.requests[0].request_id].layout
    for name in ("token_ids", "positions", "prefix_len", "chunk_lens", "question_len"):
        if not np.array_equal(getattr(layout, name), getattr(last, name)):
            raise Difference(f"the prompt that shows documents {found.documents} is composed wrong: {name}")
    return layout


def _check_sample(sample: Sample, number: int, params: SamplingParams, rows: np.ndarray, witness: Witness) -> None:
    where = f"sample {number}"
    pattern = None if params.structured_outputs is None else pattern_of(params.structured_outputs)
    length = params.max_tokens if pattern is None else min(params.max_tokens, pattern.most)
    if len(sample.tokens) != length:
        raise Difference(f"{where}: {len(sample.tokens)} tokens, not {length}")
    chosen = rows[np.arange(len(rows)), sample.tokens]
    if params.logprobs is not None:
        _compare(np.array(sample.logprobs), chosen, f"{where}: log-probabilities", witness)
        likeliest = -np.sort(-rows, axis=1)[:, : params.logprobs]
        _compare(np.array(sample.top).reshape(likeliest.shape), likeliest, f"{where}: likeliest log-probabilities", witness)
    values = rows
    if params.temperature:
        values = rows / params.temperature + _noise(params.seed or 0, number)[: len(rows)]
    if pattern is not None:
        values = np.where(pattern.allowed(length), values, -np.inf)
    # The likeliest token, or one that ties with it.
    short = values.max(axis=1) - values[np.arange(len(rows)), sample.tokens]
    if (short > 2 * witness.tolerance / (params.temperature or 1)).any():
        place = int(np.argmax(short > 2 * witness.tolerance))
        raise Difference(f"{where}: token {place} is {sample.tokens[place]}, not {values[place].argmax()}")


def _noise(seed: int, sample: int) -> np.ndarray:
    """Gumbel noise float32 `[_MOST_SAMPLED, vocab]` of a sample's tokens: seed, sample and place decide it alone."""
    return np.asarray(_draw(np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32), sample))


@jax.jit
def _draw(key: jax.Array, sample: jax.Array) -> jax.Array:
    of_sample = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), sample)
    places = jnp.arange(_MOST_SAMPLED)
    return jax.vmap(lambda place: jax.random.gumbel(jax.random.fold_in(of_sample, place), (VOCAB,)))(places)


def _check_prompt(call: Call, layout: ChunkLayout, rows: np.ndarray, witness: Witness) -> None:
    places, found = layout.known_rows, call.prompt_logprobs
    if not len(places):
        return
    if found is None or np.flatnonzero(found.known).tolist() != (places + 1).tolist():
        raise Difference("prompt log-probabilities are missing, or of other tokens")
    expected = rows[places, layout.token_ids[places + 1]]
    _compare(found.logprobs.target[places + 1], expected, "prompt log-probabilities", witness)


def _check_scores(call: Call, ask: Score, witness: Witness) -> None:
    rows = [witness.logprobs(make_layout([], [], ids))[-1] for ids in ask.sequences()]
    expected = [row[list(ask.labels_of(number))].astype(np.float64) for number, row in enumerate(rows)]
    output = call.result
    if ask.rerank:
        relevance = np.zeros(len(rows))
        for result in output.results:
            relevance[result.index] = result.relevance_score
        yes, no = np.stack(expected).T
        _compare(relevance, 1 / (1 + np.exp(no - yes)), "relevance", witness)
    else:
        for number, (found, own) in enumerate(zip(output.logprobs, expected, strict=True)):
            _compare(np.array(found), own, f"label log-probabilities of item {number}", witness)


def _check_decision(call: Call, ask: Decide, witness: Witness) -> None:
    """Compare every row with the witness, and every answer with the one that follows from the rows."""
    rows = rows_of(call.job)
    for found, items in zip(rows, prompts(ask, call.positions), strict=True):
        for number, (row, (layout, item)) in enumerate(zip(found, items, strict=True)):
            expected, count = witness.logprobs(layout), len(item.answer)
            own = expected[np.arange(-count, 0), list(item.answer)] if count else expected[-1, list(item.labels)]
            _compare(row, own, f"log-probabilities of item {number}", witness)
    answers = call.result.answers
    for number, (answer, own) in enumerate(zip(answers, expected_answers(ask, rows), strict=True)):
        if not np.allclose(numbers_of(ask.questions[number], answer), own, rtol=1e-9):
            raise Difference(f"answer {number} is {answer}, and its label mass and probabilities are {own}")


def _compare(found: np.ndarray, expected: np.ndarray, what: str, witness: Witness) -> None:
    if found.shape != expected.shape:
        raise Difference(f"{what}: shape {found.shape}, not {expected.shape}")
    error = np.abs(found - expected).max(initial=0.0)
    if not error <= witness.tolerance:  # NaN compares false
        raise Difference(f"{what} differ by {error:.3g}, against {witness.name}")
