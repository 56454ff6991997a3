"""Case viewer: one HTML file with the scan, its labels and the text of the report, drawn by niivue without internet access."""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from medseg.anatomy.rules import CT_WINDOWS_HU
from medseg.geometry.grid import VoxelGrid
from medseg.io.atomic import replace_text
from medseg.io.label_table import Structure
from medseg.io.nifti import packed_nifti
from medseg.report.overlay import ERROR_COLOURS, grey_range

SPACING_MM = 1.5
"""Wanted spacing of the voxels in the page; a scan whose page would be too large gets a coarser one."""

CT_RANGE_HU = (-1024.0, 1024.0)
"""HU that the 256 values of a CT in the page stand for: steps of 8 HU, from air to bone."""

DIFFERENCES = [
    Structure(name, value, colour)
    for value, (name, colour) in enumerate(ERROR_COLOURS.items(), start=1)
]
"""Differences to a reference: voxels of the reference alone, of the prediction alone, and with two different labels."""

_FOLDER = Path(__file__).parent / "viewer"
_PAGE_BYTES = 40_000  # page, style and words beside niivue and the volumes
# Grey values of a CT are compressed to no less than a quarter: finer bins than for this need not be
# tried.
_BEST_RATIO = 4


@dataclass(frozen=True)
class ViewerVolumes:
    """Volumes of a page, each a NIfTI file (.nii.gz).

    Attributes:
        image: The scan in 256 values.
        labels: The label map.
        differences: See `DIFFERENCES`; None without a reference.
    """

    image: bytes
    labels: bytes
    differences: bytes | None = None

    @property
    def page_bytes(self) -> int:
        """Size of a page with them."""
        packed = sum(
            4 * math.ceil(len(volume) / 3)
            for volume in (self.image, self.labels, self.differences or b"")
        )
        return packed + _fixed_bytes()


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

    The scan is averaged over each bin; labels and reference are read at its centre.

    Args:
        image: Scan, (D, H, W), in any storage order.
        labels: Predicted label values, (D, H, W).
        grid: Grid of both.
        reference: Reference label values, (D, H, W), or None.
        is_ct: Whether the values are HU; others are drawn between their percentiles.
        max_mb: Largest size of the page in 10⁶ bytes.
    """
    low, high = CT_RANGE_HU if is_ct else grey_range(image[:: max(1, len(image) // 32)], None)
    free_bytes = max(max_mb * 1e6 - _fixed_bytes(), 1e5)
    bytes_per_bin = 4 / 3 / _BEST_RATIO  # in base64 three bytes take four
    spacing_mm = SPACING_MM
    factors: tuple[int, ...] = (0, 0, 0)
    while True:
        wanted = tuple(
            min(size, max(1, round(spacing_mm / step)))
            for size, step in zip(grid.shape, grid.spacing_mm, strict=True)
        )
        num_bins = math.prod(
            math.ceil(size / factor) for size, factor in zip(grid.shape, wanted, strict=True)
        )
        # The first bins that can fit, by what larger pages took: bins are whole voxels, so a step
        # along one axis may do.
        if wanted != factors and (num_bins * bytes_per_bin <= free_bytes or num_bins == 1):
            factors = wanted
            volumes = _packed(image, labels, grid, reference, factors, low, high)
            if volumes.page_bytes <= max_mb * 1e6 or num_bins == 1:
                return volumes
            bytes_per_bin = (volumes.page_bytes - _fixed_bytes()) / num_bins
        spacing_mm *= 1.03


def _packed(
    image: np.ndarray,
    labels: np.ndarray,
    grid: VoxelGrid,
    reference: np.ndarray | None,
    factors: tuple[int, ...],
    low: float,
    high: float,
) -> ViewerVolumes:
    """Bin the volumes of a case by whole factors (z, y, x) and compress them."""
    shape = tuple(
        math.ceil(size / factor) for size, factor in zip(grid.shape, factors, strict=True)
    )
    steps = [step * factor for step, factor in zip(grid.spacing_mm, factors, strict=True)]
    first = [(factor - 1) / 2 for factor in factors]
    origin_xyz_mm = grid.index_to_world_xyz_mm(first).tolist()
    small = VoxelGrid(shape, tuple(steps), tuple(origin_xyz_mm), grid.direction)  # type: ignore[arg-type]
    slope = (high - low) / 255
    centres = np.ix_(
        *(np.minimum(np.arange(number) * factor + factor // 2, size - 1)
          for number, factor, size in zip(shape, factors, grid.shape, strict=True))
    )  # fmt: skip
    small_labels = labels[centres].astype(np.uint8)
    differences = None
    if reference is not None:
        target = reference[centres]
        found, expected = small_labels > 0, target > 0
        kinds = np.select(
            [expected & ~found, found & ~expected, found & (small_labels != target)], [1, 2, 3]
        )
        differences = packed_nifti(kinds.astype(np.uint8), small)
    return ViewerVolumes(
        packed_nifti(_binned(image, factors, low, slope), small, slope, low),
        packed_nifti(small_labels, small, is_labels=True),
        differences,
    )


def _binned(image: np.ndarray, factors: tuple[int, ...], low: float, slope: float) -> np.ndarray:
    """Average bins of voxels, the last ones of an axis over fewer, and map them to 0 … 255; plane by plane."""
    planes = []
    rows, columns = (
        np.arange(0, size, factor)
        for size, factor in zip(image.shape[1:], factors[1:], strict=True)
    )
    counts = np.outer(np.diff([*rows, image.shape[1]]), np.diff([*columns, image.shape[2]]))
    for start in range(0, len(image), factors[0]):
        plane = image[start : start + factors[0]].mean(axis=0, dtype=np.float32)
        plane = np.add.reduceat(np.add.reduceat(plane, rows, axis=0), columns, axis=1) / counts
        planes.append(np.clip(np.rint((plane - low) / slope), 0, 255).astype(np.uint8))
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
        dice_at_least: Region to the sentence about the lower bound on its Dice coefficient with a
            reference.
        places: What a key jumps to: name to world point (LPS) in mm.
    """

    title: str
    status: str
    warnings: Sequence[str]
    information: Sequence[str]
    columns: Sequence[str]
    rows: Mapping[int, Sequence[str]]
    agreements: Mapping[str, float]
    usual_agreement: float
    dice_at_least: Mapping[str, str]
    places: Mapping[str, Sequence[float]]


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
    windows = {"task": window} if window else {"all": None}
    # niivue's world is RAS.
    places = [{"name": name, "mm": [-x, -y, z]} for name, (x, y, z) in words.places.items()]
    data: dict[str, Any] = {
        "windows": [
            {"name": name, "range": range_hu}
            for name, range_hu in (windows | (CT_WINDOWS_HU if is_ct else {})).items()
        ],
        "labels": [asdict(one) for one in structures],
        "differences": [asdict(one) for one in DIFFERENCES] if volumes.differences else [],
        "places": places,
    }
    templates = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = templates.get_template("viewer.html").render(
        words=words,
        structures=structures,
        data=data,
        # A name may contain `</script>`.
        json=Markup(json.dumps(data, ensure_ascii=True).replace("<", "\\u003c")),
        css=Markup((_FOLDER / "viewer.css").read_text(encoding="utf-8")),
        js=Markup((_FOLDER / "viewer.js").read_text(encoding="utf-8")),
        niivue=Markup(_niivue()),
        volumes={
            name: base64.b64encode(volume).decode()
            for name in ("image", "labels", "differences")
            if (volume := getattr(volumes, name)) is not None
        },
    )
    replace_text(path, page)


@cache
def _niivue() -> str:
    """Script of niivue, after its licence."""
    licence = (_FOLDER / "niivue.LICENSE.txt").read_text(encoding="utf-8").replace("*/", "* /")
    return f"/*\n{licence}*/\n{(_FOLDER / 'niivue.umd.js').read_text(encoding='utf-8')}"


def _fixed_bytes() -> int:
    """Size of a page without volumes."""
    return len(_niivue().encode()) + _PAGE_BYTES
