"""The modes of a model for several regions differ in what the region's index changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from medseg.models.adapter import Traits
from medseg.models.regional import RegionalNetwork
from medseg.models.unet import UNet


def make(mode: str, num_regions: int = 2, norm: str = "instance") -> RegionalNetwork:
    torch.manual_seed(0)
    return RegionalNetwork(lambda channels: UNet(channels, 2, width=8, depth=1, norm=norm), num_regions=num_regions, mode=mode)


def image(batch: int = 1) -> Tensor:
    return torch.randn(batch, 1, 8, 12, 16, generator=torch.Generator().manual_seed(1))


def region(*indices: int) -> Tensor:
    return torch.tensor(indices)


@pytest.mark.parametrize(("size", "kernel"), [((2, 2, 2), 3), ((4, 5, 6), 5)])
def test_bf16_gradients_of_small_features_are_right_in_any_network(size: tuple[int, int, int], kernel: int) -> None:
    torch.manual_seed(0)
    conv = nn.Conv3d(16, 16, kernel, padding=kernel // 2)
    traits = Traits((1, 1, 1), ())
    network = RegionalNetwork(lambda channels: nn.Sequential(conv), in_channels=16, traits=traits)
    features, wanted = torch.randn(1, 16, *size), torch.randn(1, 16, *size)

    def gradient(enabled: bool) -> Tensor:
        network.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            logits = network(features, region(0))
        (logits * wanted).sum().backward()
        assert conv.weight.grad is not None
        return conv.weight.grad.clone()

    exact = gradient(enabled=False)
    for number in (1000, 20_000, 110_592):
        used = [torch.full((number,), 1e3) for _ in range(3)]
        del used  # memory that a kernel may read before it has written it
        torch.testing.assert_close(gradient(enabled=True), exact, atol=0.03 * float(exact.abs().max()), rtol=0)


@pytest.mark.parametrize(("mode", "num_regions"), [("whole", 1), ("mirrored", 2)])
def test_one_network_ignores_the_region(mode: str, num_regions: int) -> None:
    network = make(mode, num_regions)
    assert torch.equal(network(image(), region(0)), network(image(), region(num_regions - 1)))


def test_separate_networks_serve_their_own_region_only() -> None:
    network = make("separate")
    network(image(), region(1)).sum().backward()
    trained = {name.split(".")[1] for name, weight in network.named_parameters() if weight.grad is not None}
    assert trained == {"1"}


@pytest.mark.parametrize("mode", ["separate", "side_input", "mirrored"])
def test_samples_of_a_batch_do_not_meet(mode: str) -> None:
    network, images = make(mode), image(3)
    together = network(images, region(1, 0, 1))
    for row, index in enumerate((1, 0, 1)):
        torch.testing.assert_close(together[row], network(images[row : row + 1], region(index))[0])


@pytest.mark.parametrize("norm", ["instance", "group", "batch"])
def test_side_input_reaches_the_logits(norm: str) -> None:
    # A channel that held a bare number would be subtracted by an instance or batch norm.
    network = make("side_input", norm=norm)
    left, right = network(image(), region(0)), network(image(), region(1))
    assert (left - right).abs().max() > 0.1 * left.std()


def test_blocks_are_named_by_network_and_share_the_divisor() -> None:
    network = make("separate")
    assert network.divisor == (4, 4, 4)
    assert list(network.blocks())[:2] == ["0.stem", "1.stem"]
    assert next(iter(make("mirrored").blocks())) == "stem"


@pytest.mark.parametrize(("mode", "num_regions"), [("both", 2), ("whole", 2), ("separate", 0)])
def test_senseless_arguments_are_refused(mode: str, num_regions: int) -> None:
    with pytest.raises(ValueError, match="mode"):
        make(mode, num_regions)
