"""Loss of a run."""

from torch import nn

from medseg.config.schema import TrainConfig
from medseg.losses.dice_ce import DiceCrossEntropyLoss


def make_loss(config: TrainConfig) -> nn.Module:
    """Make the weighted sum of Dice and cross-entropy of the `loss` group."""
    return DiceCrossEntropyLoss(**vars(config.loss))
