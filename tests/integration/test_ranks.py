"""Several ranks make the run that one makes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from .conftest import train
from .test_runs import SMALL, command, history, weights

SETTINGS = ["steps=5", "stage.batch_size=2", "data.num_workers=0", "checkpoint_every=2", "ema_decay=0.5"]


def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(command, cwd=cwd, capture_output=True, encoding="utf-8", timeout=900, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
def one_rank(tiny_table: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank that accumulates."""
    run_dir = tmp_path_factory.mktemp("ranks") / "one"
    train(run_dir, tiny_table, *SMALL, *SETTINGS, "memory.accumulate=2")
    return run_dir


def assert_alike(one: Path, two: Path) -> None:
    """Whether the losses of two runs agree to 1e-5, and weights and validations as far as rounding lets them."""
    left, right = (weights(folder / "checkpoints" / "last.ckpt") for folder in (one, two))
    assert left.keys() == right.keys()
    for key, value in left.items():
        torch.testing.assert_close(value, right[key], rtol=1e-4, atol=1e-5)
    assert len(history(one)) == len(history(two)) == 7
    for row, other in zip(history(one), history(two), strict=True):
        assert row["step"] == other["step"]
        for column, tolerance in (("loss", 1e-5), ("lr", 1e-12), ("val_dice", 0.01)):
            assert bool(row[column]) == bool(other[column])
            assert not row[column] or float(row[column]) == pytest.approx(float(other[column]), abs=tolerance)


@pytest.mark.slow
def test_two_ranks_equal_one_rank_that_accumulates(one_rank: Path, tiny_table: Path, tmp_path: Path) -> None:
    # One validation case, two ranks: the second scores it too, and it counts once.
    run(command(tiny_table, tmp_path / "two", *SETTINGS, "trainer=ddp"), tmp_path)
    assert_alike(one_rank, tmp_path / "two")
    assert [path.name for path in (tmp_path / "two" / "ranks").iterdir()] == ["rank1.log"]
