"""Report of an evaluation: `report.html`, and `differences.csv` with the differences to a baseline on the same cases."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

from medseg.errors import UserError, require
from medseg.inference.segmentation import StatedBound
from medseg.io.atomic import replace_text
from medseg.io.tables import read_csv, write_csv
from medseg.report.cases import Files, render_cases
from medseg.report.differences import (
    FORMATS,
    Difference,
    describe_patients,
    paired_difference,
    write_difference,
)
from medseg.wording import first_few

# Metric to 1 where more is better, or -1 where less is.
RANKED = {"dice": 1, "nsd_1mm": 1, "nsd_2mm": 1, "hd95_mm": -1}
ALL = "all"
# Decimals of `metrics.csv`: more of them would make a difference out of two equal results.
TABLE_DIGITS = 6

Row = Mapping[str, Any]


def read_baseline(folder: Path) -> list[dict[str, Any]]:
    """Read the scores of another evaluation.

    Args:
        folder: Its output folder.

    Returns:
        Rows with `case`, `region` and the metrics of `RANKED`.

    Raises:
        UserError: If there is no `metrics.csv`, or `evaluate` did not write it.
    """
    path = folder / "metrics.csv"
    require(
        path.is_file(),
        f"baseline={folder}: there is no metrics.csv; give the output folder of another evaluation.",
    )
    try:
        return [
            {
                "case": row["case"],
                "region": row["region"],
                **{metric: float(row[metric]) for metric in RANKED},
            }
            for row in read_csv(path)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: expected the table of an evaluation, but it is damaged ({error}); evaluate again."
        ) from error


def compare_rows(
    rows: Sequence[Row],
    baseline: Sequence[Row],
    patients: Mapping[str, str],
) -> list[tuple[str, str, Difference]]:
    """Compute the paired differences of each region and metric, and of the means of each case over its regions (`ALL`).

    A region whose score is not finite on one side, such as the distance of one that was missed,
    counts on neither.

    Args:
        rows: `case`, `region` and the metrics of `RANKED`.
        baseline: The same of the baseline; only pairs of case and region that both have count.
        patients: Case to its patient, whose cases count together.

    Returns:
        Region, metric and difference; combinations without a pair of finite scores are left out.
    """
    before = {(row["case"], row["region"]): row for row in baseline}
    scored = {(row["case"], row["region"]): row for row in rows}
    pairs = [(row, before[key]) for key, row in scored.items() if key in before]
    regions = list(dict.fromkeys(row["region"] for row, _ in pairs))
    compared = []
    for region in [*regions, ALL] if len(regions) > 1 else regions:
        of_region = [(row, other) for row, other in pairs if region in (row["region"], ALL)]
        for metric, better in RANKED.items():
            finite = [pair for pair in of_region if all(math.isfinite(row[metric]) for row in pair)]
            scores = _case_means([row for row, _ in finite], metric)
            baseline_scores = _case_means([row for _, row in finite], metric)
            if difference := paired_difference(scores, baseline_scores, better, patients):
                compared.append((region, metric, difference))
    return compared


def _case_means(rows: Sequence[Row], metric: str) -> dict[str, float]:
    """Mean score of each case over its regions."""
    scores: dict[str, list[float]] = {}
    for row in rows:
        scores.setdefault(row["case"], []).append(row[metric])
    return {case: fmean(values) for case, values in scores.items()}


def _describe_pairs(
    rows: Sequence[Row],
    baseline: Sequence[Row],
    patients: Mapping[str, str],
) -> list[str]:
    """Say how the patients of the differences count, and which cases have scores on one side only."""
    scored, before = ({row["case"]: None for row in side} for side in (rows, baseline))
    sentences = [describe_patients([case for case in scored if case in before], patients)]
    if not patients:
        sentences.append(
            "a folder of references names no patients; ref=<case table> does, by its column patient",
        )
    for where, alone in (
        ("the baseline", [case for case in before if case not in scored]),
        ("this evaluation", [case for case in scored if case not in before]),
    ):
        if alone:
            sentences.append(
                f"not compared, as only {where} has scores of them: {first_few(alone)}"
            )
    return sentences


def write_page(
    rows: Sequence[Row],
    statistics: Sequence[Row],
    viewers: Mapping[str, Path],
    prediction_viewers: Mapping[str, Path],
    bounds: Mapping[str, Mapping[str, StatedBound]],
    output: Path,
    num_pictures: int,
    progress: Callable[[str], None],
    *,
    overlays: Path | None,
    notes: Mapping[str, Sequence[str]],
    costs: Sequence[tuple[str, str]],
    baseline: Path | None,
    baseline_rows: Sequence[Row],
    patients: Mapping[str, str],
) -> None:
    """Write `report.html`, and with a baseline `differences.csv` and a line for each region.

    Args:
        rows: Scores, at least one row.
        statistics: Statistics over all trusts.
        viewers: Case to its viewer with the reference.
        prediction_viewers: Case to the viewer that `predict` wrote beside the label map.
        bounds: Case to the bound on Dice that its prediction states for each region.
        output: Folder to write to.
        num_pictures: Largest number of overlays inside the page.
        progress: Takes each line for the console.
        overlays: Folder of the pictures `<case>.png`, or None.
        notes: Heading to its lines.
        costs: Pairs of a name and a figure.
        baseline: Folder of the baseline, or None.
        baseline_rows: Its scores.
        patients: Case to its patient, where the references name patients.
    """
    rows = [
        {**row, **{metric: round(row[metric], TABLE_DIGITS) for metric in RANKED}} for row in rows
    ]
    compared = compare_rows(rows, baseline_rows, patients)
    pairing: list[str] = []
    if baseline is not None:
        require(
            bool(compared),
            f"baseline={baseline}: it has none of the scored cases; give scores of the same cases.",
        )
        table = [
            {"region": region, "metric": metric, **one._asdict()}
            for region, metric, one in compared
        ]
        write_csv(
            output / "differences.csv", table, ("region", "metric", *Difference._fields), FORMATS
        )
        for region, metric, one in compared:
            if metric == "dice":
                pairs = f"{one.cases} cases of {one.patients} patients"
                changes = f"{one.better} cases better, {one.worse} worse"
                progress(
                    f"{region}: Dice {write_difference(one)} to the baseline, {pairs} ({changes}), "
                    f"p = {one.wilcoxon_p:.2g} (Wilcoxon)"
                )
        pairing = _describe_pairs(rows, baseline_rows, patients)
        for sentence in pairing:
            progress(f"differences: {sentence}")
    files = {}
    for case in {row["case"]: None for row in rows}:
        picture = overlays / f"{case}.png" if overlays else None
        picture = picture if picture and picture.is_file() else None
        linked = picture, viewers.get(case), prediction_viewers.get(case)
        picture_link, viewer_link, prediction_link = (
            _link(path, output) if path else "" for path in linked
        )
        sentences = {region: str(bound) for region, bound in bounds.get(case, {}).items()}
        files[case] = Files(picture, picture_link, viewer_link, prediction_link, sentences)
    page = render_cases(
        rows,
        statistics,
        files,
        output.name,
        str(output.resolve()),
        num_pictures,
        progress,
        notes=notes,
        costs=costs,
        baseline=str(baseline or ""),
        baseline_dices={
            (row["case"], row["region"]): row["dice"]
            for row in baseline_rows
            if math.isfinite(row["dice"])
        },
        compared=compared,
        pairing=pairing,
    )
    replace_text(output / "report.html", page)


def _link(path: Path, folder: Path) -> str:
    """Address of a file relative to a page in a folder."""
    return quote(Path(os.path.relpath(path, folder)).as_posix())
