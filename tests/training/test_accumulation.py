"""Micro-batches: the whole batch's gradient where loss and norm see one sample, or a note."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.io.tables import read_csv
from medseg.memory.tracker import MemoryTracker
from medseg.runs.folder import open_run
from medseg.runs.train_run import train_run
from medseg.training.notes import notes
from medseg.training.options import TrainConfig

SMALL = [
    "model.width=4", "model.depth=1", "model.blocks_per_level=[1,1]", "stage=fine", "optimizer=sgd",
    "optimizer.lr=0.1",
    "schedule=poly", "trainer.gradient_clip=null", "steps=2", "stage.batch_size=4",
    "stage.patch_size=[12,16,20]",
]  # fmt: skip


def make_batch(numbers: range) -> dict[str, Any]:
    """Samples by number, in fp64."""
    images = []
    targets = []
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        images.append(torch.randn(1, 12, 16, 20, generator=generator, dtype=torch.float64))
        targets.append(torch.randint(2, (12, 16, 20), generator=generator))
    regions = torch.tensor([n % 2 for n in numbers])
    return {
        "image": torch.stack(images),
        "target": torch.stack(targets),
        "region": regions,
        "number": list(numbers),
    }


class Rates(pl.Callback):
    """Learning rate of each micro-batch."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def train(
    fit: Callable[..., Any], accumulate: int, *overrides: str
) -> tuple[dict[str, Tensor], list[float]]:
    """Weights after two steps, and the rate of each micro-batch."""
    size = 4 // accumulate  # samples of a micro-batch
    rates = Rates()
    batches = [make_batch(range(start, start + size)) for start in range(0, 8, size)]
    module = fit(
        [*SMALL, f"memory.accumulate={accumulate}", *overrides],
        batches,
        [rates],
        lambda module: module.double(),
    )
    return dict(module.network.named_parameters()), rates.rates


SETTINGS = [
    ["model.norm=instance"],
    ["model.norm=group", "memory.checkpointing=all"],
    ["model.norm=instance", "loss.include_background=true", "optimizer.momentum=0.9"],
]


@pytest.mark.parametrize("overrides", SETTINGS, ids="-".join)
@pytest.mark.parametrize("accumulate", [2, 4])
def test_micro_batches_make_the_step_of_the_whole_batch(
    accumulate: int, overrides: list[str], fit: Callable[..., Any]
) -> None:
    whole, whole_rates = train(fit, 1, *overrides)
    parts, rates = train(fit, accumulate, *overrides)
    for name, weight in whole.items():
        torch.testing.assert_close(
            parts[name], weight, rtol=1e-9, atol=1e-9 * weight.abs().max().item(), msg=name
        )
    assert rates == [rate for rate in whole_rates for _ in range(accumulate)], (
        "the schedule counts optimiser steps"
    )
    assert whole_rates[1] < whole_rates[0]


@pytest.mark.parametrize(
    ("override", "key"),
    [("model.norm=batch", "model.norm=batch"), ("loss=batch_dice_ce", "loss.batch_dice=true")],
)
def test_what_looks_at_the_whole_batch_becomes_another_run_and_is_noted(
    override: str, key: str, fit: Callable[..., Any]
) -> None:
    whole, _ = train(fit, 1, override)
    parts, _ = train(fit, 2, override)
    assert max((parts[name] - weight).abs().max().item() for name, weight in whole.items()) > 1e-6
    assert not notes(compose(override))
    (note,) = notes(compose(override, "memory.accumulate=2"))
    assert note == (
        f"{key} computes over 2 samples, not over the batch of 4 (memory.accumulate=2, 1 "
        "rank), so the result differs from that of the whole batch"
    )
    assert not notes(compose("memory.accumulate=2"))
    (note,) = notes(compose(override, "stage.patch_size=null"))
    assert "computes over 1 sample, not over the batch of 4" in note
    assert "samples of different shapes" in note


def test_norms_that_look_at_all_ranks_see_the_whole_batch_and_that_is_not_noted() -> None:
    two_ranks = ["model.norm=batch", "trainer=ddp", "stage.batch_size=4"]
    (note,) = notes(compose(*two_ranks))
    assert "model.norm=batch computes over 2 samples, not over the batch of 4" in note
    assert not notes(compose(*two_ranks, "trainer.sync_batchnorm=true", "trainer.accelerator=gpu"))


def compose(*overrides: str) -> TrainConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(
            hydra.compose("train", [*SMALL, "run_dir=none", "trainer.accelerator=cpu", *overrides]),
            TrainConfig,
        )


class Live(pl.Callback):
    """Live bytes at the end of each step."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self.tracker = tracker
        self.bytes: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.bytes.append(
            sum(size for owner, size in self.tracker.live.items() if owner.kind == "step")
        )

    def on_train_batch_start(self, *_: Any) -> None:
        self.tracker.now = self.tracker.now._replace(kind="step")


def test_a_step_leaves_nothing_behind_but_momentum_and_losses(fit: Callable[..., Any]) -> None:
    """No graph is kept by the logged loss; the next step finds no activation and no gradient."""
    tracker = MemoryTracker()
    live = Live(tracker)
    batches = [make_batch(range(n, n + 1)) for n in range(6)]
    with tracker:
        module = fit(
            [*SMALL, "stage.batch_size=1", "steps=6"],
            batches,
            [live],
            lambda module: module.double(),
        )
    # SGD keeps one number for each weight.
    momentum_bytes = sum(weight.nbytes for weight in module.parameters())
    deepest = 8 * 3 * 4 * 5 * 8  # bytes of the smallest features of the network
    assert len(live.bytes) == 6
    assert momentum_bytes <= live.bytes[-1] < momentum_bytes + deepest
    assert live.bytes[2:] == [live.bytes[2]] * 4


@pytest.mark.usefixtures("without_pictures")
def test_whole_crops_of_different_size_give_the_same_step_in_micro_batches(
    tiny_table: Path, tmp_path: Path
) -> None:
    """Crops of a step are padded to no common shape, so norms and loss see no other voxels."""
    losses = {}
    for accumulate in (1, 2):
        run_dir = tmp_path / str(accumulate)
        overrides = [
            f"data.cases='{tiny_table}'", f"data.cache='{tiny_table.parent / 'cache'}'",
            "data.num_workers=0", "stage=fine",
            "spacing.target_spacing_mm=[4.0,4.0,4.0]", "stage.batch_size=2",
            f"memory.accumulate={accumulate}", "optimizer=sgd",
            "schedule=constant", "augment=none", "model.width=4", "steps=2", "history_every=1",
            "logger=none", "trainer.accelerator=cpu",
            "trainer.threads=1", f"run_dir='{run_dir}'",
        ]  # fmt: skip
        with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
            config = to_config(hydra.compose("train", overrides), TrainConfig)
        open_run(config)
        train_run(config)
        losses[accumulate] = [
            float(row["loss"]) for row in read_csv(run_dir / "history.csv") if row["loss"]
        ]
    assert len(losses[1]) == 2
    assert losses[2] == pytest.approx(losses[1], rel=1e-5)
