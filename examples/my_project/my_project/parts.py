"""Network, loss and transform of the example."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TwoScales(nn.Module):
    """Convolutions at full and at half resolution, whose features are added.

    Maps (N, in_channels, D, H, W) to (N, out_channels, D, H, W).
    """

    def __init__(self, in_channels: int, out_channels: int, width: int = 8) -> None:
        super().__init__()
        self.stem = self.block(in_channels, width)
        self.down = self.block(width, 2 * width)
        self.up = self.block(2 * width, width)
        self.head = nn.Conv3d(width, out_channels, kernel_size=1)

    def block(self, in_channels: int, out_channels: int) -> nn.Sequential:
        conv = nn.Conv3d(in_channels, out_channels, kernel_size=3, padding=1, bias=False)
        return nn.Sequential(
            conv, nn.InstanceNorm3d(out_channels, affine=True), nn.LeakyReLU(inplace=True)
        )

    def forward(self, image: Tensor) -> Tensor:
        fine = self.stem(image)
        coarse = self.up(self.down(F.avg_pool3d(fine, 2)))  # (N, width, D/2, H/2, W/2)
        return self.head(fine + F.interpolate(coarse, scale_factor=2, mode="nearest"))


class SoftDiceLoss(nn.Module):
    """One minus the mean Dice of all classes.

    Logits are (N, K, D, H, W), the target holds class indices (N, D, H, W).
    """

    def __init__(self, smooth: float = 1.0) -> None:
        super().__init__()
        self.smooth = smooth

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        probs = logits.softmax(dim=1)
        reference = F.one_hot(target, logits.shape[1]).movedim(-1, 1)  # (N, K, D, H, W)
        overlap = (probs * reference).sum(dim=(2, 3, 4))
        sizes = probs.sum(dim=(2, 3, 4)) + reference.sum(dim=(2, 3, 4))
        return 1 - ((2 * overlap + self.smooth) / (sizes + self.smooth)).mean()


class Streak:
    """Brighten one random slice of `image` (C, D, H, W) by `strength`, in normalised units.

    Training calls `set_random_state` with a seed of its own before each sample.
    """

    def __init__(self, strength: float = 0.2) -> None:
        self.strength = strength

    def set_random_state(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, sample: dict[str, Tensor]) -> dict[str, Tensor]:
        image = sample["image"].clone()  # the tensor belongs to the caller
        plane = torch.randint(image.shape[1], (), generator=self.generator)
        image[:, plane] += self.strength
        return {**sample, "image": image}
