"""The fine stage: segment one region in its own crop."""

from __future__ import annotations

import numpy as np

from medseg.cascade.stage import CascadeOptions, Prediction, TrainedStage
from medseg.data.task import Region
from medseg.geometry.grid import VoxelGrid
from medseg.geometry.grid_rule import Crop
from medseg.preprocess.crop import resample_crop
from medseg.preprocess.intensity import HU_LIMITS, normalise_hu

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
        image_hu: Oriented volume (D, H, W) in HU.
        grid: Its grid, oriented.
        crop: Crop of the region, see `region_crop`; may reach outside.
        region: The region, one of the stage's task.
        stage: The fine stage.
        options: Overlap of tiles; the defaults where None.

    Returns:
        Probabilities (L, D, H, W) of the region's labels on the crop, and how they came about. What the network gives to other
        regions' classes is background, which is what the labels leave of one.
    """
    options = options or CascadeOptions()
    # Named once only: a second name would keep a second crop for as long as the network runs.
    image = resample_crop(
        image_hu, grid, grid.resampled(stage.spacing_mm), crop, stage.air_hu, stage.resampling, limits=HU_LIMITS
    )
    image = normalise_hu(image, stage.task.window_hu)
    flipped = [X_AXIS] if is_mirrored(region, stage.region_mode) else []
    if flipped:
        image = image.flip(flipped)
    prediction = stage.predict_probs(image, stage.task.regions.index(region), options)
    # `flip` copies, also along no axis: a view would keep the background and the classes of other regions.
    probs = prediction.probs[1 : 1 + len(region.labels)].flip(flipped)
    spread = prediction.spread
    return prediction._replace(probs=probs, spread=None if spread is None else spread.flip(flipped))
