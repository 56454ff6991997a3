"""Identity of a scan: patient, study and series as its DICOM headers name them."""

import re
from typing import NamedTuple


class Identity(NamedTuple):
    """Patient, study and series of a scan; "" where unknown, as in all formats but DICOM.

    Attributes:
        patient: Patient ID.
        study_date: Study Date, written as `2024-01-31`.
        series_number: Series Number.
        series_description: Series Description.
    """

    patient: str = ""
    study_date: str = ""
    series_number: str = ""
    series_description: str = ""

    def __str__(self) -> str:
        """Name patient and date in messages, as `patient P1, 2024-01-31`.

        An unknown part is left out; "" if both are unknown.
        """
        texts = []
        if self.patient:
            texts.append(f"patient {self.patient}")
        if self.study_date:
            texts.append(self.study_date)
        return ", ".join(texts)

    def added_to(self, message: str) -> str:
        """Put patient and date at the end of a message that refuses a scan.

        If neither is known, the message is returned as it is.

        Example:
            >>> Identity("P1", "2024-01-31").added_to("ct: it is empty; export it again.")
            'ct: it is empty; export it again (patient P1, 2024-01-31).'
        """
        name = str(self)
        if not name:
            return message
        return f"{message.rstrip('.')} ({name})."


# Identity of a scan that is not a DICOM series.
UNKNOWN = Identity()


def written_date(date: str) -> str:
    """Write a date of DICOM, `20240131`, as `2024-01-31`; other texts stay.

    Example:
        >>> written_date("20240131")
        '2024-01-31'
    """
    if re.fullmatch(r"[0-9]{8}", date) is None:
        return date
    return f"{date[:4]}-{date[4:6]}-{date[6:]}"
