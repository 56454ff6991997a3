"""Imported data set: cases, labels and channels of another program's folder, and their task."""

import functools
import itertools
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from medseg.data.audit.labels import ABSENT
from medseg.data.case_table import Case, check_case_name, normalise_name
from medseg.data.importers.account import Account, Fate, Item, Kind
from medseg.data.source_files import files_in_role
from medseg.errors import UserError
from medseg.io.inputs import CONTROL_CHARACTERS
from medseg.task import IGNORE, SHORT_SIDES, SIDES, Channel
from medseg.wording import first_few

# Separators of the words of a name.
WORD_BREAK = re.compile(r"[\s_.-]+")
# Word for a side in the name of a structure, in small letters, to the side.
SIDE_OF_WORD = {side: side for side in SIDES}
SIDE_OF_WORD |= {short: side for short, (side, _) in SHORT_SIDES.items()}
# Label maps of the task have one byte for each voxel.
MAX_IGNORE_LABEL = 255
# Window of a CT, from air to dense bone: a data set does not say which tissue it is about.
WINDOW_HU = (-1000.0, 1000.0)
# Words in the name of a channel that mean MR, most of them names of sequences.
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

LabelMembers = dict[str, list[int | str]]
"""Label name to its members: its values in the label maps, or the names of its structures."""

Structures = Mapping[str, Sequence[int | str]]
"""Case name to the structures in its files, each by its name or its value; a name may repeat."""

# Most cases or files that a message names; the others are counted.
MAX_NAMED = 3
# Name of the format of folders of DICOM files, in `medseg.data.importers.formats.FORMATS`.
DICOM = "dicom"


@dataclass(frozen=True)
class DataSet:
    """Data set as an importer reads it from the files of another program.

    Attributes:
        format: Name of the format, a key of `medseg.data.importers.formats.FORMATS`.
        name: Name of the task.
        cases: Cases, with and without labels.
        labels: Labels of the task with their members.
        channels: Channels of the task.
        background: Other names in the files with their members, which become background.
        ignore: Value of ignored voxels in the files; None where there are none.
        notes: Sentences for the user.
        structures: Structures of each case with labels; None for label maps, in which only the
            voxels show which values are present.
        account: What the importer has found, apart from labels and structures.
    """

    format: str
    name: str
    cases: tuple[Case, ...]
    labels: LabelMembers
    channels: tuple[Channel, ...]
    background: LabelMembers
    ignore: int | None = None
    notes: tuple[str, ...] = ()
    structures: Structures | None = None
    account: Account = field(default_factory=Account)

    def keep(self, choice: Sequence[str] | Mapping[str, Any] | None) -> "DataSet":
        """Choose the labels of the task; the others become background.

        Args:
            choice: Names of labels, or new labels with the names or values that they consist of;
                None keeps all.

        Returns:
            The data set with the chosen labels.

        Raises:
            UserError: If a name is unknown, or a value would have two labels.
        """
        if choice is None:
            return self
        all_members = {**self.background, **self.labels}
        chosen = _choose(choice, all_members)
        label_of_member = _label_of_each_member(chosen)
        background: LabelMembers = {}
        for name, members in all_members.items():
            remaining_members = [member for member in members if member not in label_of_member]
            if not remaining_members:
                # All its members are in labels of the task.
                continue
            if remaining_members == members and name not in chosen:
                background[name] = members
            else:
                # Only some members remain, or a label of the task has taken the name.
                rest_name = _name_of_rest(name, {*all_members, *chosen, *background})
                background[rest_name] = remaining_members
        return replace(self, labels=chosen, background=background)

    def require_structures(self) -> None:
        """Refuse labels of which a case lacks a structure.

        The voxels of the structure would be trained on as background.

        Raises:
            UserError: With the structure, the cases and the cure.
        """
        for label, members in self.labels.items():
            for member in members:
                if self._cases_without(member):
                    raise UserError(self._missing_structure(member, label))

    def _missing_structure(self, member: int | str, label: str) -> str:
        """Write the error message about a structure that cases lack, with three cures."""
        cases = self._cases_without(member)
        num_cases = len(self._compared_names)
        note = f" (a part of {label})" if len(self.labels[label]) > 1 else ""
        # Other incomplete labels would be refused next: only complete ones are proposed.
        complete = [name for name, members in self.labels.items() if self._is_complete(members)]
        choice = f"labels=[{','.join(complete) or '…'}]"
        return (
            f"{first_few(cases, MAX_NAMED)} ({len(cases)} of {num_cases} cases): the "
            f"structure {_display_name(member, label)}{note} is missing, and would be trained on "
            f"as background; add it, leave the label out (medseg import … {choice}), or state that "
            "these patients do not have it (medseg import … missing=absent)."
        )

    def _is_complete(self, members: Sequence[int | str]) -> bool:
        """Whether every case has all structures of a label."""
        return not any(self._cases_without(member) for member in members)

    def state_absence(self) -> "DataSet":
        """Treat structures that a case lacks as absent in the patient, instead of refusing them.

        If a case has none of the structures of a label, the column `trust_<label>` marks the label
        as absent. If it has some of them, these make up the label, and nothing is marked.
        """
        cases = []
        for case in self.cases:
            trust = dict(case.trust)
            names = self._compared_names.get(case.name)
            # Nothing is known of the structures of a case without labels or with a label map.
            if names is not None:
                for label, members in self.labels.items():
                    if names.isdisjoint(map(_compared_name, members)):
                        trust[label] = ABSENT
            cases.append(replace(case, trust=trust))
        return replace(self, cases=tuple(cases))

    @functools.cached_property
    def _compared_names(self) -> dict[str, frozenset[int | str]]:
        """Case name to its structures, in the form of `_compared_name`; empty for label maps."""
        if self.structures is None:
            return {}
        compared_names = {}
        for case, names in self.structures.items():
            compared_names[case] = frozenset(map(_compared_name, names))
        return compared_names

    def _cases_without(self, member: int | str) -> list[str]:
        """List the cases whose files lack a structure; none for label maps."""
        compared_name = _compared_name(member)
        return [case for case, names in self._compared_names.items() if compared_name not in names]

    def closing_items(self) -> list[Item]:
        """List the items of the closing table: everything in the folder, and what became of it."""
        has_folds = any(case.fold is not None for case in self.cases)
        items = list(self.account.items)
        items += [_case_item(case, has_folds=has_folds) for case in self.cases]
        for number, channel in enumerate(self.channels):
            why = f"{channel.modality} {channel.window_hu or channel.normalise}"
            items.append(Item(Kind.channel, str(number), Fate.used, why))
        items += [
            *self._label_items(),
            *self._background_items(),
            *self._value_items(),
            *self._spelling_items(),
            *self._overlap_items(),
        ]
        printable_items = []
        for item in items:
            # Names of files and in JSON may hold line breaks and other control characters.
            name = CONTROL_CHARACTERS.sub("_", item.name)
            why = CONTROL_CHARACTERS.sub("_", item.why)
            printable_items.append(item._replace(name=name, why=why))
        return printable_items

    def _label_items(self) -> list[Item]:
        """List the labels of the task with their structures."""
        items = []
        for label, members in self.labels.items():
            why = _origin(members)
            original_name = self.account.original_names.get(label)
            if original_name is not None:
                why += f", called {original_name} in the data set"
            items.append(Item(Kind.label, label, Fate.used, why))
            if self.structures is not None:
                items += [self._structure_item(member, label, len(members)) for member in members]
        return items

    def _background_items(self) -> list[Item]:
        """List the names that are no label of the task, with their structures."""
        items = []
        why = "no label of the task: background"
        for name, members in self.background.items():
            items.append(Item(Kind.label, f"{name} ({_origin(members)})", Fate.left_out, why))
            if self.structures is not None:
                for member in members:
                    items.append(Item(Kind.structure, str(member), Fate.left_out, why))
        return items

    def _value_items(self) -> list[Item]:
        """List the ignored value, and a note that `prepare` refuses values without a name."""
        items = []
        if self.ignore is not None:
            why = f"value {self.ignore}: its voxels count nowhere"
            items.append(Item(Kind.label, IGNORE, Fate.used, why))
        if self.structures is None:
            why = "prepare reads the voxels and refuses a value that is not named here"
            # A note: with number=0 it adds nothing to the count of its row.
            items.append(Item(Kind.label, "", Fate.used, why, number=0))
        return items

    def _structure_item(self, member: int | str, label: str, num_members: int) -> Item:
        """Say what became of a structure that belongs to a label."""
        num_cases = len(self._compared_names)
        num_present = num_cases - len(self._cases_without(member))
        where = f"in {num_present} of {num_cases} cases"
        if num_present < num_cases:
            # `state_absence` was called, or else `require_structures` would have refused the
            # import. A label of several structures is absent only where all of them are missing.
            where += ", stated as absent in the others"
        name = _display_name(member, label)
        if num_members > 1:
            return Item(Kind.structure, name, Fate.merged, f"into {label}, {where}")
        return Item(Kind.structure, name, Fate.used, where)

    def _spelling_items(self) -> list[Item]:
        """List names in the same file that `plain_name` maps to the same structure."""
        items = []
        why = "several of one name in a file are one structure"
        for case, names in (self.structures or {}).items():
            spellings: dict[int | str, list[str]] = {}
            for name in names:
                spellings.setdefault(_compared_name(name), []).append(str(name))
            for same_names in spellings.values():
                if len(same_names) > 1:
                    title = f"{' = '.join(same_names)} of {case}"
                    items.append(Item(Kind.structure, title, Fate.merged, why))
        return items

    def _overlap_items(self) -> list[Item]:
        """Note which label counts where structures overlap; `prepare` finds out whether they do."""
        if self.structures is None or len(self.labels) < 2:
            return []
        members = itertools.chain.from_iterable(self.labels.values())
        # Values of one label map cannot overlap.
        if not any(isinstance(member, str) for member in members):
            return []
        why = (
            f"where labels overlap, the last of {', '.join(self.labels)} counts; "
            "prepare counts these voxels"
        )
        # A note: with number=0 it adds nothing to the count of its row.
        return [Item(Kind.structure, "", Fate.merged, why, number=0)]

    def task(self) -> dict[str, Any]:
        """Make the groups `task` and `data` of the configuration, in plain types.

        Regions are made if every label has a side; without regions, the task has one stage.
        """
        # New values 1, 2, …, which `data.label_values` maps from those of the files.
        labels = {name: value for value, name in enumerate(self.labels, start=1)}
        task: dict[str, Any] = {
            "name": safe_name(self.name),
            "labels": labels,
            "regions": self._regions(),
            "channels": [_channel_keys(channel) for channel in self.channels],
        }
        label_values: dict[str, Any] = {}
        for name, members in {**self.labels, **self.background}.items():
            label_values[name] = members[0] if len(members) == 1 else members
        if self.ignore is not None:
            # The ignored value of the files is kept if it is greater than the new values of the
            # labels and fits into a byte.
            keeps_value = len(labels) < self.ignore <= MAX_IGNORE_LABEL
            if keeps_value:
                task["ignore_label"] = self.ignore
            else:
                task["ignore_label"] = len(labels) + 1
                label_values[IGNORE] = self.ignore
        return {"task": task, "data": {"label_values": label_values}}

    def _regions(self) -> dict[str, Any] | None:
        """Make a region of each label, name to its keys; None unless every label has a side."""
        regions: dict[str, Any] = {}
        for name in self.labels:
            side, _ = side_of(name)
            if side is None:
                return None
            regions[name] = {"labels": [name], "side": side}
        return regions


def _channel_keys(channel: Channel) -> dict[str, Any]:
    """Write a channel with the keys of the configuration."""
    if channel.window_hu:
        return {"modality": channel.modality, "window_hu": list(channel.window_hu)}
    return {"modality": channel.modality, "normalise": channel.normalise}


def _read_choice(choice: Any) -> dict[str, Any]:
    """Read the value of `labels`: a name, a list of names, or new names with their members.

    Returns:
        Name of each label to its members as the user gave them, not yet checked.

    Raises:
        UserError: If it is something else, or a new name cannot name a label.
    """
    if isinstance(choice, str):
        return {choice: [choice]}
    if isinstance(choice, list | tuple):
        return {str(name): [name] for name in choice}
    if not isinstance(choice, Mapping):
        raise UserError(
            f"labels: expected names, [a,b], or new labels, {{both: [a,b]}}, but got {choice!r}."
        )
    content_of_label = {str(label): content for label, content in choice.items()}
    for label in content_of_label:
        if label == IGNORE:
            raise UserError(
                f"labels: {IGNORE} names voxels that count nowhere; give the label another name."
            )
        name = _allowed_name(label)
        if name != label:
            raise UserError(f"labels: {label!r} {_why_unfit(label)}; write {name}.")
    return content_of_label


def _allowed_name(label: str) -> str:
    """Turn a name into one that a label may have.

    A name may contain digits but not consist of them, since it would be read as a value.
    """
    name = safe_name(label)
    return f"label_{name}" if name.isdigit() else name


def _why_unfit(label: str) -> str:
    """Say why a name is not the one that `_allowed_name` makes of it."""
    if label.isdigit():
        return "cannot name a label, because a name of digits alone is read as a value"
    return "cannot name a label, which has letters, digits, _ and -"


def _choose(choice: Sequence[str] | Mapping[str, Any], all_members: LabelMembers) -> LabelMembers:
    """Find the members of each label that a person has chosen.

    Args:
        choice: Names of labels, or new labels with the names or members that they consist of.
        all_members: Members of each name in the data set.

    Raises:
        UserError: If a name is not in the data set, none is chosen, a label would consist of
            nothing, or a list contains a value or a structure whose name no label may have.
    """
    content_of_label = _read_choice(choice)
    known_members = set(itertools.chain.from_iterable(all_members.values()))
    names = ", ".join(all_members)
    if not content_of_label:
        raise UserError(
            f"labels: no label is chosen from the data set, which has {names}; "
            "give some of these names."
        )
    chosen: LabelMembers = {}
    unknown = []
    for label, content in content_of_label.items():
        members: list[int | str] = []
        for part in _parts_of(label, content):
            # A name stands for all of its members. The configuration reads a name of digits as a
            # number, hence the `str`.
            if str(part) in all_members:
                members += all_members[str(part)]
            # The exact type is checked, since True and 1.0 are equal to the value 1.
            elif type(part) in (int, str) and part in known_members:
                members.append(part)
            else:
                unknown.append(str(part))
        # Two parts may share members, such as a name and one of its values.
        chosen[label] = list(dict.fromkeys(members))
    if unknown:
        raise UserError(
            f"labels: {', '.join(unknown)} is not in the data set, which has {names}; "
            "give some of these names."
        )
    _check_new_names(chosen, all_members)
    return chosen


def _parts_of(label: str, content: Any) -> Sequence[Any]:
    """List the names or values that the user gave for a label.

    Raises:
        UserError: If the list is empty, or holds a list or a mapping.
    """
    parts = content if isinstance(content, list | tuple) else [content]
    if not parts or any(isinstance(part, Mapping | list) for part in parts):
        raise UserError(
            f"labels: {label} needs the names or values that it consists of, {{{label}: [a,b]}}, "
            f"but got {content!r}."
        )
    return parts


def _check_new_names(chosen: LabelMembers, all_members: LabelMembers) -> None:
    """Refuse a label whose name is not in the data set and is not allowed as a new name.

    `_read_choice` has checked the names in a mapping. In a list, such as `labels=[1]`, an item is
    both the name of the label and its member.

    Raises:
        UserError: With an allowed name.
    """
    for label, members in chosen.items():
        name = _allowed_name(label)
        if label not in all_members and name != label:
            members_text = ",".join(map(str, members))
            raise UserError(
                f"labels: {label!r} {_why_unfit(label)}; write {{{name}: [{members_text}]}}."
            )


def _label_of_each_member(labels: LabelMembers) -> dict[int | str, str]:
    """Map each member to its label.

    Raises:
        UserError: If a member would have two labels.
    """
    label_of_member: dict[int | str, str] = {}
    for label, members in labels.items():
        for member in members:
            first_label = label_of_member.setdefault(member, label)
            if first_label != label:
                raise UserError(
                    f"labels: {member} would be {first_label} and {label}; name it in one of them."
                )
    return label_of_member


def _name_of_rest(name: str, taken: Collection[str]) -> str:
    """Choose a name for those members of a label of the data set that no label of the task has.

    Args:
        name: Name of the label in the data set.
        taken: Names that are not free.
    """
    rest_name = f"{name}_rest"
    while rest_name in taken:
        rest_name += "_"
    return rest_name


def check_dataset(data: DataSet, source: Path) -> DataSet:
    """Refuse a data set that cannot be trained on, and close its account.

    Args:
        data: The data set.
        source: Its folder, or the file that lists its cases.

    Returns:
        The data set with normalised names of patients; the account is changed in place.

    Raises:
        UserError: If there is no case, none has labels, two have one name or one scan, a name
            cannot name a file, or a file is missing.
    """
    if not data.cases:
        raise UserError(f"{source}: the {data.format} data set has no case; check the folder.")
    # Cases that `read_case_table` reads have their patients normalised, too.
    cases = tuple(replace(case, patient=normalise_name(case.patient)) for case in data.cases)
    data = replace(data, cases=cases)
    _check_names(data, source)
    files: list[tuple[str, Path]] = []
    for case in cases:
        files += _files_by_role(case).items()
    missing = [path for _, path in files if not path.exists()]
    if missing:
        raise UserError(
            f"{first_few(missing, 1)}: there is no such file, but the data set names it; "
            "copy the data set completely."
        )
    if all(case.labels is None for case in cases):
        raise UserError(
            f"{source}: none of the {len(cases)} cases has labels, so nothing can be trained; "
            "add them."
        )
    _check_images(cases, source)
    _account_shared_files(data)
    _account_files(data, files, source)
    return data


def _files_by_role(case: Case) -> dict[str, Path]:
    """List the files of a case by what they hold: `channel 0`, `channel 1`, …, `labels`."""
    files: dict[str, Path] = {}
    for number, path in enumerate((case.image, *case.more_images)):
        if path is not None:
            files[f"channel {number}"] = path
    if case.labels is not None:
        files["labels"] = case.labels
    return files


def _account_files(data: DataSet, files: Sequence[tuple[str, Path]], source: Path) -> None:
    """Enter the files of the cases in the account, and all other files in the same folders.

    Args:
        data: The data set, to whose account they are added.
        files: Role and path of the images and labels of all cases, as in `_files_by_role`.
        source: Folder of the data set, or the file that lists its cases.

    Raises:
        UserError: If the file with the voxels that belong to a header is missing.
    """
    root = Path(os.path.realpath(source if source.is_dir() else source.parent))
    for role, path in files:
        try:
            voxel_files = _voxel_files_of_header(path)
        except (OSError, UserError) as error:
            # Not claimed, so that the account lists it as left out, with this reason.
            data.account.explain(path, f"damaged, prepare will refuse its case ({error})")
            continue
        for file in voxel_files:
            if not file.exists():
                raise UserError(
                    f"{file} does not exist, but {path} holds its header; copy both files."
                )
        # `import_dicom` has claimed the files of each series, since several may share a folder.
        is_claimed = data.format == DICOM and path.is_dir()
        if not is_claimed:
            for file in files_in_role(role, path):
                data.account.claim(file)
        real = os.path.realpath(path)
        if not Path(real).is_relative_to(root):
            data.account.use(Kind.file, real, f"outside of {root}, and read there")
    if source.is_dir():
        data.account.close(source)
        return
    # A datalist may lie anywhere, beside files of all kinds: only the folders of its images and
    # labels are searched.
    data.account.claim(source)
    for folder in sorted({path.parent for _, path in files}):
        data.account.close(folder, is_deep=False)


def _check_names(data: DataSet, source: Path) -> None:
    """Refuse cases of one name, and names that cannot name a file.

    Names that only differ in case are entered in the account.
    """
    images: dict[str, Path] = {}
    spellings: dict[str, list[str]] = {}
    for case in data.cases:
        check_case_name(case.name, str(case.image))
        if case.name in images:
            raise UserError(
                f"{source}: {images[case.name]} and {case.image} would both be the case "
                f"{case.name!r}; rename one of them."
            )
        images[case.name] = case.image
        spellings.setdefault(case.name.casefold(), []).append(case.name)
    why = "the names differ in upper and lower case only: some systems take their files for one"
    for names in spellings.values():
        if len(names) > 1:
            data.account.use(Kind.case, " and ".join(names), why)


def _check_images(cases: Sequence[Case], source: Path) -> None:
    """Refuse one scan as two cases: it would count twice, or be trained on and validated."""
    owners: dict[tuple[str, str | None], Case] = {}
    for case in cases:
        key = os.path.realpath(case.image), case.series
        # The first case that names an image owns it.
        owner = owners.setdefault(key, case)
        if owner is not case:
            raise UserError(
                f"{source}: {case.image} is the image of the case {owner.name!r} and of "
                f"{case.name!r}; keep one of the two."
            )


def _account_shared_files(data: DataSet) -> None:
    """Enter files that are read for several cases or channels, which is often a mistake."""
    # Key: the file after resolving links, and the DICOM series, since several may share a folder.
    uses: dict[tuple[str, str | None], list[str]] = {}
    for case in data.cases:
        for role, path in _files_by_role(case).items():
            series = case.series if path == case.image else None
            key = os.path.realpath(path), series
            uses.setdefault(key, []).append(f"{role} of {case.name}")
    for (real_path, _), roles in uses.items():
        if len(roles) == 1:
            continue
        roles_text = " and ".join(roles)
        if len(roles) > MAX_NAMED:
            roles_text = first_few(roles, MAX_NAMED)
        why = f"one file is {roles_text}; check that this is meant"
        data.account.merge(Kind.file, real_path, why)


def _voxel_files_of_header(path: Path) -> tuple[Path, ...]:
    """List the files with voxels that a header names; empty for an image of another format.

    Files that do not exist are in the list too: `files_of` leaves them out.

    Raises:
        OSError: If the header cannot be opened.
        UserError: If the header is damaged.
    """
    if path.is_dir() or path.suffix.lower() not in (".mhd", ".nhdr"):
        return ()
    from medseg.io.simpleitk import read_header  # SimpleITK takes 50 MiB

    return read_header(path).files


def _case_item(case: Case, *, has_folds: bool) -> Item:
    """Say what a case is used for.

    Args:
        case: The case.
        has_folds: Whether any case of the data set has a number in the column `fold`.
    """
    use = _use_of(case, has_folds=has_folds)
    if use is not None:
        return Item(Kind.case, case.name, Fate.used, use)
    if case.fold_sides:
        why = "in no list of any fold: neither trained on nor validated"
    else:
        why = "no labels: not trained on"
    return Item(Kind.case, case.name, Fate.left_out, why)


def _use_of(case: Case, *, has_folds: bool) -> str | None:
    """Say in which part of a training a case is used; None if it is not used.

    A mark in the column `split` takes precedence over the folds.
    """
    suffix = "" if case.labels is not None else ", without labels"
    if case.split is not None:
        name_of_split = {"train": "training", "val": "validation", "test": "test"}
        return name_of_split[case.split] + suffix
    if case.fold_sides:
        folds = []
        for number, side in enumerate(case.fold_sides):
            if side is not None:
                folds.append(f"fold {number}: {side}")
        if not folds:
            return None
        return "; ".join(folds) + suffix
    if case.labels is None:
        return None
    if case.fold is not None:
        return f"validated in fold {case.fold}, trained on in the others"
    if has_folds:
        return "trained on in every fold"
    return "training and validation"


@functools.cache
def _compared_name(member: int | str) -> int | str:
    """Reduce the name of a structure to the form in which names are compared; a value stays."""
    return plain_name(member) if isinstance(member, str) else member


def _display_name(member: int | str, label: str) -> str:
    """Name a structure in messages; for a value, the name of its label with the value."""
    return member if isinstance(member, str) else f"{label} (value {member})"


def _origin(members: Sequence[int | str]) -> str:
    """Describe the members of a label, such as `values 1, 2` or `structure Liver_L`."""
    kind = "value" if all(isinstance(member, int) for member in members) else "structure"
    ending = "s" if len(members) > 1 else ""
    return f"{kind}{ending} {', '.join(map(str, members))}"


def side_of(name: str) -> tuple[str | None, str]:
    """Find the side that a name begins or ends with, and the name of the organ without it.

    Example:
        >>> [side_of(name) for name in ("left_femur", "Femur_R", "kidney_left", "heart", "l")]
        [('left', 'femur'), ('right', 'Femur'), ('left', 'kidney'), (None, 'heart'), (None, 'l')]
    """
    words = WORD_BREAK.split(name)
    if len(words) == 1:
        return None, name
    first_side = SIDE_OF_WORD.get(words[0].casefold())
    if first_side is not None:
        return first_side, "_".join(words[1:])
    last_side = SIDE_OF_WORD.get(words[-1].casefold())
    if last_side is not None:
        return last_side, "_".join(words[:-1])
    return None, name


def safe_name(name: str) -> str:
    """Replace characters that file names or keys cannot have by `_`."""
    # Of a letter in two characters, `\w` would match the first alone.
    text = CONTROL_CHARACTERS.sub("_", normalise_name(name))
    safe_text = re.sub(r"[^\w-]+", "_", text).strip("_-")
    # Nothing is left of a name without letters and digits.
    return safe_text or "label"


def plain_name(name: str) -> str:
    """Reduce a name to the form in which names are compared.

    The result has no upper case and no punctuation but `_`; the side comes first, written out.

    Example:
        >>> [plain_name(name) for name in ("Femur_L", "left femur", "femur-left", "Heart")]
        ['left_femur', 'left_femur', 'left_femur', 'heart']
        >>> [plain_name(name) for name in ("Spinal-Cord", "spinal cord")]
        ['spinal_cord', 'spinal_cord']
    """
    side, organ = side_of(safe_name(name))
    # `safe_name` keeps hyphens, since labels may have them; here they become `_`.
    organ = "_".join(WORD_BREAK.split(organ)).casefold()
    if side is None:
        return organ
    return f"{side}_{organ}"


def label_names(names: Iterable[str]) -> dict[str, str]:
    """Turn the names of a data set into names of labels: words joined by `_`, sides written out.

    A name of digits gets `label_` in front.

    Returns:
        Name in the data set to name of the label.

    Raises:
        UserError: If two names become one.

    Example:
        >>> label_names(["Femur_L", "Femur_R", "left atrium"])
        {'Femur_L': 'left_femur', 'Femur_R': 'right_femur', 'left atrium': 'left_atrium'}
    """
    safe_names = {name: _allowed_name(name) for name in names}
    # Without regard to case: `Femur_L` and `femur_R` are a pair.
    sides_of_organ: dict[str, set[str | None]] = {}
    for label in safe_names.values():
        side, organ = side_of(label)
        sides_of_organ.setdefault(organ.casefold(), set()).add(side)
    labels = {}
    for name, label in safe_names.items():
        labels[name] = label
        side, organ = side_of(label)
        if side is None:
            continue
        # Without a partner on the other side, the `l` of `vessel_l` may be a mere letter.
        is_pair = {"left", "right"} <= sides_of_organ[organ.casefold()]
        is_written_out = side in WORD_BREAK.split(label.casefold())
        if is_pair and not is_written_out:
            labels[name] = f"{side}_{organ.casefold()}"
    first_names: dict[str, str] = {}
    for name, label in labels.items():
        first_name = first_names.setdefault(label.casefold(), name)
        if first_name != name:
            raise UserError(
                f"the labels {first_name!r} and {name!r} would both be {label}; "
                "rename one of them in the data set."
            )
    return labels


def labels_of_structures(names: Iterable[str], account: Account) -> LabelMembers:
    """Make one label of each structure.

    Spellings that are equal by `plain_name` are one structure.

    Args:
        names: Names of the structures of all cases in the order of the labels; they may repeat.
        account: Gets the other spellings.

    Returns:
        Labels, each with the first spelling of its structure, which stands for the others.
    """
    first_spellings: dict[str, str] = {}
    for name in dict.fromkeys(names):
        spelling = first_spellings.setdefault(plain_name(name), name)
        if spelling != name:
            account.merge(Kind.structure, name, f"another spelling of {spelling}")
    label_of = label_names(first_spellings.values())
    return {label: [name] for name, label in label_of.items()}


def channel_of(name: str) -> Channel:
    """Guess modality and normalisation of a channel from its name in a data set."""
    words = set(re.split(r"[^a-z0-9]+", name.casefold()))
    if "ct" in words:
        return Channel("ct", WINDOW_HU)
    modality = "mr" if words & MR_WORDS else "other"
    return Channel(modality, window_hu=None, normalise="zscore")


def require_pairs(
    images: Collection[str], labels: Collection[str], images_folder: Path, labels_folder: Path
) -> None:
    """Refuse images without labels and labels without images.

    Args:
        images: Names of the cases that have images.
        labels: Names of the cases that have labels.
        images_folder: Folder of the images, for messages.
        labels_folder: Folder of the labels.

    Raises:
        UserError: With the first name that has no partner.
    """
    without_labels = sorted(set(images) - set(labels))
    if without_labels:
        if normalise_name(without_labels[0]) in map(normalise_name, labels):
            raise UserError(
                f"{labels_folder}: it writes a letter of {without_labels[0]} in another way than "
                f"{images_folder.name}, as one character or as two (Unicode NFC and NFD), so that "
                "the names differ although they look alike; rename one of the files."
            )
        raise UserError(
            f"{labels_folder}: no labels for {first_few(without_labels, 1)}, which "
            f"{images_folder.name} holds; add them, or move the image to another folder."
        )
    without_image = sorted(set(labels) - set(images))
    if without_image:
        raise UserError(
            f"{images_folder}: no image for {first_few(without_image, 1)}, which "
            f"{labels_folder.name} holds; add it, or move the labels to another folder."
        )
