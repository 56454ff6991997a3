"""Page of a batch (`index.html`): the previews of all scans, worst first, with a filter.

It refers to the pictures and viewers beside it, and needs neither a network nor a server.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from medseg.io.atomic import replace_text
from medseg.io.label_table import Structure
from medseg.wording import format_ml

# Status of a scan in `summary.csv` to its words, the worst status first: scans are sorted in this
# order.
STATUS_WORDS = {
    "failed": "failed",
    "not_hu": "values are not HU",
    "warnings": "warnings",
    "ok": "no warnings",
}
# Status to its class in the style sheet.
STATUS_STYLES = {"failed": "bad", "not_hu": "bad", "warnings": "open", "ok": "good"}
# The order of the scans in words, for the page; see `Card.sort_key`.
ORDER = (
    "failed scans, then scans whose values are not HU, then those with warnings; within these the "
    "least agreement of the two stages first, then the most warnings"
)


@dataclass(frozen=True)
class Card:
    """A scan on the page.

    Attributes:
        name: Name of the case.
        status: Status in `summary.csv`, a key of `STATUS_WORDS`.
        patient: Patient ID, or "".
        date: Date of the study, or "".
        volumes_ml: First the volume of all labels together, then the volume of each label, by
            name; the volumes of a failed scan are None.
        warnings: Sentences that need attention.
        information: Sentences that need no action.
        codes: Codes of the warnings, each once.
        least_agreement: Smallest Dice coefficient between the two stages over the regions; None
            where there is none.
        bound: Sentence about the lower bound on Dice, or "".
        preview: Name of the picture beside the page, or "".
        viewer: Name of the viewer beside the page, or "".
    """

    name: str
    status: str
    patient: str
    date: str
    volumes_ml: Mapping[str, float | None]
    warnings: Sequence[str]
    information: Sequence[str]
    codes: Sequence[str]
    least_agreement: float | None
    bound: str
    preview: str
    viewer: str

    @property
    def total_ml(self) -> float | None:
        """Volume of all labels together; None for a failed scan."""
        # `volumes_ml` has the volume of all labels first.
        return next(iter(self.volumes_ml.values()))

    @property
    def status_words(self) -> str:
        """The status in words."""
        return STATUS_WORDS.get(self.status, self.status)

    @property
    def status_style(self) -> str:
        """Class of the status in the style sheet."""
        return STATUS_STYLES.get(self.status, "open")

    @property
    def link(self) -> str:
        """Address of the viewer or, without one, of the picture; "" without both."""
        return self.viewer_link or self.preview_link

    @property
    def viewer_link(self) -> str:
        """Address of the viewer; "" without one."""
        return _link(self.viewer)

    @property
    def preview_link(self) -> str:
        """Address of the picture; "" without one."""
        return _link(self.preview)

    @property
    def search_text(self) -> str:
        """Text that a search looks through, in lower case."""
        texts = (self.name, self.patient, self.date, *self.warnings, *self.information)
        return " ".join(texts).lower()

    @property
    def sort_key(self) -> tuple[int, float, int, str]:
        """Key that sorts the worst scan to the front, see `ORDER`."""
        statuses = list(STATUS_WORDS)
        # Unknown statuses come last.
        status_rank = statuses.index(self.status) if self.status in statuses else len(statuses)
        # An agreement is at least 0: a scan without one comes first.
        agreement = -1.0 if self.least_agreement is None else self.least_agreement
        return status_rank, agreement, -len(self.warnings), self.name


def worst_first(cards: Sequence[Card]) -> list[Card]:
    """Sort scans, the worst first."""
    return sorted(cards, key=lambda card: card.sort_key)


def write_contact_sheet(path: Path, cards: Sequence[Card], structures: Sequence[Structure]) -> None:
    """Write the page, whole or not at all; the name of its folder is its title.

    Args:
        path: HTML file, beside the files that the cards name.
        cards: The scans in the order of the table.
        structures: Names and colours of the labels.

    Raises:
        UserError: If the file cannot be written.
    """
    # Imported here, since Jinja2 takes 10 MiB of memory.
    from medseg.report.html import render_page

    num_by_status = Counter(card.status_words for card in cards)
    num_by_code: Counter[str] = Counter()
    for card in cards:
        num_by_code.update(card.codes)
    # The statuses that occur, the worst first.
    statuses = [words for words in STATUS_WORDS.values() if num_by_status[words]]
    tiles = [("scans", len(cards))]
    tiles += [(words, num_by_status[words]) for words in statuses]
    page = render_page(
        "index.html",
        kind="results",
        title=path.resolve().parent.name,
        tiles=tiles,
        charts={},
        folder=str(path.resolve().parent),
        cards=worst_first(cards),
        order=ORDER,
        statuses={words: num_by_status[words] for words in statuses},
        codes=dict(num_by_code.most_common()),
        colours={entry.name: entry.colour for entry in structures},
        has_pictures=any(card.preview for card in cards),
        format_ml=format_ml,
    )
    replace_text(path, page)


def _link(file_name: str) -> str:
    """Address of a file beside the page; "" without a name."""
    if not file_name:
        return ""
    # `quote` escapes `#` and `?` in a name. Without "./" the letters before a colon would be read
    # as a protocol. A name that is not UTF-8 has surrogates in Python.
    return f"./{quote(file_name, errors='surrogateescape')}"
