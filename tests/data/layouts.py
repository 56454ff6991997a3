"""Small data sets in layouts of other programs: two blocks of air, the patient's left and right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import SimpleITK
from dicom_files import save_grid

from medseg.geometry.grid import VoxelGrid
from medseg.io.dicom.read import open_slices
from medseg.io.dicom.segmentation import write_segmentation
from medseg.io.dicom.structure_set import write_structure_set
from medseg.io.dicom.structures import Structure

SIZE = (14, 24, 28)
SPACING_MM = (6.0, 4.0, 4.5)
LEFT, RIGHT = 1, 2


def blocks(index: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Image in HU and labels (D, H, W) in LPS order; denser to the left, so that sides differ."""
    labels = np.zeros((SIZE[0] + index, SIZE[1], SIZE[2] + index), np.uint8)
    labels[3:-3, 6:18, 16:24] = LEFT
    labels[4:-3, 6:17, 4:12] = RIGHT
    body = np.broadcast_to(np.linspace(-100, 250, labels.shape[2]), labels.shape)
    noise = np.random.default_rng(index).normal(0, 20, labels.shape)
    return (np.where(labels > 0, -850, body) + noise).astype(np.int16), labels


def save(path: Path, *arrays: np.ndarray) -> Path:
    """Write a volume with SimpleITK, or several as the volumes of a 4D NIfTI with nibabel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if len(arrays) > 1:
        affine = np.diag([-SPACING_MM[2], -SPACING_MM[1], SPACING_MM[0], 1.0])
        nib.Nifti1Image(np.stack([array.T for array in arrays], axis=-1), affine).to_filename(path)
        return path
    image = SimpleITK.GetImageFromArray(arrays[0])
    image.SetSpacing(SPACING_MM[::-1])
    SimpleITK.WriteImage(image, str(path), True)
    return path


def write_json(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def make_nnunet(
    folder: Path,
    channels: Sequence[str] = ("CT",),
    labels: dict[str, Any] | None = None,
    **more: Any,
) -> Path:
    """Three training cases and a test case."""
    for index in range(4):
        image, labels_map = blocks(index)
        place = "imagesTs" if index == 3 else "imagesTr"
        for number in range(len(channels)):
            save(
                folder / place / f"chest_{index:03d}_{number:04d}.nii.gz", image + np.int16(number)
            )
        if index < 3:
            save(folder / "labelsTr" / f"chest_{index:03d}.nii.gz", labels_map)
    about = {
        "channel_names": {str(number): name for number, name in enumerate(channels)},
        "labels": labels or {"background": 0, "left_lung": LEFT, "right_lung": RIGHT},
        "numTraining": 3,
        "file_ending": ".nii.gz",
    }
    write_json(folder / "dataset.json", {**about, **more})
    return folder


def make_msd(folder: Path, **more: Any) -> Path:
    """Three training cases of two MR channels in 4D files, and a test case."""
    for index in range(4):
        image, labels = blocks(index)
        place = "imagesTs" if index == 3 else "imagesTr"
        save(
            folder / place / f"BRATS_{index:03d}.nii.gz",
            image + np.int16(1000),
            image // 2 + np.int16(2000),
        )
        if index < 3:
            save(folder / "labelsTr" / f"BRATS_{index:03d}.nii.gz", labels)
    about = {
        "name": "BRATS",
        "tensorImageSize": "4D",
        "modality": {"0": "FLAIR", "1": "T1w"},
        "labels": {"0": "background", "1": "edema", "2": "non-enhancing tumor"},
        "numTraining": 3,
        "training": [
            {
                "image": f"./imagesTr/BRATS_{n:03d}.nii.gz",
                "label": f"./labelsTr/BRATS_{n:03d}.nii.gz",
            }
            for n in range(3)
        ],
        "test": ["./imagesTs/BRATS_003.nii.gz"],
    }
    write_json(folder / "dataset.json", {**about, **more})
    return folder


def make_totalsegmentator(folder: Path) -> Path:
    """Three cases with the five lobes and a liver that is empty, and the table of the split."""
    lines = ["image_id;age;split"]
    for index, split in enumerate(("train", "train", "val")):
        image, labels = blocks(index)
        case = folder / f"s{index:04d}"
        save(case / "ct.nii.gz", image)
        upper = np.arange(labels.shape[0])[:, None, None] >= 8
        masks = {
            "lung_upper_lobe_left": (labels == LEFT) & upper,
            "lung_lower_lobe_left": (labels == LEFT) & ~upper,
            "lung_upper_lobe_right": (labels == RIGHT) & upper,
            "lung_lower_lobe_right": (labels == RIGHT) & ~upper,
            "liver": labels > RIGHT,
        }
        for name, mask in masks.items():
            save(case / "segmentations" / f"{name}.nii.gz", mask.astype(np.uint8))
        lines.append(f"s{index:04d};50;{split}")
    (folder / "meta.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def make_luna16(folder: Path) -> Path:
    """Two subsets of two scans; the masks hold 3 (left lung), 4 (right lung) and 5 (trachea)."""
    for index in range(4):
        image, labels = blocks(index)
        values = np.array([0, 3, 4], np.uint8)[labels]
        values[-2:, 10:12, 13:15] = 5
        name = f"1.3.6.1.4.1.14519.5.2.1.6279.6001.{index}.mhd"
        save(folder / f"subset{index // 2}" / name, image)
        save(folder / "seg-lungs-LUNA16" / name, values)
    return folder


def make_pairs(folder: Path) -> Path:
    """Three images with label maps of the same names."""
    for index in range(3):
        image, labels = blocks(index)
        save(folder / "images" / f"p{index}.nrrd", image)
        save(folder / "labels" / f"p{index}.nrrd", labels)
    return folder


def make_dicom(
    folder: Path, names: Sequence[str] = ("Lung_L", "Lung_R"), kind: str = "RTSTRUCT"
) -> Path:
    """Three patients as in LCTSC: a CT series and an RTSTRUCT (or SEG) each, in UID folders."""
    for index in range(3):
        image, labels = blocks(index)
        patient, study = f"LCTSC-Train-S1-{index:03d}", f"1.2.826.{index}"
        fields = {
            "uid": f"{study}.1", "PatientID": patient, "StudyInstanceUID": study,
            "FrameOfReferenceUID": f"{study}.9",
            "PatientPosition": "HFS",
        }  # fmt: skip
        grid = VoxelGrid(image.shape, SPACING_MM, (-60.0, -50.0, -300.0))
        save_grid(folder / patient / study / f"{study}.1", image, grid, **fields)
        slices = open_slices(folder / patient / study / f"{study}.1")
        structures = [Structure(name, value) for value, name in enumerate(names, start=1)]
        write = write_structure_set if kind == "RTSTRUCT" else write_segmentation
        write(folder / patient / study / f"{study}.2" / "1-1.dcm", labels, slices, structures)
    return folder


def make_slicer(folder: Path) -> Path:
    """Three volumes that 3D Slicer has saved with their segmentations beside them."""
    for index in range(3):
        image, labels = blocks(index)
        save(folder / f"p{index}.nrrd", image)
        segmentation = SimpleITK.GetImageFromArray(labels)
        segmentation.SetSpacing(SPACING_MM[::-1])
        for number, name in enumerate(("left lung", "right lung")):
            segmentation.SetMetaData(f"Segment{number}_Name", name)
            segmentation.SetMetaData(f"Segment{number}_LabelValue", str(number + 1))
            segmentation.SetMetaData(f"Segment{number}_Layer", "0")
        SimpleITK.WriteImage(segmentation, str(folder / f"p{index}.seg.nrrd"), True)
    return folder


def write_layers(
    path: Path, layers: list[np.ndarray], segments: list[tuple[str, int, int]]
) -> None:
    """Write a segmentation with layers as 3D Slicer does: name, value and layer of each segment."""
    image = SimpleITK.GetImageFromArray(np.stack(layers, axis=-1), isVector=True)
    image.SetSpacing(SPACING_MM[::-1])
    for number, (name, value, layer) in enumerate(segments):
        image.SetMetaData(f"Segment{number}_Name", name)
        image.SetMetaData(f"Segment{number}_LabelValue", str(value))
        image.SetMetaData(f"Segment{number}_Layer", str(layer))
    SimpleITK.WriteImage(image, str(path), True)


MAKERS = {
    "nnunet": make_nnunet,
    "msd": make_msd,
    "totalsegmentator": make_totalsegmentator,
    "luna16": make_luna16,
    "pairs": make_pairs,
    "dicom": make_dicom,
}
