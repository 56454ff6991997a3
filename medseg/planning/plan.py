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
from medseg.errors import EXIT_FAILED, UserError
from medseg.geometry.sizes import Shape
from medseg.io.atomic import replace_text
from medseg.memory.accounting import StepMemory
from medseg.memory.device import use_supported_half
from medseg.planning.estimate import CHECKPOINT, STEP, VALIDATION, Estimate, Machine, estimate
from medseg.planning.fit import fit
from medseg.planning.step import (
    count_memory,
    evaluated_shape,
    evaluation_bytes,
    input_shape,
    keep_numbers,
    largest_batch,
)
from medseg.runs.plans import past_errors
from medseg.training.optimisation import propose_lr
from medseg.training.options import micro_batches_per_step, samples_per_micro_batch

MIB = 2**20
GIB = 2**30
# Name of the row of the table for each kind of memory at the peak, see `StepMemory.peak_live`.
PEAK_ROWS = {
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
    """Print memory and time of a run, or find the switches that fit into `fit_gib`.

    With `memory.budget_gib` the peak is compared with it.

    Returns:
        0, or 1 if the run does not fit into the budget, or no switches do.

    Raises:
        UserError: If keys contradict each other, one is missing, or a part of the step cannot be
            counted.
    """
    _check_keys(config)
    use_supported_half(config.memory, config.trainer.accelerator)
    find_spacing(config.spacing, config.data, config.task)
    shape = input_shape(config)
    if config.fit_gib is not None:
        return fit(config, shape)
    case_shape = evaluated_shape(config)
    run_estimate = None
    if config.measure:
        run_estimate = estimate(config, shape, case_shape, Machine(config))
        memory = run_estimate.memory
    else:
        memory = count_memory(config, shape, compute=config.compute)
    case_bytes, pass_bytes = evaluation_bytes(config, case_shape)
    # The optimiser's state stays in memory during a validation.
    peaks = {STEP: memory.peak, VALIDATION: case_bytes + pass_bytes + memory.optimizer_state}
    print("\n".join(plan_lines(config, shape, memory)), flush=True)
    print("\n".join(describe_peaks(config, case_shape, peaks)), flush=True)
    facts = facts_of(memory, run_estimate)
    if run_estimate is not None:
        print("\n".join(describe_estimate(config, run_estimate)), flush=True)
        predicted = {key: facts[key] for key in ("peak_resident_mib", "seconds_per_step")}
        # The run that follows is compared with these numbers.
        keep_numbers(config, predicted)
        for sentence in past_errors():
            say(sentence)
    budget_gib = config.memory.budget_gib
    budget: float = math.inf
    batch_size = None
    if budget_gib is not None:
        budget = int(budget_gib * GIB)
        if config.largest_batch:
            batch_size = _print_largest_batch(config, shape, budget)
    peak_phase = _peak_phase(peaks)
    fits = peaks[peak_phase] <= budget
    if config.output is not None:
        facts = {
            "stage": config.stage.name.value,
            "shape": shape,
            "saved_per_voxel": memory.saved_per_voxel,
            **asdict(memory),
            "validation_peak_mib": round(peaks[VALIDATION] / MIB, 2),
            "peak_of": peak_phase,
            "budget_gib": budget_gib,
            "fits": fits,
            "largest_batch": batch_size,
            **facts,
        }
        replace_text(Path(config.output), json.dumps(facts, indent=1))
    if fits:
        return 0
    say(
        f"the {peak_phase} needs {peaks[peak_phase] / GIB:.2f} GiB and "
        f"memory.budget_gib={budget_gib:g}: it does not fit; "
        f"{_cure(peak_phase, is_case_too_large=case_bytes > budget)}"
    )
    return EXIT_FAILED


def _cure(peak_phase: str, *, is_case_too_large: bool) -> str:
    """Advise how to make a run fit.

    Args:
        peak_phase: Phase with the largest peak, STEP or VALIDATION.
        is_case_too_large: Whether the case exceeds the budget without any pass of the network.
    """
    if peak_phase != VALIDATION:
        return "find switches that fit with fit_gib in place of memory.budget_gib"
    # Tiles do not make the case itself smaller.
    if is_case_too_large:
        return "give validation_shape=[D,H,W] of your largest case, or a coarser spacing"
    return "choose smaller tiles, inference.tile_size=[D,H,W]"


def _check_keys(config: PlanConfig) -> None:
    """Refuse keys without those that they need, and keys that exclude each other.

    Raises:
        UserError: On the first such key.
    """
    budget_gib = config.memory.budget_gib
    if config.largest_batch and budget_gib is None:
        raise UserError(
            "largest_batch=true: memory.budget_gib is missing; give the GiB that a step may use"
        )
    # A search counts and measures steps of many configurations; these keys concern a single one.
    is_for_one_configuration = budget_gib is not None or not config.measure or config.compute
    if config.fit_gib is not None and is_for_one_configuration:
        raise UserError(
            "fit_gib searches for switches, while memory.budget_gib, measure=false and "
            "compute=true apply to a given configuration; leave them out"
        )
    if config.max_seconds is not None and config.fit_gib is None:
        raise UserError("max_seconds needs fit_gib: give the memory that a run may use")


def _print_largest_batch(config: PlanConfig, shape: Shape, budget: int) -> int:
    """Print the largest batch size whose step fits, with its learning rate.

    Args:
        config: Checked configuration.
        shape: Voxels of a sample, (D, H, W).
        budget: Bytes that the live tensors of a rank may take.

    Returns:
        The batch size over all ranks and micro-batches; 0 if one sample each does not fit.
    """

    # Each count takes seconds, and the search asks for some numbers again.
    @functools.cache
    def peak(samples: int) -> int:
        return count_memory(config, shape, samples=samples, compute=config.compute).peak

    batch_size = micro_batches_per_step(config) * largest_batch(peak, budget)
    proposed = "none"
    if batch_size:
        proposed = f"stage.batch_size={batch_size}"
        if "lr" in config.optimizer:
            proposed += f" optimizer.lr={propose_lr(config, batch_size):.3g}"
    print(f"largest batch within memory.budget_gib={config.memory.budget_gib:g}: {proposed}")
    return batch_size


def _peak_phase(peaks: dict[str, int]) -> str:
    """Find the phase with the largest peak."""
    return max(peaks, key=peaks.__getitem__)


def describe_peaks(config: PlanConfig, case_shape: Shape, peaks: dict[str, int]) -> list[str]:
    """Format the live peaks of a training step and of a validation, and name the larger one."""
    tile_size = config.inference.tile_size
    passes = f"tiles of {_with_crosses(tile_size)}" if tile_size else "whole"
    case = f"a case of {_with_crosses(case_shape)} voxels, {passes}"
    return [
        f"{_columns('peak of the validation', peaks[VALIDATION] / MIB)} MiB            {case}",
        f"the peak of the run is that of the {_peak_phase(peaks)}; "
        "a prediction computes a case as the validation does",
    ]


def _columns(name: str, value: float, decimals: int = 1) -> str:
    """Set a name and a number in the first two columns of the printed table."""
    return f"{name:52s}{value:10.{decimals}f}"


def _with_crosses(shape: Shape) -> str:
    """Write a shape as D×H×W."""
    return "×".join(map(str, shape))


def facts_of(memory: StepMemory, run_estimate: Estimate | None) -> dict[str, Any]:
    """Collect numbers for the file of a plan; None = not estimated.

    Args:
        memory: Count of the step.
        run_estimate: Estimate of the run; None = only the step was counted.
    """
    facts: dict[str, Any] = {
        "saved_bytes_per_voxel": memory.saved_per_voxel,
        "peak_live_mib": round(memory.peak / MIB, 2),
        "peak_allocator_mib": None,
        "peak_resident_mib": None,
        "seconds_per_step": None,
    }
    if run_estimate is None:
        return facts
    return facts | {
        "peak_allocator_mib": round(run_estimate.peak_allocator / MIB, 2),
        "peak_resident_mib": round(run_estimate.peak_resident / MIB, 2),
        "seconds_per_step": round(run_estimate.seconds_per_step, 4),
        "allocator_mib": _in_mib(run_estimate.allocator),
        "resident_mib": _in_mib(run_estimate.resident),
        "compute_seconds": round(run_estimate.compute_seconds, 4),
        "other_seconds": round(run_estimate.other_seconds, 4),
        "loader_seconds": round(run_estimate.loader_seconds, 4),
    }


def _in_mib(bytes_by_phase: dict[str, int]) -> dict[str, float]:
    return {phase: round(num_bytes / MIB, 2) for phase, num_bytes in bytes_by_phase.items()}


def describe_estimate(config: PlanConfig, run_estimate: Estimate) -> list[str]:
    """Format an estimate: peaks by phase, seconds of a step, of an interval and of the run.

    The interval is the one between two validations.
    """

    def peak_rows(name: str, bytes_by_phase: dict[str, int]) -> list[str]:
        """Format the largest peak, and below it, indented, the peak of each phase."""
        lines = [f"{_columns(name, max(bytes_by_phase.values()) / MIB)} MiB"]
        for phase, num_bytes in bytes_by_phase.items():
            if num_bytes > 0:
                lines.append(f"{_columns(f'  {phase}', num_bytes / MIB)} MiB")
        return lines

    seconds = run_estimate.seconds_per_step
    run_seconds = seconds * config.steps
    interval = min(config.stage.validate_every, config.steps)
    resident_name = "GPU memory"
    # Only the memory of the host has the phase of a checkpoint, which is written there.
    if CHECKPOINT in run_estimate.resident:
        resident_name = "resident memory of all processes"
    num_workers = run_estimate.num_workers
    processes = "process" if num_workers == 1 else "processes"
    return [
        *peak_rows("peak of torch's allocator, with workspaces", run_estimate.allocator),
        *peak_rows(f"peak of the {resident_name}", run_estimate.resident),
        f"{_columns('seconds per step', seconds, 3)} s    "
        f"{run_estimate.compute_seconds:.3f} s of computation, "
        f"{run_estimate.other_seconds:.3f} s of the training loop, "
        f"{run_estimate.loader_seconds:.3f} s of making samples "
        f"in {num_workers} loader {processes}",
        f"{_columns(f'seconds per {interval} steps, without validation', seconds * interval)} s",
        f"{_columns(f'seconds until the end ({config.steps} steps)', run_seconds)} s    "
        f"{run_seconds * run_estimate.peak_resident / 1e9:.0f} GB·s",
    ]


def plan_lines(config: PlanConfig, shape: Shape, memory: StepMemory) -> list[str]:
    """Format the counts as lines of a table, with remarks on what they leave out."""

    def row(name: str, num_bytes: int, note: str = "") -> str:
        bytes_per_voxel = num_bytes / memory.voxels
        return f"{_columns(name, num_bytes / MIB)} MiB{bytes_per_voxel:10.2f}  {note}".rstrip()

    lines = [
        f"{config.stage.name.value}: "
        f"a step on {samples_per_micro_batch(config)} × {_with_crosses(shape)} voxels, "
        f"{config.memory.precision.value}, checkpointing {config.memory.checkpointing}",
        "",
        f"{'':66s}bytes/voxel",  # after the name (52 characters), the number (10) and " MiB" (4)
        row("parameters", memory.parameters),
        row("gradients", memory.gradients),
        row("optimiser state", memory.optimizer_state),
        row("input", memory.input),
        row("target", memory.target),
        row("saved from forward to backward", memory.saved_bytes),
    ]
    lines += [row(f"  {part}", num_bytes) for part, num_bytes in memory.saved.items()]
    if memory.offloaded:
        lines.append(row("offloaded to host memory", memory.offloaded))
    lines.append(row("peak of the step", memory.peak, f"in {memory.peak_at}"))
    for kind, name in PEAK_ROWS.items():
        if kind in memory.peak_live:
            lines.append(row(f"  {name}", memory.peak_live[kind]))
    return [*lines, "", *_remarks(config, memory)]


def _remarks(config: PlanConfig, memory: StepMemory) -> list[str]:
    """Say what the counts leave out."""
    remarks = []
    if not config.measure:
        remarks.append(
            "Live tensors are counted. "
            "A device needs some more for the workspaces of its libraries."
        )
    if config.memory.compile:
        remarks.append(
            "memory.compile=true: counted uncompiled; "
            "compiled code often keeps less for the backward pass."
        )
    if config.trainer.num_ranks > 1:
        remarks.append(
            "trainer: counted per rank; "
            f"DDP adds buckets of {memory.gradients / MIB:.1f} MiB for the gradients."
        )
    if config.model["device_map"] is not None:
        remarks.append("model.device_map: counted over all of its devices together.")
    return remarks
