"""Stage network: a network of any class, with the traits that the framework needs."""

from collections.abc import Callable
from typing import cast

from torch import Tensor, nn

from medseg.models.blocks import replace_convolutions
from medseg.models.traits import Traits, outputs_of


class StageNetwork(nn.Module):
    """A network of any class as the framework calls it: from an image to logits.

    One network segments all regions of a fine stage: its caller mirrors the crops of the right
    side, so that both sides look alike.

    Attributes:
        traits: Divisor of the input size, names of the blocks and further traits.
        in_channels: Channels of the image.
        networks: The network, in a list of one.
    """

    def __init__(
        self,
        make_network: Callable[[int], nn.Module],
        *,
        in_channels: int = 1,
        traits: Traits | None = None,
    ) -> None:
        """Build the network.

        Args:
            make_network: Makes a network for a number of input channels.
            in_channels: Channels of the image.
            traits: Traits of the network; None = those that it states itself by `divisor` and
                `blocks()`, as `medseg.models.unet.UNet` does.
        """
        super().__init__()
        self.in_channels = in_channels
        # A list of one, because checkpoints name the weights `networks.0.…`.
        self.networks = nn.ModuleList([make_network(in_channels)])
        replace_convolutions(self.networks)
        if traits is None:
            blocks = self.network.blocks()  # type: ignore[operator]
            traits = Traits(self.network.divisor, tuple(blocks))  # type: ignore[arg-type]
        self.traits = traits

    @property
    def network(self) -> nn.Module:
        """The network that is wrapped."""
        return self.networks[0]

    @property
    def divisor(self) -> tuple[int, int, int]:
        """Required multiple of the image size, in voxels (z, y, x)."""
        return self.traits.divisor

    def forward(self, image: Tensor) -> Tensor | list[Tensor]:
        """Predict class logits.

        Args:
            image: Normalised image (N, C, D, H, W).

        Returns:
            Logits (N, K, D, H, W); in training with deep supervision a list, the first of which is
            at full resolution.
        """
        return outputs_of(self.network(image), self.training)

    def blocks(self) -> dict[str, nn.Module]:
        """Give the blocks that can be recomputed, by name."""
        return {name: self.network.get_submodule(name) for name in self.traits.blocks}


class Logits(nn.Module):
    """Network from an image (N, C, D, H, W) to one tensor of logits (N, K, D, H, W), for exports.

    It calls `forward` of the network's class, because an inference backend may have replaced
    `forward` of the object.
    """

    def __init__(self, network: nn.Module) -> None:
        """Wrap the network of a stage, and put it into evaluation mode."""
        super().__init__()
        self.network = network
        self.eval()

    def forward(self, image: Tensor) -> Tensor:
        """Predict logits, without the further outputs of deep supervision."""
        result = type(self.network).forward(self.network, image)
        # Outside of training the outputs are one tensor.
        return cast(Tensor, outputs_of(result, is_training=False))
