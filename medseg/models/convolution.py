"""The two implementations of a convolution on a CPU: which one torch chooses, and their memory.

Torch computes a small fp32 convolution as a product of matrices ("unfolded": it copies the features
into columns), and a larger one by oneDNN. The two round sums differently. For the few planes of a
slab torch may choose another one than for the whole volume; `convolve_as_whole` avoids that.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten
# Arguments of a torch convolution without padding, dilation or groups.
NO_PADDING = (0, 0, 0)
NO_DILATION = (1, 1, 1)
ONE_GROUP = 1

OPERATOR = "convolution_by"
# A global, because the operator is removed with this object. Not `torch.library.custom_op`: its
# first call imports torch's compiler, which takes 70 MiB.
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
    """Convolve on a CPU by a given implementation, whatever torch would choose for this depth.

    This is an operator of its own, because torch's operators for a given implementation do not run
    on the meta device, where the memory of a pass is counted.

    Args:
        features: Features (1, C, D, H, W) in fp32.
        weight: Weights (K, C, kz, ky, kx); of a transposed convolution (C, K, kz, ky, kx).
        bias: Bias (K,).
        stride: Stride along z, y and x.
        padding: Zeros on each side of z, y and x.
        transposed: Whether the convolution is transposed; then only oneDNN is supported.
        unfolded: Whether to compute a product of matrices; otherwise oneDNN computes.

    Returns:
        Result (1, K, D', H', W').
    """
    if unfolded:
        assert not transposed
        kernel_size = weight.shape[2:]
        return aten.slow_conv3d(features, weight, kernel_size, bias, stride, padding)
    if transposed:
        # After the padding of the input comes that of the output. No function ("none", with no
        # arguments) is applied to the result.
        return torch.ops.mkldnn._convolution_transpose_pointwise(
            features,
            weight,
            bias,
            padding,
            NO_PADDING,
            stride,
            NO_DILATION,
            ONE_GROUP,
            "none",
            [],
            None,
        )
    return aten.mkldnn_convolution(features, weight, bias, padding, stride, NO_DILATION, ONE_GROUP)


def _on_meta(*arguments: Any) -> Tensor:
    """Give the result's shape on the meta device, which is the same for both implementations."""
    features, weight, bias, stride, padding, transposed, _ = arguments
    return _convolve(features, weight, bias, stride, padding, transposed=transposed)


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
    """Convolve some planes of a volume by the implementation that torch chooses for the whole.

    Args:
        features: Planes (1, C, d, H, W), with the neighbouring ones that the convolution reads.
        weight: See `_on_cpu`.
        bias: See `_on_cpu`.
        stride: See `_on_cpu`.
        padding: See `_on_cpu`.
        whole_depth: Number of planes of the volume.
        transposed: See `_on_cpu`.

    Returns:
        Result (1, K, d', H', W').
    """
    # Torch chooses by the size only in fp32 on a CPU, for which the meta device stands.
    chooses_by_size = (
        features.device.type in ("cpu", "meta")
        and features.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
    )
    if chooses_by_size:
        whole_shape = (*features.shape[:2], whole_depth, *features.shape[3:])
        whole = _stand_in(features, whole_shape)
        # The choice does not depend on the padding. Along z a slab has less of it than the whole,
        # so the size of the kernel is taken, a padding that is valid for both.
        any_padding = weight.shape[2:]
        # Arguments of `aten.convolution` after the features; `NO_PADDING` is that of the output.
        arguments = (
            weight,
            bias,
            stride,
            any_padding,
            NO_DILATION,
            transposed,
            NO_PADDING,
            ONE_GROUP,
        )
        unfolded = is_unfolded((whole, *arguments))
        # The choices may differ either way: with its neighbouring planes a slab of a shallow
        # volume can be the larger of the two.
        if is_unfolded((features, *arguments)) != unfolded:
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
    """Convolve by the implementation that torch chooses."""
    if transposed:
        return F.conv_transpose3d(features, weight, bias, tuple(stride), tuple(padding))
    return F.conv3d(features, weight, bias, tuple(stride), tuple(padding))


def convolution_bytes(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Count the bytes that a convolution takes on a CPU beside its input and its result.

    Args:
        func: Operator of torch; 0 bytes for one that is no convolution.
        args: Its arguments.
        result: Its result.
    """
    if func is aten.convolution.default:
        unfolded = is_unfolded(args)
        transposed = args[6]  # after the features and five of `arguments` in `convolve_as_whole`
    elif func is convolution_by:
        transposed, unfolded = args[-2:]
    else:
        return 0
    features, weight = args[:2]
    # Input that is not contiguous is copied first.
    num_bytes = 0 if features.is_contiguous() else features.nbytes
    if unfolded:
        num_bytes += columns_bytes(features, weight, result, transposed=transposed)
    else:
        # OneDNN has a memory layout of its own. The copy of the input is freed before the result is
        # copied back to the usual layout, so the larger of the two copies counts.
        num_bytes += max(features.nbytes, result.nbytes)
    return num_bytes


def is_unfolded(args: tuple[Any, ...]) -> bool:
    """Whether torch computes a convolution as a product of matrices, as it does small ones.

    Args:
        args: Arguments of `aten.convolution`; tensors may be on the meta device.
    """
    # CPU tensors, because the choice on a CPU is meant, whatever the device of the arguments.
    cpu_args: list[Any] = []
    for argument in args:
        if isinstance(argument, Tensor):
            argument = _stand_in(argument, argument.shape)
        cpu_args.append(argument)
    # The backends without oneDNN are called Slow2d, SlowTranspose3d and so on.
    backend = torch._C._select_conv_backend(*cpu_args)
    return bool(backend.name.startswith("Slow"))


def unfolds_all() -> bool:
    """Whether torch unfolds convolutions of any size on a CPU, in the present precision.

    It does without oneDNN, and under autocast in bf16 on a processor that only emulates bf16.
    """
    dtype = torch.float32
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    value = torch.empty(1, dtype=dtype)
    # Far more values than torch unfolds where it has the choice.
    features = _stand_in(value, (1, 1, 512, 512, 512))
    weight = _stand_in(value, (1, 1, 3, 3, 3))
    stride = (1, 1, 1)
    arguments = (None, stride, NO_PADDING, NO_DILATION, False, NO_PADDING, ONE_GROUP)
    return is_unfolded((features, weight, *arguments))


def _stand_in(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Make a CPU tensor of the same dtype and of any shape that has the memory of one value."""
    return torch.empty(1, dtype=tensor.dtype).expand(shape)


def columns_bytes(features: Tensor, weight: Tensor, result: Tensor, *, transposed: bool) -> int:
    """Count the bytes of the matrix of columns: one per output voxel, with all values it reads."""
    kernel_size = math.prod(weight.shape[2:])
    # For a convolution of 1x1x1 the input is the matrix already.
    if kernel_size == 1:
        return 0
    # A transposed convolution has a column per input voxel instead, with all values it adds to.
    if transposed:
        num_columns = math.prod(features.shape[2:])
        num_channels = result.shape[1]
    else:
        num_columns = math.prod(result.shape[2:])
        num_channels = features.shape[1]
    return features.element_size() * kernel_size * num_channels * num_columns
