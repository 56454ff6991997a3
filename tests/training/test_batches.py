"""Law of the training step: weights after a step do not depend on how its samples are divided among micro-batches and ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medseg.data.samples import Sample, collate
from medseg.losses.dice_ce import DiceCrossEntropyLoss
from medseg.models.regional import RegionalNetwork
from medseg.models.unet import UNet
from medseg.training.module import SegmentationModule

SHAPES = {"crops": [(16, 20, 24), (24, 16, 16), (9, 30, 17), (16, 16, 33)], "patches": [(16, 24, 16)] * 4}


def samples(kind: str) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "image": torch.rand(1, *shape, generator=generator, dtype=torch.float64) * 2 - 1,
            "target": torch.randint(0, 3, shape, generator=generator, dtype=torch.uint8),
            "inside": torch.tensor([(0, size) for size in shape]),
            "region": n % 2,
            "case": str(n),
            "spacing_mm": (1.0, 1.0, 1.0),
        }
        for n, shape in enumerate(SHAPES[kind])
    ]


def weights_after_a_step(network: nn.Module, kind: str, num_micro_batches: int, num_ranks: int) -> Tensor:
    """One step of SGD; ranks take consecutive parts of a micro-batch, and their gradients are averaged."""
    network = copy.deepcopy(network)
    module = SegmentationModule(
        network, DiceCrossEntropyLoss(), lambda parameters: torch.optim.SGD(parameters, lr=0.5), lambda optimizer: None,
        seed=0, accumulate=num_micro_batches, tile_size=None, overlap=0.5, ema_decay=None, metadata={},
    )  # fmt: skip
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    given, size = samples(kind), len(SHAPES[kind]) // num_micro_batches // num_ranks
    for first in range(0, len(given), size):
        batch: Any = collate(given[first : first + size], network.divisor, is_stacked=kind == "patches")
        (module.training_step(batch, 0) / num_micro_batches / num_ranks).backward()
    module.make_optimizer(network.parameters()).step()
    return torch.cat([weight.detach().flatten() for weight in network.parameters()])


@pytest.mark.parametrize("norm", ["instance", "group"])
@pytest.mark.parametrize("kind", SHAPES)
def test_a_step_does_not_depend_on_how_its_samples_are_batched(kind: str, norm: str) -> None:
    torch.manual_seed(0)
    network = RegionalNetwork(
        lambda channels: UNet(channels, 3, width=4, depth=2, blocks_per_level=(1, 1, 1), norm=norm),
        num_regions=2,
        mode="mirrored",
    ).double()
    together = weights_after_a_step(network, kind, 1, 1)
    assert not torch.equal(together, torch.cat([weight.detach().flatten() for weight in network.parameters()]))
    for num_micro_batches, num_ranks in ((2, 1), (4, 1), (1, 2), (2, 2), (1, 4)):
        other = weights_after_a_step(network, kind, num_micro_batches, num_ranks)
        torch.testing.assert_close(other, together, rtol=0, atol=1e-9)
