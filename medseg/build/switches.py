"""Memory switches of a run, applied to its network."""

from torch import nn

from medseg.config.schema import MemoryConfig
from medseg.errors import UserError
from medseg.memory.switches import apply_switches
from medseg.models.stage_network import StageNetwork


def switch_on(
    network: StageNetwork,
    memory: MemoryConfig,
    device_type: str,
    *,
    sync_batchnorm: bool = False,
    has_many_shapes: bool = False,
) -> nn.Module:
    """Apply the `memory` group to a network that will run on a `cpu` or `cuda` device."""
    try:
        return apply_switches(
            network,
            checkpointing=memory.checkpointing if isinstance(memory.checkpointing, str) else tuple(memory.checkpointing),
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
