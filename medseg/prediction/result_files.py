"""Result files of a case, except for its report.

Their paths, their writers, and the voxels that pictures keep until they are written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from medseg.cascade.join import paste_percent
from medseg.data.reference import file_values, read_reference
from medseg.errors import UserError
from medseg.evaluation.matching import check_grid, task_values
from medseg.findings import warnings_of
from medseg.inference.scan_model import ScanModel
from medseg.inference.segmentation import Segmentation, describe_bounds
from medseg.io.identity import Identity
from medseg.io.inputs import (
    DICOM_SEG_SUFFIX,
    RTSTRUCT_SUFFIX,
    SEGMENTATION_SUFFIX,
    case_name,
    input_format,
    volume_suffix,
)
from medseg.io.label_files import LABEL_ENDINGS, label_file
from medseg.io.label_table import Structure
from medseg.io.scratch import new_array
from medseg.io.volume import Volume
from medseg.io.write import write_labels
from medseg.metrics.hu_statistics import ScanStatistics
from medseg.prediction.options import PredictConfig, Save
from medseg.prediction.scans import Scan
from medseg.preprocess.orient import orient, orientation_of, oriented_grid
from medseg.report.case_viewer import (
    SUFFIX,
    CaseReport,
    PackedCase,
    pack_case,
    structures_of,
    write_case_viewer,
    written_figures,
)
from medseg.report.preview import MAX_FULL_LINES, PreviewSlice, cut_slices, draw_preview
from medseg.task import LabelValues, Task

# Folder beside the label maps. Its files hold the standard deviation of the probabilities of
# several checkpoints or flips, in percent.
UNCERTAINTY = "uncertainty"
# Kind of file, as in `save`, to the end of its name, which follows the name of the case.
ENDINGS = {
    "preview": ".preview.png",
    "viewer": SUFFIX,
    "dicom_seg": DICOM_SEG_SUFFIX,
    "rtstruct": RTSTRUCT_SUFFIX,
}
# Kinds that refer to the slices of a DICOM series.
DICOM_KINDS = ("dicom_seg", "rtstruct")


@dataclass(frozen=True)
class PictureVoxels:
    """Voxels that the pictures of a case need; all others are dropped once it is segmented.

    Attributes:
        slices: Slices of the preview; empty if none is written.
        packed: Volumes of the viewer; None if none is written.
    """

    slices: Sequence[PreviewSlice] = ()
    packed: PackedCase | None = None


def result_paths(
    output: Path, model: ScanModel, save: Sequence[Save]
) -> dict[tuple[str, str], Path]:
    """Choose the paths of all files of a prediction except its report.

    Args:
        output: Path of the label map.
        model: The model of the scan; if it averages several networks or flips, there is also a map
            of their disagreement.
        save: Kinds of files.

    Returns:
        (kind, label) to path; the label is "" for a file that is not of one label. The label map
        comes first.
    """
    paths: dict[tuple[str, str], Path] = {}
    if "labels" in save:
        paths["labels", ""] = output
    # Path of the case without an ending. Its name may hold dots, which are no suffix.
    stem = output.parent / case_name(output)
    for kind in save:
        if kind in ENDINGS:
            paths[kind, ""] = stem.with_name(stem.name + ENDINGS[kind])
        elif kind in LABEL_ENDINGS:
            for label in model.task.labels:
                paths[kind, label] = label_file(stem, label, kind)
    if model.has_views:
        name = output.name
        # Percentages are no segments: 3D Slicer would read a segmentation without any.
        if volume_suffix(output) == SEGMENTATION_SUFFIX:
            name = f"{stem.name}.nrrd"
        paths["uncertainty", ""] = output.parent / UNCERTAINTY / name
    return paths


def check_kinds(scan: Scan, save: Sequence[Save]) -> None:
    """Refuse DICOM results of a scan that is no DICOM series.

    Raises:
        UserError: Names the kinds that need one.
    """
    kinds = _dicom_kinds(save)
    if not kinds:
        return
    scan_format = input_format(scan.path)
    if scan_format != "dicom":
        raise UserError(
            f"save={','.join(kinds)}: expected a DICOM series, to whose slices the result refers, "
            f"but {scan.path} is {scan_format}; leave {' and '.join(kinds)} out"
        )


def check_slices(scan: Scan, task: Task, save: Sequence[Save]) -> None:
    """Refuse a DICOM series whose headers lack what its DICOM results refer to.

    Its writers refuse it too, but not before the scan has been segmented.

    Args:
        scan: The scan; a DICOM series if `save` has DICOM results, see `check_kinds`.
        task: Has the modality of the series.
        save: Kinds of files.

    Raises:
        UserError: If the series cannot be read or referred to.
    """
    kinds = _dicom_kinds(save)
    if not kinds:
        return
    # Imported here: pydicom takes memory, and other scans don't need it.
    from medseg.io.dicom.read import open_slices
    from medseg.io.dicom.structures import segmentation_headers, source_headers

    slices = open_slices(scan.path, scan.series, task.channels[0].modality, scan.files)
    if Save.dicom_seg in kinds:
        segmentation_headers(slices)
    else:
        source_headers(slices)


def _dicom_kinds(save: Sequence[Save]) -> list[str]:
    """List the kinds of files that refer to the slices of a DICOM series."""
    return [kind for kind in DICOM_KINDS if kind in save]


def take_picture_voxels(
    scan: Scan, volume: Volume, result: Segmentation, task: Task, config: PredictConfig
) -> PictureVoxels:
    """Copy the voxels that the pictures of a case need.

    If the case has reference labels that cannot be used, a warning is added to the result.

    Args:
        scan: Has the path of the reference labels, or none.
        volume: Its first channel with all voxels, in storage order.
        result: Its labels on the same grid; may receive the warning.
        task: Labels and channels.
        config: Says which pictures are written.
    """
    slices: Sequence[PreviewSlice] = ()
    if Save.preview in config.save:
        image, grid, orientation = orient(volume.array, volume.grid)
        slices = cut_slices(image, orientation.to_lps(result.labels), grid.spacing_mm)
    if Save.viewer not in config.save:
        return PictureVoxels(slices)
    reference = None
    if scan.labels is not None:
        try:
            label_values = file_values(config.data.label_values)
            reference = _read_reference(scan, scan.labels, volume, task, label_values)
        except (UserError, OSError, ValueError) as error:
            sentence = f"the viewer shows no reference: {error}"
            result.findings += warnings_of("no_reference", [sentence])
            if result.status == "ok":
                result.status = "warnings"
    max_mb = config.viewer.max_mb
    packed = pack_case(volume.array, result.labels, volume.grid, reference, task, max_mb)
    return PictureVoxels(slices, packed)


def _read_reference(
    scan: Scan, path: Path, volume: Volume, task: Task, label_values: LabelValues
) -> np.ndarray:
    """Read reference labels in the storage order of a scan, with the values of the task.

    Voxels of the ignore label become background.

    Args:
        scan: Names path and series to whose slices structures refer.
        path: File of the reference.
        volume: The scan as it was read.
        task: Labels and channels.
        label_values: What the values of the file mean; empty = they are those of the task.

    Returns:
        Labels (D, H, W), uint8.

    Raises:
        UserError: If it cannot be read, lies on another grid, or has a value without a meaning.
    """
    if not label_values:
        label_values = {value: name for name, value in task.values.items()}
    names = dict.fromkeys(label_values.values())
    if names.keys().isdisjoint(task.labels):
        raise UserError(
            f"data.label_values names {', '.join(names)}, expected labels of the task {task.name} "
            f"({', '.join(task.labels)})"
        )
    modality = task.channels[0].modality
    # Structures of labels that the task lacks are not read.
    reference, values = read_reference(
        path, label_values, scan.path, scan.series, modality, kept=task.values
    )
    labels, grid, _ = orient(reference.array, reference.grid)
    check_grid("reference's", grid, "scan's", oriented_grid(volume.grid))
    target = task_values(labels, path, task, values)
    if task.ignore_label is not None:
        is_ignored = target == task.ignore_label
        target = np.where(is_ignored, 0, target).astype(np.uint8)
    return orientation_of(volume.grid).from_lps(target)


def write_results(
    paths: Mapping[tuple[str, str], Path],
    scan: Scan,
    volume: Volume,
    result: Segmentation,
    picture_voxels: PictureVoxels,
    task: Task,
    config: PredictConfig,
) -> None:
    """Write the files of a case in the order of `paths`.

    Args:
        paths: From `result_paths`.
        scan: DICOM results refer to its slices; its identity is shown by the viewer.
        volume: Grid and header of the scan. Its array is not used: `segment_case` has replaced the
            voxels by the labels, to free them.
        result: Labels in storage order, figures, probabilities and findings.
        picture_voxels: Voxels of the scan that the pictures need.
        task: Labels, and the window of the preview.
        config: Options of some kinds of files.

    Raises:
        UserError: If a file cannot be written.
    """
    structures = structures_of(task)
    grid = volume.grid
    header = volume.header
    for (kind, label), path in paths.items():
        if kind == "labels":
            write_labels(path, result.labels, grid, header, structures)
        elif kind == "uncertainty":
            assert result.disagreement is not None, "given where `has_views` is true"
            write_labels(path, result.disagreement, grid, header)
        elif kind == "masks":
            structure = next(structure for structure in structures if structure.name == label)
            _write_mask(path, result, structure, volume)
        elif kind == "probabilities":
            # A label that was not found has no probabilities: its file is zero everywhere.
            crops = result.probabilities.get(label, [])
            percent = paste_percent(crops, oriented_grid(grid))
            write_labels(path, orientation_of(grid).from_lps(percent), grid, header)
        elif kind == "preview":
            _write_preview(path, result, picture_voxels, task, structures)
        elif kind == "viewer":
            assert picture_voxels.packed is not None, (
                "`take_picture_voxels` has made it for the viewer"
            )
            identity = scan.identity_with(volume)
            _write_viewer(path, picture_voxels.packed, result, identity, task)
        else:  # one of `DICOM_KINDS`
            _write_on_slices(kind, path, scan, result.labels, task, config)


def _write_mask(path: Path, result: Segmentation, structure: Structure, volume: Volume) -> None:
    """Write the mask of one label: 1 inside, 0 outside."""
    mask = new_array(volume.grid.shape, np.uint8)
    # Plane by plane: the comparison of all voxels would be another volume beside the mask.
    for mask_plane, labels_plane in zip(mask, result.labels, strict=True):
        mask_plane[:] = labels_plane == structure.value
    write_labels(path, mask, volume.grid, volume.header, [replace(structure, value=1)])


def _write_viewer(
    path: Path, packed: PackedCase, result: Segmentation, identity: Identity, task: Task
) -> None:
    """Write the viewer of a case."""
    report = CaseReport(
        status=result.status,
        warnings=result.warnings,
        information=result.information,
        agreements=result.agreements,
        most_disputed_xyz_mm=result.most_disputed_xyz_mm,
        dice_at_least=result.dice_at_least,
        identity=identity,
    )
    statistics = ScanStatistics(result.statistics, result.total_statistics)
    write_case_viewer(path, packed, statistics, report, task)


def _write_on_slices(
    kind: str, path: Path, scan: Scan, labels: np.ndarray, task: Task, config: PredictConfig
) -> None:
    """Write a DICOM SEG or RTSTRUCT, which refers to the slices of the scan.

    Args:
        kind: One of `DICOM_KINDS`.
        path: The file.
        scan: The scan, a DICOM series.
        labels: Label map in its storage order.
        task: Labels and modality.
        config: Options of a DICOM SEG.
    """
    # Imported here: highdicom and pydicom take 60 MiB of memory.
    from medseg.io.dicom.read import open_slices
    from medseg.io.dicom.segmentation import write_segmentation
    from medseg.io.dicom.structure_set import write_structure_set

    structures = structures_of(task)
    slices = open_slices(scan.path, scan.series, task.channels[0].modality, scan.files)
    if kind == "dicom_seg":
        write_segmentation(
            path,
            labels,
            slices,
            structures,
            kind=config.dicom_seg.kind,
            keep_empty_frames=config.dicom_seg.keep_empty_frames,
        )
    else:
        write_structure_set(path, labels, slices, structures)


def _write_preview(
    path: Path,
    result: Segmentation,
    picture_voxels: PictureVoxels,
    task: Task,
    structures: Sequence[Structure],
) -> None:
    """Draw the preview, with the figures of each label in its legend."""
    # With many labels a line of the legend holds three of them, and has room for volumes only.
    has_volumes_only = len(task.labels) > MAX_FULL_LINES
    text_by_value = {}
    for name, value in task.labels.items():
        figures = written_figures(result.statistics.get(name, {}))
        texts = []
        for heading, text in figures.items():
            if heading == "ml":
                texts.append(f"{text} ml")
            elif not has_volumes_only:
                texts.append(f"{heading}: {text}")
        text_by_value[value] = "   ".join(texts)
    bounds = []
    if result.dice_at_least:
        bounds = [describe_bounds(result.dice_at_least)]
    title = path.name.removesuffix(ENDINGS["preview"])
    draw_preview(
        picture_voxels.slices,
        path,
        title,
        structures,
        figures=text_by_value,
        warnings=result.warnings,
        window=task.channels[0].window_hu,
        notes=bounds,
    )
