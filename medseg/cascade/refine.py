"""The fine stage: segment one region in its own crop."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from medseg.cascade.stage import CascadeOptions, Prediction, TrainedStage
from medseg.data.task import Region
from medseg.geometry.grid import VoxelGrid
from medseg.geometry.grid_rule import Crop
from medseg.preprocess.crop import resample_crop
from medseg.preprocess.intensity import normalise_hu

X_AXIS = -1


def is_mirrored(region: Region, region_mode: str) -> bool:
    """Tell whether a region's crop is flipped along x for the network: right sides look like left ones then."""
    return region_mode == "mirrored" and region.side == "right"


def refine(
    image_hu: np.ndarray,
    grid: VoxelGrid,
    crop: Crop,
    region: Region,
    stage: TrainedStage,
    options: CascadeOptions | None = None,
) -> Prediction:
    """Segment one region; only its crop is resampled.

    Args:
        image_hu: Oriented volume (D, H, W) in HU, clipped (`clip_hu`).
        grid: Its grid, oriented.
        crop: Crop of the region, see `region_crop`; may reach outside.
        region: The region, one of the stage's task.
        stage: The fine stage.
        options: Overlap of tiles; the defaults where None.

    Returns:
        Probabilities (K, D, H, W) of background and the region's labels on the crop, and how they came about.
    """
    options = options or CascadeOptions()
    resampled = resample_crop(image_hu, grid, grid.resampled(stage.spacing_mm), crop, stage.air_hu, stage.resampling)
    image = normalise_hu(resampled, stage.task.window_hu)
    mirrored = is_mirrored(region, stage.region_mode)
    if mirrored:
        image = image.flip(X_AXIS)
    prediction = stage.predict_probs(image, stage.task.regions.index(region), options)
    probs, spread = region_classes(prediction.probs, region), prediction.spread
    if mirrored:
        probs, spread = probs.flip(X_AXIS), None if spread is None else spread.flip(X_AXIS)
    return prediction._replace(probs=probs, spread=spread)


def region_classes(probs: Tensor, region: Region) -> Tensor:
    """Keep the classes that a region has; what the network gives to others goes to the background.

    Args:
        probs: Probabilities (K, D, H, W) with K of the task's largest region.
        region: A region with at most K - 1 labels.

    Returns:
        Probabilities (1 + number of the region's labels, D, H, W), still summing to 1.
    """
    num_classes = 1 + len(region.labels)
    if num_classes == probs.shape[0]:
        return probs
    background = probs[:1] + probs[num_classes:].sum(0, keepdim=True)
    return torch.cat([background, probs[1:num_classes]])
