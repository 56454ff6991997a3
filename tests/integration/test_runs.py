"""Interrupted, accumulated and distributed runs end where a plain one does."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

from medseg.errors import UserError
from medseg.runs.folder import load_config
from medseg.runs.train_run import train_run
from medseg.training.module import RAW_WEIGHTS

from .conftest import train

pytestmark = pytest.mark.usefixtures("without_pictures")

SMALL = [
    "spacing=isotropic_4mm", "model.width=4", "model.blocks_per_level=[1,1,1,1]",
    "stage.validate_every=4",
]  # fmt: skip


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(checkpoint, weights_only=True)["state_dict"]
    return state


def assert_equal_weights(one: Path, other: Path) -> None:
    left, right = weights(one), weights(other)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)


def assert_equal(one: Any, other: Any) -> None:
    """Whether two nested values are the same to the last bit."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        for left, right in zip(one, other, strict=True):
            assert_equal(left, right)
    else:
        assert one == other


def command(table: Path, run_dir: Path, *overrides: str) -> list[str]:
    return [
        sys.executable, "-m", "medseg.commands.cli", "train", *SMALL, f"data.cases={table}",
        f"data.cache={table.parent / 'cache'}",
        "logger=none", "trainer.accelerator=cpu", "trainer.threads=1", "optimizer.lr=0.01",
        f"hydra.run.dir={run_dir}", *overrides,
    ]  # fmt: skip


def history(run_dir: Path) -> list[dict[str, str]]:
    """The lines without what depends on the machine."""
    with (run_dir / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [
        {key: row[key] for key in ("step", "loss", "lr", "val_dice", "val_dice_worst")}
        for row in rows
    ]


# A run that kills itself as soon as it has made the steps that its second argument names.
KILLED_RUN = """
import os, signal, sys
from pathlib import Path
from medseg.runs.folder import load_config
from medseg.runs.train_run import train_run
from medseg.training.module import SegmentationModule

start = SegmentationModule.on_train_batch_start
def on_train_batch_start(self, batch, batch_idx):
    if self.global_step == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    start(self, batch, batch_idx)
SegmentationModule.on_train_batch_start = on_train_batch_start
train_run(load_config(Path(sys.argv[1])))
"""


def test_a_killed_run_goes_on_bit_by_bit(tiny_table: Path, tmp_path: Path) -> None:
    transforms = (
        "augment.transforms=[effects, {_target_: monai.transforms.RandGaussianNoised, prob: 0.5}, "
        "{_target_: monai.transforms.RandAffined, prob: 0.5, rotate_range: [0.1, 0.1, 0.1]}]"
    )
    settings = [
        *SMALL,
        "steps=12",
        "stage.batch_size=2",
        "memory.accumulate=2",
        "data.num_workers=1",
        transforms,
    ]
    whole, run_dir = tmp_path / "whole", tmp_path / "killed"
    train(whole, tiny_table, *settings)
    run_dir.mkdir()
    shutil.copy(whole / "config.yaml", run_dir)  # the same run, not begun
    killed = forked.run([sys.executable, "-c", KILLED_RUN, str(run_dir), "5"])
    assert killed.returncode == -signal.SIGKILL
    assert torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 4
    moved = run_dir.rename(tmp_path / "moved")
    train_run(load_config(moved))
    for name in ("last.ckpt", "best.ckpt"):
        assert_equal_weights(whole / "checkpoints" / name, moved / "checkpoints" / name)
    assert history(moved) == history(whole)
    assert [int(row["step"]) for row in history(moved) if row["loss"]] == list(range(1, 13))
    assert not run_dir.exists(), "nothing is written where the run lay before"
    assert [start["seed"] for start in json.loads((moved / "versions.json").read_text())] == [1, 1]


def test_a_table_that_is_edited_between_kill_and_resume_is_refused(
    tiny_table: Path, tmp_path: Path
) -> None:
    rows = tiny_table.read_text(encoding="utf-8").splitlines()
    table = tmp_path / "table.csv"

    def write(lines: list[str]) -> None:
        for file in tiny_table.parent.glob("*.nii.gz"):
            (table.parent / file.name).unlink(missing_ok=True)
            (table.parent / file.name).symlink_to(file)
        table.write_text("\n".join(lines) + "\n", encoding="utf-8")

    write(rows)
    settings = [*SMALL, "data.val_patients=[]", "schedule=constant"]
    train(tmp_path / "run", table, *settings, "steps=1")
    write([row.replace("case 1", "case 9") for row in rows])
    with pytest.raises(
        UserError,
        match=r"cases are not those that the run began with \(case 9 added; case 1 removed\)",
    ):
        train(tmp_path / "again", table, *settings, "steps=2", f"resume='{tmp_path / 'run'}'")
    table = tmp_path / "moved" / "table.csv"
    table.parent.mkdir()
    write(rows)
    assert train(
        tmp_path / "run", table, *settings, "steps=2", f"resume='{tmp_path / 'run'}'"
    ).is_file()


@pytest.mark.slow
def test_a_device_map_of_one_device_makes_the_same_run(tiny_table: Path, tmp_path: Path) -> None:
    settings = [*SMALL, "steps=4", "schedule=constant", "data.num_workers=0"]
    mapped = ["model.device_map={stem: cpu, encoder: cpu, decoder.0: cpu}"]
    train(tmp_path / "plain", tiny_table, *settings)
    train(tmp_path / "mapped", tiny_table, *settings, *mapped)
    assert_equal_weights(
        *(tmp_path / name / "checkpoints" / "last.ckpt" for name in ("plain", "mapped"))
    )
    # It goes on with the optimiser's state, on whatever devices.
    for name in ("plain", "mapped"):
        config = tmp_path / name / "config.yaml"
        config.write_text(config.read_text().replace("steps: 4", "steps: 6"))
        train_run(load_config(tmp_path / name))
    assert_equal_weights(
        *(tmp_path / name / "checkpoints" / "last.ckpt" for name in ("plain", "mapped"))
    )
    assert history(tmp_path / "plain") == history(tmp_path / "mapped")


def logged(run_dir: Path) -> dict[str, str]:
    """Training loss by step in the CSV logger's file; every step stands there once."""
    with (run_dir / "csv" / "metrics.csv").open() as file:
        rows = [
            (row["step"], row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]
        ]
    assert len({step for step, _ in rows}) == len(rows)
    return dict(rows)


@pytest.mark.slow
@pytest.mark.attack
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["data.num_workers=0"], id="plain"),
        pytest.param(
            [
                "data.num_workers=2",
                "stage.batch_size=2",
                "memory.accumulate=2",
                "memory.precision=bf16",
                "ema_decay=0.9",
            ],
            id="workers, accumulation, EMA, bf16",
        ),
    ],
)
def test_a_run_that_is_killed_twenty_times_ends_alike(
    settings: list[str], tiny_table: Path, tmp_path: Path
) -> None:
    settings = [
        *SMALL,
        "steps=140",
        "stage.validate_every=14",
        "checkpoint_every=2",
        "stage.patience=100",
        "logger=csv",
        *settings,
    ]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(whole, tiny_table, *settings)
    killed.mkdir()
    (killed / "config.yaml").write_text(
        (whole / "config.yaml").read_text().replace(str(whole), str(killed))
    )
    script = [
        sys.executable,
        str(Path(__file__).with_name("killed_runs.py")),
        str(killed),
        "20",
        "1",
    ]
    result = forked.run(script, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stdout + result.stderr
    states = [
        torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
        for folder in (whole, killed)
    ]
    for key in ("optimizer_states", RAW_WEIGHTS):
        assert_equal(states[0].get(key), states[1].get(key))
    assert states[0]["lr_schedulers"] == states[1]["lr_schedulers"]
    for name in ("last.ckpt", "best.ckpt"):
        assert_equal_weights(whole / "checkpoints" / name, killed / "checkpoints" / name)
    assert history(killed) == history(whole)
    assert logged(killed).items() <= logged(whole).items()
    files = [
        {str(path.relative_to(folder)) for path in folder.rglob("*")} for folder in (whole, killed)
    ]
    assert files[0] == files[1], "nothing is left over and nothing is missing"
    assert len(json.loads((killed / "versions.json").read_text())) == 21


@pytest.mark.slow
def test_a_run_is_resumed_from_another_folder(tiny_table: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    first = command(tiny_table, tmp_path / "run", "steps=1", "data.num_workers=0")
    relative = [
        "data.cases=table.csv" if part.startswith("data.cases=") else part for part in first
    ]
    forked.run(relative, cwd=tiny_table.parent, check=True)
    (tmp_path / "run" / "summary.json").unlink()
    again = [sys.executable, "-m", "medseg.commands.cli", "train", f"resume={tmp_path / 'run'}"]
    forked.run(again, cwd=elsewhere, check=True)
    assert (tmp_path / "run" / "summary.json").is_file()
    assert not list(elsewhere.rglob("20*")), "no empty run folder is left"
    # The same table by another name is no other configuration; the same name in another folder is.
    finished = forked.run([*first, f"resume={tmp_path / 'run'}"], cwd=tiny_table.parent, check=True)
    assert f"already finished: {tmp_path / 'run'} has made the 1 steps" in finished.stderr
    other = forked.run([*relative, f"resume={tmp_path / 'run'}"], cwd=elsewhere)
    assert other.returncode == 2
    assert "data.cases" in other.stderr


@pytest.mark.slow
def test_a_job_that_fails_ends_no_multirun_and_is_listed(tiny_table: Path, tmp_path: Path) -> None:
    settings = ["steps=1", "data.num_workers=0", "stage.batch_size=1", "memory.accumulate=2,1"]
    sweep = command(tiny_table, tmp_path, *settings, f"hydra.sweep.dir={tmp_path / 'sweep'}", "-m")
    result = forked.run(sweep, cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    with (tmp_path / "sweep" / "comparison.csv").open() as file:
        refused, finished = csv.DictReader(file)
    assert (refused["run"], refused["memory.accumulate"], refused["status"]) == (
        "0",
        "2",
        "refused",
    )
    assert "memory.accumulate" in refused["message"]
    assert (finished["run"], finished["memory.accumulate"], finished["status"]) == (
        "1",
        "1",
        "finished",
    )
    assert float(finished["val_dice_best"]) >= 0
    assert (tmp_path / "sweep" / "1" / "checkpoints" / "last.ckpt").is_file()


@pytest.mark.slow
def test_an_interrupt_ends_the_multirun(tiny_table: Path, tmp_path: Path) -> None:
    settings = ["steps=100000", "data.num_workers=0", "seed=1,2"]
    sweep = command(tiny_table, tmp_path, *settings, f"hydra.sweep.dir={tmp_path / 'sweep'}", "-m")
    process = subprocess.Popen(
        sweep, cwd=tmp_path, stderr=subprocess.PIPE, encoding="utf-8", start_new_session=True
    )
    last = tmp_path / "sweep" / "0" / "checkpoints" / "last.ckpt"
    deadline_s = time.monotonic() + 300
    while not last.is_file() and process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert not (tmp_path / "sweep" / "1").exists()
    assert (
        json.loads((tmp_path / "sweep" / "0" / "job.json").read_text())["status"] == "interrupted"
    )
