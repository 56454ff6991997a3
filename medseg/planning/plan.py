"""Plan: the memory of a training step, counted part by part before anything runs."""

import functools
import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn

from medseg.build.device import pick_device_type
from medseg.build.extensions import make_loss
from medseg.build.network import find_divisor, make_network
from medseg.build.optimisation import make_scheduled_optimizer, propose_lr
from medseg.build.spacing import find_spacing
from medseg.build.switches import switch_on
from medseg.build.task import make_task
from medseg.config.schema import PlanConfig, SpacingStrategy, Strategy, TrainConfig
from medseg.console import say
from medseg.errors import EXIT_FAILED, UserError, first_line, require
from medseg.io.atomic import replace_text
from medseg.memory.accounting import StepMemory, count_step

Shape = tuple[int, int, int]

# Kind of memory at the peak to its row in the table.
AT_PEAK = {
    "parameters": "parameters",
    "gradients": "gradients of parameters",
    "optimizer state": "optimiser state",
    "input": "input",
    "target": "target",
    "forward": "activations",
    "backward": "gradients of activations, recomputed activations",
    "update": "the optimiser's intermediate results",
}


def plan(config: PlanConfig) -> int:
    """Print the memory of a training step and compare it with `memory.budget_gib`.

    Returns:
        0, or 1 if the step does not fit into the budget.
    """
    budget_gib = config.memory.budget_gib
    require(
        not config.largest_batch or budget_gib is not None,
        "largest_batch=true: memory.budget_gib is missing; give the GiB that a step may use",
    )
    find_spacing(config.spacing, config.data, config.task)
    shape = input_shape(config)
    memory = count_memory(config, shape, compute=config.compute)
    print("\n".join(describe(config, shape, memory)), flush=True)
    budget = math.inf if budget_gib is None else int(budget_gib * 2**30)
    batch_size = None
    if config.largest_batch:
        peak = functools.cache(lambda samples: count_memory(config, shape, samples=samples).peak)
        batch_size = num_shares(config) * largest_batch(peak, int(budget))
        rate = f" optimizer.lr={propose_lr(config, batch_size):.3g}" if "lr" in config.optimizer else ""
        found = f"stage.batch_size={batch_size}{rate}" if batch_size else "none"
        print(f"largest batch within memory.budget_gib={budget_gib:g}: {found}")
    fits = memory.peak <= budget
    if config.output is not None:
        facts = {
            "stage": config.stage.name.value, "shape": shape, "saved_per_voxel": memory.saved_per_voxel, **asdict(memory),
            "budget_gib": budget_gib, "fits": fits, "largest_batch": batch_size,
        }  # fmt: skip
        replace_text(Path(config.output), json.dumps(facts, indent=1))
    if not fits:
        say(f"a step needs {memory.peak / 2**30:.2f} GiB and memory.budget_gib={budget_gib:g}: it does not fit")
    return 0 if fits else EXIT_FAILED


def count_memory(
    config: TrainConfig,
    shape: Shape,
    make_baseline: Callable[[], nn.Module] | None = None,
    *,
    samples: int | None = None,
    compute: bool = False,
) -> StepMemory:
    """Count the memory of a training step of a configuration.

    Args:
        config: Checked configuration.
        shape: Voxels of a sample, (D, H, W).
        make_baseline: Builds a network that replaces the configured one and is called with the image alone.
        samples: Samples of a micro-batch; None = those of the configuration.
        compute: See `count_step`.

    Raises:
        UserError: If the network does not accept the shape, or a part cannot be counted.
    """
    memory, samples = config.memory, samples or samples_per_rank(config)
    region = torch.zeros(samples, dtype=torch.int64)
    # Compiled code chooses what it saves, which cannot be counted: the network is counted before compilation.
    uncompiled = replace(memory, compile=False)
    is_gpu = memory.offload or pick_device_type(config.trainer.accelerator) == "cuda"

    def make_ours() -> nn.Module:
        return switch_on(
            make_network(config), uncompiled, "cuda" if is_gpu else "cpu", sync_batchnorm=config.trainer.sync_batchnorm
        )

    try:
        return count_step(
            make_baseline or make_ours,
            (samples, len(make_task(config.task).channels), *shape),
            loss=make_loss(config),
            make_optimizer=make_scheduled_optimizer(config),
            precision=memory.precision.value,
            accumulate=memory.accumulate,
            averages=config.ema_decay is not None,
            call=lambda network, image: network(image) if make_baseline else network(image, region),
            compute=compute,
            is_gpu=is_gpu and not compute,
        )
    except ValueError as error:
        raise UserError(f"plan: {error}") from error
    except (RuntimeError, TypeError) as error:
        # A loss or an optimiser of another package may leave torch, which fake tensors do not allow.
        if compute:
            raise
        raise UserError(
            f"plan: a part cannot be counted without computing it ({first_line(error)}); give compute=true"
        ) from error


def largest_batch(peak: Callable[[int], int], budget: int) -> int:
    """Find the largest number of samples whose step fits: a linear estimate, then exact counts around it.

    Args:
        peak: Bytes of a step by number of samples; must not fall.
        budget: Bytes that the step may use.

    Returns:
        Number of samples; 0 if one does not fit.
    """
    # Growth is linear from two samples on; one sample may do without a copy that several need.
    two, three = peak(2), peak(3)
    samples = max(1, 2 + (budget - two) // (three - two))
    while samples and peak(samples) > budget:
        samples -= 1
    while peak(samples + 1) <= budget:
        samples += 1
    return samples


def samples_per_rank(config: TrainConfig) -> int:
    """Number of samples in a micro-batch of one rank."""
    return config.stage.batch_size // num_shares(config)


def num_shares(config: TrainConfig) -> int:
    """Number of micro-batches of a step, over all ranks."""
    return config.trainer.devices * config.trainer.num_nodes * config.memory.accumulate


def input_shape(config: PlanConfig) -> Shape:
    """Voxels (D, H, W) of the sample to plan for: `shape`, the stage's patch, the size of all crops, or `extent_mm` at its spacing."""
    known = config.shape or config.stage.patch_size or config.spacing.size
    if known is not None:
        return known
    spacing_mm, range_mm = config.spacing.target_spacing_mm, config.spacing.range_mm
    if range_mm is not None:
        spacing_mm = (range_mm[0], range_mm[0], range_mm[0])  # the finest spacing gives the largest sample
    if spacing_mm is None:
        raise UserError(
            "plan: spacing.strategy=native has no spacing to count voxels with; give shape=[D,H,W] of the sample to plan for"
        )
    extent_mm = getattr(config.extent_mm, config.stage.name.value)
    depth, height, width = (math.ceil(mm / voxel_mm) for mm, voxel_mm in zip(extent_mm, spacing_mm, strict=True))
    if config.spacing.strategy is SpacingStrategy.fixed_resolution:
        depth = height = width = max(depth, height, width)
    if config.stage.max_voxels:
        depth = min(depth, max(1, config.stage.max_voxels // (height * width)))
    divisors = zip((depth, height, width), find_divisor(config), strict=True)
    depth, height, width = (math.ceil(size / divisor) * divisor for size, divisor in divisors)
    return depth, height, width


def describe(config: TrainConfig, shape: Shape, memory: StepMemory) -> list[str]:
    """Format the counts as lines of a table, with remarks on what they leave out."""
    switches, trainer = config.memory, config.trainer

    def row(name: str, size: int, note: str = "") -> str:
        return f"{name:52s}{size / 2**20:10.1f} MiB{size / memory.voxels:10.2f}  {note}".rstrip()

    has_ranks, is_fsdp = trainer.devices * trainer.num_nodes > 1, trainer.strategy is Strategy.fsdp
    remarks = {
        "Live tensors are counted. A device needs some more for the workspaces of its libraries.": True,
        "memory.compile=true: counted before compilation, which often saves less.": switches.compile,
        "trainer=fsdp: counted before weights, gradients and optimiser state are divided among the ranks.": has_ranks and is_fsdp,
        f"trainer: per rank; DDP adds buckets of {memory.gradients / 2**20:.1f} MiB for the gradients.": has_ranks
        and not is_fsdp,
        "model.device_map: counted over all of its devices together.": config.model["device_map"] is not None,
    }
    return [
        f"{config.stage.name.value}: a step on {samples_per_rank(config)} × {'×'.join(map(str, shape))} voxels, "
        f"{switches.precision.value}, checkpointing {switches.checkpointing}",
        "",
        f"{'':66s}bytes/voxel",
        row("parameters", memory.parameters),
        row("gradients", memory.gradients),
        row("optimiser state", memory.optimizer_state),
        row("input", memory.input),
        row("target", memory.target),
        row("saved from forward to backward", memory.saved_bytes),
        *(row(f"  {part}", size) for part, size in memory.saved.items()),
        *([row("offloaded to host memory", memory.offloaded)] if memory.offloaded else []),
        row("peak of the step", memory.peak, f"in {memory.peak_at}"),
        *(row(f"  {AT_PEAK[kind]}", memory.peak_live[kind]) for kind in AT_PEAK if kind in memory.peak_live),
        "",
        *(remark for remark, holds in remarks.items() if holds),
    ]
