"""`Runs`: plans runs of decodes, several tokens of every running sample in one program, and reads them.

A run computes what as many steps of decodes would compute, with the same tokens. It begins where a step would be made of
decodes alone. The next run is planned, and sent if both are short, while the device computes the present one; it continues from
values on the device.

Source: the multi-step scheduling of vLLM 0.6, and the overlapped scheduler of SGLang.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from chunkattn.backends.portable import on_cpu
from chunkattn.engine.decode_program import MOST_STOPS, NO_TOKEN, STEPS, DecodeArrays, Decoded
from chunkattn.engine.disk_tier import DiskTier
from chunkattn.engine.messages import TokenLogprobs
from chunkattn.engine.request import Request, Sample
from chunkattn.engine.runner import Runner
from chunkattn.engine.sample_inputs import edits_logits, empty_input, sample_input
from chunkattn.engine.scheduler import Scheduler
from chunkattn.engine.step import Span, Step, StepBuilder
from chunkattn.engine.step_sizes import bucket_for

RUN_ROWS = (8, 16, 32, 64)
"""Rows that runs are padded to."""
_IN_FLIGHT_S = 0.01
"""Seconds that the runs on the device may take together: a request that arrives waits for them."""


@dataclass(eq=False)
class Row:
    """Row of a run.

    Attributes:
        sample: the sample.
        pages: its page table; another one means that the sample was placed anew.
        length: tokens of its output when the run begins.
        left: tokens that it may still generate then.
    """

    sample: Sample
    pages: np.ndarray
    length: int
    left: int

    @property
    def is_placed(self) -> bool:
        """Return whether the sample still has the pages that the run writes to."""
        sample = self.sample
        return bool(sample.parts) and sample.pages is self.pages and sample in sample.request.samples

    @property
    def is_current(self) -> bool:
        """Return whether the sample is as the run expects it, before its tokens are taken."""
        return self.is_placed and len(self.sample.output_ids) == self.length


@dataclass
class RunResult:
    """Values of a run.

    Attributes:
        number: decodes that the program ran.
        tokens: tokens of each of the run's rows.
        finite: bool `[rows]`, whether the values of each row are finite in the last decode.
        seconds: seconds that the device took.
        logprobs: log-probabilities of each row's tokens; None if no row asks for them.
    """

    number: int
    tokens: list[list[int]]
    finite: np.ndarray
    seconds: float
    logprobs: TokenLogprobs | None = None

    def logprobs_of(self, row: int, num_top: int) -> TokenLogprobs:
        """Return the log-probabilities of a row's tokens, with `num_top` of the likeliest tokens."""
        assert self.logprobs is not None
        values, count = self.logprobs, len(self.tokens[row])
        picked = (slice(count), row)
        return TokenLogprobs(
            values.target[picked], values.rank[picked], values.top_ids[picked][:, :num_top], values.top[picked][:, :num_top]
        )


@dataclass(eq=False)
class Run:
    """Run of decodes.

    Attributes:
        rows: its rows.
        limit: maximum number of decodes.
        size: number of rows, padding included.
        arrays: input of the program.
        continues: whether it continues the run before it.
        began: time of its dispatch in seconds on the clock of `time.perf_counter`.
        decoded: values on the device; None before it is sent.
        is_timed: whether its time tells the length of later runs: it compiled nothing.
    """

    rows: list[Row]
    limit: int
    size: int
    arrays: DecodeArrays
    continues: bool
    began: float = 0.0
    decoded: Decoded | None = None
    is_timed: bool = True

    @property
    def spans(self) -> list[Span]:
        """Return the decodes of the run if every row takes all of them, for samples that still run."""
        first = [(row, len(row.sample.request.layout) + row.length - 1) for row in self.rows if row.is_placed]
        return [Span(row.sample, start, start + min(self.limit, row.left)) for row, start in first]

    def failed(self, result: RunResult) -> dict[Request, tuple[int, int]]:
        """Return the requests with a value that is not finite, each with index and id of its token, as `Step.not_finite`."""
        failed: dict[Request, tuple[int, int]] = {}
        for row, tokens, is_finite in zip(self.rows, result.tokens, result.finite, strict=True):
            if not is_finite and row.is_current:
                last = tokens[-1] if tokens else row.sample.output_ids[-1]
                failed.setdefault(row.sample.request, (row.sample.num_tokens - 1 + len(tokens), last))
        return failed


@dataclass
class Runs:
    """Planner of runs.

    Args:
        scheduler: scheduler of the engine.
        builder: builder of the arrays.
        runner: runner of the program.
        most: maximum number of decodes of a run; 0 for an engine that decodes step by step.
        samples: maximum number of samples that run at once.

    Attributes:
        current: run that is planned or on the device; None for none.
        limit_s: seconds that the runs on the device may take together.
        first: decodes of the first run after a step, if they are short.
        least: fewest decodes of a run. On a CPU, a step that is planned ahead is as fast as a run of one.
    """

    scheduler: Scheduler
    builder: StepBuilder
    runner: Runner
    most: int
    samples: int
    current: Run | None = None
    limit_s: float = _IN_FLIGHT_S
    first: int = 2
    least: int = field(default_factory=lambda: 2 if on_cpu() else 1)
    _next: int = 2  # decodes of the next run, if they are short
    _seconds: dict[int, float] = field(default_factory=dict)  # of a decode, by number of rows
    _read_at: float = 0.0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the numbers of rows that runs are padded to; none for an engine that decodes step by step."""
        if self.most == 0:
            return ()
        smallest = self.runner.backend.smallest_step
        sizes = (*((smallest,) if smallest < RUN_ROWS[0] else ()), *RUN_ROWS)
        return tuple(size for size in sizes if size <= bucket_for(min(self.samples, sizes[-1]), sizes))

    # Planning

    def take(self) -> Run | None:
        """Return the run to compute next, sent or not; None if the next step is not made of such decodes alone."""
        run, self.current = self.current, None
        if run is not None and run.decoded is None and not self._still_fits(run):
            run = None
        if run is None:
            samples = self._decoding()
            run = self._plan([(sample, 0, -1) for sample in samples], continues=False) if samples else None
        return run

    def follow(self, run: Run) -> None:
        """Plan the run after one on the device, as if no row of that one ended early, and send it if both are short."""
        placed = [(row, place) for place, row in enumerate(run.rows) if row.is_current]  # none after values that are not finite
        rows = [(r.sample, run.limit, place) for r, place in placed if r.left > run.limit and self._continues(r.sample)]
        if not rows or self._num_running != len(placed) or self._size(len(rows)) != run.size:
            return
        if self._others_wait and len(rows) < len(placed):  # the requests that wait will take the room
            return
        following = self._plan(rows, continues=True)
        if following is not None:
            limits = run.limit + following.limit
            if self._seconds.get(run.size, self.limit_s) * limits <= self.limit_s:
                self.send(following)
        self.current = following

    def expects(self) -> bool:
        """Return whether a run will probably follow the step that is planned last."""
        if not self.most or not 0 < self._num_running <= self.sizes[-1]:
            return False
        if self._limit(self._size(self._num_running)) < self.least:
            return False
        return all(s.num_tokens == s.num_planned and self._continues(s) for r in self.scheduler.running for s in r.samples)

    def note(self, step: Step, seconds: float) -> None:
        """Note what a step took: runs that were too long may fit again.

        Args:
            step: step that compiled nothing.
            seconds: time of the device and the host.
        """
        if self.most and step.num_rows == len(step.samples) <= self.sizes[-1]:
            self._note(self._size(step.num_rows), seconds)

    def _note(self, size: int, seconds: float) -> None:
        self._seconds[size] = (self._seconds.get(size, seconds) + seconds) / 2

    def slow_down(self) -> None:
        """Begin with short runs again, after a step."""
        self._next = self.first

    def forget(self) -> None:
        """Forget the runs on the device, whose values are lost."""
        self.current = None
        self.slow_down()

    @property
    def _num_running(self) -> int:
        return sum(len(request.samples) for request in self.scheduler.running)

    @property
    def _others_wait(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.uncached)

    def _continues(self, sample: Sample) -> bool:
        """Return whether a sample's next tokens may be drawn in a run, once its prompt is computed."""
        request = sample.request
        if request.sampling is None or request.prompt_only or request.forks or len(request.ends) > MOST_STOPS:
            return False
        return request.grammar is None and not edits_logits(sample)

    def _decoding(self) -> list[Sample]:
        """Return the running samples, if a step of their decodes is all that there is to compute."""
        scheduler = self.scheduler
        if not self.most or scheduler.uncached or not 0 < self._num_running <= self.sizes[-1]:
            return []
        samples = [sample for request in scheduler.running for sample in request.samples]
        for sample in samples:
            if not sample.output_ids or not self._continues(sample) or sample.num_tokens - sample.num_computed != 1:
                return []
        return samples

    def _still_fits(self, run: Run) -> bool:
        """Return whether a run that is planned, but not sent, is what comes next."""
        return not self._others_wait and self._num_running == sum(row.is_current for row in run.rows)

    def _size(self, rows: int) -> int:
        return bucket_for(rows, self.sizes)

    def _plan(self, rows: Sequence[tuple[Sample, int, int]], *, continues: bool) -> Run | None:
        """Return a run, or None if there is no time or no page for one.

        Args:
            rows: for each row its sample, how many of its tokens the device draws before, and its row in the run before; -1
                if the host knows its last token.
            continues: whether the device has the last tokens.
        """
        planned = [
            Row(s, s.pages, len(s.output_ids) + unknown, s.request.max_tokens - len(s.output_ids) - unknown)
            for s, unknown, _ in rows
        ]
        size = self._size(len(rows))
        limit = self._limit(size)
        while limit >= self.least and not self._grow(rows, planned, limit):
            limit //= 2
        if limit < self.least:
            return None
        return Run(planned, limit, size, self._arrays(rows, planned, limit, size), continues)

    def _limit(self, size: int) -> int:
        """Return the number of decodes of the next run."""
        if self._others_wait:
            return 1
        seconds = self._seconds.get(size)
        fitting = self._next if seconds is None else max(self.limit_s / 2 / seconds, 1)
        return int(min(self._next, fitting, self.most))

    def _grow(self, rows: Sequence[tuple[Sample, int, int]], planned: Sequence[Row], limit: int) -> bool:
        """Provide pages for a run. Return whether there were enough; without, none is taken."""
        placement = self.scheduler.placement
        more = [unknown + min(limit, row.left) - 1 for (_, unknown, _), row in zip(rows, planned, strict=True)]
        lacking = [placement.lacks(row.sample, count) for row, count in zip(planned, more, strict=True)]
        if sum(lacking) > self.scheduler.trie.num_available:
            return False
        return all(placement.grow(r.sample, count) for r, count, few in zip(planned, more, lacking, strict=True) if few)

    def _arrays(self, rows: Sequence[tuple[Sample, int, int]], planned: Sequence[Row], limit: int, size: int) -> DecodeArrays:
        described = self.builder.build_decodes([(sample, unknown) for sample, unknown, _ in rows], size)
        sampling = sample_input([(r.sample, r.sample.number, r.length) for r in planned], size, self.runner.spec.vocab_size)
        left, source = np.zeros(size, np.int32), np.full(size, -1, np.int32)
        stops = np.full((size, MOST_STOPS), NO_TOKEN, np.int32)
        left[: len(rows)], source[: len(rows)] = [row.left for row in planned], [place for _, _, place in rows]
        for row, (sample, _, _) in enumerate(rows):
            if ends := sample.request.ends:
                stops[row, : len(ends)] = [*ends]
        reads = any(sample.params.logprobs is not None for sample, _, _ in rows)
        token_ids, positions, metadata, slots = described
        return DecodeArrays(
            token_ids, source, positions, metadata, slots, sampling, stops, left, np.int32(limit), np.bool_(reads)
        )

    def empty(self, size: int, width: int) -> DecodeArrays:
        """Return the arrays of a run of padding rows only, which decodes nothing.

        Args:
            size: one of `sizes`.
            width: one of `StepBuilder.run_widths`.
        """
        token_ids, positions, metadata, slots = self.builder.build_decodes([], size, width)
        nothing, stops = np.zeros(size, np.int32), np.full((size, MOST_STOPS), NO_TOKEN, np.int32)
        sampling = empty_input(size, self.runner.spec.vocab_size)
        return DecodeArrays(
            token_ids, nothing - 1, positions, metadata, slots, sampling, stops, nothing, np.int32(0), np.bool_(False)
        )

    # The device

    def send(self, run: Run) -> None:
        """Send a run to the device."""
        run.began, compiled = time.perf_counter(), self.runner.compiles.total()
        run.decoded = self.runner.decode(run.arrays, continues=run.continues)
        run.is_timed = self.runner.compiles.total() == compiled

    def read(self, run: Run) -> RunResult:
        """Wait for a run on the device and return its values.

        Args:
            run: oldest run on the device.
        """
        assert run.decoded is not None
        reads = bool(run.arrays.reads_logprobs)
        table, logprobs = self.runner.read_decodes(run.decoded, with_logprobs=reads)
        now = time.perf_counter()
        seconds, self._read_at = now - max(run.began, self._read_at), now
        *tokens, counts, finite, number = table.tolist()
        drawn = [[tokens[n][row] for n in range(count)] for row, count in enumerate(counts[: len(run.rows)])]
        if number[0] and run.is_timed:
            self._next = min(max(2 * run.limit, self.first), STEPS)
            self._note(run.size, seconds / number[0])
        return RunResult(number[0], drawn, np.asarray(finite[: len(run.rows)], bool), seconds, logprobs)

    def commit(self, run: Run, result: RunResult, rows: Sequence[int], disk: DiskTier | None) -> None:
        """Mark the decodes of a run as computed. Blocks that they fill are published under the tokens of the run.

        Args:
            run: the run.
            result: its values.
            rows: places of rows that are current, and whose values are finite.
            disk: the K/V store; None for none.
        """
        spans = list[Span]()
        try:
            for row in rows:
                sample, tokens = run.rows[row].sample, result.tokens[row]
                spans.append(Span(sample, sample.num_tokens - 1, sample.num_tokens - 1 + len(tokens)))
                sample.output_ids += tokens[:-1]
            self.scheduler.fills.commit_decodes(spans)
            if disk is not None:
                disk.save(spans)
        finally:
            for row in rows:
                del run.rows[row].sample.output_ids[run.rows[row].length :]
