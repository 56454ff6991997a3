"""Folds of a cross-validation: checks of the case table, folders and held-out scans."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from medseg.config.schema import CrossValidateConfig
from medseg.data.case_table import (
    Case,
    count_folds,
    read_case_table,
    split_cases,
    write_case_table,
)
from medseg.errors import UserError
from medseg.studies.pieces import cut_partial_scans, paint_scan
from medseg.studies.recipes import has_checkpoint
from medseg.studies.train_arguments import key_of
from medseg.task import LabelValues, Task
from medseg.wording import first_few

# Case table of the scans that a fold holds out, in the folder of the fold.
HELD_OUT_CSV = "held_out.csv"

# Headings of the tables in folds.md. The table of the whole scans has no visible heading.
WHOLE = ""
PIECES = "Partial scans cut from these scans:"
DISEASED = "These scans with disease painted into their regions:"


@dataclass
class Folds:
    """Folds of a study.

    A held-out scan is a case of the user's table, or a harder scan made from such a case.

    Attributes:
        folders: Folder of the runs of each fold.
        tables: Path of the case table of each fold's held-out scans.
        fold_of: Name of each held-out scan to the number of its fold.
        cases: Name of each held-out scan to its case.
        names_by_heading: Heading of a table in `folds.md` to the names of the table's scans.
    """

    folders: list[Path]
    tables: list[Path] = field(default_factory=list)
    fold_of: dict[str, int] = field(default_factory=dict)
    cases: dict[str, Case] = field(default_factory=dict)
    names_by_heading: dict[str, set[str]] = field(default_factory=dict)


def make_folds(
    cases: Sequence[Case],
    organs: Mapping[str, Sequence[int]],
    modality: str,
    config: CrossValidateConfig,
) -> Folds:
    """Divide the cases into folds, and write the table of each fold's held-out scans.

    Args:
        cases: All cases of the table, which `check_folds` has accepted.
        organs: From `organ_values`.
        modality: Modality of the first channel.
        config: States the folder of the study, the number of folds and the harder scans to make.

    Raises:
        UserError: If the networks of an earlier start were trained with other folds.
    """
    folds = Folds([Path(config.output) / f"fold_{fold}" for fold in range(config.num_folds)])
    folds.names_by_heading = {WHOLE: set(), PIECES: set(), DISEASED: set()}
    held_out_cases = []
    for fold, folder in enumerate(folds.folders):
        split = split_cases(
            cases,
            fold=fold,
            num_folds=config.num_folds,
            test_patients=config.data.test_patients,
        )
        _check_held_out(folder, split.val, cases)
        held_out_cases.append(split.val)
    for fold, folder in enumerate(folds.folders):
        scans_by_heading = held_out_scans(held_out_cases[fold], organs, modality, config)
        for heading, scans in scans_by_heading.items():
            folds.names_by_heading[heading].update(case.name for case in scans)
        all_scans = list(chain(*scans_by_heading.values()))
        for case in all_scans:
            folds.cases[case.name] = case
            folds.fold_of[case.name] = fold
        folds.tables.append(write_case_table(folder / HELD_OUT_CSV, all_scans))
    return folds


def _check_held_out(folder: Path, held_out: Sequence[Case], cases: Sequence[Case]) -> None:
    """Refuse to score networks of an earlier start on scans that they were trained on.

    Args:
        folder: Folder of the fold.
        held_out: Cases that the fold holds out now.
        cases: All cases of the table.

    Raises:
        UserError: If the fold has networks, and held out other cases when they were trained.
    """
    table = folder / HELD_OUT_CSV
    if not table.is_file() or not has_checkpoint(folder):
        return
    names_now = {case.name for case in held_out}
    # The table also lists the harder scans that were made from the held-out cases.
    names_then = {case.name for case in read_case_table(table)} & {case.name for case in cases}
    if names_now != names_then:
        raise UserError(
            f"{folder}: its networks were trained with {first_few(sorted(names_then))} held out, "
            f"but the fold now holds out {first_few(sorted(names_now))}; restore the case table, "
            "num_folds and data.test_patients, or give another output"
        )


def organ_values(task: Task, label_values: LabelValues) -> dict[str, list[int]]:
    """Map each organ to its values in label maps, from which harder scans are made.

    An organ is a region of the task, or a label if the task has no regions.

    Args:
        task: Has the regions with their labels.
        label_values: Value in the label files to label name; names of structures are left out.
    """
    if task.regions:
        labels_of_organ = {region.name: region.labels for region in task.regions}
    else:
        labels_of_organ = {name: (name,) for name in task.labels}
    values_of_organ = {}
    for organ, labels in labels_of_organ.items():
        values = []
        for value, label in label_values.items():
            if isinstance(value, int) and label in labels:
                values.append(value)
        values_of_organ[organ] = values
    return values_of_organ


def held_out_scans(
    cases: Sequence[Case],
    organs: Mapping[str, Sequence[int]],
    modality: str,
    config: CrossValidateConfig,
) -> dict[str, list[Case]]:
    """Make the scans that a fold predicts: its held-out cases, and harder scans made from them.

    Args:
        cases: Held-out cases of the fold. No harder scan is made from a case without labels.
        organs: Name of each organ to its values in the label files.
        modality: Modality of the first channel.
        config: States the folder of the study, and whether partial and diseased scans are made.

    Returns:
        Heading of a table in `folds.md` to the table's scans.
    """
    output = Path(config.output)
    partial: list[Case] = []
    diseased: list[Case] = []
    labelled = [case for case in cases if case.labels]
    if config.pieces:
        for case in labelled:
            partial += cut_partial_scans(case, organs, output / "pieces", modality)
    if config.diseased:
        for case in labelled:
            diseased += paint_scan(case, list(organs.values()), output / "diseased")
    return {WHOLE: list(cases), PIECES: partial, DISEASED: diseased}


def check_num_folds(arguments: Sequence[str], num_folds: int) -> None:
    """Refuse the key of `train` for the number of folds, which a study would not read.

    Args:
        arguments: Arguments of `train` among those of the study.
        num_folds: Number of folds of the study.

    Raises:
        UserError: If an argument names another number.
    """
    for argument in arguments:
        _, _, number = argument.partition("=")
        if key_of(argument) == "data.num_folds" and number != str(num_folds):
            raise UserError(
                f"{argument}: the number of folds is the key num_folds here, and num_folds="
                f"{num_folds}; give num_folds={number}"
            )


def check_folds(cases: Sequence[Case], num_folds: int) -> None:
    """Check that a cross-validation can validate each case at most once, with no empty fold.

    Raises:
        UserError: If the table has a single fold or another number of folds than `num_folds`, a
            fold validates no case, or a case is validated in two folds.
    """
    # None if the table states no folds: patients are then divided by their names.
    num_table_folds = count_folds(cases)
    if num_table_folds == 1:
        raise UserError(
            "the case table has one fold, which is no cross-validation; "
            "train on it with medseg train"
        )
    if num_table_folds not in (None, num_folds):
        raise UserError(
            f"num_folds={num_folds}: the case table has {num_table_folds} folds; "
            f"give num_folds={num_table_folds}"
        )
    if num_table_folds is not None:
        _check_validation(cases, num_table_folds)
    for case in cases:
        if case.fold_sides.count("val") > 1:
            raise UserError(
                f"the case table validates {case.name!r} in several folds, but a cross-validation "
                "scores each case once; keep one val in its columns fold_0, fold_1, …"
            )


def _check_validation(cases: Sequence[Case], num_folds: int) -> None:
    """Refuse a fold that validates no case, as when a part of LUNA16 was not downloaded.

    Raises:
        UserError: With the number of the fold, and the column to correct.
    """
    # A table has either a column `fold_N` for each fold, with train or val for each case
    # (`fold_sides`), or one column `fold` with the number of the fold that validates the case.
    cases_with_sides = [case for case in cases if case.fold_sides]
    for fold in range(num_folds):
        if cases_with_sides:
            has_val_case = any(case.fold_sides[fold] == "val" for case in cases_with_sides)
            cure = (
                f"mark some as val in its column fold_{fold}, "
                "or remove the column and number those after it again"
            )
        else:
            has_val_case = any(case.fold == fold for case in cases)
            cure = "number the folds in its column fold from 0 without a gap"
        if not has_val_case:
            raise UserError(
                f"fold {fold} of the case table validates no case, "
                f"so there is nothing to score; {cure}"
            )
