"""Network for several regions; both stages call it as `network(image, region)`."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from medseg.models.unet import UNet

MODES = ("whole", "mirrored", "separate", "side_input")


class RegionalNetwork(nn.Module):
    """Call one or several networks as `network(image, region)`.

    Modes:

    * `whole`: one network and no regions (the coarse stage);
    * `mirrored`: one network for all regions; the caller flips right crops, so that both sides look alike;
    * `separate`: one network per region. A step trains only the regions of its batch, so DDP must find unused parameters;
    * `side_input`: one network whose input is the image, and the image times a number of the region (-1 to +1). The first convolution
      can so have separate filters for each side. A channel with the bare number would have no effect: it adds a constant to a whole
      channel, which the norm subtracts.

    Attributes:
        divisor: Required multiple of the image size, in voxels (z, y, x).
    """

    def __init__(
        self, make_network: Callable[[int], UNet], *, in_channels: int = 1, num_regions: int = 1, mode: str = "whole"
    ) -> None:
        """Build the networks.

        Args:
            make_network: Function of the number of input channels that makes a network.
            in_channels: Channels of the image.
            num_regions: Number of regions.
            mode: One of `MODES`.

        Raises:
            ValueError: If the mode is unknown or does not go with the number of regions.
        """
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}, got {mode!r}")
        if num_regions < 1 or (mode == "whole" and num_regions > 1):
            raise ValueError(f"mode {mode!r} does not serve {num_regions} regions")
        self.mode = mode
        self.num_regions = num_regions
        channels = 2 * in_channels if mode == "side_input" else in_channels
        self.networks = nn.ModuleList(make_network(channels) for _ in range(num_regions if mode == "separate" else 1))

    @property
    def divisor(self) -> tuple[int, int, int]:
        """Required multiple of the image size, in voxels (z, y, x)."""
        return self._network(0).divisor

    def forward(self, image: Tensor, region: Tensor) -> Tensor:
        """Predict class logits.

        Args:
            image: Normalised image (N, C, D, H, W).
            region: Index of each sample's region (N,), integer; ignored in the modes `whole` and `mirrored`.

        Returns:
            Logits (N, K, D, H, W).
        """
        if self.mode == "side_input":
            sides = torch.linspace(-1.0, 1.0, self.num_regions, device=image.device, dtype=image.dtype)
            factor = sides[region.to(image.device)].view(-1, 1, 1, 1, 1)
            return self.networks[0](torch.cat([image, image * factor], dim=1))
        if self.mode != "separate":
            return self.networks[0](image)
        indices = region.tolist()
        if len(set(indices)) == 1:
            return self.networks[indices[0]](image)
        # Samples of one region go through their network together, so that a batch norm sees all of them.
        parts: dict[int, Tensor] = {}
        for index in sorted(set(indices)):
            rows = [row for row, other in enumerate(indices) if other == index]
            parts.update(zip(rows, self.networks[index](image[rows]).split(1), strict=True))
        return torch.cat([parts[row] for row in range(len(indices))])

    def blocks(self) -> dict[str, nn.Module]:
        """Name the blocks that can be recomputed; with several networks a name begins with the network's number."""
        parts = [self._network(number).blocks() for number in range(len(self.networks))]
        if len(parts) == 1:
            return parts[0]
        return {f"{number}.{name}": part[name] for name in parts[0] for number, part in enumerate(parts)}

    def _network(self, number: int) -> UNet:
        network = self.networks[number]
        assert isinstance(network, UNet)
        return network
