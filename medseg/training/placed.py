"""One rank whose network lies on several devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from medseg.memory.device_map import apply_device_map


class PlacedStrategy(SingleDeviceStrategy):
    """Lightning's single device as the home of input and loss, and parts of the network elsewhere.

    Args:
        home: Device of input and loss.
        places: Device of each part, see `medseg.memory.device_map.apply_device_map`.
    """

    def __init__(self, home: torch.device, places: Mapping[str, str]) -> None:
        super().__init__(home)
        self.places = places

    def model_to_device(self) -> None:
        """Move everything home, and then the parts to their places."""
        super().model_to_device()
        assert self.lightning_module is not None
        apply_device_map(cast(nn.Module, self.lightning_module.network), self.places, self.root_device)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Leave the state of each weight beside it; Lightning would bring all of it home."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)
