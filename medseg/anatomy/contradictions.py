"""Contradictions of two stages: regions that one of them finds and the other does not.

A tiny region on which the stages agree little is a contradiction, too.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from medseg.anatomy.rules import MIN_AGREEMENT, MIN_DOUBTFUL_SHARE, USUAL_AGREEMENT
from medseg.task import Task
from medseg.wording import format_ml


def remove_contradictions(
    labels: np.ndarray,
    task: Task,
    label_volumes_ml: dict[str, float],
    agreements: Mapping[str, float],
) -> tuple[list[str], list[str]]:
    """Remove regions on which the two stages contradict each other, in place.

    A region is contradicted if the stages hardly agree on it, or agree little and it is tiny. Its
    labels become background, but a label stays if it also belongs to a region that is not
    contradicted.

    Args:
        labels: Final label map (D, H, W) in LPS order.
        task: Labels and regions.
        label_volumes_ml: Volume of each label; updated.
        agreements: Region name to the Dice coefficient of the two stages.

    Returns:
        Names of the regions that were removed, and a sentence for each region that is empty,
        removed or doubtful.
    """
    # Regions that the coarse stage has not found are absent already.
    regions = [region for region in task.regions if region.name in agreements]
    # All volumes before any label is erased: regions may share labels.
    volumes_ml: dict[str, float] = {}
    for region in regions:
        volumes_ml[region.name] = sum(label_volumes_ml[label] for label in region.labels)
    contradicted: set[str] = set()
    # Labels that stay, even if a contradicted region has them too.
    trusted_labels: set[str] = set()
    for region in regions:
        if _is_contradicted(region.name, volumes_ml[region.name], agreements[region.name], task):
            contradicted.add(region.name)
        else:
            trusted_labels.update(region.labels)
    absent: list[str] = []
    warnings: list[str] = []
    for region in regions:
        volume_ml = volumes_ml[region.name]
        agreement = agreements[region.name]
        if not volume_ml:
            # Not in `absent`, so the caller keeps its box: the user sees where nothing was found.
            warnings.append(
                f"{region.name} is empty: the fine stage found nothing in the crop that the coarse "
                "stage marks"
            )
        elif region.name in contradicted:
            removed_labels = [label for label in region.labels if label not in trusted_labels]
            _erase(labels, [task.labels[label] for label in removed_labels])
            label_volumes_ml.update(dict.fromkeys(removed_labels, 0.0))
            absent.append(region.name)
            warnings.append(
                f"no {region.name} found: the {format_ml(volume_ml)} ml of the fine stage do not "
                f"match the coarse labels (Dice {agreement:.2f}), so the region is reported as "
                "absent"
            )
        elif agreement < USUAL_AGREEMENT:
            warnings.append(
                f"{region.name}: the two stages agree only to a Dice of {agreement:.2f} "
                f"({USUAL_AGREEMENT:g} or more is usual): check the result"
            )
    return absent, warnings


def _is_contradicted(region: str, volume_ml: float, agreement: float, task: Task) -> bool:
    """Whether the stages hardly agree on a region, or agree little and it is tiny."""
    if agreement < MIN_AGREEMENT:
        return True
    return agreement < USUAL_AGREEMENT and _is_tiny(volume_ml, region, task)


def _erase(labels: np.ndarray, values: Sequence[int]) -> None:
    """Set label values to background, in place."""
    # Plane by plane: a mask of the whole map would be a second volume.
    for plane in labels:
        plane[np.isin(plane, values)] = 0


def _is_tiny(volume_ml: float, region: str, task: Task) -> bool:
    """Whether a region is far below its least plausible volume.

    A stage that takes gas in the bowel for a lung finds such a region.
    """
    # Without a range in the task, no volume is tiny.
    least_ml, _ = task.volume_ml.get(region, (0.0, 0.0))
    return volume_ml < MIN_DOUBTFUL_SHARE * least_ml
