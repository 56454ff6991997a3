"""Regional network: one or several networks of any class, called with an image and the region of each sample."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from medseg.models.adapter import Traits, outputs_of
from medseg.models.blocks import replace_convolutions

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
        traits: Divisor of the input size and names of the blocks of each network.
        in_channels: Channels of the image.
        mode: See above.
        num_regions: Number of regions.
    """

    def __init__(
        self,
        make_network: Callable[[int], nn.Module],
        *,
        in_channels: int = 1,
        num_regions: int = 1,
        mode: str = "whole",
        traits: Traits | None = None,
    ) -> None:
        """Build the networks.

        Args:
            make_network: Function of the number of input channels that makes a network.
            in_channels: Channels of the image.
            num_regions: Number of regions.
            mode: One of `MODES`.
            traits: What is known of each network; None = what it states itself, as `medseg.models.unet.UNet` does.

        Raises:
            ValueError: If the mode is unknown or does not fit the number of regions.
        """
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}, got {mode!r}")
        if num_regions < 1 or (mode == "whole" and num_regions > 1):
            raise ValueError(f"mode {mode!r} does not fit {num_regions} regions")
        self.in_channels = in_channels
        self.mode = mode
        self.num_regions = num_regions
        channels = input_channels(in_channels, mode)
        self.networks = nn.ModuleList(make_network(channels) for _ in range(num_regions if mode == "separate" else 1))
        replace_convolutions(self.networks)
        first = self.networks[0]
        self.traits = traits or Traits(first.divisor, tuple(first.blocks()))  # type: ignore[arg-type, operator]

    @property
    def divisor(self) -> tuple[int, int, int]:
        """Required multiple of the image size, in voxels (z, y, x)."""
        return self.traits.divisor

    def forward(self, image: Tensor, region: Tensor) -> Tensor | list[Tensor]:
        """Predict class logits.

        Args:
            image: Normalised image (N, C, D, H, W).
            region: Index of each sample's region (N,), integer; ignored in the modes `whole` and `mirrored`.

        Returns:
            Logits (N, K, D, H, W); in training with deep supervision a list, the first of which is at full resolution.
        """
        if self.mode != "separate":
            return self._run(0, self.network_input(image, region))
        indices = region.tolist()
        if len(set(indices)) == 1:
            return self._run(indices[0], image)
        # Samples of one region go through their network together, so that a batch norm sees all of them.
        parts: dict[int, list[Tensor]] = {}  # outputs by sample
        is_list = False
        for index in sorted(set(indices)):
            rows = [row for row, other in enumerate(indices) if other == index]
            outputs = self._run(index, image[rows])
            is_list = isinstance(outputs, list)
            split = [output.split(1) for output in (outputs if isinstance(outputs, list) else [outputs])]
            parts.update(zip(rows, map(list, zip(*split, strict=True)), strict=True))
        joined = [torch.cat(samples) for samples in zip(*(parts[row] for row in range(len(indices))), strict=True)]
        return joined if is_list else joined[0]

    def network_of(self, region_index: int) -> nn.Module:
        """The network of a region, by its index."""
        return self.networks[region_index if self.mode == "separate" else 0]

    def network_input(self, image: Tensor, region: Tensor) -> Tensor:
        """What a network sees of an image (N, C, D, H, W): the image, with `side_input` also times a number of the region (N,)."""
        if self.mode != "side_input":
            return image
        sides = torch.linspace(-1.0, 1.0, self.num_regions, device=image.device, dtype=image.dtype)
        factor = sides[region.to(image.device)].view(-1, 1, 1, 1, 1)
        return torch.cat([image, image * factor], dim=1)

    def blocks(self) -> dict[str, nn.Module]:
        """Name the blocks that can be recomputed; with several networks a name begins with the network's number."""
        parts = [{name: network.get_submodule(name) for name in self.traits.blocks} for network in self.networks]
        if len(parts) == 1:
            return parts[0]
        return {f"{number}.{name}": part[name] for name in parts[0] for number, part in enumerate(parts)}

    def _run(self, index: int, image: Tensor) -> Tensor | list[Tensor]:
        return outputs_of(self.networks[index](image), self.training)

    def logits_of(self, region_index: int) -> "Logits":
        """The part of the network that predicts one region, by its index, as a network of the image alone."""
        sides = torch.linspace(-1.0, 1.0, self.num_regions) if self.mode == "side_input" else None
        return Logits(self.network_of(region_index), None if sides is None else float(sides[region_index]))


class Logits(nn.Module):
    """Network from an image (N, C, D, H, W) to logits (N, K, D, H, W) alone, which other programs can represent.

    It calls the forward pass of the network's class, because that of the object may have been replaced by another backend.
    """

    def __init__(self, network: nn.Module, side: float | None = None) -> None:
        """Wrap a network.

        Args:
            network: One network of a `RegionalNetwork`.
            side: Number of the region in the mode `side_input`; None in the others.
        """
        super().__init__()
        self.network, self.side = network, side
        self.eval()

    def forward(self, image: Tensor) -> Tensor | list[Tensor]:
        """Predict logits, without the further outputs of deep supervision."""
        seen = image if self.side is None else torch.cat([image, image * self.side], dim=1)
        return outputs_of(type(self.network).forward(self.network, seen), is_training=False)


def input_channels(in_channels: int, mode: str) -> int:
    """Channels that a network sees: those of the image, twice with `side_input`."""
    return 2 * in_channels if mode == "side_input" else in_channels
