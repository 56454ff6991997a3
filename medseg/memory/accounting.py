"""Memory accounting: bytes of live tensors in a step or an evaluation, without computing it."""

import contextlib
import copy
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from medseg.losses.dice_ce import SLAB_VOXELS_GPU, DiceCrossEntropyLoss
from medseg.losses.sample_losses import mean_of_samples, sample_losses
from medseg.memory.device_map import named_parts
from medseg.memory.precision import HALF, has_fast_bf16
from medseg.memory.shapes import meta_layers
from medseg.memory.tracker import HOST, MemoryTracker, Owner, Timeline
from medseg.models.convolution import columns_bytes, convolution_bytes
from medseg.models.traits import build_on_meta

# Kinds of owners (`Owner.kind`). Tensors that outlast a pass have a kind of their own.
PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
INPUT = "input"
TARGET = "target"
# All other tensors belong to the phase that makes them.
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
# Further parts of owners (`Owner.part`), beside the names that `named_parts` gives.
LOSS = "loss"
BETWEEN = "between parts"  # operations of the network outside of all parts, such as sums with skips
aten = torch.ops.aten
# Position of the weight among the arguments of a norm.
NORM_WEIGHTS = {
    aten.native_batch_norm.default: 1,
    aten.native_group_norm.default: 1,
    aten.native_layer_norm.default: 2,
}
# Functions that autocast computes in fp32 on CUDA and in half precision on a CPU, each as the
# module or class that has the function, and the name of the function.
FP32_ON_CUDA = (
    (F, "group_norm"),
    (F, "interpolate"),
    (F, "layer_norm"),
    (F, "softmax"),
    (torch, "softmax"),
    (Tensor, "softmax"),
)


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a training step on one device.

    Attributes:
        voxels: Voxels of the input, all samples of a micro-batch together.
        parameters: Parameters and buffers.
        gradients: Gradients of the parameters.
        optimizer_state: State of the optimiser, and the moving average of the weights where there
            is one.
        input: The image.
        target: The reference.
        saved: Bytes that autograd keeps from forward to backward, by the part of the network that
            made them, in the order of `named_parts`.
        offloaded: Saved bytes in host memory.
        peak: Largest total of live bytes during a step.
        peak_at: Phase at the peak, `forward`, `backward` or `update`, and the part of the network.
        peak_live: Bytes at the peak by kind: `parameters`, `gradients`, `optimizer state`, `input`,
            `target`, `forward` (activations), `backward` (gradients of activations and recomputed
            activations) and `update` (temporaries of the optimiser).
        order: Parts of the network in the order in which they ran.
    """

    voxels: int
    parameters: int
    gradients: int
    optimizer_state: int
    input: int
    target: int
    saved: dict[str, int]
    offloaded: int
    peak: int
    peak_at: str
    peak_live: dict[str, int]
    order: tuple[str, ...]

    @property
    def saved_bytes(self) -> int:
        """Bytes that autograd keeps from forward to backward, without input and target."""
        return sum(self.saved.values())

    @property
    def saved_per_voxel(self) -> float:
        """Saved bytes per voxel of the input."""
        return self.saved_bytes / self.voxels


def count_step(
    make_network: Callable[[], nn.Module],
    image_shape: tuple[int, int, int, int, int],
    *,
    loss: nn.Module,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    precision: str = "fp32",
    accumulate: int = 1,
    averages: bool = False,
    compute: bool = False,
    is_gpu: bool = False,
    timeline: Timeline | None = None,
) -> StepMemory:
    """Count the memory of a training step, from the second step on.

    The step runs on torch's fake tensors: all operations are dispatched, none is computed and
    nothing is allocated. For a GPU, which need not be present, the count includes the fp32 copies
    of CUDA's autocast (norms, softmax, upsampling), the copies that nearest upsampling makes of
    channels-last tensors, and the larger slabs of our loss. What libraries add is not counted:
    workspaces of convolutions, cuDNN's reserve of a norm.

    Args:
        make_network: Makes the network with its switches applied; see `named_parts` for its parts.
        image_shape: (N, C, D, H, W) of a micro-batch.
        loss: Called as `loss(logits, target)` for each sample as in training, the target uint8 (1,
            D, H, W).
        make_optimizer: Makes the optimiser from the parameters.
        precision: Number format of forward and backward, see `medseg.memory.precision`.
        accumulate: Micro-batches per optimiser step.
        averages: Whether a moving average of the weights is kept.
        compute: Allocate and compute everything on the CPU: slow, with the same result; used to
            check the count.
        is_gpu: Count what a step keeps on a GPU; else, on a CPU.
        timeline: Gets the operations of the last micro-batch and of the optimiser; None = they are
            not recorded.

    Returns:
        The counts.

    Raises:
        ValueError: If the network or the loss decides by computed values, which fake tensors do not
            have.
    """
    with _fake_network(make_network, compute=compute, is_gpu=is_gpu, timeline=timeline) as (
        network,
        tracker,
        order,
    ):
        network.train()
        if is_gpu:
            loss = _with_slabs_of_gpu(loss)
        _assign_weights(network, tracker)
        tracker.now = Owner(OPTIMIZER)
        optimizer = make_optimizer(network.parameters())
        # From the second step on the optimiser's state is there when the step begins.
        _make_state(optimizer)
        # The copies count as long as this name holds them.
        _averages = _copy_weights(network) if averages else []
        optimizer_state = tracker.live_bytes(OPTIMIZER)
        # A gradient belongs to the backward pass until its last contribution is added.
        for parameter in network.parameters():
            # A frozen parameter gets no gradient, and torch refuses a hook for it.
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda parameter: tracker.assign(parameter.grad, GRADIENTS)
                )
        image = torch.zeros(image_shape)
        target = torch.zeros((image_shape[0], *image_shape[2:]), dtype=torch.uint8)
        tracker.assign(image, INPUT)
        tracker.assign(target, TARGET)
        saved: dict[str, int] = {}
        offloaded = 0
        tracker.restart_peak()  # tensors that served to make the state do not count
        # The second micro-batch is the first one that finds gradients of an earlier one; all later
        # ones are like it.
        for _ in range(min(accumulate, 2)):
            loss_value = _forward(network, image, target, loss, precision, tracker, timeline)
            offloaded = tracker.live_bytes(HOST)
            saved = tracker.live_by_part(FORWARD)
            # The backward pass begins in the loss; hooks then name the parts of the network.
            tracker.now = Owner(BACKWARD, LOSS)
            loss_value.backward()
            del loss_value
        gradients = tracker.live_bytes(GRADIENTS)
        tracker.now = Owner(UPDATE)
        optimizer.step(_no_loss)
        parts = [*named_parts(network), BETWEEN, LOSS]
        return StepMemory(
            voxels=image_shape[0] * math.prod(image_shape[2:]),
            parameters=tracker.live_bytes(PARAMETERS),
            gradients=gradients,
            optimizer_state=optimizer_state,
            input=tracker.live_bytes(INPUT),
            target=tracker.live_bytes(TARGET),
            saved={part: saved[part] for part in parts if part in saved},
            offloaded=offloaded,
            peak=tracker.peak_bytes,
            peak_at=f"{tracker.peak_now.kind} {tracker.peak_now.part}".strip(),
            peak_live=_peak_by_kind(tracker),
            order=tuple(order),
        )


def count_forward(
    make_network: Callable[[], nn.Module],
    image_shape: tuple[int, int, int, int, int],
    call: Callable[[nn.Module, Tensor], Any],
    *,
    precision: str = "fp32",
    is_gpu: bool = False,
) -> Timeline:
    """Record the operations of a network's evaluation, as `count_step` does those of a step.

    Args:
        make_network: See `count_step`.
        image_shape: (N, C, D, H, W).
        call: Evaluates the network on the image, as in `call(network, image)`.
        precision: See `count_step`.
        is_gpu: See `count_step`.

    Returns:
        The operations with the live bytes, weights and image included.

    Raises:
        ValueError: See `count_step`.
    """
    timeline = Timeline()
    with _fake_network(make_network, is_gpu=is_gpu, timeline=timeline) as (network, tracker, _):
        _assign_weights(network, tracker)
        image = torch.zeros(image_shape)
        tracker.assign(image, INPUT)
        timeline.segments.clear()  # making the image is no operation of the network
        tracker.now = Owner(FORWARD)
        with torch.no_grad(), torch.autocast("cpu", HALF.get(precision), enabled=precision in HALF):
            call(network.eval(), image)
    return timeline


def count_pass(
    make_network: Callable[[], nn.Module],
    image_shape: tuple[int, int, int, int, int],
    call: Callable[[nn.Module, Tensor, MemoryTracker], Any],
    *,
    precision: str = "fp32",
) -> int:
    """Count the memory of a network's evaluation on a CPU, by the shapes of its tensors alone.

    Counted are the live tensors, the workspaces of convolutions (see `medseg.models.convolution`)
    and the pages of files that are in memory.

    Args:
        make_network: Makes the network.
        image_shape: (1, C, D, H, W).
        call: Evaluates the network on the image, as in `call(network, image, tracker)`. If it uses
            memory-mapped tensors, it must make `HOST` their owner: these count only while their
            pages are in memory.
        precision: `bf16` counts all features in half precision, as autocast keeps them.

    Returns:
        Bytes at the peak, image included, weights not.
    """
    resident_file_bytes = 0

    def workspace(func: Any, args: tuple[Any, ...], result: Any) -> int:
        """Return the bytes that an operation takes beside its tensors."""
        nonlocal resident_file_bytes
        # A view touches no pages.
        touched_file_bytes = 0 if func.is_view else tracker.operand_bytes(args, HOST)
        # The pages of the last file that was read or written stay in memory until the next access,
        # before which the caller releases them.
        if touched_file_bytes:
            resident_file_bytes = touched_file_bytes
        num_bytes = resident_file_bytes + convolution_bytes(func, args, result)
        # After writing, `medseg.io.scratch.release_pages` takes them out of memory.
        if touched_file_bytes and func is aten.copy_.default:
            resident_file_bytes = 0
        return num_bytes

    dtype = HALF.get(precision, torch.float32)
    with meta_layers():
        network = build_on_meta(make_network).to(dtype).eval()
        with MemoryTracker(workspace=workspace) as tracker:
            _assign_weights(network, tracker)
            image = torch.empty(image_shape, dtype=dtype, device="meta")
            tracker.restart_peak()
            call(network, image, tracker)
            return tracker.peak_bytes - tracker.live_bytes(PARAMETERS)


@contextlib.contextmanager
def _fake_network(
    make_network: Callable[[], nn.Module],
    *,
    compute: bool = False,
    is_gpu: bool,
    timeline: Timeline | None,
) -> Iterator[tuple[nn.Module, MemoryTracker, dict[str, None]]]:
    """Make a network of fake tensors; yield it with a running tracker and the parts that have run.

    Arguments as in `count_step`.

    Raises:
        ValueError: If the network decides by computed values.
    """
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    )

    from medseg.memory.fake_mode import QuickFakeMode

    tracker = MemoryTracker(
        correct=None if compute else _correct_norm_dtypes,
        workspace=_copied_bytes if is_gpu else None,
        timeline=timeline,
    )
    cuda_precision = _cuda_precision() if is_gpu else contextlib.nullcontext()
    if compute:
        mode: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        network = make_network()
    else:
        # Real tensors are allowed: the caller may bring some, such as the index of a region.
        mode = QuickFakeMode(allow_non_fake_inputs=True)
        # Made fake only afterwards: `Module.to`, with which a switch may change the memory layout,
        # cannot do so for fake parameters.
        network = build_on_meta(make_network)
    try:
        with mode:
            if not compute:
                _make_fake(network)
            with tracker, _watch_parts(network, tracker) as order, cuda_precision:
                yield network, tracker, order
    except (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    ) as error:
        raise ValueError(
            f"the memory cannot be counted without computing ({error}); give compute=true"
        ) from error


def _assign_weights(network: nn.Module, tracker: MemoryTracker) -> None:
    for tensor in (*network.parameters(), *network.buffers()):
        tracker.assign(tensor, PARAMETERS)


def _copy_weights(network: nn.Module) -> list[Tensor]:
    """Make the tensors that a moving average of the weights keeps; integers are not averaged."""
    tensors = network.state_dict().values()
    return [tensor.clone() for tensor in tensors if torch.is_floating_point(tensor)]


def _forward(
    network: nn.Module,
    image: Tensor,
    target: Tensor,
    loss: nn.Module,
    precision: str,
    tracker: MemoryTracker,
    timeline: Timeline | None,
) -> Tensor:
    """Run the forward pass of a micro-batch; a timeline gets the storages that it keeps alive.

    Returns:
        The loss, with the graph.
    """
    # The hooks of `_watch_parts` make the parts of the network the owner while they run, and this
    # owner again at the end.
    tracker.now = Owner(FORWARD, LOSS)
    hooks: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if timeline is not None:
        # A timeline shows the last micro-batch, so the operations of the one before are removed.
        timeline.segments.clear()
        hooks = saved_tensors_hooks(tracker.save, _unchanged)
    # The fake tensors are on the CPU, also where a GPU is counted.
    with torch.autocast("cpu", HALF.get(precision), enabled=precision in HALF), hooks:
        logits = network(image)
        with _RealRanges():
            loss_value = mean_of_samples(sample_losses(loss, logits, target))
    # From here on only the tensors that the graph saves count.
    del logits
    if timeline is not None:
        timeline.held_storages = tracker.held_storages(FORWARD)
    return loss_value


def _with_slabs_of_gpu(loss: nn.Module) -> nn.Module:
    """Copy a loss with the slabs that it uses on a GPU, though the fake tensors are on a CPU."""
    loss = copy.deepcopy(loss)
    for module in loss.modules():
        if isinstance(module, DiceCrossEntropyLoss):
            module.slab_voxels = SLAB_VOXELS_GPU
    return loss


def _peak_by_kind(tracker: MemoryTracker) -> dict[str, int]:
    """Sum the bytes at the peak by kind, without offloaded tensors."""
    peak_live: Counter[str] = Counter()
    for owner, num_bytes in tracker.peak_live.items():
        if owner.kind != HOST:
            peak_live[owner.kind] += num_bytes
    return {kind: num_bytes for kind, num_bytes in peak_live.items() if num_bytes}


@contextlib.contextmanager
def _cuda_precision() -> Iterator[None]:
    """Make the fp32 copies of CUDA's autocast on a CPU, too.

    The functions are replaced. A `TorchFunctionMode` would be shorter, but it does not reach the
    backward pass, in which checkpointed blocks are computed anew.
    """
    with contextlib.ExitStack() as replaced:
        for place, name in FP32_ON_CUDA:
            replacement = _in_fp32(getattr(place, name))
            replaced.enter_context(mock.patch.object(place, name, replacement))
        yield


def _in_fp32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let a function copy features in half precision to fp32 first, where autocast is on."""

    @functools.wraps(function)
    # The argument must be called `input`, as in torch: callers may pass it by name.
    def compute(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.is_autocast_enabled("cpu") and input.dtype in HALF.values():
            input = input.float()
        return function(input, *args, **kwargs)

    return compute


class _RealRanges(TorchFunctionMode):
    """Lets `torch.arange` make real tensors.

    MONAI's losses list the axes that they sum over in such a range, and read its values, which a
    fake tensor does not have.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        kwargs = kwargs or {}
        is_range = func is torch.arange and all(isinstance(value, int) for value in args)
        if not is_range:
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _no_loss() -> float:
    """Closure that some optimisers require; the gradients are there already."""
    return 0.0


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimiser's state for all trained parameters by a step on gradients of zero.

    All tensors that are left after this step, in the optimiser's `state` or elsewhere, are state.
    Frozen parameters get no gradient, so the optimiser makes no state for them.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step(_no_loss)
    optimizer.zero_grad(set_to_none=True)


class _PartWatch:
    """Hooks that set the tracker's owner to the part of the network that runs.

    Attributes:
        order: The parts that have run, in their order: a dictionary used as an ordered set.
    """

    def __init__(self, tracker: MemoryTracker) -> None:
        self.order: dict[str, None] = {}
        self._tracker = tracker
        # Stacks of the parts whose forward pass has begun and not ended, and of the tracker's
        # owners before each of them.
        self._running: list[str] = []
        self._callers: list[Owner] = []

    def enter(self, name: str, _: nn.Module, args: Any) -> None:
        """Make a part that begins its forward pass the owner, unless it runs inside another one."""
        self._callers.append(self._tracker.now)
        self._running.append(name)
        kind = self._tracker.now.kind
        # A forward pass in the backward phase is that of a recomputed block: its tensors belong to
        # the part whose gradient is computed.
        is_recomputed = kind == BACKWARD
        if is_recomputed or self._is_nested():
            return
        if name != BETWEEN:
            self.order.setdefault(name)
            self._tracker.take(args, name)
        self._tracker.now = Owner(kind, name)

    def leave(self, name: str, _: nn.Module, __: Any, result: Any) -> None:
        """Make the caller of a part the owner again, and wait for the part's backward pass."""
        self._tracker.now = self._callers.pop()
        was_nested = self._is_nested()  # asked while the part is still among those that run
        self._running.pop()
        has_gradient = isinstance(result, Tensor) and result.requires_grad
        if was_nested or not has_gradient:
            return
        # As a rule the network returns the result of its last part, which has a hook already.
        if name == BETWEEN and result._backward_hooks:
            return
        # Once the gradient of the part's result is computed, the part's backward pass begins.
        result.register_hook(functools.partial(self._begin_backward, name))

    def _begin_backward(self, name: str, _: Tensor) -> None:
        self._tracker.now = Owner(BACKWARD, name)

    def _is_nested(self) -> bool:
        """Whether the innermost part runs within another one, to which its tensors then belong."""
        parts = [name for name in self._running if name != BETWEEN]
        return len(parts) > 1


@contextlib.contextmanager
def _watch_parts(network: nn.Module, tracker: MemoryTracker) -> Iterator[dict[str, None]]:
    """Set the tracker's owner to the part of the network that runs, in forward and in backward.

    Yields:
        The parts that have run, in their order.
    """
    watch = _PartWatch(tracker)
    enter_network = functools.partial(watch.enter, BETWEEN)
    leave_network = functools.partial(watch.leave, BETWEEN)
    # Leaving the handle of a hook as a context removes the hook.
    with contextlib.ExitStack() as hooks:
        # Hooks of one module run in the order of their registration. Where the network is a part as
        # well, it must enter as the network first, and leave as the network last.
        hooks.enter_context(network.register_forward_pre_hook(enter_network))
        for name, modules in named_parts(network).items():
            enter_part = functools.partial(watch.enter, name)
            leave_part = functools.partial(watch.leave, name)
            for module in modules:
                hooks.enter_context(module.register_forward_pre_hook(enter_part))
                hooks.enter_context(module.register_forward_hook(leave_part))
        hooks.enter_context(network.register_forward_hook(leave_network))
        yield watch.order


def _make_fake(network: nn.Module) -> None:
    """Replace weights on the meta device by fake CPU tensors, within torch's fake mode."""
    replacements: dict[Tensor, Tensor] = {}  # a tensor that two modules share stays shared
    for module in network.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if tensor not in replacements:
                    replacements[tensor] = _fake_copy(tensor)
                table[name] = replacements[tensor]  # type: ignore[assignment]


def _fake_copy(tensor: Tensor) -> Tensor:
    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, tensor.requires_grad)
    return fake


def _correct_norm_dtypes(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """Give the results of a fake norm the dtypes that the real kernels return.

    With half-precision features and fp32 weights the kernels keep the statistics in fp32 and return
    a half-precision gradient; torch 2.13's fake kernels do the opposite.
    """
    if func in NORM_WEIGHTS:
        features, weight = args[0], args[NORM_WEIGHTS[func]]
        if weight is not None and weight.dtype != features.dtype:
            normed, mean, inverse_deviation = result
            return normed, mean.to(weight.dtype), inverse_deviation.to(weight.dtype)
    if func is aten.native_group_norm_backward.default:
        features = args[1]
        gradient, *weight_gradients = result
        if gradient is not None:
            return (gradient.to(features.dtype), *weight_gradients)
    return result


def _copied_bytes(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Bytes that nearest upsampling copies on a GPU, whose kernel needs contiguous tensors."""
    if func not in (
        aten.upsample_nearest3d.default,
        aten.upsample_nearest3d.vec,
        aten.upsample_nearest3d_backward.default,
    ):
        return 0
    return sum(tensor.nbytes for tensor in (args[0], result) if not tensor.is_contiguous())


# Kernels copy their inputs into layouts of their own, which a count of tensors does not see. So the
# count is multiplied by this factor. Peaks of 1.1 to 2.1 times the live tensors were measured with
# several stems, norms, values of `refine`, precisions and processors.
WORKSPACE = 2.5
# Convolutions as a dispatch mode sees them in inference mode, and whether each is transposed.
INFERENCE_CONVOLUTIONS = {
    aten.conv2d.default: False,
    aten.conv3d.default: False,
    aten.conv_transpose2d.input: True,
    aten.conv_transpose3d.input: True,
}


def _bf16_columns_bytes(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Bytes of the columns into which a CPU without bf16 instructions copies bf16 features.

    On such a CPU torch computes every convolution in bf16 as a product of matrices; in fp32, only
    that of a small image.
    """
    if func not in INFERENCE_CONVOLUTIONS or has_fast_bf16("cpu"):
        return 0
    features, weight = args[:2]
    if features.device.type != "cpu" or features.dtype != torch.bfloat16:
        return 0
    return columns_bytes(features, weight, result, transposed=INFERENCE_CONVOLUTIONS[func])


def forward_bytes_per_voxel(
    network: nn.Module,
    call: Callable[[Tensor], Tensor],
    image_shape: tuple[int, int, int, int, int],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Count the peak bytes of a forward pass per voxel of its input.

    Args:
        network: Its weights are not counted.
        call: Runs the network on an image, in its precision.
        image_shape: (1, C, D, H, W) of the image, see `Traits.small_size`.
        device: Device of the network.
        dtype: Number format of the image.

    Returns:
        Peak bytes of activations and logits per voxel, with the kernels' workspaces, without
        weights and image.
    """
    image = torch.zeros(image_shape, dtype=dtype, device=device)
    with torch.inference_mode(), MemoryTracker(workspace=_bf16_columns_bytes) as tracker:
        tracker.assign(image, INPUT)
        _assign_weights(network, tracker)
        call(image)
    not_counted = tracker.live_bytes(INPUT) + tracker.live_bytes(PARAMETERS)
    return WORKSPACE * (tracker.peak_bytes - not_counted) / math.prod(image_shape[2:])
