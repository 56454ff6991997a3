"""One thing that the audit found, and the list of all that it can find."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from medseg.errors import UserError


class Severity(Enum):
    """An error stops the case, a warning is told, a note is only written down."""

    error = "error"
    warning = "warning"
    note = "note"


CODES = {
    "reading": "the reader had to leave out, guess or repair something",
    "hu_offset": "all values lie about 1024 too high or too low",
    "hu_range": "the values are windowed, normalised or of another modality",
    "no_air": "nothing as dark as air or lung is in the image",
    "padding": "a constant stands outside the scanner's field of view",
    "clipped": "many voxels share the lowest or the highest value",
    "label_shape": "the label map has another number of voxels than the image",
    "label_grid": "the label map lies elsewhere than the image",
    "misplaced_labels": "the labels fit the image when mirrored or turned, and do not as they are",
    "unknown_values": "the label map holds values that data.label_values does not name",
    "empty_labels": "the label map holds nothing at all",
    "swapped_sides": "the left region lies to the right of the right one",
    "doubtful_side": "a region that is alone lies on the other side of the body",
    "missing_region": "a region has no voxel",
    "touching_regions": "the regions of the two sides share a wide face",
    "cut_region": "a region reaches the border of the scan or of its field of view",
    "vanished_region": "a region is too small to be seen at a stage's spacing",
    "spacing_outlier": "the voxels are much larger or smaller than those of the other cases",
    "duplicate_image": "another case has the same voxels",
}
"""Code of each finding and what it means."""

NEVER_IGNORED = frozenset({"label_shape"})
"""Codes without which there is no way to go on."""


@dataclass(frozen=True)
class Finding:
    """One thing that the audit found.

    Attributes:
        code: One of `CODES`.
        severity: What follows from it.
        message: What was found, with its numbers: a clause without a capital and without a full stop.
        cure: What a person can do about it, likewise; empty where there is nothing.
    """

    code: str
    severity: Severity
    message: str
    cure: str

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise ValueError(f"no such finding: {self.code}")

    def __str__(self) -> str:
        return f"{self.message}; {self.cure}" if self.cure else self.message

    def to_dict(self) -> dict[str, str]:
        """Plain types for a JSON file."""
        return asdict(self) | {"severity": self.severity.value}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Finding:
        """Read what `to_dict` wrote."""
        return cls(data["code"], Severity(data["severity"]), data["message"], data["cure"])


def error(code: str, message: str, cure: str) -> Finding:
    """Make a finding that stops the case."""
    return Finding(code, Severity.error, message, cure)


def warning(code: str, message: str, cure: str) -> Finding:
    """Make a finding that is told."""
    return Finding(code, Severity.warning, message, cure)


def note(code: str, message: str, cure: str) -> Finding:
    """Make a finding that is only written down."""
    return Finding(code, Severity.note, message, cure)


def check_ignored(codes: Iterable[str], where: str) -> frozenset[str]:
    """Make sure that findings which are to be ignored exist and can be ignored.

    Args:
        codes: What a person wrote.
        where: The key or the cell, for the message.

    Raises:
        UserError: If not.
    """
    for code in codes:
        if code in NEVER_IGNORED:
            raise UserError(f"{where}: {code} cannot be ignored, since {CODES[code]}; correct the file.")
        if code not in CODES:
            close = difflib.get_close_matches(code, CODES, n=2)
            hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(CODES)}."
            raise UserError(f"{where}: there is no finding {code!r}; {hint}")
    return frozenset(codes)
