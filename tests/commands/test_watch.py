"""The `watch` command: state of a run in the terminal, from its files and machine counters."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
from rich.console import Console

from medseg.commands import watch as app
from medseg.config.schema import WatchConfig
from medseg.errors import UserError
from medseg.io.atomic import locked
from medseg.runs.folder import LOCK_FILE, START_LOCK_FILE

HISTORY = """\
step,loss,lr,val_dice,val_dice_worst,seconds_per_step,peak_gib,host_gib,\
cpu_percent,gpu_gib,gpu_percent
10,1.5,0.001,,,2.0,0.5,1.25,180,,
20,0.75,0.002,,,2.0,0.5,1.5,190,,
20,,,0.9,0.8,,,,,,
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Folder of a run after 20 of 50 steps."""
    folder = tmp_path / "runs" / "a run (1)"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("steps: 50\n")
    (folder / "history.csv").write_text(HISTORY)
    return folder


def shown(run_dir: Path) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(app.view(run_dir))
    return capture.get()


def test_the_view_shows_losses_scores_memory_and_the_time_that_is_left(run_dir: Path) -> None:
    with locked(run_dir / LOCK_FILE):
        lines = {line.split("  ")[0].strip(): line for line in shown(run_dir).splitlines()}
    assert any(line.startswith("running: step 20 of 50, about 1 minutes left") for line in lines)
    assert lines["loss"].split() == ["loss", "0.7500", "0.7500", "1.5000", "█▁"]
    assert lines["worst region"].split()[2] == "0.8000"
    assert lines["host memory of the run"].split()[5:7] == ["1.50", "GiB"]
    assert "GiB" in lines["machine: memory"]
    assert not any("GPU" in line for line in lines)
    assert "interrupted: step 20" in shown(run_dir), "without the lock nobody runs it"


@pytest.mark.parametrize("config", ["name: mine\n", "steps: many\n"])
def test_a_run_whose_number_of_steps_is_unknown_is_shown(config: str, run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text(config)
    assert "interrupted: step 20" in [line.rstrip() for line in shown(run_dir).splitlines()]


def test_the_gpus_of_the_machine_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def no_utilisation(gpu: int) -> object:
        raise NVMLError("Not Supported")

    driver = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=2**30, total=8 * 2**30),
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=93),
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert app.machine()[2:] == [
        ("GPU 0: memory", "1.0 of 8.0 GiB"),
        ("GPU 0: utilisation", "93 %"),
    ]
    driver.nvmlDeviceGetUtilizationRates = no_utilisation
    assert app.machine()[2:] == [("GPU 0: memory", "1.0 of 8.0 GiB")]


def test_the_use_of_the_processors_is_measured_at_the_first_view(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Without an interval psutil reports the use since its last call: 0 at the first.
    monkeypatch.setattr(app.psutil, "cpu_percent", lambda interval=None: 37.0 if interval else 0.0)
    assert app.machine()[1] == ("machine: processor", "37 %")


def test_long_curves_keep_their_shape() -> None:
    line = app.curve([float(number) for number in range(1000)])
    assert len(line) <= app.WIDTH
    assert list(line) == sorted(line)
    assert app.curve([2.0, 2.0]) == "▁▁"


def test_a_live_view_ends_with_the_run(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses = iter(["running"] * 4 + ["finished"] * 9)
    monkeypatch.setattr(app, "status_of_run", lambda _: app.Status(next(statuses)))
    monkeypatch.setattr(
        app,
        "Console",
        lambda highlight: Console(force_terminal=True, width=120, highlight=highlight),
    )
    assert app.watch(WatchConfig(str(run_dir), 0.01)) == 0
    assert "finished: step 20 of 50" in capsys.readouterr().out


def test_a_run_whose_ranks_are_starting_is_watched(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process that starts them has a lock of its own until rank 0 takes that of the run."""
    monkeypatch.setattr(
        app,
        "Console",
        lambda highlight: Console(force_terminal=True, width=120, highlight=highlight),
    )
    looks: list[int] = []

    def sleep(_: float) -> None:
        looks.append(len(looks))
        if len(looks) == 3:
            (run_dir / "summary.json").write_text('{"status": "finished"}')

    monkeypatch.setattr(app, "time", SimpleNamespace(sleep=sleep))
    with locked(run_dir / START_LOCK_FILE):
        assert app.watch(WatchConfig(str(run_dir), 0.01)) == 0
    assert len(looks) == 3
    shown_text = capsys.readouterr().out
    assert "running: step 20 of 50" in shown_text
    assert "finished: step 20 of 50" in shown_text


def test_the_newest_run_of_a_folder_is_shown_and_a_folder_without_runs_is_refused(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = run_dir.parent / "refused"  # a job of a sweep that never became a run
    refused.mkdir()
    (refused / "job.json").write_text("{}")
    assert app.watch(WatchConfig(str(run_dir.parent), 1.0)) == 0
    # A long path is wrapped, also at its spaces.
    assert "arun(1)" in "".join(capsys.readouterr().out.split())
    with pytest.raises(UserError, match=r"expected a run folder, with config\.yaml"):
        app.watch(WatchConfig(str(run_dir / "nowhere"), 1.0))


def test_the_folder_may_be_given_without_its_key(run_dir: Path) -> None:
    command = [sys.executable, "-m", "medseg.commands.cli", "watch", str(run_dir)]
    done = forked.run(command, cwd=run_dir)
    assert done.returncode == 0, done.stderr
    assert "step 20 of 50" in done.stdout


@pytest.mark.parametrize(
    ("history", "steps", "said"),
    [
        ([], 50, "step 0 of 50"),
        ([{"step": 20.0}], 50, "step 20 of 50"),
        ([{"step": 20.0}], None, "step 20"),
        ([{"step": 20.0, "seconds_per_step": 4.0}], "many", "step 20"),
        ([{"step": 20.0, "seconds_per_step": 4.0}], 50, "step 20 of 50, about 2 minutes left"),
        # The last rate counts; a later line may have no step time, and an earlier one more steps.
        (
            [{"step": 30.0, "seconds_per_step": 9.0}, {"step": 20.0, "seconds_per_step": 6.0}, {}],
            50,
            "step 30 of 50, about 2 minutes left",
        ),
        ([{"step": 50.0, "seconds_per_step": 4.0}], 50, "step 50 of 50"),
    ],
)
def test_the_rest_is_forecast_while_steps_are_left(
    history: list[dict[str, float]], steps: object, said: str
) -> None:
    assert app._progress(history, steps) == said


def test_of_several_runs_the_newest_is_found(run_dir: Path) -> None:
    other = run_dir.parent / "other"
    other.mkdir()
    (other / "config.yaml").write_text("steps: 50\n", encoding="utf-8")
    for newest, older in ((run_dir, other), (other, run_dir)):
        os.utime(older, (1e9, 1e9))
        os.utime(newest, (2e9, 2e9))
        assert app._find_run(str(run_dir.parent)) == newest
    assert app._find_run(str(run_dir)) == run_dir
