"""`Follower`: makes the calls that the first host of a model tells, on the devices of another host."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import jax

from chunkattn.engine.core import EngineCore
from chunkattn.engine.decode_program import DecodeArrays, Decoded
from chunkattn.engine.host_calls import (
    CopyPages,
    CopyStates,
    Decode,
    Forward,
    HostCall,
    ReadClasses,
    ReadDecodes,
    ReadHidden,
    ReadLabels,
    ReadSample,
    ReadTokens,
    ResetPool,
    WarmPicks,
    WarmReadout,
)
from chunkattn.engine.sample_inputs import Edits, SampleInput
from chunkattn.engine.step import StepArrays

logger = logging.getLogger(__name__)


class Follower:
    """Runner of a host that computes its part of what the first host schedules.

    Args:
        core: engine that is built as on the first host. Its scheduler stays empty.
    """

    def __init__(self, core: EngineCore) -> None:
        self._runner, self._builder = core.runner, core.builder
        self._structures: dict[tuple[int, str | None], jax.tree_util.PyTreeDef] = {}
        self._hidden: jax.Array
        self._runs, self._unread = core.runs, deque[Decoded]()
        self._structures_of_runs: dict[int, jax.tree_util.PyTreeDef] = {}
        self._sent: list[Any] = []  # arrays of readouts since the last step
        self._waits_for_pool = False

    def run(self, call: HostCall) -> None:
        """Make one call. Values of a step are of no use here, and are waited for only to keep pace with the devices.

        As on the first host, the next step is sent before the values of the step before are there.

        The first host recovers from an exception that is none of the devices by a new pool. It has had the same exception, so
        this host skips calls until the new pool.

        Args:
            call: next call of the first host.

        Raises:
            JaxRuntimeError: the devices failed.
        """
        if self._waits_for_pool and not isinstance(call, ResetPool):
            return
        self._waits_for_pool = False
        try:
            self._run(call)
        except jax.errors.JaxRuntimeError:
            raise
        except Exception:
            logger.exception("a call of host 0 failed")
            self._waits_for_pool = True

    def _run(self, call: HostCall) -> None:
        runner = self._runner
        match call:
            case Forward():
                self._hidden, _ = runner.forward(self._arrays(call))
                before, self._sent = self._sent, []
                jax.block_until_ready(before)  # type: ignore[no-untyped-call]
            case Decode():
                self._unread.append(runner.decode(self._decodes(call), continues=call.continues))
            case ReadDecodes():
                jax.block_until_ready(self._unread.popleft())  # type: ignore[no-untyped-call]
            case ReadSample(rows, fields, edits, with_logprobs, mask):
                changes = None if edits is None else Edits(*edits)
                reading = runner.sample(self._hidden, rows, SampleInput(*fields), changes, with_logprobs, mask)
                self._sent.append(reading.arrays)
            case ReadLabels(rows, labels, raw):
                read = runner.label_logits if raw else runner.label_logprobs
                self._sent.append(read(self._hidden, rows, labels).arrays)
            case ReadClasses(rows):
                self._sent.append(runner.class_logits(self._hidden, rows).arrays)
            case ReadHidden(rows):
                self._sent.append(runner.hidden_states(self._hidden, rows).arrays)
            case ReadTokens(rows, targets):
                self._sent.append(runner.token_logprobs(self._hidden, rows, targets).arrays)
            case WarmPicks():
                runner.warm_picks(self._hidden)
            case WarmReadout(size, number):
                jax.block_until_ready(runner.warm_readout(size, number))  # type: ignore[no-untyped-call]
            case CopyPages(pairs):
                runner.pool.copy_pages(pairs)
            case CopyStates(tracks):
                assert runner.states is not None
                runner.states.copy(tracks)
            case ResetPool():
                self._unread.clear()
                runner.reset()

    def _decodes(self, call: Decode) -> DecodeArrays:
        """Return the arrays of a run, whose structure follows from the number of rows."""
        rows = len(call.leaves[0])
        if rows not in self._structures_of_runs:
            empty = self._runs.empty(rows, self._builder.width_buckets[0])
            self._structures_of_runs[rows] = jax.tree.structure(empty)
        arrays: DecodeArrays = jax.tree.unflatten(self._structures_of_runs[rows], call.leaves)
        return arrays

    def _arrays(self, call: Forward) -> StepArrays:
        """Return the arrays of a step. Their structure follows from backend and number of rows, as compiled programs do."""
        key = len(call.leaves[0]), call.backend
        if key not in self._structures:
            *arrays, _ = self._builder.empty(key[0], self._builder.width_buckets[0], call.backend)
            self._structures[key] = jax.tree.structure(arrays)
        token_ids, positions, metadata, slots, walks = jax.tree.unflatten(self._structures[key], call.leaves)
        return StepArrays(token_ids, positions, metadata, slots, walks, call.backend)
