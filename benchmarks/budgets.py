"""Budget benchmark: the switches that `plan fit_gib=…` chooses against the fastest possible ones.

    python -m benchmarks.budgets output=<folder> [budgets=20] [sets=64]

The network has many equal blocks: its step takes more than three times as much memory with no block
recomputed as with all. A set of switches is channels-last or not, with any subset of the blocks
recomputed. There are too many sets to measure all of them. `NUM_PREDICTED` random ones, with
all numbers of recomputed blocks, are predicted. Three kinds of these are measured: the first
`sets`; for each budget the set that `plan` chooses; and its rivals, those that are predicted to be
the fastest within the budget.

Every set takes steps in rounds, in a new order in each round, with its allocations counted
(`allocations.c`, preloaded). Its time in a round is divided by the median of the round, so that a
temporary slowdown of the processor does not change the ranking. The smallest of many noisy times is
too optimistic: the sets that might be the fastest for a budget are measured again, and only the
second measurement counts.

For each budget the chosen set is compared twice: its prediction with that of the fastest predicted
set that fits, and its measured seconds with those of the fastest set whose measured peak fits. In
both comparisons a set fits if its peak plus the margin of `plan` is within the budget. Then `train`
runs with each chosen set, in a process that is killed when its resident memory exceeds the budget.
Seconds are processor time on one thread. Writes `budgets.csv`, `budgets.md` and all measured sets
in `sets.csv`.
"""

import ctypes
import gc
import math
import os
import random
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import hydra
import torch

from benchmarks.instruments import (
    allocation_counter,
    begin_anew,
    given_arguments,
    print_values,
    train,
)
from benchmarks.memory import validated_shape
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import PlanConfig
from medseg.geometry.sizes import Shape
from medseg.io.atomic import replace_text
from medseg.io.tables import markdown_table, write_csv
from medseg.losses.sample_losses import mean_of_samples, sample_losses
from medseg.memory.precision import HALF
from medseg.memory.switches import switch_on
from medseg.planning.choose import (
    MARGIN,
    Candidate,
    Option,
    blocks_of,
    choose_line,
    fastest_option,
    make_candidates,
)
from medseg.planning.estimate import Machine
from medseg.planning.step import input_shape
from medseg.training.extensions import make_loss
from medseg.training.network import make_network
from medseg.training.optimisation import make_scheduled_optimizer

# Arguments that `plan` and `train` share: a network with 24 equal blocks on its finest level.
SETTINGS = [
    "stage=coarse",
    "spacing=isotropic_3mm",
    "stage.slab_share=0",
    "stage.patch_size=[80,80,80]",
    "inference.tile_size=[48,48,48]",
    "model=unet",
    "model.block=residual",
    "model.depth=1",
    "model.blocks_per_level=[24,1]",
    "trainer.threads=1",
    "trainer.accelerator=cpu",
    "data.num_workers=0",
    "logger=none",
    "data.phantoms.num_train=2",
    "data.phantoms.num_val=1",
    "data.phantoms.num_test=0",
]
# Further arguments of the short trainings whose resident memory is compared with the budget.
TRAINING = ["steps=6", "stage.validate_every=6"]
# Visits to each set in the first and in the second measurement, and steps in a visit.
ROUNDS = 2
FINAL_ROUNDS = 4
STEPS = 5
# Steps at the end of a visit that count; in the steps before, the heap still grows.
NUM_COUNTED = 3
# A set is measured again if its seconds are at most this multiple of those of the fastest set: the
# noise of the first measurement may exchange sets so close to each other.
NEARLY_BEST = 1.06
# Sets whose peaks and seconds are predicted.
NUM_PREDICTED = 2000
# Predicted sets that are measured as rivals of a choice.
NUM_RIVALS = 3
# Heading in `budgets.md` of each column of `budgets.csv`.
COLUMNS = {
    "budget_mib": "budget MiB",
    "chosen": "chosen",
    "is_optimum": "optimum of the model",
    "predicted_s": "s/step: predicted",
    "measured_s": "measured",
    "best_s": "best measured set that fits",
    "ratio": "measured / best",
    "does_fit": "its measured step fits",
    "resident_mib": "resident MiB of `train`",
    "is_under": "under the budget",
}
# A candidate, and which of its blocks are recomputed.
SwitchSet = tuple[Candidate, Option]


class Measured(NamedTuple):
    """Measurement of a set of switches.

    Attributes:
        step_bytes: Largest number of resident bytes of tensors and workspaces in a step.
        seconds: Median processor time of a step.
    """

    step_bytes: int
    seconds: float


def main() -> None:
    """Predict, measure, choose, train and write the table."""
    output, arguments = given_arguments(["budgets", "sets"])
    # The counter must be loaded before torch: this process starts again with it.
    begin_anew(LD_PRELOAD=str(allocation_counter(output)))
    folder_arguments = [
        f"data.phantoms.folder={output / 'phantoms'}",
        f"data.cache={output / 'cache'}",
    ]
    torch.set_num_threads(1)
    config = compose(folder_arguments)
    shape = input_shape(config)
    machine = Machine(config)
    candidates = make_candidates(config, shape, machine)
    sets = sample_sets(candidates, NUM_PREDICTED)
    budgets = list_budgets(sets, int(arguments.get("budgets", 20)))
    choices = choose_sets(candidates, budgets)
    compared = compared_sets(sets, budgets, choices, int(arguments.get("sets", 64)))
    describe_sets(sets, len(compared))
    unwritten = unwritten_bytes(candidates, compared, config, shape, machine)
    measured = measure(compared, shape, ROUNDS, unwritten)
    write_csv(output / "sets.csv", [describe(switches, measured) for switches in compared])
    finalists = {line_of(choice) for choice in choices}
    for budget in budgets:
        finalists |= nearly_fastest(compared, budget, measured)
    final = [switches for switches in compared if line_of(switches) in finalists]
    print(f"{len(final)} sets are among the fastest for a budget", flush=True)
    # The first measurement has selected these sets, so only the second one is unbiased.
    final_measured = measure(final, shape, FINAL_ROUNDS, unwritten)
    rows: list[dict[str, Any]] = []
    # Peaks of the runs that came to their end, by the arguments of their switches: they also serve
    # larger budgets with the same choice. The peak of a killed run only shows that it exceeded one
    # limit.
    trained: dict[str, int] = {}
    for index, (budget, choice) in enumerate(zip(budgets, choices, strict=True)):
        line = line_of(choice)
        # `budget` limits the estimate; the user's budget is larger by the margin.
        limit_bytes = int(budget * (1 + MARGIN))
        peak = trained.get(line)
        if peak is None:
            settings = [*SETTINGS, *folder_arguments]
            peak = train_with(line, settings, output / f"run_{index}", limit_bytes)
        if peak <= limit_bytes:
            trained[line] = peak
        row = compare(choice, budget, sets, final, final_measured)
        row |= {"resident_mib": peak / 2**20, "is_under": peak <= limit_bytes}
        rows.append(row)
        print_values(row, 4)
    write(rows, compared, measured, output)


def compose(folder_arguments: Sequence[str]) -> PlanConfig:
    """Compose the configuration of `plan` for arguments that name the data folders.

    Makes the phantoms, whose largest validation case is part of the estimate.
    """
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = hydra.compose(
            "plan", [*SETTINGS, *folder_arguments, "allow=same_result", "run_dir=benchmark"]
        )
    config = to_config(composed, PlanConfig)
    return replace(config, validation_shape=validated_shape(config))


def sample_sets(candidates: Sequence[Candidate], number: int) -> list[SwitchSet]:
    """Draw different sets.

    The first sets are each candidate with none and with all blocks recomputed. For the others
    every number of recomputed blocks is equally likely, not every subset: of all subsets, most
    have about half of the blocks.
    """
    rng = random.Random(0)
    # An ordered set: the number of a candidate with its recomputed blocks in network order.
    drawn: dict[tuple[int, tuple[str, ...]], None] = {}
    for index, candidate in enumerate(candidates):
        drawn[index, ()] = None
        drawn[index, tuple(candidate.model.blocks)] = None
    # A small network has fewer sets than are asked for; then the loop ends with all of them.
    num_sets = sum(2 ** len(candidate.model.blocks) for candidate in candidates)
    while len(drawn) < min(number, num_sets):
        index = rng.randrange(len(candidates))
        blocks = candidates[index].model.blocks
        recomputed = set(rng.sample(blocks, rng.randrange(len(blocks) + 1)))
        drawn[index, tuple(block for block in blocks if block in recomputed)] = None
    return [(candidates[index], candidates[index].option(blocks)) for index, blocks in drawn]


def list_budgets(sets: Sequence[SwitchSet], number: int) -> list[int]:
    """List budgets in bytes from the smallest to the largest peak of a set, at equal distances.

    A single budget is the smallest peak.
    """
    peaks = [option.peak for _, option in sets]
    smallest = min(peaks)
    distance = max(peaks) - smallest
    num_gaps = max(1, number - 1)
    return [round(smallest + index * distance / num_gaps) for index in range(number)]


def choose_sets(candidates: Sequence[Candidate], budgets: Sequence[int]) -> list[SwitchSet]:
    """Choose the fastest set for each budget, as `plan` does."""
    choices = []
    for budget in budgets:
        choice = fastest_option(candidates, budget, math.inf)
        assert choice is not None, "no budget is less than the peak of the smallest set"
        choices.append(choice)
    return choices


def compared_sets(
    sets: Sequence[SwitchSet], budgets: Sequence[int], choices: Sequence[SwitchSet], number: int
) -> list[SwitchSet]:
    """List the sets that are measured, each once: the choices, their rivals, and a random sample.

    Args:
        sets: All predicted sets, in the random order of `sample_sets`.
        budgets: Bytes.
        choices: The choice for each budget.
        number: Size of the random sample.
    """
    # Keyed by the arguments, which are equal where two sets are.
    compared = {line_of(choice): choice for choice in choices}
    for budget in budgets:
        fitting = [(candidate, option) for candidate, option in sets if option.peak <= budget]
        fitting.sort(key=lambda switches: switches[1].seconds)  # of the option
        compared |= {line_of(rival): rival for rival in fitting[:NUM_RIVALS]}
    compared |= {line_of(switches): switches for switches in sets[:number]}
    return list(compared.values())


def describe_sets(sets: Sequence[SwitchSet], num_measured: int) -> None:
    """Print how many sets there are, and the range of the peaks of their steps."""
    peaks = sorted(step_peak(candidate, option) for candidate, option in sets)
    print(
        f"{len(sets)} sets predicted, {num_measured} measured; peaks of their steps "
        f"{peaks[0] / 2**20:.1f} to {peaks[-1] / 2**20:.1f} MiB, "
        f"a factor of {peaks[-1] / peaks[0]:.2f}",
        flush=True,
    )


def step_peak(candidate: Candidate, option: Option) -> int:
    """Predicted peak of a step in bytes."""
    return candidate.model.peak(blocks_of(option, candidate.model.blocks))


def unwritten_bytes(
    candidates: Sequence[Candidate],
    sets: Sequence[SwitchSet],
    config: PlanConfig,
    shape: Shape,
    machine: Machine,
) -> dict[str, int]:
    """Predict the bytes of workspaces at the peak of each set that no kernel writes.

    The counter sees all of each workspace, written or not; `plan` counts what is written. The
    difference is predicted by a second model, in which kernels write all of their workspaces.

    Changes the costs of the machine: do not predict with it afterwards.

    Returns:
        Bytes of each set, by the arguments of its switches.
    """
    costs = machine.costs
    costs.costs = {key: cost._replace(written=cost.workspace) for key, cost in costs.costs.items()}
    # The same candidates in the same order; by identity, since they cannot be hashed by value.
    all_written = make_candidates(config, shape, machine)
    twins = {id(candidate): twin for candidate, twin in zip(candidates, all_written, strict=True)}
    unwritten = {}
    for candidate, option in sets:
        allocated = step_peak(twins[id(candidate)], option)
        unwritten[line_of((candidate, option))] = allocated - step_peak(candidate, option)
    return unwritten


def nearly_fastest(
    sets: Sequence[SwitchSet], budget: int, measured: Mapping[str, Measured]
) -> set[str]:
    """Name the sets that fit into a budget and might be the fastest for it.

    Returns:
        The arguments of their switches; none if no set fits.
    """
    seconds_of = {}
    for switches in sets:
        if does_fit(switches, budget, measured):
            seconds_of[line_of(switches)] = measured[line_of(switches)].seconds
    if not seconds_of:
        return set()
    limit_s = NEARLY_BEST * min(seconds_of.values())
    return {line for line, seconds in seconds_of.items() if seconds <= limit_s}


def train_with(line: str, settings: Sequence[str], run_dir: Path, limit_bytes: int) -> int:
    """Train with the switches of a line; return the peak of resident bytes, see `train`."""
    shutil.rmtree(run_dir, ignore_errors=True)
    # The counter of allocations would cost time and memory.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return train([*settings, *TRAINING, *line.split()], run_dir, environment, limit_bytes)


def measure(
    sets: Sequence[SwitchSet],
    shape: Shape,
    rounds: int,
    unwritten: Mapping[str, int],
) -> dict[str, Measured]:
    """Take steps with every set in rounds; return its median time and largest peak.

    Args:
        sets: The sets.
        shape: Voxels of a sample, (D, H, W).
        rounds: How often each set is visited.
        unwritten: Bytes of workspaces at the peak of each set that no kernel writes, by the
            arguments of its switches; the counter sees them too.

    Returns:
        Measurement of each set, by the arguments of its switches.
    """
    # Durations of the steps of each set, as multiples of the median step of their round.
    ratios_of: dict[str, list[float]] = {line_of(switches): [] for switches in sets}
    peaks = dict.fromkeys(ratios_of, 0)
    medians_s = []
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", flush=True)
        visits = {}
        # A new order in each round, so that no set always follows the same one.
        for switches in random.Random(number).sample(sets, len(sets)):
            visits[line_of(switches)] = take_steps(config_of(switches), shape)
        all_s: list[float] = []
        for _, durations_s in visits.values():
            all_s += durations_s
        median_s = statistics.median(all_s)
        medians_s.append(median_s)
        for line, (peak, durations_s) in visits.items():
            peaks[line] = max(peaks[line], peak)
            ratios_of[line] += [duration_s / median_s for duration_s in durations_s]
    # Multiples become seconds again by the median of all rounds.
    usual_s = statistics.median(medians_s)
    measured = {}
    for line, ratios in ratios_of.items():
        seconds = statistics.median(ratios) * usual_s
        measured[line] = Measured(peaks[line] - unwritten[line], seconds)
    return measured


def config_of(switches: SwitchSet) -> PlanConfig:
    """Configuration of a set: its candidate's configuration with the recomputed blocks."""
    candidate, option = switches
    checkpointing = option.switches["memory.checkpointing"]
    memory = replace(candidate.config.memory, checkpointing=checkpointing)
    return replace(candidate.config, memory=memory)


def take_steps(config: PlanConfig, shape: Shape) -> tuple[int, list[float]]:
    """Take `STEPS` steps on random numbers.

    Returns:
        The largest peak in bytes of the last `NUM_COUNTED` steps, and the seconds of each of them.
    """
    # `CDLL(None)` is the process itself, into which the counter was preloaded.
    peak_since_last_call = ctypes.CDLL(None).allocations_peak
    peak_since_last_call.restype = ctypes.c_size_t
    torch.manual_seed(0)
    network = switch_on(make_network(config), config.memory, "cpu").train()
    loss = make_loss(config)
    optimizer = make_scheduled_optimizer(config)(network.parameters())
    image = torch.randn(1, 1, *shape)
    # Background and both lungs, as in the phantoms.
    target = torch.randint(0, 3, (1, *shape), dtype=torch.uint8)
    precision = config.memory.precision.value
    durations_s = []
    peaks = []
    gc.collect()  # frees the network of the set before
    for _ in range(STEPS):
        peak_since_last_call()  # allocations before the step do not count
        start = time.process_time()
        with torch.autocast("cpu", HALF.get(precision), enabled=precision in HALF):
            mean_loss = mean_of_samples(sample_losses(loss, network(image), target))
        mean_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        durations_s.append(time.process_time() - start)
        peaks.append(peak_since_last_call())
    return max(peaks[-NUM_COUNTED:]), durations_s[-NUM_COUNTED:]


def predicted_seconds(candidate: Candidate, option: Option) -> float:
    """Seconds of the operations of a step.

    Those of the training loop, which this benchmark does not measure, are left out.
    """
    return option.seconds - candidate.beside.seconds_per_step


def line_of(switches: SwitchSet) -> str:
    """Arguments of `train` that make the switches of a set; they also identify the set."""
    _, option = switches
    return choose_line(option, changes={})


def does_fit(switches: SwitchSet, budget: int, measured: Mapping[str, Measured]) -> bool:
    """Whether a set fits into a budget: its measured step and the predicted memory beside it."""
    step_bytes = measured[line_of(switches)].step_bytes
    candidate, _ = switches
    # Only the memory of the estimate is read, so its seconds may be 0.
    cost = candidate.beside.with_step(step_bytes, step_bytes, 0.0)
    return cost.peak_resident <= budget


def compare(
    choice: SwitchSet,
    budget: int,
    sets: Sequence[SwitchSet],
    final: Sequence[SwitchSet],
    measured: Mapping[str, Measured],
) -> dict[str, Any]:
    """Compare a choice with brute force in the model, and with the fastest of the measured sets.

    Args:
        choice: The set that `plan` chooses.
        budget: Bytes, without the margin of `plan`.
        sets: All predicted sets; none that fits may be faster than the choice.
        final: Sets that might be the fastest by measurement.
        measured: Second measurements of these sets.

    Returns:
        The columns of `budgets.csv` that need no training.
    """
    _, option = choice
    fitting = [(other.seconds, other.peak) for _, other in sets if other.peak <= budget]
    # The fastest, and of equally fast sets the smallest, as `plan` prefers them.
    shortest_s, smallest_peak = min(fitting)
    # Sums of the same seconds in another order differ in the last digits: ns are compared.
    is_optimum = (round(option.seconds, 9), option.peak) <= (round(shortest_s, 9), smallest_peak)
    measured_s = measured[line_of(choice)].seconds
    fitting_s = []
    for switches in final:
        if does_fit(switches, budget, measured):
            fitting_s.append(measured[line_of(switches)].seconds)
    # By measurement no set may fit into the smallest budget: nan in its row.
    best_s = min(fitting_s, default=math.nan)
    return {
        "budget_mib": budget * (1 + MARGIN) / 2**20,
        "chosen": line_of(choice),
        "is_optimum": is_optimum,
        "predicted_s": predicted_seconds(*choice),
        "measured_s": measured_s,
        "best_s": best_s,
        "ratio": measured_s / best_s,
        "does_fit": does_fit(choice, budget, measured),
    }


def describe(switches: SwitchSet, measured: Mapping[str, Measured]) -> dict[str, Any]:
    """Row of `sets.csv`: predicted and measured numbers of a set of switches."""
    line = line_of(switches)
    return {
        "set": line,
        "predicted_step_bytes": step_peak(*switches),
        "measured_step_bytes": measured[line].step_bytes,
        "predicted_s": predicted_seconds(*switches),
        "measured_s": measured[line].seconds,
    }


def write(
    rows: Sequence[dict[str, Any]],
    sets: Sequence[SwitchSet],
    measured: Mapping[str, Measured],
    output: Path,
) -> None:
    """Write `budgets.csv`, and `budgets.md` with a summary above its table."""
    write_csv(output / "budgets.csv", list(rows))
    # In the page, the arguments that all sets share are left out.
    shared_arguments = set.intersection(*(set(line_of(switches).split()) for switches in sets))
    table = []
    for row in rows:
        texts = {}
        for key, value in row.items():
            texts[key] = f"{value:.3f}" if isinstance(value, float) else str(value)
        arguments = [word for word in row["chosen"].split() if word not in shared_arguments]
        texts["chosen"] = " ".join(word.removeprefix("memory.") for word in arguments)
        table.append(texts)
    summary = summarise(rows, sets, measured)
    replace_text(output / "budgets.md", f"{summary}\n\n{markdown_table(table, COLUMNS)}")


def summarise(
    rows: Sequence[dict[str, Any]], sets: Sequence[SwitchSet], measured: Mapping[str, Measured]
) -> str:
    """Summarise the comparisons and the predictions in a list."""
    num_optima = sum(row["is_optimum"] for row in rows)
    num_under = sum(row["is_under"] for row in rows)
    ratios_to_best = [row["ratio"] for row in rows]
    ratios = []  # of predicted to measured seconds, by the first measurement
    for switches in sets:
        ratios.append(predicted_seconds(*switches) / measured[line_of(switches)].seconds)
    lines = [
        f"* optimum of the model: {num_optima} of {len(rows)}",
        "* measured seconds of the chosen set over the best measured one: "
        f"median {statistics.median(ratios_to_best):.3f}, largest {max(ratios_to_best):.3f}",
        f"* under the budget: {num_under} of {len(rows)}",
        f"* predicted over measured seconds of all {len(ratios)} sets: "
        f"median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
