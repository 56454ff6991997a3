"""Several ranks make the run that one makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import forked
import numpy as np
import pytest
import torch

import medseg
from medseg.io.read import read_image
from medseg.training.module import RAW_WEIGHTS

from .conftest import train
from .test_runs import SMALL, assert_equal, command, history, weights

TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node=2",
    "--max-restarts=1",
    "-m",
]
SETTINGS = [
    "steps=5",
    "stage.batch_size=2",
    "data.num_workers=0",
    "checkpoint_every=2",
    "ema_decay=0.5",
]


def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    result = forked.run(command, cwd=cwd, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
def one_rank(tiny_table: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank that accumulates."""
    run_dir = tmp_path_factory.mktemp("ranks") / "one"
    train(run_dir, tiny_table, *SMALL, *SETTINGS, "memory.accumulate=2")
    return run_dir


def assert_alike(one: Path, two: Path) -> None:
    """Whether losses of two runs agree to 1e-5, and weights and validations up to rounding."""
    left, right = (weights(folder / "checkpoints" / "last.ckpt") for folder in (one, two))
    assert left.keys() == right.keys()
    for key, value in left.items():
        torch.testing.assert_close(value, right[key], rtol=1e-4, atol=1e-5)
    assert len(history(one)) == len(history(two)) == 7
    for row, other in zip(history(one), history(two), strict=True):
        assert row["step"] == other["step"]
        for column, tolerance in (("loss", 1e-5), ("lr", 1e-12), ("val_dice", 0.01)):
            assert bool(row[column]) == bool(other[column])
            assert not row[column] or float(row[column]) == pytest.approx(
                float(other[column]), abs=tolerance
            )


@pytest.fixture(scope="module")
def two_ranks(tiny_table: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    run(command(tiny_table, folder / "two", *SETTINGS, "trainer=ddp"), folder)
    return folder / "two"


@pytest.mark.slow
def test_two_ranks_equal_one_rank_that_accumulates(one_rank: Path, two_ranks: Path) -> None:
    # One validation case, two ranks: the second scores it too, and it counts once.
    assert_alike(one_rank, two_ranks)
    assert [path.name for path in (two_ranks / "ranks").iterdir()] == ["rank1.log"]


@pytest.mark.slow
@pytest.mark.gpu
def test_batch_norms_that_look_at_all_ranks_see_the_whole_batch(
    tiny_table: Path, tmp_path: Path
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("two GPUs are needed")
    # Patches: volumes of different shapes would be filled to a common one where they are a batch.
    # SGD: Adam divides rounding errors by themselves.
    settings = [
        "stage=fine",
        "stage.patch_size=[32,32,32]",
        "stage.batch_size=2",
        "data.num_workers=0",
        "model.norm=batch",
        "optimizer=sgd",
        "steps=5",
        "trainer.accelerator=gpu",
    ]
    train(tmp_path / "one", tiny_table, *SMALL, *settings)
    synchronised = [*settings, "trainer=ddp", "trainer.sync_batchnorm=true"]
    run(command(tiny_table, tmp_path / "two", *synchronised), tmp_path)
    assert_alike(tmp_path / "one", tmp_path / "two")


# Loaded by every Python that is started with its folder on the path: the first rank dies as it is
# about to put its second checkpoint in its place, before torchrun has started it again.
DIES_ONCE = """
import os, signal, sys

saved = []

def die(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith("last.ckpt"):
        saved.append(arguments)
        if len(saved) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

if os.environ.get("RANK") == "0" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
    sys.addaudithook(die)
"""


@pytest.mark.slow
def test_torchrun_goes_on_after_a_rank_was_killed(
    two_ranks: Path, tiny_table: Path, tmp_path: Path
) -> None:
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(DIES_ONCE)
    paths = [
        str(tmp_path / "hook"),
        str(Path(medseg.__file__).parents[1]),
        os.environ.get("PYTHONPATH", ""),
    ]
    _, _, *arguments = command(tiny_table, tmp_path / "run", *SETTINGS, "trainer=ddp")
    result = subprocess.run(
        [*TORCHRUN, *arguments], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True, encoding="utf-8", check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    starts = json.loads((tmp_path / "run" / "versions.json").read_text())
    assert len(starts) == 2, "it was killed, and went on in the same folder"
    whole, killed = (
        torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
        for folder in (two_ranks, tmp_path / "run")
    )
    for key in ("state_dict", RAW_WEIGHTS, "optimizer_states", "lr_schedulers"):
        assert_equal(whole[key], killed[key])
    assert history(tmp_path / "run") == history(two_ranks)
    assert not list((tmp_path / "run").rglob("*.tmp"))


@pytest.mark.slow
def test_a_volume_that_two_processes_share_gets_the_labels_of_one(
    trained: tuple[Path, Path], tiny_table: Path, tmp_path: Path
) -> None:
    coarse, fine = trained
    arguments = [
        "medseg.commands.cli", "predict", f"input={tiny_table.parent / 'c3.nii.gz'}",
        f"coarse={coarse}", f"fine={fine}",
        "accelerator=cpu", "threads=1", "inference.tile_size=[32,32,32]", "inference.tta=true",
    ]  # fmt: skip
    run([sys.executable, "-m", *arguments, f"output={tmp_path / 'one.nii.gz'}"], tmp_path)
    subprocess.run(
        [*TORCHRUN, *arguments, f"output={tmp_path / 'two.nii.gz'}"], cwd=tmp_path, check=True
    )
    one, two = (read_image(tmp_path / f"{name}.nii.gz").array for name in ("one", "two"))
    assert set(np.unique(one)) == {0, 1, 2}
    assert np.array_equal(one, two)
    spreads = [
        read_image(tmp_path / "uncertainty" / f"{name}.nii.gz").array for name in ("one", "two")
    ]
    assert np.array_equal(*spreads)
    passes = json.loads((tmp_path / "two.json").read_text())["passes"]
    assert passes["refine_left_lung"] == "tiles of 32×32×32"
