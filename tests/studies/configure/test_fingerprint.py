"""Fingerprint: sizes of labels with known shapes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from medseg.data.case_table import read_case_table
from medseg.errors import UserError
from medseg.io.tables import read_csv
from medseg.phantom.case_folders import write_phantoms
from medseg.studies.configure.fingerprint import (
    CaseFacts,
    Fingerprint,
    LabelFacts,
    read_fingerprint,
)
from medseg.task import Channel, LabelValues, Region, Task


@pytest.fixture(scope="module")
def scan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phantoms")
    return write_phantoms(folder, 1, 5, "small", {"train": 1})


TASK = Task(
    "chest",
    {"left_lung": 1, "right_lung": 2},
    (),
    (Channel("ct", (-1000.0, 400.0)),),
)


def test_labels_are_measured_as_in_the_file(scan: Path, tmp_path: Path) -> None:
    import nibabel

    (case,) = read_case_table(scan)
    fingerprint = read_fingerprint([(case, {1: "left_lung", 2: "right_lung"})], TASK)
    (facts,) = fingerprint.cases
    stored = nibabel.load(case.labels)
    labels = np.asarray(stored.dataobj)
    for name, value in TASK.labels.items():
        voxel_ml = abs(np.linalg.det(stored.affine[:3, :3])) / 1000
        assert facts.labels[name].volume_ml == pytest.approx((labels == value).sum() * voxel_ml)
        indices = np.argwhere(labels == value)
        lengths = np.ptp(indices, axis=0) + 1
        extent_mm = sorted(lengths * np.array(stored.header.get_zooms()))
        assert sorted(facts.labels[name].extent_mm) == pytest.approx(extent_mm, rel=1e-5)
    assert sorted(facts.shape) == sorted(labels.shape)
    assert facts.low < facts.high
    fingerprint.write(tmp_path / "fingerprint.csv")
    rows = read_csv(tmp_path / "fingerprint.csv")
    assert [row["label"] for row in rows] == list(TASK.labels)


def test_a_ball_is_as_large_as_its_diameter() -> None:
    ball = LabelFacts(math.pi / 6 * 30**3 / 1000, (30.0, 30.0, 30.0))
    assert ball.size_mm == pytest.approx(30.0)
    # The size of a disc of the same volume is its thickness.
    assert LabelFacts(ball.volume_ml, (3.0, 80.0, 80.0)).size_mm == 3.0


def test_the_smallest_label_is_that_of_the_median_case() -> None:
    cases = []
    for number, liver_mm in enumerate((90.0, 100.0, 5.0)):
        labels = {
            "liver": LabelFacts(1000.0, (liver_mm,) * 3),
            "gland": LabelFacts(1000.0, (20.0 + number,) * 3),
        }
        cases.append(
            CaseFacts(str(number), (10, 10 + number, 10), (3.0, 1.0, 1.0), 0.0, 1.0, labels, {})
        )
    fingerprint = Fingerprint(tuple(cases))
    # The liver is cut in one case only, so its median size is not that of the cut one.
    assert fingerprint.smallest_label == ("gland", 21.0)
    assert fingerprint.largest.name == "2"
    assert fingerprint.spacing_mm == (3.0, 1.0, 1.0)
    assert fingerprint.extent_mm == (30.0, 11.0, 10.0)


def test_the_largest_case_has_the_largest_field_of_view() -> None:
    """Not the most stored voxels: after resampling, the field of view decides the size."""
    fine = CaseFacts("fine", (100, 100, 100), (1.0, 1.0, 1.0), 0.0, 1.0, {}, {})
    wide = CaseFacts("wide", (50, 50, 50), (3.0, 3.0, 3.0), 0.0, 1.0, {}, {})
    assert Fingerprint((fine, wide)).largest.name == "wide"


def test_a_region_is_as_large_as_its_labels_together(scan: Path) -> None:
    (case,) = read_case_table(scan)
    values: LabelValues = {1: "left_lung", 2: "right_lung"}
    regions = (Region("both", ("left_lung", "right_lung")), Region("left", ("left_lung",)))
    task = replace(TASK, regions=regions)
    (facts,) = read_fingerprint([(case, values)], task).cases
    both, left, right = facts.regions["both"], facts.labels["left_lung"], facts.labels["right_lung"]
    assert facts.regions["left"] == left
    assert both.volume_ml == pytest.approx(left.volume_ml + right.volume_ml)
    # Along x the lungs lie beside each other.
    assert both.extent_mm[2] > max(left.extent_mm[2], right.extent_mm[2])
    assert both.extent_mm[0] >= max(left.extent_mm[0], right.extent_mm[0])
    (facts,) = read_fingerprint([(case, values)], TASK).cases
    assert facts.regions == {}


def test_a_missing_file_is_told_by_its_case(scan: Path, tmp_path: Path) -> None:
    (case,) = read_case_table(scan)
    missing = tmp_path / "ct.nii.gz"
    values: LabelValues = {1: "left_lung", 2: "right_lung"}
    for changed in (replace(case, image=missing), replace(case, labels=missing)):
        with pytest.raises(UserError, match=f"{case.name}: its file {missing} does not exist"):
            read_fingerprint([(changed, values)], TASK)
