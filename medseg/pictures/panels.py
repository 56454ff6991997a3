"""Bar charts side by side: one panel per quantity, one bar per row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from medseg.pictures.png import new_axes, new_figure, write_png

_OURS, _OTHERS = "#0369a1", "#94a3b8"


class Panel(NamedTuple):
    """One quantity of all rows.

    Attributes:
        title: Name and unit.
        text: Format of a value, e.g. `{:.2f}`.
        values: One per row; None = not known.
        has_bars: Bars from zero; False = dots, on an axis that does not begin at zero.
    """

    title: str
    text: str
    values: Sequence[float | None]
    has_bars: bool = True


def draw_panels(names: Sequence[str], panels: Sequence[Panel], title: str, path: Path, others: Sequence[bool] = ()) -> None:
    """Draw one panel per quantity that is known for some row.

    Args:
        names: Rows from top to bottom, at least one.
        panels: Quantities from left to right.
        title: Title of the figure.
        path: PNG file to write.
        others: Whether a row is a baseline, drawn grey; empty = none is.
    """
    panels = [panel for panel in panels if any(value is not None for value in panel.values)]
    figure = new_figure(2.4 + 2.7 * len(panels), 1.3 + 0.36 * len(names))
    figure.suptitle(title, fontsize=10)
    for number, panel in enumerate(panels):
        axes = new_axes(figure, panel.title, place=(1, len(panels), number + 1))
        known = [(place, value) for place, value in enumerate(panel.values) if value is not None]
        places, numbers = [place for place, _ in known], [value for _, value in known]
        colours = [_OTHERS if others and others[place] else _OURS for place in places]
        if panel.has_bars:
            axes.barh(places, numbers, color=colours, height=0.72)
            axes.set_xlim(0, 1.25 * max(numbers) or 1)
        else:
            axes.scatter(numbers, places, color=colours, s=30)
            span = max(max(numbers) - min(numbers), 0.01)
            axes.set_xlim(min(numbers) - 0.2 * span, max(numbers) + 0.6 * span)
        for place, value in known:
            axes.text(value, place, "  " + panel.text.format(value), va="center", fontsize=8)
        axes.set_yticks(range(len(names)) if number == 0 else [], names if number == 0 else [], fontsize=9)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.tick_params(axis="x", labelbottom=False, bottom=False)
        axes.spines["bottom"].set_visible(False)
    write_png(figure, path)
