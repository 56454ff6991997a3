"""Time to Dice: a row is timed until its target, stopped at its limit, and continued later."""

from __future__ import annotations

import csv
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import hydra
import pytest

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import TimeToDiceConfig
from medseg.errors import EXIT_OUT_OF_MEMORY, EXIT_RESUME, UserError
from medseg.runs.folder import write_end
from medseg.runs.status import Status
from medseg.studies import time_to_dice as app
from medseg.training.options import TrainConfig


@pytest.fixture
def study(tiny_table: Path, tmp_path: Path) -> Iterator[TimeToDiceConfig]:
    arguments = [
        "target_dice=0.8",
        "metric=val_dice",
        "max_minutes=10",
        "run_dir=none",
        f"data.cases='{tiny_table}'",
    ]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        yield to_config(hydra.compose("time_to_dice", arguments), TimeToDiceConfig)


@pytest.fixture
def row(tiny_table: Path, tmp_path: Path, study: TimeToDiceConfig) -> TrainConfig:
    arguments = [
        f"data.cases='{tiny_table}'",
        "logger=none",
        f"run_dir='{tmp_path / 'row' / 'run'}'",
    ]
    return to_config(hydra.compose("train", arguments), TrainConfig)


class Training:
    """Training that validates every ten steps: after each CPU minute Dice is 0.1 higher."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, last_step: int = 1000, code: int = 0
    ) -> None:
        self.minutes, self.step, self.last_step, self.code, self.starts = 0.0, 0, last_step, code, 0
        monkeypatch.setattr(app, "cpu_s", lambda: 60 * self.minutes)
        monkeypatch.setattr(app, "run_in_process", self.run)

    def run(self, config: TrainConfig, is_enough: Callable[[], bool]) -> int:
        run_dir, self.starts = Path(config.run_dir), self.starts + 1
        while self.step < self.last_step:
            self.minutes, self.step = self.minutes + 1, self.step + 10
            lines = [f"{step},{step / 100},{step / 200}" for step in range(10, self.step + 1, 10)]
            (run_dir / "history.csv").write_text(
                "\n".join(["step,val_dice,val_dice_worst", *lines])
            )
            if is_enough():
                write_end(run_dir, Status.interrupted, "stopped on request")
                return EXIT_RESUME
        write_end(run_dir, app.status_of(self.code), "no memory" if self.code else "")
        return self.code


def test_a_row_ends_at_its_target(
    row: TrainConfig, study: TimeToDiceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(monkeypatch)
    points, outcome = app.train_row(row, study, 100.0)
    assert outcome == "reached"
    assert points[-2] == {"step": 80.0, "val_dice": 0.8, "val_dice_worst": 0.4, "cpu_minutes": 8.0}
    assert app.train_row(row, study, 100.0) == (points, "reached")
    assert training.starts == 1


def test_the_minutes_of_another_configuration_are_not_reused(
    row: TrainConfig, study: TimeToDiceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    Training(monkeypatch)
    assert app.train_row(row, study, 100.0)[1] == "reached"
    row.seed += 1
    with pytest.raises(UserError, match=r"another configuration \(seed: .*give another output"):
        app.train_row(row, study, 100.0)


def test_a_row_keeps_its_minutes_where_the_table_was_moved(
    row: TrainConfig, study: TimeToDiceConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Training(monkeypatch)
    assert app.train_row(row, study, 100.0)[1] == "reached"
    row.data.cases = str(tmp_path / "moved.csv")
    assert app.train_row(row, study, 100.0)[1] == "reached"


def test_a_row_that_ended_goes_on_with_more_steps_where_its_schedule_allows_them(
    row: TrainConfig, study: TimeToDiceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    row.steps, row.schedule = 20, {"_target_": "torch.optim.lr_scheduler.ConstantLR"}
    training = Training(monkeypatch, last_step=20)
    assert app.train_row(row, study, 100.0)[1] == "ended"
    row.steps, training.last_step = 1000, 1000
    assert app.train_row(row, study, 100.0)[1] == "reached"
    assert training.starts == 2
    row.steps = 2000
    assert app.train_row(row, study, 100.0)[1] == "reached"
    row.steps = 10
    with pytest.raises(UserError, match=r"steps: 1000 then, 10 now"):
        app.train_row(row, study, 100.0)


def test_a_row_is_stopped_at_its_limit_and_continues_under_a_higher_one(
    row: TrainConfig, study: TimeToDiceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(monkeypatch)
    points, outcome = app.train_row(row, study, 3.0)
    assert (outcome, training.step, points[-1]["cpu_minutes"]) == ("stopped", 30, 3.0)
    assert app.train_row(row, study, 3.0)[1] == "stopped"
    assert training.starts == 1, "its time is used up"
    points, outcome = app.train_row(row, study, 100.0)
    assert (outcome, training.starts, points[-1]["cpu_minutes"]) == ("reached", 2, 8.0)
    assert [point["step"] for point in points if "step" in point] == list(range(10, 90, 10)), (
        "no validation counts twice"
    )


@pytest.mark.parametrize(
    ("code", "outcome"),
    [(0, "ended"), (EXIT_OUT_OF_MEMORY, "no memory"), (EXIT_RESUME, "interrupted")],
)
def test_a_training_that_ends_by_itself_says_how(
    code: int,
    outcome: str,
    row: TrainConfig,
    study: TimeToDiceConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Training(monkeypatch, last_step=20, code=code)
    points, found = app.train_row(row, study, 100.0)
    assert found == outcome
    assert points[-1] == {"cpu_minutes": 2.0}


def test_a_training_that_fails_at_its_limit_has_failed(
    row: TrainConfig, study: TimeToDiceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(monkeypatch, last_step=20, code=EXIT_OUT_OF_MEMORY)
    run = training.run

    def run_past_the_limit(config: TrainConfig, is_enough: Callable[[], bool]) -> int:
        code = run(config, is_enough)
        training.minutes += 1
        return code

    monkeypatch.setattr(app, "run_in_process", run_past_the_limit)
    points, outcome = app.train_row(row, study, 2.5)
    assert (points[-1], outcome) == ({"cpu_minutes": 3.0}, "no memory")
    assert app.train_row(row, study, 2.5) == (points, "no memory"), "its time is used up"
    assert training.starts == 1


@pytest.mark.parametrize(
    ("first_minutes", "outcome", "limits"),
    [(2.0, "reached", [10.0, 6.0]), (9.0, "reached", [10.0, 10.0]), (2.0, "ended", [10.0, 10.0])],
)
def test_a_row_has_the_smaller_of_the_two_limits(
    first_minutes: float,
    outcome: str,
    limits: list[float],
    study: TimeToDiceConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The multiple of the first row's minutes counts only if that row has reached the target."""
    used_limits: list[float] = []

    def train_row(_: Any, __: Any, limit_minutes: float) -> Any:
        used_limits.append(limit_minutes)
        points = [{"step": 10.0, "val_dice": 0.9, "cpu_minutes": first_minutes}]
        return points, outcome

    hydra_config = SimpleNamespace(overrides=SimpleNamespace(task=[]))
    monkeypatch.setattr(app, "HydraConfig", SimpleNamespace(get=lambda: hydra_config))
    monkeypatch.setattr(app, "compose_train", lambda *_: None)
    data = SimpleNamespace(prepare_data=lambda: None)
    monkeypatch.setattr(app, "make_data_module", lambda _: data)
    monkeypatch.setattr(app, "train_row", train_row)
    rows: Any = {"first": [], "second": []}
    app.time_to_dice(
        replace(study, output=str(tmp_path), rows=rows, max_minutes=10.0, max_ratio=3.0)
    )
    assert used_limits == limits


def test_all_rows_that_have_begun_are_checked_before_one_is_trained(
    row: TrainConfig, study: TimeToDiceConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Training(monkeypatch)
    row.run_dir = str(tmp_path / "second" / "run")
    assert app.train_row(row, study, 100.0)[1] == "reached"
    row.seed += 1
    hydra_config = SimpleNamespace(overrides=SimpleNamespace(task=[]))
    monkeypatch.setattr(app, "HydraConfig", SimpleNamespace(get=lambda: hydra_config))
    monkeypatch.setattr(app, "compose_train", lambda *_: row)
    monkeypatch.setattr(app, "make_data_module", lambda _: pytest.fail("a row begins"))
    rows: Any = {"first": [], "second": []}
    with pytest.raises(UserError, match=r"second.run holds a training with another .*seed: "):
        app.time_to_dice(replace(study, output=str(tmp_path), rows=rows))


def test_processes_that_have_ended_count() -> None:
    before = app.cpu_s()
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    assert app.cpu_s() - before > 0.05


def command(table: Path, folder: Path, *arguments: str) -> list[str]:
    return [
        sys.executable, "-m", "medseg.commands.cli", "time_to_dice", f"output={folder / 't'}",
        "stage=coarse", f"data.cases={table}",
        f"data.cache={folder / 'cache'}", "logger=none", "data.num_workers=0",
        "trainer.accelerator=cpu", "trainer.threads=1",
        "spacing=isotropic_4mm", "augment=none", "schedule=constant", "steps=2000",
        "stage.validate_every=10", "~rows",
        ("+rows={learns: ['model.width=16', 'optimizer.lr=0.01'], idle: ['model.width=4', "
         "'optimizer.lr=1e-9']}"),
        *arguments,
    ]  # fmt: skip


@pytest.mark.slow
def test_a_study_reaches_stops_and_continues(tiny_table: Path, tmp_path: Path) -> None:
    arguments = command(tiny_table, tmp_path, "target_dice=0.3", "metric=val_dice", "max_ratio=0.5")
    killed = forked.Popen(arguments, cwd=tmp_path)
    while "step 10:" not in killed.files[0].read_text(encoding="utf-8"):
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.02)
    killed.terminate()
    assert killed.wait() in (EXIT_RESUME, 0)
    result = forked.run(arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    with (tmp_path / "t" / "time_to_dice.csv").open(encoding="utf-8", newline="") as file:
        learns, idle = csv.DictReader(file)
    assert (learns["outcome"], idle["outcome"]) == ("reached", "stopped")
    assert float(learns["dice"]) >= 0.3 > float(idle["dice"])
    # The table rounds the minutes of both rows to hundredths.
    rounding = 0.005
    learned = float(learns["cpu_minutes"])
    assert learned > 0
    assert float(idle["cpu_minutes"]) + rounding >= 0.5 * (learned - rounding)
    assert (
        "| learns | model.width=16 optimizer.lr=0.01 | reached |"
        in (tmp_path / "t" / "time_to_dice.md").read_text()
    )
    again = forked.run(arguments, cwd=tmp_path)
    assert "step " not in again.stdout, "nothing is repeated"


def test_equal_names_are_refused(tiny_table: Path, tmp_path: Path) -> None:
    result = forked.run(command(tiny_table, tmp_path, "+rows={a b: [], a/b: []}"))
    assert result.returncode == 2
    assert "differ in more than punctuation" in result.stderr
    assert not (tmp_path / "t").exists()
