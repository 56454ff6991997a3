"""Memory switches of a run, applied to its network."""

from torch import nn

from medseg.config.schema import TrainConfig
from medseg.errors import UserError
from medseg.memory.switches import apply_switches
from medseg.models.regional import RegionalNetwork


def switch_on(network: RegionalNetwork, config: TrainConfig, device_type: str) -> nn.Module:
    """Apply the `memory` group to a network that will run on a `cpu` or `cuda` device."""
    memory = config.memory
    try:
        return apply_switches(
            network,
            checkpointing=memory.checkpointing if isinstance(memory.checkpointing, str) else tuple(memory.checkpointing),
            offload=memory.offload,
            channels_last=memory.channels_last,
            compile=memory.compile,
            synchronise=config.trainer.sync_batchnorm,
            device_type=device_type,
        )
    except ValueError as error:
        raise UserError(f"memory: {error}") from error
