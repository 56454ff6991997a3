"""Classes without a voxel in any training case, which the network cannot learn."""

from collections.abc import Collection, Sequence

from medseg.data.cache import CachedCase
from medseg.task import Task


def absent_classes(
    items: Sequence[tuple[CachedCase, int]],
    task: Task,
    *,
    is_coarse: bool,
) -> list[str]:
    """List the labels that no training item has at the spacing of the cache.

    All regions share one network and therefore its classes: class 1 is the first label of every
    region, so that a left kidney also teaches the class of the right kidney.

    Args:
        items: Pairs of a case and the index in `task.regions` of the region that is trained on, as
            in `medseg.data.samples.Samples`; the coarse stage does not use the index.
        task: Labels and regions.
        is_coarse: Whether samples are whole scans with all labels, as in the coarse stage;
            otherwise each sample is the crop of one region.

    Returns:
        Names of labels in the order of the task; those that share a class are joined by "and".
    """
    taught: set[str] = set()
    for case, region_index in items:
        names = tuple(task.labels)
        if not is_coarse:
            names = (*task.regions[region_index].labels, *task.helper_labels)
        # `label_boxes` has an entry for each label that has voxels.
        taught.update(name for name in names if name in case.label_boxes)
    if is_coarse:
        return [name for name in task.labels if name not in taught]
    absent = []
    for index in range(task.num_region_labels):
        names_of_class = []
        for region in task.regions:
            # Regions may have different numbers of labels.
            if index < len(region.labels):
                names_of_class.append(region.labels[index])
        if taught.isdisjoint(names_of_class):
            absent.append(" and ".join(names_of_class))
    absent += [name for name in task.helper_labels if name not in taught]
    return absent


def absence_note(
    absent: Sequence[str],
    num_train: int,
    val_cases: Sequence[CachedCase],
    train_trust: Collection[str] | None = None,
) -> str:
    """Say which classes cannot be learnt, and how many cases have them.

    Args:
        absent: Result of `absent_classes`.
        num_train: Number of training cases.
        val_cases: Validation cases; classes that only these have are scored although the network
            cannot learn them.
        train_trust: Values of the columns `trust_<region>` that training accepts; None accepts all.
    """
    if not absent:
        return ""
    # The labels of a class were joined by "and".
    names = set(" and ".join(absent).split(" and "))
    num_val = sum(not names.isdisjoint(case.label_boxes) for case in val_cases)
    pronoun = "it" if len(names) == 1 else "them"
    condition = ""
    if train_trust is not None:
        condition = f" with data.train_trust={' or '.join(train_trust)}"
    return (
        f"{', '.join(absent)}: found in 0 of {num_train} training cases{condition} and in "
        f"{num_val} of {len(val_cases)} validation cases, so the network cannot learn {pronoun}; "
        f"check data.label_values and the split, or remove {pronoun} from task.labels"
    )
