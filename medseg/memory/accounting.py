"""Memory accounting: live tensor bytes of a training step by owner, counted without computing it; peak of a forward pass."""

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from medseg.losses.sample_losses import mean_of_samples, sample_losses
from medseg.memory.device_map import named_parts
from medseg.memory.precision import HALF
from medseg.memory.tracker import HOST, MemoryTracker, Owner, Timeline
from medseg.models.traits import build_on_meta

PARAMETERS, GRADIENTS, OPTIMIZER, INPUT, TARGET = (
    "parameters",
    "gradients",
    "optimizer state",
    "input",
    "target",
)
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
LOSS = "loss"
BETWEEN = "between parts"  # operations of the network outside of all parts, such as sums with skips
aten = torch.ops.aten
# Position of the weight among the arguments of a norm.
NORM_WEIGHTS = {
    aten.native_batch_norm.default: 1,
    aten.native_group_norm.default: 1,
    aten.native_layer_norm.default: 2,
}
# Functions of features that CUDA's autocast computes in fp32 and that of the CPU in half precision.
FP32_ON_CUDA = (F.group_norm, F.layer_norm, F.softmax, torch.softmax, Tensor.softmax)


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
        saved: What autograd keeps from forward to backward, by the part of the network that made
            it, in forward order.
        offloaded: What waits in host memory.
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
    of CUDA's autocast (norms, softmax) and the copies that nearest upsampling makes of
    channels-last tensors. What libraries add is not counted: workspaces of convolutions, cuDNN's
    reserve of a norm.

    Args:
        make_network: Makes the network with its switches applied; see `named_parts` for its parts.
        image_shape: (N, C, D, H, W) of a micro-batch.
        loss: Called as `loss(logits, target)` for each sample as in training, the target uint8 (1,
            D, H, W).
        make_optimizer: From parameters to an optimiser.
        precision: Number format of forward and backward, see `medseg.memory.precision`.
        accumulate: Micro-batches per optimiser step.
        averages: Whether a moving average of the weights is kept.
        compute: Allocate and compute everything on the CPU: slow, with the same result; used to
            check the count.
        is_gpu: Count what a GPU keeps; else, a CPU.
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
        return _count(
            network.train(),
            image_shape,
            tracker,
            loss,
            make_optimizer,
            precision,
            accumulate,
            averages,
            order,
            timeline,
        )


def count_forward(
    make_network: Callable[[], nn.Module],
    image_shape: tuple[int, int, int, int, int],
    call: Callable[[nn.Module, Tensor], Any],
    *,
    precision: str = "fp32",
    is_gpu: bool = False,
) -> Timeline:
    """Record the operations of a network's evaluation, as `count_step` does those of a training step.

    Args:
        make_network: See `count_step`.
        image_shape: (N, C, D, H, W).
        call: Does the work with a network and an image.
        precision: See `count_step`.
        is_gpu: See `count_step`.

    Returns:
        The operations with the live bytes, weights and image included.

    Raises:
        ValueError: See `count_step`.
    """
    timeline = Timeline()
    with _fake_network(make_network, is_gpu=is_gpu, timeline=timeline) as (network, tracker, _):
        for tensor in (*network.parameters(), *network.buffers()):
            tracker.assign(tensor, PARAMETERS)
        image = torch.zeros(image_shape)
        tracker.assign(image, INPUT)
        timeline.segments.clear()
        tracker.now = Owner(FORWARD)
        with torch.no_grad(), torch.autocast("cpu", HALF.get(precision), enabled=precision in HALF):
            call(network.eval(), image)
    return timeline


@contextlib.contextmanager
def _fake_network(
    make_network: Callable[[], nn.Module],
    *,
    compute: bool = False,
    is_gpu: bool,
    timeline: Timeline | None,
) -> Iterator[tuple[nn.Module, MemoryTracker, dict[str, None]]]:
    """Make a network of fake tensors; yield it with a tracker that is on, and the parts that have run.

    Raises:
        ValueError: If the network decides by computed values.
    """
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
        UnsupportedOperatorException,
    )

    # Real tensors are allowed: the caller may bring some, such as the index of a region.
    mode = contextlib.nullcontext() if compute else FakeTensorMode(allow_non_fake_inputs=True)
    tracker = MemoryTracker(
        None if compute else _correct_norm_dtypes, _copied_bytes if is_gpu else None, timeline
    )
    # Built on the meta device: `Module.to` cannot change the memory layout of fake parameters.
    network = make_network() if compute else build_on_meta(make_network)
    try:
        with mode:
            if not compute:
                _make_fake(network)
            with (
                tracker,
                _watch_parts(network, tracker) as order,
                _CudaPrecision() if is_gpu else contextlib.nullcontext(),
            ):
                yield network, tracker, order
    except (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    ) as error:
        raise ValueError(
            f"the memory cannot be counted without computing ({error}); give compute=true"
        ) from error


def _count(
    network: nn.Module,
    image_shape: tuple[int, int, int, int, int],
    tracker: MemoryTracker,
    loss: nn.Module,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    precision: str,
    accumulate: int,
    averages: bool,
    order: dict[str, None],
    timeline: Timeline | None,
) -> StepMemory:
    for tensor in (*network.parameters(), *network.buffers()):
        tracker.assign(tensor, PARAMETERS)
    tracker.now = Owner(OPTIMIZER)
    optimizer = make_optimizer(network.parameters())
    _make_state(optimizer)
    _average = [
        tensor.clone()
        for tensor in network.state_dict().values()
        if averages and torch.is_floating_point(tensor)
    ]
    optimizer_state = tracker.live_bytes(OPTIMIZER)
    for parameter in network.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: tracker.assign(p.grad, GRADIENTS))
    image = torch.zeros(image_shape)
    target = torch.zeros((image_shape[0], *image_shape[2:]), dtype=torch.uint8)
    tracker.assign(image, INPUT)
    tracker.assign(target, TARGET)
    saved: dict[str, int] = {}
    offloaded = 0
    tracker.restart_peak()
    # The second micro-batch is the first one that finds gradients; all later ones are like it.
    for _ in range(min(accumulate, 2)):
        if timeline is not None:
            timeline.segments.clear()
        tracker.now = Owner(FORWARD, LOSS)
        hooks = (
            saved_tensors_hooks(tracker.save, _unchanged)
            if timeline is not None
            else contextlib.nullcontext()
        )
        with torch.autocast("cpu", HALF.get(precision), enabled=precision in HALF), hooks:
            logits = network(image)
            with _RealRanges():
                value = mean_of_samples(sample_losses(loss, logits, target))
            del logits
        if timeline is not None:
            timeline.held = tracker.held(FORWARD)
        offloaded = tracker.live_bytes(HOST)
        saved = {
            owner.part: size
            for owner, size in tracker.live.items()
            if owner.kind == FORWARD and size
        }
        tracker.now = Owner(BACKWARD, LOSS)
        value.backward()
        del value
    gradients = tracker.live_bytes(GRADIENTS)
    tracker.now = Owner(UPDATE)
    optimizer.step(_no_loss)
    peak_live: Counter[str] = Counter()
    for owner, size in tracker.peak_live.items():
        peak_live[owner.kind] += size
    return StepMemory(
        voxels=image_shape[0] * math.prod(image_shape[2:]),
        parameters=tracker.live_bytes(PARAMETERS),
        gradients=gradients,
        optimizer_state=optimizer_state,
        input=tracker.live_bytes(INPUT),
        target=tracker.live_bytes(TARGET),
        saved={
            part: saved[part] for part in [*named_parts(network), BETWEEN, LOSS] if part in saved
        },
        offloaded=offloaded,
        peak=tracker.peak_bytes,
        peak_at=f"{tracker.peak_now.kind} {tracker.peak_now.part}".strip(),
        peak_live={kind: size for kind, size in peak_live.items() if size and kind != HOST},
        order=tuple(order),
    )


class _CudaPrecision(TorchFunctionMode):
    """Compute what CUDA's autocast computes in fp32 from fp32 copies of half-precision features, on tensors of the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if (
            func in FP32_ON_CUDA
            and torch.is_autocast_enabled("cpu")
            and args[0].dtype in HALF.values()
        ):
            args = (args[0].float(), *args[1:])
        return func(*args, **(kwargs or {}))


class _RealRanges(TorchFunctionMode):
    """Lets `torch.arange` make real tensors: MONAI's losses read the axes that they sum over from one, and a fake tensor has no values."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        is_range = func is torch.arange and all(isinstance(one, int) for one in args)
        with unset_fake_temporarily() if is_range else contextlib.nullcontext():
            return func(*args, **(kwargs or {}))


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _no_loss() -> float:
    """Closure that some optimisers require; the gradients are there already."""
    return 0.0


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimiser's state for all parameters by a step on gradients of zero.

    What this step leaves behind, in the optimiser's `state` or elsewhere, is what the optimiser
    keeps.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step(_no_loss)
    optimizer.zero_grad(set_to_none=True)


@contextlib.contextmanager
def _watch_parts(network: nn.Module, tracker: MemoryTracker) -> Iterator[dict[str, None]]:
    """Set the tracker's owner to the part of the network that runs, in forward and in backward; yields the parts that have run."""
    callers: list[Owner] = []
    running: list[str] = []
    order: dict[str, None] = {}

    def enter(name: str, _: nn.Module, args: Any) -> None:
        callers.append(tracker.now)
        running.append(name)
        if tracker.now.kind == BACKWARD or len(running) - (running[0] == BETWEEN) > 1:
            return  # a part that others share belongs to the one that calls it, and that recomputes it
        if name != BETWEEN:
            order.setdefault(name)
            tracker.take(args, name)
        tracker.now = Owner(tracker.now.kind, name)

    def leave(name: str, _: nn.Module, __: Any, result: Any) -> None:
        tracker.now = callers.pop()
        is_shared = len(running) - (running[0] == BETWEEN) > 1
        running.pop()
        # What the network returns is, as a rule, the result of a part, which has its hook.
        is_known = name == BETWEEN and isinstance(result, Tensor) and bool(result._backward_hooks)
        if isinstance(result, Tensor) and result.requires_grad and not is_known and not is_shared:
            # The gradient of the part's result is known: the backward pass of the part begins.
            result.register_hook(functools.partial(begin_backward, name))

    def begin_backward(name: str, _: Tensor) -> None:
        tracker.now = Owner(BACKWARD, name)

    with contextlib.ExitStack() as hooks:
        hooks.enter_context(network.register_forward_pre_hook(functools.partial(enter, BETWEEN)))
        for name, modules in named_parts(network).items():
            for module in modules:
                hooks.enter_context(
                    module.register_forward_pre_hook(functools.partial(enter, name))
                )
                hooks.enter_context(module.register_forward_hook(functools.partial(leave, name)))
        hooks.enter_context(network.register_forward_hook(functools.partial(leave, BETWEEN)))
        yield order


def _make_fake(network: nn.Module) -> None:
    """Replace the parameters and buffers of a network on the meta device by fake CPU tensors, within torch's fake mode."""
    made: dict[Tensor, Tensor] = {}  # a tensor that two modules share stays shared
    for module in network.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if tensor not in made:
                    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
                    made[tensor] = (
                        nn.Parameter(fake, tensor.requires_grad)
                        if isinstance(tensor, nn.Parameter)
                        else fake
                    )
                table[name] = made[tensor]  # type: ignore[assignment]


def _correct_norm_dtypes(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """Give the results of a fake norm the dtypes that the real kernels return.

    With half-precision features and fp32 weights the kernels keep the statistics in fp32 and return
    a half-precision gradient; torch 2.13's fake kernels do the opposite.
    """
    if func in NORM_WEIGHTS:
        features, weight = args[0], args[NORM_WEIGHTS[func]]
        if weight is not None and weight.dtype != features.dtype:
            out, *statistics = result
            return (out, *(values.to(weight.dtype) for values in statistics))
    if func is aten.native_group_norm_backward.default and result[0] is not None:
        return (result[0].to(args[1].dtype), *result[1:])
    return result


def _copied_bytes(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Bytes that nearest upsampling copies on a GPU: its kernel takes and gives contiguous tensors only."""
    if func not in (
        aten.upsample_nearest3d.default,
        aten.upsample_nearest3d.vec,
        aten.upsample_nearest3d_backward.default,
    ):
        return 0
    return sum(tensor.nbytes for tensor in (args[0], result) if not tensor.is_contiguous())


# Kernels copy their inputs into layouts of their own, which a count of tensors does not see.
# Measured: 1.1 to 2.1 times the live tensors over stems, norms, `refine`, precisions and
# processors.
WORKSPACE = 2.5


def forward_bytes_per_voxel(
    network: nn.Module,
    call: Callable[[Tensor], Tensor],
    image_shape: tuple[int, int, int, int, int],
    device: torch.device,
) -> float:
    """Count the peak bytes of a forward pass per voxel of its input.

    Args:
        network: Its weights are not counted.
        call: Runs the network on an image, in its precision.
        image_shape: (1, C, D, H, W) of the image, see `Traits.small_size`.
        device: Device of the network.

    Returns:
        Peak bytes of activations and logits per voxel, with the kernels' workspaces, without
        weights and image.
    """
    image = torch.zeros(image_shape, device=device)
    with torch.inference_mode(), MemoryTracker() as tracker:
        for tensor in (image, *network.parameters(), *network.buffers()):
            tracker.assign(tensor, "given")
        call(image)
    return (
        WORKSPACE * (tracker.peak_bytes - tracker.live_bytes("given")) / math.prod(image_shape[2:])
    )
