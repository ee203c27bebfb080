"""`DecodeProgram`: up to `STEPS` decodes in one program. Tokens are chosen, checked and fed back on the device.

The host looks once a run, and may send the next run before it has read the present one: what a run leaves on the device, the
last token of every row and whether the row goes on, the next run takes from there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from chunkattn.backends.base import AttentionBackend, Metadata, StepArray
from chunkattn.engine.messages import TokenLogprobs
from chunkattn.engine.programs import ProgramCounts
from chunkattn.engine.sample_inputs import SampleInput
from chunkattn.engine.sampling import choose, largest, read
from chunkattn.engine.upload import Form, unpack
from chunkattn.models.shards import WHOLE, Shards

logger = logging.getLogger(__name__)

STEPS = 16
"""Maximum number of decodes of a run."""
MOST_STOPS = 64
"""Maximum number of tokens that end a row's text; rows with more are decoded step by step."""
NO_TOKEN = -1
_GRAPHS = "xla_gpu_enable_command_buffer"
_IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE"
"""Kinds of operations in CUDA graphs: XLA's default and loops."""


class Fed(NamedTuple):
    """Values that a run leaves on the device for the next one.

    Attributes:
        token_ids: int32 `[T]` last token of each row.
        goes_on: bool `[T]`, whether the row has not ended.
    """

    token_ids: StepArray
    goes_on: StepArray


class DecodeArrays(NamedTuple):
    """Input of a run of decodes, one row a sample. The rows of padding come last.

    Attributes:
        token_ids: int32 `[T]` last token of each row, where the host knows it.
        source: int32 `[T]` row of the last run whose token the row continues; -1 for a token that the host knows.
        positions: int32 `[T]` position ids of the first decode.
        metadata: result of `AttentionBackend.build_decodes`.
        slots: see `StepArrays`.
        sampling: sampling parameters of the first decode, of `T` rows.
        stops: int32 `[T, MOST_STOPS]` tokens that end each row, padded with `NO_TOKEN`.
        left: int32 `[T]` tokens that each row may still generate; 0 for padding.
        limit: int32 maximum number of decodes, up to `STEPS`.
        reads_logprobs: bool, whether log-probabilities are read.
    """

    token_ids: StepArray
    source: StepArray
    positions: StepArray
    metadata: Metadata
    slots: StepArray | None
    sampling: SampleInput
    stops: StepArray
    left: StepArray
    limit: StepArray
    reads_logprobs: StepArray


class Decoded(NamedTuple):
    """Values of a run.

    Attributes:
        table: int32 `[STEPS + 3, T]`: the tokens of each row by decode, the number of its tokens, whether its values are finite
            in the last decode, and the number of decodes. A row's last token may end its text. Values that are not finite end
            the run.
        logprobs: log-probabilities of the tokens, arrays `[STEPS, T, ...]`; zeros unless they are read.
    """

    table: StepArray
    logprobs: TokenLogprobs


class _Carry(NamedTuple):
    """State of a run between two decodes: values as in `Decoded`, and `steps` int32 `[T]`, decodes that each row moved on."""

    number: jax.Array
    fed: Fed
    steps: jax.Array
    tokens: jax.Array
    counts: jax.Array
    finite: jax.Array
    logprobs: TokenLogprobs
    caches: Any


def _options(platform: str) -> dict[str, str] | None:
    """Return the compiler's options: on GPUs the loop is part of the CUDA graph, or else the host would start every decode.

    What `XLA_FLAGS` says of graphs holds instead, and so does the default of an XLA that does not know these kinds.
    """
    if platform not in ("gpu", "cuda") or _GRAPHS in os.environ.get("XLA_FLAGS", ""):
        return None
    options = {_GRAPHS: _IN_GRAPHS}
    try:
        if jax.default_backend() == "gpu":
            jax.jit(lambda x: x + 1, compiler_options=options).lower(0).compile()
    except jax.errors.JaxRuntimeError:
        logger.warning("this XLA cannot put a loop into a CUDA graph; runs of decodes are slower")
        return None
    return options


def later(sampling: SampleInput, steps: jax.Array) -> SampleInput:
    """Return the sampling parameters of rows that have moved on by `steps` `[T]`: random numbers depend on a token's place."""
    return sampling._replace(fold=jnp.asarray(sampling.fold).at[:, 1].add(steps))


class DecodeProgram:
    """The program of a run of decodes.

    A row that has ended stands still: it computes its last token again, and writes the same K/V to the same slot.

    Args:
        step: traced step of the model, `Runner._trace_step`.
        logits: traced logits of hidden states.
        backend: attention backend, which `advances`.
        shards: devices of the model.
        partitions: partitions of parameters, caches and adapters.
        num_top: number of likeliest tokens that log-probabilities come with.
        head: place of the head among the parameters.
        compiles: counts of programs.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        logits: Callable[..., jax.Array],
        backend: AttentionBackend,
        shards: Shards,
        partitions: tuple[Any, Any, Any],
        *,
        num_top: int,
        head: int,
        compiles: ProgramCounts,
    ) -> None:
        self._step, self._logits, self._backend = step, logits, backend
        self._num_top, self._head, self._compiles = num_top, head, compiles
        self._mapped = shards.map(self._trace, partitions, (WHOLE, WHOLE, partitions[1]))
        self._programs: dict[str, Any] = {}

    def on(self, platform: str) -> Any:
        """Return the jitted program for a platform: of parameters, caches, adapters, `Fed`, arrays and their form."""
        if platform not in self._programs:
            self._programs[platform] = jax.jit(
                self._mapped, donate_argnums=1, static_argnames="form", compiler_options=_options(platform)
            )
        return self._programs[platform]

    def _trace(
        self, params: list[Any], caches: list[Any], stacks: Any, fed: Fed, sent: Any, *, form: Form | None
    ) -> tuple[Decoded, Fed, list[Any]]:
        """Run decodes until the limit, the end of every row, or a value that is not finite.

        Args:
            params: parameters of the model.
            caches: caches of the layers.
            stacks: adapters that rows may have.
            fed: what the last run left.
            sent: `DecodeArrays`, packed if there is a form.
            form: form of the packed arrays, or None.
        """
        self._compiles.count("decode")
        arrays: DecodeArrays = sent if form is None else unpack(sent, form)
        rows, used, known = len(arrays.left), arrays.left > 0, arrays.source < 0
        row = jnp.maximum(arrays.source, 0)
        first = Fed(
            jnp.where(known, arrays.token_ids, fed.token_ids[row]),
            used & (known | fed.goes_on[row]),
        )
        top = (STEPS, rows, self._num_top)
        zeros = partial(jnp.zeros, dtype=jnp.float32)
        values: tuple[StepArray, ...] = (zeros(top[:2]), jnp.zeros(top[:2], jnp.int32), jnp.zeros(top, jnp.int32), zeros(top))
        nothing = jnp.zeros(rows, jnp.int32)
        tokens = jnp.full(top[:2], NO_TOKEN, jnp.int32)

        def goes_on(carry: _Carry) -> jax.Array:
            return (carry.number < arrays.limit) & carry.fed.goes_on.any() & carry.finite.all()

        def decode(carry: _Carry) -> _Carry:
            (token_ids, active), steps, number = carry.fed, carry.steps, carry.number
            metadata = self._backend.advance(arrays.metadata, steps, used)
            hidden, finite, caches = self._step(
                params, carry.caches, stacks, token_ids, arrays.positions + steps, metadata, arrays.slots
            )
            logits = self._logits(params[self._head : self._head + 1], hidden)
            drawn = choose(logits, later(arrays.sampling, steps))
            logprobs = jax.lax.cond(
                arrays.reads_logprobs,
                lambda: read(logits, drawn, self._num_top)[0],
                lambda: jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), carry.logprobs),
            )
            finite = finite & largest(logits)[1] | ~active
            counts = carry.counts + (active & finite)
            active &= finite & ~(drawn[:, None] == arrays.stops).any(1) & (counts < arrays.left)
            return _Carry(
                number + 1,
                Fed(jnp.where(active, drawn, token_ids), active),
                steps + active,
                carry.tokens.at[number].set(drawn),
                counts,
                finite,
                jax.tree.map(lambda all_, some: all_.at[number].set(some), carry.logprobs, logprobs),
                caches,
            )

        start = _Carry(jnp.int32(0), first, nothing, tokens, nothing, jnp.ones(rows, bool), TokenLogprobs(*values), caches)
        end = jax.lax.while_loop(goes_on, decode, start)
        goes_on_after = end.fed.goes_on & end.finite.all()
        facts = jnp.stack([end.counts, end.finite.astype(jnp.int32), jnp.broadcast_to(end.number, rows)])
        table = jnp.concatenate([end.tokens, facts])
        return Decoded(table, end.logprobs), Fed(end.fed.token_ids, goes_on_after), end.caches
