"""Airway labels: the case table of a coarse stage that learns the airway as a class of its own.

    python -m benchmarks.airway_labels output=<folder> cases=<table.csv> [unsure=<case>,…]
        [absent=<case>,…]

Writes `<case>_airway.nii.gz`, the labels of the table with the tracked airway
(`benchmarks/airways.py`) as 3, and `cases.csv`. Masks of the airway alone are kept in
`<output>/airways`, which `benchmarks.lungs airways=<folder>` can use. Look at these masks and run
again with the names of the wrong ones. `absent` lists the scans that show no trachea; their labels
stay. `unsure` lists the scans whose mask is wrong for another reason; the air between and above
their lungs becomes 255, which is ignored.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy import ndimage

from benchmarks.airways import track_airway
from benchmarks.instruments import given_arguments
from medseg.data.case_table import Case, write_case_table
from medseg.data.importers.formats import read_cases
from medseg.geometry.grid import VoxelGrid
from medseg.io.read import read_labels
from medseg.io.write import write_labels
from medseg.preprocess.orient import orient
from medseg.studies.pieces import oriented_image, oriented_labels

# Values in the label maps: the class of the airway, and `task.ignore_label`.
AIRWAY, IGNORED = 3, 255
# Voxels below this value are air. Thick slices blur the wall into the lumen, so the bound is high.
MAX_AIR_HU = -400.0
# Trachea and main bronchi lie within this distance of the middle of the lungs.
HALF_WIDTH_MM = 50.0


def main() -> None:
    """Label all cases and write the table."""
    output, arguments = given_arguments(["unsure", "absent"], required=["cases"])
    unsure = arguments.get("unsure", "").split(",")
    absent = arguments.get("absent", "").split(",")
    airways = output / "airways"
    airways.mkdir(exist_ok=True)
    labelled = []
    for case in read_cases(Path(arguments["cases"])):
        # Without a visible trachea there is nothing to add: the labels of the table stay.
        if case.name not in absent:
            case = label_airway(case, output, airways, is_sure=case.name not in unsure)
        labelled.append(case)
        print(case.name, flush=True)
    write_case_table(output / "cases.csv", labelled)


def label_airway(case: Case, folder: Path, airways: Path, *, is_sure: bool) -> Case:
    """Add the airway to the labels of a case.

    Args:
        case: A CT with labels 1 (left lung) and 2 (right lung); without labels it is returned
            unchanged.
        folder: Folder of the new labels.
        airways: Folder of the masks of the airway; a missing one is tracked and written.
        is_sure: Whether the mask is right; otherwise the air between and above the lungs is
            ignored.

    Returns:
        The case with the new labels. Voxels that are labelled as lung keep that label.
    """
    if case.labels is None:
        return case
    # Scan and labels are turned to the same axes: z to the head, y to the back, x to the left.
    stored_values, grid = oriented_image(case)
    image_hu = case.hu.apply(stored_values)
    labels, _ = oriented_labels(case)
    labels = labels.astype(np.uint8)
    if is_sure:
        region = read_airway(image_hu, grid, airways / f"{case.name}.nii.gz")
        value = AIRWAY
    else:
        region = _middle_air(image_hu, labels, grid)
        value = IGNORED
    labels[region & (labels == 0)] = value
    path = folder / f"{case.name}_airway.nii.gz"
    write_labels(path, labels, grid)
    return replace(case, labels=path)


def read_airway(image_hu: np.ndarray, grid: VoxelGrid, file: Path) -> np.ndarray:
    """Read the airway of an oriented scan, (D, H, W) bool; track and write it first if need be.

    An airway that was not found is written as an empty mask, so that it is not tracked again.
    """
    if not file.is_file():
        airway = track_airway(image_hu, grid)
        if airway.remark:
            name = file.name.removesuffix(".nii.gz")
            print(f"{name}: no airway is measured: {airway.remark}", flush=True)
        write_labels(file, airway.lumen.astype(np.uint8), grid)
    # The mask may have been corrected by hand, in a program that stores other axes.
    volume = read_labels(file)
    return orient(volume.array, volume.grid)[0] > 0


def _middle_air(image_hu: np.ndarray, labels: np.ndarray, grid: VoxelGrid) -> np.ndarray:
    """Find the air between the lungs and above them, (D, H, W) bool; none without lungs."""
    is_air = np.zeros(grid.shape, dtype=bool)
    # The bounding box of both lungs together: all voxels of the mask have the value 1.
    lung_boxes = ndimage.find_objects((labels > 0).astype(np.uint8))
    if not lung_boxes:
        return is_air
    z, y, x = lung_boxes[0]
    middle = (x.start + x.stop) // 2
    half_width = round(HALF_WIDTH_MM / grid.spacing_mm[2])
    columns = slice(max(0, middle - half_width), middle + half_width)
    # From the base of the lungs up to the last slice: the trachea begins above the lungs.
    region = (slice(z.start, None), y, columns)
    is_air[region] = image_hu[region] < MAX_AIR_HU
    return is_air


if __name__ == "__main__":
    main()
