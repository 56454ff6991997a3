"""Choice of a clean-up on held-out predictions, by a paired test over patients.

A clean-up has up to two steps for a part (a region or label): remove components, then fill holes. A
step is taken if it raises the part's Dice coefficient, averaged over patients, and Wilcoxon's
signed-rank test finds the rise significant. The choice reads stored predictions; no network runs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from medseg.geometry.grid import VoxelGrid
from medseg.inference.clean_up import clean
from medseg.inference.components import label_box
from medseg.io.atomic import replace_text
from medseg.io.tables import Formats, markdown_table, write_csv
from medseg.metrics.scores import dice
from medseg.report.differences import paired_difference
from medseg.studies.held_out import HeldOut
from medseg.studies.reference_volumes import ReferenceVolume
from medseg.task import CleanUp, Task

# Significance level of all tests together. The level of a single test is `LEVEL` divided by the
# number of tests (Bonferroni).
LEVEL = 0.05
# Candidates for the volume below which a component is removed, as shares of the median volume of
# the part in the references.
SHARES = (0.01, 0.1)
# Files of the choice: the tests, and the choice with the tests for readers.
CLEAN_UP_CSV = "clean_up.csv"
CLEAN_UP_MD = "clean_up.md"
# Column of clean_up.csv to its heading in clean_up.md.
COLUMNS = {
    "part": "part",
    "clean_up": "clean-up",
    "compared_with": "compared with",
    "patients": "patients",
    "better": "better",
    "worse": "worse",
    "dice_before": "Dice before",
    "dice": "Dice",
    "p": "p",
    "taken": "taken",
}
FORMATS: Formats = {"dice_before": ".4f", "dice": ".4f", "p": ".2g"}

# Case to the Dice coefficient of one part.
Scores = dict[str, float]
# Case and part to the Dice coefficient.
Dices = dict[tuple[str, str], float]


@dataclass(frozen=True)
class Choice:
    """Chosen clean-up, and the tests that led to it.

    Attributes:
        clean_ups: Clean-up of each part; a part that is not cleaned up has no entry.
        rows: One row for each test, with the keys of `COLUMNS`.
        num_tests: Number of tests, over all parts.
        num_patients: Number of patients of the held-out scans.
        dices: Dice coefficients after all chosen steps; empty if no step was taken.
        lowered: Parts whose mean Dice would fall if all chosen steps were applied together. If
            there is such a part, no step was taken.
    """

    clean_ups: tuple[CleanUp, ...]
    rows: Sequence[dict[str, Any]]
    num_tests: int
    num_patients: int
    dices: Dices
    lowered: tuple[str, ...] = ()

    def markdown(self) -> str:
        """Describe the choice in Markdown, with a table of the tests."""
        if not self.rows:
            return "No clean-up: no trusted reference shows anything.\n"
        chosen = [f"{clean_up.part}: {clean_up}" for clean_up in self.clean_ups]
        level = LEVEL / self.num_tests
        num_needed = least_patients(level)
        lines = [
            f"Clean-up of the model: {'; '.join(chosen) or 'none'}.",
            "",
            f"A step is taken where the mean Dice over patients rises and Wilcoxon's signed-rank "
            f"test over them gives p ≤ {level:.3g} ({LEVEL:.0%} divided by {self.num_tests} "
            f"candidates). That takes at least {num_needed} patients whose Dice changes; there are "
            f"{self.num_patients}.",
        ]
        if self.num_patients < num_needed:
            lines.append("With so few nothing can be taken, whatever it does.")
        if self.lowered:
            names = ", ".join(self.lowered)
            lines.append(f"All chosen steps together lower the Dice of {names}: none was taken.")
        if chosen:
            lines.append(
                "The scores of what was taken are a little too high: it was chosen by them."
            )
        lines += ["", markdown_table(self.rows, COLUMNS, FORMATS)]
        return "\n".join(lines)


def write_choice(choice: Choice, folder: Path) -> None:
    """Write the choice with its table as `clean_up.csv` and `clean_up.md`."""
    write_csv(folder / CLEAN_UP_CSV, choice.rows, tuple(COLUMNS))
    replace_text(folder / CLEAN_UP_MD, choice.markdown())


def least_patients(level: float) -> int:
    """Compute the fewest patients with which the two-sided test can reach a level.

    Example:
        >>> [least_patients(level) for level in (0.05, 0.0125)]
        [6, 8]
    """
    # p is smallest if the Dice of all n patients rises. It then is the probability of n equal signs
    # by chance, 2 * 0.5 ** n, which is at most the level if n >= 1 + log2(1 / level).
    return 1 + math.ceil(math.log2(1 / level))


def choose_clean_up(held_out: HeldOut, volumes: Sequence[ReferenceVolume]) -> Choice:
    """Choose the clean-up of a model on its held-out predictions.

    Args:
        held_out: The predictions and their references.
        volumes: From `measure_references`.
    """
    # Parts that a trusted reference shows, in the order of their first scan.
    parts = list(dict.fromkeys(volume.part for volume in volumes))
    candidates = {part: candidates_of(part, held_out.task, volumes) for part in parts}
    scores = score_candidates(held_out, candidates)
    num_tests = sum(map(_count_tests, candidates.values()))
    clean_ups: list[CleanUp] = []
    rows: list[dict[str, Any]] = []
    for part, scores_by_clean_up in scores.items():
        # Inside the loop, since without parts `num_tests` is 0.
        level = LEVEL / num_tests
        chosen, part_rows = _choose_for_part(part, scores_by_clean_up, held_out.patients, level)
        rows += part_rows
        if chosen != CleanUp(part):
            clean_ups.append(chosen)
    num_patients = len(set(held_out.patients.values()))
    dices: Dices = {}
    lowered: list[str] = []
    if clean_ups:
        dices, lowered = _check_together(held_out, clean_ups)
    if lowered:
        # No step is taken.
        clean_ups = []
        dices = {}
        rows = [{**row, "taken": ""} for row in rows]
    return Choice(
        clean_ups=tuple(clean_ups),
        rows=rows,
        num_tests=num_tests,
        num_patients=num_patients,
        dices=dices,
        lowered=tuple(lowered),
    )


def candidates_of(part: str, task: Task, volumes: Sequence[ReferenceVolume]) -> list[CleanUp]:
    """List the candidates of a part: no change, then removals of components, the strongest last.

    If the part is a single label, the same candidates follow once more, with holes filled.

    Args:
        part: Region or label.
        task: Task with this part.
        volumes: Volumes of all parts in the references.
    """
    median_ml = median(volume.volume_ml for volume in volumes if volume.part == part)
    removals = [CleanUp(part)]
    for share in SHARES:
        # Rounded to two digits: the median of few scans is no more exact, and readers see it.
        min_ml = float(f"{share * median_ml:.2g}")
        removals.append(CleanUp(part, min_ml=min_ml))
    removals.append(CleanUp(part, only_largest=True))
    # A hole in a part of several labels could be filled with any of them.
    if len(task.part_values(part)) > 1:
        return removals
    fillings = [replace(removal, fill_holes=True) for removal in removals]
    return [*removals, *fillings]


def _count_tests(clean_ups: Sequence[CleanUp]) -> int:
    """Count the tests that `_choose_for_part` makes on the candidates of a part."""
    removals = [clean_up for clean_up in clean_ups if not clean_up.fill_holes]
    # Each removal is compared with the first candidate, which changes nothing.
    num_tests = len(removals) - 1
    has_fillings = len(removals) < len(clean_ups)
    if has_fillings:
        # Holes are filled after the chosen removal only, so this is one more test.
        num_tests += 1
    return num_tests


def score_candidates(
    held_out: HeldOut, candidates: Mapping[str, Sequence[CleanUp]]
) -> dict[str, dict[CleanUp, Scores]]:
    """Score each candidate alone on the cases whose trusted reference shows its part.

    Args:
        held_out: The predictions and their references.
        candidates: Part to its candidates.

    Returns:
        For each part, a mapping of candidate to its scores.
    """
    scores: dict[str, dict[CleanUp, Scores]] = {}
    for part, clean_ups in candidates.items():
        scores[part] = {clean_up: {} for clean_up in clean_ups}
    for case, pred, target, grid in held_out.pairs():
        for part in held_out.trusted_parts(case):
            if part not in candidates:
                continue
            target_mask = np.isin(target, held_out.task.part_values(part))
            if not target_mask.any():
                continue
            for clean_up, scores_of_cases in scores[part].items():
                cleaned = _mask_after(clean_up, pred, grid, held_out.task)
                scores_of_cases[case.name] = dice(cleaned, target_mask)
    return scores


def _mask_after(clean_up: CleanUp, pred: np.ndarray, grid: VoxelGrid, task: Task) -> np.ndarray:
    """Make the mask (D, H, W) of a part after this clean-up of the prediction."""
    values = task.part_values(clean_up.part)
    mask = np.zeros(pred.shape, dtype=bool)
    # Cropped to save time: the clean-up changes nothing outside the box of the part.
    box = label_box(pred, values)
    if box is not None:
        labels_in_box = pred[box.slices()].copy()
        clean(labels_in_box, grid, task, [clean_up])
        mask[box.slices()] = np.isin(labels_in_box, values)
    return mask


def _choose_for_part(
    part: str,
    scores: Mapping[CleanUp, Scores],
    patients: Mapping[str, str],
    level: float,
) -> tuple[CleanUp, list[dict[str, Any]]]:
    """Choose the removal of components, then whether holes are filled after the removal.

    Args:
        part: Region or label.
        scores: Candidate of the part to its scores, in the order of `candidates_of`.
        patients: Case to its patient.
        level: Largest p with which a step is taken.

    Returns:
        The chosen candidate, and a row of the table for each test.
    """
    nothing = CleanUp(part)
    chosen = nothing
    rows: list[dict[str, Any]] = []
    best_dice = -math.inf
    for removal in scores:
        if removal == nothing or removal.fill_holes:
            continue
        row = _compare(removal, nothing, scores, patients)
        rows.append(row)
        # Of candidates with equal means the first is kept, which removes least.
        if _is_significant_rise(row, level) and row["dice"] > best_dice:
            chosen = removal
            best_dice = row["dice"]
    for row in rows:
        row["taken"] = "yes" if row["clean_up"] == str(chosen) else ""
    filled = replace(chosen, fill_holes=True)
    # Parts of several labels have no candidate that fills holes.
    if filled not in scores:
        return chosen, rows
    row = _compare(filled, chosen, scores, patients)
    rows.append(row)
    if not _is_significant_rise(row, level):
        row["taken"] = ""
        return chosen, rows
    row["taken"] = "yes"
    return filled, rows


def _is_significant_rise(row: Mapping[str, Any], level: float) -> bool:
    """Whether the mean Dice rises significantly: for the two-sided test a fall may be too."""
    return row["p"] <= level and row["dice"] > row["dice_before"]


def _compare(
    clean_up: CleanUp,
    baseline: CleanUp,
    scores: Mapping[CleanUp, Scores],
    patients: Mapping[str, str],
) -> dict[str, Any]:
    """Compare two candidates of a part, paired by patient, and make the row of the table."""
    difference = paired_difference(scores[clean_up], scores[baseline], patients=patients)
    assert difference is not None, "a trusted reference shows the part"
    return {
        "part": clean_up.part,
        "clean_up": str(clean_up),
        "compared_with": str(baseline),
        "patients": difference.patients,
        "better": difference.better,
        "worse": difference.worse,
        "dice_before": difference.baseline_mean,
        "dice": difference.mean,
        "p": difference.wilcoxon_p,
    }


def _check_together(held_out: HeldOut, clean_ups: Sequence[CleanUp]) -> tuple[Dices, list[str]]:
    """Score all chosen steps together, as the model applies them.

    Steps that help by themselves may do harm together, as where a label fills a hole in another
    label. References of different trust are not averaged together: a part has one mean over the
    patients for each trust.

    Returns:
        Dice coefficients after all steps, and the parts for which one of these means falls.
    """
    # The keys are part and trust in its reference.
    before: dict[tuple[str, str], Scores] = {}
    after: dict[tuple[str, str], Scores] = {}
    dices: Dices = {}
    for case, pred, target, grid in held_out.pairs():
        cleaned = pred.copy()
        clean(cleaned, grid, held_out.task, clean_ups)
        for part in held_out.task.parts:
            values = held_out.task.part_values(part)
            target_mask = np.isin(target, values)
            if not target_mask.any():
                continue
            group = part, case.trust.get(part, "")
            dice_before = dice(np.isin(pred, values), target_mask)
            dice_after = dice(np.isin(cleaned, values), target_mask)
            before.setdefault(group, {})[case.name] = dice_before
            after.setdefault(group, {})[case.name] = dice_after
            dices[case.name, part] = dice_after
    # A dictionary as an ordered set, since a part has a group for each trust.
    lowered: dict[str, None] = {}
    for group, scores_before in before.items():
        difference = paired_difference(after[group], scores_before, patients=held_out.patients)
        # None if no case has a finite Dice. The limit is just below 0, because rounding may change
        # the last digit of the mean of equal scores.
        if difference is not None and difference.difference < -1e-9:
            part, _ = group
            lowered[part] = None
    return dices, list(lowered)
