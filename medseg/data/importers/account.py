"""Account of an import: everything that was found, and whether it was used, merged or left out."""

import os
from collections.abc import Collection, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from medseg.io.inputs import leads_nowhere, volume_suffix

# Most names in a row of the closing table, which `medseg import` prints at its end.
MAX_NAMES = 3
# Key of a row of the closing table to the heading of its column, the same word.
COLUMNS = {"what": "what", "number": "number", "became": "became", "why": "why", "names": "names"}


class Fate(StrEnum):
    """Whether something that an importer has found was used, merged or left out."""

    used = "used"
    merged = "merged"
    left_out = "left out"


class Kind(StrEnum):
    """What an importer finds, in the order of the closing table."""

    file = "file"
    key = "key"
    list = "list"
    row = "row"
    series = "series"
    channel = "channel"
    case = "case"
    label = "label"
    structure = "structure"


class Item(NamedTuple):
    """One thing that an importer has found; its fields are the columns of the file of items.

    Attributes:
        kind: Kind of the thing.
        name: Name of the thing in the data set.
        fate: What became of the thing.
        why: The reason, a clause; "" where there is nothing to add.
        number: How many things the item stands for; 0 for a note about all things of a kind.
    """

    kind: Kind
    name: str
    fate: Fate
    why: str = ""
    number: int = 1


class Account:
    """What an importer has found, written while it reads.

    Files are not entered one by one: the importer claims the files that it uses, and `close` enters
    all others as left out.

    Attributes:
        items: The entries.
        original_names: Label to its name in the data set, where the two differ.
    """

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.original_names: dict[str, str] = {}
        # Absolute paths of claimed files and folders, in which links are not resolved.
        self._claimed: set[str] = set()
        # Absolute path of a file or folder to the reason why it is left out.
        self._reasons: dict[str, str] = {}

    def use(self, kind: Kind, name: str, why: str = "") -> None:
        """Enter something that was used."""
        self.items.append(Item(kind, name, Fate.used, why))

    def merge(self, kind: Kind, name: str, why: str) -> None:
        """Enter something that was merged with something else."""
        self.items.append(Item(kind, name, Fate.merged, why))

    def leave_out(self, kind: Kind, name: str, why: str) -> None:
        """Enter something that was not used."""
        self.items.append(Item(kind, name, Fate.left_out, why))

    def leave_out_keys(self, keys: Iterable[str], used_keys: Collection[str], place: str) -> None:
        """Enter the keys of a mapping or the columns of a table that are not read.

        Args:
            keys: All keys.
            used_keys: Those that are read.
            place: Where the keys stand, for the reason.
        """
        for key in keys:
            if key not in used_keys:
                self.leave_out(Kind.key, str(key), f"medseg does not read it in {place}")

    def claim(self, path: Path) -> None:
        """State that a file, or all files of a folder, are used."""
        self._claimed.add(os.path.abspath(path))

    def explain(self, path: Path, why: str) -> None:
        """Give the reason why a file, or all files of a folder, are left out unless claimed."""
        self._reasons[os.path.abspath(path)] = why

    def close(self, root: Path, *, is_deep: bool = True) -> None:
        """Enter the files of a folder: the claimed ones in total, each other one with its reason.

        Args:
            root: Folder of the data set, or of some of its files.
            is_deep: Whether to enter the files of the folders below, too.
        """
        num_used = 0
        files = self._walk(os.path.abspath(root), is_claimed=False, why="", is_deep=is_deep)
        for path, is_claimed, given_why in files:
            if is_claimed:
                num_used += 1
                continue
            why = given_why or _reason_of(Path(path))
            self.leave_out(Kind.file, os.path.relpath(path, root), why)
        if num_used:
            self.items.append(Item(Kind.file, "", Fate.used, "read for the cases", num_used))

    def _walk(
        self, path: str, *, is_claimed: bool, why: str, is_deep: bool
    ) -> Iterator[tuple[str, bool, str]]:
        """Find the files at a path.

        Args:
            path: A file or a folder.
            is_claimed: Whether a folder around it is claimed.
            why: Reason that was given for a folder around it; "" if there is none.
            is_deep: Whether to search the folders below, too.

        Yields:
            Path of each file, whether it is claimed, and the reason that was given for it or the
            nearest folder around it.
        """
        is_claimed = is_claimed or path in self._claimed
        why = self._reasons.get(path, why)
        # A link is followed only to claimed files, else it counts as a file: links may form a
        # cycle.
        is_unfollowed_link = os.path.islink(path) and not self._claims_below(path)
        if is_unfollowed_link or not os.path.isdir(path):
            yield path, is_claimed, why
            return
        try:
            names = sorted(os.listdir(path))
        except OSError:
            yield path, False, "folder that cannot be read"
            return
        for name in names:
            inner = os.path.join(path, name)
            if is_deep or not os.path.isdir(inner):
                yield from self._walk(inner, is_claimed=is_claimed, why=why, is_deep=is_deep)

    def _claims_below(self, path: str) -> bool:
        """Whether something in a folder is claimed; slow, hence only called for links."""
        return any(claimed.startswith(path + os.sep) for claimed in self._claimed)


def _reason_of(path: Path) -> str:
    """Say why a file that no importer claimed or explained is left out."""
    if path.name.startswith("."):
        return "hidden file"
    if leads_nowhere(path):
        return "link that leads nowhere"
    if volume_suffix(path) is None:
        return "not an image"
    return "nothing in the data set refers to it"


def closing_rows(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Group items of one kind, fate and reason to rows of the closing table.

    Returns:
        Rows with the keys of `COLUMNS`, sorted by kind and fate in the order of these classes;
        `names` gives the first names of each group, `number` is None for a note.
    """
    groups: dict[tuple[Kind, Fate, str], list[Item]] = {}
    for item in items:
        groups.setdefault((item.kind, item.fate, item.why), []).append(item)
    kinds = list(Kind)
    fates = list(Fate)
    keys = sorted(groups, key=lambda key: (kinds.index(key[0]), fates.index(key[1])))
    rows = []
    for kind, fate, why in keys:
        group = groups[kind, fate, why]
        number = sum(item.number for item in group)
        # Each name once, in the order of the items.
        names = list(dict.fromkeys(item.name for item in group if item.name))
        first_names = ", ".join(names[:MAX_NAMES])
        if len(names) > MAX_NAMES:
            first_names += ", …"
        row = {
            "what": kind.value,
            "number": None if number == 0 else number,
            "became": fate.value,
            "why": why,
            "names": first_names,
        }
        rows.append(row)
    return rows


def left_out_sentences(items: Iterable[Item]) -> list[str]:
    """Make a sentence of each row of the closing table about what was left out or merged."""
    rows = closing_rows(item for item in items if item.fate is not Fate.used)
    return [_sentence(row) for row in rows]


def _sentence(row: dict[str, Any]) -> str:
    """Write a row of the closing table as a sentence."""
    count = f" ({row['number']})" if row["number"] else ""
    names = f": {row['names']}{count}" if row["names"] else ""
    return f"{row['what']} {row['became']}{names}: {row['why']}"
