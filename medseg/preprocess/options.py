"""Keys of the group `spacing`: the grid that a stage works on."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from medseg.config.knob import Knob, Pair, Shape, Triple

SpacingStrategy = StrEnum(  # see docs/spacing.md
    "SpacingStrategy",
    [
        "isotropic",
        "anisotropic",
        "dataset_median",
        "dataset_mean",
        "native",
        "fixed_size",
        "fixed_resolution",
        "multi_scale",
    ],
)
SpacingDraw = StrEnum("SpacingDraw", ["even", "tail"])  # see `medseg.data.crops`
Fill = StrEnum("Fill", ["widen", "pad"])
Resampling = StrEnum("Resampling", ["antialiased", "linear", "cubic"])  # see `medseg.preprocess.resample`


@dataclass
class SpacingConfig:
    """Grid that a stage works on."""

    target_spacing_mm: Annotated[
        Triple | None,
        Knob(
            "Voxel spacing; null: averaged over the training cases (dataset_median, dataset_mean), else that of each scan.",
            "(0, inf)",
            "mm (z, y, x)",
        ),
    ]
    # The keys below are absent from older run folders.
    strategy: Annotated[SpacingStrategy, Knob("Rule for the grid of each scan, see docs/spacing.md.")] = SpacingStrategy.isotropic
    size: Annotated[
        Shape | None, Knob("Shape that each crop is resized to; fixed_size only.", "[1, inf)", "voxels (D, H, W)")
    ] = None
    resampling: Annotated[
        Resampling, Knob("Filter. linear: faster, skips voxels where an axis gets coarser; cubic: sharper where it gets finer.")
    ] = Resampling.antialiased
    range_mm: Annotated[Pair | None, Knob("Smallest and largest spacing of an axis; multi_scale only.", "(0, inf)", "mm")] = None
    draw: Annotated[
        SpacingDraw | None, Knob("multi_scale only. even: log-uniform; tail: spacing of a training scan, clamped to range_mm.")
    ] = None
    fill: Annotated[Fill, Knob("fixed_resolution only: how a crop becomes a cube. widen: by more of the scan; pad: by air.")] = (
        Fill.widen
    )
