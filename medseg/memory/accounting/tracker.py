"""Memory tracker: live tensor bytes by owner, each storage from the operation that makes it until it is freed."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from medseg.memory.offload import is_copying_to_host

HOST = "host"  # kind of offloaded tensors: counted by owner, but not part of the device's total


class Owner(NamedTuple):
    """Purpose of a storage (`kind`), and the part of the network that made it."""

    kind: str
    part: str = ""


class MemoryTracker(TorchDispatchMode):
    """Count the bytes of live tensors by owner, and their peak.

    Bytes are counted by storage: views and in-place results cost nothing, and a storage counts until nothing holds it, be it Python,
    autograd's graph or a hook. Hooks on saved tensors would see less, because inner hooks (checkpointing, offloading) hide what they
    save from outer ones. Not counted are workspaces that a kernel takes and frees within one operation, and the rounding and
    fragmentation of an allocator.

    A new storage belongs to `now`; one that is older than the tracker belongs to `other`. `assign` changes the owner.

    Attributes:
        now: Owner of what the following operations make.
        live: Bytes of the live storages by owner.
        peak_bytes: Largest total of live bytes so far, without what waits in host memory.
        peak_live: `live` at that moment.
        peak_now: `now` at that moment.
    """

    def __init__(self, correct: Callable[[Any, tuple[Any, ...], Any], Any] | None = None) -> None:
        """Start without any storage.

        Args:
            correct: Called as `correct(operation, arguments, result)`; its result replaces the operation's.
        """
        super().__init__()
        self.now = Owner("other")
        self.live: Counter[Owner] = Counter()
        self._correct = correct
        self._entries: dict[int, tuple[weakref.ref[Any], Owner, int]] = {}
        self._total = 0
        self.restart_peak()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch's guard against compiling this class imports the compiler, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        owner = Owner(HOST) if is_copying_to_host() else self.now
        # `torch.tensor` passes its new tensor as an argument, which is therefore no older tensor.
        owner_before = owner if func is torch.ops.aten.lift_fresh.default else Owner("other")
        self._see_all((args, kwargs), owner_before)
        result = func(*args, **(kwargs or {}))
        if self._correct is not None:
            result = self._correct(func, args, result)
        self._see_all(result, owner)
        if self._total > self.peak_bytes:
            self.restart_peak()
        return result

    def assign(self, tensor: Tensor, kind: str) -> None:
        """Give a tensor's storage to another owner; a storage that the tracker has not seen yet counts from now on."""
        storage = tensor.untyped_storage()
        owner = Owner(kind)
        self._see(storage, owner)
        reference, old, num_bytes = self._entries[storage._cdata]
        self._entries[storage._cdata] = (reference, owner, num_bytes)
        self.live[old] -= num_bytes
        self.live[owner] += num_bytes

    def restart_peak(self) -> None:
        """Take the present moment as the peak so far."""
        self.peak_bytes, self.peak_live, self.peak_now = self._total, self.live.copy(), self.now

    def live_bytes(self, kind: str) -> int:
        """Sum the live bytes of a kind over all parts."""
        return sum(num_bytes for owner, num_bytes in self.live.items() if owner.kind == kind)

    def _see_all(self, values: Any, owner: Owner) -> None:
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage(), owner)

    def _see(self, storage: torch.UntypedStorage, owner: Owner) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        entry = self._entries.get(key)
        if entry is not None:
            # An operation may have resized the storage.
            reference, owner, num_bytes_before = entry
        else:
            reference, num_bytes_before = weakref.ref(storage, lambda _: self._forget(key)), 0
        if num_bytes != num_bytes_before or entry is None:
            self._entries[key] = (reference, owner, num_bytes)
            self.live[owner] += num_bytes - num_bytes_before
            self._total += (num_bytes - num_bytes_before) * (owner.kind != HOST)

    def _forget(self, key: int) -> None:
        _, owner, num_bytes = self._entries.pop(key)
        self.live[owner] -= num_bytes
        self._total -= num_bytes * (owner.kind != HOST)
