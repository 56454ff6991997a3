"""Cross-validation by patient, on whole scans and on harder ones that are made of them."""

import json
import shutil
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml
from hydra.core.hydra_config import HydraConfig

from medseg.cascade.bound import calibrate, count_covered
from medseg.config.overrides import text_of
from medseg.config.schema import CrossValidateConfig
from medseg.data.case_table import Case, count_folds, split_cases, write_case_table
from medseg.data.importers.formats import read_cases
from medseg.data.options import StageName
from medseg.data.reference import file_values
from medseg.errors import UserError
from medseg.evaluation.scoring import METRICS
from medseg.io.atomic import check_writable, replace_text
from medseg.io.tables import Formats, markdown_table, read_csv, write_csv
from medseg.report.spacings import distance_text
from medseg.runs.signature import plain
from medseg.studies.pieces import cut_partial_scans, oriented_labels, paint_scan
from medseg.studies.pooled import POOLED_MD, fold_costs, write_pooled
from medseg.studies.recipes import (
    BOUND,
    Step,
    check_experiments,
    coarse_arguments,
    experiments,
    key_of,
    label_values_argument,
    last_checkpoint,
    merge_arguments,
    note_recipe,
    recipe_of,
    run_steps,
    stage_steps,
    train_arguments,
    train_steps,
    without_folders,
)
from medseg.task import Task
from medseg.task_options import make_task
from medseg.weights.files import read_weights
from medseg.weights.model_folder import StageWeights, write_model_folder

Row = dict[str, Any]
# Column of folds.md to its heading.
COLUMNS = {
    "case": "case",
    "fold": "fold",
    "region": "region",
    "trust": "reference",
    "dice": "Dice",
    "nsd_1mm": "NSD 1 mm",
    "hd95_mm": "HD95 mm",
    "volume_pred_ml": "predicted ml",
    "volume_ref_ml": "reference ml",
    "share_in_crop": "in the crop",
}
METRICS_FILE = "metrics.csv"
SINGLE = StageName.single.value
CASCADE = (StageName.coarse.value, StageName.fine.value)
MODEL = "model"
LEVEL = 0.9  # of the lower bound on Dice
TRUSTED = ("", "reference")
# Headings of the tables in folds.md; the table of the whole scans has none.
WHOLE = ""
PIECES = "Partial scans cut from these scans:"
DISEASED = "These scans with disease painted into their regions:"


def cross_validate(config: CrossValidateConfig) -> int:
    """Train, predict and score fold by fold; a study that was stopped continues when started again.

    Writes `scores/` (as `evaluate` does), `metrics.csv` with the scores of all held-out cases,
    `folds.csv` with one row per case and region, `folds.md`, a table for readers, the pooled
    figures of `medseg.studies.pooled`, and `model/`, a model folder with the networks of all folds.

    Raises:
        UserError: If the folds, the experiments or the references cannot be used.
        SystemExit: With the exit code of the command that failed.
    """
    output = Path(config.output)
    arguments = train_arguments(HydraConfig.get().overrides.task, CrossValidateConfig)
    is_cascade = config.stage.name is not StageName.single
    if is_cascade:
        _check_cascade(config, arguments)
    cases = read_cases(Path(str(config.cases)), config.data.labels_column)
    check_folds(cases, config.num_folds)
    check_writable(output)
    task = make_task(config.task)
    label_values = _label_map_values(config)
    if config.diseased and not task.is_ct:
        raise UserError(
            "diseased=true paints in HU, but the first channel of the task is no CT; leave it out"
        )
    organs = _organ_values(task, label_values)
    folders = [output / f"fold_{fold}" for fold in range(config.num_folds)]
    scored: dict[str, tuple[int, Case]] = {}
    names_by_heading: dict[str, set[str]] = {WHOLE: set(), PIECES: set(), DISEASED: set()}
    tables: list[Path] = []
    for fold, folder in enumerate(folders):
        split = split_cases(
            cases,
            fold=fold,
            num_folds=config.num_folds,
            test_patients=config.data.test_patients,
        )
        held_out = held_out_scans(split.val, organs, config)
        for heading, scans in held_out.items():
            names_by_heading[heading].update(case.name for case in scans)
            scored |= {case.name: (fold, case) for case in scans}
        tables.append(write_case_table(folder / "held_out.csv", list(chain(*held_out.values()))))
    reference = write_case_table(output / "scored.csv", [case for _, case in scored.values()])
    if is_cascade:
        steps = _cascade_steps(config, arguments, cases, folders, tables)
    else:
        steps = _single_steps(config, arguments, cases, folders, tables)
    # The folds share the trainings on phantoms: equal commands run once.
    run_steps(list(dict.fromkeys(map(tuple, steps))))
    run_steps([_evaluate_step(reference, config)])
    rows = fold_rows(scored, output, organs, is_cascade)
    write_rows(rows, output, names_by_heading)
    shutil.copyfile(output / "scores" / METRICS_FILE, output / METRICS_FILE)
    whole_rows = [row for row in rows if row["case"] in names_by_heading[WHOLE]]
    cases_by_name = {name: case for name, (_, case) in scored.items()}
    write_pooled(whole_rows, cases_by_name, fold_costs(folders), output)
    if is_cascade:
        write_bound(whole_rows, cases_by_name, config)
    pooled = (output / POOLED_MD).read_text(encoding="utf-8")
    stages = CASCADE if is_cascade else (SINGLE,)
    write_model_folder(output / MODEL, _networks(folders, stages, output / BOUND), pooled)
    print((output / "folds.md").read_text(encoding="utf-8"))
    print(pooled)
    print(f"next: medseg predict input=<scan> output=<folder> weights={output / MODEL}")
    return 0


def _networks(
    folders: Sequence[Path], stages: Sequence[str], bound_file: Path
) -> list[StageWeights]:
    """Read the trained networks of all folds, with the bound on Dice of the study.

    Args:
        folders: Folder of each fold.
        stages: Stages of the model.
        bound_file: From `write_bound`; it need not be there.
    """
    bound = None
    if bound_file.is_file():
        bound = json.loads(bound_file.read_text(encoding="utf-8"))["bound"]
    networks = []
    for fold, folder in enumerate(folders):
        for stage in stages:
            metadata, weights = read_weights(last_checkpoint(folder / stage), stage, stage)
            metadata["dice_bound"] = bound
            networks.append(StageWeights(without_folders(metadata), weights, str(fold)))
    return networks


def _check_cascade(config: CrossValidateConfig, arguments: Sequence[str]) -> None:
    """Refuse experiments that cannot be trained, and arguments that choose one stage.

    Raises:
        UserError: With the key.
    """
    for key in map(key_of, arguments):
        if key in ("experiment", "stage"):
            raise UserError(
                f"{key}: cross_validate trains both stages of a cascade, but this is the stage "
                f"{config.stage.name} alone; name an experiment of each stage by coarse= and "
                "fine=, or choose stage=single"
            )
    # With the table: a rule of spacing may ask for its cases.
    check_experiments(config, [*arguments, f"data.cases={Path(str(config.cases)).absolute()}"])


def _cascade_steps(
    config: CrossValidateConfig,
    arguments: Sequence[str],
    cases: Sequence[Case],
    folders: Sequence[Path],
    tables: Sequence[Path],
) -> list[Step]:
    """Make the commands that train both stages of each fold and predict its held-out cases.

    The fine stage of a fold may see what the coarse stages of all folds say about their held-out
    cases, so all coarse stages are trained first.
    """
    output = Path(config.output)
    coarse_steps: list[Step] = []
    fine_steps: list[Step] = []
    coarse_checkpoints = coarse_arguments(config, folders)
    for fold, (folder, table) in enumerate(zip(folders, tables, strict=True)):
        note_recipe(folder, recipe_of(experiments(config), cases, arguments))
        data = _fold_arguments(config, arguments, fold)
        coarse_steps += stage_steps(config, "coarse", folder, data, output)
        fine_steps += stage_steps(config, "fine", folder, data, output, coarse_checkpoints)
        checkpoints = {stage: last_checkpoint(folder / stage) for stage in CASCADE}
        fine_steps.append(_predict_step(table, config, checkpoints))
    return [*coarse_steps, *fine_steps]


def _single_steps(
    config: CrossValidateConfig,
    arguments: Sequence[str],
    cases: Sequence[Case],
    folders: Sequence[Path],
    tables: Sequence[Path],
) -> list[Step]:
    """Make the commands that train the one stage of each fold and predict its held-out cases."""
    output = Path(config.output)
    cache = f"data.cache={output / 'cache'}"
    steps: list[Step] = []
    for fold, (folder, table) in enumerate(zip(folders, tables, strict=True)):
        note_recipe(folder, recipe_of({}, cases, arguments))
        run_dir = folder / SINGLE
        data = _fold_arguments(config, arguments, fold)
        steps += train_steps(run_dir, *merge_arguments([cache], data))
        steps.append(_predict_step(table, config, {SINGLE: last_checkpoint(run_dir)}))
    return steps


def _label_map_values(config: CrossValidateConfig) -> dict[int, str]:
    """Read the meaning of the values in the label maps.

    Raises:
        UserError: If the reference is not one label map of each case.
    """
    labels = file_values(config.data.label_values or {})
    if not all(isinstance(value, int) for value in labels):
        raise UserError(
            "data.label_values: cross_validate reads label maps, but these are names of masks or "
            "DICOM structures; save one label map of each case"
        )
    return {value: label for value, label in labels.items() if isinstance(value, int)}


def _organ_values(task: Task, label_values: Mapping[int, str]) -> dict[str, list[int]]:
    """Map each region of the task, or each label if it has no regions, to its values in files."""
    if task.regions:
        labels_of_organ = {region.name: region.labels for region in task.regions}
    else:
        labels_of_organ = {name: (name,) for name in task.labels}
    return {
        organ: [value for value, label in label_values.items() if label in labels]
        for organ, labels in labels_of_organ.items()
    }


def held_out_scans(
    cases: Sequence[Case], organs: Mapping[str, Sequence[int]], config: CrossValidateConfig
) -> dict[str, list[Case]]:
    """Make the scans that a fold scores: its held-out cases, and the harder scans made of them.

    Args:
        cases: Held-out cases of the fold; those without labels are predicted, but not cut.
        organs: Name of each organ to its values in the label files.
        config: Names the folder, and says whether partial and diseased scans are made.

    Returns:
        Heading in `folds.md` to the scans of its table.
    """
    output = Path(config.output)
    partial: list[Case] = []
    diseased: list[Case] = []
    labelled = [case for case in cases if case.labels]
    if config.pieces:
        for case in labelled:
            partial += cut_partial_scans(case, organs, output / "pieces")
    if config.diseased:
        for case in labelled:
            diseased += paint_scan(case, list(organs.values()), output / "diseased")
    return {WHOLE: list(cases), PIECES: partial, DISEASED: diseased}


def _fold_arguments(
    config: CrossValidateConfig, arguments: Sequence[str], fold: int
) -> tuple[str, ...]:
    """Join the arguments of `train` that the user gave with those that select a fold."""
    place = [
        f"data.cases={Path(str(config.cases)).absolute()}",
        f"data.fold={fold}",
        f"data.num_folds={config.num_folds}",
        "data.val_patients=[]",
    ]
    return merge_arguments(["data.test_patients=[]"], arguments, place)


def _predict_step(
    table: Path, config: CrossValidateConfig, checkpoints: Mapping[str, Path]
) -> Step:
    """Make the command that predicts the cases of a table.

    Args:
        table: Held-out cases of a fold.
        config: Names the folder of the study, and what a prediction cannot read from a checkpoint.
        checkpoints: Key of `predict` to the checkpoint of the fold.
    """
    return [
        "predict",
        f"input={table}",
        f"output={Path(config.output) / 'predictions'}",
        *(f"{key}={path}" for key, path in checkpoints.items()),
        f"hu_slope={config.data.hu_slope}",
        f"hu_offset={config.data.hu_offset}",
        f"trusted_targets={text_of(config.trusted_targets)}",
    ]


def _evaluate_step(reference: Path, config: CrossValidateConfig) -> Step:
    """Make the command that scores the predictions of all folds against a case table."""
    output = Path(config.output)
    # An experiment may choose the task or change it, so the task is written out.
    task_file = output / "task.yaml"
    replace_text(task_file, yaml.safe_dump({"task": plain(config.task)}, sort_keys=False))
    return [
        "evaluate",
        f"pred={output / 'predictions'}",
        f"ref={reference}",
        f"output={output / 'scores'}",
        f"task={task_file}",
        label_values_argument(config.data.label_values or {}),
    ]


def check_folds(cases: Sequence[Case], num_folds: int) -> None:
    """Refuse folds of a case table that a cross-validation would leave out or score twice.

    Raises:
        UserError: If the table has another number of folds, a fold that validates no case, or
            validates a case in two.
    """
    count = count_folds(cases)
    if count == 1:
        raise UserError(
            "the case table has one fold, which is no cross-validation; "
            "train on it with medseg train"
        )
    if count not in (None, num_folds):
        raise UserError(
            f"num_folds={num_folds}: the case table has {count} folds; give num_folds={count}"
        )
    if count is not None:
        _check_validation(cases, count)
    for case in cases:
        if case.fold_sides.count("val") > 1:
            raise UserError(
                f"the case table validates {case.name!r} in several folds, but a cross-validation "
                "scores each case once; keep one val in its columns fold_0, fold_1, …"
            )


def _check_validation(cases: Sequence[Case], num_folds: int) -> None:
    """Refuse a fold that validates no case, as if a part of LUNA16 was not downloaded.

    Raises:
        UserError: With the number of the fold, and the column to correct.
    """
    # A table has either one column fold_N per fold, or the column fold with a number per case.
    cases_with_sides = [case for case in cases if case.fold_sides]
    for number in range(num_folds):
        if cases_with_sides:
            is_validated = any(case.fold_sides[number] == "val" for case in cases_with_sides)
            cure = (
                f"mark some as val in its column fold_{number}, "
                "or remove the column and number those after it again"
            )
        else:
            is_validated = any(case.fold == number for case in cases)
            cure = "number the folds in its column fold from 0 without a gap"
        if not is_validated:
            raise UserError(
                f"fold {number} of the case table validates no case, "
                f"so there is nothing to score; {cure}"
            )


def fold_rows(
    scored: Mapping[str, tuple[int, Case]],
    output: Path,
    organs: Mapping[str, Sequence[int]],
    is_cascade: bool,
) -> list[Row]:
    """Make one row per scored case and region, with its fold and scores.

    Args:
        scored: Name of a case to its fold and the case.
        output: Folder of the study.
        organs: Name of each region to its values in the label files.
        is_cascade: Whether two stages made the predictions. Their rows have the agreement of the
            stages and the share in the crop too.
    """
    rows = []
    for score in read_csv(output / "scores" / METRICS_FILE):
        name, region = score["case"], score["region"]
        fold, case = scored[name]
        report = json.loads((output / "predictions" / f"{name}.json").read_text(encoding="utf-8"))
        row = {
            "case": name,
            "fold": fold,
            "region": region,
            "trust": score["trust"],
            **{metric: float(score[metric]) for metric in METRICS},
            "total_s": round(report["durations_s"]["total"], 1),
        }
        if is_cascade:
            box = report["boxes"].get(region)
            # Two stages that agree on an empty region say nothing about its Dice.
            row["agreement"] = None if box is None else report["agreements"].get(region)
            row["share_in_crop"] = share_in_crop(case, organs[region], box)
        rows.append(row)
    return rows


def share_in_crop(case: Case, values: Sequence[int], box: dict[str, Any] | None) -> float:
    """Measure the share of a region's reference voxels that lies in the crop of the fine stage.

    Args:
        case: Case with labels.
        values: Values of the region in the reference file.
        box: The region's entry under `boxes` in the report of the prediction; None if the coarse
            stage did not find the region.

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


def write_rows(rows: Sequence[Row], output: Path, groups: Mapping[str, Set[str]]) -> None:
    """Write `folds.csv` and `folds.md`.

    Args:
        rows: From `fold_rows`.
        output: Folder.
        groups: Line above each table to the names of its scans.
    """
    write_csv(output / "folds.csv", rows)
    sections = []
    for heading, names in groups.items():
        group_rows = [row for row in rows if row["case"] in names]
        if not group_rows:
            continue
        section = _section(group_rows)
        if heading:
            section = f"{heading}\n\n{section}"
        sections.append(section)
    replace_text(output / "folds.md", "\n".join(sections))


def write_bound(
    rows: Sequence[Row], cases: Mapping[str, Case], config: CrossValidateConfig
) -> None:
    """Calibrate the lower bound on Dice on the whole scans.

    Writes `bound.json`, which `make_weights` stores, and appends a line to `folds.md`.

    Args:
        rows: From `fold_rows`, of whole scans. Those count whose region was found and whose
            reference is not said to be doubtful.
        cases: Cases by name.
        config: Names the experiments, which the file keeps, and the folder.
    """
    output = Path(config.output)
    # Per fold and patient: agreement of the stages and Dice of each region of each scan.
    folds: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        if row["agreement"] is None or row["trust"] not in TRUSTED:
            continue
        patient = cases[row["case"]].patient or row["case"]
        fold_scores = folds.setdefault(row["fold"], {})
        fold_scores.setdefault(patient, []).append((row["agreement"], row["dice"]))
    scores: dict[str, list[tuple[float, float]]] = {}
    for fold_scores in folds.values():
        scores |= fold_scores
    (output / BOUND).unlink(missing_ok=True)
    bound = calibrate(scores, LEVEL)
    if bound is None:
        return
    calibrated = {"bound": asdict(bound), "experiments": experiments(config)}
    replace_text(output / BOUND, json.dumps(calibrated))
    median_bound = median(bound.at(agreement) for agreement, _ in chain(*scores.values()))
    text = (
        f"Lower bound on Dice at a level of {LEVEL:.0%}: "
        f"1 - {bound.factor:.3g} * (1 - agreement of the stages + {bound.offset:g}), "
        f"from {len(scores)} patients; its median over their regions is {median_bound:.3f}."
    )
    covered = count_covered(list(folds.values()), LEVEL)
    if covered is not None:
        text += (
            " Each fold tested with the bound that the other folds give: "
            f"{covered} patients reach it with every region."
        )
    table = (output / "folds.md").read_text(encoding="utf-8")
    replace_text(output / "folds.md", f"{table}\n{text}\n")


def _section(rows: Sequence[Row]) -> str:
    """Format a table with its summary.

    The summary states mean and worst Dice by trust where the reference has the region, and the
    largest predicted volume where it does not.
    """
    formats: Formats = {
        "dice": ".4f",
        "nsd_1mm": ".3f",
        "volume_pred_ml": ".0f",
        "volume_ref_ml": ".0f",
        "hd95_mm": distance_text,
        "share_in_crop": _percent,
    }
    columns = {key: heading for key, heading in COLUMNS.items() if key in rows[0]}
    lines = [markdown_table(rows, columns, formats)]
    present = [row for row in rows if row["volume_ref_ml"] > 0]
    absent = [row for row in rows if row["volume_ref_ml"] == 0]
    for trust in dict.fromkeys(row["trust"] for row in present):
        scores = [row for row in present if row["trust"] == trust]
        worst = min(scores, key=lambda row: row["dice"])
        mean = sum(row["dice"] for row in scores) / len(scores)
        lines.append(
            f"Mean Dice, {trust or 'all'} ({len(scores)}): {mean:.4f}, "
            f"worst {worst['dice']:.4f}: {_where(worst)}\n"
        )
    if absent:
        largest = max(absent, key=lambda row: row["volume_pred_ml"])
        lines.append(
            f"Largest false-positive volume where the region is absent ({len(absent)}): "
            f"{largest['volume_pred_ml']:.1f} ml: {_where(largest)}\n"
        )
    return "\n".join(lines)


def _where(row: Row) -> str:
    return f"{row['case']} {row['region']} (scores/overlays/{row['case']}.png)"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
