"""Presence loss: classification of which classes an image contains, by pooling of the logits."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PresenceLoss(nn.Module):
    """Binary cross-entropy of the presence of each class but the background.

    The logit of the presence of a class is the logit of the class minus that of the background,
    averaged over the `voxels` voxels where this difference is largest; for a class that is present,
    over at most as many voxels as it has. The loss thus pushes an absent class below the background
    everywhere, not only on average. It has no trained parameters, so it works with every network
    and image size.

    Attributes:
        target_form: Form of the target, see `TARGET_FORMS` of `medseg.losses.sample_losses`.
        is_voxelwise: Whether voxels can be left out: the largest differences are the same at any
            position.
    """

    target_form = "indices"
    is_voxelwise = True

    def __init__(self, voxels: int = 1000) -> None:
        """Set the pooling.

        Args:
            voxels: Number of voxels that are averaged, at least one. An image that has fewer is
                averaged over all of its voxels.

        Raises:
            ValueError: If `voxels` is below 1.
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
        max_pooled = min(self.voxels, target[0].numel())  # M in the shapes below
        differences = (logits[:, 1:] - logits[:, :1]).flatten(2)  # (N, K-1, D*H*W)
        largest = differences.topk(max_pooled, dim=2).values  # (N, K-1, M), descending
        classes = range(1, logits.shape[1])
        class_voxels = [(target == k).flatten(1).sum(1) for k in classes]
        sizes = torch.stack(class_voxels, dim=1)  # (N, K-1)
        is_present = sizes > 0
        # A present class pools no more voxels than it has; otherwise the loss would reward
        # predicting more voxels.
        num_pooled = torch.where(is_present, sizes.clamp(max=max_pooled), max_pooled)
        # The first `num_pooled` of the M differences of a class, which are its largest.
        is_pooled = torch.arange(max_pooled, device=largest.device) < num_pooled[..., None]
        presence_logits = (largest * is_pooled).sum(2) / num_pooled
        is_present = is_present.to(presence_logits.dtype)
        return F.binary_cross_entropy_with_logits(presence_logits, is_present)
