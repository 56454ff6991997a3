"""The `compare_spacing` command: spacing strategies trained on the same samples and scored on the same held-out cases."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig

from medseg import __version__
from medseg.build.cases import find_sources
from medseg.build.spacing import make_grid_rule
from medseg.config.check import find_divisor, to_config
from medseg.config.schema import CompareSpacingConfig, SpacingConfig, TrainConfig
from medseg.config.signature import plain, signature
from medseg.console import say
from medseg.errors import EXIT_FAILED, UserError
from medseg.geometry.box import VoxelBox
from medseg.geometry.grid import VoxelGrid
from medseg.io.read import read_grid
from medseg.io.replacing import check_writable
from medseg.pictures.panels import Panel, draw_panels
from medseg.planning.plan import Shape, count
from medseg.preprocess.orient import oriented_grid
from medseg.report.spacings import ALL, STAGES, THICKNESSES, Strategy, markdown, means_of, prediction_costs
from medseg.runs.folder import read_summary, replace_text, settle
from medseg.runs.status import Status, status_of
from medseg.studies.cross_validate import write_table
from medseg.studies.steps import label_values_argument, last_checkpoint, merge_arguments, run_step, run_steps, without_keys

# Keys that its rows, which are configurations of `train`, do not have, or get from it.
OWN_KEYS = ("output", "rows", "seed", "stages", "steps")
RECORD_FILE = "row.json"
COSTS = ("spacing", "saved_bytes_per_voxel", "step_peak_mib", "whole_peak_mib", "step_s", "train_s")
SCORES = ("case", "slice_mm", "region", "trust", "dice", "nsd_1mm", "nsd_2mm", "hd95_mm", "predict_s", "predict_peak_gb")
COLUMNS = ("row", "failure", *SCORES, *(f"{stage}_{cost}" for stage in STAGES for cost in COSTS))


@dataclass(frozen=True)
class Stage:
    """One stage of a row.

    Attributes:
        name: `coarse` or `fine`.
        arguments: Its arguments of `train`.
        config: What they compose.
        run_dir: Where it is trained; the same for rows that compose the same.
    """

    name: str
    arguments: tuple[str, ...]
    config: TrainConfig
    run_dir: Path


def compare_spacing(config: CompareSpacingConfig) -> int:
    """Train, predict and score every row, and write `comparison.csv`, `comparison.md` and `comparison.png` after each.

    Returns:
        0, or 1 where a row failed and the others went on.
    """
    output = Path(config.output).absolute()
    given = without_keys(HydraConfig.get().overrides.task, OWN_KEYS)
    rows = {name: stages_of(name, config, given, output / "runs") for name in config.rows}  # all are checked before the first
    folders = {name: output / re.sub(r"\W+", "_", name) for name in rows}
    if not rows or len({*folders.values(), output / "runs"}) <= len(folders):
        raise UserError(f"rows: names must differ in their letters, and from runs, but got {list(rows)}")
    cases = [case for case in find_sources(config.data)[0].split.test if case.labels is not None]
    if not cases:
        raise UserError("data.test_patients: no case with labels is held out; name patients of the case table")
    grids = {case.name: oriented_grid(read_grid(case.image, case.series)) for case in cases}
    check_writable(output)
    table = write_table(cases, output / "held_out.csv")
    scored_as = [label_values_argument(config.data.label_values), *(one for one in given if one.startswith("task"))]
    failed: dict[Path, str] = {}
    strategies = []
    for number, (name, stages) in enumerate(rows.items(), start=1):
        print(f"\nrow {number} of {len(rows)}: {name}", flush=True)
        try:
            strategies.append(run_row(name, stages, folders[name], table, grids, scored_as, failed))
        except UserError as error:
            say(f"{name}: {error}")
            strategies.append(Strategy(name, {}, [], {}, str(error)))
        write(strategies, output)
    print("\n" + (output / "comparison.md").read_text(encoding="utf-8"))
    print(f"{output / 'comparison.csv'}, comparison.md, comparison.png")
    return EXIT_FAILED if any(strategy.failure or strategy.missing for strategy in strategies) else 0


def stages_of(row: str, config: CompareSpacingConfig, given: Sequence[str], runs: Path) -> list[Stage]:
    """Compose both stages of a row.

    Args:
        row: Name of the row.
        config: Says what its stages are.
        given: Arguments that all rows share.
        runs: Folder of the runs.

    Raises:
        UserError: If `train` would refuse one.
    """
    stages = []
    for name in STAGES:
        own = [getattr(config.stages, name), getattr(config.rows[row], name)]
        arguments = merge_arguments([f"stage={name}", f"seed={config.seed}", f"steps={config.steps}"], given, *own)
        try:
            composed = to_config(hydra.compose("train", [*arguments, "run_dir=none"]), TrainConfig)
        except UserError as error:
            raise UserError(f"rows.{row}.{name}: {error}") from error
        settle(composed)
        stages.append(Stage(name, arguments, composed, runs / f"{name}-{signature(plain(composed))}"))
    return stages


def run_row(
    name: str,
    stages: Sequence[Stage],
    folder: Path,
    table: Path,
    grids: dict[str, VoxelGrid],
    scored_as: Sequence[str],
    failed: dict[Path, str],
) -> Strategy:
    """Train both stages of a row, predict and score the held-out cases; a row that is finished is read.

    Args:
        name: Name of the row.
        stages: Coarse and fine.
        folder: Folder of the row.
        table: Case table of the held-out cases.
        grids: Name of each held-out case to its oriented grid.
        scored_as: Arguments of `evaluate` that say what the references mean.
        failed: Runs that failed before in another row, and why; added to.

    Raises:
        UserError: If a stage could not be trained, or nothing could be predicted or scored.
    """
    record = folder / RECORD_FILE
    request = {
        "runs": [stage.run_dir.name for stage in stages],
        "cases": table.read_text(encoding="utf-8"),
        "scored_as": list(scored_as),
        "version": __version__,
    }
    if record.is_file():
        known = json.loads(record.read_text(encoding="utf-8"))
        if known.pop("request") == request:
            print("finished before", flush=True)
            return Strategy(**known)._replace(name=name)
    for stage in stages:
        train_once(stage, failed)
    # Named after the runs: what others predicted is not scored in the place of a case that fails.
    name_of_runs = "-".join(stage.run_dir.name for stage in stages)
    predictions, scores = folder / "predictions" / name_of_runs, folder / "scores" / name_of_runs
    coarse, fine = stages
    trainer = fine.config.trainer
    step = ["predict", f"input={table}", f"output={predictions}", f"accelerator={trainer.accelerator.value}"]
    step += [f"threads={trainer.threads}"] if trainer.threads else []
    predictions.mkdir(parents=True, exist_ok=True)  # several cases go into a folder, one too
    run_or_fail([*step, *(f"{stage.name}={last_checkpoint(stage.run_dir)}" for stage in stages)])
    run_or_fail(["evaluate", f"pred={predictions}", f"ref={table}", f"output={scores}", "pictures=false", *scored_as])
    reports = {case: _read_json(predictions / f"{case}.json") for case in grids if (predictions / f"{case}.json").is_file()}
    costs = {
        coarse.name: stage_costs(coarse, max((whole_shape(coarse.config, grid) for grid in grids.values()), key=math.prod)),
        fine.name: stage_costs(fine, max((crop_shape(fine.config, report) for report in reports.values()), key=math.prod)),
    }
    summary = _read_json(scores / "summary.json")
    missing = dict.fromkeys(summary["without_prediction"], "no prediction") | summary["failed"]
    strategy = Strategy(name, costs, read_scores(scores / "metrics.csv", grids, reports), missing)
    if not missing:
        replace_text(record, json.dumps({"request": request, **strategy._asdict()}, indent=1))
    return strategy


def train_once(stage: Stage, failed: dict[Path, str]) -> None:
    """Train a stage, or go on with it; one that has failed before is not tried again by the next row.

    Raises:
        UserError: If it failed.
    """
    if stage.run_dir not in failed:
        for step in run_step(stage.run_dir, *stage.arguments):
            code = _run(step)
            if code:
                message = read_summary(stage.run_dir).get("message") or f"exit code {code}; what went wrong stands above"
                failed[stage.run_dir] = f"the {stage.name} stage could not be trained: {message}"
    if stage.run_dir in failed:
        raise UserError(failed[stage.run_dir])


def run_or_fail(step: Sequence[str]) -> None:
    """Run a command that may lose single cases.

    Raises:
        UserError: If it failed altogether.
    """
    code = _run(step)
    if code:
        raise UserError(f"{step[0]} ended with exit code {code}; what went wrong stands above")


def _run(step: Sequence[str]) -> int:
    """Run a command; where it was asked to stop, the comparison stops as well."""
    code = run_steps([step])
    if code and status_of(code) is Status.interrupted:
        sys.exit(code)
    return code


def stage_costs(stage: Stage, whole: Shape) -> dict[str, Any]:
    """What a stage costs in training.

    Args:
        stage: Trained stage.
        whole: Voxels of the largest whole input.
    """
    config = stage.config
    step = count(config, config.stage.patch_size or whole)
    with (stage.run_dir / "history.csv").open(encoding="utf-8", newline="") as file:
        steps_s = [float(row["seconds_per_step"]) for row in csv.DictReader(file) if row["seconds_per_step"]]
    return {
        "spacing": spacing_text(config.spacing),
        "saved_bytes_per_voxel": round(step.saved_per_voxel, 2),
        "step_peak_mib": round(step.peak / 2**20, 1),
        "whole_peak_mib": round(count(config, whole).peak / 2**20, 1),
        "step_s": round(median(steps_s), 4),
        "train_s": read_summary(stage.run_dir)["train_s"],
    }


def spacing_text(spacing: SpacingConfig) -> str:
    """What a stage works on, for a table.

    Example:
        >>> spacing_text(SpacingConfig((2.5, 1.0, 1.0)))
        '2.5×1×1 mm'
    """
    if spacing.size:
        return "×".join(map(str, spacing.size)) + " voxels"
    if spacing.range_mm:
        return "{:g} to {:g} mm".format(*spacing.range_mm)
    return "×".join(f"{mm:g}" for mm in spacing.target_spacing_mm) + " mm" if spacing.target_spacing_mm else "native"


def whole_shape(config: TrainConfig, grid: VoxelGrid) -> Shape:
    """Voxels of a whole scan as the coarse stage trains on it, where nothing beside the body can be left out."""
    rule, divisor = make_grid_rule(config.spacing), find_divisor(config)
    lattice = grid.resampled(config.spacing.target_spacing_mm).resampled(rule.spacing_mm(grid.spacing_mm))
    crop = rule.crop(VoxelBox.full(lattice.shape), lattice, (1, 1, 1), divisor)
    depth, height, width = crop.box.to_multiple(divisor).shape
    if config.stage.max_voxels:
        depth = min(depth, max(divisor[0], config.stage.max_voxels // (height * width) // divisor[0] * divisor[0]))
    return depth, height, width


def crop_shape(config: TrainConfig, report: dict[str, Any]) -> Shape:
    """Voxels of the largest crop of a prediction, from its report, as the network takes it; the least where no region was found."""
    divisor = find_divisor(config)
    boxes = [VoxelBox.from_dict(box["voxels"]).to_multiple(divisor) for box in report["boxes"].values()]
    return max((box.shape for box in boxes), key=math.prod, default=divisor)


def read_scores(path: Path, grids: dict[str, VoxelGrid], reports: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per held-out case and region: its scores, the thickness of its slices, what its prediction cost."""
    scores = []
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            report = reports[row["case"]]
            scores.append(
                {
                    "case": row["case"],
                    "slice_mm": round(max(grids[row["case"]].spacing_mm), 3),  # as `by_spacing` measures it
                    "region": row["region"],
                    "trust": row["trust"],
                    **{metric: float(row[metric]) for metric in ("dice", "nsd_1mm", "nsd_2mm", "hd95_mm")},
                    "predict_s": round(report["durations_s"]["total"], 2),
                    "predict_peak_gb": round(report["peak_resident_bytes"] / 1e9, 3),
                }
            )
    return scores


def write(strategies: Sequence[Strategy], output: Path) -> None:
    """Write the table, the same to be read, and the picture of the rows that are known so far."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for strategy in strategies:
        costs = {f"{stage}_{name}": value for stage, known in strategy.costs.items() for name, value in known.items()}
        lost = [{"case": case, "failure": why} for case, why in strategy.missing.items()]
        lost += [{"failure": strategy.failure}] if strategy.failure else []
        writer.writerows({"row": strategy.name, **entry, **costs} for entry in (*strategy.scores, *lost))
    replace_text(output / "comparison.csv", text.getvalue())
    replace_text(output / "comparison.md", markdown(strategies))
    if not any(strategy.scores for strategy in strategies):
        return
    means = {(mean.row, mean.thickness): mean.dice for strategy in strategies for mean in means_of(strategy)}
    names = [strategy.name for strategy in strategies]

    def cost(stage: str, name: str) -> list[float | None]:
        return [strategy.costs.get(stage, {}).get(name) for strategy in strategies]

    panels = [
        Panel(f"Dice, {one} slices", "{:.3f}", [means.get((name, one)) for name in names], has_bars=False)
        for one in (*THICKNESSES, ALL)
    ]
    panels += [
        Panel("fine: peak of a whole crop, MiB", "{:.0f}", cost("fine", "whole_peak_mib")),
        Panel("fine: seconds per step", "{:.2f}", cost("fine", "step_s")),
        Panel("prediction, s per case", "{:.1f}", [prediction_costs(one)[0] if one.scores else None for one in strategies]),
    ]
    draw_panels(names, panels, "Spacing strategies, held-out cases", output / "comparison.png")


def _read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))
