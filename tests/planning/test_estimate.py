"""Estimate: free memory that the heap keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from medseg.memory.kernels import Cost, KernelCosts
from medseg.memory.tracker import MemoryTracker, Owner, Segment, Timeline
from medseg.planning import estimate
from medseg.planning.estimate import kept_bytes

MIB = 2**20


def test_the_heap_is_at_the_peak_as_large_as_it_was_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three small blocks of 3 MiB, freed before a large one of 40 MiB; a workspace of 2 MiB comes from the heap as well."""
    monkeypatch.setattr(estimate, "maps_large_blocks", lambda: True)
    costs = KernelCosts(tmp_path, torch.device("cpu"))
    costs.costs = {"small": Cost(2 * MIB, 2 * MIB, 0, 0.0), "large": Cost(0, 0, 0, 0.0)}
    segment = Segment(Owner("forward"), 0, [(9 * MIB, 0, "small"), (41 * MIB, 0, "large")], [9 * MIB, MIB])
    timeline = Timeline([segment])
    assert kept_bytes(timeline, costs) == (9 + 2 - 1) * MIB
    monkeypatch.setattr(estimate, "HEAP_BYTES", 4 * MIB)
    assert kept_bytes(timeline, costs) == 4 * MIB, "the heap gives back what is above its bound"
    monkeypatch.setattr(estimate, "maps_large_blocks", lambda: False)
    assert kept_bytes(timeline, costs) == 0


def test_small_storages_are_counted_apart() -> None:
    timeline = Timeline()
    with MemoryTracker(timeline=timeline):
        small = torch.zeros(2**18)  # 1 MiB
        large = torch.zeros(2**21)  # 8 MiB, mapped
        del small
        both = torch.zeros(2**19), large
    (segment,) = timeline.segments
    kinds = dict(zip((total for total, _, _ in segment.calls), segment.small, strict=True))
    assert kinds[9 * MIB] == MIB
    assert kinds[10 * MIB] == 2 * MIB
    assert len(both) == 2
