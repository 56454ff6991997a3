"""Kernel costs: workspace and seconds of single operations, measured once a machine and kept."""

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

# An operation on a larger tensor is measured on two parts of its slices. The tensors of a part are
# still so large that the system maps new memory for each, as for all larger ones (see
# `medseg.memory.heap`): the measured time contains the page faults.
MEASURED_BYTES = 40 * 2**20
# On a GPU the largest tensor of an operation that is measured whole takes this part of the card:
# cuDNN chooses another kernel for a part, whose workspace says nothing of the whole.
MEASURED_PART_OF_GPU = 1 / 8
# An operation that cannot be divided and needs more is not measured.
MAX_BYTES = 2**30
# Operations are measured in groups. After each group its costs are written, so that a command that
# is stopped keeps them, and the user is told how long the rest takes.
GROUP_SIZE = 64
# The operations of a group are timed in rounds, so that a processor that is slower for a while is
# so for all of them. ROUNDS_S is the time for all groups together.
LEAST_ROUNDS, MOST_ROUNDS, ROUNDS_S = 3, 15, 15.0
# If ROUNDS_S is too short for LEAST_ROUNDS, operations that take longer than this are timed once.
# That is enough: in three rounds, the sums of 116 convolutions of 0.05 to 0.6 s were within 2 %.
LONG_S = 0.05
# An operation is cut by a common divisor of the depths of its tensors. Below this, small numbers
# among its arguments (the size of a kernel, the number of an axis) could be taken for a depth.
LEAST_DIVISOR = 8
# What torch raises for an operation whose arguments cannot be made alone, or do not fit; anything
# else is a defect of ours.
OPERATION_ERRORS = (RuntimeError, TypeError, ValueError, IndexError)
MARK = "medseg operation "
aten = torch.ops.aten
# Position of the weight among the arguments: it has five axes too, but no slices.
WEIGHTS = {aten.convolution.default: 1, aten.convolution_backward.default: 2}
# Position of the number of voxels in a channel, which follows the slices.
VOXEL_COUNTS = {aten.native_group_norm.default: 5, aten.native_group_norm_backward.default: 7}


class Cost(NamedTuple):
    """Cost of one operation.

    Attributes:
        workspace: Bytes that its kernel takes beside arguments and result, and frees.
        written: Bytes of the workspace that the kernel writes; the system gives no memory for the
            others.
        lasting: Bytes that the libraries keep after its first run: the code that oneDNN makes for
            these sizes.
        seconds: Duration.
    """

    workspace: int
    written: int
    lasting: int
    seconds: float


NOTHING = Cost(0, 0, 0, 0.0)


class Run(NamedTuple):
    """What was seen of one run of an operation.

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

    Attributes:
        unmeasured: Names of operations that could not be run alone, whose costs count as zero, to
            the reason.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Read what was measured before.

        Args:
            folder: Folder of the file.
            device: Device on which operations are measured.
        """
        self.device = device
        hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
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
        self._reasons: dict[str, str] = {}  # by key of the operation
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}  # by place among the arguments
        self._circumstances: dict[str, Circumstances] = {}
        self.costs: dict[str, Cost] = {}
        self._read()

    def __getitem__(self, key: str) -> Cost:
        """Cost of an operation; zero where it was not measured."""
        return self.costs.get(key, NOTHING)

    def measure(self, calls: Mapping[str, Call]) -> None:
        """Measure the operations that are new on this machine, and add their costs to the file."""
        missing = sorted(key for key in calls if key not in self.costs)
        if not missing:
            return
        noun = "operation" if len(missing) == 1 else "operations"
        say(f"plan: measuring {len(missing)} {noun} on this machine; kept for later plans")
        # Mixed, so that each group has operations of all sets of switches: a processor that slows
        # down favours none of them, and the groups so far tell how long the others take.
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
            share: Part of ROUNDS_S that they may use.
        """
        gc.collect()  # what the last profiler left would be freed between two readings of the heap
        with LoadMeter() as meter:
            measured = self._measure(group, share * ROUNDS_S)
        self.costs |= measured
        self._circumstances |= dict.fromkeys(measured, meter.circumstances())
        self._write(measured)

    def _measure(self, missing: Mapping[str, Call], rounds_s: float) -> dict[str, Cost]:
        """Measure operations, large ones by one or two parts of them."""
        largest_bytes = self._measured_bytes()
        parts = {key: parts_of(call, largest_bytes) for key, call in missing.items()}
        with torch.no_grad():
            larger = {key: call_parts[-1].call for key, call_parts in parts.items() if call_parts}
            lasting = self._lasting(larger)
            # Operations that cannot run alone are missing from here on.
            runs = self._watched(larger)
            smaller: dict[str, Call] = {}
            for key, run in runs.items():
                # An operation without a workspace on its larger part has none on the whole.
                if run.workspace and len(parts[key]) > 1:
                    smaller[key] = parts[key][0].call
            smaller_runs = self._watched(smaller)
            durations_s = self._durations(
                {key: larger[key] for key in runs},
                {key: run.seconds for key, run in runs.items()},
                rounds_s,
            )
        costs = {}
        for key, call in missing.items():
            if key not in runs:
                reason = self._reasons.get(key, "it is too large, and cannot be divided")
                self.unmeasured[str(call.operation)] = reason
                costs[key] = NOTHING
                continue
            share = parts[key][-1].share
            points = [(share, runs[key].workspace)]
            if key in smaller_runs:
                points.insert(0, (parts[key][0].share, smaller_runs[key].workspace))
            workspace = continued(points)
            costs[key] = Cost(
                workspace,
                written=round(runs[key].written_share * workspace),
                lasting=lasting[key],
                seconds=median(durations_s[key]) / share,
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
            first_s: Seconds of a first run of each. They stand for long operations if there is no
                time for LEAST_ROUNDS with them.
            rounds_s: Seconds that more than LEAST_ROUNDS may take.
        """
        durations_s: dict[str, list[float]] = {key: [] for key in calls}
        timed = dict(calls)
        if LEAST_ROUNDS * sum(first_s.values()) > rounds_s:
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
        """Read the costs that still count, see `medseg.io.calibration`."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            for key, (workspace, written, lasting, seconds, load, time_s) in content.items():
                circumstances = Circumstances(float(load), float(time_s))
                if not circumstances.is_valid(present_load):
                    continue
                self.costs[key] = Cost(int(workspace), int(written), int(lasting), float(seconds))
                self._circumstances[key] = circumstances
        except (OSError, ValueError, TypeError, AttributeError):  # none yet, or a damaged one
            self.costs = {}
            self._circumstances = {}

    def _write(self, measured: Mapping[str, Cost]) -> None:
        """Add costs to the file; another process may have added some since it was read."""
        file = KernelCosts(self.path.parent, self.device)
        file.costs |= measured
        file._circumstances |= {key: self._circumstances[key] for key in measured}
        rows = {key: [*cost, *file._circumstances[key]] for key, cost in file.costs.items()}
        # In a folder that cannot be written nothing is kept: measured again the next time.
        with contextlib.suppress(UserError):
            replace_text(self.path, json.dumps(rows))

    def _lasting(self, calls: Mapping[str, Call]) -> dict[str, int]:
        """Run each operation for the first time.

        Returns:
            Bytes that stay taken when its result is gone; 0 for an operation that fails.
        """
        lasting = dict.fromkeys(calls, 0)
        start_libraries(self.device)
        for key, call in calls.items():
            with self._noted_failure(key):
                run = self._prepared(call)
                before = heap_used_bytes()
                run()
                self._synchronise()
                lasting[key] = max(0, heap_used_bytes() - before)
        return lasting

    def _watched(self, calls: Mapping[str, Call]) -> dict[str, Run]:
        """Run each operation once more, and measure its workspace and its seconds.

        Operations that fail are missing in the result.
        """
        if self.device.type == "cuda":
            return self._watched_on_gpu(calls)
        # The profiler's library prints lines otherwise.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        runs: dict[str, tuple[int, int | None, float]] = {}
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            for number, (key, call) in enumerate(calls.items()):
                with self._noted_failure(key):
                    written_bytes, seconds = self._watched_run(call, f"{MARK}{number}")
                    runs[key] = number, written_bytes, seconds
        peaks = _allocated_peaks(profiler.profiler.kineto_results.experimental_event_tree())
        watched = {}
        for key, (number, written_bytes, seconds) in runs.items():
            workspace = peaks.get(number, 0)
            written_share = 1.0
            # A smaller workspace comes from the heap, which may be resident already: then it does
            # not show what is written.
            if written_bytes is not None and workspace >= min_mapped_bytes():
                written_share = min(1.0, written_bytes / workspace)
            watched[key] = Run(workspace, written_share, seconds)
        return watched

    def _watched_run(self, call: Call, mark: str) -> tuple[int | None, float]:
        """Run an operation under a mark of the profiler.

        It has run before: what the libraries make once is there.

        Returns:
            Bytes that it writes beside its result, None where that is not known; and its seconds.
        """
        clock = self._clock()
        run = self._prepared(call)
        before = _watch_resident()
        with record_function(mark):
            start_s = clock()
            result = run()  # live at the end of the mark
            seconds = clock() - start_s
        if before is None:
            return None, seconds
        peak = peak_resident_bytes()
        after = resident_bytes()
        result_bytes = 0
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                result_bytes += leaf.untyped_storage().nbytes()
        # Two lower bounds of what was written beside the result. The first is too low where a part
        # of the workspace stays in the heap, the second where the result was resident before.
        written_bytes = max(peak - after, peak - before - result_bytes, 0)
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
        """Wait for the GPU, so that an operation fails by itself and not in the next one."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _watched_on_gpu(self, calls: Mapping[str, Call]) -> dict[str, Run]:
        watched = {}
        for key, call in calls.items():
            with self._noted_failure(key):
                run = self._prepared(call)
                torch.cuda.reset_peak_memory_stats()
                start_s = time.perf_counter()
                _result = run()  # live when the bytes are read, so that it does not count
                torch.cuda.synchronize()
                seconds = time.perf_counter() - start_s
                peak = torch.cuda.max_memory_allocated()
                workspace = peak - torch.cuda.memory_allocated()
                del _result
                watched[key] = Run(workspace, 1.0, seconds)
        return watched

    def _clock(self) -> Callable[[], float]:
        """Clock of the device.

        On a CPU it is the processor time of the calling thread: other programs on the machine do
        not lengthen it. Of several threads the calling one works from the beginning to the end:
        torch and oneDNN divide an operation evenly and give it the first and largest part. With two
        threads nine operations took it 1.00 to 1.4 times half of the processor time of both, and
        0.50 to 0.65 times its time alone.
        """
        return time.thread_time if self.device.type == "cpu" else time.perf_counter

    def _seconds(self, call: Call) -> float:
        """Time an operation once.

        In a step each operation runs among others: its code and its tensors are no longer in the
        processor's caches. A repetition would find them there; steps took 10 to 25 % longer than
        the sum of repeated operations.
        """
        clock = self._clock()
        run = self._prepared(call)
        start_s = clock()
        run()
        self._synchronise()
        return clock() - start_s

    def _prepared(self, call: Call) -> Callable[[], Any]:
        """Make tensors for an operation's arguments; return it as a function without arguments."""
        # An operation that writes into its arguments gets new ones.
        buffers = {} if call.operation._schema.is_mutable else self._buffers
        count = itertools.count()

        def as_value(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return self.device
            if isinstance(leaf, Operand):
                return self._as_tensor(leaf, buffers, next(count))
            return leaf

        arguments, options = tree_map(as_value, (call.arguments, call.options), is_leaf=_is_operand)
        return lambda: call.operation(*arguments, **options)

    def _as_tensor(
        self, operand: Operand, buffers: dict[tuple[int, torch.dtype], Tensor], place: int
    ) -> Tensor:
        """Take a tensor from the buffer of its place among the arguments.

        New memory would cost more than many operations.
        """
        size = 0
        if 0 not in operand.shape:
            lengths = zip(operand.shape, operand.stride, strict=True)
            # Place of the last element, by the strides.
            size = 1 + sum((length - 1) * step for length, step in lengths)
        buffer = buffers.get((place, operand.dtype))
        if buffer is None or len(buffer) < size:
            # Not zero: results near it would be denormal numbers, which are slow. Integers may be
            # indices, for which 0 is in range.
            value = 0.5 if operand.dtype.is_floating_point else 0
            buffer = torch.full((size,), value, dtype=operand.dtype, device=self.device)
            buffers[place, operand.dtype] = buffer
        return buffer.as_strided(operand.shape, operand.stride)


def _watch_resident() -> int | None:
    """Start to watch the largest resident memory of this process.

    Returns:
        Bytes that are resident now; None where the system does not tell the largest ones, or where
        large blocks are not mapped, so that what the heap keeps decides what is resident.
    """
    if not maps_large_blocks():
        return None
    release_free_memory()  # free memory of the heap that is resident would not be seen again
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


def continued(points: Sequence[tuple[float, int]]) -> int:
    """Extrapolate bytes measured on shares of an operation to the whole.

    Two shares are continued linearly, a single one in proportion.

    Args:
        points: Share and bytes, the larger share last.
    """
    share, num_bytes = points[-1]
    smaller_share, fewer_bytes = points[0] if len(points) > 1 else (0.0, 0)
    slope = (num_bytes - fewer_bytes) / (share - smaller_share)
    return max(0, round(num_bytes + slope * (1 - share)))


class Part(NamedTuple):
    """An operation on some of the slices of a larger one, and their share of all slices."""

    share: float
    call: Call


def parts_of(call: Call, measured_bytes: int) -> list[Part]:
    """Divide a large operation into parts of its slices, the largest last.

    Args:
        call: A small one is its only part; one that is too large and cannot be divided has none.
        measured_bytes: Bytes of the largest tensor of an operation that is measured whole.
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
    if divisor < LEAST_DIVISOR:
        # It cannot be divided.
        if sum(sizes) > MAX_BYTES:
            return []
        return [Part(1.0, call)]
    num_slices = max(1, divisor * measured_bytes // max(sizes))
    fewer_slices = max(1, num_slices // 2)
    return [
        Part(number / divisor, _cut(call, weight, number, divisor))
        for number in sorted({fewer_slices, num_slices})
    ]


def _has_slices(leaf: Any, weight: Operand | None) -> bool:
    """Whether an argument is a tensor (N, C, D, H, W), and not the weight."""
    return _is_operand(leaf) and len(leaf.shape) == 5 and leaf is not weight


def _cut(call: Call, weight: Operand | None, numerator: int, denominator: int) -> Call:
    """Take a share of the slices of an operation.

    All tensors (N, C, D, H, W) but the weight are cut, and sizes among the other arguments.
    """

    def cut(leaf: Any) -> Any:
        if _has_slices(leaf, weight):
            depth = leaf.shape[2] * numerator // denominator
            shape = (*leaf.shape[:2], depth, *leaf.shape[3:])
            return leaf._replace(shape=shape, stride=_dense(shape, leaf.stride))
        # The lists of a convolution are strides, padding and the like, no sizes.
        is_convolution = weight is not None
        if is_convolution or not _is_sizes(leaf):
            return leaf
        # Sizes of (D, H, W) or (N, C, D, H, W).
        if len(leaf) not in (3, 5):
            return leaf
        depth = leaf[-3]
        if depth == 0 or depth % denominator:
            return leaf
        return [*leaf[:-3], depth * numerator // denominator, *leaf[-2:]]

    def is_leaf(leaf: Any) -> bool:
        return _is_operand(leaf) or _is_sizes(leaf)

    arguments, options = tree_map(cut, (call.arguments, call.options), is_leaf=is_leaf)
    if call.operation in VOXEL_COUNTS:
        place = VOXEL_COUNTS[call.operation]
        num_voxels = arguments[place] * numerator // denominator
        arguments = (*arguments[:place], num_voxels, *arguments[place + 1 :])
    return Call(call.operation, arguments, options)


def _dense(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor without gaps whose axes lie in memory in the order of other strides.

    Repeated axes (0) stay.
    """
    dense = [0] * len(shape)
    step = 1
    for axis in sorted(range(len(shape)), key=lambda axis: (stride[axis], -axis)):
        if stride[axis]:
            dense[axis] = step
            step *= shape[axis]
    return tuple(dense)


def _is_sizes(leaf: Any) -> bool:
    if not isinstance(leaf, (list, tuple)) or not leaf:
        return False
    return all(isinstance(value, int) for value in leaf)


def _is_operand(leaf: Any) -> bool:
    return isinstance(leaf, Operand)


def _allocated_peaks(roots: Iterable[Any]) -> dict[int, int]:
    """Find the workspace of each marked operation: its peak memory less what it left.

    Args:
        roots: Events of the profiler, each with its children.

    Returns:
        Bytes by the number of the operation.
    """
    peaks: dict[int, int] = {}
    for root in roots:
        if not root.name.startswith(MARK):
            peaks |= _allocated_peaks(root.children)
            continue
        total = 0
        peak = 0
        for _, size in sorted(_allocations(root)):
            total += size
            peak = max(peak, total)
        peaks[int(root.name.removeprefix(MARK))] = peak - total
    return peaks


def _allocations(event: Any) -> list[tuple[int, int]]:
    """Times and sizes of all allocations below an event of the profiler; releases are negative."""
    allocations = []
    if event.name == "[memory]":
        allocations.append((event.start_time_ns, event.extra_fields.alloc_size))
    for child in event.children:
        allocations += _allocations(child)
    return allocations
