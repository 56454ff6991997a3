"""Forecast of a prediction: what a case holds in memory, step by step, and how long it takes.

Only the grid of its scan is known.
"""

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
from medseg.inference.scan_model import ScanModel
from medseg.inference.tiles import TilingPlan, tile_boxes
from medseg.io.atomic import replace_text
from medseg.io.machine_cache import machine_folder
from medseg.io.scratch import TOUCHED_BYTES
from medseg.memory.accounting import WORKSPACE
from medseg.memory.heap import maps_large_blocks
from medseg.nnunet.ensemble import NnunetEnsemble
from medseg.nnunet.model import NnunetModel
from medseg.prediction.joined import JoinedModels
from medseg.prediction.totalsegmentator import (
    RESAMPLE,
    RESTORE,
    VALUE_BYTES,
    TotalsegmentatorModel,
)
from medseg.preprocess.orient import oriented_grid
from medseg.preprocess.resample import MAX_THREADS, SLAB_VOXELS

# Bytes of a voxel of a scan (int16), of its labels (uint8), of an image at the spacing of a stage
# (float32), of a stored probability (float16), and of one that is summed up over tiles (float32).
SCAN_BYTES = 2
LABEL_BYTES = 1
IMAGE_BYTES = 4
PROBABILITY_BYTES = 2
SUM_BYTES = 4
# Bytes of a pass, with the workspaces of its kernels, by those of its live tensors, which are
# counted on a small image. Below 1, because the head predicts a few planes at a time, which saves
# more of a large image. Measured on phantoms of 1 to 520 slices in bf16; the budget counts with the
# larger `WORKSPACE`.
USUAL_WORKSPACE = 0.75
# Box of the body with the table, (z, y, x): its share of a scan's axes, and the most that it takes
# of a wide field of view. Medians of 33 scans.
BODY_SHARE = (1.0, 0.8, 1.0)
BODY_MM = (math.inf, 360.0, 480.0)
# Bytes of resampling per voxel of the scan that the threads have in work. The heap keeps them until
# the step of the crop ends, unless large blocks are mapped.
RESAMPLING_BYTES = 24
# Freed memory that a further thread keeps for itself, unless large blocks are mapped: glibc gives
# each thread heaps of 64 MiB.
THREAD_HEAP_BYTES = 64 * 2**20
# Kernels that our networks compile for their first scan. Their libraries are loaded before.
FIRST_SCAN_BYTES = 10 * 2**20
# Bytes while probabilities are pasted and labels are cleaned, slab by slab (`SLAB_VOXELS`).
JOINING_BYTES = 18 * 2**20
# The unit of time is that of a voxel of the scan. Measured on two cores of an AMD EPYC with the
# included weights. Time of a voxel that goes through a network:
NETWORK_TIME = 5
# Time of a case of a model of nnU-Net, however small: 20 ms for checks, statistics and report.
CASE_TIME = 1.5e6
# What a model of nnU-Net takes once a scan is read; libraries that read scans are loaded before.
READING_BYTES = 4 * 2**20
# The same from its first pass on, which compiles kernels and leaves free memory in the heap.
PASS_BYTES = 15 * 2**20
# Durations of this many finished cases are kept.
MAX_CASES = 20


class Forecast(NamedTuple):
    """Expected cost of a case.

    Attributes:
        memory: Resident bytes of the process by step.
        voxels: Time in the unit of `NETWORK_TIME`: 1 for each voxel of the scan, and `NETWORK_TIME`
            for each that goes through one of our networks.
        operations: Additions and multiplications of networks of nnU-Net, whose seconds differ more
            from one to the other and are known by themselves.
    """

    memory: dict[str, int]
    voxels: int
    operations: float = 0.0

    @property
    def peak_bytes(self) -> int:
        """Largest resident memory."""
        return max(self.memory.values())


class ArrayLimits(NamedTuple):
    """Sizes above which arrays are temporary files, see `medseg.io.scratch.scratch_above`.

    Attributes:
        array_bytes: Of an array.
        waiting_bytes: Of an array that waits.
    """

    array_bytes: float
    waiting_bytes: float

    def held(self, num_bytes: int, *, waits: bool) -> int:
        """Bytes of an array in memory."""
        return _held(num_bytes, self.waiting_bytes if waits else self.array_bytes)

    def held_of_scan(self, itemsize: int, grid: VoxelGrid) -> int:
        """Bytes in memory of an array (D, H, W) of a scan, which waits where planes are axial."""
        return self.held(itemsize * math.prod(grid.shape), waits=grid.is_axial)


class Rate(NamedTuple):
    """Time that a model takes on this machine.

    Attributes:
        voxel_s: Seconds of one of `Forecast.voxels`.
        operation_s: Seconds of one of `Forecast.operations`.
    """

    voxel_s: float
    operation_s: float

    def seconds(self, expected: Forecast) -> float:
        """Seconds of a case."""
        return self.voxel_s * expected.voxels + self.operation_s * expected.operations


def rate_of(expected: Forecast, total_s: float, pass_s: float) -> Rate:
    """Rate of a finished case.

    Args:
        expected: What was expected of it.
        total_s: Its seconds.
        pass_s: Those inside the passes of networks of nnU-Net.
    """
    operation_s = pass_s / expected.operations if expected.operations else 0.0
    return Rate((total_s - pass_s) / expected.voxels, operation_s)


def forecast(
    model: ScanModel,
    grid: VoxelGrid,
    loaded_bytes: int,
    array_bytes: float = math.inf,
    waiting_bytes: float | None = None,
) -> Forecast:
    """Forecast the memory of a case from the header of its scan.

    Args:
        model: What segments it, with the memory that a network may use.
        grid: Grid of the scan, in storage order.
        loaded_bytes: Resident memory of the process with the weights, before the first scan.
        array_bytes: Size above which an array is a temporary file, see
            `medseg.prediction.memory_limit`.
        waiting_bytes: The same for arrays that wait; None = as the model says.

    Raises:
        UserError: If a stage cannot keep its budget.
    """
    if waiting_bytes is None:
        waiting_bytes = model.waiting_bytes
    limits = ArrayLimits(array_bytes, min(array_bytes, waiting_bytes))
    if isinstance(model, JoinedModels):
        return _forecast_joined(model, grid, loaded_bytes, limits)
    if isinstance(model, TotalsegmentatorModel):
        return _forecast_resampled(model, grid, loaded_bytes, limits)
    if isinstance(model, (NnunetModel, NnunetEnsemble)):
        return _forecast_nnunet(model, grid, loaded_bytes, limits)
    return _forecast_cascade(cast(Cascade, model), grid, loaded_bytes, array_bytes)


def _forecast_resampled(
    model: TotalsegmentatorModel, grid: VoxelGrid, loaded_bytes: int, limits: ArrayLimits
) -> Forecast:
    """Forecast a model that segments a resampled scan, beside the scan itself."""
    resampled_grid = model.resampled_grid(grid)
    channels = len(model.task.channels)
    num_voxels = math.prod(grid.shape)
    scan_bytes = channels * limits.held_of_scan(SCAN_BYTES, grid)
    resampled_bytes = channels * limits.held_of_scan(VALUE_BYTES, resampled_grid)
    # The forecast of the inner model counts the resampled scan as one that was read.
    counted_bytes = channels * limits.held_of_scan(SCAN_BYTES, resampled_grid)
    inner = forecast(model.parts[0], resampled_grid, loaded_bytes, *limits)
    more_bytes = scan_bytes + resampled_bytes - counted_bytes
    read_bytes = inner.memory["read"] - counted_bytes + scan_bytes
    memory = {"read": read_bytes, RESAMPLE: read_bytes + resampled_bytes}
    for step, num_bytes in inner.memory.items():
        if step != "read":
            memory[step] = num_bytes + more_bytes
    labels_bytes = limits.held_of_scan(LABEL_BYTES, resampled_grid)
    labels_bytes += limits.held_of_scan(LABEL_BYTES, grid)
    memory[RESTORE] = read_bytes + resampled_bytes + labels_bytes
    return Forecast(memory, channels * num_voxels + inner.voxels, inner.operations)


def _forecast_joined(
    model: JoinedModels, grid: VoxelGrid, loaded_bytes: int, limits: ArrayLimits
) -> Forecast:
    """Forecast models that run one after the other, beside the labels of those before."""
    joined_bytes = limits.held_of_scan(LABEL_BYTES, grid)
    memory: dict[str, int] = {}
    num_voxels = 0
    operations = 0.0
    for number, part in enumerate(model.parts, start=1):
        expected = forecast(part, grid, loaded_bytes, *limits)
        # The labels of the first model become the joined ones.
        held_bytes = 0 if number == 1 else joined_bytes
        for step, num_bytes in expected.memory.items():
            name = step if step == "read" else model.step_name(number, step)
            memory[name] = num_bytes + held_bytes
        num_voxels += expected.voxels
        operations += expected.operations
    return Forecast(memory, num_voxels, operations)


def _forecast_nnunet(
    model: NnunetModel | NnunetEnsemble, grid: VoxelGrid, loaded_bytes: int, limits: ArrayLimits
) -> Forecast:
    """Forecast a case of nnU-Net's models, which have no crop that is unknown beforehand."""
    scan_bytes = len(model.task.channels) * limits.held_of_scan(SCAN_BYTES, grid)
    fixed = loaded_bytes + READING_BYTES + scan_bytes
    expected = model.expected(grid)
    memory = {"read": fixed}
    for step, arrays in expected.memory.items():
        # The peak of a step is in its last pass, or at its end, when all arrays are written.
        at_end = 0.0
        during_pass = 0.0
        touched = 0.0
        for array in arrays:
            num_bytes = limits.held(array.num_bytes, waits=array.waits)
            at_end += num_bytes
            # A part of the array may not be written before the last pass.
            during_pass += array.written_share * num_bytes
            if num_bytes < array.num_bytes:
                # Pages of files are in memory for a moment.
                touched += min(array.num_bytes, array.touched_bytes)
        if step in model.pass_steps:
            # What the first pass has brought stays for all later steps.
            fixed = loaded_bytes + PASS_BYTES + scan_bytes
            # A pass is no array, which could be a file; on a GPU it takes nothing here.
            if model.device.type == "cpu":
                during_pass += model.usual_pass_bytes
        touched = min(TOUCHED_BYTES, touched)
        memory[step] = fixed + round(touched + max(at_end, during_pass))
    return Forecast(memory, round(CASE_TIME + expected.other_time), expected.operations)


def _forecast_cascade(
    cascade: Cascade, grid: VoxelGrid, loaded_bytes: int, array_bytes: float
) -> Forecast:
    """Forecast a case; the body and the regions are not known yet, so their usual sizes are taken.

    Args:
        cascade: The trained stages, with the memory that a network may use.
        grid: Grid of the scan, in storage order.
        loaded_bytes: Resident memory of the process with the weights, before the first scan.
        array_bytes: Size above which an array is a temporary file, see
            `medseg.prediction.memory_limit`.

    Raises:
        UserError: If a stage cannot keep its budget.
    """
    grid = oriented_grid(grid)
    coarse = cascade.coarse
    task = cascade.task
    options = cascade.options

    num_voxels = math.prod(grid.shape)
    channels = len(task.channels)
    fixed = loaded_bytes + FIRST_SCAN_BYTES + cascade.backend_bytes + _heap_bytes(num_voxels)
    fixed += channels * _held(SCAN_BYTES * num_voxels, array_bytes)
    scan_mm = [size * mm for size, mm in zip(grid.shape, grid.spacing_mm, strict=True)]
    body_mm = []
    for length_mm, share, most_mm in zip(scan_mm, BODY_SHARE, BODY_MM, strict=True):
        body_mm.append(min(length_mm * share, most_mm))
    body = _crop_shape(coarse, grid, body_mm, None)
    lattice = grid.resampled(coarse.spacing_mm)
    resampled = channels * _held(IMAGE_BYTES * math.prod(lattice.shape), array_bytes)
    in_pass, stored_probs = _pass_bytes(coarse, coarse.task.num_classes, body, options, array_bytes)
    memory = {"read": fixed, cascade.steps[0]: fixed + resampled + in_pass}
    voxels = channels * num_voxels + NETWORK_TIME * _pass_voxels(coarse, body, options)
    # Extent of the voxels that get a label.
    extent_mm = scan_mm
    if cascade.fine is not None:
        fine = cascade.fine
        stored_probs = 0
        extent_mm = [min(pair) for pair in zip(REGION_MM, scan_mm, strict=True)]
        shape = _crop_shape(fine, grid, extent_mm, fine.tile_size or fine.least_size)
        num_in_region = min(math.prod(extent_mm) / math.prod(grid.spacing_mm), num_voxels)
        num_classes = fine.task.num_region_classes
        in_pass, probs = _pass_bytes(fine, num_classes, shape, options, array_bytes)
        in_pass += _resampling_bytes(num_in_region)
        # Between the localisation and the join, each region has a step.
        for region, step in zip(task.regions, cascade.steps[1:-1], strict=True):
            # The probabilities of the regions before are there until all are joined.
            memory[step] = fixed + stored_probs + in_pass
            stored_probs += round(probs * len(region.labels) / num_classes)
            voxels += NETWORK_TIME * _pass_voxels(fine, shape, options)
    # The system gives no memory to planes without a region: nothing is written into their zeros.
    labels = _held(LABEL_BYTES * num_voxels, array_bytes) * extent_mm[0] / scan_mm[0]
    memory["join"] = fixed + stored_probs + round(labels + JOINING_BYTES)
    return Forecast(memory, voxels)


def _heap_bytes(num_voxels: int) -> int:
    """Free memory that the threads beside the first keep, for a scan of so many voxels."""
    if maps_large_blocks():
        return 0
    num_threads = min(torch.get_num_threads(), MAX_THREADS)
    return (num_threads - 1) * min(THREAD_HEAP_BYTES, IMAGE_BYTES * num_voxels)


def _resampling_bytes(num_voxels: float) -> int:
    """Free memory that resampling leaves until its step ends, for so many voxels of a scan."""
    if maps_large_blocks():
        return 0
    num_threads = min(torch.get_num_threads(), MAX_THREADS)
    return round(RESAMPLING_BYTES * min(num_threads * SLAB_VOXELS, num_voxels))


def _held(size: int, array_bytes: float) -> int:
    """Bytes of an array in memory: none where it is so large that it is a temporary file."""
    return size if size <= array_bytes else 0


def _crop_shape(
    stage: TrainedStage, grid: VoxelGrid, extent_mm: Sequence[float], patch_size: Shape | None
) -> Shape:
    """Voxels (D, H, W) of the crop that a stage makes of a box of some extent."""
    lattice = grid.resampled(stage.spacing_mm).resampled(stage.rule.spacing_mm(grid.spacing_mm))
    shape = []
    for length_mm, step_mm in zip(extent_mm, lattice.spacing_mm, strict=True):
        shape.append(max(1, math.ceil(length_mm / step_mm)))
    box = VoxelBox.full(tuple(shape))
    crop = stage.rule.crop(box, lattice, patch_size or (1, 1, 1), stage.divisor)
    return crop.grid.shape


def _pass_bytes(
    stage: TrainedStage, classes: int, shape: Shape, options: InferenceOptions, array_bytes: float
) -> tuple[int, int]:
    """Bytes while a crop goes through a stage, and those of its probabilities, which stay."""
    plan = stage.plan(shape, options)
    num_voxels = math.prod(shape)
    # What the network sees at a time, and the crop when it is padded to that.
    network_shape = network_size(plan.tile_size or shape, stage.divisor)
    padded: Shape = tuple(map(max, shape, network_shape))  # type: ignore[assignment]
    num_padded = math.prod(padded)
    input_bytes = stage.image_dtype.itemsize * stage.num_channels
    during: float = _held(input_bytes * num_voxels, array_bytes)
    if padded != shape:
        during += _held(input_bytes * num_padded, array_bytes)
    # Tiles fill an array that is there from the start. The result of a single pass is made when the
    # features of the network are free.
    if plan != TilingPlan(None):
        during += _held(PROBABILITY_BYTES * classes * num_padded, array_bytes)
    if stage.has_views(options):
        during += _held(IMAGE_BYTES * classes * num_voxels, array_bytes)
        during += _held(IMAGE_BYTES * num_voxels, array_bytes)
    if stage.device.type == "cpu":
        live = USUAL_WORKSPACE / WORKSPACE * stage.bytes_per_voxel * math.prod(network_shape)
        during += plan.slab_bytes or live
        if plan.tile_size is not None:
            # The sums of a layer of tiles, and their copy while they move down; then one tile.
            num_in_layer = network_shape[0] * math.prod(padded[1:])
            layer = _held(SUM_BYTES * classes * num_in_layer, array_bytes)
            during += 2 * layer + SUM_BYTES * classes * math.prod(network_shape)
    return round(during), _held(PROBABILITY_BYTES * classes * num_voxels, array_bytes)


def _pass_voxels(stage: TrainedStage, shape: Shape, options: InferenceOptions) -> int:
    """Voxels that go through the networks of a stage for one crop."""
    network_shape = network_size(stage.tile_size or shape, stage.divisor)
    num_tiles = 1
    if stage.tile_size:
        depth, height, width = map(max, shape, network_shape)
        num_tiles = len(tile_boxes((depth, height, width), network_shape, options.overlap))
    num_passes = num_tiles * len(stage.networks) * len(flips(stage.task, options.tta))
    return num_passes * math.prod(network_shape)


def forecast_text(forecasts: Mapping[str, Forecast], mean_s: float | None, num_cases: int) -> str:
    """Say what a batch will hold and how long it will take.

    The time is known where this machine has finished cases before.

    Args:
        forecasts: Name to the forecast of cases, at least one; those of a long batch are a part of
            all.
        mean_s: Expected seconds of a case; None is unknown.
        num_cases: Number of all cases.
    """
    largest = max(forecasts, key=lambda name: forecasts[name].peak_bytes)
    sentence = f"expected peak memory {forecasts[largest].peak_bytes / 2**30:.2f} GiB"
    if num_cases > 1:
        sentence = f"{num_cases} cases, {sentence} (case {largest})"
    if mean_s is None:
        return sentence
    seconds = mean_s * num_cases
    duration = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return f"{sentence}, expected time {duration}"


def record_cost(
    expected: Forecast, model: ScanModel, total_s: float, pass_s: float
) -> dict[str, float | None]:
    """Record the seconds of a case for later cases.

    Args:
        expected: Its forecast.
        model: What segmented it.
        total_s: Its seconds.
        pass_s: See `rate_of`.

    Returns:
        The peak and the seconds that were expected; the seconds are None for the first case on a
        machine.
    """
    key = machine_key(model)
    rate = known_rate(key)
    note_rate(key, rate_of(expected, total_s, pass_s))
    return {
        "peak_resident_bytes": expected.peak_bytes,
        "total_s": None if rate is None else round(rate.seconds(expected), 2),
    }


def machine_key(cascade: ScanModel) -> str:
    """Name all that decides the rate on this machine."""
    checksums: list[str] = []
    for files in cascade.checkpoints.values():
        checksums += sorted(files.values())
    weights = " ".join(checksum[:12] for checksum in checksums)
    return (
        f"{weights} {cascade.precision} {cascade.device} {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}"
    )


def known_rate(key: str) -> Rate | None:
    """Medians of the cases that this machine has finished; None if there are none."""
    rates = _known_rates().get(key)
    if not rates:
        return None
    return Rate(median(rate.voxel_s for rate in rates), median(rate.operation_s for rate in rates))


def note_rate(key: str, rate: Rate) -> None:
    """Add a finished case to those of this machine, where the folder can be written."""
    rates_by_key = _known_rates()
    rates_by_key[key] = [*rates_by_key.get(key, []), rate][-MAX_CASES:]
    with suppress(UserError):
        replace_text(machine_folder() / "predictions.json", json.dumps(rates_by_key, indent=1))


def _known_rates() -> dict[str, list[Rate]]:
    """Rates of finished cases by `machine_key`."""
    rates_by_key: dict[str, list[Rate]] = {}
    try:
        content = json.loads((machine_folder() / "predictions.json").read_text(encoding="utf-8"))
        for key, pairs in content.items():
            rates_by_key[key] = [Rate(*map(float, pair)) for pair in pairs]
    except (OSError, ValueError, TypeError, AttributeError):  # none yet, or a damaged one
        return {}
    return rates_by_key
