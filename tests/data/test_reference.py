"""References from label maps and from folders of binary masks."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from dicom_files import save_grid
from layouts import (
    LEFT,
    RIGHT,
    SPACING_MM,
    blocks,
    make_dicom,
    make_totalsegmentator,
    save,
    write_layers,
)
from pydicom import dcmread

from medseg.data.reference import read_reference
from medseg.data.source_files import files_in_role, files_of, fingerprint, is_same_source
from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.io import volume
from medseg.io.read import read_layer
from medseg.task import IGNORE, LabelValues
from tests.io.io_volumes import finding_texts

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
    assert finding_texts(volume) == ()


def test_a_label_without_structures_has_the_mask_of_its_name_and_a_missing_one_is_absent(
    tmp_path: Path,
) -> None:
    labels = blocks()[1]
    save(tmp_path / "Lung L.nii.gz", (labels == LEFT).astype(np.uint8) * 255)
    volume, values = read_reference(tmp_path, {1: "left_lung", 2: "right_lung"})
    assert values == {1: "left_lung", 2: "right_lung"}
    assert np.array_equal(volume.array == 1, labels == LEFT)
    assert set(np.unique(volume.array)) == {0, 1}
    assert finding_texts(volume) == ("right_lung: no such structure, taken as absent",)
    # The value of ignored voxels is always among `data.label_values` where the task has one.
    volume, _ = read_reference(tmp_path, {1: "left_lung", 255: IGNORE})
    assert finding_texts(volume) == ()


def test_overlapping_masks_count_for_the_last_label(tmp_path: Path) -> None:
    labels = blocks()[1]
    save(tmp_path / "body.nii.gz", np.ones_like(labels))
    save(tmp_path / "left.nii.gz", (labels == LEFT).astype(np.uint8))
    volume, _ = read_reference(tmp_path, {"body": "body", "left": "left"})
    assert Counter(volume.array.ravel().tolist()) == {
        1: int((labels != LEFT).sum()),
        2: int((labels == LEFT).sum()),
    }
    assert finding_texts(volume) == (
        (
            f"{(labels == LEFT).sum()} voxels belong to several labels and count for the last one "
            "of data.label_values"
        ),
    )


def test_the_findings_of_all_masks_are_kept_once(tmp_path: Path) -> None:
    names = ("body", "left", "right")
    for name in names:
        path = save(tmp_path / f"{name}.nii.gz", blocks()[1] // 2)
        if name != "body":
            mask = nib.load(path)
            # The sform that counts stays; the qform now disagrees with it by one voxel along x.
            affine = mask.affine.copy()
            affine[0, 3] += SPACING_MM[2]
            mask.header.set_sform(mask.affine, code=1)
            mask.header.set_qform(affine, code=1)
            nib.Nifti1Image(np.asanyarray(mask.dataobj), None, mask.header).to_filename(path)
    volume, _ = read_reference(tmp_path, dict.fromkeys(names, "label"))
    sentence = "the sform and the qform of the header disagree by up to 1 voxels"
    assert [text for text in finding_texts(volume) if text.startswith(sentence)] == [
        f"{sentence}: the sform is used, as ITK does"
    ]


def test_structures_of_one_label_may_overlap(tmp_path: Path) -> None:
    labels = blocks()[1]
    for name in ("upper", "lower"):
        save(tmp_path / f"{name}.nii.gz", (labels == LEFT).astype(np.uint8))
    volume, _ = read_reference(tmp_path, {"upper": "left_lung", "lower": "left_lung"})
    assert np.array_equal(volume.array == 1, labels == LEFT)
    assert finding_texts(volume) == ()


def test_a_label_map_keeps_its_values(tmp_path: Path) -> None:
    path = save(tmp_path / "a.nii.gz", blocks()[1])
    volume, values = read_reference(
        path, {LEFT: "left_lung", RIGHT: "right_lung", "other": "heart"}
    )
    assert values == {1: "left_lung", 2: "right_lung"}
    assert np.array_equal(volume.array, blocks()[1])


def test_masks_that_fit_nothing_have_their_sentences(tmp_path: Path) -> None:
    labels = blocks()[1]
    save(tmp_path / "a" / "left_lung.nii.gz", labels)
    with pytest.raises(
        UserError, match="expected a mask of one value, but that of left_lung holds several"
    ):
        read_reference(tmp_path / "a", {1: "left_lung"})
    with pytest.raises(
        UserError,
        match="expected a structure named spleen, but it holds left_lung; name the structures",
    ):
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


def test_a_change_of_a_mask_beside_dicom_files_is_seen(tmp_path: Path) -> None:
    """`read_reference` reads the masks, not the series in a folder below."""
    folder = make_totalsegmentator(tmp_path) / "s0000" / "segmentations"
    (folder / "series").mkdir()
    (folder / "series" / "1.dcm").write_bytes(bytes(128) + b"DICM")
    known = fingerprint(folder, files_in_role("labels", folder))
    save(folder / "liver.nii.gz", np.ones_like(blocks()[1]))
    assert not is_same_source(folder, known, files_in_role("labels", folder))
    assert [file.name for file in files_in_role("image", folder)] == ["1.dcm"]


def test_another_name_of_a_mask_is_a_change(tmp_path: Path) -> None:
    folder = make_totalsegmentator(tmp_path) / "s0000" / "segmentations"
    known = fingerprint(folder)
    masks = sorted(folder.iterdir())
    # Still the first of the folder, with the same content and time.
    masks[0].rename(masks[0].with_name(f"a_{masks[0].name}"))
    assert not is_same_source(folder, known), "the name of a mask is that of its structure"


def test_a_structure_that_the_task_does_not_keep_takes_no_voxel(tmp_path: Path) -> None:
    """A tumour inside the right lung, in each kind of file; the option `labels` leaves it out."""
    labels = blocks()[1]
    tumour = np.zeros_like(labels)
    tumour[6:9, 8:12, 6:9] = 1
    structures = {"left_lung": labels == LEFT, "right_lung": labels == RIGHT, "tumour": tumour == 1}
    for name, mask in structures.items():
        save(tmp_path / "masks" / f"{name}.nii.gz", mask.astype(np.uint8))
    layers = [labels, tumour]
    segments = [("left lung", LEFT, 0), ("right lung", RIGHT, 0), ("tumour", 1, 1)]
    write_layers(tmp_path / "a.seg.nrrd", layers, segments)
    series = add_tumour(make_dicom(tmp_path / "rtstruct"))
    frames = add_tumour(make_dicom(tmp_path / "seg", kind="SEG"))
    values: LabelValues = {name: name for name in structures}
    files = [
        (tmp_path / "masks", None),
        (tmp_path / "a.seg.nrrd", None),
        (series / "1.2.826.0.2" / "1-1.dcm", series / "1.2.826.0.1"),
        (frames / "1.2.826.0.2" / "1-1.dcm", frames / "1.2.826.0.1"),
    ]
    for path, image in files:
        volume, names = read_reference(path, values, image, kept=["left_lung", "right_lung"])
        assert names == {1: "left_lung", 2: "right_lung"}, path
        assert np.array_equal(volume.array, labels), path
        assert finding_texts(volume) == (), path
        all_of_them, _ = read_reference(path, values, image)
        assert np.count_nonzero(all_of_them.array == 3) > 0, path
        assert np.count_nonzero(all_of_them.array == 2) < np.count_nonzero(labels == RIGHT), path


def test_layers_are_read_whatever_the_chunks_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk may end within a voxel of three layers: 1000 is no multiple of 3."""
    monkeypatch.setattr(volume, "SLAB_BYTES", 1000)
    labels = blocks()[1]
    layers = [labels, (labels == LEFT).astype(np.uint8), (labels == RIGHT).astype(np.uint8)]
    write_layers(
        tmp_path / "a.seg.nrrd", layers, [("left", LEFT, 0), ("left again", 1, 1), ("right", 1, 2)]
    )
    for number, layer in enumerate(layers):
        assert np.array_equal(read_layer(tmp_path / "a.seg.nrrd", number).array, layer)


def test_values_of_a_file_of_3d_slicer_need_names_only_where_it_has_layers(
    tmp_path: Path,
) -> None:
    """In one layer a value is one segment; in several, it may stand for two."""
    labels = blocks()[1]
    values: LabelValues = {LEFT: "left_lung", RIGHT: "right_lung"}
    segments = [("left_lung", LEFT, 0), ("right_lung", RIGHT, 0)]
    flat = save(tmp_path / "flat.seg.nrrd", labels)
    volume, names = read_reference(flat, values)
    assert (names, np.array_equal(volume.array, labels)) == (
        {1: "left_lung", 2: "right_lung"},
        True,
    )
    # Made in the other order, the segments have exchanged values; their names count.
    other = tmp_path / "other.seg.nrrd"
    write_layers(other, [labels], [("Lung_R", LEFT, 0), ("Lung_L", RIGHT, 0)])
    with pytest.raises(UserError, match="'Lung_R' has the value 1, which is left_lung in data"):
        read_reference(other, values)
    by_name: LabelValues = {"Lung_L": "left_lung", "Lung_R": "right_lung"}
    assert np.array_equal(read_reference(other, by_name)[0].array == 1, labels == RIGHT)
    # The second layer holds one segment more, of a value of the first.
    tumour = np.zeros_like(labels)
    tumour[6:9, 8:12, 6:9] = 1
    path = tmp_path / "layers.seg.nrrd"
    write_layers(path, [labels, tumour], [*segments, ("tumour", 1, 1)])
    volume, names = read_reference(path, values)
    assert names == {1: "left_lung", 2: "right_lung"}
    assert np.array_equal(volume.array, labels)


def test_the_files_of_a_dicom_series_are_those_of_its_folder_alone(tmp_path: Path) -> None:
    series = tmp_path / "series"
    save_grid(series, np.zeros((4, 6, 8), np.int16), VoxelGrid((4, 6, 8), SPACING_MM))
    slices = sorted(series.iterdir())
    older = series / "older"
    older.mkdir()
    (older / "copy.dcm").write_bytes(slices[0].read_bytes())
    assert sorted(files_of(slices[3])) == slices
    # A folder stands for all that it holds.
    assert sorted(files_of(series)) == sorted([*slices, older / "copy.dcm"])


def add_tumour(folder: Path) -> Path:
    """Add a structure to the first patient, on voxels of the right lung; returns the study."""
    study = folder / "LCTSC-Train-S1-000" / "1.2.826.0"
    path = study / "1.2.826.0.2" / "1-1.dcm"
    dataset = dcmread(path)
    if "StructureSetROISequence" in dataset:
        for sequence, key in (
            ("StructureSetROISequence", "ROINumber"),
            ("ROIContourSequence", "ReferencedROINumber"),
        ):
            items = dataset[sequence].value
            added = copy.deepcopy(items[1])
            setattr(added, key, 3)
            items.append(added)
        dataset.StructureSetROISequence[2].ROIName = "tumour"
        dataset.save_as(path)
        return study
    segment = copy.deepcopy(dataset.SegmentSequence[1])
    segment.SegmentNumber, segment.SegmentLabel = 3, "tumour"
    dataset.SegmentSequence.append(segment)
    groups = dataset.PerFrameFunctionalGroupsSequence
    frame_bytes = dataset.Rows * dataset.Columns // 8
    own = [
        n
        for n, group in enumerate(groups)
        if group.SegmentIdentificationSequence[0].ReferencedSegmentNumber == 2
    ]
    pixels = dataset.PixelData[: len(groups) * frame_bytes]
    for number in own:
        group = copy.deepcopy(groups[number])
        group.SegmentIdentificationSequence[0].ReferencedSegmentNumber = 3
        groups.append(group)
        pixels += pixels[number * frame_bytes : (number + 1) * frame_bytes]
    dataset.NumberOfFrames, dataset.PixelData = len(groups), pixels + b"\0" * (len(pixels) % 2)
    dataset.save_as(path)
    return study


def test_two_masks_of_one_name_are_refused(tmp_path: Path) -> None:
    for ending in (".nii.gz", ".nrrd"):
        save(tmp_path / f"left_lung{ending}", (blocks()[1] == LEFT).astype(np.uint8))
    with pytest.raises(
        UserError, match=r"left_lung.nii.gz and left_lung.nrrd are masks of one structure; keep one"
    ):
        read_reference(tmp_path, {1: "left_lung"})
