"""The network of a stage: its gradients, its samples, and the names of its weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from medseg.models.stage_network import StageNetwork
from medseg.models.traits import Traits
from medseg.models.unet import UNet


def make() -> StageNetwork:
    torch.manual_seed(0)
    return StageNetwork(lambda channels: UNet(channels, 2, width=8, depth=1))


def image(batch: int = 1) -> Tensor:
    return torch.randn(batch, 1, 8, 12, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("size", "kernel"), [((2, 2, 2), 3), ((4, 5, 6), 5)])
def test_bf16_gradients_of_small_features_are_right_in_any_network(
    size: tuple[int, int, int], kernel: int
) -> None:
    torch.manual_seed(0)
    conv = nn.Conv3d(16, 16, kernel, padding=kernel // 2)
    traits = Traits((1, 1, 1), ())
    network = StageNetwork(lambda channels: nn.Sequential(conv), in_channels=16, traits=traits)
    features, target = torch.randn(1, 16, *size), torch.randn(1, 16, *size)

    def gradient(enabled: bool) -> Tensor:
        network.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            logits = network(features)
        (logits * target).sum().backward()
        assert conv.weight.grad is not None
        return conv.weight.grad.clone()

    exact = gradient(enabled=False)
    for number in (1000, 20_000, 110_592):
        used = [torch.full((number,), 1e3) for _ in range(3)]
        del used  # memory that a kernel may read before it has written it
        torch.testing.assert_close(
            gradient(enabled=True), exact, atol=0.03 * float(exact.abs().max()), rtol=0
        )


def test_samples_of_a_batch_do_not_meet() -> None:
    network, images = make(), image(3)
    together = network(images)
    for row in range(3):
        torch.testing.assert_close(together[row], network(images[row : row + 1])[0])


def test_weights_and_blocks_are_named_as_in_older_checkpoints() -> None:
    network = make()
    assert network.divisor == (4, 4, 4)
    assert next(iter(network.blocks())) == "stem"
    assert all(name.startswith("networks.0.") for name in network.state_dict())
