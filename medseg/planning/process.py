"""Processes of a run beside its tensors: resident memory of the libraries and of a loader worker, memory and seconds of a sample."""

import hashlib
import importlib.metadata
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import torch

from medseg.build.run import make_data_module
from medseg.config.schema import PlanConfig
from medseg.data.audit.finding import CaseAudit
from medseg.data.cache import CachedCase
from medseg.data.task import Task
from medseg.errors import UserError
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.io.atomic import replace_text
from medseg.memory.profile import peak_resident_bytes, private_bytes, resident_bytes
from medseg.planning.step import Shape
from medseg.preprocess.intensity import intensity_of
from medseg.runs.signature import plain

INTERVAL_S = 0.02
# A training of the smallest size with one loader worker, a validation, its picture and its checkpoints.
REHEARSAL = [
    "train", "stage=coarse", "steps=2", "stage.patch_size=[16,16,16]",
    "inference.tile_size=[16,16,16]", "stage.slab_share=0", "data.phantoms.num_train=1", "data.phantoms.num_val=1", "data.phantoms.num_test=0",
    "data.num_workers=1", "trainer.accelerator=cpu", "trainer.threads=1", "spacing=isotropic_4mm",
]  # fmt: skip
# A small network of ours or of MONAI, whose libraries take more memory.
SMALL_UNET = ["model.width=4", "model.depth=1", "model.blocks_per_level=[1,1]"]
SMALL_MONAI = ["model=segresnet", "model.init_filters=8", "model.blocks_down=[1,1,1]", "model.blocks_up=[1,1]"]


class ProcessMemory(NamedTuple):
    """Resident bytes of a run without its tensors.

    Attributes:
        main: Of the training process: interpreter, libraries, a picture.
        worker: Of a loader worker, beyond what it shares with the training process.
    """

    main: int
    worker: int


class SampleCost(NamedTuple):
    """Cost of making a training sample.

    Attributes:
        num_bytes: Memory while it is made.
        seconds: Duration on one thread.
    """

    num_bytes: int
    seconds: float


def process_memory(folder: Path, *, has_logger: bool, has_monai: bool) -> ProcessMemory:
    """Measure the resident memory of a run beside its tensors by a tiny training; read it where it was measured before.

    Args:
        folder: Folder of the machine's measurements.
        has_logger: Whether a logger is loaded, which brings libraries of its own.
        has_monai: Whether the network is one of MONAI's, likewise.

    Raises:
        UserError: If the training fails.
    """
    names = ("medseg", "torch", "lightning", "monai", "matplotlib", "numpy", "tensorboard")
    versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in names if _is_installed(name))
    path = folder / f"process {versions}{'' if has_logger else ' no logger'}{' MONAI network' if has_monai else ''}.json"
    known = _read(path)
    if known is not None:
        return ProcessMemory(int(known[0]), int(known[1]))
    with tempfile.TemporaryDirectory(prefix="medseg-plan-") as name:
        parts = [*(SMALL_MONAI if has_monai else SMALL_UNET), *([] if has_logger else ["logger=none"])]
        parts += [f"data.phantoms.folder={name}/phantoms", f"data.cache={name}/cache"]
        # The first training also makes scan and cache, which takes more memory.
        for number in range(2):
            found = _watched_training([*REHEARSAL, *parts, f"hydra.run.dir={name}/run{number}"], Path(name) / "log")
    with suppress(UserError):  # a folder that cannot be written: measured again the next time
        replace_text(path, json.dumps(found))
    return found


def _watched_training(arguments: list[str], log: Path) -> ProcessMemory:
    """Run a training in a process of its own and watch its memory and that of its worker."""
    command = [sys.executable, "-m", "medseg.commands.cli", *arguments]
    main = worker = 0
    with log.open("wb") as output, psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        while process.poll() is None:
            with suppress(psutil.Error):  # it has just ended
                main = max(main, process.memory_info().rss)
                worker = max([worker, *(private_bytes(one.pid) for one in process.children(recursive=True))])
            time.sleep(INTERVAL_S)
    if process.returncode:
        last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no message"])[-1]
        raise UserError(f"plan: the training that measures the memory of a process failed ({last}); give measure=false")
    return ProcessMemory(main, worker)


def _is_installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def sample_cost(config: PlanConfig, shape: Shape, folder: Path, *, is_training: bool = True) -> SampleCost:
    """Make samples of a synthetic case in a process of its own, and measure them; read the measurement where there is one.

    Args:
        config: Checked configuration.
        shape: Voxels of a sample, (D, H, W).
        folder: Folder of the machine's measurements.
        is_training: Whether samples are patched and augmented as in training; else, as in validation.
    """
    values = plain(config)
    key = repr(
        (shape, is_training, [values[group] for group in ("augment", "spacing", "stage", "task", "inference")], torch.__version__)
    )
    path = folder / "samples" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    known = _read(path)
    if known is not None:
        return SampleCost(int(known[0]), known[1])
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        found = SampleCost(*pool.submit(_make_samples, config, shape, is_training).result())
    with suppress(UserError):  # a folder that cannot be written: measured again the next time
        replace_text(path, json.dumps(found))
    return found


def _read(path: Path) -> list[float] | None:
    """Read two numbers that were measured before; None if there are none, or damaged ones."""
    try:
        first, second = json.loads(path.read_text(encoding="utf-8"))
        return [float(first), float(second)]
    except (OSError, ValueError, TypeError):
        return None


def _make_samples(config: PlanConfig, shape: Shape, is_training: bool) -> tuple[int, float]:
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
