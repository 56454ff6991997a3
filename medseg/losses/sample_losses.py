"""Adapter from the training step to any loss: weighted terms, form of the target, deep supervision and ignored voxels."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medseg.losses.dice_ce import DiceCrossEntropyLoss

# Forms in which losses expect the target: class indices (N, D, H, W), the same with a channel axis
# (N, 1, D, H, W), or floats of 0 and 1 (N, K, D, H, W). A class may name its own as the attribute
# `target_form`.
TARGET_FORMS = ("indices", "channel", "one_hot")
# Losses of torch on class indices; its other losses compare tensors of one shape.
INDEX_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
# Losses that are sums over voxels and therefore do not change when the ignored voxels are left out.
# A class may say so by the attribute `is_voxelwise`; others read the neighbours of a voxel.
VOXELWISE_LOSSES = (
    "AsymmetricUnifiedFocalLoss", "DiceCELoss", "DiceFocalLoss", "DiceLoss", "FocalLoss", "GeneralizedDiceFocalLoss",
    "GeneralizedDiceLoss", "MaskedDiceLoss", "TverskyLoss",
)  # fmt: skip

# Logit of a class that a network is sure of.
SURE_LOGIT = 10.0


class Term(NamedTuple):
    """One term of a loss.

    Attributes:
        weight: Factor.
        loss: Called as `loss(logits, target)`, returns a scalar.
        form: One of `TARGET_FORMS`.
    """

    weight: float
    loss: nn.Module
    form: str


class TrainingLoss(nn.Module):
    """Weighted sum of losses of logits (N, K, D, H, W), or of several outputs of a network (deep supervision), and integers (N, D, H, W).

    Half-precision logits are converted to fp32 for all losses but ours, which converts slab by
    slab. A smaller output is compared with the target at the nearest voxels.

    Args:
        terms: Terms, one at least.
        output_weights: Weight of each output under deep supervision, the full-size one first; None
            halves it from one to the next. They are divided by their sum.
        ignore_value: Value of ignored voxels in the target; None if there are none.

    Raises:
        ValueError: If a term cannot leave voxels out, or no output has a weight.

    Source: Isensee et al., nnU-Net (Nature Methods 2021), supplement: the weights of deep
    supervision.
    """

    def __init__(
        self,
        terms: Sequence[Term],
        output_weights: Sequence[float] | None = None,
        ignore_value: int | None = None,
    ) -> None:
        super().__init__()
        self.losses = nn.ModuleList(term.loss for term in terms)
        self.terms, self.output_weights, self.ignore_value = terms, output_weights, ignore_value
        if output_weights is not None and not (
            min(output_weights, default=-1) >= 0 and sum(output_weights) > 0
        ):
            raise ValueError(
                f"output_weights={list(output_weights)}: expected numbers from 0 on, one of them above 0"
            )
        for loss in self.losses if ignore_value is not None else ():
            is_known = isinstance(loss, (DiceCrossEntropyLoss, *INDEX_LOSSES)) or (
                type(loss).__module__.startswith("monai.losses.")
                and type(loss).__name__ in VOXELWISE_LOSSES
            )
            if not getattr(
                loss, "is_voxelwise", is_known or type(loss).__module__.startswith("torch.nn.")
            ):
                raise ValueError(
                    f"{type(loss).__name__} is not a sum over voxels, so it cannot leave out the voxels of task.ignore_label; choose another loss"
                )

    def forward(self, logits: Tensor | Sequence[Tensor], target: Tensor) -> Tensor:
        """Compute the loss.

        Args:
            logits: (N, K, D, H, W), or several outputs, the full-size one first.
            target: (N, D, H, W), integers in [0, K), or `ignore_value`.

        Returns:
            The loss, a scalar.
        """
        if isinstance(logits, Tensor):
            return self._sum_of_terms(logits, target)
        weights = self.output_weights or [0.5**n for n in range(len(logits))]
        if len(weights) != len(logits):
            raise ValueError(
                f"loss.output_weights: expected {len(logits)} numbers, one for each output of the network, got {list(weights)}"
            )
        shares = [weight / sum(weights) for weight in weights]
        return sum_all(
            share * self._sum_of_terms(output, _nearest(target, output.shape[2:]))
            for share, output in zip(shares, logits, strict=True)
            if share
        )

    def _sum_of_terms(self, logits: Tensor, target: Tensor) -> Tensor:
        return sum_all(term.weight * self._one(term, logits, target) for term in self.terms)

    def _one(self, term: Term, logits: Tensor, target: Tensor) -> Tensor:
        if isinstance(term.loss, DiceCrossEntropyLoss):
            return term.loss(logits, target, self.ignore_value)
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        if self.ignore_value is None:
            return term.loss(logits, in_form(target, term.form, logits.shape[1]))
        # The remaining voxels of a sample form a line; a sum over voxels does not depend on their
        # order. Their number is read from the device, once for each sample: other libraries take no
        # mask.
        lines = []
        for sample, labels in zip(logits, target.flatten(1), strict=True):
            kept = (labels != self.ignore_value).nonzero().squeeze(1)
            lines.append((sample.flatten(1)[:, kept], labels[kept]))
        if getattr(term.loss, "batch", False):  # a sum over the voxels of all samples
            lines = [
                (
                    torch.cat([line for line, _ in lines], dim=1),
                    torch.cat([voxels for _, voxels in lines]),
                )
            ]
        parts = [
            term.loss(
                line[None, :, :, None, None],
                in_form(voxels[None, :, None, None], term.form, logits.shape[1]),
            )
            if len(voxels)
            else 0.0 * logits.sum()
            for line, voxels in lines
        ]
        return torch.stack(parts).mean()


def sample_losses(
    loss: nn.Module, outputs: Tensor | Sequence[Tensor], target: Tensor
) -> list[tuple[Tensor, int]]:
    """Compute the loss of each sample of a stack by itself; a loss of a whole batch (batch Dice) is computed once for the stack.

    Args:
        loss: Called as `loss(outputs, target)`.
        outputs: Logits (N, K, D, H, W), or several with deep supervision.
        target: (N, D, H, W), integers.

    Returns:
        Losses, each with its number of samples.
    """
    if len(target) == 1 or is_batch_loss(loss):
        return [(loss(outputs, target), len(target))]
    parts = (
        outputs.split(1)
        if isinstance(outputs, Tensor)
        else zip(*(output.split(1) for output in outputs), strict=True)
    )
    return [(loss(*part), 1) for part in zip(parts, target.split(1), strict=True)]


def is_batch_loss(loss: nn.Module) -> bool:
    """Whether a loss, or a part of it, is computed over all samples of a batch together."""
    return any(
        getattr(one, "batch_dice", False) or getattr(one, "batch", False) for one in loss.modules()
    )


def mean_of_samples(losses: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Average losses by their numbers of samples; a single loss is kept bit by bit."""
    num_samples = sum(count for _, count in losses)
    return sum_all(value * (count / num_samples) for value, count in losses)


def sum_all(values: Iterable[Tensor]) -> Tensor:
    """Add tensors; a single one is returned unchanged."""
    first, *others = values
    return sum(others, start=first)


def in_form(target: Tensor, form: str, num_classes: int) -> Tensor:
    """Bring class indices (N, D, H, W) to the form that a loss expects, one of `TARGET_FORMS`."""
    if form == "indices":
        return target.long()
    channel = target[:, None].long()
    if form == "channel":
        return channel
    one_hot = torch.zeros((len(target), num_classes, *target.shape[1:]), device=target.device)
    return one_hot.scatter_(1, channel, 1.0)


def find_target_form(target: Any, arguments: dict[str, Any]) -> str:
    """Find the form in which a class of losses expects the target.

    Args:
        target: Class of the loss.
        arguments: Arguments that it gets, after `default_arguments`.
    """
    if hasattr(target, "target_form"):
        return str(target.target_form)
    if "to_onehot_y" in arguments:
        return "channel" if arguments["to_onehot_y"] else "one_hot"
    is_torch_or_monai = target.__module__.startswith(("torch.nn.", "monai."))
    return "indices" if issubclass(target, INDEX_LOSSES) or not is_torch_or_monai else "one_hot"


def default_arguments(_: type, known: Iterable[str], given: Iterable[str]) -> dict[str, Any]:
    """Choose what a loss of MONAI needs for logits and integers, where it knows the arguments and the user says nothing else."""
    says_activation = bool({"sigmoid", "softmax", "use_softmax", "other_act"} & set(given))
    names = [name for name in ("softmax", "use_softmax") if name in known and not says_activation]
    added = dict.fromkeys(names, True)
    return added | (
        {"to_onehot_y": True} if "to_onehot_y" in known and "to_onehot_y" not in given else {}
    )


def check_loss(loss: nn.Module, num_classes: int) -> None:
    """Compute a loss and its gradient on a small sample, then that of right and of wrong labels.

    Raises:
        ValueError: If it fails, is no finite scalar, has no gradient, or prefers wrong labels.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, num_classes, 8, 8, 8, generator=generator).requires_grad_()
    target = torch.randint(0, num_classes, (2, 8, 8, 8), generator=generator, dtype=torch.uint8)
    try:
        value = loss(logits, target)
        value.backward()
    except Exception as error:
        raise ValueError(
            f"it cannot be computed from logits (N, K, D, H, W) and labels ({type(error).__name__}: {error})"
        ) from error
    if value.ndim or not bool(torch.isfinite(value)) or logits.grad is None:
        raise ValueError(
            f"a finite scalar with a gradient is expected, but it gives {value.detach()}"
        )
    with torch.no_grad():
        right, wrong = (
            float(loss(SURE_LOGIT * in_form(labels, "one_hot", num_classes), target))
            for labels in (target, (target + 1) % num_classes)
        )
    if right > wrong:
        raise ValueError(
            f"it is larger for the right labels ({right:.3g}) than for wrong ones ({wrong:.3g}); change its weights"
        )


def _nearest(target: Tensor, shape: Sequence[int]) -> Tensor:
    """Take the labels (N, D, H, W) at the nearest voxels of a smaller grid."""
    if tuple(target.shape[1:]) == tuple(shape):
        return target
    return F.interpolate(target[:, None].float(), size=tuple(shape), mode="nearest")[:, 0].to(
        target.dtype
    )
