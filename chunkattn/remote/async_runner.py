"""`AsyncRunner`: an engine in a separate process, and the jobs that run on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from os import PathLike
from secrets import token_hex
from types import TracebackType
from typing import Any, Self, TypeVar

from chunkattn.adapter_salt import LoRARequest, salt_for
from chunkattn.calls.frontend import Frontend
from chunkattn.calls.generate import GenerateJob, OutputBuilder
from chunkattn.calls.job import Ask, CheckShape, Flow, Job, LookUp, Question, Returned, advance
from chunkattn.config import make_config
from chunkattn.engine.limits import EngineLimits
from chunkattn.errors import ConfigError, EngineDeadError, RequestError
from chunkattn.fair_threads import FairThreads
from chunkattn.models.loader import open_files
from chunkattn.outputs import RequestOutput, ScoreUsage
from chunkattn.remote.client import EngineClient
from chunkattn.remote.inflight import InflightRequests
from chunkattn.remote.messages import Checkpoint
from chunkattn.request_record import RECORD

T = TypeVar("T")
J = TypeVar("J", bound=Job[Any])


class AsyncRunner:
    """Owner of an engine's process, which runs jobs made with its `frontend`. It belongs to the event loop it is started in.

    Args:
        model: local Hugging Face folder, GGUF file or hub id; None for the bundled demo model.
        **options: other fields of `chunkattn.config.EngineConfig`, by name.

    Attributes:
        client: client of the engine's process.
        config: options of the engine.

    Raises:
        ConfigError: an option is unknown or invalid.
    """

    def __init__(self, model: str | PathLike[str] | None = None, **options: Any) -> None:
        self.config = make_config(model, options)
        if self.config.host_index:
            raise ConfigError(f"host {self.config.host_index} of several takes no requests; run `chunkattn serve` on it")
        self.client = EngineClient(self.config, self._connect)
        self._frontend: Frontend | None = None
        self._generations: dict[str, tuple[InflightRequests, OutputBuilder | None]] = {}

    @classmethod
    async def start(cls, model: str | PathLike[str] | None = None, **options: Any) -> Self:
        """Start an engine. The caller closes it with `close`.

        Args:
            model: see the class.
            **options: see the class.

        Raises:
            ConfigError, ModelError, BackendError: the engine cannot be built.
            EngineDeadError: the engine's process died three times.
        """
        llm = cls(model, **options)
        await llm.open()
        return llm

    async def open(self) -> None:
        """Start the engine and wait until it is ready, as `start` and `async with` do.

        Raises:
            ChunkAttnError: as `start`; the engine is then closed.
        """
        try:
            self.client.launch()
            files = await asyncio.to_thread(open_files, self.config)
            self._frontend = await asyncio.to_thread(Frontend, self.config, files)
            await self.client.start(Checkpoint.of(files))
        except BaseException:
            await self.close()
            raise

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace_s: float | None = None) -> None:
        """Stop the engine. All waiting callers get `EngineDeadError`. A second call does nothing.

        Args:
            grace_s: seconds for the engine to finish its step and to write to its KV store; None is 60 with a store, else 10.
        """
        await self.client.close((60.0 if self.config.kv_store else 10.0) if grace_s is None else grace_s)

    @property
    def frontend(self) -> Frontend:
        """Return the frontend, which parses prompts.

        Raises:
            EngineDeadError: the engine has not been started.
        """
        if self._frontend is None:
            raise EngineDeadError("the engine has not been started")
        return self._frontend

    def _connect(self, limits: EngineLimits) -> None:
        self.frontend.connect(limits)

    @property
    def state(self) -> str:
        """Return `"starting"`, `"ready"`, `"restarting"`, `"failed"` or `"closed"`; see `EngineClient`."""
        return self.client.state

    @property
    def is_ready(self) -> bool:
        """Return whether the engine accepts requests."""
        return self.client.is_ready

    @property
    def is_warm(self) -> bool:
        """Return whether every program has been compiled ahead, so that no request waits for a compilation."""
        return self.client.is_warm

    @property
    def limits(self) -> EngineLimits:
        """Return the sizes and limits of the engine.

        Raises:
            EngineDeadError: the engine has never been ready.
        """
        if self.client.limits is None:
            raise EngineDeadError("the engine has not been started")
        return self.client.limits

    @property
    def threads(self) -> FairThreads:
        """Return the threads for the CPU work of calls. The work of each `chunkattn.fair_threads.OWNER` forms one queue."""
        return self.client.threads

    async def metrics(self) -> str:
        """Return the engine's metrics in Prometheus' text format.

        Raises:
            EngineDeadError: the engine is not ready, or dies.
        """
        return await self.client.metrics()

    def stream(
        self, job: GenerateJob | Callable[[], GenerateJob], *, timeout: float | None = None, snapshots: bool = True
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a job of one prompt made by `generate_job`, and yield outputs as `AsyncLLM.generate` does.

        Args:
            job: job made with this engine's `frontend`, or a function that makes the job off the event loop.
            timeout: see `AsyncLLM.generate`.
            snapshots: see `AsyncLLM.generate`.

        Raises:
            ChunkAttnError: as `AsyncLLM.generate`.
        """
        return self._generate(job, None, timeout, snapshots)

    async def _generate(
        self,
        made: GenerateJob | Callable[[], GenerateJob],
        request_id: str | None,
        timeout: float | None,
        snapshots: bool,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        name = token_hex(16) if request_id is None else request_id
        if not isinstance(name, str) or name in self._generations:
            raise RequestError(f"request_id must be a text no other running request has, got {name!r}", param="request_id")
        await self._load(lora_request)
        with self.client.call(_check_timeout(timeout)) as call:
            self._generations[name] = call, None
            try:
                job, flow, step = await call.prepare(_begin, (lambda: made) if isinstance(made, GenerateJob) else made)
                while not job.builders and not call.aborted and not isinstance(step, Returned):
                    answer = await self._answer(call, step)
                    if not call.aborted:  # else scores are missing
                        step = await call.prepare(advance, flow, answer)
                if call.aborted:  # before its start
                    return
                assert isinstance(step, Ask)
                (builder,) = job.builders
                builder.output.request_id = name
                self._generations[name] = call, builder
                call.send(step.requests, partial(step.take, stop=self.client.stop), quiet=job.final_only)
                ended = False
                while not ended:
                    await call.wait()
                    ended = builder.finished  # read before the yield, during which more outputs may arrive
                    if ended or not job.final_only:
                        output = builder.read()
                        yield snapshot(output) if snapshots and not ended else output
            finally:
                del self._generations[name]

    async def abort(self, request_id: str) -> None:
        """End a generation. Its last output has `finish_reason="abort"`.

        A generation that has not begun ends without an output. Ids that are not running are ignored, since the generation
        may just have finished.

        Args:
            request_id: id that was given to `AsyncLLM.generate` or `AsyncLLM.chat`.
        """
        call, builder = self._generations.get(request_id, (None, None))
        for completion in builder.read().outputs if builder else []:
            completion.finish_reason = completion.finish_reason or "abort"
        if call is not None:
            call.abort()

    async def run(self, make: Callable[[], Job[T]], timeout: float | None = None) -> T:
        """Make a job, run it and return its result. Slow CPU work runs in a thread.

        Args:
            make: makes a job with this engine's `frontend`.
            timeout: see `AsyncLLM.generate`.

        Raises:
            ChunkAttnError: the job or a request cannot be made, or as `InflightRequests.finish`.
        """
        pins: list[str] = []
        with self.client.call(_check_timeout(timeout)) as call:
            try:
                _, flow, step = await call.prepare(_begin, make)
                while not isinstance(step, Returned):
                    pins += step.pins
                    step = await call.prepare(advance, flow, await self._answer(call, step))
            except BaseException:
                call.abort()  # before `unpin`, so that the engine pins nothing afterwards
                self.client.unpin(pins)
                raise
        result: T = step.value
        _count_usage(result)
        return result

    async def _load(self, request: Any) -> None:
        """Load the adapter of a call, if the call brings one."""
        salt_for(request, None)
        if request is not None and (place := await asyncio.to_thread(self.frontend.find_adapter, request)):
            await self.client.load_adapter(request.lora_name, place[1])
            self.frontend.adapters[request.lora_name] = place

    async def _answer(self, call: InflightRequests, question: Question) -> Sequence[Any]:
        """Return the engine's answer to a question; nothing if the call is aborted."""
        if isinstance(question, CheckShape):
            await call.ask(self.client.check_shape(question.shape, question.vocabulary))
            return []
        if isinstance(question, LookUp):
            return await call.ask(self.client.look_up(question.requests, forget=question.forget))
        await call.finish(question.requests, partial(question.take, stop=self.client.stop))
        return [] if call.aborted else question.answer


def _begin(make: Callable[[], J]) -> tuple[J, Flow[Any], Question | Returned[Any]]:
    """Make a job and run its flow up to the first question or its end, in a thread: both may take long."""
    job = make()
    flow = job.flow()
    return job, flow, advance(flow)


def snapshot(output: RequestOutput) -> RequestOutput:
    """Return a copy that a caller may keep while the original grows."""
    copies = [
        replace(
            o,
            token_ids=list(o.token_ids),
            logprobs=None if o.logprobs is None else list(o.logprobs),
            citations=None if o.citations is None else list(o.citations),
        )
        for o in output.outputs
    ]
    return replace(output, outputs=copies)


def _count_usage(result: Any) -> None:
    """Add the usage of scores, a ranking or decisions to the record of the request that asked for them."""
    if (record := RECORD.get()) is not None:
        for output in result if isinstance(result, list) else [result]:
            if isinstance(usage := getattr(output, "usage", None), ScoreUsage):
                record.count(usage.prompt_tokens, usage.cached_tokens, usage.computed_tokens)


def _check_timeout(timeout: float | None) -> float | None:
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, Real) or not timeout > 0):
        raise RequestError(f"timeout must be a number of seconds above 0, got {timeout!r}", param="timeout")
    return timeout
