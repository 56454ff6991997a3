"""The two kernels of a convolution on a CPU: which one torch takes, and what memory it takes.

Torch computes a small convolution in fp32 as a product of matrices (it unfolds the features), and a
larger one by oneDNN. The two round sums differently. For the few planes of a slab torch may choose
another kernel than for all planes; `convolve_as_whole` takes the same.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten
NONE = (0, 0, 0)  # padding


OPERATOR = "convolution_by"
# Kept: the operator exists as long as this object. `torch.library.custom_op` would do the same, but
# its first call imports torch's compiler, which takes 70 MiB.
_library = torch.library.Library("medseg", "DEF")
_library.define(
    f"{OPERATOR}(Tensor features, Tensor weight, Tensor? bias, int[] stride, int[] padding, "
    "bool transposed, bool unfolded) -> Tensor"
)


def _on_cpu(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    transposed: bool,
    unfolded: bool,
) -> Tensor:
    """Convolve on a CPU by a kernel that torch would not choose for so few planes, or so many.

    An operator of its own, because torch's operators of a kernel do not run on the meta device,
    where the memory of a pass is counted.

    Args:
        features: Features (1, C, D, H, W) in fp32.
        weight: Weights (K, C, d, h, w); of a transposed convolution (C, K, d, h, w).
        bias: Bias (K,).
        stride: Stride by axis.
        padding: Zeros on each side of an axis.
        transposed: Whether the convolution is transposed; by oneDNN alone.
        unfolded: Whether as a product of matrices; otherwise by oneDNN.
    """
    dilation = (1, 1, 1)
    if unfolded:
        assert not transposed
        kernel_size = weight.shape[2:]
        return aten.slow_conv3d(features, weight, kernel_size, bias, stride, padding)
    if transposed:
        # No output padding, one group, and no function of the result.
        return torch.ops.mkldnn._convolution_transpose_pointwise(
            features, weight, bias, padding, NONE, stride, dilation, 1, "none", [], None
        )
    return aten.mkldnn_convolution(features, weight, bias, padding, stride, dilation, 1)


def _on_meta(*arguments: Any) -> Tensor:
    *of_convolution, transposed, _ = arguments  # the kernels give one shape
    return _convolve(*of_convolution, transposed=transposed)


_library.impl(OPERATOR, _on_cpu, "CPU")
_library.impl(OPERATOR, _on_meta, "Meta")
convolution_by = torch.ops.medseg.convolution_by.default


def convolve_as_whole(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    whole_depth: int,
    *,
    transposed: bool = False,
) -> Tensor:
    """Convolve some planes by the kernel that torch takes for all of them.

    Args:
        features: Planes (1, C, d, H, W).
        weight: See `_on_cpu`.
        bias: See `_on_cpu`.
        stride: See `_on_cpu`.
        padding: See `_on_cpu`.
        whole_depth: Number of all planes.
        transposed: See `_on_cpu`.

    Returns:
        Result (1, K, d', H', W').
    """
    # Only in fp32 does torch choose by the size.
    chooses_by_size = (
        features.device.type in ("cpu", "meta")
        and features.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
    )
    if chooses_by_size:
        whole_shape = (*features.shape[:2], whole_depth, *features.shape[3:])
        # The choice does not depend on the padding; the whole has zeros along z that a slab lacks.
        further = (weight, bias, stride, weight.shape[2:], (1, 1, 1), transposed, NONE, 1)
        unfolded = is_unfolded((_stand_in(features, whole_shape), *further))
        # With the planes beside it a slab may also be larger than the whole.
        if is_unfolded((features, *further)) != unfolded:
            return convolution_by(
                features, weight, bias, list(stride), list(padding), transposed, unfolded
            )
    return _convolve(features, weight, bias, stride, padding, transposed=transposed)


def _convolve(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    *,
    transposed: bool,
) -> Tensor:
    """Convolve by the kernel that torch takes."""
    if transposed:
        return F.conv_transpose3d(features, weight, bias, tuple(stride), tuple(padding))
    return F.conv3d(features, weight, bias, tuple(stride), tuple(padding))


def convolution_bytes(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Bytes that a convolution takes on a CPU beside its input and its result.

    Args:
        func: Operator of torch; one that is no convolution takes nothing.
        args: Its arguments.
        result: Its result.
    """
    if func is aten.convolution.default:
        unfolded = is_unfolded(args)
        transposed = args[6]
    elif func is convolution_by:
        transposed, unfolded = args[-2:]
    else:
        return 0
    features = args[0]
    # An input with gaps is copied without them first.
    num_bytes = 0 if features.is_contiguous() else features.nbytes
    if unfolded:
        num_bytes += _columns_bytes(features, args[1], result, transposed=transposed)
    else:
        # The kernels of oneDNN have a layout of their own. The copy of the input is free before the
        # result is brought back to the usual layout.
        num_bytes += max(features.nbytes, result.nbytes)
    return num_bytes


def is_unfolded(args: tuple[Any, ...]) -> bool:
    """Whether torch computes a convolution as a product of matrices, as it does small ones.

    Args:
        args: Arguments of `aten.convolution`.
    """
    on_cpu: list[Any] = []
    for argument in args:
        if isinstance(argument, Tensor):
            argument = _stand_in(argument, argument.shape)
        on_cpu.append(argument)
    # The backends without oneDNN are Slow2d, SlowTranspose3d and others.
    backend = torch._C._select_conv_backend(*on_cpu)
    return bool(backend.name.startswith("Slow"))


def _stand_in(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Make a tensor on the CPU with which torch chooses a kernel: one value stands for all."""
    return torch.empty(1, dtype=tensor.dtype).expand(shape)


def _columns_bytes(features: Tensor, weight: Tensor, result: Tensor, *, transposed: bool) -> int:
    """Bytes of the matrix that has a column for each voxel, with all values that a kernel takes."""
    kernel_size = math.prod(weight.shape[2:])
    # Kernels of one voxel take the input as it is.
    if kernel_size == 1:
        return 0
    # A transposed convolution makes the columns of its result.
    narrow, wide = (features, result) if transposed else (result, features)
    num_voxels = math.prod(narrow.shape[2:])
    return features.element_size() * kernel_size * wide.shape[1] * num_voxels
