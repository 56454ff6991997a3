"""What a network refuses, in one sentence and before data is read."""

from __future__ import annotations

import math
from collections.abc import Callable

import hydra
import pytest
import torch

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.errors import UserError
from medseg.targets import targets_first
from medseg.training.check import _check_rates, check_objects
from medseg.training.network import network_node
from medseg.training.notes import notes
from medseg.training.options import TrainConfig

SEGRESNET = ["model._target_=monai.networks.nets.SegResNet"]
UNET = ["model._target_=monai.networks.nets.UNet", "model.channels=[8,16,32]"]
# Patches of one voxel at the deepest level of a network with the divisor 16.
ONE_VOXEL = ["stage.patch_size=[16,16,16]", "inference.tile_size=null"]
LION = ["optimizer._target_=pytorch_optimizer.Lion", "optimizer.lr=0.01"]
EPOCHS = [
    "schedule._target_=torch.optim.lr_scheduler.OneCycleLR",
    "schedule.max_lr=0.1",
    "schedule.epochs=1",
]
MONITOR = ["callbacks.lr._target_=lightning.pytorch.callbacks.LearningRateMonitor"]
UNETR = [
    "model=unetr",
    "model.img_size=[32,32,32]",
    "model.hidden_size=24",
    "model.mlp_dim=24",
    "model.num_heads=2",
]


def check(*overrides: str) -> list[str]:
    """Check the objects of a configuration; returns the notes on it."""
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = hydra.compose(
            "train",
            targets_first(["stage=fine", "trainer.accelerator=cpu", *overrides, "run_dir=none"]),
        )
    config = to_config(composed, TrainConfig)
    return notes(config, check_objects(config))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [*SEGRESNET, "model.init_filter=8"],
            r"model: SegResNet does not take .*did you mean init_filters\? Its arguments are",
        ),
        (
            [*SEGRESNET, "model.out_channels=5"],
            "model: out_channels=5, but the task has 2 classes; leave out_channels out",
        ),
        ([*SEGRESNET, "model.init_filters=9"], "model: "),
        (
            [*SEGRESNET, "model.num_groups=123456"],
            "model: num_groups=123456 of the network, expected numbers up to 65536",
        ),
        (
            [*SEGRESNET, "model.divisor=[3,3,3]"],
            r"model: divisor=\[3, 3, 3\]: SegResNet fails on an input of \[45, 45, 45\] voxels",
        ),
        (
            [*SEGRESNET, "model.blocks=[encoder.*]"],
            r"model: blocks names 'encoder\.\*', which is no module of the network",
        ),
        (
            [*SEGRESNET, "stage.patch_size=[36,40,40]", "inference.tile_size=[40,40,40]"],
            r"stage\.patch_size: expected multiples of 8",
        ),
        (
            ["model._target_=monai.networks.nets.BasicUNet", "model.norm=batch", *ONE_VOXEL],
            "would have one voxel of one sample, but batch norm needs at least two",
        ),
        (
            ["model.norm=batch", *ONE_VOXEL],
            "would have one voxel of one sample, but batch norm needs at least two",
        ),
        (
            [*SEGRESNET, "memory.checkpointing=[encoder]"],
            "memory: checkpointing names 'encoder', which is no block; the blocks are",
        ),
        (
            [
                *SEGRESNET,
                "trainer=ddp",
                "stage.batch_size=2",
                "trainer.sync_batchnorm=true",
                "trainer.accelerator=auto",
            ],
            "batch norm only",
        ),
        (
            ["model._target_=torch.nn.Conv3d", "model.kernel_size=1", "memory.checkpointing=all"],
            r"memory\.checkpointing: no block of",
        ),
        (
            ["model._target_=torch.nn.Linear"],
            ("model: the constructor of Linear has no argument for the number of channels of the "
             "image"),
        ),
        (
            UNETR,
            r"stage\.patch_size=None: the network accepts inputs of \[32, 32, 32\] voxels only",
        ),
        (
            [*UNETR, "stage.patch_size=[32,32,32]"],
            r"inference\.tile_size=None: the network accepts inputs of \[32, 32, 32\] voxels only",
        ),
        (
            [*SEGRESNET, "loss.output_weights=[1,0.5]"],
            r"loss\.output_weights=\[1\.0, 0\.5\]: expected 1 numbers, one for each output",
        ),
        (
            ["metrics.dice._target_=monai.metrics.DiceMetric"],
            r"metrics\.dice: history\.csv already has a column val_dice",
        ),
        (
            ["metrics.dice_worst._target_=monai.metrics.DiceMetric"],
            r"metrics\.dice_worst: history\.csv already has a column val_dice_worst",
        ),
        (
            ["lr_scaling=sqrt", "optimizer._target_=torch.optim.Adam", "schedule=cosine"],
            r"lr_scaling=sqrt: optimizer\.lr is missing",
        ),
        (
            ["lr_scaling=linear"],
            "the steps of AdamW do not grow with the gradient; choose lr_scaling=sqrt",
        ),
        (["lr_scaling=linear", *LION], "the steps of Lion do not grow with the gradient"),
        (
            ["lr_scaling=linear", "optimizer=lamb"],
            "the steps of Lamb do not grow with the gradient",
        ),
        (
            ["optimizer.amsgrad=maybe"],
            r"optimizer\.amsgrad: AdamW needs true or false, but got 'maybe'",
        ),
        (["optimizer.betas=0.9"], r"optimizer\.betas: AdamW needs a list, but got 0\.9"),
        (["optimizer.maximize=true"], "a step of AdamW goes up the gradient"),
        (
            ["optimizer._target_=pytorch_optimizer.ScheduleFreeAdamW", "schedule=constant"],
            "ScheduleFreeAdamW evaluates other weights than those that it trains",
        ),
        (["schedule=cyclic", "schedule.mode=zigzag"], "mode is invalid"),
        ([*EPOCHS, "schedule.steps_per_epoch=10"], "The specified number of total steps is 10"),
        (
            [*EPOCHS, "schedule.steps_per_epoch=3000", "steps=4000"],
            "The specified number of total steps is 3000",
        ),
        (
            ["loss=dice_focal", "loss.include_background=perhaps"],
            r"loss\.include_background: DiceFocalLoss needs true or false",
        ),
        (["loss=generalized_dice", "loss.w_type=cube"], "loss: "),
        ([*UNET, "model.strides=2"], r"model\.strides: UNet needs a list, but got 2"),
        (
            [*MONITOR, "logger=none"],
            (r"callbacks\.lr: LearningRateMonitor writes to a logger, but there is none; choose "
             "logger=csv"),
        ),
        (["callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping",
            "callbacks.stop.monitor=val/dice", "callbacks.stop.patience=soon"],
         r"callbacks\.stop\.patience: EarlyStopping needs a whole number, but got 'soon'"),
        (
            [
                "augment.transforms=[{_target_: monai.transforms.RandGaussianNoised, keys: image, "
                "prob: high}]"
            ],
            r"augment\.transforms\[0\]\.prob: .* needs a number",
        ),
    ],
)  # fmt: skip
def test_a_network_that_does_not_fit_is_one_sentence(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        check(*overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [*SEGRESNET, "memory.checkpointing=[down_layers.*]"],
        [*UNETR, "stage.patch_size=[32,32,32]", "inference.tile_size=[32,32,32]"],
        [*UNETR, "spacing=fixed_size", "spacing.size=[32,32,32]"],
        [*UNET, "model.strides=[3,3]"],
        [*UNET, "model.strides=[[1,5,5],[3,3,3]]"],
        ["optimizer=sgd", "lr_scaling=linear", "schedule=poly"],
        ["optimizer=lars", "lr_scaling=linear"],
        [
            "optimizer._target_=torch.optim.Adafactor",
            "optimizer.lr=0.01",
            "optimizer.eps=[null,1e-3]",
        ],
        ["loss=hausdorff_dt"],
        [*MONITOR, "logger=csv"],
    ],
)
def test_what_fits_is_accepted(overrides: list[str]) -> None:
    check(*overrides)


@pytest.mark.parametrize(
    "model",
    [["model._target_=monai.networks.nets.VNet"], ["model=dynunet", "model.norm_name=batch"]],
)
def test_batch_norm_over_micro_batches_is_noted_whatever_the_network_calls_it(
    model: list[str],
) -> None:
    settings = [
        *model,
        "stage.batch_size=2",
        "stage.patch_size=[64,64,64]",
        "inference.tile_size=[64,64,64]",
    ]
    (note,) = check(*settings, "memory.accumulate=2")
    assert note.startswith("batch norm of monai.networks.nets.")
    assert "computes over 1 sample, not over the batch of 2" in note
    assert not check(*settings)


def test_null_is_an_argument_of_a_network_like_any_other() -> None:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = hydra.compose("train", [*SEGRESNET, "model.dropout_prob=null", "run_dir=none"])
    config = to_config(composed, TrainConfig)
    node = network_node(config.model, config.spacing)
    assert node == {"_target_": "monai.networks.nets.SegResNet", "dropout_prob": None}


@pytest.mark.parametrize(
    ("factor", "message"),
    [
        (lambda step: 1 - step / 4, "the learning rate of step 6 is -0.5"),
        (lambda step: math.inf if step == 3 else 1.0, "the learning rate of step 4 is inf"),
        (lambda step: 1 - step / 7, None),
    ],
)
def test_a_rate_that_is_negative_or_not_finite_is_named_with_its_step(
    factor: Callable[[int], float], message: str | None
) -> None:
    """The rate may be zero; steps count from 1, and two of them have been tried before."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for _ in range(2):
        optimizer.step()
        schedule.step()
    if message is None:
        _check_rates(optimizer, schedule, 8)
    else:
        with pytest.raises(ValueError, match=message):
            _check_rates(optimizer, schedule, 8)


def test_a_long_run_tries_its_first_steps_and_its_last_one() -> None:
    steps: list[int] = []
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: float(bool(steps.append(step) or True))
    )
    optimizer.step()
    _check_rates(optimizer, schedule, 5000)
    assert steps == [*range(1999), 5000]
