"""The average of the weights is what its formula says, and changes no step of the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from medseg.data.sampler import StepBatchSampler
from medseg.training.averaging import WeightAverage
from medseg.training.checkpoints import Checkpoints
from medseg.training.module import RAW_WEIGHTS, SegmentationModule
from medseg.training.preemption import StopRequest

STEPS = 9  # of the run
EVERY = 4  # steps between two validations
DECAY = 0.75


def formula(weights: list[Tensor], decay: float = DECAY) -> Tensor:
    """d^(n-1) w_1 + (1 - d) Σ d^(n-k) w_k, in float64."""
    first, *later = (weight.double() for weight in weights)
    num_later = len(later)
    return decay**num_later * first + (1 - decay) * sum(
        (decay ** (num_later - k) * weight for k, weight in enumerate(later, start=1)),
        torch.zeros_like(first),
    )


def test_the_average_follows_its_formula() -> None:
    network = nn.Sequential(nn.Conv3d(1, 2, 1), nn.BatchNorm3d(2))
    average = WeightAverage(network, DECAY)
    history: list[dict[str, Tensor]] = []
    generator = torch.Generator().manual_seed(0)
    assert average.values() == {}
    for step in range(6):
        for weight in network.state_dict().values():
            weight.copy_(
                torch.randn(weight.shape, generator=generator)
                if weight.is_floating_point()
                else torch.tensor(step)
            )
        average.update()
        history.append({name: weight.clone() for name, weight in network.state_dict().items()})
        for name, value in average.values().items():
            torch.testing.assert_close(
                value.double(),
                formula([weights[name] for weights in history]),
                rtol=1e-6,
                atol=1e-6,
            )
    counter = "1.num_batches_tracked"
    assert set(average.values()) == set(history[0]) - {counter}, "a counter has no average"
    averaged = {name: value.clone() for name, value in average.values().items()}
    average.exchange()
    assert all(torch.equal(network.state_dict()[name], value) for name, value in averaged.items())
    assert network.state_dict()[counter] == 5
    average.exchange()
    assert all(
        torch.equal(network.state_dict()[name], weight) for name, weight in history[-1].items()
    )
    assert all(torch.equal(average.values()[name], value) for name, value in averaged.items())


def test_all_that_is_no_whole_number_is_averaged() -> None:
    """A single factor as well; an index of several numbers is no weight."""
    network = nn.Conv3d(1, 2, 1)
    network.factor = nn.Parameter(torch.tensor(2.0))
    network.register_buffer("index", torch.arange(5))
    average = WeightAverage(network, DECAY)
    average.update()
    assert average.values().keys() == {"weight", "bias", "factor"}


def test_an_average_that_is_loaded_leaves_the_checkpoint_alone() -> None:
    network = nn.Conv3d(1, 2, 1)
    values = {name: torch.zeros_like(weight) for name, weight in network.state_dict().items()}
    average = WeightAverage(network, DECAY)
    average.load(values)
    average.update()
    assert not any(value.any() for value in values.values())
    assert all(value.any() for value in average.values().values())


class Killed(BaseException):
    """Ends a run as a kill does."""


class Line(SegmentationModule):
    """One weight that each sample moves; its score is that weight, so each validation is best."""

    def __init__(
        self, ema_decay: float | None, kill_at: int | None = None, accumulate: int = 2
    ) -> None:
        network = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(network.weight)
        super().__init__(
            network,
            nn.Identity(),
            lambda parameters: torch.optim.Adam(parameters, lr=0.1),
            lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
            seed=1,
            accumulate=accumulate,
            tile_size=None,
            overlap=0.5,
            ema_decay=ema_decay,
            metadata={},
        )
        self.kill_at = kill_at
        self.steps: list[Tensor] = []
        self.validated: list[Tensor] = []

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.network.weight.detach().clone()
        return weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_step == self.kill_at:
            raise Killed
        return ((self.network(batch) - 1 - batch.cos()) ** 2).mean()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.steps.append(self.weight)

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.validated.append(self.weight)
        self.log("val/dice", self.network.weight.sum())
        return batch

    def train_dataloader(self) -> DataLoader[Any]:
        sampler = StepBatchSampler(STEPS, 2, self.accumulate, start_step=self.trainer.global_step)
        return DataLoader(
            [torch.tensor([float(n)]) for n in range(2 * STEPS)], batch_sampler=sampler
        )

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader([torch.ones(1)])


def fit(
    folder: Path, ema_decay: float | None, kill_at: int | None = None, accumulate: int = 2
) -> Line:
    """Train, from `last.ckpt` where there is one."""
    module = Line(ema_decay, kill_at, accumulate)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, max_epochs=-1,
        accumulate_grad_batches=accumulate,
        val_check_interval=EVERY * accumulate,
        check_val_every_n_epoch=None, num_sanity_val_steps=0, logger=False,
        enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
        callbacks=[Checkpoints(folder, EVERY, 3, None, StopRequest())],
        default_root_dir=folder,
    )  # fmt: skip
    last = folder / "last.ckpt"
    try:
        trainer.fit(module, ckpt_path=last if last.is_file() else None, weights_only=True)
    except Killed:
        assert kill_at is not None
    return module


def loaded(path: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    return checkpoint


def test_the_average_is_validated_and_saved_while_training_goes_on_from_the_weights(
    tmp_path: Path,
) -> None:
    plain = fit(tmp_path / "plain", None)
    averaged = fit(tmp_path / "averaged", DECAY)
    assert len(plain.steps) == STEPS
    assert torch.equal(torch.stack(plain.steps), torch.stack(averaged.steps)), "no step is another"
    expected = {step: formula(plain.steps[:step]).float() for step in (4, 8, 9)}
    torch.testing.assert_close(averaged.validated, list(expected.values()))
    best, last = (loaded(tmp_path / "averaged" / name) for name in ("best.ckpt", "last.ckpt"))
    torch.testing.assert_close(last["state_dict"]["network.weight"], expected[9])
    assert torch.equal(last[RAW_WEIGHTS]["network.weight"], plain.steps[-1])
    torch.testing.assert_close(best["state_dict"]["network.weight"], expected[best["global_step"]])
    assert RAW_WEIGHTS not in best, "nothing goes on from it"
    assert RAW_WEIGHTS not in loaded(tmp_path / "plain" / "last.ckpt")


@pytest.mark.parametrize("kill_at", [4, 5, 7])
def test_a_killed_run_goes_on_with_its_average(kill_at: int, tmp_path: Path) -> None:
    fit(tmp_path / "whole", DECAY)
    fit(tmp_path / "killed", DECAY, kill_at)
    assert loaded(tmp_path / "killed" / "last.ckpt")["global_step"] == {4: 4, 5: 4, 7: 6}[kill_at]
    fit(tmp_path / "killed", DECAY)
    for key in ("state_dict", RAW_WEIGHTS):
        whole_weight, resumed_weight = (
            loaded(tmp_path / name / "last.ckpt")[key]["network.weight"]
            for name in ("whole", "killed")
        )
        assert torch.equal(whole_weight, resumed_weight)


@pytest.mark.parametrize("kill_at", [3, 4, 5, 7])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_run_goes_on_with_another_number_of_micro_batches(
    before: int, after: int, kill_at: int, tmp_path: Path
) -> None:
    whole = fit(tmp_path / "whole", None)
    first = fit(tmp_path / "run", None, kill_at, before)
    saved = loaded(tmp_path / "run" / "last.ckpt")["global_step"]
    rest = fit(tmp_path / "run", None, accumulate=after)
    assert saved == {3: 3, 4: 4, 5: 4, 7: 6}[kill_at]
    torch.testing.assert_close(first.steps[:saved] + rest.steps, whole.steps)
    assert len(rest.validated) == (3 if kill_at == 3 else 2)
