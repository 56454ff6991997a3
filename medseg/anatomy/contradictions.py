"""Contradictions of two stages: regions that one of them finds and the other does not, or that are tiny or gas."""

from collections.abc import Mapping, Sequence

import numpy as np

from medseg.anatomy.rules import (
    MAX_DOUBTFUL_GAS_SHARE,
    MIN_AGREEMENT,
    MIN_DOUBTFUL_SHARE,
    USUAL_AGREEMENT,
)
from medseg.task import Task


def remove_contradictions(
    labels: np.ndarray,
    image_hu: np.ndarray,
    task: Task,
    label_volumes_ml: dict[str, float],
    agreements: Mapping[str, float],
    added_ml: dict[str, float],
) -> tuple[list[str], list[str]]:
    """Remove regions on which the two stages contradict each other, in place, and warn where they agree little.

    Without a reference each stage is the check of the other. A label stays if one of its regions is
    trusted.

    Args:
        labels: Final label map (D, H, W) in LPS order.
        image_hu: The scan, its first channel.
        task: Labels and regions.
        label_volumes_ml: Volume of each label; updated.
        agreements: Region name to the Dice coefficient of the two stages.
        added_ml: Region name to the volume that the coarse stage alone finds; loses the regions
            that are removed.

    Returns:
        Names of the regions that were removed, and a sentence for each region that is empty,
        removed or doubtful.
    """
    absent: list[str] = []
    warnings: list[str] = []
    regions = [region for region in task.regions if region.name in agreements]
    values = {region.name: task.region_values(region) for region in regions}
    volumes_ml = {
        region.name: sum(label_volumes_ml[name] for name in region.labels) for region in regions
    }
    doubtful = {name for name in volumes_ml if agreements[name] < USUAL_AGREEMENT}
    contradicted = {
        name
        for name, volume_ml in volumes_ml.items()
        if agreements[name] < MIN_AGREEMENT
        or (
            name in doubtful
            and (
                _is_tiny(volume_ml, name, task)
                or _is_gas(labels, image_hu, values[name], task.least_hu)
            )
        )
    }
    # What the coarse stage alone adds does not make a tiny region larger, unless the scan shows
    # another one.
    found = {
        name for name, volume_ml in volumes_ml.items() if volume_ml and name not in contradicted
    }
    contradicted |= {
        name
        for name in doubtful & found
        if found == {name} and _is_tiny(volumes_ml[name] - added_ml.get(name, 0.0), name, task)
    }
    trusted = {
        name for region in regions if region.name not in contradicted for name in region.labels
    }
    for region in regions:
        volume_ml, agreed = volumes_ml[region.name], agreements[region.name]
        if not volume_ml:
            warnings.append(
                f"{region.name} is empty: the fine stage found nothing in the crop that the coarse stage marks"
            )
        elif region.name in contradicted:
            removed = [name for name in region.labels if name not in trusted]
            for plane in labels:
                plane[np.isin(plane, [task.labels[name] for name in removed])] = 0
            label_volumes_ml |= dict.fromkeys(removed, 0.0)
            absent.append(region.name)
            # What was added is counted in coarse voxels, so it may be a little more than the final
            # volume.
            volume_ml = max(0.0, volume_ml - added_ml.pop(region.name, 0.0))
            warnings.append(
                f"no {region.name} found: the {volume_ml:.0f} ml of the fine stage do not match the coarse labels (Dice {agreed:.2f}), so "
                "the region is reported as absent"
            )
        elif agreed < USUAL_AGREEMENT:
            warnings.append(
                f"{region.name}: the two stages agree only to a Dice of {agreed:.2f} "
                f"({USUAL_AGREEMENT:g} or more is usual): check the result"
            )
    return absent, warnings


def _is_tiny(volume_ml: float, region: str, task: Task) -> bool:
    """Whether a region is far below the least plausible volume, as bowel gas and air between limbs are."""
    least_ml, _ = task.volume_ml.get(region, (0.0, 0.0))
    return volume_ml < MIN_DOUBTFUL_SHARE * least_ml


def _is_gas(
    labels: np.ndarray, image_hu: np.ndarray, values: Sequence[int], least_hu: float | None
) -> bool:
    """Whether more than a third of a region lies below the bound of gas, as air below a blanket does."""
    if least_hu is None:
        return False
    num_voxels = num_gas = 0
    for plane, hu in zip(labels, image_hu, strict=True):
        found = hu[np.isin(plane, values)]
        num_voxels += len(found)
        num_gas += int(np.count_nonzero(found < least_hu))
    return num_gas > MAX_DOUBTFUL_GAS_SHARE * num_voxels
