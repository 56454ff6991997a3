"""Lower bound on Dice, calibrated on the held-out scans of a cascade."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from statistics import median

from medseg.cascade.bound import calibrate, count_covered
from medseg.config.schema import CrossValidateConfig
from medseg.data.case_table import Case
from medseg.io.atomic import replace_text
from medseg.studies.fold_tables import Row
from medseg.studies.held_out import TRUSTED
from medseg.studies.recipes import BOUND, experiments

LEVEL = 0.9  # of the lower bound on Dice


def write_bound(
    rows: Sequence[Row], cases: Mapping[str, Case], config: CrossValidateConfig
) -> None:
    """Calibrate the lower bound on Dice on the whole scans.

    Writes `bound.json`, which `make_weights` stores, and appends a line to `folds.md`.

    Args:
        rows: From `fold_rows`, of whole scans. Those count whose region was found and whose
            reference is not said to be doubtful.
        cases: Cases by name.
        config: Names the experiments, which the file keeps, and the folder.
    """
    output = Path(config.output)
    # Per fold and patient: agreement of the stages and Dice of each region of each scan.
    folds: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        if row["agreement"] is None or row["trust"] not in TRUSTED:
            continue
        patient = cases[row["case"]].patient or row["case"]
        fold_scores = folds.setdefault(row["fold"], {})
        fold_scores.setdefault(patient, []).append((row["agreement"], row["dice"]))
    scores: dict[str, list[tuple[float, float]]] = {}
    for fold_scores in folds.values():
        scores |= fold_scores
    (output / BOUND).unlink(missing_ok=True)
    bound = calibrate(scores, LEVEL)
    if bound is None:
        return
    calibrated = {"bound": asdict(bound), "experiments": experiments(config)}
    replace_text(output / BOUND, json.dumps(calibrated))
    median_bound = median(bound.at(agreement) for agreement, _ in chain(*scores.values()))
    text = (
        f"Lower bound on Dice at a level of {LEVEL:.0%}: "
        f"1 - {bound.factor:.3g} * (1 - agreement of the stages + {bound.offset:g}), "
        f"from {len(scores)} patients; its median over their regions is {median_bound:.3f}."
    )
    covered = count_covered(list(folds.values()), LEVEL)
    if covered is not None:
        text += (
            " Each fold tested with the bound that the other folds give: "
            f"{covered} patients reach it with every region."
        )
    table = (output / "folds.md").read_text(encoding="utf-8")
    replace_text(output / "folds.md", f"{table}\n{text}\n")
