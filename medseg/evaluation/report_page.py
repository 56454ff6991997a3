"""Report of an evaluation: `report.html`, and `differences.csv` to compare with a baseline."""

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

from medseg.errors import UserError
from medseg.inference.segmentation import StatedBound
from medseg.io.atomic import replace_text
from medseg.io.tables import read_csv, write_csv
from medseg.report.cases import Files, render_cases
from medseg.report.differences import (
    FORMATS,
    Difference,
    describe_patients,
    format_difference,
    paired_difference,
)
from medseg.wording import first_few

# Metric to 1 if a larger score is better, or -1 if a smaller score is better.
DIRECTION_OF_METRIC = {"dice": 1, "nsd_1mm": 1, "nsd_2mm": 1, "hd95_mm": -1}
# Value of `region` in rows over all regions, and of `trust` in rows over all levels of trust.
ALL = "all"
# Decimals of the scores in `metrics.csv`. Rounding errors are smaller, so equal results have equal
# rows.
TABLE_DIGITS = 6

# Row of a table: column to value.
Row = Mapping[str, Any]


def read_baseline(folder: Path) -> list[dict[str, Any]]:
    """Read the scores of another evaluation.

    Args:
        folder: Output folder of that evaluation.

    Returns:
        Rows with `case`, `region` and the metrics of `DIRECTION_OF_METRIC`.

    Raises:
        UserError: If there is no `metrics.csv`, or it is not the table of an evaluation.
    """
    path = folder / "metrics.csv"
    if not path.is_file():
        raise UserError(
            f"baseline={folder}: there is no metrics.csv; "
            "give the output folder of another evaluation."
        )
    rows = []
    try:
        for row in read_csv(path):
            scores = {metric: float(row[metric]) for metric in DIRECTION_OF_METRIC}
            rows.append({"case": row["case"], "region": row["region"], **scores})
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: expected the table of an evaluation, but it is damaged ({error}); "
            "evaluate again."
        ) from error
    return rows


def check_baseline(folder: Path, rows: Sequence[Row], cases: Collection[str]) -> None:
    """Refuse a baseline that has none of the cases.

    Args:
        folder: Output folder of the baseline, for the message.
        rows: Its scores, from `read_baseline`.
        cases: Names of the cases to compare.
    """
    if set(cases).isdisjoint(_cases_of(rows)):
        raise UserError(
            f"baseline={folder}: it has none of the scored cases; give scores of the same cases."
        )


def compare_rows(
    rows: Sequence[Row],
    baseline: Sequence[Row],
    patients: Mapping[str, str],
) -> list[tuple[str, str, Difference]]:
    """Compute the paired differences of each region and metric.

    With several regions the last entries have the region `ALL` and compare the mean of each case
    over its regions. If a score is not finite in one evaluation, as the distance of a missed
    region, it is left out in both. Example for `ALL`: this evaluation has a distance of inf for the
    left and 2 mm for the right region, the baseline has 5 mm and 3 mm. Only the right region
    counts: 2 mm against 3 mm.

    Args:
        rows: Rows with `case`, `region` and the metrics of `DIRECTION_OF_METRIC`.
        baseline: Rows of the baseline with the same keys. Cases and regions that only one of the
            evaluations has are left out.
        patients: Case to its patient; the cases of a patient count as one.

    Returns:
        Tuples of region, metric and difference. Combinations without a pair of finite scores are
        left out.
    """
    baseline_rows = {(row["case"], row["region"]): row for row in baseline}
    scored_rows = {(row["case"], row["region"]): row for row in rows}
    # Pairs of a row of this evaluation and the row of the baseline for the same case and region.
    pairs: list[tuple[Row, Row]] = []
    pairs_by_region: dict[str, list[tuple[Row, Row]]] = {}
    for key, row in scored_rows.items():
        if key in baseline_rows:
            pair = row, baseline_rows[key]
            pairs.append(pair)
            pairs_by_region.setdefault(row["region"], []).append(pair)
    groups = list(pairs_by_region.items())
    # A list, not a dictionary: a region may also have the name `ALL`.
    if len(groups) > 1:
        groups.append((ALL, pairs))
    compared = []
    for region, region_pairs in groups:
        for metric, direction in DIRECTION_OF_METRIC.items():
            scores, baseline_scores = _finite_means(region_pairs, metric)
            difference = paired_difference(scores, baseline_scores, direction, patients)
            if difference is not None:
                compared.append((region, metric, difference))
    return compared


def _finite_means(
    pairs: Sequence[tuple[Row, Row]], metric: str
) -> tuple[dict[str, float], dict[str, float]]:
    """Compute the mean score of each case over the pairs in which both scores are finite.

    Args:
        pairs: Rows of this evaluation and of the baseline for the same case and region.
        metric: Key of the score.

    Returns:
        Case to mean in this evaluation, and case to mean in the baseline.
    """
    rows = []
    baseline_rows = []
    for row, baseline_row in pairs:
        if math.isfinite(row[metric]) and math.isfinite(baseline_row[metric]):
            rows.append(row)
            baseline_rows.append(baseline_row)
    return _case_means(rows, metric), _case_means(baseline_rows, metric)


def _case_means(rows: Sequence[Row], metric: str) -> dict[str, float]:
    """Compute the mean score of each case over its rows, one per region."""
    scores: dict[str, list[float]] = {}
    for row in rows:
        scores.setdefault(row["case"], []).append(row[metric])
    return {case: fmean(values) for case, values in scores.items()}


def _describe_pairs(
    rows: Sequence[Row],
    baseline: Sequence[Row],
    patients: Mapping[str, str],
) -> list[str]:
    """Describe how patients count in the differences, and which cases are in one evaluation only.

    Args:
        rows: Scores of this evaluation.
        baseline: Scores of the baseline.
        patients: Case to its patient; empty if the references name no patients.
    """
    scored_cases = _cases_of(rows)
    baseline_cases = _cases_of(baseline)
    common_cases = [case for case in scored_cases if case in baseline_cases]
    sentences = [describe_patients(common_cases, patients)]
    # A case table names the patient of every case: without patients the references are a folder.
    if not patients:
        sentences.append(
            "a folder of references names no patients; ref=<case table> does, by its column patient"
        )
    cases_of_one_side = {
        "the baseline": [case for case in baseline_cases if case not in scored_cases],
        "this evaluation": [case for case in scored_cases if case not in baseline_cases],
    }
    for side, cases in cases_of_one_side.items():
        if cases:
            sentences.append(f"not compared, as only {side} has scores of them: {first_few(cases)}")
    return sentences


def _cases_of(rows: Sequence[Row]) -> list[str]:
    """Names of the cases of rows, each once, in the order of the rows."""
    cases = [row["case"] for row in rows]
    return list(dict.fromkeys(cases))


def write_page(
    rows: Sequence[Row],
    statistics: Sequence[Row],
    *,
    viewers: Mapping[str, Path],
    prediction_viewers: Mapping[str, Path],
    bounds: Mapping[str, Mapping[str, StatedBound]],
    output: Path,
    num_pictures: int,
    say: Callable[[str], None],
    overlays: Path | None,
    notes: Mapping[str, Sequence[str]],
    costs: Sequence[tuple[str, str]],
    baseline: Path | None,
    baseline_rows: Sequence[Row],
    patients: Mapping[str, str],
) -> None:
    """Write `report.html`; with a baseline also `differences.csv` and a console line per region.

    Args:
        rows: Scores, at least one row.
        statistics: Rows of `summarise` whose trust is `ALL`.
        viewers: Case to its viewer with the reference.
        prediction_viewers: Case to the viewer that `predict` wrote beside the label map.
        bounds: Case to its bounds on Dice, by region, as the report of its prediction states them.
        output: Folder to write to.
        num_pictures: Largest number of overlays inside the page.
        say: Takes each line for the console.
        overlays: Folder of the pictures `<case>.png`, or None.
        notes: Heading to the lines below it.
        costs: Title and formatted mean over the cases of each cost of a prediction, such as its
            duration.
        baseline: Output folder of the evaluation to compare with, or None.
        baseline_rows: Scores of the baseline, from `read_baseline`; empty without a baseline.
        patients: Case to its patient; empty if the references name no patients.

    Raises:
        UserError: If there is a baseline, but no case and region with finite scores in both.
    """
    # Rounded like the scores of the baseline, which are read from `metrics.csv`.
    rows = [{**row, **_rounded_scores(row)} for row in rows]
    compared = compare_rows(rows, baseline_rows, patients)
    pairing_sentences: list[str] = []
    if baseline is not None:
        if not compared:
            check_baseline(baseline, baseline_rows, _cases_of(rows))
            raise UserError(
                f"baseline={baseline}: none of its scores of the same cases is finite in both "
                "evaluations, or the regions have other names; give scores of the same regions."
            )
        _write_differences(compared, output, say)
        pairing_sentences = _describe_pairs(rows, baseline_rows, patients)
        for sentence in pairing_sentences:
            say(f"differences: {sentence}")
    files = {}
    for case in _cases_of(rows):
        picture = _picture_of(case, overlays)
        bounds_of_case = bounds.get(case, {})
        files[case] = Files(
            picture=picture,
            picture_link=_link(picture, output),
            viewer_link=_link(viewers.get(case), output),
            prediction_link=_link(prediction_viewers.get(case), output),
            dice_at_least={region: str(bound) for region, bound in bounds_of_case.items()},
        )
    baseline_dices = {}
    for row in baseline_rows:
        # A table that was edited by hand may hold NaN or infinity.
        if math.isfinite(row["dice"]):
            baseline_dices[row["case"], row["region"]] = row["dice"]
    page = render_cases(
        rows,
        statistics,
        files,
        title=output.resolve().name,
        folder=str(output.resolve()),
        num_pictures=num_pictures,
        say=say,
        notes=notes,
        costs=costs,
        baseline=str(baseline or ""),
        baseline_dices=baseline_dices,
        compared=compared,
        pairing=pairing_sentences,
    )
    replace_text(output / "report.html", page)


def _picture_of(case: str, overlays: Path | None) -> Path | None:
    """Find the overlay of a case; None where it was not drawn."""
    if overlays is None:
        return None
    picture = overlays / f"{case}.png"
    return picture if picture.is_file() else None


def _rounded_scores(row: Row) -> dict[str, float]:
    """Round scores as in `metrics.csv`, so that equal results have equal scores."""
    return {metric: round(row[metric], TABLE_DIGITS) for metric in DIRECTION_OF_METRIC}


def _write_differences(
    compared: Sequence[tuple[str, str, Difference]],
    output: Path,
    say: Callable[[str], None],
) -> None:
    """Write `differences.csv`, and print the Dice difference of each region.

    Args:
        compared: Tuples of region, metric and difference, from `compare_rows`.
        output: Folder to write to.
        say: Takes each line for the console.
    """
    table = []
    for region, metric, difference in compared:
        table.append({"region": region, "metric": metric, **difference._asdict()})
    columns = ("region", "metric", *Difference._fields)
    write_csv(output / "differences.csv", table, columns, FORMATS)
    for region, metric, difference in compared:
        if metric == "dice":
            say(
                f"{region}: Dice {format_difference(difference)} to the baseline, "
                f"{difference.cases} cases of {difference.patients} patients "
                f"({difference.better} cases better, {difference.worse} worse), "
                f"p = {difference.wilcoxon_p:.2g} (Wilcoxon)"
            )


def _link(path: Path | None, folder: Path) -> str:
    """Make the URL of a file relative to a page in `folder`; empty without a file."""
    if path is None:
        return ""
    # Quote the bytes of the path, because a file name need not be valid UTF-8.
    return quote(os.fsencode(os.path.relpath(path, folder)))
