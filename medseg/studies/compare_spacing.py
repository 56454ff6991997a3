"""Spacing comparison: strategies trained on the same samples and scored on the same held-out cases."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from hydra.core.hydra_config import HydraConfig

from medseg.config.schema import CompareSpacingConfig
from medseg.console import say
from medseg.data.case_table import write_case_table
from medseg.data.cases import find_sources
from medseg.data.spacing import make_grid_rule
from medseg.errors import EXIT_FAILED, UserError, require
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.geometry.sizes import Shape, network_size
from medseg.io.atomic import check_writable, replace_text
from medseg.io.read import read_grid
from medseg.io.tables import read_csv, write_csv
from medseg.memory.accounting import StepMemory
from medseg.planning.step import count_memory
from medseg.preprocess.options import SpacingOptions
from medseg.preprocess.orient import oriented_grid
from medseg.report.plots import Panel, draw_panels
from medseg.report.spacings import (
    ALL,
    STAGES,
    THICKNESSES,
    Strategy,
    markdown,
    means_of,
    prediction_costs,
)
from medseg.runs.folder import read_summary
from medseg.runs.signature import plain, signature
from medseg.studies.recipes import (
    Step,
    check_names,
    compose_train,
    failure_of,
    folder_name,
    label_values_argument,
    last_checkpoint,
    merge_arguments,
    run_until_failure,
    train_arguments,
    train_steps,
)
from medseg.training.network import find_divisor
from medseg.training.options import TrainConfig

COSTS = ("spacing", "saved_bytes_per_voxel", "step_peak_mib", "whole_peak_mib", "step_s", "train_s")
SCORES = (
    "case",
    "slice_mm",
    "region",
    "trust",
    "dice",
    "nsd_1mm",
    "nsd_2mm",
    "hd95_mm",
    "predict_s",
    "predict_peak_gb",
)
COLUMNS = ("row", "failure", *SCORES, *(f"{stage}_{cost}" for stage in STAGES for cost in COSTS))


class Stage(NamedTuple):
    """Stage of a row.

    Attributes:
        name: `coarse` or `fine`.
        arguments: Its arguments of `train`.
        config: The configuration that they compose.
        run_dir: Run folder, which rows with the same configuration share.
    """

    name: str
    arguments: tuple[str, ...]
    config: TrainConfig
    run_dir: Path


def compare_spacing(config: CompareSpacingConfig) -> int:
    """Train, predict and score every row; write `comparison.csv`, `comparison.md` and `comparison.png` after each.

    Returns:
        0, or 1 if a row failed; the rows after it still run.
    """
    output = Path(config.output).absolute()
    given = train_arguments(HydraConfig.get().overrides.task, CompareSpacingConfig)
    rows = {
        name: stages_of(name, config, given, output / "runs") for name in config.rows
    }  # all are checked before the first runs
    check_names(list(rows), "runs")
    cases = [
        case
        for case in find_sources(config.data, config.task)[0].split.test
        if case.labels is not None
    ]
    require(
        bool(cases),
        "data.test_patients: no case with labels is held out; name patients of the case table",
    )
    grids = {case.name: oriented_grid(read_grid(case.image, case.series)) for case in cases}
    check_writable(output)
    table = write_case_table(output / "held_out.csv", cases)
    patients = {case.name: case.patient for case in cases}
    reference = [
        label_values_argument(config.data.label_values or {}),
        *(one for one in given if one.startswith("task")),
    ]
    failed: dict[Path, str] = {}
    strategies = []
    for number, (name, stages) in enumerate(rows.items(), start=1):
        print(f"\nrow {number} of {len(rows)}: {name}", flush=True)
        try:
            strategies.append(
                run_row(name, stages, output / folder_name(name), table, grids, reference, failed)
            )
        except UserError as error:
            say(f"{name}: {error}")
            strategies.append(Strategy(name, {}, [], {}, str(error)))
        write(strategies, output, patients)
    print("\n" + (output / "comparison.md").read_text(encoding="utf-8"))
    print(f"{output / 'comparison.csv'}, comparison.md, comparison.png")
    return (
        EXIT_FAILED if any(strategy.failure or strategy.missing for strategy in strategies) else 0
    )


def stages_of(
    row: str, config: CompareSpacingConfig, given: Sequence[str], runs: Path
) -> list[Stage]:
    """Compose both stages of a row.

    Args:
        row: Name of the row.
        config: Names the arguments of each stage.
        given: Arguments that all rows share.
        runs: Folder of the runs.

    Raises:
        UserError: If `train` would refuse a stage.
    """
    stages = []
    for name in STAGES:
        own = [getattr(config.stages, name), getattr(config.rows[row], name)]
        arguments = merge_arguments(
            [f"stage={name}", f"seed={config.seed}", f"steps={config.steps}"], given, *own
        )
        composed = compose_train([*arguments, "run_dir=none"], f"rows.{row}.{name}")
        stages.append(
            Stage(name, arguments, composed, runs / f"{name}-{signature(plain(composed))}")
        )
    return stages


def run_row(
    name: str,
    stages: Sequence[Stage],
    folder: Path,
    table: Path,
    grids: Mapping[str, VoxelGrid],
    reference: Sequence[str],
    failed: dict[Path, str],
) -> Strategy:
    """Train both stages of a row, predict and score the held-out cases; finished trainings and predictions are kept.

    Args:
        name: Name of the row.
        stages: Coarse and fine.
        folder: Folder of the row.
        table: Case table of the held-out cases.
        grids: Name of each held-out case to its oriented grid.
        reference: Arguments of `evaluate` that give the meaning of the reference labels.
        failed: Runs that failed in an earlier row, and why; a run that fails now is added.

    Raises:
        UserError: If a stage could not be trained, or nothing could be predicted or scored.
    """
    for stage in stages:
        train(stage, failed)
    coarse, fine = stages
    # Named after the runs: results of other runs must not be scored if a case fails now.
    of_runs = f"{coarse.run_dir.name}-{fine.run_dir.name}"
    predictions, scores = folder / "predictions" / of_runs, folder / "scores" / of_runs
    trainer = fine.config.trainer
    predictions.mkdir(
        parents=True, exist_ok=True
    )  # `predict` writes a single case into a folder only if the folder exists
    predict_step: Step = [
        "predict",
        f"input={table}",
        f"output={predictions}",
        f"accelerator={trainer.accelerator.value}",
        *([f"threads={trainer.threads}"] if trainer.threads else []),
        *(f"{stage.name}={last_checkpoint(stage.run_dir)}" for stage in stages),
    ]
    predict_failure = failure_of(predict_step)
    reports = {
        case: json.loads(path.read_text(encoding="utf-8"))
        for case in grids
        if (path := predictions / f"{case}.json").is_file()
    }
    reasons = failed_predictions(predictions)
    if predict_failure or not reports:
        of_cases = "; ".join(f"{case}: {reason}" for case, reason in reasons.items())
        raise UserError(f"no case could be predicted: {of_cases or predict_failure}")
    files = [f"pred={predictions}", f"ref={table}", f"output={scores}"]
    evaluate_step = ["evaluate", *files, "pictures=false", *reference]
    if evaluate_failure := failure_of(evaluate_step):
        raise UserError(f"no case could be scored: {evaluate_failure}")
    summary = json.loads((scores / "summary.json").read_text(encoding="utf-8"))
    without = summary["without_prediction"]
    missing = {case: reasons.get(case, "no prediction") for case in without} | summary["failed"]
    entries = read_scores(scores / "metrics.csv", grids, reports)
    shapes = [crop_shape(fine.config, report) for report in reports.values()]
    crops = [shape for shape in shapes if shape is not None]
    costs = {
        coarse.name: stage_costs(
            coarse,
            max((whole_shape(coarse.config, grid) for grid in grids.values()), key=math.prod),
        ),
        fine.name: stage_costs(fine, max(crops, key=math.prod, default=None)),
    }
    return Strategy(name, costs, entries, missing)


def failed_predictions(predictions: Path) -> dict[str, str]:
    """Read why cases have no prediction, from the `summary.csv` of the batch: case to its message."""
    path = predictions / "summary.csv"
    rows = read_csv(path) if path.is_file() else []
    return {row["case"]: row["warnings"] for row in rows if row["status"] == "failed"}


def train(stage: Stage, failed: dict[Path, str]) -> None:
    """Train or resume a stage; a run that failed in an earlier row is not tried again.

    Raises:
        UserError: If the training failed.
    """
    if stage.run_dir not in failed and (
        code := run_until_failure(train_steps(stage.run_dir, *stage.arguments))
    ):
        message = (
            read_summary(stage.run_dir).get("message") or f"exit code {code}; see the message above"
        )
        failed[stage.run_dir] = f"the {stage.name} stage could not be trained: {message}"
    require(stage.run_dir not in failed, failed.get(stage.run_dir, ""))


def stage_costs(stage: Stage, whole: Shape | None) -> dict[str, Any]:
    """Measure the training costs of a stage; bytes that cannot be counted are None.

    Args:
        stage: Trained stage.
        whole: Voxels of the largest whole input; None where no region was found.
    """
    config, history = stage.config, read_csv(stage.run_dir / "history.csv")
    step = _counted(stage, config.stage.patch_size or whole)
    whole_step = _counted(stage, whole)
    return {
        "spacing": spacing_in_words(config.spacing),
        "saved_bytes_per_voxel": None if step is None else round(step.saved_per_voxel, 2),
        "step_peak_mib": None if step is None else round(step.peak / 2**20, 1),
        "whole_peak_mib": None if whole_step is None else round(whole_step.peak / 2**20, 1),
        "step_s": round(
            median(float(row["seconds_per_step"]) for row in history if row["seconds_per_step"]), 4
        ),
        "train_s": read_summary(stage.run_dir)["train_s"],
    }


def _counted(stage: Stage, shape: Shape | None) -> StepMemory | None:
    """Count a training step; None without a shape, or where it cannot be counted, which is said.

    A trained row keeps its scores then: a network may refuse an input as small as the crop of a few
    voxels.
    """
    if shape is None:
        return None
    try:
        return count_memory(stage.config, shape)
    except UserError as error:
        voxels = "×".join(map(str, shape))
        what = f"a step of {voxels} voxels was not counted, its cells stay empty"
        say(f"{stage.run_dir.name}: {what} ({error})")
        return None


def spacing_in_words(spacing: SpacingOptions) -> str:
    """Describe the grid of a stage for a table.

    Example:
        >>> spacing_in_words(SpacingOptions((2.5, 1.0, 1.0)))
        '2.5×1×1 mm'
    """
    if spacing.size:
        return "×".join(map(str, spacing.size)) + " voxels"
    if spacing.range_mm:
        return "{:g} to {:g} mm".format(*spacing.range_mm)
    return (
        "×".join(f"{mm:g}" for mm in spacing.target_spacing_mm) + " mm"
        if spacing.target_spacing_mm
        else "native"
    )


def whole_shape(config: TrainConfig, grid: VoxelGrid) -> Shape:
    """Voxels of a whole scan as the coarse stage trains on it, if the body fills the scan."""
    rule, divisor = make_grid_rule(config.spacing), find_divisor(config)
    lattice = grid.resampled(config.spacing.target_spacing_mm).resampled(
        rule.spacing_mm(grid.spacing_mm)
    )
    crop = rule.crop(VoxelBox.full(lattice.shape), lattice, (1, 1, 1), divisor)
    depth, height, width = network_size(crop.box.shape, divisor)
    if config.stage.max_voxels:
        depth = min(
            depth,
            max(divisor[0], config.stage.max_voxels // (height * width) // divisor[0] * divisor[0]),
        )
    return depth, height, width


def crop_shape(config: TrainConfig, report: dict[str, Any]) -> Shape | None:
    """Network input of the largest crop in the report of a prediction; None if no region was found."""
    divisor = find_divisor(config)
    boxes = [VoxelBox(**box["voxels"]) for box in report["boxes"].values()]
    return max((network_size(box.shape, divisor) for box in boxes), key=math.prod, default=None)


def read_scores(
    path: Path, grids: Mapping[str, VoxelGrid], reports: Mapping[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Make one entry per held-out case and region: slice thickness, scores, and the costs of the prediction."""
    return [
        {
            "case": row["case"],
            "slice_mm": round(max(grids[row["case"]].spacing_mm), 3),  # as `by_spacing` measures it
            "region": row["region"],
            "trust": row["trust"],
            **{metric: float(row[metric]) for metric in ("dice", "nsd_1mm", "nsd_2mm", "hd95_mm")},
            "predict_s": round(reports[row["case"]]["durations_s"]["total"], 2),
            "predict_peak_gb": round(reports[row["case"]]["peak_resident_bytes"] / 1e9, 3),
        }
        for row in read_csv(path)
    ]


def write(
    strategies: Sequence[Strategy],
    output: Path,
    patients: Mapping[str, str] | None = None,
) -> None:
    """Write the tables and the picture of the rows that are known so far.

    Args:
        strategies: The rows.
        output: Folder.
        patients: Held-out case to its patient; a case that is missing is a patient of its own.
    """
    rows: list[dict[str, Any]] = []
    for strategy in strategies:
        costs = {
            f"{stage}_{name}": value
            for stage, known in strategy.costs.items()
            for name, value in known.items()
        }
        lost = [{"case": case, "failure": why} for case, why in strategy.missing.items()]
        lost += [{"failure": strategy.failure}] if strategy.failure else []
        rows += [{"row": strategy.name, **entry, **costs} for entry in (*strategy.scores, *lost)]
    write_csv(output / "comparison.csv", rows, COLUMNS)
    replace_text(output / "comparison.md", markdown(strategies, patients))
    if not any(strategy.scores for strategy in strategies):
        return
    means = {
        (one.name, thickness): mean["dice"]
        for one in strategies
        for thickness, mean in means_of(one).items()
    }
    names, fine = (
        [strategy.name for strategy in strategies],
        [strategy.costs.get("fine", {}) for strategy in strategies],
    )
    panels = [
        *(
            Panel(
                f"Dice, {one} slices",
                "{:.3f}",
                [means.get((name, one)) for name in names],
                has_bars=False,
            )
            for one in (*THICKNESSES, ALL)
        ),
        Panel(
            "fine: peak of a whole crop, MiB",
            "{:.0f}",
            [costs.get("whole_peak_mib") for costs in fine],
        ),
        Panel("fine: seconds per step", "{:.2f}", [costs.get("step_s") for costs in fine]),
        Panel(
            "prediction, s per case",
            "{:.1f}",
            [prediction_costs(one)[0] if one.scores else None for one in strategies],
        ),
    ]
    draw_panels(names, panels, "Spacing strategies, held-out cases", output / "comparison.png")
