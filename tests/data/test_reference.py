"""References from label maps and from folders of binary masks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from layouts import LEFT, RIGHT, blocks, make_totalsegmentator, save

from medseg.data.reference import read_reference
from medseg.data.source_files import fingerprint, is_same_source
from medseg.data.task import LabelValues
from medseg.errors import UserError

LOBES: LabelValues = {
    "lung_upper_lobe_left": "left_lung",
    "lung_lower_lobe_left": "left_lung",
    "LUNG_upper_lobe_right": "right_lung",
    "lung_lower_lobe_right": "right_lung",
}


def test_masks_are_merged_to_the_label_map_that_they_were_cut_from(tmp_path: Path) -> None:
    folder = make_totalsegmentator(tmp_path) / "s0001" / "segmentations"
    volume, values = read_reference(folder, LOBES)
    assert values == {1: "left_lung", 2: "right_lung"}
    assert np.array_equal(volume.array, blocks(1)[1])
    assert volume.remarks == ()


def test_a_label_without_structures_has_the_mask_of_its_name_and_a_missing_one_is_absent(tmp_path: Path) -> None:
    labels = blocks()[1]
    save(tmp_path / "Lung L.nii.gz", (labels == LEFT).astype(np.uint8) * 255)
    volume, values = read_reference(tmp_path, {1: "left_lung", 2: "right_lung"})
    assert values == {1: "left_lung", 2: "right_lung"}
    assert np.array_equal(volume.array == 1, labels == LEFT)
    assert set(np.unique(volume.array)) == {0, 1}
    assert volume.remarks == ("right_lung: no such structure, taken as absent",)


def test_overlapping_masks_count_for_the_last_label(tmp_path: Path) -> None:
    labels = blocks()[1]
    save(tmp_path / "body.nii.gz", np.ones_like(labels))
    save(tmp_path / "left.nii.gz", (labels == LEFT).astype(np.uint8))
    volume, _ = read_reference(tmp_path, {"body": "body", "left": "left"})
    assert Counter(volume.array.ravel().tolist()) == {1: int((labels != LEFT).sum()), 2: int((labels == LEFT).sum())}
    assert volume.remarks == (
        f"{(labels == LEFT).sum()} voxels belong to several labels and count for the last one of data.label_values",
    )


def test_a_label_map_keeps_its_values(tmp_path: Path) -> None:
    path = save(tmp_path / "a.nii.gz", blocks()[1])
    volume, values = read_reference(path, {LEFT: "left_lung", RIGHT: "right_lung", "other": "heart"})
    assert values == {1: "left_lung", 2: "right_lung"}
    assert np.array_equal(volume.array, blocks()[1])


def test_masks_that_fit_nothing_have_their_sentences(tmp_path: Path) -> None:
    labels = blocks()[1]
    save(tmp_path / "a" / "left_lung.nii.gz", labels)
    with pytest.raises(UserError, match="expected a mask of one value, but that of left_lung holds several"):
        read_reference(tmp_path / "a", {1: "left_lung"})
    with pytest.raises(UserError, match="expected a structure named spleen, but it holds left_lung; name the structures"):
        read_reference(tmp_path / "a", {1: "spleen"})
    save(tmp_path / "b" / "left_lung.nii.gz", (labels == LEFT).astype(np.uint8))
    save(tmp_path / "b" / "right_lung.nii.gz", np.zeros((3, 4, 5), np.uint8))
    with pytest.raises(UserError, match="the mask of right_lung has another grid than the first"):
        read_reference(tmp_path / "b", {1: "left_lung", 2: "right_lung"})


def test_a_change_of_any_mask_is_seen(tmp_path: Path) -> None:
    folder = make_totalsegmentator(tmp_path) / "s0000" / "segmentations"
    known = fingerprint(folder)
    assert is_same_source(folder, known)
    save(folder / "liver.nii.gz", np.ones_like(blocks()[1]))
    assert not is_same_source(folder, known)
