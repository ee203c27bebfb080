"""Calls on the engine under test: what is asked, the requests it becomes, and what comes back.

An *ask* is plain data, so that it can be printed, sent again and compared. A `Call` is an ask on its way.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np

from chunkattn import ChunkedPrompt, ChunkLayout, SamplingParams, make_layout
from chunkattn.calls.frontend import Frontend
from chunkattn.calls.generate import GenerateJob, generate_job
from chunkattn.calls.job import Ask as Stage
from chunkattn.calls.job import CheckShape, LookUp, Returned, advance
from chunkattn.calls.precompute import precompute_job
from chunkattn.calls.rerank import rerank_call
from chunkattn.calls.rerank_template import PLAIN
from chunkattn.calls.score_inputs import score_call
from chunkattn.engine.messages import (
    CachedTokens,
    EngineOutput,
    GenerateRequest,
    Message,
    PromptLogprobsOutput,
    ScoreRequest,
    TokenOutput,
)
from tests.fuzz.decisions import Decide
from tests.fuzz.prompts import Ids, Prompt, joined
from tests.fuzz.rig import POSITIONS, SEPARATOR_ID, words

RERANK_LABELS = (SEPARATOR_ID - 2, SEPARATOR_ID - 1)


def shares(sampling: SamplingParams) -> bool:
    """Return whether a prompt reads the cache and leaves something in it."""
    return not sampling.skip_reading_prefix_cache and sampling.prompt_logprobs is None


def positions_of(frontend: Frontend) -> str:
    """Return the name in `POSITIONS` of an engine's strategy and gap."""
    found = frontend.config.position_strategy, frontend.config.calibration.chunk_position_gap
    return next(name for name, value in POSITIONS.items() if value == found)


@dataclass(frozen=True)
class Generate:
    """Continue a prompt, sent in one of `Prompt.forms`, or with its chunks "joined"."""

    prompt: Prompt
    form: str
    sampling: SamplingParams
    salt: str | None = None
    priority: int = 0

    def layout(self, positions: str) -> ChunkLayout:
        """The prompt as the parser must read it."""
        prefix, chunks, question = self.prompt
        chunks = joined(chunks) if self.form == "joined" else chunks
        return make_layout(prefix, chunks, question, *POSITIONS[positions])

    def job(self, frontend: Frontend) -> Any:
        """Parse the prompt; it must come out as `layout`."""
        (parsed,) = self._parse(frontend)
        expected = self.layout(positions_of(frontend))
        for name in ("token_ids", "positions", "prefix_len", "chunk_lens", "question_len"):
            assert np.array_equal(getattr(parsed.layout, name), getattr(expected, name)), (
                f"{describe(self)} is parsed wrong: {name}"
            )
        return generate_job(frontend, [parsed], self.sampling, self.priority, cache_salt=self.salt)

    def _parse(self, frontend: Frontend) -> list[Any]:
        prefix, chunks, question = self.prompt
        if self.form == "ids":
            return frontend.parse({"prompt_token_ids": list(question)}, False)
        if self.form in ("chunked", "joined"):
            mode = "joined" if self.form == "joined" else "isolated"
            return frontend.parse(ChunkedPrompt(list(prefix), list(map(list, chunks)), list(question)), None, chunk_mode=mode)
        if self.form == "separated ids":
            ids = list(prefix)
            for part in (*chunks, question):
                ids += [SEPARATOR_ID, SEPARATOR_ID, *part]
            return frontend.parse({"prompt_token_ids": ids}, True)
        if self.form == "text":
            parts = [question] if self.prompt.plain else self.prompt.parts
            return frontend.parse(" # # ".join(map(words, parts)), None)
        system = [{"role": "system", "content": words(prefix)}] if prefix else []
        documents = [words(chunk) for chunk in chunks] or None
        return frontend.parse_chat([*system, {"role": "user", "content": words(question)}], documents, None)


@dataclass(frozen=True)
class Score:
    """Score items behind a query, or before it; `rerank` sends both as text and has labels of its own.

    `labels` is one list for all items, or one list per item.
    """

    query: Ids
    items: tuple[Ids, ...]
    labels: Ids | tuple[Ids, ...]
    algorithm: str
    item_first: bool = False
    rerank: bool = False
    salt: str | None = None
    priority: int = 0

    def job(self, frontend: Frontend) -> Any:
        """Check the items."""
        options = {"algorithm": self.algorithm, "cache_salt": self.salt, "priority": self.priority}
        if self.rerank:
            documents, order = [words(item) for item in self.items], "document_first" if self.item_first else "query_first"
            return rerank_call(frontend, words(self.query), documents, template=PLAIN, order=order, **options)
        labels = [list(own) if isinstance(own, tuple) else own for own in self.labels]
        options |= {"item_first": self.item_first, "label_token_ids": labels}
        return score_call(frontend, list(self.query), list(map(list, self.items)), **options)

    def sequences(self) -> list[Ids]:
        """Every item with the query as a plain prompt, whose next token is scored."""
        return [item + self.query if self.item_first else self.query + item for item in self.items]

    def labels_of(self, number: int) -> Ids:
        """The labels of an item."""
        own: Any = self.labels[number] if isinstance(self.labels[0], tuple) else self.labels
        return own


@dataclass(frozen=True)
class Precompute:
    """Fill the cache with a prefix and documents, and with the states at their ends if `keep_states`."""

    prefix: Ids
    documents: tuple[Ids, ...]
    pin: bool = False
    salt: str | None = None
    priority: int = 0
    keep_states: bool = False

    def job(self, frontend: Frontend) -> Any:
        """One request a document, or one for all."""
        documents = list(map(list, self.documents))
        options = {"cache_salt": self.salt, "pin": self.pin, "priority": self.priority}
        return precompute_job(frontend, list(self.prefix), documents, **options)


Ask = Generate | Score | Precompute | Decide


def has_no_state(ask: Ask) -> bool:
    """Return whether a model with recurrent layers must refuse an ask other than a choice."""
    if isinstance(ask, Score):
        return ask.algorithm == "packed_dense"
    chunks = ask.prompt.chunks if isinstance(ask, Generate) else ask.documents if isinstance(ask, Decide) else ()
    is_joined = ask.joined if isinstance(ask, Decide) else isinstance(ask, Generate) and ask.form == "joined"
    return not is_joined and sum(map(bool, chunks)) > 1


@dataclass
class Sample:
    """Tokens of one sample, with the log-probability of each and of the likeliest at its place."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[np.ndarray] = field(default_factory=list)
    ended: bool = False


def describe(value: object) -> str:
    """Return Python code of an ask, or another value, without what is at its default."""
    if not is_dataclass(value):
        return repr(value)
    given = []
    for entry in fields(value):
        default = entry.default if entry.default_factory is MISSING else entry.default_factory()
        if (held := getattr(value, entry.name)) != default:
            given.append(f"{entry.name}={describe(held)}")
    return f"{type(value).__name__}({', '.join(given)})"


class Call:
    """An ask on its way through the engine.

    Attributes:
        job: the checked call.
        open: ids of requests that were sent and have not ended.
        requests: all requests sent, by id.
        samples: of a `Generate`.
        prompt_logprobs: of a `Generate` that asked for them.
        warm: some of its tokens came from the cache.
        result: result of the call, when it has ended.
    """

    def __init__(self, ask: Ask, frontend: Frontend) -> None:
        self.ask, self.positions = ask, positions_of(frontend)
        self.job = ask.job(frontend)
        self._flow = self.job.flow()
        self._question: Stage | None = None
        self.result: Any = None
        self.open: set[str] = set()
        self.requests: dict[str, Message] = {}
        self.samples = [Sample() for _ in range(ask.sampling.n)] if isinstance(ask, Generate) else []
        self.prompt_logprobs: PromptLogprobsOutput | None = None
        self.warm = self.done = False

    def next_stage(self) -> list[Message]:
        """Requests to send now; empty while some are open, and when the call has ended. Look-ups find nothing."""
        if self.open or self.done:
            return []
        step = advance(self._flow, self._question and self._question.answer)
        while isinstance(step, (LookUp, CheckShape)):
            known = [CachedTokens(0, (), 0)] * len(step.requests) if isinstance(step, LookUp) else None
            step = advance(self._flow, known)
        if isinstance(step, Returned):
            self.done, self.result = True, step.value
            return []
        self._question = step
        self.open = {request.request_id for request in step.requests}
        self.requests |= {request.request_id: request for request in step.requests}
        return list(step.requests)

    def take(self, event: EngineOutput) -> None:
        """Take an output of one of its requests."""
        assert self._question is not None
        if self._question.take(event, lambda *_: None):
            self.open.discard(event.request_id)
        if not isinstance(self.job, GenerateJob) or event.request_id != self.job.requests[0].request_id:
            return  # of a document that is scored, or no text
        if isinstance(event, TokenOutput):
            sample = self.samples[event.sample]
            assert not sample.ended
            sample.tokens += event.token_ids
            if event.logprobs is not None:
                sample.logprobs += event.logprobs.target.tolist()
                sample.top += [*event.logprobs.top]
            sample.ended = event.finish_reason is not None
        elif isinstance(event, PromptLogprobsOutput):
            self.prompt_logprobs = event


def continued(layout: ChunkLayout, tokens: list[int]) -> ChunkLayout:
    """The layout with generated tokens at the end of its question."""
    later = layout.next_position + np.arange(len(tokens), dtype=np.int32)
    return replace(
        layout,
        token_ids=np.concatenate([layout.token_ids, np.asarray(tokens, np.int32)]),
        positions=np.concatenate([layout.positions, later]),
        question_len=layout.question_len + len(tokens),
    )


def cut(layout: ChunkLayout, end: int) -> ChunkLayout:
    """The layout up to a token of its question."""
    question_len = end - layout.question_start
    return replace(layout, token_ids=layout.token_ids[:end], positions=layout.positions[:end], question_len=question_len)


def is_private(request: Message) -> bool:
    """Return whether a request to continue a prompt neither reads the cache nor leaves something in it."""
    return isinstance(request, GenerateRequest) and request.logprobs_from is None and not shares(request.sampling)


def cacheable(request: Message) -> ChunkLayout | None:
    """Return what a request may leave in the cache; None when it shares nothing."""
    if isinstance(request, ScoreRequest):
        if not request.share_prefix:
            return None
        if request.state_len:  # the item behind the state stays private
            return cut(request.layout, request.layout.question_start + request.state_len)
        return make_layout(request.layout.token_ids[: request.layout.prefix_len], [], [])
    return None if is_private(request) else request.layout
