"""Kernel costs: workspace and seconds of single operations, measured once per machine, stored."""

import contextlib
import gc
import itertools
import json
import math
import os
import platform
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_leaves, tree_map

from medseg.console import Progress, say
from medseg.errors import UserError, first_line, is_out_of_memory
from medseg.io.atomic import replace_text
from medseg.io.calibration import Circumstances, LoadMeter, present_load
from medseg.memory.device import start_libraries
from medseg.memory.heap import (
    USUALLY_MAPPED_BYTES,
    heap_used_bytes,
    maps_large_blocks,
    min_mapped_bytes,
)
from medseg.memory.instructions import instruction_limit
from medseg.memory.profile import (
    peak_resident_bytes,
    release_free_memory,
    reset_peak_resident,
    resident_bytes,
)
from medseg.memory.tracker import Call, Operand

# An operation with a larger tensor is measured on some of its slices, see `parts_of`. The tensors
# of these parts are still so large that the system maps new memory for each, as for all larger ones
# (see `medseg.memory.heap`): the measured time contains the page faults.
MEASURED_BYTES = 40 * 2**20
# On a GPU, operations with tensors of up to this share of its memory are measured whole: for a part
# of the slices cuDNN may choose another kernel, whose workspace cannot be extrapolated.
MEASURED_PART_OF_GPU = 1 / 8
# An operation that cannot be divided and needs more is not measured.
MAX_BYTES = 2**30
# Operations are measured in groups. After each group its costs are written, so that a command that
# is stopped keeps them, and the user is told how long the rest takes.
GROUP_SIZE = 64
# In each round, every operation of a group is run once: a processor that is slower for a while then
# affects all of them.
LEAST_ROUNDS, MOST_ROUNDS = 3, 15
# Seconds for the rounds of all groups together.
ROUNDS_S = 15.0
# If ROUNDS_S is too short for LEAST_ROUNDS, operations that take longer than this, in seconds, are
# timed once. That is enough: 116 convolutions of 0.05 to 0.6 s took, all together, the same time
# within 2 % in three rounds.
LONG_S = 0.05
# The parts of an operation are multiples of 1 / d of its slices, where d is the greatest common
# divisor of the depths of its tensors: so each tensor has a whole number of slices in each part. An
# operation with a smaller d than this is not divided, because small numbers among its arguments
# (kernel size, number of an axis) could be taken for a depth.
LEAST_DIVISOR = 8
# Exceptions of torch for an operation that does not accept arguments made from shapes alone, or
# that lacks memory; any other exception is a defect of this module.
OPERATION_ERRORS = (RuntimeError, TypeError, ValueError, IndexError)
# Name of an operation's run for the profiler, to which the number of the run is appended.
MARK = "medseg operation "
aten = torch.ops.aten
# Position of the weight among the arguments: it has five axes too, but no slices.
WEIGHTS = {aten.convolution.default: 1, aten.convolution_backward.default: 2}
# Position among the arguments of the number of voxels in a channel, which changes with the number
# of slices.
VOXEL_COUNTS = {aten.native_group_norm.default: 5, aten.native_group_norm_backward.default: 7}


class Cost(NamedTuple):
    """Cost of one operation.

    Attributes:
        workspace: Bytes that its kernel takes beside arguments and result, and frees.
        written: Bytes of the workspace that the kernel writes. Only they become resident.
        lasting: Bytes that the libraries keep after its first run: the code that oneDNN makes for
            these sizes.
        seconds: Duration; on a CPU see `KernelCosts._clock`.
    """

    workspace: int
    written: int
    lasting: int
    seconds: float


NOTHING = Cost(workspace=0, written=0, lasting=0, seconds=0.0)


class Run(NamedTuple):
    """Measurement of one run of an operation.

    Attributes:
        workspace: See `Cost`.
        written_share: Share of the workspace that the kernel wrote; 1 where it is not known.
        seconds: Duration.
    """

    workspace: int
    written_share: float
    seconds: float


class KernelCosts:
    """Costs of operations on this machine, with its libraries and number of threads.

    Operations have the same keys as in `Timeline.calls`.

    Attributes:
        device: Device on which operations are measured.
        path: File of the costs.
        costs: Cost by the key of the operation.
        unmeasured: Reason why an operation could not be run alone, by its name. Its cost counts as
            zero.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Read earlier measurements.

        Args:
            folder: Folder of the file.
            device: Device on which operations are measured.
        """
        self.device = device
        hardware = processor_name()
        if device.type == "cuda":
            hardware = torch.cuda.get_device_name(device)
        # The name contains everything that changes the costs.
        name = f"{hardware} {torch.get_num_threads()} threads torch {torch.__version__}"
        # Whether large blocks are mapped decides about page faults, which take time.
        if device.type == "cpu" and maps_large_blocks():
            name += " mapped"
            if min_mapped_bytes() != USUALLY_MAPPED_BYTES:
                name += f" from {min_mapped_bytes()}"
        if instruction_limit():
            name += f" {instruction_limit()}"
        file_name = f"kernels {name}.json".replace("/", "_").replace(" ", "_")
        self.path = folder / file_name
        self.unmeasured: dict[str, str] = {}
        self._reasons: dict[str, str] = {}  # why an operation failed, by its key
        # Memory of the arguments of operations, by their place among the arguments, for reuse.
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}
        self._circumstances: dict[str, Circumstances] = {}  # of the measurement, by key
        self.costs: dict[str, Cost] = {}
        self._read()

    def __getitem__(self, key: str) -> Cost:
        """Return the cost of an operation; zero where it was not measured."""
        return self.costs.get(key, NOTHING)

    def measure(self, calls: Mapping[str, Call]) -> None:
        """Measure the operations that are new on this machine, and add their costs to the file."""
        missing = sorted(key for key in calls if key not in self.costs)
        if not missing:
            return
        noun = "operation" if len(missing) == 1 else "operations"
        say(f"plan: measuring {len(missing)} {noun} on this machine; kept for later plans")
        # In random order, so that each group has operations of all configurations that a plan
        # compares: a processor that slows down favours none of them, and the time of the groups so
        # far tells how long the others take.
        random.Random(0).shuffle(missing)
        progress = Progress("plan", len(missing), "operations")
        for start in range(0, len(missing), GROUP_SIZE):
            group = missing[start : start + GROUP_SIZE]
            self._measure_group({key: calls[key] for key in group}, len(group) / len(missing))
            progress.show(start + len(group))
        self._buffers.clear()
        for operation, reason in self.unmeasured.items():
            say(f"plan: {operation} could not be measured and counts as nothing: {reason}")

    def _measure_group(self, group: Mapping[str, Call], share: float) -> None:
        """Measure some operations, and add their costs to the file.

        Args:
            group: The operations.
            share: Share of ROUNDS_S that they may use.
        """
        # Otherwise the memory of the last group's profiler would be freed later, between two
        # readings of the heap.
        gc.collect()
        with LoadMeter() as meter:
            measured = self._measure(group, share * ROUNDS_S)
        self.costs |= measured
        self._circumstances |= dict.fromkeys(measured, meter.circumstances())
        self._write(measured)

    def _measure(self, missing: Mapping[str, Call], rounds_s: float) -> dict[str, Cost]:
        """Measure operations, large ones by one or two parts of them.

        Args:
            missing: The operations.
            rounds_s: See `_durations`.
        """
        largest_bytes = self._measured_bytes()
        # Of each operation one or two parts, the larger one last; no part if the operation is too
        # large and cannot be divided.
        parts = {key: parts_of(call, largest_bytes) for key, call in missing.items()}
        larger = {key: call_parts[-1].call for key, call_parts in parts.items() if call_parts}
        with torch.no_grad():
            # This comes first, because `_lasting` must see the first run of each operation in this
            # process.
            lasting = self._lasting(larger)
            # Operations that cannot run alone are missing from here on.
            larger_runs = self._watched(larger)
            smaller: dict[str, Call] = {}
            for key, run in larger_runs.items():
                # The smaller part serves to extrapolate the workspace. An operation that takes no
                # workspace on its larger part takes none as a whole.
                if run.workspace and len(parts[key]) > 1:
                    smaller[key] = parts[key][0].call
            smaller_runs = self._watched(smaller)
            durations_s = self._durations(
                {key: larger[key] for key in larger_runs},
                {key: run.seconds for key, run in larger_runs.items()},
                rounds_s,
            )
        costs = {}
        for key, call in missing.items():
            if key not in larger_runs:
                reason = self._reasons.get(key, "it is too large, and cannot be divided")
                self.unmeasured[str(call.operation)] = reason
                costs[key] = NOTHING
                continue
            larger_run = larger_runs[key]
            larger_share = parts[key][-1].share
            points = []
            if key in smaller_runs:
                smaller_share = parts[key][0].share
                points.append((smaller_share, smaller_runs[key].workspace))
            points.append((larger_share, larger_run.workspace))
            workspace = extrapolated_bytes(points)
            costs[key] = Cost(
                workspace,
                written=round(larger_run.written_share * workspace),
                lasting=lasting[key],
                # Time is proportional to the number of slices.
                seconds=median(durations_s[key]) / larger_share,
            )
        return costs

    def _measured_bytes(self) -> int:
        """Bytes of the largest tensor of an operation that is measured whole."""
        if self.device.type != "cuda":
            return MEASURED_BYTES
        card_bytes = torch.cuda.get_device_properties(self.device).total_memory
        return int(MEASURED_PART_OF_GPU * card_bytes)

    def _durations(
        self, calls: Mapping[str, Call], first_s: Mapping[str, float], rounds_s: float
    ) -> dict[str, list[float]]:
        """Time operations in rounds.

        Args:
            calls: The operations.
            first_s: Seconds of a first run of each operation. If LEAST_ROUNDS of all operations
                would exceed `rounds_s`, this run is the only one of the operations that take longer
                than LONG_S.
            rounds_s: Seconds after which no further round begins, once LEAST_ROUNDS are done.

        Returns:
            One or more durations of each operation.
        """
        durations_s: dict[str, list[float]] = {key: [] for key in calls}
        timed = dict(calls)
        lacks_time = LEAST_ROUNDS * sum(first_s.values()) > rounds_s
        if lacks_time:
            for key, seconds in first_s.items():
                if seconds > LONG_S:
                    durations_s[key].append(seconds)
                    del timed[key]
        start_s = time.perf_counter()
        for number in range(MOST_ROUNDS):
            if number >= LEAST_ROUNDS and time.perf_counter() - start_s > rounds_s:
                break
            for key, call in timed.items():
                durations_s[key].append(self._seconds(call))
        return durations_s

    def _read(self) -> None:
        """Read the costs that are still valid, see `Circumstances.is_valid`."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            for key, (workspace, written, lasting, seconds, load, time_s) in content.items():
                circumstances = Circumstances(float(load), float(time_s))
                if not circumstances.is_valid(present_load):
                    continue
                self.costs[key] = Cost(int(workspace), int(written), int(lasting), float(seconds))
                self._circumstances[key] = circumstances
        except (OSError, ValueError, TypeError, AttributeError):  # no file yet, or a damaged one
            self.costs = {}
            self._circumstances = {}

    def _write(self, measured: Mapping[str, Cost]) -> None:
        """Add costs to the file."""
        # A new object reads the file again: another process may have added costs in the meantime.
        stored = KernelCosts(self.path.parent, self.device)
        stored.costs |= measured
        stored._circumstances |= {key: self._circumstances[key] for key in measured}
        rows = {key: [*cost, *stored._circumstances[key]] for key, cost in stored.costs.items()}
        # Where the folder cannot be written, the costs are measured again the next time.
        with contextlib.suppress(UserError):
            replace_text(self.path, json.dumps(rows))

    def _lasting(self, calls: Mapping[str, Call]) -> dict[str, int]:
        """Run each operation for the first time.

        Returns:
            Bytes that stay taken when the result of the operation is gone, by key; 0 for an
            operation that fails.
        """
        lasting = dict.fromkeys(calls, 0)
        # Libraries are loaded first, so that they do not count as a cost of the first operation.
        start_libraries(self.device)
        for key, call in calls.items():
            with self._noted_failure(key):
                run = self._prepared(call)
                bytes_before = heap_used_bytes()
                run()
                self._synchronise()
                lasting[key] = max(0, heap_used_bytes() - bytes_before)
        return lasting

    def _watched(self, calls: Mapping[str, Call]) -> dict[str, Run]:
        """Run each operation once more, and measure its workspace and its seconds.

        Operations that fail are missing in the result.
        """
        if self.device.type == "cuda":
            return self._watched_on_gpu(calls)
        # The profiler's library prints lines otherwise.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        # By key: number of the run for the profiler, written bytes and seconds.
        runs: dict[str, tuple[int, int | None, float]] = {}
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            for number, (key, call) in enumerate(calls.items()):
                with self._noted_failure(key):
                    written_bytes, seconds = self._watched_run(call, f"{MARK}{number}")
                    runs[key] = number, written_bytes, seconds
        workspaces = _workspaces(profiler.profiler.kineto_results.experimental_event_tree())
        watched = {}
        for key, (number, written_bytes, seconds) in runs.items():
            workspace = workspaces.get(number, 0)
            written_share = 1.0
            # A smaller workspace comes from the heap, whose pages may be resident already: then the
            # resident memory does not show what is written.
            if written_bytes is not None and workspace >= min_mapped_bytes():
                written_share = min(1.0, written_bytes / workspace)
            watched[key] = Run(workspace, written_share, seconds)
        return watched

    def _watched_run(self, call: Call, mark: str) -> tuple[int | None, float]:
        """Run an operation under a name for the profiler.

        It must have run before, because the first run also creates what the libraries then keep.

        Returns:
            Bytes that it writes beside its result, None where that is not known; and its seconds.
        """
        clock = self._clock()
        run = self._prepared(call)
        bytes_before = _watch_resident()
        with record_function(mark):
            start_s = clock()
            # The name keeps the result alive, so that its bytes are not taken for a workspace.
            result = run()
            seconds = clock() - start_s
        if bytes_before is None:
            return None, seconds
        peak_bytes = peak_resident_bytes()
        bytes_after = resident_bytes()
        result_bytes = 0
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                result_bytes += leaf.untyped_storage().nbytes()
        # Two lower bounds of the bytes written beside the result. The first is too low where a part
        # of the workspace stays in the heap, the second where the result was resident before.
        freed_bytes = peak_bytes - bytes_after
        added_bytes = peak_bytes - bytes_before - result_bytes
        written_bytes = max(freed_bytes, added_bytes, 0)
        return written_bytes, seconds

    @contextlib.contextmanager
    def _noted_failure(self, key: str) -> Iterator[None]:
        """Keep the reason why an operation cannot run alone.

        Raises:
            RuntimeError: If the GPU itself fails, after which no operation runs: all that follow
                would count as nothing.
        """
        try:
            yield
        except OPERATION_ERRORS as error:
            if str(error).startswith("CUDA error") and not is_out_of_memory(error):
                raise
            self._reasons[key] = first_line(error)

    def _synchronise(self) -> None:
        """Wait for the GPU, so that an operation fails, and takes its time, before the next one."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _watched_on_gpu(self, calls: Mapping[str, Call]) -> dict[str, Run]:
        """Do the same as `_watched` by the statistics of torch's allocator."""
        watched = {}
        for key, call in calls.items():
            with self._noted_failure(key):
                run = self._prepared(call)
                torch.cuda.reset_peak_memory_stats()
                start_s = time.perf_counter()
                # The name keeps the result alive, so that its bytes are in both numbers below.
                _result = run()
                torch.cuda.synchronize()
                seconds = time.perf_counter() - start_s
                peak_bytes = torch.cuda.max_memory_allocated()
                workspace = peak_bytes - torch.cuda.memory_allocated()
                del _result  # before the next operation runs
                watched[key] = Run(workspace, written_share=1.0, seconds=seconds)
        return watched

    def _clock(self) -> Callable[[], float]:
        """Return the clock of the device, in seconds.

        On a CPU it is the processor time of the calling thread: other programs on the machine do
        not lengthen it. Where an operation uses several threads, the calling one works from the
        beginning to the end: torch and oneDNN divide an operation evenly and give that thread the
        first and largest part. Measured with nine operations on two threads: the calling thread
        took 50 to 70 % of the processor time of both, so its part was never the smaller one, and
        50 to 65 % of its time without the other thread, so its time shows what a thread saves.
        """
        return time.thread_time if self.device.type == "cpu" else time.perf_counter

    def _seconds(self, call: Call) -> float:
        """Time one run of an operation.

        An operation must not be run twice in a row. In a step each operation runs among others, and
        its code and its tensors are no longer in the processor's caches. A repetition would find
        them there: steps took 10 to 25 % longer than the sum of repeated operations.
        """
        clock = self._clock()
        run = self._prepared(call)
        start_s = clock()
        run()
        self._synchronise()
        return clock() - start_s

    def _prepared(self, call: Call) -> Callable[[], Any]:
        """Make tensors for an operation's arguments; return it as a function without arguments."""
        # An operation that writes into its arguments gets tensors of its own.
        buffers = {} if call.operation._schema.is_mutable else self._buffers
        places = itertools.count()

        def as_value(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return self.device
            if isinstance(leaf, Operand):
                return self._as_tensor(leaf, buffers, next(places))
            return leaf

        arguments, options = tree_map(as_value, (call.arguments, call.options), is_leaf=_is_operand)
        return lambda: call.operation(*arguments, **options)

    def _as_tensor(
        self, operand: Operand, buffers: dict[tuple[int, torch.dtype], Tensor], place: int
    ) -> Tensor:
        """Make a tensor as a view of the buffer for its place among the arguments.

        Filling a new tensor would take longer than many operations.
        """
        # Number of elements from the first of the tensor to its last, gaps included.
        num_elements = 0
        if 0 not in operand.shape:
            num_elements = 1
            for length, stride in zip(operand.shape, operand.stride, strict=True):
                num_elements += (length - 1) * stride
        buffer = buffers.get((place, operand.dtype))
        if buffer is None or len(buffer) < num_elements:
            # Not zero: results near it would be denormal numbers, which are slow. Integers may be
            # indices, for which 0 is in range.
            value = 0.5 if operand.dtype.is_floating_point else 0
            buffer = torch.full((num_elements,), value, dtype=operand.dtype, device=self.device)
            buffers[place, operand.dtype] = buffer
        return buffer.as_strided(operand.shape, operand.stride)


def _watch_resident() -> int | None:
    """Reset the peak of this process's resident memory, see `peak_resident_bytes`.

    Returns:
        Bytes that are resident now; None where the peak would not show what an operation writes:
        where the system cannot reset it, or where large blocks come from the heap, whose free pages
        are resident already.
    """
    if not maps_large_blocks():
        return None
    # Memory that an operation takes from resident free pages would not raise the resident memory.
    release_free_memory()
    try:
        reset_peak_resident()
    except OSError:
        return None
    return resident_bytes()


def processor_name() -> str:
    """Model of this machine's processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def extrapolated_bytes(points: Sequence[tuple[float, int]]) -> int:
    """Extrapolate bytes measured on one or two shares of an operation to the whole.

    Args:
        points: Share, from 0 to 1, and bytes; the larger share last. Through two points goes a
            straight line; a single one is continued in proportion.
    """
    share, num_bytes = points[-1]
    smaller_share, fewer_bytes = 0.0, 0
    if len(points) > 1:
        smaller_share, fewer_bytes = points[0]
    slope = (num_bytes - fewer_bytes) / (share - smaller_share)
    return max(0, round(num_bytes + slope * (1 - share)))


class Part(NamedTuple):
    """An operation on some of the slices of a larger one, and their share of all slices."""

    share: float
    call: Call


def parts_of(call: Call, measured_bytes: int) -> list[Part]:
    """Cut a large operation down to one or two smaller ones, which are measured in its place.

    Args:
        call: The operation.
        measured_bytes: Bytes of the largest tensor of an operation that is measured whole.

    Returns:
        The smaller operations, the one with the most slices last. A small operation is its own only
        part. So is a larger one that cannot be divided, unless it needs more than MAX_BYTES: then
        there is no part.
    """
    leaves = tree_leaves((call.arguments, call.options), is_leaf=_is_operand)
    operands = [leaf for leaf in leaves if _is_operand(leaf)]
    sizes = [math.prod(operand.shape) * operand.dtype.itemsize for operand in operands]
    if max(sizes, default=0) <= measured_bytes:
        return [Part(1.0, call)]
    weight = None
    if call.operation in WEIGHTS:
        weight = call.arguments[WEIGHTS[call.operation]]
    depths = [operand.shape[-3] for operand in operands if _has_slices(operand, weight)]
    divisor = math.gcd(*depths)  # 0 without depths
    can_be_divided = divisor >= LEAST_DIVISOR
    if not can_be_divided:
        if sum(sizes) > MAX_BYTES:
            return []
        return [Part(1.0, call)]
    # Tensors may differ in depth, e.g. by a stride of 2. A share of n / divisor is a whole number
    # of slices in each of them. The largest n whose part is small enough, but at least 1:
    numerator = max(1, divisor * measured_bytes // max(sizes))
    smaller_numerator = max(1, numerator // 2)
    parts = []
    for part_numerator in sorted({smaller_numerator, numerator}):
        part = _cut(call, weight, part_numerator, divisor)
        parts.append(Part(part_numerator / divisor, part))
    return parts


def _has_slices(leaf: Any, weight: Operand | None) -> bool:
    """Whether an argument is a tensor (N, C, D, H, W), and not the weight."""
    return _is_operand(leaf) and len(leaf.shape) == 5 and leaf is not weight


def _cut(call: Call, weight: Operand | None, numerator: int, denominator: int) -> Call:
    """Take the share `numerator / denominator` of the slices of an operation.

    All tensors (N, C, D, H, W) but the weight are cut, and sizes among the other arguments.
    """

    def cut(leaf: Any) -> Any:
        if _has_slices(leaf, weight):
            depth = leaf.shape[2] * numerator // denominator
            shape = (*leaf.shape[:2], depth, *leaf.shape[3:])
            return leaf._replace(shape=shape, stride=_dense(shape, leaf.stride))
        # The lists of integers of a convolution are strides, padding and the like, no sizes.
        is_convolution = weight is not None
        if is_convolution or not _is_integers(leaf):
            return leaf
        # Sizes (D, H, W) or (N, C, D, H, W).
        if len(leaf) not in (3, 5):
            return leaf
        depth = leaf[-3]
        # The depths of all tensors are multiples of the denominator. A list with another number in
        # that place, such as kernel sizes or the zeros of a padding, stays.
        if depth == 0 or depth % denominator:
            return leaf
        return [*leaf[:-3], depth * numerator // denominator, *leaf[-2:]]

    def is_leaf(leaf: Any) -> bool:
        return _is_operand(leaf) or _is_integers(leaf)

    arguments, options = tree_map(cut, (call.arguments, call.options), is_leaf=is_leaf)
    if call.operation in VOXEL_COUNTS:
        place = VOXEL_COUNTS[call.operation]
        num_voxels = arguments[place] * numerator // denominator
        arguments = (*arguments[:place], num_voxels, *arguments[place + 1 :])
    return Call(call.operation, arguments, options)


def _dense(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor without gaps in memory, with the order of axes of another tensor.

    An image stored with its channels last, for example, keeps them last.

    Args:
        shape: Shape of the tensor.
        stride: Strides of the other tensor. Those of repeated axes, 0, stay.
    """
    dense = [0] * len(shape)
    # The innermost axis first. Of two axes with equal strides one has length 1, because elements
    # would overlap otherwise; the later axis is taken for the inner one.
    axes_from_innermost = sorted(range(len(shape)), key=lambda axis: (stride[axis], -axis))
    step = 1
    for axis in axes_from_innermost:
        if stride[axis]:
            dense[axis] = step
            step *= shape[axis]
    return tuple(dense)


def _is_integers(leaf: Any) -> bool:
    """Whether an argument is a list of one or more integers."""
    if not isinstance(leaf, (list, tuple)) or not leaf:
        return False
    return all(isinstance(value, int) for value in leaf)


def _is_operand(leaf: Any) -> bool:
    return isinstance(leaf, Operand)


def _workspaces(events: Iterable[Any]) -> dict[int, int]:
    """Find the workspace of each operation named with MARK: its peak memory less its result.

    Args:
        events: Events of the profiler, each with its children.

    Returns:
        Bytes by the number of the operation's run.
    """
    workspaces: dict[int, int] = {}
    for event in events:
        if not event.name.startswith(MARK):
            workspaces |= _workspaces(event.children)
            continue
        live_bytes = 0
        peak_bytes = 0
        for _, num_bytes in sorted(_allocations(event)):  # by time
            live_bytes += num_bytes
            peak_bytes = max(peak_bytes, live_bytes)
        # Only the result is live at the end.
        number = int(event.name.removeprefix(MARK))
        workspaces[number] = peak_bytes - live_bytes
    return workspaces


def _allocations(event: Any) -> list[tuple[int, int]]:
    """List time (ns) and bytes of all allocations below an event; releases are negative."""
    allocations = []
    if event.name == "[memory]":
        allocations.append((event.start_time_ns, event.extra_fields.alloc_size))
    for child in event.children:
        allocations += _allocations(child)
    return allocations
