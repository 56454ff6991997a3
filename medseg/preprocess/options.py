"""Keys of the group `spacing`: the grid that a stage works on."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from medseg.geometry.sizes import Shape
from medseg.knob import Knob, Pair, Triple

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
Fill = StrEnum("Fill", ["widen", "pad"])  # how a crop of fixed_resolution becomes a cube
# See `medseg.preprocess.resample`.
Resampling = StrEnum("Resampling", ["antialiased", "linear", "cubic"])

# Strategies whose target spacing is an average over the training cases, to the name of the average
# (a key of `medseg.data.crops.AVERAGES`).
FOUND_IN_DATA = {SpacingStrategy.dataset_median: "median", SpacingStrategy.dataset_mean: "mean"}
# Strategies that require the key `target_spacing_mm`.
TARGET_NEEDED = (
    SpacingStrategy.isotropic,
    SpacingStrategy.anisotropic,
    SpacingStrategy.fixed_resolution,
)
# Strategies that use one spacing for all axes.
ONE_SPACING = (SpacingStrategy.isotropic, SpacingStrategy.fixed_resolution)
# Keys that exactly one strategy uses, to this strategy: it requires the key, all others refuse it.
OWN_SPACING_KEYS = {
    "size": SpacingStrategy.fixed_size,
    "range_mm": SpacingStrategy.multi_scale,
    "draw": SpacingStrategy.multi_scale,
}


@dataclass
class SpacingOptions:
    """Grid that a stage works on."""

    target_spacing_mm: Annotated[
        Triple | None,
        Knob(
            "Voxel spacing; null: averaged over the training cases (dataset_median, "
            "dataset_mean), else that of each scan.",
            "(0, inf)",
            "mm (z, y, x)",
        ),
    ] = None
    strategy: Annotated[
        SpacingStrategy, Knob("Rule for the grid of each scan, see docs/spacing.md.")
    ] = SpacingStrategy.isotropic
    size: Annotated[
        Shape | None,
        Knob(
            "Shape that each crop is resized to; fixed_size only.", "[1, inf)", "voxels (D, H, W)"
        ),
    ] = None
    resampling: Annotated[
        Resampling,
        Knob(
            "Filter. linear: faster, skips voxels where an axis gets coarser; cubic: sharper where "
            "it gets finer."
        ),
    ] = Resampling.antialiased
    range_mm: Annotated[
        Pair | None,
        Knob("Smallest and largest spacing of an axis; multi_scale only.", "(0, inf)", "mm"),
    ] = None
    draw: Annotated[
        SpacingDraw | None,
        Knob(
            "multi_scale only. even: log-uniform; tail: spacing of a training scan, clamped to "
            "range_mm."
        ),
    ] = None
    fill: Annotated[
        Fill,
        Knob(
            "fixed_resolution only: how a crop becomes a cube. widen: by more of the scan; pad: by "
            "air."
        ),
    ] = Fill.widen

    def clashes(self, key: str) -> Iterator[str]:
        """Yield a sentence for each contradiction between the keys of a spacing.

        Args:
            key: Path of this group in the configuration, such as `spacing`.
        """
        name = self.strategy.value
        target_mm = list(self.target_spacing_mm or ())
        if self.strategy is SpacingStrategy.native:
            yield from self._native_clashes(key, target_mm)
        if self.strategy in TARGET_NEEDED and not target_mm:
            yield (
                f"{key}.target_spacing_mm: {key}.strategy={name} needs three numbers in mm, "
                "(z, y, x)"
            )
        if self.strategy in ONE_SPACING and len(set(target_mm)) > 1:
            yield (
                f"{key}.target_spacing_mm={target_mm}: {key}.strategy={name} uses one spacing for "
                f"all axes; choose {key}.strategy=anisotropic"
            )
        if self.fill is not Fill.widen and self.strategy is not SpacingStrategy.fixed_resolution:
            yield (
                f"{key}.fill={self.fill.value}: only {key}.strategy=fixed_resolution makes cubes, "
                f"but {key}.strategy={name}; leave it out"
            )
        yield from self._owner_clashes(key)
        if self.range_mm is not None:
            yield from self._range_clashes(key, self.range_mm, target_mm)

    def _native_clashes(self, key: str, target_mm: list[float]) -> Iterator[str]:
        """Yield a sentence for each key that has no effect because `native` resamples nothing."""
        if target_mm:
            yield (
                f"{key}.target_spacing_mm={target_mm}: {key}.strategy=native keeps the spacing "
                "of each scan; leave it null"
            )
        if self.resampling is not Resampling.antialiased:
            yield (
                f"{key}.resampling={self.resampling.value}: {key}.strategy=native resamples "
                "nothing; leave it out"
            )

    def _owner_clashes(self, key: str) -> Iterator[str]:
        """Yield a sentence for each key of another strategy, and for missing keys of this one."""
        for own_key, owner in OWN_SPACING_KEYS.items():
            has_value = getattr(self, own_key) is not None
            if has_value and self.strategy is not owner:
                yield (
                    f"{key}.{own_key}: only {key}.strategy={owner.value} uses it, but "
                    f"{key}.strategy={self.strategy.value}; leave it out"
                )
            if self.strategy is owner and not has_value:
                yield f"{key}.{own_key}: {key}.strategy={owner.value} needs a value"

    def _range_clashes(self, key: str, range_mm: Pair, target_mm: list[float]) -> Iterator[str]:
        """Check the range of `multi_scale` against the spacing of the cache.

        Yields:
            A sentence for each contradiction.
        """
        low_mm, high_mm = range_mm
        if low_mm >= high_mm:
            yield f"{key}.range_mm: expected two increasing numbers, but got {[low_mm, high_mm]}"
        # Without a target spacing, the cache keeps the spacing of each scan: nothing to check.
        if max(target_mm, default=0.0) > low_mm:
            yield (
                f"{key}.target_spacing_mm={target_mm}: samples are resampled from the cache, so it "
                f"must not be coarser than the lower bound of {key}.range_mm={[low_mm, high_mm]}; "
                "choose a finer spacing, or null"
            )
