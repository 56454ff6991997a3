"""Estimate of a run before it starts: peaks of allocator and processes, seconds of a step."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import torch

from medseg.config.schema import PlanConfig
from medseg.geometry.sizes import Shape
from medseg.io.machine_cache import machine_folder
from medseg.memory.accounting import UPDATE, StepMemory
from medseg.memory.device import pick_device, pick_device_type, start_libraries
from medseg.memory.heap import KEPT_BYTES, maps_large_blocks, min_mapped_bytes
from medseg.memory.kernels import KernelCosts
from medseg.memory.tracker import Timeline
from medseg.planning.process import ProcessCost, SampleCost, process_cost, sample_cost
from medseg.planning.recomputation import duration, rise
from medseg.planning.step import count_evaluation, count_memory, is_planned_for_gpu
from medseg.processors import num_processors
from medseg.targets import TARGET
from medseg.training.data_module import propose_workers
from medseg.training.mapped_blocks import map_blocks
from medseg.training.options import samples_per_micro_batch

# Phases of a run: keys of `Estimate.allocator` and `Estimate.resident`.
STEP, VALIDATION, CHECKPOINT, LOADING = "training step", "validation", "checkpoint", "loading"
# Checkpoints are serialised in memory, in a buffer that grows by an eighth whenever it is full: so
# it may be larger than its content by this factor.
BUFFER_GROWTH = 1.125
# Free memory that the heap keeps between the small tensors of a step where large ones are mapped:
# the smaller of these bytes and this share of the step's tensors. Measured at a bound of 64 MiB
# (`KEPT_BYTES`): ten trainings of five networks held 18 to 60 MiB more than their tensors, and
# those with small steps about 1.5 times their tensors.
STEP_KEPT_BYTES, STEP_KEPT_SHARE = 48 * 2**20, 0.5
# On a GPU the allocator takes more memory than the tensors need, by this share of them: free memory
# in fragments.
FRAGMENTS = 0.05
# The allocator of a GPU takes segments of this size for tensors of 1 to 10 MiB (`kLargeBuffer` of
# torch's CUDACachingAllocator). The last of them is hardly used, and is added as a whole.
SEGMENT_BYTES = 20 * 2**20


@dataclass(frozen=True)
class Estimate:
    """Memory and time of a run on one device.

    In the result of `estimate_beside`, `compute_seconds` and the entries STEP of `allocator` and
    `resident` are incomplete until `with_step` adds the training step.

    Attributes:
        memory: Exact count of the live tensors of a training step.
        allocator: Bytes of torch's allocator, with the workspaces of kernels, in the phases STEP
            and VALIDATION.
        resident: Resident bytes of all processes in these phases, in CHECKPOINT and, without loader
            processes, in LOADING; on a GPU, bytes of the card in the first two.
        compute_seconds: Duration of the operations of an optimiser step.
        other_seconds: Duration of the rest of the training loop in an optimiser step.
        loader_seconds: Processor time of making the samples of an optimiser step.
        num_workers: Loader processes.
        busy_processors: Processors that the computation uses.
        fragments: Share of the bytes of a step that its allocator takes in addition, see FRAGMENTS;
            0 on a CPU.
    """

    memory: StepMemory
    allocator: dict[str, int]
    resident: dict[str, int]
    compute_seconds: float
    other_seconds: float
    loader_seconds: float
    num_workers: int
    busy_processors: int
    fragments: float = 0.0

    @property
    def peak_allocator(self) -> int:
        """Largest number of bytes of torch's allocator."""
        return max(self.allocator.values())

    @property
    def peak_resident(self) -> int:
        """Largest number of resident bytes; on a GPU, of the card."""
        return max(self.resident.values())

    @property
    def seconds_per_step(self) -> float:
        """Duration of an optimiser step with the wait for its samples."""
        training_s = self.compute_seconds + self.other_seconds
        if not self.num_workers:
            return training_s + self.loader_seconds
        # Loaders and training run side by side, and the slowest of three sets the pace: the
        # training, the loaders, and the work of both together divided among all processors.
        worker_s = self.loader_seconds / self.num_workers
        compute_processor_s = self.compute_seconds * self.busy_processors
        all_processor_s = compute_processor_s + self.other_seconds + self.loader_seconds
        return max(training_s, worker_s, all_processor_s / num_processors())

    def with_step(self, allocated: int, resident: int, seconds: float) -> "Estimate":
        """Add the peaks and the seconds of a training step to the estimate of everything else.

        The bytes are added to the entries STEP; the seconds replace `compute_seconds`.

        Args:
            allocated: Peak bytes of torch's allocator.
            resident: Peak resident bytes. They are fewer than the allocated ones where a kernel
                does not write all of its workspace.
            seconds: Duration of the operations.
        """
        step_allocated = self.allocator[STEP] + allocated
        step_resident = self.resident[STEP] + round(resident * (1 + self.fragments))
        return replace(
            self,
            allocator=self.allocator | {STEP: step_allocated},
            resident=self.resident | {STEP: step_resident},
            compute_seconds=seconds,
        )

    def room_for_step(self, budget: int) -> int:
        """Return the bytes of tensors that may be added to the step within a budget.

        Before `with_step` this is the room for all tensors of the step.

        Args:
            budget: Resident bytes; on a GPU, bytes of the card.
        """
        return int((budget - self.resident[STEP]) / (1 + self.fragments))


class Evaluation(NamedTuple):
    """Cost of the evaluation of a case.

    Attributes:
        allocated: Peak bytes of torch's allocator.
        resident: Peak resident bytes, with free memory that the heap keeps. They are fewer than the
            allocated ones where a kernel does not write all of its workspace.
        keys: Keys of its operations, see `Timeline.calls`.
    """

    allocated: int
    resident: int
    keys: frozenset[str]


class Machine:
    """Measurements of this machine, made on first use and kept in files.

    Attributes:
        folder: Folder of the files.
        device: Device of the run.
        costs: Costs of operations.
    """

    def __init__(self, config: PlanConfig) -> None:
        """Prepare to measure for a configuration.

        Sets torch's number of threads in this process as configured.
        """
        self.folder = machine_folder()
        self.device = pick_device(config.trainer.accelerator)
        if self.device.type == "cpu" and config.trainer.threads:
            torch.set_num_threads(config.trainer.threads)
        self.costs = KernelCosts(self.folder, self.device)
        # The costs hold for this setting of the heap alone, see `prepare_for`.
        self._min_mapped_bytes = min_mapped_bytes()
        self._has_logger = bool(config.logger)
        self._has_monai = config.model[TARGET].startswith("monai.")
        self._samples: dict[tuple[Shape, bool], SampleCost] = {}
        self._evaluations: dict[str, Evaluation] = {}

    def prepare_for(self, config: PlanConfig) -> None:
        """Map blocks of memory as a training of a configuration does; use the costs that hold then.

        The size from which on the C library maps blocks changes for the whole process.
        """
        if self.device.type == "cpu":
            map_blocks(config)
        if min_mapped_bytes() != self._min_mapped_bytes:
            self._min_mapped_bytes = min_mapped_bytes()
            self.costs = KernelCosts(self.folder, self.device)

    @cached_property
    def process(self) -> ProcessCost:
        """Cost of a run without its tensors, with the libraries of the configuration.

        Without an earlier measurement it takes a minute.
        """
        return process_cost(self.folder, has_logger=self._has_logger, has_monai=self._has_monai)

    def measure(self, *timelines: Timeline) -> None:
        """Measure the operations of timelines that are new on this machine."""
        calls = {}
        for timeline in timelines:
            for key in used_keys(timeline):
                calls[key] = timeline.calls[key]
        self.costs.measure(calls)

    def lasting(self, keys: Collection[str]) -> int:
        """Bytes that the libraries keep after the first run of each of some operations."""
        return sum(self.costs[key].lasting for key in keys)

    def evaluation(self, config: PlanConfig, shape: Shape) -> Evaluation:
        """Estimate the cost of evaluating a case, from its operations; no values are computed.

        The cost is kept for later calls.
        """
        # Everything that the cost depends on.
        memory = config.memory
        switches = memory.precision, memory.channels_last, is_planned_for_gpu(config)
        key = repr((config.model, config.inference.tile_size, switches, shape, min_mapped_bytes()))
        if key not in self._evaluations:
            case_bytes, timeline = count_evaluation(config, shape)
            self.measure(timeline)
            allocated, resident = peaks(timeline, self.costs)
            kept_by_heap = kept_bytes(timeline, self.costs)
            self._evaluations[key] = Evaluation(
                allocated=case_bytes + allocated,
                resident=case_bytes + resident + kept_by_heap,
                keys=used_keys(timeline),
            )
        return self._evaluations[key]

    def sample(self, config: PlanConfig, shape: Shape, *, is_training: bool) -> SampleCost:
        """Measure the samples of a shape once, for training or for validation.

        The first measurement stands for all configurations that this object is asked about. They
        must agree in what a sample costs beside its shape: task, augmentation and kind of stage.
        """
        key = (shape, is_training)
        if key not in self._samples:
            self._samples[key] = sample_cost(config, shape, self.folder, is_training=is_training)
        return self._samples[key]


def estimate(
    config: PlanConfig, shape: Shape, validation_shape: Shape, machine: Machine
) -> Estimate:
    """Estimate the memory and the time of a run.

    Args:
        config: Checked configuration.
        shape: Voxels of a training sample, (D, H, W).
        validation_shape: Voxels of the largest validation case, (D, H, W).
        machine: Measurements.
    """
    machine.prepare_for(config)
    timeline = Timeline()
    memory = count_memory(config, shape, timeline=timeline)
    machine.measure(timeline)
    without_step = estimate_beside(config, shape, validation_shape, machine, memory, timeline)
    allocated, resident = peaks(timeline, machine.costs)
    seconds = step_seconds(timeline, machine.costs, config)
    return without_step.with_step(allocated, resident, seconds)


def used_keys(timeline: Timeline) -> frozenset[str]:
    """Keys of the operations of a timeline."""
    keys: set[str] = set()
    for segment in timeline.segments:
        keys.update(operation.key for operation in segment.operations)
    return frozenset(keys)


def peaks(timeline: Timeline, costs: KernelCosts) -> tuple[int, int]:
    """Find the largest numbers of allocated and of resident bytes in a timeline."""
    allocated = 0
    resident = 0
    for segment in timeline.segments:
        start_bytes = segment.start_bytes
        allocated = max(allocated, start_bytes + rise(segment, costs, is_resident=False))
        resident = max(resident, start_bytes + rise(segment, costs, is_resident=True))
    return allocated, resident


def kept_bytes(timeline: Timeline, costs: KernelCosts) -> int:
    """Bytes by which free memory in the heap raises the resident peak of a timeline.

    Small blocks come from the heap, and their pages stay when they are freed, up to a bound: at the
    peak the heap is as large as it was at any time before, also in the step before.
    """
    if not maps_large_blocks():
        return 0
    # For each operation: live bytes with the written part of a workspace, and those of them that
    # lie in the heap.
    points: list[tuple[int, int]] = []
    for segment in timeline.segments:
        for operation, tensor_bytes_in_heap in zip(
            segment.operations, segment.heap_bytes, strict=True
        ):
            written = max(operation.known_workspace, costs[operation.key].written)
            bytes_in_heap = tensor_bytes_in_heap
            # A workspace is a block of memory as a tensor is: a small one comes from the heap.
            if written < min_mapped_bytes():
                bytes_in_heap += written
            points.append((operation.live_bytes + written, bytes_in_heap))
    largest_heap = max((bytes_in_heap for _, bytes_in_heap in points), default=0)
    peak = 0
    peak_with_heap = 0
    for total, bytes_in_heap in points:
        outside_heap = total - bytes_in_heap
        # The heap stays as large as ever, but keeps no more free memory than its bound.
        heap_size = min(largest_heap, bytes_in_heap + KEPT_BYTES)
        peak = max(peak, total)
        peak_with_heap = max(peak_with_heap, outside_heap + heap_size)
    return peak_with_heap - peak


def kept_by_heap_in_step(peak: int, sample_bytes: int | None) -> int:
    """Bytes of free memory that the heap of the training process keeps during a step.

    Args:
        peak: Live bytes at the peak of the step.
        sample_bytes: Memory of making a sample in this process; None where workers make them.
    """
    if not maps_large_blocks():
        return 0
    left_by_tensors = min(STEP_KEPT_BYTES, round(STEP_KEPT_SHARE * peak))
    if sample_bytes is None:
        return left_by_tensors
    left_by_samples = min(KEPT_BYTES, sample_bytes)
    # Not the sum: the small tensors of a step use the free memory that a sample has left.
    return max(left_by_tensors, left_by_samples)


def step_seconds(timeline: Timeline, costs: KernelCosts, config: PlanConfig) -> float:
    """Sum the seconds of the operations of an optimiser step."""
    seconds = 0.0
    for segment in timeline.segments:
        # The optimiser runs once, the rest for each micro-batch.
        repeats = 1 if segment.owner.kind == UPDATE else config.memory.accumulate
        seconds += repeats * duration(segment, costs)
    return seconds


def estimate_beside(
    config: PlanConfig,
    shape: Shape,
    validation_shape: Shape,
    machine: Machine,
    memory: StepMemory,
    timeline: Timeline,
) -> Estimate:
    """Estimate memory and time of a run without the operations of its training step.

    It contains validation, checkpoints, loader and processes. `Estimate.with_step` adds the step.

    Args:
        config: Checked configuration.
        shape: Voxels of a training sample, (D, H, W).
        validation_shape: Voxels of the largest validation case, (D, H, W).
        machine: Measurements.
        memory: Count of the step.
        timeline: Operations of the step.
    """
    num_workers = config.data.num_workers
    if num_workers is None:
        num_workers = propose_workers(config)
    sample = machine.sample(config, shape, is_training=True)
    process = machine.process
    evaluation = machine.evaluation(config, validation_shape)
    is_gpu = pick_device_type(config.trainer.accelerator) == "cuda"
    # A batch that a worker has made lies in memory that processes share, which torch's allocator
    # does not count.
    shared_batch_bytes = 0
    if num_workers and not is_gpu:
        shared_batch_bytes = memory.input + memory.target
    allocator = {
        # Below zero, because the step's timeline, which `with_step` adds, counts the batch.
        STEP: -shared_batch_bytes,
        # The optimiser's state stays in memory between the steps.
        VALIDATION: evaluation.allocated + memory.optimizer_state,
    }
    fragments = 0.0
    if is_gpu:
        # `card_bytes` adds the fragments of all other memory; `with_step` adds those of the step.
        resident = card_bytes(allocator)
        fragments = FRAGMENTS
        busy_processors = 1
    else:
        validation_sample = machine.sample(config, validation_shape, is_training=False)
        library_bytes = machine.lasting(used_keys(timeline) | evaluation.keys)
        all_worker_bytes = loader_bytes(config, num_workers, process, sample, memory)
        resident = _host_bytes(
            config,
            memory,
            evaluation,
            in_all_phases=process.main + library_bytes + all_worker_bytes,
            shared_batch_bytes=shared_batch_bytes,
            sample_bytes=None if num_workers else sample.num_bytes,
            # Not the sum: a picture is drawn after the case was evaluated.
            validation_bytes=max(validation_sample.num_bytes, process.pictures),
        )
        busy_processors = min(torch.get_num_threads(), num_processors())
    num_samples = samples_per_micro_batch(config) * config.memory.accumulate
    return Estimate(
        memory=memory,
        allocator=allocator,
        resident=resident,
        compute_seconds=0.0,  # see `Estimate.with_step`
        # The loop runs once for each micro-batch.
        other_seconds=process.seconds * config.memory.accumulate,
        loader_seconds=num_samples * sample.seconds,
        num_workers=num_workers,
        busy_processors=busy_processors,
        fragments=fragments,
    )


def card_bytes(allocator: dict[str, int]) -> dict[str, int]:
    """Convert bytes of torch's allocator, by phase, to bytes of the card."""
    other_bytes = _context_bytes() + SEGMENT_BYTES
    card = {}
    for phase, num_bytes in allocator.items():
        card[phase] = round(num_bytes * (1 + FRAGMENTS)) + other_bytes
    return card


def _host_bytes(
    config: PlanConfig,
    memory: StepMemory,
    evaluation: Evaluation,
    *,
    in_all_phases: int,
    shared_batch_bytes: int,
    sample_bytes: int | None,
    validation_bytes: int,
) -> dict[str, int]:
    """Resident bytes of all processes by phase, without the tensors of the training step.

    Args:
        config: Checked configuration.
        memory: Count of the step.
        evaluation: Cost of the largest validation case.
        in_all_phases: Bytes of the training process without its tensors, of what its libraries
            keep, and of the loader workers.
        shared_batch_bytes: Bytes of a batch that a worker has made, in shared memory.
        sample_bytes: Memory of making a sample in this process; None where workers make them.
        validation_bytes: Memory of making the sample of the largest case, or of drawing it.
    """
    between_steps = in_all_phases + shared_batch_bytes + memory.optimizer_state
    # A checkpoint contains these two.
    weights_and_state = memory.parameters + memory.optimizer_state
    buffer = round(BUFFER_GROWTH * weights_and_state)
    # Before the network runs, the sample is made while the weights are in memory.
    making_validation_sample = memory.parameters + validation_bytes
    resident = {
        # `with_step` adds the tensors of the step, with the batch and the optimiser's state.
        STEP: in_all_phases + kept_by_heap_in_step(memory.peak, sample_bytes),
        # An evaluation includes the weights and the sample.
        VALIDATION: between_steps + max(evaluation.resident, making_validation_sample),
        CHECKPOINT: between_steps + memory.parameters + buffer,
    }
    if sample_bytes is not None:
        # The gradients of earlier micro-batches are kept until the optimiser steps.
        gradients = memory.gradients if config.memory.accumulate > 1 else 0
        # The samples of a batch, and the batch into which they are stacked.
        batches = 2 * (memory.input + memory.target)
        loading = weights_and_state + gradients + sample_bytes + batches
        resident[LOADING] = in_all_phases + loading
    return resident


def loader_bytes(
    config: PlanConfig,
    num_workers: int,
    process: ProcessCost,
    sample: SampleCost,
    memory: StepMemory,
) -> int:
    """Bytes of the loader workers and of the batches that wait.

    Workers are forked before the first step, and share the pages of the training process until one
    side writes them (copy on write). Each step writes the weights and their average, so that their
    old pages remain for the workers: one copy for all of them.
    """
    if not num_workers:
        return 0
    average_bytes = memory.parameters if config.ema_decay is not None else 0
    shared_copies = process.copies + memory.parameters + average_bytes
    batch = memory.input + memory.target
    # A worker holds the samples of a batch until the last of them is made, and stacks them then.
    # `sample.num_bytes` contains one of them.
    num_samples = samples_per_micro_batch(config)
    unstacked = batch * (num_samples - 1) // num_samples
    waiting = config.data.prefetch * batch
    bytes_a_worker = process.worker + sample.num_bytes + unstacked + waiting
    return shared_copies + num_workers * bytes_a_worker


@cache
def _context_bytes() -> int:
    """Bytes of a GPU that driver and libraries hold beside torch's allocator; 0 without a GPU.

    What other programs hold on the GPU at this moment counts too.
    """
    if not torch.cuda.is_available():
        return 0
    start_libraries(torch.device("cuda"))
    free, total = torch.cuda.mem_get_info()
    return int(total - free - torch.cuda.memory_reserved())
