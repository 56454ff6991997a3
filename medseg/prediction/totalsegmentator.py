"""Resampling of TotalSegmentator 2.18 around nnU-Net: scans in RAS, labels brought back.

The scan is turned to RAS and resampled linearly to the spacing of the networks; the values become
whole numbers. The labels return to the scan by nearest neighbour. The centres of the outermost
voxels stay in their places both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.geometry.sizes import Shape
from medseg.inference.scan_model import CombinedModel, ScanModel
from medseg.inference.segmentation import Segmentation
from medseg.io.scratch import new_array
from medseg.io.volume import Volume
from medseg.memory.profile import timed_step
from medseg.nnunet.model import NnunetModel
from medseg.nnunet.spline import axis_taps
from medseg.preprocess.orient import ras_orientation_of
from medseg.task import Task

RESAMPLE, RESTORE = "resample", "restore"
# Bytes of a voxel of the resampled scan, which is int32.
VALUE_BYTES = 4


@dataclass(frozen=True)
class TotalsegmentatorModel(CombinedModel):
    """A model of nnU-Net, or several joined ones, for scans that are resampled around it.

    It has one part: that model, or the `JoinedModels`.

    Attributes:
        spacing_mm: Spacing of the resampled scan along all axes.
    """

    spacing_mm: float

    @property
    def task(self) -> Task:
        """Labels and channels."""
        return self.parts[0].task

    @property
    def steps(self) -> list[str]:
        """Steps of `segment`."""
        return [RESAMPLE, *super().steps, RESTORE]

    def check_budget(self, grid: VoxelGrid) -> None:
        """Refuse a scan that the model cannot segment within the bound."""
        super().check_budget(self.resampled_grid(grid))

    def resampled_grid(self, grid: VoxelGrid) -> VoxelGrid:
        """Grid of the resampled scan, in RAS.

        Args:
            grid: Grid of the scan, in storage order.
        """
        orientation = ras_orientation_of(grid)
        turned = grid.reoriented(orientation.order, orientation.flips)
        depth, height, width = (
            max(1, round(size * (native_mm / self.spacing_mm)))
            for size, native_mm in zip(turned.shape, turned.spacing_mm, strict=True)
        )
        spacing_mm = (self.spacing_mm, self.spacing_mm, self.spacing_mm)
        return replace(turned, shape=(depth, height, width), spacing_mm=spacing_mm)

    def segment(
        self,
        volume: Volume,
        more_channels: Sequence[np.ndarray] = (),
        *,
        on_step: Callable[[str], None] | None = None,
        keep_probabilities: bool = False,
    ) -> Segmentation:
        """Segment one scan: resample it, segment it, bring the labels back.

        Args:
            volume: First channel.
            more_channels: The other channels, (D, H, W) each, on the grid of the first.
            on_step: Called with the name of each step when it begins.
            keep_probabilities: Must be False: models of nnU-Net keep none here.
        """
        grid = self.resampled_grid(volume.grid)
        orientation = ras_orientation_of(volume.grid)
        durations_s: dict[str, float] = {}
        with timed_step(durations_s, on_step, RESAMPLE):
            # `to_lps` turns to RAS here, since that is the orientation.
            turned = [orientation.to_lps(array) for array in (volume.array, *more_channels)]
            first, *others = (resampled(array, grid.shape) for array in turned)
        result = self.parts[0].segment(
            Volume(first, grid, None),
            others,
            on_step=on_step,
            keep_probabilities=keep_probabilities,
        )
        result.durations_s = {**durations_s, **result.durations_s}
        with timed_step(result.durations_s, on_step, RESTORE):
            labels = new_array(volume.array.shape, np.uint8, waits=volume.grid.is_axial)
            # Written through a view in RAS, so that the array itself is in storage order.
            restore(result.labels, orientation.to_lps(labels))
            result.labels = labels
            # Volumes, and whether the result is empty, are those of the scan: a thin structure may
            # vanish between its slices.
            result.findings = [
                finding for finding in result.findings if finding.code != "empty_result"
            ]
            result.measure(volume.grid, self.task)
        return result


def isotropic_mm(models: Sequence[ScanModel]) -> float:
    """Spacing that all models are made for.

    Raises:
        UserError: If one is none of nnU-Net, or their spacings differ.
    """
    spacings_mm = set[float]()
    for model in models:
        if not isinstance(model, NnunetModel):
            raise UserError(
                "inference.around=totalsegmentator: expected model folders of nnU-Net; leave it out"
            )
        spacings_mm.update(model.plan.spacing_mm)
    if len(spacings_mm) > 1:
        listed = ", ".join(f"{spacing_mm:g}" for spacing_mm in sorted(spacings_mm))
        raise UserError(
            "inference.around=totalsegmentator: expected models of one spacing along all axes, as "
            f"those of TotalSegmentator are, got {listed} mm; leave it out"
        )
    return spacings_mm.pop()


def resampled(image: np.ndarray, shape: Shape) -> np.ndarray:
    """Resample an image (D, H, W) linearly to a shape, as whole numbers.

    The result is that of scipy on the array (x, y, z) of a NIfTI file to the last bit: products and
    sums run over x first and over z last. Decimals are cut off, so a last bit may make a difference
    of 1.

    Args:
        image: The image; a view is read plane by plane.
        shape: The new shape.

    Returns:
        int32.
    """
    depth = axis_taps(shape[0], image.shape[0], 1, by_centres=True)
    rows = axis_taps(shape[1], image.shape[1], 1, by_centres=True)
    columns = axis_taps(shape[2], image.shape[2], 1, by_centres=True)
    # A spline of order 1 has two taps with weights.
    assert depth.weight is not None
    assert rows.weight is not None
    assert columns.weight is not None
    values = new_array(shape, np.int32, waits=True)
    # Each term is multiplied along x, then y, then z, and added in this order.
    for number in range(shape[0]):
        planes = image[depth.index[number]].astype(np.float64)
        total = np.zeros(shape[1:])
        for column, column_weight in zip(columns.index.T, columns.weight.T, strict=True):
            by_column = planes[:, :, column] * column_weight
            for row, row_weight in zip(rows.index.T, rows.weight.T, strict=True):
                by_row = by_column[:, row] * row_weight[:, None]
                for plane, plane_weight in zip(by_row, depth.weight[number], strict=True):
                    total += plane * plane_weight
        values[number] = total
    return values


def restore(labels: np.ndarray, output: np.ndarray) -> None:
    """Bring labels to the shape of a scan by nearest neighbour.

    Args:
        labels: Labels (d, h, w).
        output: Receives them (D, H, W); may be a view.
    """
    # Spline of order 0: one tap, the nearest voxel.
    sources = []
    for outputs, inputs in zip(output.shape, labels.shape, strict=True):
        sources.append(axis_taps(outputs, inputs, 0, by_centres=True).index[:, 0])
    depth, height, width = sources
    for number, source in enumerate(depth):
        output[number] = labels[source][height[:, None], width]
