"""The `time_to_dice` command: CPU minutes until the validation of a training reaches a target Dice.

Each row is a configuration; all rows are trained and validated on the same split.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from hydra.core.hydra_config import HydraConfig

from medseg.config.overrides import quote
from medseg.config.schema import TimeToDiceConfig
from medseg.errors import EXIT_FAILED, EXIT_RESUME
from medseg.io.atomic import check_writable, replace_text
from medseg.io.tables import markdown_table, read_csv, write_csv
from medseg.runs.folder import CONFIG_FILE, is_finished, open_run, read_summary, status_of_run
from medseg.runs.past_runs import HISTORY_FILE, read_history
from medseg.runs.processes import run_in_process
from medseg.runs.status import FAILURES, Status, status_of
from medseg.studies.train_arguments import (
    arguments_for_train,
    check_names,
    check_same_training,
    compose_train,
    folder_name,
    merge_arguments,
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
# Columns of a validation in `history.csv` that are copied to `points.csv`.
SCORES = ("step", "val_dice", "val_dice_worst")

# Line of `points.csv`: a validation, with the keys of `SCORES` and the `cpu_minutes` until the
# validation; or the end of a process, with `cpu_minutes` only.
Point = Mapping[str, float]


def time_to_dice(config: TimeToDiceConfig) -> int:
    """Train each row until its Dice reaches the target or its time is used up.

    Writes `<row>/points.csv` at each validation, and a line of `time_to_dice.csv` and
    `time_to_dice.md` after each row. CPU minutes count all processes of a training: start, steps
    and validations. The cache is filled before the training, which is not counted. A study that was
    stopped is resumed when it starts again.

    Returns:
        Exit code: 0; 1 if a row failed; `EXIT_RESUME` if the system stopped a training.
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
    arguments = arguments_for_train(HydraConfig.get().overrides.task, TimeToDiceConfig)
    # Compose all rows first, so that a mistake in any row is found before a training.
    configs = {}
    for name, row_arguments in rows.items():
        folder = output / folder_name(name)
        run_arguments = [f"name={quote(folder.name)}", f"run_dir={quote(str(folder / 'run'))}"]
        merged = merge_arguments(common, arguments, row_arguments)
        configs[name] = compose_train([*merged, *run_arguments], f"rows.{name}")
    for name, row_config in configs.items():
        check_begun_row(output / folder_name(name) / "run", row_config)
    check_writable(output)
    table: list[dict[str, Any]] = []
    for name, row_config in configs.items():
        # If the first row reached the target, a multiple of its time limits the other rows.
        first_minutes = float("inf")
        if table and table[0]["outcome"] == "reached":
            first_minutes = table[0]["cpu_minutes"]
        limit_minutes = min(config.max_minutes, config.max_ratio * first_minutes)
        print(
            f"{name}: until {config.metric} reaches {config.target_dice:g}, at most "
            f"{limit_minutes:.1f} CPU minutes",
            flush=True,
        )
        # Fill the cache before the time of the row counts: rows share the cache, and the first row
        # would be charged for filling it.
        make_data_module(row_config).prepare_data()
        points, outcome = train_row(row_config, config, limit_minutes)
        line: dict[str, Any] = {
            "row": name,
            "arguments": " ".join(rows[name]),
            "outcome": outcome,
            **_figures(points, config),
        }
        line["ratio"] = 1.0
        if table:
            line["ratio"] = line["cpu_minutes"] / table[0]["cpu_minutes"]
        table.append(line)
        write_csv(output / "time_to_dice.csv", table, list(COLUMNS), FORMATS)
        replace_text(output / "time_to_dice.md", markdown_table(table, COLUMNS, FORMATS))
        if outcome == Status.interrupted.value:
            return EXIT_RESUME
    print((output / "time_to_dice.md").read_text(encoding="utf-8"), end="")
    # A row that ran out of time (`stopped`) or steps (`ended`) is a result, no failure.
    successes = ("reached", "stopped", "ended")
    return 0 if all(line["outcome"] in successes for line in table) else EXIT_FAILED


def _figures(points: Sequence[Point], study: TimeToDiceConfig) -> dict[str, Any]:
    """Compute the columns `cpu_minutes`, `step` and `dice` (the best) of a row.

    Minutes and steps count until the first validation that reached the target, or until the end of
    the row if no validation did.
    """
    dices = [point.get(study.metric, 0.0) for point in points]
    steps = [point.get("step", 0.0) for point in points]
    end_point = max(points, key=lambda point: point["cpu_minutes"])
    for point, dice in zip(points, dices, strict=True):
        if dice >= study.target_dice:
            end_point = point
            break
    return {
        "cpu_minutes": end_point["cpu_minutes"],
        # A point for the end of a process has no step: take the last validation.
        "step": end_point.get("step", max(steps)),
        "dice": max(dices),
    }


class _Progress:
    """Points of a row over all starts of the study, with the CPU minutes until each point.

    Attributes:
        points: All lines of `points.csv` so far, see `Point`.
    """

    def __init__(self, run_dir: Path, study: TimeToDiceConfig) -> None:
        # CPU time so far, of earlier rows and the cache, which this row is not charged for.
        self._begin_s = cpu_s()
        self._history = run_dir / HISTORY_FILE
        self._path = run_dir.parent / "points.csv"
        self._study = study
        lines = read_csv(self._path) if self._path.is_file() else []
        self.points: list[Point] = []
        for line in lines:
            # The line of the end of a process has empty cells, which are left out.
            self.points.append({key: float(value) for key, value in line.items() if value})
        self._earlier_minutes = max((point["cpu_minutes"] for point in self.points), default=0.0)

    @property
    def minutes(self) -> float:
        """CPU minutes of this row until now, including earlier starts of the study."""
        return self._earlier_minutes + (cpu_s() - self._begin_s) / 60

    @property
    def is_reached(self) -> bool:
        """Whether a validation has reached the target."""
        study = self._study
        return any(point.get(study.metric, 0.0) >= study.target_dice for point in self.points)

    def add_validations(self) -> None:
        """Add the validations that were written to the history since the last call."""
        minutes = self.minutes
        metric = self._study.metric
        last_step = max((point.get("step", 0.0) for point in self.points), default=0.0)
        for line in read_history(self._history):
            # Skip lines of losses alone, which are no validations.
            if not line.keys() >= set(SCORES):
                continue
            if line["step"] <= last_step:
                continue
            self._add({key: line[key] for key in SCORES} | {"cpu_minutes": minutes})
            print(
                f"  step {line['step']:.0f}: {metric} {line[metric]:.4f} after "
                f"{minutes:.2f} CPU minutes",
                flush=True,
            )

    def end(self) -> None:
        """Add the end of a process: the minutes since its last validation count too."""
        self._add({"cpu_minutes": self.minutes})

    def _add(self, point: Point) -> None:
        self.points.append(point)
        write_csv(self._path, self.points, (*SCORES, "cpu_minutes"))


def check_begun_row(run_dir: Path, config: TrainConfig) -> None:
    """Refuse a row that an earlier start has trained with another configuration.

    Args:
        run_dir: Run folder of the row, which may not exist.
        config: Configuration of the row.

    Raises:
        UserError: Names the keys that differ.
    """
    if (run_dir / CONFIG_FILE).is_file():
        check_same_training(run_dir, config, can_extend=True)


def train_row(
    config: TrainConfig, study: TimeToDiceConfig, limit_minutes: float
) -> tuple[Sequence[Point], str]:
    """Train or resume a row until it reaches the target, is out of time, or ends.

    Args:
        config: Configuration of the row.
        study: Has the metric and the target.
        limit_minutes: Largest number of CPU minutes, including earlier starts of the study.

    Returns:
        The points, at least one, and the outcome: `reached`, `stopped` (out of time), `ended` (all
        steps are done), `interrupted`, or the reason of a failure.

    Raises:
        UserError: If an earlier start trained the row with another configuration.
    """
    run_dir = Path(config.run_dir)
    progress = _Progress(run_dir, study)

    def is_enough() -> bool:
        """Whether the training should end; `run_in_process` polls this while it runs."""
        progress.add_validations()
        return progress.is_reached or progress.minutes >= limit_minutes

    has_begun = (run_dir / CONFIG_FILE).is_file()
    # A row that has not begun is treated like an interrupted one: it has steps to make.
    status = status_of_run(run_dir) if has_begun else Status.interrupted
    config.resume = str(run_dir) if has_begun else None
    # A row that has ended goes on where the study has more steps now.
    if status is Status.finished and not is_finished(config):
        status = Status.interrupted
    # `is_enough` comes first in the condition: it also adds the validations of an earlier start
    # that are in the history only.
    if is_enough() or status is Status.finished:
        # Where a row is continued, `open_run` compares the configurations.
        check_begun_row(run_dir, config)
    else:
        open_run(config)
        try:
            status = status_of(run_in_process(config, is_enough))
        # In `finally`, because a stop signal ends the study by SystemExit.
        finally:
            progress.add_validations()
            progress.end()
    points = progress.points
    if progress.is_reached:
        return points, "reached"
    if status is Status.finished:
        return points, "ended"
    # Failures come before the limit: a training may also fail when its time is used up.
    if status in FAILURES:
        return points, str(read_summary(run_dir).get("message", status.value))
    if points[-1]["cpu_minutes"] >= limit_minutes:
        return points, "stopped"
    return points, Status.interrupted.value


def cpu_s() -> float:
    """Sum the CPU time of all descendants of this process, in s.

    Descendants that have ended are included; this process itself is not.
    """
    own_process = psutil.Process()
    own_times = own_process.cpu_times()
    # `children_…` are the times of children that have ended.
    total_s = own_times.children_user + own_times.children_system
    for child in own_process.children(recursive=True):
        try:
            times = child.cpu_times()
        # The child has just ended: from now on its time is in the `children_…` of its parent.
        except psutil.Error:
            continue
        total_s += times.user + times.system + times.children_user + times.children_system
    return float(total_s)
