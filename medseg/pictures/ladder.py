"""What each switch buys, as bars side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from medseg.pictures.png import write_png

_OTHERS, _OURS = "#94a3b8", "#0369a1"


class Rung(NamedTuple):
    """One row of the ladder.

    Attributes:
        name: What the row adds, or whose network it is.
        is_ours: Whether it is a network of ours, which the switches change.
        saved_per_voxel: Bytes that autograd keeps per voxel of the input.
        peak_mib: Live bytes at the peak of a step, in MiB.
        seconds_per_step: None = not timed.
        dice: None = not trained.
    """

    name: str
    is_ours: bool
    saved_per_voxel: float
    peak_mib: float
    seconds_per_step: float | None
    dice: float | None


def draw_ladder(rungs: Sequence[Rung], title: str, path: Path) -> None:
    """Draw one panel per quantity that is known for some row.

    Args:
        rungs: Rows from top to bottom, at least one.
        title: What was measured, and on what.
        path: PNG file to write.
    """
    from matplotlib.figure import Figure

    panels: list[tuple[str, str, list[float | None]]] = [
        ("saved bytes per voxel", "{:.0f}", [rung.saved_per_voxel for rung in rungs]),
        ("peak of a step, MiB", "{:.0f}", [rung.peak_mib for rung in rungs]),
        ("seconds per step", "{:.2f}", [rung.seconds_per_step for rung in rungs]),
        ("Dice, best validation", "{:.4f}", [rung.dice for rung in rungs]),
    ]
    panels = [panel for panel in panels if any(value is not None for value in panel[2])]
    figure = Figure(figsize=(2.4 + 2.7 * len(panels), 1.3 + 0.36 * len(rungs)), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=10)
    for number, (name, text, values) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), number + 1)
        known = [(place, value) for place, value in enumerate(values) if value is not None]
        places, numbers = [place for place, _ in known], [value for _, value in known]
        colours = [_OURS if rungs[place].is_ours else _OTHERS for place in places]
        if name.startswith("Dice"):
            # Dots: the axis does not begin at zero, and bars would promise that it does.
            axes.scatter(numbers, places, color=colours, s=30)
            span = max(max(numbers) - min(numbers), 0.01)
            axes.set_xlim(min(numbers) - 0.2 * span, max(numbers) + 0.6 * span)
        else:
            axes.barh(places, numbers, color=colours, height=0.72)
            axes.set_xlim(0, 1.25 * max(numbers))
        for place, value in known:
            axes.text(value, place, "  " + text.format(value), va="center", fontsize=8)
        axes.set_yticks(
            range(len(rungs)) if number == 0 else [], [rung.name for rung in rungs] if number == 0 else [], fontsize=9
        )
        axes.set_ylim(len(rungs) - 0.4, -0.6)
        axes.set_title(name, fontsize=9)
        axes.tick_params(axis="x", labelbottom=False, bottom=False)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    write_png(figure, path)
