"""What a forward pass needs is known before a large crop is given to it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medseg.memory import accounting
from medseg.memory.accounting import WORKSPACE, count_pass, forward_bytes_per_voxel
from medseg.memory.precision import has_fast_bf16
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


@pytest.mark.parametrize(
    ("layer", "values"),
    [
        # 27 values that the kernel takes from each of 4 channels, for each voxel of the result.
        (lambda: nn.Conv3d(4, 5, 3, padding=1), 27 * 4),
        (lambda: nn.Conv3d(4, 5, 1), 0),
        # 8 values that each voxel of the image adds to, in each of 5 channels.
        (lambda: nn.ConvTranspose3d(4, 5, 2, 2), 8 * 5),
    ],
)
def test_columns_count_in_bf16_where_the_processor_lacks_it(
    layer: Callable[[], nn.Module], values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def per_voxel(dtype: torch.dtype, *, has_bf16: bool) -> float:
        monkeypatch.setattr(accounting, "has_fast_bf16", lambda _: has_bf16)
        network = layer().to(dtype)
        return forward_bytes_per_voxel(network, network, (1, 4, 12, 12, 12), CPU, dtype)

    bytes_with_columns = per_voxel(torch.bfloat16, has_bf16=False)
    more_bytes = bytes_with_columns - per_voxel(torch.bfloat16, has_bf16=True)
    assert more_bytes == pytest.approx(WORKSPACE * 2 * values)
    fp32_bytes = {per_voxel(torch.float32, has_bf16=has_bf16) for has_bf16 in (False, True)}
    assert len(fp32_bytes) == 1


def test_bf16_is_not_fast_without_onednn() -> None:
    was_enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        assert not has_fast_bf16("cpu")
    finally:
        torch._C._set_mkldnn_enabled(was_enabled)


# Torch unfolds smaller images.
LARGE = (150, 80, 70)
Work = Callable[[nn.Module, Tensor, MemoryTracker], Tensor]


def run_network(network: nn.Module, image: Tensor, _: MemoryTracker) -> Tensor:
    result: Tensor = network(image)
    return result


@pytest.mark.parametrize(("channels", "copy"), [((2, 3), 3), ((4, 1), 4)])
def test_a_convolution_takes_a_copy_of_the_larger_of_its_input_and_its_result(
    channels: tuple[int, int], copy: int
) -> None:
    """An input with gaps is copied first; what the tracker gives to the host does not count."""
    voxels = math.prod(LARGE)

    def call_with_gaps(network: nn.Module, image: Tensor, _: MemoryTracker) -> Tensor:
        result: Tensor = network(image.transpose(3, 4))
        return result

    def call_beside_file(network: nn.Module, image: Tensor, tracker: MemoryTracker) -> Tensor:
        tracker.now = Owner(HOST)
        file = torch.empty(10**6, device="meta")
        tracker.now = Owner("pass")
        result: Tensor = network(image)
        return result + file.shape[0]

    def count(work: Work) -> int:
        return count_pass(
            lambda: nn.Conv3d(*channels, 3, padding=1), (1, channels[0], *LARGE), work
        )

    usual = 4 * voxels * (sum(channels) + copy)
    assert count(run_network) == usual
    assert count(call_with_gaps) == usual + 4 * voxels * channels[0]
    # The sum is made when the copies are free.
    assert count(call_beside_file) == usual


@pytest.mark.parametrize(
    ("make", "values"),
    [
        # Each voxel of the result has a column with all values that its kernel takes.
        (lambda: nn.Conv3d(2, 3, 3, padding=1), 3 + 27 * 2),
        (lambda: nn.Conv3d(2, 3, (1, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1)), (3 + 9 * 2) / 4),
        # A kernel of one voxel takes the image as it is.
        (lambda: nn.Conv3d(2, 3, 1), 3),
        # Each voxel of the image has a column with all values that it is spread to.
        (lambda: nn.ConvTranspose3d(2, 3, 2, 2), 3 * 8 + 8 * 3),
    ],
)
def test_a_small_convolution_takes_columns(make: Callable[[], nn.Module], values: float) -> None:
    voxels = 8 * 10 * 12
    counted = count_pass(make, (1, 2, 8, 10, 12), run_network)
    assert counted == 4 * voxels * (2 + values)


def test_a_small_convolution_of_planes_takes_columns() -> None:
    def call(network: nn.Module, image: Tensor, _: MemoryTracker) -> Tensor:
        result: Tensor = network(image[:, :, 0])
        return result

    counted = count_pass(lambda: nn.Conv2d(2, 3, 3, padding=1), (1, 2, 1, 10, 12), call)
    assert counted == 4 * 10 * 12 * (2 + 3 + 9 * 2)


def test_a_pass_takes_the_same_in_inference_mode() -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv3d(1, 4, 3, padding=1),
            nn.InstanceNorm3d(4, affine=True),
            nn.LeakyReLU(),
            nn.Conv3d(4, 4, 3, padding=1),
        )

    usual = count_pass(make, (1, 1, 8, 8, 8), run_network)
    with torch.inference_mode():
        assert count_pass(make, (1, 1, 8, 8, 8), run_network) == usual


COLUMNS_SCRIPT = """
import torch
from medseg.memory.accounting import count_pass
from medseg.memory.heap import map_large_blocks

# Each large block leaves the process when it is freed.
map_large_blocks()
torch.set_num_threads(1)
make = lambda: torch.nn.Conv3d(16, 8, 3, padding=1)
image = torch.randn(1, 16, 24, 32, 40)
counted = count_pass(make, image.shape, lambda network, inputs, _: network(inputs))

def resident(key):
    status = open("/proc/self/status")
    return next(int(line.split()[1]) for line in status if line.startswith(key)) * 1024

with torch.inference_mode():
    network = make()
    network(image)
    open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts anew
    before = resident("VmRSS")
    network(image)
print((resident("VmHWM") - before) / (counted - image.nbytes))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's high-water mark")
def test_the_columns_of_a_small_convolution_are_measured() -> None:
    assert measured(COLUMNS_SCRIPT) == pytest.approx(1.0, abs=0.05)


SCRIPT = """
import sys, torch
from medseg.memory.accounting import forward_bytes_per_voxel
from medseg.memory.switches import use_channels_last
from medseg.memory.precision import autocast
from medseg.models.unet import UNet

precision, arguments, size = sys.argv[1], eval(sys.argv[2]), eval(sys.argv[3])
torch.set_num_threads(1)
if precision == "emulated":
    precision = "bf16"
    torch._C._set_mkldnn_enabled(False)  # as on a processor without bf16
network = UNet(1, 2, blocks_per_level=(1, 1, 2, 4), **arguments).eval()
if precision != "fp32":
    use_channels_last(network)

def call(image):
    with torch.inference_mode(), autocast(precision, "cpu"):
        return network(image)

def resident(key):
    status = open("/proc/self/status")
    return next(int(line.split()[1]) for line in status if line.startswith(key)) * 1024

small = (1, 1, *(3 * step for step in network.divisor))
per_voxel = forward_bytes_per_voxel(network, call, small, torch.device("cpu"))
image = torch.randn(1, 1, *size)
open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts anew
before = resident("VmRSS")
logits = call(image)
print((resident("VmHWM") - before) / image.numel() / per_voxel)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's high-water mark")
@pytest.mark.parametrize(
    ("precision", "arguments"),
    [
        ("bf16", {}),
        ("fp32", {}),
        ("bf16", {"stem": "conv"}),
        ("fp32", {"refine": 8}),
        ("emulated", {}),
        ("emulated", {"stem": "conv"}),
    ],
)
def test_the_prediction_bounds_what_is_measured(precision: str, arguments: dict[str, Any]) -> None:
    # The emulation is slow.
    size = (64, 96, 96) if precision == "emulated" else (192, 192, 160)
    # A bound, and not one that is far off.
    assert 0.3 < measured(SCRIPT, precision, repr(arguments), repr(size)) <= 1.0


def measured(script: str, *arguments: str) -> float:
    """Number that a script prints in a process of its own."""
    command = [sys.executable, "-c", script, *arguments]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", check=True)
    return float(done.stdout)
