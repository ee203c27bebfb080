"""Work items of a run of decodes, computed on the device from the rows' slots.

Every row moves by one slot a step and sees its whole sequence, so the page tables and each row's slot tell all that `plan`
computes on the host. The items equal those of `splits.split_items` for a batch at the later slots. Block `i` of queries holds
row `i`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from chunkattn.backends.base import AttentionBatch, RowWeighing, StepArray, Weighing, positions_of
from chunkattn.backends.pallas_gpu import plan, splits, walk
from chunkattn.backends.pallas_gpu.combine import CHUNK, REST, UNUSED
from chunkattn.backends.pallas_gpu.plan import Work
from chunkattn.backends.pallas_gpu.shape import UNIT, Shape
from chunkattn.backends.pallas_gpu.splits import Splits

_FAR = np.iinfo(np.int32).max


class Run(NamedTuple):
    """First step of a run of decodes, on the host; see `AttentionBatch` for the fields.

    Attributes:
        slots: KV slot of every row.
        prefix_end: slots of each sequence's prefix.
        tables: page tables.
        page_len: valid slots of every page.
        weighing: weighing of each sequence, or None.
        page_position: position of the first slot of every page; None without windows.
    """

    slots: Int32[StepArray, " T"]
    prefix_end: Int32[StepArray, " S"]
    tables: Int32[StepArray, "S W"]
    page_len: Int32[StepArray, "S W"]
    weighing: Weighing | None
    page_position: Int32[StepArray, "S W"] | None

    @staticmethod
    def of(batch: AttentionBatch, *, windowed: bool) -> Run:
        """Return the run that begins with a step of decodes."""
        positions = batch.page_positions() if windowed else None
        return Run(batch.row_slot, batch.prefix_end, batch.block_tables, batch.page_len, batch.weighing, positions)

    def flat_slots(self, slots: Int32[Array, " T"], used: Bool[Array, " T"], block_size: int) -> Int32[Array, " T"]:
        """Return `AttentionBatch.flat_slots` of the rows at later slots."""
        row = np.minimum(np.arange(len(slots)), len(self.tables) - 1)
        page = self.tables[row, slots // block_size]
        return jnp.where(used, page * block_size + slots % block_size, -1)

    def row_weighing(self, slots: Int32[Array, " E"]) -> RowWeighing | None:
        """Return `AttentionBatch.row_weighing` of rows at later slots, one of each of the first sequences."""
        if self.weighing is None:
            return None
        count = len(slots)
        start, temperature, scale = (x[:count] for x in self.weighing)
        weighed = slots >= start
        return RowWeighing(
            jnp.where(weighed, self.prefix_end[:count], 0),
            jnp.where(weighed, start, 0),
            jnp.where(weighed, temperature, 1),
            jnp.where(weighed, scale, 1),
        )


class _Range(NamedTuple):
    """Slots of one kind that each row sees, none where `high` is below `low`; see `splits._Ranges`."""

    low: Int32[Array, " E"]
    high: Int32[Array, " E"]
    prefix_end: Int32[Array, " E"]
    kind: int


class _Visits(NamedTuple):
    """KV tiles that each row visits; see `windows.Visits`."""

    tiles: Int32[Array, "E N"]
    before: Int32[Array, "E n"]
    lowest: Int32[Array, " E"]
    start: Int32[Array, " E"]


def run_work(run: Run, slots: Int32[Array, " T"], used: Bool[Array, " T"], shape: Shape, window: int | None) -> Work:
    """Return the work items of decodes at later slots, see `splits.split_items`. Layers with a window weigh no chunks.

    Args:
        run: first step of the run.
        slots: slot of every row.
        used: whether a row is in use.
        shape: sizes of the kernel over decodes.
        window: sliding window in positions, or None.
    """
    rows = min(len(run.prefix_end), len(slots))
    slots, used, prefix_end = slots[:rows], used[:rows], run.prefix_end[:rows]
    weighing = run.row_weighing(slots) if window is None else None
    visits = None if window is None else _visits(run, slots, shape, window)
    start = jnp.zeros_like(slots) if visits is None else visits.start
    most = plan.decode_states(weighing is not None, windowed=window is not None)
    weighed = jnp.zeros(rows, bool) if weighing is None else weighing.end > weighing.begin
    ranges = _ranges(slots, start, prefix_end, weighing)

    split = splits.SPLIT_SLOTS * -(-(slots + 1) // (splits.SPLIT_SLOTS * plan.MOST_SPLITS))
    counts = [jnp.where(used & (r.high >= r.low), r.high // split - r.low // split + 1, 0) for r in ranges]
    ends = jnp.cumsum(jnp.stack(counts), axis=0)
    place, total = jnp.arange(most), ends[-1]
    kinds = jnp.full((rows, most), UNUSED, jnp.int32)
    fields = dict.fromkeys((walk.LOW, walk.HIGH, walk.PREFIX_END, walk.SECOND_START, walk.SECOND_END), 0 * kinds)
    for count, end, of in zip(counts, ends, ranges):
        inside = (place >= (end - count)[:, None]) & (place < end[:, None])
        low, high, prefix = (x[:, None] for x in of[:3])
        index = low // split[:, None] + place - (end - count)[:, None]
        begin = index * split[:, None]
        values = {
            walk.LOW: low,
            walk.HIGH: high,
            walk.PREFIX_END: prefix,
            walk.SECOND_START: jnp.maximum(low, begin) // shape.slots,
            walk.SECOND_END: jnp.minimum(high, begin + split[:, None] - 1) // shape.slots + 1,
        }
        kinds = jnp.where(inside, of.kind, kinds)
        fields = {field: jnp.where(inside, values[field], x) for field, x in fields.items()}
    row, full = jnp.arange(rows)[:, None], ((slots + 1) // shape.slots)[:, None]
    end_of_all = jnp.minimum(fields[walk.HIGH] + 1, (slots + 1)[:, None]) // shape.slots
    begin_of_all = -(-fields[walk.LOW] // shape.slots)
    fields |= {
        walk.SEQ: row,
        walk.QUERY: row,
        walk.START: row * UNIT,
        walk.SIZE: jnp.ones_like(row),
        walk.OUT: row * most + place,
        walk.FULL_END: jnp.where(weighed[:, None], 0, full),
        walk.FULL_START: jnp.where(weighed[:, None], begin_of_all, full),
        walk.FULL_STOP: jnp.where(weighed[:, None], end_of_all, full),
    }
    if visits is not None:
        last = visits.before.shape[1] - 1
        for field in (walk.SECOND_START, walk.SECOND_END):
            fields[field] = visits.before[row, jnp.minimum(fields[field], last)]
        fields[walk.POSITION] = visits.lowest[:, None]
    none, width = jnp.zeros((), jnp.int32), walk.WIDTH if visits is None else walk.POSITION + 1
    dense = jnp.stack([jnp.broadcast_to(fields.get(field, none), kinds.shape) for field in range(width)], axis=-1)

    stops = jnp.cumsum(total)
    number = jnp.arange(rows * most)
    of_row = jnp.minimum((number[:, None] >= stops).sum(axis=1), rows - 1)
    of_place = jnp.minimum(number - (stops - total)[of_row], most - 1)
    in_use = number < stops[-1]
    items = jnp.where(in_use[:, None], dense[of_row, of_place], 0)
    factors = scale = None
    if weighing is not None:
        factor = jnp.where(kinds == CHUNK, 1 / weighing.temperature[:, None], 1)
        factors = jnp.where(in_use, factor[of_row, of_place], 0)
        scale = jnp.where(used, weighing.scale, 0)
    listed = None if visits is None else jnp.where(used[:, None], visits.tiles, 0)
    return Work(items, None, None, None, None, Splits(stops[-1:], kinds, factors, scale), listed)


def _ranges(
    last: Int32[Array, " E"], start: Int32[Array, " E"], prefix_end: Int32[Array, " E"], weighing: RowWeighing | None
) -> list[_Range]:
    """Return what rows see, see `splits._ranges`: of a row that is weighed three ranges, else one or two."""
    none = jnp.zeros_like(last)
    apart = start > prefix_end
    whole = _Range(none, jnp.where(apart, prefix_end - 1, last), prefix_end, REST)
    if weighing is None:
        return [whole, _Range(start, jnp.where(apart, last, -1), none, REST)]
    begin, end = weighing.begin, weighing.end
    weighed = end > begin
    return [
        _Range(none, jnp.where(weighed, begin - 1, last), jnp.where(weighed, 0, prefix_end), REST),
        _Range(begin, jnp.where(weighed, end - 1, -1), none, CHUNK),
        _Range(end, jnp.where(weighed, last, -1), none, REST),
    ]


def _visits(run: Run, slots: Int32[Array, " E"], shape: Shape, window: int) -> _Visits:
    """Return `windows.visits` of rows at later slots, one of each of the first sequences."""
    assert run.page_position is not None
    size, rows, prefix_end = shape.block_size, jnp.arange(len(slots)), run.prefix_end[: len(slots)]
    own, first = slots // size, -(-prefix_end // size)
    page_start, position = run.page_position, positions_of(run.page_position, rows, slots, size)
    first = jnp.minimum(first, own)
    behind = slots >= prefix_end
    parts = behind & (page_start[rows, own] - page_start[rows, first] != (own - first) * size)  # see `windows.sees_parts`
    start = jnp.where(behind, jnp.maximum(prefix_end, slots - window + 1), _FAR)

    most = -(-run.tables.shape[1] * size // shape.slots)
    begin, last, unseen = jnp.arange(most) * shape.slots, slots[:, None], (position - window)[:, None]
    seen, cut = jnp.zeros((2, len(slots), most), bool)
    stop = jnp.minimum(prefix_end[:, None], last + 1)
    origin = jnp.where(behind, prefix_end, _FAR)[:, None]
    two = (unseen + 1, stop, jnp.zeros_like(origin), unseen), (start[:, None], last + 1, origin, last - window)
    for low, high, base, before in two:
        visited = jnp.maximum(begin, low) < jnp.minimum(begin + shape.slots, high)
        seen |= visited
        cut |= visited & (jnp.maximum(begin, base) <= before)
    seen_by_page, cut_by_page = _by_page(run, slots, unseen, shape, most)
    seen, cut = (jnp.where(parts[:, None], *pair) for pair in ((seen_by_page, seen), (cut_by_page, cut)))
    before = jnp.pad(jnp.cumsum(seen, axis=1), ((0, 0), (1, 0)))
    place = jnp.where(seen, before[:, :-1], most)
    listed = jnp.zeros((len(slots), most), jnp.int32)
    listed = listed.at[rows[:, None], place].set(jnp.arange(most) << 1 | cut, mode="drop", unique_indices=True)
    return _Visits(listed, before, position, jnp.where(parts | ~behind, 0, start))


def _by_page(
    run: Run, slots: Int32[Array, " E"], unseen: Int32[Array, "E 1"], shape: Shape, count: int
) -> tuple[Bool[Array, "E n"], Bool[Array, "E n"]]:
    """Return `windows._by_page` of all rows."""
    assert run.page_position is not None
    size = min(shape.block_size, shape.slots)
    slot = np.arange(count * shape.slots // size) * size
    page, offset = np.divmod(slot, shape.block_size)
    page = np.minimum(page, run.tables.shape[1] - 1)
    lengths, starts = (x[: len(slots)][:, page] for x in (run.page_len, run.page_position))
    tokens = jnp.minimum(jnp.minimum(lengths - offset, size), slots[:, None] + 1 - slot)
    first = starts + offset
    seen = (tokens > 0) & (first + tokens - 1 > unseen)
    cut = (tokens > 0) & (first <= unseen)
    by_tile = (len(slots), count, shape.slots // size)
    return seen.reshape(by_tile).any(axis=2), cut.reshape(by_tile).any(axis=2)
