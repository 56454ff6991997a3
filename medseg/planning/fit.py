"""Search for the fastest switches that fit into a budget: tables, picture, arguments of `train`.

A switch is a key of `memory`, such as `memory.precision` or `memory.checkpointing`. It changes how
a step is computed, and with that its peak memory and its duration, but not the network.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

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
    combinations,
    fastest_option,
    front,
    make_candidates,
    reasons,
    smaller_runs,
    with_switches,
)
from medseg.planning.estimate import STEP, Estimate, Machine, estimate
from medseg.planning.step import (
    count_memory,
    evaluated_shape,
    keep_numbers,
)
from medseg.report.plots import draw_front
from medseg.training.network import find_divisor
from medseg.training.options import micro_batches_per_step, samples_per_micro_batch

MIB = 2**20
GIB = 2**30
# A row of the front is printed only if its peak is lower than that of the last printed row by at
# least this share. The file has all rows.
STEP_DOWN = 0.05
# Largest number of searches for a set whose counted peak fits. Each one after the first has a lower
# budget.
TRIES = 3

# A chosen set of switches: its candidate, its option with the counted peak, and its estimate.
Choice = tuple[Candidate, Option, Estimate]


class Search(NamedTuple):
    """Result of the search for switches.

    Attributes:
        choice: The fastest switches; None where none fits.
        candidates: All candidates among which the search chose.
        shape: Voxels of a sample, (D, H, W).
        changes: Values of the keys in which the run differs from the configured one.
    """

    choice: Choice | None
    candidates: list[Candidate]
    shape: Shape
    changes: dict[str, Any]


def fit(config: PlanConfig, shape: Shape) -> int:
    """Print the fastest switches that fit into `fit_gib`, as arguments of `train` in the last line.

    Before that line come the Pareto front, the effect of each switch, and the largest batch and
    patch that would fit.

    Args:
        config: Checked configuration with `fit_gib`.
        shape: Voxels of a sample, (D, H, W).

    Returns:
        0, or 1 if no set of switches fits.
    """
    assert config.fit_gib is not None, "`plan` searches only with a limit"
    # Largest predicted peak that fits: the prediction may be too low by the margin.
    budget = int(config.fit_gib * GIB / (1 + MARGIN))
    choice, candidates, shape, changes = _search(config, shape, budget)
    options = front(candidates)
    if choice is None:
        print_front(options, None, config)
        # The last one of the front has the lowest peak.
        say(_no_fit_message(config, options[-1]))
        return EXIT_FAILED
    candidate, option, run_estimate = choice
    options = with_choice(options, option)
    print_front(options, option, config, changes)
    print_reasons(candidate, option, candidates)
    print_room(candidate, option, run_estimate, shape, budget)
    keep_plan(candidate, option)
    # "Fits" below means: by the model, or by the model corrected for its error where the count of a
    # faster set exceeded the budget, see `choose_verified`.
    # Each block of each candidate may be recomputed or not.
    num_sets = sum(2 ** len(candidate.model.blocks) for candidate in candidates)
    print(
        f"chosen: {option.peak / MIB:.1f} MiB, with a margin of {100 * MARGIN:.0f} % "
        f"within {config.fit_gib:g} GiB; {option.seconds:.3f} s per step. Of {num_sets} sets of "
        "switches, none that fits is predicted to be faster, as integer programs (one per "
        "combination of the switches other than recomputation) have proven."
    )
    line = choose_line(option, changes)
    if config.output is not None:
        facts = _facts(line, option, run_estimate, options, changes)
        replace_text(Path(config.output), json.dumps(facts, indent=1))
    print(f"choose: {line}", flush=True)
    return 0


def _search(config: PlanConfig, shape: Shape, budget: int) -> Search:
    """Search the switches of the configured run, then of others where `allow` permits them.

    If no run fits, returns the search of the configured run.
    """
    machine = Machine(config)
    max_seconds = config.max_seconds or math.inf
    candidates = make_candidates(config, shape, machine)
    choice = choose_verified(candidates, budget, max_seconds, shape, machine)
    configured_search = Search(choice, candidates, shape, changes={})
    if choice is not None or config.allow is not Allow.other_run:
        return configured_search
    # In order of falling width, then of falling voxels per step: the first run that fits is taken.
    for changes, other_config, patch in smaller_runs(config, shape):
        # One estimate takes less time than the count of all candidates.
        if not fits_at_all(other_config, patch, machine, budget):
            continue
        candidates = make_candidates(other_config, patch, machine)
        choice = choose_verified(candidates, budget, max_seconds, patch, machine)
        if choice is not None:
            return Search(choice, candidates, patch, changes)
    return configured_search


def _no_fit_message(config: PlanConfig, smallest: Option) -> str:
    """Say why no set of switches was chosen, and what to change.

    Args:
        config: Configuration with the limits `fit_gib` and `max_seconds`.
        smallest: The set with the lowest predicted peak.
    """
    assert config.fit_gib is not None, "`plan` searches only with a limit"
    needed_gib = smallest.peak * (1 + MARGIN) / GIB
    reason = ""
    cure = "give more memory"
    if config.max_seconds is not None:
        reason = f" and takes at most max_seconds={config.max_seconds:g}"
        cure += ", or a larger max_seconds"
    elif needed_gib <= config.fit_gib:
        reason = ": the sets that are predicted to fit need more when their steps are counted"
    if config.allow is not Allow.other_run:
        cure += ", or allow=other_run for a smaller patch, batch or width"
    return (
        f"fit_gib={config.fit_gib:g}: no set of switches fits{reason}; the smallest needs "
        f"{needed_gib:.2f} GiB and takes {smallest.seconds:.3g} s per step "
        f"with {choose_line(smallest, {})}; {cure}"
    )


def _facts(
    line: str,
    chosen_option: Option,
    run_estimate: Estimate,
    options: Sequence[Option],
    changes: dict[str, Any],
) -> dict[str, Any]:
    """Collect the content of the output file: the choice with its counted peaks, and the front.

    Args:
        line: The choice as arguments of `train`.
        chosen_option: The chosen switches, with the counted peak.
        run_estimate: Estimate of a run with them.
        options: The front.
        changes: See `Search`.
    """
    rows = []
    for option in options:
        row = {
            "peak_mib": round(option.peak / MIB, 2),
            "seconds": round(option.seconds, 4),
            "arguments": choose_line(option, changes),
        }
        rows.append(row)
    return {
        "choose": line,
        "peak_resident_mib": round(chosen_option.peak / MIB, 2),
        "seconds_per_step": round(chosen_option.seconds, 4),
        "peak_allocator_mib": round(run_estimate.peak_allocator / MIB, 2),
        "peak_live_mib": round(run_estimate.memory.peak / MIB, 2),
        "saved_bytes_per_voxel": run_estimate.memory.saved_per_voxel,
        "front": rows,
    }


def keep_plan(chosen: Candidate, option: Option) -> None:
    """Write the predicted numbers of the chosen switches to the cache of plans.

    A run that is started with these switches compares its own numbers with them.
    """
    numbers = {
        "peak_resident_mib": round(option.peak / MIB, 2),
        "seconds_per_step": round(option.seconds, 4),
    }
    keep_numbers(with_switches(chosen.config, option), numbers)


def choose_verified(
    candidates: Sequence[Candidate],
    budget: int,
    max_seconds: float,
    shape: Shape,
    machine: Machine,
) -> Choice | None:
    """Choose the fastest switches by the model, and verify them by counting their step.

    Where the count exceeds the budget, choose again for a lower budget of the model.

    Args:
        candidates: Values of all switches but the recomputed blocks.
        budget: Largest peak to choose, in resident bytes: the limit without the margin.
        max_seconds: Longest duration of a step.
        shape: Voxels of a sample, (D, H, W).
        machine: Measured costs of operations, from which a step is estimated.

    Returns:
        The choice; None if nothing fits.
    """
    model_budget = budget
    for _ in range(TRIES):
        best = fastest_option(candidates, model_budget, max_seconds)
        if best is None:
            return None
        candidate, option = best
        config = with_switches(candidate.config, option)
        counted = estimate(config, shape, evaluated_shape(config), machine)
        if counted.peak_resident <= budget:
            return candidate, option._replace(peak=counted.peak_resident), counted
        # The model underestimates the peak of the chosen set by `error`. Assumed: the model
        # underestimates similar sets by as much, so a budget lowered by `error` rejects them if
        # their counted peak exceeds `budget`. The errors of all tries add up, and the 1 lowers the
        # budget even where the error is 0.
        error = counted.peak_resident - option.peak
        model_budget -= error + 1
    return None


def fits_at_all(config: PlanConfig, shape: Shape, machine: Machine, budget: int) -> bool:
    """Whether a run fits with its least demanding switches.

    These recompute all blocks, in half precision and in the smallest micro-batches, where `allow`
    permits them.
    """
    *_, leanest = combinations(config)  # the last one needs the least memory
    leanest = replace(leanest, memory=replace(leanest.memory, checkpointing="all"))
    # First the tensors alone: they are counted in seconds, while the estimate may have to measure
    # new operations, which takes minutes.
    if count_memory(leanest, shape).peak > budget:
        return False
    return estimate(leanest, shape, evaluated_shape(leanest), machine).peak_resident <= budget


def with_choice(options: Sequence[Option], choice: Option) -> list[Option]:
    """Put the chosen set into the front, in place of its own row and of rows that it beats.

    Args:
        options: Front by the model. It lacks the choice if the choice lies between two of its
            points.
        choice: The chosen set, with its counted peak.

    Returns:
        The sets, the fastest first.
    """
    rows = [choice]
    for option in options:
        is_beaten = option.peak >= choice.peak and option.seconds >= choice.seconds
        if option.switches != choice.switches and not is_beaten:
            rows.append(option)
    return sorted(rows, key=lambda option: (option.seconds, option.peak))


def shown_rows(options: Sequence[Option], choice: Option | None) -> list[Option]:
    """Thin out a front: its ends, the choice, and rows whose peaks are clearly lower."""
    rows = list(options[:1])
    for option in options[1:]:
        is_lower = option.peak <= (1 - STEP_DOWN) * rows[-1].peak
        if is_lower or option is options[-1] or option is choice:
            rows.append(option)
    return rows


def print_front(
    options: Sequence[Option],
    choice: Option | None,
    config: PlanConfig,
    changes: dict[str, Any] | None = None,
) -> None:
    """Print the Pareto front of peak and seconds; draw it beside the output file.

    Args:
        options: The sets, the fastest first.
        choice: The chosen set, whose row is marked; None if nothing fits.
        config: Names the output file.
        changes: See `Search`; None = none.
    """
    print(f"{'Pareto front of peak and seconds':52s}{'MiB':>10s}{'s/step':>10s}")
    for option in shown_rows(options, choice):
        mark = "chosen" if option is choice else ""
        line = choose_line(option, changes or {})
        print(f"{mark:52s}{option.peak / MIB:10.1f}{option.seconds:10.3f}  {line}", flush=True)
    if config.output is None:
        return
    path = Path(config.output).with_suffix(".png")
    assert config.fit_gib is not None, "`plan` searches only with a limit"
    # The limit without the margin, as the peaks are predictions without it.
    limit_gib = config.fit_gib / (1 + MARGIN)
    peaks_gib = [option.peak / GIB for option in options]
    seconds = [option.seconds for option in options]
    draw_front(peaks_gib, seconds, limit_gib, path)


def print_reasons(chosen: Candidate, option: Option, candidates: Sequence[Candidate]) -> None:
    """Print how each switch changes peak and seconds: the difference to the set without it."""
    print(f"\n{'what each switch changes':52s}{'MiB':>10s}{'s/step':>10s}")
    for name, undone in reasons(chosen, option, candidates):
        change_mib = (option.peak - undone.peak) / MIB  # negative if the switch saves memory
        change_seconds = option.seconds - undone.seconds
        print(f"{name:52s}{change_mib:+10.1f}{change_seconds:+10.3f}")


def print_room(
    chosen: Candidate, option: Option, run_estimate: Estimate, shape: Shape, budget: int
) -> None:
    """Print the largest batch and the largest patch with the chosen switches.

    Each is extrapolated linearly from two counted peaks, of the chosen step and of a larger one.

    Args:
        chosen: Candidate of the chosen switches.
        option: The chosen switches.
        run_estimate: Estimate of a run with these switches.
        shape: Voxels of a sample of this run, (D, H, W).
        budget: Largest peak that fits, in resident bytes: the limit without the margin.
    """
    config = with_switches(chosen.config, option)
    # Assumed: workspaces grow in proportion to the tensors. To measure the operations of larger
    # steps would take minutes.
    workspace_factor = run_estimate.allocator[STEP] / run_estimate.memory.peak
    num_waiting_batches = run_estimate.num_workers * config.data.prefetch

    def growth(samples: int, sample_shape: Shape) -> float:
        """Count the bytes that a larger step adds, with the batches that wait in the loader."""
        small = run_estimate.memory
        large = count_memory(config, sample_shape, samples=samples)
        step_growth = (large.peak - small.peak) * workspace_factor
        batch_growth = large.input + large.target - small.input - small.target
        return step_growth + num_waiting_batches * batch_growth

    samples = samples_per_micro_batch(config)
    room = max(0, run_estimate.room_for_step(budget))
    bytes_a_sample = growth(2 * samples, shape) / samples
    # At least 1 byte: a peak in the update of the weights does not depend on the samples.
    most_samples = samples + int(room / max(1.0, bytes_a_sample))
    print(
        "\nlargest batch with these switches, extrapolated from two counted steps: "
        f"stage.batch_size={most_samples * micro_batches_per_step(config)}"
    )
    if config.stage.patch_size is None:
        return
    # Patches whose axes are longer by 0/8, 1/8, … 64/8: up to nine times as long.
    divisor = find_divisor(config)
    patches = [grown(shape, 1 + eighths / 8, divisor) for eighths in range(65)]
    num_voxels = math.prod(shape)
    # The second point of the line is a patch 1.5 times as long: far enough that the rounding to
    # multiples of the divisor does not decide the slope.
    larger_patch = patches[4]  # 1 + 4/8
    bytes_a_voxel = growth(samples, larger_patch) / (math.prod(larger_patch) - num_voxels)
    largest = shape
    for patch in patches:
        if bytes_a_voxel * (math.prod(patch) - num_voxels) <= room:
            largest = patch
    print(
        "largest patch of the same form, extrapolated from two counted steps: "
        f"stage.patch_size={text_of(list(largest))}"
    )


def grown(shape: Shape, factor: float, divisor: Shape) -> Shape:
    """Multiply a shape (D, H, W) by a factor of at least one, rounded to multiples of the divisor.

    A factor over one adds at least the divisor along each axis.
    """
    if factor == 1:
        return shape
    lengths = []
    for length, step in zip(shape, divisor, strict=True):
        rounded = round(length * factor / step) * step
        lengths.append(max(length + step, rounded))
    depth, height, width = lengths
    return depth, height, width
