"""Choice of switches: the fastest set within a budget, the Pareto front of peak and seconds, and the effect of each switch."""

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from medseg.config.overrides import text_of
from medseg.config.schema import Allow, PlanConfig
from medseg.console import say
from medseg.geometry.sizes import Shape
from medseg.losses.sample_losses import is_batch_loss
from medseg.memory.device import pick_device_type
from medseg.memory.options import Precision
from medseg.memory.precision import has_fast_bf16
from medseg.memory.tracker import Timeline
from medseg.models.options import UNET, is_batch_norm
from medseg.planning.estimate import STEP, Estimate, Machine, estimate_beside
from medseg.planning.recomputation import StepModel
from medseg.planning.step import count_memory, evaluated_shape, samples_per_rank
from medseg.targets import TARGET
from medseg.training.extensions import make_loss
from medseg.training.network import find_divisor, make_network_on_meta

# The estimate of the resident memory may be too low by this part, which a chosen set must have to
# spare.
MARGIN = 0.05
FRONT_STEP = 0.01


class Option(NamedTuple):
    """A set of switches with its peak and its seconds.

    Attributes:
        switches: Keys and values.
        peak: Resident bytes of all processes; on a GPU, bytes of the card.
        seconds: Duration of a step.
    """

    switches: dict[str, Any]
    peak: int
    seconds: float


@dataclass(frozen=True)
class Candidate:
    """Values of all switches but the recomputed blocks, with the model of the step that they make.

    Attributes:
        config: Configuration with these values.
        model: Peak and seconds by recomputed blocks.
        beside: Estimate of memory and time outside the step.
    """

    config: PlanConfig
    model: StepModel
    beside: Estimate

    def fastest(self, budget: int) -> Option | None:
        """Find the fastest set of recomputed blocks within a budget of resident bytes; None if no set fits."""
        if self.beside.peak_resident > budget:
            return None
        blocks = self.model.fastest(budget - self.beside.resident[STEP])
        return None if blocks is None else self.option(blocks)

    def option(self, blocks: Collection[str]) -> Option:
        """Find peak and seconds with some blocks recomputed."""
        peak = self.model.peak(blocks)
        found = self.beside.with_step(peak, peak, self.model.duration(blocks))
        return Option(
            switches_of(self.config, blocks, self.model.blocks),
            found.peak_resident,
            found.seconds_per_step,
        )


def switches_of(
    config: PlanConfig, blocks: Collection[str], all_blocks: Sequence[str]
) -> dict[str, Any]:
    """Keys and values of the switches that are chosen."""
    memory = config.memory
    return {
        "memory.precision": memory.precision.value,
        "memory.channels_last": memory.channels_last,
        "memory.checkpointing": "none"
        if not blocks
        else "all"
        if len(blocks) == len(all_blocks)
        else list(blocks),
        "memory.accumulate": memory.accumulate,
        **(
            {"memory.offload": memory.offload}
            if pick_device_type(config.trainer.accelerator) == "cuda"
            else {}
        ),
    }


def combinations(config: PlanConfig) -> Iterator[PlanConfig]:
    """Vary precision, layout, micro-batches and offloading as far as `allow` says, the one that needs the least memory last."""
    is_gpu = pick_device_type(config.trainer.accelerator) == "cuda"
    fast = [Precision.fp32, Precision.bf16] if is_gpu or has_fast_bf16() else [Precision.fp32]
    precisions = [config.memory.precision, *(fast if config.allow is not Allow.same_result else ())]
    samples = samples_per_rank(config) * config.memory.accumulate
    # A norm or a loss that looks at the whole micro-batch computes something else on smaller ones.
    is_divisible = not is_batch_norm(config.model) and not is_batch_loss(make_loss(config))
    parts = [
        one
        for one in range(1, samples + 1)
        if samples % one == 0 and (is_divisible or one == config.memory.accumulate)
    ]
    ordered = sorted(dict.fromkeys(precisions), key=list(Precision).index)
    layouts = (False, True)
    places = (False, True) if is_gpu else (False,)
    for precision, channels_last, accumulate, offload in itertools.product(
        ordered, layouts, parts, places
    ):
        memory = replace(
            config.memory,
            precision=precision,
            channels_last=channels_last,
            accumulate=accumulate,
            offload=offload,
            checkpointing="none",
        )
        yield replace(config, memory=memory)


def make_candidates(config: PlanConfig, shape: Shape, machine: Machine) -> list[Candidate]:
    """Make a candidate of each combination of switches.

    Steps without and with recomputation of all blocks are counted first. Then all of their
    operations are measured together: a processor that slows down in between would favour the
    combinations that were measured before.
    """
    counted = []
    variants = list(combinations(config))
    say(f"plan: counting the steps of {len(variants)} combinations of switches, some seconds each")
    for one in variants:
        plain, recomputed, blocks = Timeline(), Timeline(), list(make_network_on_meta(one).blocks())
        memory = count_memory(one, shape, timeline=plain)
        if blocks:
            count_memory(
                replace(one, memory=replace(one.memory, checkpointing="all")),
                shape,
                timeline=recomputed,
            )
        counted.append((one, memory, plain, recomputed if blocks else plain, blocks))
    machine.measure(*(timeline for _, _, *timelines, _ in counted for timeline in timelines))
    return [
        Candidate(
            one,
            StepModel(plain, recomputed, blocks, machine.costs, one.memory.accumulate),
            estimate_beside(one, shape, evaluated_shape(one), machine, memory, plain),
        )
        for one, memory, plain, recomputed, blocks in counted
    ]


def fastest_option(
    found: Sequence[Candidate], budget: int, max_seconds: float
) -> tuple[Candidate, Option] | None:
    """Choose the fastest set of switches within a budget of resident bytes; of equally fast ones, the one with the lower peak.

    The optimum of each candidate is proved, so the best of these optima is proved too.
    """
    options = [
        (one, option)
        for one in found
        if (option := one.fastest(budget)) is not None and option.seconds <= max_seconds
    ]
    return min(options, key=lambda pair: (pair[1].seconds, pair[1].peak), default=None)


def front(found: Sequence[Candidate]) -> list[Option]:
    """List the sets of switches that no other one beats in peak and seconds, in steps of a hundredth of the peak, the fastest first."""
    options: list[Option] = []
    for one in found:
        option: Option | None = one.option(())
        while option is not None:
            options.append(option)
            option = one.fastest(int(option.peak * (1 - FRONT_STEP)))
    best: list[Option] = []
    for option in sorted(options, key=lambda one: (one.seconds, one.peak)):
        if not best or option.peak < best[-1].peak:
            best.append(option)
    return best


def reasons(
    chosen: Candidate, option: Option, found: Sequence[Candidate]
) -> list[tuple[str, Option]]:
    """Undo each switch of a choice by itself: its name, and the peak and the seconds without it."""
    blocks = blocks_of(option, chosen.model.blocks)
    undone = [
        (f"recompute {block}", chosen.option([one for one in blocks if one != block]))
        for block in blocks
    ]
    for other in found:
        theirs, ours = other.option(blocks).switches, option.switches
        differing = [key for key in ours if ours[key] != theirs[key]]
        if len(differing) == 1:
            undone.append(
                (
                    f"{differing[0]}={text_of(ours[differing[0]])} instead of {text_of(theirs[differing[0]])}",
                    other.option(blocks),
                )
            )
    return undone


def blocks_of(option: Option, all_blocks: Sequence[str]) -> list[str]:
    """Blocks that a set of switches recomputes."""
    policy = option.switches["memory.checkpointing"]
    return list(all_blocks) if policy == "all" else [] if policy == "none" else policy


def closer_runs(
    config: PlanConfig, shape: Shape
) -> Iterator[tuple[dict[str, Any], PlanConfig, Shape]]:
    """Make other runs that need less memory, the one that sees the most voxels per step first.

    Yields:
        The changed keys, the configuration with them, and the voxels of its sample.
    """
    ranks = config.trainer.devices * config.trainer.num_nodes
    divisor, batch_size = find_divisor(config), config.stage.batch_size
    batches = [batch_size] + [
        batch_size // 2**n
        for n in range(1, 10)
        if batch_size // 2**n >= ranks and batch_size % (2**n * ranks) == 0
    ]
    shapes = [shape]
    for share in (7 / 8, 3 / 4, 5 / 8, 1 / 2, 3 / 8, 1 / 4):
        depth, height, width = (
            max(step * 2, int(length * share) // step * step)
            for length, step in zip(shape, divisor, strict=True)
        )
        shapes.append((min(depth, shape[0]), min(height, shape[1]), min(width, shape[2])))
    widths = (
        [config.model["width"] // 2**n for n in range(3)]
        if config.model[TARGET] == UNET
        else [None]
    )
    variants = itertools.product(dict.fromkeys(widths), batches, dict.fromkeys(shapes))
    # The width last: it changes the network.
    for width, batch, patch in sorted(
        variants, key=lambda one: (-(one[0] or 0), -one[1] * math.prod(one[2]))
    ):
        changes: dict[str, Any] = {}
        changed = replace(config, memory=replace(config.memory, accumulate=1))
        if width != config.model.get("width"):
            changes["model.width"] = width
            changed = replace(changed, model={**config.model, "width": width})
        if batch != batch_size:
            changes["stage.batch_size"] = batch
        if patch != shape:
            changes["stage.patch_size"] = list(patch)
        changed = replace(
            changed,
            stage=replace(
                config.stage,
                batch_size=batch,
                patch_size=patch if patch != shape else config.stage.patch_size,
            ),
            shape=None,
        )
        if changes:
            yield changes, changed, patch


def choose_line(option: Option, changes: dict[str, Any]) -> str:
    """Write a set of switches as arguments of `train`."""
    return " ".join(
        f"{key}={text_of(value)}" for key, value in {**changes, **option.switches}.items()
    )
