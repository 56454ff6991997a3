"""Cases of one origin: their split, their label convention, and how often they are drawn."""

from __future__ import annotations

from dataclasses import dataclass

from medseg.data.splits import Split


@dataclass(frozen=True)
class CaseSource:
    """Cases that share a label convention.

    Attributes:
        split: The cases of each side.
        label_values: Value in the reference files to label name.
        share: Share of the training samples that these cases give; shares of all sources add up to 1.
    """

    split: Split
    label_values: dict[int, str]
    share: float
