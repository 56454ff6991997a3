"""Optimisers, schedules, warm-up, scaling with the batch and clipping, in rates and steps."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import hydra
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.errors import UserError
from medseg.targets import targets_first
from medseg.training import optimisation as build
from medseg.training.check import check_objects
from medseg.training.notes import notes
from medseg.training.options import TrainConfig


def compose(*overrides: str) -> TrainConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(
            hydra.compose("train", targets_first([*overrides, "run_dir=none"])), TrainConfig
        )


class Rates:
    """An optimiser and its schedule, of one weight."""

    def __init__(self, *overrides: str) -> None:
        config = compose(*overrides)
        factor = build.find_lr_factor(config.lr_scaling, config.stage.batch_size)
        self.optimizer = build.make_optimizer(config.optimizer, factor)(
            [nn.Parameter(torch.ones(1))]
        )
        self.schedule = build.make_schedule(config.schedule, factor, config.warmup_steps)(
            self.optimizer
        )

    def next(self, num_steps: int) -> list[float]:
        rates = []
        for _ in range(num_steps):
            rates.append(self.optimizer.param_groups[0]["lr"])
            self.optimizer.step()
            self.schedule.step()
        return rates


@pytest.mark.parametrize("schedule", ["constant", "poly", "cosine"])
def test_a_warm_up_multiplies_the_rates_of_the_schedule(schedule: str) -> None:
    plain = Rates(f"schedule={schedule}", "steps=20").next(20)
    warm = Rates(f"schedule={schedule}", "steps=20", "warmup_steps=4").next(20)
    ramp = [min(1.0, (n + 1) / 5) for n in range(20)]
    assert warm == pytest.approx([share * rate for share, rate in zip(ramp, plain, strict=True)])
    assert warm[0] == pytest.approx(plain[0] / 5)


def test_a_list_of_rates_is_scaled_number_by_number() -> None:
    rates = Rates(
        "schedule=one_cycle", "steps=20", "schedule.max_lr=[0.02]", "schedule.total_steps=20",
        "lr_scaling=linear", "stage.batch_size=2",
    ).next(20)  # fmt: skip
    assert max(rates) == pytest.approx(0.04, rel=0.01)


def test_a_rate_that_is_no_number_is_left_to_the_class() -> None:
    group = {"lr": "auto", "eta_min": None, "max_lr": [0.5, None]}
    assert build.scale_rates(group, 2.0) == group | {"max_lr": [1.0, None]}


def test_a_rate_of_null_is_refused_in_one_sentence() -> None:
    for override, group in (("optimizer.lr=null", "optimizer"), ("schedule.max_lr=null", "")):
        config = compose("schedule=one_cycle", "model.width=4", override)
        with pytest.raises(UserError, match=f"^{group or 'schedule'}: .* cannot be used with"):
            check_objects(config)


def test_a_warm_up_goes_on_where_it_was() -> None:
    settings = ["schedule=cosine", "steps=20", "warmup_steps=9"]
    whole, first, second = Rates(*settings), Rates(*settings), Rates(*settings)
    first.next(5)
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.schedule.load_state_dict(first.schedule.state_dict())
    assert second.next(15) == whole.next(20)[5:]


def test_cosine_falls_to_zero_at_the_last_step_and_cyclic_comes_back() -> None:
    cosine = Rates("schedule=cosine", "steps=10", "optimizer.lr=1").next(11)
    assert cosine == pytest.approx([(1 + math.cos(math.pi * n / 10)) / 2 for n in range(11)])
    cyclic = Rates(
        "schedule=cyclic", "optimizer.lr=1", "schedule.base_lr=0.1", "schedule.step_size_up=2"
    ).next(9)
    assert cyclic == pytest.approx([0.1, 0.55, 1, 0.55, 0.1, 0.325, 0.55, 0.325, 0.1])


@pytest.mark.parametrize(
    ("overrides", "factor"),
    [
        (["optimizer=sgd", "lr_scaling=linear"], 4),
        (["optimizer=lars", "lr_scaling=linear"], 4),
        (["optimizer=adamw", "lr_scaling=sqrt"], 2),
        (["optimizer=sgd"], 1),
    ],
)
@pytest.mark.parametrize("schedule", ["one_cycle", "cyclic", "poly"])
def test_all_rates_grow_with_the_batch(overrides: list[str], factor: int, schedule: str) -> None:
    settings = [*overrides, f"schedule={schedule}", "steps=20"]
    rates, rates_of_four = (
        Rates(*settings).next(20),
        Rates(*settings, "stage.batch_size=4").next(20),
    )
    assert rates_of_four == pytest.approx([factor * rate for rate in rates])
    assert max(rates) > 0


@pytest.mark.parametrize("optimizer", ["lamb", "lars"])
def test_a_step_by_trust_ratio_does_not_see_the_scale_of_a_gradient(optimizer: str) -> None:
    steps = []
    for scale in (1.0, 1000.0):
        weight = nn.Parameter(torch.arange(1.0, 7).view(2, 3))
        weight.grad = scale * torch.tensor([[1.0, -2, 3], [-4, 5, -6]])
        before = weight.detach().clone()
        build.make_optimizer(
            compose(f"optimizer={optimizer}", "optimizer.weight_decay=0").optimizer, 1.0
        )([weight]).step()
        steps.append(weight.detach() - before)
    torch.testing.assert_close(steps[0], steps[1], rtol=1e-4, atol=0)
    assert steps[0].norm() > 0


@pytest.mark.parametrize(
    ("overrides", "trust"), [([], 0.02), (["optimizer.trust_coefficient=0.05"], 0.05)]
)
def test_the_first_step_of_lars_is_the_trusted_share_of_the_weights(
    overrides: list[str], trust: float
) -> None:
    weight = nn.Parameter(torch.arange(1.0, 7).view(2, 3))
    weight.grad = torch.tensor([[1.0, -2, 3], [-4, 5, -6]])
    before = weight.detach().clone()
    settings = ["optimizer=lars", "optimizer.weight_decay=0", "optimizer.lr=0.5", *overrides]
    build.make_optimizer(compose(*settings).optimizer, 1.0)([weight]).step()
    share = float((weight.detach() - before).norm() / before.norm())
    assert share == pytest.approx(0.5 * trust, rel=1e-4)


def test_a_misspelled_argument_of_an_optimizer_is_refused_where_the_class_takes_any() -> None:
    with pytest.raises(
        UserError,
        match=r"optimizer: Lamb does not take these arguments .*wieght_decay.*Its arguments are lr",
    ):
        build.make_optimizer(compose("optimizer=lamb", "+optimizer.wieght_decay=1").optimizer, 1.0)


def test_an_optimizer_whose_package_is_missing_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(UserError, match=r"needs pip install 'medseg\[optimizers\]'"):
        build.make_optimizer(compose("optimizer=lamb").optimizer, 1.0)


SMALL = ["model.width=4", "model.depth=1", "model.blocks_per_level=[1,1]"]


def make_batch(seed: int, num_samples: int = 1) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "image": torch.randn(num_samples, 1, 8, 8, 12, generator=generator),
        "target": torch.randint(3, (num_samples, 8, 8, 12), generator=generator),
        "region": torch.zeros(num_samples, dtype=torch.int64),
        "number": list(range(num_samples)),
    }


def gradient(fit: Callable[..., Any], *settings: str) -> Tensor:
    """The gradient that the optimiser of a run of one step was given."""
    gradients: list[Tensor] = []

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        gradients.append(
            torch.cat([weight.grad.flatten() for weight in weights if weight.grad is not None])
        )

    hook = register_optimizer_step_post_hook(note)
    fit([*SMALL, "steps=1", "optimizer=sgd", "schedule=constant", *settings], [make_batch(0)])
    hook.remove()
    return gradients[0]


def test_clipping_shortens_the_gradient_and_keeps_its_direction(fit: Callable[..., Any]) -> None:
    grads = {
        limit: gradient(fit, f"trainer.gradient_clip={limit}")
        for limit in ("null", "0.001", "1000")
    }
    assert grads["null"].norm() > 0.001
    torch.testing.assert_close(
        grads["0.001"], grads["null"] * 0.001 / grads["null"].norm(), rtol=1e-3, atol=1e-9
    )
    assert torch.equal(grads["1000"], grads["null"])


def test_clipping_by_value_bounds_each_value(fit: Callable[..., Any]) -> None:
    free = gradient(fit, "trainer.gradient_clip=null")
    bounded = gradient(fit, "trainer.clip_by=value", "trainer.gradient_clip=0.001")
    assert float(free.abs().max()) > 0.001
    assert torch.equal(bounded, free.clamp(-0.001, 0.001))


class ScaledLoss(pl.Callback):
    """Counts the steps that loss scaling makes; on the CPU it scales the loss in fp16 itself.

    A step whose gradients overflow is left out: the weights stay, and two runs would be equal
    without a step.
    """

    def __init__(self) -> None:
        self.num_steps = 0.0
        self.start: list[Tensor] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if isinstance(trainer.accelerator, CPUAccelerator):
            trainer.strategy._precision_plugin = MixedPrecision("16-mixed", "cpu")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Lightning brings the weights back to the CPU when the training has ended.
        self.start = [weight.detach().cpu().clone() for weight in pl_module.parameters()]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object
    ) -> None:
        scaler = trainer.precision_plugin.scaler
        assert scaler is not None
        self.num_steps = scaler._get_growth_tracker()  # steps since the last one that was left out

    def distance(self, module: nn.Module) -> float:
        """Largest change of a weight since the start."""
        pairs = zip(self.start, module.parameters(), strict=True)
        return max(float((before - after.detach().cpu()).abs().max()) for before, after in pairs)


def train_scaled(fit: Callable[..., Any], *settings: str) -> tuple[nn.Module, ScaledLoss]:
    watch = ScaledLoss()
    batches = [make_batch(number) for number in range(8)]
    module = fit([*SMALL, "steps=8", "trainer.gradient_clip=0.1", *settings], batches, [watch])
    return module, watch


@pytest.mark.parametrize(
    "device",
    [
        [],
        pytest.param(
            ["trainer.accelerator=gpu", "memory.precision=fp16"], marks=pytest.mark.gpu, id="gpu"
        ),
    ],
)
def test_a_fused_optimizer_works_with_loss_scaling_and_clipping(
    device: list[str], fit: Callable[..., Any]
) -> None:
    plain, plain_watch = train_scaled(fit, *device, "optimizer.fused=false")
    fused, fused_watch = train_scaled(fit, *device, "optimizer.fused=true")
    for watch, module in ((plain_watch, plain), (fused_watch, fused)):
        assert watch.num_steps >= 4, "steps were taken"
        assert watch.distance(module) > 1e-3, "and changed the weights"
    # On a GPU sums in fp16 differ from run to run, and Adam divides by them.
    atol = 0.1 * plain_watch.distance(plain) if device else 1e-5
    for plain_weight, fused_weight in zip(plain.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(plain_weight, fused_weight, rtol=1e-3, atol=atol)


def test_loss_scaling_takes_the_steps_of_fp32(fit: Callable[..., Any]) -> None:
    scaled, watch = train_scaled(fit, "optimizer=sgd", "schedule=constant")
    assert watch.num_steps == 8, "none is left out"
    batches = [make_batch(number) for number in range(8)]
    clipped = ["steps=8", "trainer.gradient_clip=0.1", "optimizer=sgd", "schedule=constant"]
    plain = fit([*SMALL, *clipped], batches)
    distance = watch.distance(scaled)
    for scaled_weight, plain_weight in zip(scaled.parameters(), plain.parameters(), strict=True):
        assert float((scaled_weight - plain_weight).abs().max()) < 0.1 * distance


@pytest.mark.parametrize("schedule", ["one_cycle", "cyclic"])
@pytest.mark.parametrize("momentum", [0.0, 0.99])
def test_a_schedule_leaves_the_momentum_alone_unless_asked(schedule: str, momentum: float) -> None:
    settings = [
        "optimizer=sgd",
        "optimizer.nesterov=false",
        f"optimizer.momentum={momentum}",
        "steps=400",
    ]
    rates = Rates(*settings, f"schedule={schedule}")
    for _ in range(5):
        rates.next(50)
        assert rates.optimizer.param_groups[0]["momentum"] == momentum
    foreign = Rates(
        *settings,
        "schedule._target_=torch.optim.lr_scheduler.OneCycleLR",
        "schedule.max_lr=1",
        "schedule.total_steps=400",
    )
    assert foreign.optimizer.param_groups[0]["momentum"] == momentum
    asked = compose(*settings, "schedule=one_cycle_momentum")
    assert (
        build.make_scheduled_optimizer(asked)([nn.Parameter(torch.ones(1))]).param_groups[0][
            "momentum"
        ]
        == 0.95
    )
    assert f"the momentum of the optimizer ({momentum}) is not used" in notes(asked)[0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["optimizer._target_=torch.optim.SparseAdam", "optimizer.lr=0.1"],
            "optimizer: torch.optim.SparseAdam cannot be used",
        ),
        (
            ["optimizer._target_=torch.optim.Muon", "optimizer.lr=0.1"],
            "optimizer: torch.optim.Muon cannot be used",
        ),
        (["optimizer=sgd", "optimizer.momentum=0"], "Nesterov momentum requires a momentum"),
        (["schedule.total_steps=[]"], "schedule.total_steps: OneCycleLR needs a whole number"),
        (
            [
                "optimizer._target_=torch.optim.Adagrad",
                "optimizer.lr=0.1",
                "schedule=one_cycle_momentum",
            ],
            "schedule: ",
        ),
        (
            ["schedule._target_=torch.optim.lr_scheduler.ReduceLROnPlateau"],
            "schedule: torch.optim.lr_scheduler.ReduceLROnPlateau",
        ),
        (["optimizer._target_=torch.optim.Adagrad", "optimizer.lr=0.1"], None),
        (["optimizer._target_=torch.optim.LBFGS", "optimizer.lr=0.1"], None),
        (["optimizer.fused=true"], None),
        (["steps=1"], None),
    ],
)
def test_an_optimizer_or_schedule_is_tried_before_data_is_read(
    overrides: list[str], message: str | None
) -> None:
    config = compose(*overrides, "logger=none", *SMALL)
    if message is None:
        check_objects(config)
        return
    with pytest.raises(UserError) as caught:
        check_objects(config)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["optimizer=adamw"], 2.0),
        (["optimizer=sgd"], 4.0),
        (["optimizer=sgd", "lr_scaling=linear"], 1.0),
    ],
)
def test_the_rate_for_a_larger_batch(overrides: list[str], expected: float) -> None:
    assert build.propose_lr(compose(*overrides, "optimizer.lr=1"), 4) == pytest.approx(expected)
