"""Refinement: the fine stage segments one region in its own crop."""

from __future__ import annotations

import numpy as np

from medseg.cascade.stage import X_AXIS, CascadeOptions, Prediction, TrainedStage
from medseg.data.task import Region
from medseg.geometry.grid import VoxelGrid
from medseg.geometry.grid_rule import Crop
from medseg.preprocess.crop import resample_crop
from medseg.preprocess.intensity import HU_LIMITS, normalise_hu


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
        image_hu: Oriented volume (D, H, W) in HU.
        grid: Its grid, oriented.
        crop: Crop of the region, see `region_crop`; may reach outside.
        region: The region, one of the stage's task.
        stage: The fine stage.
        options: How the networks run; the defaults where None.

    Returns:
        Probabilities (L, D, H, W) of the region's labels on the crop. Classes of other regions are left out and so count as background.
    """
    # One name for the image at all times: a second name would keep a second crop in memory while the network runs.
    image = resample_crop(
        image_hu, grid, grid.resampled(stage.spacing_mm), crop, stage.air_hu, stage.resampling, limits=HU_LIMITS
    )
    image = normalise_hu(image, stage.task.window_hu)
    # In the mode `mirrored` right sides look like left ones to the network.
    flipped = [X_AXIS] if stage.region_mode == "mirrored" and region.side == "right" else []
    if flipped:
        image = image.flip(flipped)
    prediction = stage.predict_probs(image, stage.task.regions.index(region), options or CascadeOptions())
    # `flip` copies, even without an axis: a view would keep the background and the classes of other regions in memory.
    probs = prediction.probs[1 : 1 + len(region.labels)].flip(flipped)
    std = prediction.std
    return prediction._replace(probs=probs, std=None if std is None else std.flip(flipped))
