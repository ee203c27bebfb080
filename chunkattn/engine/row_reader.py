"""`RowReader`: reads values of single rows from the hidden states of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from chunkattn.backends.base import on_cpu
from chunkattn.backends.cpu import label_readout
from chunkattn.engine.host_calls import ReadClasses, ReadHidden, ReadLabels, ReadTokens, Tell
from chunkattn.engine.invariance import Invariance
from chunkattn.engine.messages import TokenLogprobs
from chunkattn.engine.programs import ProgramCounts
from chunkattn.engine.sampling import READ_BUCKETS, normalised, read, read_labels, relative
from chunkattn.engine.step_sizes import bucket_for
from chunkattn.models.decoder import Decoder
from chunkattn.models.packed import Packed, Weight, unpacked

Params = list[Weight]
"""Parameters of the model, in the order of its tree."""

LABEL_WIDTHS = (2, 8, 256)
"""Sizes to which label lists are padded, one program each; labels of longer lists are picked on the host."""


class RowReader:
    """Owner of the parameters, and of the programs that read rows of hidden states with the model's head.

    The methods return values and, for each row, whether its logits are finite.

    Args:
        model: the model.
        max_logprobs: number of likeliest tokens to return.
        invariance: whether and how the bits of results are kept.
        tell: tells the other hosts of the model every call; None for a host alone.

    Attributes:
        spec: shape of the decoder.
        shards: devices of the model. The programs run on all of them.
        max_logprobs: number of likeliest tokens that the readouts return, at most the vocabulary size.
        dtype: dtype of the model's activations and of its weights that are not packed.
        invariance: whether and how the bits of results are kept.
        compiles: number of programs traced so far, by name.
        tell: tells the other hosts of the model every call.
        while_waiting: called once, before the host next waits for values of a readout; None for nothing.
    """

    def __init__(self, model: Decoder, max_logprobs: int, invariance: Invariance, tell: Tell | None) -> None:
        self.tell, self.invariance = tell, invariance
        self.while_waiting: Callable[[], None] | None = None
        self.spec, self.shards, self.dtype = model.spec, model.shards, model.dtype
        self.max_logprobs = min(max_logprobs, model.spec.vocab_size)
        self.compiles = ProgramCounts()
        self._names, self._params = list(model.weights), list(model.weights.values())
        self._head_place = self._names.index(model.head_name)
        self._read_sizes = READ_BUCKETS[-1:] if self.invariance.one_size else READ_BUCKETS
        self._reads_at_once = (
            model.spec.num_labels is None
            and model.shards.size == 1
            and model.spec.has_plain_logits
            and not isinstance(model.head, Packed)
            and label_readout.serves(model.head)
        )
        many = self._reads_at_once and not self.invariance.one_size
        self._label_sizes = (READ_BUCKETS[0], label_readout.MAX_ROWS) if many else self._read_sizes
        head = [self._partition(model.head_name, model.head)]
        program = partial(self.compiles.jit, shards=self.shards)
        self._gather = program("gather", lambda hidden, rows: hidden[rows])
        self._logits = program("sample", self._trace_logits, inputs=[head])
        self._read = program("read", self._trace_read, inputs=[head])
        self._read_labels = program("read", self._trace_read_labels, inputs=[head])
        self._read_vocabulary = program("read", self._trace_read_vocabulary, inputs=[head])
        self._classify = program("classify", self._trace_logits, inputs=[head])

    def label_logprobs(
        self, hidden: jax.Array, rows: Sequence[int], labels: Sequence[tuple[int, ...]]
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Return the log-probabilities of each row's labels, one float32 `[len(labels[i])]` per row.

        A row's own list chooses the program that reads the row: the one for the smallest of `LABEL_WIDTHS` that holds the list.
        Labels of a longer list are picked on the host from the log-probabilities of the whole vocabulary.

        Args:
            hidden: float32 `[T, hidden]` hidden states of the step.
            rows: rows to read from.
            labels: token ids of each row's labels.
        """
        if self.tell:
            self.tell(ReadLabels(tuple(rows), tuple(labels), raw=False))
        logprobs, finite = [np.empty(0, np.float32)] * len(rows), np.empty(len(rows), bool)
        by_width: dict[int, list[int]] = {}  # places of rows; 0 for the whole vocabulary
        for place, ids in enumerate(labels):
            by_width.setdefault(next((width for width in LABEL_WIDTHS if len(ids) <= width), 0), []).append(place)
        for width, places in by_width.items():
            program, sizes, targets = self._read_vocabulary, self._read_sizes, None
            if width:
                program, sizes, targets = self._read_labels, self._label_sizes, np.full((len(places), width), -1, np.int32)
                for target, place in zip(targets, places, strict=True):
                    target[: len(labels[place])] = labels[place]
            for block, (values, fine) in self._by_block(program, hidden, [rows[place] for place in places], sizes, targets):
                for place, some in zip(places[block], values, strict=True):
                    logprobs[place] = some[: len(labels[place])] if width else some[list(labels[place])]
                finite[places[block]] = fine
        return logprobs, finite

    def label_logits(self, hidden: jax.Array, rows: Sequence[int], labels: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        """Return the logits of each row's labels, picked on the host; `label_logprobs` tells which are finite."""
        if self.tell:
            self.tell(ReadLabels(tuple(rows), tuple(labels), raw=True))
        blocks = self._by_block(self._logits, hidden, rows, self._read_sizes)
        return [some[list(ids)] for block, values in blocks for some, ids in zip(values, labels[block], strict=True)]

    def class_logits(self, hidden: jax.Array, rows: Sequence[int]) -> tuple[list[np.ndarray], np.ndarray]:
        """Return a classifier's logits, one float32 `[num_labels]` per row.

        Args:
            hidden: float32 `[T, hidden]` hidden states of the step.
            rows: rows to read from.
        """
        if self.tell:
            self.tell(ReadClasses(tuple(rows)))
        logits = np.concatenate([values for _, values in self._by_block(self._classify, hidden, rows, self._read_sizes)])
        return [*logits], np.isfinite(logits).all(-1)

    def hidden_states(self, hidden: jax.Array, rows: Sequence[int]) -> tuple[list[np.ndarray], np.ndarray]:
        """Return the hidden states of rows, one float32 `[hidden]` per row, for a head that the caller has.

        Args:
            hidden: float32 `[T, hidden]` hidden states of the step.
            rows: rows to read.
        """
        if self.tell:
            self.tell(ReadHidden(tuple(rows)))
        states, most = list[np.ndarray](), self._read_sizes[-1]
        for first in range(0, len(rows), most):
            block = rows[first : first + most]
            states += [*self._fetch(self._pick(hidden, block, self._read_sizes))[: len(block)]]
        return states, np.asarray([np.isfinite(state).all() for state in states], bool)

    def token_logprobs(
        self, hidden: jax.Array, rows: Sequence[int], targets: Sequence[int]
    ) -> tuple[TokenLogprobs, np.ndarray]:
        """Return the log-probability and rank of one target token per row, and the likeliest tokens of the row.

        Args:
            hidden: float32 `[T, hidden]` hidden states of the step.
            rows: rows to read from.
            targets: token id to read from each row.
        """
        if self.tell:
            self.tell(ReadTokens(tuple(rows), tuple(targets)))
        blocks = self._by_block(self._read, hidden, rows, self._read_sizes, np.asarray(targets, np.int32))
        values: tuple[TokenLogprobs, np.ndarray] = jax.tree.map(
            lambda *parts: np.concatenate(parts), *(values for _, values in blocks)
        )
        return values

    def _by_block(
        self,
        program: Callable[..., Any],
        hidden: jax.Array,
        rows: Sequence[int],
        sizes: Sequence[int],
        targets: np.ndarray | None = None,
    ) -> Iterator[tuple[slice, Any]]:
        """Run a program that reads rows, a block at a time. Yield the places of a block in `rows`, and its values.

        Args:
            program: program that takes the parameters, picked hidden states and, if given, targets.
            hidden: float32 `[T, hidden]` hidden states of the step.
            rows: rows to read from.
            sizes: sizes to which blocks are padded.
            targets: token ids `[rows, ...]`, or None; those of padding are -1.
        """
        most = sizes[-1]
        for first in range(0, len(rows), most):
            block = slice(first, min(first + most, len(rows)))
            size, picked = block.stop - first, self._pick(hidden, rows[block], sizes)
            inputs = []
            if targets is not None:
                padding = ((0, len(picked) - size), *[(0, 0)] * (targets.ndim - 1))
                inputs = [np.pad(targets[block], padding, constant_values=-1)]
            yield block, jax.tree.map(itemgetter(slice(size)), self._fetch(program(self._head, picked, *inputs)))

    def _fetch(self, values: Any) -> Any:
        """Return the values of a readout on the host, after the work that the wait is used for."""
        meanwhile, self.while_waiting = self.while_waiting, None
        if meanwhile is not None:
            meanwhile()
        return jax.tree.map(np.asarray, values) if on_cpu() else jax.device_get(values)  # the CPU's arrays need no copy

    def _pick(self, hidden: jax.Array, rows: Sequence[int], sizes: Sequence[int]) -> jax.Array:
        """Return the hidden states of a block of rows, padded to a bucket, so that readers compile once per bucket."""
        padded = np.zeros(bucket_for(len(rows), sizes), np.int32)
        padded[: len(rows)] = rows
        return self._gather(hidden, padded)

    @property
    def _head(self) -> Params:
        """Return the only parameter that the readouts take: every argument of a program costs time at each call."""
        return self._params[self._head_place : self._head_place + 1]

    def _partition(self, name: str, weight: Weight) -> PartitionSpec:
        return self.shards.partition_of_parts(name) if isinstance(weight, Packed) else self.shards.partition(name)

    def _head_model(self, params: Params) -> Decoder:
        """Return a decoder that computes logits only."""
        return Decoder(self.spec, {self._names[self._head_place]: params[0]}, self.dtype, self.shards)

    # Traced functions

    def _trace_logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        return self._head_model(params).logits(hidden)

    def _trace_read(self, params: Params, hidden: jax.Array, targets: jax.Array) -> tuple[TokenLogprobs, jax.Array]:
        return read(self._trace_logits(params, hidden), targets, self.max_logprobs)

    def _trace_read_labels(self, params: Params, hidden: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = self._head_model(params)
        if self._reads_at_once:
            return relative(*label_readout.read_labels(hidden, unpacked(model.head), labels))
        return read_labels(model.logits(hidden), labels)

    def _trace_read_vocabulary(self, params: Params, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = self._head_model(params)
        logits = model.logits(hidden)
        if self._reads_at_once:  # for the bits of shorter lists, though the head is multiplied twice
            head, first = unpacked(model.head), jnp.zeros((len(hidden), 1), jnp.int32)
            _, normalisers = label_readout.read_labels(hidden, head, first)
            return relative(logits, normalisers)
        return normalised(logits, logits)
