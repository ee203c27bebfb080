"""`EngineCore`: requests in, outputs out, one step at a time."""

from __future__ import annotations

import logging
from typing import Any

import jax
import numpy as np

from chunkattn.cache.pages import PagePool
from chunkattn.config import EngineConfig, SamplingParams
from chunkattn.engine.batch import BatchBuilder, StepBatch
from chunkattn.engine.messages import (
    EngineLimits,
    EngineOutput,
    GenerateRequest,
    PromptLogprobsOutput,
    RequestFailed,
    ScoreRequest,
    ScoreResult,
    TokenLogprobs,
    TokenOutput,
)
from chunkattn.engine.request import Request, Sequence, prepare_generate, prepare_score
from chunkattn.engine.runner import Runner
from chunkattn.engine.scheduler import Scheduler, Span
from chunkattn.errors import CapacityError, RequestError
from chunkattn.layout import ChunkLayout

logger = logging.getLogger(__name__)


class EngineCore:
    """Admits requests, schedules and runs steps. Knows token ids, never text.

    Attributes:
        requests: admitted and not yet ended, by id.
        limits: what it can hold.
        scheduler: for its counts of waiting and running requests and free pages.
        runner: for its counts of compiled programs.
    """

    def __init__(self, runner: Runner, config: EngineConfig, max_model_len: int) -> None:
        self.runner, self.config, self.max_model_len = runner, config, max_model_len
        self.scheduler = Scheduler(
            PagePool(runner.num_pages),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        self.batches = BatchBuilder(
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            num_pages=runner.num_pages,
            block_size=config.block_size,
        )
        self.requests: dict[str, Request] = {}
        self.limits = EngineLimits(
            kv_tokens=runner.num_pages * config.block_size,
            max_model_len=max_model_len,
            vocab_size=runner.spec.vocab_size,
            sliding_window=runner.spec.sliding_window,
        )
        self._readouts: dict[str, _Collector] = {}
        self._admitted = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.requests)

    # Requests

    def check(self, message: GenerateRequest | ScoreRequest) -> None:
        """Check a request against every limit, without admitting it.

        Raises:
            RequestError: malformed; the message names the part, its size and the limit.
            CapacityError: it can never fit this engine.
        """
        self._prepare(message, seed=0)

    def add(self, message: GenerateRequest | ScoreRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: as `check`, or its id is in use.
        """
        if message.request_id in self.requests:
            raise RequestError(f"request_id {message.request_id!r} is already in use", param="request_id")
        request = self._prepare(message, seed=self._next_seed())
        self.requests[request.request_id] = request
        params = request.sampling
        if request.score is not None:
            self._readouts[request.request_id] = _Collector(len(request.score.rows))
        elif params is not None and params.prompt_logprobs is not None and (wanted := len(request.layout.known_rows)):
            self._readouts[request.request_id] = _Collector(wanted)
        self.scheduler.add(request)

    def _prepare(self, message: GenerateRequest | ScoreRequest, seed: int) -> Request:
        self._check_layout(message.layout)
        block_size = self.config.block_size
        if isinstance(message, ScoreRequest):
            self._check_ids("label_token_ids", np.asarray(message.label_token_ids))
            request = prepare_score(message, block_size=block_size)
            what, param = "", "items"
        else:
            params = message.sampling
            self._check_sampling(params, message.layout)
            canonical = self.config.position_strategy == "shared"
            request = prepare_generate(
                message, block_size=block_size, canonical=canonical, seed=seed if params.seed is None else params.seed
            )
            request.max_tokens = params.max_tokens or self._most_tokens(request)
            if params.min_tokens > request.max_tokens:
                raise RequestError(
                    f"min_tokens {params.min_tokens} exceeds the {request.max_tokens} that fit", param="min_tokens"
                )
            what, param = " with its n and max_tokens", "max_tokens"
        if request.total_pages > self.runner.num_pages:
            raise CapacityError(
                f"the prompt of {len(request.layout)} tokens{what} needs {request.total_pages} KV pages of {block_size} "
                f"tokens, the pool has {self.runner.num_pages}; send less or raise kv_cache_memory_bytes",
                param=param,
            )
        return request

    def abort(self, request_id: str) -> None:
        """Forget a request and free its pages; unknown ids are ignored, for it may just have finished."""
        if request := self.requests.pop(request_id, None):
            self._readouts.pop(request_id, None)
            self.scheduler.remove(request)

    def stop(self, request_id: str, sample: int) -> None:
        """End one sample early, for instance at a stop string."""
        request = self.requests.get(request_id)
        for sequence in list(request.sequences) if request else []:
            if sequence.sample == sample:
                self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        if not sequence.request.sequences:
            self.requests.pop(sequence.request.request_id)

    def _next_seed(self) -> int:
        """64 bits for the next request without a seed: the same in every run of the same program."""
        self._admitted += 1
        return int(np.random.SeedSequence([self.config.seed, self._admitted]).generate_state(1, np.uint64)[0])

    def _most_tokens(self, request: Request) -> int:
        """What `max_tokens=None` resolves to: as many as positions and pages allow."""
        pages = (self.runner.num_pages - request.shared_pages) // request.samples + request.shared_pages
        slots = pages * self.config.block_size - request.plan.end + 1  # the last token is never computed
        return max(min(slots, self.max_model_len - request.layout.next_position), 1)

    def _check_layout(self, layout: ChunkLayout) -> None:
        for segment in layout.segments:
            name = "prompt" if layout.is_plain else segment.name
            self._check_ids(name, layout.part(segment), param="prompt")
            if segment.chunk_id >= 0 and segment.end - segment.start > self.config.max_chunk_len:
                raise RequestError(
                    f"{name} has {segment.end - segment.start} tokens, max_chunk_len is {self.config.max_chunk_len}",
                    param="prompt",
                )
            last = int(layout.positions[segment.start : segment.end].max(initial=-1))
            if last >= self.max_model_len:
                raise CapacityError(
                    f"{name} of {segment.end - segment.start} tokens reaches position {last}, max_model_len "
                    f"{self.max_model_len} allows {self.max_model_len - 1}",
                    param="prompt",
                )
        if layout.num_chunks and (window := self.runner.spec.sliding_window) is not None:
            raise RequestError(
                f"this checkpoint attends within a sliding window of {window} tokens, which has no meaning across "
                "chunks that share positions; only plain prompts can be served",
                param="prompt",
            )

    def _check_ids(self, name: str, ids: np.ndarray, param: str | None = None) -> None:
        vocab = self.runner.spec.vocab_size
        bad = np.flatnonzero((ids < 0) | (ids >= vocab))
        if len(bad):
            raise RequestError(
                f"{name}: token id {ids[bad[0]]} at index {bad[0]} is outside the vocabulary of {vocab}", param=param or name
            )

    def _check_sampling(self, params: SamplingParams, layout: ChunkLayout) -> None:
        room = self.max_model_len - layout.next_position
        if room < (params.max_tokens or 1):
            wanted = f"max_tokens {params.max_tokens}" if params.max_tokens else "even one token more"
            raise CapacityError(
                f"the prompt reaches position {layout.next_position - 1}; {wanted} would exceed max_model_len "
                f"{self.max_model_len}; shorten the prompt or lower max_tokens",
                param="max_tokens",
            )
        self._check_ids("stop_token_ids", np.asarray(params.stop_token_ids, np.int64))
        self._check_ids("logit_bias", np.asarray([*params.logit_bias], np.int64))
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.runner.max_logprobs:
                raise RequestError(
                    f"{name} {getattr(params, name)} exceeds max_logprobs {self.runner.max_logprobs}", param=name
                )
        if params.n > self.config.max_num_seqs:
            raise CapacityError(f"n {params.n} exceeds max_num_seqs {self.config.max_num_seqs}", param="n")

    # Steps

    def step(self) -> list[EngineOutput]:
        """Run one step and return what it produced: often nothing, while prompts are being computed."""
        spans = self.scheduler.schedule()
        if not spans:
            return []
        try:
            return self._run(spans)
        except Exception as error:
            logger.exception("a step of %d sequences failed", len(spans))
            return self._recover({s.sequence.request.request_id for s in spans}, error)
        except BaseException:  # an interrupt: nobody's fault, but the donated pool is just as lost
            self._recover(set(), None)
            raise

    def _run(self, spans: list[Span]) -> list[EngineOutput]:
        batch = self.batches.build(spans)
        hidden = self.runner.forward(batch)
        tokens, logprobs = self.runner.sample(hidden, batch.samples)
        outputs = self._collect(hidden, batch)
        for span in spans:
            span.sequence.num_computed = span.end
            if span.sequence.request.sampling is None and span.end == span.sequence.num_tokens:
                self._finish(span.sequence)
        self._fork(batch)
        for row, token, logprob in zip(batch.samples, tokens, logprobs, strict=True):
            outputs.append(self._accept(row.sequence.request, row.sample, token, logprob))
        return outputs

    def _fork(self, batch: StepBatch) -> None:
        """Prompts just completed split into their samples before the first tokens are taken."""
        copies = []
        for request in dict.fromkeys(r.sequence.request for r in batch.samples if r.sample != r.sequence.sample):
            copies += self.scheduler.fork(request)
        self.runner.copy_pages(copies)

    def _accept(self, request: Request, sample: int, token: int, logprobs: TokenLogprobs | None) -> TokenOutput:
        """Append a sampled token and end its sequence when it is the last."""
        params = request.sampling
        assert params is not None
        sequence = next(s for s in request.sequences if s.sample == sample)
        sequence.output_ids.append(token)
        finish_reason, stop_reason = None, None
        if len(sequence.output_ids) > params.min_tokens:
            if token in params.stop_token_ids:
                finish_reason, stop_reason = "stop", token
            elif token in request.eos_token_ids and not params.ignore_eos:
                finish_reason = "stop"
        if finish_reason is None and len(sequence.output_ids) >= request.max_tokens:
            finish_reason = "length"
        if finish_reason:
            self._finish(sequence)
        return TokenOutput(request.request_id, sample, token, logprobs, finish_reason, stop_reason)

    def _collect(self, hidden: jax.Array, batch: StepBatch) -> list[EngineOutput]:
        """Read the rows asked about; requests whose last row this was are answered."""
        outputs: list[EngineOutput] = []
        if batch.scores:
            scored = [r.request.score for r in batch.scores]
            values = self.runner.label_logprobs(hidden, [r.row for r in batch.scores], [s.label_token_ids for s in scored if s])
            for (_, request, place), value in zip(batch.scores, values, strict=True):
                if collector := self._note(request, place, value):
                    outputs.append(collector.score_result(request))
        if batch.prompt_logprobs:
            targets = [int(r.request.layout.token_ids[r.place]) for r in batch.prompt_logprobs]
            read = self.runner.token_logprobs(hidden, [r.row for r in batch.prompt_logprobs], targets)
            for i, (_, request, place) in enumerate(batch.prompt_logprobs):
                row = (read.target[i], read.rank[i], read.top_ids[i], read.top[i])
                if collector := self._note(request, int(request.user_index[place]), row):
                    outputs.append(collector.prompt_output(request))
        return outputs

    def _note(self, request: Request, index: int, row: Any) -> _Collector | None:
        """Note a row; returns the request's collector, no longer kept here, when this was its last."""
        collector = self._readouts.get(request.request_id)
        if collector is None:  # answered before its sequence had to start over
            return None
        collector.rows[index] = row
        return self._readouts.pop(request.request_id) if len(collector.rows) == collector.wanted else None

    def _recover(self, failed: set[str], error: Exception | None) -> list[EngineOutput]:
        """The step's donated pool is lost: fail the requests in it, start the others over on a fresh pool."""
        for request_id in failed:
            self.abort(request_id)
        self.runner.reset()
        for request in self.scheduler.running:
            for sequence in request.sequences:
                sequence.num_computed = 0
        reason = f"{type(error).__name__}: {error}"
        return [RequestFailed(request_id, reason) for request_id in sorted(failed)]


class _Collector:
    """Rows of one request's readout as steps compute them."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.rows: dict[int, Any] = {}

    def score_result(self, request: Request) -> ScoreResult:
        """Label log-probabilities in the order of the request's rows."""
        assert request.score is not None
        values = np.stack([self.rows[i] for i in range(self.wanted)])
        return ScoreResult(request.request_id, values[:, : len(request.score.label_token_ids)])

    def prompt_output(self, request: Request) -> PromptLogprobsOutput:
        """Everything collected, by token index in the user's order."""
        assert request.sampling is not None
        tokens, num_top = len(request.layout), request.sampling.prompt_logprobs or 0
        target, rank, known = np.zeros(tokens, np.float32), np.zeros(tokens, np.int32), np.zeros(tokens, bool)
        top_ids, top = np.zeros((tokens, num_top), np.int32), np.zeros((tokens, num_top), np.float32)
        for index, row in self.rows.items():
            target[index], rank[index], known[index] = row[0], row[1], True
            top_ids[index], top[index] = row[2][:num_top], row[3][:num_top]
        return PromptLogprobsOutput(request.request_id, TokenLogprobs(target, rank, top_ids, top), known)
