"""Comparison of spacing strategies on the same cases: means by slice thickness, and tables."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from medseg.io.tables import markdown_table
from medseg.report.differences import case_means, is_established

# Classes of slice thickness: upper bounds of all but the last class, and names of all.
THICKNESS_BOUNDS_MM = (1.5, 3.0)
THICKNESSES = ("≤ 1.5 mm", "1.5–3 mm", "> 3 mm")
# Name of all classes together.
ALL = "all"
# Values of `trust` for a reliable reference, called sure below; only scores with one count in a
# mean. "" = not stated.
SURE = ("reference", "")
STAGES = ("coarse", "fine")


class Strategy(NamedTuple):
    """A row of the comparison.

    Attributes:
        name: Name of the row.
        costs: Stage, from `STAGES`, to its costs, such as `spacing`, `step_peak_mib` and `step_s`,
            see `_cost_table`; empty where the strategy failed.
        scores: One per held-out case and region: `case`, `slice_mm`, `region`, `trust`, `dice`,
            `nsd_1mm`, `nsd_2mm`, `hd95_mm`, `predict_s` and `predict_peak_gb`.
        missing: Held-out case without a result to the reason.
        failure: Reason why the strategy has no result; empty where it has one.
    """

    name: str
    costs: dict[str, dict[str, Any]]
    scores: list[dict[str, Any]]
    missing: dict[str, str]
    failure: str = ""


def thickness_of(slice_mm: float) -> str:
    """Name the class of thickness of a scan by its coarsest spacing.

    Example:
        >>> [thickness_of(mm) for mm in (0.8, 1.5, 2.5, 3.0, 3.001)]
        ['≤ 1.5 mm', '≤ 1.5 mm', '1.5–3 mm', '1.5–3 mm', '> 3 mm']
    """
    num_exceeded = sum(slice_mm > bound_mm for bound_mm in THICKNESS_BOUNDS_MM)
    return THICKNESSES[num_exceeded]


def means_of(strategy: Strategy) -> dict[str, dict[str, float]]:
    """Average the scores of a strategy by class of thickness and over `ALL`.

    A class without a sure reference is left out. Cases without a result are in no mean; they are in
    `Strategy.missing`.

    Returns:
        Class to the `number` of regions with a sure reference, their mean `dice` and `nsd_1mm`, and
        their median `hd95_mm`, which one missed region does not make infinite.
    """
    means = {}
    for thickness in (*THICKNESSES, ALL):
        scores = _sure_scores(strategy, thickness)
        if scores:
            means[thickness] = {
                "number": len(scores),
                "dice": fmean(score["dice"] for score in scores),
                "nsd_1mm": fmean(score["nsd_1mm"] for score in scores),
                "hd95_mm": median(score["hd95_mm"] for score in scores),
            }
    return means


def _sure_scores(strategy: Strategy, thickness: str) -> list[dict[str, Any]]:
    """Select the scores of a class of thickness, or of `ALL`, where the reference is sure."""
    scores = []
    for score in strategy.scores:
        is_of_class = thickness in (ALL, thickness_of(score["slice_mm"]))
        if is_of_class and score["trust"] in SURE:
            scores.append(score)
    return scores


def prediction_costs(strategy: Strategy) -> tuple[float, float]:
    """Compute mean seconds and largest memory peak in GB of a prediction; NaN without a case."""
    if not strategy.scores:
        return math.nan, math.nan
    # By case, since the scores of all its regions have the same costs.
    seconds = {score["case"]: score["predict_s"] for score in strategy.scores}
    peaks_gb = {score["case"]: score["predict_peak_gb"] for score in strategy.scores}
    return fmean(seconds.values()), max(peaks_gb.values())


def markdown(strategies: Sequence[Strategy], patients: Mapping[str, str] | None = None) -> str:
    """Format the comparison in Markdown: costs, means by thickness, the best, failures, every case.

    Args:
        strategies: The strategies, at least one.
        patients: Case to its patient; a case that is not listed is a patient of its own.
    """
    # The strategies that have not failed, by their name.
    compared = {}
    failure_lines = []
    for strategy in strategies:
        if strategy.failure:
            failure_lines.append(f"* {strategy.name}: failed, {strategy.failure}\n")
        else:
            compared[strategy.name] = strategy
    if not compared:
        return "".join(failure_lines)
    means = {name: means_of(strategy) for name, strategy in compared.items()}
    scored_thicknesses = []
    lines = []
    for thickness in (*THICKNESSES, ALL):
        class_means = {}
        for name in compared:
            if thickness in means[name]:
                class_means[name] = means[name][thickness]
        if class_means:
            scored_thicknesses.append(thickness)
            sentence = _best_sentence(compared, class_means, thickness, patients)
            lines.append(f"* {thickness}: {sentence}\n")
    for name, strategy in compared.items():
        for case, reason in strategy.missing.items():
            lines.append(f"* {name}: no result of {case} ({reason})\n")
    lines += failure_lines
    return (
        f"{_cost_table(compared)}\n"
        "Slices: Dice / NSD at 1 mm / HD95 mm (mean, mean, median) over regions with a reliable "
        "reference.\n\n"
        f"{_mean_table(compared, means, scored_thicknesses)}\n{''.join(lines)}\n"
        f"Dice / HD95 mm of every case:\n\n{_case_table(compared)}"
    )


def _best_sentence(
    strategies: Mapping[str, Strategy],
    means: Mapping[str, Mapping[str, float]],
    thickness: str,
    patients: Mapping[str, str] | None,
) -> str:
    """Say which strategy has the best mean Dice, and which others it is not established to beat.

    Args:
        strategies: The strategies by name.
        means: Means of the class of thickness, by the name of the strategy; at least one.
        thickness: The class, or `ALL`.
        patients: Case to its patient.
    """
    best = max(means, key=lambda name: means[name]["dice"])
    sentence = (
        f"{best} has the best mean Dice, {means[best]['dice']:.4f} "
        f"over {means[best]['number']} regions"
    )
    rivals = [name for name in means if name != best]
    tied = _tied(strategies, best, rivals, thickness, patients or {})
    if tied:
        sentence += f"; not established against {', '.join(tied)} (paired t-test over the patients)"
    return sentence


def _tied(
    strategies: Mapping[str, Strategy],
    best: str,
    rivals: Sequence[str],
    thickness: str,
    patients: Mapping[str, str],
) -> list[str]:
    """List the rivals that the best strategy is not established to beat on their common regions.

    The best was chosen after all results were seen, so every pair of strategies counts as a
    comparison.
    """
    # n strategies have n (n - 1) / 2 pairs; there are n - 1 rivals.
    num_pairs = len(rivals) * (1 + len(rivals)) // 2
    best_dices = _sure_dices(strategies[best], thickness)
    tied = []
    for rival in rivals:
        rival_dices = _sure_dices(strategies[rival], thickness)
        # Pairs of case and region.
        common = best_dices.keys() & rival_dices.keys()
        best_means = case_means({key: best_dices[key] for key in common})
        rival_means = case_means({key: rival_dices[key] for key in common})
        if not is_established(best_means, rival_means, patients, num_pairs):
            tied.append(rival)
    return tied


def _sure_dices(strategy: Strategy, thickness: str) -> dict[tuple[str, str], float]:
    """Map case and region of a class of thickness to their Dice, where the reference is sure."""
    scores = _sure_scores(strategy, thickness)
    return {(score["case"], score["region"]): score["dice"] for score in scores}


def _cost_table(strategies: Mapping[str, Strategy]) -> str:
    """Format the costs of training: a line for each strategy and stage."""
    headings = {
        "strategy": "strategy",
        "stage": "stage",
        "spacing": "works on",
        "saved_bytes_per_voxel": "saved B/voxel",
        "step_peak_mib": "peak of a step MiB",
        "whole_peak_mib": "of a whole crop MiB",
        "step_s": "s/step",
        "train_s": "training s",
    }
    formats = {
        "saved_bytes_per_voxel": ".1f",
        "step_peak_mib": ".0f",
        "whole_peak_mib": ".0f",
        "step_s": ".2f",
        "train_s": ".0f",
    }
    rows = []
    for name, strategy in strategies.items():
        for stage, cost in strategy.costs.items():
            rows.append({"strategy": name, "stage": stage, **cost})
    return markdown_table(rows, headings, formats)


def _mean_table(
    strategies: Mapping[str, Strategy],
    means: Mapping[str, Mapping[str, Mapping[str, float]]],
    thicknesses: Sequence[str],
) -> str:
    """Format the means: a line for each strategy, a column for each class of thickness.

    Args:
        strategies: The strategies by name.
        means: Name of a strategy to its means, from `means_of`.
        thicknesses: Classes with a column, and `ALL`.
    """
    rows = []
    for name, strategy in strategies.items():
        row: dict[str, Any] = {"strategy": name}
        for thickness, mean in means[name].items():
            distance = distance_text(mean["hd95_mm"])
            row[thickness] = f"{mean['dice']:.4f} / {mean['nsd_1mm']:.3f} / {distance}"
        row["prediction s"], row["peak GB"] = prediction_costs(strategy)
        rows.append(row)
    columns = ("strategy", *thicknesses, "prediction s", "peak GB")
    return markdown_table(rows, columns, {"prediction s": ".1f", "peak GB": ".2f"})


def _case_table(strategies: Mapping[str, Strategy]) -> str:
    """Format the scores of the cases: a line for each region, a column for each strategy.

    Scans with thin slices come first.
    """
    headings = {"case": "case", "slice_mm": "slices mm", "region": "region", "trust": "reference"}
    # The values of these keys, in this order, identify a line and sort the lines.
    sort_keys = ("slice_mm", "case", "region", "trust")
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, strategy in strategies.items():
        for score in strategy.scores:
            first_columns = {key: score[key] for key in sort_keys}
            row = rows.setdefault(tuple(first_columns.values()), first_columns)
            # Not the name alone: a strategy may have the name of another column.
            row[f"of {name}"] = f"{score['dice']:.4f} / {distance_text(score['hd95_mm'])}"
    columns = headings | {f"of {name}": name for name in strategies}
    sorted_rows = [rows[key] for key in sorted(rows)]
    return markdown_table(sorted_rows, columns, {"slice_mm": "g"}, missing="none")


def distance_text(value_mm: float) -> str:
    """Format a surface distance in mm; infinite, of a region that was not found, is `none`."""
    return f"{value_mm:.1f}" if math.isfinite(value_mm) else "none"
