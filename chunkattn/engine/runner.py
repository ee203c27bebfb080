"""`Runner`: the model on the device, with one jitted step and the choice of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chunkattn.backends.base import AttentionBackend, HeadInputs, Metadata
from chunkattn.backends.default_cache import KVCache
from chunkattn.backends.recurrence import Inputs, RecurrentCache
from chunkattn.backends.recurrent import make_recurrence
from chunkattn.backends.registry import ON_REQUEST, get_backend
from chunkattn.engine.decode_program import DecodeArrays, Decoded, DecodeProgram, Fed
from chunkattn.engine.host_calls import (
    Decode,
    Forward,
    ReadDecodes,
    ReadSample,
    ResetPool,
    Tell,
    WarmPicks,
    WarmReadout,
)
from chunkattn.engine.invariance import Invariance
from chunkattn.engine.kv_pool import KVPool, fingerprint
from chunkattn.engine.messages import TokenLogprobs
from chunkattn.engine.row_reader import LABEL_WIDTHS, Params, Reading, RowReader, begin_copy
from chunkattn.engine.sample_inputs import SAMPLE_BUCKETS, Edits, SampleInput, edit_widths, empty_edits, empty_input
from chunkattn.engine.sampling import apply_edits, apply_mask, choose, finite_rows, largest, mask_words, read
from chunkattn.engine.state_pool import StatePool
from chunkattn.engine.step import StepArrays
from chunkattn.engine.upload import Form, pack, unpack
from chunkattn.models.adapter_slots import AdapterSlots, RowAdapters, Stacks
from chunkattn.models.decoder import Decoder
from chunkattn.models.shards import WHOLE

Program = Callable[[], Any]
"""Call that runs one compiled program, or a few small ones, on zeros, and returns its values."""


class Runner(RowReader):
    """Owner of the parameters and the KV pool.

    The step outputs hidden states. Sampling and log-probabilities are separate small programs, so that their variants add to
    the variants of the step instead of multiplying them.

    Attributes:
        backend: attention backend of the heads of one device.
        backends: attention backends by the name that a request gives; None names `backend`.
        pool: pages of the KV cache.
        states: slots and seats of recurrent layers; None for a model without such layers.
        sample_sizes: sizes to which blocks of sampled rows are padded.
        picked_sizes: sizes of blocks that are read, and, unless the model is a classifier, `sample_sizes`.
        slots: adapters that rows may have; None for none.
    """

    def __init__(
        self,
        model: Decoder,
        backend: AttentionBackend,
        num_pages: int,
        max_logprobs: int,
        batch_invariant: bool | None = None,
        tell: Tell | None = None,
        slots: AdapterSlots | None = None,
        tracks: tuple[int, int] = (0, 0),
    ) -> None:
        invariance = Invariance.of(batch_invariant, backend, model.spec, model.dtype, list(model.weights.values()))
        super().__init__(model, max_logprobs, invariance, tell)
        self.backend, self.slots = backend, slots
        self.backends: dict[str | None, AttentionBackend] = {n: get_backend(n)(backend.spec) for n in ON_REQUEST}
        self.backends[None] = backend
        attention, recurrent = model.spec.attention_layers, model.spec.recurrent_layers
        self._places = {layer: place for place, layer in enumerate((*attention, *recurrent))}  # of caches
        self.pool = KVPool(backend, len(attention), num_pages, self.compiles, self.shards, tell)
        self.states: StatePool | None = None
        if model.spec.recurrent is not None:
            recurrence = make_recurrence(model.spec.recurrent.recurrence(self.shards.size))
            self.states = StatePool(recurrence, len(recurrent), *tracks, self.compiles, self.shards, tell)
        backend.batch_invariant = self.invariance.holds
        backend.any_table_width &= not self.invariance.own_pages  # every part of a step gets a table of its own
        self.sample_sizes = self._read_sizes if self.invariance.one_size else SAMPLE_BUCKETS
        sampled = self.sample_sizes if model.spec.num_labels is None else ()
        self.picked_sizes = tuple(sorted({*self._read_sizes, *self._label_sizes, *sampled}))
        params, pool = [self._partition(*of) for of in model.weights.items()], self._cache_partitions
        head = [self._partition(model.head_name, model.head)]
        stacks = {} if slots is None else slots.partitions
        step = self.shards.map(self._trace_counted, [params, pool, stacks], (WHOLE, WHOLE, pool))
        # The pool's arrays are donated, so that writing a token does not copy them.
        self._step = jax.jit(step, donate_argnums=1, static_argnames=("form", "backend"))
        program = partial(self.compiles.jit, shards=self.shards)
        self._decode: DecodeProgram | None = None
        if backend.advances and not self.invariance.one_size and self.states is None and model.spec.num_labels is None:
            self._decode = DecodeProgram(
                self._trace_step,
                self._trace_logits,
                backend,
                self.shards,
                (params, pool, stacks),
                num_top=self.max_logprobs,
                head=self._head_place,
                compiles=self.compiles,
            )
        self._fed: dict[int, Fed] = {}  # what the last run left, by number of rows
        self._sample = program("sample", self._trace_sample, inputs=[head], static_argnames="with_logprobs")
        self._edit = program("sample", apply_edits)
        self._mask = program("sample", apply_mask)
        self._choose = program("sample", self._trace_choose, static_argnames="with_logprobs")

    def forward(self, arrays: StepArrays) -> tuple[jax.Array, jax.Array]:
        """Run the layers of one step, without waiting for the device.

        Args:
            arrays: arrays of the step; its K/V is written to the pool.

        Returns:
            Hidden states, float32 `[T, hidden]`, and bool `[T]`, whether all values of a row are finite.
        """
        *inputs, backend = arrays
        if self.tell:
            self.tell(Forward(tuple(map(np.asarray, jax.tree.leaves(inputs))), backend))
        sent, form = self._sent(inputs, None)
        hidden, finite, caches = self._step(self._params, self.caches, self._stacks, sent, form=form, backend=backend)
        self._take(caches)
        return hidden, begin_copy(finite)

    @property
    def decodes(self) -> bool:
        """Return whether `decode` works."""
        return self._decode is not None

    def decode(self, arrays: DecodeArrays, *, continues: bool) -> Decoded:
        """Run several decodes, without waiting for the device.

        Args:
            arrays: arrays of the run; its K/V is written to the pool.
            continues: whether rows continue those of the last run, which had as many.
        """
        assert self._decode is not None
        if self.tell:
            self.tell(Decode(tuple(map(np.asarray, jax.tree.leaves(arrays))), continues))
        rows = len(arrays.left)
        if rows not in self._fed:
            self._fed[rows] = Fed(*(self.shards.zeros((rows,), of) for of in (np.int32, bool)))
        sent, form = self._sent(arrays, None)
        run, fed = self._decode.on(self._platform(None)), self._fed[rows]
        decoded, self._fed[rows], caches = run(self._params, self.caches, self._stacks, fed, sent, form=form)
        self._take(caches)
        begin_copy(decoded.table)
        return decoded

    def read_decodes(self, decoded: Decoded, *, with_logprobs: bool) -> tuple[np.ndarray, TokenLogprobs | None]:
        """Wait for the values of a run, and return them on the host (see `Decoded`).

        Args:
            decoded: values of the oldest run on the device.
            with_logprobs: whether to return log-probabilities.
        """
        if self.tell:
            self.tell(ReadDecodes())
        if not with_logprobs:
            return np.asarray(decoded.table), None
        table, logprobs = jax.device_get(decoded)
        return table, logprobs

    @property
    def caches(self) -> list[KVCache | RecurrentCache]:
        """Return what the layers keep between steps: of those with attention, then of the recurrent ones."""
        return [*self.pool.caches, *(() if self.states is None else self.states.caches)]

    @property
    def _cache_partitions(self) -> list[Any]:
        return [*self.pool.partitions, *(() if self.states is None else self.states.partitions)]

    def _take(self, caches: list[KVCache | RecurrentCache]) -> None:
        """Take the caches that a step returns."""
        count = len(self.pool.partitions)
        self.pool.caches = caches[:count]
        if self.states is not None:
            self.states.caches = caches[count:]

    def reset(self) -> None:
        """Allocate new caches after the loss of the donated ones."""
        if self.tell:
            self.tell(ResetPool())
        self.pool.reset()
        self._fed.clear()
        if self.states is not None:
            self.states.reset()

    @property
    def _stacks(self) -> Stacks:
        return {} if self.slots is None else self.slots.arrays

    @property
    def row_flops(self) -> float:
        """Return the floating-point operations of the layers' matrices per row and device, without the head."""
        return 2.0 * sum(layer.row_products(self.spec.hidden_size) for layer in self.spec.layers) / self.shards.size

    @property
    def pair_flops(self) -> float:
        """Return the floating-point operations of attention per row, slot and device, over all layers."""
        mixers = self.spec.attention.values()
        return 4.0 * sum(mixer.num_heads * mixer.head_dim for mixer in mixers) / self.shards.size

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the parameters, over all devices once. Tied embeddings count once."""
        return sum(leaf.nbytes for leaf in self._params)

    def lower(
        self, arrays: StepArrays | DecodeArrays, num_pages: int, where: jax.sharding.Sharding | None = None
    ) -> jax.stages.Lowered:
        """Lower the program of a step or of a run for devices that may be absent, to compile it ahead of time.

        Args:
            arrays: arrays of the step or the run.
            num_pages: number of pages of the KV pool.
            where: sharding of all arrays on one device; None for the devices of the model.
        """

        def there(x: Any, sharding: jax.sharding.Sharding | None) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where or sharding)  # type: ignore[no-untyped-call]

        def whole(tree: Any) -> Any:
            return jax.tree.map(partial(there, sharding=self.shards.sharding(WHOLE)), tree)

        caches = jax.eval_shape(
            lambda: [self.shards.map(lambda: self.backend.allocate(num_pages), outputs=of)() for of in self.pool.partitions]
        )
        if self.states is not None:
            caches += self.states.shapes()
        params = [
            jax.tree.map(partial(there, sharding=self.shards.sharding(self._partition(name, weight))), weight)
            for name, weight in zip(self._names, self._params, strict=True)
        ]
        pool = jax.tree.map(lambda x, of: there(x, self.shards.sharding(of)), caches, self._cache_partitions)
        partitions = {} if self.slots is None else self.slots.partitions
        stacks = jax.tree.map(lambda x, of: there(x, self.shards.sharding(of)), self._stacks, partitions)
        if isinstance(arrays, DecodeArrays):
            assert self._decode is not None
            fed = Fed(*(np.zeros(len(arrays.left), of) for of in (np.int32, bool)))
            sent, form = self._sent(arrays, where)
            program = self._decode.on(self._platform(where))
            lowered: jax.stages.Lowered = program.lower(params, pool, stacks, whole(fed), whole(sent), form=form)
            return lowered
        *inputs, backend = arrays
        sent, form = self._sent(inputs, where)
        return self._step.lower(params, pool, stacks, whole(sent), form=form, backend=backend)

    def _sent(self, arrays: Any, where: jax.sharding.Sharding | None) -> tuple[Any, Form | None]:
        """Return host arrays as they go to the devices, and their form if they go in one array."""
        return pack(arrays) if self._packs(where) else (arrays, None)

    def _packs(self, where: jax.sharding.Sharding | None) -> bool:
        """Return whether the arrays of a call go to the devices in one array. CPUs read each where it lies on the host.

        Args:
            where: sharding of all arrays on one device; None for the devices of the model.
        """
        return self._platform(where) != "cpu"

    def _platform(self, where: jax.sharding.Sharding | None) -> str:
        device = self.shards.devices[0] if where is None else next(iter(where.device_set))
        return str(device.platform)

    def warm_picks(self, hidden: jax.Array) -> None:
        """Compile the programs that pick rows from a step's hidden states `[T, hidden]`."""
        if self.tell:
            self.tell(WarmPicks())
        for size in self.picked_sizes:
            self._pick(hidden, [0] * size, self.picked_sizes)

    def warm_readout(self, size: int, number: int) -> Any:
        """Compile a program that reads `size` picked rows, and return its values.

        Args:
            size: one of `picked_sizes`.
            number: number of the program, below `num_readouts(size)`; the likeliest come first.
        """
        if self.tell:
            self.tell(WarmReadout(size, number))
        return self._readouts(size)[number]()

    def num_readouts(self, size: int) -> int:
        """Return the number of programs that read `size` picked rows; `size` is one of `picked_sizes`."""
        return len(self._readouts(size))

    def _readouts(self, size: int) -> list[Program]:
        # Results of programs lie on every device; a program compiles again for an argument that lies elsewhere.
        params, picked = self._head, self.shards.zeros((size, self.spec.hidden_size))
        if self.spec.num_labels is not None:
            return [partial(self._classify, params, picked)]
        programs: list[Program] = []
        edits: list[Program] = []
        if size in self.sample_sizes:
            vocab = self.spec.vocab_size
            logits = self.shards.zeros((size, vocab))
            samples = [(empty_input(size, vocab), logprobs) for logprobs in (False, True)]
            programs += [partial(self._sample, params, picked, g, with_logprobs=w) for g, w in samples]
            edits += [partial(self._choose, logits, logits, g, with_logprobs=w) for g, w in samples]
            edits += [partial(self._edit_nothing, logits, width) for width in edit_widths(vocab)]
            edits += [partial(self._mask, logits, np.zeros((size, mask_words(vocab)), np.int32))]
        if size in self._label_sizes:
            programs += [partial(self._read_labels, params, picked, np.zeros((size, n), np.int32)) for n in LABEL_WIDTHS]
        if size in self._read_sizes:
            programs += [partial(self._read, params, picked, np.zeros(size, np.int32))]
            programs += [partial(self._read_vocabulary, params, picked)]
        if size in {*self.sample_sizes, *self._read_sizes}:
            programs += [partial(self._logits, params, picked)]
        return programs + edits

    def _edit_nothing(self, logits: np.ndarray | jax.Array, width: int) -> jax.Array:
        """Compile the edits of `width`; the large arrays are made and dropped here."""
        return self._edit(logits, empty_edits(len(logits), width, logits.shape[1]))

    def fingerprint(self) -> bytes:
        """Return 16 bytes that identify this model's K/V: its geometry, weights, attention and page format."""
        form: tuple[Any, ...] = (self.spec, self.backend.name, self.backend.spec, self.pool.page_shapes)
        if self.states is not None:
            form += (type(self.states.recurrence).__name__, self.states.slot_shapes)
        return fingerprint(form, zip(self._names, self._params, strict=True))

    # Reading. These methods return values and, for each row, whether its logits are finite.

    def sample(
        self,
        hidden: jax.Array,
        rows: Sequence[int],
        parameters: SampleInput,
        edits: Edits | None,
        with_logprobs: bool,
        mask: np.ndarray | None = None,
    ) -> Reading[tuple[np.ndarray, TokenLogprobs | None, np.ndarray]]:
        """Choose the next token of up to `sample_sizes[-1]` rows. Entries of padding follow those of the rows.

        Args:
            hidden: float32 `[T, hidden]` hidden states of the step.
            rows: rows to sample from.
            parameters: sampling parameters, padded to one of `sample_sizes`.
            edits: changes of single logits, padded to the same size; None if no row changes a logit.
            with_logprobs: whether to read the log-probabilities of the tokens.
            mask: tokens that each row may draw, padded to the same size; see `apply_mask`. None allows all tokens.

        Returns:
            Readout of token ids, their log-probabilities or None, and whether the logits are finite.
        """
        if self.tell:
            self.tell(ReadSample(tuple(rows), parameters, edits, with_logprobs, mask))
        picked = self._pick(hidden, rows, self.sample_sizes)
        if edits is None and mask is None:
            drawn = self._sample(self._head, picked, parameters, with_logprobs=with_logprobs)
        else:  # several programs, so that a mask and each width of edits compile only small ones
            logits = self._logits(self._head, picked)
            edited = logits if edits is None else self._edit(logits, edits)
            edited = edited if mask is None else self._mask(edited, mask)
            drawn = self._choose(logits, edited, parameters, with_logprobs=with_logprobs)
        return Reading(begin_copy(drawn), lambda values: values)

    def _model(self, params: Params, adapters: RowAdapters | None) -> Decoder:
        return Decoder(self.spec, dict(zip(self._names, params, strict=True)), self.dtype, self.shards, adapters)

    # Traced functions

    def _trace_counted(
        self, params: Params, caches: list[Any], stacks: Stacks, sent: Any, *, form: Form | None, backend: str | None
    ) -> Any:
        self.compiles.count(backend or "step")
        inputs = sent if form is None else unpack(sent, form)
        return self._trace_step(params, caches, stacks, *inputs, backend=backend)

    def _trace_step(
        self,
        params: Params,
        caches: list[KVCache | RecurrentCache],
        stacks: Stacks,
        token_ids: jax.Array,
        positions: jax.Array,
        metadata: Metadata,
        slots: jax.Array | None = None,
        walks: Any = None,
        *,
        backend: str | None = None,
    ) -> tuple[jax.Array, jax.Array, list[KVCache | RecurrentCache]]:
        caches, attention, mixers = list(caches), self.backends[backend], self.spec.attention

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            # A tile multiplies the V of slots that a row does not see by zero, so NaN in the cache would spread to other rows.
            # The cache gets zeros instead, and the row itself gets NaN, which its hidden state keeps.
            fine_k, fine_v = jnp.isfinite(k), jnp.isfinite(v)
            k, v = jnp.where(fine_k, k, 0), jnp.where(fine_v, v, 0)
            scale, window, place = mixers[layer].scale, mixers[layer].window, self._places[layer]
            out, caches[place] = attention.forward(q, k, v, caches[place], metadata, scale=scale, window=window)
            taint = jnp.where(fine_k & fine_v, 0, jnp.nan).astype(out.dtype)
            return out + jnp.repeat(taint, q.shape[1] // k.shape[1], axis=1)

        def attend_inputs(layer: int, heads: HeadInputs) -> jax.Array:
            scale, place = mixers[layer].scale, self._places[layer]
            out, caches[place] = attention.forward_inputs(heads, caches[place], metadata, scale=scale)
            return out

        def recur(layer: int, inputs: Inputs) -> jax.Array:
            assert self.states is not None
            place = self._places[layer]
            out, caches[place] = self.states.recurrence.forward(inputs, caches[place], walks)
            return out

        prepared = attend_inputs if attention.prepares_heads else None
        adapters = None if self.slots is None or slots is None else RowAdapters.of(stacks, slots, self.slots.count)
        hidden = self._model(params, adapters)(token_ids, positions, attend, prepared, recur)
        return hidden, finite_rows(hidden), caches

    def _trace_sample(
        self, params: Params, hidden: jax.Array, parameters: SampleInput, *, with_logprobs: bool
    ) -> tuple[jax.Array, TokenLogprobs | None, jax.Array]:
        logits = self._trace_logits(params, hidden)
        return self._trace_choose(logits, logits, parameters, with_logprobs=with_logprobs)

    def _trace_choose(
        self, raw: jax.Array, edited: jax.Array, parameters: SampleInput, *, with_logprobs: bool
    ) -> tuple[jax.Array, TokenLogprobs | None, jax.Array]:
        tokens = choose(edited, parameters)
        if with_logprobs:
            return tokens, *read(raw, tokens, self.max_logprobs)
        return tokens, None, largest(raw)[1]
