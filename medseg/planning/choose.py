"""Choice of switches: the fastest set within a budget, the Pareto front, each switch's effect."""

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch.nn.modules.batchnorm import _BatchNorm

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
from medseg.models.options import UNET
from medseg.planning.estimate import Estimate, Machine, estimate_beside
from medseg.planning.recomputation import StepModel
from medseg.planning.step import count_memory, evaluated_shape
from medseg.targets import TARGET
from medseg.training.extensions import make_loss
from medseg.training.network import find_divisor, make_network_on_meta
from medseg.training.options import samples_per_micro_batch

# The estimate of the resident memory may be too low by this share. A chosen set must leave as much
# of the budget free.
MARGIN = 0.05
# Share of the peak by which each point of a candidate's front lies below the one before.
FRONT_STEP = 0.01
# Shares of a patch's lengths that are tried where the whole patch does not fit.
PATCH_SHARES = (7 / 8, 3 / 4, 5 / 8, 1 / 2, 3 / 8, 1 / 4)


class Option(NamedTuple):
    """A set of switches with its peak and its seconds.

    Attributes:
        switches: Value of each switch by its key, as in `memory.precision`.
        peak: Resident bytes of all processes; on a GPU, bytes of the card.
        seconds: Duration of a step.
    """

    switches: dict[str, Any]
    peak: int
    seconds: float


@dataclass(frozen=True)
class Candidate:
    """Values of all switches but the recomputed blocks, with the model of a step with them.

    Attributes:
        config: Configuration with these values.
        model: Peak and seconds of the step by recomputed blocks.
        beside: Estimate of the run without the tensors and the duration of the step.
    """

    config: PlanConfig
    model: StepModel
    beside: Estimate

    def fastest(self, budget: int) -> Option | None:
        """Find the fastest recomputed blocks within a budget of resident bytes; None: none fit."""
        # A phase other than the step, such as the validation, may exceed the budget by itself.
        if self.beside.peak_resident > budget:
            return None
        # The model only knows the tensors of the step, not the other memory of the run.
        blocks = self.model.fastest(self.beside.room_for_step(budget))
        if blocks is None:
            return None
        return self.option(blocks)

    def option(self, blocks: Collection[str]) -> Option:
        """Predict peak and seconds of the run with some blocks recomputed."""
        step_peak = self.model.peak(blocks)
        # Only `run.peak_resident` is read, so the model's resident peak stands for both.
        run = self.beside.with_step(
            allocated=step_peak, resident=step_peak, seconds=self.model.duration(blocks)
        )
        switches = switches_of(self.config, blocks, self.model.blocks)
        return Option(switches, run.peak_resident, run.seconds_per_step)


def switches_of(
    config: PlanConfig, blocks: Collection[str], all_blocks: Sequence[str]
) -> dict[str, Any]:
    """List the values of the switches by key, with some blocks recomputed.

    Args:
        config: Configuration with all other switches.
        blocks: The recomputed blocks.
        all_blocks: All blocks of the network.
    """
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
    """Vary precision, layout, micro-batches and offloading as far as `allow` permits.

    The combination that needs the least memory comes last: the values of each switch are in the
    order of falling memory.
    """
    device_type = pick_device_type(config.trainer.accelerator)
    precisions = _precisions(config, device_type)
    layouts = (False, True)  # channels-last or not
    accumulations = _accumulations(config)
    offloadings = (False, True) if device_type == "cuda" else (False,)
    for precision, channels_last, accumulate, offload in itertools.product(
        precisions, layouts, accumulations, offloadings
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
    """List the precisions to try, the widest numbers first: in the order of `Precision`."""
    precisions = {config.memory.precision}
    if config.allow is not Allow.same_result:
        precisions.add(Precision.fp32)
        # Without instructions for bf16, a GPU has fp16; a processor would emulate both slowly.
        if has_fast_bf16(device_type):
            precisions.add(Precision.bf16)
        elif device_type == "cuda":
            precisions.add(Precision.fp16)
    return [precision for precision in Precision if precision in precisions]


def _accumulations(config: PlanConfig) -> list[int]:
    """List the numbers of micro-batches into which a step can be divided, ascending."""
    # A norm or a loss that looks at the whole micro-batch computes something else on smaller ones.
    # The modules tell, since many networks of MONAI have batch norm without an argument.
    modules = make_network_on_meta(config).modules()
    has_batch_norm = any(isinstance(module, _BatchNorm) for module in modules)
    if has_batch_norm or is_batch_loss(make_loss(config)):
        return [config.memory.accumulate]
    samples_per_step = samples_per_micro_batch(config) * config.memory.accumulate
    numbers = range(1, samples_per_step + 1)
    return [number for number in numbers if samples_per_step % number == 0]


def make_candidates(config: PlanConfig, shape: Shape, machine: Machine) -> list[Candidate]:
    """Make a candidate of each combination of switches.

    Steps without and with recomputation of all blocks are counted first. Then all of their
    operations are measured together: if each combination were measured by itself, a processor that
    slows down in between would favour the first ones.
    """
    machine.prepare_for(config)
    variants = list(combinations(config))
    say(f"plan: counting the steps of {len(variants)} combinations of switches, some seconds each")
    counts = [_count_variant(variant, shape) for variant in variants]
    timelines: list[Timeline] = []
    for count in counts:
        timelines += [count.plain, count.recomputed]
    machine.measure(*timelines)
    candidates = []
    for variant, count in zip(variants, counts, strict=True):
        model = StepModel(
            count.plain,
            count.recomputed,
            blocks=count.blocks,
            costs=machine.costs,
            accumulate=variant.memory.accumulate,
        )
        beside = estimate_beside(
            variant,
            shape,
            validation_shape=evaluated_shape(variant),
            machine=machine,
            memory=count.memory,
            timeline=count.plain,
        )
        candidates.append(Candidate(variant, model, beside))
    return candidates


class _VariantCount(NamedTuple):
    """Counted steps of a combination of switches, without and with recomputation of all blocks.

    Attributes:
        memory: Count of the step without recomputation.
        plain: Its operations.
        recomputed: Operations of the step with recomputation of all blocks.
        blocks: Names of all blocks of the network.
    """

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

    Of equally fast sets, it is the one with the lower peak. The optimum of each candidate is
    proved, so the best of these optima is proved too.

    Returns:
        The set and its candidate; None if no set fits or is fast enough.
    """
    best: tuple[Candidate, Option] | None = None
    best_rank = (math.inf, math.inf)
    for candidate in candidates:
        option = candidate.fastest(budget)
        if option is None or option.seconds > max_seconds:
            continue
        rank = (option.seconds, option.peak)
        if rank < best_rank:
            best = (candidate, option)
            best_rank = rank
    return best


def front(candidates: Sequence[Candidate]) -> list[Option]:
    """List the sets of switches that no other one beats in peak and seconds, the fastest first.

    This is the Pareto front. Each candidate is searched in steps of FRONT_STEP of the peak.
    """
    options: list[Option] = []
    for candidate in candidates:
        # The first set recomputes nothing; each next one is the fastest with a lower peak.
        option: Option | None = candidate.option(())
        while option is not None:
            options.append(option)
            option = candidate.fastest(int(option.peak * (1 - FRONT_STEP)))
    unbeaten: list[Option] = []
    for option in sorted(options, key=lambda option: (option.seconds, option.peak)):
        # All sets before are at least as fast, so this one must have a lower peak.
        if not unbeaten or option.peak < unbeaten[-1].peak:
            unbeaten.append(option)
    return unbeaten


def reasons(
    chosen: Candidate, option: Option, candidates: Sequence[Candidate]
) -> list[tuple[str, Option]]:
    """Undo each switch of a choice by itself.

    Args:
        chosen: Candidate of the choice.
        option: The choice.
        candidates: All candidates.

    Returns:
        For each switch a pair: its name, and the set of switches without it, with the set's peak
        and seconds.
    """
    blocks = blocks_of(option, chosen.model.blocks)
    undone = []
    for block in blocks:
        other_blocks = [name for name in blocks if name != block]
        undone.append((f"recompute {block}", chosen.option(other_blocks)))
    for candidate in candidates:
        alternative = candidate.option(blocks)
        differing_keys = []
        for key, value in option.switches.items():
            if alternative.switches[key] != value:
                differing_keys.append(key)
        # Only a candidate that differs in a single switch shows the effect of this switch.
        if len(differing_keys) != 1:
            continue
        (key,) = differing_keys
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


def smaller_runs(
    config: PlanConfig, shape: Shape
) -> Iterator[tuple[dict[str, Any], PlanConfig, Shape]]:
    """Make other runs that need less memory, the one that sees the most voxels per step first.

    Runs with a smaller width come after all others, because that makes another network.

    Yields:
        The values of the changed keys, the configuration with them, and the voxels of its sample
        (D, H, W).
    """
    widths: list[int | None] = [None]  # None = as configured
    if config.model[TARGET] == UNET:
        full_width = config.model["width"]
        widths = [full_width // parts for parts in (1, 2, 4) if full_width >= parts]
    patches = _smaller_patches(shape, find_divisor(config))
    runs = itertools.product(widths, _smaller_batches(config), patches)

    def width_and_voxels(run: tuple[int | None, int, Shape]) -> tuple[int, int]:
        """Return the sort key of a run: width first, then voxels per step."""
        width, batch_size, patch = run
        # Without a width to vary, it is None in all runs.
        return width or 0, batch_size * math.prod(patch)

    for width, batch_size, patch in sorted(runs, key=width_and_voxels, reverse=True):
        changes: dict[str, Any] = {}
        model = config.model
        if width is not None and width != model["width"]:
            changes["model.width"] = width
            model = {**model, "width": width}
        if batch_size != config.stage.batch_size:
            changes["stage.batch_size"] = batch_size
        stage = replace(config.stage, batch_size=batch_size)
        inference = config.inference
        if patch != shape:
            changes["stage.patch_size"] = list(patch)
            stage = replace(stage, patch_size=patch)
            # Tiles of the size of a patch follow it, as those of inference=tiles do.
            if inference.tile_size and inference.tile_size == config.stage.patch_size:
                changes["inference.tile_size"] = list(patch)
                inference = replace(inference, tile_size=patch)
        if not changes:
            continue
        # `combinations` chooses numbers of micro-batches that divide the new batch size.
        memory = replace(config.memory, accumulate=1)
        # The key `shape` holds the size of the configured sample, which this run does not have, so
        # it is unset.
        smaller = replace(
            config, memory=memory, model=model, stage=stage, inference=inference, shape=None
        )
        yield changes, smaller, patch


def _smaller_batches(config: PlanConfig) -> list[int]:
    """Halve the batch size as long as the ranks share it evenly; the full one comes first."""
    num_ranks = config.trainer.num_ranks
    batch_sizes = [config.stage.batch_size]
    while batch_sizes[-1] % (2 * num_ranks) == 0:
        batch_sizes.append(batch_sizes[-1] // 2)
    return batch_sizes


def _smaller_patches(shape: Shape, divisor: Shape) -> list[Shape]:
    """Shrink a patch (D, H, W) to multiples of the divisor; the full one comes first."""
    patches = [shape]
    for share in PATCH_SHARES:
        lengths = []
        for length, step in zip(shape, divisor, strict=True):
            rounded_down = int(length * share) // step * step
            # With one times the divisor on every axis the deepest level would be a single voxel.
            at_least_two_steps = max(step * 2, rounded_down)
            # An axis that is shorter than that keeps its length.
            lengths.append(min(length, at_least_two_steps))
        depth, height, width = lengths
        patches.append((depth, height, width))
    # Without repetitions, in the same order.
    return list(dict.fromkeys(patches))


def choose_line(option: Option, changes: dict[str, Any]) -> str:
    """Write other changes of a run and a set of switches as arguments of `train`."""
    values = {**changes, **option.switches}
    return " ".join(f"{key}={text_of(value)}" for key, value in values.items())
