"""Rules benchmark: what each rule of the clean-up changes in the results.

    python -m benchmarks.rules output=<folder> cases=<table.csv> [coarse=<weights>] [fine=<weights>]
        [together=<rule>+<rule>,…]

Each scan is segmented as `predict` does, once with all rules and once with each rule of `RULES`
switched off; `together` names sets of rules that are switched off together too. Each crop goes
through the networks once: their outputs are kept while a scan is measured. Writes `rules.csv` with
a row for each scan, rule and region, and `rules.md` with a row for each rule. References have the
label values of the task.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.instruments import given_arguments
from medseg.anatomy import contradictions, impossible
from medseg.cascade import cascade as cascade_module
from medseg.cascade import join, localise
from medseg.cascade.cascade import Cascade
from medseg.cascade.stage import Prediction
from medseg.data.audit.image import check_channels
from medseg.data.case_table import Case
from medseg.data.importers.formats import read_cases
from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid, voxel_ml
from medseg.geometry.grid_rule import Crop
from medseg.io.atomic import replace_text
from medseg.io.read import read_labels
from medseg.io.tables import markdown_table, write_csv
from medseg.io.volume import Volume
from medseg.metrics.scores import dice
from medseg.prediction.case import read_scan
from medseg.prediction.load_models import load_cascade
from medseg.preprocess.orient import orient
from medseg.task import Region, Task

Row = dict[str, Any]
# Name of the set of all rules.
ALL = "all"
# Heading of each key of a summary.
SUMMARY = {
    "rule": "rule switched off", "scans": "scans changed", "regions": "regions changed",
    "changed_ml": "changed, ml", "false_ml": "of regions without reference, ml",
    "mean_gain": "mean gain by the rule, Dice", "worst_gain": "worst", "best_gain": "best",
}  # fmt: skip


@dataclass(frozen=True)
class Switch:
    """How a rule is switched off.

    Attributes:
        module: Module that has the name.
        name: Name of a threshold or a function in that module.
        off: Threshold or function that replaces it.
    """

    module: ModuleType
    name: str
    off: float | Callable[..., None]


# The rules of `anatomy/` and `cascade/` that change a label or remove a region. The gas rule of
# `join.py` is not among them: it acts only in a task of one stage.
# A threshold is off where no value can pass it: no share is above 1, no volume or share below 0, no
# agreement below -1.
RULES = {
    "coarse_gas": Switch(impossible, "MAX_GAS_SHARE", 1.0),
    "coarse_beside_patient": Switch(impossible, "MAX_BEYOND_SHARE", 1.0),
    "coarse_small_component": Switch(localise, "MIN_PART_FRACTION", 0.0),
    "coarse_small_region": Switch(localise, "MIN_REGION_ML", 0.0),
    "fine_unseen": Switch(join, "MAX_UNSEEN_SHARE", 1.0),
    "fine_small_component": Switch(join, "MIN_PART_FRACTION", 0.0),
    "fine_holes": Switch(join, "fill_holes", lambda *_: None),
    "absent_contradiction": Switch(contradictions, "MIN_AGREEMENT", -1.0),
    "absent_doubtful_tiny": Switch(contradictions, "MIN_DOUBTFUL_SHARE", 0.0),
}


def main() -> None:
    """Measure all cases and write the tables."""
    output, arguments = given_arguments(["coarse", "fine", "together"], required=["cases"])
    rule_sets = read_rule_sets(arguments.get("together", ""))
    checkpoints_by_stage = {}
    for stage in ("coarse", "fine"):
        if stage in arguments:
            checkpoints_by_stage[stage] = [arguments[stage]]
    cascade = load_cascade(checkpoints_by_stage.get("coarse"), checkpoints_by_stage.get("fine"))
    rows: list[Row] = []
    for case in read_cases(Path(arguments["cases"])):
        rows += case_rows(case, cascade, rule_sets)
        # After each scan: a run that is stopped keeps its rows.
        write_csv(output / "rules.csv", rows)
        replace_text(output / "rules.md", summary_table(rows))
        print(case.name, flush=True)
    print((output / "rules.md").read_text(encoding="utf-8"))


def read_rule_sets(together: str) -> dict[str, tuple[str, ...]]:
    """List the sets of rules that are switched off: each alone, those given, and all.

    Args:
        together: Sets of names, such as `fine_unseen+fine_holes,coarse_gas+fine_unseen`.

    Raises:
        UserError: If a name is unknown.
    """
    rule_sets: dict[str, tuple[str, ...]] = {rule: (rule,) for rule in RULES}
    for set_name in together.split(","):
        if not set_name:
            continue  # splitting an empty text gives one empty name
        names = tuple(set_name.split("+"))
        unknown = [name for name in names if name not in RULES]
        if unknown:
            raise UserError(f"together: there is no rule {unknown[0]}, but {', '.join(RULES)}")
        rule_sets[set_name] = names
    rule_sets[ALL] = tuple(RULES)
    return rule_sets


def case_rows(case: Case, cascade: Cascade, rule_sets: Mapping[str, Sequence[str]]) -> list[Row]:
    """Measure what the rules change in the labels of a scan.

    Args:
        case: The scan, with or without a reference.
        cascade: The networks and the rules.
        rule_sets: Name of each set to its rules, see `read_rule_sets`.

    Returns:
        A row for each set of rules and region; see `region_row`.
    """
    volume = _read_scan(case, cascade.task)
    reference = None
    if case.labels:
        labels_read = read_labels(case.labels)
        reference = orient(labels_read.array, labels_read.grid)[0]
    rows = []
    with kept_outputs():
        labels = cascade.segment(volume).labels
        for set_name, names in rule_sets.items():
            with switched_off(names):
                labels_without = cascade.segment(volume).labels
            for region in cascade.task.regions:
                values = cascade.task.region_values(region)
                row: Row = {"case": case.name, "rule": set_name, "region": region.name}
                row["trust"] = case.trust.get(region.name, "")
                row |= region_row(labels, labels_without, reference, values, voxel_ml(volume.grid))
                rows.append(row)
    return rows


def _read_scan(case: Case, task: Task) -> Volume:
    """Read a scan in LPS order, with air in place of padding."""
    volume, _ = read_scan([case.image], task, case.series, case.hu)
    modalities = [channel.modality for channel in task.channels]
    # `is_owned`: the array was read for this call, so padding may become air in place.
    (array,), _, _ = check_channels([volume.array], modalities, is_owned=True)
    oriented, grid, _ = orient(array, volume.grid)
    return Volume(oriented, grid)


def region_row(
    labels: np.ndarray,
    labels_without: np.ndarray,
    reference: np.ndarray | None,
    values: Sequence[int],
    ml_per_voxel: float,
) -> Row:
    """Compare a region of two label maps (D, H, W), made with a rule and without it.

    Args:
        labels: Made with all rules.
        labels_without: Made without the rule.
        reference: None where there is none.
        values: Label values of the region.
        ml_per_voxel: Volume of a voxel.

    Returns:
        Columns of the row; a value that does not exist is None:

        * `volume_ml` and `without_ml`: volume of the region with the rule and without it.
        * `changed_voxels` and `changed_ml`: voxels that are in the region in one of the maps only.
        * `false_ml`: what the rule takes away from a region that the reference does not show.
        * `dice`, `dice_without` and their difference `gain`.
    """
    mask = np.isin(labels, values)
    mask_without = np.isin(labels_without, values)
    num_changed = int(np.count_nonzero(mask != mask_without))
    row: Row = {
        "volume_ml": ml_per_voxel * np.count_nonzero(mask),
        "without_ml": ml_per_voxel * np.count_nonzero(mask_without),
        "changed_voxels": num_changed,
        "changed_ml": ml_per_voxel * num_changed,
        "false_ml": None,
        "dice": None,
        "dice_without": None,
        "gain": None,
    }
    if reference is None:
        return row
    reference_mask = np.isin(reference, values)
    if not reference_mask.any():
        # If the reference lacks the region, there is no Dice, and all predicted volume is wrong.
        row["false_ml"] = row["without_ml"] - row["volume_ml"]
        return row
    row["dice"] = dice(mask, reference_mask)
    row["dice_without"] = dice(mask_without, reference_mask)
    row["gain"] = row["dice"] - row["dice_without"]
    return row


@contextmanager
def switched_off(names: Sequence[str]) -> Iterator[None]:
    """Within the block, replace the threshold or function of each rule by its `off`."""
    with ExitStack() as patches:
        for name in names:
            switch = RULES[name]
            patches.enter_context(mock.patch.object(switch.module, switch.name, switch.off))
        yield


@contextmanager
def kept_outputs() -> Iterator[None]:
    """Within the block, which is for one scan, run the coarse network and each crop only once.

    No rule changes the input of the coarse network, so its first output serves every call. Without
    a rule the crop of a region may differ: the fine network runs on each new crop. The network of a
    task of one stage runs every time; such a task has no regions to compare.
    """
    # The originals, before their names are replaced.
    predict_body, refine = localise.predict_body, cascade_module.refine
    body_predictions: list[Any] = []  # empty, or the one prediction
    refined: dict[tuple[str, Crop], Prediction] = {}

    def predict_body_once(*arguments: Any) -> Any:
        # The arguments are the same in every call.
        if not body_predictions:
            body_predictions.append(predict_body(*arguments))
        return body_predictions[0]

    def refine_once(
        images: Sequence[np.ndarray], grid: VoxelGrid, crop: Crop, region: Region, *others: Any
    ) -> Prediction:
        key = (region.name, crop)
        if key not in refined:
            refined[key] = refine(images, grid, crop, region, *others)
        return refined[key]

    with (
        mock.patch.object(localise, "predict_body", predict_body_once),
        mock.patch.object(cascade_module, "refine", refine_once),
    ):
        yield


def summarise(rows: Sequence[Row]) -> list[Row]:
    """Add up what each rule changes; gains are averaged over the regions that it changes."""
    changed_by_set: dict[str, list[Row]] = {}
    for row in rows:
        # This also adds rules that change nothing, which get a row too.
        changed_rows = changed_by_set.setdefault(row["rule"], [])
        if row["changed_voxels"]:
            changed_rows.append(row)
    summaries = []
    for set_name, changed in changed_by_set.items():
        # A region has no Dice if there is no reference, or if the reference does not show it.
        gains = [row["gain"] for row in changed if row["gain"] is not None]
        summaries.append(
            {
                "rule": set_name,
                "scans": len({row["case"] for row in changed}),  # each counts once
                "regions": len(changed),
                "changed_ml": sum(row["changed_ml"] for row in changed),
                "false_ml": sum(row["false_ml"] or 0.0 for row in changed),
                "mean_gain": fmean(gains) if gains else None,
                "worst_gain": min(gains, default=None),
                "best_gain": max(gains, default=None),
            }
        )
    return summaries


def summary_table(rows: Sequence[Row]) -> str:
    """Write the table of `summarise`."""
    formats = {
        "changed_ml": ".1f",
        "false_ml": ".1f",
        "mean_gain": "+.4f",
        "worst_gain": "+.4f",
        "best_gain": "+.4f",
    }
    return markdown_table(summarise(rows), SUMMARY, formats)


if __name__ == "__main__":
    main()
