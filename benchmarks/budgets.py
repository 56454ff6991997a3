"""Budget benchmark: compares the switches that `plan fit_gib=…` chooses with the fastest possible ones, predicted and measured.

    python -m benchmarks.budgets output=<folder> [budgets=20] [sets=64]

A network of many equal blocks, whose step takes more than three times as much memory without
recomputation as with all of it. A set of switches is channels-last or not, with any subset of the
blocks recomputed. Of these sets, which are too many to measure, a random sample is compared: as
many recomputed blocks as not, in all numbers. To it come, for each budget, the chosen set and its
rivals, the sets of a larger sample that are predicted to be nearly as fast.

Every set takes steps in rounds, in a new order in each round, with its allocations counted
(`allocations.c`, preloaded). Its time in a round is divided by the median of the round, so that a
temporary slowdown of the processor does not change the ranking. For each budget the chosen set is
compared with the set of the larger sample that `plan` predicts to be the fastest of all that fit,
and its measured seconds with those of the fastest set whose measured peak fits. In both comparisons
a set fits if its peak plus the margin of `plan` is within the budget. The smallest of many noisy
times is too optimistic: the sets that might be the fastest for a budget are measured again, and
only the second measurement counts. Then `train` runs with each chosen set, in a process that is
killed when its resident memory exceeds the budget. Seconds are processor time on one thread. Writes
`budgets.csv`, `budgets.md` and all measured sets in `sets.csv`.
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

from benchmarks.instruments import allocation_counter, begin_anew, given_arguments, train
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

SETTINGS = [
    "stage=coarse", "spacing=isotropic_3mm", "stage.slab_share=0", "stage.patch_size=[96,96,96]",
    "inference.tile_size=[48,48,48]", "model=unet", "model.depth=1", "model.blocks_per_level=[14,1]",
    "trainer.threads=1", "trainer.accelerator=cpu", "data.num_workers=0", "logger=none",
    "data.phantoms.num_train=2", "data.phantoms.num_val=1", "data.phantoms.num_test=0",
]  # fmt: skip
TRAINING = ["steps=6", "stage.validate_every=6"]
ROUNDS, FINAL_ROUNDS = 2, 12
STEPS, TAKEN = 5, 3  # steps that count: in those before, the heap still takes its shape
NEARLY_BEST = 1.1
# Sets whose peaks and seconds are predicted, and how many of them are measured as rivals of a
# choice.
NUM_PREDICTED, NUM_RIVALS = 2000, 3
COLUMNS = {
    "budget_mib": "budget MiB", "chosen": "chosen", "is_optimum": "optimum of the model", "predicted_s": "s/step: predicted", "measured_s": "measured",
    "best_s": "best measured set that fits", "ratio": "measured / best", "does_fit": "its measured step fits",
    "resident_mib": "resident MiB of `train`", "is_under": "under the budget",
}  # fmt: skip


class Measured(NamedTuple):
    """Measurement of a set of switches.

    Attributes:
        step_bytes: Largest number of resident bytes of tensors and workspaces in a step.
        seconds: Median processor time of a step.
    """

    step_bytes: int
    seconds: float


def main() -> None:
    """Enumerate, measure, choose, train and write the table."""
    output, given = given_arguments(["budgets", "sets"])
    begin_anew(LD_PRELOAD=str(allocation_counter(output)))
    places = [f"data.phantoms.folder={output / 'phantoms'}", f"data.cache={output / 'cache'}"]
    torch.set_num_threads(1)
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = to_config(
            hydra.compose("plan", [*SETTINGS, *places, "allow=same_result", "run_dir=benchmark"]),
            PlanConfig,
        )
    config = replace(config, validation_shape=validated_shape(config))
    shape, machine = input_shape(config), Machine(config)
    found = make_candidates(config, shape, machine)
    sets = sample_sets(found, NUM_PREDICTED)
    peaks = sorted({option.peak for _, option in sets})
    number = int(given.get("budgets", 20))
    # Budgets from the smallest to the largest peak, at equal distances.
    budgets = [
        round(peaks[0] + index * (peaks[-1] - peaks[0]) / (number - 1)) for index in range(number)
    ]
    choices = [fastest_option(found, budget, math.inf) for budget in budgets]
    compared = {line_of(choice): choice for choice in choices if choice is not None}
    for budget in budgets:
        fitting = [one for one in sets if one[1].peak <= budget]
        rivals = sorted(fitting, key=lambda one: one[1].seconds)[:NUM_RIVALS]
        compared |= {line_of(one): one for one in rivals}
    compared |= {line_of(one): one for one in sets[: int(given.get("sets", 64))]}
    steps = sorted(one.model.peak(blocks_of(option, one.model.blocks)) for one, option in sets)
    print(
        f"{len(sets)} sets predicted, {len(compared)} measured; peaks of their steps "
        f"{steps[0] / 2**20:.1f} to {steps[-1] / 2**20:.1f} MiB, a factor of {steps[-1] / steps[0]:.2f}",
        flush=True,
    )
    # The counter sees all of each workspace, written or not.
    machine.costs.costs = {
        key: cost._replace(written=cost.workspace) for key, cost in machine.costs.costs.items()
    }
    whole = dict(zip(map(id, found), make_candidates(config, shape, machine), strict=True))
    unwritten = {}
    for line, (candidate, option) in compared.items():
        blocks = blocks_of(option, candidate.model.blocks)
        unwritten[line] = whole[id(candidate)].model.peak(blocks) - candidate.model.peak(blocks)
    compared_sets = list(compared.values())
    measured = measure(compared_sets, shape, ROUNDS, unwritten)
    write_csv(output / "sets.csv", [describe(*one, measured) for one in compared_sets])
    finalists = {line_of(choice) for choice in choices if choice is not None}
    for budget in budgets:
        seconds_of = {
            line_of(one): measured[line_of(one)].seconds
            for one in compared_sets
            if does_fit(one, budget, measured)
        }
        finalists |= {
            line
            for line, seconds in seconds_of.items()
            if seconds <= NEARLY_BEST * min(seconds_of.values())
        }
    final = [one for one in compared_sets if line_of(one) in finalists]
    print(f"{len(final)} sets are among the fastest for a budget", flush=True)
    final_measured = measure(final, shape, FINAL_ROUNDS, unwritten)
    rows: list[dict[str, Any]] = []
    trained: dict[str, int] = {}  # peaks of the runs that came to their end
    for index, (budget, best) in enumerate(zip(budgets, choices, strict=True)):
        assert best is not None, "no budget is less than the peak of the smallest set"
        line, limit = line_of(best), int(budget * (1 + MARGIN))
        peak = trained.get(line)
        if peak is None:
            run_dir = output / f"run_{index}"
            shutil.rmtree(run_dir, ignore_errors=True)
            environment = {
                name: value for name, value in os.environ.items() if name != "LD_PRELOAD"
            }
            peak = train(
                [*SETTINGS, *places, *TRAINING, *line.split()], run_dir, environment, limit
            )
        if peak <= limit:
            trained[line] = peak
        rows.append(
            compare(best, budget, sets, final, final_measured)
            | {"resident_mib": peak / 2**20, "is_under": peak <= limit}
        )
        print(
            " ".join(
                f"{value:.4g}" if isinstance(value, float) else str(value)
                for value in rows[-1].values()
            ),
            flush=True,
        )
    write(rows, compared_sets, measured, output)


def sample_sets(candidates: Sequence[Candidate], number: int) -> list[tuple[Candidate, Option]]:
    """Draw different sets: of each candidate none and all blocks, then as many sets of each number of blocks."""
    rng = random.Random(0)
    drawn: dict[tuple[int, tuple[str, ...]], None] = {}
    for index, candidate in enumerate(candidates):
        drawn[index, ()] = None
        drawn[index, tuple(candidate.model.blocks)] = None
    while len(drawn) < min(number, sum(2 ** len(one.model.blocks) for one in candidates)):
        index = rng.randrange(len(candidates))
        blocks = candidates[index].model.blocks
        chosen = set(rng.sample(blocks, rng.randrange(len(blocks) + 1)))
        drawn[index, tuple(block for block in blocks if block in chosen)] = None
    return [(candidates[index], candidates[index].option(blocks)) for index, blocks in drawn]


def measure(
    sets: Sequence[tuple[Candidate, Option]],
    shape: Shape,
    rounds: int,
    unwritten: Mapping[str, int],
) -> dict[str, Measured]:
    """Take steps with every set in rounds; return its median time and largest peak by the arguments of its switches.

    Args:
        sets: The sets.
        shape: Voxels of a sample, (D, H, W).
        rounds: How often each is visited.
        unwritten: Bytes of workspaces at its peak that no kernel writes, by the arguments of its
            switches; the counter sees them too.
    """
    relative: dict[str, list[float]] = {line_of(one): [] for one in sets}
    peaks, middles_s = dict.fromkeys(relative, 0), []
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", flush=True)
        taken = {}
        for candidate, option in random.Random(number).sample(sets, len(sets)):
            memory = replace(
                candidate.config.memory, checkpointing=option.switches["memory.checkpointing"]
            )
            taken[choose_line(option, {})] = take_steps(
                replace(candidate.config, memory=memory), shape
            )
        middles_s.append(
            statistics.median(second for _, durations_s in taken.values() for second in durations_s)
        )
        for line, (peak, durations_s) in taken.items():
            peaks[line] = max(peaks[line], peak)
            relative[line] += [second / middles_s[-1] for second in durations_s]
    middle_s = statistics.median(middles_s)
    return {
        line: Measured(peaks[line] - unwritten[line], statistics.median(found) * middle_s)
        for line, found in relative.items()
    }


def take_steps(config: PlanConfig, shape: Shape) -> tuple[int, list[float]]:
    """Take some steps on random numbers; return the largest peak in bytes and the seconds of the steps after the warm-up."""
    counter = ctypes.CDLL(None).allocations_peak
    counter.restype = ctypes.c_size_t
    torch.manual_seed(0)
    network = switch_on(make_network(config), config.memory, "cpu").train()
    loss, optimizer = make_loss(config), make_scheduled_optimizer(config)(network.parameters())
    image, target = torch.randn(1, 1, *shape), torch.randint(0, 3, (1, *shape), dtype=torch.uint8)
    precision, durations_s, peaks = config.memory.precision.value, [], []
    gc.collect()  # the network of the set before
    for _ in range(STEPS):
        counter()
        start_s = time.process_time()
        with torch.autocast("cpu", HALF.get(precision), enabled=precision in HALF):
            value = mean_of_samples(sample_losses(loss, network(image), target))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        durations_s.append(time.process_time() - start_s)
        peaks.append(counter())
    return max(peaks[-TAKEN:]), durations_s[-TAKEN:]


def predicted_seconds(candidate: Candidate, option: Option) -> float:
    """Seconds of the operations of a step, without those of the training loop, which this benchmark does not measure."""
    return option.seconds - candidate.beside.seconds_per_step


def line_of(one: tuple[Candidate, Option]) -> str:
    """Arguments of the switches of a set."""
    return choose_line(one[1], {})


def does_fit(one: tuple[Candidate, Option], budget: int, measured: Mapping[str, Measured]) -> bool:
    """Whether the measured step of a set and the predicted memory outside the step fit into a budget."""
    step_bytes = measured[line_of(one)].step_bytes
    return one[0].beside.with_step(step_bytes, step_bytes, 0.0).peak_resident <= budget


def compare(
    chosen: tuple[Candidate, Option],
    budget: int,
    sets: Sequence[tuple[Candidate, Option]],
    final: Sequence[tuple[Candidate, Option]],
    measured: Mapping[str, Measured],
) -> dict[str, Any]:
    """Compare a choice with brute force in the model, and with the fastest of the measured sets.

    Args:
        chosen: The choice.
        budget: Bytes.
        sets: All predicted sets; none that fits may be faster than the choice.
        final: Sets that might be the fastest by measurement.
        measured: Second measurements of these sets.
    """
    option = chosen[1]
    best = min((one.seconds, one.peak) for _, one in sets if one.peak <= budget)
    is_optimum = (round(option.seconds, 9), option.peak) <= (round(best[0], 9), best[1])
    own = measured[line_of(chosen)].seconds
    best_s = min(
        (measured[line_of(one)].seconds for one in final if does_fit(one, budget, measured)),
        default=math.nan,
    )
    return {
        "budget_mib": budget * (1 + MARGIN) / 2**20,
        "chosen": choose_line(option, {}),
        "is_optimum": is_optimum,
        "predicted_s": predicted_seconds(*chosen),
        "measured_s": own,
        "best_s": best_s,
        "ratio": own / best_s,
        "does_fit": does_fit(chosen, budget, measured),
    }


def describe(
    candidate: Candidate, option: Option, measured: Mapping[str, Measured]
) -> dict[str, Any]:
    """Predicted and measured numbers of a set of switches."""
    line = choose_line(option, {})
    return {
        "set": line,
        "predicted_step_bytes": candidate.model.peak(blocks_of(option, candidate.model.blocks)),
        "measured_step_bytes": measured[line].step_bytes,
        "predicted_s": predicted_seconds(candidate, option),
        "measured_s": measured[line].seconds,
    }


def write(
    rows: Sequence[dict[str, Any]],
    sets: Sequence[tuple[Candidate, Option]],
    measured: Mapping[str, Measured],
    output: Path,
) -> None:
    """Write `budgets.csv`, and `budgets.md` with a summary above its table."""
    write_csv(output / "budgets.csv", list(rows))
    ratios = [predicted_seconds(*one) / measured[line_of(one)].seconds for one in sets]
    # What all sets have in common is left out.
    common = set.intersection(*(set(line_of(one).split()) for one in sets))
    shown = [
        {
            key: f"{value:.3f}" if isinstance(value, float) else str(value)
            for key, value in row.items()
        }
        | {
            "chosen": " ".join(
                word.removeprefix("memory.") for word in row["chosen"].split() if word not in common
            )
        }
        for row in rows
    ]
    summary = [
        f"* optimum of the model: {sum(row['is_optimum'] for row in rows)} of {len(rows)}",
        f"* measured seconds of the chosen set over the best measured one: median {statistics.median(row['ratio'] for row in rows):.3f}, "
        f"largest {max(row['ratio'] for row in rows):.3f}",
        f"* under the budget: {sum(row['is_under'] for row in rows)} of {len(rows)}",
        f"* predicted over measured seconds of all {len(ratios)} sets: median {statistics.median(ratios):.3f}, "
        f"{min(ratios):.3f} to {max(ratios):.3f}",
    ]
    replace_text(
        output / "budgets.md", "\n".join(summary) + "\n\n" + markdown_table(shown, COLUMNS)
    )


if __name__ == "__main__":
    main()
