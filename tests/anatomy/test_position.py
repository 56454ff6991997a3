"""Pairs of regions that are the two sides of one organ."""

from __future__ import annotations

from itertools import permutations

from medseg.anatomy.position import side_pairs
from medseg.task import Channel, Region, Task

REGIONS = (
    Region("left_lung", ("left_lung",), "left"),
    Region("right_lung", ("right_lung",), "right"),
    Region("right_kidney", ("right_kidney",), "right"),
    Region("left_kidney", ("left_kidney",), "left"),
    Region("heart", ("heart",)),
)
LABELS = {region.name: value for value, region in enumerate(REGIONS, start=1)}


def test_a_pair_has_its_left_region_first_whatever_their_order() -> None:
    pairs = set()
    for regions in permutations(REGIONS):
        task = Task("body", LABELS, regions, (Channel(),))
        found = [(left.name, right.name) for left, right in side_pairs(task)]
        assert len(found) == 2
        pairs.update(found)
    assert pairs == {("left_lung", "right_lung"), ("left_kidney", "right_kidney")}
