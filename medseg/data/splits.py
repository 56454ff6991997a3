"""Splits: training, validation and test cases by patient, and the sources that they come from."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from medseg.data.case_table import Case
from medseg.errors import UserError


@dataclass(frozen=True)
class Split:
    """The cases of each side, in the order of the case table."""

    train: tuple[Case, ...]
    val: tuple[Case, ...]
    test: tuple[Case, ...]


@dataclass(frozen=True)
class CaseSource:
    """Cases that share a label convention.

    Attributes:
        split: The cases of each side.
        label_values: Value in the reference files to label name.
        share: Share of the training samples that these cases give; the shares of all sources add up to 1.
    """

    split: Split
    label_values: dict[int, str]
    share: float


def split_cases(
    cases: Sequence[Case],
    *,
    fold: int | str | None = None,
    num_folds: int = 5,
    val_patients: Sequence[str] = (),
    test_patients: Sequence[str] = (),
) -> Split:
    """Divide the cases by patient.

    Test patients are those of `test_patients` and those that the table marks as `test`; they are never used for training or
    validation. Of the others, the first that applies is validated: `val_patients`; the patients that the table marks as
    `val`; fold `fold` of `num_folds`. If no fold is given and the patients are fewer than the folds, there are as many
    folds as patients, and a single patient is trained on without validation. A row without a mark has the split of the
    other rows of its patient. Fold `all` validates no patient and trains on all but the test patients. Folds depend on
    the names of the patients alone, and differ by at most one patient in size.

    Args:
        cases: All cases of the table.
        fold: The fold that is validated, 0 ≤ fold < num_folds; `all` is none of them; None is fold 0.
        num_folds: Number of folds, at least 2.
        val_patients: Patients to validate on, in place of a fold.
        test_patients: Patients to keep away from training and validation.

    Raises:
        UserError: If a patient is unknown or on two sides, the fold does not exist, or no case is left for training.
    """
    patients = sorted({case.patient for case in cases})
    for key, names in (("data.val_patients", val_patients), ("data.test_patients", test_patients)):
        for name in names:
            if name not in patients:
                close = difflib.get_close_matches(name, patients, n=3, cutoff=0.4)
                hint = f"did you mean {' or '.join(close)}" if close else f"the table has {', '.join(patients[:5])}, …"
                raise UserError(f"{key} names the patient {name!r}, who is not in the case table; {hint}?")
    if both := sorted(set(val_patients) & set(test_patients)):
        raise UserError(f"The patient {both[0]!r} is in data.val_patients and in data.test_patients; keep one of them.")

    side = _sides_of_table(cases)
    test = set(test_patients) | ({p for p in patients if side.get(p) == "test"} - set(val_patients))
    rest = [patient for patient in patients if patient not in test]
    if fold == "all":
        if val_patients:
            raise UserError("data.fold=all trains on everybody, but data.val_patients is given; keep one of them.")
        val = set[str]()
    elif val_patients:
        _refuse_fold(fold, "data.val_patients is given")
        val = set(val_patients)
    elif "val" in side.values():
        _refuse_fold(fold, "the case table marks its validation cases in the column split")
        val = {patient for patient in rest if side.get(patient) == "val"}
    elif isinstance(fold, int):
        val = _fold(rest, fold, num_folds)
    else:
        # No fold was given: few patients make fewer folds, and a single one is trained on without validation.
        val = _fold(rest, 0, min(num_folds, len(rest))) if len(rest) > 1 else set()
    train = set(rest) - val
    if not train:
        raise UserError(
            f"No case is left for training: of {len(patients)} patients, {len(test)} are for testing and {len(val)} "
            "for validation; name fewer in data.val_patients, data.test_patients or the column split."
        )
    return Split(*(tuple(case for case in cases if case.patient in chosen) for chosen in (train, val, test)))


def _sides_of_table(cases: Sequence[Case]) -> dict[str, str]:
    """Map each patient that the table marks to its side."""
    side: dict[str, str] = {}
    for case in cases:
        if case.split is not None and side.setdefault(case.patient, case.split) != case.split:
            raise UserError(
                f"The patient {case.patient!r} is marked {side[case.patient]} and {case.split} in the case table; "
                "give all scans of one patient the same split."
            )
    return side


def _refuse_fold(fold: int | str | None, reason: str) -> None:
    if fold is not None:
        raise UserError(f"data.fold={fold} has no effect because {reason}; leave one of the two out.")


def _fold(patients: Sequence[str], fold: int, num_folds: int) -> set[str]:
    if not 2 <= num_folds <= len(patients):
        raise UserError(
            f"data.num_folds={num_folds} does not divide {len(patients)} patients outside the test set; choose "
            f"a number from 2 to {len(patients)}, or name data.val_patients."
        )
    if not 0 <= fold < num_folds:
        raise UserError(f"data.fold={fold} does not exist among {num_folds} folds; choose 0 to {num_folds - 1}.")
    # Ordered by hash, so that consecutive names (by hospital, by date) do not end in one fold.
    ordered = sorted(patients, key=lambda name: (hashlib.sha256(name.encode()).digest(), name))
    return set(ordered[fold::num_folds])
