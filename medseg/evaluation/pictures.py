"""Pictures of scored cases: an overlay of each case, and viewers of the worst cases."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medseg.data.case_table import Case
from medseg.errors import UserError
from medseg.evaluation.matching import Prediction, Reference, check_grid, read_pair
from medseg.evaluation.reports import read_case_report, scan_of
from medseg.findings import sentences_of
from medseg.geometry.grid import VoxelGrid
from medseg.io.read import read_image
from medseg.metrics.hu_statistics import scan_statistics
from medseg.preprocess.orient import orient
from medseg.report.case_viewer import SUFFIX, pack_case, write_case_viewer
from medseg.report.cases import worst_first
from medseg.report.overlay import overlay_montage
from medseg.task import LabelValues, Task

Row = Mapping[str, Any]


def draw_overlay(
    scan: Case, pred: np.ndarray, target: np.ndarray, grid: VoxelGrid, task: Task, folder: Path
) -> list[str]:
    """Draw prediction and reference of a case on its scan, `<folder>/<case>.png`.

    Args:
        scan: Case with the file of the scan.
        pred: Label map of the prediction, oriented, (D, H, W).
        target: Label map of the reference, oriented, (D, H, W).
        grid: Grid of both label maps.
        task: Labels and channels.
        folder: Folder of the overlays.

    Returns:
        Warnings about the scan.

    Raises:
        UserError: If the scan cannot be read or has another grid.
    """
    image, warnings = _read_image(scan, grid, task)
    overlay_montage(
        image,
        pred,
        target,
        grid.spacing_mm,
        path=folder / f"{scan.name}.png",
        title=scan.name,
        label_names={value: name for name, value in task.without_helpers().labels.items()},
        window_hu=task.channels[0].window_hu,
    )
    return warnings


def _read_image(scan: Case, grid: VoxelGrid, task: Task) -> tuple[np.ndarray, list[str]]:
    """Read the first channel of a scan.

    Returns:
        Image, oriented, (D, H, W); and the warnings about the scan.

    Raises:
        UserError: If the scan cannot be read or has another grid.
    """
    # `images` lists the file of each channel. A 4D file is listed once for each of its channels,
    # and `read_image` must know their number.
    num_channels = scan.images(len(task.channels)).count(scan.image)
    volume = read_image(
        scan.image, scan.series, task.channels[0].modality, channel=0, num_channels=num_channels
    )
    image, image_grid, _ = orient(scan.hu.apply(volume.array), volume.grid)
    check_grid("image's", image_grid, "labels'", grid)
    return image, sentences_of(volume.findings)


def write_viewers(
    rows: Sequence[Row],
    pairs: Mapping[str, tuple[Prediction, Reference]],
    task: Task,
    label_values: LabelValues,
    overlays: Path,
    folder: Path,
    num_viewers: int,
    say: Callable[[str], None],
) -> dict[str, Path]:
    """Write the viewers of the worst cases.

    The files of these cases are read again: the worst cases are known only after all are scored. A
    case whose files cannot be read any more gets no viewer.

    Args:
        rows: Scores of all cases and regions.
        pairs: Case to its prediction and reference.
        task: Labels and channels.
        label_values: Value in the reference files to label name.
        overlays: Folder of the overlays. A case without an overlay gets no viewer: its scan is
            unknown or unreadable.
        folder: Folder of the viewers.
        num_viewers: Largest number of viewers.
        say: Takes a warning for each viewer that cannot be written.

    Returns:
        Case to its viewer.
    """
    drawn_cases = [name for name in worst_first(rows) if (overlays / f"{name}.png").is_file()]
    viewers = {}
    for name in drawn_cases[:num_viewers]:
        viewer = folder / f"{name}{SUFFIX}"
        prediction, reference = pairs[name]
        try:
            _write_viewer(viewer, prediction, reference, task, label_values)
        # The scores and the page do not need the viewer.
        except (UserError, OSError, ValueError) as error:
            say(f"warning: {name}: no viewer, {error}")
            continue
        viewers[name] = viewer
    return viewers


def _write_viewer(
    viewer: Path,
    prediction: Prediction,
    reference: Reference,
    task: Task,
    label_values: LabelValues,
) -> None:
    """Write the viewer of a case, whose overlay was drawn.

    Raises:
        UserError: If a file cannot be read or written.
    """
    # Their warnings are in the summary already.
    pred, target, grid, _ = read_pair(prediction, reference, task, label_values)
    scan = scan_of(reference, prediction.path, task)
    if scan is None:
        raise UserError("its scan does not exist any more")
    image, _ = _read_image(scan, grid, task)
    # Only CT has values in HU.
    image_hu = image if task.is_ct else None
    # `pred` and `target` have no helper labels.
    result_task = task.without_helpers()
    statistics = scan_statistics(image_hu, pred, grid, result_task.labels)
    volumes = pack_case(image, pred, grid, target, result_task)
    report = read_case_report(prediction.path)
    write_case_viewer(viewer, volumes, statistics, report, result_task)
