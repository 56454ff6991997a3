"""Budget benchmark: the switches that `plan fit_gib=…` chooses, against brute force in its model and against all sets measured.

    python -m benchmarks.budgets output=<folder> [budgets=20]

A network of six blocks is small enough to try every set of switches: each precision and layout with each subset of recomputed blocks. Every set
takes steps in rounds, so that a processor that slows down slows all sets, with its allocations counted (`allocations.c`, preloaded). For each
budget the choice is compared with the fastest set of the model that fits (brute force), and its measured seconds with those of the fastest
measured set whose measured peak fits. Each chosen set then trains as `train` in a process that is killed when its resident memory exceeds the
budget. Seconds are processor time on one thread. Writes `budgets.csv` and `budgets.md`.
"""

import ctypes
import itertools
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import hydra
import psutil
import torch

from benchmarks.memory import proportional_bytes, validated_shape
from medseg.build.extensions import make_loss
from medseg.build.network import make_network
from medseg.build.optimisation import make_scheduled_optimizer
from medseg.build.switches import switch_on
from medseg.config.check import to_config
from medseg.config.folder import conf_dir
from medseg.config.schema import PlanConfig
from medseg.console import say
from medseg.errors import EXIT_USER_ERROR
from medseg.io.atomic import replace_text
from medseg.losses.adapter import mean_of_samples, sample_losses
from medseg.memory.heap import map_large_blocks
from medseg.memory.precision import HALF
from medseg.planning.choose import MARGIN, Candidate, Option, choose_line, combinations, fastest_option, make_candidate
from medseg.planning.estimate import Machine
from medseg.planning.step import Shape, input_shape
from medseg.report.tables import markdown_table, write_csv

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = [
    "stage=coarse", "spacing=isotropic_3mm", "stage.slab_share=0", "stage.patch_size=[96,96,96]", "model=unet", "model.depth=1",
    "model.blocks_per_level=[1,1]", "trainer.threads=1", "trainer.accelerator=cpu", "data.num_workers=0", "logger=none",
    "data.phantoms.num_train=2", "data.phantoms.num_val=1", "data.phantoms.num_test=0",
]  # fmt: skip
TRAINING = ["steps=6", "stage.validate_every=6"]
ROUNDS, STEPS = 3, 3
COLUMNS = {
    "budget_mib": "budget MiB", "chosen": "chosen", "is_optimum": "optimum of the model", "predicted_s": "s/step: predicted", "measured_s": "measured",
    "best_s": "best measured set that fits", "ratio": "measured / best", "resident_mib": "resident MiB of `train`", "is_under": "under the budget",
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
    given = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    if "output" not in given or given.keys() - {"output", "budgets"}:
        say("benchmarks/budgets.py: expected output=<folder> and perhaps budgets=<number>")
        sys.exit(EXIT_USER_ERROR)
    output = Path(given["output"]).absolute()
    output.mkdir(parents=True, exist_ok=True)
    library = output / "allocations.so"
    if os.environ.get("LD_PRELOAD") != str(library):
        map_large_blocks()  # as in `train`, for the process that begins anew
        subprocess.run(
            ["cc", "-O2", "-shared", "-fPIC", ROOT / "benchmarks" / "allocations.c", "-o", library, "-ldl"], check=True
        )
        os.execve(
            sys.executable, [sys.executable, "-m", "benchmarks.budgets", *sys.argv[1:]], os.environ | {"LD_PRELOAD": str(library)}
        )
    places = [f"data.phantoms.folder={output / 'phantoms'}", f"data.cache={output / 'cache'}"]
    torch.set_num_threads(1)
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = to_config(hydra.compose("plan", [*SETTINGS, *places, "run_dir=benchmark"]), PlanConfig)
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
    least, most = min(option.peak for _, option in sets), max(option.peak for _, option in sets)
    number = int(given.get("budgets", 20))
    rows: list[dict[str, Any]] = []
    trained: dict[str, int] = {}
    for index in range(number):
        budget = least + (most - least) * (index + 1) // number
        option = required(fastest_option(found, budget, math.inf))
        line = choose_line(option, {})
        limit = int(budget * (1 + MARGIN))
        if line not in trained:
            trained[line] = train([*SETTINGS, *places, *TRAINING, *line.split()], output / f"run_{len(trained)}", limit)
        rows.append(
            compare(option, budget, sets, measured) | {"resident_mib": trained[line] / 2**20, "is_under": trained[line] <= limit}
        )
        print(" ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in rows[-1].values()), flush=True)
    write(rows, [option.seconds / measured[choose_line(option, {})].seconds for _, option in sets], output)


def required(best: tuple[Candidate, Option] | None) -> Option:
    """The choice, which exists because the budget is no less than that of a set."""
    assert best is not None
    return best[1]


def measure(sets: Sequence[tuple[Candidate, Option]], shape: Shape) -> dict[str, Measured]:
    """Take steps with every set in rounds; the smallest time and the largest peak of each, by the arguments of its switches."""
    found: dict[str, Measured] = {}
    for _ in range(ROUNDS):
        for candidate, option in sets:
            memory = replace(candidate.config.memory, checkpointing=option.switches["memory.checkpointing"])
            now = take_steps(replace(candidate.config, memory=memory), shape)
            before = found.setdefault(choose_line(option, {}), now)
            found[choose_line(option, {})] = Measured(max(before.step_bytes, now.step_bytes), min(before.seconds, now.seconds))
    return found


def take_steps(config: PlanConfig, shape: Shape) -> Measured:
    """Take some steps on random numbers; the first one also makes the optimiser's state and does not count."""
    counter = ctypes.CDLL(None).allocations_peak
    counter.restype = ctypes.c_size_t
    torch.manual_seed(0)
    network = switch_on(make_network(config), config.memory, "cpu").train()
    loss, optimizer = make_loss(config), make_scheduled_optimizer(config)(network.parameters())
    image, target = torch.randn(1, 1, *shape), torch.randint(0, 3, (1, *shape), dtype=torch.uint8)
    precision, durations_s, peaks = config.memory.precision.value, [], []
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
    return Measured(max(peaks[1:]), min(durations_s[1:]))


def compare(
    option: Option, budget: int, sets: Sequence[tuple[Candidate, Option]], measured: Mapping[str, Measured]
) -> dict[str, Any]:
    """Compare a choice with brute force in the model, and with the fastest of all sets by measurement."""
    best = min((one.seconds, one.peak) for _, one in sets if one.peak <= budget)

    def peak(one: Candidate, other: Option) -> int:
        return one.beside.with_step(measured[choose_line(other, {})].step_bytes, 0.0).peak_resident

    fitting = [measured[choose_line(other, {})].seconds for one, other in sets if peak(one, other) <= budget * (1 + MARGIN)]
    own = measured[choose_line(option, {})].seconds
    return {
        "budget_mib": budget * (1 + MARGIN) / 2**20,
        "chosen": choose_line(option, {}),
        "is_optimum": (round(option.seconds, 9), option.peak) == (round(best[0], 9), best[1]),
        "predicted_s": option.seconds,
        "measured_s": own,
        "best_s": min(fitting),
        "ratio": own / min(fitting),
    }


def train(arguments: Sequence[str], run_dir: Path, limit: int) -> int:
    """Train with the chosen switches; the peak of the resident memory, at which the run is killed if it exceeds the limit."""
    command = [sys.executable, "-m", "medseg.commands.cli", "train", *arguments, f"hydra.run.dir={run_dir}"]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    peak = 0
    with run_dir.with_suffix(".log").open("wb") as log:
        process = psutil.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        while process.poll() is None:
            peak = max(peak, proportional_bytes(process))
            if peak > limit:
                process.kill()
            time.sleep(0.02)
    return peak


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
