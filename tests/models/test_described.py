"""Networks that a configuration describes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from medseg.models.described import make_described_network
from medseg.task import Channel, Task


class PopsItsOptions(nn.Module):
    """A class that changes the dictionary that it is given, as careless ones do."""

    def __init__(self, in_channels: int, out_channels: int, options: dict[str, Any]) -> None:
        super().__init__()
        width = options.pop("width")
        self.first = nn.Conv3d(in_channels, width, 3, padding=1)
        self.last = nn.Conv3d(width, out_channels, 1)

    def forward(self, image: Tensor) -> Tensor:
        return self.last(self.first(image))


def test_each_construction_gets_arguments_of_its_own() -> None:
    """The network is built twice, the first time to find its traits."""
    node = {"_target_": f"{__name__}.PopsItsOptions", "options": {"width": 4}}
    task = Task("organ", {"liver": 1}, (), (Channel(window_hu=(-1000.0, 400.0)),))
    network = make_described_network(node, task, "single", trusted=[__name__])
    assert network(torch.zeros(1, 1, 8, 8, 8)).shape == (1, 2, 8, 8, 8)
