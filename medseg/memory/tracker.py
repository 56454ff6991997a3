"""Tracker of live tensors: bytes by owner, their peak, and the timeline of a step's operations."""

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from medseg.memory.heap import min_mapped_bytes
from medseg.memory.switches import is_copying_to_host

HOST = "host"  # kind of offloaded tensors: counted by owner, but not part of the device's total


class Owner(NamedTuple):
    """Purpose of a storage, and the part of the network that made it.

    Attributes:
        kind: HOST, "other", or one of the kinds of `medseg.memory.accounting`, such as FORWARD.
        part: See `medseg.memory.device_map.named_parts`; empty outside of the network.
    """

    kind: str
    part: str = ""


class Operand(NamedTuple):
    """Shape, strides and number format of a tensor among the arguments of an operation."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Call(NamedTuple):
    """Operation with its arguments, in which `Operand` stands for each tensor.

    Attributes:
        operation: Operator of torch, such as `torch.ops.aten.relu.default`.
        arguments: Positional arguments.
        options: Keyword arguments.
    """

    operation: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @classmethod
    def of(cls, operation: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> "Call":
        """Describe an operation that is about to run."""
        described_options = {name: _with_operands(value) for name, value in options.items()}
        return cls(operation, _with_operands(arguments), described_options)


def _with_operands(value: Any) -> Any:
    """Replace the tensors in an argument, also inside lists and tuples, by `Operand`.

    An operation takes no other containers, so torch's slower `tree_map` is not needed.
    """
    if isinstance(value, Tensor):
        return Operand(tuple(value.shape), tuple(value.stride()), value.dtype)
    # Not a subclass, such as `torch.Size`: it stays as it is.
    if type(value) in (list, tuple):
        return type(value)(map(_with_operands, value))
    return value


def _tensors(values: Any) -> Iterator[Tensor]:
    """Find the tensors among the arguments or results of an operation."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)


def _heap_bytes(num_bytes: int) -> int:
    """Bytes that a storage of a size takes from the heap: none if it is mapped by itself."""
    return num_bytes if num_bytes < min_mapped_bytes() else 0


def _is_composite(func: Any) -> bool:
    """Whether torch decomposes an operation into others, because it has no kernel of its own.

    Only the decompositions of the dispatcher count ("CompositeImplicitAutograd"), not those in
    Python, which are made for compilers.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), DispatchKey.CompositeImplicitAutograd
    )


class RecordedOperation(NamedTuple):
    """Operation at its place in a timeline.

    Attributes:
        live_bytes: Live bytes after it.
        known_workspace: Bytes of its workspace that are known without measuring it.
        key: Its key in `Timeline.calls`.
    """

    live_bytes: int
    known_workspace: int
    key: str


@dataclass
class Segment:
    """Operations that ran one after the other under one owner.

    Attributes:
        owner: Phase of the step, and part of the network.
        start_bytes: Live bytes before the first of them.
        operations: The operations in their order.
        heap_bytes: For each operation: those of the live bytes after it that lie in the heap,
            because their storages are too small to be mapped, see `medseg.memory.heap`.
    """

    owner: Owner
    start_bytes: int
    operations: list[RecordedOperation] = field(default_factory=list)
    heap_bytes: list[int] = field(default_factory=list)


class HeldStorage(NamedTuple):
    """Storage that is live between the forward and the backward pass.

    Attributes:
        num_bytes: Its size.
        maker: Part of the network that made it.
        savers: Parts whose operations save it for the backward pass.
        takers: Parts that take it as an argument, and hold it if they are recomputed.
    """

    num_bytes: int
    maker: str
    savers: frozenset[str]
    takers: frozenset[str]


@dataclass
class Timeline:
    """Operations of a step in their order, and the storages that forward leaves for backward.

    Attributes:
        segments: The operations, divided wherever the owner changes.
        calls: Each operation with its arguments by its key; equal ones have the same key.
        held_storages: Storages that are live at the end of the forward pass.
    """

    segments: list[Segment] = field(default_factory=list)
    calls: dict[str, Call] = field(default_factory=dict)
    held_storages: list[HeldStorage] = field(default_factory=list)


class _Entry(NamedTuple):
    """Storage that is live.

    Attributes:
        reference: Reports the end of the storage without keeping it alive.
        owner: Its owner.
        num_bytes: Its size when it was last seen.
    """

    reference: weakref.ref[Any]
    owner: Owner
    num_bytes: int


class MemoryTracker(TorchDispatchMode):
    """Count the bytes of live tensors by owner, and their peak.

    Bytes are counted by storage: views and in-place results cost nothing, and a storage counts as
    long as Python, autograd's graph or a hook holds it. Hooks on saved tensors would see less,
    because inner hooks (checkpointing, offloading) hide what they save from outer ones. Not counted
    are the rounding and the fragmentation of an allocator, nor the workspaces that a kernel takes
    and frees within one operation, unless a function `workspace` states them.

    A new storage belongs to the owner `now`; one that is older than the tracker belongs to `other`.
    `assign` changes the owner.

    Attributes:
        now: Owner of what the following operations make.
        live: Bytes of the live storages by owner.
        peak_bytes: Largest total of live bytes so far, without offloaded tensors.
        peak_live: `live` at that moment.
        peak_now: `now` at that moment.
    """

    def __init__(
        self,
        correct: Callable[[Any, tuple[Any, ...], Any], Any] | None = None,
        workspace: Callable[[Any, tuple[Any, ...], Any], int] | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """Start without any storage.

        Args:
            correct: Called as `correct(operation, arguments, result)`; its result replaces the
                operation's.
            workspace: Called in the same way; returns the bytes that the operation takes and frees,
                which count in the peak.
            timeline: Gets the operations in their order; None = they are not recorded.
        """
        super().__init__()
        self.now = Owner("other")
        self.live: Counter[Owner] = Counter()
        self._correct = correct
        self._workspace = workspace
        self._timeline = timeline
        # By the address of the storage (`_cdata`): the live storages, the parts that save one, and
        # the parts that take one.
        self._entries: dict[int, _Entry] = {}
        self._savers: defaultdict[int, set[str]] = defaultdict(set)
        self._takers: defaultdict[int, set[str]] = defaultdict(set)
        self._live_bytes = 0  # without offloaded tensors
        self._live_heap_bytes = 0  # in storages that are too small to be mapped
        self.restart_peak()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch's guard against compiling this class imports the slow compiler."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # This operation reads the device of a tensor and makes no tensor. It gets a shortcut,
        # because it is four of ten calls of a step.
        if func is torch.ops.prim.device.default:
            return func(*args)
        has_timeline = self._timeline is not None
        if has_timeline and torch.is_inference_mode_enabled() and _is_composite(func):
            # In a training step torch decomposes this operation before its parts come here; in
            # inference mode it does not. The tracker decomposes it too, so that training and
            # evaluation consist of the same operations, each of which is measured once. `with self`
            # because torch switches the tracker off inside this method.
            with self:
                return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        owner = Owner(HOST) if is_copying_to_host() else self.now
        # An argument that is not known yet is older than the tracker. The exception is a new tensor
        # of `torch.tensor`, which comes here first as an argument of `lift_fresh`.
        argument_owner = Owner("other")
        if func is torch.ops.aten.lift_fresh.default:
            argument_owner = owner
        self._see_all((args, tuple(kwargs.values())), argument_owner)
        # Views are not recorded: they take no memory and next to no time. Nor are the marks that an
        # optimiser sets for a profiler: their arguments contain an address, so each would have a
        # new key and be measured again in every plan.
        is_recorded = has_timeline and not func.is_view and func.namespace != "profiler"
        if is_recorded:
            segment, key = self._record(func, args, kwargs)
        result = func(*args, **kwargs)
        if self._correct is not None:
            result = self._correct(func, args, result)
        self._see_all(result, owner)
        workspace_bytes = 0
        if self._workspace is not None:
            workspace_bytes = self._workspace(func, args, result)
        if is_recorded:
            operation = RecordedOperation(self._live_bytes, workspace_bytes, key)
            segment.operations.append(operation)
            segment.heap_bytes.append(self._live_heap_bytes)
        if self._live_bytes + workspace_bytes > self.peak_bytes:
            self.restart_peak()
            # Only the peak contains the workspace, which the operation has freed again.
            self.peak_bytes += workspace_bytes
            self.peak_live[owner] += workspace_bytes
        return result

    def assign(self, tensor: Tensor, kind: str) -> None:
        """Give a tensor's storage to another owner.

        A storage that the tracker has not seen yet counts from now on.
        """
        storage = tensor.untyped_storage()
        owner = Owner(kind)
        self._see(storage, owner)
        entry = self._entries[storage._cdata]
        self._entries[storage._cdata] = entry._replace(owner=owner)
        self._add(entry.owner, -entry.num_bytes)
        self._add(owner, entry.num_bytes)

    def save(self, tensor: Tensor) -> Tensor:
        """Note that an operation of the part `now` saves a tensor: `pack_hook` of autograd.

        Returns:
            The tensor without its graph: an operation that saves its own result would otherwise
            keep itself alive.
        """
        self._savers[tensor.untyped_storage()._cdata].add(self.now.part)
        # A leaf has no graph, and autograd needs the leaf itself.
        return tensor if tensor.is_leaf else tensor.detach()

    def take(self, arguments: Any, part: str) -> None:
        """Note that a part takes the tensors in its arguments, which may be nested."""
        for leaf in tree_leaves(arguments):
            if isinstance(leaf, Tensor):
                self._takers[leaf.untyped_storage()._cdata].add(part)

    def held_storages(self, kind: str) -> list[HeldStorage]:
        """List the live storages of a kind with their savers and takers."""
        storages = []
        for key, entry in self._entries.items():
            if entry.owner.kind != kind:
                continue
            storage = HeldStorage(
                num_bytes=entry.num_bytes,
                maker=entry.owner.part,
                savers=frozenset(self._savers[key]),
                takers=frozenset(self._takers[key]),
            )
            storages.append(storage)
        return storages

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Segment, str]:
        """Add an operation to the timeline before it runs; return its segment and its key."""
        assert self._timeline is not None
        call = Call.of(func, args, kwargs)
        segments = self._timeline.segments
        # Operations of equal form cost the same, and are measured once.
        key = f"{func}{call.arguments}{call.options}"
        self._timeline.calls.setdefault(key, call)
        if not segments or segments[-1].owner != self.now:
            segments.append(Segment(self.now, self._live_bytes))
        return segments[-1], key

    def restart_peak(self) -> None:
        """Take the present moment as the peak so far."""
        self.peak_bytes = self._live_bytes
        self.peak_live = self.live.copy()
        self.peak_now = self.now

    def live_bytes(self, kind: str) -> int:
        """Sum the live bytes of a kind over all parts."""
        return sum(self.live_by_part(kind).values())

    def operand_bytes(self, arguments: Any, kind: str) -> int:
        """Sum the bytes of the tensors among some arguments whose storage is of a kind."""
        num_bytes = 0
        for tensor in _tensors(arguments):
            entry = self._entries.get(tensor.untyped_storage()._cdata)
            if entry is not None and entry.owner.kind == kind:
                num_bytes += tensor.nbytes
        return num_bytes

    def live_by_part(self, kind: str) -> dict[str, int]:
        """Find the live bytes of a kind by the part of the network that made them."""
        bytes_by_part = {}
        for owner, num_bytes in self.live.items():
            # An owner whose storages have all been freed stays in `live`, with 0 bytes.
            if owner.kind == kind and num_bytes:
                bytes_by_part[owner.part] = num_bytes
        return bytes_by_part

    def _see_all(self, values: Any, owner: Owner) -> None:
        for tensor in _tensors(values):
            self._see(tensor.untyped_storage(), owner)

    def _see(self, storage: torch.UntypedStorage, owner: Owner) -> None:
        """Count a storage if it is new; count the difference if an operation has resized it.

        Args:
            storage: The storage.
            owner: Owner of a new storage; one that is known keeps its own.
        """
        key = storage._cdata
        num_bytes = storage.nbytes()
        entry = self._entries.get(key)
        if entry is None:
            # Called as soon as nothing holds the storage any more: torch keeps the Python object of
            # a storage alive as long as the storage itself.
            reference = weakref.ref(storage, lambda _: self._forget(key))
            entry = _Entry(reference, owner, num_bytes=0)
        elif entry.num_bytes == num_bytes:
            return
        self._entries[key] = entry._replace(num_bytes=num_bytes)
        self._add(entry.owner, num_bytes - entry.num_bytes)
        self._live_heap_bytes += _heap_bytes(num_bytes) - _heap_bytes(entry.num_bytes)

    def _add(self, owner: Owner, num_bytes: int) -> None:
        self.live[owner] += num_bytes
        if owner.kind != HOST:
            self._live_bytes += num_bytes

    def _forget(self, key: int) -> None:
        """Take a storage that has been freed out of the count."""
        entry = self._entries.pop(key)
        self._savers.pop(key, None)
        self._takers.pop(key, None)
        self._add(entry.owner, -entry.num_bytes)
        self._live_heap_bytes -= _heap_bytes(entry.num_bytes)
