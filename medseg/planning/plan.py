"""Plan: memory and time of a run before it starts, and the switches that fit into a budget."""

import functools
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from medseg.config.schema import PlanConfig
from medseg.console import say
from medseg.data.spacing import find_spacing
from medseg.errors import EXIT_FAILED, require
from medseg.geometry.sizes import Shape
from medseg.io.atomic import replace_text
from medseg.memory.accounting import StepMemory
from medseg.planning.estimate import STEP, VALIDATION, Estimate, Machine, estimate
from medseg.planning.fit import fit
from medseg.planning.step import (
    count_memory,
    evaluated_shape,
    evaluation_bytes,
    input_shape,
    largest_batch,
    num_shares,
    samples_per_rank,
)
from medseg.runs.plans import past_errors, write_plan
from medseg.training.optimisation import propose_lr

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
    """Print memory and time of a run, compare it with `memory.budget_gib`, or find the switches that fit into `fit_gib`.

    Returns:
        0, or 1 if the step does not fit into the budget or nothing does.
    """
    budget_gib = config.memory.budget_gib
    require(
        not config.largest_batch or budget_gib is not None,
        "largest_batch=true: memory.budget_gib is missing; give the GiB that a step may use",
    )
    require(
        config.fit_gib is None or (budget_gib is None and config.measure and not config.compute),
        "fit_gib searches for switches, while memory.budget_gib, measure=false and compute=true apply to a given "
        "configuration; leave them out",
    )
    require(
        config.max_seconds is None or config.fit_gib is not None,
        "max_seconds needs fit_gib: give the memory that a run may use",
    )
    find_spacing(config.spacing, config.data, config.task)
    shape = input_shape(config)
    if config.fit_gib is not None:
        return fit(config, shape)
    case_shape = evaluated_shape(config)
    if config.measure:
        found = estimate(config, shape, case_shape, Machine(config))
        memory = found.memory
    else:
        found, memory = None, count_memory(config, shape, compute=config.compute)
    case_bytes, pass_bytes = evaluation_bytes(config, case_shape)
    peaks = {STEP: memory.peak, VALIDATION: case_bytes + pass_bytes + memory.optimizer_state}
    peak_of = max(peaks, key=peaks.__getitem__)
    print("\n".join(plan_lines(config, shape, memory)), flush=True)
    print("\n".join(describe_peaks(config, case_shape, peaks)), flush=True)
    if found is not None:
        print("\n".join(describe_estimate(config, found)), flush=True)
        write_plan(
            config,
            {
                key: facts_of(memory, found)[key]
                for key in ("peak_resident_mib", "seconds_per_step")
            },
        )
        for sentence in past_errors():
            say(sentence)
    budget = math.inf if budget_gib is None else int(budget_gib * 2**30)
    batch_size = None
    if config.largest_batch:
        peak = functools.cache(lambda samples: count_memory(config, shape, samples=samples).peak)
        batch_size = num_shares(config) * largest_batch(peak, int(budget))
        rate = (
            f" optimizer.lr={propose_lr(config, batch_size):.3g}"
            if "lr" in config.optimizer
            else ""
        )
        proposed = f"stage.batch_size={batch_size}{rate}" if batch_size else "none"
        print(f"largest batch within memory.budget_gib={budget_gib:g}: {proposed}")
    fits = peaks[peak_of] <= budget
    if config.output is not None:
        facts = {
            "stage": config.stage.name.value, "shape": shape, "saved_per_voxel": memory.saved_per_voxel, **asdict(memory),
            "validation_peak_mib": round(peaks[VALIDATION] / 2**20, 2), "peak_of": peak_of,
            "budget_gib": budget_gib, "fits": fits, "largest_batch": batch_size, **facts_of(memory, found),
        }  # fmt: skip
        replace_text(Path(config.output), json.dumps(facts, indent=1))
    if not fits:
        cure = "find switches that fit with fit_gib in place of memory.budget_gib"
        if peak_of == VALIDATION and case_bytes > budget:
            cure = "give validation_shape=[D,H,W] of your largest case, or a coarser spacing"
        elif peak_of == VALIDATION:
            cure = "choose smaller tiles, inference.tile_size=[D,H,W]"
        say(
            f"the {peak_of} needs {peaks[peak_of] / 2**30:.2f} GiB and memory.budget_gib={budget_gib:g}: it does not fit; {cure}"
        )
    return 0 if fits else EXIT_FAILED


def describe_peaks(config: PlanConfig, case_shape: Shape, peaks: dict[str, int]) -> list[str]:
    """Format the live peaks of a training step and of a validation, and name the larger one."""
    tile = config.inference.tile_size
    parts = f"tiles of {'×'.join(map(str, tile))}" if tile else "whole"
    case = f"a case of {'×'.join(map(str, case_shape))} voxels, {parts}"
    peak_of = max(peaks, key=peaks.__getitem__)
    return [
        f"{'peak of the validation':52s}{peaks[VALIDATION] / 2**20:10.1f} MiB            {case}",
        f"the peak of the run is that of the {peak_of}; a prediction computes a case as the validation does",
    ]


def facts_of(memory: StepMemory, found: Estimate | None) -> dict[str, Any]:
    """Numbers for the file of a plan; those that need measurements are null without them."""
    return {
        "saved_bytes_per_voxel": memory.saved_per_voxel,
        "peak_live_mib": round(memory.peak / 2**20, 2),
        "peak_allocator_mib": None if found is None else round(found.peak_allocator / 2**20, 2),
        "peak_resident_mib": None if found is None else round(found.peak_resident / 2**20, 2),
        "seconds_per_step": None if found is None else round(found.seconds_per_step, 4),
        **({} if found is None else {
            "allocator_mib": {phase: round(size / 2**20, 2) for phase, size in found.allocator.items()},
            "resident_mib": {phase: round(size / 2**20, 2) for phase, size in found.resident.items()},
            "compute_seconds": round(found.compute_seconds, 4),
            "other_seconds": round(found.other_seconds, 4),
            "loader_seconds": round(found.loader_seconds, 4),
        }),
    }  # fmt: skip


def describe_estimate(config: PlanConfig, found: Estimate) -> list[str]:
    """Format an estimate: peaks by phase, seconds of a step, of an interval between validations and of the run."""

    def row(name: str, sizes: dict[str, int]) -> list[str]:
        lines = [f"{name:52s}{max(sizes.values()) / 2**20:10.1f} MiB"]
        return lines + [
            f"{'  ' + phase:52s}{size / 2**20:10.1f} MiB"
            for phase, size in sizes.items()
            if size > 0
        ]

    seconds, steps = found.seconds_per_step, config.steps
    interval = min(config.stage.validate_every, steps)
    resident = (
        "GPU memory" if "checkpoint" not in found.resident else "resident memory of all processes"
    )
    return [
        *row("peak of torch's allocator, with workspaces", found.allocator),
        *row(f"peak of the {resident}", found.resident),
        f"{'seconds per step':52s}{seconds:10.3f} s    {found.compute_seconds:.3f} s of computation, {found.other_seconds:.3f} s of the training loop, "
        f"{found.loader_seconds:.3f} s of making samples in {found.num_workers} loader process{'es' * (found.num_workers != 1)}",
        f"{f'seconds per {interval} steps, without validation':52s}{seconds * interval:10.1f} s",
        f"{f'seconds until the end ({steps} steps)':52s}{seconds * steps:10.1f} s    "
        f"{seconds * steps * found.peak_resident / 1e9:.0f} GB·s",
    ]


def plan_lines(config: PlanConfig, shape: Shape, memory: StepMemory) -> list[str]:
    """Format the counts as lines of a table, with remarks on what they leave out."""
    switches, trainer = config.memory, config.trainer

    def row(name: str, size: int, note: str = "") -> str:
        return f"{name:52s}{size / 2**20:10.1f} MiB{size / memory.voxels:10.2f}  {note}".rstrip()

    has_ranks = trainer.devices * trainer.num_nodes > 1
    remarks = {
        "Live tensors are counted. A device needs some more for the workspaces of its libraries.": not config.measure,
        "memory.compile=true: counted uncompiled; compiled code often keeps less for the backward pass.": switches.compile,
        f"trainer: counted per rank; DDP adds buckets of {memory.gradients / 2**20:.1f} MiB for the gradients.": has_ranks,
        "model.device_map: counted over all of its devices together.": config.model["device_map"]
        is not None,
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
        *(
            row(f"  {AT_PEAK[kind]}", memory.peak_live[kind])
            for kind in AT_PEAK
            if kind in memory.peak_live
        ),
        "",
        *(remark for remark, holds in remarks.items() if holds),
    ]
