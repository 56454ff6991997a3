"""Check of medseg's SEG and RTSTRUCT files by dcmqi (3D Slicer), dcmjs (OHIF) and rt-utils.

    python -m venv /tmp/readers && /tmp/readers/bin/pip install dcmqi rt-utils
    npm install --prefix /tmp/readers dcmjs
    python benchmarks/dicom_readers.py /tmp/readers

Writes a series and two labels on it, reads SEG and RTSTRUCT back with each program, and compares
names, colours and geometry with what was written. Exit code 1 where something differs.

All three read a series along the axes of the patient, with square pixels and slices. Only dcmqi and
dcmjs read an oblique series: rt-utils cannot read one, and it exchanges the axes of pixels and
slices that are not square.
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

# The series comes from a helper of the tests, which is no installed module.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "io"))

from dicom_sources import make_series  # type: ignore[import-not-found]
from pydicom import dcmread

from medseg.io.dicom.read import SourceSlices, open_slices
from medseg.io.dicom.segmentation import write_segmentation
from medseg.io.dicom.structure_set import write_structure_set
from medseg.io.label_table import Structure

# The first has a code of SNOMED CT; the second has none, and a letter outside ASCII in its name.
STRUCTURES = (
    Structure("left_lung", 1, "#38bdf8", ("39607008", "Lung", "left")),
    Structure("lésion", 2, "#ff8000"),
)
# Largest difference of red, green or blue (0 to 255) of a SEG, which stores CIELab in 16 bits.
MAX_COLOUR = 3
# Largest difference of a coordinate: the files store decimal strings of 16 characters.
MAX_MM = 1e-3
SHAPE = (8, 64, 64)  # slices, rows, columns

# Runs in the environment of rt-utils. Prints, for each structure, the indices of its voxels along
# the axes of rt-utils: rows, columns, slices.
RT_UTILS = """
import json, sys
from rt_utils import RTStructBuilder
builder = RTStructBuilder.create_from(dicom_series_path=sys.argv[1], rt_struct_path=sys.argv[2])
masks = {name: builder.get_roi_mask_by_name(name) for name in builder.get_roi_names()}
places = {}
for name, mask in masks.items():
    places[name] = [list(map(int, axis)) for axis in mask.nonzero()]
print(json.dumps(places))
"""


def oblique() -> np.ndarray:
    """Directions of the axes of a series, columns (3, 3), rotated by 20° about z and about x."""
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
    """Make two labels without any symmetry, so that an exchanged or flipped axis shows."""
    labels = np.zeros(shape, np.uint8)
    labels[1:6, 6:40, 12:50] = 1
    labels[1, 6:12, 12:30] = 0  # a corner is missing
    labels[3:5, 12:28, 20:38] = 2  # takes the place of a part of label 1
    return labels


def rgb(structure: Structure) -> list[int]:
    """Colour of a label: red, green, blue, each 0 to 255."""
    assert structure.colour is not None
    return list(bytes.fromhex(structure.colour[1:]))  # without the "#"


def centre_of(labels: np.ndarray, slices: SourceSlices, value: int) -> np.ndarray:
    """Centre of a label in the patient, (x, y, z) in mm."""
    return slices.grid.index_to_world_xyz_mm(np.argwhere(labels == value)).mean(axis=0)


def check(program: str, what: str, difference: float, limit: float) -> bool:
    """Print a comparison; return whether it holds. Names that differ have the difference 1."""
    holds = difference <= limit
    print(
        f"{program:9s}{what:34s}{difference:.4g} (at most {limit:g}) {'ok' if holds else 'WRONG'}"
    )
    return holds


def by_dcmqi(readers: Path, seg: Path, slices: SourceSlices, labels: np.ndarray) -> list[bool]:
    """Read the SEG as 3D Slicer does: an image of each segment, and a description.

    Args:
        readers: See `main`.
        seg: The SEG file.
        slices: Source slices of the file, with their grid.
        labels: The written labels (D, H, W).

    Returns:
        Whether each comparison holds.
    """
    results = []
    with tempfile.TemporaryDirectory() as folder:
        program = readers / "bin" / "segimage2itkimage"
        arguments = ["--inputDICOM", str(seg), "--outputDirectory", folder, "-t", "nrrd", "-p", "s"]
        subprocess.run([program, *arguments], check=True, capture_output=True)
        description = json.loads((Path(folder) / "s-meta.json").read_text(encoding="utf-8"))
        # A list of lists: one for each image, since overlapping segments need several.
        segments = itertools.chain(*description["segmentAttributes"])
        for structure, segment in zip(STRUCTURES, segments, strict=True):
            image = SimpleITK.ReadImage(str(Path(folder) / f"s-{segment['labelID']}.nrrd"))
            voxels = np.argwhere(SimpleITK.GetArrayFromImage(image))
            points = []
            for voxel in voxels:
                index_xyz = voxel[::-1].astype(float).tolist()
                points.append(image.TransformContinuousIndexToPhysicalPoint(index_xyz))
            centre_xyz_mm = np.mean(points, axis=0)
            away_mm = np.abs(centre_xyz_mm - centre_of(labels, slices, structure.value))
            colour = np.abs(np.subtract(segment["recommendedDisplayRGBValue"], rgb(structure)))
            name = segment["SegmentLabel"]
            miscount = abs(len(voxels) - int((labels == structure.value).sum()))
            results += [
                check("dcmqi", f"{name}: name", float(name != structure.name), 0),
                check("dcmqi", f"{name}: colour", float(colour.max()), MAX_COLOUR),
                check("dcmqi", f"{name}: voxels", miscount, 0),
                check("dcmqi", f"{name}: centre, mm", float(away_mm.max()), MAX_MM),
            ]
    return results


def by_dcmjs(
    readers: Path, seg: Path, rtstruct: Path, slices: SourceSlices, labels: np.ndarray
) -> list[bool]:
    """Read the SEG and the RTSTRUCT as OHIF does; returns whether each comparison holds."""
    script = Path(__file__).with_suffix(".mjs")
    result = subprocess.run(
        ["node", script, readers, seg, rtstruct], check=True, capture_output=True, encoding="utf-8"
    )
    # The last line: dcmjs prints its own messages before.
    content = json.loads(result.stdout.splitlines()[-1])
    results = []
    for structure, segment in zip(STRUCTURES, content["seg"], strict=True):
        away_mm = np.abs(segment["centre_xyz_mm"] - centre_of(labels, slices, structure.value))
        miscount = abs(segment["voxels"] - int((labels == structure.value).sum()))
        colour = np.abs(np.subtract(segment["colour"], rgb(structure)))
        name = segment["name"]
        results += [
            check("dcmjs", f"{name}: name", float(name != structure.name), 0),
            check("dcmjs", f"{name}: colour", float(colour.max()), MAX_COLOUR),
            check("dcmjs", f"{name}: voxels", miscount, 0),
            check("dcmjs", f"{name}: centre, mm", float(away_mm.max()), MAX_MM),
        ]
    for structure, roi in zip(STRUCTURES, content["rtstruct"], strict=True):
        voxels = np.argwhere(labels == structure.value)
        planes = np.unique(voxels[:, 0])  # each has one contour
        # Outlines pass half-way between pixels, so they lie less than a voxel beyond the centres of
        # the outermost ones.
        points = slices.grid.index_to_world_xyz_mm(voxels)
        reach_mm = max(slices.grid.spacing_mm)
        beyond_mm = np.maximum(
            points.min(axis=0) - reach_mm - roi["low_xyz_mm"],
            roi["high_xyz_mm"] - points.max(axis=0) - reach_mm,
        )
        colour = np.abs(np.subtract(roi["colour"], rgb(structure)))
        name = roi["name"]
        results += [
            check("dcmjs", f"{name}: name of contours", float(name != structure.name), 0),
            check("dcmjs", f"{name}: colour of contours", float(colour.max()), 0),
            check("dcmjs", f"{name}: contours", abs(roi["contours"] - len(planes)), 0),
            check("dcmjs", f"{name}: contours beyond, mm", float(beyond_mm.max()), 0),
        ]
    return results


def by_rt_utils(readers: Path, series: Path, rtstruct: Path, labels: np.ndarray) -> list[bool]:
    """Read the contours as masks; returns whether each comparison holds.

    rt-utils rounds contours to pixels, which moves edges by up to one pixel.
    """
    python = readers / "bin" / "python"
    result = subprocess.run(
        [python, "-c", RT_UTILS, series, rtstruct],
        check=True,
        capture_output=True,
        encoding="utf-8",
    )
    # The last line: the libraries print messages before.
    places = json.loads(result.stdout.splitlines()[-1])
    results = []
    for structure in STRUCTURES:
        y, x, z = places[structure.name]
        mask = np.zeros(labels.shape, bool)
        mask[z, y, x] = True
        written = labels == structure.value
        # The written label, grown and shrunk by a pixel within each slice.
        outer = ndimage.binary_dilation(written, np.ones((1, 3, 3)))
        inner = ndimage.binary_erosion(written, np.ones((1, 3, 3)))
        num_wrong = int((mask & ~outer).sum() + (inner & ~mask).sum())
        results.append(check("rt-utils", f"{structure.name}: voxels off the edge", num_wrong, 0))
    return results


def main(readers: Path) -> int:
    """Compare all programs on both series.

    Args:
        readers: Folder of the virtual environment and of `node_modules`.

    Returns:
        The exit code.
    """
    results: list[bool] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, direction in (("axial", np.eye(3)), ("oblique", oblique())):
            print(kind)
            # `plain`: one file per slice, at equal distances.
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
