"""Pictures of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from chunkattn.tools.eval.measures import Mean
from chunkattn.tools.eval.report import LOGPROB, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = ("#2d6fa3", "#c25b3a", "#2e9e6b", "#8e5bb5", "#d9a441")


def draw(rows: Sequence[Row], title: str) -> Figure:
    """Return a picture of a comparison: differences of log-probability on the left, the other measures on the right.

    Args:
        rows: rows of a comparison.
        title: title of the picture.
    """
    from matplotlib.figure import Figure

    others = [name for name in rows[0].means if name != LOGPROB]
    panels = (LOGPROB in rows[0].means) + bool(others)
    figure = Figure(figsize=(5.5 * panels + 1.5, 1.6 + 0.5 * len(rows)), layout="constrained")
    places = list(figure.subplots(1, panels, squeeze=False, sharey=True)[0])
    if LOGPROB in rows[0].means:
        axes = places.pop(0)
        for place, row in enumerate(rows):
            if row.against_full is not None:
                _difference(axes, row.against_full[LOGPROB], place, _COLORS[0], "against full attention")
            if row.against_control is not None:
                _difference(axes, row.against_control[LOGPROB], place + 0.2, _COLORS[1], "against full attention, same T and S")
        axes.axvline(0, color="#8a8a8a", linewidth=1)
        axes.set_xlabel(
            "log-probability per token of the gold answer, difference and 95% interval\n"
            "hollow: these questions cannot tell the difference from none"
        )
        _legend(axes)
    for axes in places:
        for number, name in enumerate(others):
            for place, row in enumerate(rows):
                _point(axes, row.means[name], place + 0.12 * (number - len(others) / 2), _COLORS[number], name)
        highest = max(row.means[name].mean for row in rows for name in others)  # a Brier score may be above 1
        axes.set(xlabel="mean and 95% interval", xlim=(-0.02, max(1.02, highest + 0.1)))
        _legend(axes)
    first = figure.axes[0]
    first.set_yticks(range(len(rows)), [row.name for row in rows])
    first.set_ylim(len(rows) - 0.4, -0.6)
    figure.suptitle(title, fontsize=11)
    return figure


def _difference(axes: Axes, value: Mean, place: float, color: str, label: str) -> None:
    _point(axes, value, place, color, label, fill=color if value.sign else "white")


def _point(axes: Axes, value: Mean, place: float, color: str, label: str, fill: str | None = None) -> None:
    if value.has_interval:
        axes.plot([value.low, value.high], [place, place], color=color, linewidth=2, alpha=0.5)
    axes.plot([value.mean], [place], "o", color=color, markerfacecolor=fill or color, label=label)


def _legend(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(*zip(*dict(zip(labels, zip(handles, labels))).values()), fontsize=8)
    axes.grid(alpha=0.3, axis="x")
