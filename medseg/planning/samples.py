"""Samples of a synthetic case, made to measure their memory and their seconds."""

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from medseg.build.run import make_data_module
from medseg.config.schema import PlanConfig
from medseg.data.audit.finding import CaseAudit
from medseg.data.cache import CachedCase
from medseg.data.task import Task
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.memory.profile import peak_resident_bytes, resident_bytes
from medseg.planning.step import Shape
from medseg.preprocess.intensity import intensity_of


def make_samples(config: PlanConfig, shape: Shape, is_training: bool) -> tuple[int, float]:
    """Make samples of a synthetic case on one thread, in a process that does nothing else.

    Args:
        config: Checked configuration.
        shape: Voxels of a sample, (D, H, W).
        is_training: Whether samples are patched and augmented as in training; else, as in validation.

    Returns:
        Bytes of memory while a sample is made, and seconds of one.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="medseg-plan-") as name:
        data = make_data_module(replace(config, stage=replace(config.stage, coarse=None)), sources=[])
        data.setup("fit")
        case = synthetic_case(Path(name), config, data.task, shape)
        data.train_cases, data.val_cases, data.weights = [case], [case], [1.0]
        samples = data.train_samples() if is_training else data.val_samples()
        samples[0]  # loads what the first sample needs
        before, start_s = resident_bytes(), time.perf_counter()
        num_samples = 0
        while num_samples < 3 and time.perf_counter() - start_s < 2.0:
            num_samples += 1
            samples[num_samples]
        seconds = (time.perf_counter() - start_s) / num_samples
        return max(0, peak_resident_bytes() - before), seconds


def synthetic_case(folder: Path, config: PlanConfig, task: Task, shape: Shape) -> CachedCase:
    """Write a cache entry of a scan whose regions are boxes, in which samples of a shape can be cut."""
    margin_mm, spacing_mm = config.stage.region_margin_mm or 0.0, config.spacing.target_spacing_mm or (1.0, 1.0, 1.0)
    margins = [round(margin_mm / mm) if config.stage.patch_size is None else 0 for mm in spacing_mm]
    size = [length if config.stage.region_mode is None and config.stage.patch_size is None else length + 16 for length in shape]
    box = VoxelBox.of(
        ((length - inner) // 2 + margin for length, inner, margin in zip(size, shape, margins, strict=True)),
        (max(1, (length + inner) // 2 - margin) for length, inner, margin in zip(size, shape, margins, strict=True)),
    )
    grid = VoxelGrid((size[0], size[1], size[2]), spacing_mm)
    labels = np.zeros(size, dtype=np.uint8)
    for value, part in enumerate(np.array_split(labels[box.slices()], len(task.labels)), start=1):
        part[:] = value
    (folder / "case.json").touch()  # a case is read as long as its record is there
    np.save(folder / "labels.npy", labels)
    intensities = []
    for number, channel in enumerate(task.channels):
        image = np.zeros(size, dtype=np.int16 if channel.modality == "ct" else np.float32)
        np.save(folder / (f"image_{number}.npy" if number else "image.npy"), image)
        image[0, 0, 0] = 1  # a percentile or a standard deviation of a constant image is refused
        intensities.append(None if channel.window_hu else intensity_of(image, channel.modality, channel.normalise, None))
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
