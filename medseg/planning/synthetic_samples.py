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

# Samples of this length, beside the margins of a crop, load the libraries and fill the heap as
# those of the tiny training that measures a loader worker.
WARM_UP_LENGTH = 16
# Samples that are made and timed, and the seconds after which no further one is. They are many
# because the draws of the augmentation differ: in patches of 64×64×64 voxels the memory of the
# first samples is half of that after thirty.
MOST_SAMPLES, MOST_S = 48, 3.0
# Spacing of the probabilities that a sample with a coarse channel is given. The cost of the channel
# is that of the voxels of the sample, whatever the spacing.
COARSE_MM = 4.0


def make_samples(config: PlanConfig, shape: Shape, is_training: bool) -> tuple[int, float]:
    """Make samples of a synthetic case on one thread, in a process that does nothing else.

    Args:
        config: Checked configuration.
        shape: Voxels of a sample, (D, H, W).
        is_training: Whether samples are patched and augmented as in training; else, as in
            validation.

    Returns:
        Bytes of memory while samples are made, with what the process keeps afterwards, and the
        processor time of one.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="medseg-plan-") as name:
        small = _samples_of(config, _smaller(config, shape), Path(name) / "small", is_training)
        small[0]  # loads what the first sample needs
        before = resident_bytes()
        samples = _samples_of(config, shape, Path(name) / "large", is_training)
        samples[0]
        durations_s: list[float] = []
        while len(durations_s) < MOST_SAMPLES and sum(durations_s) < MOST_S:
            # Processor time, which other programs on the machine do not lengthen.
            start_s = time.process_time()
            samples[len(durations_s) + 1]
            durations_s.append(time.process_time() - start_s)
        return max(0, peak_resident_bytes() - before), median(durations_s)


def _samples_of(config: PlanConfig, shape: Shape, folder: Path, is_training: bool) -> Samples:
    """Make the data set of a synthetic case in which samples of a shape can be cut."""
    folder.mkdir()
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


def _smaller(config: PlanConfig, shape: Shape) -> Shape:
    """Size of the warm-up, which does not exceed the samples."""
    depth, height, width = (
        min(length, WARM_UP_LENGTH + 2 * margin)
        for length, margin in zip(shape, _margins(config), strict=True)
    )
    return depth, height, width


def _margins(config: PlanConfig) -> list[int]:
    """Voxels around a region that a whole crop contains, by axis."""
    if config.stage.patch_size is not None:
        return [0, 0, 0]
    margin_mm = config.stage.region_margin_mm or 0.0
    return [round(margin_mm / voxel_mm) for voxel_mm in _spacing_mm(config)]


def _spacing_mm(config: PlanConfig) -> tuple[float, float, float]:
    """Spacing of the synthetic case; 1 mm where scans keep their own."""
    return config.spacing.target_spacing_mm or (1.0, 1.0, 1.0)


def synthetic_case(folder: Path, config: PlanConfig, task: Task, shape: Shape) -> CachedCase:
    """Write a cache entry of a scan whose regions are boxes.

    Samples of the shape can be cut in it.
    """
    # A fine stage and patches cut their samples in a larger volume.
    is_whole = config.stage.name is not StageName.fine and config.stage.patch_size is None
    border = 0 if is_whole else 16
    depth, height, width = (length + border for length in shape)
    grid = VoxelGrid((depth, height, width), _spacing_mm(config))
    box = _region_box(grid.shape, shape, _margins(config))
    labels = np.zeros(grid.shape, dtype=np.uint8)
    slabs = np.array_split(labels[box.slices()], len(task.labels))
    for value, slab in enumerate(slabs, start=1):
        slab[:] = value
    (folder / "case.json").touch()  # a case is read as long as its record is there
    np.save(folder / "labels.npy", labels)
    intensities: list[Intensity | None] = []
    for number, channel in enumerate(task.channels):
        dtype = np.int16 if channel.modality == "ct" else np.float32
        image = np.zeros(grid.shape, dtype)
        # The names of `medseg.data.cache`.
        file_name = f"image_{number}.npy" if number else "image.npy"
        np.save(folder / file_name, image)
        if channel.window_hu:
            intensities.append(None)
            continue
        image[0, 0, 0] = 1  # a percentile or a standard deviation of a constant image is refused
        intensities.append(intensity_of(image, channel.modality, channel.normalise, None))
    return CachedCase(
        "synthetic",
        folder,
        grid,
        {region.name: box for region in task.regions},
        CaseAudit(grid, {}, "", {}, ()),
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
    """Box in the middle of a volume that makes, with its margins, a sample of a shape."""
    starts: list[int] = []
    stops: list[int] = []
    for volume_length, length, margin in zip(volume_shape, shape, margins, strict=True):
        start = (volume_length - length) // 2 + margin
        stop = (volume_length + length) // 2 - margin
        starts.append(start)
        # A sample within its margins has a region of one voxel.
        stops.append(max(stop, start + 1))
    return VoxelBox.of(starts, stops)
