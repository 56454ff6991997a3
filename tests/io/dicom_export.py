"""An export of 40 patients as a hospital's archive writes it: flat, in folders, as a zip archive.

    python tests/io/dicom_export.py <output> [<folder of a DICOM series> …]

writes `flat/`, `folders/` and `export.zip` of the same files below the output. The scans are those
of the given series under new identities, or small phantoms.
"""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydicom import Dataset, dcmread
from pydicom.uid import MRImageStorage

sys.path.insert(0, str(Path(__file__).parent))

from dicom_files import enhanced, header, place, save

STEP_MM = 2.5
LOCALISER = ["ORIGINAL", "PRIMARY", "LOCALIZER"]
KINDS = (
    *["plain"] * 10,
    *["two kernels"] * 8,
    *["thin and thick"] * 6,
    *["with MR"] * 4,
    *["enhanced"] * 3,
    *["two studies"] * 4,
    "gap",
    "MR alone",
    "damaged",
    "topogram alone",
    "two acquisitions",
)
"""What each of the 40 patients has."""

Volume = tuple[np.ndarray, tuple[float, float, float]]
"""HU (D, H, W), and spacing (z, y, x) in mm."""


class File(NamedTuple):
    """A file of the export: patient, study, series, and its bytes or object."""

    patient: str
    study: int
    series: int
    dataset: Dataset
    num_kept: int | None = None


def tiny(patient: int) -> Volume:
    """Noise that tells patients apart."""
    rng = np.random.default_rng(patient)
    return rng.integers(-900, 900, (4, 8, 9)).astype(np.int16), (STEP_MM, 0.8, 0.8)


def files_of(number: int, kind: str, volume: Volume) -> Iterator[File]:
    """Make the files of a patient, each with a topogram in every study."""
    image, spacing_mm = volume
    patient = f"P{number:02d}"

    def series(
        study: int, series_number: int, image: np.ndarray, step_mm: float, **fields: Any
    ) -> Iterator[File]:
        identity = _identity(number, study, series_number)
        for index, pixels in enumerate(image):
            dataset = header((pixels + 1024).astype(np.uint16), **{**identity, **fields})
            acquisition = fields.get("AcquisitionNumber", 1)
            dataset.SOPInstanceUID = f"{identity['uid']}.{acquisition}.{index}"
            place(dataset, (-150.0, -150.0, index * step_mm), spacing_mm=spacing_mm[1:])
            dataset.SliceThickness = f"{step_mm:g}"
            yield File(patient, study, series_number, dataset)

    step_mm = spacing_mm[0]
    topogram = np.zeros((1, *image.shape[1:]), np.int16)
    studies = (1, 2) if kind == "two studies" else (1,)
    for study in studies:
        yield from series(
            study, 1, topogram, 1.0, SeriesDescription="Topogram", ImageType=LOCALISER
        )
    soft = {"SeriesDescription": "Chest B40f", "ConvolutionKernel": "B40f"}
    sharp = {"SeriesDescription": "Chest B70f", "ConvolutionKernel": "B70f"}
    mr = {"Modality": "MR", "SOPClassUID": MRImageStorage, "SeriesDescription": "T2"}
    if kind in ("plain", "with MR", "two kernels", "thin and thick", "two studies"):
        for study in studies:
            yield from series(study, 2, image, step_mm, **soft)
    if kind == "two kernels":
        yield from series(1, 3, image, step_mm, **sharp)
    if kind == "thin and thick":
        yield from series(1, 3, image[::2], 2 * step_mm, **sharp)
    if kind in ("with MR", "MR alone"):
        yield from series(1, 4, image, step_mm, **mr)
    if kind == "gap":
        gapped = [
            file for index, file in enumerate(series(1, 2, image, 11.0, **soft)) if index != 1
        ]
        yield from gapped
    if kind == "damaged":
        first, *others = series(1, 2, image, step_mm, **soft)
        yield first._replace(num_kept=-image[0].size)
        yield from others
    if kind == "two acquisitions":
        yield from series(1, 2, image, step_mm, AcquisitionNumber=1, **soft)
        yield from series(1, 2, -image, step_mm, AcquisitionNumber=2, **soft)
    if kind == "enhanced":
        positions = [(-150.0, -150.0, index * step_mm) for index in range(len(image))]
        dataset = enhanced(
            (image + 1024).astype(np.uint16),
            positions,
            [(1, -1024)] * len(image),
            **_identity(number, 1, 2),
            **soft,
        )
        measures = dataset.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
        measures.PixelSpacing = list(spacing_mm[1:])
        yield File(patient, 1, 2, dataset)


def _identity(number: int, study: int, series: int) -> dict[str, Any]:
    uid = f"1.2.826.0.1.{number}.{study}"
    return {
        "uid": f"{uid}.{series}",
        "StudyInstanceUID": uid,
        "FrameOfReferenceUID": f"{uid}.99",
        "PatientID": f"P{number:02d}",
        "PatientName": f"Name^{number}",
        "StudyDate": f"202401{study:02d}",
        "SeriesNumber": series,
    }


def real_volume(folder: Path) -> Volume:
    """Read the slices of a series in files of their own, in HU."""
    slices = [dcmread(path) for path in sorted(folder.iterdir())]
    slices.sort(key=lambda dataset: float(dataset.ImagePositionPatient[2]))
    images_hu = []
    for dataset in slices:
        slope, intercept = float(dataset.RescaleSlope), float(dataset.RescaleIntercept)
        images_hu.append(dataset.pixel_array * slope + intercept)
    image = np.stack(images_hu)
    heights_mm = [float(dataset.ImagePositionPatient[2]) for dataset in slices]
    step_mm = float(np.diff(heights_mm).mean())
    return image.clip(-1024, 3071).astype(np.int16), (step_mm, *map(float, slices[0].PixelSpacing))


def make_export(
    output: Path, volume_of: Callable[[int], Volume] = tiny, kinds: Sequence[str] = KINDS
) -> dict[str, Path]:
    """Write the export in three forms.

    Returns:
        The form, `flat`, `folders` or `zip`, to its path.
    """
    flat, folders = output / "flat", output / "folders"
    for number, kind in enumerate(kinds, start=1):
        for index, file in enumerate(files_of(number, kind, volume_of(number))):
            path = flat / f"IM{number:02d}{index:04d}"
            save(file.dataset, path)
            if file.num_kept is not None:
                path.write_bytes(path.read_bytes()[: file.num_kept])
            folder = folders / file.patient / f"ST{file.study}" / f"SE{file.series}"
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / f"{index:04d}.dcm")
    archive = shutil.make_archive(str(output / "export"), "zip", flat)
    return {"flat": flat, "folders": folders, "zip": Path(archive)}


if __name__ == "__main__":
    sources = [real_volume(Path(folder)) for folder in sys.argv[2:]]
    given = itertools.cycle(sources)
    make_export(Path(sys.argv[1]), (lambda _: next(given)) if sources else tiny)
