"""Samples of a synthetic case, made to measure their memory and their seconds."""

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch

from medseg.config.schema import PlanConfig
from medseg.data.audit.finding import CaseAudit
from medseg.data.cache import CachedCase, CoarseProbs
from medseg.data.options import StageName
from medseg.data.samples import Samples
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.geometry.sizes import Shape
from medseg.memory.profile import peak_resident_bytes, resident_bytes
from medseg.preprocess.intensity import Intensity, intensity_of
from medseg.task import Task
from medseg.training.assemble import make_data_module

# Voxels along each axis of a first sample, beside the margins of a crop. This sample loads
# the libraries and fills the heap. Their memory is not counted here, because the tiny training
# (`REHEARSAL`) has measured it as a part of a loader worker.
WARM_UP_LENGTH = 16
# Samples are made and timed until there are MOST_SAMPLES, or have taken MOST_S seconds. Many are
# needed because augmentation is random: with patches of 64×64×64 voxels the peak of
# the memory after the first samples is half of the peak after thirty.
MOST_SAMPLES, MOST_S = 48, 3.0
# Spacing of the synthetic probabilities for samples with a coarse channel. It does not change the
# cost of the channel, which depends on the voxels of the sample.
COARSE_MM = 4.0
# Voxels by which the volume is longer, along each axis, than a sample that is cut out of it.
BORDER = 16


def make_samples(config: PlanConfig, shape: Shape, is_training: bool) -> tuple[int, float]:
    """Make samples of a synthetic case on one thread, in a process that does nothing else.

    Args:
        config: Checked configuration.
        shape: Voxels of a sample, (D, H, W).
        is_training: Whether samples are cut and augmented as in training; else, as in validation.

    Returns:
        Bytes of memory while samples are made, with what the process keeps afterwards, and the
        processor time of one, in seconds.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="medseg-plan-") as scratch:
        small_shape = _warm_up_shape(config, shape)
        small_samples = _samples_of(config, small_shape, Path(scratch) / "small", is_training)
        small_samples[0]  # reading an item makes the sample, and loads what the first one needs
        bytes_before = resident_bytes()
        samples = _samples_of(config, shape, Path(scratch) / "large", is_training)
        samples[0]  # not timed: reads the case for the first time
        durations_s: list[float] = []
        while len(durations_s) < MOST_SAMPLES and sum(durations_s) < MOST_S:
            # Processor time, which other programs on the machine do not lengthen.
            start_s = time.process_time()
            samples[len(durations_s) + 1]
            durations_s.append(time.process_time() - start_s)
        return max(0, peak_resident_bytes() - bytes_before), median(durations_s)


def _samples_of(config: PlanConfig, shape: Shape, folder: Path, is_training: bool) -> Samples:
    """Make a data set of one synthetic case, with samples of a shape (D, H, W)."""
    folder.mkdir()
    # Without the trained coarse stage, which may not exist yet.
    stage = replace(config.stage, coarse=None, coarse_folds=None)
    if stage.patch_size is not None:
        stage = replace(stage, patch_size=shape)
    data = make_data_module(replace(config, stage=stage), sources=[])
    data.setup("fit")
    case = synthetic_case(folder, config, data.task, shape)
    data.train_cases, data.val_cases, data.weights = [case], [case], [1.0]
    if stage.coarse_channel:
        probs = _synthetic_probs(folder, case.grid, data.task)
        data.crops = replace(data.crops, coarse_probs={case.name: probs})
    return data.train_samples() if is_training else data.val_samples()


def _warm_up_shape(config: PlanConfig, shape: Shape) -> Shape:
    """Voxels of the warm-up's sample, (D, H, W): along no axis more than the other samples have."""
    lengths = []
    for length, margin in zip(shape, _margins(config), strict=True):
        lengths.append(min(length, WARM_UP_LENGTH + 2 * margin))
    depth, height, width = lengths
    return depth, height, width


def _margins(config: PlanConfig) -> list[int]:
    """Voxels by which a crop extends beyond its region on each side, by axis (z, y, x).

    Patches have no margin.
    """
    if config.stage.patch_size is not None:
        return [0, 0, 0]
    margin_mm = config.stage.region_margin_mm or 0.0
    return [round(margin_mm / voxel_mm) for voxel_mm in _spacing_mm(config)]


def _spacing_mm(config: PlanConfig) -> tuple[float, float, float]:
    """Spacing of the synthetic case; 1 mm where scans keep their own."""
    return config.spacing.target_spacing_mm or (1.0, 1.0, 1.0)


def synthetic_case(folder: Path, config: PlanConfig, task: Task, shape: Shape) -> CachedCase:
    """Write a cache entry of a scan out of which samples of a shape can be cut.

    All its regions are the same box.

    Args:
        folder: Folder of the entry.
        config: Checked configuration.
        task: Task of the configuration, with its labels and channels.
        shape: Voxels of a sample, (D, H, W).
    """
    # A fine stage and patches cut their samples out of a larger volume.
    is_whole = config.stage.name is not StageName.fine and config.stage.patch_size is None
    border = 0 if is_whole else BORDER
    depth, height, width = shape
    volume_shape = (depth + border, height + border, width + border)
    grid = VoxelGrid(volume_shape, _spacing_mm(config))
    box = _region_box(grid.shape, shape, _margins(config))
    labels = np.zeros(grid.shape, dtype=np.uint8)
    # The box is divided along z among all labels. The slabs are views of `labels`.
    slabs = np.array_split(labels[box.slices()], len(task.labels))
    for value, slab in enumerate(slabs, start=1):
        slab[:] = value
    (folder / "case.json").touch()  # a case is read as long as its record is there
    np.save(folder / "labels.npy", labels)
    intensities: list[Intensity | None] = []
    for number, channel in enumerate(task.channels):
        # Names and number formats are those of `medseg.data.cache`.
        dtype = np.int16 if channel.modality == "ct" else np.float32
        image = np.zeros(grid.shape, dtype)
        file_name = f"image_{number}.npy" if number else "image.npy"
        np.save(folder / file_name, image)
        # A window needs no statistics of the image.
        if channel.window_hu:
            intensities.append(None)
            continue
        # The file is written already: this voxel serves the statistics alone, which are refused for
        # a constant image.
        image[0, 0, 0] = 1
        intensity = intensity_of(image, channel.modality, channel.normalise, window_hu=None)
        intensities.append(intensity)
    no_findings = CaseAudit(grid, hu={}, voxels_sha256="", volumes_ml={}, findings=())
    return CachedCase(
        name="synthetic",
        folder=folder,
        grid=grid,
        region_boxes={region.name: box for region in task.regions},
        audit=no_findings,
        resampling=config.spacing.resampling.value,
        label_boxes=dict.fromkeys(task.labels, box),
        intensities=tuple(intensities),
    )


def _synthetic_probs(folder: Path, grid: VoxelGrid, task: Task) -> CoarseProbs:
    """Write probabilities of a coarse stage, as the cache holds them, over the whole grid."""
    coarse_grid = grid.resampled((COARSE_MM, COARSE_MM, COARSE_MM))
    probs = np.zeros((task.num_classes, *coarse_grid.shape), dtype=np.float16)
    file = folder / "coarse.npy"
    np.save(file, probs)
    return CoarseProbs(file, coarse_grid)


def _region_box(volume_shape: Shape, shape: Shape, margins: list[int]) -> VoxelBox:
    """Make a box in the middle of a volume that has, with its margins, a shape (D, H, W)."""
    starts: list[int] = []
    stops: list[int] = []
    for volume_length, length, margin in zip(volume_shape, shape, margins, strict=True):
        start = (volume_length - length) // 2 + margin
        stop = (volume_length + length) // 2 - margin
        starts.append(start)
        # Where the margins leave nothing, the box has one voxel: a region must not be empty.
        stops.append(max(stop, start + 1))
    return VoxelBox.of(starts, stops)
