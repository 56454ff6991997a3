"""Forecast of a prediction: what a case holds in memory, step by step, and how long it takes, from the grid of its scan alone."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import median
from typing import NamedTuple, cast

import torch

from medseg.anatomy.rules import REGION_MM
from medseg.cascade.cascade import Cascade
from medseg.cascade.stage import TrainedStage, flips
from medseg.errors import UserError
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.geometry.sizes import Shape, network_size
from medseg.inference.options import InferenceOptions
from medseg.inference.tiles import TilingPlan, tile_boxes
from medseg.io.atomic import replace_text
from medseg.io.machine_cache import machine_folder
from medseg.memory.accounting import WORKSPACE
from medseg.memory.heap import maps_large_blocks
from medseg.nnunet.model import NnunetModel
from medseg.prediction.around import RESAMPLE, RESTORE, VALUE, TotalsegmentatorModel
from medseg.prediction.contract import LIBRARIES_BYTES, SLABS_BYTES
from medseg.prediction.joined import JoinedModels
from medseg.prediction.model import ScanModel
from medseg.preprocess.orient import oriented_grid
from medseg.preprocess.resample import MAX_THREADS, SLAB_VOXELS

# Bytes of a voxel: of a scan (int16), its labels, an image at the spacing of a stage, a stored
# probability, and one of a tile.
SCAN, LABEL, IMAGE, PROBABILITY, SUM = 2, 1, 4, 2, 4
# Workspaces of kernels per byte of live tensors, beside it; the budget counts with the larger
# `WORKSPACE`.
USUAL_WORKSPACE = 1.25
# Box of the body with the table, (z, y, x): its share of a scan's axes, and the most that it takes
# of a wide field of view. Medians of 33 scans.
BODY_SHARE, BODY_MM = (1.0, 0.8, 1.0), (math.inf, 360.0, 480.0)
# Bytes per voxel of the scan that a thread resamples at a time. The heap keeps those of a crop
# until its step ends, unless large blocks are mapped.
RESAMPLING = 24
# Freed memory that a further thread keeps for itself, unless large blocks are mapped: glibc gives
# each thread heaps of 64 MiB.
THREAD_HEAP = 64 * 2**20
# Bytes per voxel of a slab in which a label is cleaned (numbers of components and masks), and bytes
# while they are counted.
CLEANING, COUNTING = 8, 32 * 2**20
CLEANED_VOXELS = 2**25
# Time of a voxel that goes through a network by that of a voxel of the scan; two cores of an AMD
# EPYC, included weights.
NETWORK_TIME = 5
# The same for a head of a model of nnU-Net: a voxel of a tile that is added to the sums, and one of
# the scan to which logits are resampled.
SUM_TIME, LOGIT_TIME = 0.1, 0.4
# Durations of this many finished cases are kept.
MAX_CASES = 20


class Forecast(NamedTuple):
    """Expected cost of a case.

    Attributes:
        memory: Resident bytes of the process by step.
        voxels: Voxels of the scan, and `NETWORK_TIME` for each that goes through a network: the
            duration is proportional to it.
    """

    memory: dict[str, int]
    voxels: int

    @property
    def peak_bytes(self) -> int:
        """Largest resident memory."""
        return max(self.memory.values())


def forecast(
    model: ScanModel, grid: VoxelGrid, loaded_bytes: int, array_bytes: float = math.inf
) -> Forecast:
    """Forecast the memory of a case from the header of its scan.

    Args:
        model: What segments it, with the memory that a network may use.
        grid: Grid of the scan, in storage order.
        loaded_bytes: Resident memory of the process with the weights, before the first scan.
        array_bytes: Size above which an array is a temporary file, see
            `medseg.prediction.contract`.

    Raises:
        UserError: If a stage cannot keep its budget.
    """
    if isinstance(model, JoinedModels):
        return _forecast_joined(model, grid, loaded_bytes, array_bytes)
    if isinstance(model, TotalsegmentatorModel):
        return _forecast_resampled(model, grid, loaded_bytes, array_bytes)
    if isinstance(model, NnunetModel):
        return _forecast_nnunet(model, grid, loaded_bytes, array_bytes)
    return _forecast_cascade(cast(Cascade, model), grid, loaded_bytes, array_bytes)


def _forecast_resampled(
    model: TotalsegmentatorModel, grid: VoxelGrid, loaded_bytes: int, array_bytes: float
) -> Forecast:
    """Forecast a model that segments a resampled scan, beside the scan itself."""
    resampled_grid = model.resampled_grid(grid)
    channels = len(model.task.channels)

    def held(*sizes: int) -> int:
        return sum(size for size in sizes if size <= array_bytes)

    num_voxels, num_resampled = math.prod(grid.shape), math.prod(resampled_grid.shape)
    scan_bytes = channels * held(SCAN * num_voxels)
    # The forecast of the inner model counts the resampled scan as one that was read.
    resampled_bytes = channels * held(VALUE * num_resampled)
    counted_bytes = channels * held(SCAN * num_resampled)
    inner = forecast(model.model, resampled_grid, loaded_bytes, array_bytes)
    more_bytes = scan_bytes + resampled_bytes - counted_bytes
    read_bytes = inner.memory["read"] - counted_bytes + scan_bytes
    memory = {"read": read_bytes, RESAMPLE: read_bytes + resampled_bytes}
    for step, num_bytes in inner.memory.items():
        if step != "read":
            memory[step] = num_bytes + more_bytes
    labels_bytes = held(LABEL * num_resampled, LABEL * num_voxels)
    memory[RESTORE] = read_bytes + resampled_bytes + labels_bytes
    return Forecast(memory, channels * num_voxels + inner.voxels)


def _forecast_joined(
    model: JoinedModels, grid: VoxelGrid, loaded_bytes: int, array_bytes: float
) -> Forecast:
    """Forecast models that run one after the other, beside the labels of those before."""
    labels_bytes = LABEL * math.prod(grid.shape)
    joined_bytes = labels_bytes if labels_bytes <= array_bytes else 0
    memory: dict[str, int] = {}
    cost = 0
    for number, part in enumerate(model.parts, start=1):
        expected = forecast(part, grid, loaded_bytes, array_bytes)
        held_bytes = 0 if number == 1 else joined_bytes
        for step, num_bytes in expected.memory.items():
            name = step if step == "read" else model.step_name(number, step)
            memory[name] = num_bytes + held_bytes
        cost += expected.voxels
    return Forecast(memory, cost)


def _forecast_nnunet(
    model: NnunetModel, grid: VoxelGrid, loaded_bytes: int, array_bytes: float
) -> Forecast:
    """Forecast a case of a model of nnU-Net, which has no crop that is unknown beforehand."""
    num_voxels, channels = math.prod(grid.shape), len(model.task.channels)
    fixed = loaded_bytes + LIBRARIES_BYTES
    if SCAN * num_voxels <= array_bytes:
        fixed += channels * SCAN * num_voxels
    expected, network_voxels = model.expected(grid)
    memory = {"read": fixed}
    for step, sizes in expected.items():
        memory[step] = fixed + sum(size for size in sizes if size <= array_bytes)
    num_heads = model.plan.labels.num_heads
    cost = (channels + LOGIT_TIME * num_heads) * num_voxels
    cost += (NETWORK_TIME + SUM_TIME * num_heads) * network_voxels
    return Forecast(memory, round(cost))


def _forecast_cascade(
    cascade: Cascade, grid: VoxelGrid, loaded_bytes: int, array_bytes: float
) -> Forecast:
    """Forecast a case; the body and the regions are not known yet, so their usual sizes are taken.

    Args:
        cascade: The trained stages, with the memory that a network may use.
        grid: Grid of the scan, in storage order.
        loaded_bytes: Resident memory of the process with the weights, before the first scan.
        array_bytes: Size above which an array is a temporary file, see
            `medseg.prediction.contract`.

    Raises:
        UserError: If a stage cannot keep its budget.
    """
    grid, task, options, coarse = (
        oriented_grid(grid),
        cascade.coarse.task,
        cascade.options,
        cascade.coarse,
    )

    def held(*sizes: float) -> int:
        return round(sum(size for size in sizes if size <= array_bytes))

    num_voxels, channels, first = math.prod(grid.shape), len(task.channels), cascade.steps[0]
    threads = min(torch.get_num_threads(), MAX_THREADS)
    has_holes = not maps_large_blocks()
    heaps = has_holes * (threads - 1) * min(THREAD_HEAP, IMAGE * num_voxels)
    libraries = LIBRARIES_BYTES + cascade.backend_bytes
    fixed = loaded_bytes + libraries + heaps + channels * held(SCAN * num_voxels)
    lattice, scan_mm = (
        grid.resampled(coarse.spacing_mm),
        [n * mm for n, mm in zip(grid.shape, grid.spacing_mm, strict=True)],
    )
    body = _crop_shape(
        coarse,
        grid,
        [
            min(length * share, most)
            for length, share, most in zip(scan_mm, BODY_SHARE, BODY_MM, strict=True)
        ],
        None,
    )
    during, kept = _pass_bytes(coarse, task.num_classes, body, options, array_bytes)
    memory = {
        "read": fixed,
        first: fixed + channels * held(IMAGE * math.prod(lattice.shape)) + during,
    }
    voxels = channels * num_voxels + NETWORK_TIME * _pass_voxels(coarse, body, options)
    if cascade.fine is not None:
        fine, kept = cascade.fine, 0
        extent_mm = [min(pair) for pair in zip(REGION_MM, scan_mm, strict=True)]
        shape = _crop_shape(fine, grid, extent_mm, fine.tile_size or fine.least_size)
        cleaned = math.prod(extent_mm) / math.prod(grid.spacing_mm)
        resampling = has_holes * round(RESAMPLING * min(threads * SLAB_VOXELS, cleaned, num_voxels))
        during, probs = _pass_bytes(fine, task.num_region_classes, shape, options, array_bytes)
        for region, step in zip(task.regions, cascade.steps[1:], strict=False):
            memory[step] = fixed + kept + resampling + during
            kept += round(probs * len(region.labels) / task.num_region_classes)
            voxels += NETWORK_TIME * _pass_voxels(fine, shape, options)
    else:
        cleaned, extent_mm = num_voxels, scan_mm
    cleaning = COUNTING + CLEANING * min(cleaned, CLEANED_VOXELS, num_voxels)
    # Zeros of planes without a region take no memory until they are written.
    labels = held(LABEL * num_voxels) * extent_mm[0] / scan_mm[0]
    memory["join"] = fixed + kept + round(labels + min(SLABS_BYTES, cleaning))
    return Forecast(memory, voxels)


def _crop_shape(
    stage: TrainedStage, grid: VoxelGrid, extent_mm: Sequence[float], patch_size: Shape | None
) -> Shape:
    """Voxels (D, H, W) of the crop that a stage makes of a box of some extent."""
    lattice = grid.resampled(stage.spacing_mm).resampled(stage.rule.spacing_mm(grid.spacing_mm))
    shape = (
        max(1, math.ceil(length / mm))
        for length, mm in zip(extent_mm, lattice.spacing_mm, strict=True)
    )
    crop = stage.rule.crop(
        VoxelBox.full(tuple(shape)), lattice, patch_size or (1, 1, 1), stage.divisor
    )
    return crop.grid.shape


def _pass_bytes(
    stage: TrainedStage, classes: int, shape: Shape, options: InferenceOptions, array_bytes: float
) -> tuple[int, int]:
    """Bytes while a crop goes through a stage, and those of its probabilities, which stay."""

    def held(size: float) -> float:
        return size if size <= array_bytes else 0.0

    plan, channels = stage.plan(shape, options), stage.num_channels
    seen = network_size(plan.tile_size or shape, stage.divisor)
    padded: Shape = tuple(map(max, shape, seen))  # type: ignore[assignment]
    # One pass gives its probabilities when its features are free.
    probs = 0.0 if plan == TilingPlan(None) else held(PROBABILITY * classes * math.prod(padded))
    during = (
        held(IMAGE * channels * math.prod(shape))
        + (padded != shape) * held(IMAGE * channels * math.prod(padded))
        + probs
    )
    if stage.has_views(options):
        during += held(IMAGE * classes * math.prod(shape)) + held(IMAGE * math.prod(shape))
    if stage.device.type == "cpu":
        live = USUAL_WORKSPACE / WORKSPACE * stage.bytes_per_voxel * math.prod(seen)
        during += plan.slab_bytes or live
        if plan.tile_size is not None:
            layer = held(SUM * classes * seen[0] * math.prod(padded[1:]))
            during += 2 * layer + SUM * classes * math.prod(seen)
    return round(during), round(held(PROBABILITY * classes * math.prod(shape)))


def _pass_voxels(stage: TrainedStage, shape: Shape, options: InferenceOptions) -> int:
    """Voxels that go through the networks of a stage for one crop."""
    seen = network_size(stage.tile_size or shape, stage.divisor)
    num_tiles = 1
    if stage.tile_size:
        depth, height, width = map(max, shape, seen)
        num_tiles = len(tile_boxes((depth, height, width), seen, options.overlap))
    return num_tiles * math.prod(seen) * len(stage.networks) * len(flips(stage.task, options.tta))


def forecast_text(forecasts: Mapping[str, Forecast], rate_s: float | None, num_cases: int) -> str:
    """Say what a batch will hold and, where this machine has finished cases before, how long it will take.

    Args:
        forecasts: Name to the forecast of cases, at least one; those of a long batch are a part of
            all.
        rate_s: Seconds per voxel; None is unknown.
        num_cases: Number of all cases.
    """
    largest = max(forecasts, key=lambda name: forecasts[name].peak_bytes)
    said = f"expected peak memory {forecasts[largest].peak_bytes / 2**30:.2f} GiB"
    if num_cases > 1:
        said = f"{num_cases} cases, {said} (case {largest})"
    if rate_s is None:
        return said
    seconds = rate_s * sum(one.voxels for one in forecasts.values()) * num_cases / len(forecasts)
    return f"{said}, expected time {f'{seconds:.0f} s' if seconds < 120 else f'{seconds / 60:.0f} min'}"


def expected_cost(
    expected: Forecast, cascade: ScanModel, total_s: float
) -> dict[str, float | None]:
    """Return the expected peak and seconds of a case (null for the first one), and record its `total_s` for later cases."""
    key = machine_key(cascade)
    rate_s = seconds_per_voxel(key)
    note_duration(key, total_s, expected.voxels)
    return {
        "peak_resident_bytes": expected.peak_bytes,
        "total_s": None if rate_s is None else round(rate_s * expected.voxels, 2),
    }


def machine_key(cascade: ScanModel) -> str:
    """Name of all that decides the seconds per voxel on this machine: weights, precision, device and threads."""
    weights = " ".join(
        checksum[:12]
        for files in cascade.checkpoints.values()
        for checksum in sorted(files.values())
    )
    return f"{weights} {cascade.precision} {cascade.device} {torch.get_num_threads()} threads, torch {torch.__version__}"


def seconds_per_voxel(key: str) -> float | None:
    """Median of the cases that this machine has finished; None if there are none."""
    rates = _known_rates().get(key)
    return median(rates) if rates else None


def note_duration(key: str, seconds: float, voxels: int) -> None:
    """Add a finished case to those of this machine, where the folder can be written."""
    known = _known_rates()
    known[key] = [*known.get(key, []), seconds / voxels][-MAX_CASES:]
    with suppress(UserError):
        replace_text(machine_folder() / "predictions.json", json.dumps(known, indent=1))


def _known_rates() -> dict[str, list[float]]:
    try:
        known = json.loads((machine_folder() / "predictions.json").read_text(encoding="utf-8"))
        return {key: [float(rate) for rate in rates] for key, rates in known.items()}
    except (OSError, ValueError, TypeError, AttributeError):  # none yet, or a damaged one
        return {}
