"""Several models as one: their labels are painted into one map, later labels over earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from medseg.data.audit.image import check_channels
from medseg.errors import UserError
from medseg.inference.scan_model import CombinedModel, ScanModel
from medseg.inference.segmentation import Segmentation
from medseg.io.volume import Volume
from medseg.task import Task

# Largest value of a label: label maps are stored in bytes.
MAX_VALUE = 255


@dataclass(frozen=True)
class JoinedModels(CombinedModel):
    """Models that segment a scan one after the other.

    Attributes:
        names: Name of each model in messages.
        label_values: Label name to value, for labels that do not take the next free value.
        task: The labels of all parts, and the channels, which are the same for all; made by the
            class.

    Raises:
        UserError: If the parts take different channels, or as for `join_values`.
    """

    names: tuple[str, ...]
    label_values: Mapping[str, int] = field(default_factory=dict)
    task: Task = field(init=False)

    def __post_init__(self) -> None:
        first_task = self.parts[0].task
        modalities = [channel.modality for channel in first_task.channels]
        for name, part in zip(self.names, self.parts, strict=True):
            part_modalities = [channel.modality for channel in part.task.channels]
            if part_modalities != modalities:
                raise UserError(
                    f"weights: {self.names[0]} takes the channels {', '.join(modalities)}, but "
                    f"{name} {', '.join(part_modalities)}; give models for the same scans"
                )
        task_names: dict[str, None] = {}  # each once, in the order of the parts
        labels_by_part = []
        volume_ml: dict[str, tuple[float, float]] = {}
        codes: dict[str, tuple[str, ...]] = {}
        colours: dict[str, str] = {}
        for part in self.parts:
            task_names[part.task.name] = None
            labels_by_part.append(list(part.task.labels))
            # Where several models have a label, the last of them decides: it paints last.
            volume_ml |= part.task.volume_ml
            codes |= part.task.codes
            colours |= part.task.colours
        task = Task(
            name=" + ".join(task_names),
            labels=join_values(labels_by_part, self.label_values),
            regions=(),
            channels=first_task.channels,
            volume_ml=volume_ml,
            codes=codes,
            colours=colours,
        )
        object.__setattr__(self, "task", task)  # the class is frozen

    def segment(
        self,
        volume: Volume,
        more_channels: Sequence[np.ndarray] = (),
        *,
        on_step: Callable[[str], None] | None = None,
        keep_probabilities: bool = False,
    ) -> Segmentation:
        """Segment one scan by each part in turn; see `ScanModel.segment`.

        A part does not see the labels of the others. Bounds on Dice are left out: a later part may
        paint over the label that they are about.
        """
        assert not keep_probabilities, "`load_range_models` refuses probabilities of joined models"
        result = Segmentation(np.empty(0))  # the labels of the first part replace this empty map
        for number, (name, part) in enumerate(zip(self.names, self.parts, strict=True), start=1):
            part_volume, part_channels = _as_seen_by(part, volume, more_channels)
            on_part_step = self.on_step_of_part(number, on_step)
            part_result = part.segment(part_volume, part_channels, on_step=on_part_step)
            # A label map of a whole scan is large. Values are replaced in place, and the map of the
            # first part becomes the result, into which the others are painted.
            _replace_values(part_result.labels, part.task.labels, self.task.labels)
            if number == 1:
                result.labels = part_result.labels
            else:
                _paint(result.labels, part_result.labels)
            for finding in part_result.findings:
                # Whether all parts together are empty is found by `measure` below.
                if finding.code == "empty_result":
                    continue
                if len(self.parts) > 1:
                    finding = finding.within(name)
                result.findings.append(finding)
            self.note_part(number, part_result, result)  # durations, tiling plans, distortions
            result.boxes |= part_result.boxes
            result.agreements |= part_result.agreements
        result.measure(volume.grid, self.task)
        return result


def join_values(
    labels_by_part: Sequence[Sequence[str]], label_values: Mapping[str, int]
) -> dict[str, int]:
    """Give each label of several models a value.

    A label in `label_values` has the value that is stated there. The others count from 1 in their
    order and skip the stated values. A name that several models have is one label.

    Args:
        labels_by_part: Names of the labels of each model.
        label_values: Label name to its value.

    Returns:
        Name of each label to its value.

    Raises:
        UserError: If a name is unknown, a value is used twice or out of range, or there are too
            many labels.

    Example:
        >>> join_values([["liver", "spleen"], ["aorta"]], {"aorta": 1})
        {'liver': 2, 'spleen': 3, 'aorta': 1}
    """
    names: list[str] = []
    for labels in labels_by_part:
        names += [name for name in labels if name not in names]
    unknown = [name for name in label_values if name not in names]
    if unknown:
        raise UserError(
            f"label_values: the models have no label {unknown[0]}, but {', '.join(names[:20])}"
        )
    stated_values = set(label_values.values())
    is_repeated = len(stated_values) < len(label_values)
    are_in_range = stated_values.issubset(range(1, MAX_VALUE + 1))
    if is_repeated or not are_in_range:
        raise UserError(
            f"label_values: expected different values from 1 to {MAX_VALUE}, got "
            f"{dict(label_values)}"
        )
    # These may exceed `MAX_VALUE`: the check below refuses them in a message that has the number of
    # all labels.
    free_values = (value for value in count(1) if value not in stated_values)
    values: dict[str, int] = {}
    for name in names:
        if name in label_values:
            values[name] = label_values[name]
        else:
            values[name] = next(free_values)
    if max(values.values()) > MAX_VALUE:
        raise UserError(
            f"weights: the models have {len(names)} labels, but a label map holds values up to "
            f"{MAX_VALUE}; give fewer models"
        )
    return values


def _as_seen_by(
    part: ScanModel, volume: Volume, more_channels: Sequence[np.ndarray]
) -> tuple[Volume, Sequence[np.ndarray]]:
    """Return the channels as a part expects them: as stored, or with air in place of padding."""
    if part.keeps_values:
        return volume, more_channels
    modalities = [channel.modality for channel in part.task.channels]
    # The findings are ignored: `segment_scan` has audited the same values and reports them once.
    arrays, _, _ = check_channels([volume.array, *more_channels], modalities, is_owned=False)
    return replace(volume, array=arrays[0]), arrays[1:]


def _replace_values(
    labels: np.ndarray, values: Mapping[str, int], new_values: Mapping[str, int]
) -> None:
    """Replace the values of a part by those of the joined task, in place.

    Args:
        labels: Label map (D, H, W), uint8.
        values: Name of each label to its value in the map.
        new_values: Name of each label to its new value.
    """
    new_value_of = np.zeros(256, dtype=np.uint8)  # by the old value; the background stays 0
    for name, value in values.items():
        new_value_of[value] = new_values[name]
    # Plane by plane: all at once would take the memory of a second label map.
    for plane in labels:
        plane[:] = new_value_of[plane]


def _paint(labels: np.ndarray, later_labels: np.ndarray) -> None:
    """Write the labels of a later part over those that are there, in place; (D, H, W) both."""
    for plane, later_plane in zip(labels, later_labels, strict=True):
        np.copyto(plane, later_plane, where=later_plane > 0)
