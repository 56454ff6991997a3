"""Classes that no training case holds: by stage, by trust, and by what the regions share."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from medseg.data.absent_classes import absence_note, absent_classes
from medseg.task import Channel, Region, Task

CHANNELS = (Channel(window_hu=(-1000.0, 400.0)),)
LOBES = Task(
    "lobes",
    {"left_upper": 1, "left_lower": 2, "right_upper": 3, "right_lower": 4},
    (
        Region("left", ("left_upper", "left_lower"), "left"),
        Region("right", ("right_upper", "right_lower"), "right"),
    ),
    CHANNELS,
)


def case(name: str, *labels: str) -> Any:
    return SimpleNamespace(name=name, label_boxes=dict.fromkeys(labels))


def items(*cases: Any, number: int = 0) -> list[tuple[Any, int]]:
    return [(cached_case, number) for cached_case in cases]


@pytest.mark.parametrize(
    ("labels", "is_coarse", "absent"),
    [
        (list(LOBES.labels), True, []),
        (["left_upper", "right_lower"], True, ["left_lower", "right_upper"]),
        # A shared network learns the lower lobe from one side.
        (["left_upper", "right_lower"], False, []),
        (["left_upper", "right_upper"], False, ["left_lower and right_lower"]),
    ],
)
def test_what_no_item_holds_is_listed(
    labels: list[str], is_coarse: bool, absent: list[str]
) -> None:
    both = [*items(case("a", *labels)), *([] if is_coarse else items(case("a", *labels), number=1))]
    assert absent_classes(both, LOBES, is_coarse=is_coarse) == absent


def test_a_region_that_is_not_trained_on_teaches_nothing() -> None:
    left_alone = case("a", "left_upper", "right_upper", "right_lower")
    assert absent_classes(items(left_alone, number=0), LOBES, is_coarse=False) == [
        "left_lower and right_lower"
    ]


def test_a_class_of_the_region_with_more_labels_is_listed() -> None:
    regions = (
        Region("left", ("left_upper", "left_lower"), "left"),
        Region("right", ("right_upper",), "right"),
    )
    labels = {"left_upper": 1, "left_lower": 2, "right_upper": 3}
    task = Task("lobes", labels, regions, CHANNELS)
    trained_on = items(case("a", "left_upper", "right_upper"))
    assert absent_classes(trained_on, task, is_coarse=False) == ["left_lower"]


def test_a_helper_label_that_no_case_has_is_listed() -> None:
    task = replace(LOBES, labels={**LOBES.labels, "airway": 5})
    with_airway = case("a", "left_upper", "left_lower", "airway")
    without = case("b", "left_upper", "left_lower")
    assert absent_classes(items(with_airway), task, is_coarse=False) == []
    assert absent_classes(items(without), task, is_coarse=False) == ["airway"]


def test_the_note_has_the_class_and_the_counts() -> None:
    val_cases = [case("c", "left_lower"), case("d")]
    note = absence_note(["left_lower"], 3, val_cases, ["reference"])
    assert note.startswith(
        "left_lower: found in 0 of 3 training cases with data.train_trust=reference and in 1 "
        "of 2 validation cases, so"
    )
    assert absence_note([], 3, val_cases) == ""
