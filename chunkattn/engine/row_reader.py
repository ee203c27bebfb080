"""`RowReader`: reads values of single rows from the hidden states of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from chunkattn.backends.cpu import label_readout
from chunkattn.backends.portable import on_cpu
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


T = TypeVar("T")


class Reading(NamedTuple, Generic[T]):
    """Readout whose programs are on the device, and whose values the host has not waited for.

    Attributes:
        arrays: tree of arrays of the device, for `RowReader.fetch`.
        finish: function from the arrays on the host to the values of the readout.
    """

    arrays: Any
    finish: Callable[[Any], T]


Blocks = tuple[list[int], list[Any]]
"""Rows in use of each block of a readout, and the arrays of each block on the device, padded."""
_NOTHING = np.empty(0, np.float32)
_MOST_BYTES = 128 << 20
"""Bytes of values of the whole vocabulary on an accelerator at a time."""


class RowReader:
    """Owner of the parameters, and of the programs that read rows of hidden states with the model's head.

    The methods send the programs of a readout to the device, and do not wait. The readout has values and, for each row, whether
    its logits are finite.

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
    ) -> Reading[tuple[list[np.ndarray], np.ndarray]]:
        """Read the log-probabilities of each row's labels, one float32 `[len(labels[i])]` per row.

        A row's own list chooses the program that reads the row: the one for the smallest of `LABEL_WIDTHS` that holds the list.
        Labels of a longer list are picked on the host from the log-probabilities of the whole vocabulary.

        Args:
            hidden: float32 `[T, hidden]` hidden states of the step.
            rows: rows to read from.
            labels: token ids of each row's labels.
        """
        if self.tell:
            self.tell(ReadLabels(tuple(rows), tuple(labels), raw=False))
        numbers: dict[tuple[int, ...], int] = {}  # of different lists
        of_row = np.fromiter((numbers.setdefault(ids, len(numbers)) for ids in labels), np.int64, len(labels))
        widths = np.asarray([next((width for width in LABEL_WIDTHS if len(ids) <= width), 0) for ids in numbers])
        groups: list[np.ndarray] = []  # places of the rows of a program
        readings: list[Reading[tuple[list[np.ndarray], np.ndarray]]] = []
        for width in dict.fromkeys(widths.tolist()):
            places = np.flatnonzero(widths[of_row] == width)
            picked, own = np.asarray(rows, np.int32)[places], [labels[place] for place in places.tolist()]
            groups.append(places)
            if not width:
                readings.append(self._from_vocabulary(self._read_vocabulary, hidden, picked, own))
                continue
            targets = padded_lists([*numbers], width)[of_row[places]]
            sizes, arrays = self._by_block(self._read_labels, hidden, picked, self._label_sizes, targets)
            readings.append(Reading(arrays, partial(_without_padding, sizes, own)))

        def finish(values: list[Any]) -> tuple[list[np.ndarray], np.ndarray]:
            logprobs, finite = [_NOTHING] * len(rows), np.empty(len(rows), bool)
            for places, reading, of_reading in zip(groups, readings, values, strict=True):
                found, finite[places] = reading.finish(of_reading)
                for place, some in zip(places.tolist(), found, strict=True):
                    logprobs[place] = some
            return logprobs, finite

        return Reading([reading.arrays for reading in readings], finish)

    def label_logits(
        self, hidden: jax.Array, rows: Sequence[int], labels: Sequence[tuple[int, ...]]
    ) -> Reading[list[np.ndarray]]:
        """Read the logits of each row's labels, picked on the host; `label_logprobs` tells which are finite."""
        if self.tell:
            self.tell(ReadLabels(tuple(rows), tuple(labels), raw=True))
        arrays, finish = self._from_vocabulary(lambda *given: (self._logits(*given), None), hidden, rows, labels)
        return Reading(arrays, lambda values: finish(values)[0])

    def _from_vocabulary(
        self,
        program: Callable[..., Any],
        hidden: jax.Array,
        rows: Sequence[int] | np.ndarray,
        labels: Sequence[tuple[int, ...]],
    ) -> Reading[tuple[list[np.ndarray], Any]]:
        """Read labels of rows from values of the whole vocabulary. Their arrays are large, so few rows are sent at a time.

        Args:
            program: program that returns values float32 `[rows, vocab]`, and bool `[rows]` or None.
            hidden: float32 `[T, hidden]` hidden states of the step.
            rows: rows to read from, at least one.
            labels: token ids of each row's labels.
        """
        most = self._read_sizes[-1]
        if not on_cpu():
            most *= max(_MOST_BYTES // (4 * self.spec.vocab_size * most), 1)
        known: list[tuple[list[np.ndarray], Any]] = []
        for first in range(0, len(rows), most):
            sizes, arrays = self._by_block(program, hidden, rows[first : first + most], self._read_sizes)
            reading = Reading(arrays, partial(_picked, sizes, labels[first : first + most]))
            if first + most < len(rows):
                known.append(reading.finish(self.fetch(arrays)))

        def finish(values: list[Any]) -> tuple[list[np.ndarray], Any]:
            found, finite = zip(*known, reading.finish(values), strict=True)
            return [some for part in found for some in part], None if finite[0] is None else np.concatenate(finite)

        return Reading(arrays, finish)

    def class_logits(self, hidden: jax.Array, rows: Sequence[int]) -> Reading[tuple[list[np.ndarray], np.ndarray]]:
        """Read a classifier's logits, one float32 `[num_labels]` per row.

        Args:
            hidden: float32 `[T, hidden]` hidden states of the step.
            rows: rows to read from.
        """
        if self.tell:
            self.tell(ReadClasses(tuple(rows)))
        return self._finite_rows(*self._by_block(self._classify, hidden, rows, self._read_sizes))

    def hidden_states(self, hidden: jax.Array, rows: Sequence[int]) -> Reading[tuple[list[np.ndarray], np.ndarray]]:
        """Read the hidden states of rows, one float32 `[hidden]` per row, for a head that the caller has.

        Args:
            hidden: float32 `[T, hidden]` hidden states of the step.
            rows: rows to read.
        """
        if self.tell:
            self.tell(ReadHidden(tuple(rows)))
        return self._finite_rows(*self._by_block(lambda _, picked: picked, hidden, rows, self._read_sizes))

    def token_logprobs(
        self, hidden: jax.Array, rows: Sequence[int], targets: Sequence[int]
    ) -> Reading[tuple[TokenLogprobs, np.ndarray]]:
        """Read the log-probability and rank of one target token per row, and the likeliest tokens of the row.

        Args:
            hidden: float32 `[T, hidden]` hidden states of the step.
            rows: rows to read from.
            targets: token id to read from each row.
        """
        if self.tell:
            self.tell(ReadTokens(tuple(rows), tuple(targets)))
        sizes, arrays = self._by_block(self._read, hidden, rows, self._read_sizes, np.asarray(targets, np.int32))
        return Reading(arrays, partial(joined, sizes))

    def fetch(self, arrays: Any) -> Any:
        """Return the arrays of readouts on the host. The wait is used for `while_waiting` first."""
        meanwhile, self.while_waiting = self.while_waiting, None
        if meanwhile is not None:
            meanwhile()
        return jax.tree.map(np.asarray, arrays) if on_cpu() else jax.device_get(arrays)  # the CPU's arrays need no copy

    def _finite_rows(self, sizes: list[int], arrays: list[Any]) -> Reading[tuple[list[np.ndarray], np.ndarray]]:
        """Return a readout of one array by row, and whether each row is finite."""

        def finish(values: list[Any]) -> tuple[list[np.ndarray], np.ndarray]:
            read = joined(sizes, values)
            return [*read], np.isfinite(read).all(-1)

        return Reading(arrays, finish)

    def _by_block(
        self,
        program: Callable[..., Any],
        hidden: jax.Array,
        rows: Sequence[int] | np.ndarray,
        sizes: Sequence[int],
        targets: np.ndarray | None = None,
    ) -> Blocks:
        """Send a program that reads rows to the device, a block at a time. Return what `joined` takes.

        Args:
            program: program that takes the parameters, picked hidden states and, if given, targets.
            hidden: float32 `[T, hidden]` hidden states of the step.
            rows: rows to read from.
            sizes: sizes to which blocks are padded.
            targets: token ids `[rows, ...]`, or None; those of padding are -1.
        """
        used, arrays = list[int](), list[Any]()
        for first in range(0, len(rows), sizes[-1]):
            block = rows[first : first + sizes[-1]]
            picked, inputs = self._pick(hidden, block, sizes), list[np.ndarray]()
            if targets is not None:
                inputs.append(np.full((len(picked), *targets.shape[1:]), -1, np.int32))
                inputs[0][: len(block)] = targets[first : first + len(block)]
            used.append(len(block))
            arrays.append(begin_copy(program(self._head, picked, *inputs)))
        return used, arrays

    def _pick(self, hidden: jax.Array, rows: Sequence[int] | np.ndarray, sizes: Sequence[int]) -> jax.Array:
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


def begin_copy(arrays: Any) -> Any:
    """Return arrays of the device, after beginning to copy them to the host."""
    if not on_cpu():
        for array in jax.tree.leaves(arrays):
            array.copy_to_host_async()
    return arrays


def joined(sizes: Sequence[int], blocks: Sequence[Any]) -> Any:
    """Return the values of all rows of a readout, without padding.

    Args:
        sizes: rows in use of each block.
        blocks: arrays of each block on the host.
    """
    if len(blocks) == 1:
        return jax.tree.map(lambda values: values[: sizes[0]], blocks[0])
    return jax.tree.map(lambda *values: np.concatenate([x[:size] for x, size in zip(values, sizes, strict=True)]), *blocks)


def _without_padding(
    sizes: Sequence[int], labels: Sequence[tuple[int, ...]], blocks: Sequence[Any]
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return what `label_logprobs` does for rows whose lists are padded."""
    values, finite = joined(sizes, blocks)
    return [some[: len(ids)] for some, ids in zip(values, labels, strict=True)], finite


def _picked(sizes: Sequence[int], labels: Sequence[tuple[int, ...]], blocks: Sequence[Any]) -> tuple[list[np.ndarray], Any]:
    """Return the values of each row's labels out of those of the whole vocabulary, and the other result of the program."""
    values = [some for size, (block, _) in zip(sizes, blocks, strict=True) for some in block[:size]]
    _, finite = joined(sizes, [(None, fine) for _, fine in blocks])
    return [some[list(ids)] for some, ids in zip(values, labels, strict=True)], finite


def padded_lists(lists: Sequence[tuple[int, ...]], width: int) -> np.ndarray:
    """Return lists of token ids as int32 `[lists, width]`, padded with -1. Longer lists become padding alone."""
    table = np.full((len(lists), width), -1, np.int32)
    for row, ids in zip(table, lists, strict=True):
        if len(ids) <= width:
            row[: len(ids)] = ids
    return table
