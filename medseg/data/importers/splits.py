"""Folds of nnU-Net: the lists of `splits_final.json`, as columns of the case table."""

import difflib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from medseg.data.case_table import FOLD_SIDES, normalise_name
from medseg.data.importers.account import Account, Kind
from medseg.errors import UserError
from medseg.io.text import read_json
from medseg.wording import counted

SPLITS_FILE = "splits_final.json"


class Place(NamedTuple):
    """Place of a case in the folds: the values of its columns in the case table.

    Attributes:
        fold: Number of the fold that validates the case, for the column `fold`; all other folds
            train on it. None where no fold validates it, or where `sides` is used instead.
        sides: Side of the case in each fold, for the columns `fold_0`, `fold_1`, …: `train`, `val`,
            or None where the fold leaves it out; empty where the column `fold` is enough.

    A training case with neither is trained on in every fold. Test cases, and all cases of a data
    set without folds, have neither, too.
    """

    fold: int | None = None
    sides: tuple[str | None, ...] = ()


class Folds(NamedTuple):
    """Folds of a data set.

    Attributes:
        places: Name of each case, normalised, to its place.
        advice: How to choose a fold; "" where there are none.
        num_sides: Length of `Place.sides` of each case.
    """

    places: Mapping[str, Place]
    advice: str = ""
    num_sides: int = 0

    def place(self, name: str) -> Place:
        """Find the place of a case; an unknown case is in no fold."""
        in_no_fold = Place(sides=(None,) * self.num_sides)
        return self.places.get(normalise_name(name), in_no_fold)


def read_folds(paths: Sequence[Path], cases: Collection[str], account: Account) -> Folds:
    """Read the folds of nnU-Net.

    nnU-Net trains a fold on the cases of its list `train` alone, not on all that it does not
    validate.

    Args:
        paths: Where `splits_final.json` may lie.
        cases: Names of the training cases.
        account: Gets an entry for each file and each list.

    Raises:
        UserError: If two files differ, a file holds something else than folds, a list names an
            unknown case, or a fold trains on no case or on a case that it validates.
    """
    existing = [path for path in paths if path.is_file()]
    if not existing:
        return Folds({})
    path, *others = existing
    content = read_json(path, unique_keys=True)
    account.claim(path)
    for other in others:
        if read_json(other) != content:
            raise UserError(
                f"{path} and {other} hold different folds; remove the one that does not count."
            )
        account.merge(Kind.file, str(other), f"holds the folds of {path}")
        account.claim(other)
    folds = _check_folds(content, path)
    names = {normalise_name(name) for name in cases}
    sides_in_folds = []
    for number, fold in enumerate(folds):
        sides_in_folds.append(_read_fold(fold, number, names, path, account))
    return _place_cases(sides_in_folds, names)


def _place_cases(sides_in_folds: Sequence[Mapping[str, str]], names: Collection[str]) -> Folds:
    """Find the place of each case.

    Args:
        sides_in_folds: For each fold, the side of each case that it uses.
        names: All training cases.
    """
    num_folds = len(sides_in_folds)
    advice = (
        f"the folds of {SPLITS_FILE} are in the case table: "
        "data.fold=0 is the only one, and needs no key"
    )
    if num_folds > 1:
        advice = (
            f"the folds of {SPLITS_FILE} are in the case table: data.fold=0 … "
            f"data.fold={num_folds - 1} chooses one, together with data.num_folds={num_folds}"
        )
    # Side of each case in each fold; None where the fold leaves the case out.
    sides_of = {}
    for name in names:
        sides_of[name] = tuple(side_of_case.get(name) for side_of_case in sides_in_folds)
    # The column `fold` says that a case is validated in one fold and trained on in all others. It
    # cannot say that a fold leaves a case out, or validates nothing.
    fits_column = all("val" in side_of_case.values() for side_of_case in sides_in_folds)
    for sides in sides_of.values():
        if None in sides or sides.count("val") > 1:
            fits_column = False
    places = {}
    for name, sides in sides_of.items():
        if not fits_column:
            places[name] = Place(sides=sides)
        elif "val" in sides:
            places[name] = Place(fold=sides.index("val"))
        else:
            places[name] = Place()  # all folds train on it
    num_sides = 0 if fits_column else num_folds
    return Folds(places, advice, num_sides=num_sides)


def _check_folds(content: Any, path: Path) -> list[dict[str, list[Any]]]:
    """Check that the file holds a list of folds, each with its two lists, and return it.

    Raises:
        UserError: If it holds something else.
    """
    folds: list[Any] = content if isinstance(content, list) else []
    if not folds or not all(map(_is_fold, folds)):
        raise UserError(
            f"{path}: expected a list of folds, each with train and val; correct or remove the "
            "file."
        )
    return folds


def _is_fold(fold: Any) -> bool:
    """Whether a value of the file is a fold with its two lists."""
    if not isinstance(fold, dict):
        return False
    return all(isinstance(fold.get(side), list) for side in FOLD_SIDES)


def _read_fold(
    fold: Mapping[str, list[Any]],
    number: int,
    names: Collection[str],
    path: Path,
    account: Account,
) -> dict[str, str]:
    """Read the lists of one fold.

    Args:
        fold: The lists by side.
        number: Number of the fold, for messages.
        names: All training cases.
        path: The file, for messages.
        account: Gets an entry for each list.

    Returns:
        Name of each case that the fold uses, to its side.

    Raises:
        UserError: If a list names an unknown case or a case of the other list, or no case is
            trained on.
    """
    side_of_case: dict[str, str] = {}
    for side in FOLD_SIDES:
        where = f"{side} of fold {number}"
        counts = Counter(normalise_name(str(name)) for name in fold[side])
        for name, count in counts.items():
            if name not in names:
                raise UserError(
                    f"{path}: {where} names {name!r}, which is no training "
                    f"case{_hint(name, names)}; correct the name, add the case, or remove the name "
                    "from the list."
                )
            if name in side_of_case:
                raise UserError(
                    f"{path}: fold {number} names {name!r} in train and in val, but no case is "
                    "trained on and validated at once; remove it from one of the lists, or remove "
                    "the file and train on all cases with data.fold=all."
                )
            if count > 1:
                account.merge(Kind.list, f"{name} in {where}", "named more than once, counts once")
        side_of_case |= dict.fromkeys(counts, side)
        account.use(Kind.list, where, f"names {counted(len(counts), 'case')} of {path.name}")
    if "train" not in side_of_case.values():
        raise UserError(
            f"{path}: train of fold {number} is empty; name the cases to train on, or remove the "
            "fold."
        )
    for key in fold:
        if key not in FOLD_SIDES:
            account.leave_out(
                Kind.list, f"{key} of fold {number}", "a fold has train and val alone"
            )
    return side_of_case


def _hint(name: str, names: Collection[str]) -> str:
    """Propose the name of a case that looks like an unknown one."""
    close = difflib.get_close_matches(name, sorted(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
