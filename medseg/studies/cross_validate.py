"""Cross-validation by patient, on whole scans and on partial ones that are cut out of them."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hydra.core.hydra_config import HydraConfig

from medseg.build.cases import file_values
from medseg.build.task import make_task
from medseg.config.schema import CrossValidateConfig
from medseg.data.case_table import Case, split_cases, write_case_table
from medseg.data.importers.formats import read_cases
from medseg.data.task import Task
from medseg.errors import require
from medseg.evaluation.scoring import METRICS
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.io.atomic import check_writable, replace_text
from medseg.io.read import read_image, read_labels
from medseg.io.write import write_image, write_labels
from medseg.preprocess.orient import orient
from medseg.report.spacings import distance_text
from medseg.report.tables import Formats, markdown_table, read_csv, write_csv
from medseg.studies.recipes import Step, cascade_steps, label_values_argument, last_checkpoint, run_steps

Row = dict[str, Any]
# Column of folds.md to its heading.
COLUMNS = {
    "case": "case", "fold": "fold", "region": "region", "trust": "reference", "dice": "Dice", "nsd_1mm": "NSD 1 mm", "hd95_mm": "HD95 mm",
    "volume_pred_ml": "predicted ml", "volume_ref_ml": "reference ml", "share_in_crop": "in the crop",
}  # fmt: skip

# Shares of the organ's height in a part with one of its ends, and in the middle part.
SHARE_OF_END = 0.25
SHARE_OF_MIDDLE = 0.35
# A lower organ is not cut.
LEAST_HEIGHT_MM = 100.0
# A part without organ keeps this distance, since references may stop a slice early, and is at least this high.
GAP_MM = 5.0
LEAST_MM = 15.0


def cross_validate(config: CrossValidateConfig) -> int:
    """Train, predict and score fold by fold; a study that was stopped continues when started again.

    Writes `scores/` (as `evaluate` does), `folds.csv` with one row per case and region, and `folds.md`, a table for readers.

    Raises:
        SystemExit: With the exit code of the command that failed.
    """
    output, table = Path(config.output), Path(config.cases).absolute()
    cases = read_cases(Path(config.cases), config.data.labels_column)
    check_writable(output)
    task, given = make_task(config.task), file_values(config.data.label_values or {})
    values = {value: label for value, label in given.items() if isinstance(value, int)}
    require(
        len(values) == len(given),
        "data.label_values: cross_validate reads label maps, but these are names of masks or DICOM structures; save one label map of each case",
    )
    label_values = label_values_argument(config.data.label_values or {})
    task_given = [one for one in HydraConfig.get().overrides.task if one.startswith("task")]
    scored: dict[str, tuple[int, Case]] = {}
    steps: list[Step] = []
    for fold in range(config.num_folds):
        held_out = list(split_cases(cases, fold=fold, num_folds=config.num_folds).val)
        if config.pieces:
            organ = [value for value, name in values.items() if name in task.labels]
            held_out += [part for case in held_out if case.labels for part in cut_partial_scans(case, organ, output / "pieces")]
        scored |= {case.name: (fold, case) for case in held_out}
        folder = output / f"fold_{fold}"
        data = [
            f"data.cases={table}", f"data.fold={fold}", f"data.num_folds={config.num_folds}", "data.val_patients=[]",
            "data.test_patients=[]", f"data.labels_column={config.data.labels_column}", label_values,
        ]  # fmt: skip
        steps += cascade_steps(config, folder, data, output)
        steps.append(
            [
                "predict",
                f"input={write_case_table(folder / 'held_out.csv', held_out)}",
                f"output={output / 'predictions'}",
                *(f"{stage}={last_checkpoint(folder / stage)}" for stage in ("coarse", "fine")),
            ]
        )
    reference = write_case_table(output / "scored.csv", [case for _, case in scored.values()])
    steps.append(
        [
            "evaluate",
            f"pred={output / 'predictions'}",
            f"ref={reference}",
            f"output={output / 'scores'}",
            label_values,
            *task_given,
        ]
    )
    # The folds share the trainings on phantoms: equal commands run once.
    run_steps(list(dict.fromkeys(map(tuple, steps))))
    write_rows(fold_rows(scored, output, task, values), output, {case.name for case in cases})
    print((output / "folds.md").read_text(encoding="utf-8"))
    return 0


def fold_rows(scored: Mapping[str, tuple[int, Case]], output: Path, task: Task, label_values: dict[int, str]) -> list[Row]:
    """Make one row per scored case and region: its fold, its scores, and how much of the region the crop contained."""
    region_labels = {region.name: region.labels for region in task.regions}
    rows = []
    for score in read_csv(output / "scores" / "metrics.csv"):
        name, region = score["case"], score["region"]
        fold, case = scored[name]
        report = json.loads((output / "predictions" / f"{name}.json").read_text(encoding="utf-8"))
        region_values = [value for value, label in label_values.items() if label in region_labels[region]]
        rows.append(
            {
                "case": name,
                "fold": fold,
                "region": region,
                "trust": score["trust"],
                **{metric: float(score[metric]) for metric in METRICS},
                "share_in_crop": share_in_crop(case, region_values, report["boxes"].get(region)),
                "total_s": round(report["durations_s"]["total"], 1),
            }
        )
    return rows


def share_in_crop(case: Case, values: Sequence[int], box: dict[str, Any] | None) -> float:
    """Measure the share of a region's reference voxels that lies in the crop of the fine stage.

    Args:
        case: Case with labels.
        values: Values of the region in the reference file.
        box: The region's entry under `boxes` in the report of the prediction; None if the coarse stage did not find the region.

    Returns:
        Share in [0, 1]; 1 if the reference has no such voxel.
    """
    labels, grid = oriented_labels(case)
    indices = np.argwhere(np.isin(labels, values))
    if len(indices) == 0:
        return 1.0
    if box is None:
        return 0.0
    corners = grid.world_to_index_zyx(np.array(box["corners_xyz_mm"]))
    low, high = corners.min(axis=0), corners.max(axis=0)
    sizes = np.subtract(box["voxels"]["stop"], box["voxels"]["start"])
    # The corners are centres of voxels: the crop extends half a crop voxel beyond them.
    half = (high - low) / np.maximum(sizes - 1, 1) / 2
    return float(np.all((indices >= low - half) & (indices <= high + half), axis=1).mean())


def cut_partial_scans(case: Case, values: Sequence[int], folder: Path) -> list[Case]:
    """Cut a case along z and write the parts with their labels; existing files are kept.

    Args:
        case: Case with labels.
        values: Values of the organ in its label file.
        folder: Folder of `<case>_<part>.nii.gz` and `<case>_<part>_labels.nii.gz`.

    Returns:
        The parts as cases; see `slice_ranges` for the parts that a scan has.
    """
    labels, grid = oriented_labels(case)
    has_organ = np.array([np.isin(plane, values).any() for plane in labels])
    ranges = dict(slice_ranges(has_organ, grid.spacing_mm[0]))
    paths = {name: (folder / f"{case.name}_{name}.nii.gz", folder / f"{case.name}_{name}_labels.nii.gz") for name in ranges}
    if not all(path.is_file() for pair in paths.values() for path in pair):
        scan = read_image(case.image, case.series)
        image, image_grid, _ = orient(scan.array, scan.grid)
        for name, (start, stop) in ranges.items():
            box = VoxelBox((start, 0, 0), (stop, *image.shape[1:]))
            write_image(paths[name][0], image[box.slices()], image_grid.crop(box))
            write_labels(paths[name][1], labels[box.slices()], grid.crop(box))
    return [
        replace(case, name=f"{case.name}_{name}", image=image_path, labels=labels_path, series=None)
        for name, (image_path, labels_path) in paths.items()
    ]


def slice_ranges(has_organ: np.ndarray, step_mm: float) -> Iterator[tuple[str, tuple[int, int]]]:
    """Choose the slices of each part.

    Args:
        has_organ: Per slice, from the feet up, whether it contains the organ; all may be False.
        step_mm: Distance between slices.

    Yields:
        Name and half-open range of slices. `bases` and `apices` extend to the end of the scan and exist only if the organ ends before
        it; `below` and `above` contain no organ.

    Example:
        >>> dict(slice_ranges(np.array([False] * 6 + [True] * 20), 5.0))
        {'below': (0, 5), 'bases': (0, 11), 'middle': (12, 20)}
    """
    slices = np.flatnonzero(has_organ)
    if len(slices) == 0:
        return
    first, stop, end = int(slices[0]), int(slices[-1]) + 1, len(has_organ)
    height = stop - first
    gap, least = math.ceil(GAP_MM / step_mm), math.ceil(LEAST_MM / step_mm)
    share, margin = math.ceil(SHARE_OF_END * height), (height - math.ceil(SHARE_OF_MIDDLE * height)) // 2
    if first - gap >= least:
        yield "below", (0, first - gap)
    if height * step_mm >= LEAST_HEIGHT_MM:
        if first > 0:
            yield "bases", (0, first + share)
        yield "middle", (first + margin, stop - margin)
        if stop < end:
            yield "apices", (stop - share, end)
    if end - stop - gap >= least:
        yield "above", (stop + gap, end)


def oriented_labels(case: Case) -> tuple[np.ndarray, VoxelGrid]:
    """Read the labels of a case in the orientation of networks, with their grid."""
    assert case.labels is not None, "only cases with labels are cut and scored"
    volume = read_labels(case.labels)
    labels, grid, _ = orient(volume.array, volume.grid)
    return labels, grid


def write_rows(rows: Sequence[Row], output: Path, whole: Set[str]) -> None:
    """Write `folds.csv` and `folds.md`.

    Args:
        rows: From `fold_rows`.
        output: Folder.
        whole: Names of the whole scans; partial scans get a table of their own.
    """
    write_csv(output / "folds.csv", rows)
    text = _section([row for row in rows if row["case"] in whole])
    if partial := [row for row in rows if row["case"] not in whole]:
        text += f"\nPieces cut out of these scans:\n\n{_section(partial)}"
    replace_text(output / "folds.md", text)


def _section(rows: Sequence[Row]) -> str:
    """Format a table with a summary: mean and worst Dice by trust where the reference has the region, else the largest volume found."""
    formats: Formats = {
        "dice": ".4f", "nsd_1mm": ".3f", "volume_pred_ml": ".0f", "volume_ref_ml": ".0f", "hd95_mm": distance_text, "share_in_crop": _percent,
    }  # fmt: skip
    lines = [markdown_table(rows, COLUMNS, formats)]
    present = [row for row in rows if row["volume_ref_ml"] > 0]
    for trust in dict.fromkeys(row["trust"] for row in present):
        scores = [row for row in present if row["trust"] == trust]
        worst = min(scores, key=lambda row: row["dice"])
        mean = sum(row["dice"] for row in scores) / len(scores)
        lines.append(f"Mean Dice, {trust or 'all'} ({len(scores)}): {mean:.4f}, worst {worst['dice']:.4f}: {_where(worst)}\n")
    if absent := [row for row in rows if row["volume_ref_ml"] == 0]:
        most = max(absent, key=lambda row: row["volume_pred_ml"])
        lines.append(
            f"Largest false-positive volume where the region is absent ({len(absent)}): {most['volume_pred_ml']:.1f} ml: {_where(most)}\n"
        )
    return "\n".join(lines)


def _where(row: Row) -> str:
    return f"{row['case']} {row['region']} (scores/overlays/{row['case']}.png)"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
