"""What a forward pass needs is known before a large crop is given to it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medseg.memory.accounting import WORKSPACE, count_pass, forward_bytes_per_voxel
from medseg.memory.tracker import HOST, MemoryTracker, Owner

CPU = torch.device("cpu")


def test_live_tensors_are_counted_and_weights_are_not() -> None:
    conv = nn.Conv3d(1, 5, 1)
    conv.weight.data = torch.zeros(5, 1, 1, 1, 1)
    huge = nn.Parameter(torch.zeros(10_000_000))
    conv.register_parameter("huge", huge)

    def call(image: Tensor) -> Tensor:
        features = conv(image)  # 5 channels of 4 bytes
        return features + huge[:1]  # and as many beside them

    assert forward_bytes_per_voxel(conv, call, (1, 1, 24, 24, 24), CPU) == pytest.approx(
        WORKSPACE * 2 * 5 * 4, rel=0.01
    )


@pytest.mark.parametrize(("channels", "copy"), [((2, 3), 3), ((4, 1), 4)])
def test_a_convolution_takes_a_copy_of_the_larger_of_its_input_and_its_result(
    channels: tuple[int, int], copy: int
) -> None:
    """An input with gaps is copied first; what the tracker gives to the host does not count."""
    voxels = 5 * 6 * 7

    def call(network: nn.Module, image: Tensor, _: MemoryTracker) -> Tensor:
        result: Tensor = network(image)
        return result

    def call_with_gaps(network: nn.Module, image: Tensor, _: MemoryTracker) -> Tensor:
        result: Tensor = network(image.transpose(2, 4))
        return result

    def call_beside_file(network: nn.Module, image: Tensor, tracker: MemoryTracker) -> Tensor:
        tracker.now = Owner(HOST)
        file = torch.empty(10**6, device="meta")
        tracker.now = Owner("pass")
        result: Tensor = network(image)
        return result + file.shape[0]

    def count(work: Any) -> int:
        return count_pass(
            lambda: nn.Conv3d(*channels, 3, padding=1), (1, channels[0], 5, 6, 7), work
        )

    usual = 4 * voxels * (sum(channels) + copy)
    assert count(call) == usual
    assert count(call_with_gaps) == usual + 4 * voxels * channels[0]
    # The sum is made when the copies are free.
    assert count(call_beside_file) == usual


def test_a_pass_takes_the_same_in_inference_mode() -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv3d(1, 4, 3, padding=1),
            nn.InstanceNorm3d(4, affine=True),
            nn.LeakyReLU(),
            nn.Conv3d(4, 4, 3, padding=1),
        )

    def call(network: nn.Module, image: Tensor, _: MemoryTracker) -> Tensor:
        result: Tensor = network(image)
        return result

    usual = count_pass(make, (1, 1, 8, 8, 8), call)
    with torch.inference_mode():
        assert count_pass(make, (1, 1, 8, 8, 8), call) == usual


SCRIPT = """
import sys, torch
from medseg.memory.accounting import forward_bytes_per_voxel
from medseg.memory.switches import use_channels_last
from medseg.memory.precision import autocast
from medseg.models.unet import UNet

precision, arguments = sys.argv[1], eval(sys.argv[2])
torch.set_num_threads(1)
network = UNet(1, 2, blocks_per_level=(1, 1, 2, 4), **arguments).eval()
if precision != "fp32":
    use_channels_last(network)

def call(image):
    with torch.inference_mode(), autocast(precision, "cpu"):
        return network(image)

def resident(key):
    status = open("/proc/self/status")
    return next(int(line.split()[1]) for line in status if line.startswith(key)) * 1024

size = (1, 1, *(3 * step for step in network.divisor))
per_voxel = forward_bytes_per_voxel(network, call, size, torch.device("cpu"))
image = torch.randn(1, 1, 192, 192, 160)
open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts anew
before = resident("VmRSS")
logits = call(image)
print((resident("VmHWM") - before) / image.numel() / per_voxel)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's high-water mark")
@pytest.mark.parametrize(
    ("precision", "arguments"),
    [("bf16", {}), ("fp32", {}), ("bf16", {"stem": "conv"}), ("fp32", {"refine": 8})],
)
def test_the_prediction_bounds_what_is_measured(precision: str, arguments: dict[str, Any]) -> None:
    command = [sys.executable, "-c", SCRIPT, precision, repr(arguments)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", check=True)
    # A bound, and not one that is far off.
    assert 0.3 < float(done.stdout) <= 1.0
