"""Batch norm over the samples of all ranks.

Torch's own (`torch.nn.SyncBatchNorm`) takes tensors of GPUs only. This one takes those of any device, so that two CPU
ranks can prove what many GPUs rely on.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# Everything but the channels of (N, C, D, H, W).
OVER = (0, 2, 3, 4)
PER_CHANNEL = (1, -1, 1, 1, 1)


class SynchronisedBatchNorm3d(nn.BatchNorm3d):
    """`BatchNorm3d` whose mean and variance are those of all ranks' samples, in training; each rank may have other shapes."""

    def forward(self, features: Tensor) -> Tensor:
        """Normalise (N, C, D, H, W); all ranks must call it, in the same order."""
        if not (self.training and dist.is_available() and dist.is_initialized()):
            return super().forward(features)
        normalised, mean, variance, count = _Normalise.apply(features, self.weight, self.bias, self.eps)
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        return normalised


def synchronise_batch_norms(network: nn.Module) -> None:
    """Let every batch norm of a network look at all ranks' samples, in place; parameters, buffers and their names stay."""
    for module in network.modules():
        for name, child in module.named_children():
            if type(child) is nn.BatchNorm3d:
                norm = SynchronisedBatchNorm3d(child.num_features, child.eps, child.momentum, device="meta")
                norm._parameters, norm._buffers = child._parameters, child._buffers
                setattr(module, name, norm)


class _Normalise(Function):
    """Normalise by the moments of all ranks, which exchange three numbers per channel forward and two backward.

    The gradients of scale and shift are those of the rank's own samples, as those of all other parameters are.
    """

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        variance, mean = torch.var_mean(_wide(features), OVER, correction=0)
        own_count = torch.full_like(mean, features.numel() // features.shape[1])
        counts, means, variances = _of_all_ranks(torch.stack((own_count, mean, variance))).unbind(1)
        # Moments of parts put together (Chan et al. 1979): no difference of large sums.
        count = counts.sum(0)
        mean = (counts * means).sum(0) / count
        variance = (counts * (variances + (means - mean) ** 2)).sum(0) / count
        ctx.save_for_backward(features, weight, mean, (variance + eps).rsqrt(), count)
        ctx.mark_non_differentiable(mean, variance, count)
        return F.batch_norm(features, mean, variance, weight, bias, training=False, eps=eps), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, None]:
        features, weight, mean, scale, count = ctx.saved_tensors
        mean, scale, factor = (values.view(PER_CHANNEL) for values in (mean, scale, weight))
        normalised = (_wide(features) - mean).mul_(scale)
        of_shift = _wide(gradient).sum(OVER)
        of_scale = (gradient * normalised).sum(OVER)
        shift, slope = (_of_all_ranks(torch.stack((of_shift, of_scale))).sum(0) / count).view(2, *PER_CHANNEL).unbind(0)
        of_features = (gradient - shift - normalised.mul_(slope)).mul_(factor * scale)
        return of_features.to(features.dtype), of_scale.to(weight.dtype), of_shift.to(weight.dtype), None


def _wide(values: Tensor) -> Tensor:
    """Half precision as fp32, which sums are made in."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _of_all_ranks(values: Tensor) -> Tensor:
    """Gather (K, C) of every rank, (ranks, K, C), the same bits everywhere."""
    gathered = values.new_empty((dist.get_world_size(), *values.shape))
    dist.all_gather(list(gathered), values)
    return gathered
