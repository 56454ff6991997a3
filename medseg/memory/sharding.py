"""Sharding: weights, gradients and optimiser state divided among the ranks by FSDP2, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard_network(network: nn.Module, mesh: DeviceMesh) -> None:
    """Divide each block's weights among the ranks of a mesh, in place; names and results stay.

    A rank gathers a block for its use and frees it afterwards, so all ranks must use the same blocks in the same order.

    Args:
        network: Network with a method `blocks()`, its other switches applied, not yet moved or optimised.
        mesh: The ranks, one axis.
    """
    blocks = cast(Callable[[], Mapping[str, nn.Module]], network.blocks)
    for part in (*blocks().values(), network):
        fully_shard(part, mesh=mesh)


@contextmanager
def gathered(network: nn.Module) -> Iterator[None]:
    """Hold all weights on every rank, so that each may use the network any number of times; all ranks must enter and leave.

    A network that is not sharded stays as it is.
    """
    shards = [module for module in network.modules() if isinstance(module, FSDPModule)]
    for shard in shards:
        shard.unshard()
        shard.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for shard in shards:
            shard.set_reshard_after_forward(True, recurse=False)
            shard.reshard()
