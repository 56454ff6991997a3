"""Count the memory of one training step: forward, backward, optimiser."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from medseg.memory.accounting.ledger import HOST, Ledger, Owner
from medseg.memory.parts import named_parts
from medseg.memory.precision import HALF

PARAMETERS, GRADIENTS, OPTIMIZER, INPUT, TARGET = "parameters", "gradients", "optimizer state", "input", "target"
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
LOSS = "loss"


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a training step on one device.

    Attributes:
        voxels: Voxels of the input, all samples of a micro-batch together.
        parameters: Parameters and buffers.
        gradients: Gradients of the parameters.
        optimizer_state: What the optimiser keeps from step to step, and the average of the weights where there is one.
        input: The image.
        target: The reference.
        saved: What autograd keeps from forward to backward, by the part of the network that made it, in order.
        offloaded: What waits in host memory instead.
        peak: Largest sum of live bytes during a step.
        peak_at: What was going on at the peak: `forward`, `backward` or `update`, and the part of the network.
        peak_live: The bytes at the peak by kind: the five above, `forward` (activations), `backward` (gradients of
            activations and recomputed activations) and `update` (temporaries of the optimiser).
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

    @property
    def saved_bytes(self) -> int:
        """Bytes that autograd keeps from forward to backward, input and target left out."""
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
    call: Callable[[nn.Module, Tensor], Tensor] = lambda network, image: network(image),
    compute: bool = False,
) -> StepMemory:
    """Count the memory of a training step as it is from the second step on.

    The step runs on torch's fake tensors: all operations are dispatched, none is computed and nothing is allocated.
    The counts are those of the CPU's graph. A GPU keeps the same, but for what its libraries add: workspaces, cuDNN's
    reserve of a norm, and fp32 copies where CUDA's autocast wants them (group norm).

    Args:
        make_network: Makes the network with its switches applied. Its parts are those of its method `blocks()`, or its
            children where it has none.
        image_shape: (N, C, D, H, W) of a micro-batch.
        loss: Called as `loss(logits, target)`, the target uint8 (N, D, H, W).
        make_optimizer: From parameters to an optimiser.
        precision: Number format of forward and backward, see `medseg.memory.precision`.
        accumulate: Micro-batches per optimiser step.
        averages: Keep a moving average of the weights.
        call: Gives the logits of a network for an image.
        compute: Allocate and compute everything on the CPU instead: slow, and the same result.

    Returns:
        The counts.

    Raises:
        ValueError: If something decides by the values that it computes and so cannot be counted.
    """
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
        UnsupportedOperatorException,
    )

    from medseg.memory.accounting.fake import correct, replace_tensors

    with torch.device("cpu" if compute else "meta"):
        network = make_network().train()
    mode: AbstractContextManager[Any] = contextlib.nullcontext()
    if not compute:
        # What a call brings along, such as a region's number, may be real.
        mode = FakeTensorMode(allow_non_fake_inputs=True)
    ledger = Ledger(None if compute else correct)
    try:
        with mode:
            if not compute:
                replace_tensors(network)
            with ledger, _watch_parts(network, ledger):
                return _count(network, image_shape, ledger, loss, make_optimizer, precision, accumulate, averages, call)
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        raise ValueError(f"the memory cannot be counted without computing: {error}") from error


def _count(
    network: nn.Module,
    image_shape: tuple[int, int, int, int, int],
    ledger: Ledger,
    loss: nn.Module,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    precision: str,
    accumulate: int,
    averages: bool,
    call: Callable[[nn.Module, Tensor], Tensor],
) -> StepMemory:
    for tensor in (*network.parameters(), *network.buffers()):
        ledger.assign(tensor, PARAMETERS)
    ledger.now = Owner(OPTIMIZER)
    optimizer = make_optimizer(network.parameters())
    _make_state(optimizer)
    _average = [tensor.clone() for tensor in network.state_dict().values() if averages and torch.is_floating_point(tensor)]
    optimizer_state = ledger.live_bytes(OPTIMIZER)
    for parameter in network.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: ledger.assign(p.grad, GRADIENTS))
    image = torch.zeros(image_shape)
    target = torch.zeros((image_shape[0], *image_shape[2:]), dtype=torch.uint8)
    ledger.assign(image, INPUT)
    ledger.assign(target, TARGET)
    saved: dict[str, int] = {}
    offloaded = 0
    ledger.restart_peak()
    # The second micro-batch is the first that finds gradients; the others are like it.
    for _ in range(min(accumulate, 2)):
        ledger.now = Owner(FORWARD, LOSS)
        with torch.autocast("cpu", HALF.get(precision), enabled=precision in HALF):
            value = loss(call(network, image), target)
        offloaded = ledger.live_bytes(HOST)
        saved = {owner.part: size for owner, size in ledger.live.items() if owner.kind == FORWARD and size}
        ledger.now = Owner(BACKWARD, LOSS)
        value.backward()
        del value
    gradients = ledger.live_bytes(GRADIENTS)
    ledger.now = Owner(UPDATE)
    optimizer.step(_no_loss)
    peak_live: dict[str, int] = {}
    for owner, size in ledger.peak_live.items():
        if owner.kind != HOST:
            peak_live[owner.kind] = peak_live.get(owner.kind, 0) + size
    return StepMemory(
        voxels=image_shape[0] * math.prod(image_shape[2:]),
        parameters=ledger.live_bytes(PARAMETERS),
        gradients=gradients,
        optimizer_state=optimizer_state,
        input=ledger.live_bytes(INPUT),
        target=ledger.live_bytes(TARGET),
        saved={part: saved[part] for part in [*named_parts(network), LOSS] if part in saved},
        offloaded=offloaded,
        peak=ledger.peak_bytes,
        peak_at=f"{ledger.peak_now.kind} {ledger.peak_now.part}".strip(),
        peak_live={kind: size for kind, size in peak_live.items() if size},
    )


def _no_loss() -> float:
    """The closure that some optimisers ask for; the gradients are there already."""
    return 0.0


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimiser make its state for all parameters, by a step on gradients of zero.

    Whatever is left of it, in the optimiser's `state` or elsewhere, is what it keeps.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(_no_loss)
    optimizer.zero_grad(set_to_none=True)


@contextlib.contextmanager
def _watch_parts(network: nn.Module, ledger: Ledger) -> Iterator[None]:
    """Tell the ledger which part is at work, in forward and in backward."""
    handles: list[Any] = []

    def follow(name: str, module: nn.Module) -> Iterable[Any]:
        callers: list[Owner] = []

        def enter(*_: Any) -> None:
            callers.append(ledger.now)
            ledger.now = Owner(ledger.now.kind, name)

        def leave(_: nn.Module, __: Any, result: Any) -> None:
            ledger.now = callers.pop()
            if isinstance(result, Tensor) and result.requires_grad:
                # The gradient of what a part returned: its backward begins.
                result.register_hook(begin_backward)

        def begin_backward(_: Tensor) -> None:
            ledger.now = Owner(BACKWARD, name)

        return module.register_forward_pre_hook(enter), module.register_forward_hook(leave)

    for name, modules in named_parts(network).items():
        for module in modules:
            handles += follow(name, module)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
