"""Dice plus cross-entropy loss; its explicit gradient is its only full-size tensor."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Voxels per slab; each takes some 24 bytes. A CPU is fast with small slabs, a GPU needs enough
# voxels for all its cores.
SLAB_VOXELS_CPU = 2**18
SLAB_VOXELS_GPU = 2**20


class DiceCrossEntropyLoss(nn.Module):
    """Weighted sum of one minus the mean soft Dice and the mean cross-entropy.

    The Dice of a class is (2 * sum(p t) + smooth) / (sum(p) + sum(t) + smooth), with the softmax p
    of the logits and the reference t. For a class that is absent from the reference it is near 1
    where the class is not predicted, and near 0 where it is. Half-precision logits are converted to
    fp32, in which each slab is summed (fp64 for fp64 logits); the sums of all slabs are added in
    fp64.

    MONAI's `DiceCELoss` is the same function (tested), but it makes a float one-hot copy of the
    target, the softmax and the log-softmax, and saves several of them for the backward pass. Here
    only the logits and the target are saved; the backward pass recomputes the softmax slab by slab.
    """

    def __init__(
        self,
        dice_weight: float = 1.0,
        ce_weight: float = 1.0,
        include_background: bool = False,
        batch_dice: bool = False,
        smooth: float = 1e-5,
        hard_weight: float = 0.0,
    ) -> None:
        """Set the terms.

        Args:
            dice_weight: Weight of the Dice term, >= 0.
            ce_weight: Weight of the cross-entropy, >= 0; one of the two is positive.
            include_background: Whether class 0 counts in the mean Dice. It always counts in the
                cross-entropy.
            batch_dice: Whether the samples of a batch are scored as one volume instead of one by
                one.
            smooth: Added to numerator and denominator of the Dice, in voxels, > 0.
            hard_weight: Weight h >= 0 of hard voxels: the cross-entropy of a voxel whose reference
                has probability p counts 1 + h (1 - p)² times (Lin et al., Focal loss, ICCV 2017).

        Raises:
            ValueError: If a weight is negative, both are zero or `smooth` is not positive.
        """
        super().__init__()
        if hard_weight < 0:
            raise ValueError(f"hard_weight must be >= 0, got {hard_weight}")
        if min(dice_weight, ce_weight) < 0 or dice_weight + ce_weight <= 0:
            raise ValueError(
                f"weights must be >= 0 and not both 0, got dice {dice_weight} and ce {ce_weight}"
            )
        if smooth <= 0:
            raise ValueError(
                f"smooth must be positive, or an absent class has no Dice, got {smooth}"
            )
        self.dice_weight = dice_weight
        self.ce_weight = ce_weight
        self.include_background = include_background
        self.batch_dice = batch_dice
        self.smooth = smooth
        self.hard_weight = hard_weight
        self.slab_voxels: int | None = None

    def forward(self, logits: Tensor, target: Tensor, ignore_value: int | None = None) -> Tensor:
        """Score logits against a reference.

        Args:
            logits: (N, K, D, H, W), floating point.
            target: (N, D, H, W), integers in [0, K) or `ignore_value`; other values raise or are
                undefined, as in torch's losses.
            ignore_value: Value of ignored voxels; None if there are none.

        Returns:
            The loss, a scalar of fp32 (fp64 for fp64 logits).

        Raises:
            ValueError: If the shapes do not fit each other or the target is not of integers.
        """
        if logits.ndim != 5 or target.shape != (logits.shape[0], *logits.shape[2:]):
            raise ValueError(
                f"target must be (N, D, H, W) for logits (N, K, D, H, W), got "
                f"{tuple(target.shape)} for {tuple(logits.shape)}"
            )
        if target.is_floating_point():
            raise ValueError(f"target must hold integers, got {target.dtype}")
        num_classes = logits.shape[1]
        least_classes = 1 if self.include_background else 2
        if num_classes < least_classes:
            raise ValueError(f"logits need a foreground class, got {num_classes} classes")
        # One pass over the volume gives the sums of the loss; autograd differentiates the
        # arithmetic between them.
        slab_voxels = self.slab_voxels or _slab_voxels(logits)
        moments = _Moments.apply(logits, target, ignore_value, self.hard_weight, slab_voxels)
        overlaps, predicted, entropy = moments  # (N, K), (N, K), (N,)
        class_counts = [(target == k).sum((1, 2, 3)) for k in range(num_classes)]
        counts = torch.stack(class_counts, dim=1)  # (N, K)
        # Ignored voxels have no class; a batch may hold no others.
        num_voxels = target.numel() if ignore_value is None else counts.sum().clamp(min=1)
        if self.batch_dice:
            overlaps = overlaps.sum(0, keepdim=True)
            predicted = predicted.sum(0, keepdim=True)
            counts = counts.sum(0, keepdim=True)
        dice = (2 * overlaps + self.smooth) / (predicted + counts + self.smooth)
        if not self.include_background:
            dice = dice[:, 1:]
        loss = self.dice_weight * (1 - dice.mean()) + self.ce_weight * entropy.sum() / num_voxels
        return loss.to(_sum_dtype(logits))


class _Moments(torch.autograd.Function):
    """Sums of each sample over its voxels, in fp64.

    They are sum(p t) and sum(p) of each class, (N, K) both, and the sum of -log p of the reference
    class, weighted by `hard_weight`, (N,).
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        ignore_value: int | None,
        hard_weight: float,
        slab_voxels: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_samples, num_classes = logits.shape[:2]
        overlaps = logits.new_zeros(num_samples, num_classes, dtype=torch.float64)
        predicted = torch.zeros_like(overlaps)
        entropy = logits.new_zeros(num_samples, dtype=torch.float64)
        for sample, slab in _slabs(logits, slab_voxels):
            log_probs = _log_softmax(logits[sample, :, slab])
            labels = target[sample, slab]
            indices = labels.unsqueeze(0).long()
            # Log-probability of the reference class, (d, H, W).
            if ignore_value is None:
                reference = log_probs.gather(0, indices).squeeze(0)
                probs = log_probs.exp_()
            else:
                # An ignored value need not be an index, so these voxels look up class 0.
                is_counted = labels != ignore_value
                reference = log_probs.gather(0, indices * is_counted).squeeze(0) * is_counted
                probs = log_probs.exp_().mul_(is_counted)
            if hard_weight:
                # An ignored voxel has 0 here, and keeps it.
                reference = reference * (1 + hard_weight * (1 - reference.exp()) ** 2)
            entropy[sample] -= reference.sum()
            predicted[sample] += probs.sum((1, 2, 3))
            for k in range(num_classes):
                overlaps[sample, k] += (probs[k] * (labels == k)).sum()
        ctx.save_for_backward(logits, target)
        ctx.ignore_value = ignore_value
        ctx.hard_weight = hard_weight
        ctx.slab_voxels = slab_voxels
        return overlaps, predicted, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, target = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for sample, slab in _slabs(logits, ctx.slab_voxels):
            probs = _log_softmax(logits[sample, :, slab]).exp_()
            labels = target[sample, slab]
            by_overlap, by_predicted, by_entropy = (
                by_sum[sample].to(probs.dtype) for by_sum in grads
            )
            # Three derivatives come in: by_predicted is a_k = dL/d(sum p_k), by_overlap is
            # b_k = dL/d(sum p_k t_k), and by_entropy is c = dL/d(entropy).
            # For each voxel dL/dp_k = a_k + b_k t_k, and through the softmax
            #   dL/dlogit_k = p_k (dL/dp_k - sum_j p_j dL/dp_j) + c (p_k - t_k).
            # With r = sum_j p_j t_j b_j, of which the reference class is the only term, this is
            #   dL/dlogit_k = p_k (c - sum_j p_j a_j - r + a_k) + t_k (r - c).
            # With hard voxels c differs from voxel to voxel.
            if ctx.hard_weight:
                by_entropy = by_entropy * _hard_factor(probs, labels, ctx.hard_weight)
            of_reference = torch.zeros_like(probs[0])  # r, and from the last line on r - c
            for_all = by_entropy - (probs * by_predicted.view(-1, 1, 1, 1)).sum(0)
            for k in range(len(probs)):
                of_reference.addcmul_(probs[k] * (labels == k), by_overlap[k])
            for_all -= of_reference
            of_reference -= by_entropy
            for k in range(len(probs)):
                grad = torch.addcmul(
                    (labels == k) * of_reference, probs[k], for_all + by_predicted[k]
                )
                if ctx.ignore_value is not None:
                    grad = grad * (labels != ctx.ignore_value)
                grad_logits[sample, k, slab] = grad
        return grad_logits, None, None, None, None


def _hard_factor(probs: Tensor, labels: Tensor, hard_weight: float) -> Tensor:
    """Factor of the gradient of the cross-entropy that is weighted by 1 + h (1 - p)², (d, H, W).

    With f = -(1 + h (1 - p)²) log p, df/dlogit_k is (p_k - t_k) times
    1 + h ((1 - p)² - 2 (1 - p) p log p).
    """
    p = torch.zeros_like(probs[0])
    for k in range(len(probs)):
        p += probs[k] * (labels == k)
    # The limit of p log p at 0 is 0.
    log_p = p.clamp(min=torch.finfo(p.dtype).tiny).log_()
    return 1 + hard_weight * ((1 - p) ** 2 - 2 * (1 - p) * p * log_p)


def _slab_voxels(logits: Tensor) -> int:
    """Voxels of a slab on the device of the logits."""
    return SLAB_VOXELS_CPU if logits.device.type == "cpu" else SLAB_VOXELS_GPU


def _slabs(logits: Tensor, slab_voxels: int) -> Iterator[tuple[int, slice]]:
    """Cut logits (N, K, D, H, W) into samples and ranges of slices."""
    depth = logits.shape[2]
    step = max(1, slab_voxels // max(1, math.prod(logits.shape[3:])))
    for sample in range(logits.shape[0]):
        for start in range(0, depth, step):
            yield sample, slice(start, min(start + step, depth))


def _log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities over the first axis, in the precision of the sums."""
    return torch.log_softmax(logits.to(_sum_dtype(logits)).contiguous(), dim=0)


def _sum_dtype(logits: Tensor) -> torch.dtype:
    """Precision of the sums over a slab: fp32, or fp64 for fp64 logits."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
