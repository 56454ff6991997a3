"""Data of `learning_curves.py`: the same files for medseg and nnU-Net, with one fixed split."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import yaml

from medseg.conf_folder import conf_dir
from medseg.config.imported import TASK_FILE, with_task
from medseg.config.overrides import quote_paths
from medseg.data.case_table import Case, split_cases, write_case_table
from medseg.data.cases import find_cases
from medseg.data.reference import read_reference
from medseg.errors import UserError
from medseg.evaluation.matching import task_values
from medseg.io.atomic import replace_text
from medseg.io.write import write_image, write_labels
from medseg.preprocess.channels import read_channels
from medseg.runs.signature import plain
from medseg.studies.train_arguments import compose_train
from medseg.task import LabelValues, Task
from medseg.task_options import make_task
from medseg.training.options import TrainConfig

# The form that nnU-Net requires: `Dataset`, three digits, a name.
DATASET = "Dataset001_curves"
# nnU-Net's folder of data sets.
RAW = "nnUNet_raw"
# Case tables of medseg: all cases with their split, and the held-out ones without a split.
CASES = "cases.csv"
HELD_OUT = "held_out.csv"
SUFFIX = ".nii.gz"


def write_data(folder: Path, arguments: Sequence[str], num_folds: int) -> dict[str, Any]:
    """Write the cases of a table in nnU-Net's layout, with a case table and a task for medseg.

    Both programs read these files: images in HU, label maps with the values of the task. The
    cases that the table marks as `val` are held out, or else the first of the folds by patient.

    Args:
        folder: Receives `cases.csv`, `held_out.csv`, `task.yaml` and nnU-Net's raw data.
        arguments: Arguments of `medseg train` that name the cases and their task.
        num_folds: Number of folds.

    Returns:
        `task`, the name of the task; `held_out`, a list of the channels' files per held-out case.

    Raises:
        UserError: If the cases cannot be read, or the task ignores voxels.
    """
    config = compose(arguments)
    task = make_task(config.task)
    if task.ignore_label is not None:
        raise UserError(f"task {task.name}: ignored voxels are not compared with nnU-Net")
    # The second group, synthetic scans that a configuration may add to the table, is not used.
    (all_cases, label_values), _ = find_cases(config.data, config.task)
    labelled = [case for case in all_cases if case.labels]
    split = split_cases(labelled, num_folds=num_folds)  # fold 0, or the split of the table
    raw = folder / RAW / DATASET
    training = [write_case(raw, case, label_values, task, "train") for case in split.train]
    held_out = [write_case(raw, case, label_values, task, "val") for case in split.val]
    write_case_table(folder / CASES, [*training, *held_out])
    write_case_table(folder / HELD_OUT, [replace(case, split=None) for case in held_out])
    plain_task = {"task": plain(config.task)}
    replace_text(folder / TASK_FILE, yaml.safe_dump(plain_task, sort_keys=False))
    # The held-out cases are included: nnU-Net also plans with the validation cases of its folds.
    num_cases = len(training) + len(held_out)
    replace_text(raw / "dataset.json", json.dumps(dataset_json(task, num_cases)))
    fold = {
        "train": [case.name for case in training],
        "val": [case.name for case in held_out],
    }
    # A list of folds, of which only the first one is trained.
    replace_text(raw / "splits_final.json", json.dumps([fold]))
    scans = [list(map(str, case.images(len(task.channels)))) for case in held_out]
    return {"task": task.name, "held_out": scans}


def compose(arguments: Sequence[str]) -> TrainConfig:
    """Compose the configuration of a training of one stage, as the command does."""
    all_arguments = with_task([*arguments, "stage=single", "run_dir=none"], TrainConfig)
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        # Regions are crops of a second stage, which neither program trains here.
        return compose_train([*quote_paths(all_arguments), "task.regions=null"], "cases")


def write_case(raw: Path, case: Case, label_values: LabelValues, task: Task, split: str) -> Case:
    """Write the images and labels of a case; returns the case of these files.

    Args:
        raw: Folder of nnU-Net's raw data set.
        case: Case with labels.
        label_values: Value in its label file to label.
        task: Labels and channels.
        split: `train` or `val`, for the case table.
    """
    modalities = [channel.modality for channel in task.channels]
    channels, volume = read_channels(
        case.images(len(task.channels)),
        [channel.outside for channel in task.channels],
        series=case.series,
        scales=[case.hu],
        modalities=modalities,
    )
    assert case.labels is not None, "only cases with labels are written"
    reference, values = read_reference(
        case.labels, label_values, case.image, case.series, modalities[0], kept=task.values
    )
    labels = task_values(reference.array, case.labels, task, values)
    paths = []
    for number, image in enumerate(channels):
        # nnU-Net finds the channels of a case by these four digits.
        path = raw / "imagesTr" / f"{case.name}_{number:04d}{SUFFIX}"
        write_image(path, image, volume.grid)
        paths.append(path)
    labels_path = raw / "labelsTr" / f"{case.name}{SUFFIX}"
    write_labels(labels_path, labels, reference.grid)
    first, *others = paths
    return Case(case.name, first, labels_path, case.patient, split=split, more_images=tuple(others))


def dataset_json(task: Task, num_cases: int) -> dict[str, Any]:
    """Describe the data set for nnU-Net, whose normalisation follows the names of the channels.

    `CT` is clipped and scaled by statistics of the data set; any other name means a z-score.
    """
    names = {}
    for number, channel in enumerate(task.channels):
        names[str(number)] = "CT" if channel.modality == "ct" else f"MR{number}"
    return {
        "channel_names": names,
        "labels": {"background": 0, **task.labels},
        "numTraining": num_cases,
        "file_ending": SUFFIX,
    }
