"""Spacing strategies on the same cases: the means by thickness of the slices, and tables to be read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

# Upper ends of the classes of thickness, in mm.
THICKNESS_BOUNDS_MM = (1.5, 3.0)
THICKNESSES = ("≤ 1.5 mm", "1.5–3 mm", "> 3 mm")
ALL = "all"
# Regions whose reference is sure enough for a mean: `reference`, or nobody has said.
SURE = ("reference", "")
STAGES = ("coarse", "fine")


class Strategy(NamedTuple):
    """A row of the comparison.

    Attributes:
        name: Name of the row.
        costs: Stage (`STAGES`) to its spacing, bytes and seconds; empty where it failed.
        scores: One per held-out case and region: `case`, `slice_mm`, `region`, `trust`, `dice`, `nsd_1mm`, `nsd_2mm`, `hd95_mm`,
            `predict_s` and `predict_peak_gb`.
        missing: Held-out cases without a result, and why.
        failure: Why the row has no result; empty where it has one.
    """

    name: str
    costs: dict[str, dict[str, Any]]
    scores: list[dict[str, Any]]
    missing: dict[str, str]
    failure: str = ""


class Mean(NamedTuple):
    """The scores of a row in one class of thickness.

    Attributes:
        row: Name of the row.
        thickness: One of `THICKNESSES`, or `ALL`.
        number: Regions with a sure reference.
        dice: Their mean.
        worst_dice: The smallest.
        nsd_1mm: Their mean.
        hd95_mm: Their median, which one region that was missed does not make infinite.
    """

    row: str
    thickness: str
    number: int
    dice: float
    worst_dice: float
    nsd_1mm: float
    hd95_mm: float


def thickness_of(slice_mm: float) -> str:
    """The class of a scan by its coarsest spacing.

    Example:
        >>> [thickness_of(mm) for mm in (0.8, 1.5, 2.5, 3.0, 3.001)]
        ['≤ 1.5 mm', '≤ 1.5 mm', '1.5–3 mm', '1.5–3 mm', '> 3 mm']
    """
    return THICKNESSES[sum(slice_mm > bound for bound in THICKNESS_BOUNDS_MM)]


def means_of(strategy: Strategy) -> list[Mean]:
    """The means of a row, class by class and over all; a class without a sure reference is left out.

    A case without a result has no score here: `Strategy.missing` must be said beside the means.
    """
    means = []
    for thickness in (*THICKNESSES, ALL):
        own = [
            score for score in strategy.scores if score["trust"] in SURE and thickness in (thickness_of(score["slice_mm"]), ALL)
        ]
        if own:
            dices = [score["dice"] for score in own]
            means.append(
                Mean(
                    strategy.name,
                    thickness,
                    len(own),
                    fmean(dices),
                    min(dices),
                    fmean(score["nsd_1mm"] for score in own),
                    median(score["hd95_mm"] for score in own),
                )
            )
    return means


def markdown(strategies: Sequence[Strategy]) -> str:
    """The comparison to be read: costs, means by thickness, the best of each class, every case; what failed is named."""
    done = [strategy for strategy in strategies if not strategy.failure]
    failures = [f"* {strategy.name}: failed, {strategy.failure}" for strategy in strategies if strategy.failure]
    if not done:
        return "\n".join(failures) + "\n"
    lines = ["| strategy | stage | works on | saved B/voxel | peak of a step MiB | of a whole crop MiB | s/step | training s |"]
    lines.append("|---" * 8 + "|")
    for strategy in done:
        for stage, cost in strategy.costs.items():
            lines.append(
                f"| {strategy.name} | {stage} | {cost['spacing']} | {cost['saved_bytes_per_voxel']:.1f} | {cost['step_peak_mib']:.0f} | "
                f"{cost['whole_peak_mib']:.0f} | {cost['step_s']:.2f} | {cost['train_s']:.0f} |"
            )
    means = {(mean.row, mean.thickness): mean for strategy in done for mean in means_of(strategy)}
    shown = [thickness for thickness in (*THICKNESSES, ALL) if any(key[1] == thickness for key in means)]
    lines += [
        "",
        "Slices: Dice / NSD at 1 mm / HD95 mm (mean, mean, median) over regions with a sure reference.",
        "",
        f"| strategy | {' | '.join(shown)} | prediction s | peak GB |",
        "|---" * (len(shown) + 3) + "|",
    ]
    for strategy in done:
        cells = [_scores_text(means[strategy.name, one]) if (strategy.name, one) in means else "" for one in shown]
        predicted_s, peak_gb = prediction_costs(strategy)
        lines.append(f"| {strategy.name} | {' | '.join(cells)} | {predicted_s:.1f} | {peak_gb:.2f} |")
    lines.append("")
    for thickness in shown:
        best = max((mean for mean in means.values() if mean.thickness == thickness), key=lambda mean: mean.dice)
        lines.append(f"* {thickness}: {best.row} has the best mean Dice, {best.dice:.4f} over {best.number} regions")
    lines += [f"* {strategy.name}: no result of {case} ({why})" for strategy in done for case, why in strategy.missing.items()]
    lines += [*failures, "", "Dice / HD95 mm of every case:", "", *_case_table(done)]
    return "\n".join(lines) + "\n"


def prediction_costs(strategy: Strategy) -> tuple[float, float]:
    """Mean seconds and largest peak in GB over the cases that were predicted; not a number where there is none."""
    cases = {score["case"]: (score["predict_s"], score["predict_peak_gb"]) for score in strategy.scores}.values()
    return (fmean(s for s, _ in cases), max(gb for _, gb in cases)) if cases else (math.nan, math.nan)


def _case_table(strategies: Sequence[Strategy]) -> list[str]:
    """One line per case and region, from thin to thick slices, and one column per row."""
    scores: dict[tuple[float, str, str, str], dict[str, str]] = {}
    for strategy in strategies:
        for score in strategy.scores:
            known = scores.setdefault((score["slice_mm"], score["case"], score["region"], score["trust"]), {})
            known[strategy.name] = f"{score['dice']:.4f} / {_distance(score['hd95_mm'])}"
    return [
        f"| case | slices mm | region | reference | {' | '.join(one.name for one in strategies)} |",
        "|---" * (4 + len(strategies)) + "|",
        *(
            f"| {case} | {slice_mm:g} | {region} | {trust} | {' | '.join(known.get(one.name, 'none') for one in strategies)} |"
            for (slice_mm, case, region, trust), known in sorted(scores.items())
        ),
    ]


def _scores_text(mean: Mean) -> str:
    return f"{mean.dice:.4f} / {mean.nsd_1mm:.3f} / {_distance(mean.hd95_mm)}"


def _distance(value_mm: float) -> str:
    return f"{value_mm:.1f}" if math.isfinite(value_mm) else "none"
