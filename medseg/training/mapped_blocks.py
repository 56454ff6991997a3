"""Choice of the size from which a training on a CPU maps memory blocks, by its network's results.

A mapped block is a memory map of its own outside the heap, see `medseg.memory.heap`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from medseg.memory.heap import (
    ALIGNED_BYTES,
    KEPT_BYTES,
    USUALLY_MAPPED_BYTES,
    map_blocks_from,
    maps_large_blocks,
)
from medseg.memory.precision import HALF
from medseg.models.traits import build_on_meta
from medseg.training.network import count_channels, make_network
from medseg.training.options import TrainConfig, samples_per_micro_batch


def map_blocks(config: TrainConfig) -> None:
    """Choose the size from which on this process maps memory blocks, for a training on a CPU.

    Usually the size is 4 MiB. It is 2 MiB if the results of a forward pass that have 2 to 4 MiB
    take more in all than the free memory that the heap may keep anyway. All results of the pass
    count, also those that activation checkpointing discards, so that the choice is the same for all
    sets of switches that `plan` compares. For whole volumes, whose sizes differ, it is 4 MiB.
    """
    if not maps_large_blocks():
        return
    shape = config.stage.patch_size or config.spacing.size
    num_bytes = 0
    if shape is not None:
        image_shape = (samples_per_micro_batch(config), count_channels(config), *shape)
        value_bytes = 2 if config.memory.precision.value in HALF else 4
        num_bytes = heap_result_bytes(lambda: make_network(config), image_shape, value_bytes)
    if num_bytes > KEPT_BYTES:
        map_blocks_from(ALIGNED_BYTES)
    else:
        map_blocks_from(USUALLY_MAPPED_BYTES)


def heap_result_bytes(
    make: Callable[[], torch.nn.Module], image_shape: Sequence[int], value_bytes: int
) -> int:
    """Sum the results of a forward pass whose sizes are from ALIGNED_BYTES to USUALLY_MAPPED_BYTES.

    These usually lie in the heap, where their alignment leaves holes.

    Args:
        make: Makes the network.
        image_shape: (N, C, D, H, W).
        value_bytes: Bytes of a value.

    Returns:
        Bytes; 0 for a network that does not run on tensors without values.
    """
    image = torch.zeros(tuple(image_shape), device="meta")
    try:
        network = build_on_meta(make).train()
        with torch.device("meta"), torch.no_grad(), _Results() as results:
            network(image)
    except Exception:  # whatever a foreign network raises without values
        return 0
    total = 0
    for num_values in results.num_values:
        num_bytes = num_values * value_bytes
        if ALIGNED_BYTES <= num_bytes < USUALLY_MAPPED_BYTES:
            total += num_bytes
    return total


class _Results(TorchDispatchMode):
    """Records the number of values of each new tensor in `num_values`."""

    def __init__(self) -> None:
        super().__init__()
        self.num_values: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # A view or a change in place takes no memory.
        makes_tensors = not func.is_view and not func._schema.is_mutable
        if makes_tensors:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.num_values.append(math.prod(leaf.shape))
        return result
