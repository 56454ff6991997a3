"""Memory switches: recomputed blocks, offloaded activations, channels-last, compilation."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint

from medseg.errors import UserError
from medseg.memory.options import MemoryOptions
from medseg.models.stage_network import StageNetwork


def apply_switches(
    network: nn.Module,
    *,
    checkpointing: str | Sequence[str] = "none",
    offload: bool = False,
    channels_last: bool = False,
    compile: bool = False,
    compile_mode: str = "default",
    has_many_shapes: bool = False,
    synchronise: bool = False,
    device_type: str = "cpu",
) -> nn.Module:
    """Change how a network runs, but not the names of its weights.

    Only `synchronise` changes the results. The order of the switches is fixed: layout, so that
    the others act on the weights as they are finally stored; norms, which checkpointing looks for;
    checkpointing of blocks; offloading of what the blocks still save; compilation of everything.

    Args:
        network: Network with a method `blocks()` that names its blocks, like `StageNetwork`.
        checkpointing: `none`, `sqrt`, `all` or names of blocks or levels.
        offload: Keep saved activations in host memory.
        channels_last: Use the channels-last memory layout.
        compile: Compile with `torch.compile` at the first call.
        compile_mode: Mode of `torch.compile`, with underscores.
        has_many_shapes: Whether inputs differ in shape, so that the compiler must treat sizes as
            variables.
        synchronise: Share the statistics of batch norms among all ranks.
        device_type: Device that the network will run on, `cpu` or `cuda`.

    Returns:
        The same network, changed in place.

    Raises:
        ValueError: If switches exclude each other, one has no effect on the device, or
            `checkpointing` is unknown or names no block.
    """
    # An empty list names no block.
    has_checkpoints = checkpointing != "none" and len(checkpointing) > 0
    if compile:
        # A recomputed norm must not update its statistics twice, see `_recomputed`.
        pauses_statistics = has_checkpoints and len(_running_norms(network)) > 0
        _check_compilation(
            offload=offload, synchronise=synchronise, pauses_statistics=pauses_statistics
        )
    if channels_last:
        use_channels_last(network)
    if synchronise:
        nn.SyncBatchNorm.convert_sync_batchnorm(network)
    if has_checkpoints:
        blocks = cast(Callable[[], Mapping[str, nn.Module]], network.blocks)
        checkpoint_blocks(blocks(), checkpointing)
    if offload:
        offload_activations(network, device_type)
    if compile:
        # In place: the wrapper that torch.compile returns would put `_orig_mod.` before every name.
        # With its default, `dynamic=None`, torch would treat sizes as variables from the second
        # shape on, e.g. in the first validation, which it cannot do for every network.
        network.compile(mode=compile_mode.replace("_", "-"), dynamic=has_many_shapes)
    return network


def _check_compilation(*, offload: bool, synchronise: bool, pauses_statistics: bool) -> None:
    """Refuse switches that cannot be combined with compilation.

    Raises:
        ValueError: If one of them is on.
    """
    if offload:
        raise ValueError(
            "compile and offload cannot be combined, because compiled code chooses which "
            "activations to save: turn one off"
        )
    if synchronise:
        raise ValueError(
            "compile and synchronised batch norm cannot be combined, because compiled code would "
            "not wait for the other ranks: turn one off"
        )
    if pauses_statistics:
        raise ValueError(
            "compile, checkpointing and batch norm cannot be combined, because compiled code "
            "cannot pause running statistics: use a norm without them (norm=instance) or turn one "
            "off"
        )


def switch_on(
    network: StageNetwork,
    memory: MemoryOptions,
    device_type: str,
    *,
    sync_batchnorm: bool = False,
    has_many_shapes: bool = False,
) -> nn.Module:
    """Apply the `memory` group to a network that will run on a `cpu` or `cuda` device.

    Raises:
        UserError: See `apply_switches`.
    """
    try:
        return apply_switches(
            network,
            checkpointing=memory.checkpointing,
            offload=memory.offload,
            channels_last=memory.channels_last,
            compile=memory.compile,
            compile_mode=memory.compile_mode.value,
            has_many_shapes=has_many_shapes,
            synchronise=sync_batchnorm,
            device_type=device_type,
        )
    except ValueError as error:
        raise UserError(f"memory: {error}") from error


def uncompiled(network: nn.Module) -> AbstractContextManager[Any]:
    """Make a context in which a network runs uncompiled.

    A validation evaluates whole cases, and each new shape would be compiled.
    """
    # Only for a compiled network: `torch.compiler.set_stance` imports torch's compiler, which takes
    # a second.
    is_compiled = network._compiled_call_impl is not None
    if not is_compiled:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


def use_channels_last(network: nn.Module) -> None:
    """Store weights channels-last; convolutions with such weights return channels-last features.

    The channels of a voxel are then neighbours in memory, which convolutions in half precision
    prefer. Names and values stay. The image is not converted: its copy would be in memory for the
    whole pass.
    """
    for weight in network.parameters():
        # A network of volumes may have 2D convolutions too, whose weights have no such layout.
        if weight.ndim == 5:
            weight.data = weight.data.to(memory_format=torch.channels_last_3d)


POLICIES = ("none", "sqrt", "all")  # of checkpointing


def select_blocks(blocks: Mapping[str, nn.Module], policy: str | Sequence[str]) -> list[str]:
    """Choose the blocks to recompute.

    Args:
        blocks: Named blocks, those that save the most bytes first.
        policy: `none`; `all`; `sqrt`, the first ceil(sqrt(n)) of the n blocks; or names and
            patterns, see `matching_names`. In a UNet a level has eight times the voxels of the next
            coarser one and half the channels: it saves four times the bytes for twice the
            operations. So the finest blocks give the most memory per second of recomputation.

    Returns:
        Names of the blocks, in the order of `blocks`.

    Raises:
        ValueError: If the policy is unknown or a name matches no block.
    """
    names = list(blocks)
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(
                f"checkpointing must be one of {POLICIES} or a tuple of block names, got {policy!r}"
            )
        counts = {"none": 0, "sqrt": math.ceil(math.sqrt(len(names))), "all": len(names)}
        return names[: counts[policy]]
    chosen: set[str] = set()
    for pattern in policy:
        matches = matching_names(names, pattern)
        if not matches:
            raise ValueError(
                f"checkpointing names {pattern!r}, which is no block; "
                f"the blocks are {', '.join(names) or 'none'}"
            )
        chosen.update(matches)
    return [name for name in names if name in chosen]


def matching_names(names: Sequence[str], pattern: str) -> list[str]:
    """List the names that a pattern matches.

    Args:
        names: All names.
        pattern: One of the names; the beginning of names up to a dot, such as `encoder.0`; or a
            shell pattern, such as `encoder.*.block0`.
    """

    def matches(name: str) -> bool:
        is_same_or_below = name == pattern or name.startswith(f"{pattern}.")
        return is_same_or_below or fnmatchcase(name, pattern)

    return [name for name in names if matches(name)]


def checkpoint_blocks(blocks: Mapping[str, nn.Module], policy: str | Sequence[str]) -> list[str]:
    """Recompute the chosen blocks in the backward pass, each on its own.

    Parameters and their names stay. Without a gradient (evaluation, inference mode) a block runs
    once, as before. The recomputation draws the same random numbers, and a norm updates its running
    statistics once per batch although it runs twice.

    Args:
        blocks: Named blocks, those that save the most bytes first.
        policy: See `select_blocks`.

    Returns:
        Names of the recomputed blocks.
    """
    names = select_blocks(blocks, policy)
    for name in names:
        block = blocks[name]
        block.forward = _recomputed(block)
    return names


def _recomputed(block: nn.Module) -> Callable[..., Any]:
    """Make the forward function of a block that is recomputed in the backward pass."""
    forward = block.forward
    norms = _running_norms(block)
    # Reading the state of a GPU's generator waits for the GPU, so it is kept only where the block
    # may draw random numbers.
    keeps_random_state = any(map(_may_draw, block.modules()))

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Make two contexts: one for the first run, one for the recomputation."""
        return contextlib.nullcontext(), _paused_statistics(norms)

    # Torch cannot compile a call with a function of ours as `context_fn`, so it is left out where
    # it is not needed.
    options: dict[str, Any] = {"context_fn": contexts} if norms else {}
    options["preserve_rng_state"] = keeps_random_state

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return run


def _running_norms(network: nn.Module) -> list[_NormBase]:
    """List the norms that keep running statistics, in training mode or not.

    These are batch norms, and instance norms with `track_running_stats`.
    """
    norms = [module for module in network.modules() if isinstance(module, _NormBase)]
    return [norm for norm in norms if norm.track_running_stats]


def _may_draw(module: nn.Module) -> bool:
    """Whether a module may draw random numbers.

    A dropout with a rate above 0 does, and a class of neither torch, MONAI nor medseg may.
    """
    if isinstance(module, (nn.RReLU, nn.FractionalMaxPool3d)):
        return True
    if isinstance(module, _DropoutNd):
        return module.p != 0
    # Other modules pass their rate to a function. They keep it, e.g., as `dropout` (attention of
    # torch), `drop_prob` or `drop_connect_rate` (MONAI).
    for name, value in vars(module).items():
        if "drop" in name and isinstance(value, (int, float)) and value != 0:
            return True
    library = type(module).__module__.partition(".")[0]
    return library not in ("torch", "monai", "medseg")


@contextlib.contextmanager
def _paused_statistics(norms: list[_NormBase]) -> Iterator[None]:
    """Let norms update copies of their running statistics, which are then dropped.

    The norms cannot run without buffers: the kernel saves them for the backward pass, and torch's
    checkpointing requires that both runs save the same number of tensors.
    """
    originals = [dict(norm._buffers) for norm in norms]
    for norm in norms:
        for name, buffer in norm._buffers.items():
            if buffer is not None:
                norm._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for norm, buffers in zip(norms, originals, strict=True):
            norm._buffers.update(buffers)


# Whether `HostCopies.to_host` is copying a tensor now. Each thread has a value of its own.
_copies_to_host: ContextVar[bool] = ContextVar("copies_to_host", default=False)
# Bytes of a block of pinned memory (16 MiB). Torch rounds each allocation of pinned memory up to a
# power of two, so a block for each tensor could take twice the bytes of the tensors.
HOST_BLOCK_BYTES = 2**24


def offload_activations(network: nn.Module, device_type: str) -> None:
    """Keep the tensors that the network's forward pass saves in pinned host memory.

    Parameters and their names stay. With checkpointing, the inputs of the recomputed blocks are
    moved.

    Args:
        network: Network that will run on `device_type`.
        device_type: `cuda`, or another device that is not the host.

    Raises:
        ValueError: If the network runs on the CPU, whose activations are in host memory anyway.
    """
    if device_type == "cpu":
        raise ValueError(
            "offload moves activations from a GPU to host memory and saves nothing on cpu: "
            "turn it off"
        )
    save_to_host(network)


def save_to_host(network: nn.Module) -> None:
    """Wrap the network's forward pass so that saved activations go to the host and come back.

    They come back in the same memory layout. Torch's `save_on_cpu` is not used: it copies the
    parameters too, and returns channels-last activations in contiguous layout.
    """
    forward = network.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        copies = HostCopies()
        with saved_tensors_hooks(copies.to_host, copies.from_host):
            return forward(*args, **kwargs)

    network.forward = run


def is_copying_to_host() -> bool:
    """Whether the tensor that is being made now is an offloaded copy.

    `MemoryTracker` asks, because the device of a fake tensor does not show it.
    """
    return _copies_to_host.get()


class HostCopy(NamedTuple):
    """A saved tensor on the host.

    Attributes:
        pieces: Its bytes (uint8) in the order of its memory; several where it goes on in another
            block.
        shape: Its shape.
        stride: Its strides, without gaps.
        dtype: Its number format.
        device: Where it came from.
    """

    pieces: list[Tensor]
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _is_dense(tensor: Tensor) -> bool:
    """Whether the values of a tensor fill its memory without gaps, in any order of the axes."""
    expected_stride = 1
    # From the innermost axis, with the smallest stride, outwards.
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        # The stride of an axis of length 1 is never used, and may be any number.
        if length == 1:
            continue
        if stride != expected_stride:
            return False
        expected_stride *= length
    return True


class HostCopies:
    """Host memory of the tensors that one forward pass saves, in blocks of equal size.

    A tensor begins where the last one ends, and may go on in the next block. A block is free when
    the backward pass has used all tensors in it; torch then keeps it for the next step.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)  # the one that is being filled
        self._num_used_bytes = 0  # of this block

    def to_host(self, tensor: Tensor) -> Tensor | HostCopy:
        """Copy a tensor to the host; parameters stay, because the device holds them anyway."""
        if isinstance(tensor, nn.Parameter):
            return tensor
        token = _copies_to_host.set(True)
        try:
            return self._copy(tensor)
        finally:
            _copies_to_host.reset(token)

    def _copy(self, tensor: Tensor) -> HostCopy:
        if not _is_dense(tensor):
            tensor = tensor.contiguous()
        # All values along one axis, in the order of memory.
        values = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
        all_bytes = values.view(torch.uint8)  # may be cut anywhere, also within a value
        pieces = []
        start = 0
        while start < len(all_bytes):
            free_part = self._free_part(is_pinned=tensor.is_cuda)
            piece = free_part[: len(all_bytes) - start]
            stop = start + len(piece)
            # To pinned memory a GPU copies while it computes.
            piece.copy_(all_bytes[start:stop], non_blocking=tensor.is_cuda)
            pieces.append(piece)
            self._num_used_bytes += len(piece)
            start = stop
        return HostCopy(pieces, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def _free_part(self, *, is_pinned: bool) -> Tensor:
        """Return the unused end of the block, or a new block where it is full.

        Args:
            is_pinned: Whether a new block is of pinned memory.
        """
        if self._num_used_bytes == len(self._block):
            self._block = torch.empty(HOST_BLOCK_BYTES, dtype=torch.uint8, pin_memory=is_pinned)
            self._num_used_bytes = 0
        return self._block[self._num_used_bytes :]

    def from_host(self, saved: Tensor | HostCopy) -> Tensor:
        """Copy a tensor back to its device."""
        if isinstance(saved, Tensor):
            return saved
        tensor = torch.empty_strided(
            saved.shape, saved.stride, dtype=saved.dtype, device=saved.device
        )
        all_bytes = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        start = 0
        for piece in saved.pieces:
            stop = start + len(piece)
            all_bytes[start:stop].copy_(piece, non_blocking=True)
            start = stop
        return tensor
