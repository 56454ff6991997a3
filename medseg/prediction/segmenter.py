"""Segmenting from Python: load once, then any number of scans."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from medseg.build.device import pick_device
from medseg.build.stages import load_stages
from medseg.cascade.segment import RegionBox, Segmentation, check_stages, segment
from medseg.cascade.stage import CascadeOptions, TrainedStage
from medseg.config.schema import Accelerator
from medseg.errors import UserError, require
from medseg.io.read import read_image
from medseg.io.simpleitk import from_simpleitk, is_simpleitk, to_simpleitk
from medseg.io.volume import Volume
from medseg.preprocess.scale import AS_STORED, HuScale
from medseg.weights.files import shipped_weights


@dataclass(frozen=True)
class SegmentedScan:
    """What `LungSegmenter.segment` gives.

    Attributes:
        labels: 1 = the patient's left lung, 2 = the right, on the grid of the scan: a `SimpleITK.Image` where one was given, else
            a `Volume` in the storage order of the scan, whose array is uint8 (D, H, W).
        volumes_ml: Label name to its volume.
        boxes: Region name to the crop in which it was refined; absent regions are missing.
        agreements: Name of each region that the coarse stage found to the Dice coefficient between what the two stages say.
        warnings: Sentences for a person.
        durations_s: Seconds by step, and `total`.
    """

    labels: Any
    volumes_ml: dict[str, float]
    boxes: dict[str, RegionBox]
    agreements: dict[str, float]
    warnings: list[str]
    durations_s: dict[str, float]


class LungSegmenter:
    """Both stages, loaded once.

    `segment` may be called from several threads: it changes nothing, and networks run one at a time, so that the memory of a pass
    is needed once.

    Args:
        coarse: Checkpoints or `.safetensors` files of the coarse stage, which are averaged; none = those that come with medseg.
        fine: The same for the fine stage.
        accelerator: `auto`, `cpu` or `gpu`.
        precision: `fp32`, `tf32`, `bf16` or `fp16`; None = as the checkpoint was trained, fp32 where the device lacks that.
        options: Thresholds, memory budget and flips; the defaults where None.

    Raises:
        UserError: If a file or the device is not usable.
    """

    def __init__(
        self,
        coarse: Sequence[str | Path] = (),
        fine: Sequence[str | Path] = (),
        *,
        accelerator: str = "auto",
        precision: str | None = None,
        options: CascadeOptions | None = None,
    ) -> None:
        names = [choice.value for choice in Accelerator]
        require(accelerator in names, f"accelerator={accelerator}: choose one of {', '.join(names)}")
        self.options = options or CascadeOptions()
        self.num_threads = torch.get_num_threads()
        self.coarse, self.fine = load_cascade(coarse, fine, Accelerator(accelerator), precision)

    def segment(self, scan: str | Path | Volume | Any, hu: HuScale = AS_STORED) -> SegmentedScan:
        """Segment one scan.

        Args:
            scan: Path of a volume file or a DICOM series, a `Volume` in HU, or a `SimpleITK.Image` in HU.
            hu: What makes HU of values that are none.

        Returns:
            Labels of the scan's kind, and what there is to know of them.

        Raises:
            UserError: If it cannot be read as one regular 3D volume, or shows nothing.
        """
        # A thread that began while another one resampled may have been given a single one to compute with.
        torch.set_num_threads(self.num_threads)
        start_s = time.perf_counter()
        if isinstance(scan, (str, Path)):
            name, volume = str(scan), read_image(Path(scan))
        elif isinstance(scan, Volume):
            name, volume = "Volume", scan
        else:
            require(is_simpleitk(scan), f"expected a path, a Volume or a SimpleITK image, but got {type(scan).__name__}")
            name, volume = "SimpleITK image", from_simpleitk(scan)
        read_s = time.perf_counter() - start_s
        result = segment_scan(volume, name, hu, self.coarse, self.fine, self.options)
        is_image = not isinstance(scan, (str, Path, Volume))
        labels = to_simpleitk(result.labels, scan) if is_image else Volume(result.labels, volume.grid, volume.header)
        durations_s = {"read": read_s, **result.durations_s, "total": time.perf_counter() - start_s}
        return SegmentedScan(labels, result.volumes_ml, result.boxes, result.agreements, result.warnings, durations_s)


def load_cascade(
    coarse: Sequence[str | Path], fine: Sequence[str | Path], accelerator: Accelerator, precision: str | None
) -> tuple[TrainedStage, TrainedStage]:
    """Load both stages, those that come with medseg where no checkpoint is given.

    Raises:
        UserError: If the device, the precision or a checkpoint is not usable, or the stages do not fit together.
    """
    from medseg.memory.precision import check_precision

    device = pick_device(accelerator, "accelerator")
    if precision is not None:
        try:
            check_precision(precision, device.type)
        except ValueError as error:
            raise UserError(f"precision={precision}: {error}") from error
    stages = [
        load_stages([Path(path) for path in given] or [shipped_weights("lungs", stage)], stage, device, precision)
        for stage, given in (("coarse", coarse), ("fine", fine))
    ]
    check_stages(*stages)
    return stages[0], stages[1]


def segment_scan(
    volume: Volume, name: str | Path, hu: HuScale, coarse: TrainedStage, fine: TrainedStage, options: CascadeOptions
) -> Segmentation:
    """Segment a scan that has just been read, after a look at its values.

    Args:
        volume: Scan in the values of its file.
        name: What to call it in a message.
        hu: What makes HU of the values.
        coarse: Trained coarse stage.
        fine: Trained fine stage.
        options: How the networks are run.

    Returns:
        Labels in the scan's storage order; among the warnings also what its reader and the audit of its values say.

    Raises:
        UserError: If it shows nothing.
    """
    from medseg.data.audit.finding import Severity
    from medseg.data.audit.image import audit_image, measure_image

    if volume.array.min() == volume.array.max():
        raise UserError(f"{name}: expected a scan, but every voxel holds {volume.array.flat[0]:g}; export it again.")
    volume = replace(volume, array=hu.apply(volume.array))
    odd = [finding for finding in audit_image(measure_image(volume.array)) if finding.severity is not Severity.note]
    result = segment(volume, coarse, fine, options)
    return replace(result, warnings=[*volume.remarks, *map(str, odd), *result.warnings])
