"""Budget benchmark: the switches that `plan fit_gib=…` chooses, against brute force in its model and against all sets measured.

    python -m benchmarks.budgets output=<folder> [budgets=20]

A network of six blocks is small enough to try every set of switches that gives the same result: each layout with each subset of recomputed
blocks. Every set takes steps in rounds, so that a processor that slows down slows all sets, with its allocations counted (`allocations.c`,
preloaded). For each budget the choice is compared with the fastest set of the model that fits (brute force), and its measured seconds with those
of the fastest measured set whose measured peak fits with the same margin. Each chosen set then trains as `train` in a process that is killed when
its resident memory exceeds the budget. Seconds are processor time on one thread. Writes `budgets.csv`, `budgets.md` and all sets in `sets.csv`.
"""

import ctypes
import gc
import itertools
import math
import os
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
from medseg.build.extensions import make_loss
from medseg.build.network import make_network
from medseg.build.optimisation import make_scheduled_optimizer
from medseg.build.switches import switch_on
from medseg.config.check import to_config
from medseg.config.folder import conf_dir
from medseg.config.schema import PlanConfig
from medseg.io.atomic import replace_text
from medseg.losses.adapter import mean_of_samples, sample_losses
from medseg.memory.precision import HALF
from medseg.planning.choose import MARGIN, Candidate, Option, blocks_of, choose_line, combinations, fastest_option, make_candidate
from medseg.planning.estimate import Machine
from medseg.planning.step import Shape, input_shape
from medseg.report.tables import markdown_table, write_csv

SETTINGS = [
    "stage=coarse", "spacing=isotropic_3mm", "stage.slab_share=0", "stage.patch_size=[112,96,128]", "model=unet", "model.depth=1",
    "model.blocks_per_level=[1,1]", "memory.precision=bf16", "trainer.threads=1", "trainer.accelerator=cpu", "data.num_workers=0", "logger=none",
    "data.phantoms.num_train=2", "data.phantoms.num_val=1", "data.phantoms.num_test=0",
]  # fmt: skip
TRAINING = ["steps=6", "stage.validate_every=6"]
ROUNDS, STEPS, TAKEN = 3, 5, 3  # steps that count: in those before, the heap still takes its shape
COLUMNS = {
    "budget_mib": "budget MiB", "chosen": "chosen", "is_optimum": "optimum of the model", "predicted_s": "s/step: predicted", "measured_s": "measured",
    "best_s": "best measured set that fits", "ratio": "measured / best", "does_fit": "its measured step fits",
    "resident_mib": "resident MiB of `train`", "is_under": "under the budget",
}  # fmt: skip


class Measured(NamedTuple):
    """Measurement of a set of switches.

    Attributes:
        step_bytes: Largest number of allocated bytes in a step.
        seconds: Processor time of a step.
    """

    step_bytes: int
    seconds: float


def main() -> None:
    """Enumerate, measure, choose, train and write the table."""
    output, given = given_arguments(["budgets"])
    begin_anew(LD_PRELOAD=str(allocation_counter(output)))
    places = [f"data.phantoms.folder={output / 'phantoms'}", f"data.cache={output / 'cache'}"]
    torch.set_num_threads(1)
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = to_config(hydra.compose("plan", [*SETTINGS, *places, "allow=same_result", "run_dir=benchmark"]), PlanConfig)
    config = replace(config, validation_shape=validated_shape(config))
    shape, machine = input_shape(config), Machine(config)
    found = [make_candidate(one, shape, machine) for one in combinations(config)]
    sets = [
        (one, one.option(blocks))
        for one in found
        for count in range(len(one.model.blocks) + 1)
        for blocks in itertools.combinations(one.model.blocks, count)
    ]
    print(f"{len(sets)} sets of {len(found)} combinations and {len(found[0].model.blocks)} blocks", flush=True)
    measured = measure(sets, shape)
    write_csv(output / "sets.csv", [describe(*one, measured) for one in sets])
    peaks = sorted({option.peak for _, option in sets})
    number = int(given.get("budgets", 20))
    rows: list[dict[str, Any]] = []
    trained: dict[str, int] = {}  # peaks of the runs that came to their end
    for index in range(number):
        budget = peaks[max(0, (index + 1) * len(peaks) // number - 1)]
        best = fastest_option(found, budget, math.inf)
        assert best is not None, "no budget is less than the peak of the smallest set"
        line, limit = choose_line(best[1], {}), int(budget * (1 + MARGIN))
        peak = trained.get(line)
        if peak is None:
            run_dir = output / f"run_{index}"
            shutil.rmtree(run_dir, ignore_errors=True)
            environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
            peak = train([*SETTINGS, *places, *TRAINING, *line.split()], run_dir, environment, limit)
        if peak <= limit:
            trained[line] = peak
        rows.append(compare(best, budget, sets, measured) | {"resident_mib": peak / 2**20, "is_under": peak <= limit})
        print(" ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in rows[-1].values()), flush=True)
    write(rows, [predicted_seconds(*one) / measured[choose_line(one[1], {})].seconds for one in sets], output)


def measure(sets: Sequence[tuple[Candidate, Option]], shape: Shape) -> dict[str, Measured]:
    """Take steps with every set in rounds; the smallest time and the largest peak of each, by the arguments of its switches."""
    found: dict[str, Measured] = {}
    for number in range(ROUNDS):
        print(f"round {number + 1} of {ROUNDS}", flush=True)
        for candidate, option in sets:
            memory = replace(candidate.config.memory, checkpointing=option.switches["memory.checkpointing"])
            now = take_steps(replace(candidate.config, memory=memory), shape)
            before = found.setdefault(choose_line(option, {}), now)
            found[choose_line(option, {})] = Measured(max(before.step_bytes, now.step_bytes), min(before.seconds, now.seconds))
    return found


def take_steps(config: PlanConfig, shape: Shape) -> Measured:
    """Take some steps on random numbers, of which the last ones count; the first one also makes the optimiser's state."""
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
            value = mean_of_samples(sample_losses(loss, network(image, torch.zeros(1, dtype=torch.int64)), target))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        durations_s.append(time.process_time() - start_s)
        peaks.append(counter())
    return Measured(max(peaks[-TAKEN:]), min(durations_s[-TAKEN:]))


def predicted_seconds(candidate: Candidate, option: Option) -> float:
    """Seconds of the operations of a step, without those of the training loop, which are not measured here either."""
    return option.seconds - candidate.beside.seconds_per_step


def compare(
    chosen: tuple[Candidate, Option], budget: int, sets: Sequence[tuple[Candidate, Option]], measured: Mapping[str, Measured]
) -> dict[str, Any]:
    """Compare a choice with brute force in the model, and with the fastest of all sets by measurement."""
    option = chosen[1]
    best = min((one.seconds, one.peak) for _, one in sets if one.peak <= budget)

    def does_fit(candidate: Candidate, other: Option) -> bool:
        step_bytes = measured[choose_line(other, {})].step_bytes
        return candidate.beside.with_step(step_bytes, 0.0).peak_resident <= budget

    own = measured[choose_line(option, {})].seconds
    best_s = min((measured[choose_line(other, {})].seconds for one, other in sets if does_fit(one, other)), default=math.nan)
    return {
        "budget_mib": budget * (1 + MARGIN) / 2**20,
        "chosen": choose_line(option, {}),
        "is_optimum": (round(option.seconds, 9), option.peak) == (round(best[0], 9), best[1]),
        "predicted_s": predicted_seconds(*chosen),
        "measured_s": own,
        "best_s": best_s,
        "ratio": own / best_s,
        "does_fit": does_fit(*chosen),
    }


def describe(candidate: Candidate, option: Option, measured: Mapping[str, Measured]) -> dict[str, Any]:
    """Predicted and measured numbers of a set of switches."""
    line = choose_line(option, {})
    return {
        "set": line,
        "predicted_step_bytes": candidate.model.peak(blocks_of(option, candidate.model.blocks)),
        "measured_step_bytes": measured[line].step_bytes,
        "predicted_s": predicted_seconds(candidate, option),
        "measured_s": measured[line].seconds,
    }


def write(rows: Sequence[dict[str, Any]], ratios: Sequence[float], output: Path) -> None:
    """Write `budgets.csv`, and `budgets.md` with a summary above its table."""
    write_csv(output / "budgets.csv", list(rows))
    shown = [{key: f"{value:.3f}" if isinstance(value, float) else str(value) for key, value in row.items()} for row in rows]
    summary = [
        f"* optimum of the model: {sum(row['is_optimum'] for row in rows)} of {len(rows)}",
        f"* measured seconds of the chosen set over the best measured one: median {statistics.median(row['ratio'] for row in rows):.3f}, "
        f"largest {max(row['ratio'] for row in rows):.3f}",
        f"* under the budget: {sum(row['is_under'] for row in rows)} of {len(rows)}",
        f"* predicted over measured seconds of all {len(ratios)} sets: median {statistics.median(ratios):.3f}, "
        f"{min(ratios):.3f} to {max(ratios):.3f}",
    ]
    replace_text(output / "budgets.md", "\n".join(summary) + "\n\n" + markdown_table(shown, COLUMNS))


if __name__ == "__main__":
    main()
