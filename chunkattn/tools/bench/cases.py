"""Cases of `chunkattn bench gen`: their prompts, and chunkattn's measurement of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from chunkattn.calls.algorithms import AUTO
from chunkattn.engine.messages import GenerateRequest, TokenOutput
from chunkattn.errors import EngineError
from chunkattn.layout import ChunkLayout
from chunkattn.rope.positions import make_layout
from chunkattn.sampling_params import SamplingParams
from chunkattn.tools.bench.peer_script import DecodeClock
from chunkattn.tools.bench.score import ScoreBench, needed_flops
from chunkattn.tools.bench.sizes import CASES, SPARE, Setup, Sizes


class Timing(NamedTuple):
    """One measurement of chunkattn.

    Attributes:
        seconds: time of the whole job in seconds.
        decode_rate: tokens per second while all sequences decode; None if they do not.
        flops: floating-point operations that the job needs.
        cached: prompt tokens found in the cache.
    """

    seconds: float
    decode_rate: float | None
    flops: float
    cached: int


@dataclass(frozen=True)
class BenchJob:
    """One measurement to take, with token ids of its own.

    Attributes:
        name: see `GenCase`.
        unit: see `GenCase`.
        measure: measures chunkattn.
        batches: token ids that peers get; see `PeerProcess.run`.
        max_tokens: tokens to generate for each prompt.
        items: items of a scoring request, else 0.
    """

    name: str
    unit: str
    measure: Callable[[], Timing]
    batches: list[list[list[int]]]
    max_tokens: int = 1
    items: int = 0

    @property
    def sequences(self) -> int:
        """Return the number of sequences that decode together; 1 in a job that generates a token a prompt."""
        return len(self.batches[0]) if self.unit == "tok/s" else 1

    def value(self, seconds: float, decode_rate: float | None) -> float | None:
        """Return a measurement in the job's unit; None if it needs a decode rate and there is none.

        Args:
            seconds: time of the whole job in seconds.
            decode_rate: tokens per second while all sequences decode.
        """
        if self.unit == "tok/s":
            return decode_rate
        return self.items / seconds if self.items else seconds


class GenerateBench:
    """Engine, and the jobs of the benchmark.

    Args:
        setup: model and page size.
        sizes: cases and their token counts.
        gguf: GGUF file of the weights; None for random weights of the geometry.
        **options: other options of the engine.
    """

    def __init__(self, setup: Setup, sizes: Sizes, gguf: Path | None = None, **options: Any) -> None:
        self.sizes = sizes
        pool, running = sizes.kv_tokens(setup.page), max(64, *sizes.sequences)
        options |= {"dtype": setup.dtype, "block_size": setup.page, "max_num_seqs": running}
        self.engine = ScoreBench(setup.geometry, pool, gguf=gguf, **options)
        self._numbers = count()

    def makers(self) -> list[Callable[[], list[BenchJob]]]:
        """Return the functions that make the jobs of one round, in the order of `CASES`."""
        makers: dict[str, list[Callable[[], list[BenchJob]]]] = {
            "prefill": [partial(self.prefill, tokens) for tokens in self.sizes.prefill],
            "rag": [self.rag],
            "plain": [self.plain],
            "decode": [partial(self.decode, sequences) for sequences in self.sizes.sequences],
            "score": [self.score],
        }
        return [make for case in CASES if case in self.sizes.case for make in makers[case]]

    def prefill(self, tokens: int) -> list[BenchJob]:
        """Return the job of one plain prompt.

        Args:
            tokens: tokens of the prompt.
        """
        ids = self.engine.ids(tokens)
        return [BenchJob(f"prefill {tokens}", "s", partial(self.generate, [make_layout([], [], ids)]), [[ids]])]

    def rag(self) -> list[BenchJob]:
        """Return two jobs over the same documents: nothing cached, then all documents cached, in a new order."""
        return self._documents("rag")

    def plain(self) -> list[BenchJob]:
        """Return the jobs of `rag` as ordinary causal prompts, of which the prefix alone is found again in the new order."""
        return self._documents("plain")

    def _documents(self, case: str) -> list[BenchJob]:
        sizes, jobs = self.sizes, []
        prefix = self.engine.ids(sizes.prefix_tokens)
        documents = [self.engine.ids(sizes.document_tokens) for _ in range(sizes.documents)]
        for state, ordered in (("cold", documents), ("warm", documents[1:] + documents[:1])):
            question = self.engine.ids(sizes.question_tokens)
            whole = [*prefix, *chain.from_iterable(ordered), *question]
            layout = make_layout([], [], whole) if case == "plain" else make_layout(prefix, ordered, question)
            name = f"{case} {state} {sizes.documents} x {sizes.document_tokens} + {sizes.question_tokens}"
            jobs.append(BenchJob(name, "s", partial(self.generate, [layout], fresh=state == "cold"), [[whole]]))
        return jobs

    def decode(self, sequences: int) -> list[BenchJob]:
        """Return the job of sequences that decode together.

        Args:
            sequences: number of sequences.
        """
        prompts = [self.engine.ids(self.sizes.prompt_tokens) for _ in range(sequences)]
        layouts = [make_layout([], [], prompt) for prompt in prompts]
        tokens = 1 + self.sizes.decode_tokens + SPARE
        return [BenchJob(f"decode {sequences}", "tok/s", partial(self.generate, layouts, tokens), [prompts], tokens)]

    def score(self) -> list[BenchJob]:
        """Return the job of one scoring request.

        `auto` picks the algorithm. Peers get the first item before the others, so that the query is in their cache.
        """
        workload = self.sizes.score
        query, items = self.engine.ids(workload.query), self.engine.items(workload)
        prompts = [query + item for item in items]
        name = f"score {workload.query} + {workload.items} x {workload.item_len}"
        batches = [batch for batch in (prompts[:1], prompts[1:]) if batch]
        return [BenchJob(name, "items/s", partial(self._score, query, items), batches, items=len(items))]

    def _score(self, query: list[int], items: list[list[int]], algorithm: str = "auto") -> Timing:
        self.engine.core.reset_prefix_cache()
        run = self.engine.run(query, items, algorithm)
        return Timing(run.seconds, None, run.flops, run.output.usage.cached_tokens)

    def warm_up_score(self) -> None:
        """Run every scoring algorithm that `auto` may take."""
        workload = self.sizes.score
        query, items = self.engine.ids(workload.query), self.engine.items(workload)
        refused = self.engine.refused(query, items)
        for name in AUTO:
            if name not in refused:
                self._score(query, items[:2] if name == "serial" else items, name)

    def generate(self, layouts: list[ChunkLayout], max_tokens: int = 1, *, fresh: bool = True) -> Timing:
        """Generate for all prompts at once.

        Args:
            layouts: layouts of the prompts.
            max_tokens: tokens to generate for each prompt.
            fresh: whether to empty the cache first, untimed.

        Raises:
            EngineError: a step failed.
        """
        core, clock = self.engine.core, DecodeClock(len(layouts))
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        if fresh:
            core.reset_prefix_cache()
        requests = [GenerateRequest(f"gen-{next(self._numbers)}", layout, params) for layout in layouts]
        counts: dict[str, int] = {}
        cached = 0
        began = perf_counter()
        for request in requests:
            core.add(request)
        while core.has_work:
            ended = False
            for event in core.step():
                if not isinstance(event, TokenOutput):
                    raise EngineError(f"the request failed: {event}")
                counts[event.request_id] = counts.get(event.request_id, 0) + len(event.token_ids)
                cached += event.cached.total if event.cached else 0
                ended = ended or event.finish_reason is not None
            clock.step(counts, ended=ended)
        seconds = perf_counter() - began
        # Only one prompt may have cached tokens, and its cached tokens come before the question.
        return Timing(seconds, clock.rate, needed_flops(core.runner, requests, cached), cached)
