"""Small data sets of each layout with one oddity: the closing table accounts for every case."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from copy import deepcopy as copy_of
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import SimpleITK
from layouts import (
    LEFT,
    RIGHT,
    blocks,
    make_dicom,
    make_luna16,
    make_msd,
    make_nnunet,
    make_pairs,
    make_slicer,
    make_totalsegmentator,
    save,
    write_json,
    write_layers,
)
from pydicom import dcmread

from medseg.data.importers.dataset import DataSet
from medseg.data.importers.formats import import_dataset
from medseg.data.reference import file_values, read_reference
from medseg.errors import UserError

CASES = ["chest_000", "chest_001", "chest_002"]
FOLDS = [{"train": CASES[1:], "val": CASES[:1]}, {"train": CASES[:1], "val": CASES[1:]}]


class Oddity(NamedTuple):
    """A data set with something too many, too few or twice.

    Attributes:
        make: Writes the data set.
        spoil: Adds the oddity.
        refused: Part of the sentence that refuses it; "" if it is accepted.
        line: Kind, fate, and parts of the name and of the reason of a line in the closing table.
        num_cases: Cases that are left.
    """

    make: Callable[[Path], Path]
    spoil: Callable[[Path], Any]
    refused: str = ""
    line: tuple[str, str, str, str] = ("", "", "", "")
    num_cases: int = 3


def change(path: Path, **values: Any) -> None:
    about = json.loads(path.read_text(encoding="utf-8")) | values
    write_json(path, {key: value for key, value in about.items() if value is not None})


def splits(folds: list[dict[str, list[str]]]) -> Callable[[Path], Any]:
    return lambda at: write_json(at / "splits_final.json", folds)


def describe(**values: Any) -> Callable[[Path], Any]:
    return lambda at: change(at / "dataset.json", **values)


def copy(source: str, target: str) -> Callable[[Path], Any]:
    def spoil(at: Path) -> None:
        (at / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(at / source, at / target)

    return spoil


def stray(name: str) -> Callable[[Path], Any]:
    def spoil(at: Path) -> None:
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        (at / name).write_text("a,b\n", encoding="utf-8")

    return spoil


def add(folder: str, source: int = 0, **entry: Any) -> Callable[[Path], Any]:
    """Add an entry to a list of a datalist, changed from that of a training case."""

    def spoil(at: Path) -> None:
        about = json.loads((at / "dataset.json").read_text(encoding="utf-8"))
        about.setdefault(folder, []).append({**about["training"][source], **entry})
        write_json(at / "dataset.json", about)

    return spoil


def first_version(at: Path) -> Path:
    make_nnunet(at)
    listed = [
        {"image": f"./imagesTr/{name}.nii.gz", "label": f"./labelsTr/{name}.nii.gz"}
        for name in CASES
    ]
    labels = {"0": "background", "1": "left_lung", "2": "right_lung"}
    change(
        at / "dataset.json",
        channel_names=None,
        modality={"0": "CT"},
        labels=labels,
        training=listed,
    )
    return at


def v1_list(*names: str) -> Callable[[Path], Any]:
    return describe(training=[{"image": f"./imagesTr/{name}.nii.gz"} for name in names])


def add_meta(*lines: str) -> Callable[[Path], Any]:
    def spoil(at: Path) -> None:
        with (at / "meta.csv").open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)

    return spoil


def segmentation(**fields: str | None) -> Callable[[Path], Any]:
    """Change fields of a segmentation of 3D Slicer; None removes one."""

    def spoil(at: Path) -> None:
        image = SimpleITK.ReadImage(str(at / "p1.seg.nrrd"))
        for key, value in fields.items():
            if value is None:
                image.EraseMetaData(key)
            else:
                image.SetMetaData(key, value)
        SimpleITK.WriteImage(image, str(at / "p1.seg.nrrd"), True)

    return spoil


def relabelled(values: np.ndarray, **fields: str) -> Callable[[Path], Any]:
    """Give the segments of a case other values, in the voxels and in the header."""

    def spoil(at: Path) -> None:
        source = SimpleITK.ReadImage(str(at / "p1.seg.nrrd"))
        image = SimpleITK.GetImageFromArray(values[SimpleITK.GetArrayFromImage(source)])
        image.CopyInformation(source)
        for key in source.GetMetaDataKeys():
            image.SetMetaData(key, source.GetMetaData(key))
        SimpleITK.WriteImage(image, str(at / "p1.seg.nrrd"), True)
        segmentation(**fields)(at)

    return spoil


def layered(at: Path) -> None:
    """Left and right in separate layers, both of value 1, as 3D Slicer stores overlapping ones."""
    for index in range(3):
        labels = blocks(index)[1]
        layers = [(labels == value).astype(np.uint8) for value in (LEFT, RIGHT)]
        write_layers(at / f"p{index}.seg.nrrd", layers, [("left lung", 1, 0), ("right lung", 1, 1)])


def masks_of_pairs(at: Path) -> Path:
    for index in range(3):
        image, labels = blocks(index)
        save(at / "images" / f"p{index}.nii.gz", image)
        for name, value in (("left_lung", LEFT), ("right_lung", RIGHT)):
            save(at / "labels" / f"p{index}" / f"{name}.nii.gz", (labels == value).astype(np.uint8))
    return at


def change_dicom(
    pattern: str, edit: Callable[[Any], Any], copy_to: str = ""
) -> Callable[[Path], Any]:
    """Edit the first DICOM file of a pattern, or a copy of it."""

    def spoil(at: Path) -> None:
        path = sorted(at.glob(pattern))[0]
        dataset = dcmread(path)
        edit(dataset)
        target = at / copy_to if copy_to else path
        target.parent.mkdir(parents=True, exist_ok=True)
        dataset.save_as(target)

    return spoil


def seg(at: Path) -> Path:
    return make_dicom(at, kind="SEG")


def rename_rois(*names: str) -> Callable[[Any], None]:
    def edit(dataset: Any) -> None:
        for item, name in zip(dataset.StructureSetROISequence, names, strict=True):
            item.ROIName = name

    return edit


def rename_segments(*names: str) -> Callable[[Any], None]:
    def edit(dataset: Any) -> None:
        for item, name in zip(dataset.SegmentSequence, names, strict=True):
            item.SegmentLabel = name

    return edit


def refer_elsewhere(dataset: Any) -> None:
    dataset.ReferencedSeriesSequence[0].SeriesInstanceUID = "1.2.3.4"


def repeat_roi(dataset: Any) -> None:
    for sequence, key in (
        (dataset.StructureSetROISequence, "ROINumber"),
        (dataset.ROIContourSequence, "ReferencedROINumber"),
    ):
        item = copy_of(sequence[1])
        setattr(item, key, 3)
        sequence.append(item)


def empty_contours(dataset: Any) -> None:
    del dataset.ROIContourSequence[0].ContourSequence


def only_points(dataset: Any) -> None:
    for contour in dataset.ROIContourSequence[0].ContourSequence:
        contour.ContourGeometricType = "POINT"
        contour.ContourData = list(contour.ContourData)[:3]
        contour.NumberOfContourPoints = 1


def drop_contour(dataset: Any) -> None:
    del dataset.ROIContourSequence[0].ContourSequence[-1]


RTSTRUCT = "LCTSC-Train-S1-001/*/*.2/1-1.dcm"
LOBE_OF_1 = "s0001/segmentations/lung_lower_lobe_left"
ODDITIES: dict[str, Oddity] = {
    # nnU-Net
    "fold names an unknown case": Oddity(
        make_nnunet,
        splits([{"train": CASES[1:], "val": ["chest_00"]}]),
        "names 'chest_00', which is no training case (did you",
    ),
    "fold names a test case": Oddity(
        make_nnunet,
        splits([{"train": CASES[1:], "val": ["chest_003"]}]),
        "val of fold 0 names 'chest_003', which is no training",
    ),
    "case on both sides": Oddity(
        make_nnunet,
        splits([{"train": CASES, "val": CASES[:1]}]),
        "names 'chest_000' in train and in val",
    ),
    "fold without train": Oddity(
        make_nnunet, splits([{"train": [], "val": CASES}]), "train of fold 0 is empty"
    ),
    "case in no fold": Oddity(
        make_nnunet,
        splits([{"train": CASES[1:2], "val": CASES[:1]}]),
        line=("case", "left out", "chest_002", "in no list of any fold"),
        num_cases=4,
    ),
    "case validated twice": Oddity(
        make_nnunet,
        splits([{"train": CASES[1:], "val": CASES[:1]}, {"train": CASES[1:], "val": CASES[:1]}]),
        line=("case", "used", "chest_000", "fold 0: val; fold 1: val"),
        num_cases=4,
    ),
    "case named twice in a list": Oddity(
        make_nnunet,
        splits([{"train": [*CASES[1:], CASES[1]], "val": CASES[:1]}]),
        line=("list", "merged", "chest_001 in train of fold 0", "counts once"),
        num_cases=4,
    ),
    "third list in a fold": Oddity(
        make_nnunet,
        splits([{"train": CASES[1:2], "val": CASES[:1], "test": CASES[2:]}]),
        line=("list", "left out", "test of fold 0", "train and val alone"),
        num_cases=4,
    ),
    "fold that validates nothing": Oddity(
        make_nnunet,
        splits([{"train": CASES, "val": []}]),
        line=("case", "used", "chest_001", "fold 0: train"),
        num_cases=4,
    ),
    "two different files of folds": Oddity(
        make_nnunet,
        lambda at: (
            splits(FOLDS)(at),
            write_json(
                at.parent.parent / "nnUNet_preprocessed" / at.name / "splits_final.json", FOLDS[:1]
            ),
        ),
        "hold different folds; remove the one that does not count",
    ),
    "folds in a pickle": Oddity(
        make_nnunet,
        stray("splits_final.pkl"),
        line=("file", "left out", "splits_final.pkl", "a pickle is not read"),
        num_cases=4,
    ),
    "hidden file beside the images": Oddity(
        make_nnunet,
        stray("imagesTr/._chest_000_0000.nii.gz"),
        line=("file", "left out", "imagesTr/._chest_000_0000.nii.gz", "no file of a case"),
        num_cases=4,
    ),
    "case in another format": Oddity(
        make_nnunet,
        copy("imagesTr/chest_000_0000.nii.gz", "imagesTr/chest_000_0000.nii"),
        line=(
            "file",
            "left out",
            "imagesTr/chest_000_0000.nii",
            "no file of a case that ends in .nii.gz",
        ),
        num_cases=4,
    ),
    "two endings of one file": Oddity(
        make_nnunet,
        copy("imagesTr/chest_000_0000.nii.gz", "imagesTr/chest_000_0000.NII.GZ"),
        "would both be 'chest_000_0000'; keep one",
    ),
    "case in upper and lower case": Oddity(
        make_nnunet,
        lambda at: (
            copy("imagesTr/chest_000_0000.nii.gz", "imagesTr/Chest_000_0000.nii.gz")(at),
            copy("labelsTr/chest_000.nii.gz", "labelsTr/Chest_000.nii.gz")(at),
        ),
        line=("case", "used", "Chest_000 and chest_000", "upper and lower case only"),
        num_cases=5,
    ),
    "test labels without an image": Oddity(
        make_nnunet,
        copy("labelsTr/chest_000.nii.gz", "labelsTs/chest_009.nii.gz"),
        line=("file", "left out", "labelsTs/chest_009.nii.gz", "labels without an image"),
        num_cases=4,
    ),
    "wrong number of cases": Oddity(
        make_nnunet,
        describe(numTraining=7),
        line=("key", "left out", "numTraining", "says 7, but there are 3"),
        num_cases=4,
    ),
    "two names of one value": Oddity(
        make_nnunet,
        describe(labels={"background": 0, "a": 1, "b": 2, "c": 2}),
        "the labels 'b' and 'c' have the same value 2",
    ),
    "value of the background in a region": Oddity(
        make_nnunet,
        describe(labels={"background": 0, "a": [0, 1], "b": 2}),
        "'a' has the value 0, which is the background",
    ),
    "second value of the background": Oddity(
        make_nnunet,
        describe(labels={"background": [0, 5], "a": 1, "b": 2}),
        line=("label", "left out", "background", "background"),
        num_cases=4,
    ),
    "regions that overlap": Oddity(
        make_nnunet,
        describe(labels={"background": 0, "lungs": [1, 2], "right_lung": 2}),
        line=("label", "merged", "lungs", "divided into lungs_rest, right_lung"),
        num_cases=4,
    ),
    "key twice": Oddity(
        make_nnunet,
        lambda at: (at / "dataset.json").write_text(
            '{"labels": {"a": 1, "a": 2}, "channel_names": {"0": "CT"}}'
        ),
        "the key 'a' appears twice",
    ),
    "unlisted case of nnU-Net 1": Oddity(
        first_version,
        v1_list(*CASES[:2]),
        line=(
            "case",
            "left out",
            "chest_002",
            "the list training of dataset.json does not name it",
        ),
    ),
    "listed case of nnU-Net 1 that is missing": Oddity(
        first_version, v1_list(*CASES, "chest_009"), "the list training names chest_009"
    ),
    # Decathlon and MONAI
    "unlisted file": Oddity(
        make_msd,
        copy("imagesTr/BRATS_000.nii.gz", "imagesTr/BRATS_009.nii.gz"),
        line=(
            "file",
            "left out",
            "imagesTr/BRATS_009.nii.gz",
            "nothing in the data set refers to it",
        ),
        num_cases=4,
    ),
    "listed file that is missing": Oddity(
        make_msd, add("training", image="imagesTr/x.nii.gz"), "x.nii.gz: there is no such file, but"
    ),
    "entry twice": Oddity(
        make_msd,
        add("training"),
        line=("list", "merged", "imagesTr/BRATS_000.nii.gz in training", "counts once"),
        num_cases=4,
    ),
    "entry in two lists": Oddity(
        make_msd, add("testing"), "is listed twice, in training and in testing"
    ),
    "unknown list": Oddity(
        make_msd,
        add("unlabelled", image="x"),
        line=("key", "left out", "unlabelled", "medseg does not read it"),
        num_cases=4,
    ),
    "test case in another list": Oddity(
        make_msd,
        add("validation", image="./imagesTr/../imagesTs/BRATS_003.nii.gz", weight=2),
        "imagesTs/BRATS_003.nii.gz is listed twice, in validation and in test",
    ),
    "two values of one name": Oddity(
        make_msd,
        describe(labels={"0": "background", "1": "lung", "2": "lung"}),
        line=("label", "used", "lung", "values 1, 2"),
        num_cases=4,
    ),
    "two test lists": Oddity(
        make_msd,
        describe(testing=[]),
        line=("list", "used", "testing", "has 0 entries"),
        num_cases=4,
    ),
    # TotalSegmentator
    "structure missing in a case": Oddity(
        make_totalsegmentator,
        lambda at: (at / "s0001/segmentations/lung_lower_lobe_left.nii.gz").unlink(),
        "s0001 (1 of 3 cases): the structure lung_lower_lobe_left (a part of left_lung) is missing",
    ),
    "structure of one case alone": Oddity(
        make_totalsegmentator,
        copy("s0001/segmentations/liver.nii.gz", "s0001/segmentations/tumour.nii.gz"),
        "s0000, s0002 (2 of 3 cases): the structure tumour is missing",
    ),
    "structure in two files": Oddity(
        make_totalsegmentator,
        copy("s0001/segmentations/liver.nii.gz", "s0001/segmentations/liver.nii"),
        "liver.nii and liver.nii.gz are masks of one structure",
    ),
    "case that the table lacks": Oddity(
        make_totalsegmentator,
        lambda at: shutil.copytree(at / "s0000", at / "s0009"),
        "meta.csv: expected the split of s0009, but found no row",
    ),
    "row without a case": Oddity(
        make_totalsegmentator,
        add_meta("s0009;1;train"),
        line=("row", "left out", "s0009", "there is no such case"),
    ),
    "row twice": Oddity(
        make_totalsegmentator,
        add_meta("s0000;1;train"),
        line=("row", "merged", "s0000", "counts once"),
    ),
    "two splits of a case": Oddity(
        make_totalsegmentator, add_meta("s0000;1;val"), "s0000 has the splits train and val"
    ),
    "two images of a case": Oddity(
        make_totalsegmentator,
        copy("s0000/ct.nii.gz", "s0000/ct.nii"),
        "expected one image, but found ct.nii and ct.nii.gz",
    ),
    "image without masks": Oddity(
        make_totalsegmentator,
        copy("s0000/ct.nii.gz", "s0009/ct.nii.gz"),
        "segmentations: expected masks such as liver.nii.gz",
    ),
    "lobe in another spelling": Oddity(
        make_totalsegmentator,
        lambda at: (at / f"{LOBE_OF_1}.nii.gz").rename(
            at / f"{LOBE_OF_1.replace('lung', 'Lung')}.nii.gz"
        ),
        line=("structure", "merged", "Lung_lower_lobe_left", "into left_lung, in 3 of 3 cases"),
    ),
    "table beside the masks": Oddity(
        make_totalsegmentator,
        stray("s0000/segmentations/notes.csv"),
        line=("file", "left out", "s0000/segmentations/notes.csv", "not an image"),
    ),
    # LUNA16
    "mask without a scan": Oddity(
        make_luna16,
        lambda at: shutil.rmtree(at / "subset1"),
        line=(
            "file",
            "left out",
            "seg-lungs-LUNA16/1.3.6.1.4.1.14519.5.2.1.6279.6001.2.mhd",
            "in none of the subsets",
        ),
        num_cases=2,
    ),
    "scan twice": Oddity(
        make_luna16,
        lambda at: shutil.copytree(at / "subset0", at / "subset2"),
        "have the same name; keep one of them",
    ),
    "subset without a number": Oddity(
        make_luna16,
        lambda at: (at / "subset1").rename(at / "subset_b"),
        "subset_b: expected folders subset0, subset1",
    ),
    "header in upper case": Oddity(
        make_luna16,
        lambda at: shutil.move(
            *(next(at.glob("subset0/*.0.mhd")).with_suffix(end) for end in (".mhd", ".MHD"))
        ),
        line=("case", "used", "6279.6001.0", "validated in fold 0"),
        num_cases=4,
    ),
    "header without its voxels": Oddity(
        make_luna16, lambda at: next(at.glob("subset0/*.?raw")).unlink(), "does not exist, but"
    ),
    "table of candidates": Oddity(
        make_luna16,
        stray("candidates.csv"),
        line=("file", "left out", "candidates.csv", "not an image"),
        num_cases=4,
    ),
    # DICOM
    "contours of another series": Oddity(
        seg,
        change_dicom("LCTSC-Train-S1-001/*/*.2/1-1.dcm", refer_elsewhere),
        line=("series", "left out", "1.2.826.1.1", "no labels refer to it"),
        num_cases=2,
    ),
    "two structures of one name": Oddity(
        make_dicom,
        change_dicom(RTSTRUCT, rename_rois("Lung_L", "Lung_L")),
        "LCTSC-Train-S1-001 (1 of 3 cases): the structure Lung_R is missing",
    ),
    "two segments of one name": Oddity(
        seg,
        change_dicom("LCTSC-Train-S1-001/*/*.2/1-1.dcm", rename_segments("Lung_R", "Lung_R")),
        "LCTSC-Train-S1-001 (1 of 3 cases): the structure Lung_L is missing",
    ),
    "third structure of a name": Oddity(
        make_dicom,
        change_dicom(RTSTRUCT, repeat_roi),
        line=("structure", "merged", "Lung_R = Lung_R of LCTSC-Train-S1-001", "are one structure"),
    ),
    "structure in another spelling": Oddity(
        make_dicom,
        change_dicom(RTSTRUCT, rename_rois("lung left", "Lung_R")),
        line=("structure", "merged", "lung left", "another spelling of Lung_L"),
    ),
    "structure without contours": Oddity(
        make_dicom,
        change_dicom(RTSTRUCT, empty_contours),
        line=("structure", "used", "Lung_L of LCTSC-Train-S1-001", "empty there"),
    ),
    "second file of labels": Oddity(
        make_dicom,
        change_dicom(
            RTSTRUCT, lambda dataset: setattr(dataset, "SOPInstanceUID", "1.2.9"), "second/1.dcm"
        ),
        "label the same series of LCTSC-Train-S1-001; which one counts is not said",
    ),
    "copy of the labels": Oddity(
        make_dicom,
        change_dicom(RTSTRUCT, lambda dataset: None, "second/1.dcm"),
        line=("file", "left out", "second/1.dcm", "a copy of LCTSC-Train-S1-001"),
    ),
    "corrected labels with the identity of the first": Oddity(
        make_dicom,
        change_dicom(RTSTRUCT, rename_rois("Lung_R", "Lung_L"), "second/1.dcm"),
        "label the same series of LCTSC-Train-S1-001; which one counts is not said",
    ),
    "moved contours with the identity of the first": Oddity(
        make_dicom,
        change_dicom(RTSTRUCT, drop_contour, "second/1.dcm"),
        "label the same series of LCTSC-Train-S1-001; which one counts is not said",
    ),
    "structure of points": Oddity(
        make_dicom,
        change_dicom(RTSTRUCT, only_points),
        line=(
            "structure",
            "used",
            "Lung_L of LCTSC-Train-S1-001",
            "empty there: nothing is enclosed",
        ),
    ),
    "object that is no image": Oddity(
        make_dicom,
        change_dicom("*/*/*.1/*", lambda dataset: setattr(dataset, "Modality", "SR"), "report.dcm"),
        line=("file", "left out", "report.dcm", "DICOM without an image (SR)"),
    ),
    "table beside the series": Oddity(
        make_dicom, stray("clinical.csv"), line=("file", "left out", "clinical.csv", "not an image")
    ),
    # 3D Slicer
    "segments in layers": Oddity(
        make_slicer,
        layered,
        line=(
            "structure",
            "merged",
            "",
            "where labels overlap, the last of left_lung, right_lung counts",
        ),
    ),
    "values in another order": Oddity(
        make_slicer,
        segmentation(Segment0_Name="right lung", Segment1_Name="left lung"),
        line=("structure", "used", "left lung", "in 3 of 3 cases"),
    ),
    "segment missing in a case": Oddity(
        make_slicer,
        segmentation(Segment1_Name=None, Segment1_ID=None, Segment1_LabelValue=None),
        "p1 (1 of 3 cases): the structure right_lung (value 2) is missing",
    ),
    "segment without a name": Oddity(
        make_slicer,
        segmentation(Segment1_Name=None),
        "(2 of 3 cases): the structure Segment",
    ),
    "two segments of one value": Oddity(
        make_slicer,
        segmentation(Segment1_LabelValue="1"),
        "the segments 'left lung' and 'right lung' share the value 1",
    ),
    "segment without a value": Oddity(
        make_slicer,
        segmentation(Segment1_LabelValue=None),
        "expected a value from 1 and a layer of the segment 'right lung'",
    ),
    "other value of a segment in a case": Oddity(
        make_slicer,
        relabelled(np.array([0, LEFT, 3], np.uint8), Segment1_LabelValue="3"),
        line=("structure", "used", "right lung", "in 3 of 3 cases"),
    ),
    "segment twice in a case": Oddity(
        make_slicer,
        segmentation(Segment2_Name="right lung", Segment2_LabelValue="3"),
        line=("structure", "merged", "right lung = right lung of p1", "are one structure"),
    ),
    "scene file": Oddity(
        make_slicer, stray("scene.mrml"), line=("file", "left out", "scene.mrml", "not an image")
    ),
    "volume without a segmentation": Oddity(
        make_slicer, copy("p0.nrrd", "p9.nrrd"), "no labels for p9"
    ),
    # Folders of images and labels
    "two folders of labels": Oddity(
        make_pairs,
        lambda at: shutil.copytree(at / "labels", at / "masks"),
        "images with labels and images with masks",
    ),
    "image without labels": Oddity(
        make_pairs, copy("images/p0.nrrd", "images/p9.nrrd"), "labels: no labels for p9"
    ),
    "image in two formats": Oddity(
        make_pairs, copy("images/p0.nrrd", "images/p0.mha"), "would both be called 'p0'"
    ),
    "labels of two kinds": Oddity(
        masks_of_pairs,
        lambda at: (shutil.rmtree(at / "labels/p1"), save(at / "labels/p1.nii.gz", blocks(1)[1])),
        (
            "expected labels of one kind, but found folders of masks (p0 and 1 more) and label "
            "maps (p1.nii.gz)"
        ),
    ),
    "mask missing in a case": Oddity(
        masks_of_pairs,
        lambda at: (at / "labels/p1/left_lung.nii.gz").unlink(),
        "p1 (1 of 3 cases): the structure left_lung is missing",
    ),
    "notes": Oddity(
        make_pairs, stray("README.txt"), line=("file", "left out", "README.txt", "not an image")
    ),
    "system file": Oddity(
        make_pairs,
        stray("images/.DS_Store"),
        line=("file", "left out", "images/.DS_Store", "hidden file"),
    ),
}


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Callable[[Path], Path], Path], Path]:
    """Copies a data set that is made once: writing DICOM takes a second."""
    folders: dict[Callable[[Path], Path], Path] = {}

    def take(make: Callable[[Path], Path], target: Path) -> Path:
        if make not in folders:
            folders[make] = make(tmp_path_factory.mktemp("made"))
        return Path(shutil.copytree(folders[make], target))

    return take


@pytest.mark.parametrize("name", ODDITIES)
def test_nothing_is_lost_or_added_without_a_line(
    tmp_path: Path, made: Callable[..., Path], name: str
) -> None:
    oddity = ODDITIES[name]
    # nnU-Net keeps its preprocessed data beside the folder of all raw data sets.
    folder = made(oddity.make, tmp_path / "raw" / "data")
    oddity.spoil(folder)
    if oddity.refused:
        with pytest.raises(UserError) as error:
            import_dataset(folder).require_structures()
        assert oddity.refused in str(error.value)
        return
    data = import_dataset(folder)
    data.require_structures()
    assert len(data.cases) == oddity.num_cases
    assert_line(data, oddity.line)
    assert_all_files(data, folder)


def assert_line(data: DataSet, line: tuple[str, str, str, str]) -> None:
    kind, fate, name, why = line
    items = [item for item in data.closing_items() if (item.kind, item.fate) == (kind, fate)]
    assert any(name in item.name and why in item.why for item in items), items


def assert_all_files(data: DataSet, folder: Path) -> None:
    """Each file below the folder is either read for a case, or has a line."""
    num_files = sum(len(files) for _, _, files in os.walk(folder))
    items = [item for item in data.closing_items() if item.kind == "file"]
    assert sum(item.number for item in items) == num_files


@pytest.mark.parametrize(
    "make",
    [make_nnunet, make_totalsegmentator, make_luna16, make_dicom, seg, make_slicer, make_pairs],
)
@pytest.mark.parametrize("index", [0, 1])
def test_a_data_set_without_oddities_keeps_all_voxels_and_files(
    tmp_path: Path,
    made: Callable[..., Path],
    make: Callable[[Path], Path],
    index: int,
) -> None:
    data = import_dataset(made(make, tmp_path / "data"))
    assert_all_files(data, tmp_path / "data")
    assert_voxels(data, index)


@pytest.mark.parametrize("spoil", ["segments in layers", "values in another order"])
def test_segments_are_found_in_layers_and_by_name(tmp_path: Path, spoil: str) -> None:
    folder = make_slicer(tmp_path / "data")
    ODDITIES[spoil].spoil(folder)
    data = import_dataset(folder)
    assert_voxels(data, 0)
    if spoil == "segments in layers":
        assert_voxels(data, 1)
        return
    case = data.cases[1]
    assert case.labels is not None
    volume, names = read_reference(case.labels, file_values(data.task()["data"]["label_values"]))
    values = {name: value for value, name in names.items()}
    assert np.array_equal(volume.array == values["left_lung"], blocks(1)[1] == RIGHT)


@pytest.mark.parametrize("index", [0, 1])
def test_segments_of_other_values_keep_their_voxels(tmp_path: Path, index: int) -> None:
    folder = make_slicer(tmp_path / "data")
    ODDITIES["other value of a segment in a case"].spoil(folder)
    data = import_dataset(folder)
    assert list(data.labels) == ["left_lung", "right_lung"]
    assert_voxels(data, index)


@pytest.mark.parametrize("whole", ["lung_left", "left_lung"])
def test_a_whole_organ_beside_its_lobes_is_the_same_label(tmp_path: Path, whole: str) -> None:
    folder = make_totalsegmentator(tmp_path)
    for index in range(3):
        for name, value in ((whole, LEFT), ("lung_right", RIGHT)):
            mask = (blocks(index)[1] == value).astype(np.uint8)
            save(folder / f"s{index:04d}" / "segmentations" / f"{name}.nii.gz", mask)
    data = import_dataset(folder)
    assert sorted(data.labels) == ["left_lung", "liver", "right_lung"]
    assert_line(data, ("structure", "merged", whole, "into left_lung, in 3 of 3 cases"))
    assert_voxels(data, 1)


def test_a_lobe_in_another_spelling_makes_no_label_of_its_own(tmp_path: Path) -> None:
    folder = make_totalsegmentator(tmp_path)
    ODDITIES["lobe in another spelling"].spoil(folder)
    data = import_dataset(folder)
    assert sorted(data.labels) == ["left_lung", "liver", "right_lung"]
    assert_voxels(data, 1)


def assert_voxels(data: DataSet, index: int) -> None:
    """The labels of a case are those it was made of; labels other than lungs are empty."""
    case = data.cases[index]
    assert case.labels is not None
    values = file_values(data.task()["data"]["label_values"])
    volume, names = read_reference(case.labels, values, case.image, case.series)
    expected = blocks(index)[1]
    sides = {"left_lung": LEFT, "right_lung": RIGHT, "label_1": LEFT, "label_2": RIGHT}
    for value, name in names.items():
        if name in sides:
            assert np.array_equal(volume.array == value, expected == sides[name])


def test_a_structure_that_is_stated_as_absent_is_marked_and_told(tmp_path: Path) -> None:
    folder = masks_of_pairs(tmp_path)
    (folder / "labels/p1/left_lung.nii.gz").unlink()
    data = import_dataset(folder).state_absence()
    assert [case.trust for case in data.cases] == [{}, {"left_lung": "absent"}, {}]
    assert_line(
        data, ("structure", "used", "left_lung", "in 2 of 3 cases, stated as absent in the others")
    )


def test_labels_that_are_not_kept_have_a_line(tmp_path: Path) -> None:
    data = import_dataset(make_totalsegmentator(tmp_path)).keep(["left_lung"])
    assert_line(data, ("label", "left out", "liver", "no label of the task: background"))
    assert_line(
        data, ("structure", "merged", "lung_upper_lobe_left", "into left_lung, in 3 of 3 cases")
    )
    with pytest.raises(UserError, match="labels: 3 would be a and b"):
        import_dataset(make_luna16(tmp_path / "luna")).keep({"a": [3], "b": ["left_lung"]})
