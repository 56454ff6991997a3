"""Augmentation of training samples."""

from medseg.config.schema import TrainConfig
from medseg.data.augment import Augmentation


def make_augmentation(config: TrainConfig) -> Augmentation | None:
    """Make the augmentation of the `augment` group; None where it is off."""
    arguments = {**vars(config.augment), "flip_axes": tuple(config.augment.flip_axes)}
    return Augmentation(**arguments) if arguments.pop("enabled") else None
