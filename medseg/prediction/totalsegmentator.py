"""Resampling around models of nnU-Net as TotalSegmentator 2.18 does it.

The scan is turned to RAS and resampled linearly to the spacing of the networks; its values become
whole numbers. The labels are resampled to the grid of the scan by nearest neighbour. Both times the
centres of the outermost voxels stay in their places.
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

# Names of the steps before and after those of the model.
RESAMPLE = "resample"
RESTORE = "restore"
# Bytes of a voxel of the resampled scan, which is int32.
VALUE_BYTES = 4


@dataclass(frozen=True)
class TotalsegmentatorModel(CombinedModel):
    """A model of nnU-Net, or several joined ones, with the resampling of TotalSegmentator.

    It has one part: the model of nnU-Net, or the `JoinedModels`.

    Attributes:
        spacing_mm: Spacing of the resampled scan along all axes.
    """

    spacing_mm: float

    @property
    def task(self) -> Task:
        """Labels and channels of the model inside."""
        return self.parts[0].task

    @property
    def steps(self) -> list[str]:
        """Steps of `segment`: those of the model inside, between the two of resampling."""
        return [RESAMPLE, *super().steps, RESTORE]

    def check_budget(self, grid: VoxelGrid) -> None:
        """Refuse a scan that the model cannot segment within the bound on its memory."""
        super().check_budget(self.resampled_grid(grid))

    def resampled_grid(self, grid: VoxelGrid) -> VoxelGrid:
        """Compute the grid of the resampled scan, in RAS.

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
            keep_probabilities: Must be False, since models of nnU-Net keep none.
        """
        grid = self.resampled_grid(volume.grid)
        orientation = ras_orientation_of(volume.grid)
        durations_s: dict[str, float] = {}
        with timed_step(durations_s, on_step, RESAMPLE):
            # Despite its name, `to_lps` turns to RAS here: `ras_orientation_of` has made this
            # orientation so.
            turned = [orientation.to_lps(array) for array in (volume.array, *more_channels)]
            first, *others = [resampled(array, grid.shape) for array in turned]
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
            labels_in_ras = orientation.to_lps(labels)
            restore(result.labels, labels_in_ras)
            result.labels = labels
            # The volumes are measured again on the grid of the scan, and whether the result is
            # empty: a thin structure may vanish between the slices of the scan.
            result.findings = [
                finding for finding in result.findings if finding.code != "empty_result"
            ]
            result.measure(volume.grid, self.task)
        return result


def isotropic_mm(models: Sequence[ScanModel]) -> float:
    """Return the spacing of all models, which is the same along all axes.

    Raises:
        UserError: If one is not of nnU-Net, or spacings differ between models or axes.
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

    The result is the same to the last bit as that of scipy for the array (x, y, z) of a NIfTI file,
    where products and sums run over x first and over z last. The last bit matters: as decimals are
    cut off, it may make a difference of 1.

    Args:
        image: The image; a view is read plane by plane.
        shape: The new shape, (D', H', W').

    Returns:
        Image (D', H', W'), int32.
    """
    # For each voxel of an axis of the result, the two voxels between which it lies (`index`) and
    # their weights: arrays (D', 2), (H', 2) and (W', 2).
    taps_z = axis_taps(shape[0], image.shape[0], order=1, by_centres=True)
    taps_y = axis_taps(shape[1], image.shape[1], order=1, by_centres=True)
    taps_x = axis_taps(shape[2], image.shape[2], order=1, by_centres=True)
    # Only a spline of order 0 has no weights.
    assert taps_z.weight is not None
    assert taps_y.weight is not None
    assert taps_x.weight is not None
    values = new_array(shape, np.int32, waits=True)
    # The eight terms of a voxel are each multiplied along x, then y, then z, and are added in the
    # order of the loops.
    for z in range(shape[0]):
        planes = image[taps_z.index[z]].astype(np.float64)  # (2, H, W)
        total = np.zeros(shape[1:])
        for columns, column_weights in zip(taps_x.index.T, taps_x.weight.T, strict=True):
            weighted_in_x = planes[:, :, columns] * column_weights  # (2, H, W')
            for rows, row_weights in zip(taps_y.index.T, taps_y.weight.T, strict=True):
                weighted_in_xy = weighted_in_x[:, rows] * row_weights[:, None]  # (2, H', W')
                for plane, plane_weight in zip(weighted_in_xy, taps_z.weight[z], strict=True):
                    total += plane * plane_weight
        values[z] = total  # int32: decimals are cut off
    return values


def restore(labels: np.ndarray, output: np.ndarray) -> None:
    """Bring labels to the shape of a scan by nearest neighbour.

    Args:
        labels: Labels (d, h, w) on the resampled grid.
        output: Receives the labels (D, H, W); may be a view.
    """
    # For each voxel of an axis of the output the nearest voxel of the labels, which is the only tap
    # of a spline of order 0.
    nearest = []
    for num_outputs, num_inputs in zip(output.shape, labels.shape, strict=True):
        taps = axis_taps(num_outputs, num_inputs, order=0, by_centres=True)
        nearest.append(taps.index[:, 0])
    nearest_z, nearest_y, nearest_x = nearest
    for z, label_z in enumerate(nearest_z):
        output[z] = labels[label_z][nearest_y[:, None], nearest_x]
