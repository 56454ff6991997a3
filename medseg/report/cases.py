"""Page of an evaluation: cases from worst to best, differences to a baseline, and charts."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from medseg.report.charts import (
    Chart,
    case_differences,
    dice_by_region,
    differences,
    volume_errors,
)
from medseg.report.compare import MISSING
from medseg.report.differences import METHOD, Difference
from medseg.report.html import data_uri, render_page

# Number of hues in the style sheet; with more regions they repeat.
_NUM_HUES = 8
# Score to its title, in the order of the columns.
_TITLES = {
    "dice": "Dice",
    "nsd_1mm": "NSD 1 mm",
    "nsd_2mm": "NSD 2 mm",
    "hd95_mm": "HD95 mm",
    "volume_pred_ml": "ml",
    "volume_ref_ml": "reference ml",
}
# Keys of a row that the charts use.
_POINT_KEYS = (
    "case",
    "region",
    "dice",
    "volume_ref_ml",
    "error_ml",
    "delta",
    "row",
    "link",
    "colour",
)

Row = Mapping[str, Any]


class Files(NamedTuple):
    """Files of a case.

    Attributes:
        picture: PNG file of the overlay, or None.
        picture_link: Address of the overlay relative to the page, or "".
        viewer_link: Address of the viewer with the reference relative to the page, or "".
        prediction_link: Address of the viewer that `predict` wrote, or "".
        dice_at_least: Region to the text of the lower bound on its Dice that the prediction states.
    """

    picture: Path | None
    picture_link: str
    viewer_link: str
    prediction_link: str = ""
    dice_at_least: Mapping[str, str] = {}


def render_cases(
    rows: Sequence[Row],
    statistics: Sequence[Row],
    files: Mapping[str, Files],
    title: str,
    folder: str,
    num_pictures: int,
    say: Callable[[str], None],
    *,
    notes: Mapping[str, Sequence[str]],
    costs: Sequence[tuple[str, str]],
    baseline: str,
    baseline_dices: Mapping[tuple[str, str], float],
    compared: Sequence[tuple[str, str, Difference]],
    pairing: Sequence[str] = (),
) -> str:
    """Render the page.

    Args:
        rows: Scores of each case and region: `case`, `region`, `trust`, the scores of
            `medseg.metrics.scores.score_region` and further metrics.
        statistics: Statistics of each region and metric, over references of any trust.
        files: Case to its picture and viewers.
        title: Heading.
        folder: Folder of the evaluation, as shown to the reader.
        num_pictures: Largest number of overlays inside the page, the worst cases first.
        say: Receives a sentence about each picture that cannot be read.
        notes: Heading to the lines below it: failures, warnings, cases without a partner; a heading
            without lines is left out.
        costs: Pairs of a name and a value for the top of the page.
        baseline: Name of the baseline; "" without one, and then `baseline_dices`, `compared` and
            `pairing` are empty.
        baseline_dices: Case and region to the Dice of the baseline.
        compared: Region, metric and difference to the baseline.
        pairing: Sentences about the cases and patients of the differences.

    Returns:
        HTML.
    """
    regions = list(dict.fromkeys(row["region"] for row in rows))
    anchors = {case: f"case-{number}" for number, case in enumerate(worst_first(rows))}
    page_rows = _page_rows(sorted(rows, key=_badness), regions, anchors, baseline_dices)
    # The page contains the points: keys that no chart uses would only make it larger.
    points = []
    for row in page_rows:
        points.append({key: row[key] for key in _POINT_KEYS})
    trusts = {row["trust"] for row in rows} - {""}
    return render_page(
        "cases.html",
        kind="evaluation",
        title=title,
        tiles=[("cases", len(anchors)), *_mean_dices(statistics), *costs],
        charts={
            "cases": [dice_by_region(points), volume_errors(points)],
            "differences": _difference_charts(compared, points),
        },
        folder=folder,
        regions=regions,
        trusts=sorted(trusts),
        titles=_titles(rows[0]),
        rows=page_rows,
        cases=_page_cases(anchors, files, num_pictures, say),
        statistics=[row for row in statistics if row["mean"] is not None],
        notes={heading: lines for heading, lines in notes.items() if lines},
        baseline=baseline,
        differences=_difference_rows(compared),
        method=METHOD,
        pairing=pairing,
        missing=MISSING,
        format_score=_format_score,
    )


def _mean_dices(statistics: Sequence[Row]) -> list[tuple[str, str]]:
    """List the mean Dice of each region, as pairs of a name and a value."""
    tiles = []
    for row in statistics:
        if row["metric"] == "dice":
            name = row["region"].replace("_", " ")
            tiles.append((f"mean Dice, {name}", f"{row['mean']:.4f}"))
    return tiles


def _page_cases(
    anchors: Mapping[str, str],
    files: Mapping[str, Files],
    num_pictures: int,
    say: Callable[[str], None],
) -> list[tuple[str, str, str, Files]]:
    """List the cases of the page, the worst first.

    Args:
        anchors: Case to its anchor in the page, the worst case first.
        files: Case to its picture and viewers.
        num_pictures: Largest number of pictures.
        say: Receives a sentence about each picture that cannot be read.

    Returns:
        Name, anchor, picture as a data URI ("" without one) and files of each case.
    """
    cases = []
    for number, (case, anchor) in enumerate(anchors.items()):
        picture = files[case].picture
        uri = ""
        if picture is not None and number < num_pictures:
            uri = data_uri(picture, say)
        cases.append((case, anchor, uri, files[case]))
    return cases


def _difference_rows(compared: Sequence[tuple[str, str, Difference]]) -> list[dict[str, Any]]:
    """Make the rows of the table of differences, one for each region and metric."""
    rows = []
    for region, metric, difference in compared:
        rows.append(
            {
                "name": region.replace("_", " "),
                "metric": _TITLES[metric],
                # On the page of runs, which has this table too, a row is a setting with a colour.
                "setting": None,
                "digits": 2 if metric == "hd95_mm" else 4,
                **difference._asdict(),
            }
        )
    return rows


def _titles(row: Row) -> dict[str, str]:
    """Map the scores of a row to their titles: `_TITLES`, then further metrics by their name."""
    titles = dict(_TITLES)
    for name in row:
        if name not in ("case", "region", "trust"):
            titles.setdefault(name, name)
    return titles


def _difference_charts(
    compared: Sequence[tuple[str, str, Difference]], points: Sequence[dict[str, Any]]
) -> list[Chart]:
    """Chart the differences of the Dice to the baseline, by region and by case.

    Args:
        compared: Region, metric and difference to the baseline.
        points: Data points of the charts; `delta` is the difference of the Dice.
    """
    rows = []
    for region, metric, difference in compared:
        if metric == "dice":
            row = {
                "name": region.replace("_", " "),
                # All rows are of this evaluation: the chart treats them as one setting.
                "setting": 0,
                "colour": "var(--accent)",
                **difference._asdict(),
            }
            rows.append(row)
    charts = list(differences(rows, "Difference of the Dice"))
    # The baseline may have only some of the cases.
    pairs = [point for point in points if point["delta"] is not None]
    if pairs:
        charts.append(case_differences(pairs))
    return charts


def worst_first(rows: Sequence[Row]) -> list[str]:
    """List the cases in the order of the page: by their lowest Dice, then by its row's HD95."""
    cases = [row["case"] for row in sorted(rows, key=_badness)]
    # A case has a row for each region. The first of its rows, its worst, decides its place.
    return list(dict.fromkeys(cases))


def _badness(row: Row) -> tuple[float, float]:
    """Sort key of a row that puts the worst first: the lowest Dice, then the largest HD95."""
    return row["dice"], -row["hd95_mm"]


def _page_rows(
    rows: Sequence[Row],
    regions: Sequence[str],
    anchors: Mapping[str, str],
    baseline_dices: Mapping[tuple[str, str], float],
) -> list[dict[str, Any]]:
    """Add to each row its number, link, colour, difference to the baseline and volume errors.

    Args:
        rows: Scores, in the order of the page.
        regions: All regions, in the order of their colours.
        anchors: Case to its anchor in the page.
        baseline_dices: Case and region to the Dice of the baseline.
    """
    page_rows = []
    for number, row in enumerate(rows):
        delta = None
        baseline_dice = baseline_dices.get((row["case"], row["region"]))
        if baseline_dice is not None:
            # The scores have six decimals: further ones of their difference are rounding errors.
            delta = round(row["dice"] - baseline_dice, 6)
        page_row = {
            **row,
            "row": number,
            "link": f"#{anchors[row['case']]}",
            "colour": f"var(--hue-{regions.index(row['region']) % _NUM_HUES})",
            "error_ml": row["volume_pred_ml"] - row["volume_ref_ml"],
            "delta": delta,
            **_error_volumes_ml(row),
        }
        page_rows.append(page_row)
    return page_rows


def _error_volumes_ml(row: Row) -> dict[str, float]:
    """Compute the missed and the extra volume, which follow from the Dice and both volumes."""
    # Dice = 2 · common / (prediction + reference).
    common_ml = row["dice"] * (row["volume_pred_ml"] + row["volume_ref_ml"]) / 2
    # The Dice is rounded, so the common volume may come out a little too large.
    return {
        "missed_ml": max(0.0, row["volume_ref_ml"] - common_ml),
        "extra_ml": max(0.0, row["volume_pred_ml"] - common_ml),
    }


def _format_score(name: str, value: float) -> str:
    """Format a score: mm and ml with one decimal, or two digits below 1; any other with four.

    Example:
        >>> [_format_score("dice", 0.98765), _format_score("hd95_mm", 2.345)]
        ['0.9877', '2.3']
        >>> _format_score("volume_ref_ml", 0.0312)
        '0.031'
        >>> _format_score("hd95_mm", math.inf)
        'none'
    """
    if not math.isfinite(value):
        return "none"
    # The mm in the name of an NSD are its tolerance, not its unit.
    has_unit = name.endswith(("_mm", "_ml")) and not name.startswith("nsd")
    if not has_unit:
        return f"{value:.4f}"
    # The volume of a small lesion must not become 0.
    return f"{value:.2g}" if 0 < value < 1 else f"{value:.1f}"
