"""Augmentation of training samples."""

from medseg.config.schema import AugmentConfig
from medseg.data.augment import Augmentation


def make_augmentation(augment: AugmentConfig) -> Augmentation | None:
    """Make the augmentation of the `augment` group; None where it is off."""
    arguments = {**vars(augment), "flip_axes": tuple(augment.flip_axes)}
    return Augmentation(**arguments) if arguments.pop("enabled") else None
