"""Lower bound on Dice, calibrated on the held-out scans of the folds of a cascade."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from statistics import median

from medseg.cascade.bound import DiceBound, calibrate, count_covered
from medseg.config.schema import CrossValidateConfig
from medseg.data.case_table import Case
from medseg.io.atomic import replace_text
from medseg.studies.fold_tables import Row
from medseg.studies.held_out import TRUSTED, patients_of
from medseg.studies.recipes import experiments

# File of the bound in the folder of the study.
BOUND = "bound.json"
# Share of patients all of whose regions are to reach the bound.
LEVEL = 0.9

# Patient to pairs (agreement of the two stages, Dice), one for each region of each scan.
Scores = dict[str, list[tuple[float, float]]]


def write_bound(
    rows: Sequence[Row], cases: Mapping[str, Case], config: CrossValidateConfig
) -> None:
    """Calibrate the lower bound on Dice on the whole scans.

    Writes `bound.json`, from which `make_weights` takes the bound, and appends a line to
    `folds.md`. With too few patients for a bound, it writes neither.

    Args:
        rows: From `fold_rows`, of whole scans. A row counts only if its region was found and its
            reference is trusted.
        cases: Name to case.
        config: Names the folder of the study, and the experiments, which are stored with the bound.
    """
    output = Path(config.output)
    folds = _scores_by_fold(rows, patients_of(cases.values()))
    # Folds have no patient in common, so no entry is overwritten.
    scores: Scores = {}
    for fold_scores in folds:
        scores |= fold_scores
    # Remove the bound of an earlier start, which `make_weights` would take if there is none now.
    (output / BOUND).unlink(missing_ok=True)
    bound = calibrate(scores, LEVEL)
    if bound is None:
        return
    calibrated = {"bound": asdict(bound), "experiments": experiments(config)}
    replace_text(output / BOUND, json.dumps(calibrated))
    median_bound = median(bound.at(agreement) for agreement, _ in chain(*scores.values()))
    text = (
        f"{formula_text(bound)}, from {len(scores)} patients; "
        f"its median over their regions is {median_bound:.3f}."
    )
    num_covered = count_covered(folds, LEVEL)
    if num_covered is not None:
        text += (
            " Each fold tested with the bound that the other folds give: "
            f"{num_covered} patients reach it with every region."
        )
    table = (output / "folds.md").read_text(encoding="utf-8")
    replace_text(output / "folds.md", f"{table}\n{text}\n")


def _scores_by_fold(rows: Sequence[Row], patients: Mapping[str, str]) -> list[Scores]:
    """Collect the scores that count for the bound, one mapping per fold with such scores."""
    folds: dict[int, Scores] = {}
    for row in rows:
        # The agreement is None if the coarse stage did not find the region.
        if row["agreement"] is None or row["trust"] not in TRUSTED:
            continue
        fold_scores = folds.setdefault(row["fold"], {})
        patient_scores = fold_scores.setdefault(patients[row["case"]], [])
        patient_scores.append((row["agreement"], row["dice"]))
    return list(folds.values())


def formula_text(bound: DiceBound) -> str:
    """Write the formula that computes the bound of a region from the agreement of the stages."""
    return (
        f"Lower bound on Dice at a level of {LEVEL:.0%}: "
        f"1 - {bound.factor:.3g} * (1 - agreement of the stages + {bound.offset:g})"
    )
