"""Search for the fastest switches whose peak fits into a budget: tables, picture, and the arguments of `train`."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from medseg.config.overrides import text_of
from medseg.config.schema import Allow, PlanConfig
from medseg.console import say
from medseg.errors import EXIT_FAILED
from medseg.geometry.sizes import Shape
from medseg.io.atomic import replace_text
from medseg.planning.choose import (
    MARGIN,
    Candidate,
    Option,
    choose_line,
    closer_runs,
    combinations,
    fastest_option,
    front,
    make_candidates,
    reasons,
)
from medseg.planning.estimate import STEP, Estimate, Machine, estimate
from medseg.planning.step import count_memory, evaluated_shape, num_shares, samples_per_rank
from medseg.report.plots import draw_front
from medseg.runs.plans import write_plan
from medseg.training.network import find_divisor

MIB = 2**20
# Part of the peak by which a row of the printed front is below the one before; the file has all.
STEP_DOWN = 0.05
# Times that the budget is lowered where the count of the chosen set exceeds the model's.
TRIES = 3


def fit(config: PlanConfig, shape: Shape) -> int:
    """Print the fastest switches that fit into `fit_gib`, why, what else there is, and the arguments as the last line.

    Returns:
        0, or 1 if no set of switches fits.
    """
    machine, budget = Machine(config), int((config.fit_gib or 0) * 2**30 / (1 + MARGIN))
    max_seconds = config.max_seconds or math.inf
    changes: dict[str, Any] = {}
    found = make_candidates(config, shape, machine)
    chosen = verified(found, budget, max_seconds, shape, machine)
    if chosen is None and config.allow is Allow.other_run:
        for keys, changed, patch in closer_runs(config, shape):
            if fits_at_all(changed, patch, machine, budget):
                others = make_candidates(changed, patch, machine)
                chosen = verified(others, budget, max_seconds, patch, machine)
                if chosen is not None:
                    found, shape, changes = others, patch, keys
                    break
    options = front(found)
    if chosen is not None:
        options = with_choice(options, chosen[1])
    print_front(options, None if chosen is None else chosen[1], config)
    if chosen is None:
        least = options[-1]
        say(
            f"fit_gib={config.fit_gib:g}: no set of switches fits; the smallest needs "
            f"{least.peak * (1 + MARGIN) / 2**30:.2f} GiB and takes {least.seconds:.3g} s per step "
            f"with {choose_line(least, {})}; give more memory"
            f"{'' if config.allow is Allow.other_run else ', or allow=other_run for a smaller patch, batch or width'}"
        )
        return EXIT_FAILED
    candidate, option, checked = chosen
    print_reasons(candidate, option, found)
    print_room(candidate, option, checked, shape, budget)
    line = choose_line(option, changes)
    keep_plan(candidate, option)
    print(
        f"chosen: {option.peak / 2**20:.1f} MiB, with a margin of {100 * MARGIN:.0f} % within {config.fit_gib:g} GiB; "
        f"{option.seconds:.3f} s per step. Of "
        f"{sum(2 ** len(one.model.blocks) for one in found)} sets of switches, none that fits is predicted to be faster, as "
        "integer programs (one per combination of the switches other than recomputation) have proven."
    )
    if config.output is not None:
        facts = {"choose": line, "peak_resident_mib": round(option.peak / 2**20, 2), "seconds_per_step": round(option.seconds, 4),
                 "peak_allocator_mib": round(checked.peak_allocator / 2**20, 2), "peak_live_mib": round(checked.memory.peak / 2**20, 2),
                 "saved_bytes_per_voxel": checked.memory.saved_per_voxel,
                 "front": [{"peak_mib": round(one.peak / 2**20, 2), "seconds": round(one.seconds, 4), "arguments": choose_line(one, {})}
                           for one in options]}  # fmt: skip
        replace_text(Path(config.output), json.dumps(facts, indent=1))
    print(f"choose: {line}", flush=True)
    return 0


def keep_plan(chosen: Candidate, option: Option) -> None:
    """Keep the predicted numbers of the chosen switches for the runs that are started with them."""
    memory = replace(chosen.config.memory, checkpointing=option.switches["memory.checkpointing"])
    peak_mib, seconds = round(option.peak / MIB, 2), round(option.seconds, 4)
    numbers = {"peak_resident_mib": peak_mib, "seconds_per_step": seconds}
    write_plan(replace(chosen.config, memory=memory), numbers)


def verified(
    found: Sequence[Candidate], budget: int, max_seconds: float, shape: Shape, machine: Machine
) -> tuple[Candidate, Option, Estimate] | None:
    """Choose the fastest switches and count their step; choose again where the count exceeds the budget."""
    within = budget
    for _ in range(TRIES):
        best = fastest_option(found, within, max_seconds)
        if best is None:
            return None
        candidate, option = best
        memory = replace(
            candidate.config.memory, checkpointing=option.switches["memory.checkpointing"]
        )
        counted = estimate(
            replace(candidate.config, memory=memory),
            shape,
            evaluated_shape(candidate.config),
            machine,
        )
        if counted.peak_resident <= budget:
            return candidate, option._replace(peak=counted.peak_resident), counted
        within -= counted.peak_resident - option.peak + 1
    return None


def fits_at_all(config: PlanConfig, shape: Shape, machine: Machine, budget: int) -> bool:
    """Whether a run fits with recomputation of all blocks, in half precision and in the smallest micro-batches that are allowed."""
    *_, last = combinations(config)
    least = replace(last, memory=replace(last.memory, checkpointing="all"))
    return estimate(least, shape, evaluated_shape(least), machine).peak_resident <= budget


def with_choice(options: Sequence[Option], choice: Option) -> list[Option]:
    """Put the chosen set, whose peak was counted, in the place of its row of the front, or of rows that it beats.

    Args:
        options: Front by the model, whose steps may have passed over the choice.
        choice: The chosen set.
    """
    others = [
        option
        for option in options
        if option.switches != choice.switches
        and not (option.peak >= choice.peak and option.seconds >= choice.seconds)
    ]
    return sorted([*others, choice], key=lambda option: (option.seconds, option.peak))


def shown_rows(options: Sequence[Option], choice: Option | None) -> list[Option]:
    """Thin out a front: the first row, the last one, the choice, and rows whose peaks are clearly lower."""
    shown = list(options[:1])
    for option in options[1:]:
        is_lower = option.peak <= (1 - STEP_DOWN) * shown[-1].peak
        if is_lower or option is options[-1] or option is choice:
            shown.append(option)
    return shown


def print_front(options: Sequence[Option], choice: Option | None, config: PlanConfig) -> None:
    """Print the sets of switches that no other one beats in peak and seconds; draw them beside the output file.

    Args:
        options: The sets, the fastest first.
        choice: The chosen one among them, which is marked; None if nothing fits.
        config: Names the output file.
    """
    print(f"{'Pareto front of peak and seconds':52s}{'MiB':>10s}{'s/step':>10s}")
    for option in shown_rows(options, choice):
        mark = "chosen" if option is choice else ""
        line = choose_line(option, {})
        print(f"{mark:52s}{option.peak / MIB:10.1f}{option.seconds:10.3f}  {line}", flush=True)
    if config.output is not None:
        path = Path(config.output).with_suffix(".png")
        fit_gib = (config.fit_gib or 0) / (1 + MARGIN)
        peaks_gib = [option.peak / 2**30 for option in options]
        draw_front(peaks_gib, [option.seconds for option in options], fit_gib, path)


def print_reasons(chosen: Candidate, option: Option, found: Sequence[Candidate]) -> None:
    """Print what each switch of a choice saves and costs: the difference to the same set without it."""
    print(f"\n{'what each switch changes':52s}{'MiB':>10s}{'s/step':>10s}")
    for name, other in reasons(chosen, option, found):
        print(
            f"{name:52s}{(option.peak - other.peak) / MIB:+10.1f}{option.seconds - other.seconds:+10.3f}"
        )


def print_room(
    chosen: Candidate, option: Option, checked: Estimate, shape: Shape, budget: int
) -> None:
    """Print the largest batch and the largest patch with the chosen switches, on a line through two counted peaks of each."""
    config, divisor = chosen.config, find_divisor(chosen.config)
    config = replace(
        config, memory=replace(config.memory, checkpointing=option.switches["memory.checkpointing"])
    )
    # Workspaces grow with the tensors; new operations are not measured for them.
    workspaces, waiting = (
        checked.allocator[STEP] / checked.memory.peak,
        checked.num_workers * config.data.prefetch,
    )

    def growth(samples: int, sample: Shape) -> float:
        counted, own = count_memory(config, sample, samples=samples), checked.memory
        batches = counted.input + counted.target - own.input - own.target
        return (counted.peak - own.peak) * workspaces + waiting * batches

    samples, room = samples_per_rank(config), max(0, budget - checked.resident[STEP])
    most = samples + int(room / max(1.0, growth(2 * samples, shape) / samples))
    print(
        f"\nlargest batch with these switches, extrapolated from two counted steps: stage.batch_size={most * num_shares(config)}"
    )
    if config.stage.patch_size is None:
        return
    # Patches that grow by eighths along all axes.
    patches = [grown(shape, 1 + eighths / 8, divisor) for eighths in range(65)]
    per_voxel = growth(samples, patches[4]) / (math.prod(patches[4]) - math.prod(shape))
    fitting = [
        patch for patch in patches if per_voxel * (math.prod(patch) - math.prod(shape)) <= room
    ]
    print(
        "largest patch of the same form, extrapolated from two counted steps: "
        f"stage.patch_size={text_of(list(fitting[-1] if fitting else shape))}"
    )


def grown(shape: Shape, factor: float, divisor: Shape) -> Shape:
    """Multiply a shape (D, H, W) by a factor of at least one, rounded to multiples of the divisor, and at least by one of them."""
    depth, height, width = (
        length if factor == 1 else max(length + step, round(length * factor / step) * step)
        for length, step in zip(shape, divisor, strict=True)
    )
    return depth, height, width
