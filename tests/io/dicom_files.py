"""DICOM files as scanners and exporters write them, made with pydicom."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydicom import dcmread
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate, generate_frames
from pydicom.uid import (
    CTImageStorage,
    EnhancedCTImageStorage,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    generate_uid,
)

from medseg.geometry.grid import VoxelGrid

SPACING_MM = (0.8, 0.6484375)
ALONG_Z = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0))


def header(stored: np.ndarray, *, uid: str = "1.2.3.4", **fields: Any) -> Dataset:
    """What every CT object has: identity, series, 16-bit pixels (…, H, W), by default HU + 1024."""
    dataset = Dataset()
    dataset.SOPClassUID = CTImageStorage
    dataset.SOPInstanceUID = generate_uid(
        entropy_srcs=[uid, stored.tobytes().hex()]
    )  # the same in each run
    dataset.StudyInstanceUID = "1.2.3"
    dataset.SeriesInstanceUID = uid
    dataset.Modality = "CT"
    dataset.ImageType = ["ORIGINAL", "PRIMARY", "AXIAL"]
    dataset.SamplesPerPixel = 1
    dataset.PhotometricInterpretation = "MONOCHROME2"
    dataset.Rows, dataset.Columns = stored.shape[-2:]
    dataset.BitsAllocated = dataset.BitsStored = 8 * stored.dtype.itemsize
    dataset.PixelRepresentation = int(stored.dtype.kind == "i")
    for keyword, value in {"RescaleIntercept": -1024, "RescaleSlope": 1, **fields}.items():
        if value is None:
            if keyword in dataset:
                delattr(dataset, keyword)
        else:
            setattr(dataset, keyword, value)
    dataset.HighBit = dataset.BitsStored - 1
    dataset.PixelData = stored.tobytes()
    return dataset


def save(dataset: Dataset, path: Path, syntax: str = ExplicitVRLittleEndian) -> Path:
    """Write a file in an encoding without compression; compressed pixels come compressed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = syntax
    dataset.file_meta.MediaStorageSOPClassUID = dataset.SOPClassUID
    dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID
    dataset.save_as(path, enforce_file_format=True)
    return path


def place(
    dataset: Dataset,
    position_xyz_mm: Sequence[float],
    axes: Any = ALONG_Z,
    spacing_mm: Any = SPACING_MM,
) -> None:
    """Give a slice its place; numbers are rounded to 16 characters, as DICOM stores them."""
    dataset.ImagePositionPatient = [f"{value:.9g}" for value in position_xyz_mm]
    dataset.ImageOrientationPatient = [f"{value:.9g}" for value in np.ravel(axes)]
    dataset.PixelSpacing = [f"{value:.9g}" for value in spacing_mm]


def save_slice(
    path: Path,
    image_hu: np.ndarray,
    position_xyz_mm: Sequence[float],
    axes: Any = ALONG_Z,
    spacing_mm: Any = SPACING_MM,
    **fields: Any,
) -> Path:
    """Write one slice of HU (H, W) as unsigned HU + 1024."""
    dataset = header((image_hu + 1024).astype(np.uint16), **fields)
    place(dataset, position_xyz_mm, axes, spacing_mm)
    return save(dataset, path)


def save_stack(
    folder: Path,
    image_hu: np.ndarray,
    heights_mm: Sequence[float],
    slant: Sequence[float] = (0.0, 0.0),
    **fields: Any,
) -> list[Path]:
    """Write slices (D, H, W) at heights along z, names unordered; `slant` (x, y) mm per mm drifts.

    Args:
        folder: Where to.
        image_hu: The slices.
        heights_mm: Height of each.
        slant: Drift.
        fields: Fields of all slices; a list gives each its own.
    """
    paths = []
    for index, (pixels, height_mm) in enumerate(zip(image_hu, heights_mm, strict=True)):
        own = {
            keyword: value[index] if isinstance(value, list) else value
            for keyword, value in fields.items()
        }
        name = f"{(index * 7) % len(image_hu):03d}_{own.get('uid', '')}_{index}.dcm"
        position = (-120.25 + slant[0] * height_mm, 33.5 + slant[1] * height_mm, height_mm)
        paths.append(save_slice(folder / name, pixels, position, InstanceNumber=999 - index, **own))
    return paths


def save_stored(
    folder: Path, stored: np.ndarray, syntax: str = ExplicitVRLittleEndian, **fields: Any
) -> Path:
    """Write stored values (D, H, W) as slices; a list gives each slice its own field."""
    for index, values in enumerate(stored):
        own = {
            keyword: value[index] if isinstance(value, list) else value
            for keyword, value in fields.items()
        }
        dataset = header(values, **own)
        place(dataset, (-120.25, 33.5, 2.5 * index))
        save(dataset, folder / f"{index}", syntax)
    return folder


def save_grid(folder: Path, image_hu: np.ndarray, grid: VoxelGrid, **fields: Any) -> list[Path]:
    """Write the slices of a volume on a right-handed grid of any direction."""
    direction = np.array(grid.direction)
    return [
        save_slice(
            folder / f"IM{(index * 7) % len(image_hu):05d}{index}",
            pixels,
            grid.index_to_world_xyz_mm((index, 0, 0)),
            (direction[:, 0], direction[:, 1]),
            grid.spacing_mm[1:],
            **fields,
        )
        for index, pixels in enumerate(image_hu)
    ]


def _item(**fields: Any) -> list[Dataset]:
    dataset = Dataset()
    for keyword, value in fields.items():
        setattr(dataset, keyword, value)
    return [dataset]


def enhanced(
    stored: np.ndarray,
    positions_xyz_mm: Sequence[Sequence[float]],
    rescale: Sequence[tuple[float, float]],
    axes: Any = ALONG_Z,
    **fields: Any,
) -> Dataset:
    """An enhanced CT object: frames (D, H, W) in one file, each with a slope and an intercept."""
    dataset = header(
        stored,
        SOPClassUID=EnhancedCTImageStorage,
        RescaleIntercept=None,
        RescaleSlope=None,
        NumberOfFrames=len(stored),
        **fields,
    )
    dataset.SharedFunctionalGroupsSequence = _item(
        PlaneOrientationSequence=_item(
            ImageOrientationPatient=[f"{value:.9g}" for value in np.ravel(axes)]
        ),
        PixelMeasuresSequence=_item(PixelSpacing=list(SPACING_MM), SliceThickness=2.5),
    )
    dataset.PerFrameFunctionalGroupsSequence = [
        _item(
            PlanePositionSequence=_item(
                ImagePositionPatient=[f"{value:.9g}" for value in position]
            ),
            PixelValueTransformationSequence=_item(
                RescaleSlope=slope, RescaleIntercept=intercept, RescaleType="HU"
            ),
            FrameContentSequence=_item(
                StackID="1", InStackPositionNumber=index + 1, FrameAcquisitionNumber=1
            ),
            CTImageFrameTypeSequence=_item(FrameType=["ORIGINAL", "PRIMARY", "VOLUME", "NONE"]),
        )[0]
        for index, (position, (slope, intercept)) in enumerate(
            zip(positions_xyz_mm, rescale, strict=True)
        )
    ]
    return dataset


def save_by_gdcm(source: Path, target: Path, syntax: str) -> Path:
    """Write a file again in one of GDCM's encodings, such as `JPEGLosslessProcess14_1`."""
    import gdcm

    reader = gdcm.ImageReader()
    reader.SetFileName(str(source))
    assert reader.Read()
    change = gdcm.ImageChangeTransferSyntax()
    change.SetTransferSyntax(gdcm.TransferSyntax(getattr(gdcm.TransferSyntax, syntax)))
    change.SetInput(reader.GetImage())
    assert change.Change(), f"GDCM has no encoder for {syntax}"
    writer = gdcm.ImageWriter()
    writer.SetFileName(str(target))
    writer.SetFile(reader.GetFile())
    writer.SetImage(change.GetOutput())
    assert writer.Write()
    return target


def pack_frames(source: Path, target: Path, syntax: str) -> Path:
    """Write an enhanced file again in one of GDCM's encodings (its own writer moves the frames)."""
    dataset = dcmread(source)
    packed = []
    for pixels in dataset.pixel_array:
        flat = save(header(pixels), target.with_suffix(".flat"))
        packed.append(dcmread(save_by_gdcm(flat, target.with_suffix(".one"), syntax)))
        flat.unlink()
        target.with_suffix(".one").unlink()
    codes = [next(generate_frames(file.PixelData, number_of_frames=1)) for file in packed]
    return save_packed(dataset, target, codes, packed[0].file_meta.TransferSyntaxUID)


def save_packed(dataset: Dataset, path: Path, codes: list[bytes], syntax: str) -> Path:
    """Write a file whose frames are compressed already."""
    dataset.PixelData = encapsulate(codes)
    dataset["PixelData"].VR = "OB"
    dataset["PixelData"].is_undefined_length = True
    return save(dataset, path, syntax)


NATIVE = {
    "implicit": ImplicitVRLittleEndian,
    "explicit": ExplicitVRLittleEndian,
    "big endian": ExplicitVRBigEndian,
}
