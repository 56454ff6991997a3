"""Imported data set: the cases, labels and channels in a folder of another program, and the task that is made from them."""

import functools
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from medseg.data.audit.labels import ABSENT
from medseg.data.case_table import Case, check_case_name
from medseg.data.importers.account import Account, Fate, Item, Kind
from medseg.data.importers.splits import nfc
from medseg.data.source_files import files_of
from medseg.errors import UserError, require
from medseg.io.inputs import CONTROL_CHARACTERS
from medseg.task import IGNORE, Channel
from medseg.wording import first_few

SIDES = {"left": "left", "right": "right", "l": "left", "r": "right"}
# Label maps have one byte for each voxel.
MAX_IGNORE_LABEL = 255
# Air to dense bone: a data set does not say which tissue it is about.
WINDOW_HU = (-1000.0, 1000.0)
MR_WORDS = frozenset(
    {
        "mr",
        "mri",
        "t1",
        "t1w",
        "t1c",
        "t1ce",
        "t1gd",
        "t1n",
        "t2",
        "t2w",
        "t2f",
        "flair",
        "adc",
        "dwi",
        "pd",
        "swi",
        "bssfp",
    }
)

FileValues = dict[str, list[int | str]]
"""Label name to its values, or names of structures, in the files."""

Structures = Mapping[str, Sequence[int | str]]
"""Case name to the structures in its file, as `FileValues` names them; a name may repeat."""

MAX_CASES = 3
DICOM = "dicom"


@dataclass(frozen=True)
class DataSet:
    """Content of a folder of another program.

    Attributes:
        format: Name of the layout.
        name: Name of the task.
        cases: Cases by name.
        labels: Labels of the task with their values in the files.
        channels: Channels of the task.
        background: Further names in the files, which become background.
        ignore: Value of ignored voxels; None where there are none.
        notes: Sentences for the user.
        structures: Structures of each case with labels; None where label maps hold values that only
            their voxels tell.
        account: What the reader has found, apart from labels and structures.
    """

    format: str
    name: str
    cases: tuple[Case, ...]
    labels: FileValues
    channels: tuple[Channel, ...]
    background: FileValues
    ignore: int | None = None
    notes: tuple[str, ...] = ()
    structures: Structures | None = None
    account: Account = field(default_factory=Account)

    def keep(self, wanted: Sequence[str] | Mapping[str, Any] | None) -> "DataSet":
        """Choose the labels of the task; the others become background.

        Args:
            wanted: Names of labels, or new labels with the names or values that they consist of;
                None = all.

        Raises:
            UserError: If a name is unknown, or a value would have two labels.
        """
        if wanted is None:
            return self
        named = {**self.background, **self.labels}
        chosen = _choose(wanted, named)
        owners = _owners(chosen)
        background: FileValues = {}
        for name, members in named.items():
            rest = [member for member in members if member not in owners]
            if rest == members and name not in chosen:
                background[name] = rest
            elif rest:
                background[_name_of_rest(name, {*named, *chosen, *background})] = rest
        return replace(self, labels=chosen, background=background)

    def require_structures(self) -> None:
        """Refuse labels of which a case lacks a structure: its voxels would be trained on as background.

        Raises:
            UserError: With the structure, the cases and the cure.
        """
        for label, members in self.labels.items():
            for member in members:
                lacking = self._cases_without(member)
                if not lacking:
                    continue
                part = f" (a part of {label})" if len(members) > 1 else ""
                # Others may be incomplete too, and would be refused next.
                complete = [
                    name
                    for name, parts in self.labels.items()
                    if not any(map(self._cases_without, parts))
                ]
                choice = f"labels=[{','.join(complete)}]" if complete else "labels=[…]"
                raise UserError(
                    f"{first_few(lacking, MAX_CASES)} ({len(lacking)} of {len(self.structures or ())} cases): the structure "
                    f"{_shown(member, label)}{part} is missing, and would be trained on as background; add it, leave the label "
                    f"out (medseg import … {choice}), or state that these patients do not have it (medseg import … missing=absent)."
                )

    def state_absence(self) -> "DataSet":
        """Mark labels of which a case has no structure as absent there, in the columns `trust_<label>`."""
        cases = []
        for case in self.cases:
            absent = {
                label: ABSENT
                for label, members in self.labels.items()
                if case.name in self._keys and self._keys[case.name].isdisjoint(map(_key, members))
            }
            cases.append(replace(case, trust={**case.trust, **absent}))
        return replace(self, cases=tuple(cases))

    @functools.cached_property
    def _keys(self) -> dict[str, frozenset[int | str]]:
        """Structures of each case in the form in which names are compared; empty where label maps hold values."""
        return {
            case: frozenset(map(_key, names)) for case, names in (self.structures or {}).items()
        }

    def _cases_without(self, member: int | str) -> list[str]:
        """List the cases whose files lack a structure; none where label maps hold values."""
        return [case for case, keys in self._keys.items() if _key(member) not in keys]

    def closing_items(self) -> list[Item]:
        """List everything that was found, with what became of it: the closing table of an import."""
        has_folds = any(case.fold is not None for case in self.cases)
        items = [
            *self.account.items,
            *(_case_item(case, has_folds=has_folds) for case in self.cases),
        ]
        items += [
            Item(
                Kind.channel,
                str(number),
                Fate.used,
                f"{one.modality} {one.window_hu or one.normalise}",
            )
            for number, one in enumerate(self.channels)
        ]
        for label, members in self.labels.items():
            items.append(Item(Kind.label, label, Fate.used, _origin(members)))
            if self.structures is not None:
                items += [self._structure_item(member, label, len(members)) for member in members]
        for name, members in self.background.items():
            why = "no label of the task: background"
            items.append(Item(Kind.label, f"{name} ({_origin(members)})", Fate.left_out, why))
            if self.structures is not None:
                items += [
                    Item(Kind.structure, str(member), Fate.left_out, why) for member in members
                ]
        if self.ignore is not None:
            items.append(
                Item(
                    Kind.label, IGNORE, Fate.used, f"value {self.ignore}: its voxels count nowhere"
                )
            )
        if self.structures is None:
            why = "prepare reads the voxels and refuses a value that is not named here"
            items.append(Item(Kind.label, "", Fate.used, why, 0))
        items += [*self._spelling_items(), *self._overlap_items()]
        # Names of files and in JSON may hold what no text file can.
        return [
            item._replace(
                name=CONTROL_CHARACTERS.sub("_", item.name),
                why=CONTROL_CHARACTERS.sub("_", item.why),
            )
            for item in items
        ]

    def _structure_item(self, member: int | str, label: str, num_members: int) -> Item:
        """Say what became of a structure that belongs to a label."""
        num_cases = len(self.structures or ())
        num_present = num_cases - len(self._cases_without(member))
        where = f"in {num_present} of {num_cases} cases"
        if num_present < num_cases:
            where += ", stated as absent in the others"
        if num_members > 1:
            return Item(
                Kind.structure, _shown(member, label), Fate.merged, f"into {label}, {where}"
            )
        return Item(Kind.structure, _shown(member, label), Fate.used, where)

    def _spelling_items(self) -> list[Item]:
        """List the structures of one file that become one: those of equal names, or of names that differ in signs."""
        items = []
        for case, names in (self.structures or {}).items():
            groups: dict[int | str, list[str]] = {}
            for name in names:
                groups.setdefault(_key(name), []).append(str(name))
            for several in groups.values():
                if len(several) > 1:
                    name = f"{' = '.join(several)} of {case}"
                    items.append(
                        Item(
                            Kind.structure,
                            name,
                            Fate.merged,
                            "several of one name in a file are one structure",
                        )
                    )
        return items

    def _overlap_items(self) -> list[Item]:
        """Say what counts where structures overlap, which only their voxels tell."""
        names = [
            member
            for members in self.labels.values()
            for member in members
            if isinstance(member, str)
        ]
        if self.structures is None or len(self.labels) < 2 or not names:
            return []
        why = f"where labels overlap, the last of {', '.join(self.labels)} counts; prepare counts these voxels"
        return [Item(Kind.structure, "", Fate.merged, why, 0)]

    def task(self) -> dict[str, Any]:
        """Make the groups `task` and `data` of the configuration, in plain types.

        Regions are made if every label has a side; a task with other labels has one stage.
        """
        labels = {name: value for value, name in enumerate(self.labels, start=1)}
        sides = {name: side_of(name)[0] for name in labels}
        fits = self.ignore is not None and len(labels) < self.ignore <= MAX_IGNORE_LABEL
        ignore = self.ignore if fits or self.ignore is None else len(labels) + 1
        files = {
            name: values[0] if len(values) == 1 else values
            for name, values in {**self.labels, **self.background}.items()
        }
        if ignore is not None and ignore != self.ignore:
            files[IGNORE] = self.ignore  # type: ignore[assignment]
        channels = [
            {"modality": one.modality, "window_hu": list(one.window_hu)}
            if one.window_hu
            else {"modality": one.modality, "normalise": one.normalise}
            for one in self.channels
        ]
        return {
            "task": {
                "name": safe_name(self.name),
                "labels": labels,
                "regions": {name: {"labels": [name], "side": side} for name, side in sides.items()}
                if all(sides.values())
                else None,
                "channels": channels,
                **({} if ignore is None else {"ignore_label": ignore}),
            },
            "data": {"label_values": files},
        }


def _groups_of(wanted: Any) -> dict[str, Any]:
    """Read the value of `labels`: a name, a list of names, or new names with their members.

    Raises:
        UserError: If it is something else, or a new name cannot name a label.
    """
    if isinstance(wanted, str):
        wanted = [wanted]
    if isinstance(wanted, list | tuple):
        return {str(name): [name] for name in wanted}
    if not isinstance(wanted, Mapping):
        raise UserError(
            f"labels: expected names, [a,b], or new labels, {{both: [a,b]}}, but got {wanted!r}."
        )
    for label in map(str, wanted):
        name = f"label_{label}" if label.isdigit() else safe_name(label)
        if name != label:
            raise UserError(
                f"labels: {label!r} cannot name a label, which has letters, digits, _ and -; write {name}."
            )
    return {str(label): members for label, members in wanted.items()}


def _choose(wanted: Sequence[str] | Mapping[str, Any], named: FileValues) -> FileValues:
    """Find the members of each label that a person has chosen.

    Args:
        wanted: Names of labels, or new labels with the names or members that they consist of.
        named: Members of each name in the data set.

    Raises:
        UserError: If a name is not in the data set, or none is chosen.
    """
    groups = _groups_of(wanted)
    members = {member for several in named.values() for member in several}
    choices = ", ".join(named)
    if not groups:
        raise UserError(
            f"labels: no label is chosen from the data set, which has {choices}; give some of these names."
        )
    chosen: FileValues = {}
    unknown = []
    for label, parts in groups.items():
        chosen[label] = []
        for part in parts if isinstance(parts, list) else [parts]:
            if str(part) in named:
                chosen[label] += named[str(part)]
            elif part in members:
                chosen[label].append(part)
            else:
                unknown.append(str(part))
    if unknown:
        raise UserError(
            f"labels: {', '.join(unknown)} is not in the data set, which has {choices}; give some of these names."
        )
    return {label: list(dict.fromkeys(parts)) for label, parts in chosen.items()}


def _owners(chosen: FileValues) -> dict[int | str, str]:
    """Map each member to its label.

    Raises:
        UserError: If a member would have two labels.
    """
    owners: dict[int | str, str] = {}
    for label, members in chosen.items():
        for member in members:
            owner = owners.setdefault(member, label)
            if owner != label:
                raise UserError(
                    f"labels: {member} would be {owner} and {label}; name it in one of them."
                )
    return owners


def _name_of_rest(name: str, taken: Collection[str]) -> str:
    """Name the members of a label that are left: an own name, since a task may give the label's name to other members."""
    rest_name = f"{name}_rest"
    while rest_name in taken:
        rest_name += "_"
    return rest_name


def check_dataset(data: DataSet, folder: Path) -> DataSet:
    """Refuse a data set that cannot be trained on, and close its account.

    Raises:
        UserError: If there is no case, two cases are the same, a name cannot name a file, or a file
            is missing.
    """
    require(
        bool(data.cases), f"{folder}: the {data.format} data set has no case; check the folder."
    )
    # As a case table is read: programs write ü in two ways.
    data = replace(
        data, cases=tuple(replace(case, patient=nfc(case.patient)) for case in data.cases)
    )
    _check_names(data, folder)
    files = [
        path
        for case in data.cases
        for path in (case.image, *case.more_images, case.labels)
        if path is not None
    ]
    if missing := [path for path in files if not path.exists()]:
        raise UserError(
            f"{first_few(missing, 1)}: there is no such file, but the data set names it; copy the data set completely."
        )
    if all(case.labels is None for case in data.cases):
        raise UserError(
            f"{folder}: none of the {len(data.cases)} cases has labels, so nothing can be trained; add them."
        )
    _check_images(data.cases, folder)
    _account_shared(data)
    _account_files(data, files, folder)
    return data


def _account_files(data: DataSet, files: Sequence[Path], folder: Path) -> None:
    """Enter the files of the cases, and all others at the same place."""
    root = Path(os.path.realpath(folder if folder.is_dir() else folder.parent))
    for path in files:
        for file in _data_files(path):
            require(
                file.exists(),
                f"{file} does not exist, but {path} holds its header; copy both files.",
            )
        # The importer of DICOM claims the files of each series itself: several may share a folder.
        if data.format != DICOM or not path.is_dir():
            for file in files_of(path):
                data.account.claim(file)
        real = os.path.realpath(path)
        if not Path(real).is_relative_to(root):
            data.account.use(Kind.file, real, f"outside of {root}, and read there")
    if folder.is_dir():
        data.account.close(folder)
        return
    # A datalist may lie anywhere, beside files of all kinds: only the folders of its images and
    # labels are searched.
    data.account.claim(folder)
    for place in sorted({path.parent for path in files}):
        data.account.close(place, is_deep=False)


def _check_names(data: DataSet, folder: Path) -> None:
    """Refuse names that clash, or that cannot name a file."""
    seen: dict[str, Case] = {}
    for case in data.cases:
        check_case_name(case.name, str(case.image))
        other = seen.get(case.name.casefold())
        if other is not None and other.name == case.name:
            raise UserError(
                f"{folder}: {other.image} and {case.image} would both be the case {case.name!r}; rename one of them."
            )
        if other is not None:
            why = "the names differ in upper and lower case only: some systems take their files for one"
            data.account.use(Kind.case, f"{other.name} and {case.name}", why)
        seen[case.name.casefold()] = case


def _check_images(cases: Sequence[Case], folder: Path) -> None:
    """Refuse one scan as two cases: it would count twice, or be trained on and validated."""
    owners: dict[tuple[str, str | None], Case] = {}
    for case in cases:
        key = os.path.realpath(case.image), case.series
        owner = owners.setdefault(key, case)
        if owner is not case:
            raise UserError(
                f"{folder}: {case.image} is the image of the case {owner.name!r} and of {case.name!r}; keep one of the two."
            )


def _account_shared(data: DataSet) -> None:
    """Enter files that are read for several cases or channels: a slip of a list, unless it is meant."""
    uses: dict[tuple[str, str | None], list[str]] = {}
    for case in data.cases:
        roles = {
            f"channel {number}": path
            for number, path in enumerate((case.image, *case.more_images))
            if path
        }
        if case.labels is not None:
            roles["labels"] = case.labels
        for role, path in roles.items():
            series = case.series if path == case.image else None
            uses.setdefault((os.path.realpath(path), series), []).append(f"{role} of {case.name}")
    for (real_path, _), shared in uses.items():
        if len(shared) > 1:
            data.account.merge(
                Kind.file,
                real_path,
                f"one file is {' and '.join(shared[:MAX_CASES])}; check that this is meant",
            )


def _data_files(path: Path) -> tuple[Path, ...]:
    """Find the files with the voxels of a header that is a file of its own."""
    if path.is_dir() or path.suffix.lower() not in (".mhd", ".nhdr"):
        return ()
    from medseg.io.simpleitk import read_header  # SimpleITK takes 50 MiB

    try:
        return read_header(path)[2]
    except UserError:  # a damaged header stops its case alone, in `prepare`
        return ()


def _case_item(case: Case, *, has_folds: bool) -> Item:
    """Say what a case is used for; `has_folds`: whether the column `fold` divides the cases."""
    labels = "" if case.labels is not None else ", without labels"
    if case.fold_sides and case.split is None:
        places = [
            f"fold {number}: {side}"
            for number, side in enumerate(case.fold_sides)
            if side is not None
        ]
        if not places:
            return Item(
                Kind.case,
                case.name,
                Fate.left_out,
                "in no list of any fold: neither trained on nor validated",
            )
        return Item(Kind.case, case.name, Fate.used, f"{'; '.join(places)}{labels}")
    if case.split is not None:
        uses = {"train": "training", "val": "validation", "test": "test"}
        return Item(Kind.case, case.name, Fate.used, uses[case.split] + labels)
    if case.labels is None:
        return Item(Kind.case, case.name, Fate.left_out, "no labels: not trained on")
    if case.fold is not None:
        return Item(
            Kind.case,
            case.name,
            Fate.used,
            f"validated in fold {case.fold}, trained on in the others",
        )
    if has_folds:
        return Item(Kind.case, case.name, Fate.used, "trained on in every fold")
    return Item(Kind.case, case.name, Fate.used, "training and validation")


@functools.cache
def _key(member: int | str) -> int | str:
    """Reduce the name of a structure to the form in which names are compared; a value stays."""
    return plain_name(member) if isinstance(member, str) else member


def _shown(member: int | str, label: str) -> str:
    """Name a structure in messages; one that is known by its value has the name of its label."""
    return member if isinstance(member, str) else f"{label} (value {member})"


def _origin(members: Sequence[int | str]) -> str:
    """Say of which values or structures a label consists."""
    kind = "value" if all(isinstance(one, int) for one in members) else "structure"
    return f"{kind}{'s' * (len(members) > 1)} {', '.join(map(str, members))}"


def side_of(name: str) -> tuple[str | None, str]:
    """Find the side that a name begins or ends with, and the name of the organ without it.

    Example:
        >>> [side_of(name) for name in ("left_femur", "Femur_R", "kidney_left", "heart", "l")]
        [('left', 'femur'), ('right', 'Femur'), ('left', 'kidney'), (None, 'heart'), (None, 'l')]
    """
    words = re.split(r"[\s_.-]+", name)
    for index in (0, -1):
        if len(words) > 1 and (side := SIDES.get(words[index].casefold())):
            return side, "_".join(words[1:] if index == 0 else words[:-1])
    return None, name


def safe_name(name: str) -> str:
    """Join the words of a name by `_`, without signs that a file name or a key of the configuration cannot have."""
    return re.sub(r"[^\w-]+", "_", CONTROL_CHARACTERS.sub("_", name)).strip("_-") or "label"


def plain_name(name: str) -> str:
    """Reduce a name to the form in which names are compared: without upper case and signs, the side first and written out.

    Example:
        >>> [plain_name(name) for name in ("Femur_L", "left femur", "femur-left", "Heart")]
        ['left_femur', 'left_femur', 'left_femur', 'heart']
    """
    side, organ = side_of(safe_name(name))
    return f"{side}_{organ}".casefold() if side else organ.casefold()


def label_names(names: Iterable[str]) -> dict[str, str]:
    """Turn the names of a data set into names of labels: words joined by `_`, sides written out.

    Returns:
        Name in the data set to name of the label.

    Raises:
        UserError: If two names become one.

    Example:
        >>> label_names(["Femur_L", "Femur_R", "left atrium"])
        {'Femur_L': 'left_femur', 'Femur_R': 'right_femur', 'left atrium': 'left_atrium'}
    """
    known = {name: safe_name(name) for name in names}
    organs = [side_of(name) for name in known.values()]
    for name, label in known.items():
        side, organ = side_of(label)
        is_pair = {one for one, other in organs if other == organ} >= {"left", "right"}
        if side and is_pair and side not in label.casefold():
            known[name] = f"{side}_{organ.casefold()}"
    taken: dict[str, str] = {}
    for name, label in known.items():
        other = taken.setdefault(label.casefold(), name)
        require(
            other == name,
            f"the labels {other!r} and {name!r} would both be {label}; rename one of them in the data set.",
        )
    return known


def named_groups(names: Iterable[str], account: Account) -> FileValues:
    """Make one label of each structure; spellings that differ in case, signs or the place of the side are one structure.

    Args:
        names: Names of the structures of all cases in the order of the labels; they may repeat.
        account: Gets the other spellings.

    Returns:
        Labels, each with the first spelling of its structure, which stands for the others.
    """
    first: dict[str, str] = {}
    for name in dict.fromkeys(names):
        spelling = first.setdefault(plain_name(name), name)
        if spelling != name:
            account.merge(Kind.structure, name, f"another spelling of {spelling}")
    written = label_names(first.values())
    return {label: [name] for name, label in written.items()}


def channel_of(name: str) -> Channel:
    """Guess modality and normalisation of a channel from its name in a data set."""
    words = set(re.split(r"[^a-z0-9]+", name.casefold()))
    if "ct" in words:
        return Channel("ct", WINDOW_HU)
    return Channel("mr" if words & MR_WORDS else "other", None, "zscore")


def require_pairs(
    images: Collection[str], labels: Collection[str], images_at: Path, labels_at: Path
) -> None:
    """Refuse images without labels and labels without images.

    Raises:
        UserError: With the name of the first.
    """
    if alone := sorted(set(images) - set(labels)):
        raise UserError(
            f"{labels_at}: no labels for {first_few(alone, 1)}, which {images_at.name} holds; add them, or move the image to another folder."
        )
    if alone := sorted(set(labels) - set(images)):
        raise UserError(
            f"{images_at}: no image for {first_few(alone, 1)}, which {labels_at.name} holds; add it, or move the labels to another folder."
        )
