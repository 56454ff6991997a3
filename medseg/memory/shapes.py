"""Networks on the meta device: shapes of their tensors, without torch's compiler.

Choice of 2026-11-27. Torch computes the shape of many a result there in Python, and imports SymPy
and its compiler for it: 70 MiB that stay in memory, and 1.4 s. The layers of usual U-Nets need no
more than a few formulas. Not chosen: a process of its own (imports torch once more), fake tensors
(import the same).
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
    """Results of usual layers on the meta device; those of other operations are torch's.

    Attributes:
        operations: Additions and multiplications of the convolutions so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch's guard against compiling this class imports the slow compiler."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        make_result = RESULTS.get(func)
        result = None
        if make_result is not None and _is_on_meta(args[0]):
            result = make_result(*args, **(kwargs or {}))
        if result is None:
            return func(*args, **(kwargs or {}))
        if func is aten.convolution.default:
            features, weight, is_transposed = args[0], args[1], args[6]
            self.operations += conv_flop_count(
                list(features.shape),
                list(weight.shape),
                list(result.shape),
                transposed=is_transposed,
            )
        return result


@contextmanager
def meta_layers() -> Iterator[MetaLayers]:
    """Run networks on the meta device by the shapes of their layers, without gradients."""
    # In inference mode a mode sees no parts of composite operations, such as an instance norm.
    with torch.inference_mode(mode=False), torch.no_grad(), MetaLayers() as layers:
        yield layers


def _is_on_meta(operand: Any) -> bool:
    """Whether an operand, or the first of a list, is on the meta device."""
    if isinstance(operand, (list, tuple)):
        operand = operand[0]
    return isinstance(operand, Tensor) and operand.is_meta


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
    shape = [features.shape[0], weight.shape[0]]
    if is_transposed:
        shape[1] = weight.shape[1] * num_groups
    for axis, size in enumerate(features.shape[2:]):
        # Voxels that the kernel reaches beside the first, without those beyond the image.
        reach = dilation[axis] * (weight.shape[2 + axis] - 1) - 2 * padding[axis]
        if is_transposed:
            shape.append((size - 1) * stride[axis] + reach + output_padding[axis] + 1)
        else:
            shape.append((size - reach - 1) // stride[axis] + 1)
    return features.new_empty(shape)


def _convolution_by(*arguments: Any) -> Tensor:
    features, weight, bias, stride, padding, is_transposed, _ = arguments
    further = ((1, 1, 1), is_transposed, (0, 0, 0), 1)
    return _convolution(features, weight, bias, stride, padding, *further)


def _norm(features: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    mean = features.new_empty(features.shape[1], dtype=torch.float32)
    deviation = features.new_empty(features.shape[1], dtype=torch.float32)
    return features.new_empty(features.shape), mean, deviation


def _like(features: Tensor, *_: Any, **__: Any) -> Tensor:
    return features.new_empty_strided(features.shape, features.stride())


def _in_place(features: Tensor, *_: Any, **__: Any) -> Tensor:
    return features


def _comparison(features: Tensor, _: Any) -> Tensor:
    return features.new_empty(features.shape, dtype=torch.bool)


def _joined(parts: Sequence[Tensor], axis: int = 0) -> Tensor:
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    return parts[0].new_empty(shape)


def _repeated(values: Tensor, repeats: Sequence[int]) -> Tensor | None:
    if len(repeats) != values.ndim:
        return None
    return values.new_empty(tuple(map(operator.mul, values.shape, repeats)))


def _padded(features: Tensor, num_added: Sequence[int], _: float = 0) -> Tensor:
    shape = list(features.shape)
    # Pairs, of the last axis first.
    for axis, (before, after) in enumerate(zip(num_added[::2], num_added[1::2], strict=True), 1):
        shape[-axis] += before + after
    return features.new_empty(shape)


def _pooled(
    features: Tensor, kernel_size: Sequence[int], stride: Sequence[int] = (), *others: Any
) -> Tensor | None:
    # The poolings of a residual encoder: neighbouring windows, and no voxels around the image.
    if others or len(kernel_size) != features.ndim - 2 or list(stride) != list(kernel_size):
        return None
    num_before = features.ndim - len(kernel_size)
    sizes = map(operator.floordiv, features.shape[num_before:], stride)
    return features.new_empty((*features.shape[:num_before], *sizes))


# Result of each operation by its arguments, without values; None leaves it to torch.
RESULTS: dict[Any, Callable[..., Any]] = {
    aten.convolution.default: _convolution,
    convolution_by: _convolution_by,
    aten.native_batch_norm.default: _norm,
    aten.leaky_relu.default: _like,
    aten.relu.default: _like,
    aten.gelu.default: _like,
    aten.silu.default: _like,
    aten.leaky_relu_.default: _in_place,
    aten.relu_.default: _in_place,
    aten.silu_.default: _in_place,
    aten.add_.Tensor: _in_place,
    aten.eq.Scalar: _comparison,
    aten.cat.default: _joined,
    aten.repeat.default: _repeated,
    aten.constant_pad_nd.default: _padded,
    aten.avg_pool2d.default: _pooled,
    aten.avg_pool3d.default: _pooled,
}
