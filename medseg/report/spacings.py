"""Comparison of spacing strategies on the same cases: means by slice thickness, and tables in Markdown."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from medseg.io.tables import markdown_table
from medseg.report.differences import is_established

# Upper ends of the first classes of slice thickness, in mm.
THICKNESS_BOUNDS_MM = (1.5, 3.0)
THICKNESSES = ("≤ 1.5 mm", "1.5–3 mm", "> 3 mm")
ALL = "all"
# Trust of the references that count in a mean; "" = not given.
SURE = ("reference", "")
STAGES = ("coarse", "fine")


class Strategy(NamedTuple):
    """A row of the comparison.

    Attributes:
        name: Name of the row.
        costs: Stage (`STAGES`) to its spacing, bytes and seconds; empty where it failed.
        scores: One per held-out case and region: `case`, `slice_mm`, `region`, `trust`, `dice`,
            `nsd_1mm`, `nsd_2mm`, `hd95_mm`, `predict_s` and `predict_peak_gb`.
        missing: Held-out case without a result to the reason.
        failure: Reason why the row has no result; empty where it has one.
    """

    name: str
    costs: dict[str, dict[str, Any]]
    scores: list[dict[str, Any]]
    missing: dict[str, str]
    failure: str = ""


def thickness_of(slice_mm: float) -> str:
    """Class of a scan by its coarsest spacing.

    Example:
        >>> [thickness_of(mm) for mm in (0.8, 1.5, 2.5, 3.0, 3.001)]
        ['≤ 1.5 mm', '≤ 1.5 mm', '1.5–3 mm', '1.5–3 mm', '> 3 mm']
    """
    return THICKNESSES[sum(slice_mm > bound for bound in THICKNESS_BOUNDS_MM)]


def means_of(strategy: Strategy) -> dict[str, dict[str, float]]:
    """Average the scores of a row by class of thickness and over `ALL`; a class without a sure reference is left out.

    A case without a result has no score here: `Strategy.missing` belongs beside the means.

    Returns:
        Class to the `number` of regions with a sure reference, their mean `dice` and `nsd_1mm`, and
        their median `hd95_mm`: one missed region does not make it infinite.
    """
    sure = [score for score in strategy.scores if score["trust"] in SURE]
    groups = {
        one: [score for score in sure if one in (thickness_of(score["slice_mm"]), ALL)]
        for one in (*THICKNESSES, ALL)
    }
    return {
        one: {
            "number": len(scores),
            "dice": fmean(score["dice"] for score in scores),
            "nsd_1mm": fmean(score["nsd_1mm"] for score in scores),
            "hd95_mm": median(score["hd95_mm"] for score in scores),
        }
        for one, scores in groups.items()
        if scores
    }


def prediction_costs(strategy: Strategy) -> tuple[float, float]:
    """Mean seconds and largest peak in GB over the predicted cases; not a number where there is none."""
    cases = {
        score["case"]: (score["predict_s"], score["predict_peak_gb"]) for score in strategy.scores
    }.values()
    return (
        (fmean(s for s, _ in cases), max(gb for _, gb in cases)) if cases else (math.nan, math.nan)
    )


def markdown(strategies: Sequence[Strategy], patients: Mapping[str, str] | None = None) -> str:
    """Format the comparison: costs, means by thickness, the best of each class, failures, every case.

    Args:
        strategies: The rows.
        patients: Case to its patient; a case that is missing is a patient of its own.
    """
    failures = "".join(
        f"* {strategy.name}: failed, {strategy.failure}\n"
        for strategy in strategies
        if strategy.failure
    )
    done = {strategy.name: strategy for strategy in strategies if not strategy.failure}
    if not done:
        return failures
    means = {name: means_of(strategy) for name, strategy in done.items()}
    shown = [
        thickness
        for thickness in (*THICKNESSES, ALL)
        if any(thickness in known for known in means.values())
    ]
    bests = {
        one: max(
            (name for name in done if one in means[name]), key=lambda name: means[name][one]["dice"]
        )
        for one in shown
    }
    lines = []
    for thickness, best in bests.items():
        mean = means[best][thickness]
        sentence = (
            f"{best} has the best mean Dice, {mean['dice']:.4f} over {mean['number']} regions"
        )
        rivals = [name for name in done if name != best and thickness in means[name]]
        tied = _tied(done, best, rivals, thickness, patients or {})
        if tied:
            sentence += (
                f"; not established against {', '.join(tied)} (paired t-test over the patients)"
            )
        lines.append(f"* {thickness}: {sentence}\n")
    lines += [
        f"* {name}: no result of {case} ({why})\n"
        for name, one in done.items()
        for case, why in one.missing.items()
    ]
    return (
        f"{_cost_table(done)}\n"
        "Slices: Dice / NSD at 1 mm / HD95 mm (mean, mean, median) over regions with a reliable reference.\n\n"
        f"{_mean_table(done, means, shown)}\n{''.join(lines)}{failures}\n"
        f"Dice / HD95 mm of every case:\n\n{_case_table(done)}"
    )


def _tied(
    strategies: Mapping[str, Strategy],
    best: str,
    rivals: Sequence[str],
    thickness: str,
    patients: Mapping[str, str],
) -> list[str]:
    """Rows that the one with the best mean is not established to beat on the regions that both have.

    The best was chosen after all were seen, so every pair of rows counts as a comparison.
    """
    num_pairs = len(rivals) * (1 + len(rivals)) // 2
    own = _sure_dices(strategies[best], thickness)
    tied = []
    for rival in rivals:
        other = _sure_dices(strategies[rival], thickness)
        common = own.keys() & other.keys()
        scores, other_scores = ({key: dices[key] for key in common} for dices in (own, other))
        if not is_established(_case_means(scores), _case_means(other_scores), patients, num_pairs):
            tied.append(rival)
    return tied


def _sure_dices(strategy: Strategy, thickness: str) -> dict[tuple[str, str], float]:
    """Dice by case and region of a class of thickness, where the reference is sure."""
    return {
        (score["case"], score["region"]): score["dice"]
        for score in strategy.scores
        if score["trust"] in SURE and thickness in (thickness_of(score["slice_mm"]), ALL)
    }


def _case_means(dices: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """Mean Dice of each case over its regions."""
    by_case: dict[str, list[float]] = {}
    for (case, _), dice in dices.items():
        by_case.setdefault(case, []).append(dice)
    return {case: fmean(values) for case, values in by_case.items()}


def _cost_table(done: Mapping[str, Strategy]) -> str:
    """One line per strategy and stage."""
    headings = {
        "strategy": "strategy", "stage": "stage", "spacing": "works on", "saved_bytes_per_voxel": "saved B/voxel",
        "step_peak_mib": "peak of a step MiB", "whole_peak_mib": "of a whole crop MiB", "step_s": "s/step", "train_s": "training s",
    }  # fmt: skip
    rows = [
        {"strategy": name, "stage": stage, **cost}
        for name, one in done.items()
        for stage, cost in one.costs.items()
    ]
    return markdown_table(
        rows,
        headings,
        {
            "saved_bytes_per_voxel": ".1f",
            "step_peak_mib": ".0f",
            "whole_peak_mib": ".0f",
            "step_s": ".2f",
            "train_s": ".0f",
        },
    )


def _mean_table(
    done: Mapping[str, Strategy],
    means: Mapping[str, Mapping[str, Mapping[str, float]]],
    shown: Sequence[str],
) -> str:
    """One line per strategy and one column per class of thickness."""
    rows = []
    for name, strategy in done.items():
        predicted_s, peak_gb = prediction_costs(strategy)
        rows.append(
            {
                "strategy": name,
                **{
                    one: f"{mean['dice']:.4f} / {mean['nsd_1mm']:.3f} / {distance_text(mean['hd95_mm'])}"
                    for one, mean in means[name].items()
                },
                "prediction s": predicted_s,
                "peak GB": peak_gb,
            }
        )
    return markdown_table(
        rows,
        ("strategy", *shown, "prediction s", "peak GB"),
        {"prediction s": ".1f", "peak GB": ".2f"},
    )


def _case_table(done: Mapping[str, Strategy]) -> str:
    """One line per case and region, from thin to thick slices, and one column per strategy."""
    keys = {"slice_mm": "slices mm", "case": "case", "region": "region", "trust": "reference"}
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, strategy in done.items():
        for score in strategy.scores:
            row = rows.setdefault(
                tuple(score[key] for key in keys), {key: score[key] for key in keys}
            )
            row[f"of {name}"] = f"{score['dice']:.4f} / {distance_text(score['hd95_mm'])}"
    columns = {key: keys[key] for key in ("case", "slice_mm", "region", "trust")} | {
        f"of {name}": name for name in done
    }
    return markdown_table(
        [rows[key] for key in sorted(rows)], columns, {"slice_mm": "g"}, missing="none"
    )


def distance_text(value_mm: float) -> str:
    """Format a surface distance in mm; an infinite one, of a region that was not found, is `none`."""
    return f"{value_mm:.1f}" if math.isfinite(value_mm) else "none"
