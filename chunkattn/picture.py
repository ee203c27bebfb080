"""Views of a prompt's layout: a table, a summary, and a picture of mask and positions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table
from rich.text import Text

from chunkattn.errors import ConfigError
from chunkattn.layout import PREFIX_ID, QUESTION_ID, ChunkLayout, Segment

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedTokenizerBase

MOST_PLOTTED = 4000
"""Token limit of a picture, because its dense mask is O(tokens^2)."""

_PREFIX_COLOR, _QUESTION_COLOR = "#44546a", "#c0392b"
_CHUNK_COLORS = ("#2e86c1", "#28a06b", "#e08e0b", "#8e5bb5", "#17a2b8", "#b5651d")


def _positions(layout: ChunkLayout, segment: Segment) -> str:
    if segment.start == segment.end:
        return "-"
    first, last = layout.positions[segment.start], layout.positions[segment.end - 1]
    return f"{first}-{last}" if last > first else str(first)


def layout_table(layout: ChunkLayout, tokenizer: PreTrainedTokenizerBase | None) -> Table:
    """Return a table of part, tokens, positions and the beginning of the text. A plain prompt has one part.

    Args:
        layout: prompt to show.
        tokenizer: tokenizer for the texts; None shows token ids.
    """
    table = Table("part", "tokens", "positions", "text", title_justify="left")
    for column in (1, 2):
        table.columns[column].justify = "right"
    table.columns[3].no_wrap = True
    table.columns[3].overflow = "ellipsis"
    for segment in layout.segments:
        if layout.is_plain and segment.chunk_id != QUESTION_ID:
            continue
        name = "prompt" if layout.is_plain else segment.name
        ids = layout.part(segment).tolist()
        text = tokenizer.decode(ids) if tokenizer is not None else " ".join(map(str, ids))
        table.add_row(name, str(len(ids)), _positions(layout, segment), Text(repr(text)[1:-1]))
    return table


def layout_summary(layout: ChunkLayout) -> str:
    """Return one line: parts, tokens, highest position, and the visible share of the causal pairs."""
    tokens = len(layout)
    per_row = np.arange(1, tokens + 1) - np.maximum(layout.row_start - layout.prefix_len, 0)
    share = per_row.sum() / (tokens * (tokens + 1) / 2)
    kind = "plain prompt" if layout.is_plain else f"{layout.num_chunks} chunks"
    return f"{kind}, {tokens} tokens, positions up to {layout.max_position}, {share:.0%} of the causal pairs are visible"


def _color(segment: Segment) -> str:
    if segment.chunk_id == PREFIX_ID:
        return _PREFIX_COLOR
    if segment.chunk_id == QUESTION_ID:
        return _QUESTION_COLOR
    return _CHUNK_COLORS[segment.chunk_id % len(_CHUNK_COLORS)]


def plot_layout(layout: ChunkLayout, path: Path) -> None:
    """Write a picture of the mask, coloured by the key token's part, and of every token's position id.

    Args:
        layout: prompt to draw.
        path: file to write; the suffix selects the format.

    Raises:
        ConfigError: matplotlib is not installed, the prompt is too long, or the file cannot be written.
    """
    try:
        from matplotlib.colors import to_rgb
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from error
    tokens = len(layout)
    if tokens > MOST_PLOTTED:
        raise ConfigError(f"a picture of {tokens} tokens would not be readable; the limit is {MOST_PLOTTED}")
    segments = [s for s in layout.segments if s.end > s.start]
    colors = np.repeat([to_rgb(_color(s)) for s in segments], [s.end - s.start for s in segments], axis=0)
    image = np.where(layout.visible()[..., None], colors[None], 1.0)

    figure = Figure(figsize=(7.5, 9.4), layout="constrained")
    mask, track = figure.subplots(2, 1, height_ratios=[4, 1], sharex=True)
    edges = (-0.5, tokens - 0.5)
    mask.imshow(image, interpolation="nearest", extent=(*edges, *edges[::-1]), aspect="auto")
    for segment in segments:
        for line in (mask.axhline, mask.axvline):
            line(segment.end - 0.5, color="#cccccc", linewidth=0.6)
        track.axvline(segment.end - 0.5, color="#cccccc", linewidth=0.6)
        index = np.arange(segment.start, segment.end)
        track.plot(index, layout.positions[index], ".-", color=_color(segment), markersize=3, linewidth=1.2)
    crowded = len(segments) > 14
    middles = [(s.start + s.end - 1) / 2 for s in segments]
    names = ["prompt" if layout.is_plain else s.name for s in segments]
    if crowded:  # label the first and last parts only, so the labels stay readable
        keep = [i for i, s in enumerate(segments) if s.chunk_id < 0 or i in (1, len(segments) - 2)]
        middles, names = [middles[i] for i in keep], [names[i] for i in keep]
    mask.set_yticks(middles, names)
    mask.set_ylabel("token that looks")
    mask.set_title(layout_summary(layout), fontsize=10)
    slant = 90 if crowded else 45 if len(names) > 6 else 0
    track.set_xticks(middles, names, rotation=slant, ha="right" if slant == 45 else "center")
    track.set_xlabel("token that is looked at")
    track.set_ylabel("position id")
    track.set_ylim(bottom=-0.5)
    save_picture(figure, path)


def save_picture(figure: Figure, path: Path) -> None:
    """Write a figure to a file.

    Args:
        figure: figure to write.
        path: file to write; the suffix selects the format.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=130)
    except (ValueError, OSError) as error:
        raise ConfigError(f"cannot write the picture {path}: {error}") from error
