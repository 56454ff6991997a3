"""The range test: a rate per step, an end where the loss explodes, and the steepest fall."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import numpy as np
import pytest
import torch
from PIL import Image

from medseg.report.plots import draw_lr_range
from medseg.training.lr_range import LrRange, has_diverged, smoothed, suggest_lr

RATES = np.geomspace(1e-6, 1.0, 121)


def valley(noise: float = 0.0) -> np.ndarray:
    """A loss that falls around 1e-3, is lowest around 1e-2 and explodes near 1."""
    x = np.log10(RATES)
    losses = 2 - 1.5 / (1 + np.exp(-4 * (x + 3))) + np.exp(4 * (x + 0.5))
    return np.asarray(losses + noise * np.random.default_rng(0).standard_normal(len(x)))


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_steepest_fall_is_found(noise: float) -> None:
    suggested_lr = suggest_lr(RATES.tolist(), valley(noise).tolist())
    assert suggested_lr == pytest.approx(1e-3, rel=0.6)  # a quarter of a decade


def test_a_rate_is_a_tenth_of_that_of_the_lowest_loss_at_most() -> None:
    """A loss that falls ever faster until it explodes, as with many a network of instance norms."""
    losses = [2 - 10 * rate if rate <= 0.1 else 9.0 for rate in RATES]
    lowest = RATES[smoothed(losses).argmin()]
    assert suggest_lr(RATES.tolist(), losses) == pytest.approx(lowest / 10)


def test_a_loss_that_never_falls_gives_no_rate() -> None:
    assert suggest_lr(RATES.tolist(), np.linspace(1, 2, len(RATES)).tolist()) is None
    assert suggest_lr([], []) is None


def test_divergence_is_a_mean_of_several_losses_not_one_bad_batch() -> None:
    assert not has_diverged([1.0] * 20)
    assert not has_diverged([1.0] * 20 + [9.0])
    assert has_diverged([1.0] * 20 + [9.0] * 3)


def test_a_negative_loss_that_falls_does_not_diverge() -> None:
    falling = np.linspace(-0.1, -0.9, 20).tolist()
    assert not has_diverged(falling)
    assert has_diverged([*falling, *[2.0] * 5])


def test_divergence_is_measured_from_the_lowest_loss_wherever_it_was() -> None:
    fell = [5.0] * 10 + [1.0] * 10
    assert not has_diverged([*fell, *[3.9] * 5])
    assert has_diverged([*fell, *[4.1] * 5])
    assert not has_diverged([*[1.0] * 2, *[9.0] * 3]), "too few for two means"


class Climb:
    """What the callback sees of a trainer that accumulates over two micro-batches."""

    def __init__(self, callback: LrRange) -> None:
        self.callback = callback
        self.groups = [{"lr": 0.0}, {"lr": 0.0}]
        self.trainer: Any = SimpleNamespace(
            global_step=0, should_stop=False, accumulate_grad_batches=2,
            optimizers=[SimpleNamespace(param_groups=self.groups)],
        )  # fmt: skip

    def step(self, *losses: float) -> list[float]:
        for index, loss in enumerate(losses):
            self.callback.on_train_batch_start(self.trainer, None, None, index)
            rates = [group["lr"] for group in self.groups]
            module = SimpleNamespace(train_loss=torch.tensor(loss))
            if index == 1:
                self.trainer.global_step += 1
            self.callback.on_train_batch_end(self.trainer, module, None, None, index)
        return rates


def test_each_step_has_its_rate_and_the_mean_loss_of_its_micro_batches() -> None:
    climb = Climb(LrRange(1e-3, 1e-1, 3))
    rates = [climb.step(2.0, 1.0), climb.step(1.0, 0.5), climb.step(float("nan"), 1.0)]
    assert rates == [pytest.approx([rate, rate]) for rate in (1e-3, 1e-2, 1e-1)]
    assert climb.callback.losses == [1.5, 0.75]
    assert climb.callback.lrs == pytest.approx([1e-3, 1e-2])
    assert climb.trainer.should_stop, "the loss is not finite"


def test_the_picture_marks_the_rate(tmp_path: Path) -> None:
    losses = valley(0.05).tolist()
    draw_lr_range(
        RATES.tolist(), losses, smoothed(losses).tolist(), 1e-3, "coarse, AdamW", tmp_path / "a.png"
    )
    picture = np.asarray(Image.open(tmp_path / "a.png").convert("RGB")).astype(int)
    red = np.argwhere((picture[..., 0] - picture[..., 2]) > 100)
    assert len(red)
    # Halfway between 1e-6 and 1 on a logarithmic axis.
    assert abs(np.median(red[:, 1]) / picture.shape[1] - 0.5) < 0.1


@pytest.mark.slow
def test_the_command_finds_a_rate(tiny_table: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "medseg.commands.cli", "find_lr", "model.width=4", "steps=30",
        "data.num_workers=0", "output=f",
        f"data.cases={tiny_table}", f"data.cache={tiny_table.parent / 'cache'}",
        "spacing.target_spacing_mm=[4.0,4.0,4.0]",
        "trainer.accelerator=cpu", "stage.batch_size=4", "memory.accumulate=2", "lr_scaling=sqrt",
    ]  # fmt: skip
    result = forked.run(command, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Tip:" not in result.stderr
    assert "TPU" not in result.stderr
    printed_lr = float(result.stdout.partition("optimizer.lr=")[2].split()[0])
    with (tmp_path / "f" / "find_lr.csv").open(newline="") as file:
        rows = [(float(row["lr"]), float(row["loss"])) for row in csv.DictReader(file)]
    assert rows[0][0] == pytest.approx(1e-6)
    suggested_lr = suggest_lr([rate for rate, _ in rows], [loss for _, loss in rows])
    assert suggested_lr is not None
    # Two digits are printed. `lr_scaling=sqrt` doubles the rate for the batch of four.
    assert printed_lr == pytest.approx(suggested_lr / 2, rel=0.05)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["f", "find_lr.csv", "find_lr.png"]


def test_the_ends_of_a_smoothed_loss_are_continued_by_their_last_value() -> None:
    losses = [5.0] * 50 + [1.0] * 50
    curve = smoothed(losses)
    assert curve[:20] == pytest.approx([5.0] * 20)
    assert curve[-20:] == pytest.approx([1.0] * 20)
    # For ten steps the Gaussian has a standard deviation of one step, and ends at four of them. The
    # values before the ramp 0, 1, 2, … are its first one.
    ramp = smoothed(np.arange(10.0).tolist())
    steps = np.arange(-4, 5)
    kernel = np.exp(-0.5 * steps**2)
    expected = (kernel * np.maximum(0, steps)).sum() / kernel.sum()
    assert ramp[0] == pytest.approx(expected)
