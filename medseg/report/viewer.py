"""Case viewer: one HTML file with the scan, its labels and the text of the report.

niivue draws it without internet access.
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from medseg.anatomy.rules import CT_WINDOWS_HU
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.geometry.sizes import Shape
from medseg.io.atomic import replace_text
from medseg.io.label_table import Structure
from medseg.io.nifti import packed_nifti
from medseg.preprocess.orient import orient
from medseg.report.overlay import ERROR_COLOURS, grey_range
from medseg.report.templates import open_templates

# Spacing of the voxels in the page; a scan whose page would be too large gets a coarser one.
SPACING_MM = 1.5

# HU that the 256 values of a CT in the page stand for: steps of 8 HU, from air to bone.
CT_RANGE_HU = (-1024.0, 1024.0)

# Differences to a reference: voxels of it alone, of the prediction alone, with two labels.
DIFFERENCES = [
    Structure(name, value, colour)
    for value, (name, colour) in enumerate(ERROR_COLOURS.items(), start=1)
]

_FOLDER = Path(__file__).parent / "viewer_page"
_PAGE_BYTES = 40_000  # page, style and words beside niivue and the volumes
# Grey values of a CT are compressed to no less than a quarter: finer bins than for this need not be
# tried.
_BEST_RATIO = 4


@dataclass(frozen=True)
class LabelBox:
    """Place of the label map of a page on the oriented scan, see `orient`.

    Attributes:
        start: First voxel, (z, y, x).
        step: Voxels of the scan from one of the map to the next; 1 unless the page is too large.
        shape: Voxels of the map, (D, H, W).
    """

    start: tuple[int, ...]
    step: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ViewerVolumes:
    """Volumes of a page, each a NIfTI file (.nii.gz) towards Superior, Posterior and Left.

    Attributes:
        image: The scan in 256 values, in bins of whole voxels.
        labels: The label map in a box around all labels, at the resolution of the scan.
        differences: In the same box, see `DIFFERENCES`; None without a reference.
        label_box: The box.
        grid: Grid of the oriented scan.
        factors: Voxels of a bin of the image, (z, y, x).
        value_step: Difference of neighbouring values of the image.
    """

    image: bytes
    labels: bytes
    differences: bytes | None
    label_box: LabelBox
    grid: VoxelGrid
    factors: Shape
    value_step: float

    @property
    def page_bytes(self) -> int:
        """Size of a page with them."""
        volumes = (self.image, self.labels, self.differences or b"")
        return _fixed_bytes() + sum(map(_base64_bytes, volumes))

    def geometry(self) -> dict[str, Any]:
        """What the script of the page knows of the scan, in plain types."""
        bins = _num_bins(self.grid, self.factors)
        bin_mm = np.multiply(self.factors, self.grid.spacing_mm)
        return {
            "shape": list(self.grid.shape),
            "padded_shape": np.multiply(bins, self.factors).tolist(),
            "spacing_mm": list(self.grid.spacing_mm),
            "bin_mm": " × ".join(f"{size_mm:.3g}" for size_mm in bin_mm[::-1]),
            "value_step": f"{self.value_step:.2g}",
            "labels": asdict(self.label_box),
        }


def pack_volumes(
    image: np.ndarray,
    labels: np.ndarray,
    grid: VoxelGrid,
    reference: np.ndarray | None = None,
    *,
    is_ct: bool = True,
    max_mb: float = 12.0,
) -> ViewerVolumes:
    """Reduce a case to what a page of a given size can hold: bins of whole voxels, 256 grey values.

    The scan is averaged over each bin. Labels keep the resolution of the scan, unless they take
    more than half of the page.

    Args:
        image: Scan, (D, H, W), in any storage order.
        labels: Predicted label values, (D, H, W).
        grid: Grid of both.
        reference: Reference label values, (D, H, W), or None.
        is_ct: Whether the values are HU; others are drawn between their percentiles.
        max_mb: Largest size of the page in 10⁶ bytes.
    """
    low, high = CT_RANGE_HU
    if not is_ct:
        # The percentiles of about 32 slices.
        some_slices = image[:: max(1, len(image) // 32)]
        low, high = grey_range(some_slices, None)
    image, oriented, orientation = orient(image, grid)
    labels = orientation.to_lps(labels)
    if reference is not None:
        reference = orientation.to_lps(reference)
    free_bytes = max(max_mb * 1e6 - _fixed_bytes(), 1e5)
    box, packed_labels, differences = _packed_labels(labels, reference, oriented, free_bytes / 2)
    free_bytes -= _base64_bytes(packed_labels) + _base64_bytes(differences or b"")
    bytes_per_bin = 4 / 3 / _BEST_RATIO  # in base64 three bytes take four
    spacing_mm = SPACING_MM
    tried_factors: Shape = (0, 0, 0)
    slope = (high - low) / 255
    # Coarser and coarser, until the page is small enough; a single bin is taken whatever its size.
    while True:
        factors = _factors_near(spacing_mm, oriented)
        num_bins = math.prod(_num_bins(oriented, factors))
        # The first bins that can fit, by what larger pages took: bins are whole voxels, so a step
        # along one axis may do.
        may_fit = num_bins * bytes_per_bin <= free_bytes or num_bins == 1
        if factors != tried_factors and may_fit:
            tried_factors = factors
            binned = _binned(image, factors, low, slope)
            packed_image = packed_nifti(binned, _binned_grid(oriented, factors), slope, low)
            num_bytes = _base64_bytes(packed_image)
            if num_bytes <= free_bytes or num_bins == 1:
                return ViewerVolumes(
                    packed_image, packed_labels, differences, box, oriented, factors, slope
                )
            bytes_per_bin = num_bytes / num_bins
        spacing_mm *= 1.03


def _factors_near(spacing_mm: float, grid: VoxelGrid) -> Shape:
    """Count the voxels of a bin along each axis whose bins have about a spacing."""
    z, y, x = (
        min(size, max(1, round(spacing_mm / step_mm)))
        for size, step_mm in zip(grid.shape, grid.spacing_mm, strict=True)
    )
    return z, y, x


def _num_bins(grid: VoxelGrid, factors: Shape) -> Shape:
    """Count the bins along each axis; the last one may have fewer voxels."""
    depth, height, width = (
        math.ceil(size / factor) for size, factor in zip(grid.shape, factors, strict=True)
    )
    return depth, height, width


def _packed_labels(
    labels: np.ndarray, reference: np.ndarray | None, grid: VoxelGrid, max_bytes: float
) -> tuple[LabelBox, bytes, bytes | None]:
    """Compress the label map, and its differences to a reference, in a box around all labels.

    Args:
        labels: Predicted label values of the oriented scan, (D, H, W).
        reference: Those of the reference, or None.
        grid: Grid of both.
        max_bytes: Size in the page above which voxels are left out.

    Returns:
        The box, the label map, and the differences.
    """
    is_labelled = (plane > 0 for plane in labels)
    if reference is not None:
        is_labelled = (
            (plane > 0) | (expected > 0) for plane, expected in zip(labels, reference, strict=True)
        )
    # A page without labels still has a label map, of one voxel.
    bounds = VoxelBox.around(is_labelled) or VoxelBox((0, 0, 0), (1, 1, 1))
    inner_labels = labels[bounds.slices()]
    step = 1
    while True:
        # Every `step`-th voxel along each axis.
        thinned = (slice(None, None, step),) * 3
        small_labels = inner_labels[thinned]
        box = LabelBox(bounds.start, step, small_labels.shape)
        z_mm, y_mm, x_mm = grid.spacing_mm
        x0_mm, y0_mm, z0_mm = grid.index_to_world_xyz_mm(list(bounds.start)).tolist()
        box_grid = VoxelGrid(
            small_labels.shape,
            (step * z_mm, step * y_mm, step * x_mm),
            (x0_mm, y0_mm, z0_mm),
            grid.direction,
        )
        packed = packed_nifti(small_labels.astype(np.uint8, copy=False), box_grid, is_labels=True)
        differences = None
        if reference is not None:
            kinds = _differences(small_labels, reference[bounds.slices()][thinned])
            differences = packed_nifti(kinds, box_grid)
        num_bytes = _base64_bytes(packed) + _base64_bytes(differences or b"")
        if num_bytes <= max_bytes or max(small_labels.shape) == 1:
            return box, packed, differences
        step += 1


def _differences(labels: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Compare labels with a reference, (D, H, W): 0, or a value of `DIFFERENCES`."""
    kinds = np.zeros(labels.shape, dtype=np.uint8)
    for kind, plane, expected in zip(kinds, labels, target, strict=True):
        kind[(expected > 0) & (plane == 0)] = 1
        kind[(plane > 0) & (expected == 0)] = 2
        kind[(plane > 0) & (expected > 0) & (plane != expected)] = 3
    return kinds


def _binned_grid(grid: VoxelGrid, factors: Shape) -> VoxelGrid:
    """Grid of bins of whole voxels, each at the centre of its voxels."""
    z_mm, y_mm, x_mm = np.multiply(grid.spacing_mm, factors).tolist()
    first = [(factor - 1) / 2 for factor in factors]
    x0_mm, y0_mm, z0_mm = grid.index_to_world_xyz_mm(first).tolist()
    return VoxelGrid(
        _num_bins(grid, factors), (z_mm, y_mm, x_mm), (x0_mm, y0_mm, z0_mm), grid.direction
    )


def _binned(image: np.ndarray, factors: Shape, low: float, slope: float) -> np.ndarray:
    """Average bins of voxels, and map them to 0 … 255, plane by plane.

    The last bins of an axis may have fewer voxels.
    """
    _, height, width = image.shape
    # First row and column of each bin, and the pixels of each bin of a plane.
    rows = np.arange(0, height, factors[1])
    columns = np.arange(0, width, factors[2])
    counts = np.outer(np.diff([*rows, height]), np.diff([*columns, width]))
    planes = []
    for start in range(0, len(image), factors[0]):
        mean_plane = image[start : start + factors[0]].mean(axis=0, dtype=np.float32)
        sums = np.add.reduceat(np.add.reduceat(mean_plane, rows, axis=0), columns, axis=1)
        values = np.rint((sums / counts - low) / slope)
        planes.append(np.clip(values, 0, 255).astype(np.uint8))
    return np.stack(planes)


@dataclass(frozen=True)
class ViewerWords:
    """Text of a page.

    Attributes:
        title: Name of the case.
        status: `ok`, `warnings` or `not_hu`.
        warnings: Sentences of the report.
        information: Sentences that ask for nothing.
        columns: Headings of the table of labels.
        rows: Label value to its cells.
        agreements: Region to the Dice coefficient of the two stages.
        usual_agreement: Smaller coefficients are marked.
        dice_at_least: Sentence about the lower bounds on the Dice coefficients of the regions with
            a reference; "" where none is stated.
        places: What a key jumps to: name to world point (LPS) in mm.
        total: Cells of all labels together; empty where they are not known.
        identity: Patient and date; "" where they are not known.
    """

    title: str
    status: str
    warnings: Sequence[str]
    information: Sequence[str]
    columns: Sequence[str]
    rows: Mapping[int, Sequence[str]]
    agreements: Mapping[str, float]
    usual_agreement: float
    dice_at_least: str
    places: Mapping[str, Sequence[float]]
    total: Sequence[str] = ()
    identity: str = ""


def write_viewer(
    path: Path,
    volumes: ViewerVolumes,
    words: ViewerWords,
    structures: Sequence[Structure],
    window: tuple[float, float] | None = None,
    *,
    is_ct: bool = True,
) -> None:
    """Write the page of a case, whole or not at all.

    Args:
        path: HTML file.
        volumes: Scan and labels.
        words: Text beside them.
        structures: Names and colours of the labels.
        window: Values that are drawn black and white at first; None = all.
        is_ct: Whether the windows of CT are offered.

    Raises:
        UserError: If the file cannot be written.
    """
    # The window of the task is what the networks see.
    windows: dict[str, Any] = {"network": window} if window else {"all": None}
    if is_ct:
        windows |= CT_WINDOWS_HU
    differences = DIFFERENCES if volumes.differences is not None else []
    places = []
    for name, (x_mm, y_mm, z_mm) in words.places.items():
        # niivue's world is RAS, ours is LPS.
        places.append({"name": name, "mm": [-x_mm, -y_mm, z_mm]})
    data: dict[str, Any] = {
        "windows": [{"name": name, "range": limits} for name, limits in windows.items()],
        "labels": [asdict(structure) for structure in structures],
        "differences": [asdict(structure) for structure in differences],
        "places": places,
        "is_ct": is_ct,
        "scan": volumes.geometry(),
    }
    files = {"image": volumes.image, "labels": volumes.labels}
    if volumes.differences is not None:
        files["differences"] = volumes.differences
    page = (
        open_templates(_FOLDER)
        .get_template("viewer.html")
        .render(
            words=words,
            structures=structures,
            data=data,
            # A name may contain `</script>`.
            json=Markup(json.dumps(data, ensure_ascii=True).replace("<", "\\u003c")),
            css=Markup((_FOLDER / "viewer.css").read_text(encoding="utf-8")),
            overlay=Markup((_FOLDER / "overlay.js").read_text(encoding="utf-8")),
            js=Markup((_FOLDER / "viewer.js").read_text(encoding="utf-8")),
            niivue=Markup(_niivue()),
            volumes={name: base64.b64encode(content).decode() for name, content in files.items()},
        )
    )
    replace_text(path, page)


@cache
def _niivue() -> str:
    """Script of niivue, after its licence."""
    licence = (_FOLDER / "niivue.LICENSE.txt").read_text(encoding="utf-8").replace("*/", "* /")
    return f"/*\n{licence}*/\n{(_FOLDER / 'niivue.umd.js').read_text(encoding='utf-8')}"


def _base64_bytes(data: bytes) -> int:
    """Size of bytes in the page."""
    return 4 * math.ceil(len(data) / 3)


def _fixed_bytes() -> int:
    """Size of a page without volumes."""
    return len(_niivue().encode()) + _PAGE_BYTES
