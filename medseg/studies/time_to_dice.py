"""Time to Dice: CPU minutes that configurations need until their validation reaches a Dice.

All are trained and validated on one split.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from hydra.core.hydra_config import HydraConfig

from medseg.config.overrides import text_of
from medseg.config.schema import TimeToDiceConfig
from medseg.errors import EXIT_FAILED, EXIT_RESUME
from medseg.io.atomic import check_writable, replace_text
from medseg.io.tables import markdown_table, read_csv, write_csv
from medseg.runs.folder import CONFIG_FILE, open_run, read_summary, status_of_run
from medseg.runs.past_runs import HISTORY_FILE, read_history
from medseg.runs.processes import run_in_process
from medseg.runs.status import Status, status_of
from medseg.studies.recipes import (
    check_names,
    compose_train,
    folder_name,
    merge_arguments,
    train_arguments,
)
from medseg.training.assemble import make_data_module
from medseg.training.options import TrainConfig

# Column of time_to_dice.csv to its heading in time_to_dice.md.
COLUMNS = {
    "row": "",
    "arguments": "arguments",
    "outcome": "outcome",
    "cpu_minutes": "CPU minutes",
    "ratio": "of the first row",
    "step": "steps",
    "dice": "best Dice",
}
FORMATS = {"cpu_minutes": ".2f", "ratio": ".2f", "dice": ".4f", "step": ".0f"}
SCORES = ("step", "val_dice", "val_dice_worst")

Point = Mapping[str, float]
"""`SCORES` of a validation and `cpu_minutes` until then.

The end of a process has `cpu_minutes` only.
"""


def time_to_dice(config: TimeToDiceConfig) -> int:
    """Train every row until its Dice reaches the target or its time is used up.

    A study that was stopped resumes.

    Writes `<row>/points.csv` at each validation, and `time_to_dice.csv` and `time_to_dice.md` after
    each row. CPU minutes count all processes of a training: start, steps and validations. The cache
    is filled before, and not counted.

    Returns:
        0; 1 if a row failed; `EXIT_RESUME` if the system stopped a training.
    """
    output = Path(config.output).absolute()
    rows = config.rows
    check_names(list(rows))
    # `train` has other defaults than this study.
    common = [
        f"stage={config.stage.name.value}",
        f"steps={config.steps}",
        f"stage.validate_every={config.stage.validate_every}",
    ]
    arguments = train_arguments(HydraConfig.get().overrides.task, TimeToDiceConfig)
    # All rows are checked before the first is trained.
    configs = {}
    for name, row_arguments in rows.items():
        folder = output / folder_name(name)
        place = [f"name={folder.name}", f"run_dir={text_of(str(folder / 'run'))}"]
        merged = merge_arguments(common, arguments, row_arguments)
        configs[name] = compose_train([*merged, *place], f"rows.{name}")
    check_writable(output)
    table: list[dict[str, Any]] = []
    for name, row_config in configs.items():
        # Without a result of the first row only `max_minutes` bounds the others.
        first_minutes = float("inf")
        if table and table[0]["outcome"] == "reached":
            first_minutes = table[0]["cpu_minutes"]
        limit_minutes = min(config.max_minutes, config.max_ratio * first_minutes)
        print(
            f"{name}: until {config.metric} reaches {config.target_dice:g}, at most "
            f"{limit_minutes:.1f} CPU minutes",
            flush=True,
        )
        make_data_module(row_config).prepare_data()
        points, outcome = train_row(row_config, config, limit_minutes)
        reached = [point for point in points if point.get(config.metric, 0.0) >= config.target_dice]
        last = reached[0] if reached else max(points, key=lambda point: point["cpu_minutes"])
        table.append(
            {
                "row": name,
                "arguments": " ".join(rows[name]),
                "outcome": outcome,
                "cpu_minutes": last["cpu_minutes"],
                "ratio": last["cpu_minutes"] / table[0]["cpu_minutes"] if table else 1.0,
                "step": last.get("step", max(point.get("step", 0.0) for point in points)),
                "dice": max(point.get(config.metric, 0.0) for point in points),
            }
        )
        write_csv(output / "time_to_dice.csv", table, list(COLUMNS), FORMATS)
        replace_text(output / "time_to_dice.md", markdown_table(table, COLUMNS, FORMATS))
        if outcome == Status.interrupted.value:
            return EXIT_RESUME
    print((output / "time_to_dice.md").read_text(encoding="utf-8"), end="")
    successes = ("reached", "stopped", "ended")
    return 0 if all(row["outcome"] in successes for row in table) else EXIT_FAILED


def train_row(
    config: TrainConfig, study: TimeToDiceConfig, limit_minutes: float
) -> tuple[Sequence[Point], str]:
    """Train or resume a row until it reaches the target, is out of time, or ends.

    Args:
        config: Configuration of the row.
        study: Names the metric and the target.
        limit_minutes: Largest number of CPU minutes, with those of earlier starts.

    Returns:
        The points, at least one, and the outcome: `reached`, `stopped` (out of time), `ended` (all
        steps are done), `interrupted`, or the reason of a failure.
    """
    run_dir = Path(config.run_dir)
    begin_s = cpu_s()
    path = run_dir.parent / "points.csv"
    lines = read_csv(path) if path.is_file() else []
    points = [{key: float(value) for key, value in line.items() if value} for line in lines]
    earlier_minutes = max((point["cpu_minutes"] for point in points), default=0.0)

    def is_enough() -> bool:
        """Add the validations since the last look to the points."""
        minutes = earlier_minutes + (cpu_s() - begin_s) / 60
        last_step = max((point.get("step", 0.0) for point in points), default=0.0)
        for line in read_history(run_dir / HISTORY_FILE):
            if line.keys() >= set(SCORES) and line["step"] > last_step:
                points.append({key: line[key] for key in SCORES} | {"cpu_minutes": minutes})
                write_csv(path, points, (*SCORES, "cpu_minutes"))
                print(
                    f"  step {line['step']:.0f}: {study.metric} {line[study.metric]:.4f} after "
                    f"{minutes:.2f} CPU minutes",
                    flush=True,
                )
        return is_reached() or minutes >= limit_minutes

    def is_reached() -> bool:
        return any(point.get(study.metric, 0.0) >= study.target_dice for point in points)

    has_run = (run_dir / CONFIG_FILE).is_file()
    status = status_of_run(run_dir) if has_run else Status.interrupted
    if not is_enough() and status is not Status.finished:
        config.resume = str(run_dir) if has_run else None
        open_run(config)
        try:
            status = status_of(run_in_process(config, is_enough))
        finally:  # a study that is asked to stop leaves by SystemExit
            is_enough()
            points.append({"cpu_minutes": earlier_minutes + (cpu_s() - begin_s) / 60})
            write_csv(path, points, (*SCORES, "cpu_minutes"))
    if is_reached():
        return points, "reached"
    if status is Status.finished:
        return points, "ended"
    if points[-1]["cpu_minutes"] >= limit_minutes:
        return points, "stopped"
    if status is Status.interrupted:
        return points, "interrupted"
    return points, str(read_summary(run_dir).get("message", status.value))


def cpu_s() -> float:
    """Sum the CPU time of all processes that this one has started and their children, in s.

    Those that have ended are included.
    """
    own = psutil.Process()
    total_s = own.cpu_times().children_user + own.cpu_times().children_system
    for child in own.children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:
            continue  # it has just ended, and its parent counts it
        total_s += sum(
            getattr(times, name, 0.0)
            for name in ("user", "system", "children_user", "children_system")
        )
    return float(total_s)
