"""Input sizes that a configuration states, and their required multiple.

Both are found without building the network.
"""

from collections.abc import Mapping
from typing import Any

from medseg.geometry.sizes import Shape
from medseg.geometry.strides import level_strides, total_strides
from medseg.models.options import UNET, count_strides
from medseg.preprocess.options import FOUND_IN_DATA, SpacingOptions, SpacingStrategy
from medseg.targets import TARGET
from medseg.training.options import TrainConfig


def stated_divisor(model: Mapping[str, Any], spacing: SpacingOptions) -> Shape | None:
    """Find the required multiple of the network's input size where the configuration decides it.

    A spacing that the data decide is not known yet. It counts as the same along all axes, which
    requires the largest multiple.

    Returns:
        Multiple in voxels (z, y, x): `model.divisor`, or that of our UNet; None for a network that
        must be traced, see `medseg.training.network.find_divisor`.
    """
    divisor: Shape | None = model["divisor"]
    if divisor is None and model[TARGET] == UNET:
        return total_strides(choose_strides(model, spacing))
    return divisor


def choose_strides(model: Mapping[str, Any], spacing: SpacingOptions) -> tuple[Shape, ...]:
    """Choose the strides of each level of our UNet, finest first.

    They follow the spacing where the strategy keeps different spacings along the axes.
    """
    spacing_mm = None  # the same along all axes
    if spacing.strategy in (SpacingStrategy.anisotropic, *FOUND_IN_DATA):
        spacing_mm = spacing.target_spacing_mm
    return level_strides(spacing_mm, count_strides(model))


def input_sizes(config: TrainConfig) -> dict[str, Shape]:
    """List the sizes of network inputs, in voxels (D, H, W), by the keys that state them."""
    sizes = {
        "spacing.size": config.spacing.size,
        "stage.patch_size": config.stage.patch_size,
        "inference.tile_size": config.inference.tile_size,
    }
    return {key: size for key, size in sizes.items() if size is not None}
