"""Dice plus cross-entropy loss, computed in slabs to save memory, with an explicit gradient."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Voxels per slab. A voxel takes 8 bytes per class: two copies in fp32. A CPU is fast with small
# slabs, a GPU needs enough voxels for all its cores.
SLAB_VOXELS_CPU = 2**18
SLAB_VOXELS_GPU = 2**20


class DiceCrossEntropyLoss(nn.Module):
    """Weighted sum of one minus the mean soft Dice and the mean cross-entropy.

    The Dice of a class is (2 * sum(p t) + smooth) / (sum(p) + sum(t) + smooth), with the softmax p
    of the logits and the reference t. A class that is absent from the reference has a Dice near 1
    if it is not predicted, else near 0. Each slab is summed in fp32 (fp64 for fp64 logits), and the
    sums of the slabs are added in fp64.

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
        # None = chosen by the device of the logits. The memory accounting, which counts the bytes
        # of a GPU with tensors that are not on it, sets `SLAB_VOXELS_GPU`.
        self.slab_voxels: int | None = None

    def forward(self, logits: Tensor, target: Tensor, ignore_value: int | None = None) -> Tensor:
        """Score logits against a reference.

        Args:
            logits: (N, K, D, H, W), floating point.
            target: (N, D, H, W), integers in [0, K) or `ignore_value`; other values raise or are
                undefined, as in torch's losses.
            ignore_value: Value of ignored voxels, in [0, K) or not; None if there are none.

        Returns:
            The loss, a scalar of fp32 (fp64 for fp64 logits).

        Raises:
            ValueError: If the shapes do not fit each other, the target is not of integers, or no
                class counts in the Dice.
        """
        if logits.ndim != 5 or target.shape != (logits.shape[0], *logits.shape[2:]):
            raise ValueError(
                f"target must be (N, D, H, W) for logits (N, K, D, H, W), got "
                f"{tuple(target.shape)} for {tuple(logits.shape)}"
            )
        if target.is_floating_point():
            raise ValueError(f"target must hold integers, got {target.dtype}")
        num_classes = logits.shape[1]
        min_classes = 1 if self.include_background else 2
        if num_classes < min_classes:
            raise ValueError(f"logits need a foreground class, got {num_classes} classes")
        slab_voxels = self.slab_voxels
        if slab_voxels is None:
            slab_voxels = _slab_voxels(logits)
        # Only these sums have an explicit gradient; autograd differentiates the rest.
        sums = _VoxelSums.apply(logits, target, ignore_value, self.hard_weight, slab_voxels)
        overlaps, prob_sums, ce_sums = sums  # (N, K), (N, K), (N,)
        class_voxels = [(target == k).sum((1, 2, 3)) for k in range(num_classes)]
        reference_sizes = torch.stack(class_voxels, dim=1)  # (N, K)
        if ignore_value in range(num_classes):
            reference_sizes[:, ignore_value] = 0
        # At least 1, because all voxels of a batch may be ignored.
        num_voxels = reference_sizes.sum().clamp(min=1)
        if self.batch_dice:
            overlaps = overlaps.sum(0, keepdim=True)
            prob_sums = prob_sums.sum(0, keepdim=True)
            reference_sizes = reference_sizes.sum(0, keepdim=True)
        dice = (2 * overlaps + self.smooth) / (prob_sums + reference_sizes + self.smooth)
        if not self.include_background:
            dice = dice[:, 1:]
        dice_loss = self.dice_weight * (1 - dice.mean())
        ce_loss = self.ce_weight * ce_sums.sum() / num_voxels
        return (dice_loss + ce_loss).to(_sum_dtype(logits))


class _VoxelSums(torch.autograd.Function):
    """Sums over the voxels of each sample, in fp64, without the ignored voxels.

    The sums are sum(p t) and sum(p) of each class, both (N, K), and the sum of the cross-entropy
    -log p of the reference class, (N,), in which `hard_weight` weights each voxel.
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
        prob_sums = torch.zeros_like(overlaps)
        ce_sums = logits.new_zeros(num_samples, dtype=torch.float64)
        for sample, slab in _slabs(logits, slab_voxels):
            log_probs = _log_softmax(logits[sample, :, slab])  # (K, d, H, W)
            labels = target[sample, slab]  # (d, H, W)
            indices = labels.unsqueeze(0).long()
            # `log_p` is the log-probability of the reference class, (d, H, W). The exponential is
            # taken in place, after `log_p` has been copied out.
            if ignore_value is None:
                log_p = log_probs.gather(0, indices).squeeze(0)
                probs = log_probs.exp_()
            else:
                # Ignored voxels look up class 0, because the ignored value need not be a class. The
                # mask then removes them from all sums.
                is_counted = labels != ignore_value
                log_p = log_probs.gather(0, indices * is_counted).squeeze(0) * is_counted
                probs = log_probs.exp_().mul_(is_counted)
            if hard_weight:
                # The factor 1 + h (1 - p)²; the 0 of an ignored voxel stays 0.
                log_p = log_p * (1 + hard_weight * (1 - log_p.exp()) ** 2)
            ce_sums[sample] -= log_p.sum()
            prob_sums[sample] += probs.sum((1, 2, 3))
            for k in range(num_classes):
                overlaps[sample, k] += (probs[k] * (labels == k)).sum()
        ctx.save_for_backward(logits, target)
        ctx.ignore_value = ignore_value
        ctx.hard_weight = hard_weight
        ctx.slab_voxels = slab_voxels
        return overlaps, prob_sums, ce_sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, target = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for sample, slab in _slabs(logits, ctx.slab_voxels):
            probs = _log_softmax(logits[sample, :, slab]).exp_()
            labels = target[sample, slab]
            # Derivatives of the loss L by the three sums of this sample: b_k = dL/d(sum p_k t_k),
            # a_k = dL/d(sum p_k), both (K,), and c = dL/d(sum of the cross-entropy), a scalar.
            # For each voxel dL/dp_k = a_k + b_k t_k, and through the softmax
            #   dL/dlogit_k = p_k (dL/dp_k - sum_j p_j dL/dp_j) + c (p_k - t_k).
            # With r = sum_j p_j t_j b_j, of which the reference class is the only term, this is
            #   dL/dlogit_k = p_k (s + a_k) + t_k (r - c), where s = c - sum_j p_j a_j - r.
            b, a, c = (grad[sample].to(probs.dtype) for grad in grads)
            if ctx.hard_weight:
                # Now c differs from voxel to voxel, (d, H, W).
                c = c * _hard_factor(probs, labels, ctx.hard_weight)
            r = torch.zeros_like(probs[0])
            for k in range(len(probs)):
                r.addcmul_(probs[k] * (labels == k), b[k])
            s = c - (probs * a.view(-1, 1, 1, 1)).sum(0)
            s -= r
            # In place, to save a tensor: from here on r holds r - c.
            r -= c
            for k in range(len(probs)):
                grad = torch.addcmul((labels == k) * r, probs[k], s + a[k])
                if ctx.ignore_value is not None:
                    grad = grad * (labels != ctx.ignore_value)
                grad_logits[sample, k, slab] = grad
        return grad_logits, None, None, None, None


def _hard_factor(probs: Tensor, labels: Tensor, hard_weight: float) -> Tensor:
    """Compute the factor by which `hard_weight` changes the gradient of each voxel, (d, H, W).

    With p the probability of the reference class and f = -(1 + h (1 - p)²) log p, df/dlogit_k is
    (p_k - t_k) times 1 + h ((1 - p)² - 2 (1 - p) p log p). Without the weight it is p_k - t_k.
    """
    p = torch.zeros_like(probs[0])
    for k in range(len(probs)):
        p += probs[k] * (labels == k)
    # Clamped, so that p log p is 0, its limit, where p is 0.
    log_p = p.clamp(min=torch.finfo(p.dtype).tiny).log_()
    return 1 + hard_weight * ((1 - p) ** 2 - 2 * (1 - p) * p * log_p)


def _slab_voxels(logits: Tensor) -> int:
    """Choose the number of voxels of a slab for the device of the logits."""
    return SLAB_VOXELS_CPU if logits.device.type == "cpu" else SLAB_VOXELS_GPU


def _slabs(logits: Tensor, slab_voxels: int) -> Iterator[tuple[int, slice]]:
    """Divide logits (N, K, D, H, W) into slabs of as many slices as have `slab_voxels` voxels.

    Yields:
        Index of the sample and range of its slices (at least one); all slabs of a sample in turn.
    """
    depth = logits.shape[2]
    slice_voxels = max(1, math.prod(logits.shape[3:]))
    step = max(1, slab_voxels // slice_voxels)
    for sample in range(logits.shape[0]):
        for start in range(0, depth, step):
            yield sample, slice(start, min(start + step, depth))


def _log_softmax(logits: Tensor) -> Tensor:
    """Compute log-probabilities of logits (K, d, H, W), in the precision of the sums."""
    # Contiguous, so that the loops over the classes read each class as one piece of memory.
    return torch.log_softmax(logits.to(_sum_dtype(logits)).contiguous(), dim=0)


def _sum_dtype(logits: Tensor) -> torch.dtype:
    """Choose the precision of the sums over a slab: fp32, or fp64 for fp64 logits."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
