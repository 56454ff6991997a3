"""Case of a batch: one scan read, checked and segmented."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from medseg.anatomy.mirrored.cues import mirror_evidence
from medseg.data.audit.image import are_hu, audit_channels, check_channels, measure_image
from medseg.data.source_files import fingerprint
from medseg.errors import UserError
from medseg.findings import Finding, warnings_of
from medseg.inference.scan_model import ScanModel
from medseg.inference.segmentation import Segmentation
from medseg.io.volume import Volume
from medseg.memory.profile import MemoryProfile
from medseg.metrics.hu_statistics import scan_statistics
from medseg.prediction.options import PredictConfig, Save
from medseg.prediction.result_files import PictureVoxels, take_picture_voxels
from medseg.prediction.scans import Scan, scan_grid
from medseg.preprocess.channels import read_channel_images
from medseg.preprocess.orient import orient
from medseg.preprocess.scale import AS_STORED, HuScale
from medseg.task import Task

# Memory of a voxel of a scan, at most: float32.
BYTES_PER_VOXEL = 4


@dataclass
class CaseData:
    """Data of a case on its way from the scan to the result files.

    Attributes:
        volume: The first channel, set by `read_case`; `segment_case` replaces its voxels by the
            labels.
        result: The segmentation, set by `segment_case`.
        picture_voxels: Voxels that the pictures need, set by `segment_case`.
        more_channels: The other channels on the grid of the first, (D, H, W) each, set by
            `read_case`; `segment_case` drops them.
        sources: Fingerprint of the files of each channel when they were read; None where they could
            not be read.
        durations_s: Seconds by step; the time between the steps belongs to other cases.
        memory_gb_s: Memory of the process, integrated over the time of the steps, in GB·s.
    """

    volume: Volume = field(init=False)
    result: Segmentation = field(init=False)
    picture_voxels: PictureVoxels = field(default_factory=PictureVoxels)
    more_channels: list[np.ndarray] = field(default_factory=list)
    sources: list[dict[str, Any] | None] = field(default_factory=list)
    durations_s: dict[str, float] = field(default_factory=dict)
    memory_gb_s: float = 0.0

    @contextmanager
    def measured(self, step: str) -> Iterator[None]:
        """Record time and memory of a step, which is the block."""
        start_s = time.perf_counter()
        with MemoryProfile() as profile:
            yield
        self.durations_s[step] = time.perf_counter() - start_s
        self.memory_gb_s += profile.area_gb_s


def is_small(scan: Scan, task: Task, budget_gib: float) -> bool:
    """Tell whether the voxels of all channels of a scan fit into the budget of a network pass.

    Raises:
        UserError: If its header cannot be read.
    """
    num_voxels = len(task.channels) * math.prod(scan_grid(scan, task).shape)
    return BYTES_PER_VOXEL * num_voxels <= budget_gib * 2**30


def read_case(scan: Scan, task: Task) -> CaseData:
    """Read the channels of a scan and the fingerprint of their files.

    Raises:
        UserError: If one is missing or cannot be read.
    """
    case = CaseData()
    paths = scan.paths(len(task.channels))
    with case.measured("read"):
        # The fingerprint is taken before the voxels are read: a file that changes meanwhile then
        # differs from it, and the case counts as outdated.
        for path, files in zip(paths, scan.files_by_channel(len(paths)), strict=True):
            source = None
            if path is not None:
                with suppress(OSError):  # `read_scan` below reports the same error
                    source = fingerprint(path, files)
            case.sources.append(source)
        case.volume, case.more_channels = read_scan(paths, task, scan.series, scan.hu, scan.files)
    if scan.choice_warning:
        findings = (*warnings_of("reading", [scan.choice_warning]), *case.volume.findings)
        case.volume = replace(case.volume, findings=findings)
    return case


def read_scan(
    paths: Sequence[Path | None],
    task: Task,
    series: str | None,
    hu: HuScale,
    files: Sequence[Path] = (),
) -> tuple[Volume, list[np.ndarray]]:
    """Read the channels of a scan on the grid of the first.

    Args:
        paths: File of each channel; None for a channel without a file.
        task: Has the modality of each channel, and its value outside the field of view.
        series: DICOM series of the first channel, as for `read_image`.
        hu: Scale that turns the values of the first channel into HU.
        files: DICOM files of the first channel; empty where these are all files at its path.

    Returns:
        The first channel, and the arrays (D, H, W) of the others.

    Raises:
        UserError: If one is missing or cannot be read.
    """
    outside = [channel.outside for channel in task.channels]
    modalities = [channel.modality for channel in task.channels]
    images, volume = read_channel_images(
        paths, outside, series=series, files=files, scales=[hu], modalities=modalities
    )
    return volume, images[1:]


def segment_case(
    scan: Scan,
    model: ScanModel,
    case: CaseData,
    config: PredictConfig,
    on_step: Callable[[str], None] | None = None,
) -> None:
    """Segment a scan, keep the voxels that its pictures need, and drop all others.

    Args:
        scan: Its path names it in messages; its reference labels go into the viewer.
        model: What segments it.
        case: Its data from `read_case`, to which `result` and `picture_voxels` are added.
        config: Says which results are written.
        on_step: Called with the name of each step of the model when it begins.

    Raises:
        UserError: If all its voxels have one value.
    """
    with case.measured("segment"):
        case.result = segment_scan(
            case.volume,
            scan.path,
            model,
            case.more_channels,
            scale=scan.hu,
            on_step=on_step,
            keep_probabilities=Save.probabilities in config.save,
        )
        case.picture_voxels = take_picture_voxels(
            scan, case.volume, case.result, model.task, config
        )
    # The next case is segmented while this one is written. The voxels are dropped, so that memory
    # holds those of one scan; the writers need only grid, header and labels.
    case.volume = replace(case.volume, array=case.result.labels)
    case.more_channels = []


def segment_scan(
    volume: Volume,
    name: str | Path,
    model: ScanModel,
    more_channels: Sequence[np.ndarray] = (),
    *,
    is_owned: bool = True,
    scale: HuScale = AS_STORED,
    **options: Any,
) -> Segmentation:
    """Segment a scan that has just been read, after a check of its values.

    Args:
        volume: First channel; a CT in HU.
        name: Name of the scan in messages.
        model: What segments it.
        more_channels: The other channels on the grid of the first, (D, H, W) each.
        is_owned: Whether the channels may be changed in place: values with which a scanner fills
            the space outside the field of view are replaced by air.
        scale: Scale that has been applied to the first channel. The advice of a finding replaces
            it.
        options: `on_step` and `keep_probabilities` of `ScanModel.segment`.

    Returns:
        Labels in the storage order of the scan; the findings include those of the reader and of the
        audit of its values.

    Raises:
        UserError: If all voxels have one value.
    """
    _refuse_constant(volume.array, name)
    task = model.task
    arrays = [volume.array, *more_channels]
    modalities = [channel.modality for channel in task.channels]
    audit_findings: list[Finding] = []
    is_scale_wrong = False
    # With another number of channels there is no audit: the model refuses them below.
    if len(arrays) == len(modalities):
        if model.keeps_values:
            facts = [measure_image(array) for array in arrays]
            facts[0] = replace(facts[0], scale=scale)
            audit_findings = audit_channels(facts, modalities)
        else:
            # Also replaces padding by air in the arrays.
            arrays, facts, audit_findings = check_channels(
                arrays, modalities, is_owned=is_owned, scale=scale
            )
        is_scale_wrong = not are_hu(facts, modalities)
        volume = replace(volume, array=arrays[0])
    result = model.segment(volume, arrays[1:], **options)
    image_hu = volume.array if task.is_ct else None
    statistics = scan_statistics(image_hu, result.labels, volume.grid, task.labels)
    result.statistics, result.total_statistics = statistics
    is_turned = any(finding.code == "body_position" for finding in result.findings)
    # The check needs the HU of organs full of air, and a patient who lies as the header says.
    can_check_sides = task.is_ct and not is_scale_wrong and not is_turned
    if can_check_sides:
        result.findings += mirrored_findings(volume, result.labels, task)
    # Findings from before the segmentation come first.
    result.findings = [*volume.findings, *audit_findings, *result.findings]
    if is_scale_wrong:
        result.status = "not_hu"
    elif result.warnings:
        result.status = "warnings"
    else:
        result.status = "ok"
    return result


def _refuse_constant(image: np.ndarray, name: str | Path) -> None:
    """Refuse an image (D, H, W) of one value.

    Raises:
        UserError: Names the value.
    """
    first_value = image.flat[0]
    for plane in image:
        is_constant = bool((plane == first_value).all())
        # A usual scan leaves here after its first plane, without a mask of all voxels.
        if not is_constant:
            return
    raise UserError(
        f"{name}: expected a scan, but every voxel holds {first_value:g}; export it again."
    )


def mirrored_findings(volume: Volume, labels: np.ndarray, task: Task) -> list[Finding]:
    """Warn of a CT whose left and right seem to be exchanged, against its header.

    Args:
        volume: The scan in HU, in storage order.
        labels: Its label map, in storage order.
        task: Its labels. The check needs two organs full of air that have a side; without them no
            CT counts as mirrored.

    Returns:
        One warning, or none.
    """
    image_hu, grid, orientation = orient(volume.array, volume.grid)
    evidence = mirror_evidence(image_hu, orientation.to_lps(labels), grid.spacing_mm, task)
    if not evidence.is_mirrored:
        return []
    sentence = (
        f"{evidence.sentence}: the image may be mirrored, which exchanges left and right; compare "
        "it with the DICOM files, unless the organs of the patient are known to be mirrored"
    )
    return warnings_of("mirrored_image", [sentence])
