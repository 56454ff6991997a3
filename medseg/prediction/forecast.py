"""Forecast of a prediction: the memory of a case, step by step, and its time.

A forecast needs only the grid of the scan, which is in the header of its file.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
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

# Bytes of a voxel.
SCAN_BYTES = 2  # of the first channel of a scan, int16
CHANNEL_BYTES = 4  # of each further channel, float32 on the grid of the first
LABEL_BYTES = 1  # of its labels, uint8
IMAGE_BYTES = 4  # of an image at the spacing of a stage, float32
PROBABILITY_BYTES = 2  # of a stored probability, float16
SUM_BYTES = 4  # of a probability that is summed up over tiles, float32
# Memory of a pass with the workspaces of its kernels, as a multiple of its live tensors. These are
# counted on a small image. A large image has fewer live bytes per voxel, since the head predicts a
# few planes at a time: so the factor is below 1. Measured on phantoms of 1 to 520 slices in bf16.
# Budgets are checked with the larger factor `WORKSPACE`, to be on the safe side.
USUAL_WORKSPACE = 0.75
# Box of the body with the table, (z, y, x): the share of each axis of the scan that it takes, and
# its largest extent in mm, which counts where the field of view is wide. Medians of 33 scans.
BODY_SHARE = (1.0, 0.8, 1.0)
BODY_MM = (math.inf, 360.0, 480.0)
# Bytes that resampling needs for each voxel of the slabs that are resampled at a time, one slab for
# each thread. The heap keeps them until the step ends, unless large blocks are mapped.
RESAMPLING_BYTES = 24
# Freed memory that each thread but the first keeps for itself, unless large blocks are mapped:
# glibc gives each thread heaps of 64 MiB.
THREAD_HEAP_BYTES = 64 * 2**20
# Memory of the kernels that our networks compile for their first scan. The libraries that compile
# them are loaded before.
FIRST_SCAN_BYTES = 10 * 2**20
# Memory for pasting probabilities and cleaning labels, which is done in slabs.
JOINING_BYTES = 18 * 2**20
# Times are in units of the time that a voxel of the scan takes outside of networks. A voxel that
# goes through one of our networks takes this many units more. Measured on two cores of an AMD EPYC
# with the included weights.
NETWORK_TIME = 5
# Fixed time of each case of a model of nnU-Net, in the same unit: about 20 ms for checks,
# statistics and report.
CASE_TIME = 1.5e6
# Memory that a model of nnU-Net takes when a scan is read, beside the scan. The libraries that read
# scans are loaded before.
READING_BYTES = 4 * 2**20
# Memory that a model of nnU-Net takes from its first pass on, beside the scan and its arrays. The
# pass compiles kernels and leaves freed memory in the heap.
PASS_BYTES = 15 * 2**20
# Number of finished cases of a model whose rates are kept.
MAX_CASES = 20


class Forecast(NamedTuple):
    """Expected cost of a case.

    Attributes:
        memory: Resident bytes of the process by step.
        time_units: Time without the networks of nnU-Net: 1 for each voxel of the scan, and
            `NETWORK_TIME` for each voxel that goes through one of our networks.
        operations: Additions and multiplications of the networks of nnU-Net. Their time is counted
            by itself, since it differs more from network to network.
    """

    memory: dict[str, int]
    time_units: int
    operations: float = 0.0

    @property
    def peak_bytes(self) -> int:
        """Largest resident memory of all steps."""
        return max(self.memory.values())


class ArrayLimits(NamedTuple):
    """Sizes above which arrays are temporary files, see `medseg.io.scratch.scratch_above`.

    Attributes:
        array_bytes: Size for most arrays.
        waiting_bytes: Size for arrays that wait: they are written once and read a few times, plane
            by plane, so that a file hardly slows them. It is at most `array_bytes`.
    """

    array_bytes: float
    waiting_bytes: float

    def held(self, num_bytes: int, *, waits: bool) -> int:
        """Count the bytes that an array takes in memory: none if it is a temporary file.

        Args:
            num_bytes: Size of the array.
            waits: Whether it waits.
        """
        limit_bytes = self.waiting_bytes if waits else self.array_bytes
        return _held(num_bytes, limit_bytes)

    def held_of_scan(self, itemsize: int, grid: VoxelGrid) -> int:
        """Count the bytes in memory of an array (D, H, W) of a scan.

        If the stored planes are axial, the array is one that waits: models of nnU-Net then write
        and read it plane by plane.

        Args:
            itemsize: Bytes of a voxel.
            grid: Grid of the scan, in storage order.
        """
        num_bytes = itemsize * math.prod(grid.shape)
        return self.held(num_bytes, waits=grid.is_axial)

    def held_of_channels(self, num_channels: int, grid: VoxelGrid) -> int:
        """Count the bytes in memory of all channels of a scan.

        Args:
            num_channels: Channels of the scan.
            grid: Its grid, in storage order.
        """
        # Further channels do not wait: `read_channel_images` makes them.
        further_bytes = self.held(CHANNEL_BYTES * math.prod(grid.shape), waits=False)
        return self.held_of_scan(SCAN_BYTES, grid) + (num_channels - 1) * further_bytes


class Rate(NamedTuple):
    """Time that a model takes on this machine.

    Attributes:
        unit_s: Seconds of one of `Forecast.time_units`.
        operation_s: Seconds of one of `Forecast.operations`.
    """

    unit_s: float
    operation_s: float

    def seconds(self, expected: Forecast) -> float:
        """Return the expected seconds of a case."""
        return self.unit_s * expected.time_units + self.operation_s * expected.operations


def rate_of(expected: Forecast, total_s: float, pass_s: float) -> Rate:
    """Compute the rate of a finished case.

    Args:
        expected: Its forecast, by whose units and operations the seconds are divided.
        total_s: Seconds that it took.
        pass_s: Seconds of them inside the passes of networks of nnU-Net.
    """
    operation_s = 0.0
    if expected.operations:
        operation_s = pass_s / expected.operations
    return Rate((total_s - pass_s) / expected.time_units, operation_s)


def forecast(
    model: ScanModel,
    grid: VoxelGrid,
    loaded_bytes: int,
    array_bytes: float = math.inf,
    waiting_bytes: float | None = None,
) -> Forecast:
    """Forecast the memory and the time of a case from the header of its scan.

    Args:
        model: What segments it; its options have the memory that a network may use.
        grid: Grid of the scan, in storage order.
        loaded_bytes: Resident memory of the process with the weights, before the first scan.
        array_bytes: Size above which an array is a temporary file, see
            `medseg.prediction.memory_limit`.
        waiting_bytes: The same for arrays that wait, see `ArrayLimits`; None =
            `model.waiting_bytes`. A part of a combined model gets the size of the whole model.

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
    # The other models are cascades. They read crops in any order, so none of their arrays waits.
    return _forecast_cascade(cast(Cascade, model), grid, loaded_bytes, array_bytes)


def _forecast_resampled(
    model: TotalsegmentatorModel, grid: VoxelGrid, loaded_bytes: int, limits: ArrayLimits
) -> Forecast:
    """Forecast a model that segments a resampled scan, while the scan itself stays in memory."""
    resampled_grid = model.resampled_grid(grid)
    num_channels = len(model.task.channels)
    scan_bytes = limits.held_of_channels(num_channels, grid)
    resampled_bytes = num_channels * limits.held_of_scan(VALUE_BYTES, resampled_grid)
    # The forecast of the inner model counts a scan on the resampled grid as if it were read. In its
    # place the process holds the original scan, as it was read, and the resampled one (int32).
    counted_bytes = limits.held_of_channels(num_channels, resampled_grid)
    inner = forecast(
        model.parts[0],
        resampled_grid,
        loaded_bytes,
        limits.array_bytes,
        limits.waiting_bytes,
    )
    more_bytes = scan_bytes + resampled_bytes - counted_bytes
    read_bytes = inner.memory["read"] - counted_bytes + scan_bytes
    memory = {"read": read_bytes, RESAMPLE: read_bytes + resampled_bytes}
    for step, num_bytes in inner.memory.items():
        if step != "read":
            memory[step] = num_bytes + more_bytes
    # Labels on both grids.
    labels_bytes = limits.held_of_scan(LABEL_BYTES, resampled_grid)
    labels_bytes += limits.held_of_scan(LABEL_BYTES, grid)
    memory[RESTORE] = read_bytes + resampled_bytes + labels_bytes
    time_units = num_channels * math.prod(grid.shape) + inner.time_units
    return Forecast(memory, time_units, inner.operations)


def _forecast_joined(
    model: JoinedModels, grid: VoxelGrid, loaded_bytes: int, limits: ArrayLimits
) -> Forecast:
    """Forecast models that run one after the other, while the joined labels stay in memory."""
    joined_bytes = limits.held_of_scan(LABEL_BYTES, grid)
    memory: dict[str, int] = {}
    time_units = 0
    operations = 0.0
    for number, part in enumerate(model.parts, start=1):
        expected = forecast(part, grid, loaded_bytes, limits.array_bytes, limits.waiting_bytes)
        # The labels of the first model become the joined ones, so it needs no array for these.
        held_bytes = 0 if number == 1 else joined_bytes
        for step, num_bytes in expected.memory.items():
            # The scan is read once for all models.
            name = step if step == "read" else model.step_name(number, step)
            memory[name] = num_bytes + held_bytes
        time_units += expected.time_units
        operations += expected.operations
    return Forecast(memory, time_units, operations)


def _forecast_nnunet(
    model: NnunetModel | NnunetEnsemble, grid: VoxelGrid, loaded_bytes: int, limits: ArrayLimits
) -> Forecast:
    """Forecast a case of nnU-Net's models.

    They segment the whole scan, so all sizes follow from its grid.
    """
    scan_bytes = limits.held_of_channels(len(model.task.channels), grid)
    fixed_bytes = loaded_bytes + READING_BYTES + scan_bytes
    expected = model.expected(grid)
    memory = {"read": fixed_bytes}
    for step, arrays in expected.memory.items():
        # The peak of a step is in its last pass, or at its end, when all arrays are written.
        bytes_at_end = 0.0
        bytes_in_pass = 0.0
        touched_bytes = 0.0
        for array in arrays:
            held_bytes = limits.held(array.num_bytes, waits=array.waits)
            bytes_at_end += held_bytes
            # A part of the array may not be written before the last pass.
            bytes_in_pass += array.written_share * held_bytes
            is_file = held_bytes < array.num_bytes
            if is_file:
                # Pages of files are in memory for a moment after they were used.
                touched_bytes += min(array.num_bytes, array.touched_bytes)
        if step in model.pass_steps:
            # The first pass brings memory that stays in all later steps: from here on `PASS_BYTES`
            # takes the place of `READING_BYTES`.
            fixed_bytes = loaded_bytes + PASS_BYTES + scan_bytes
            # The memory of a pass is never a file; on a GPU it is not that of the process.
            if model.device.type == "cpu":
                bytes_in_pass += model.usual_pass_bytes
        touched_bytes = min(TOUCHED_BYTES, touched_bytes)
        memory[step] = fixed_bytes + round(touched_bytes + max(bytes_at_end, bytes_in_pass))
    return Forecast(memory, round(CASE_TIME + expected.other_time), expected.operations)


def _forecast_cascade(
    cascade: Cascade, grid: VoxelGrid, loaded_bytes: int, array_bytes: float
) -> Forecast:
    """Forecast a case of a cascade, or of a model of one stage.

    The body and the regions are not known yet, so their usual sizes are taken.

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

    # Bytes of all steps: the loaded weights, the libraries and the scan.
    num_voxels = math.prod(grid.shape)
    num_channels = len(task.channels)
    fixed_bytes = loaded_bytes + FIRST_SCAN_BYTES + cascade.backend_bytes
    fixed_bytes += _heap_bytes(num_voxels)
    limits = ArrayLimits(array_bytes, waiting_bytes=array_bytes)
    fixed_bytes += limits.held_of_channels(num_channels, grid)

    # The first stage sees the crop of the body, from a scan resampled to its spacing.
    scan_mm = [size * mm for size, mm in zip(grid.shape, grid.spacing_mm, strict=True)]
    body_mm = []
    for length_mm, share, max_mm in zip(scan_mm, BODY_SHARE, BODY_MM, strict=True):
        body_mm.append(min(length_mm * share, max_mm))
    body_shape = _crop_shape(coarse, grid, body_mm, patch_size=None)
    resampled_shape = grid.resampled(coarse.spacing_mm).shape
    resampled_bytes = num_channels * _held(IMAGE_BYTES * math.prod(resampled_shape), array_bytes)
    pass_bytes, stored_bytes = _pass_bytes(
        coarse, coarse.task.num_classes, body_shape, options, array_bytes
    )
    first_step = cascade.steps[0]
    memory = {"read": fixed_bytes, first_step: fixed_bytes + resampled_bytes + pass_bytes}
    time_units = num_channels * num_voxels
    time_units += NETWORK_TIME * _pass_voxels(coarse, body_shape, options)

    labelled_mm = scan_mm  # extent of the voxels that get a label
    if cascade.fine is not None:
        fine = cascade.fine
        # The probabilities of the coarse stage are dropped; those of all regions are stored.
        stored_bytes = 0
        region_mm = [min(pair) for pair in zip(REGION_MM, scan_mm, strict=True)]
        labelled_mm = region_mm
        # A crop of a region has at least one tile, or without tiles the size of the training.
        patch_size = fine.tile_size or fine.least_size
        region_shape = _crop_shape(fine, grid, region_mm, patch_size)
        num_in_region = min(math.prod(region_mm) / math.prod(grid.spacing_mm), num_voxels)
        num_classes = fine.task.num_region_classes
        pass_bytes, probs_bytes = _pass_bytes(fine, num_classes, region_shape, options, array_bytes)
        pass_bytes += _resampling_bytes(num_in_region)
        # Between the localisation and the join, each region has a step.
        for region, step in zip(task.regions, cascade.steps[1:-1], strict=True):
            # The probabilities of earlier regions stay until all regions are joined.
            memory[step] = fixed_bytes + stored_bytes + pass_bytes
            # Of all classes of the network only the labels of this region are stored.
            stored_bytes += round(probs_bytes * len(region.labels) / num_classes)
            time_units += NETWORK_TIME * _pass_voxels(fine, region_shape, options)

    # The label map is made of zeros, to which the system gives no memory until they are written.
    # So it takes memory only in the share of the planes (axis 0, z) that have labels.
    label_bytes = _held(LABEL_BYTES * num_voxels, array_bytes) * labelled_mm[0] / scan_mm[0]
    memory["join"] = fixed_bytes + stored_bytes + round(label_bytes + JOINING_BYTES)
    return Forecast(memory, time_units)


def _heap_bytes(num_voxels: int) -> int:
    """Estimate the freed memory that all threads but the first keep.

    Args:
        num_voxels: Voxels of the scan.
    """
    if maps_large_blocks():
        return 0
    num_threads = min(torch.get_num_threads(), MAX_THREADS)
    # A small scan frees less than a heap holds.
    return (num_threads - 1) * min(THREAD_HEAP_BYTES, IMAGE_BYTES * num_voxels)


def _resampling_bytes(num_voxels: float) -> int:
    """Estimate the freed memory that resampling keeps until its step ends.

    Args:
        num_voxels: Voxels of the scan that are resampled.
    """
    if maps_large_blocks():
        return 0
    num_threads = min(torch.get_num_threads(), MAX_THREADS)
    # Each thread works on one slab at a time; a small scan has fewer voxels than these slabs.
    num_in_work = min(num_threads * SLAB_VOXELS, num_voxels)
    return round(RESAMPLING_BYTES * num_in_work)


def _held(num_bytes: int, limit_bytes: float) -> int:
    """Count the bytes that an array takes in memory: none above the limit, where it is a file."""
    return num_bytes if num_bytes <= limit_bytes else 0


def _crop_shape(
    stage: TrainedStage, grid: VoxelGrid, extent_mm: Sequence[float], patch_size: Shape | None
) -> Shape:
    """Compute the size (D, H, W) of the crop that a stage makes of a box.

    Args:
        stage: Has spacing, grid rule and divisor.
        grid: Grid of the oriented scan.
        extent_mm: Extent of the box, (z, y, x).
        patch_size: Smallest size of the crop in voxels, (z, y, x); None = that of the box.
    """
    # A rule may take the spacing of the scan, within bounds, in place of that of the stage. Without
    # such a rule the spacing is None, and `resampled(None)` returns the grid as it is.
    spacing_mm = stage.rule.spacing_mm(grid.spacing_mm)
    stage_grid = grid.resampled(stage.spacing_mm).resampled(spacing_mm)
    box_shape = []
    for length_mm, step_mm in zip(extent_mm, stage_grid.spacing_mm, strict=True):
        box_shape.append(max(1, math.ceil(length_mm / step_mm)))
    box = VoxelBox.full(tuple(box_shape))
    crop = stage.rule.crop(box, stage_grid, patch_size or (1, 1, 1), stage.divisor)
    return crop.grid.shape


def _pass_bytes(
    stage: TrainedStage,
    num_classes: int,
    shape: Shape,
    options: InferenceOptions,
    array_bytes: float,
) -> tuple[int, int]:
    """Estimate the memory of a crop that goes through the networks of a stage.

    Args:
        stage: Its memory per voxel must be known, see `count_memory`.
        num_classes: Classes of its networks.
        shape: Size of the crop, (D, H, W).
        options: Budget, overlap and flips.
        array_bytes: Size above which an array is a temporary file.

    Returns:
        Bytes during the passes, and bytes of the probabilities, which stay afterwards.
    """
    plan = stage.plan(shape, options)
    num_voxels = math.prod(shape)
    # Size of a network's input, and of the crop after it is padded to at least that size.
    network_shape = network_size(plan.tile_size or shape, stage.divisor)
    padded_shape: Shape = tuple(map(max, shape, network_shape))  # type: ignore[assignment]
    num_padded = math.prod(padded_shape)
    input_bytes = stage.image_dtype.itemsize * stage.num_channels  # of a voxel
    pass_bytes: float = _held(input_bytes * num_voxels, array_bytes)
    if padded_shape != shape:
        pass_bytes += _held(input_bytes * num_padded, array_bytes)
    # Tiles and slabs fill a result that exists from the start. The result of a single pass adds
    # nothing to the peak, as it is made when the features of the network are freed.
    is_single_pass = plan == TilingPlan(tile_size=None)  # neither tiles nor slabs
    if not is_single_pass:
        pass_bytes += _held(PROBABILITY_BYTES * num_classes * num_padded, array_bytes)
    if stage.has_views(options):
        # Views are the passes of all networks and flips. Two sums over them are kept: that of the
        # probabilities, by class, and that of their squares, over all classes together.
        pass_bytes += _held(IMAGE_BYTES * num_classes * num_voxels, array_bytes)
        pass_bytes += _held(IMAGE_BYTES * num_voxels, array_bytes)
    # Feature maps and tiles are in the memory of the device, which on a GPU is not that of the
    # process.
    if stage.device.type == "cpu":
        num_in_network = math.prod(network_shape)
        if plan.slab_bytes:
            pass_bytes += plan.slab_bytes
        else:
            # `bytes_per_voxel` counts with `WORKSPACE`.
            usual_share = USUAL_WORKSPACE / WORKSPACE
            pass_bytes += usual_share * stage.bytes_per_voxel * num_in_network
        if plan.tile_size is not None:
            # One tile, and the sums of a layer of tiles. The sums count twice, since most of their
            # planes are copied when they move on to the next layer.
            num_in_layer = network_shape[0] * math.prod(padded_shape[1:])
            layer_bytes = _held(SUM_BYTES * num_classes * num_in_layer, array_bytes)
            tile_bytes = SUM_BYTES * num_classes * num_in_network
            pass_bytes += 2 * layer_bytes + tile_bytes
    probs_bytes = _held(PROBABILITY_BYTES * num_classes * num_voxels, array_bytes)
    return round(pass_bytes), probs_bytes


def _pass_voxels(stage: TrainedStage, shape: Shape, options: InferenceOptions) -> int:
    """Count the voxels that go through the networks of a stage for one crop (D, H, W).

    A voxel counts once for each tile, network and flip.
    """
    network_shape = network_size(stage.tile_size or shape, stage.divisor)
    num_tiles = 1
    if stage.tile_size:
        # A crop smaller than a tile is padded to its size.
        depth, height, width = map(max, shape, network_shape)
        boxes = tile_boxes((depth, height, width), network_shape, options.overlap)
        num_tiles = len(boxes)
    num_passes = num_tiles * len(stage.networks) * len(flips(stage.task, options.tta))
    return num_passes * math.prod(network_shape)


def forecast_text(forecasts: Mapping[str, Forecast], mean_s: float | None, num_cases: int) -> str:
    """Say how much memory and time a batch is expected to take.

    Args:
        forecasts: Name of a case to its forecast, at least one; of a long batch some of the cases.
        mean_s: Expected seconds of a case; None = unknown, as before this machine has finished one.
        num_cases: Number of all cases.
    """
    largest_case = max(forecasts, key=lambda name: forecasts[name].peak_bytes)
    peak_gib = forecasts[largest_case].peak_bytes / 2**30
    sentence = f"expected peak memory {peak_gib:.2f} GiB"
    if num_cases > 1:
        sentence = f"{num_cases} cases, {sentence} (case {largest_case})"
    if mean_s is None:
        return sentence
    total_s = mean_s * num_cases
    duration = f"{total_s / 60:.0f} min"
    if total_s < 120:
        duration = f"{total_s:.0f} s"
    return f"{sentence}, expected time {duration}"


def record_cost(
    expected: Forecast, model: ScanModel, total_s: float, pass_s: float
) -> dict[str, float | None]:
    """Record the seconds of a case on this machine, for forecasts of later cases.

    Args:
        expected: Its forecast.
        model: What segmented it.
        total_s: Seconds that it took.
        pass_s: Seconds of them inside the passes of networks, see `rate_of`.

    Returns:
        The peak and the seconds that were expected before this case; the seconds are None for the
        first case of a model on a machine.
    """
    key = machine_key(model)
    earlier_rate = known_rate(key)
    note_rate(key, rate_of(expected, total_s, pass_s))
    expected_s = None
    if earlier_rate is not None:
        expected_s = round(earlier_rate.seconds(expected), 2)
    return {"peak_resident_bytes": expected.peak_bytes, "total_s": expected_s}


def machine_key(model: ScanModel) -> str:
    """Name all that decides the rate on this machine: weights, precision, device and threads."""
    checksums: list[str] = []
    for files in model.checkpoints.values():
        checksums += sorted(files.values())
    weights = " ".join(checksum[:12] for checksum in checksums)
    return (
        f"{weights} {model.precision} {model.device} {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}"
    )


def known_rate(key: str) -> Rate | None:
    """Return the median rate of the cases that this machine has finished; None if there are none.

    Args:
        key: From `machine_key`.
    """
    rates = _read_rates().get(key)
    if not rates:
        return None
    unit_s = median(rate.unit_s for rate in rates)
    operation_s = median(rate.operation_s for rate in rates)
    return Rate(unit_s, operation_s)


def note_rate(key: str, rate: Rate) -> None:
    """Add the rate of a finished case to those of this machine, if their file can be written."""
    rates_by_key = _read_rates()
    earlier_rates = rates_by_key.get(key, [])
    rates_by_key[key] = [*earlier_rates, rate][-MAX_CASES:]
    # Without the file later forecasts only lack the seconds.
    with suppress(UserError):
        replace_text(_rates_path(), json.dumps(rates_by_key, indent=1))


def _rates_path() -> Path:
    """Name the file of this machine with the rates of finished cases."""
    return machine_folder() / "predictions.json"


def _read_rates() -> dict[str, list[Rate]]:
    """Read the rates of finished cases by `machine_key`; none if the file is damaged."""
    rates_by_key: dict[str, list[Rate]] = {}
    try:
        content = json.loads(_rates_path().read_text(encoding="utf-8"))
        for key, pairs in content.items():
            rates_by_key[key] = [Rate(*map(float, pair)) for pair in pairs]
    # The file does not exist yet, is damaged, or is of an older version.
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return rates_by_key
