"""Segmentation task: label values, regions of interest, their sides and the HU window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_SEPARATORS = "_- "


@dataclass(frozen=True)
class Region:
    """One anatomical region that the fine stage refines in a crop of its own.

    Attributes:
        name: Name in the scores, e.g. `left_lung`.
        labels: Names of the labels that make the region, in the order of the fine network's classes 1, 2, ….
        side: Side of the patient on which it must lie (`left`, `right`); None if it has no side.
    """

    name: str
    labels: tuple[str, ...]
    side: str | None = None


@dataclass(frozen=True)
class Task:
    """Labels and regions of a segmentation task.

    Attributes:
        name: Name of the task, e.g. `lungs`.
        labels: Label name to value in every label map that medseg writes; values are 1, 2, … without a gap.
        regions: Regions of interest, one fine crop each.
        window_hu: Lower and upper HU that are mapped to [-1, 1].
        least_hu: A connected component with a lower median HU is no organ; None accepts every component.
    """

    name: str
    labels: dict[str, int]
    regions: tuple[Region, ...]
    window_hu: tuple[float, float]
    least_hu: float | None = None

    @property
    def num_classes(self) -> int:
        """Classes of the coarse network: the labels and the background."""
        return 1 + len(self.labels)

    @property
    def num_region_classes(self) -> int:
        """Classes of the fine network: the labels of the largest region and the background."""
        return 1 + max(len(region.labels) for region in self.regions)

    def region_values(self, region: Region) -> tuple[int, ...]:
        """Label values of a region, in the order of the fine network's classes."""
        return tuple(self.labels[name] for name in region.labels)

    def to_dict(self) -> dict[str, Any]:
        """Plain types for a checkpoint or a JSON file."""
        return {
            "name": self.name,
            "labels": dict(self.labels),
            "regions": [{"name": r.name, "labels": list(r.labels), "side": r.side} for r in self.regions],
            "window_hu": list(self.window_hu),
            "least_hu": self.least_hu,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Task:
        """Read what `to_dict` wrote."""
        regions = tuple(Region(r["name"], tuple(r["labels"]), r["side"]) for r in data["regions"])
        low_hu, high_hu = data["window_hu"]
        return cls(data["name"], dict(data["labels"]), regions, (float(low_hu), float(high_hu)), data.get("least_hu"))


def is_side_pair(one: Region, other: Region) -> bool:
    """Whether two regions are the left and the right of one organ: same name apart from the side."""
    names = {region.name.replace(str(region.side), "").strip(_SEPARATORS) for region in (one, other)}
    return {one.side, other.side} == {"left", "right"} and len(names) == 1
