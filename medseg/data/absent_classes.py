"""Classes that no training sample holds, which the network cannot learn."""

from collections.abc import Collection, Sequence

from medseg.data.cache import CachedCase
from medseg.task import Task


def absent_classes(
    items: Sequence[tuple[CachedCase, int]],
    task: Task,
    *,
    is_coarse: bool,
) -> list[str]:
    """List the labels that no item of the training has at the spacing of the cache.

    Regions share one network and so its classes: each side teaches it the class of the other.

    Args:
        items: Cases with the number of a region that is trained on, see
            `medseg.data.samples.Samples`.
        task: Labels and regions.
        is_coarse: Whether samples are whole scans with all labels; else crops of one region each.

    Returns:
        Names of labels in the order of the task; those that share a class are joined by "and".
    """
    taught: set[str] = set()
    for case, number in items:
        names = tuple(task.labels)
        if not is_coarse:
            names = (*task.regions[number].labels, *task.helper_labels)
        taught.update(name for name in names if name in case.label_boxes)
    if is_coarse:
        return [name for name in task.labels if name not in taught]
    absent = []
    for index in range(task.num_region_labels):
        # Labels of the same place in their regions share a class.
        names_of_class = [
            region.labels[index] for region in task.regions if index < len(region.labels)
        ]
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
    """Say which classes cannot be learnt, by how many cases; empty where all can.

    Args:
        absent: Result of `absent_classes`.
        num_train: Number of training cases that samples are made of.
        val_cases: Validation cases, whose scores will hold the class all the same.
        train_trust: Trusts in the reference that a training case needs; None if any will do.
    """
    if not absent:
        return ""
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
