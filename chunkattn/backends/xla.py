"""Tile-range attention in plain XLA operations, for any platform and without an O(n^2) array.

The algorithm is online softmax. Each row sums portions of `portion()` slots, first those of the prefix, then those of its own
part; where a portion begins depends on the row's own part alone (see `AttentionBackend.forward`). A task is a run of
consecutive rows of one sequence and a range of slots whose portions they share: rows of all parts share the prefix, and rows
of one part share this part. The states of all rows are kept between tasks. Tasks are computed in tiles of many rows, one
sequence at a time, or of few rows. Loops have dynamic trip counts, so a portion without a visible slot costs neither a load
nor a multiplication.

Axes that `base` does not define: `B` runs of rows computed together, `R` folded rows (rows times query heads per KV head), `N`
slots of a portion, `E` tiles.

Source: FlashAttention, arXiv:2205.14135.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from chunkattn.backends import softmax
from chunkattn.backends.base import AttentionBatch, Queries, RowWeighing, StepArray, positions_of
from chunkattn.backends.default_cache import KV, KVCache, read_slots, write_pages
from chunkattn.backends.portable import PortableBackend, on_cpu
from chunkattn.backends.registry import register_backend
from chunkattn.backends.softmax import Softmax
from chunkattn.backends.tiles import Tiles, cut, cut_at_questions, spans

MANY_ROWS = 256
"""Maximum number of rows of a tile of many rows."""
FOLDED_ROWS = 16
"""Divisor of the number of folded rows of a tile. XLA:CPU computes what remains of an array after its last full vector, of 16
values at most, with other instructions, which round otherwise."""
MOST_FEW = 128
"""Maximum number of rows that are computed in tiles of few rows."""


def portion() -> int:
    """Return the number of slots of a portion."""
    return 128 if on_cpu() else 256


def few_runs() -> int:
    """Return the maximum number of runs of a tile of few rows.

    XLA:CPU takes as long for runs together as one by one, and runs together wait for the longest.
    """
    return 1 if on_cpu() else 32


class Tasks(NamedTuple):
    """Tasks in tiles of `B` runs. `E` is a static bound.

    Attributes:
        row: first row of each task.
        size: rows of each task; 0 for padding.
        begin: first slot of each task's range.
        end: slot after each task's range.
        of_chunks: whether each task's range holds the chunks that weighed rows see; None if no row is weighed.
        num_tiles: tiles in use.
    """

    row: Int32[StepArray, "E B"]
    size: Int32[StepArray, "E B"]
    begin: Int32[StepArray, "E B"]
    end: Int32[StepArray, "E B"]
    of_chunks: Bool[StepArray, "E B"] | None
    num_tiles: Int32[StepArray, ""]


class TileMetadata(NamedTuple):
    """A step as tasks.

    Attributes:
        many: tasks of many rows; None in steps that are too small for them.
        few: tasks of few rows.
        row_seq: see `AttentionBatch`.
        row_slot: see `AttentionBatch`.
        flat_slots: see `AttentionBatch`.
        block_tables: see `AttentionBatch`.
        page_len: see `AttentionBatch`.
        weighing: weighing of every row; None leaves all rows as they are.
        page_position: see `AttentionBatch`; None for models without sliding windows.
    """

    many: Tasks | None
    few: Tasks
    row_seq: Int32[StepArray, " T"]
    row_slot: Int32[StepArray, " T"]
    flat_slots: Int32[StepArray, " T"]
    block_tables: Int32[StepArray, "S W"]
    page_len: Int32[StepArray, "S W"]
    weighing: RowWeighing | None
    page_position: Int32[StepArray, "S W"] | None


class _Kind(NamedTuple):
    """Tasks of one kind: the chunks of weighed rows, the prefix, or the rows' own parts.

    Attributes:
        runs: runs of rows with one range.
        long: whether each run is computed in tiles of many rows.
        begin: first slot of each row's range.
        limit: slot after each row's range.
        remainders: whether what remains of a long run may be computed in tiles of few rows.
    """

    runs: Tiles
    long: Bool[np.ndarray, " runs"]
    begin: Int32[np.ndarray, " T"]
    limit: Int32[np.ndarray, " T"]
    remainders: bool


@register_backend("xla")
class XlaBackend(PortableBackend):
    """The portable backend, which `auto` falls back to on every platform."""

    advances = True

    def build_metadata(self, batch: AttentionBatch) -> TileMetadata:
        """Cut the batch into tasks; see `AttentionBackend.build_metadata`."""
        rows, seqs = len(batch.row_seq), len(batch.prefix_end)
        weighing, few_rows = batch.row_weighing(), _few_rows(self.spec.num_heads, self.spec.num_kv_heads)
        many, few = [], []
        for kind in _kinds(batch, weighing):
            tiles = cut(kind.runs.pick(kind.long), MANY_ROWS)
            small = (tiles.size <= MOST_FEW) & kind.remainders
            rest = [kind.runs.pick(~kind.long), tiles.pick(small)]
            many.append((tiles.pick(~small), kind))
            few.append((cut(Tiles(*map(np.concatenate, zip(*rest, strict=True))), few_rows), kind))
        long = rows // (MOST_FEW + 1)
        many_bound = (len(many) - 1) * (rows // MANY_ROWS + long) + long
        few_bound = (len(few) - 1) * min(rows, rows // few_rows + seqs) + rows
        return TileMetadata(
            many=_tasks(batch, many, many_bound, 1) if many_bound else None,
            few=_tasks(batch, few, few_bound, min(few_runs(), rows)),
            row_seq=batch.row_seq,
            row_slot=batch.row_slot,
            flat_slots=batch.flat_slots(),
            block_tables=batch.block_tables,
            page_len=batch.page_len,
            weighing=weighing,
            page_position=batch.page_positions() if self.spec.windowed else None,
        )

    def advance(self, decodes: TileMetadata, steps: Int32[Array, " T"], used: Bool[Array, " T"]) -> TileMetadata:
        """Move the rows and the ends of their own parts; see `AttentionBackend.advance`."""
        few, size = decodes.few, self.spec.block_size
        own, slot = few.end == decodes.row_slot[few.row] + 1, decodes.row_slot + steps
        page = jnp.take_along_axis(decodes.block_tables[decodes.row_seq], (slot // size)[:, None], axis=1)[:, 0]
        return decodes._replace(
            few=few._replace(end=few.end + jnp.where(own & (few.size > 0), steps[few.row], 0)),
            row_slot=slot,
            flat_slots=jnp.where(used, page * size + slot % size, -1),
        )

    def forward(
        self, q: Queries, k: KV, v: KV, cache: KVCache, metadata: TileMetadata, *, scale: float, window: int | None = None
    ) -> tuple[Queries, KVCache]:
        """Attend task by task; see `AttentionBackend.forward`."""
        cache = write_pages(cache, k, v, metadata.flat_slots)
        rows, heads, _ = q.shape
        kv_heads, few_rows = k.shape[1], _few_rows(heads, k.shape[1])
        # A tile reads and writes all its rows, those after the last row of the step included.
        padding = few_rows if metadata.many is None else max(few_rows, MANY_ROWS)
        padded = metadata._replace(row_slot=jnp.pad(metadata.row_slot, (0, padding)))
        if window is not None:  # chunks are weighed anew in full attention alone
            padded = padded._replace(weighing=None)
        folded = softmax.fold(jnp.pad(q, ((0, padding), (0, 0), (0, 0))), kv_heads)
        state = softmax.start(folded)
        if metadata.many is not None:
            state = _attend(state, folded, cache, padded, metadata.many, MANY_ROWS, scale, window)
        state = _attend(state, folded, cache, padded, metadata.few, few_rows, scale, window)
        return softmax.unfold(softmax.finish(state), rows + padding)[:rows].astype(q.dtype), cache


def _few_rows(heads: int, kv_heads: int) -> int:
    """Return the rows of a tile of few rows: the fewest that give several vectors of folded rows."""
    rows = FOLDED_ROWS // math.gcd(heads // kv_heads, FOLDED_ROWS)
    return rows if rows * heads > FOLDED_ROWS else 2 * rows


def _kinds(batch: AttentionBatch, weighing: RowWeighing | None) -> list[_Kind]:
    """Return the kinds of tasks, in the order in which a row takes them.

    All tasks of a row but the last one, its own part, have tiles of one size, so that their order is kept.
    """
    runs, prefix_end = spans(batch), batch.prefix_end[batch.row_seq]
    starts, everything = np.maximum(batch.row_start, prefix_end), np.full(len(prefix_end), np.iinfo(np.int32).max, np.int32)
    prefix = runs.pick(prefix_end[runs.row] > 0)
    kinds = [_Kind(prefix, prefix.size > MOST_FEW, np.zeros_like(prefix_end), prefix_end, False)]
    if weighing is not None:
        weighed = weighing.end > weighing.begin
        starts = np.where(weighed, weighing.end, starts)
        cuts = cut_at_questions(runs, weighing)
        long = (runs.size > MOST_FEW)[np.searchsorted(runs.row, cuts.row, side="right") - 1]  # as the prefix of these rows
        questions = weighed[cuts.row]
        kinds.insert(0, _Kind(cuts.pick(questions), long[questions], weighing.begin, weighing.end, False))
    # Rows of the prefix have no part of their own.
    part_start = np.where(batch.row_slot < prefix_end, -1, starts)
    parts = spans(batch, part_start)
    parts = parts.pick(part_start[parts.row] >= 0)
    return [*kinds, _Kind(parts, parts.size > MOST_FEW, starts.astype(np.int32), everything, True)]


def _tasks(batch: AttentionBatch, tiles_of_kinds: list[tuple[Tiles, _Kind]], bound: int, runs: int) -> Tasks:
    """Return the tasks of all kinds, one kind after the other.

    Args:
        batch: the step.
        tiles_of_kinds: kinds, and tiles of rows of each.
        bound: maximum number of tasks.
        runs: tasks of a tile, all of one kind.
    """
    columns = np.zeros((5, -(-bound // runs) + len(tiles_of_kinds), runs), np.int32)
    flat, at = columns.reshape(5, -1), 0
    for number, (tiles, kind) in enumerate(tiles_of_kinds):
        begin = kind.begin[tiles.row]
        end = np.minimum(kind.limit[tiles.row], batch.row_slot[tiles.row + tiles.size - 1] + 1)
        of_chunks = np.full(len(begin), len(tiles_of_kinds) == 3 and number == 0)
        fields = np.stack([tiles.row, tiles.size, begin, end, of_chunks])
        if runs > 1:  # neighbours wait for the longest
            fields = fields[:, np.argsort(end - begin, kind="stable")]
        flat[:, at : at + fields.shape[1]] = fields
        at += -(-fields.shape[1] // runs) * runs
    row, size, begin, end, of_chunks = columns
    return Tasks(row, size, begin, end, of_chunks > 0 if len(tiles_of_kinds) == 3 else None, np.int32(at // runs))


def _attend(
    state: Softmax,
    q: Float[Array, "Hkv R D"],
    cache: KVCache,
    metadata: TileMetadata,
    tasks: Tasks,
    rows: int,
    scale: float,
    window: int | None,
) -> Softmax:
    """Add tasks to the state of all rows, one tile of `rows` rows a run at a time."""
    groups, length = q.shape[1] // len(metadata.row_slot), portion()
    block_size, page_position = cache[0].shape[1], metadata.page_position

    def one_tile(index: jax.Array, state: Softmax) -> Softmax:
        row, size, begin, end = (x[index] for x in tasks[:4])
        seq, count = metadata.row_seq[row], -(-(end - begin).max() // length)
        tables, page_len = (x[seq] for x in (metadata.block_tables, metadata.page_len))
        used = jnp.arange(rows) < size[:, None]
        row_slots = jnp.where(used, _take(metadata.row_slot[None], row, rows)[0], -1)[..., None]
        folded = _take(q, row * groups, rows * groups)
        old = Softmax(*(_take(x, row * groups, rows * groups) for x in state))
        factor: float | jax.Array = scale
        if metadata.weighing is not None and tasks.of_chunks is not None:
            _, _, temperature, chunk_scale = (x[row] for x in metadata.weighing)
            factor = jnp.where(tasks.of_chunks[index], scale / temperature, scale)[:, None, None, None]

        def one_portion(number: jax.Array, state: Softmax) -> Softmax:
            first = begin + number * length
            slots = first[:, None] + jnp.arange(length)
            keys, values, valid = read_slots(cache, tables, page_len, first, length, q.dtype)
            present = valid & (slots < end[:, None])
            mask = present[:, None] & (slots[:, None] <= row_slots)
            if window is not None:
                assert page_position is not None
                mask &= positions_of(page_position, seq, slots, block_size)[:, None] > before
            return softmax.update(state, folded, keys, values, mask, present, factor)

        if window is None:
            new = jax.lax.fori_loop(0, count, one_portion, old)
        else:  # only portions with a slot that a row sees
            assert page_position is not None
            before = positions_of(page_position, seq, row_slots, block_size) - window
            lowest = jnp.where(used[..., None], before, np.iinfo(np.int32).max).min((1, 2))
            page_start = jnp.arange(tables.shape[1]) * block_size
            seen_from = page_start + jnp.maximum(lowest[:, None] + 1 - page_position[seq], 0)
            seen_to = jnp.minimum(page_start + page_len, end[:, None])

            def next_seen(number: jax.Array) -> jax.Array:
                slot = jnp.maximum(seen_from, (begin + number * length)[:, None])
                return jnp.where(slot < seen_to, (slot - begin[:, None]) // length, count).min()

            def one_seen(carry: tuple[jax.Array, Softmax]) -> tuple[jax.Array, Softmax]:
                return next_seen(carry[0] + 1), one_portion(*carry)

            _, new = jax.lax.while_loop(lambda carry: carry[0] < count, one_seen, (next_seen(jnp.int32(0)), old))
        if metadata.weighing is not None and tasks.of_chunks is not None:
            of_chunks = tasks.of_chunks[index][:, None]
            one = softmax.as_one_slot(new, chunk_scale[:, None])
            new = Softmax(*(jnp.where(of_chunks.reshape(-1, *[1] * (x.ndim - 2)), x, y) for x, y in zip(one, new)))
        by_folded = jnp.repeat(used, groups, axis=1)
        return Softmax(*(_put(x, row * groups, by_folded, y) for x, y in zip(state, new)))

    return jax.lax.fori_loop(0, tasks.num_tiles, one_tile, state)


def _take(x: Float[Array, "G rows *axes"], first: Int32[Array, " B"], size: int) -> Float[Array, "G B size *axes"]:
    """Return `size` rows from each of the rows `first` on."""
    if len(first) == 1:  # a slice is faster than a gather
        return jax.lax.dynamic_slice_in_dim(x, first[0], size, axis=1)[:, None]
    return x[:, first[:, None] + jnp.arange(size)]


def _put(
    x: Float[Array, "G rows *axes"],
    first: Int32[Array, " B"],
    used: Bool[Array, "B size"],
    new: Float[Array, "G B size *axes"],
) -> Float[Array, "G rows *axes"]:
    """Return `x` with the rows that are `used` from each of the rows `first` on replaced."""
    size = used.shape[1]
    if len(first) == 1:
        kept = jnp.where(used.reshape(1, size, *[1] * (x.ndim - 2)), new[:, 0], _take(x, first, size)[:, 0])
        return jax.lax.dynamic_update_slice_in_dim(x, kept, first[0], axis=1)
    index = jnp.where(used, first[:, None] + jnp.arange(size), x.shape[1])
    return x.at[:, index].set(new, mode="drop")
