"""Plots in one style, as small PNG files: panels of bars, scores, learning rates, Pareto fronts."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from medseg.io.atomic import replace_path
from medseg.wording import counted

# Colours of the results of medseg, of baselines beside them, and of lines that mark a limit.
_OURS = "#0369a1"
_OTHERS = "#94a3b8"
_LIMIT = "#b91c1c"
# Colours of the regions, which repeat.
_COLOURS = ("#0369a1", "#c2410c", "#15803d", "#be185d", "#a16207", "#6d28d9")
_MAX_NAME_LETTERS = 28
# Style of the lines of a box.
_BOX = {"color": "#9ca3af"}
# Values of `trust` of scores whose points are filled; "" = not stated.
_SURE_TRUST = ("", "reference")


def new_figure(
    width_in: float, height_in: float, *titles: str, loc: Literal["left", "center"] = "center"
) -> tuple[Any, Sequence[Any]]:
    """Make a figure without a window, with axes side by side.

    Args:
        width_in: Width in inches.
        height_in: Height in inches.
        titles: Title of each axes.
        loc: Where the titles stand.

    Returns:
        The figure, and its axes, without a frame at the top and at the right.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), dpi=110, layout="constrained")
    all_axes = figure.subplots(1, len(titles), squeeze=False)[0]
    for axes, title in zip(all_axes, titles, strict=True):
        axes.set_title(title, fontsize=10, loc=loc, parse_math=False)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, figure.axes


def write_png(figure: Any, path: Path) -> None:
    """Write a figure as a PNG file with a palette of 256 colours, half the size of true colour.

    The file appears under its name only when it is complete; missing folders are made. Bytes of
    names that are not UTF-8 are drawn as codes.

    Args:
        figure: Matplotlib figure without a window.
        path: PNG file.

    Raises:
        UserError: If the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text
    from PIL import Image

    for text in figure.findobj(Text):
        # Matplotlib draws no surrogates, which stand for such bytes in Python.
        text.set_text(text.get_text().encode(errors="backslashreplace").decode())
    # A letter that the font lacks, such as a Chinese one, is drawn as a box.
    warnings.filterwarnings("ignore", "Glyph .* missing from font")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    palette_image = image.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    with replace_path(path) as part:
        palette_image.save(part, "PNG")


def shortened(text: str, max_letters: int) -> str:
    """Cut a text to `max_letters` characters, the last one an ellipsis; a shorter text stays."""
    if len(text) <= max_letters:
        return text
    return f"{text[: max_letters - 1]}…"


def rank_offsets(num_points: int) -> np.ndarray:
    """Offsets in [0, 1) of points in the order of their scores, so that equal ones do not overlap.

    The offsets are not random: a plot of the same scores looks the same.
    """
    # Multiples of 0.618, the golden ratio minus 1, modulo 1 are evenly distributed, whatever their
    # number.
    return (np.arange(num_points) * 0.618) % 1


def draw_lr_range(
    rates: Sequence[float],
    losses: Sequence[float],
    curve: Sequence[float],
    suggested: float | None,
    title: str,
    path: Path,
) -> None:
    """Draw the losses as dots, their smoothed curve and the suggested rate.

    Args:
        rates: Learning rates, ascending.
        losses: Loss of the step made at each rate.
        curve: Smoothed losses.
        suggested: Rate to mark; None = no mark.
        title: Title of the plot, which names the run.
        path: PNG file to write.
    """
    figure, (axes,) = new_figure(7, 4, title)
    axes.scatter(rates, losses, s=9, color=_OTHERS, label="loss of a step")
    axes.plot(rates, curve, color=_OURS, linewidth=2, label="smoothed")
    if suggested is not None:
        label = f"suggested: {suggested:.2g}"
        axes.axvline(suggested, color=_LIMIT, linewidth=1.2, linestyle="--", label=label)
    # Up to twice the first loss, since the losses of the last steps may explode, and would flatten
    # all others. With `abs`, as losses may be negative.
    lowest = min(losses)
    highest = min(max(losses), losses[0] + abs(losses[0]))
    # Equal losses still get an axis.
    margin = max(0.1 * (highest - lowest), 1e-3)
    ylim = (lowest - margin, highest + margin)
    axes.set(xscale="log", ylim=ylim, xlabel="learning rate", ylabel="loss")
    axes.legend(frameon=False, fontsize=9)
    write_png(figure, path)


class Panel(NamedTuple):
    """One quantity of all rows.

    Attributes:
        title: Name and unit.
        value_format: Format of a value, such as `{:.2f}`.
        values: Value of each row; None = not known.
        has_bars: Whether bars from zero are drawn; else dots, on an axis that does not begin at
            zero.
    """

    title: str
    value_format: str
    values: Sequence[float | None]
    has_bars: bool = True


def draw_panels(
    names: Sequence[str],
    panels: Sequence[Panel],
    title: str,
    path: Path,
    others: Sequence[bool] = (),
) -> None:
    """Draw a panel for each quantity that is known for some row, side by side.

    Args:
        names: Rows from top to bottom, at least one.
        panels: Quantities from left to right.
        title: Title of the figure.
        path: PNG file to write.
        others: Whether each row is a baseline, which is drawn grey; empty = no row is.
    """
    known_panels = []
    for panel in panels:
        if any(value is not None for value in panel.values):
            known_panels.append(panel)
    titles = [panel.title for panel in known_panels]
    # The width of the names and of each panel; the height of the titles and of each row.
    width_in = 2.4 + 2.7 * len(known_panels)
    height_in = 1.3 + 0.36 * len(names)
    figure, all_axes = new_figure(width_in, height_in, *titles)
    figure.suptitle(title, fontsize=10, parse_math=False)
    for axes, panel in zip(all_axes, known_panels, strict=True):
        _draw_panel(axes, panel, others)
        # Only the first panel names the rows.
        row_names = names if axes is all_axes[0] else ()
        axes.set_yticks(range(len(row_names)), row_names, fontsize=9, parse_math=False)
        # Downwards: the first row is at the top.
        axes.set(ylim=(len(names) - 0.4, -0.6))
        # The values stand beside the bars.
        axes.tick_params(axis="x", labelbottom=False, bottom=False)
        axes.spines["bottom"].set_visible(False)
    write_png(figure, path)


def _draw_panel(axes: Any, panel: Panel, others: Sequence[bool]) -> None:
    """Draw the known values of a quantity as bars or dots, with their texts at the right.

    Args:
        axes: Axes of the panel.
        panel: The quantity, with at least one known value.
        others: Whether each row is drawn grey; empty = no row is.
    """
    # Rows with a known value, from the top, and these values.
    rows = []
    values = []
    colours = []
    for row, value in enumerate(panel.values):
        if value is not None:
            rows.append(row)
            values.append(value)
            colours.append(_OTHERS if others and others[row] else _OURS)
    if panel.has_bars:
        axes.barh(rows, values, color=colours, height=0.72)
        # Room at the right for the texts; 1 where all bars are 0.
        right_end = 1.25 * max(values)
        axes.set(xlim=(0, right_end or 1))
    else:
        axes.scatter(values, rows, color=colours, s=30)
        low = min(values)
        high = max(values)
        span = max(high - low, 0.01)
        # Room at the right for the text of the largest value.
        axes.set(xlim=(low - 0.2 * span, high + 0.6 * span))
    for row, value in zip(rows, values, strict=True):
        text = panel.value_format.format(value)
        axes.text(value, row, f"  {text}", va="center", fontsize=8, parse_math=False)


def score_plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the Dice of every case by region.

    A box encloses the middle half of the cases; the worst case of each region is named.

    Args:
        rows: Scores with the keys `case`, `region`, `trust` and `dice`, at least one, in any order;
            regions are drawn in the order of their first row. A `trust` other than `reference` or
            "" makes a hollow point.
        path: PNG file to write.

    Raises:
        ValueError: If there is no row.
    """
    if not rows:
        raise ValueError("a plot of scores needs at least one row")
    regions = list(dict.fromkeys(row["region"] for row in rows))
    num_cases = len({row["case"] for row in rows})
    title = counted(num_cases, "case")
    if any(row["trust"] not in _SURE_TRUST for row in rows):
        title += " · hollow: reference approximate or absent"
    figure, (axes,) = new_figure(2.2 + 2.4 * len(regions), 4.8, title, loc="left")
    for number, region in enumerate(regions):
        region_rows = [row for row in rows if row["region"] == region]
        region_rows.sort(key=lambda row: row["dice"])
        _draw_region(axes, number, region_rows)
    lowest = min(row["dice"] for row in rows)
    reach = max(1.0 - lowest, 0.02)
    region_names = [region.replace("_", " ") for region in regions]
    axes.set_xticks(range(len(regions)), region_names, parse_math=False)
    # Room below for the name of the worst case, and above for half a point.
    ylim = (lowest - 0.14 * reach, 1.0 + 0.04 * reach)
    axes.set(xlim=(-0.6, len(regions) - 0.4), ylim=ylim, ylabel="Dice", axisbelow=True)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    write_png(figure, path)


def _draw_region(axes: Any, number: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the Dice of a region.

    Args:
        axes: Axes of all regions.
        number: Place of the region on the horizontal axis, from 0.
        rows: Scores of the region, at least one, the lowest Dice first.
    """
    dices = np.array([row["dice"] for row in rows])
    is_sure = np.array([row["trust"] in _SURE_TRUST for row in rows])
    colour = _COLOURS[number % len(_COLOURS)]
    # A box around fewer points would show no more than the points themselves.
    if len(rows) > 3:
        axes.boxplot(
            dices,
            positions=[number],
            widths=0.5,
            showfliers=False,
            manage_ticks=False,
            boxprops=_BOX,
            whiskerprops=_BOX,
            capprops=_BOX,
            medianprops={"color": "#4b5563", "linewidth": 1.6},
        )
    # Points within 0.18 to the left and to the right of the place.
    xs = number + (rank_offsets(len(rows)) - 0.5) * 0.36
    filled: dict[str, Any] = {"color": colour, "alpha": 0.85}
    hollow: dict[str, Any] = {"facecolors": "white", "edgecolors": colour}
    axes.scatter(xs[is_sure], dices[is_sure], s=26, zorder=3, **filled)
    axes.scatter(xs[~is_sure], dices[~is_sure], s=26, zorder=3, **hollow)
    worst_name = shortened(rows[0]["case"], _MAX_NAME_LETTERS)
    axes.annotate(
        f"{worst_name} {dices[0]:.3f}",
        (xs[0], dices[0]),
        xytext=(0, -9),
        textcoords="offset points",
        ha="center",
        va="top",
        fontsize=8,
        color="#374151",
        parse_math=False,
    )


def draw_front(
    peaks_gib: Sequence[float], seconds: Sequence[float], budget_gib: float, path: Path
) -> None:
    """Draw peak memory against seconds per step, and the budget.

    Args:
        peaks_gib: Peak of each set of switches that no other set beats in both numbers; their
            points are joined in this order.
        seconds: Seconds of a step with each set.
        budget_gib: Budget minus its margin, drawn as a line.
        path: PNG file to write.
    """
    figure, (axes,) = new_figure(7, 4, "Pareto front of peak and seconds")
    axes.plot(peaks_gib, seconds, color=_OURS, linewidth=1.2, marker="o", markersize=4)
    label = "budget minus margin"
    axes.axvline(budget_gib, color=_LIMIT, linewidth=1.2, linestyle="--", label=label)
    axes.set_xlabel("peak (GiB)")
    axes.set_ylabel("seconds per step")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=9)
    write_png(figure, path)
