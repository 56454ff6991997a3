"""Mirrored images: how many are detected, and how many untouched scans are reported as mirrored.

    python -m benchmarks.mirrored output=<folder> cases=<table.csv>[,<table.csv>] [phantoms=40]
                                  [segment=0]

Each scan is measured twice: as it is, and flipped along x with an unchanged header. The reference
labels replace those of a model. A model names a lung by its place in the image, so the values of
left and right are exchanged in the labels of a flipped scan. `phantoms` is the number of synthetic
chests to add. `segment` is the number of scans of a whole chest to segment with the included
weights, as they are and flipped, to list the findings of the prediction. Writes `mirrored.csv` with
a row for each scan, `mirrored.md` with counts by view, and `segmented.csv`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.instruments import given_arguments
from medseg.anatomy.mirrored.cues import SENTENCES, MirrorEvidence, mirror_evidence
from medseg.data.case_table import Case
from medseg.data.importers.formats import read_cases
from medseg.io.atomic import replace_text
from medseg.io.read import read_image
from medseg.io.tables import markdown_table, write_csv
from medseg.io.volume import Volume
from medseg.phantom.case_folders import write_phantoms
from medseg.prediction.segmenter import Segmenter
from medseg.preprocess.orient import orient
from medseg.studies.pieces import oriented_image, oriented_labels
from medseg.task import Channel, Region, Task

# Both lungs, each with the side of the body on which it lies.
TASK = Task(
    "lungs",
    {"left_lung": 1, "right_lung": 2},
    (Region("left_lung", ("left_lung",), "left"), Region("right_lung", ("right_lung",), "right")),
    (Channel(),),
)
# Label value of the other side, by label value (the index).
OTHER_SIDE = np.array([0, 2, 1], dtype=np.uint8)
SEED = 0  # of the phantoms
CUES = tuple(SENTENCES)
Row = dict[str, Any]


def main() -> None:
    """Measure all scans and write the tables."""
    output, arguments = given_arguments(["phantoms", "segment"], required=["cases"])
    tables = [Path(path) for path in arguments["cases"].split(",")]
    num_phantoms = int(arguments.get("phantoms", "40"))
    if num_phantoms:
        tables.append(write_phantoms(output / "phantoms", num_phantoms, SEED))
    rows: list[Row] = []
    cases: dict[str, Case] = {}  # by name
    for table in tables:
        for case in read_cases(table):
            cases[case.name] = case
            rows.append(measure(case, table.parent.name))
            print(" ".join(str(value) for value in rows[-1].values()), flush=True)
    write_csv(output / "mirrored.csv", rows)
    replace_text(output / "mirrored.md", markdown_table(summarise(rows)))
    print((output / "mirrored.md").read_text(encoding="utf-8"))
    whole_chests = [row["case"] for row in rows if row["view"] == "whole"]
    num_segmented = int(arguments.get("segment", "0"))
    segmented: list[Row] = []
    for name in whole_chests[:num_segmented]:
        segmented += segment(cases[name])
        print(segmented[-2], segmented[-1], flush=True)  # untouched and flipped
    if segmented:
        write_csv(output / "segmented.csv", segmented)


def measure(case: Case, source: str) -> Row:
    """Measure a scan as it is and flipped.

    Args:
        case: The scan; without labels it counts as one without lungs.
        source: Name of its data set.

    Returns:
        `case`, `source`, `view` (see `view_of`); the strengths of the cues of the scan as it is,
        and their `sum`; and the columns of `_verdict` for the scan as it is and flipped.
    """
    stored_values, grid = oriented_image(case)
    image_hu = case.hu.apply(stored_values)
    labels = np.zeros(stored_values.shape, dtype=np.uint8)
    if case.labels is not None:
        labels = oriented_labels(case)[0].astype(np.uint8)
    evidence = mirror_evidence(image_hu, labels, grid.spacing_mm, TASK)
    # Arrays are (z, y, x): the last axis runs from right to left.
    flipped_hu = image_hu[:, :, ::-1]
    flipped_labels = OTHER_SIDE[labels[:, :, ::-1]]
    flipped = mirror_evidence(flipped_hu, flipped_labels, grid.spacing_mm, TASK)
    row: Row = {"case": case.name, "source": source, "view": view_of(labels)}
    for name in CUES:
        # The evidence lacks the cues that the scan does not show.
        strength = evidence.cues.get(name)
        row[name] = "" if strength is None else round(strength, 2)
    row["sum"] = round(sum(evidence.cues.values()), 2)
    return row | _verdict("", evidence) | _verdict("flipped_", flipped)


def _verdict(prefix: str, evidence: MirrorEvidence) -> Row:
    """Columns of a scan: whether the prediction warns, and whether the audit calls it an error.

    The audit needs two independent cues.
    """
    return {f"{prefix}told": evidence.is_mirrored, f"{prefix}confirmed": evidence.is_confirmed}


def view_of(labels: np.ndarray) -> str:
    """Part of the chest that a label map (D, H, W) shows.

    Returns:
        `whole` if both lungs end within the scan, `none` without lungs, else `partial`.
    """
    if not labels.any():
        return "none"
    has_both = all((labels == value).any() for value in TASK.labels.values())
    # A lung in the first or the last slice goes on beyond the scan.
    is_cut = labels[0].any() or labels[-1].any()
    return "whole" if has_both and not is_cut else "partial"


def summarise(rows: Sequence[Row]) -> list[Row]:
    """Count the scans of each view: real ones, phantoms, and all."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        kind = "phantoms" if row["source"] == "phantoms" else "scans"
        groups.setdefault(f"{kind}, {row['view']}", []).append(row)
        groups.setdefault(f"all, {row['view']}", []).append(row)
    summaries: list[Row] = []
    for view, members in sorted(groups.items()):
        # Each sum counts the rows in which the value is true.
        summaries.append(
            {
                "view": view,
                "n": len(members),
                "untouched, called mirrored": sum(row["told"] for row in members),
                "flipped, told": sum(row["flipped_told"] for row in members),
                "of them confirmed": sum(row["flipped_confirmed"] for row in members),
            }
        )
    return summaries


def segment(case: Case) -> list[Row]:
    """Segment a scan as it is and flipped, and list the codes of the findings of both."""
    segmenter = Segmenter()
    scan = read_image(case.image, case.series)
    rows = []
    for state, volume in (("untouched", scan), ("flipped", flip(scan))):
        result = segmenter.segment(volume, case.hu)
        codes = sorted({finding.code for finding in result.findings})
        rows.append({"case": case.name, "scan": state, "codes": " ".join(codes)})
    return rows


def flip(scan: Volume) -> Volume:
    """Flip a scan along the world axis nearest to x, and leave its header."""
    # Which stored axis is x depends on the file: turn to (z, y, x), flip the last, and turn back.
    oriented, _, orientation = orient(scan.array, scan.grid)
    flipped = np.ascontiguousarray(orientation.from_lps(oriented[:, :, ::-1]))
    return replace(scan, array=flipped)


if __name__ == "__main__":
    main()
