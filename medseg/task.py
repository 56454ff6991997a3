"""Segmentation task: labels, regions of interest, input channels and plausible volumes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

AIR_HU = -1024
"""HU of air outside the patient, and of voxels without a value."""

IGNORE = "ignore"
"""Name of the ignore label in `data.label_values`."""

LabelValues = dict[int | str, str]
"""How a reference names its labels: value in a label map, or name of a structure (the file of a
binary mask, an object of DICOM), to label name."""

SIDES = ("left", "right")
# Short words for the sides, each with the side that it means and the word for the other side.
SHORT_SIDES = {
    "l": ("left", "r"),
    "r": ("right", "l"),
    "lt": ("left", "rt"),
    "rt": ("right", "lt"),
}


@dataclass(frozen=True)
class Region:
    """One anatomical region that the fine stage refines in a crop of its own.

    Attributes:
        name: Name in the scores, e.g. `left_kidney`.
        labels: Names of the labels that make the region, in the order of the fine network's classes
            1, 2, ….
        side: Side of the patient on which the region lies (`left`, `right`); None for no side.
    """

    name: str
    labels: tuple[str, ...]
    side: str | None = None


@dataclass(frozen=True)
class Channel:
    """One channel of the input.

    Attributes:
        modality: `ct` (values in HU, which the audit checks), `mr` or `other`.
        window_hu: Lower and upper HU that are mapped to [-1, 1]; None with another normalisation
            than `window`.
        normalise: `window`, or by the values of each case: `zscore` or `percentile`.
    """

    modality: str = "ct"
    window_hu: tuple[float, float] | None = None
    normalise: str = "window"

    @property
    def outside(self) -> int:
        """Value outside the field of view of the channel: air, or the background of MR."""
        return AIR_HU if self.modality == "ct" else 0


@dataclass(frozen=True)
class Task:
    """Labels, regions and channels of a segmentation task.

    Attributes:
        name: Name of the task, e.g. `kidneys`.
        labels: Label name to value in every label map that medseg writes; values are 1, 2, …
            without a gap. The class puts them into the order of their values.
        regions: Regions of interest, one fine crop each; empty for a task of one stage, which
            segments all labels at once.
        channels: Channels of the input, at least one, in the order of the columns `image`,
            `image_1`, ….
        least_hu: A connected component with a lower median HU is no organ; None accepts every
            component.
        ignore_label: Value of ignored voxels in label maps and targets; None where no voxel is
            ignored.
        volume_ml: Name of a region or label to its smallest and largest plausible volume; names may
            be absent.
        codes: Label name to its SNOMED CT code, its meaning and, for a part of one side, `left` or
            `right`; names may be absent.
        colours: Label name to its colour in results, `#rrggbb`; names may be absent.
        is_sided: Whether left and right differ, although no region has a side and no label one in
            its name.
    """

    name: str
    labels: dict[str, int]
    regions: tuple[Region, ...]
    channels: tuple[Channel, ...]
    least_hu: float | None = None
    ignore_label: int | None = None
    volume_ml: dict[str, tuple[float, float]] = field(default_factory=dict)
    codes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    colours: dict[str, str] = field(default_factory=dict)
    is_sided: bool = False

    def __post_init__(self) -> None:
        # Networks number their classes by the values, but files of weights sort labels by name.
        by_value = sorted(self.labels.items(), key=lambda item: item[1])
        object.__setattr__(self, "labels", dict(by_value))  # the class is frozen

    @property
    def num_classes(self) -> int:
        """Classes of a network for all labels (coarse, or of one stage): background and labels."""
        return 1 + len(self.labels)

    @property
    def num_region_labels(self) -> int:
        """Largest number of labels of a region; only for tasks with regions."""
        return max(len(region.labels) for region in self.regions)

    @property
    def num_region_classes(self) -> int:
        """Classes of the fine network: background, labels of the largest region, helper labels."""
        return 1 + self.num_region_labels + len(self.helper_labels)

    @property
    def organ_values(self) -> tuple[int, ...]:
        """Label values of the organs: of all regions, or of all labels without regions."""
        if not self.regions:
            return tuple(self.labels.values())
        values = set[int]()
        for region in self.regions:
            values.update(self.region_values(region))
        return tuple(sorted(values))

    @property
    def helper_labels(self) -> tuple[str, ...]:
        """Labels that belong to no region of a task with regions, in the order of their values.

        They help the networks to distinguish organs from other tissue, and are background in
        results.
        """
        organ_values = self.organ_values
        return tuple(name for name, value in self.labels.items() if value not in organ_values)

    def without_helpers(self) -> Task:
        """Return the task of the results, in which helper labels are background."""
        helper_labels = self.helper_labels
        labels = {name: value for name, value in self.labels.items() if name not in helper_labels}
        # Helper labels are not in results, so their volumes cannot be checked.
        parts = {*labels, *(region.name for region in self.regions)}
        volume_ml = {name: limits for name, limits in self.volume_ml.items() if name in parts}
        return replace(self, labels=labels, volume_ml=volume_ml)

    def finds_regions_of(self, other: Task) -> bool:
        """Whether a coarse stage of this task finds the regions of another one.

        It does if both tasks have the same regions and modalities, and this task has all labels of
        the other with their values. This task may have further labels: helper labels.
        """
        modalities = [channel.modality for channel in self.channels]
        other_modalities = [channel.modality for channel in other.channels]
        has_other_labels = other.labels.items() <= self.labels.items()
        return self.regions == other.regions and has_other_labels and modalities == other_modalities

    @property
    def parts(self) -> list[str]:
        """Names in the columns `trust_<name>` of a case table: regions or, without any, labels."""
        if not self.regions:
            return list(self.labels)
        return [region.name for region in self.regions]

    def part_values(self, name: str) -> tuple[int, ...]:
        """Label values of one of `parts`."""
        for region in self.regions:
            if region.name == name:
                return self.region_values(region)
        return (self.labels[name],)

    @property
    def has_sides(self) -> bool:
        """Whether left and right differ.

        They do if a region has a side, or if the name of a label has one, see `sides_in_names`; a
        task of one stage keeps the answer in `is_sided`.
        """
        if self.is_sided or any(region.side for region in self.regions):
            return True
        return any(sides_in_names(self.labels).values())

    def side_values(self, side: str) -> tuple[int, ...]:
        """Label values of one side, `left` or `right`.

        These are the labels of the regions with this side or, in a task without regions, those with
        this side in their names, see `sides_in_names`.
        """
        values = set[int]()
        for region in self.regions:
            if region.side == side:
                values.update(self.region_values(region))
        if not self.regions:
            for label, label_sides in sides_in_names(self.labels).items():
                if side in label_sides:
                    values.add(self.labels[label])
        return tuple(sorted(values))

    def as_one_stage(self) -> Task:
        """Return the task without regions, for a network of one stage; it keeps `has_sides`."""
        return replace(self, regions=(), is_sided=self.has_sides)

    @property
    def is_ct(self) -> bool:
        """Whether the first channel, which the audit and the clean-up look at, is in HU."""
        return self.channels[0].modality == "ct"

    @property
    def window_hu(self) -> tuple[float, float]:
        """Window of the first channel, the one that pictures show.

        Raises:
            ValueError: If that channel has none.
        """
        window_hu = self.channels[0].window_hu
        if window_hu is None:
            raise ValueError(f"the first channel of the task {self.name} has no window")
        return window_hu

    @property
    def num_values(self) -> int:
        """Number of values from 0 to the largest one in label maps, the ignore label included."""
        return 1 + max(self.values.values())

    @property
    def values(self) -> dict[str, int]:
        """Label name to value, the ignore label included."""
        # A copy, because the ignore label is no label of the task.
        values = dict(self.labels)
        if self.ignore_label is not None:
            values[IGNORE] = self.ignore_label
        return values

    def region_values(self, region: Region) -> tuple[int, ...]:
        """Label values of a region, in the order of the fine network's classes."""
        return tuple(self.labels[name] for name in region.labels)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain types for a checkpoint or a JSON file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Task:
        """Read what `to_dict` wrote.

        Older versions, which knew one CT channel only, wrote `window_hu` in place of `channels`.
        """
        regions = []
        for region in data["regions"]:
            regions.append(Region(region["name"], tuple(region["labels"]), region["side"]))
        channels = []
        for fields in data.get("channels") or [{"window_hu": data["window_hu"]}]:
            channel = Channel(**fields)
            # JSON has made a list of the window.
            channels.append(replace(channel, window_hu=_pair(channel.window_hu)))
        least_hu = data.get("least_hu")
        if least_hu is not None:
            least_hu = float(least_hu)
        return cls(
            name=data["name"],
            labels=dict(data["labels"]),
            regions=tuple(regions),
            channels=tuple(channels),
            least_hu=least_hu,
            ignore_label=data.get("ignore_label"),
            volume_ml={name: _pair(limits) for name, limits in data.get("volume_ml", {}).items()},
            codes={name: tuple(code) for name, code in data.get("codes", {}).items()},
            colours=dict(data.get("colours", {})),
            is_sided=bool(data.get("is_sided", False)),
        )


@dataclass(frozen=True)
class CleanUp:
    """What is done to the predicted voxels of one region or label.

    Attributes:
        part: Name of the region or, in a task without regions, of the label.
        min_ml: Smaller components are removed, but never the largest one; 0 keeps all.
        only_largest: Whether the largest component alone stays; `min_ml` has then no effect.
        fill_holes: Whether enclosed cavities are filled; for parts of a single label.

    Raises:
        TypeError: If a value is of another type.
    """

    part: str
    min_ml: float = 0.0
    only_largest: bool = False
    fill_holes: bool = False

    def __post_init__(self) -> None:
        has_name = isinstance(self.part, str)
        has_volume = isinstance(self.min_ml, (int, float))
        # Each flag must be True or False; 1 and 0 pass too, since Python holds them equal to these.
        has_flags = {self.only_largest, self.fill_holes} <= {True, False}
        if not (has_name and has_volume and has_flags):
            raise TypeError(f"expected a name, a volume in ml and two flags, got {self!r}")

    def __str__(self) -> str:
        """Say what is done.

        Example:
            >>> print(CleanUp("liver", min_ml=2.5, fill_holes=True))
            components of less than 2.5 ml go, holes are filled
            >>> print(CleanUp("liver"))
            nothing
        """
        steps = []
        if self.only_largest:
            steps.append("the largest component stays")
        elif self.min_ml > 0:
            steps.append(f"components of less than {self.min_ml:g} ml go")
        if self.fill_holes:
            steps.append("holes are filled")
        return ", ".join(steps) or "nothing"


def _pair(values: Any) -> Any:
    """Convert a list of two numbers to a tuple; None stays."""
    if values is None:
        return None
    low, high = values
    return float(low), float(high)


def is_side_pair(first: Region, second: Region) -> bool:
    """Whether two regions are the left and the right of one organ, by their names and sides.

    Their names must be the same without the words for the sides.
    """
    if {first.side, second.side} != set(SIDES):
        return False
    return _name_without_side(first) == _name_without_side(second)


def _name_without_side(region: Region) -> list[str]:
    """Words of the name of a region in lower case, without those for a side."""
    return [word for word in words_of(region.name) if word not in (*SIDES, *SHORT_SIDES)]


def sides_in_names(labels: Iterable[str]) -> dict[str, set[str]]:
    """Find the sides that the names of labels contain: `left`, `right`, both, or none.

    A short word, such as `l`, is a side where the word for the other side makes the name of another
    label.

    Example:
        >>> sides_in_names(["Femur_L", "Femur_R", "LeftKidney", "vessel_l"])
        {'Femur_L': {'left'}, 'Femur_R': {'right'}, 'LeftKidney': {'left'}, 'vessel_l': set()}
    """
    words_by_label = {label: words_of(label) for label in labels}
    sides_by_label = {}
    for label, words in words_by_label.items():
        sides = set(words).intersection(SIDES)
        for short, (side, other_short) in SHORT_SIDES.items():
            twin_words = [other_short if word == short else word for word in words]
            if twin_words != words and twin_words in words_by_label.values():
                sides.add(side)
        sides_by_label[label] = sides
    return sides_by_label


def words_of(name: str) -> list[str]:
    """Words of a name in lower case: `Left_kidney` and `LeftKidney` give `left` and `kidney`."""
    # A capital after a small letter begins a word, too.
    words = re.split(r"[\s_.-]+|(?<=[a-z])(?=[A-Z])", name)
    return [word.lower() for word in words]
