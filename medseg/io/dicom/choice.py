"""Parser of `series=`: a patient or study, and a series in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from medseg.io.dicom.frames import Series


class SeriesChoice(NamedTuple):
    """A value of `series=`.

    Attributes:
        scope: Patient, study or both, see `Series.is_in`; "" for any.
        name: Series Instance UID or Series Number, with `/<part>` for a part of a series; "" for
            the only one.

    Example:
        >>> parse_series("P1:20240131:3/2")
        SeriesChoice(scope='P1:20240131', name='3/2')
    """

    scope: str
    name: str

    def is_scope_of(self, series: Series) -> bool:
        """Whether a series is one of the chosen patient or study."""
        return not self.scope or series.is_in(self.scope)

    def is_meant(self, series: Series, part: int = 0) -> bool:
        """Whether it names a series and, if it names a part, this part; 0 stands for any part."""
        uid_or_number, _, part_name = self.name.partition("/")
        is_series = uid_or_number in ("", series.uid, series.number)
        is_part = not part or part_name in ("", str(part))
        return is_series and is_part and self.is_scope_of(series)

    def is_uid_of(self, series: Series) -> bool:
        """Whether it names a series by its UID."""
        return bool(series.uid) and self.name.partition("/")[0] == series.uid

    def within(self, scope: str) -> str:
        """Write the value that names the same series of one study."""
        return f"{scope}:{self.name}"


def parse_series(series: str | None) -> SeriesChoice:
    """Divide a value of `series=` into its scope and its series; None chooses any."""
    scope, _, name = (series or "").rpartition(":")
    return SeriesChoice(scope, name)
