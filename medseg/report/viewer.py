"""Case viewer: one HTML file with the scan, its labels and the text of the report.

The script niivue, which is part of the file, draws the volumes without internet access.
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

# Range of HU of the 256 grey values of a CT in the page: steps of 8 HU, from air to bone.
CT_RANGE_HU = (-1024.0, 1024.0)

# Values of the map of differences to a reference: 1 = voxels of the reference only, 2 = of the
# prediction only, 3 = with different labels in both.
DIFFERENCES = [
    Structure(name, value, colour)
    for value, (name, colour) in enumerate(ERROR_COLOURS.items(), start=1)
]

_FOLDER = Path(__file__).parent / "viewer_page"
# Bytes of the page without niivue and the volumes: markup, style sheet and text.
_PAGE_BYTES = 40_000
# Highest ratio by which the grey values of a CT, of one byte each, are compressed. A number of bins
# that would not fit even with this ratio is not tried.
_BEST_RATIO = 4


@dataclass(frozen=True)
class LabelBox:
    """Place of the label map of a page on the oriented scan, see `orient`.

    Attributes:
        start: Voxel of the scan where the first voxel of the map lies, (z, y, x).
        step: Distance of neighbouring voxels of the map in voxels of the scan, along each axis; 1
            unless the map would be too large.
        shape: Voxels of the map, (D, H, W).
    """

    start: tuple[int, ...]
    step: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ViewerVolumes:
    """Volumes of a page, each a NIfTI file (.nii.gz) with axes to Superior, Posterior and Left.

    Attributes:
        image: The scan in 256 values, averaged over bins of whole voxels.
        labels: The label map in `label_box`, a box around all labels.
        differences: Map of `DIFFERENCES` in the same box; None without a reference.
        label_box: Place of both maps.
        grid: Grid of the oriented scan.
        factors: Voxels of a bin along each axis, (z, y, x).
        value_step: Difference of neighbouring grey values, in values of the scan.
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
        """Size of a page with these volumes."""
        volumes = (self.image, self.labels, self.differences or b"")
        return _fixed_bytes() + sum(map(_base64_bytes, volumes))

    def geometry(self) -> dict[str, Any]:
        """Describe the scan for the script of the page, in plain types."""
        num_bins = _num_bins(self.grid, self.factors)
        bin_mm = np.multiply(self.factors, self.grid.spacing_mm)
        return {
            "shape": list(self.grid.shape),
            # The last bins may reach beyond the scan.
            "padded_shape": np.multiply(num_bins, self.factors).tolist(),
            "spacing_mm": list(self.grid.spacing_mm),
            # For readers: width, height and depth.
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
        is_ct: Whether the values are HU; other values are drawn between their percentiles.
        max_mb: Largest size of the page in 10⁶ bytes; by default that of `viewer.max_mb`.
    """
    low, high = CT_RANGE_HU
    if not is_ct:
        # Every n-th slice, 32 to 63 in all, are enough for the percentiles.
        some_slices = image[:: max(1, len(image) // 32)]
        low, high = grey_range(some_slices, None)
    image, oriented_grid, orientation = orient(image, grid)
    labels = orientation.to_lps(labels)
    if reference is not None:
        reference = orientation.to_lps(reference)
    # A limit below the size of niivue still leaves 100 kB to the volumes.
    free_bytes = max(max_mb * 1e6 - _fixed_bytes(), 1e5)
    box, packed_labels, packed_differences = _pack_labels(
        labels, reference, oriented_grid, free_bytes / 2
    )
    free_bytes -= _base64_bytes(packed_labels) + _base64_bytes(packed_differences or b"")
    # Estimated bytes of a bin in the page: at first the fewest that are possible, and after a try
    # those of the tried bins. Base64 makes four bytes of three.
    bytes_per_bin = 4 / 3 / _BEST_RATIO
    spacing_mm = SPACING_MM
    tried_factors: Shape = (0, 0, 0)
    slope = (high - low) / 255
    # Coarser and coarser bins, until the page is small enough; a single bin is taken whatever its
    # size. Bins are whole voxels, so steps of 3 % enlarge them along one axis at a time.
    while True:
        factors = _factors_near(spacing_mm, oriented_grid)
        num_bins = math.prod(_num_bins(oriented_grid, factors))
        may_fit = num_bins * bytes_per_bin <= free_bytes or num_bins == 1
        # Packing takes a second or more: only bins that are new and may fit are tried.
        if factors != tried_factors and may_fit:
            tried_factors = factors
            binned = _binned(image, factors, low, slope)
            packed_image = packed_nifti(binned, _binned_grid(oriented_grid, factors), slope, low)
            num_bytes = _base64_bytes(packed_image)
            if num_bytes <= free_bytes or num_bins == 1:
                return ViewerVolumes(
                    image=packed_image,
                    labels=packed_labels,
                    differences=packed_differences,
                    label_box=box,
                    grid=oriented_grid,
                    factors=factors,
                    value_step=slope,
                )
            bytes_per_bin = num_bytes / num_bins
        spacing_mm *= 1.03


def _factors_near(spacing_mm: float, grid: VoxelGrid) -> Shape:
    """Choose the voxels of a bin along each axis so that it has about the given spacing."""
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


def _pack_labels(
    labels: np.ndarray, reference: np.ndarray | None, grid: VoxelGrid, max_bytes: float
) -> tuple[LabelBox, bytes, bytes | None]:
    """Compress the label map, and its differences to a reference, in a box around all labels.

    Args:
        labels: Predicted label values of the oriented scan, (D, H, W).
        reference: Label values of the reference, (D, H, W), or None.
        grid: Grid of both.
        max_bytes: Largest size of both maps in the page; above it voxels are left out.

    Returns:
        The box, and as NIfTI files the label map and the differences (None without a reference).
    """
    # Generators: only the mask of one plane is in memory at a time.
    label_masks = (plane > 0 for plane in labels)
    if reference is not None:
        label_masks = (
            (pred > 0) | (target > 0) for pred, target in zip(labels, reference, strict=True)
        )
    bounds = VoxelBox.around(label_masks)
    if bounds is None:
        # A page without labels still has a label map, of one voxel.
        bounds = VoxelBox((0, 0, 0), (1, 1, 1))
    inner_labels = labels[bounds.slices()]
    z_mm, y_mm, x_mm = grid.spacing_mm
    x0_mm, y0_mm, z0_mm = grid.index_to_world_xyz_mm(list(bounds.start)).tolist()
    step = 1
    while True:
        # Each `step`-th voxel along each axis is kept: labels cannot be averaged.
        thinning = (slice(None, None, step),) * 3
        small_labels = inner_labels[thinning]
        box = LabelBox(bounds.start, step, small_labels.shape)
        box_grid = VoxelGrid(
            small_labels.shape,
            (step * z_mm, step * y_mm, step * x_mm),
            (x0_mm, y0_mm, z0_mm),
            grid.direction,
        )
        packed_labels = packed_nifti(
            small_labels.astype(np.uint8, copy=False), box_grid, is_labels=True
        )
        packed_differences = None
        if reference is not None:
            small_reference = reference[bounds.slices()][thinning]
            packed_differences = packed_nifti(_differences(small_labels, small_reference), box_grid)
        num_bytes = _base64_bytes(packed_labels) + _base64_bytes(packed_differences or b"")
        if num_bytes <= max_bytes or max(small_labels.shape) == 1:
            return box, packed_labels, packed_differences
        step += 1


def _differences(labels: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Compare labels with a reference, (D, H, W): 0 = equal, or a value of `DIFFERENCES`."""
    differences = np.zeros(labels.shape, dtype=np.uint8)
    # Plane by plane, without masks of the volume; each plane is a view that is changed in place.
    for difference, pred, target in zip(differences, labels, reference, strict=True):
        difference[(target > 0) & (pred == 0)] = 1
        difference[(pred > 0) & (target == 0)] = 2
        difference[(pred > 0) & (target > 0) & (pred != target)] = 3
    return differences


def _binned_grid(grid: VoxelGrid, factors: Shape) -> VoxelGrid:
    """Make the grid of bins of whole voxels, each at the centre of its voxels."""
    z_mm, y_mm, x_mm = np.multiply(grid.spacing_mm, factors).tolist()
    # Index of the centre of the first bin: n voxels along an axis are the voxels 0 to n - 1.
    first_centre = [(factor - 1) / 2 for factor in factors]
    x0_mm, y0_mm, z0_mm = grid.index_to_world_xyz_mm(first_centre).tolist()
    return VoxelGrid(
        _num_bins(grid, factors), (z_mm, y_mm, x_mm), (x0_mm, y0_mm, z0_mm), grid.direction
    )


def _binned(image: np.ndarray, factors: Shape, low: float, slope: float) -> np.ndarray:
    """Average an image over bins, and map the averages to grey values.

    The last bins of an axis may have fewer voxels.

    Args:
        image: Oriented image, (D, H, W).
        factors: Voxels of a bin along each axis, (z, y, x).
        low: Value of the image that becomes 0.
        slope: Difference of values that becomes 1.

    Returns:
        Grey values from 0 to 255, uint8, one for each bin.
    """
    _, height, width = image.shape
    # First row and column of each bin of a plane, and its number of pixels.
    rows = np.arange(0, height, factors[1])
    columns = np.arange(0, width, factors[2])
    bin_heights = np.diff([*rows, height])
    bin_widths = np.diff([*columns, width])
    num_pixels = np.outer(bin_heights, bin_widths)
    planes = []
    for start in range(0, len(image), factors[0]):
        mean_plane = image[start : start + factors[0]].mean(axis=0, dtype=np.float32)
        # Sums from the first row of each bin to that of the next; then likewise the columns.
        row_sums = np.add.reduceat(mean_plane, rows, axis=0)
        sums = np.add.reduceat(row_sums, columns, axis=1)
        values = np.rint((sums / num_pixels - low) / slope)
        planes.append(np.clip(values, 0, 255).astype(np.uint8))
    return np.stack(planes)


@dataclass(frozen=True)
class ViewerWords:
    """Text of a page.

    Attributes:
        title: Name of the case.
        status: `ok`, `warnings` or `not_hu`.
        warnings: Sentences of the report.
        information: Sentences that need no action.
        columns: Headings of the table of labels.
        rows: Label value to its cells.
        agreements: Region to the Dice coefficient between the two stages.
        usual_agreement: Agreements below this coefficient are marked.
        dice_at_least: Sentence about the lower bounds on the Dice coefficients of the regions with
            a reference; "" where none is stated.
        places: Points that the reader can jump to: name to world point (LPS) in mm, (x, y, z).
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
        words: Text beside the volumes.
        structures: Names, values and colours of the labels.
        window: Values that are drawn black and white at first; None = the viewer's own choice.
        is_ct: Whether the windows of CT are offered.

    Raises:
        UserError: If the file cannot be written.
    """
    # Name to range. The window of the task is what the networks see.
    windows: dict[str, Any] = {"network": window} if window else {"all": None}
    if is_ct:
        windows |= CT_WINDOWS_HU
    files = {"image": volumes.image, "labels": volumes.labels}
    differences = []
    if volumes.differences is not None:
        files["differences"] = volumes.differences
        differences = DIFFERENCES
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
    page = (
        open_templates(_FOLDER)
        .get_template("viewer.html")
        .render(
            words=words,
            structures=structures,
            data=data,
            # Escaped, since a name may contain `</script>`.
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
    """Read the script of niivue, after its licence in a comment."""
    licence = (_FOLDER / "niivue.LICENSE.txt").read_text(encoding="utf-8")
    script = (_FOLDER / "niivue.umd.js").read_text(encoding="utf-8")
    # `*/` would end the comment.
    licence = licence.replace("*/", "* /")
    return f"/*\n{licence}*/\n{script}"


def _base64_bytes(data: bytes) -> int:
    """Size of bytes in base64, as the page has them."""
    return 4 * math.ceil(len(data) / 3)


def _fixed_bytes() -> int:
    """Size of a page without volumes."""
    return len(_niivue().encode()) + _PAGE_BYTES
