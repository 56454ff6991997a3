"""Loss of a run."""

from torch import nn

from medseg.config.schema import LossConfig
from medseg.losses.dice_ce import DiceCrossEntropyLoss


def make_loss(loss: LossConfig) -> nn.Module:
    """Make the weighted sum of Dice and cross-entropy."""
    return DiceCrossEntropyLoss(**vars(loss))
