"""Choice of switches: the fastest set within a budget, the Pareto front, each switch's effect."""

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
from medseg.memory.accounting import StepMemory
from medseg.memory.device import pick_device_type
from medseg.memory.options import Precision
from medseg.memory.precision import has_fast_bf16
from medseg.memory.tracker import Timeline
from medseg.models.options import UNET, is_batch_norm
from medseg.planning.estimate import Estimate, Machine, estimate_beside
from medseg.planning.recomputation import StepModel
from medseg.planning.step import count_memory, evaluated_shape
from medseg.targets import TARGET
from medseg.training.extensions import make_loss
from medseg.training.network import find_divisor, make_network_on_meta
from medseg.training.options import samples_per_rank

# The estimate of the resident memory may be too low by this part, which a chosen set must have to
# spare.
MARGIN = 0.05
# Part of the peak by which each point of the front must lie below the one before.
FRONT_STEP = 0.01
# Parts of a patch's lengths that are tried where the whole patch does not fit.
PATCH_SHARES = (7 / 8, 3 / 4, 5 / 8, 1 / 2, 3 / 8, 1 / 4)


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
        """Find the fastest recomputed blocks within a budget of resident bytes; None: none fit."""
        if self.beside.peak_resident > budget:
            return None
        # The model knows the tensors of the step alone, not what lies beside them.
        blocks = self.model.fastest(self.beside.room_for_step(budget))
        if blocks is None:
            return None
        return self.option(blocks)

    def option(self, blocks: Collection[str]) -> Option:
        """Find peak and seconds with some blocks recomputed."""
        step_peak = self.model.peak(blocks)
        run = self.beside.with_step(step_peak, step_peak, self.model.duration(blocks))
        switches = switches_of(self.config, blocks, self.model.blocks)
        return Option(switches, run.peak_resident, run.seconds_per_step)


def switches_of(
    config: PlanConfig, blocks: Collection[str], all_blocks: Sequence[str]
) -> dict[str, Any]:
    """Keys and values of the switches that are chosen."""
    checkpointing: str | list[str] = list(blocks)
    if not blocks:
        checkpointing = "none"
    elif len(blocks) == len(all_blocks):
        checkpointing = "all"
    memory = config.memory
    switches = {
        "memory.precision": memory.precision.value,
        "memory.channels_last": memory.channels_last,
        "memory.checkpointing": checkpointing,
        "memory.accumulate": memory.accumulate,
    }
    # Offloading moves tensors from a GPU to the host, so only a GPU has the switch.
    if pick_device_type(config.trainer.accelerator) == "cuda":
        switches["memory.offload"] = memory.offload
    return switches


def with_switches(config: PlanConfig, option: Option) -> PlanConfig:
    """Give the configuration of a candidate the recomputed blocks of an option."""
    checkpointing = option.switches["memory.checkpointing"]
    return replace(config, memory=replace(config.memory, checkpointing=checkpointing))


def combinations(config: PlanConfig) -> Iterator[PlanConfig]:
    """Vary precision, layout, micro-batches and offloading as far as `allow` says.

    The combination that needs the least memory comes last.
    """
    device_type = pick_device_type(config.trainer.accelerator)
    layouts = (False, True)
    offloadings = (False, True) if device_type == "cuda" else (False,)
    for precision, channels_last, accumulate, offload in itertools.product(
        _precisions(config, device_type), layouts, _accumulations(config), offloadings
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


def _precisions(config: PlanConfig, device_type: str) -> list[Precision]:
    """List the precisions to try, in the order of the enumeration: the widest numbers first."""
    precisions = {config.memory.precision}
    if config.allow is not Allow.same_result:
        precisions.add(Precision.fp32)
        # Processors without instructions for bfloat16 emulate it slowly, and have no fp16.
        if has_fast_bf16(device_type):
            precisions.add(Precision.bf16)
        elif device_type == "cuda":
            precisions.add(Precision.fp16)
    return [precision for precision in Precision if precision in precisions]


def _accumulations(config: PlanConfig) -> list[int]:
    """List the numbers of micro-batches into which a step can be divided, ascending."""
    # A norm or a loss that looks at the whole micro-batch computes something else on smaller ones.
    if is_batch_norm(config.model) or is_batch_loss(make_loss(config)):
        return [config.memory.accumulate]
    samples = samples_per_rank(config) * config.memory.accumulate
    return [number for number in range(1, samples + 1) if samples % number == 0]


def make_candidates(config: PlanConfig, shape: Shape, machine: Machine) -> list[Candidate]:
    """Make a candidate of each combination of switches.

    Steps without and with recomputation of all blocks are counted first. Then all of their
    operations are measured together: a processor that slows down in between would favour the
    combinations that were measured before.
    """
    machine.prepare_for(config)
    variants = list(combinations(config))
    say(f"plan: counting the steps of {len(variants)} combinations of switches, some seconds each")
    counts = [_count_variant(variant, shape) for variant in variants]
    timelines: list[Timeline] = []
    for count in counts:
        timelines += (count.plain, count.recomputed)
    machine.measure(*timelines)
    candidates = []
    for variant, count in zip(variants, counts, strict=True):
        model = StepModel(
            count.plain, count.recomputed, count.blocks, machine.costs, variant.memory.accumulate
        )
        beside = estimate_beside(
            variant, shape, evaluated_shape(variant), machine, count.memory, count.plain
        )
        candidates.append(Candidate(variant, model, beside))
    return candidates


class _VariantCount(NamedTuple):
    """Counted steps of a combination of switches, without and with recomputation of all blocks."""

    memory: StepMemory
    plain: Timeline
    recomputed: Timeline
    blocks: list[str]


def _count_variant(variant: PlanConfig, shape: Shape) -> _VariantCount:
    blocks = list(make_network_on_meta(variant).blocks())
    plain = Timeline()
    memory = count_memory(variant, shape, timeline=plain)
    if not blocks:
        return _VariantCount(memory, plain, plain, blocks)
    recomputed = Timeline()
    recomputing = replace(variant, memory=replace(variant.memory, checkpointing="all"))
    count_memory(recomputing, shape, timeline=recomputed)
    return _VariantCount(memory, plain, recomputed, blocks)


def fastest_option(
    candidates: Sequence[Candidate], budget: int, max_seconds: float
) -> tuple[Candidate, Option] | None:
    """Choose the fastest set of switches within a budget of resident bytes.

    Of equally fast sets, the one with the lower peak. The optimum of each candidate is proved, so
    the best of these optima is proved too.
    """
    options = []
    for candidate in candidates:
        option = candidate.fastest(budget)
        if option is not None and option.seconds <= max_seconds:
            options.append((candidate, option))
    return min(options, key=lambda pair: (pair[1].seconds, pair[1].peak), default=None)


def front(candidates: Sequence[Candidate]) -> list[Option]:
    """List the sets of switches that no other one beats in peak and seconds, the fastest first.

    Each candidate is searched in steps of a hundredth of the peak.
    """
    options: list[Option] = []
    for candidate in candidates:
        option: Option | None = candidate.option(())
        while option is not None:
            options.append(option)
            option = candidate.fastest(int(option.peak * (1 - FRONT_STEP)))
    best: list[Option] = []
    for option in sorted(options, key=lambda option: (option.seconds, option.peak)):
        if not best or option.peak < best[-1].peak:
            best.append(option)
    return best


def reasons(
    chosen: Candidate, option: Option, candidates: Sequence[Candidate]
) -> list[tuple[str, Option]]:
    """Undo each switch of a choice by itself: its name, and the peak and the seconds without it."""
    blocks = blocks_of(option, chosen.model.blocks)
    undone = []
    for block in blocks:
        rest = [name for name in blocks if name != block]
        undone.append((f"recompute {block}", chosen.option(rest)))
    for candidate in candidates:
        alternative = candidate.option(blocks)
        # A candidate that differs in one switch shows what this switch does.
        differing = []
        for key, value in option.switches.items():
            if alternative.switches[key] != value:
                differing.append(key)
        if len(differing) != 1:
            continue
        (key,) = differing
        chosen_text = text_of(option.switches[key])
        alternative_text = text_of(alternative.switches[key])
        undone.append((f"{key}={chosen_text} instead of {alternative_text}", alternative))
    return undone


def blocks_of(option: Option, all_blocks: Sequence[str]) -> list[str]:
    """Blocks that a set of switches recomputes."""
    checkpointing = option.switches["memory.checkpointing"]
    if checkpointing == "all":
        return list(all_blocks)
    if checkpointing == "none":
        return []
    return checkpointing


def closer_runs(
    config: PlanConfig, shape: Shape
) -> Iterator[tuple[dict[str, Any], PlanConfig, Shape]]:
    """Make other runs that need less memory, the one that sees the most voxels per step first.

    The width is changed last, because that makes another network.

    Yields:
        The changed keys, the configuration with them, and the voxels of its sample.
    """
    widths: list[int | None] = [None]  # None = as configured
    if config.model[TARGET] == UNET:
        full_width = config.model["width"]
        widths = [full_width // parts for parts in (1, 2, 4) if full_width >= parts]
    patches = _smaller_patches(shape, find_divisor(config))
    runs = itertools.product(widths, _smaller_batches(config), patches)

    def size(run: tuple[int | None, int, Shape]) -> tuple[int, int]:
        width, batch_size, patch = run
        return width or 0, batch_size * math.prod(patch)

    for width, batch_size, patch in sorted(runs, key=size, reverse=True):
        changes: dict[str, Any] = {}
        model = config.model
        if width is not None and width != model["width"]:
            changes["model.width"] = width
            model = {**model, "width": width}
        if batch_size != config.stage.batch_size:
            changes["stage.batch_size"] = batch_size
        stage = replace(config.stage, batch_size=batch_size)
        if patch != shape:
            changes["stage.patch_size"] = list(patch)
            stage = replace(stage, patch_size=patch)
        if not changes:
            continue
        # Micro-batches are chosen anew: they must divide the new batch size.
        memory = replace(config.memory, accumulate=1)
        yield changes, replace(config, memory=memory, model=model, stage=stage, shape=None), patch


def _smaller_batches(config: PlanConfig) -> list[int]:
    """Halve the batch size as long as the ranks share it evenly; the full one comes first."""
    ranks = config.trainer.devices * config.trainer.num_nodes
    batches = [config.stage.batch_size]
    while batches[-1] % (2 * ranks) == 0:
        batches.append(batches[-1] // 2)
    return batches


def _smaller_patches(shape: Shape, divisor: Shape) -> list[Shape]:
    """Shrink a patch (D, H, W) to multiples of the divisor; the full one comes first."""
    patches = [shape]
    for share in PATCH_SHARES:
        lengths = []
        for length, step in zip(shape, divisor, strict=True):
            rounded_down = int(length * share) // step * step
            # With a single multiple on every axis the deepest level would be one voxel.
            lengths.append(min(length, max(step * 2, rounded_down)))
        depth, height, width = lengths
        patches.append((depth, height, width))
    return list(dict.fromkeys(patches))


def choose_line(option: Option, changes: dict[str, Any]) -> str:
    """Write a set of switches as arguments of `train`."""
    values = {**changes, **option.switches}
    return " ".join(f"{key}={text_of(value)}" for key, value in values.items())
