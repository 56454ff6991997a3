"""Readers of others for our SEG and RTSTRUCT: dcmqi (3D Slicer), dcmjs (OHIF) and rt-utils.

    python -m venv /tmp/readers && /tmp/readers/bin/pip install dcmqi rt-utils
    npm install --prefix /tmp/readers dcmjs
    python benchmarks/dicom_readers.py /tmp/readers

writes a series and two labels on it, reads both results back with each program, and compares names,
colours and geometry with what was written. Exit code 1 where something differs. The series lies
along the axes of the patient, as rt-utils reads no other, with square pixels and slices, as it
turns others; dcmqi and dcmjs also read an oblique one.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import SimpleITK
from scipy import ndimage

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "io"))

from dicom_sources import make_series  # type: ignore[import-not-found]
from pydicom import dcmread

from medseg.io.dicom.read import SourceSlices, open_slices
from medseg.io.dicom.segmentation import write_segmentation
from medseg.io.dicom.structure_set import write_structure_set
from medseg.io.label_table import Structure

STRUCTURES = (
    Structure("left_lung", 1, "#38bdf8", ("39607008", "Lung", "left")),
    Structure("lésion", 2, "#ff8000"),
)
# Largest difference of a colour of SEG, which is stored in 16 bits of CIELab.
MAX_COLOUR = 3
MAX_MM = 1e-3
SHAPE = (8, 64, 64)

RT_UTILS = """
import json, sys
from rt_utils import RTStructBuilder
builder = RTStructBuilder.create_from(dicom_series_path=sys.argv[1], rt_struct_path=sys.argv[2])
masks = {name: builder.get_roi_mask_by_name(name) for name in builder.get_roi_names()}
places = {}
for name, mask in masks.items():
    places[name] = [int(mask.sum()), *(list(map(int, axis)) for axis in mask.nonzero())]
print(json.dumps(places))
"""


def oblique() -> np.ndarray:
    """A direction that is rotated about two axes."""
    angle = np.deg2rad(20)
    cos, sin = np.cos(angle), np.sin(angle)
    about_x = np.array([[1, 0, 0], [0, cos, -sin], [0, sin, cos]])
    about_z = np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])
    return np.asarray(about_x @ about_z)


def make_pixels_square(series: Path) -> None:
    """Give the slices square pixels: rt-utils exchanges the spacing of rows and columns."""
    for path in series.iterdir():
        dataset = dcmread(path)
        dataset.PixelSpacing = [0.8, 0.8]
        dataset.save_as(path)


def make_labels(shape: tuple[int, int, int]) -> np.ndarray:
    """Two labels without any symmetry."""
    labels = np.zeros(shape, np.uint8)
    labels[1:6, 6:40, 12:50] = 1
    labels[1, 6:12, 12:30] = 0
    labels[3:5, 12:28, 20:38] = 2
    return labels


def rgb(structure: Structure) -> list[int]:
    """Colour of a label: red, green, blue."""
    assert structure.colour is not None
    return list(bytes.fromhex(structure.colour[1:]))


def centre_of(labels: np.ndarray, slices: SourceSlices, value: int) -> np.ndarray:
    """Centre of a label in the patient, in mm."""
    return slices.grid.index_to_world_xyz_mm(np.argwhere(labels == value)).mean(axis=0)


def check(program: str, what: str, difference: float, limit: float) -> bool:
    """Print a comparison, and say whether it holds."""
    holds = difference <= limit
    print(
        f"{program:9s}{what:34s}{difference:.4g} (at most {limit:g}) {'ok' if holds else 'WRONG'}"
    )
    return holds


def by_dcmqi(readers: Path, seg: Path, slices: SourceSlices, labels: np.ndarray) -> list[bool]:
    """Read the SEG as 3D Slicer does: an image of each segment, and a description."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        program = readers / "bin" / "segimage2itkimage"
        arguments = ["--inputDICOM", str(seg), "--outputDirectory", folder, "-t", "nrrd", "-p", "s"]
        subprocess.run([program, *arguments], check=True, capture_output=True)
        about = json.loads((Path(folder) / "s-meta.json").read_text(encoding="utf-8"))
        segments = itertools.chain(*about["segmentAttributes"])
        for structure, segment in zip(STRUCTURES, segments, strict=True):
            image = SimpleITK.ReadImage(str(Path(folder) / f"s-{segment['labelID']}.nrrd"))
            voxels = np.argwhere(SimpleITK.GetArrayFromImage(image))
            points = [
                image.TransformContinuousIndexToPhysicalPoint(voxel[::-1].astype(float).tolist())
                for voxel in voxels
            ]
            away_mm = np.abs(np.mean(points, axis=0) - centre_of(labels, slices, structure.value))
            colour = np.abs(np.subtract(segment["recommendedDisplayRGBValue"], rgb(structure)))
            name = segment["SegmentLabel"]
            number = abs(len(voxels) - int((labels == structure.value).sum()))
            results += [
                check("dcmqi", f"{name}: name", float(name != structure.name), 0),
                check("dcmqi", f"{name}: colour", float(colour.max()), MAX_COLOUR),
                check("dcmqi", f"{name}: voxels", number, 0),
                check("dcmqi", f"{name}: centre, mm", float(away_mm.max()), MAX_MM),
            ]
    return results


def by_dcmjs(
    readers: Path, seg: Path, rtstruct: Path, slices: SourceSlices, labels: np.ndarray
) -> list[bool]:
    """Read both as OHIF does."""
    script = Path(__file__).with_suffix(".mjs")
    done = subprocess.run(
        ["node", script, readers, seg, rtstruct], check=True, capture_output=True, encoding="utf-8"
    )
    content = json.loads(done.stdout.splitlines()[-1])
    results = []
    for structure, segment in zip(STRUCTURES, content["seg"], strict=True):
        away_mm = np.abs(segment["centre_xyz_mm"] - centre_of(labels, slices, structure.value))
        number = abs(segment["voxels"] - int((labels == structure.value).sum()))
        colour = np.abs(np.subtract(segment["colour"], rgb(structure)))
        name = segment["name"]
        results += [
            check("dcmjs", f"{name}: name", float(name != structure.name), 0),
            check("dcmjs", f"{name}: colour", float(colour.max()), MAX_COLOUR),
            check("dcmjs", f"{name}: voxels", number, 0),
            check("dcmjs", f"{name}: centre, mm", float(away_mm.max()), MAX_MM),
        ]
    for structure, roi in zip(STRUCTURES, content["rtstruct"], strict=True):
        planes = np.unique(np.argwhere(labels == structure.value)[:, 0])
        # Outlines pass half-way between pixels: their box is the voxels' box or lies within it.
        points = slices.grid.index_to_world_xyz_mm(np.argwhere(labels == structure.value))
        reach_mm = max(slices.grid.spacing_mm)
        beyond = np.maximum(
            points.min(axis=0) - reach_mm - roi["low_xyz_mm"],
            roi["high_xyz_mm"] - points.max(axis=0) - reach_mm,
        )
        colour = np.abs(np.subtract(roi["colour"], rgb(structure)))
        name = roi["name"]
        results += [
            check("dcmjs", f"{name}: name of contours", float(name != structure.name), 0),
            check("dcmjs", f"{name}: colour of contours", float(colour.max()), 0),
            check("dcmjs", f"{name}: contours", abs(roi["contours"] - len(planes)), 0),
            check("dcmjs", f"{name}: contours beyond, mm", float(beyond.max()), 0),
        ]
    return results


def by_rt_utils(readers: Path, series: Path, rtstruct: Path, labels: np.ndarray) -> list[bool]:
    """Read the contours as masks; rt-utils rounds contours to pixels, which moves edges by one."""
    python = readers / "bin" / "python"
    done = subprocess.run(
        [python, "-c", RT_UTILS, series, rtstruct],
        check=True,
        capture_output=True,
        encoding="utf-8",
    )
    masks = json.loads(done.stdout.splitlines()[-1])
    results = []
    for structure in STRUCTURES:
        _, y, x, z = masks[structure.name]
        mask = np.zeros(labels.shape, bool)
        mask[z, y, x] = True
        written = labels == structure.value
        near = ndimage.binary_dilation(written, np.ones((1, 3, 3)))
        inner = ndimage.binary_erosion(written, np.ones((1, 3, 3)))
        wrong = int((mask & ~near).sum() + (inner & ~mask).sum())
        results.append(check("rt-utils", f"{structure.name}: voxels off the edge", wrong, 0))
    return results


def main(readers: Path) -> int:
    """Compare; returns the exit code."""
    results: list[bool] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, direction in (("axial", np.eye(3)), ("oblique", oblique())):
            print(kind)
            series = make_series(folder / kind, "plain", direction, SHAPE)
            if kind == "axial":
                make_pixels_square(series)
            slices = open_slices(series)
            labels = make_labels(slices.grid.shape)
            seg, rtstruct = folder / f"{kind}.seg.dcm", folder / f"{kind}.rtstruct.dcm"
            write_segmentation(seg, labels, slices, STRUCTURES)
            write_structure_set(rtstruct, labels, slices, STRUCTURES)
            results += by_dcmqi(readers, seg, slices, labels)
            results += by_dcmjs(readers, seg, rtstruct, slices, labels)
            if kind == "axial":
                results += by_rt_utils(readers, series, rtstruct, labels)
    print(f"{sum(results)} of {len(results)} comparisons hold")
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
