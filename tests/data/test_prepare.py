"""Preparation of a data set: every case is audited, and a failing one does not affect the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from medseg.data.case_table import Case
from medseg.data.prepare import prepare_cases
from medseg.data.task import Task

from .conftest import LABEL_VALUES, two_blocks

TARGETS = [((4.0, 2.0, 2.0), "antialiased"), (None, "linear")]


def test_ready_refused_and_failed_cases(write_case: Callable[..., Case], tmp_path: Path, task: Task) -> None:
    image, labels = two_blocks((22, 30, 41))
    accepted = frozenset({"hu_range"})
    good = replace(write_case("good", image, labels), ignore_findings=accepted)
    swapped = replace(write_case("swapped", image, np.array([0, 2, 1], np.uint8)[labels]), ignore_findings=accepted)
    gone = Case("gone", tmp_path / "no.nii.gz", tmp_path / "none.nii.gz", "gone")
    cases = [(case, LABEL_VALUES) for case in (swapped, gone, good)]
    (first, refused), (second, nothing), (third, entry) = prepare_cases(cases, tmp_path / "cache", task, TARGETS)
    assert [one.status for one in (first, second, third)] == ["refused", "failed", "ready"]
    assert "does not exist" in second.failure
    assert nothing is None
    assert refused is not None
    assert np.array_equal(refused.image_hu, image)
    assert entry is not None
    assert entry.grid.spacing_mm == (4.0, 2.0, 2.0), "the entry of the first spacing"
    assert len(list((tmp_path / "cache").glob("*/good-*/case.json"))) == 2
