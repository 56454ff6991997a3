"""What each switch buys, as bars side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from medseg.pictures.panels import Panel, draw_panels


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
    panels = [
        Panel("saved bytes per voxel", "{:.0f}", [rung.saved_per_voxel for rung in rungs]),
        Panel("peak of a step, MiB", "{:.0f}", [rung.peak_mib for rung in rungs]),
        Panel("seconds per step", "{:.2f}", [rung.seconds_per_step for rung in rungs]),
        Panel("Dice, best validation", "{:.4f}", [rung.dice for rung in rungs], has_bars=False),
    ]
    draw_panels([rung.name for rung in rungs], panels, title, path, [not rung.is_ours for rung in rungs])
