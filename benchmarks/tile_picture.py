"""A picture of the TPU kernel's walk: the tiles of a small prompt, and the timeline of one query tile."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from chunkattn.backends import AttentionBatch, AttentionSpec
from chunkattn.backends.pallas_tpu import kernel
from chunkattn.backends.pallas_tpu.backend import PallasTpuBackend
from chunkattn.backends.pallas_tpu.blocks import TABLE, Blocks
from chunkattn.backends.pallas_tpu.pages import LENGTH_BITS
from chunkattn.cache.slots import SlotPlan, plan_slots
from chunkattn.errors import ConfigError
from chunkattn.rope.positions import make_layout

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLOCK = 16
ROWS, SLOTS = 32, 64
"""Tile sizes small enough that a prompt of a few hundred tokens has many tiles; real tiles are several times larger."""
LAYOUT = make_layout(np.zeros(180), [np.zeros(n) for n in (44, 40, 164, 36, 56)], np.zeros(56))

_WHOLE, _MASKED, _SEEN = "#2e86c1", "#fbe6c4", "#e59a26"
_INK, _SOFT, _GRID, _HOLE = "#22303f", "#6b7885", "#d5dae0", "#b4bcc5"
_COPY, _COPYING, _OTHER = "#1f8055", "#dff1e7", "#eef0f3"
_TEXT, _SMALL = 9.5, 8.5
_PILL = {"boxstyle": "round,pad=0.22", "facecolor": "white", "edgecolor": _INK, "linewidth": 0.9}


class Visit(NamedTuple):
    """One KV tile of a query tile's walk.

    Attributes:
        tile: number of the KV tile.
        pages: number of its pages that are copied.
        whole: whether every row sees every slot, so that no mask is computed.
        buffer: buffer that receives the pages.
    """

    tile: int
    pages: int
    whole: bool
    buffer: int


class Walk(NamedTuple):
    """One grid step.

    Attributes:
        low: first row.
        high: end of the rows.
        ranges: ranges of slots that the rows see.
        visits: the KV tiles visited.
    """

    low: int
    high: int
    ranges: list[tuple[int, int]]
    visits: list[Visit]


def batch_of(plan: SlotPlan) -> AttentionBatch:
    """Return one prompt as one step."""
    rows, pages = len(plan.slots), len(plan.page_len)
    return AttentionBatch(
        rows,
        np.zeros(rows, np.int32),
        plan.slots,
        plan.row_start,
        np.asarray([plan.prefix_end], np.int32),
        np.arange(pages, dtype=np.int32)[None],
        plan.page_len[None],
        plan.block_size,
    )


def walks(batch: AttentionBatch) -> list[Walk]:
    """Return the kernel's query tiles of a step of one prompt, from its metadata."""

    class Small(PallasTpuBackend):
        chip = "v6e"
        table = dict.fromkeys(TABLE, (Blocks(ROWS, SLOTS, 1),) * 2)

    size = batch.block_size
    backend = Small(AttentionSpec(1, 1, 128, jnp.dtype("bfloat16"), size))
    shape, metadata = backend.shape(backend.block(batch.num_rows)), backend.build_metadata(batch)
    lengths = metadata.table[0, 0] & ((1 << LENGTH_BITS) - 1)
    listed: list[Walk] = []
    done = 0
    for sc in metadata.tiles[:, : metadata.num_tiles].T:
        low, high = (int(sc[kernel.BLOCK] * shape.rows + sc[at]) for at in (kernel.LOW, kernel.HIGH))
        first_end, second_start, second_end = (int(sc[at]) for at in (kernel.FIRST_END, kernel.SECOND_START, kernel.SECOND_END))
        last, prefix = int(sc[kernel.LAST]), int(sc[kernel.PREFIX_END])
        visits = []
        for tile in (*range(first_end), *range(second_start, second_end)):
            begin, end = tile * shape.slots, (tile + 1) * shape.slots
            pages = min(last // size + 1 - tile * shape.pages, shape.pages)
            # The kernel's condition: no hole, before every row, and within the prefix or every row's own part.
            whole = pages == shape.pages and lengths[tile * shape.pages :][: shape.pages].min() == size
            whole = bool(whole and end <= sc[kernel.MIN_SLOT] + 1 and (end <= prefix or begin >= sc[kernel.MAX_START]))
            visits.append(Visit(tile, pages, whole, (done + len(visits)) % 2))
        done += len(visits)
        start = int(batch.row_start[low:high].min())
        ranges = [(0, prefix), (start, last + 1)] if first_end else [(0, last + 1)]
        listed.append(Walk(low, high, ranges, visits))
    return listed


def draw(path: Path) -> None:
    """Write the picture.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from PIL import Image  # matplotlib needs it
    except ImportError as error:
        raise ConfigError("--png needs matplotlib: pip install matplotlib") from error
    plan = plan_slots(LAYOUT, BLOCK, aligned=True)
    drawn = walks(batch_of(plan))
    # Show the tile with the most ranges and, among these, the tile with the most unmasked tiles.
    shown = max(range(len(drawn)), key=lambda i: (len(drawn[i].ranges), sum(v.whole for v in drawn[i].visits)))
    figure = Figure(figsize=(10, 8.7), facecolor="white")
    _matrix(figure.add_axes((0.085, 0.295, 0.905, 0.66)), plan, drawn, shown)
    _timeline(figure.add_axes((0.005, 0.005, 0.985, 0.235)), drawn, shown)
    drawn = BytesIO()
    figure.savefig(drawn, dpi=160)
    Image.open(drawn).convert("RGB").quantize(64).save(path, "PNG", optimize=True)


def _matrix(axes: Axes, plan: SlotPlan, drawn: list[Walk], shown: int) -> None:
    """Draw rows against slots, with the tiles."""
    from matplotlib.patches import Rectangle

    tokens, end = len(plan.slots), len(plan.page_len) * plan.block_size
    tiles = -(-end // SLOTS)

    def box(x: float, y: float, width: float, height: float, **style: Any) -> None:
        axes.add_patch(Rectangle((x, y), width, height, **style))

    slot = np.arange(end)
    written = slot % plan.block_size < plan.page_len[slot // plan.block_size]
    seen = (slot <= plan.slots[:, None]) & ((slot < plan.prefix_end) | (slot >= plan.row_start[:, None])) & written
    for walk in drawn:
        height = walk.high - walk.low
        for visit in walk.visits:
            columns = slice(visit.tile * SLOTS, min((visit.tile + 1) * SLOTS, end))
            width = columns.stop - columns.start
            box(columns.start, walk.low, width, height, facecolor=_WHOLE if visit.whole else _MASKED, linewidth=0)
            if visit.whole:
                continue
            for row in range(walk.low, walk.high):  # runs of seen slots
                edges = np.flatnonzero(np.diff(seen[row, columns].astype(int), prepend=0, append=0)) + columns.start
                for a, b in zip(edges[::2], edges[1::2], strict=True):
                    box(a, row, b - a, 1, facecolor=_SEEN, linewidth=0, antialiased=False)
    holes = np.flatnonzero(np.diff(written.astype(int), prepend=1, append=1))
    for a, b in zip(holes[::2], holes[1::2], strict=True):
        top = int(np.searchsorted(plan.slots, a))
        box(a, top, b - a, tokens - top, fill=False, hatch="//////", edgecolor=_HOLE, linewidth=0)
    for tile in range(tiles + 1):
        axes.plot([min(tile * SLOTS, end)] * 2, [0, tokens], color=_GRID, linewidth=0.7)
    for row in [*(w.low for w in drawn), tokens]:
        axes.plot([0, end], [row] * 2, color=_GRID, linewidth=0.7)

    for segment in LAYOUT.segments:
        first, last = int(plan.slots[segment.start]), int(plan.slots[segment.end - 1]) + 1
        axes.text((first + last) / 2, -7, segment.name, ha="center", va="bottom", fontsize=_TEXT, color=_INK)
        axes.plot([first + 2, last - 2], [-4, -4], color=_INK, linewidth=1.6, solid_capstyle="butt")
        axes.text(-9, (segment.start + segment.end) / 2, segment.name, ha="right", va="center", fontsize=_TEXT, color=_INK)
        axes.plot([-5, -5], [segment.start + 2, segment.end - 2], color=_INK, linewidth=1.6, solid_capstyle="butt")
    for tile in range(tiles):
        name = f"KV tile {tile}" if tile == 0 else str(tile)
        axes.text((tile + 0.5) * SLOTS, tokens + 4, name, ha="center", va="top", fontsize=_SMALL, color=_SOFT)

    def arrow(walk: Walk, number: int, span: tuple[int, int]) -> None:
        y, style = (
            (walk.low + walk.high) / 2,
            {"arrowstyle": "-|>", "color": _INK, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0},
        )
        axes.annotate("", (span[1], y), (span[0], y), arrowprops=style)
        box_style = _PILL | {"boxstyle": "circle,pad=0.18", "facecolor": _INK}
        axes.text(span[0] + 10, y, str(number), ha="center", va="center", color="white", fontsize=_TEXT, bbox=box_style)
        text = f"question: one range, [0, {span[1]})" if number == 3 else f"[{span[0]}, {span[1]})"
        axes.text(span[1] - 12, y, text, ha="right", va="center", fontsize=_TEXT, bbox=_PILL)

    walk, question = drawn[shown], drawn[-1]
    numbers = iter(range(1, 4))
    for tile in (walk, question):
        box(0, tile.low, end, tile.high - tile.low, fill=False, edgecolor=_INK, linewidth=2.0, zorder=2.5)
        for span in tile.ranges:
            arrow(tile, next(numbers), span)
    middle, right = (walk.low + walk.high) / 2, (walk.visits[-1].tile + 1) * SLOTS + 8
    label = f"query tile {shown}: (1) prefix, (2) own chunk"
    axes.text(right, middle, label, va="center", fontsize=_TEXT, color=_INK, bbox=_PILL | {"edgecolor": "white"})

    visits = [v.whole for w in drawn for v in w.visits]
    whole, masked, skipped = sum(visits), len(visits) - sum(visits), tiles * len(drawn) - len(visits)
    entries = (
        ({"facecolor": _WHOLE, "edgecolor": _WHOLE}, f"{whole} tiles: every row sees every slot, no mask computed"),
        ({"facecolor": _MASKED, "edgecolor": _SEEN}, f"{masked} tiles: mask computed; dark: the pairs that are visible"),
        ({"facecolor": "white", "edgecolor": _SOFT}, f"{skipped} tiles: not visited; no load, no multiply"),
        ({"facecolor": "white", "edgecolor": _HOLE, "hatch": "//////"}, "hole: the unused end of a part's last page"),
    )
    left, top, step = 4.4 * SLOTS, 12, 24
    box(left - 9, top - 6, end - left + 4, step * (len(entries) + 1) + 8, facecolor="white", edgecolor=_GRID, zorder=3)
    for n, (style, text) in enumerate(entries):
        box(left, top + n * step, 20, 15, linewidth=1, zorder=4, **style)
        axes.text(left + 28, top + n * step + 8, text, va="center", fontsize=_TEXT, color=_INK, zorder=4)
    size = f"a query tile: {ROWS} tokens; a KV tile: {SLOTS} slots, {SLOTS // plan.block_size} pages"
    axes.text(left, top + len(entries) * step + 8, size, va="center", fontsize=_TEXT, color=_SOFT, zorder=4)

    axes.set_xlim(-1, end + 1)
    axes.set_ylim(tokens + 1, -1)
    axes.set_axis_off()
    for text in axes.texts:
        text.set_clip_on(False)
    for line in axes.lines:
        line.set_clip_on(False)


def _timeline(axes: Axes, drawn: list[Walk], shown: int) -> None:
    """Draw copies and multiplications of one query tile, one KV tile a column, with its neighbours in grey at both ends."""
    from matplotlib.patches import Rectangle

    owners = {shown - 1: drawn[shown - 1].visits[-1:], shown: drawn[shown].visits, shown + 1: drawn[shown + 1].visits[:2]}
    steps = [(owner, visit) for owner, visits in owners.items() for visit in visits]
    columns, height = len(steps) - 1, 0.74
    lanes, multiply, head = (0.95, 1.85), 3.0, 0.5

    def box(x: float, y: float, width: float, tall: float, **style: Any) -> None:
        axes.add_patch(Rectangle((x, y), width, tall, **style))

    def write(x: float, y: float, text: str, **style: Any) -> None:
        axes.text(x, y, text, **({"ha": "center", "va": "center", "fontsize": _TEXT, "color": _INK} | style))

    for at, (owner, visit) in enumerate(steps):
        is_shown, middle = owner == shown, lanes[visit.buffer] + height / 2
        if at:  # its pages are copied while the previous KV tile is multiplied
            edge, fill, ink = (_COPY, _COPYING, _INK) if is_shown else (_HOLE, _OTHER, _SOFT)
            box(at - 0.9, lanes[visit.buffer], 0.8, height, facecolor=fill, edgecolor=edge, linewidth=1)
            write(at - 0.86, middle, f"tile {visit.tile}", ha="left", fontsize=_SMALL, color=ink)
            for page in range(visit.pages):
                box(at - 0.46 + page * 0.085, middle - 0.2, 0.06, 0.4, facecolor="white", edgecolor=edge, linewidth=0.8)
            if at < columns:
                axes.plot([at - 0.1, at + 0.05], [middle, middle], color=edge, linewidth=1.3)
                tip = {"arrowstyle": "-|>", "color": edge, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
                axes.annotate("", (at + 0.05, multiply), (at + 0.05, middle), arrowprops=tip)
            if steps[at - 1][0] == shown and not is_shown:
                note = lanes[1 - visit.buffer] + height / 2
                write(at - 0.46, note, f"already for\nquery tile {owner}", fontsize=_SMALL, color=_SOFT, linespacing=1.1)
        if at < columns:
            fill, ink = (_WHOLE, "white") if visit.whole else (_SEEN, _INK)
            box(at + 0.01, multiply, 0.98, height, facecolor=fill if is_shown else _OTHER, linewidth=0)
            write(at + 0.5, multiply + height / 2, f"tile {visit.tile}", color=ink if is_shown else _SOFT)
    for owner in owners:
        at = [n for n, step in enumerate(steps[:columns]) if step[0] == owner]
        is_shown = owner == shown
        axes.plot([at[0] + 0.03, at[-1] + 0.97], [head, head], color=_INK if is_shown else _HOLE, linewidth=1.6)
        style = {"fontweight": "bold"} if is_shown else {"color": _SOFT}
        write((at[0] + at[-1] + 1) / 2, head - 0.28, f"query tile {owner}", **style)
    for lane, y in enumerate(lanes):
        write(-0.1, y + height / 2, f"buffer {lane}", ha="right", color=_COPY)
    write(-0.78, (lanes[0] + lanes[1] + height) / 2, "copy pages,\nHBM to VMEM", ha="right", color=_COPY, linespacing=1.1)
    write(-0.1, multiply + height / 2, "multiply (MXU),\nexponentiate", ha="right", linespacing=1.1)
    tip = {"arrowstyle": "-|>", "color": _SOFT, "linewidth": 1.0, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (columns - 0.02, multiply + height + 0.3), (0.02, multiply + height + 0.3), arrowprops=tip)
    write(-0.1, multiply + height + 0.3, "time", ha="right", fontsize=_SMALL, color=_SOFT)
    axes.set_xlim(-1.72, columns)
    axes.set_ylim(multiply + height + 0.5, 0)
    axes.set_axis_off()
