"""`Lifetimes`: the requests of an engine that have not ended, how each ends, and the outputs that wait to be returned."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from chunkattn.engine.disk_tier import DiskTier
from chunkattn.engine.messages import EngineOutput, PrecomputeResult, RequestFailed
from chunkattn.engine.metrics import EngineMetrics
from chunkattn.engine.readout import cached_tokens, request_stats
from chunkattn.engine.request import Request, Sample
from chunkattn.engine.scheduler import Scheduler
from chunkattn.engine.shapes import Shapes
from chunkattn.structured_outputs import PARAM

logger = logging.getLogger(__name__)


class Lifetimes:
    """Requests that have not ended.

    Args:
        scheduler: scheduler of the requests.
        metrics: metrics, which count the ends.
        disk: the K/V store; None for none.

    Attributes:
        disk: the K/V store.
        requests: requests added and not yet ended, by id.
        pins: completed precompute requests whose blocks are pinned, or are recomputed to be pinned, by id.
        outputs: outputs of the step under way. An interrupt leaves them to the next step.
        shapes: grammars of the requests.
        persisted: whether the step under way has completed a document for the K/V store.
    """

    def __init__(self, scheduler: Scheduler, metrics: EngineMetrics, disk: DiskTier | None) -> None:
        self._scheduler, self._metrics, self.disk = scheduler, metrics, disk
        self.requests: dict[str, Request] = {}
        self.pins: dict[str, Request] = {}
        self.outputs: list[EngineOutput] = []
        self.shapes = Shapes()
        self.persisted = False

    @property
    def all(self) -> list[Request]:
        """Return the requests that have not ended, and the pinned ones."""
        return [*self.requests.values(), *self.pins.values()]

    def is_alive(self, request: Request) -> bool:
        """Return whether a request has not ended, or is pinned."""
        name = request.request_id
        return self.requests.get(name) is request or self.pins.get(name) is request

    def take_outputs(self) -> list[EngineOutput]:
        """Return the outputs of the step, which ends."""
        outputs, self.outputs = self.outputs, []
        return outputs

    def end(self, request: Request, outcome: str) -> None:
        """End a request, for every outcome except a failed step, and free everything but cached and pinned blocks."""
        if request.request_id not in self.pins:
            self._scheduler.remove(request)
        if self.disk is not None:
            self.disk.drop(request)
        self.shapes.drop(request)
        self.requests.pop(request.request_id, None)
        self._metrics.count_end(request, outcome)

    def finish(self, sample: Sample) -> None:
        """End a sample, and its request with its last one."""
        if len(sample.request.samples) == 1:
            self.end(sample.request, "finished")
        else:
            self._scheduler.finish(sample)

    def fail(self, request: Request, failure: RequestFailed) -> None:
        """End a request that has failed, without a pin: it would be recomputed and fail forever.

        Args:
            request: the request.
            failure: its output.
        """
        self._drop_pin(request)
        self.end(request, "failed")
        self.outputs.append(failure)

    def refuse_shape(self, request: Request, reason: str) -> None:
        """End a request whose text cannot have its shape."""
        self.fail(request, RequestFailed(request.request_id, reason, PARAM, stats=request_stats(request)))

    def unpin(self, request_ids: Iterable[str]) -> None:
        """Let the cache evict the blocks that precompute requests pinned. Unknown ids are ignored."""
        for request_id in request_ids:
            if request := self.pins.pop(request_id, None):
                self._scheduler.remove(request)

    def finish_precomputed(self) -> None:
        """Answer the precompute requests whose blocks are all complete, including blocks that other requests computed."""
        for request in [r for r in self._scheduler.running if r.precompute]:
            if request.samples[0].num_computed < len(request.layout):
                continue
            if request.request_id in self.pins:  # recomputed after a failure
                self._scheduler.pin(request)
                continue
            self._scheduler.placement.note_states(request, request.samples[0].parts)
            cached = cached_tokens(request)
            self._metrics.count_cached(cached, request.layout)
            self.outputs.append(PrecomputeResult(request.request_id, cached, request_stats(request)))
            self.persisted |= request.precompute is not None and request.precompute.persist
            if request.precompute and request.precompute.pin:
                self.pins[request.request_id] = request
                self._scheduler.pin(request)
            self.end(request, "finished")

    def restart(self, failed: Iterable[Request]) -> None:
        """End requests of a failed step, and queue all others anew.

        Args:
            failed: requests that failed.
        """
        for request in failed:
            if self.disk is not None:
                self.disk.drop(request)
            self.shapes.drop(request)
            self._drop_pin(request)
            if self.requests.pop(request.request_id, None):
                self._metrics.count_end(request, "failed")
        reading = self.shapes.waiting | (self.disk.reading if self.disk is not None else frozenset())
        self._scheduler.restart([*(r for r in self.requests.values() if r not in reading), *self.pins.values()])

    def _drop_pin(self, request: Request) -> None:
        if self.pins.pop(request.request_id, None):
            logger.warning("precomputed documents of request %s are no longer pinned", request.request_id)
