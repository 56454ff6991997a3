"""Keys of the group `task`: labels, regions and channels."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from medseg.knob import Knob, Pair
from medseg.task import IGNORE, Channel, Region, Task

Side = StrEnum("Side", ["left", "right"])  # of the patient
Modality = StrEnum("Modality", ["ct", "mr", "other"])
# See `medseg.preprocess.intensity`.
Normalise = StrEnum("Normalise", ["window", "zscore", "percentile"])

# Label maps are bytes, 0 to 255: 0 is the background, and one value is left for the ignore label.
MAX_LABELS = 254


@dataclass
class RegionOptions:
    """One region of interest of a task."""

    labels: Annotated[
        list[str], Knob("Labels of the region, in the order of the fine network's classes.")
    ]
    side: Annotated[Side | None, Knob("Side of the patient; null: crops are never mirrored.")]


@dataclass
class ChannelOptions:
    """One channel of the input: the column `image` of a case table, then `image_1`, …."""

    modality: Annotated[
        Modality, Knob("ct: values in HU, which the audit checks; mr, other: values of any scale.")
    ] = Modality.ct
    window_hu: Annotated[
        Pair | None, Knob("Window that is mapped to [-1, 1]; with normalise=window.", unit="HU")
    ] = None
    normalise: Annotated[
        Normalise,
        Knob(
            "Intensity normalisation. window: by window_hu; zscore, percentile: by the values of "
            "the case itself."
        ),
    ] = Normalise.window


@dataclass
class TaskOptions:
    """Task: labels, regions and channels."""

    name: Annotated[str, Knob("Name of the task.")]
    labels: Annotated[
        dict[str, int],
        Knob(
            "Label names and their values in every label map that medseg writes: 1, 2, … without a "
            "gap."
        ),
    ]
    regions: Annotated[
        dict[str, RegionOptions] | None,
        Knob(
            "Regions of interest; the fine stage makes one crop of each. null: one stage segments "
            "all labels."
        ),
    ] = None
    channels: Annotated[
        list[ChannelOptions] | None,
        Knob(
            "Channels of the input, in the order image, image_1, …; null: one CT with "
            "task.window_hu."
        ),
    ] = None
    window_hu: Annotated[
        Pair | None,
        Knob("Window that is mapped to [-1, 1], of a task with one CT channel.", unit="HU"),
    ] = None
    least_hu: Annotated[
        float | None,
        Knob("Connected components with a lower median are removed as gas; null: none.", unit="HU"),
    ] = None
    ignore_label: Annotated[
        int | None,
        Knob(
            "Value of voxels that the loss, the sampling and the scores ignore; null: none.",
            "[1, 255]",
        ),
    ] = None
    volume_ml: Annotated[
        dict[str, Any] | None,
        Knob(
            "Region or label: its smallest and largest plausible volume, [low, high]; others are "
            "not checked.",
            unit="ml",
            neutral=True,
        ),
    ] = None
    codes: Annotated[
        dict[str, Any] | None,
        Knob(
            "Label: its SNOMED CT code, [code, meaning] or [code, meaning, left | right], for "
            "DICOM results.",
            neutral=True,
        ),
    ] = None
    colours: Annotated[
        dict[str, str] | None,
        Knob("Label: its colour in results, '#rrggbb'; others get one of a palette.", neutral=True),
    ] = None

    @property
    def has_sides(self) -> bool:
        """Whether left and right differ, see `Task.has_sides`."""
        return make_task(self).has_sides

    def clashes(self, _: str) -> Iterator[str]:
        """Yield a sentence for each contradiction between the keys of a task.

        The argument, the key of the options, is not needed: it is `task` in every configuration.
        """
        yield from self._label_clashes()
        yield from self._channel_clashes()
        yield from self._region_clashes()
        yield from self._name_clashes()

    def _label_clashes(self) -> Iterator[str]:
        if self.name in ("", ".", "..") or set(self.name) & set("/\\\0"):
            yield (
                f"task.name={self.name!r}: expected a valid folder name without / and \\, since "
                "the folder of synthetic scans is named after the task; choose another one"
            )
        values = sorted(self.labels.values())
        if not values or values != list(range(1, len(values) + 1)):
            yield (
                "task.labels: expected the values 1, 2, … without a gap, "
                f"but got {dict(self.labels)}"
            )
        if len(values) > MAX_LABELS:
            yield f"task.labels: at most {MAX_LABELS} labels are possible, but got {len(values)}"
        if IGNORE in self.labels:
            yield (
                f"task.labels.{IGNORE}: expected another name, since {IGNORE} names the voxels "
                "that count nowhere (task.ignore_label); rename the label"
            )
        if self.ignore_label is not None and self.ignore_label <= len(values):
            yield (
                f"task.ignore_label={self.ignore_label} is the value of a label; choose a value "
                f"from {len(values) + 1} to 255"
            )

    def _channel_clashes(self) -> Iterator[str]:
        has_window = self.window_hu is not None
        has_channels = bool(self.channels)
        if has_window == has_channels:  # both or neither
            yield (
                "task.channels and task.window_hu: expected one of the two; window_hu is short for "
                "channels=[{modality: ct, window_hu: […]}]"
            )
        yield from _window_clashes("task.window_hu", self.window_hu)
        for number, channel in enumerate(self.channels or ()):
            key = f"task.channels.{number}"
            needs_window = channel.normalise is Normalise.window
            has_channel_window = channel.window_hu is not None
            if needs_window != has_channel_window:
                yield (
                    f"{key}: expected a window_hu (normalise=window), or normalise=zscore or "
                    f"percentile without one, but got normalise={channel.normalise.value} "
                    f"and window_hu={channel.window_hu}"
                )
            if needs_window and channel.modality is not Modality.ct:
                yield (
                    f"{key}.normalise=window: values of modality={channel.modality.value} have no "
                    "common scale; choose zscore or percentile"
                )
            yield from _window_clashes(f"{key}.window_hu", channel.window_hu)

    def _region_clashes(self) -> Iterator[str]:
        for name, region in (self.regions or {}).items():
            key = f"task.regions.{name}.labels"
            unknown = [label for label in region.labels if label not in self.labels]
            if unknown:
                yield f"{key}: {unknown} are not among task.labels {sorted(self.labels)}"
            if not region.labels:
                yield f"{key}: at least one label is needed"

    def _name_clashes(self) -> Iterator[str]:
        """Yield contradictions of the keys that are maps by label or region."""
        parts = {**self.labels, **(self.regions or {})}
        for name, range_ml in (self.volume_ml or {}).items():
            key = f"task.volume_ml.{name}"
            if name not in parts:
                yield f"{key}: there is no such label or region; there are {', '.join(parts)}"
            if not _is_range(range_ml):
                yield f"{key}: expected two increasing numbers in ml, but got {range_ml}"
        yield from self._unknown_labels("codes", self.codes)
        yield from self._unknown_labels("colours", self.colours)
        for name, code in (self.codes or {}).items():
            if not _is_code(code):
                yield (
                    f"task.codes.{name}: expected [code, meaning] or [code, meaning, left | "
                    f"right], such as [64033007, Kidney, left], but got {code}"
                )
        for name, colour in (self.colours or {}).items():
            if not re.fullmatch("#[0-9a-fA-F]{6}", colour):
                yield (
                    f"task.colours.{name}: expected a colour such as '#38bdf8', but got {colour!r}"
                )

    def _unknown_labels(self, key: str, by_label: dict[str, Any] | None) -> Iterator[str]:
        """Yield a sentence for each name of a map that is no label."""
        labels = ", ".join(self.labels)
        for name in by_label or ():
            if name not in self.labels:
                yield f"task.{key}.{name}: there is no such label; there are {labels}"


def _window_clashes(key: str, window_hu: Pair | None) -> Iterator[str]:
    """Yield a sentence where the bounds of a window are swapped or equal."""
    if window_hu is not None and window_hu[0] >= window_hu[1]:
        yield f"{key}: expected a lower bound below the upper one, but got {window_hu}"


def _is_code(code: Any) -> bool:
    """Whether a value is a SNOMED CT code, its meaning, and perhaps a side.

    DICOM limits the code to 16 digits and the meaning to 64 characters.
    """
    if not isinstance(code, list) or len(code) not in (2, 3):
        return False
    number, meaning, *side = code  # `side` is empty or holds one word
    if not isinstance(meaning, str) or not 0 < len(meaning) <= 64:
        return False
    if side not in ([], ["left"], ["right"]):
        return False
    return str(number).isdecimal() and len(str(number)) <= 16


def _is_range(values: Any) -> bool:
    """Whether a value is two increasing numbers, the first at least 0."""
    if not isinstance(values, list) or len(values) != 2:
        return False
    if not all(isinstance(bound, (int, float)) for bound in values):
        return False
    return 0 <= values[0] < values[1]


def make_task(config: TaskOptions) -> Task:
    """Make the task of a configuration."""
    regions = []
    for name, region in (config.regions or {}).items():
        side = None
        if region.side is not None:
            side = region.side.value
        regions.append(Region(name, tuple(region.labels), side))
    channels = [
        Channel(channel.modality.value, channel.window_hu, channel.normalise.value)
        for channel in config.channels or ()
    ]
    if not channels:  # `task.window_hu` is short for one CT channel
        channels = [Channel(window_hu=config.window_hu)]
    return Task(
        name=config.name,
        labels=dict(config.labels),
        regions=tuple(regions),
        channels=tuple(channels),
        least_hu=config.least_hu,
        ignore_label=config.ignore_label,
        volume_ml={name: (low, high) for name, (low, high) in (config.volume_ml or {}).items()},
        codes=code_texts(config.codes),
        colours=dict(config.colours or {}),
    )


def code_texts(codes: dict[str, Any] | None) -> dict[str, tuple[str, ...]]:
    """Convert the parts of SNOMED CT codes to texts; YAML reads the digits as a number."""
    return {name: tuple(map(str, code)) for name, code in (codes or {}).items()}
