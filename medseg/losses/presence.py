"""Presence loss: whether a class is in the image at all, by global pooling of the logits."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PresenceLoss(nn.Module):
    """Binary cross-entropy of the presence of each class but the background.

    The logit of the presence of a class is the logit of the class minus that of the background,
    averaged over the `voxels` voxels where this difference is largest; for a class that is present,
    over at most as many voxels as it has. The loss adds no weights, so it works with every network
    and at every size: a class that is absent is pushed below the background everywhere, not only on
    average.
    """

    target_form = "indices"

    def __init__(self, voxels: int = 1000) -> None:
        """Set the pooling.

        Args:
            voxels: Voxels that decide, at least one; a smaller image takes all of its own.

        Raises:
            ValueError: If there are none.
        """
        super().__init__()
        if voxels < 1:
            raise ValueError(f"voxels must be at least 1, got {voxels}")
        self.voxels = voxels

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Score the presence of all classes.

        Args:
            logits: (N, K, D, H, W).
            target: (N, D, H, W), integers in [0, K).

        Returns:
            The mean over samples and classes, a scalar.
        """
        most = min(self.voxels, target[0].numel())
        differences = (logits[:, 1:] - logits[:, :1]).flatten(2)  # (N, K-1, D*H*W)
        scores = differences.topk(most, dim=2).values  # (N, K-1, most), descending
        classes = range(1, logits.shape[1])
        sizes = torch.stack([(target == value).flatten(1).sum(1) for value in classes], dim=1)
        is_present = sizes > 0
        # A present class is averaged over as many voxels as it has, (N, K-1).
        num_pooled = torch.where(is_present, sizes.clamp(max=most), most)
        is_pooled = torch.arange(most, device=scores.device) < num_pooled[..., None]
        presence = (scores * is_pooled).sum(2) / num_pooled
        return F.binary_cross_entropy_with_logits(presence, is_present.to(presence.dtype))
