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
    if is_coarse:
        seen = {name for case, _ in items for name in case.label_boxes}
        return [name for name in task.labels if name not in seen]
    taught: set[str] = set()
    for case, number in items:
        taught.update(name for name in task.regions[number].labels if name in case.label_boxes)
    absent = []
    for index in range(max(len(region.labels) for region in task.regions)):
        names = [region.labels[index] for region in task.regions if index < len(region.labels)]
        if not taught.intersection(names):
            absent.append(" and ".join(names))
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
    names = {name for joined in absent for name in joined.split(" and ")}
    num_val = sum(not names.isdisjoint(case.label_boxes) for case in val_cases)
    pronoun = "it" if len(names) == 1 else "them"
    condition = ""
    if train_trust is not None:
        condition = f" with data.train_trust={' or '.join(train_trust)}"
    return (
        f"{', '.join(absent)}: found in 0 of {num_train} training cases{condition} and in {num_val} "
        f"of {len(val_cases)} validation cases, so the network cannot learn {pronoun}; check "
        f"data.label_values and the split, or remove {pronoun} from task.labels"
    )
