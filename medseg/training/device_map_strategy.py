"""Strategy for one rank whose network is divided among several devices by a device map."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from medseg.memory.device_map import apply_device_map


class DeviceMapStrategy(SingleDeviceStrategy):
    """Lightning's single device for input and loss, with parts of the network on other devices.

    Args:
        home: Device of input and loss.
        device_map: Device of each part, see `medseg.memory.device_map.apply_device_map`.
    """

    def __init__(self, home: torch.device, device_map: Mapping[str, str]) -> None:
        super().__init__(home)
        self.device_map = device_map

    def model_to_device(self) -> None:
        """Move the whole module to `home`, and then the parts to their devices."""
        super().model_to_device()
        assert self.lightning_module is not None
        apply_device_map(
            cast(nn.Module, self.lightning_module.network), self.device_map, self.root_device
        )

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of each weight onto the device of the weight.

        Lightning would move the whole state to `home`.
        """
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)
