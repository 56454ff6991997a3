"""Every pair of values of all switches, in few runs: each takes two steps or is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import hydra
import lightning.pytorch as pl
import pytest
import torch
from covering import Row, allowed_pairs, covering_rows, pairs_of
from torch import Tensor, nn

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.errors import UserError
from medseg.memory import switches
from medseg.training import extensions
from medseg.training import network as networks
from medseg.training.check import check_objects
from medseg.training.options import TrainConfig

# The first values go together with every other single value that is possible at all.
SWITCHES: dict[str, Sequence[str]] = {
    "model.block": ("bottleneck", "residual", "plain"),
    "model.stem": ("space_to_depth", "strided", "conv"),
    "model.norm": ("instance", "group", "batch", "channel", "affine"),
    "model.refine": ("0", "4"),
    "memory.precision": ("fp32", "bf16", "tf32", "fp16"),
    "memory.checkpointing": ("none", "sqrt", "all", "[encoder.0]"),
    "memory.accumulate": ("1", "2"),
    "memory.offload": ("false", "true"),
    "memory.channels_last": ("false", "true"),
    "memory.compile": ("false", "true"),
    "memory.cudnn_benchmark": ("false", "true"),
    "optimizer": ("sgd", "adamw", "lamb", "lars"),
    "schedule": ("constant", "one_cycle", "poly", "cosine", "cyclic"),
    "warmup_steps": ("0", "1"),
    "lr_scaling": ("none", "sqrt", "linear"),
    "trainer.gradient_clip": ("null", "0.1"),
    "loss": ("dice_ce", "batch_dice_ce"),
    "debug": ("none", "anomaly", "profile"),
}
DEFAULT: Row = {switch: values[0] for switch, values in SWITCHES.items()}

# What is refused on a CPU, by the values that are needed for it, with a part of the sentence that
# says so.
REFUSED: list[tuple[Row, str]] = [
    ({"memory.precision": "fp16"}, "memory.precision=fp16 needs a GPU"),
    ({"memory.precision": "tf32"}, "memory.precision=tf32 needs a GPU"),
    ({"memory.offload": "true"}, "memory.offload=true moves activations from a GPU to the host"),
    ({"memory.cudnn_benchmark": "true"}, "memory.cudnn_benchmark=true chooses kernels of a GPU"),
    (
        {"model.refine": "4", "model.stem": "conv"},
        "with model.stem=conv the whole network works at full resolution",
    ),
    (
        {"warmup_steps": "1", "schedule": "one_cycle"},
        "schedule OneCycleLR sets the learning rates of all steps itself",
    ),
    (
        {"warmup_steps": "1", "schedule": "cyclic"},
        "schedule CyclicLR sets the learning rates of all steps itself",
    ),
    (
        {"lr_scaling": "linear", "optimizer": "adamw"},
        "the steps of AdamW do not grow with the gradient",
    ),
    (
        {"lr_scaling": "linear", "optimizer": "lamb"},
        "the steps of Lamb do not grow with the gradient",
    ),
    *(
        (
            {"memory.compile": "true", "memory.checkpointing": policy, "model.norm": "batch"},
            "compile, checkpointing and batch norm cannot be combined",
        )
        for policy in ("sqrt", "all", "[encoder.0]")
    ),
]


def is_allowed(row: Mapping[str, str]) -> bool:
    """Whether nothing refuses the values of a row, the others being the first ones."""
    whole = {**DEFAULT, **row}
    return not any(values.items() <= whole.items() for values, _ in REFUSED)


ROWS = covering_rows(SWITCHES, is_allowed)
SMALL = [
    "stage=fine",
    "model.width=8",
    "model.depth=1",
    "model.blocks_per_level=[1,1]",
    "stage.batch_size=2",
    "steps=2",
]


def arguments(row: Mapping[str, str]) -> list[str]:
    return [*SMALL, *(f"{switch}={value}" for switch, value in {**DEFAULT, **row}.items())]


def compose(row: Mapping[str, str]) -> TrainConfig:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        fixed = ["trainer.accelerator=cpu", "logger=none", "run_dir=none"]
        return to_config(hydra.compose("train", [*fixed, *arguments(row)]), TrainConfig)


def make_network(config: TrainConfig) -> nn.Module:
    torch.manual_seed(config.seed)
    return networks.make_network(config)


def test_the_rows_hold_every_pair_that_is_allowed_and_nothing_that_is_not() -> None:
    held = set().union(*map(pairs_of, ROWS))
    assert held == set(allowed_pairs(SWITCHES, is_allowed))
    assert all(row.keys() == SWITCHES.keys() and is_allowed(row) for row in ROWS)
    assert len(ROWS) < 40
    # A value that appears in no allowed pair is one that this machine refuses whatever the others
    # are.
    alone = {
        value
        for switch in SWITCHES
        for value in ((switch, v) for v in SWITCHES[switch])
        if not is_allowed(dict([value]))
    }
    assert alone == {next(iter(values.items())) for values, _ in REFUSED if len(values) == 1}


@pytest.mark.parametrize(
    ("values", "said"),
    REFUSED,
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_what_is_refused_says_why_before_anything_runs(values: Row, said: str) -> None:
    def begin() -> None:
        config = compose(values)
        check_objects(config)
        switches.switch_on(make_network(config), config.memory, "cpu")

    with pytest.raises(UserError) as caught:
        begin()
    assert said in str(caught.value)


def phantom_like(number: int) -> tuple[Tensor, Tensor]:
    """A bright ball in noise and its label, not in the middle, of different sizes per axis."""
    generator = torch.Generator().manual_seed(number)
    z, y, x = torch.meshgrid(torch.arange(12), torch.arange(16), torch.arange(20), indexing="ij")
    inside = (z - 5 - number % 2) ** 2 + (y - 8) ** 2 + (x - 9 - number % 3) ** 2 < 20
    return (inside * 2.0 - 1.0 + 0.3 * torch.randn(inside.shape, generator=generator))[
        None
    ], inside.to(torch.uint8)


def batch(numbers: range) -> dict[str, Tensor]:
    samples = [phantom_like(number) for number in numbers]
    return {
        "image": torch.stack([image for image, _ in samples]),
        "target": torch.stack([target for _, target in samples]),
        "region": torch.tensor([number % 2 for number in numbers]),
        "number": list(numbers),
    }


class Watcher(pl.Callback):
    """The loss of each micro-batch, and the weights at the beginning."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.before: list[Tensor] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.before = [weight.detach().clone() for weight in pl_module.parameters()]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train/loss"]))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_every_row_takes_two_steps(
    number: int, fit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ROWS[number]
    # Capture, not code generation, is what the other switches can upset; the compiler itself is in
    # `test_switches`.
    monkeypatch.setattr(
        nn.Module,
        "compile",
        lambda module, **_: setattr(module, "_compiled_call_impl", eager(module)),
    )
    accumulate = int(row["memory.accumulate"])
    size = 2 // accumulate
    batches = [batch(range(start, start + size)) for start in range(0, 4, size)]
    watcher = Watcher()
    module = fit(arguments(row), batches, [watcher])
    assert len(watcher.losses) == 2 * accumulate
    assert all(math.isfinite(loss) for loss in watcher.losses)
    after = list(module.parameters())
    assert all(weight.isfinite().all() for weight in after)
    assert any(
        not torch.equal(weight, old) for weight, old in zip(after, watcher.before, strict=True)
    )

    # The first loss is that of the network without any switch of `memory`.
    config = compose({**row, "memory.checkpointing": "none", "memory.compile": "false"})
    plain, first = make_network(config), batches[0]
    expected = extensions.make_loss(config)(plain(first["image"]), first["target"])
    assert watcher.losses[0] == pytest.approx(
        float(expected), rel=2e-2 if row["memory.precision"] == "bf16" else 1e-4
    )


def eager(module: nn.Module) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(module._call_impl, backend="aot_eager")
