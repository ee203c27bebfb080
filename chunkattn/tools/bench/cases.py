"""Cases of `chunkattn bench gen`: their sizes, their prompts, and chunkattn's measurement of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from time import perf_counter
from typing import NamedTuple

from chunkattn.config import SamplingParams
from chunkattn.engine.messages import GenerateRequest, TokenOutput
from chunkattn.errors import EngineError
from chunkattn.layout import ChunkLayout
from chunkattn.rope.positions import make_layout
from chunkattn.tools.bench.peer_script import DecodeClock
from chunkattn.tools.bench.score import BLOCK, IN_ORDER, ScoreBench, Workload, needed_flops, pool_tokens

CASES = ("prefill", "rag", "decode", "score")
_SPARE = 8
"""Tokens generated beyond those that are timed, because vLLM may start some sequences a few steps early."""


@dataclass(frozen=True)
class Sizes:
    """Token counts of the cases.

    Attributes:
        prefill: tokens of each plain prompt that is timed.
        documents: number of documents.
        document_tokens: tokens per document.
        prefix_tokens: tokens of the prefix before the documents.
        question_tokens: tokens of the question after the documents.
        sequences: numbers of sequences that decode together.
        prompt_tokens: tokens of the prompt of each sequence that decodes.
        decode_tokens: timed tokens of each sequence that decodes.
        score: query and items of the scoring request.
        block_size: slots per page.
    """

    prefill: tuple[int, ...] = (2000, 6000)
    documents: int = 12
    document_tokens: int = 500
    prefix_tokens: int = 32
    question_tokens: int = 50
    sequences: tuple[int, ...] = (1, 16)
    prompt_tokens: int = 128
    decode_tokens: int = 32
    score: Workload = field(default_factory=lambda: Workload(items=100))
    block_size: int = BLOCK

    @property
    def rag_tokens(self) -> int:
        """Return the tokens of a prompt of documents."""
        return self.prefix_tokens + self.documents * self.document_tokens + self.question_tokens

    def longest(self, cases: Sequence[str]) -> int:
        """Return the tokens of the longest sequence of some cases, generated tokens included.

        Args:
            cases: names in `CASES`.
        """
        lengths = {
            "prefill": max(self.prefill) + 1,
            "rag": self.rag_tokens + 1,
            "decode": self.prompt_tokens + self.decode_tokens + _SPARE,
            "score": self.score.query + self.score.item_len + 1,
        }
        return max(lengths[case] for case in cases)

    def kv_tokens(self, cases: Sequence[str]) -> int:
        """Return the size in tokens of a KV pool that runs some cases without eviction.

        Args:
            cases: names in `CASES`.
        """
        page = self.block_size
        query, items, item_len = self.score.query, self.score.items, self.score.item_len + page
        chunks = self.prefix_tokens + self.documents * (self.document_tokens + page)
        sequence = self.prompt_tokens + self.decode_tokens + _SPARE + page
        tokens = {
            "prefill": max(self.prefill) + 2 * page,
            "rag": chunks + 2 * (self.question_tokens + 2 * page),  # the documents stay, and two questions follow
            "decode": max(self.sequences) * sequence,
            "score": min(pool_tokens(query), 4 * (query + items * item_len)),  # a pack has a quarter of the pool
        }
        return max(tokens[case] for case in cases)


class Sample(NamedTuple):
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
class Job:
    """One measurement to take, with token ids of its own.

    Attributes:
        name: see `Case`.
        unit: see `Case`.
        measure: measures chunkattn.
        batches: token ids that vLLM gets; see `PeerProcess.run`.
        max_tokens: tokens to generate for each prompt.
        items: items of a scoring request, else 0.
    """

    name: str
    unit: str
    measure: Callable[[], Sample]
    batches: list[list[list[int]]]
    max_tokens: int = 1
    items: int = 0

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
    """Engine over random weights, and the jobs of the benchmark.

    Args:
        geometry: name of the model's geometry.
        sizes: token counts of the cases.
        cases: names in `CASES`.
        dtype: dtype of weights and K/V.
    """

    def __init__(self, geometry: str, sizes: Sizes, cases: Sequence[str], *, dtype: str = "bfloat16") -> None:
        self.sizes, self.cases = sizes, cases
        running = max(64, *sizes.sequences)
        pool, block_size = sizes.kv_tokens(cases), sizes.block_size
        self.engine = ScoreBench(geometry, pool, dtype=dtype, block_size=block_size, max_num_seqs=running)
        self._numbers = count()

    def makers(self) -> Iterator[Callable[[], list[Job]]]:
        """Yield a function for each case that makes the jobs of one round."""
        for case in self.cases:
            if case == "prefill":
                yield from (partial(self.prefill, tokens) for tokens in self.sizes.prefill)
            elif case == "rag":
                yield self.rag
            elif case == "decode":
                yield from (partial(self.decode, sequences) for sequences in self.sizes.sequences)
            else:
                yield self.score

    def prefill(self, tokens: int) -> list[Job]:
        """Return the job of one plain prompt.

        Args:
            tokens: tokens of the prompt.
        """
        ids = self.engine.ids(tokens)
        return [Job(f"prefill {tokens}", "s", partial(self.generate, [make_layout([], [], ids)]), [[ids]])]

    def rag(self) -> list[Job]:
        """Return two jobs over the same documents: nothing cached, then all documents cached, in a new order."""
        sizes = self.sizes
        prefix = self.engine.ids(sizes.prefix_tokens)
        documents = [self.engine.ids(sizes.document_tokens) for _ in range(sizes.documents)]
        jobs = []
        for state, ordered in (("cold", documents), ("warm", documents[1:] + documents[:1])):
            question = self.engine.ids(sizes.question_tokens)
            measure = partial(self.generate, [make_layout(prefix, ordered, question)], fresh=state == "cold")
            name = f"rag {state} {sizes.documents} x {sizes.document_tokens} + {sizes.question_tokens}"
            jobs.append(Job(name, "s", measure, [[[*prefix, *(token for ids in ordered for token in ids), *question]]]))
        return jobs

    def decode(self, sequences: int) -> list[Job]:
        """Return the job of sequences that decode together.

        Args:
            sequences: number of sequences.
        """
        prompts = [self.engine.ids(self.sizes.prompt_tokens) for _ in range(sequences)]
        layouts = [make_layout([], [], prompt) for prompt in prompts]
        tokens = 1 + self.sizes.decode_tokens + _SPARE
        return [Job(f"decode {sequences}", "tok/s", partial(self.generate, layouts, tokens), [prompts], tokens)]

    def score(self) -> list[Job]:
        """Return the job of one scoring request.

        `auto` picks the algorithm. vLLM gets the first item before the others, so that the query is in its cache.
        """
        workload = self.sizes.score
        query, items = self.engine.ids(workload.query), self.engine.items(workload)
        prompts = [query + item for item in items]
        name = f"score {workload.query} + {workload.items} x {workload.item_len}"
        batches = [batch for batch in (prompts[:1], prompts[1:]) if batch]
        return [Job(name, "items/s", partial(self._score, query, items), batches, items=len(items))]

    def _score(self, query: list[int], items: list[list[int]], algorithm: str = "auto") -> Sample:
        self.engine.core.reset_prefix_cache()
        found = self.engine.run(query, items, algorithm)
        return Sample(found.seconds, None, found.flops, found.output.usage.cached_tokens)

    def warm_up_score(self) -> None:
        """Run every scoring algorithm that `auto` may take."""
        workload = self.sizes.score
        query, items = self.engine.ids(workload.query), self.engine.items(workload)
        refused = self.engine.refused(query, items)
        for name in IN_ORDER:
            if name not in (*refused, "packed_dense"):
                self._score(query, items[:2] if name == "serial" else items, name)

    def generate(self, layouts: list[ChunkLayout], max_tokens: int = 1, *, fresh: bool = True) -> Sample:
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
        return Sample(seconds, clock.rate, needed_flops(core.runner, requests, cached), cached)
