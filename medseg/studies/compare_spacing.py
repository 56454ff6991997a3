"""Spacing comparison: trains a cascade with each strategy of spacing, and scores the same cases.

A row is an entry of `rows` in the configuration: one strategy of spacing. Its costs and scores are
a `Strategy`.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from hydra.core.hydra_config import HydraConfig

from medseg.config.schema import CompareSpacingConfig
from medseg.console import say
from medseg.data.case_table import write_case_table
from medseg.data.cases import find_sources
from medseg.data.spacing import make_grid_rule, read_scan_grid
from medseg.errors import EXIT_FAILED, UserError
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.geometry.sizes import Shape, bounded_depth, network_size
from medseg.io.atomic import check_writable, replace_text
from medseg.io.tables import read_csv, write_csv
from medseg.memory.accounting import StepMemory
from medseg.planning.step import count_memory
from medseg.preprocess.options import SpacingOptions
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
from medseg.runs.advice import prediction_arguments
from medseg.runs.folder import read_summary
from medseg.runs.signature import plain, signature
from medseg.studies.command_steps import (
    failed_predictions,
    last_checkpoint,
    run_and_get_failure,
    run_until_failure,
    task_argument,
    train_steps,
)
from medseg.studies.train_arguments import (
    arguments_for_train,
    check_names,
    compose_train,
    folder_name,
    key_of,
    merge_arguments,
)
from medseg.task_options import make_task
from medseg.training.network import find_divisor
from medseg.training.options import TrainConfig

# Columns of the costs of a stage, see `stage_costs`. Saved bytes: tensors that autograd keeps from
# the forward to the backward pass.
COSTS = ("spacing", "saved_bytes_per_voxel", "step_peak_mib", "whole_peak_mib", "step_s", "train_s")
# Columns of the scores of a case and region, see `read_scores`.
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
# Columns of `comparison.csv`; `row` is the name of the strategy.
COLUMNS = (
    "row",
    "failure",
    *SCORES,
    *(f"coarse_{cost}" for cost in COSTS),
    *(f"fine_{cost}" for cost in COSTS),
)


class Stage(NamedTuple):
    """Stage of a row.

    Attributes:
        name: `coarse` or `fine`.
        arguments: Arguments of `train`.
        config: Configuration composed from the arguments.
        run_dir: Run folder; rows whose stages have the same configuration share one.
    """

    name: str
    arguments: tuple[str, ...]
    config: TrainConfig
    run_dir: Path


def compare_spacing(config: CompareSpacingConfig) -> int:
    """Train, predict and score every row.

    Writes `comparison.csv`, `comparison.md` and `comparison.png` after each row. After a row that
    fails, the next rows still run.

    Returns:
        Exit code: 0, or 1 if a row failed or a case has no scores in some row.
    """
    output = Path(config.output).absolute()
    arguments = arguments_for_train(HydraConfig.get().overrides.task, CompareSpacingConfig)
    for sentence in unused_arguments(config, arguments):
        say(sentence)
    # Compose all rows first, so that a mistake in any row is found before a training.
    rows = {name: stages_of(name, config, arguments, output / "runs") for name in config.rows}
    # The folders of the rows are siblings of the folder `runs`.
    check_names(list(rows), "runs")
    # The first source has the user's cases; a second source has phantoms for training only.
    source = find_sources(config.data, config.task)[0]
    cases = [case for case in source.split.test if case.labels is not None]
    if not cases:
        raise UserError(
            "data.test_patients: no case with labels is held out; name patients of the case table"
        )
    channels = make_task(config.task).channels
    grids = {}
    for case in cases:
        grids[case.name] = read_scan_grid(case, channels)
    check_writable(output)
    table = write_case_table(output / "held_out.csv", cases)
    patients = {case.name: case.patient for case in cases}
    task = task_argument(output, plain(config.task), config.data.label_values or {})
    # Run folder to failure. Rows may share runs: a failed run is not tried again in a later row.
    failed_runs: dict[Path, str] = {}
    strategies = []
    for number, (name, stages) in enumerate(rows.items(), start=1):
        print(f"\nrow {number} of {len(rows)}: {name}", flush=True)
        folder = output / folder_name(name)
        try:
            strategy = run_row(
                name,
                stages,
                folder=folder,
                table=table,
                grids=grids,
                task=task,
                failed_runs=failed_runs,
            )
        except UserError as error:
            say(f"{name}: {error}")
            strategy = Strategy(name, costs={}, scores=[], missing={}, failure=str(error))
        strategies.append(strategy)
        write(strategies, output, patients)
    print("\n" + (output / "comparison.md").read_text(encoding="utf-8"))
    print(f"{output / 'comparison.csv'}, comparison.md, comparison.png")
    for strategy in strategies:
        if strategy.failure or strategy.missing:
            return EXIT_FAILED
    return 0


def unused_arguments(config: CompareSpacingConfig, common: Sequence[str]) -> Iterator[str]:
    """Name the arguments of all rows that the arguments of one stage replace.

    Args:
        config: Has the arguments of each stage, by default some for the fine stage.
        common: Arguments that all rows share.
    """
    for stage in STAGES:
        stage_keys = {key_of(argument) for argument in getattr(config.stages, stage)}
        for argument in common:
            key = key_of(argument)
            if key in stage_keys:
                yield (
                    f"{argument} has no effect on the {stage} stage: stages.{stage} sets {key}; "
                    "change it there"
                )


def stages_of(
    row: str, config: CompareSpacingConfig, common: Sequence[str], runs: Path
) -> list[Stage]:
    """Compose both stages of a row.

    Args:
        row: Name of the row.
        config: Has the arguments of each stage, in general and in this row.
        common: Arguments that all rows share.
        runs: Folder of the runs of all rows.

    Raises:
        UserError: If `train` would refuse a stage.
    """
    stages = []
    for name in STAGES:
        arguments = merge_arguments(
            [f"stage={name}", f"seed={config.seed}", f"steps={config.steps}"],
            common,
            getattr(config.stages, name),
            getattr(config.rows[row], name),
        )
        # `run_dir` must have some value: it is not part of the signature, and not created here.
        composed = compose_train([*arguments, "run_dir=none"], f"rows.{row}.{name}")
        # Named after the configuration, so that stages with equal configurations share a run.
        run_dir = runs / f"{name}-{signature(plain(composed))}"
        stages.append(Stage(name, arguments, composed, run_dir))
    return stages


def run_row(
    name: str,
    stages: Sequence[Stage],
    folder: Path,
    table: Path,
    grids: Mapping[str, VoxelGrid],
    task: str,
    failed_runs: dict[Path, str],
) -> Strategy:
    """Train both stages of a row, predict and score the held-out cases.

    Finished trainings and predictions are kept.

    Args:
        name: Name of the row.
        stages: Coarse stage and fine stage.
        folder: Folder of the row.
        table: Case table of the held-out cases.
        grids: Name of each held-out case to its oriented grid.
        task: From `task_argument`.
        failed_runs: Run folders that failed in earlier rows, with the reason; a run that fails now
            is added.

    Raises:
        UserError: If a stage could not be trained, or nothing could be predicted or scored.
    """
    for stage in stages:
        train(stage, failed_runs)
    coarse, fine = stages
    # Named after the runs, so that predictions of other runs are never scored: where a case fails
    # now, an earlier prediction would still be in the folder.
    runs_name = f"{coarse.run_dir.name}-{fine.run_dir.name}"
    predictions = folder / "predictions" / runs_name
    reports, predict_failures = _predict(stages, table, list(grids), predictions)
    scores = folder / "scores" / runs_name
    files = [f"pred={predictions}", f"ref={table}", f"output={scores}"]
    step = ["evaluate", *files, "pictures=false", task]
    evaluate_failure = run_and_get_failure(step)
    if evaluate_failure:
        raise UserError(f"no case could be scored: {evaluate_failure}")
    summary = json.loads((scores / "summary.json").read_text(encoding="utf-8"))
    # Each case without scores to the reason.
    missing = {}
    for case in summary["without_prediction"]:
        missing[case] = predict_failures.get(case, "no prediction")
    missing |= summary["failed"]
    entries = read_scores(scores / "metrics.csv", grids, reports)
    # Costs are counted on the largest input of a stage among these cases: a whole scan for the
    # coarse stage, a crop for the fine stage.
    scan_shapes = [whole_shape(coarse.config, grid) for grid in grids.values()]
    crop_shapes = []
    for report in reports.values():
        shape = crop_shape(fine.config, report)
        # There is no crop if the prediction found no region.
        if shape is not None:
            crop_shapes.append(shape)
    costs = {
        coarse.name: stage_costs(coarse, max(scan_shapes, key=math.prod)),
        fine.name: stage_costs(fine, max(crop_shapes, key=math.prod, default=None)),
    }
    return Strategy(name, costs, entries, missing)


def _predict(
    stages: Sequence[Stage], table: Path, cases: Sequence[str], folder: Path
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Predict the held-out cases with the stages of a row.

    Args:
        stages: Coarse stage and fine stage, trained.
        table: Case table of the held-out cases.
        cases: Names of these cases.
        folder: Folder of the predictions.

    Returns:
        Case to the report of its prediction, and failed case to its message.

    Raises:
        UserError: If no case was predicted, or the command failed as a whole.
    """
    # `predict` runs both stages on one device and number of threads: those of the last training.
    trainer = stages[-1].config.trainer
    step = [
        "predict",
        f"input={table}",
        f"output={folder}",
        f"accelerator={trainer.accelerator.value}",
    ]
    if trainer.threads:
        step.append(f"threads={trainer.threads}")
    checkpoints = {stage.name: last_checkpoint(stage.run_dir) for stage in stages}
    step += [f"{name}={checkpoint}" for name, checkpoint in checkpoints.items()]
    step += prediction_arguments(stages[-1].config, list(checkpoints.values()))
    # `predict` writes a single case into a folder only if the folder exists.
    folder.mkdir(parents=True, exist_ok=True)
    # Empty unless the command failed as a whole; single cases may have failed all the same.
    failure = run_and_get_failure(step)
    reports = {}
    for case in cases:
        path = folder / f"{case}.json"
        if path.is_file():
            reports[case] = json.loads(path.read_text(encoding="utf-8"))
    messages = failed_predictions(folder)
    # If only some cases failed, `run_row` reports them as missing, with their messages.
    if failure or not reports:
        case_failures = [f"{case}: {message}" for case, message in messages.items()]
        raise UserError(f"no case could be predicted: {'; '.join(case_failures) or failure}")
    return reports, messages


def train(stage: Stage, failed_runs: dict[Path, str]) -> None:
    """Train or resume a stage; a run that failed in an earlier row is not tried again.

    Raises:
        UserError: If the training failed.
    """
    if stage.run_dir not in failed_runs:
        code = run_until_failure(train_steps(stage.run_dir, *stage.arguments))
        if code == 0:
            return
        message = read_summary(stage.run_dir).get("message")
        reason = message or f"exit code {code}; see the message above"
        failed_runs[stage.run_dir] = f"the {stage.name} stage could not be trained: {reason}"
    raise UserError(failed_runs[stage.run_dir])


def stage_costs(stage: Stage, largest_shape: Shape | None) -> dict[str, Any]:
    """Measure the training costs of a stage; an unknown cost is None.

    Args:
        stage: Trained stage.
        largest_shape: Shape of the largest whole input, (D, H, W); None if no region was found.

    Returns:
        Costs with the keys of `COSTS`. `step_…` is a cost of a training step, on a patch if the
        stage has patches; `whole_…` is the cost of a step on the whole input.
    """
    config = stage.config
    step = _count_step(stage, config.stage.patch_size or largest_shape)
    whole_step = _count_step(stage, largest_shape)
    history = read_csv(stage.run_dir / "history.csv")
    # Lines of validations have no duration, and a training shorter than `history_every` steps has
    # no other lines: `durations_s` may be empty.
    durations_s = [float(row["seconds_per_step"]) for row in history if row.get("seconds_per_step")]
    step_s = None
    if durations_s:
        step_s = round(median(durations_s), 4)
    return {
        "spacing": spacing_in_words(config.spacing),
        "saved_bytes_per_voxel": None if step is None else round(step.saved_per_voxel, 2),
        "step_peak_mib": _peak_mib(step),
        "whole_peak_mib": _peak_mib(whole_step),
        "step_s": step_s,
        "train_s": read_summary(stage.run_dir)["train_s"],
    }


def _peak_mib(step: StepMemory | None) -> float | None:
    return None if step is None else round(step.peak / 2**20, 1)


def _count_step(stage: Stage, shape: Shape | None) -> StepMemory | None:
    """Count the memory of a training step.

    A network may refuse a crop of a few voxels. A message is printed, and the row keeps its scores
    without these costs.

    Args:
        stage: Has the configuration of the step.
        shape: Shape of the network's input, (D, H, W); None if there is no input.

    Returns:
        The memory; None if it cannot be counted.
    """
    if shape is None:
        return None
    try:
        return count_memory(stage.config, shape)
    except UserError as error:
        voxels = "×".join(map(str, shape))
        say(
            f"{stage.run_dir.name}: a step of {voxels} voxels was not counted, "
            f"its cells stay empty ({error})"
        )
        return None


def spacing_in_words(spacing: SpacingOptions) -> str:
    """Describe the spacing of a stage in a few words, for a table.

    Example:
        >>> spacing_in_words(SpacingOptions((2.5, 1.0, 1.0)))
        '2.5×1×1 mm'
    """
    if spacing.size:
        return "×".join(map(str, spacing.size)) + " voxels"
    if spacing.range_mm:
        return "{:g} to {:g} mm".format(*spacing.range_mm)
    if spacing.target_spacing_mm:
        return "×".join(f"{mm:g}" for mm in spacing.target_spacing_mm) + " mm"
    return "native"


def whole_shape(config: TrainConfig, grid: VoxelGrid) -> Shape:
    """Find the shape in which the coarse stage trains on a whole scan, (D, H, W).

    The body is assumed to fill the scan. For a scan with air around the body, the shape of the
    training is smaller.
    """
    rule = make_grid_rule(config.spacing)
    divisor = find_divisor(config)
    # Resampled in the two steps of `medseg.cascade.localise`, since each step rounds the shape:
    # first to the spacing of the stage, then to the spacing of the rule, which may depend on the
    # scan.
    target_grid = grid.resampled(config.spacing.target_spacing_mm)
    lattice = target_grid.resampled(rule.spacing_mm(grid.spacing_mm))
    # As in prediction: a patch of one voxel, so that `crop` does not enlarge the box to a size that
    # the network takes; then `network_size` pads the box to such a size.
    crop = rule.crop(VoxelBox.full(lattice.shape), lattice, patch_size=(1, 1, 1), divisor=divisor)
    depth, height, width = network_size(crop.box.shape, divisor)
    if config.stage.max_voxels is not None:
        depth = bounded_depth((depth, height, width), config.stage.max_voxels, divisor[0])
    return depth, height, width


def crop_shape(config: TrainConfig, report: dict[str, Any]) -> Shape | None:
    """Find the input shape (D, H, W) of the largest crop of a prediction; None without a crop.

    Args:
        config: Configuration of the fine stage.
        report: Content of `<case>.json` of the prediction.
    """
    divisor = find_divisor(config)
    shapes = []
    for box in report["boxes"].values():
        shapes.append(network_size(VoxelBox(**box["voxels"]).shape, divisor))
    return max(shapes, key=math.prod, default=None)


def read_scores(
    path: Path, grids: Mapping[str, VoxelGrid], reports: Mapping[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Join scores and costs of the predictions.

    Args:
        path: The `metrics.csv` of `evaluate`.
        grids: Case to its oriented grid.
        reports: Case to the report of its prediction.

    Returns:
        One entry per case and region, with the keys of `SCORES`.
    """
    entries = []
    for row in read_csv(path):
        case = row["case"]
        report = reports[case]
        entry = {
            "case": case,
            # Coarsest spacing, rounded as in `predict`, where `by_spacing` selects a model by this
            # number.
            "slice_mm": round(max(grids[case].spacing_mm), 3),
            "region": row["region"],
            "trust": row["trust"],
            "dice": float(row["dice"]),
            "nsd_1mm": float(row["nsd_1mm"]),
            "nsd_2mm": float(row["nsd_2mm"]),
            "hd95_mm": float(row["hd95_mm"]),
            "predict_s": round(report["durations_s"]["total"], 2),
            "predict_peak_gb": round(report["peak_resident_bytes"] / 1e9, 3),
        }
        entries.append(entry)
    return entries


def write(
    strategies: Sequence[Strategy],
    output: Path,
    patients: Mapping[str, str] | None = None,
) -> None:
    """Write the tables and the picture of the rows that are done so far.

    Args:
        strategies: Results of the rows, with their costs and scores.
        output: Folder of `comparison.csv`, `comparison.md` and `comparison.png`.
        patients: Held-out case to its patient; a case that is missing is a patient of its own.
    """
    csv_rows: list[dict[str, Any]] = []
    for strategy in strategies:
        csv_rows += _csv_rows(strategy)
    write_csv(output / "comparison.csv", csv_rows, COLUMNS)
    replace_text(output / "comparison.md", markdown(strategies, patients))
    picture = output / "comparison.png"
    if any(strategy.scores for strategy in strategies):
        _draw(strategies, picture)
    else:
        # A picture of an earlier start would show other results than the tables.
        picture.unlink(missing_ok=True)


def _csv_rows(strategy: Strategy) -> list[dict[str, Any]]:
    """Make the rows of `comparison.csv` of a strategy: scores, then cases without scores.

    Each row repeats the costs of the strategy.
    """
    costs: dict[str, Any] = {}
    for stage, stage_values in strategy.costs.items():
        costs |= {f"{stage}_{cost}": value for cost, value in stage_values.items()}
    entries = list(strategy.scores)
    entries += [{"case": case, "failure": reason} for case, reason in strategy.missing.items()]
    if strategy.failure:
        entries.append({"failure": strategy.failure})
    return [{"row": strategy.name, **entry, **costs} for entry in entries]


def _draw(strategies: Sequence[Strategy], path: Path) -> None:
    """Draw scores and costs of the strategies, one panel each."""
    names = [strategy.name for strategy in strategies]
    # For each strategy a mapping: slice thickness to metric to its mean.
    means = [means_of(strategy) for strategy in strategies]
    fine_costs = [strategy.costs.get("fine", {}) for strategy in strategies]
    durations_s: list[float | None] = []
    for strategy in strategies:
        mean_s, _ = prediction_costs(strategy)
        # Without a predicted case there is no mean, and the panel has no bar.
        durations_s.append(mean_s if strategy.scores else None)
    panels = []
    for thickness in (*THICKNESSES, ALL):
        # A strategy without cases of this thickness has no mean.
        dices = [mean.get(thickness, {}).get("dice") for mean in means]
        panels.append(Panel(f"Dice, {thickness} slices", "{:.3f}", dices, has_bars=False))
    peaks_mib = [costs.get("whole_peak_mib") for costs in fine_costs]
    panels.append(Panel("fine: peak of a whole crop, MiB", "{:.0f}", peaks_mib))
    steps_s = [costs.get("step_s") for costs in fine_costs]
    panels.append(Panel("fine: seconds per step", "{:.2f}", steps_s))
    panels.append(Panel("prediction, s per case", "{:.1f}", durations_s))
    draw_panels(names, panels, "Spacing strategies, held-out cases", path)
