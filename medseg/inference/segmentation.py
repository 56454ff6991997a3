"""Result of a model on one scan: its labels, their measurements and the findings about them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from torch import Tensor

from medseg.findings import Finding, information_in, sentences_of, warnings_of
from medseg.geometry.grid import VoxelBox, VoxelGrid, voxel_ml
from medseg.task import Task
from medseg.wording import counted

# Sentence of the finding `empty_result`.
NO_LABEL = (
    "no label found at all: the result is empty; check that the scan shows the organs of the task"
)


@dataclass(frozen=True)
class StatedBound:
    """Lower bound on the Dice coefficient of one region of one scan, as `<case>.json` holds it.

    Attributes:
        value: Dice coefficient that the region reaches at least, in [0, 1].
        level: Share of patients whose regions all reach their bounds, in (0, 1).
        patients: Number of patients in the calibration.

    Raises:
        ValueError: If a number is out of its range.
    """

    value: float
    level: float
    patients: int

    def __post_init__(self) -> None:
        is_in_range = 0 <= self.value <= 1 and 0 < self.level < 1 and self.patients >= 1
        if not is_in_range:
            raise ValueError(
                "expected a value in [0, 1], a level in (0, 1) and a patient, got "
                f"{self.value}, {self.level} and {self.patients}"
            )

    def __str__(self) -> str:
        """Describe the bound for reports.

        Example:
            >>> print(StatedBound(0.9871, 0.9, 26))
            at least 0.98 in 9 of 10 patients (26 patients)
            >>> print(StatedBound(0.5, 0.95, 1))
            at least 0.50 in 19 of 20 patients (1 patient)
        """
        return f"at least {self.value_text} {self.calibration_text}"

    @property
    def value_text(self) -> str:
        """The value with two decimals, rounded down: rounded up it would promise too much."""
        return f"{rounded_down(self.value, 2):.2f}"

    @property
    def calibration_text(self) -> str:
        """For how many patients the value holds, and on how many it was calibrated."""
        # 0.9 is not 9/10 but the nearest binary fraction; the limit finds the 9/10 again.
        share = Fraction(self.level).limit_denominator(10_000)
        calibrated_on = counted(self.patients, "patient")
        return f"in {share.numerator} of {share.denominator} patients ({calibrated_on})"


def describe_bounds(bounds: Mapping[str, StatedBound]) -> str:
    """Say the bounds of all regions: a sentence for each calibration, joined by `; `.

    Without any bound the text is "".

    Args:
        bounds: Region name to its bound. Regions of one calibration share level and patients.

    Example:
        >>> high, low = StatedBound(0.9871, 0.9, 26), StatedBound(0.975, 0.9, 26)
        >>> print(describe_bounds({"liver": high, "left_kidney": low}))
        Dice at least 0.98 (liver), 0.97 (left kidney) in 9 of 10 patients (26 patients)
        >>> print(describe_bounds({"liver": high, "left_kidney": high}))
        Dice at least 0.98 (liver and left kidney) in 9 of 10 patients (26 patients)
    """
    # For each calibration the regions of each value. The keys are the texts that are shown, so
    # bounds whose texts are equal are listed together.
    calibrations: dict[str, dict[str, list[str]]] = {}
    for region, bound in bounds.items():
        regions_by_value = calibrations.setdefault(bound.calibration_text, {})
        regions = regions_by_value.setdefault(bound.value_text, [])
        regions.append(region.replace("_", " "))
    sentences = []
    for calibration_text, regions_by_value in calibrations.items():
        values = []
        for value_text, regions in regions_by_value.items():
            values.append(f"{value_text} ({' and '.join(regions)})")
        sentences.append(f"Dice at least {', '.join(values)} {calibration_text}")
    return "; ".join(sentences)


@dataclass(frozen=True)
class RegionBox:
    """Crop in which a region was refined.

    Attributes:
        voxels: The crop, in voxels of the fine grid of the oriented scan; may reach outside of the
            scan. For a crop of fixed size the box starts at zero, in voxels of the crop itself.
        grid: Grid of the crop in the world, which says where the crop lies.
    """

    voxels: VoxelBox
    grid: VoxelGrid

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain types for a JSON file.

        The corners are the centres of the corner voxels, in LPS.
        """
        return {
            "voxels": asdict(self.voxels),
            "spacing_mm": list(self.grid.spacing_mm),
            "corners_xyz_mm": self.grid.corners_xyz_mm().tolist(),
        }


@dataclass
class Segmentation:
    """Result of a model on one scan.

    Attributes:
        labels: Label map in the storage order of the scan, (D, H, W), uint8. The Python API
            replaces it by an image with its grid.
        boxes: Region name to the crop in which it was refined; absent regions are missing.
        volumes_ml: Volume of each label by its name.
        findings: Warnings and information about the scan and the result.
        durations_s: Seconds by step: `localise`, `refine_<region>`, `join`.
        tiling_plans: How the volume and each crop went through the networks, `whole` or in tiles,
            by step.
        pass_s: Seconds inside the passes of networks; only models of nnU-Net count them.
        distortions: How much a crop of fixed size is distorted, by step, see
            `medseg.geometry.grid_rule.distortion`; empty where crops keep the shape.
        agreements: Dice coefficient of the two stages by region, for regions that were refined, see
            `medseg.cascade.agreement`.
        dice_at_least: Region to a lower bound on its Dice coefficient, see `medseg.cascade.bound`;
            empty where the stages were not calibrated together.
        status: `ok`; `warnings` if there are any; `not_hu` if the values of the scan are not HU, so
            the labels are doubtful.
        most_disputed_xyz_mm: Point where the two stages differ most (LPS), see
            `medseg.cascade.agreement`; None if they differ nowhere.
        statistics: Label name to volume and figures in HU, see `medseg.metrics.hu_statistics`.
            `medseg.prediction.case.segment_scan` adds them; a model itself leaves them empty.
        total_statistics: The same figures of all labels together.
        probabilities: Label name to the probabilities (D, H, W) in each crop and the grid of the
            crop, before the clean-up; empty unless `keep_probabilities`.
        disagreement: With several fine checkpoints or flips, the standard deviation of the
            probabilities in percent, uint8, in the order of `labels`; else None.
    """

    # Any: the Python API replaces the array by an image of the type that the caller passed.
    labels: Any
    boxes: dict[str, RegionBox] = field(default_factory=dict)
    volumes_ml: dict[str, float] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    durations_s: dict[str, float] = field(default_factory=dict)
    tiling_plans: dict[str, str] = field(default_factory=dict)
    pass_s: float = 0.0
    distortions: dict[str, float] = field(default_factory=dict)
    agreements: dict[str, float] = field(default_factory=dict)
    dice_at_least: dict[str, StatedBound] = field(default_factory=dict)
    status: str = "ok"
    most_disputed_xyz_mm: tuple[float, ...] | None = None
    statistics: dict[str, dict[str, float | None]] = field(default_factory=dict)
    total_statistics: dict[str, float | None] = field(default_factory=dict)
    probabilities: dict[str, list[tuple[Tensor, VoxelGrid]]] = field(default_factory=dict)
    disagreement: np.ndarray | None = None

    def measure(self, grid: VoxelGrid, task: Task) -> None:
        """Measure the volumes of the labels, and add the finding `empty_result` if all are zero.

        Args:
            grid: Grid of the labels.
            task: Has the names and values of the labels.
        """
        self.volumes_ml = label_volumes_ml(self.labels, grid, task)
        if not any(self.volumes_ml.values()):
            self.findings += warnings_of("empty_result", [NO_LABEL])

    @property
    def warnings(self) -> list[str]:
        """Sentences of the findings that need attention."""
        return sentences_of(self.findings)

    @property
    def information(self) -> list[str]:
        """Sentences of the findings that need no attention."""
        return information_in(self.findings)


# Largest number of labels that are counted by a comparison each. For more, `bincount` is faster,
# though it converts each voxel to eight bytes.
MAX_COMPARED = 8


def label_volumes_ml(labels: np.ndarray, grid: VoxelGrid, task: Task) -> dict[str, float]:
    """Measure the volume of each label.

    Args:
        labels: Label map (D, H, W), uint8.
        grid: Grid of the label map.
        task: Has the names and values of the labels.

    Returns:
        Name of each label to its volume in ml.
    """
    num_voxels = np.zeros(256, dtype=np.int64)  # indexed by label value, which is uint8
    # Plane by plane, so that temporary arrays stay small.
    for plane in labels:
        if len(task.labels) <= MAX_COMPARED:
            for value in task.labels.values():
                num_voxels[value] += np.count_nonzero(plane == value)
        else:
            num_voxels += np.bincount(plane.reshape(-1), minlength=256)
    ml_per_voxel = voxel_ml(grid)
    return {name: ml_per_voxel * int(num_voxels[value]) for name, value in task.labels.items()}


def rounded_down(value: float, digits: int) -> float:
    """Round down to a number of decimal digits."""
    scale = 10**digits
    # In floating point 100 * 0.57 is 56.99…, which without the rounding would give 0.56.
    return math.floor(round(scale * value, 6)) / scale
