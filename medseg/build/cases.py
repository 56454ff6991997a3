"""Which cases a configuration means (a table of the user, the phantom, or both), and what the values of their labels mean."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medseg.config.schema import DataConfig, PhantomCountsConfig
from medseg.data.audit.finding import check_ignored
from medseg.data.case_table import Case, read_case_table
from medseg.data.splits import CaseSource, Split, split_cases
from medseg.errors import UserError
from medseg.io.atomic import check_writable
from medseg.io.locks import locked
from medseg.preprocess.scale import HuScale

# Phantoms made at a time; one of full detail takes 2 to 5 GB.
MAX_PHANTOM_WORKERS = 4
# Values in the phantom's `organs` maps.
PHANTOM_LABELS = {1: "left_lung", 2: "right_lung", 3: "heart", 4: "spine"}


def find_cases(data: DataConfig) -> list[tuple[list[Case], dict[int, str]]]:
    """All cases of the `data` group with their label convention, whatever the split; makes the phantom where it is needed.

    Raises:
        UserError: If the table or the label values are not right.
    """
    own = _own_cases(data), file_values(data.label_values)
    return [own, (_extra_phantoms(data, own[0]), PHANTOM_LABELS)]


def find_sources(data: DataConfig) -> list[CaseSource]:
    """The cases of the `data` group with their split and label convention; makes the phantom where it is needed.

    Raises:
        UserError: If the table, the split or the label values are not right.
    """
    label_values = file_values(data.label_values)
    cases = _own_cases(data)
    split = _split(cases, data)
    extra = Split(train=tuple(_extra_phantoms(data, cases)), val=(), test=())
    if not extra.train:
        return [CaseSource(split, label_values, 1.0)]
    return [
        CaseSource(split, label_values, 1.0 - data.phantom_share),
        CaseSource(extra, PHANTOM_LABELS, data.phantom_share),
    ]


def _own_cases(data: DataConfig) -> list[Case]:
    """The cases of the table, or the phantom where there is none."""
    ignore_findings = check_ignored(data.ignore_findings, "data.ignore_findings")
    if data.cases is None:
        table = make_phantoms(data.phantoms, Path(data.phantoms.folder), data.phantoms.num_train, with_held_out=True)
        return read_case_table(table, data.labels_column, ignore_findings=ignore_findings)
    hu = HuScale(data.hu_slope, data.hu_offset)
    return read_case_table(Path(data.cases), data.labels_column, hu=hu, ignore_findings=ignore_findings)


def _extra_phantoms(data: DataConfig, cases: Sequence[Case]) -> list[Case]:
    """The phantoms that are trained on beside the cases of a table."""
    if data.cases is None or data.phantoms.num_extra == 0:
        return []
    table = make_phantoms(data.phantoms, Path(data.phantoms.folder) / "extra", data.phantoms.num_extra, with_held_out=False)
    extra = read_case_table(table, "organs", ignore_findings=frozenset(data.ignore_findings))
    known = {case.name for case in cases}
    clash = [case.name for case in extra if case.name in known]
    if clash:
        raise UserError(f"data.cases={data.cases}: the case name {clash[0]} is that of a phantom; rename the case")
    return extra


def _split(cases: Sequence[Case], data: DataConfig) -> Split:
    return split_cases(
        cases,
        fold=data.fold,
        num_folds=data.num_folds,
        val_patients=data.val_patients,
        test_patients=data.test_patients,
    )


def file_values(label_values: Mapping[str, Any]) -> dict[int, str]:
    """Turn `data.label_values` round: value in the files to name.

    Args:
        label_values: Name to its value or list of values.

    Raises:
        UserError: If a value is no whole number or stands for two names.

    Example:
        >>> file_values({"left_lung": 10, "right_lung": [11, 12]})
        {10: 'left_lung', 11: 'right_lung', 12: 'right_lung'}
    """
    names: dict[int, str] = {}
    for name, given in label_values.items():
        for value in given if isinstance(given, list) else [given]:
            if type(value) is not int:  # True and False are no values
                raise UserError(
                    f"data.label_values.{name}: a whole number or a list of them is needed (name: value), but got {given!r}"
                )
            if names.setdefault(value, name) != name:
                raise UserError(
                    f"data.label_values: {value} cannot be {names[value]} and {name}; give one of them another value, or "
                    f"take it out with ~data.label_values.{names[value]}"
                )
    return names


def make_phantoms(config: PhantomCountsConfig, folder: Path, num_train: int, *, with_held_out: bool) -> Path:
    """Make the phantoms that are not there yet, and their case table.

    Returns:
        Path of the table.
    """
    from rich.progress import Progress

    from medseg.phantom.dataset import write_phantoms

    splits = {"train": num_train}
    if with_held_out:
        splits |= {"val": config.num_val, "test": config.num_test}
    total = sum(splits.values())
    check_writable(folder)
    # Ranks and the jobs of a sweep begin at the same time: the first one makes them.
    with locked(folder / ".lock"), Progress(transient=True) as progress:
        bar = progress.add_task("phantoms", total=total)
        return write_phantoms(
            folder,
            total,
            config.seed,
            config.detail.value,
            splits,
            lambda finished, _, name: progress.update(bar, completed=finished, description=name),
            num_workers=max(1, min(total, os.cpu_count() or 1, MAX_PHANTOM_WORKERS)),
        )
