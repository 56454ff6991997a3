"""Plot of the scores: the Dice of all cases by region."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medseg.pictures.png import new_axes, new_figure, shortened, write_png

_COLOURS = ("#0369a1", "#c2410c", "#15803d", "#be185d", "#a16207", "#6d28d9")
_MAX_NAME = 28
_BOX = {"color": "#9ca3af"}
_SURE = ("", "reference")


def score_plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the Dice of every case by region, a box around the middle half, the worst case of each region named.

    Args:
        rows: Scores with the keys `case`, `region`, `trust` and `dice`, at least one, in any order; regions are drawn in the
            order of their first row. A `trust` other than `reference` or "" makes a hollow point.
        path: PNG file to write.

    Raises:
        ValueError: If there is no row.
    """
    if not rows:
        raise ValueError("a plot of scores needs at least one row")
    regions = list(dict.fromkeys(row["region"] for row in rows))
    num_cases = len({row["case"] for row in rows})
    hollow = " · hollow: reference approximate or absent" if any(row["trust"] not in _SURE for row in rows) else ""
    figure = new_figure(2.2 + 2.4 * len(regions), 4.8)
    axes = new_axes(figure, f"{num_cases} case{'s' if num_cases != 1 else ''}{hollow}", loc="left")
    for number, region in enumerate(regions):
        own = sorted((row for row in rows if row["region"] == region), key=lambda row: row["dice"])
        values = np.array([row["dice"] for row in own])
        colour = _COLOURS[number % len(_COLOURS)]
        if len(own) > 3:
            axes.boxplot(
                values,
                positions=[number],
                widths=0.5,
                showfliers=False,
                manage_ticks=False,
                boxprops=_BOX,
                whiskerprops=_BOX,
                capprops=_BOX,
                medianprops={"color": "#4b5563", "linewidth": 1.6},
            )
        # Neighbours in rank are moved sideways by the golden ratio, without chance: points of nearly equal score do not overlap.
        offsets = ((np.arange(len(own)) * 0.618) % 1 - 0.5) * 0.36
        is_sure = np.array([row["trust"] in _SURE for row in own])
        axes.scatter(number + offsets[is_sure], values[is_sure], s=26, color=colour, alpha=0.85, zorder=3)
        axes.scatter(number + offsets[~is_sure], values[~is_sure], s=26, facecolors="white", edgecolors=colour, zorder=3)
        axes.annotate(
            f"{shortened(own[0]['case'], _MAX_NAME)} {values[0]:.3f}",
            (number + offsets[0], values[0]),
            xytext=(0, -9),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=8,
            color="#374151",
            parse_math=False,
        )
    lowest = min(row["dice"] for row in rows)
    reach = max(1.0 - lowest, 0.02)
    axes.set(xlim=(-0.6, len(regions) - 0.4), ylim=(lowest - 0.14 * reach, 1.0 + 0.04 * reach), ylabel="Dice")
    axes.set_xticks(range(len(regions)), [region.replace("_", " ") for region in regions])
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    write_png(figure, path)
