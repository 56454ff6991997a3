"""Networks on the meta device: shapes of their tensors, without torch's compiler.

Choice of 2026-11-27. For many operations on the meta device torch computes the shape of the result
in Python, and imports SymPy and its compiler to do so: 70 MiB that stay in memory, and 1.4 s. The
layers of usual U-Nets need no more than a few formulas. Not chosen: a process of its own (imports
torch once more), fake tensors (import the same).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import conv_flop_count

from medseg.models.convolution import convolution_by

aten = torch.ops.aten


class MetaLayers(TorchDispatchMode):
    """Makes the results of usual layers on the meta device; torch makes those of other operations.

    Attributes:
        conv_flops: Multiplications and additions of torch's own convolutions so far, as torch's
            `FlopCounterMode` counts them; those of `convolution_by` are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv_flops = 0.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch keeps its compiler from tracing this mode, which imports the compiler."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        make_result = RESULT_MAKERS.get(func)
        result = None
        if make_result is not None and _is_on_meta(args[0]):
            result = make_result(*args, **kwargs)
        if result is None:
            return func(*args, **kwargs)
        if func is aten.convolution.default:
            # At these positions of the arguments, see `_convolution`.
            features, weight, is_transposed = args[0], args[1], args[6]
            self.conv_flops += conv_flop_count(
                list(features.shape),
                list(weight.shape),
                list(result.shape),
                transposed=is_transposed,
            )
        return result


@contextmanager
def meta_layers() -> Iterator[MetaLayers]:
    """Run networks on the meta device by the shapes of their layers, without gradients.

    Yields:
        The active mode, which counts the operations of the convolutions.
    """
    # Torch's inference mode is switched off, because in it a dispatch mode gets a composite
    # operation, such as an instance norm, as a whole and not the operations that it consists of.
    with torch.inference_mode(mode=False), torch.no_grad(), MetaLayers() as layers:
        yield layers


def _is_on_meta(operand: Any) -> bool:
    """Whether an operand, or the first of a list, is on the meta device."""
    if isinstance(operand, (list, tuple)):
        operand = operand[0]
    return isinstance(operand, Tensor) and operand.is_meta


# The functions below take the arguments of the operation that they stand for, in its order.
# `features` is (N, C, *sizes).


def _convolution(
    features: Tensor,
    weight: Tensor,
    _: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    is_transposed: bool,
    output_padding: Sequence[int],
    num_groups: int,
) -> Tensor:
    # The weight is (outputs, inputs / groups, *kernel); transposed (inputs, outputs / groups,
    # *kernel).
    num_channels = weight.shape[0]
    if is_transposed:
        num_channels = weight.shape[1] * num_groups
    shape = [features.shape[0], num_channels]
    # Sizes by the formulas in the documentation of torch's Conv3d and ConvTranspose3d.
    for axis, size in enumerate(features.shape[2:]):
        kernel_size = weight.shape[2 + axis]
        # The voxels that the kernel covers beyond one, less the padding at both ends. A convolution
        # shrinks the features by the margin, and a transposed one enlarges them by it.
        margin = dilation[axis] * (kernel_size - 1) - 2 * padding[axis]
        if is_transposed:
            shape.append((size - 1) * stride[axis] + margin + output_padding[axis] + 1)
        else:
            shape.append((size - margin - 1) // stride[axis] + 1)
    return features.new_empty(shape)


def _chosen_convolution(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    is_transposed: bool,
    _: Any,
) -> Tensor:
    """Make the result of `convolution_by`, which has neither dilation nor groups.

    Its last argument chooses the implementation, on which the shape does not depend.
    """
    return _convolution(
        features,
        weight,
        bias,
        stride,
        padding,
        dilation=(1, 1, 1),
        is_transposed=is_transposed,
        output_padding=(0, 0, 0),
        num_groups=1,
    )


def _norm(features: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    # Torch keeps the statistics of each channel in fp32, also for half-precision features.
    mean = features.new_empty(features.shape[1], dtype=torch.float32)
    inverse_deviation = features.new_empty(features.shape[1], dtype=torch.float32)
    return features.new_empty(features.shape), mean, inverse_deviation


def _element_wise(features: Tensor, *_: Any, **__: Any) -> Tensor:
    return features.new_empty_strided(features.shape, features.stride())


def _element_wise_in_place(features: Tensor, *_: Any, **__: Any) -> Tensor:
    return features


def _comparison(features: Tensor, _: Any) -> Tensor:
    return features.new_empty(features.shape, dtype=torch.bool)


def _concatenated(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape[axis] = sum(tensor.shape[axis] for tensor in tensors)
    return tensors[0].new_empty(shape)


def _repeated(tensor: Tensor, repeats: Sequence[int]) -> Tensor | None:
    # With more repeats than axes the result has further axes, which usual networks do not ask for.
    if len(repeats) != tensor.ndim:
        return None
    return tensor.new_empty(tuple(map(operator.mul, tensor.shape, repeats)))


def _padded(features: Tensor, num_added: Sequence[int], _: float = 0) -> Tensor:
    shape = list(features.shape)
    # Torch lists the added voxels of the last axis first: (before, after, before, after, ...).
    nums_before, nums_after = num_added[::2], num_added[1::2]
    for axis, num_before in enumerate(nums_before):
        shape[-1 - axis] += num_before + nums_after[axis]
    return features.new_empty(shape)


def _pooled(
    features: Tensor, kernel_size: Sequence[int], stride: Sequence[int] = (), *others: Any
) -> Tensor | None:
    # Only the pooling of a residual encoder: windows side by side, no padding or other option.
    if others or len(kernel_size) != features.ndim - 2 or list(stride) != list(kernel_size):
        return None
    pooled_sizes = map(operator.floordiv, features.shape[2:], stride)
    return features.new_empty((*features.shape[:2], *pooled_sizes))


# Makes the result of each operation from its arguments; a function that returns None leaves these
# arguments to torch.
RESULT_MAKERS: dict[Any, Callable[..., Any]] = {
    aten.convolution.default: _convolution,
    convolution_by: _chosen_convolution,
    aten.native_batch_norm.default: _norm,
    aten.leaky_relu.default: _element_wise,
    aten.relu.default: _element_wise,
    aten.gelu.default: _element_wise,
    aten.silu.default: _element_wise,
    aten.leaky_relu_.default: _element_wise_in_place,
    aten.relu_.default: _element_wise_in_place,
    aten.silu_.default: _element_wise_in_place,
    aten.add_.Tensor: _element_wise_in_place,
    aten.eq.Scalar: _comparison,
    aten.cat.default: _concatenated,
    aten.repeat.default: _repeated,
    aten.constant_pad_nd.default: _padded,
    aten.avg_pool2d.default: _pooled,
    aten.avg_pool3d.default: _pooled,
}
