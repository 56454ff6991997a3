"""Writing of the model folder of a cross-validation, with the networks of all folds.

The study's clean-up, bound on Dice and plausible volumes are added to the networks' metadata.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from medseg.config.schema import CrossValidateConfig
from medseg.studies.clean_up import Choice, choose_clean_up, write_choice
from medseg.studies.command_steps import last_checkpoint
from medseg.studies.fold_bound import BOUND, write_bound
from medseg.studies.fold_tables import Row
from medseg.studies.folds import Folds
from medseg.studies.held_out import HeldOut
from medseg.studies.pooled import POOLED_MD
from medseg.studies.recipes import without_folders
from medseg.studies.reference_volumes import (
    LEAST_PATIENTS,
    SHARE,
    measure_references,
    plausible_ranges,
)
from medseg.task import LabelValues, Task
from medseg.weights.files import read_weights
from medseg.weights.model_folder import StageWeights, write_model_folder

# Name of the model folder in the folder of the study.
MODEL = "model"


def write_model(
    config: CrossValidateConfig,
    task: Task,
    label_values: LabelValues,
    folds: Folds,
    rows: Sequence[Row],
    stages: Sequence[str],
    needed: Sequence[str],
) -> Path:
    """Choose the clean-up, calibrate the bound and write the model folder.

    Args:
        config: Names the folder of the study, and the experiments of a cascade.
        task: The task of the study.
        label_values: Value, or name of a structure, in the reference files to label name.
        folds: The folds, whose runs have finished.
        rows: From `fold_rows`, of whole scans.
        stages: Stages of the model: `single` alone, or `coarse` and `fine`.
        needed: Arguments of `predict` for the command in the model card.

    Returns:
        The model folder.
    """
    output = Path(config.output)
    is_cascade = len(stages) > 1
    # A model of one stage has no regions: its parts are the labels.
    model_task = task if is_cascade else task.as_one_stage()
    scored_names = {row["case"] for row in rows}
    scored_cases = [case for case in folds.cases.values() if case.name in scored_names]
    held_out = HeldOut(scored_cases, output / "predictions", model_task, label_values)
    volumes = measure_references(held_out)
    choice = choose_clean_up(held_out, volumes)
    # The bound is calibrated on the Dice after the clean-up, since a prediction states the bound
    # for cleaned labels.
    if is_cascade:
        write_bound(_with_clean_up(rows, choice), folds.cases, config)
    study_metadata = {
        "dice_bound": _read_bound(output / BOUND),
        "clean_up": [asdict(clean_up) for clean_up in choice.clean_ups],
    }
    ranges_ml = plausible_ranges(volumes)
    networks = _read_networks(folds.folders, stages, study_metadata, ranges_ml)
    write_choice(choice, output / MODEL)
    sections = {
        "Data": _describe_data(held_out, len(folds.folders), ranges_ml),
        "Scores": (output / POOLED_MD).read_text(encoding="utf-8"),
        "Clean-up": choice.markdown(),
    }
    write_model_folder(output / MODEL, networks, sections, arguments=needed)
    return output / MODEL


def _with_clean_up(rows: Sequence[Row], choice: Choice) -> list[Row]:
    """Replace the Dice of each row by the Dice after the chosen clean-up."""
    cleaned_rows = []
    for row in rows:
        # Without a clean-up `dices` is empty, and the Dice of the row is kept.
        dice = choice.dices.get((row["case"], row["region"]), row["dice"])
        cleaned_rows.append({**row, "dice": dice})
    return cleaned_rows


def _read_bound(path: Path) -> dict[str, Any] | None:
    """Read the bound of `write_bound`; None if there were too few patients or only one stage."""
    if not path.is_file():
        return None
    bound: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["bound"]
    return bound


def _read_networks(
    folders: Sequence[Path],
    stages: Sequence[str],
    study_metadata: dict[str, Any],
    ranges_ml: dict[str, tuple[float, float]],
) -> list[StageWeights]:
    """Read the trained networks of all folds, and add the results of the study to their metadata.

    Args:
        folders: Folder of each fold.
        stages: Stages of the model.
        study_metadata: Entries that are added to the metadata of each network.
        ranges_ml: Part to its range of plausible volumes; a range that the task states is kept.
    """
    networks = []
    for fold, folder in enumerate(folders):
        for stage in stages:
            metadata, weights = read_weights(
                last_checkpoint(folder / stage), stage=stage, key=stage
            )
            task = metadata["task"]
            task = {**task, "volume_ml": {**ranges_ml, **task.get("volume_ml", {})}}
            metadata = without_folders({**metadata, **study_metadata, "task": task})
            networks.append(StageWeights(metadata, weights, fold=str(fold)))
    return networks


def _describe_data(
    held_out: HeldOut, num_folds: int, ranges_ml: dict[str, tuple[float, float]]
) -> str:
    """Describe scans, patients, folds and plausible volumes in Markdown."""
    num_patients = len(set(held_out.patients.values()))
    volumes_text = (
        f"There are none: that takes {LEAST_PATIENTS} patients whose scans show all of a part."
    )
    if ranges_ml:
        volumes_text = (
            f"They hold {SHARE:.0%} of patients like these, by the logarithms of the volumes in "
            f"the references: {', '.join(ranges_ml)}."
        )
    return (
        f"{len(held_out.cases)} scans of {num_patients} patients in {num_folds} folds. The network "
        f"of a fold was trained without the scans of the fold, and scored on them.\n\n"
        f"Plausible volumes that the task does not state come from the scans. {volumes_text}\n"
    )
