"""`DensePacks`: the scoring baseline that computes each pack in a step of its own, under a dense mask, without pages."""

from __future__ import annotations

import numpy as np

from chunkattn.backends.base import AttentionBatch
from chunkattn.backends.packed_dense import PackedDenseBackend
from chunkattn.engine.batch import ReadRow, StepBatch, StepPlan
from chunkattn.engine.buckets import bucket_for, buckets
from chunkattn.engine.request import Request
from chunkattn.engine.runner import Runner


class DensePacks:
    """Queue of `packed_dense` requests, in order of arrival. Each runs alone in a step.

    Args:
        runner: runner of the model.
        limit: token limit of one pack.

    Attributes:
        waiting: requests that wait for their step.
        refusal: reason why the model cannot run under a dense mask, or None if it can.
    """

    def __init__(self, runner: Runner, limit: int) -> None:
        self.waiting: list[Request] = []
        self.refusal = PackedDenseBackend.supports(runner.backend.spec)
        self._runner, self._limit, self._sizes = runner, limit, buckets(8, max(limit, 8), 2)

    def remove(self, request: Request) -> None:
        """Remove a request from the queue, if it is there."""
        if request in self.waiting:
            self.waiting.remove(request)

    def build(self, request: Request) -> StepPlan:
        """Return the step that computes one request."""
        layout, plan = request.layout, request.plan
        used = len(layout)
        rows = bucket_for(used, self._sizes)
        token_ids, positions, row_seq, row_slot, row_start = np.zeros((5, rows), np.int32)
        token_ids[:used], positions[:used] = layout.token_ids, layout.positions
        row_slot[:used], row_start[:used] = plan.slots, plan.row_start
        table = np.zeros((1, len(plan.page_len)), np.int32)
        prefix_end = np.asarray([plan.prefix_end], np.int32)
        attention = AttentionBatch(used, row_seq, row_slot, row_start, prefix_end, table, plan.page_len[None], plan.block_size)
        backend = self._runner.dense_backend
        backend.max_multi_item_seq_len = self._limit
        metadata = backend.build_metadata(attention)
        assert request.score is not None
        scores = [ReadRow(int(row), request, place) for place, row in enumerate(request.score.rows)]
        return StepPlan(StepBatch(token_ids, positions, used, metadata), [], [], scores, [])
