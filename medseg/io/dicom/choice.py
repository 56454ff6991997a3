"""Parser of the argument `series=`: `<patient or study>:<series>`, both parts optional."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from medseg.io.dicom.frames import Series


class SeriesChoice(NamedTuple):
    """A value of `series=`.

    Attributes:
        scope: Patient, study or both, see `Series.is_in`; "" for any.
        name: Series Instance UID or Series Number, with `/<part>` for a part of a series; "" for
            the only series.

    Example:
        >>> parse_series("P1:20240131:3/2")
        SeriesChoice(scope='P1:20240131', name='3/2')
    """

    scope: str
    name: str

    def is_scope_of(self, series: Series) -> bool:
        """Whether a series is one of the chosen patient or study."""
        return not self.scope or series.is_in(self.scope)

    def selects(self, series: Series, part: int = 0) -> bool:
        """Whether the value selects a series, or a part of a series.

        Args:
            series: Series of a stack or of a file.
            part: Number of the part, from 1; 0: any part of the series.
        """
        uid_or_number, _, part_name = self.name.partition("/")
        if part and part_name not in ("", str(part)):
            return False
        is_series = uid_or_number in ("", series.uid, series.number)
        return is_series and self.is_scope_of(series)

    def is_uid_of(self, series: Series) -> bool:
        """Whether the value names a series by its UID."""
        uid_or_number = self.name.partition("/")[0]
        return bool(series.uid) and uid_or_number == series.uid

    def within(self, scope: str) -> str:
        """Write a value of `series=` for the same series in another scope."""
        return f"{scope}:{self.name}"


def parse_series(series: str | None) -> SeriesChoice:
    """Divide a value of `series=` into scope and series; None selects any series."""
    # At the last colon, since a scope of patient and study contains a colon too.
    scope, _, name = (series or "").rpartition(":")
    return SeriesChoice(scope, name)
