"""Kernel costs: workspace and seconds of single operations, measured once per machine and kept in a file."""

import contextlib
import itertools
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_leaves, tree_map

from medseg.console import say
from medseg.errors import UserError
from medseg.io.atomic import replace_text
from medseg.io.calibration import Circumstances, LoadMeter, present_load
from medseg.memory.heap import MAPPED_BYTES, maps_large_blocks, used_bytes
from medseg.memory.instructions import instruction_limit
from medseg.memory.profile import (
    peak_resident_bytes,
    release_free_memory,
    reset_peak_resident,
    resident_bytes,
)
from medseg.memory.tracker import Call, Operand

# A larger operation is measured on two parts of its slices. They are so large that the memory of
# each tensor is mapped anew, as for all larger tensors (see `medseg.memory.heap`), so that the
# measured time contains the page faults.
MEASURED_BYTES = 40 * 2**20
# An operation that cannot be divided and needs more is not measured.
MAX_BYTES = 2**30
# All operations are timed in rounds, so that a processor that is slower for a while is so for all
# of them.
LEAST_ROUNDS, MOST_ROUNDS, ROUNDS_S = 3, 15, 15.0
# Slices are divided by a common divisor of all depths, which must be larger than any size of a
# kernel or number of an axis.
LEAST_DIVISOR = 8
MARK = "medseg operation "
aten = torch.ops.aten
# Position of the weight, whose third axis is none of slices.
WEIGHTS = {aten.convolution.default: 1, aten.convolution_backward.default: 2}


class Cost(NamedTuple):
    """Cost of one operation.

    Attributes:
        workspace: Bytes that its kernel takes beside arguments and result, and frees.
        written: Bytes of them that the kernel writes; the system provides no memory for the others.
        lasting: Bytes that the libraries keep after its first run: the code that oneDNN makes for
            these sizes.
        seconds: Duration.
    """

    workspace: int
    written: int
    lasting: int
    seconds: float


NOTHING = Cost(0, 0, 0, 0.0)


class KernelCosts:
    """Costs of operations on this machine with the present versions of the libraries and number of threads.

    Attributes:
        unmeasured: Names of operations that could not be run alone, whose costs count as zero.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Read what was measured before.

        Args:
            folder: Folder of the file.
            device: Device on which operations are measured.
        """
        self.device = device
        hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
        heap = (
            " mapped" if device.type == "cpu" and maps_large_blocks() else ""
        )  # page faults are a part of the seconds
        name = f"{hardware} {torch.get_num_threads()} threads torch {torch.__version__}{heap} {instruction_limit()}".rstrip()
        self.path = folder / f"kernels {name}.json".replace("/", "_").replace(" ", "_")
        self.unmeasured: set[str] = set()
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}  # by place among the arguments
        self._circumstances: dict[str, Circumstances] = {}
        self.costs: dict[str, Cost] = {}
        self._read()

    def __getitem__(self, key: str) -> Cost:
        """Cost of an operation; zero where it was not measured."""
        return self.costs.get(key, NOTHING)

    def measure(self, calls: Mapping[str, Call]) -> None:
        """Measure the operations that are new on this machine, and write all costs to the file."""
        missing = {key: call for key, call in calls.items() if key not in self.costs}
        if not missing:
            return
        number = f"{len(missing)} operation{'s' * (len(missing) != 1)}"
        say(f"plan: measuring {number} on this machine; kept for later plans")
        with LoadMeter() as meter:
            measured = self._measure(missing)
        self.costs |= measured
        self._circumstances |= dict.fromkeys(measured, meter.circumstances())
        self._write(measured)

    def _measure(self, missing: Mapping[str, Call]) -> dict[str, Cost]:
        """Measure operations."""
        parts = {key: parts_of(call) for key, call in missing.items()}
        with torch.no_grad():
            largest = {key: some[-1][1] for key, some in parts.items() if some}
            lasting = self._lasting(largest)
            workspaces = self._workspaces(largest)
            # An operation without a workspace on its larger part has none on the whole.
            smaller = self._workspaces(
                {
                    key: some[0][1]
                    for key, some in parts.items()
                    if len(some) > 1 and workspaces.get(key)
                }
            )
            written = {
                key: self._written_share(largest[key], size) for key, size in workspaces.items()
            }
            durations_s = self._durations({key: largest[key] for key in workspaces})
        self._buffers.clear()
        costs = {}
        for key, some in parts.items():
            if key not in workspaces:
                self.unmeasured.add(str(missing[key].operation))
                costs[key] = NOTHING
                continue
            points = [(some[0][0], smaller[key])] if key in smaller else []
            share = some[-1][0]
            workspace = continued([*points, (share, workspaces[key])])
            seconds = median(durations_s[key]) / share
            costs[key] = Cost(workspace, round(written[key] * workspace), lasting[key], seconds)
        return costs

    def _durations(self, calls: Mapping[str, Call]) -> dict[str, list[float]]:
        """Time operations in rounds."""
        durations_s: dict[str, list[float]] = {key: [] for key in calls}
        start_s = time.perf_counter()
        for number in range(MOST_ROUNDS):
            if number >= LEAST_ROUNDS and time.perf_counter() - start_s > ROUNDS_S:
                break
            for key, call in calls.items():
                durations_s[key].append(self._seconds(call))
        return durations_s

    def _read(self) -> None:
        """Read the costs that still count, see `medseg.io.calibration`."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            for key, (workspace, written, kept, seconds, load, time_s) in content.items():
                circumstances = Circumstances(float(load), float(time_s))
                if circumstances.is_valid(present_load):
                    self.costs[key] = Cost(int(workspace), int(written), int(kept), float(seconds))
                    self._circumstances[key] = circumstances
        except (OSError, ValueError, TypeError, AttributeError):  # none yet, or a damaged one
            self.costs, self._circumstances = {}, {}

    def _write(self, measured: Mapping[str, Cost]) -> None:
        """Add costs to the file; another process may have added some since it was read."""
        file = KernelCosts(self.path.parent, self.device)
        file.costs |= measured
        file._circumstances |= {key: self._circumstances[key] for key in measured}
        rows = {key: [*cost, *file._circumstances[key]] for key, cost in file.costs.items()}
        with contextlib.suppress(
            UserError
        ):  # a folder that cannot be written: measured again the next time
            replace_text(self.path, json.dumps(rows))

    def _lasting(self, calls: Mapping[str, Call]) -> dict[str, int]:
        """Run each operation for the first time; return the bytes that stay taken when its result is gone."""
        found: dict[str, int] = {}
        self._start_libraries()
        for key, call in calls.items():
            found[key] = 0
            with contextlib.suppress(Exception):  # of any operation
                run = self._prepared(call)
                before = used_bytes()
                run()
                found[key] = max(0, used_bytes() - before)
        return found

    def _start_libraries(self) -> None:
        """Run a convolution in each format, whose libraries keep memory once."""
        for dtype in (torch.float32, torch.bfloat16):
            image = torch.zeros(1, 8, 8, 8, 8, dtype=dtype, device=self.device, requires_grad=True)
            weight = torch.zeros(8, 8, 3, 3, 3, dtype=dtype, device=self.device, requires_grad=True)
            with (
                torch.enable_grad(),
                contextlib.suppress(RuntimeError),
            ):  # a format that is missing here
                torch.nn.functional.conv3d(image, weight).sum().backward()

    def _workspaces(self, calls: Mapping[str, Call]) -> dict[str, int]:
        """Run each operation once and measure the bytes of its workspace; those that fail are missing in the result."""
        if self.device.type == "cuda":
            return self._workspaces_on_gpu(calls)
        os.environ.setdefault(
            "KINETO_LOG_LEVEL", "99"
        )  # of the profiler's library, which prints lines otherwise
        numbers: dict[str, int] = {}
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            for number, (key, call) in enumerate(calls.items()):
                with contextlib.suppress(Exception):  # of any operation
                    run = self._prepared(call)
                    with record_function(f"{MARK}{number}"):
                        _result = run()  # live at the end of the mark
                    del _result
                    numbers[key] = number
        found = _allocated_peaks(profiler.profiler.kineto_results.experimental_event_tree())
        return {key: found.get(number, 0) for key, number in numbers.items()}

    def _workspaces_on_gpu(self, calls: Mapping[str, Call]) -> dict[str, int]:
        found = {}
        for key, call in calls.items():
            with contextlib.suppress(Exception):
                run = self._prepared(call)
                torch.cuda.reset_peak_memory_stats()
                _result = run()
                torch.cuda.synchronize()
                found[key] = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
                del _result
        return found

    def _written_share(self, call: Call, workspace: int) -> float:
        """Share of the workspace of an operation that it writes, by the largest resident memory of the process; 1 where it is not known.

        Where large blocks are not mapped, what the heap keeps decides what is resident.
        """
        if self.device.type == "cuda" or workspace < MAPPED_BYTES or not maps_large_blocks():
            return 1.0
        run = self._prepared(call)
        run()  # what the libraries make once
        release_free_memory()  # free memory of the heap that is resident would not be seen again
        try:
            reset_peak_resident()
        except OSError:
            return 1.0
        before = resident_bytes()
        result = run()
        peak, after = peak_resident_bytes(), resident_bytes()
        kept = sum(
            one.untyped_storage().nbytes() for one in tree_leaves(result) if isinstance(one, Tensor)
        )
        # A result from the heap adds nothing to what is resident, and a workspace from the heap may
        # stay there.
        return min(1.0, max(peak - after, peak - before - kept, 0) / workspace)

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
        clock, run = self._clock(), self._prepared(call)
        start_s = clock()
        run()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return clock() - start_s

    def _prepared(self, call: Call) -> Callable[[], Any]:
        """Make tensors for the arguments of an operation; return it as a function without arguments."""
        buffers = {} if call.operation._schema.is_mutable else self._buffers
        count = itertools.count()

        def as_value(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return self.device
            return (
                self._as_tensor(leaf, buffers, next(count)) if isinstance(leaf, Operand) else leaf
            )

        arguments, options = tree_map(as_value, (call.arguments, call.options), is_leaf=_is_operand)
        return lambda: call.operation(*arguments, **options)

    def _as_tensor(
        self, operand: Operand, buffers: dict[tuple[int, torch.dtype], Tensor], place: int
    ) -> Tensor:
        """Take a tensor from the buffer of its place among the arguments: new memory would cost more than many operations."""
        size = 0 if 0 in operand.shape else 1
        size += size and sum(
            (length - 1) * step for length, step in zip(operand.shape, operand.stride, strict=True)
        )
        buffer = buffers.get((place, operand.dtype))
        if buffer is None or len(buffer) < size:
            # Not zero, whose neighbours are slow denormal numbers; integers may be indices.
            value = 0.5 if operand.dtype.is_floating_point else 0
            buffer = buffers[place, operand.dtype] = torch.full(
                (size,), value, dtype=operand.dtype, device=self.device
            )
        return buffer.as_strided(operand.shape, operand.stride)


def processor_name() -> str:
    """Model of this machine's processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def continued(points: Sequence[tuple[float, int]]) -> int:
    """Extrapolate bytes measured on one or two shares of an operation to the whole: linearly, or in proportion to a single share."""
    (share, num_bytes), *others = reversed(points)
    smaller, fewer_bytes = others[0] if others else (0.0, 0)
    return max(0, round(num_bytes + (num_bytes - fewer_bytes) / (share - smaller) * (1 - share)))


def parts_of(call: Call) -> list[tuple[float, Call]]:
    """Divide a large operation: parts of its slices with their shares of the whole, the largest last.

    A small operation is its only part; one that is too large and cannot be divided has none.
    """
    operands = [
        leaf
        for leaf in tree_leaves((call.arguments, call.options), is_leaf=_is_operand)
        if _is_operand(leaf)
    ]
    sizes = [math.prod(one.shape) * one.dtype.itemsize for one in operands]
    if max(sizes, default=0) <= MEASURED_BYTES:
        return [(1.0, call)]
    weight = call.arguments[WEIGHTS[call.operation]] if call.operation in WEIGHTS else None
    depths = [one.shape[-3] for one in operands if len(one.shape) == 5 and one is not weight]
    divisor = math.gcd(*depths)
    if not depths or divisor < LEAST_DIVISOR:
        return [(1.0, call)] if sum(sizes) <= MAX_BYTES else []
    num_slices = max(1, divisor * MEASURED_BYTES // max(sizes))
    shares = dict.fromkeys(max(1, number) for number in (num_slices // 2, num_slices))
    return [(number / divisor, _part(call, weight, number, divisor)) for number in shares]


def _part(call: Call, weight: Operand | None, numerator: int, denominator: int) -> Call:
    """Take a share of the slices of all tensors (N, C, D, H, W) but the weight, and of sizes among the other arguments."""

    def cut(leaf: Any) -> Any:
        if _is_operand(leaf) and len(leaf.shape) == 5 and leaf is not weight:
            shape = (*leaf.shape[:2], leaf.shape[2] * numerator // denominator, *leaf.shape[3:])
            return leaf._replace(shape=shape, stride=_dense(shape, leaf.stride))
        is_size = (
            isinstance(leaf, (list, tuple))
            and len(leaf) in (3, 5)
            and all(isinstance(one, int) for one in leaf)
        )
        if is_size and weight is None and leaf[-3] and leaf[-3] % denominator == 0:
            return [*leaf[:-3], leaf[-3] * numerator // denominator, *leaf[-2:]]
        return leaf

    return Call(
        call.operation, *tree_map(cut, (call.arguments, call.options), is_leaf=_is_operand_or_sizes)
    )


def _dense(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor without gaps whose axes lie in memory in the order of other strides; repeated axes (0) stay."""
    found, step = [0] * len(shape), 1
    for axis in sorted(range(len(shape)), key=lambda axis: (stride[axis], -axis)):
        if stride[axis]:
            found[axis], step = step, step * shape[axis]
    return tuple(found)


def _is_operand_or_sizes(leaf: Any) -> bool:
    return _is_operand(leaf) or (
        isinstance(leaf, (list, tuple)) and bool(leaf) and all(isinstance(one, int) for one in leaf)
    )


def _is_operand(leaf: Any) -> bool:
    return isinstance(leaf, Operand)


def _allocated_peaks(roots: Iterable[Any]) -> dict[int, int]:
    """Find the bytes by which memory exceeded, within each marked operation, what it left at its end; by its number."""
    found: dict[int, int] = {}
    for root in roots:
        if not root.name.startswith(MARK):
            found |= _allocated_peaks(root.children)
            continue
        sizes = [size for _, size in sorted(_allocations(root))]
        totals = [sum(sizes[: count + 1]) for count in range(len(sizes))]
        found[int(root.name.removeprefix(MARK))] = max(0, *totals, 0) - (
            totals[-1] if totals else 0
        )
    return found


def _allocations(event: Any) -> list[tuple[int, int]]:
    """Times and sizes of all allocations (releases are negative) below an event of the profiler."""
    own = [(event.start_time_ns, event.extra_fields.alloc_size)] if event.name == "[memory]" else []
    return own + [one for child in event.children for one in _allocations(child)]
