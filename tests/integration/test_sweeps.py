"""A sweep survives its jobs, and itself: failures are recorded, what is done is not done again."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
from pathlib import Path

import forked
import pytest

from medseg.runs.sweeps import read_jobs

from .test_runs import command
from .test_stopping import wait_for

# Each in the place of a job that would be good.
FAILURES = {
    1: ("out_of_memory", "model: {width: 4}\nspacing: {target_spacing_mm: [0.001,0.001,0.001]}"),
    2: ("not_finite", "model: {width: 4}\noptimizer: {lr: 1e30}\ntrainer: {gradient_clip: null}"),
    4: (
        "refused",
        "model: {width: 4}\nschedule: {pct_start: 7.0}",
    ),  # by its class, before data is read
}


def statuses(sweep_dir: Path) -> list[str]:
    return [job.status.value for job in read_jobs(sweep_dir).values()]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_sweep_that_is_killed_goes_on_and_runs_no_job_twice(
    tiny_table: Path, tmp_path: Path
) -> None:
    experiments, sweep_dir = tmp_path / "conf" / "experiment", tmp_path / "sweep"
    experiments.mkdir(parents=True)
    for number in range(6):
        text = FAILURES[number][1] if number in FAILURES else "model: {width: 4}"
        (experiments / f"e{number:02d}.yaml").write_text(
            f"# @package _global_\nseed: {number}\n{text}\n"
        )
    names = ",".join(f"e{number:02d}" for number in range(6))
    sweep = [
        *command(tiny_table, tmp_path, f"experiment={names}", "steps=3", "data.num_workers=0"),
        f"hydra.sweep.dir={sweep_dir}", "--config-dir", str(tmp_path / "conf"), "-m",
    ]  # fmt: skip
    for said in ("optimizer.lr=0.01", "model.width=4"):  # they would overrule the experiments
        sweep.remove(said)
    process = subprocess.Popen(
        sweep, cwd=tmp_path, start_new_session=True, stderr=subprocess.PIPE, encoding="utf-8"
    )
    wait_for(lambda: (sweep_dir / "3" / "versions.json").is_file(), process, limit_s=1000)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert statuses(sweep_dir) == ["finished", "out_of_memory", "not_finite", "running"]

    again = forked.run(sweep, cwd=tmp_path)
    assert again.returncode == 1, again.stderr
    assert "3 of 6 jobs failed" in again.stderr
    expected = [FAILURES[number][0] if number in FAILURES else "finished" for number in range(6)]
    assert statuses(sweep_dir) == expected
    with (sweep_dir / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == expected
    assert all(0 <= float(row["val_dice_best"]) <= 1 for row in rows if row["status"] == "finished")
    assert all(row["message"] for row in rows if row["status"] != "finished")
    assert "pct_start" in again.stderr
    starts = [
        len(json.loads((sweep_dir / row["run"] / "versions.json").read_text()))
        for row in rows
        if row["status"] not in ("out_of_memory", "refused")
    ]
    assert starts == [1, 1, 2, 1], "only what was interrupted began twice"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "settings"),
    [
        pytest.param("joblib", ["hydra.launcher.n_jobs=2"], id="joblib"),
        pytest.param(
            "joblib",
            ["hydra.launcher.n_jobs=2", "trainer=ddp", "stage.batch_size=2"],
            id="joblib, two ranks each",
            marks=pytest.mark.thorough,
        ),
        pytest.param("submitit_local", ["hydra.launcher.timeout_min=10"], id="submitit"),
    ],
)
def test_other_launchers_bring_back_what_became_of_their_jobs(
    launcher: str, settings: list[str], tiny_table: Path, tmp_path: Path
) -> None:
    sweep_dir = tmp_path / "sweep"
    sweep = command(
        tiny_table,
        tmp_path,
        "steps=3",
        "schedule=constant",
        "trainer.gradient_clip=null",
        "data.num_workers=0",
        *settings,
    )
    sweep[sweep.index("optimizer.lr=0.01")] = "optimizer.lr=0.01,1e30"
    sweep += [f"hydra/launcher={launcher}", f"hydra.sweep.dir={sweep_dir}", "-m"]
    # Not `forked.run`: a forked process waits five minutes for joblib's idle processes. A new
    # Python stops them when it ends.
    result = subprocess.run(sweep, cwd=tmp_path, capture_output=True, encoding="utf-8")
    assert result.returncode == 1, result.stderr
    assert "1 of 2 jobs failed" in result.stderr
    assert statuses(sweep_dir) == ["finished", "not_finite"]
    for number in range(2):
        assert (sweep_dir / str(number) / "ranks" / "rank1.log").is_file() == (
            "trainer=ddp" in settings
        )
    with (sweep_dir / "comparison.csv").open() as file:
        assert [row["optimizer.lr"] for row in csv.DictReader(file)] == ["0.01", "1e+30"]
