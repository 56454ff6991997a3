"""Stage network: a network of any class, with what the framework knows of it."""

from collections.abc import Callable
from typing import cast

from torch import Tensor, nn

from medseg.models.blocks import replace_convolutions
from medseg.models.traits import Traits, outputs_of


class StageNetwork(nn.Module):
    """A network of any class as the framework calls it: from an image to logits.

    One network segments all regions of a fine stage: the caller mirrors right crops, so that both
    sides look alike.

    Attributes:
        traits: Divisor of the input size and names of the blocks.
        in_channels: Channels of the image.
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
            make_network: Function of the number of input channels that makes a network.
            in_channels: Channels of the image.
            traits: What is known of the network; None = what it states itself, as
                `medseg.models.unet.UNet` does.
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
        """The network itself."""
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
        """Name the blocks that can be recomputed."""
        return {name: self.network.get_submodule(name) for name in self.traits.blocks}


class Logits(nn.Module):
    """Network from an image (N, C, D, H, W) to logits (N, K, D, H, W) alone, for other programs.

    It calls the forward pass of the network's class, because that of the object may have been
    replaced by another backend.
    """

    def __init__(self, network: nn.Module) -> None:
        """Wrap the network of a stage."""
        super().__init__()
        self.network = network
        self.eval()

    def forward(self, image: Tensor) -> Tensor:
        """Predict logits, without the further outputs of deep supervision."""
        outputs = type(self.network).forward(self.network, image)
        # Outside of training it is one tensor.
        return cast(Tensor, outputs_of(outputs, is_training=False))
