"""Augmentation of training samples: the transforms of the `augment` group in their order."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from medseg.config.schema import AugmentConfig
from medseg.data import augment as effects
from medseg.data.transforms import Transforms

# Effects of the keys of `augment` in their order: the keys are the fields of the class, most of them behind this word.
EFFECTS = {
    "window_shift": effects.WindowShift,
    "affine": effects.Affine,
    "flip": effects.Flip,
    "resolution": effects.Resolution,
    "noise": effects.Noise,
    "contrast": effects.Contrast,
    "brightness": effects.Brightness,
    "gamma": effects.Gamma,
    "truncate": effects.Truncate,
    "narrow": effects.Narrow,
    "circle": effects.Circle,
}


def make_transforms(augment: AugmentConfig) -> Transforms | None:
    """Make the transforms of training samples; None where augmentation is off."""
    return Transforms(make_effects(vars(augment))) if augment.enabled else None


def make_effects(values: Mapping[str, Any]) -> list[Any]:
    """Make the effects of the keys of `augment`."""
    return [
        cls(**{one.name: values.get(f"{word}_{one.name}", values.get(one.name)) for one in dataclasses.fields(cls)})
        for word, cls in EFFECTS.items()
    ]
