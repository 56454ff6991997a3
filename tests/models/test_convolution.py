"""The planes of a slab go through the kernel of the whole, and its memory is counted."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from medseg.memory.precision import has_fast_bf16
from medseg.models.convolution import (
    convolution_by,
    convolution_bytes,
    convolve_as_whole,
    is_unfolded,
    unfolds_all,
)

STEP = (1, 1, 1)
FLAT = (0, 1, 1)  # padding of a slab, to which the planes beside it belong


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=dtype)


def unfolds(features: Tensor, weight: Tensor, *, transposed: bool = False) -> bool:
    padding = weight.shape[2:]
    return is_unfolded((features, weight, None, STEP, padding, STEP, transposed, (0, 0, 0), 1))


def test_a_few_planes_have_the_values_of_the_whole() -> None:
    """The whole goes through oneDNN; torch would unfold three planes, and round otherwise."""
    features, weight, bias = random(1, 32, 16, 48, 40), random(24, 32, 3, 3, 3), random(24)
    whole = F.conv3d(features, weight, bias, padding=1)
    assert not unfolds(features, weight)
    planes = features[:, :, 4:7]
    assert unfolds(planes, weight)
    values = convolve_as_whole(planes, weight, bias, STEP, FLAT, 16)
    assert torch.equal(values, whole[:, :, 5:6])
    assert not torch.equal(F.conv3d(planes, weight, bias, padding=FLAT), values)


def test_a_slab_with_its_reach_is_larger_than_a_whole_that_is_unfolded() -> None:
    features, weight, bias = random(1, 320, 8, 8, 8), random(16, 320, 3, 3, 3), random(16)
    whole = F.conv3d(features, weight, bias, padding=1)
    assert unfolds(features, weight)
    planes = F.pad(features, (0, 0, 0, 0, 1, 0))
    assert not unfolds(planes, weight)
    values = convolve_as_whole(planes, weight, bias, STEP, FLAT, 8)
    assert torch.equal(values, whole[:, :, :7])


def test_planes_of_a_transposed_convolution_have_the_values_of_the_whole() -> None:
    features, weight, bias = random(1, 256, 16, 16, 16), random(256, 8, 2, 2, 2), random(8)
    whole = F.conv_transpose3d(features, weight, bias, 2)
    assert not unfolds(features, weight, transposed=True)
    planes = features[:, :, 3:5]
    assert unfolds(planes, weight, transposed=True)
    stride, padding = (2, 2, 2), (0, 0, 0)
    values = convolve_as_whole(planes, weight, bias, stride, padding, 16, transposed=True)
    assert torch.equal(values, whole[:, :, 6:10])


def test_gaps_strides_and_no_bias_are_those_of_torch() -> None:
    features = random(4, 32, 40, 40).transpose(0, 1)[None]
    weight = random(8, 32, 1, 3, 3)
    assert not features.is_contiguous()
    stride, padding = (1, 2, 2), (0, 1, 1)
    for unfolded in (True, False):
        values = convolution_by(features, weight, None, stride, padding, False, unfolded)
        expected = F.conv3d(features.double(), weight.double(), None, stride, padding)
        torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_keep_the_kernel_of_torch(dtype: torch.dtype) -> None:
    planes, weight = random(1, 4, 3, 8, 8, dtype=dtype), random(4, 4, 3, 3, 3, dtype=dtype)
    values = convolve_as_whole(planes, weight, None, STEP, FLAT, 1000)
    assert torch.equal(values, F.conv3d(planes, weight, None, padding=FLAT))


def test_the_memory_of_a_chosen_kernel_is_counted_on_the_meta_device() -> None:
    """By oneDNN a copy of the larger side; unfolded, 27 values for a voxel."""
    features = random(1, 1, 5, 10, 12).to("meta")
    weight = random(3, 1, 3, 3, 3).to("meta")
    operator = torch.ops.medseg.convolution_by.default
    voxels = 3 * 10 * 12
    for unfolded, values in ((False, 3 * voxels), (True, 27 * voxels)):
        arguments = (features, weight, None, STEP, FLAT, False, unfolded)
        result = operator(*arguments)
        assert result.device.type == "meta"
        assert math.prod(result.shape) == 3 * voxels
        assert convolution_bytes(operator, arguments, result) == 4 * values
    assert convolution_bytes(torch.ops.aten.relu.default, (features,), features) == 0


def test_the_first_call_leaves_torchs_compiler_out() -> None:
    """The compiler would keep 70 MiB in the memory of each prediction."""
    script = (
        "import sys, torch\n"
        "from medseg.models.convolution import convolve_as_whole\n"
        "planes, weight = torch.ones(1, 32, 3, 48, 40), torch.ones(24, 32, 3, 3, 3)\n"
        "convolve_as_whole(planes, weight, None, (1, 1, 1), (0, 1, 1), 16)\n"
        "assert not {'sympy', 'torch._dynamo', 'torch._inductor'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_torch_unfolds_all_without_onednn() -> None:
    assert not unfolds_all()
    was_enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        assert unfolds_all()
        with torch.autocast("cpu", torch.bfloat16):
            assert unfolds_all()
    finally:
        torch._C._set_mkldnn_enabled(was_enabled)
    with torch.autocast("cpu", torch.bfloat16):
        assert unfolds_all() != has_fast_bf16("cpu")
