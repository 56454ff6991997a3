"""Limits benchmark: a budget that is too small for every scan still has its row."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import limits
from medseg.geometry.grid import VoxelGrid
from medseg.io.write import write_labels

NAMES = ("a", "b")


def test_a_budget_that_refuses_every_scan_has_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = np.ones((2, 3, 3), np.uint8)
    grid = VoxelGrid(labels.shape, (1.0, 1.0, 1.0))

    def predict(arguments: Iterable[str], log: Path) -> tuple[int, int]:
        # The smallest budget refuses both scans, the one above it the second.
        names = {"0.25": (), "0.5": NAMES[:1]}.get(log.parent.name, NAMES)
        for name in names:
            write_labels(log.parent / f"{name}.nii.gz", labels, grid)
        return 0, 2**30

    monkeypatch.setattr(limits, "predict", predict)
    cases = [SimpleNamespace(name=name) for name in NAMES]
    monkeypatch.setattr(limits, "read_cases", lambda _: cases)
    rows = limits.budgets(tmp_path, [tmp_path / "set" / "cases.csv"])
    assert [row["budget_gib"] for row in rows] == [4.0, 1.0, 0.5, 0.25]
    assert [row["refused"] for row in rows] == [0, 0, 1, 2]
    assert [row["dice"] for row in rows] == [1.0, 1.0, 1.0, None]
    assert rows[-1]["worst"] is None
