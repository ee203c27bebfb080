"""`RequestRecord`: what one request of a client cost and waited for, collected where its outputs arrive."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class RequestStats:
    """Waits and cache hits of a request of the engine so far. Times are in seconds since its arrival.

    Attributes:
        queue_s: time until the request was first admitted to a step.
        first_token_s: time until its first token; None for requests that generate nothing.
        compile_s: time in which the engine compiled programs, before or after the admission. The request waited meanwhile.
        preemptions: number of times that the request lost its pages and started over.
        cached_tokens: prompt tokens that the request did not compute.
        cached_chunk_tokens: those of chunks.
    """

    queue_s: float
    first_token_s: float | None
    compile_s: float
    preemptions: int
    cached_tokens: int
    cached_chunk_tokens: int


@dataclass
class _Sent:
    """Request of the engine that has not ended, with its tokens, those of its chunks, and its last stats."""

    prompt_tokens: int
    chunk_tokens: int
    stats: RequestStats | None = None


@dataclass
class CallRecord:
    """Record of the requests that live and end together; stages follow each other.

    Attributes:
        began: time of the first stage on the clock of `time.perf_counter`; None before.
        queue_s: seconds in the engine's queue: of each stage its longest wait, summed over the stages.
        compile_s: seconds of waits for compilations, summed likewise.
        first_token_at: time of the first token of the last stage that generates; None before.
        last_at: time of the last output.
        requests: number of requests sent to the engine.
        prompt_tokens: tokens of their prompts.
        chunk_tokens: tokens of their chunks: documents, or items.
        cached_tokens: prompt tokens that were not computed, of requests with an output.
        cached_chunk_tokens: those of chunks.
        computed_tokens: prompt tokens that were computed, of requests with an output.
        generated_tokens: tokens generated.
        preemptions: number of preemptions.
    """

    began: float | None = None
    queue_s: float = 0.0
    compile_s: float = 0.0
    first_token_at: float | None = None
    last_at: float | None = None
    requests: int = 0
    prompt_tokens: int = 0
    chunk_tokens: int = 0
    cached_tokens: int = 0
    cached_chunk_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    _stage_began: float = 0.0
    _open: dict[str, _Sent] = field(default_factory=dict)

    def begin(self, now: float) -> None:
        """Begin a stage, whose requests `add` names."""
        self.end_stage()
        self._stage_began = now
        if self.began is None:
            self.began = now

    def add(self, request_id: str, prompt_tokens: int, chunk_tokens: int) -> None:
        """Add a request to the stage.

        Args:
            request_id: id of the request.
            prompt_tokens: tokens of its prompt.
            chunk_tokens: tokens of its chunks.
        """
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.chunk_tokens += chunk_tokens
        self._open[request_id] = _Sent(prompt_tokens, chunk_tokens)

    def take(self, request_id: str, stats: RequestStats | None, generated: int = 0) -> None:
        """Take what an output tells.

        Args:
            request_id: id of the request.
            stats: stats of the request, which replace earlier ones.
            generated: number of new tokens.
        """
        self.last_at = time.perf_counter()
        self.generated_tokens += generated
        if stats is not None and (sent := self._open.get(request_id)) is not None:
            sent.stats = stats

    def end_stage(self, compiling_s: float = 0.0) -> None:
        """End a stage, and add it to the totals.

        Args:
            compiling_s: seconds for which the engine compiles at this moment. A request that has heard nothing of the engine
                meanwhile waits for that compilation.
        """
        now, waits, compiles = time.perf_counter(), [0.0], [0.0]
        waiting_s = min(compiling_s, now - max(self._stage_began, self.last_at or 0.0))
        for sent in self._open.values():
            if (stats := sent.stats) is None:
                compiles.append(waiting_s)
                continue
            waits.append(stats.queue_s)
            compiles.append(stats.compile_s + waiting_s)
            if stats.first_token_s is not None:
                self.first_token_at = max(self.first_token_at or 0.0, self._stage_began + stats.first_token_s)
            self.cached_tokens += stats.cached_tokens
            self.cached_chunk_tokens += stats.cached_chunk_tokens
            self.computed_tokens += sent.prompt_tokens - stats.cached_tokens
            self.preemptions += stats.preemptions
        self.queue_s += max(waits)
        self.compile_s += max(compiles)
        self._open.clear()

    def so_far(self) -> CallRecord:
        """Return a copy whose stage has ended."""
        made = replace(self, _open=dict(self._open))
        made.end_stage()
        return made


class RequestRecord:
    """Record of one request of a client, which may make several calls of the engine.

    Args:
        began: time of the request on the clock of `time.perf_counter`.

    Attributes:
        began: time of the request.
        model: name of the model that serves the request; None before it is checked.
        upload_s: seconds from the request to the end of its body, or to its last part so far.
        route: how a gateway chose the replica, and how long it waited for one: names and values for the log; empty elsewhere.
    """

    def __init__(self, began: float) -> None:
        self.began = began
        self.model: str | None = None
        self.upload_s = 0.0
        self.route: dict[str, Any] = {}
        self._calls: list[CallRecord] = []
        self._usage: tuple[int, int, int] | None = None

    def new_call(self) -> CallRecord:
        """Return the record of a new call of the engine."""
        self._calls.append(CallRecord())
        return self._calls[-1]

    def count(self, prompt_tokens: int, cached_tokens: int, computed_tokens: int) -> None:
        """Add the usage of an answer, which takes the place of the tokens of the engine's requests.

        A query that several requests of the engine share counts once in it.
        """
        prompt, cached, computed = self._usage or (0, 0, 0)
        self._usage = prompt + prompt_tokens, cached + cached_tokens, computed + computed_tokens

    def summary(self) -> RequestSummary | None:
        """Return what the calls cost and waited for so far; None if no call has sent a request or has a usage."""
        calls = [call.so_far() for call in self._calls if call.began is not None]
        if not calls and self._usage is None:
            return None

        def values(name: str) -> list[Any]:
            return [value for call in calls if (value := getattr(call, name)) is not None]

        prompt, cached, computed = self._usage or (
            sum(values(name)) for name in ("prompt_tokens", "cached_tokens", "computed_tokens")
        )
        first, last = max(values("first_token_at"), default=None), values("last_at")
        return RequestSummary(
            prompt_tokens=prompt,
            cached_tokens=cached,
            computed_tokens=computed,
            document_tokens=sum(values("chunk_tokens")),
            cached_document_tokens=sum(values("cached_chunk_tokens")),
            completion_tokens=sum(values("generated_tokens")),
            engine_requests=sum(values("requests")),
            preemptions=sum(values("preemptions")),
            prepare_s=min(values("began"), default=self.began) - self.began,
            queue_s=max(values("queue_s"), default=0.0),
            compile_s=max(values("compile_s"), default=0.0),
            first_token_s=None if first is None else first - self.began,
            last_s=max(last, default=self.began) - self.began,
            answered=not calls or bool(last),
        )


@dataclass(frozen=True)
class RequestSummary:
    """Costs and waits of one request of a client: tokens of all prompts or items, and the longest of their waits.

    Attributes:
        prompt_tokens: tokens of the prompts, as in the answer's usage.
        cached_tokens: those that were not computed.
        computed_tokens: those that were computed; with `cached_tokens` fewer than all until the request has ended.
        document_tokens: tokens of documents, or of the items of scores.
        cached_document_tokens: those that were not computed.
        completion_tokens: tokens generated.
        engine_requests: number of requests of the engine.
        preemptions: number of times that one of them lost its pages and started over.
        prepare_s: seconds from the request to the first request of the engine: reading, checking and tokenizing the body.
        queue_s: seconds in the engine's queue.
        compile_s: seconds of waits for compilations, in the queue or later.
        first_token_s: seconds from the request to its first token, of several prompts the last; None if nothing is generated.
        last_s: seconds from the request to the last output of the engine; 0 before the first.
        answered: whether an output has come, or none is needed, because earlier requests had the same items scored.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    document_tokens: int
    cached_document_tokens: int
    completion_tokens: int
    engine_requests: int
    preemptions: int
    prepare_s: float
    queue_s: float
    compile_s: float
    first_token_s: float | None
    last_s: float
    answered: bool

    def slowest(self, seconds: float) -> str:
        """Return the part that took the most time, one of `PARTS`.

        Args:
            seconds: seconds of the whole request.
        """
        if not self.answered:
            name = "prepare" if self.prepare_s > seconds / 2 else "engine"
            return "compile" if name == "engine" and self.compile_s > (seconds - self.prepare_s) / 2 else name
        admitted, last = self.prepare_s + self.queue_s, self.last_s
        first = last if self.first_token_s is None else self.first_token_s
        parts = {
            "prepare": self.prepare_s,
            "queue": self.queue_s,
            "prompt": max(first - admitted, 0.0),
            "generate": max(last - first, 0.0),
            "answer": max(seconds - last, 0.0),
        }
        # A compilation falls into the queue or a later part, and explains it if it is most of it.
        name = max(parts, key=parts.__getitem__)
        return "compile" if self.compile_s > parts[name] / 2 else name


PARTS = ("prepare", "queue", "compile", "prompt", "generate", "answer", "engine", "wait", "replica")
"""Parts of a request that can take the most time.

- `prepare`: reading, checking and tokenizing the body, before the engine has it.
- `queue`: the engine's queue: other requests hold its pages or steps.
- `compile`: a compilation, of a program that this request or another one needs, or of the warm-up.
- `prompt`: computing the prompt, or the items of scores, which includes waiting for turns between other requests.
- `generate`: generating tokens.
- `answer`: writing the answer, and a client that reads slowly; of requests without the engine, all but the body.
- `engine`: the engine, which had not answered when the client left or the request failed.
- `wait`: a gateway's wait for a replica that takes requests, pauses between tries included.
- `replica`: the replica, which has a line of its own.
"""

RECORD: ContextVar[RequestRecord | None] = ContextVar("record", default=None)
"""Record of the request that a task answers; None keeps none. A server sets it."""
