"""Plot of the learning-rate finder: the loss over the learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from medseg.pictures.png import new_axes, new_figure, write_png


def draw_lr_range(
    rates: Sequence[float], losses: Sequence[float], curve: Sequence[float], suggested: float | None, title: str, path: Path
) -> None:
    """Draw the losses as dots, their smoothed curve and the suggested rate.

    Args:
        rates: Rates, rising.
        losses: Loss of the step made at each.
        curve: The same, smoothed.
        suggested: Rate to mark; None = none.
        title: Of what run.
        path: PNG file to write.
    """
    figure = new_figure(7, 4)
    axes = new_axes(figure, title)
    axes.scatter(rates, losses, s=9, color="#94a3b8", label="loss of a step")
    axes.plot(rates, curve, color="#0369a1", linewidth=2, label="smoothed")
    if suggested is not None:
        axes.axvline(suggested, color="#b91c1c", linewidth=1.2, linestyle="--", label=f"steepest fall: {suggested:.2g}")
    axes.set_xscale("log")
    # A last step that exploded would flatten all others.
    axes.set_ylim(0.9 * min(losses), min(max(losses), 2.0 * losses[0]) * 1.1)
    axes.set(xlabel="learning rate", ylabel="loss")
    axes.legend(frameon=False, fontsize=9)
    write_png(figure, path)
