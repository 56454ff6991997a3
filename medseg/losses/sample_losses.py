"""Adapter from the training step to the losses of medseg, MONAI and torch.

It sums weighted terms, averages over the outputs of deep supervision and leaves out ignored voxels.
Each loss gets the target in the form that it expects.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medseg.losses.dice_ce import DiceCrossEntropyLoss

# Forms in which losses expect the target: class indices (N, D, H, W), the same with a channel axis
# (N, 1, D, H, W), or floats of 0 and 1 (N, K, D, H, W). A loss class may name its form by the
# attribute `target_form`.
TARGET_FORMS = ("indices", "channel", "one_hot")
# Losses of torch on class indices; its other losses compare tensors of one shape.
INDEX_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)
# Losses of MONAI that do not depend on the positions of the voxels, because they are computed from
# sums over voxels, such as the two sums of Dice. Only these can leave out ignored voxels; a loss
# that reads the neighbours of a voxel cannot. A class of another package states by the attribute
# `is_voxelwise` whether it is such a loss.
POSITION_FREE_LOSSES = (
    "AsymmetricUnifiedFocalLoss", "DiceCELoss", "DiceFocalLoss", "DiceLoss", "FocalLoss",
    "GeneralizedDiceFocalLoss", "GeneralizedDiceLoss", "MaskedDiceLoss", "TverskyLoss",
)  # fmt: skip

# Logit of the predicted class in `check_loss`, where the other classes have 0: the probability of
# the predicted class is near 1.
SURE_LOGIT = 10.0


class Term(NamedTuple):
    """One term of a loss.

    Attributes:
        weight: Factor of the term in the sum.
        loss: Called as `loss(logits, target)`, returns a scalar.
        form: One of `TARGET_FORMS`.
    """

    weight: float
    loss: nn.Module
    form: str


class TrainingLoss(nn.Module):
    """Weighted sum of losses of logits (N, K, D, H, W) and integer labels (N, D, H, W).

    With deep supervision, the loss is a weighted mean over several outputs of a network; for a
    smaller output the target is resized by nearest neighbour. Half-precision logits are converted
    to fp32, except for `DiceCrossEntropyLoss`, which converts slab by slab.

    Args:
        terms: Terms, one at least.
        output_weights: Weight of each output under deep supervision, the full-size one first; None
            = 1, 1/2, 1/4, …. The weights are divided by their sum.
        ignore_value: Value of ignored voxels in the target; None if there are none.

    Raises:
        ValueError: If a term cannot leave out the ignored voxels, or an output weight is negative,
            not finite, or all of them are 0.

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
        self.terms = terms
        self.output_weights = output_weights
        self.ignore_value = ignore_value
        if output_weights is not None:
            total = sum(output_weights)
            # NaN makes the sum NaN, which is not finite.
            if not math.isfinite(total) or total <= 0 or min(output_weights) < 0:
                raise ValueError(
                    f"output_weights={list(output_weights)}: expected numbers from 0 on, "
                    "one of them above 0 and their sum finite"
                )
        if ignore_value is None:
            return
        for loss in self.losses:
            if not _is_position_free(loss):
                raise ValueError(
                    f"{type(loss).__name__} is not a sum over voxels, so it cannot leave out the "
                    "voxels of task.ignore_label; choose another loss"
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
        weights = self.output_weights
        if weights is None:
            weights = [0.5**level for level in range(len(logits))]
        if len(weights) != len(logits):
            raise ValueError(
                f"loss.output_weights: expected {len(logits)} numbers, one for each output of the "
                f"network, got {list(weights)}"
            )
        total = sum(weights)
        output_losses = []
        for weight, output in zip(weights, logits, strict=True):
            # Not multiplied by 0, which would keep the output's activations for the backward pass.
            if weight == 0:
                continue
            output_target = _resize_labels(target, output.shape[2:])
            output_losses.append(weight / total * self._sum_of_terms(output, output_target))
        return sum_all(output_losses)

    def _sum_of_terms(self, logits: Tensor, target: Tensor) -> Tensor:
        """Compute the loss of one output (N, K, D, H, W) and labels of its size."""
        return sum_all(term.weight * self._term_loss(term, logits, target) for term in self.terms)

    def _term_loss(self, term: Term, logits: Tensor, target: Tensor) -> Tensor:
        """Compute one term of the loss, without its weight."""
        # This loss leaves out ignored voxels and converts half precision itself.
        if isinstance(term.loss, DiceCrossEntropyLoss):
            return term.loss(logits, target, self.ignore_value)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        num_classes = logits.shape[1]
        if self.ignore_value is None:
            return term.loss(logits, in_form(target, term.form, num_classes))
        # The L counted voxels of a sample form a line; a sum over voxels does not depend on their
        # order.
        lines = []  # (K, L)
        labels = []  # (L,)
        for sample, sample_labels in zip(logits, target.flatten(1), strict=True):
            # `nonzero` waits for a GPU. A mask would not, but losses of other libraries take none.
            indices = (sample_labels != self.ignore_value).nonzero().squeeze(1)
            lines.append(sample.flatten(1)[:, indices])
            labels.append(sample_labels[indices])
        # A batch loss is computed over all samples together, so the samples form one line.
        if is_batch_loss(term.loss):
            lines = [torch.cat(lines, dim=1)]
            labels = [torch.cat(labels)]
        line_losses = []
        for line, line_labels in zip(lines, labels, strict=True):
            # Without counted voxels the loss is 0; the product gives it a gradient, of zeros.
            if len(line_labels) == 0:
                line_losses.append(0.0 * logits.sum())
            else:
                line_losses.append(_loss_of_line(term, line, line_labels))
        return torch.stack(line_losses).mean()


def _loss_of_line(term: Term, line: Tensor, labels: Tensor) -> Tensor:
    """Compute a term of logits (K, L) and labels (L,), as a volume of L × 1 × 1 voxels."""
    target = in_form(labels[None, :, None, None], term.form, len(line))
    return term.loss(line[None, :, :, None, None], target)


def _is_position_free(loss: nn.Module) -> bool:
    """Whether a loss does not depend on the positions of voxels, so that some can be left out."""
    if hasattr(loss, "is_voxelwise"):
        return bool(loss.is_voxelwise)
    if isinstance(loss, (DiceCrossEntropyLoss, *INDEX_LOSSES)):
        return True
    module = type(loss).__module__
    if module.startswith("monai.losses."):
        return type(loss).__name__ in POSITION_FREE_LOSSES
    # Losses of torch compare voxel by voxel. Nothing is known of other packages' losses.
    return module.startswith("torch.nn.")


def sample_losses(
    loss: nn.Module, outputs: Tensor | Sequence[Tensor], target: Tensor
) -> list[tuple[Tensor, int]]:
    """Compute the loss of each sample of a batch by itself.

    A loss over all samples together (batch Dice) is computed once for the batch.

    Args:
        loss: Called as `loss(outputs, target)`.
        outputs: Logits (N, K, D, H, W), or several outputs with deep supervision.
        target: (N, D, H, W), integers.

    Returns:
        Scalar losses, each with its number of samples; see `mean_of_samples`.
    """
    if len(target) == 1 or is_batch_loss(loss):
        return [(loss(outputs, target), len(target))]
    samples: Iterable[Any]
    if isinstance(outputs, Tensor):
        samples = outputs.split(1)
    else:
        # All outputs of the first sample, then those of the second one, and so on.
        samples = zip(*(output.split(1) for output in outputs), strict=True)
    pairs = zip(samples, target.split(1), strict=True)
    return [(loss(sample, labels), 1) for sample, labels in pairs]


def is_batch_loss(loss: nn.Module) -> bool:
    """Whether a loss, or a part of it, is computed over all samples of a batch together."""
    for part in loss.modules():
        # `batch_dice` is the option's name in our loss, `batch` in those of MONAI.
        if getattr(part, "batch_dice", False) or getattr(part, "batch", False):
            return True
    return False


def mean_of_samples(losses: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Average losses over all samples; a single loss keeps its exact value.

    Args:
        losses: Mean losses, each with its number of samples.
    """
    num_samples = sum(count for _, count in losses)
    return sum_all(value * (count / num_samples) for value, count in losses)


def sum_all(values: Iterable[Tensor]) -> Tensor:
    """Add one or more tensors; a single one is returned unchanged."""
    # Not from the default start 0 of `sum`, which would add a tensor and a node of autograd.
    first, *others = values
    return sum(others, start=first)


def in_form(target: Tensor, form: str, num_classes: int) -> Tensor:
    """Bring class indices (N, D, H, W) to the form that a loss expects, one of `TARGET_FORMS`."""
    if form == "indices":
        return target.long()
    channel = target[:, None].long()
    if form == "channel":
        return channel
    shape = (len(target), num_classes, *target.shape[1:])
    one_hot = torch.zeros(shape, device=target.device)
    return one_hot.scatter_(1, channel, 1.0)


def find_target_form(loss_class: Any, arguments: dict[str, Any]) -> str:
    """Find the form in which a loss class expects the target.

    Args:
        loss_class: Class of the loss.
        arguments: All its arguments, including those of `default_arguments`.

    Returns:
        One of `TARGET_FORMS`.
    """
    if hasattr(loss_class, "target_form"):
        return str(loss_class.target_form)
    if "to_onehot_y" in arguments:
        return "channel" if arguments["to_onehot_y"] else "one_hot"
    is_torch_or_monai = loss_class.__module__.startswith(("torch.nn.", "monai."))
    if is_torch_or_monai and not issubclass(loss_class, INDEX_LOSSES):
        return "one_hot"
    return "indices"


def default_arguments(_: type, parameters: Iterable[str], stated: Iterable[str]) -> dict[str, Any]:
    """Choose the arguments that make a loss of MONAI take logits and integer labels.

    Args:
        _: Class of the loss; not used here. The function for transforms, which is called in the
            same way, uses the class.
        parameters: Names of the arguments that the class takes.
        stated: Names of the arguments that the user states, which stay as they are.

    Returns:
        Arguments to add, by name.
    """
    added: dict[str, Any] = {}
    # A user who states one of these arguments has chosen the activation.
    if not {"sigmoid", "softmax", "use_softmax", "other_act"} & set(stated):
        for name in ("softmax", "use_softmax"):
            if name in parameters:
                added[name] = True
    if "to_onehot_y" in parameters and "to_onehot_y" not in stated:
        added["to_onehot_y"] = True
    return added


def check_loss(loss: nn.Module, num_classes: int) -> None:
    """Check on small random samples that a loss can train a network.

    Raises:
        ValueError: If it fails, is no finite scalar, has no gradient, or is larger for a right
            prediction than for a wrong one.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, num_classes, 8, 8, 8, generator=generator).requires_grad_()
    target = torch.randint(0, num_classes, (2, 8, 8, 8), generator=generator, dtype=torch.uint8)
    try:
        value = loss(logits, target)
        value.backward()
    except Exception as error:
        raise ValueError(
            "it cannot be computed from logits (N, K, D, H, W) and labels "
            f"({type(error).__name__}: {error})"
        ) from error
    if value.ndim or not bool(torch.isfinite(value)) or logits.grad is None:
        raise ValueError(
            f"a finite scalar with a gradient is expected, but it gives {value.detach()}"
        )
    # Losses of other packages accept negative weights. With a negative weight, training would lower
    # the loss by wrong predictions.
    right_logits = SURE_LOGIT * in_form(target, "one_hot", num_classes)
    wrong_logits = SURE_LOGIT * in_form((target + 1) % num_classes, "one_hot", num_classes)
    with torch.no_grad():
        right_loss = float(loss(right_logits, target))
        wrong_loss = float(loss(wrong_logits, target))
    if right_loss > wrong_loss:
        raise ValueError(
            f"it is larger for the right labels ({right_loss:.3g}) than for wrong ones "
            f"({wrong_loss:.3g}); change its weights"
        )


def _resize_labels(target: Tensor, shape: Sequence[int]) -> Tensor:
    """Resize labels (N, D, H, W) to a shape (D', H', W') by the nearest voxels."""
    if tuple(target.shape[1:]) == tuple(shape):
        return target
    floats = target[:, None].float()  # torch does not resize integers
    resized = F.interpolate(floats, size=tuple(shape), mode="nearest")
    return resized[:, 0].to(target.dtype)
