"""Scoring packs under a dense mask: one pass each, alone in its step, without pages. The baseline."""

from __future__ import annotations

import numpy as np

from chunkattn.backends.base import AttentionBatch
from chunkattn.backends.packed_dense import PackedDenseBackend
from chunkattn.engine.batch import ReadRow, StepBatch, StepPlan, score_reads
from chunkattn.engine.buckets import bucket_for, buckets
from chunkattn.engine.request import Request
from chunkattn.engine.runner import Runner


class DensePacks:
    """Requests waiting for a pass of their own, in order of arrival.

    Args:
        limit: most tokens of a pack.

    Attributes:
        refusal: why the model cannot be run so, None if it can.
    """

    def __init__(self, runner: Runner, limit: int) -> None:
        self.waiting: list[Request] = []
        self.refusal = PackedDenseBackend.supports(runner.backend.spec)
        self._runner, self._limit, self._sizes = runner, limit, buckets(8, max(limit, 8), 2)

    def remove(self, request: Request) -> None:
        """Forget a request, if it is here."""
        if request in self.waiting:
            self.waiting.remove(request)

    def build(self, request: Request) -> StepPlan:
        """Make the step of one request alone."""
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
        read, labels = score_reads(scores)
        return StepPlan(StepBatch(token_ids, positions, used, metadata, score_rows=read, labels=labels), [], [], scores, [])
