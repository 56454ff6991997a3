"""Content of the viewer of a case, from arrays, statistics and the report of a prediction.

`medseg.report.viewer` writes the page.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from medseg.anatomy.rules import USUAL_AGREEMENT
from medseg.geometry.grid import VoxelGrid
from medseg.inference.segmentation import StatedBound, describe_bounds
from medseg.io.identity import UNKNOWN, Identity
from medseg.io.label_table import Structure
from medseg.metrics.hu_statistics import ScanStatistics
from medseg.preprocess.orient import orient, orientation_of
from medseg.report.overlay import colour_of
from medseg.task import Task
from medseg.wording import format_ml

if TYPE_CHECKING:  # this module imports Jinja2, which takes 10 MiB of memory
    from medseg.report.viewer import ViewerVolumes

# The viewer of a case is called `<case>.html`.
SUFFIX = ".html"


class PackedCase(NamedTuple):
    """Reduced voxels of a case, and its differences to the reference, for a viewer.

    Attributes:
        volumes: Reduced scan, labels and differences.
        worst_xyz_mm: Centre of the differences to the reference in the axial slice with the most of
            them, (x, y, z) in LPS; None without a difference.
        dice: Label name to its Dice coefficient with the reference; empty without one.
    """

    volumes: "ViewerVolumes"
    worst_xyz_mm: Sequence[float] | None
    dice: Mapping[str, float]


class CaseReport(NamedTuple):
    """Part of the report of a prediction that a viewer shows.

    `identity` is that of the patient. All other fields are described in
    `medseg.inference.segmentation.Segmentation`.
    """

    status: str = ""
    warnings: Sequence[str] = ()
    information: Sequence[str] = ()
    agreements: Mapping[str, float] = {}
    most_disputed_xyz_mm: Sequence[float] | None = None
    dice_at_least: Mapping[str, StatedBound] = {}
    identity: Identity = UNKNOWN


def pack_case(
    image: np.ndarray,
    labels: np.ndarray,
    grid: VoxelGrid,
    reference: np.ndarray | None,
    task: Task,
    max_mb: float = 12.0,
) -> PackedCase:
    """Reduce a case to what its viewer shows, and find its differences to the reference.

    Args:
        image: First channel, (D, H, W), in any storage order.
        labels: Predicted label values, (D, H, W).
        grid: Grid of both.
        reference: Reference label values, (D, H, W), or None.
        task: Labels, and whether the values are HU.
        max_mb: Largest size of the page in 10⁶ bytes; by default that of `viewer.max_mb`.
    """
    from medseg.report.viewer import pack_volumes

    volumes = pack_volumes(image, labels, grid, reference, is_ct=task.is_ct, max_mb=max_mb)
    if reference is None:
        return PackedCase(volumes, None, {})
    pred, lps_grid, _ = orient(labels, grid)
    target = orientation_of(grid).to_lps(reference)
    num_values = 1 + max(task.labels.values())
    # Number of voxels by label value: in the prediction, in the reference, and equal in both.
    counts = np.zeros((3, num_values), dtype=np.int64)
    worst_xyz_mm = None
    most_different = 0
    # Slice by slice: masks of the whole volume would take much memory.
    for index, (pred_slice, target_slice) in enumerate(zip(pred, target, strict=True)):
        is_equal = pred_slice == target_slice
        for row, values in enumerate((pred_slice, target_slice, pred_slice[is_equal])):
            # Larger values belong to no label of the task, and are cut off.
            counts[row] += np.bincount(values.ravel(), minlength=num_values)[:num_values]
        num_different = pred_slice.size - int(np.count_nonzero(is_equal))
        if num_different > most_different:
            most_different = num_different
            ys, xs = np.nonzero(~is_equal)
            centre = [index, float(ys.mean()), float(xs.mean())]
            worst_xyz_mm = lps_grid.index_to_world_xyz_mm(centre).tolist()
    return PackedCase(volumes, worst_xyz_mm, _dice_by_label(counts, task))


def _dice_by_label(counts: np.ndarray, task: Task) -> dict[str, float]:
    """Compute the Dice coefficient of each label that the prediction or the reference has.

    Args:
        counts: Number of voxels in the prediction, in the reference, and equal in both, by label
            value; (3, values).
        task: Names and values of the labels.
    """
    dice = {}
    for name, value in task.labels.items():
        num_pred, num_target, num_both = counts[:, value].tolist()
        if num_pred + num_target:
            dice[name] = 2 * num_both / (num_pred + num_target)
    return dice


def write_case_viewer(
    path: Path,
    packed: PackedCase,
    statistics: ScanStatistics,
    report: CaseReport,
    task: Task,
) -> None:
    """Write the viewer of a case; the stem of the file is its title.

    Args:
        path: HTML file.
        packed: Volumes and differences.
        statistics: Figures of the labels.
        report: Report of the prediction.
        task: Labels and window.

    Raises:
        UserError: If the file cannot be written.
    """
    from medseg.report.viewer import ViewerWords, write_viewer

    rows: dict[int, dict[str, str]] = {}
    for name, value in task.labels.items():
        rows[value] = written_figures(statistics.labels.get(name, {}))
        if name in packed.dice:
            rows[value]["Dice"] = f"{packed.dice[name]:.3f}"
    # The headings of all rows, each once. A label without voxels has no figures in HU.
    columns = list(dict.fromkeys(chain(*rows.values())))
    places: dict[str, Sequence[float]] = {}
    if packed.worst_xyz_mm is not None:
        places["most differences"] = packed.worst_xyz_mm
    if report.most_disputed_xyz_mm is not None:
        places["stages differ most"] = report.most_disputed_xyz_mm
    total = written_figures(statistics.total)
    cells = {}
    for value, row in rows.items():
        cells[value] = [row.get(heading, "") for heading in columns]
    words = ViewerWords(
        title=path.name.removesuffix(SUFFIX),
        status=report.status,
        warnings=report.warnings,
        information=report.information,
        columns=columns,
        rows=cells,
        agreements=report.agreements,
        usual_agreement=USUAL_AGREEMENT,
        dice_at_least=describe_bounds(report.dice_at_least),
        places=places,
        total=[total.get(heading, "") for heading in columns],
        identity=str(report.identity),
    )
    write_viewer(
        path,
        packed.volumes,
        words,
        structures_of(task),
        window=task.channels[0].window_hu,
        is_ct=task.is_ct,
    )


def structures_of(task: Task) -> list[Structure]:
    """Describe the labels of a task; a label without a colour gets one of the palette."""
    structures = []
    for number, (name, value) in enumerate(task.labels.items()):
        colour = task.colours.get(name) or colour_of(number)
        structures.append(Structure(name, value, colour, task.codes.get(name, ())))
    return structures


def written_figures(figures: Mapping[str, float | None]) -> dict[str, str]:
    """Format the figures of a label for readers, by heading.

    Args:
        figures: From `ScanStatistics`; figures in HU that are None get no heading.
    """
    # A label that was not measured has no figures at all; its volume is shown as 0.
    texts = {"ml": format_ml(figures.get("ml") or 0.0)}
    # Either all figures in HU are numbers, or all are None. The percentiles are whole numbers.
    if figures.get("mean_hu") is not None:
        share = figures["share_below_minus_950_hu"]
        assert share is not None, "the mean is a number"
        texts["mean HU"] = f"{figures['mean_hu']:.0f}"
        texts["5 … 95 % HU"] = f"{figures['p5_hu']} … {figures['p95_hu']}"
        texts["< −950 HU"] = f"{100 * share:.1f} %"
    return texts
